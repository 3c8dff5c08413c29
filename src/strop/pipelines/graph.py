"""The stages of a recipe as a graph: what each makes, what each stands on, and the order in which they can run."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Product(StrEnum):
    """What a stage hands on."""

    MODEL = "a model"
    TASKS = "tasks"
    CONVERSATIONS = "conversations"
    REWARD_MODEL = "a reward model"
    EVALUATION = "an evaluation"
    SAME = "what it is given"  # of data stages that take tasks or conversations


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One stage that another stands on: by which key, and what it has to make."""

    key: str
    stage: str
    wants: tuple[Product, ...]

    @classmethod
    def each(cls, key: str, stages: Iterable[str], *wants: Product) -> tuple[Self, ...]:
        return tuple(cls(key=key, stage=stage, wants=wants) for stage in stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A stage as the graph sees it."""

    makes: Product
    inputs: tuple[Input, ...]


def in_order(nodes: Mapping[str, Node]) -> list[str]:
    """The names of `nodes`, each behind those that it stands on, and otherwise as they come.

    Raises:
        ValueError: a stage stands on one that is not there or that makes something else, or stages stand on each other
            in a circle; one message for all of the first sort.
    """
    problems = [problem for name, node in nodes.items() for problem in _unknown(name, node, nodes)]
    if problems:
        raise ValueError(" ".join(problems))
    order: list[str] = []
    waiting = list(nodes)
    while waiting:
        ready = next((name for name in waiting if all(each.stage in order for each in nodes[name].inputs)), None)
        if ready is None:
            raise ValueError(f"{_circle(waiting, nodes)}. One of them has to start from something else.")
        order.append(ready)
        waiting.remove(ready)
    if problems := _of_wrong_kind(order, nodes):
        raise ValueError(" ".join(problems))
    return order


def made_by(nodes: Mapping[str, Node], order: Sequence[str]) -> dict[str, Product]:
    """What each stage makes; of one that hands on the kind that it is given, that kind."""
    makes: dict[str, Product] = {}
    for name in order:
        node = nodes[name]
        makes[name] = makes[node.inputs[0].stage] if node.makes is Product.SAME else node.makes
    return makes


def standing_on(names: Collection[str], nodes: Mapping[str, Node]) -> set[str]:
    """`names`, and every stage that stands on one of them, however far."""
    found = set(names)
    while more := {name for name, node in nodes.items() if name not in found and any(i.stage in found for i in node.inputs)}:
        found |= more
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
    makes = made_by(nodes, order)
    problems = []
    for name in order:
        inputs = nodes[name].inputs
        wrong = [each for each in inputs if makes[each.stage] not in each.wants]
        for each in wrong:
            wanted = " or ".join(each.wants)
            fitting = [other for other in order if other != name and makes[other] in each.wants]
            problems.append(
                f"stages.{name}.{each.key} names {each.stage!r}, which makes {makes[each.stage]}; {wanted} would fit."
                f" Stages that make such: {', '.join(fitting) or 'none'}."
            )
        kinds = {makes[each.stage] for each in inputs if each.key == "data"}
        if not wrong and len(kinds) > 1:
            problems.append(f"stages.{name}.data names stages that make {' and '.join(sorted(kinds))}: give it one kind alone.")
    return problems


def _circle(waiting: Sequence[str], nodes: Mapping[str, Node]) -> str:
    """The first circle among stages each of which waits for another of them."""
    path = [waiting[0]]
    while True:
        following = next(each.stage for each in nodes[path[-1]].inputs if each.stage in waiting)
        if following in path:
            circle = [*path[path.index(following) :], following]
            return "stages stand on each other in a circle: " + " -> ".join(circle)
        path.append(following)
