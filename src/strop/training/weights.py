"""The weights that an optimizer updates, the model that computes with them, their gradients, and their checkpoints.

A checkpoint holds a model directory, tensors of any layout, and counters.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.engine.torch.cpu.resources import end_team
from strop.errors import ModelError, RunError
from strop.run_directory import write_json, writing_to
from strop.training.batch import World

if TYPE_CHECKING:
    import transformers
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


class Weights(Protocol):
    """Float32 weights by the model's names, on one rank or divided over several."""

    def named(self) -> Mapping[str, nn.Parameter]:
        """Return the weights that the optimizer updates; of divided weights the part on this rank."""

    def names(self) -> list[str]:
        """Return the names of all weights, also frozen ones; a tied weight once."""

    def num_elements(self, name: str) -> int:
        """Return the size of one whole weight."""

    def whole(self, name: str) -> Tensor:
        """Return one whole weight. All ranks call this. Do not write into it."""

    def on_rank(self, name: str, rank: int, dtype: torch.dtype) -> Tensor | None:
        """Return one whole weight, rounded to `dtype`, on one rank and None on the others. All ranks call this."""

    def assign(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite weights that the optimizer updates by whole tensors."""

    def refresh(self) -> None:
        """Update the model after the optimizer has changed the weights."""

    def rest(self) -> None:
        """Free weights that forward passes without a backward pass gathered from other ranks."""


class MasterWeights:
    """Weights of a single process, for a model that may compute in bfloat16.

    In float32 the model's parameters are the masters. In bfloat16 each parameter is a rounded copy of its master, as in an
    engine in bfloat16. A backward pass adds each gradient to the master's gradient at once: sums over micro-batches are
    float32, and only one rounded gradient is in memory at a time. A frozen parameter has no master: it is rounded, and its
    float32 values stay in the memory of the host if rounding changed them.

    Args:
        model: in float32; it is changed in place.
        dtype: in which it computes. Buffers, such as the frequencies of rotary positions, stay as they are.
        rounds_layers: False where the layers' weights are rounded when the layers compute (`checkpoint_activations`): their
            parameters are then the masters themselves.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, rounds_layers: bool = True) -> None:
        self._exact: dict[str, Tensor] = {}  # frozen weights that rounding changed
        self._masters: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        layers = [] if rounds_layers else layers_of(model)
        late = {parameter for layer in layers for parameter in layer.parameters()}
        for name, parameter in model.named_parameters():  # a tied weight appears once
            if not parameter.requires_grad:
                exact = parameter.data
                parameter.data = exact.to(dtype)
                if not torch.equal(parameter.data.float(), exact):
                    self._exact[name] = exact.cpu()
                self._frozen[name] = parameter
            elif dtype is torch.float32 or parameter in late:
                self._masters[name] = parameter
                if dtype is torch.float32:
                    add_up_in(parameter, None)
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

    def num_elements(self, name: str) -> int:
        return (self._masters if name in self._masters else self._frozen)[name].numel()

    def on_rank(self, name: str, rank: int, dtype: torch.dtype) -> Tensor | None:
        return self.whole(name).to(dtype)

    def whole(self, name: str) -> Tensor:
        if name in self._masters:
            return self._masters[name].detach()
        rounded = self._frozen[name].detach()
        return self._exact[name].to(rounded.device) if name in self._exact else rounded.float()

    @torch.no_grad()
    def assign(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self._masters[name].copy_(tensor)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the model again, after the optimizer has updated them."""
        for parameter, master in self._copies:
            parameter.copy_(master)

    def rest(self) -> None:
        """Nothing was gathered."""


def round_weights(model: transformers.PreTrainedModel, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """`model` with its parameters in `dtype`, for one that is never trained; its buffers stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def layers_of(model: nn.Module) -> list[transformers.GradientCheckpointingLayer]:
    """Return the layers of `model`; none if the model library does not mark them."""
    import transformers

    return [module for module in model.modules() if isinstance(module, transformers.GradientCheckpointingLayer)]


@torch.no_grad()
def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    if parameter.grad is None:  # it was added up where it arose
        return
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad += parameter.grad
    parameter.grad = None


_MASTER = "strop_master"


def add_up_in(parameter: Tensor, master: nn.Parameter | None) -> None:
    """Let functions that know of it add the gradient of `parameter` to that of its float32 `master`, or to its own if None.

    What they add autograd does not see: `torch.autograd.grad` and hooks on `parameter` miss it.
    """
    setattr(parameter, _MASTER, master)


def master_of(parameter: Tensor) -> Tensor | None:
    """The float32 weight to whose gradient that of `parameter` is to be added; None: autograd is to have it.

    A backward pass may get `parameter` as another object, so its forward pass calls this.
    """
    if not (parameter.requires_grad and hasattr(parameter, _MASTER)):
        return None
    master: Tensor | None = getattr(parameter, _MASTER)
    return parameter if master is None else master


def gradient_sum(weight: Tensor, master: Tensor | None) -> Tensor:
    """What to add the gradient of `weight` to, in float32: that of its `master`, or zeros for autograd."""
    if master is None:
        return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


def embed(embedding: nn.Module, ids: Tensor) -> Tensor:
    """`embedding(ids)`: int64 (n, T) -> (n, T, H). Its gradient takes the rows of `ids`, not a vocabulary."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or not torch.is_grad_enabled():
        embedded: Tensor = embedding(ids)
        return embedded
    if master_of(embedding.weight) is None:
        return F.embedding(ids, embedding.weight, embedding.padding_idx)
    rows: Tensor = _Rows.apply(embedding.weight, ids, embedding.padding_idx)  # type: ignore[no-untyped-call]
    return rows


def zeros_together(like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros of these shapes, of one dtype on one device, in one block of memory.

    Tensors that live long, each made among others that do not, would leave holes in the heap that nothing fits into.
    """
    block = torch.zeros(sum(each.numel() for each in like), dtype=like[0].dtype, device=like[0].device)
    parts = torch.split(block, [each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.padding, ctx.master = padding, master_of(weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor) -> tuple[None, ...]:
        weight, ids = ctx.saved_tensors
        total = gradient_sum(weight, ctx.master)
        flat, gradients = ids.flatten(), of_rows.flatten(0, -2).to(total.dtype)
        if ctx.padding is not None:
            gradients = gradients.masked_fill((flat == ctx.padding)[:, None], 0.0)
        total.index_add_(0, flat, gradients)
        return None, None, None


_NOT_COMPLETE = "The checkpoint is not complete; use the one before it."


WriteCheckpoint: TypeAlias = Callable[[Path], None]
"""Writes a checkpoint into an empty directory, in the thread that calls it, and waits for the disk.

Raises `RunError` if there is no room, `TrainerLost` if a process of the trainer is gone.
"""


class Checkpointed(Protocol):
    """A trainer of a policy or of a reward model, as the writer of checkpoints sees it."""

    async def snapshot(self) -> WriteCheckpoint:
        """Copy a checkpoint in memory. Return a function that writes the copy, also while training continues."""

    async def load(self, directory: Path) -> None:
        """Continue from a checkpoint."""


def is_divided(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether each rank holds a part of `tensor`."""
    from torch.distributed.tensor import DTensor  # takes a second, so not when strop is imported

    return isinstance(tensor, DTensor)


def write_tensors(directory: Path, tensors: dict[str, Tensor], *, world: World) -> None:
    """Write `tensors` so that any number of ranks can read them. All ranks of `world` call this, each with its parts."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    with writing_to(directory), _quiet():
        cause: BaseException | None = None
        try:
            state_dict_saver.save(tensors, checkpoint_id=directory, no_dist=world.size == 1)
        except CheckpointException as error:  # no Exception, so it would pass by everything that cleans up
            cause, _ = next(iter(error.failures.values()))
        if cause is not None:
            raise cause  # out here, where it keeps what it arose from: of a full disk torch itself says something else


def read_tensors(directory: Path, tensors: dict[str, Tensor], *, is_alone: bool) -> None:
    """Read what `write_tensors` wrote into `tensors`, in place, on any number of ranks.

    Raises:
        RunError: a file is missing or cut.
        ModelError: a tensor is missing or has another shape.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not (directory / ".metadata").is_file():
        raise RunError(f"{directory / '.metadata'}: missing. {_NOT_COMPLETE}")
    try:
        written = FileSystemReader(directory).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle that is cut may raise anything
        raise RunError(f"{directory / '.metadata'}: cannot be read ({error}). {_NOT_COMPLETE}") from error
    for name, tensor in tensors.items():
        shape = tuple(getattr(written.get(name), "size", ())) if name in written else None
        if shape != tuple(tensor.shape):
            found = "not there" if shape is None else f"of shape {shape}"
            raise ModelError(f"{directory}: not of what is being trained: {name} is {found}, not of {tuple(tensor.shape)}.")
    try:
        with _quiet():
            state_dict_loader.load(tensors, checkpoint_id=directory, no_dist=is_alone)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise RunError(f"{directory}: cannot be read ({cause}). {_NOT_COMPLETE}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warning about a single process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def shell_of(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Return a model like `model` without weights and without the layers of an adapter."""
    with torch.device("meta"):
        shell = type(model)(model.config)
    shell.generation_config = model.generation_config
    return shell


def write_model(
    directory: Path, shell: transformers.PreTrainedModel, tensors: Mapping[str, Tensor], extra: Mapping[str, bytes]
) -> None:
    """Write a model like `shell` with the weights `tensors` and the files of `extra`, in the format of `transformers`."""
    with writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
        shell.save_pretrained(directory, state_dict=dict(tensors))
        for name, content in extra.items():
            (directory / name).write_bytes(content)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's part of a checkpoint. All ranks write their parts, in any thread. Use `world` for nothing else meanwhile."""

    write_weights: Callable[[Path], None]  # the model or the adapter, below a directory; the first rank calls it
    state: dict[str, Tensor]
    counters: Mapping[str, Any]
    world: World

    def write(self, directory: Path) -> None:
        """Write into the empty `directory`.

        Raises:
            RunError: the disk is full or the directory cannot be written; on all ranks.
        """
        try:
            self.world.together(lambda: None if self.world.rank else self.write_weights(directory))
            write_tensors(directory / "state", self.state, world=self.world)
            self.world.together(lambda: None if self.world.rank else write_json(directory / "trainer.json", self.counters))
        finally:
            end_team()


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in the memory of the host. Copies of divided tensors are divided in the same way."""
    whole = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items() if not is_divided(tensor)}
    divided = {name: tensor for name, tensor in tensors.items() if is_divided(tensor)}
    if divided:
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        whole |= BlockingAsyncStager(cache_staged_state_dict=False).stage(divided)
        if any(tensor.device.type == "cuda" for tensor in divided.values()):
            torch.cuda.synchronize()  # the copies are made behind the host's back
    return whole
