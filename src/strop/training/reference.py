"""The model that KL is measured against: a frozen copy, or the policy without its adapter. It can be moved to the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.training.adapter import Adapter
from strop.training.logprobs import LogprobModule
from strop.training.models import load_model
from strop.training.sharded import overwrite
from strop.training.weights import Weights


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
    def prepare_state(self) -> dict[str, Tensor]:
        """`state` of one that has moved, to be read into."""

    @abstractmethod
    def go_back(self) -> None:
        """Become what it was at first."""


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

    def prepare_state(self) -> dict[str, Tensor]:
        self.has_moved = True
        return self.state()

    @torch.no_grad()
    def go_back(self) -> None:
        if not self.has_moved:
            return
        for name, tensor in load_model(self._directory).named_parameters():
            overwrite(self._parameters_by_name[name], tensor)
        self.has_moved = False


class AdapterReference(Reference):
    """The policy without its adapter, or with the one that it had at the last refresh."""

    def __init__(self, policy: LogprobModule, adapter: Adapter, weights: Weights) -> None:
        super().__init__()
        self._policy = (policy,)  # in a tuple, so that it is no module of this one
        self._adapter, self._weights = adapter, weights
        self._earlier: dict[str, Tensor] = {}

    def forward(self, *rows: Any) -> tuple[Tensor, Tensor]:
        logprobs: tuple[Tensor, Tensor]
        if not self.has_moved:
            with self._adapter.off():
                logprobs = self._policy[0](*rows)
            return logprobs
        self._exchange()
        try:
            logprobs = self._policy[0](*rows)
        finally:
            self._exchange()
        return logprobs

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

    def prepare_state(self) -> dict[str, Tensor]:
        self.refresh()
        return self.state()

    def go_back(self) -> None:
        self._earlier, self.has_moved = {}, False
