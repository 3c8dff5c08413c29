"""The stages of a recipe as a graph: what each makes, what each reads, and the order in which they run."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A stage in the graph."""

    makes: Product
    inputs: tuple[Input, ...]


def in_order(nodes: Mapping[str, Node]) -> list[str]:
    """Return the names of `nodes` such that each comes after its inputs, and otherwise as they are written.

    Raises:
        ValueError: an input does not exist or makes something else, or stages depend on each other in a circle.
    """
    if problems := [problem for name, node in nodes.items() for problem in _unknown(name, node, nodes)]:
        raise ValueError(" ".join(problems))
    order: list[str] = []
    waiting = list(nodes)
    while waiting:
        ready = next((name for name in waiting if all(each.stage in order for each in nodes[name].inputs)), None)
        if ready is None:
            raise ValueError(f"{_circle(waiting, nodes)}. Let one of them start from another stage.")
        order.append(ready)
        waiting.remove(ready)
    if problems := _of_wrong_kind(order, nodes):
        raise ValueError(" ".join(problems))
    return order


def with_dependents(names: Iterable[str], parents: Mapping[str, Collection[str]]) -> set[str]:
    """Return `names` and every stage that depends on one of them, directly or not. `parents` is in running order."""
    found = set(names)
    for name, above in parents.items():
        if found & set(above):
            found.add(name)
    return found


def _unknown(name: str, node: Node, nodes: Mapping[str, Node]) -> list[str]:
    problems = []
    for each in node.inputs:
        if each.stage not in nodes:
            others = [other for other in nodes if other != name]
            nearest = difflib.get_close_matches(each.stage, others, n=1)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else f"The other stages: {', '.join(others) or 'none'}."
            problems.append(f"stages.{name}.{each.key} names {each.stage!r}, which is no stage of the recipe. {hint}")
    return problems


def _of_wrong_kind(order: Sequence[str], nodes: Mapping[str, Node]) -> list[str]:
    makes: dict[str, Product] = {}
    for name in order:
        node = nodes[name]
        makes[name] = makes[node.inputs[0].stage] if node.makes is Product.SAME else node.makes
    problems = []
    for name in order:
        inputs = nodes[name].inputs
        wrong = [each for each in inputs if makes[each.stage] not in each.wants]
        for each in wrong:
            fitting = [other for other in order if other != name and makes[other] in each.wants]
            problems.append(
                f"stages.{name}.{each.key} names {each.stage!r}, which makes {makes[each.stage]}, but needs"
                f" {' or '.join(each.wants)}. Stages that make this: {', '.join(fitting) or 'none'}."
            )
        kinds = {makes[each.stage] for each in inputs if each.key == "data"}
        if not wrong and len(kinds) > 1:
            problems.append(f"stages.{name}.data names stages that make {' and '.join(sorted(kinds))}. Name only one kind.")
    return problems


def _circle(waiting: Sequence[str], nodes: Mapping[str, Node]) -> str:
    """Return the first circle among stages of which each waits for another."""
    path = [waiting[0]]
    while True:
        following = next(each.stage for each in nodes[path[-1]].inputs if each.stage in waiting)
        if following in path:
            circle = [*path[path.index(following) :], following]
            return "stages depend on each other in a circle: " + " -> ".join(circle)
        path.append(following)
