"""The sweep file: one recipe and the arms that change it. Every arm is checked as a recipe before anything runs."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from strop.config import Config, load_toml, next_to, validate
from strop.errors import ConfigError
from strop.recipe.load import check_stages, load_recipe
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Product

_OWN_KEYS = {"seed": "seeds = [0, 1]", "name": 'name = "..." at the top of the sweep file'}

Overrides = Mapping[str, Any]
"""Keys of a recipe as `--set` takes them, with their values."""

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Values = Annotated[tuple[str | bool | int | float, ...], Field(min_length=1)]


class SweepFile(Config):
    """The keys of a sweep file. Keys of the recipe are written in quotes, as in "stages.rl.steps"."""

    name: Name = Field(description="Name of the sweep's directory. Default: the name of the file.")
    description: str = Field("", description="Text at the top of the comparison page.")
    recipe: str = Field(description="Path of the recipe, relative to the sweep file or to the working directory.")
    seeds: tuple[Seed, ...] = Field((0,), min_length=1, description="Each arm runs once with each seed.")
    set: dict[str, Any] = Field(default={}, description="Changes of the recipe for every arm.")
    grid: dict[str, Values] = Field(default={}, description="Values to try: one arm for each combination.")
    arms: dict[Name, dict[str, Any]] = Field(
        default={}, description="Changes by the name of the arm. With a grid, each arm runs at each of its points."
    )
    result: str | None = Field(
        None, description="`evaluation.metric` to compare arms by. Default: accuracy of the last evaluation with real tools."
    )
    stage: str | None = Field(None, description="Stage whose curves are drawn. Default: the last stage that trains.")
    curves: tuple[str, ...] = Field((), description="Metrics to draw. Default: a selection of those that were logged.")

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        arms = {f"arms.{name}": keys for name, keys in self.arms.items()}
        for place, keys in {"set": self.set, "grid": self.grid, **arms}.items():
            if wrong := [key for key in keys if key in _OWN_KEYS]:
                raise ValueError(f"{place}.{wrong[0]}: the sweep sets this key. Write {_OWN_KEYS[wrong[0]]}.")
            if place in arms and (both := [key for key in keys if key in self.grid]):
                raise ValueError(f"{place} sets {both[0]}, which the grid varies. Remove it from one of them.")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One set of changes, and the recipe that results for each seed."""

    name: str
    overrides: Overrides  # without those that every arm has
    recipes: Mapping[int, Recipe]

    def run_name(self, seed: int) -> str:
        return f"{self.name}-seed-{seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep file whose arms are valid recipes."""

    path: Path
    file: SweepFile
    recipe: Path
    common: tuple[str, ...]  # `--set` words of every arm
    arms: tuple[Arm, ...]
    stage: str
    result: str

    def words(self, arm: Arm, seed: int) -> list[str]:
        """Return the arguments of `strop train`, without `--runs`."""
        overrides = [*self.common, *as_words(arm.overrides), f"seed={seed}"]
        return [str(self.recipe), *(word for one in overrides for word in ("--set", one)), "--name", arm.run_name(seed)]


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Return the sweep in `path`, with `overrides` (as of `--set`) for every arm.

    Raises:
        ConfigError: names every arm that is not a valid recipe, and its mistake.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such sweep file. Examples are in `recipes/sweeps/`.")
    file = validate(SweepFile, {"name": path.stem} | load_toml(path), place=str(path))
    recipe = Path(os.path.normpath(next_to(path, file.recipe, key="recipe")))
    common = (*as_words(file.set), *overrides)
    stages = load_toml(recipe, common).get("stages", {})
    arms, problems = [], []
    for name, changes in _expand(file).items():
        try:
            check_stages(changes, stages)
            recipes = {
                seed: load_recipe(recipe, [*common, *as_words(changes), f"seed={seed}"], name=f"{name}-seed-{seed}")
                for seed in file.seeds
            }
            arms.append(Arm(name=name, overrides=changes, recipes=recipes))
        except ConfigError as error:
            problems.append(f"arm {name!r}: {error}")
    if problems:
        raise ConfigError(f"{path}: " + "\n".join(["", *problems] if len(problems) > 1 else problems))
    stage, result = _stage_of(path, file, arms), _result_of(path, file, arms)
    return Sweep(path=path, file=file, recipe=recipe, common=common, arms=tuple(arms), stage=stage, result=result)


def as_words(overrides: Overrides) -> list[str]:
    """Return `overrides` as `--set` takes them: a.b=value, with the value as TOML."""
    return [f"{key}={toml_value(value)}" for key, value in overrides.items()]


def toml_value(value: Any) -> str:
    """Return a value that was read from TOML as TOML on one line."""
    match value:
        case Mapping():
            return "{" + ", ".join(f"{_quoted(key)} = {toml_value(each)}" for key, each in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case str():
            return _quoted(value)
        case _:
            return json.dumps(value)


def _quoted(text: str) -> str:
    """Return a TOML string. JSON strings are TOML strings, except that TOML escapes one more character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _expand(file: SweepFile) -> dict[str, Overrides]:
    """Return every arm by its name: the named ones, at each point of the grid."""
    named = file.arms or {"": {}}
    shorts = _short_keys(list(file.grid))
    arms: dict[str, Overrides] = {}
    for (name, changes), point in itertools.product(named.items(), itertools.product(*file.grid.values())):
        values = dict(zip(file.grid, point, strict=True))
        parts = [name] if name else []
        parts += [f"{shorts[key]}-{_slug(value)}" for key, value in values.items()]
        whole = "-".join(parts) or "base"
        if whole in arms:
            raise ConfigError(f"{file.name}: two arms have the name {whole!r}. Name them yourself, as in [arms.one].")
        arms[whole] = {**changes, **values}
    return arms


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or the whole keys where two of them end alike."""
    shorts = {key: key.rpartition(".")[2] for key in keys}
    return shorts if len({*shorts.values()}) == len(shorts) else {key: key for key in keys}


def _slug(value: str | float) -> str:
    text = json.dumps(value) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def _stage_of(path: Path, file: SweepFile, arms: Sequence[Arm]) -> str:
    """Return the stage whose curves are drawn. Every arm has it."""
    recipes = [next(iter(arm.recipes.values())) for arm in arms]
    common = [
        name
        for name, stage in recipes[0].stages.items()
        if stage.makes is not Product.EVALUATION and stage.inputs() and all(name in recipe.stages for recipe in recipes)
    ]
    if not common or (file.stage is not None and file.stage not in common):
        known = ", ".join(common) or "none"
        raise ConfigError(f"{path}: stage is {file.stage!r}, but the stages that train, in every arm, are: {known}.")
    return file.stage or common[-1]


def _result_of(path: Path, file: SweepFile, arms: Sequence[Arm]) -> str:
    """Return evaluation.metric, or "" where the recipe has no evaluation."""
    stages = next(iter(arms[0].recipes.values())).stages
    evaluations = {name: stage for name, stage in stages.items() if stage.makes is Product.EVALUATION}
    if file.result is None:
        real = [name for name, stage in evaluations.items() if getattr(stage.config, "tools", "real") == "real"]
        return f"{(real or list(evaluations))[-1]}.accuracy" if evaluations else ""
    stage, _, metric = file.result.partition(".")
    if not metric or stage not in evaluations:
        known = ", ".join(f"{name}.accuracy" for name in evaluations) or "none: the recipe has no evaluation"
        raise ConfigError(f"{path}: result is {file.result!r}, which is no metric of an evaluation. There are {known}.")
    return file.result
