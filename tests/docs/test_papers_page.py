"""docs/papers.md: every row has a file and a test, and what it says of recipes is so."""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from generate import reachable
from pydantic_core import to_jsonable_python

from strop.algorithms.method import Method
from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
SHIPPED = sorted([*(ROOT / "recipes").rglob("*.toml"), *(ROOT / "experiments").rglob("*.toml")])
MODELS = list(reachable(Recipe, set()))
METHODS = set(Method.kinds)
NOBODY, NO_SETTING = "-", "no setting"
ANY = None  # of a key that a row names without a value: whatever is not its default

Row = dict[str, str]
Setting = tuple[str, str | None]  # last part of a recipe's key; its value as JSON, or ANY


def rows(column: str) -> list[Row]:
    """Of the tables that have the column; cells by the column's name."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        found += [dict(zip(header, cells, strict=True)) for cells in body if column in header]
    return found


def as_json(value: Any) -> str:
    return json.dumps(to_jsonable_python(value, fallback=lambda component: component.table()), sort_keys=True)


@cache
def defaults() -> Mapping[str, set[str]]:
    """By key of a recipe, what it is where nobody sets it, in whichever of the tables that have it."""
    found: dict[str, set[str]] = defaultdict(set)
    for model in MODELS:
        for name, field in model.model_fields.items():
            found[name] |= set() if field.is_required() or field.default_factory else {as_json(field.default)}
    return found


def leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key with its value, at any depth, tables and lists too; of a dotted key the last part."""
    for key, value in tree.items():
        yield key.rpartition(".")[2], as_json(value)
        for below in value if isinstance(value, list) else [value]:
            if isinstance(below, dict):
                yield from leaves(below)


@cache
def held(path: Path) -> Mapping[str, set[str]]:
    """The values of each key: of a recipe with all defaults, of a sweep those of its recipe and of every arm."""
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    found: dict[str, set[str]] = defaultdict(set)
    if "recipe" in tree:
        points = [{key: value} for key, values in tree.get("grid", {}).items() for value in values]
        parts = [tree.get("set", {}), *tree.get("arms", {}).values(), *points]
        for key, values in held((path.parent / tree["recipe"]).resolve()).items():
            found[key] |= values
    else:
        parts = [load_recipe(path).model_dump(mode="json") if "stages" in tree else tree]
    for part in parts:
        for key, value in leaves(part):
            found[key].add(value)
    return found


def uses(path: Path, setting: Setting) -> bool:
    key, value = setting
    values = held(path).get(key, set())
    return value in values if value is not ANY else bool(values - defaults()[key])


def settings_of(row: Row) -> list[Setting]:
    """What a recipe would say to have what the row is about: named in the row, or the method or prompt that its file is."""
    named: list[Setting] = []
    for token in re.findall(r"`([^`]+)`", row["what"]):
        key, is_set, value = token.partition(" = ")
        key = key.rpartition(".")[2]
        if token.startswith('"'):  # another value of the key before
            named.append((named[-1][0], as_json(tomllib.loads(f"value = {token}")["value"])))
        elif is_set:
            assert key in defaults(), f"{token!r}: recipes have no such key"
            named.append((key, as_json(tomllib.loads(f"value = {value}")["value"])))
        elif key in defaults():
            named.append((key, ANY))
    if not named:
        named += [("prompt", as_json(name)) for name in re.findall(r"`src/strop/rollout/prompts/(\w+)\.toml`", row["file"])]
        methods = re.findall(r"`src/strop/algorithms/(\w+)\.py`", row["file"])
        named += [("kind", as_json(name)) for name in methods if name in METHODS]
    return named


def problem(row: Row) -> str:
    """What is not so of the row's last column; empty where it is true."""
    settings = settings_of(row)
    if row["recipe"] == NO_SETTING:
        return f"recipes have {settings}" if settings else ""
    if row["recipe"] == NOBODY:
        users = [path.relative_to(ROOT).as_posix() for path in SHIPPED if any(uses(path, setting) for setting in settings)]
        return f"used by {', '.join(users)}" if users else "" if settings else "it names no setting that nobody has"
    if not re.fullmatch(r"`[^`]+`(, `[^`]+`)*", row["recipe"]):
        return f"{row['recipe']!r} is no list of recipes"
    for name in re.findall(r"`([^`]+)`", row["recipe"]):
        if (path := ROOT / name) not in SHIPPED:
            return f"there is no {name}"
        if settings and not any(uses(path, setting) for setting in settings):
            return f"{name} has none of {settings}"
    return ""


WITH_RECIPE = rows("recipe")


@pytest.mark.parametrize("row", WITH_RECIPE, ids=lambda row: row["what"][:60])
def test_a_recipe_has_what_its_row_names_and_where_none_is_named_none_has(row: Row) -> None:
    assert problem(row) == ""


def test_no_row_that_a_recipe_uses_could_say_that_none_does() -> None:
    used = [row for row in WITH_RECIPE if row["recipe"] not in (NOBODY, NO_SETTING) and settings_of(row)]
    assert len(used) > 40
    assert [row["what"] for row in used if not problem({**row, "recipe": NOBODY})] == []
    assert [row["what"] for row in used if not problem({**row, "recipe": NO_SETTING})] == []


@pytest.mark.parametrize(
    ("what", "recipe", "said"),
    [
        ("Dual clip (`dual_clip`)", "-", "used by recipes/presets/arpo-deepsearch-14b-released.toml"),
        ("Dual clip (`dual_clip`)", "`recipes/demo.toml`", "recipes/demo.toml has none of"),
        ("Dual clip", "-", "it names no setting"),
        ("Overlong filtering (`overlong_filter = true`)", "-", "used by experiments/faithful/overlong.toml"),
        ("Hard credit", "`recipes/none.toml`", "there is no recipes/none.toml"),
        ("Hard credit", "", "'' is no list of recipes"),
    ],
)
def test_a_wrong_cell_is_told_by_what_is_wrong_with_it(what: str, recipe: str, said: str) -> None:
    assert problem({"what": what, "file": "`src/strop/algorithms/losses.py`", "recipe": recipe}).startswith(said)


def test_the_top_leads_to_where_strop_and_the_field_differ() -> None:
    heading = "Where strop follows a paper and common implementations do not"
    assert f"\n## {heading}\n" in (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    assert f"(presets.md#{heading.lower().replace(' ', '-')})" in PAGE.partition("\n## ")[0]


def test_every_row_has_a_file_and_a_test() -> None:
    found = rows("file")
    assert len(found) > 100
    for row in found:
        assert "`src/strop/" in row["file"], row
        assert ".py::" in row["test"], row


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+/test_\w+\.py)::(\w+)`", PAGE)
    assert len(named) == PAGE.count(".py::") > 100
    for path, name in named:
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), f"{path}::{name}"


def test_every_claim_that_was_run_leads_to_its_experiment_its_results_and_a_test() -> None:
    found = rows("experiment")
    sweeps = (ROOT / "experiments" / "faithful").glob("*.toml")
    results = ROOT / "experiments" / "results"
    run = {f"experiments/faithful/{path.name}" for path in sweeps if (results / f"faithful-{path.stem}.json").exists()}
    assert len(run) > 5
    assert run <= {row["experiment"].strip("`") for row in found}
    for row in found:
        assert ROOT / row["experiment"].strip("`") in SHIPPED, row
        assert (ROOT / row["results"].strip("`")).suffix == ".txt", row
        assert (ROOT / row["results"].strip("`")).exists(), row
        assert ".py::" in row["test"], row
