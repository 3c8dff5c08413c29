"""A key that is added to recipes must not make stages stale that were begun before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from strop.config import Config
from strop.pipelines.recipe import Recipe
from strop.runs import FORMAT_VERSION

_KEYS = Path(__file__).with_name("keys_of_format_1.txt")


def _models(annotation: Any) -> set[type[Config]]:
    """The models that a value so annotated may be, with those inside them."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return {annotation}.union(*(_models(field.annotation) for field in annotation.model_fields.values()))
    return set().union(*(_models(each) for each in get_args(annotation)))


def test_a_key_that_older_runs_do_not_have_is_left_out_at_its_default():
    """Name it in `newer` of its model. With another run directory format, the file has the keys of all models anew."""
    assert FORMAT_VERSION == 1
    known = set(_KEYS.read_text().split())
    models = _models(Recipe)
    there = {name.partition(".")[0] for name in known}
    of_older = [model for model in models if model.__name__ in there]
    assert len(of_older) > 80
    unnamed = {
        f"{model.__name__}.{key}"
        for model in of_older
        for key in model.model_fields
        if f"{model.__name__}.{key}" not in known and key not in model.newer_keys()
    }
    assert unnamed == set()


def test_what_is_newer_is_a_key_with_a_default():
    newer = {(model, key) for model in _models(Recipe) for key in model.newer_keys()}
    assert len(newer) > 3
    assert [(model.__name__, key) for model, key in newer if model.model_fields[key].is_required()] == []
