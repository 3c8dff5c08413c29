"""docs/recipes.md lists every key of every table of a recipe, with its default, and no other."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from strop.algorithms import MethodConfig
from strop.config import Config, validate
from strop.pipelines.recipe import Recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
HEADING = re.compile(r"^##+ .*`(\w+)`$", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| ", re.MULTILINE)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def reachable(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """`model`, its bases and everything that its fields lead to; each once."""
    for each in model.__mro__:
        if issubclass(each, Config) and each is not Config and each not in seen:
            seen.add(each)
            yield each
            for field in each.model_fields.values():
                for child in models_in(field.annotation):
                    yield from reachable(child, seen)


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "computed"
    if isinstance(field.default, BaseModel):
        return "table"
    return "not set" if field.default is None else f"`{json.dumps(to_jsonable_python(field.default))}`"


def sections() -> dict[str, dict[str, str]]:
    """By config class: its keys, and their defaults as the page gives them."""
    _, *parts = HEADING.split(PAGE.read_text(encoding="utf-8"))
    return {name: dict(ROW.findall(text)) for name, text in zip(parts[::2], parts[1::2], strict=True)}


MODELS = list(reachable(Recipe, set()))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_key_is_listed_with_its_default(model: type[BaseModel]) -> None:
    own = {name: default_of(model.model_fields[name]) for name in model.__annotations__ if name in model.model_fields}
    assert sections().get(model.__name__) == own


def test_no_other_table_is_described() -> None:
    assert set(sections()) == {model.__name__ for model in MODELS}


class OneMethod(Config):
    method: MethodConfig


NAMED_METHODS = re.findall(r"^\| .+ \| `((?:advantage|loss|ratio) = .+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("settings", NAMED_METHODS)
def test_the_settings_of_a_named_method_are_a_method(settings: str) -> None:
    tree = tomllib.loads(f'method = {{ name = "grpo", {settings} }}')
    dumped = validate(OneMethod, tree, place="the page").method.model_dump(mode="json")
    assert {name: dumped[name] for name in tree["method"]} == tree["method"]


def test_the_page_names_methods() -> None:
    assert len(NAMED_METHODS) == 8
