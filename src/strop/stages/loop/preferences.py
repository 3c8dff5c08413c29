"""Preferences of a stage: its keys, those that it learns from, batch by batch, and those that it is measured on."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import Field

from strop.errors import ConfigError, TaskError
from strop.stages.context import StageContext
from strop.stages.loop.checkpoints import CheckpointedKeys
from strop.stages.loop.training_stage import check_schedule
from strop.tasks.files import RowFile
from strop.training.preferences import Preference, read_preferences

ItemT = TypeVar("ItemT")


class PreferenceKeys(CheckpointedKeys):
    """Keys of a stage that learns from preferences."""

    path: str = Field(description="A .jsonl of preferences: pairs, or single labelled responses.")
    test_path: str | None = Field(default=None, description="File to measure on. Default: a share of `path`.")
    test_share: float = Field(default=0.1, gt=0, lt=1, description="Share of the prompts of `path` to measure on.")
    max_length: int = Field(default=8192, ge=2, description="Tokens of prompt and response; longer ones are left out.")
    epochs: int = Field(default=1, ge=1, description="Passes over the preferences.")
    batch_size: int = Field(default=64, ge=1, description="Preferences of one update.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSets(Generic[ItemT]):
    """What a stage learns from and what it is measured on, on disk, and how many preferences were left out."""

    train: RowFile[ItemT]
    test: RowFile[ItemT]
    num_left_out: int


def open_sets(
    context: StageContext,
    stage: PreferenceKeys,
    opened: AsyncExitStack,
    keep: Callable[[Path, Iterator[Preference]], RowFile[ItemT]],
    *,
    why_left_out: str,
    remedy: str,
) -> PreferenceSets[ItemT]:
    """Return the preferences of `path`, and those of `test_path` or of a share of the prompts of `path`, as `opened` files.

    A warning says how many are left out, and how many prompts are in both files.

    Args:
        keep: writes preferences that can be used into a directory.
        why_left_out: why others cannot, in words.
        remedy: what to do if none are left, in words.

    Raises:
        TaskError: the preferences cannot be read, or none are left to learn from or to measure on.
    """
    found = read_preferences(Path(stage.path))
    if stage.test_path is None:
        prompts = (each.prompt for each in found)
        train, test = split_by_prompt(prompts, share=stage.test_share, seed=context.seed("test"))
        sets = [(found, train), (found, test)]
    else:
        other = read_preferences(Path(stage.test_path))
        if type(found[0]) is not type(other[0]):
            raise TaskError(f"{stage.test_path}: not of the form of {stage.path}: one has pairs, the other single responses.")
        sets = [(each, array("Q", range(len(each)))) for each in (found, other)]
        learnt = {_digest(each.prompt) for each in found}
        if num_learnt := sum(_digest(each.prompt) in learnt for each in other):
            context.warn(
                f"{num_learnt} of {len(other)} preferences in {stage.test_path} have prompts that are in {stage.path} too."
                " Remove them from one of the files."
            )
    fit = [opened.enter_context(keep(context.directory.path, (lines[number] for number in numbers))) for lines, numbers in sets]
    num_found = sum(len(numbers) for _, numbers in sets)
    num_left_out = num_found - len(fit[0]) - len(fit[1])
    if num_left_out:
        context.warn(f"{num_left_out} of {num_found} preferences are left out: {why_left_out}")
    if not len(fit[0]) or not len(fit[1]):
        raise TaskError(
            f"stages.{context.name}: {len(fit[0])} preferences are left to learn from and {len(fit[1])} to measure on. {remedy}"
        )
    return PreferenceSets(train=fit[0], test=fit[1], num_left_out=num_left_out)


def split_by_prompt(prompts: Iterable[str], *, share: float, seed: int) -> tuple[array[int], array[int]]:
    """Return (train, test): numbers of preferences with these `prompts`. No prompt is in both, and neither is empty."""
    places: dict[bytes, int] = {}  # by a digest of each prompt, since prompts may be long: its place among them
    of_row = array("Q")
    for prompt in prompts:
        of_row.append(places.setdefault(_digest(prompt), len(places)))
    order = array("Q", range(len(places)))
    random.Random(seed).shuffle(order)
    held_out = set(order[: max(1, round(share * len(order)))])
    return (
        array("Q", (number for number, place in enumerate(of_row) if place not in held_out)),
        array("Q", (number for number, place in enumerate(of_row) if place in held_out)),
    )


def _digest(prompt: str) -> bytes:
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def count_steps(context: StageContext, stage: PreferenceKeys, num: int) -> int:
    """Return the updates of a stage that learns from `num` preferences. Raises `ConfigError` if its schedule needs more."""
    steps = stage.epochs * -(-num // stage.batch_size)
    try:
        check_schedule(stage.trainer.optimizer, steps, key=f"stages.{context.name}.trainer.optimizer")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return steps
