"""What a trainer writes into a checkpoint and reads from it: a model directory, tensors of any layout, counters."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from strop.errors import ModelError, RunError
from strop.runs import writing_to
from strop.training.gradients import zeros_together
from strop.training.models import load_model
from strop.training.paged import PagedAdamW
from strop.training.world import World

_NOT_COMPLETE = "The checkpoint is not complete; use the one before it."


def moments(optimizer: torch.optim.AdamW, named: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """What the optimizer remembers of each parameter, itself, by the model's names; {} before its first step."""
    return {
        f"{kind}.{name}": value
        for name, parameter in named.items()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def prepare_moments(optimizer: torch.optim.AdamW, named: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """`moments`, made for an optimizer that has none yet, to be read into."""
    parameters = list(named.values())
    first, second = (_zeros(optimizer, parameters) for _ in range(2))
    for parameter, exp_avg, exp_avg_sq in zip(parameters, first, second, strict=True):
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
        }
    return moments(optimizer, named)


def _zeros(optimizer: torch.optim.AdamW, like: list[torch.nn.Parameter]) -> list[Tensor]:
    if isinstance(optimizer, PagedAdamW):
        return optimizer.zeros(like)
    if isinstance(like[0], DTensor):
        return [torch.zeros_like(each, requires_grad=False) for each in like]
    return zeros_together(like)


def write_tensors(directory: Path, tensors: dict[str, Tensor], *, world: World) -> None:
    """Write `tensors` so that any number of ranks can read them; all of `world` call this, each with its parts."""
    with writing_to(directory), _quiet():
        cause: BaseException | None = None
        try:
            state_dict_saver.save(tensors, checkpoint_id=directory, no_dist=world.size == 1, process_group=world.process_group)
        except CheckpointException as error:  # no Exception, so it would pass by everything that cleans up
            cause, _ = next(iter(error.failures.values()))
        if cause is not None:
            raise cause  # out here, where it keeps what it arose from: of a full disk torch itself says something else


def read_tensors(directory: Path, tensors: dict[str, Tensor], *, is_alone: bool) -> None:
    """Read what `write_tensors` wrote into `tensors`, in place, whatever ranks they lie on now.

    Raises:
        RunError: a file is missing or cut.
        ModelError: some of them are not there, or have other shapes.
    """
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
    """A process alone is what is meant, and no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def shell_of(model: PreTrainedModel) -> PreTrainedModel:
    """A model like `model` without weights, and without what an adapter has changed of its layers."""
    with torch.device("meta"):
        shell = type(model)(model.config)
    shell.generation_config = model.generation_config
    return shell


def write_model(directory: Path, shell: PreTrainedModel, tensors: Mapping[str, Tensor], extra: Mapping[str, bytes]) -> None:
    """Write a directory that `transformers` loads: a model like `shell`, with `tensors`, and the files of `extra`."""
    with writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
        shell.save_pretrained(directory, state_dict=dict(tensors))
        for name, content in extra.items():
            (directory / name).write_bytes(content)


def read_model(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The float32 weights of the model in `directory`, which are of these names and shapes.

    Raises:
        ModelError: there is no model, or another one.
    """
    found = {name: parameter.data for name, parameter in load_model(directory).named_parameters()}
    if {name: tuple(tensor.shape) for name, tensor in found.items()} != dict(shapes):
        raise ModelError(f"{directory}: not the model that is being trained: its tensors have other names or shapes.")
    return found
