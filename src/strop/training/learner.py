"""One model and its optimizer, or one rank's part of them: the compute behind every trainer, in plain calls."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.algorithms.protocol import Column, LossInputs
from strop.engine.protocol import weights_checksum
from strop.errors import CannotLearnError
from strop.runs import read_json, write_json
from strop.training.adapter import Adapter
from strop.training.batch import TokenBatch, shares
from strop.training.config import OptimizerConfig, TrainerConfig, learning_rate
from strop.training.figures import TokenFigures
from strop.training.logprobs import LogprobModule
from strop.training.protocol import TokenLoss, TokenStatistics, UpdateReport
from strop.training.reference import Reference
from strop.training.state import moments, prepare_moments, read_model, read_tensors, write_model, write_tensors
from strop.training.weights import Weights
from strop.training.world import World

logger = logging.getLogger(__name__)


class Learner:
    """Calls of `Trainer`, as they run on each rank: all ranks make the same calls, and take their shares of each batch.

    Args:
        policy: the model, in whatever form computes the log-probs of rows.
        weights: of `policy`.
        adapter: where only an adapter is trained.
        reference: None where there is none.
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
        tokenizer_files: Mapping[str, bytes],
        total_updates: int | None,
    ) -> None:
        self.policy, self.weights, self.config, self.world = policy, weights, config, world
        self.adapter, self.reference = adapter, reference
        self._tokenizer_files = dict(tokenizer_files)
        self._total_updates = total_updates
        self._device = torch.device(config.device)
        self._parameters = list(weights.named().values())
        self.optimizer = _make_optimizer(self._parameters, config.optimizer)
        self.num_updates = 0
        self._num_scheduled = 0  # updates since the schedule started
        self._num_skipped = 0  # in a row

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    def score(self, batch: TokenBatch, column: Column) -> Tensor:
        """Log-probs of the policy or the reference (N, T), of this rank's share of the rows; 0 elsewhere."""
        match column:
            case Column.OLD_LOGPROBS:
                scorer: nn.Module = self.policy
            case Column.REFERENCE_LOGPROBS if self.reference is not None:
                scorer = self.reference
            case _:
                raise ValueError(f"this trainer has no model that can fill {column.value!r}: it was built without one")
        scores = torch.zeros(batch.ids.shape)
        with torch.no_grad():
            for part in shares(batch, self.config.max_tokens_per_microbatch, self.config.packing, self.world):
                rows = part.batch.to(self._device)
                logprobs, _ = scorer(rows.ids, rows.loss_mask, rows.temperature)
                if part.batch.num_loss_tokens:
                    scores[part.rows, : logprobs.shape[1]] = logprobs.cpu()
        self.weights.rest()
        return scores

    def update(self, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics) -> UpdateReport:
        rate = learning_rate(self.config.optimizer, self._num_scheduled, self._total_updates)
        if batch.num_loss_tokens == 0:
            return self._skip(0.0, 0.0, rate, f"none of the {len(batch.lengths)} rows has a token to train on")
        self.optimizer.zero_grad(set_to_none=True)
        total_loss, figures = self._backward(batch, loss, statistics)
        norm = nn.utils.clip_grad_norm_(self._parameters, self.config.optimizer.grad_clip or math.inf)
        loss_value, grad_norm = self.world.sum(total_loss).item(), _whole(norm).item()
        if not (math.isfinite(loss_value) and math.isfinite(grad_norm)):
            return self._skip(loss_value, grad_norm, rate, f"loss is {loss_value}, gradient norm is {grad_norm}")
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = rate
        self.optimizer.step()
        self.weights.refresh()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        self._num_scheduled += 1
        self._num_skipped = 0
        gathered, *others = self.world.gather(figures.on_cpu())
        for other in others:
            gathered.merge(other)
        return UpdateReport(
            update=self.num_updates,
            loss=loss_value,
            grad_norm=grad_norm,
            learning_rate=rate,
            statistics=gathered.summary(batch.num_loss_tokens),
        )

    def _backward(self, batch: TokenBatch, loss: TokenLoss, statistics: TokenStatistics) -> tuple[Tensor, TokenFigures]:
        """Add this rank's share of the gradient up; returns its share of the loss and of the figures."""
        total_loss = torch.zeros((), dtype=torch.float64, device=self._device)
        figures = TokenFigures()
        for part in shares(batch, self.config.max_tokens_per_microbatch, self.config.packing, self.world):
            rows = part.batch.to(self._device)
            logprobs, entropies = self.policy(rows.ids, rows.loss_mask, rows.temperature)
            inputs = LossInputs(
                loss_mask=rows.loss_mask,
                advantages=rows.advantages,
                sampled_logprobs=rows.sampled_logprobs,
                entropies=entropies,
                columns={Column.OLD_LOGPROBS: logprobs.detach(), **rows.columns},
            )
            part_loss = (rows.loss_weights * loss(logprobs, inputs)).sum()
            part_loss.backward()  # type: ignore[no-untyped-call]
            total_loss += part_loss.detach()
            figures.add(rows.loss_mask, {"entropy_nats": entropies.detach(), **statistics(logprobs.detach(), inputs)})
        return total_loss, figures

    def _skip(self, loss: float, grad_norm: float, rate: float, reason: str) -> UpdateReport:
        self.optimizer.zero_grad(set_to_none=True)
        self._num_skipped += 1
        logger.warning("update %d is skipped: %s", self.num_updates + 1, reason)
        if self._num_skipped >= self.config.max_skipped_updates:
            raise CannotLearnError(
                f"{self._num_skipped} updates in a row were skipped, the last because {reason}. The weights are those of update"
                f" {self.num_updates}. If values are not finite, lower trainer.optimizer.lr or use precision = 'float32'; if"
                " there is nothing to train on, look at why rollouts are dropped."
            )
        return UpdateReport(
            update=self.num_updates, loss=loss, grad_norm=grad_norm, learning_rate=rate, statistics={}, skip_reason=reason
        )

    def names(self) -> list[str]:
        """Of the tensors that are published: those of a model without an adapter."""
        names = self.weights.names()
        return names if self.adapter is None else self.adapter.published_names(names)

    def tensor(self, name: str) -> Tensor:
        """A published tensor in float32, whole; an adapter is merged into it. Do not write into it."""
        return self.weights.whole(name) if self.adapter is None else self.adapter.merged(name, self.weights.whole)

    def checksum(self, dtype: torch.dtype) -> str:
        return weights_checksum((name, self.tensor(name).to(dtype)) for name in self.names())

    def save(self, directory: Path) -> None:
        """Write model (or adapter), state and counters; of several ranks, the first writes what is not divided."""
        state = moments(self.optimizer, self.weights.named())
        counters = {
            "num_updates": self.num_updates,
            "num_scheduled": self._num_scheduled,
            "num_skipped": self._num_skipped,
            "has_moments": bool(state),
            "has_moved_reference": self.reference is not None and self.reference.has_moved,
        }
        if self.adapter is None:
            self.save_model(directory / "model")
        else:
            tensors = {name: self.weights.whole(name).cpu() for name in self.weights.named()}
            if self.world.rank == 0:
                self.adapter.write(directory / "adapter", tensors)
        if self.reference is not None:
            state |= self.reference.state()
        write_tensors(directory / "state", state, is_alone=self.world.size == 1)
        if self.world.rank == 0:
            write_json(directory / "trainer.json", counters)
        self.world.wait()

    def save_model(self, directory: Path) -> None:
        """Write the model and its tokenizer into `directory`, which `transformers` then loads."""
        tensors = {}
        for name in self.names():
            tensor = self.tensor(name)  # all ranks take part, the first one keeps it
            if self.world.rank == 0:
                tensors[name] = tensor.cpu()
        if self.world.rank == 0:
            write_model(directory, self.model, tensors, self._tokenizer_files)
        self.world.wait()

    def load(self, directory: Path) -> None:
        counters = read_json(directory / "trainer.json")
        named = self.weights.named()
        if self.adapter is None:
            shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
            weights = read_model(directory / "model", shapes)
        else:
            weights = self.adapter.read(directory / "adapter", {name: parameter.shape for name, parameter in named.items()})
        state: dict[str, Tensor] = {}
        self._reset_moments()
        if counters["has_moments"]:
            state |= prepare_moments(self.optimizer, named)
        if self.reference is not None and counters["has_moved_reference"]:
            state |= self.reference.prepare_state()
        read_tensors(directory / "state", state, is_alone=self.world.size == 1)
        self.weights.assign(weights.items())
        self.num_updates = int(counters["num_updates"])
        self._num_scheduled = int(counters["num_scheduled"])
        self._num_skipped = int(counters["num_skipped"])

    def reset_optimizer(self) -> None:
        self._reset_moments()
        self._num_scheduled = 0

    def refresh_reference(self) -> None:
        if self.reference is None:
            raise ValueError("this trainer has no reference that could be refreshed: it was built without one")
        self.reference.refresh()

    def _reset_moments(self) -> None:
        self.optimizer = _make_optimizer(self._parameters, self.config.optimizer)


def _whole(value: Tensor) -> Tensor:
    """The norm of a gradient that is divided over ranks is itself divided."""
    return value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value


def _make_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # Fused: one kernel a tensor instead of a dozen. Elementwise, so as reproducible as the plain one.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
