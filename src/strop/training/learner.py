"""The roles of a trainer (policy, reference, critic), or one rank's part of them: the compute behind it, in plain calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.algorithms.protocol import Column, LossInputs
from strop.engine.memory import give_back_freed_memory
from strop.engine.protocol import weights_checksum
from strop.errors import ModelError
from strop.runs import read_json
from strop.training.adapter import Adapter
from strop.training.batch import TokenBatch, shares
from strop.training.compute import ModelProducts, UpdateCost, seconds_since, update_cost, update_flops
from strop.training.config import TrainerConfig
from strop.training.critic import Critic
from strop.training.figures import TokenFigures
from strop.training.logprobs import LogprobModule
from strop.training.optimization import Optimization
from strop.training.protocol import TokenLoss, TokenStatistics, UpdateReport, ValueLoss, ValueStatistics
from strop.training.reference import Reference
from strop.training.scoring import score_rows
from strop.training.snapshot import Snapshot, copied
from strop.training.state import read_model, read_tensors, shell_of, write_model
from strop.training.weights import Weights
from strop.training.world import World


class Learner:
    """Calls of `Trainer`, as they run on each rank: all ranks make the same calls, and take their shares of each batch.

    Args:
        policy: the model, in whatever form computes the log-probs of rows.
        weights: of `policy`.
        adapter: where only an adapter is trained.
        reference, critic: None where there is none.
        total_updates: where a cosine schedule ends.
    """

    def __init__(
        self,
        policy: LogprobModule,
        weights: Weights,
        config: TrainerConfig,
        *,
        world: World,
        adapter: Adapter | None,
        reference: Reference | None,
        critic: Critic | None,
        tokenizer_files: Mapping[str, bytes],
        total_updates: int | None,
    ) -> None:
        self.policy, self.weights, self.config, self.world = policy, weights, config, world
        self.adapter, self.reference, self.critic = adapter, reference, critic
        self._tokenizer_files = dict(tokenizer_files)
        self._shell = shell_of(policy.model)
        self._products = ModelProducts.of(policy.model)
        self._writers = world.another()
        self._device = torch.device(config.device)
        self._optimization = Optimization(
            weights,
            config.optimizer,
            key="trainer.optimizer",
            world=world,
            max_skipped=config.max_skipped_updates,
            total_updates=total_updates,
        )

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    @property
    def optimizer(self) -> torch.optim.AdamW:
        """The policy's."""
        return self._optimization.optimizer

    @property
    def num_updates(self) -> int:
        """Of the policy."""
        return self._optimization.num_updates

    def score(self, batch: TokenBatch, column: Column) -> Tensor:
        """What policy, reference or critic says of this rank's share of the rows, (N, T); 0 elsewhere."""
        self._check()
        match column:
            case Column.VALUES if self.critic is not None:
                return self.critic.score(batch)
            case Column.OLD_LOGPROBS:
                scorer: LogprobModule | Reference = self.policy
            case Column.REFERENCE_LOGPROBS if self.reference is not None:
                scorer = self.reference
            case _:
                raise ValueError(f"this trainer has no model that can fill {column.value!r}: it was built without one")

        def logprobs(rows: TokenBatch) -> Tensor:
            of_rows: Tensor = scorer(rows.ids, rows.loss_mask, rows.temperature, rows.is_banned, rows.banned_ids)[0]
            return of_rows

        scores = score_rows(batch, self.config, self.world, logprobs)
        self.weights.rest()
        return scores

    def update(self, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics) -> UpdateReport:
        self._check()
        started = time.perf_counter()
        report = self._optimization.update(batch, lambda: self._backward(batch, loss, statistics))
        return report if report.is_skipped else replace(report, cost=self._cost(batch, started))

    def _cost(self, batch: TokenBatch, started: float) -> UpdateCost:
        time_s, config = seconds_since(started, self._device), self.config
        num_tokens, flops = update_flops(
            self._products, batch, max_tokens=config.max_tokens_per_microbatch, is_packed=config.packing
        )
        return update_cost(
            tokens=num_tokens,
            flops=flops,
            time_s=time_s,
            device=self._device,
            precision=config.precision,
            world=self.world,
        )

    def update_critic(self, batch: TokenBatch, loss: ValueLoss, statistics: ValueStatistics) -> UpdateReport:
        if self.critic is None:
            raise ValueError("this trainer has no critic to update: it was built without one")
        self._check()
        return self.critic.update(batch, loss, statistics)

    def _backward(self, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics) -> tuple[Tensor, TokenFigures]:
        """Add this rank's share of the gradient up; returns its share of the loss and of the figures."""
        total_loss = torch.zeros((), dtype=torch.float64, device=self._device)
        figures = TokenFigures()
        for part in shares(batch, self.config.max_tokens_per_microbatch, self.config.packing, self.world):
            rows = part.batch.to(self._device)
            logprobs, entropies = self.policy(rows.ids, rows.loss_mask, rows.temperature, rows.is_banned, rows.banned_ids)
            inputs = LossInputs(
                loss_mask=rows.loss_mask,
                advantages=rows.advantages,
                sampled_logprobs=rows.sampled_logprobs,
                entropies=entropies,
                columns={Column.OLD_LOGPROBS: logprobs.detach(), **rows.columns},
            )
            part_loss = (rows.loss_weights * loss(logprobs, inputs)).sum()
            part_loss.backward()  # type: ignore[no-untyped-call]
            if self.config.gives_back_memory:
                give_back_freed_memory()
            total_loss += part_loss.detach()
            figures.add(rows.loss_mask, {"entropy_nats": entropies.detach(), **statistics(logprobs.detach(), inputs)})
        return total_loss, figures

    def _check(self) -> None:
        """Raises `WeightsLost` where policy or critic have no weights any more."""
        self._optimization.check()
        if self.critic is not None:
            self.critic.optimization.check()

    def names(self) -> list[str]:
        """Of the tensors that are published: those of a model without an adapter."""
        self._check()
        names = self.weights.names()
        return names if self.adapter is None else self.adapter.published_names(names)

    def tensor(self, name: str) -> Tensor:
        """A published tensor in float32, whole; an adapter is merged into it. Do not write into it."""
        return self.weights.whole(name) if self.adapter is None else self.adapter.merged(name, self.weights.whole)

    def checksum(self, dtype: torch.dtype) -> str:
        return weights_checksum((name, self.tensor(name).to(dtype)) for name in self.names())

    def save(self, directory: Path) -> None:
        """Write model (or adapter), state and counters; of several ranks, the first writes what is not divided."""
        self.snapshot(is_copy=False).write(directory)
        self._rest()

    def snapshot(self, *, is_copy: bool = True) -> Snapshot:
        """What a checkpoint holds. Without a copy it is to be written before anything is called again."""
        self._check()
        state = self._optimization.moments()
        counters: dict[str, Any] = {
            **self._optimization.counters(),
            "has_moved_reference": self.reference is not None and self.reference.has_moved,
        }
        if self.reference is not None:
            state |= self.reference.state()
        if self.critic is not None:
            state |= self.critic.state()
            counters["critic"] = self.critic.counters()
        if is_copy:
            state = copied(state)
            self._rest()
        return Snapshot(
            write_weights=self._weights_to_write(is_copy=is_copy), state=state, counters=counters, world=self._writers
        )

    def _rest(self) -> None:
        self._optimization.rest()
        if self.critic is not None:
            self.critic.optimization.rest()

    def _weights_to_write(self, *, is_copy: bool) -> Callable[[Path], None] | None:
        """Writes the policy's weights, or its adapter's, below a directory; None on all ranks but the first."""
        if self.adapter is None:
            tensors = self._gathered(self.names(), self.tensor, is_copy=is_copy)
            shell, files = self._shell, self._tokenizer_files

            def write(directory: Path) -> None:
                write_model(directory / "model", shell, tensors, files)

        else:
            adapter = self.adapter
            tensors = self._gathered(self.weights.named(), self.weights.whole, is_copy=is_copy)

            def write(directory: Path) -> None:
                adapter.write(directory / "adapter", tensors)

        return write if self.world.rank == 0 else None

    def _gathered(self, names: Iterable[str], whole: Callable[[str], Tensor], *, is_copy: bool) -> dict[str, Tensor]:
        """Whole tensors on the host: all ranks take part, the first one keeps them."""
        tensors = {}
        for name in names:
            tensor = whole(name)
            if self.world.rank == 0:
                tensors[name] = tensor.to("cpu", copy=is_copy)
        return tensors

    def save_model(self, directory: Path) -> None:
        """Write the model and its tokenizer into `directory`, which `transformers` then loads."""
        tensors = self._gathered(self.names(), self.tensor, is_copy=False)
        if self.world.rank == 0:
            write_model(directory, self._shell, tensors, self._tokenizer_files)
        self.world.wait()

    def load(self, directory: Path) -> None:
        counters = read_json(directory / "trainer.json")
        named = self.weights.named()
        if self.adapter is None:
            shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
            weights = read_model(directory / "model", shapes)
        else:
            weights = self.adapter.read(directory / "adapter", {name: parameter.shape for name, parameter in named.items()})
        if self.critic is not None and "critic" not in counters:
            raise ModelError(f"{directory}: holds no critic, but the method needs one: it was written for another method.")
        state = self._optimization.restore(counters)
        if self.reference is not None:
            if counters["has_moved_reference"]:
                state |= self.reference.prepare_state()
            else:
                self.reference.go_back()
        if self.critic is not None:
            state |= self.critic.prepare_state(counters["critic"])
        read_tensors(directory / "state", state, is_alone=self.world.size == 1)
        self.weights.assign(weights.items())
        if self.critic is not None:
            self.critic.refresh()
        self._rest()

    def reset_optimizer(self) -> None:
        self._check()
        self._optimization.reset()

    def refresh_reference(self) -> None:
        self._check()
        if self.reference is None:
            raise ValueError("this trainer has no reference that could be refreshed: it was built without one")
        self.reference.refresh()
