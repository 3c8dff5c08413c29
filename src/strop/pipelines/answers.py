"""Whether the rewards of a recipe look for answers where its prompts have the policy write them."""

from __future__ import annotations

from strop.errors import ConfigError
from strop.pipelines.recipe import PlayedStage, Recipe, RolloutStage, Stage, TrainingStage
from strop.rewards.reading import SETTINGS, Reader, readers_of
from strop.rewards.sum_config import SumRewardConfig
from strop.rollout.prompt import Prompt, load_prompt, prompt_names


def check_answers(recipe: Recipe, *, place: str) -> None:
    """Hold the reward of every stage whose rollouts are judged against the `graders` of its prompt.

    A prompt without `graders` asks for no form, so any reward may read it. A part of weight 0 only reports, and may fail.

    Raises:
        ConfigError: there is no such prompt; or no rollout could earn a part of the reward, however right its answer was.
    """
    for name, stage in recipe.stages.items():
        if not (isinstance(stage, PlayedStage) or (isinstance(stage, TrainingStage) and stage.validation is not None)):
            continue
        prompt = load_prompt(stage.prompt)
        for reader in readers_of(stage.reward):
            if prompt.graders and reader.form not in prompt.graders and _counts(stage, reader):
                raise ConfigError(f"{place}: stages.{name}: {_problem(stage.prompt, prompt, reader)}")


def _counts(stage: Stage, reader: Reader) -> bool:
    if not isinstance(stage.reward, SumRewardConfig):
        return True
    switched = [entry.reward for entry in stage.schedule if entry.reward is not None] if isinstance(stage, RolloutStage) else []
    weights = [stage.reward.weights, *(reward.weights for reward in switched)]
    return any(each.get(reader.part, 0.0) for each in weights)


def _problem(name: str, prompt: Prompt, reader: Reader) -> str:
    fitting = [each for each in prompt_names() if reader.form in (graders := load_prompt(each).graders) or not graders]
    settings = "; or ".join(SETTINGS[form] for form in prompt.graders)
    asked = ", or in ".join(form.words for form in prompt.graders)
    return (
        f"prompt {name!r} and {reader.key} ({reader.settings}) do not fit: the reward reads {reader.form.words}, but the"
        f" answers that this prompt asks for are found in {asked}. Every rollout would be judged wrong. Change the reward to"
        f" {settings}; or set prompt to one that it reads ({', '.join(fitting)}), or to a file of your own with other"
        " `graders`."
    )
