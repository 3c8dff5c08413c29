"""The weights that an optimizer moves, and the model that computes with them in its own precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class MasterWeights:
    """Float32 weights with their gradients, behind a model that may compute in bfloat16.

    In float32 the model's parameters are the masters. In bfloat16 each is a rounded copy of its master, as an engine in
    bfloat16 has it, and its gradient is added to the master's as soon as a backward pass has it: so sums over micro-batches
    are float32, and of the rounded gradients only one is held at a time.

    Args:
        model: in float32; it is changed in place.
        dtype: in which it computes. Buffers, such as the frequencies of rotary positions, stay as they are.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model = model
        self._masters: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in model.named_parameters():  # a tied weight appears once
            if dtype is torch.float32:
                self._masters[name] = parameter
                continue
            master = self._masters[name] = nn.Parameter(parameter.data)
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))
            self._copies.append((parameter, master))

    def named(self) -> dict[str, nn.Parameter]:
        """The masters, by the model's names for them."""
        return self._masters

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters anew into the model, after the optimizer has moved them."""
        for parameter, master in self._copies:
            parameter.copy_(master)

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[PreTrainedModel]:
        """The model with the masters themselves in place of their copies, to be written to disk or loaded from it."""
        rounded = [parameter.data for parameter, _ in self._copies]
        for parameter, master in self._copies:
            parameter.data = master.data
        try:
            yield self.model
        finally:
            for (parameter, _), data in zip(self._copies, rounded, strict=True):
                parameter.data = data
            self.refresh()


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """`model` with its parameters in `dtype`, for one that is never trained; its buffers stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad += parameter.grad
    parameter.grad = None
