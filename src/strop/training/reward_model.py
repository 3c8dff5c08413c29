"""Trains a reward model: a decoder with a head of one number, by pairs (helpful) or by single labels (safety).

DeepSeek-R1 (arXiv 2501.12948), section 3.1. All weights are trained; the head starts at zero. A pair stays in one micro-batch,
and the loss of an update is a mean over all of its preferences, so micro-batches change the gradient by rounding only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.algorithms.dpo import ranked_rightly
from strop.algorithms.losses import Aggregation
from strop.engine.torch.cpu.resources import give_back_freed_memory
from strop.errors import RunError
from strop.rewards.reward_model import (
    ExchangeFormat,
    begin_reward_model,
    cut_by_tokens,
    last_token_scores,
    score_rows,
)
from strop.run_directory import read_json
from strop.training.batch import Row, TokenBatch, World, pack_rows
from strop.training.config import TrainerConfig
from strop.training.learner import ModelProducts, update_cost
from strop.training.models import checkpoint_activations
from strop.training.optimizer import Optimization, TokenFigures, UpdateReport
from strop.training.preferences import PreferenceRows
from strop.training.trainer import ComputeThread
from strop.training.weights import MasterWeights, Snapshot, WriteCheckpoint, copied, read_tensors


def preference_loss(margins: Tensor) -> Tensor:
    """-log sigmoid(margin) of each preference, in nats; of the shape of its argument, which carries the gradient.

    The margin of a pair is r_chosen - r_rejected, that of a good response r and that of a bad one -r.
    """
    return F.softplus(-margins)


class RewardTrainer:
    """One reward model and its optimizer; everything that touches them runs in one thread of its own.

    Args:
        directory: of a language model, whose decoder it starts from.
        total_updates: where a cosine schedule ends.

    Raises:
        ModelError: there is no model, or it cannot become a reward model.
        ValueError: the schedule and `total_updates` do not fit.
    """

    def __init__(self, directory: Path, config: TrainerConfig, *, total_updates: int | None) -> None:
        self.exchanges = ExchangeFormat(directory)
        self._config, self._world = config, World()
        self._model = begin_reward_model(directory, pad_id=self.exchanges.pad_id)
        self._model.to(config.torch_device)
        if config.activation_checkpointing:
            checkpoint_activations(self._model)
        self._products = ModelProducts.of(self._model)
        self._weights = MasterWeights(self._model, getattr(torch, config.precision))
        self._optimization = Optimization(
            self._weights,
            config.optimizer,
            key="trainer.optimizer",
            world=self._world,
            total_updates=total_updates,
        )
        self._thread = ComputeThread()

    async def update(self, preferences: Sequence[PreferenceRows]) -> UpdateReport:
        """One optimizer step on the mean loss of `preferences`; statistics are `accuracy`, `margin`, `score`.

        Raises:
            CannotLearnError: too many updates in a row were skipped.
            WeightsLost: the step made weights that are not finite; so does every call after it, but `load`.
        """

        def update() -> UpdateReport:
            started = time.perf_counter()
            report = self._optimization.update(pack_preferences(preferences), lambda: self._backward(preferences))
            if report.is_skipped:
                return report
            lengths = [len(row) for each in preferences for row in each.rows]
            flops = self._products.flops(lengths, [0] * len(lengths), len(lengths))
            return replace(report, cost=update_cost(sum(lengths), sum(lengths), flops, started, self._config, self._world))

        return await self._thread.run(update)

    async def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The reward of each conversation, in order."""

        def score() -> list[float]:
            self._optimization.check()
            return score_rows(self._model, rows, max_tokens=self._config.max_tokens_per_microbatch)

        return await self._thread.run(score)

    async def save_model(self, directory: Path) -> None:
        """A directory that transformers loads with AutoModelForSequenceClassification, with its tokenizer."""

        def write() -> None:
            self._optimization.check()
            tensors = {name: self._weights.whole(name).cpu() for name in self._weights.names()}
            self._model.save_pretrained(directory, state_dict=tensors)
            tokenizer = self.exchanges.tokenizer
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(self.exchanges.pad_id)
            tokenizer.save_pretrained(directory)

        await self._thread.run(write)

    async def snapshot(self) -> WriteCheckpoint:
        """Copy state and counters. Return a function that writes the copy, also while training continues."""

        def copy() -> WriteCheckpoint:
            self._optimization.check()
            state, counters = copied(self._optimization.state()), self._optimization.counters()
            self._optimization.rest()
            return Snapshot(lambda _: None, state, counters, self._world).write

        return await self._thread.run(copy)

    async def load(self, directory: Path) -> None:
        """Go on from what a snapshot wrote. Raises `RunError` when it is damaged, `ModelError` when it is of another model."""

        def read() -> None:
            counters = read_json(directory / "trainer.json")
            if not isinstance(counters, dict):
                raise RunError(f"{directory / 'trainer.json'}: no counters of a trainer. Use the checkpoint before it.")
            self._optimization.restore(counters)
            read_tensors(directory / "state", self._optimization.state(), is_alone=True)
            self._optimization.rest()
            self._weights.refresh()

        await self._thread.run(read)

    async def close(self) -> None:
        await self._thread.close()

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


def pack_preferences(preferences: Sequence[PreferenceRows]) -> TokenBatch:
    """The rows of one update as the optimizer counts them, and as they are kept if it is skipped.

    One row a response, chosen before rejected. Only the last token of each is in the mask, with advantage 1 where the
    response is the chosen one or good, -1 where it is not.
    """
    rows = [
        Row(
            ids=row,
            loss_mask=[False] * (len(row) - 1) + [True],
            advantages=torch.full((len(row),), 1.0 if each.is_good and place == 0 else -1.0),
            group=index,
        )
        for index, each in enumerate(preferences)
        for place, row in enumerate(each.rows)
    ]
    return pack_rows(rows, aggregation=Aggregation.TOKEN_MEAN, temperature=1.0)


def _losses(part: Sequence[PreferenceRows], scores: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each preference, and its figures."""
    if part[0].is_pair:
        margins, means = scores[::2] - scores[1::2], (scores[::2] + scores[1::2]) / 2
    else:
        is_good = torch.tensor([each.is_good for each in part], device=scores.device)
        margins, means = torch.where(is_good, scores, -scores), scores
    found = margins.detach()
    return preference_loss(margins), {"accuracy": ranked_rightly(found), "margin": found, "score": means.detach()}


def _microbatches(preferences: Sequence[PreferenceRows], max_tokens: int) -> Iterator[list[PreferenceRows]]:
    lengths = [len(each.rows) * max(map(len, each.rows)) for each in preferences]  # with padding
    for batch in cut_by_tokens(lengths, max_tokens):
        yield [preferences[index] for index in batch]
