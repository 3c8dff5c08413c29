"""Trains a reward model: a decoder with a head of one number, by pairs (helpful) or by single labels (safety).

DeepSeek-R1 (arXiv 2501.12948), section 3.1. All weights are trained; the head starts at zero. A pair stays in one micro-batch,
and the loss of an update is a mean over all of its preferences, so micro-batches change the gradient by rounding only (law 4).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.algorithms.aggregation import Aggregation
from strop.engine.memory import give_back_freed_memory
from strop.engine.teams import end_team
from strop.errors import RunError
from strop.rewards.scorers.reward_model import (
    ExchangeFormat,
    begin_reward_model,
    cut_by_tokens,
    last_token_scores,
    score_rows,
)
from strop.runs import read_json, write_text
from strop.training.batch import Row, TokenBatch, pack_rows
from strop.training.compute import ModelProducts, UpdateCost, seconds_since, update_cost
from strop.training.config import TrainerConfig
from strop.training.figures import TokenFigures
from strop.training.models import checkpoint_activations
from strop.training.optimization import Optimization
from strop.training.preferences import PreferenceRows
from strop.training.protocol import UpdateReport, WriteCheckpoint
from strop.training.state import read_tensors, write_tensors
from strop.training.weights import MasterWeights
from strop.training.world import World

Result = TypeVar("Result")
_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected) of each pair, in nats; of the shape of its arguments."""
    return F.softplus(rejected - chosen)


def pointwise_loss(scores: Tensor, is_good: Tensor) -> Tensor:
    """-log sigmoid(r) of each good response and -log sigmoid(-r) of each bad one, in nats.

    Args:
        scores: any shape; carries the gradient.
        is_good: bool, of that shape.
    """
    return F.softplus(torch.where(is_good, -scores, scores))


class RewardTrainer:
    """One reward model and its optimizer; everything that touches them runs in one thread of its own (law 7).

    Args:
        directory: of a language model, whose decoder it starts from.
        total_updates: where a cosine schedule ends.

    Raises:
        ModelError: there is no model, or no reward model can be made of it.
        ValueError: the schedule and `total_updates` do not fit.
    """

    def __init__(self, directory: Path, config: TrainerConfig, *, total_updates: int | None) -> None:
        self.exchanges = ExchangeFormat(directory)
        self._config, self._world = config, World()
        self._model = begin_reward_model(directory, pad_id=self.exchanges.pad_id)
        self._model.to(torch.device(config.device))
        if config.activation_checkpointing:
            checkpoint_activations(self._model)
        self._products = ModelProducts.of(self._model)
        self._weights = MasterWeights(self._model, _PRECISIONS[config.precision])
        self._optimization = Optimization(
            self._weights,
            config.optimizer,
            key="trainer.optimizer",
            world=self._world,
            max_skipped=config.max_skipped_updates,
            total_updates=total_updates,
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-reward-trainer")

    async def update(self, preferences: Sequence[PreferenceRows]) -> UpdateReport:
        """One optimizer step on the mean loss of `preferences`; statistics are `accuracy`, `margin`, `score`.

        Raises:
            CannotLearnError: too many updates in a row were skipped.
            WeightsLost: the step made weights that are not finite; so does every call after it, but `load`.
        """

        def update() -> UpdateReport:
            started = time.perf_counter()
            report = self._optimization.update(pack_preferences(preferences), lambda: self._backward(preferences))
            return report if report.is_skipped else replace(report, cost=self._cost(preferences, started))

        return await self._run(update)

    async def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The reward of each conversation, in order."""

        def score() -> list[float]:
            self._optimization.check()
            return score_rows(self._model, rows, max_tokens=self._config.max_tokens_per_microbatch)

        return await self._run(score)

    async def save_model(self, directory: Path) -> None:
        """A directory that transformers loads with AutoModelForSequenceClassification, with its tokenizer."""

        def write() -> None:
            self._optimization.check()
            tensors = {name: self._weights.whole(name).cpu() for name in self._weights.names()}
            self._model.save_pretrained(directory, state_dict=tensors)
            tokenizer = self.exchanges.tokenizer
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(self.exchanges.pad_id)
            tokenizer.save_pretrained(directory)

        await self._run(write)

    async def save(self, directory: Path) -> None:
        """Writes `directory`/state and trainer.json."""

        def write() -> None:
            _write(directory, self._state(), self._optimization.counters())
            self._optimization.rest()

        await self._run(write)

    async def snapshot(self) -> WriteCheckpoint:
        """A copy of what `save` writes, to be written while training goes on."""

        def copy() -> WriteCheckpoint:
            state = {name: tensor.detach().clone() for name, tensor in self._state().items()}
            self._optimization.rest()
            counters = self._optimization.counters()
            return lambda directory: _write(directory, state, counters)

        return await self._run(copy)

    async def load(self, directory: Path) -> None:
        """Go on from what `save` wrote. Raises `RunError` when it is damaged, `ModelError` when it is of another model."""

        def read() -> None:
            counters = read_json(directory / "trainer.json")
            if not isinstance(counters, dict):
                raise RunError(f"{directory / 'trainer.json'}: no counters of a trainer. Use the checkpoint before it.")
            self._optimization.restore(counters)
            read_tensors(directory / "state", self._state(), is_alone=True)
            self._optimization.rest()
            self._weights.refresh()

        await self._run(read)

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.shutdown)

    def _state(self) -> dict[str, Tensor]:
        self._optimization.check()
        return {**{name: each.detach() for name, each in self._weights.named().items()}, **self._optimization.moments()}

    def _backward(self, preferences: Sequence[PreferenceRows]) -> tuple[Tensor, TokenFigures]:
        total = torch.zeros((), dtype=torch.float64, device=self._model.device)
        figures = TokenFigures()
        for part in _microbatches(preferences, self._config.max_tokens_per_microbatch):
            scores = last_token_scores(self._model, [row for each in part for row in each.rows])
            losses, statistics = _losses(part, scores)
            loss = losses.sum() / len(preferences)
            loss.backward()  # type: ignore[no-untyped-call]
            if self._config.gives_back_memory:
                give_back_freed_memory()
            total += loss.detach()
            per_row = 2 if part[0].is_pair else 1  # figures are divided by rows
            figures.add(torch.ones_like(losses, dtype=torch.bool), {name: per_row * each for name, each in statistics.items()})
        return total, figures

    def _cost(self, preferences: Sequence[PreferenceRows], started: float) -> UpdateCost:
        lengths = [len(row) for each in preferences for row in each.rows]
        return update_cost(
            tokens=sum(lengths),
            flops=self._products.flops(lengths, [0] * len(lengths), len(lengths)),
            time_s=seconds_since(started, self._model.device),
            device=self._model.device,
            precision=self._config.precision,
            world=self._world,
        )

    async def _run(self, work: Callable[[], Result]) -> Result:
        def compute() -> Result:
            try:
                return work()
            finally:
                end_team()  # or the engine's operations would sleep between each other

        return await asyncio.get_running_loop().run_in_executor(self._worker, compute)


def pack_preferences(preferences: Sequence[PreferenceRows]) -> TokenBatch:
    """The rows of one update as the optimizer counts them, and as they are kept if it is skipped.

    One row a response, chosen before rejected. Each learns by its last token: alone in the mask, with advantage 1 where the
    response is the chosen one or good, -1 where it is not.
    """
    rows = [
        Row(
            ids=row,
            loss_mask=[False] * (len(row) - 1) + [True],
            advantages=torch.full((len(row),), 1.0 if each.is_good and place == 0 else -1.0),
            sampled_logprobs=[0.0] * len(row),
            group=index,
        )
        for index, each in enumerate(preferences)
        for place, row in enumerate(each.rows)
    ]
    return pack_rows(rows, aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)


def _losses(part: Sequence[PreferenceRows], scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each preference, and its figures."""
    found = scores.detach()
    if part[0].is_pair:
        chosen, rejected = scores[::2], scores[1::2]
        margin = found[::2] - found[1::2]
        accuracy = (margin > 0).float() + 0.5 * (margin == 0)
        return pairwise_loss(chosen, rejected), {
            "accuracy": accuracy,
            "margin": margin,
            "score": (found[::2] + found[1::2]) / 2,
        }
    is_good = torch.tensor([each.is_good for each in part], device=scores.device)
    margin = torch.where(is_good, found, -found)
    accuracy = (margin > 0).float() + 0.5 * (margin == 0)
    return pointwise_loss(scores, is_good), {"accuracy": accuracy, "margin": margin, "score": found}


def _microbatches(preferences: Sequence[PreferenceRows], max_tokens: int) -> Iterator[list[PreferenceRows]]:
    lengths = [len(each.rows) * max(map(len, each.rows)) for each in preferences]  # with padding
    for batch in cut_by_tokens(lengths, max_tokens):
        yield [preferences[index] for index in batch]


def _write(directory: Path, state: dict[str, Tensor], counters: dict[str, int | bool]) -> None:
    write_tensors(directory / "state", state, world=World())
    write_text(directory / "trainer.json", json.dumps(counters, indent=2) + "\n")
