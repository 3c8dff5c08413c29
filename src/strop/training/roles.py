"""The models next to the policy: the reference for the KL penalty, and the critic of PPO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.algorithms.method import Column, ValueInputs
from strop.training.batch import TokenBatch, World, score_rows
from strop.training.config import TrainerConfig
from strop.training.logprobs import LogprobModule, hidden_before, spread
from strop.training.lora import Adapter
from strop.training.models import load_model
from strop.training.optimizer import Optimization, UpdateReport, ValueLoss, ValueStatistics, add_up_gradient
from strop.training.weights import Weights, is_divided

if TYPE_CHECKING:
    import transformers

    from strop.training.sharded import SequenceGroup


class Reference(nn.Module, ABC):
    """Called like a `LogprobModule`; never with gradient."""

    has_moved = False  # so that a checkpoint has to hold it

    @abstractmethod
    def refresh(self) -> None:
        """Become what the policy is now (DeepSeek-R1, arXiv 2501.12948: every 400 steps)."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold of it; {} while it is what it was at first."""

    @abstractmethod
    def restore(self, *, has_moved: bool) -> dict[str, Tensor]:
        """Return `state` of one that has moved, to be read into; or become what it was at first."""


class FrozenReference(Reference):
    """A model of its own, in the precision that is computed in.

    Args:
        scorer: the model, as it is at first.
        weights: of the policy.
        directory: that the model was read from, and is again when it goes back.
    """

    def __init__(self, scorer: LogprobModule, weights: Weights, directory: Path) -> None:
        super().__init__()
        self.scorer = scorer
        self._policy, self._directory = weights, directory
        # The tensors themselves, wherever they lie; a model that is divided over ranks shows others while it computes.
        self._parameters_by_name = dict(scorer.model.named_parameters())

    def forward(self, *rows: Any) -> tuple[Tensor, Tensor]:
        logprobs: tuple[Tensor, Tensor] = self.scorer(*rows)
        return logprobs

    @torch.no_grad()
    def refresh(self) -> None:
        policy = self._policy.named()
        for name, parameter in self._parameters_by_name.items():
            parameter.copy_(policy[name])
        self.has_moved = True

    def state(self) -> dict[str, Tensor]:
        if not self.has_moved:
            return {}
        return {f"reference.{name}": parameter.detach() for name, parameter in self._parameters_by_name.items()}

    @torch.no_grad()
    def restore(self, *, has_moved: bool) -> dict[str, Tensor]:
        parameters = self._parameters_by_name
        if self.has_moved and not has_moved and is_divided(next(iter(parameters.values()))):
            from strop.training.sharded import read_parts

            read_parts(parameters, self._directory)
        elif self.has_moved and not has_moved:
            for name, tensor in load_model(self._directory).named_parameters():
                parameters[name].copy_(tensor)
        self.has_moved = has_moved
        return self.state()


class AdapterReference(Reference):
    """The policy without its adapter, or with the one that it had at the last refresh."""

    def __init__(self, policy: LogprobModule, adapter: Adapter, weights: Weights) -> None:
        super().__init__()
        self._policy = (policy,)  # in a tuple, so that it is no module of this one
        self._adapter, self._weights = adapter, weights
        self._earlier: dict[str, Tensor] = {}

    def forward(self, *rows: Any) -> tuple[Tensor, Tensor]:
        with self._exchanged() if self.has_moved else self._adapter.off():
            logprobs: tuple[Tensor, Tensor] = self._policy[0](*rows)
        return logprobs

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """The policy's adapter and the earlier one change places."""
        self._weights.rest()
        for name, parameter in self._weights.named().items():
            now = parameter.detach().clone()
            parameter.copy_(self._earlier[name])
            self._earlier[name].copy_(now)
        self._weights.refresh()

    def refresh(self) -> None:
        self._earlier = {name: parameter.detach().clone() for name, parameter in self._weights.named().items()}
        self.has_moved = True

    def state(self) -> dict[str, Tensor]:
        return {f"reference.{name}": tensor for name, tensor in self._earlier.items()}

    def restore(self, *, has_moved: bool) -> dict[str, Tensor]:
        self._earlier, self.has_moved = {}, False
        if has_moved:
            self.refresh()
        return self.state()


_PREFIX = "critic."  # of its tensors in a checkpoint


class ValueModule(nn.Module):
    """Values of given tokens; ranks that divide its weights hook into the call of it.

    The head starts at zero, so that nothing is expected before anything is learnt, and nothing has to be drawn. It is computed
    in float32: in bfloat16 values would come in steps of a hundredth.

    Args:
        decoder: of a causal language model or a reward model, without its head.
        is_packed: lay the rows end to end, which wants a decoder with `use_row_attention`.
        group: the ranks that divide their tokens.
        head: (1, H), what to start from instead of zero: a reward model's, which becomes this one's.
    """

    def __init__(
        self,
        decoder: transformers.PreTrainedModel,
        *,
        is_packed: bool,
        group: SequenceGroup | None = None,
        head: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(decoder.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if head is not None:
            self.head.weight = head
        self._is_packed, self._group = is_packed, group

    def forward(self, ids: Tensor, where: Tensor) -> Tensor:
        """What is expected before each token of `where`, from ids[:, :t]; args as of `LogprobModule`.

        Returns:
            float32 (n, T), in units of reward, 0 where `where` is False; with gradient.
        """
        hidden, places, predicted = hidden_before(self.decoder, ids, where, is_packed=self._is_packed, group=self._group)
        values = F.linear(hidden.index_select(0, places).float(), self.head.weight.float(), self.head.bias.float()).squeeze(-1)
        return spread(values, predicted, where, self._group)


class Critic:
    """A critic and its optimizer, or one rank's part of them; micro-batches are cut as the policy's are.

    Args:
        values: the model.
        weights: of `values`.
        config: of the policy, whose `critic` says what is different here.
        total_updates: of the critic, where a cosine schedule ends.
    """

    def __init__(
        self, values: ValueModule, weights: Weights, config: TrainerConfig, *, world: World, total_updates: int | None
    ) -> None:
        self.values, self.weights, self.config, self.world = values, weights, config, world
        self.optimization = Optimization(
            weights,
            config.critic.optimizer,
            key="trainer.critic.optimizer",
            world=world,
            total_updates=total_updates,
        )

    def score(self, batch: TokenBatch) -> Tensor:
        """`Column.VALUES` of this rank's share of the rows, (N, T); 0 elsewhere."""
        scores = score_rows(batch, self.config, self.world, lambda rows: self.values(rows.ids, rows.loss_mask))
        self.weights.rest()
        return scores

    def update(self, batch: TokenBatch, loss: ValueLoss, statistics: ValueStatistics) -> UpdateReport:
        """Raises `ValueError` for a batch without old values or returns."""
        if lacking := [each.value for each in (Column.VALUES, Column.RETURNS) if each not in batch.columns]:
            raise ValueError(f"a critic learns from old values and returns, but this batch has no {' and no '.join(lacking)}")

        def token_losses(rows: TokenBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
            values = self.values(rows.ids, rows.loss_mask)
            inputs = ValueInputs(
                loss_mask=rows.loss_mask, old_values=rows.columns[Column.VALUES], returns=rows.columns[Column.RETURNS]
            )
            return loss(values, inputs), statistics(values.detach(), inputs)

        return self.optimization.update(batch, lambda: add_up_gradient(batch, self.config, self.world, token_losses))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name."""
        return {_PREFIX + name: tensor for name, tensor in self.optimization.state().items()}

    def prepare_state(self, counters: Mapping[str, int | bool]) -> dict[str, Tensor]:
        """Return `state` with these counters, to be read into. Call `weights.refresh` afterwards."""
        self.weights.rest()
        self.optimization.restore(counters)
        return self.state()
