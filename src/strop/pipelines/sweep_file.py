"""The sweep file: one recipe, and the arms in which it is changed; every arm is checked as a recipe before anything runs."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from strop.config import Config, load_toml, validate
from strop.errors import ConfigError
from strop.pipelines.load import check_stages, load_recipe
from strop.pipelines.recipe import EvalStage, ModelStage, Recipe, relative_to

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_OWN_KEYS = {"seed": "seeds = [0, 1]", "name": 'name = "..." at the head of the sweep file'}

Overrides = Mapping[str, Any]
"""Keys of a recipe as `--set` takes them, with their values."""


class SweepFile(Config):
    """What a sweep file may say. Keys of the recipe are written in quotes, as in "stages.rl.steps"."""

    name: str = Field(pattern=f"^{_NAME}$")  # of the directory; the file's own name when left out
    description: str = ""
    recipe: str  # beside the sweep file, or in the working directory
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    set: dict[str, Any] = Field(default={})  # for every arm
    grid: dict[str, tuple[Any, ...]] = Field(default={})  # an arm for each combination
    arms: dict[str, dict[str, Any]] = Field(default={})  # by name; with a grid too, each of them at each of its points
    result: str | None = None  # evaluation.figure to compare by; the accuracy of the last evaluation with real tools
    stage: str | None = None  # whose curves are drawn; the last one that trains
    curves: tuple[str, ...] = ()  # metrics to draw; those that say most by default

    @model_validator(mode="after")
    def _keys_are_whole(self) -> Self:
        arms = {f"arms.{name}": keys for name, keys in self.arms.items()}
        for place, keys in {"set": self.set, "grid": self.grid, **arms}.items():
            for key, value in keys.items():
                if "." not in key and isinstance(value, Mapping):
                    inner = next(iter(value), "...")
                    raise ValueError(
                        f"{place}.{key} is a table, which would replace all of {key}. Write whole keys in quotes, as in"
                        f' "{key}.{inner}" = ...'
                    )
                if key in _OWN_KEYS:
                    raise ValueError(f"{place}.{key}: the sweep sets it itself. Write {_OWN_KEYS[key]}.")
        return self

    @model_validator(mode="after")
    def _arms_can_be_told_apart(self) -> Self:
        if len({*self.seeds}) < len(self.seeds):
            raise ValueError(f"seeds are {list(self.seeds)}: the same seed twice is the same run twice.")
        for name in self.arms:
            if not re.fullmatch(_NAME, name):
                raise ValueError(f"arms.{name}: names a directory, so write it in letters, digits, '.', '_' and '-'.")
        for key, values in self.grid.items():
            if not values:
                raise ValueError(f"grid.{key} is empty: give it the values to try.")
            for value in values:
                if not isinstance(value, str | int | float):
                    raise ValueError(f"grid.{key}: {value!r} cannot be part of a name. Write it into an arm, as in [arms.one].")
            for name, arm in self.arms.items():
                if key in arm:
                    raise ValueError(f"arms.{name} sets {key}, which the grid varies. Take it out of one of them.")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to change the recipe, and what it then is, by seed."""

    name: str
    overrides: Overrides  # its own, without those that every arm has
    recipes: Mapping[int, Recipe]

    def run_name(self, seed: int) -> str:
        return f"{self.name}-seed-{seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep file whose arms are known to be recipes."""

    path: Path
    file: SweepFile
    recipe: Path
    common: tuple[str, ...]  # `--set` words of every arm
    arms: tuple[Arm, ...]
    stage: str
    result: str

    def words(self, arm: Arm, seed: int) -> list[str]:
        """What `strop train` is given, but for where."""
        overrides = [*self.common, *as_words(arm.overrides), f"seed={seed}"]
        return [str(self.recipe), *(word for one in overrides for word in ("--set", one)), "--name", arm.run_name(seed)]


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """The sweep in `path`, with `overrides` (as of `--set`) for every arm.

    Raises:
        ConfigError: naming every arm that is no recipe, and its mistake.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such sweep file. `recipes/sweeps/` has some.")
    file = validate(SweepFile, {"name": path.stem} | load_toml(path), place=str(path))
    recipe = Path(os.path.normpath(relative_to(path.parent, file.recipe)))
    common = (*as_words(file.set), *overrides)
    stages = load_toml(recipe, common, model=Recipe).get("stages", {})
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
    _refuse_twins(path, arms, file.seeds[0])
    return Sweep(
        path=path,
        file=file,
        recipe=recipe,
        common=common,
        arms=tuple(arms),
        stage=_stage_of(path, file, arms),
        result=_result_of(path, file, arms),
    )


def as_words(overrides: Overrides) -> list[str]:
    """`overrides` as `--set` takes them: a.b=value, the value as TOML."""
    return [f"{key}={toml_value(value)}" for key, value in overrides.items()]


def toml_value(value: Any) -> str:
    """A value that came from TOML, as TOML on one line."""
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
    """JSON's strings are TOML's, but for one character that TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _expand(file: SweepFile) -> dict[str, Overrides]:
    """Every arm by its name: the named ones, at each point of the grid."""
    named = file.arms or {"": {}}
    shorts = _short_keys(list(file.grid))
    arms: dict[str, Overrides] = {}
    for (name, changes), point in itertools.product(named.items(), itertools.product(*file.grid.values())):
        values = dict(zip(file.grid, point, strict=True))
        parts = [name] if name else []
        parts += [f"{shorts[key]}-{_slug(value)}" for key, value in values.items()]
        whole = "-".join(parts) or "base"
        if whole in arms:
            raise ConfigError(
                f"{file.name}: two arms would be called {whole!r}. Give them names of their own, as in [arms.one]."
            )
        arms[whole] = {**changes, **values}
    return arms


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key; more of it where two keys end alike."""
    shorts = {}
    for key in keys:
        parts = key.split(".")
        others = [f".{other}" for other in keys if other != key]
        tails = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        shorts[key] = next(tail for tail in tails if not any(other.endswith(f".{tail}") for other in others))
    return shorts


def _slug(value: str | float) -> str:
    text = json.dumps(value) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def _refuse_twins(path: Path, arms: Sequence[Arm], seed: int) -> None:
    """Raises `ConfigError` where two arms are one recipe: they would agree to the last bit."""
    seen: dict[str, str] = {}
    for arm in arms:
        resolved = arm.recipes[seed].model_copy(update={"name": "-"}).model_dump_json()
        if resolved in seen:
            raise ConfigError(
                f"{path}: arms {seen[resolved]!r} and {arm.name!r} are the same recipe. Take one of them out, or give it a"
                " change of its own."
            )
        seen[resolved] = arm.name


def _stage_of(path: Path, file: SweepFile, arms: Sequence[Arm]) -> str:
    """The stage whose curves are drawn; every arm has it."""
    stages_of = [next(iter(arm.recipes.values())).stages for arm in arms]
    of_arms = [
        [name for name, stage in stages.items() if not isinstance(stage, ModelStage | EvalStage)] for stages in stages_of
    ]
    common = [name for name in of_arms[0] if all(name in names for names in of_arms)]
    if file.stage is not None and file.stage not in common:
        known = ", ".join(common) or "none"
        raise ConfigError(f"{path}: stage is {file.stage!r}, but the stages that train, in every arm, are: {known}.")
    if not common:
        raise ConfigError(f"{path}: no stage trains a model in every arm, so there is nothing to compare.")
    return file.stage or common[-1]


def _result_of(path: Path, file: SweepFile, arms: Sequence[Arm]) -> str:
    """evaluation.figure; empty where the recipe has no evaluation."""
    stages = next(iter(arms[0].recipes.values())).stages
    evaluations = [name for name, stage in stages.items() if isinstance(stage, EvalStage)]
    if file.result is None:
        real = [name for name in evaluations if getattr(stages[name], "tools", "real") == "real"]
        return f"{(real or evaluations)[-1]}.accuracy" if evaluations else ""
    stage, dot, figure = file.result.partition(".")
    if not dot or not figure or stage not in evaluations:
        known = ", ".join(f"{name}.accuracy" for name in evaluations) or "none: the recipe has no evaluation"
        raise ConfigError(f"{path}: result is {file.result!r}, which is no figure of an evaluation. There are {known}.")
    return file.result
