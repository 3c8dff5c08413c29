"""Shipped recipes with wrong values in random places: `--dry-run` accepts them, or says where the mistake is."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fuzzing import JUNK, fuzz, survives
from hypothesis import strategies as st

from strop.pipeline import plan as planning
from strop.pipeline.sweep_file import toml_value
from strop.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {
    path: tree for path in sorted(ROOT.glob("recipes/**/*.toml")) if "stages" in (tree := tomllib.loads(path.read_text()))
}
Place = tuple[str | int, ...]


def places(tree: Any, path: Place = ()) -> list[Place]:
    """Every key and item of `tree`, nested ones included."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in ((*path, key), *places(value, (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    tree = copy.deepcopy(RECIPES[draw(st.sampled_from(list(RECIPES)))])
    for _ in range(draw(st.integers(1, 3))):
        known = places(tree)
        if not known:
            break
        *parents, last = draw(st.sampled_from(known))
        node = tree
        for key in parents:
            node = node[key]
        match draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"])):
            case "replace":
                node[last] = draw(JUNK)
            case "remove":
                del node[last]
            case "add" if isinstance(node, dict):
                node[
                    draw(
                        st.sampled_from(["kind", "seed", "steps", "no_such_key", *sorted({str(place[-1]) for place in known})])
                    )
                ] = draw(JUNK)
    return tree


def check(tree: dict[str, Any], directory: Path) -> None:
    path = directory / "recipe.toml"
    path.write_text("\n".join(f"{toml_value(key)} = {toml_value(value)}" for key, value in tree.items()), encoding="utf-8")
    stages = tree.get("stages")
    names = {f"stages.{name}" for name in stages} if isinstance(stages, dict) else set()
    survives(lambda: planning.plan(load_recipe(path)), places={str(path), "stages", *names, *tree})


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(planning, "_matmul_flops", lambda: 1e9)
    return tmp_path


def test_a_mutated_recipe_is_planned_or_its_mistake_has_a_place(directory: Path) -> None:
    fuzz(mutated(), lambda tree: check(tree, directory))


HUGE, LARGEST = 10**40, 1e308


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("seed", HUGE),
        ("threads", HUGE),
        ("reward.verify_deadline_s", 601),
        ("reward.weights.accuracy", -1.0),
        ("stages.rl.trainer.optimizer.betas", [LARGEST, 0.9]),
        ("stages.rl.method", {"kind": "grpo_roc", "oversample": LARGEST}),
        ("stages.rl.method", {"kind": "grpo", "kl_coefficient": LARGEST}),
        ("stages.sft.steps", HUGE),
        ("stages.sft.batch_size", HUGE),
        ("stages.rl.steps", HUGE),
        ("stages.rl.group_size", HUGE),
        ("stages.rl.tasks_per_step", HUGE),
        ("stages.rl.trainer.optimizer.lr", LARGEST),
        ("stages.sft.trainer.optimizer.lr", LARGEST),
        ("stages.base.tiny.hidden_size", HUGE),
        ("stages.base.tiny.vocab_size", HUGE),
        ("engine.max_length", HUGE),
        ("engine.slots", HUGE),
        ("sandbox.max_running", HUGE),
        ("limits.max_turns", HUGE),
        ("sampling.max_tokens", HUGE),
        ("sampling.temperature", LARGEST),
    ],
)
def test_a_number_that_nothing_can_hold_is_refused(key: str, value: Any, directory: Path) -> None:
    tree = copy.deepcopy(RECIPES[ROOT / "recipes/demo.toml"])
    node = tree
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(node.get(parent), dict):
            node[parent] = {"kind": node[parent]} if parent in node else {}
        node = node[parent]
    node[last] = value
    path = directory / "recipe.toml"
    path.write_text("\n".join(f"{toml_value(each)} = {toml_value(table)}" for each, table in tree.items()), encoding="utf-8")
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the class is checked below, for a clear message
        planning.plan(load_recipe(path))
    assert type(caught.value).__name__ == "ConfigError", repr(caught.value)
    assert key.split(".")[-1] in str(caught.value)
