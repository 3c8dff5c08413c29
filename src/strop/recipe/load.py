"""From the words of the command line to a recipe: file, `--set`, shared tables, paths, validation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from strop.config import load_toml, validate, with_paths
from strop.errors import ConfigError, did_you_mean
from strop.recipe.recipe import Recipe, resolve, written_at
from strop.recipe.stage import PlayedKeys
from strop.registry import look_next_to
from strop.rewards import SETTINGS, Reward, SumReward
from strop.rewards.base import Part
from strop.rollout.prompt import Prompt, load_prompt, prompt_names
from strop.run_directory import RunDirectory, names_damage, read_json

_PATH_KEYS = ("path", "test_path", "recipe", "cwd")


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, name: str | None = None) -> Recipe:
    """Return the recipe in `path`. Relative paths in it are looked for in its directory first, then in the working directory.

    Raises:
        ConfigError: naming each mistake and its place; or a prompt and a reward that do not fit.
    """
    path = Path(path)
    look_next_to(path)
    tree = load_toml(path, overrides)
    if "recipe" in tree and "stages" not in tree:
        raise ConfigError(f"{path}: this is a sweep, and no recipe. Run it with `strop sweep {path}`.")
    check_stages((override.partition("=")[0].strip() for override in overrides), _with_kind(tree), place="--set ")
    if name is not None:
        tree["name"] = name
    recipe = validate(
        Recipe, with_paths(resolve(tree), path, _PATH_KEYS), place=str(path), written_at=partial(written_at, tree)
    )
    check_answers(recipe, place=str(path))
    return recipe


@names_damage
def recipe_of(run: RunDirectory) -> Recipe:
    """The recipe that a run directory holds. Raises `RunError` when it holds none."""
    return validate(Recipe, read_json(run.manifest)["recipe"], place=str(run.manifest))


def check_stages(keys: Iterable[str], stages: Collection[str], *, place: str = "") -> None:
    """A key of a stage that is not there would be taken for a new one, which lacks everything. Raises `ConfigError` for one."""
    for key in keys:
        table, *below = key.split(".")
        if table == "stages" and len(below) > 1 and below[0] not in stages:
            hint = did_you_mean(below[0], stages) or f" It has {', '.join(stages)}."
            raise ConfigError(f"{place}{key}: the recipe has no stage {below[0]!r}.{hint}")


def _with_kind(tree: Mapping[str, Any]) -> list[str]:
    """The stages of `tree` that say what they are, which those that only an override named do not."""
    stages = tree.get("stages")
    stages = stages if isinstance(stages, Mapping) else {}
    return [name for name, stage in stages.items() if not isinstance(stage, Mapping) or "kind" in stage]


def check_answers(recipe: Recipe, *, place: str) -> None:
    """Hold the reward of every stage whose rollouts are judged against the `graders` of its prompt.

    A prompt without `graders` asks for no form, so any reward may read it. A part of weight 0 only reports, and may fail.

    Raises:
        ConfigError: there is no such prompt; or no rollout could earn a part of the reward, however right its answer was.
    """
    for name, stage in recipe.stages.items():
        config = stage.config
        if not isinstance(config, PlayedKeys) or not stage.opens_engines:
            continue
        try:
            prompt = load_prompt(config.prompt)
        except ConfigError as error:
            raise ConfigError(f"{place}: stages.{name}.prompt: {error}") from error
        for key, part in config.reward.readers().items():
            if prompt.graders and part.answer_form not in prompt.graders and _counts(config.reward, key):
                raise ConfigError(f"{place}: stages.{name}: {_problem(config.prompt, prompt, key, part)}")


def _counts(reward: Reward, part: str) -> bool:
    return not isinstance(reward, SumReward) or bool((reward.weights or {}).get(part))


def _problem(name: str, prompt: Prompt, key: str, part: Part) -> str:
    form = part.answer_form
    assert form is not None
    fitting = [each for each in prompt_names() if form in (graders := load_prompt(each).graders) or not graders]
    settings = "; or ".join(SETTINGS[each] for each in prompt.graders)
    asked = ", or in ".join(each.words for each in prompt.graders)
    place = f"reward.parts.{key}" if key else "reward"
    return (
        f"prompt {name!r} and {place} ({part.settings}) do not fit: the reward reads {form.words}, but the"
        f" answers that this prompt asks for are found in {asked}. Every rollout would be judged wrong. Change the reward to"
        f" {settings}; or set prompt to one that it reads ({', '.join(fitting)}), or to a file of your own with other"
        " `graders`."
    )
