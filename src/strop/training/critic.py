"""The critic: a decoder with a head of one number, which expects of each token the rewards that are still to come."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from strop.algorithms.protocol import Column, ValueInputs
from strop.engine.memory import give_back_freed_memory
from strop.training.batch import TokenBatch, shares
from strop.training.config import TrainerConfig
from strop.training.figures import TokenFigures
from strop.training.logprobs import hidden_before, spread
from strop.training.optimization import Optimization
from strop.training.protocol import UpdateReport, ValueLoss, ValueStatistics
from strop.training.scoring import score_rows
from strop.training.weights import Weights
from strop.training.world import World

_PREFIX = "critic."  # of its tensors in a checkpoint


class ValueModule(nn.Module):
    """Values of given tokens; ranks that divide its weights hook into the call of it.

    The head starts at zero, so that nothing is expected before anything is learnt, and nothing has to be drawn. It is computed
    in float32: in bfloat16 values would come in steps of a hundredth.

    Args:
        decoder: of a causal language model or a reward model, without its head.
        is_packed: lay the rows end to end, which wants a decoder with `use_row_attention`.
        head: (1, H), what to start from instead of zero: a reward model's.
    """

    def __init__(self, decoder: PreTrainedModel, *, is_packed: bool, head: Tensor | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(decoder.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if head is not None:
            self.head.weight.data.copy_(head.detach())
        self._is_packed = is_packed

    def forward(self, ids: Tensor, where: Tensor) -> Tensor:
        """What is expected before each token of `where`, from ids[:, :t]; args as of `token_logprobs`.

        Returns:
            float32 (n, T), in units of reward, 0 where `where` is False; with gradient.
        """
        hidden, predicted = hidden_before(self.decoder, ids, where, is_packed=self._is_packed)
        values = F.linear(hidden.float(), self.head.weight.float(), self.head.bias.float()).squeeze(-1)
        return spread(values, predicted, where)


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
            max_skipped=config.max_skipped_updates,
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
        return self.optimization.update(batch, lambda: self._backward(batch, loss, statistics))

    def _backward(self, batch: TokenBatch, loss: ValueLoss, statistics: ValueStatistics) -> tuple[Tensor, TokenFigures]:
        device = torch.device(self.config.device)
        total_loss = torch.zeros((), dtype=torch.float64, device=device)
        figures = TokenFigures()
        for part in shares(batch, self.config.max_tokens_per_microbatch, self.config.packing, self.world):
            rows = part.batch.to(device)
            values = self.values(rows.ids, rows.loss_mask)
            inputs = ValueInputs(
                loss_mask=rows.loss_mask, old_values=rows.columns[Column.VALUES], returns=rows.columns[Column.RETURNS]
            )
            part_loss = (rows.loss_weights * loss(values, inputs)).sum()
            part_loss.backward()  # type: ignore[no-untyped-call]
            if self.config.gives_back_memory:
                give_back_freed_memory()
            total_loss += part_loss.detach()
            figures.add(rows.loss_mask, statistics(values.detach(), inputs))
        return total_loss, figures

    def counters(self) -> dict[str, int | bool]:
        return self.optimization.counters()

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint has to hold, itself, by name."""
        tensors = {**{name: each.detach() for name, each in self.weights.named().items()}, **self.optimization.moments()}
        return {_PREFIX + name: tensor for name, tensor in tensors.items()}

    def prepare_state(self, counters: Mapping[str, int | bool]) -> dict[str, Tensor]:
        """`state` that belongs to these counters, to be read into; call `refresh` after that."""
        self.weights.rest()
        self.optimization.restore(counters)
        return self.state()

    def refresh(self) -> None:
        """Compute with the weights that were read."""
        self.weights.refresh()
