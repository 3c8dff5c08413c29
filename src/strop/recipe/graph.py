"""The stages of a recipe as a graph: what each makes, what each reads, and the order in which they run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeAlias

from strop.errors import did_you_mean


class Product(StrEnum):
    """What a stage makes for other stages."""

    MODEL = "a model"
    TASKS = "tasks"
    CONVERSATIONS = "conversations"
    REWARD_MODEL = "a reward model"
    EVALUATION = "an evaluation"
    SAME = "the kind of its input"  # of stages that take tasks or conversations


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A stage from which another one reads: the key that names it, and what it may make."""

    key: str
    stage: str
    wants: tuple[Product, ...]

    @classmethod
    def each(cls, key: str, stages: Iterable[str], *wants: Product) -> tuple[Self, ...]:
        """Return an input for each of `stages`."""
        return tuple(cls(key=key, stage=stage, wants=wants) for stage in stages)


Inputs: TypeAlias = Mapping[str, Sequence[Input]]
"""What each stage reads, by the stage's name."""


def in_order(makes: Mapping[str, Product], inputs: Inputs) -> list[str]:
    """Return the stages such that each comes after its inputs, and otherwise as they are written.

    Raises:
        ValueError: an input does not exist or makes something else, or stages depend on each other in a circle.
    """
    if problems := [problem for name in inputs for problem in _unknown(name, inputs)]:
        raise ValueError(" ".join(problems))
    order: list[str] = []
    waiting = list(inputs)
    while waiting:
        ready = next((name for name in waiting if all(each.stage in order for each in inputs[name])), None)
        if ready is None:
            raise ValueError(f"{_circle(waiting, inputs)}. Let one of them start from another stage.")
        order.append(ready)
        waiting.remove(ready)
    if problems := _of_wrong_kind(order, makes, inputs):
        raise ValueError(" ".join(problems))
    return order


def with_dependents(names: Iterable[str], parents: Mapping[str, Collection[str]]) -> set[str]:
    """Return `names` and every stage that depends on one of them, directly or not. `parents` is in running order."""
    found = set(names)
    for name, above in parents.items():
        if found & set(above):
            found.add(name)
    return found


def _unknown(name: str, inputs: Inputs) -> list[str]:
    problems = []
    for each in inputs[name]:
        if each.stage not in inputs:
            others = [other for other in inputs if other != name]
            hint = did_you_mean(each.stage, others) or f" The other stages: {', '.join(others) or 'none'}."
            problems.append(f"stages.{name}.{each.key} names {each.stage!r}, which is no stage of the recipe.{hint}")
    return problems


def _of_wrong_kind(order: Sequence[str], declared: Mapping[str, Product], inputs: Inputs) -> list[str]:
    makes: dict[str, Product] = {}
    problems = []
    for name in order:
        makes[name] = makes[inputs[name][0].stage] if declared[name] is Product.SAME else declared[name]
    for name in order:
        wrong = [each for each in inputs[name] if makes[each.stage] not in each.wants]
        for each in wrong:
            fitting = [other for other in order if other != name and makes[other] in each.wants]
            problems.append(
                f"stages.{name}.{each.key} names {each.stage!r}, which makes {makes[each.stage]}, but needs"
                f" {' or '.join(each.wants)}. Stages that make this: {', '.join(fitting) or 'none'}."
            )
        kinds = {makes[each.stage] for each in inputs[name] if each.key == "data"}
        if not wrong and len(kinds) > 1:
            problems.append(f"stages.{name}.data names stages that make {' and '.join(sorted(kinds))}. Name only one kind.")
    return problems


def _circle(waiting: Sequence[str], inputs: Inputs) -> str:
    """Return the first circle among stages of which each waits for another."""
    path = [waiting[0]]
    while True:
        following = next(each.stage for each in inputs[path[-1]] if each.stage in waiting)
        if following in path:
            circle = [*path[path.index(following) :], following]
            return "stages depend on each other in a circle: " + " -> ".join(circle)
        path.append(following)
