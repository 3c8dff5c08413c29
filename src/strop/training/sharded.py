"""Weights divided over the ranks of a process group (FSDP2): each holds a part of every tensor, and its moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from strop.training.weights import overwrite


class ShardedWeights:
    """Divides `root`, which is in float32, in place; in bfloat16 ranks exchange and compute with rounded copies.

    Gradients are added up over ranks in float32 after each backward pass, undivided: each token's share of the loss was
    computed over the whole update (law 4). Embedding and head stay whole from a forward pass to the end of its backward pass.

    Args:
        root: the module that is called.
        model: `root` or a part of it, which names the weights.
    """

    def __init__(self, root: nn.Module, model: nn.Module, dtype: torch.dtype, device: torch.device, num_ranks: int) -> None:
        precision = MixedPrecisionPolicy(param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32)
        divide(root, device, num_ranks, precision, keeps_ends=True)
        self._root = root
        # Those that the optimizer sees; while the model computes, its modules show others.
        self._parameters = dict(model.named_parameters())

    def named(self) -> Mapping[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def names(self) -> list[str]:
        return list(self._parameters)

    def whole(self, name: str) -> Tensor:
        parameter = self._parameters[name].detach()
        assert isinstance(parameter, DTensor)
        return parameter.full_tensor().float()

    @torch.no_grad()
    def assign(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.rest()
        for name, tensor in tensors:
            overwrite(self._parameters[name], tensor)

    def refresh(self) -> None:
        """Let the next forward pass gather the weights again."""

    def rest(self) -> None:
        assert isinstance(self._root, FSDPModule)
        self._root.reshard()


def divide(
    scorer: nn.Module,
    device: torch.device,
    num_ranks: int,
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - immutable
    *,
    keeps_ends: bool = False,
) -> None:
    """Divide a model over all ranks, layer by layer; `keeps_ends`: embedding and head stay whole after a forward pass."""
    mesh = init_device_mesh(device.type, (num_ranks,))
    layers = [module for module in scorer.modules() if isinstance(module, transformers.GradientCheckpointingLayer)]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(scorer, mesh=mesh, mp_policy=precision, reshard_after_forward=not keeps_ends)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other sum
