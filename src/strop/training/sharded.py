"""Weights and tokens divided over the ranks of a process group, and weights read straight into these parts.

Weights (FSDP2): each rank holds a part of every tensor, and its moments. Where several groups of ranks hold a copy each (HSDP),
gradients are added up within a group and then over the groups.

Tokens (Ulysses sequence parallelism, arXiv 2309.14509): a layer treats every token by itself, but for attention. So each rank
of a `SequenceGroup` computes its part of a micro-batch's tokens, and attention all tokens with its part of the heads; an
all-to-all before and after it swaps tokens for heads. Log-probs are single numbers, of which all ranks get those of all: then
each has the whole loss, whatever it is, and the gradient of its own tokens. Sums over ranks are those of `ShardedWeights`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from strop.engine.model_directory import config_of, shapes_of, weight_files
from strop.errors import ModelError
from strop.training.batch import World
from strop.training.config import TrainerConfig
from strop.training.logprobs import LogprobModule
from strop.training.models import require_config
from strop.training.weights import layers_of

_STORED = "strop_stored"  # of a parameter that `divide` is to read: its name in the files


def world_of(config: TrainerConfig, rank: int) -> World:
    """Return what `rank` sees of `config.workers` ranks. All of them call this, in their process group."""
    size, device = config.workers, config.torch_device.type
    if size == 1:
        return World()
    num_sharing = config.fsdp_size or size
    mesh = init_device_mesh(device, (size // num_sharing, num_sharing), mesh_dim_names=("replicate", "shard"))
    mesh = mesh["shard"] if num_sharing == size else mesh
    if config.sequence_parallel == 1:
        return World(rank, size, mesh)
    sequences = init_device_mesh(device, (size // config.sequence_parallel, config.sequence_parallel))
    return World(rank, size, mesh, SequenceGroup(sequences.get_group(1)))


class ShardedWeights:
    """Divides `root`, which is in float32, in place; in bfloat16 ranks exchange and compute with rounded copies.

    Gradients are added up over ranks in float32 after each backward pass, undivided: each token's share of the loss was
    computed over the whole update. Embedding and head stay whole from a forward pass to the end of its backward pass.

    Args:
        root: the module that is called.
        model: `root` or a part of it, which names the weights.
        directory: with the weights that are on the meta device.
    """

    def __init__(
        self, root: nn.Module, model: nn.Module, directory: Path, dtype: torch.dtype, device: torch.device, world: World
    ) -> None:
        precision = MixedPrecisionPolicy(param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32)
        divide(root, directory, device, world, precision, keeps_ends=True)
        self._root = root
        # Those that the optimizer sees; while the model computes, its modules show others.
        self._parameters = dict(model.named_parameters())

    def named(self) -> Mapping[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def names(self) -> list[str]:
        return list(self._parameters)

    def num_elements(self, name: str) -> int:
        return self._parameters[name].numel()

    def on_rank(self, name: str, rank: int, dtype: torch.dtype) -> Tensor | None:
        parameter = self._parameters[name].detach()
        assert isinstance(parameter, DTensor)
        group = parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1)
        if rank not in dist.get_process_group_ranks(group):  # which has a copy
            return None
        part = parameter.to_local().to(dtype)
        padded = part.new_zeros(_rows_of_a_rank(parameter), *part.shape[1:])
        padded[: len(part)] = part
        is_here = rank == dist.get_rank()
        parts = list(padded.new_empty(dist.get_world_size(group), *padded.shape)) if is_here else None
        dist.gather(padded, parts, dst=rank, group=group)
        return None if parts is None else torch.cat(parts)[: parameter.shape[0]]

    def whole(self, name: str) -> Tensor:
        parameter = self._parameters[name].detach()
        assert isinstance(parameter, DTensor)
        return parameter.full_tensor().float()

    @torch.no_grad()
    def assign(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.rest()
        for name, tensor in tensors:
            parameter = self._parameters[name]
            assert isinstance(parameter, DTensor)
            here = tensor.to(parameter.device)  # all of it, so there is nothing to send
            parameter.copy_(distribute_tensor(here, parameter.device_mesh, parameter.placements, src_data_rank=None))

    def refresh(self) -> None:
        """Let the next forward pass gather the weights again."""

    def rest(self) -> None:
        assert isinstance(self._root, FSDPModule)
        self._root.reshard()


def model_without_weights(directory: Path, *, is_reward_model: bool = False) -> transformers.PreTrainedModel:
    """Return the causal language model or the reward model in `directory`, in float32, with its parameters on the meta device.

    Raises:
        ModelError: `directory` holds no model that transformers knows.
    """
    require_config(directory)
    config = config_of(directory)
    kind: Any = transformers.AutoModelForCausalLM
    if is_reward_model:
        kind, config.num_labels = transformers.AutoModelForSequenceClassification, 1
    try:
        with _parameters_on_meta():
            model = kind.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except ValueError as error:
        raise ModelError(f"{directory}: transformers cannot load this model: {error}") from error
    assert isinstance(model, transformers.PreTrainedModel)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        setattr(parameter, _STORED, name)
    if (directory / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model


def _parameters_on_meta() -> AbstractContextManager[Any]:
    """Create modules without memory for their parameters. Buffers, which follow from a config, are as always."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    return patch.object(nn.Module, "register_parameter", register_on_meta)


@torch.no_grad()
def read_parts(parameters: Mapping[str, nn.Parameter], directory: Path) -> None:
    """Read this rank's part of the weights in `directory` into divided parameters, by their names there.

    The most that is in memory is that part and the largest weight.

    Raises:
        ModelError: a weight is missing there, or has another shape.
    """
    stored = shapes_of(directory)
    for name, parameter in parameters.items():
        if stored.get(name) != tuple(parameter.shape):
            raise ModelError(
                f"{directory}: its safetensors files have no {name} of the shape {tuple(parameter.shape)}, which"
                " trainer.workers reads in parts. Save the model with transformers' save_pretrained, or set workers = 0."
            )
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in parameters.keys() & set(file.keys()):
                parameter = parameters[name]
                assert isinstance(parameter, DTensor)
                local = parameter.to_local()
                if len(local):
                    start = _rows_of_a_rank(parameter) * parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)
                    local.copy_(file.get_slice(name)[start : start + len(local)])


def _rows_of_a_rank(parameter: DTensor) -> int:
    """Return the rows of each rank but the last ones."""
    return -(-parameter.shape[0] // parameter.device_mesh.shape[-1])


def divide(
    root: nn.Module,
    directory: Path,
    device: torch.device,
    world: World,
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - immutable
    *,
    keeps_ends: bool = False,
) -> None:
    """Divide `root` over the ranks, layer by layer; `keeps_ends`: embedding and head stay whole after a forward pass.

    Read this rank's part of what a `model_without_weights` brought into it, from the same directory. Raises as `read_parts`.
    """
    stored = {name: getattr(parameter, _STORED) for name, parameter in root.named_parameters() if parameter.is_meta}
    for layer in layers_of(root):
        fully_shard(layer, mesh=world.mesh, mp_policy=precision)
    fully_shard(root, mesh=world.mesh, mp_policy=precision, reshard_after_forward=not keeps_ends)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other sum
    if isinstance(root, LogprobModule):
        register_fsdp_forward_method(root, "full_logprobs")
    root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    read_parts({of_file: root.get_parameter(name) for name, of_file in stored.items()}, directory)


class SequenceGroup:
    """The ranks of `group`, which compute each micro-batch together, as one of them sees them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def to_heads(self, heads: Tensor) -> Tensor:
        """All heads of this rank's tokens (1, H, t, D) -> this rank's heads of all tokens (1, H / S, S t, D)."""
        _, _, num_tokens, width = heads.shape
        swapped = self._swap(heads.reshape(self.size, -1, num_tokens, width))
        return swapped.transpose(0, 1).reshape(1, -1, self.size * num_tokens, width)

    def to_tokens(self, heads: Tensor) -> Tensor:
        """This rank's heads of all tokens (1, S t, H / S, D) -> all heads of this rank's tokens (1, t, H, D)."""
        _, num_tokens, num_heads, width = heads.shape
        swapped = self._swap(heads.reshape(self.size, -1, num_heads, width))
        return swapped.transpose(0, 1).reshape(1, num_tokens // self.size, self.size * num_heads, width)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, from which all of them compute the same; each gets the gradient of its own `values`."""
        total: Tensor = _Sum.apply(values, self._group)  # type: ignore[no-untyped-call]
        return total

    def _swap(self, parts: Tensor) -> Tensor:
        """Give part r of (S, ...) to rank r, and get as many from all."""
        swapped: Tensor = _Swap.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return swapped


class _Swap(torch.autograd.Function):
    """All-to-all, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        swapped = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
        dist.all_to_all_single(swapped, parts.contiguous(), group=group)
        return swapped

    @staticmethod
    def backward(ctx: Any, to_swapped: Tensor) -> tuple[Tensor, None]:
        return _Swap.forward(ctx, to_swapped, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, to_total: Tensor) -> tuple[Tensor, None]:
        return to_total, None
