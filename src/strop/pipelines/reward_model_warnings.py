"""Warns, before a run begins, of reward models whose scores will not be what a recipe seems to ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from strop.engine.config import EngineConfig
from strop.pipelines.machine import scorer_parts_of
from strop.pipelines.recipe import Recipe, RewardModelStage, StageConfig
from strop.rewards.scorers.config import EmbeddedScorerConfig
from strop.rewards.sum_config import ScorerPart


def warnings_of_reward_models(recipe: Recipe, names: Collection[str]) -> list[str]:
    """Each with its remedy, of the stages of these `names` together: a shared reward is told of once."""
    stages = {name: recipe.stages[name] for name in names}
    return [*_shared_batches(recipe, stages), *_asked_otherwise(recipe, stages)]


def _shared_batches(recipe: Recipe, stages: dict[str, StageConfig]) -> Iterator[str]:
    """Of each part with a model in this process whose batches hang on the clock, in a recipe that is to repeat itself."""
    if not isinstance(recipe.engine, EngineConfig) or not recipe.engine.deterministic:
        return
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, stage in stages.items():
        for part, _, scorer in _embedded(stage):
            if not scorer.judges_alone:
                found[part, scorer.max_batch].append(name)
    for (part, max_batch), names in found.items():
        yield (
            f"reward.parts.{part}.scorer.max_batch is {max_batch} ({_listed(names)}): which responses share a batch hangs on"
            " the clock, and the rounding of their scores with it, so a run that is killed and resumed, or made again, may"
            " end with other bits although engine.deterministic is true. Set max_batch = 1, which may be slower, or"
            " engine.deterministic = false, which asks for no such thing."
        )


def _asked_otherwise(recipe: Recipe, stages: dict[str, StageConfig]) -> Iterator[str]:
    """Of each part that shows a stage's model something else of a response than it was trained on."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, stage in stages.items():
        for part, config, scorer in _embedded(stage):
            trained = recipe.stages.get(scorer.stage or "")
            if not isinstance(trained, RewardModelStage):
                continue
            keys = {"judged_on": (str(config.judged_on), str(trained.judged_on))}
            if config.judged_on == trained.judged_on == "summary":
                keys["think_tag"] = (config.think_tag, trained.think_tag)
            for key, (mine, theirs) in keys.items():
                if mine != theirs:
                    asked = f'reward.parts.{part}.{key} is "{mine}", but stages.{scorer.stage}.{key} is "{theirs}"'
                    found[asked].append(name)
    for asked, names in found.items():
        yield (
            f"{asked} ({_listed(names)}): where responses have thoughts, the model judges another part of them than it was"
            " trained on. Set both alike."
        )


def _embedded(stage: StageConfig) -> Iterator[tuple[str, ScorerPart, EmbeddedScorerConfig]]:
    """The parts of the reward that judges rollouts of the stage which have a model in this process."""
    for name, part in scorer_parts_of(stage).items():
        if isinstance(part.scorer, EmbeddedScorerConfig):
            yield name, part, part.scorer


def _listed(names: Collection[str]) -> str:
    return f"stage{'s' if len(names) > 1 else ''} {', '.join(names)}"
