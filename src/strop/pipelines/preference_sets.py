"""Divides preferences into those that a stage learns from, batch by batch, and those that it is measured on."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from strop.errors import ConfigError, TaskError
from strop.pipelines.demonstrations import shuffled
from strop.pipelines.id_file import IdFile
from strop.pipelines.recipe import DpoStage, RewardModelStage
from strop.pipelines.stage import StageContext
from strop.pipelines.stage_config import check_schedule
from strop.seeds import derive_seed
from strop.training.preferences import Preference, read_preferences

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSets(Generic[ItemT]):
    """What a stage learns from and what it is measured on, on disk, and how many preferences were left out."""

    train: IdFile[ItemT]
    test: IdFile[ItemT]
    num_left_out: int


def open_sets(
    context: StageContext,
    stage: RewardModelStage | DpoStage,
    opened: AsyncExitStack,
    keep: Callable[[Path, Iterator[Preference]], IdFile[ItemT]],
    *,
    why_left_out: str,
    remedy: str,
) -> PreferenceSets[ItemT]:
    """The preferences of `path`, and of `test_path` or a share of the prompts of `path`, as `opened` files; with a warning
    where some are left out, or where prompts are in both files.

    Args:
        keep: writes those that can be learnt from into a directory.
        why_left_out: of the others, in words.
        remedy: what to do where none are left, in words.

    Raises:
        TaskError: the preferences cannot be read, or none are left to learn from or to be measured on.
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
                f"{num_learnt} of {len(other)} preferences in {stage.test_path} have prompts that are in {stage.path} too, so"
                " what is measured is partly what was learnt by heart. Take them out of one of them."
            )
    fit = [opened.enter_context(keep(context.directory.path, (lines[number] for number in numbers))) for lines, numbers in sets]
    num_found = sum(len(numbers) for _, numbers in sets)
    num_left_out = num_found - len(fit[0]) - len(fit[1])
    if num_left_out:
        context.warn(f"{num_left_out} of {num_found} preferences are left out: {why_left_out}")
    if not len(fit[0]) or not len(fit[1]):
        raise TaskError(
            f"stages.{context.name}: {len(fit[0])} preferences are left to learn from and {len(fit[1])} to be measured on;"
            f" there has to be one of each. {remedy}"
        )
    return PreferenceSets(train=fit[0], test=fit[1], num_left_out=num_left_out)


def split_by_prompt(prompts: Iterable[str], *, share: float, seed: int) -> tuple[array[int], array[int]]:
    """(train, test): the numbers of preferences with these `prompts`, no prompt in both; one at least is in the test set."""
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


def count_steps(context: StageContext, stage: RewardModelStage | DpoStage, num: int) -> int:
    """Updates of a stage that learns from `num` preferences. Raises `ConfigError` where its schedule has no use for so few."""
    steps = stage.epochs * -(-num // stage.batch_size)
    try:
        check_schedule(stage.trainer.optimizer, steps, key=f"stages.{context.name}.trainer.optimizer")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return steps


def batch_of_epoch(train: IdFile[ItemT], step: int, *, size: int, seed: int) -> list[ItemT]:
    """The batch of a step, a pure function of its arguments: each epoch in another order, its last batch the rest."""
    epoch, position = divmod(step, -(-len(train) // size))
    order = shuffled(len(train), derive_seed(seed, "epoch", epoch))
    return [train[index] for index in order[position * size : (position + 1) * size]]
