"""The generated page of recipe keys has every key with a meaning, and the tables of docs/recipes.md are true."""

import re
import tomllib
from pathlib import Path

import pytest
from generate import default_of, generated, meaning_of, models_in, own_fields, reachable, title_of
from pydantic import BaseModel

from strop.algorithms.method import Method
from strop.config import Config, validate
from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
KEYS = generated()["recipe-keys.md"]
MODELS = list(reachable(Recipe, set()))
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| ((?:`[^`]*`|\w+(?: \w+)?)) \| (.*) \|$", re.MULTILINE)


def sections() -> dict[str, dict[str, str]]:
    """Return the defaults by config class and key, as the page shows them."""
    _, *parts = re.split(r"^## `([\w.]+)` \{#[\w-]+\}$", KEYS, flags=re.MULTILINE)
    return {name: {row[0]: row[2] for row in ROW.findall(text)} for name, text in zip(parts[::2], parts[1::2], strict=True)}


SECTIONS = sections()


@pytest.mark.parametrize("model", MODELS, ids=title_of)
def test_every_key_has_a_row_with_its_default(model: type[BaseModel]) -> None:
    shown = {name: default_of(field).replace("|", "\\|") for name, field in own_fields(model).items()}
    assert SECTIONS[title_of(model)] == shown


@pytest.mark.parametrize("model", MODELS, ids=title_of)
def test_every_key_has_a_meaning(model: type[BaseModel]) -> None:
    assert [name for name, field in own_fields(model).items() if not meaning_of(name, field)] == []


def test_the_page_has_links_to_tables_that_it_has() -> None:
    assert len(SECTIONS) == len(MODELS) > 50
    assert set(re.findall(r"\]\(#([\w-]+)\)", KEYS)) <= {name.lower().replace(".", "-") for name in SECTIONS}


def test_models_are_found_at_any_depth_of_a_type() -> None:
    assert models_in(dict[str, tuple[Recipe | None, ...]]) == [Recipe]


class OneMethod(Config):
    method: Method


NAMED_METHODS = re.findall(r"^\| .+ \| `((?:advantage|loss|ratio|clip_high) = .+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("settings", NAMED_METHODS)
def test_the_settings_of_a_named_method_are_a_method(settings: str) -> None:
    tree = tomllib.loads(f'method = {{ kind = "grpo", {settings} }}')
    dumped = validate(OneMethod, tree, place="the page").method.table()
    assert {name: dumped[name] for name in tree["method"]} == tree["method"]


def test_the_page_names_methods() -> None:
    assert len(NAMED_METHODS) == 12


def test_the_example_is_a_recipe(tmp_path: Path) -> None:
    [example, *_] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "example.toml").write_text(example)
    assert list(load_recipe(tmp_path / "example.toml").stages) == ["base", "rl", "after"]
