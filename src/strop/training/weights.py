"""The weights that an optimizer moves, and the model that computes with them in its own precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.training.gradients import add_up_in
from strop.training.originals import Originals


class Weights(Protocol):
    """Float32 weights, by the model's names for them, wherever they lie."""

    def named(self) -> Mapping[str, nn.Parameter]:
        """Those that the optimizer moves; of ranks that share them, what lies on this one."""

    def names(self) -> list[str]:
        """All of the model's, the frozen ones too; a tied weight once."""

    def whole(self, name: str) -> Tensor:
        """One of them, not divided over ranks, which all call this; do not write into it."""

    def assign(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite some of those that the optimizer moves by whole tensors."""

    def refresh(self) -> None:
        """Tell the model that the optimizer has moved them."""

    def rest(self) -> None:
        """Give back what forward passes without a backward pass have gathered from other ranks."""


class MasterWeights:
    """Weights of a process alone, behind a model that may compute in bfloat16.

    In float32 the model's parameters are the masters. In bfloat16 each is a rounded copy of its master, as an engine in
    bfloat16 has it, and its gradient is added to the master's as soon as a backward pass has it: so sums over micro-batches
    are float32, and of the rounded gradients only one is held at a time. A frozen parameter has no master: it is rounded, and
    what it was is found where `originals` has it.

    Args:
        model: in float32; it is changed in place.
        dtype: in which it computes. Buffers, such as the frequencies of rotary positions, stay as they are.
        rounds_layers: False where the layers' weights are rounded when the layers compute (`checkpoint_activations`): their
            parameters are then the masters themselves.
        originals: of the frozen ones; None: they are kept in memory.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, *, rounds_layers: bool = True, originals: Originals | None = None
    ) -> None:
        self.model = model
        self._originals = originals or Originals()
        self._masters: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        late = set[nn.Parameter]() if rounds_layers else _parameters_of_layers(model)
        for name, parameter in model.named_parameters():  # a tied weight appears once
            if not parameter.requires_grad:
                exact = parameter.data
                parameter.data = exact.to(dtype)
                self._originals.remember(name, exact, parameter.data)
                self._frozen[name] = parameter
            elif dtype is torch.float32 or parameter in late:
                self._masters[name] = parameter
            else:
                master = self._masters[name] = nn.Parameter(parameter.data)
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))  # type: ignore[no-untyped-call]
                add_up_in(parameter, master)
                self._copies.append((parameter, master))

    def named(self) -> Mapping[str, nn.Parameter]:
        return self._masters

    def names(self) -> list[str]:
        return [*self._masters, *self._frozen]

    def whole(self, name: str) -> Tensor:
        if name in self._masters:
            return self._masters[name].detach()
        return self._originals.exact(name, self._frozen[name].detach())

    @torch.no_grad()
    def assign(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self._masters[name].copy_(tensor)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters anew into the model, after the optimizer has moved them."""
        for parameter, master in self._copies:
            parameter.copy_(master)

    def rest(self) -> None:
        """Nothing was gathered."""


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """`model` with its parameters in `dtype`, for one that is never trained; its buffers stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _parameters_of_layers(model: nn.Module) -> set[nn.Parameter]:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return {parameter for layer in layers for parameter in layer.parameters()}


@torch.no_grad()
def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    if parameter.grad is None:  # it was added up where it arose
        return
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad += parameter.grad
    parameter.grad = None
