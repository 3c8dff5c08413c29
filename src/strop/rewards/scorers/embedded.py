"""A reward model in this process, which computes in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from strop.engine.teams import end_team
from strop.errors import UserError
from strop.rewards.scorers.config import EmbeddedScorerConfig
from strop.rewards.scorers.protocol import Exchange, checked_scores
from strop.rewards.scorers.reward_model import ExchangeFormat, load_reward_model, score_rows


class EmbeddedScorer:
    """Loads the model when it is first asked."""

    def __init__(self, config: EmbeddedScorerConfig) -> None:
        if config.path is None:
            raise UserError(f"the scorer's stage = {config.stage!r} names a stage, which only a recipe has. Give path instead.")
        self._config, self._directory = config, Path(config.path)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-scorer")

    async def score(self, exchanges: Sequence[Exchange]) -> list[float | None]:
        """Raises `ModelError` when there is no reward model."""
        return [*await asyncio.get_running_loop().run_in_executor(self._worker, self._score, list(exchanges))]

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.shutdown)

    def _score(self, exchanges: Sequence[Exchange]) -> list[float]:
        try:
            rows = [self._format.ids(exchange) for exchange in exchanges]
            scores = score_rows(self._model, rows, max_tokens=self._config.max_tokens_per_batch)
            return checked_scores(scores, num=len(exchanges), place=str(self._directory))
        finally:
            end_team()  # or the engine's operations would sleep between each other

    @cached_property
    def _format(self) -> ExchangeFormat:
        return ExchangeFormat(self._directory)

    @cached_property
    def _model(self) -> PreTrainedModel:
        model = load_reward_model(self._directory)
        if self._config.precision == "bfloat16":  # buffers, such as the frequencies of rotary positions, stay as they are
            for parameter in model.base_model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        return model.to(self._config.device)
