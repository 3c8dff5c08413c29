"""Trains a reward model on preferences, measures it on new prompts, and warns of rewards that do not fit it.

The measure is how well scores separate good responses from bad ones, and how far they only follow length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import Literal, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from strop.errors import TaskError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, Product, Stage, StageResult, scoring_stages
from strop.reports.number_format import counted
from strop.rewards import SumReward
from strop.rewards.reward_model import ExchangeFormat
from strop.run_directory import RunDirectory, write_json
from strop.stages.context import StageContext, product_of
from strop.stages.dpo import PreferenceKeys, PreferenceSets, PreferenceStage
from strop.stages.loop.steps import take_updates
from strop.stages.loop.training_stage import checked_steps
from strop.stages.loop.updates import keep_skipped
from strop.tasks.files import RowFile
from strop.training.optimizer import UpdateReport
from strop.training.preferences import Preference, PreferenceRows, as_rows
from strop.training.reward_model import RewardTrainer, pack_preferences

_MEASURED_AT_ONCE = 1024  # preferences; the others stay on disk


class RewardModel(PreferenceStage):
    """A head of one number on the decoder of another stage's model, trained on preferences."""

    unusable = "a response of more than max_length = {max_length} tokens, or without a summary to be judged on"
    remedy = "Give preferences of more prompts, raise max_length, or set judged_on = 'response'."
    makes = Product.REWARD_MODEL
    root_keys = frozenset()

    class Config(PreferenceKeys):
        """Keys of `kind = "reward_model"`."""

        judged_on: Literal["summary", "response"] = Field(
            default="summary", description="What it reads of a response. DeepSeek-R1: for safety all of it."
        )
        think_tag: str = Field(default="think", pattern=r"^\w+$", description="Tag of the thoughts before a summary.")
        is_prefilled: bool = Field(default=False, description="The prompts end with the opening tag of the thoughts.")
        batch_size: int = Field(default=256, ge=1, description="Pairs, or single responses, of one update.")

        @model_validator(mode="after")
        def _trains_all_weights_here(self) -> Self:
            if self.trainer.lora is not None or self.trainer.workers:
                raise ValueError("a reward model trains all of its weights in one process. Remove trainer.lora and workers.")
            return self

    config: Config

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        config = self.config
        arithmetic = f"{counted(config.epochs, 'epoch')} over {config.path} in batches of {config.batch_size}"
        trained = config.as_trained(rows=2 * config.batch_size, longest=config.max_length)
        return Estimate(arithmetic=arithmetic, trained=replace(trained, in_one_process=True))

    async def run(self, context: StageContext) -> StageResult:
        """Train from the last checkpoint to the last step, and measure the model on new prompts.

        Raises:
            TaskError: the preferences cannot be read, or too few are left, or all have one label.
            CannotLearnError: too many updates in a row were skipped.
        """
        config, directory = self.config, context.directory
        init = product_of(context.run, config.init)
        options = config.model_dump(include={"judged_on", "think_tag", "is_prefilled", "max_length"})
        exchanges = ExchangeFormat(init)

        def keep(preferences: Iterator[Preference]) -> Iterator[PreferenceRows]:
            return (rows for rows in as_rows(preferences, exchanges, **options) if rows is not None)

        async with AsyncExitStack() as opened:
            sets = self.open_sets(context, opened, keep)
            _check_labels(context, sets)
            steps = checked_steps(context, config, config.num_updates(len(sets.train)))
            trainer = RewardTrainer(init, config.trainer, total_updates=steps)
            opened.push_async_callback(trainer.close)

            async def take(step: int) -> tuple[UpdateReport, dict[str, float]]:
                batch = sets.batch(step, config, context)
                report = await keep_skipped(context, pack_preferences(batch), trainer.update(batch), step=step)
                found = {} if report.is_skipped else {"loss": report.loss, **report.statistics}
                return report, {f"reward_model/{name}": value for name, value in found.items()}

            product = await take_updates(context, config, trainer, steps, take)
            quality = await _measure(trainer, sets.test)
            write_json(directory.path / "quality.json", asdict(quality) | {"num_left_out": sets.num_left_out})
        auc = "unknown" if quality.auc is None else f"{quality.auc:.3f}"
        summary = (
            f"{counted(steps, 'update')} on {counted(len(sets.train), 'preference')}; {quality.num} held out:"
            f" accuracy {quality.accuracy:.3f}, AUC {auc}"
        )
        return StageResult(summary=summary, product=product)


async def _measure(trainer: RewardTrainer, test: RowFile[PreferenceRows]) -> PreferenceQuality:
    scores, lengths, are_good = list[float](), list[int](), list[bool]()
    for start in range(0, len(test), _MEASURED_AT_ONCE):
        part = [test[number] for number in range(start, min(len(test), start + _MEASURED_AT_ONCE))]
        rows = [row for each in part for row in each.rows]
        scores += await trainer.score(rows)
        lengths += (length for each in part for length in each.response_lengths)
        are_good += [each.is_good for each in part]
    if test[0].is_pair:
        return pair_quality(scores[::2], scores[1::2], lengths[::2], lengths[1::2])
    return label_quality(scores, are_good, lengths)


def _check_labels(context: StageContext, sets: PreferenceSets[PreferenceRows]) -> None:
    """Raise `TaskError` if all single responses to learn from have one label; warn if all to measure on do."""
    for rows, purpose in ((sets.train, "to learn from"), (sets.test, "to measure on")):
        first = rows[0]
        if first.is_pair or any(rows[number].is_good != first.is_good for number in range(1, len(rows))):
            continue
        label = "safe" if first.is_good else "unsafe"
        what = f"{counted(len(rows), 'response')}, all of them labelled {label}, are left {purpose}"
        if rows is sets.train:
            raise TaskError(f"stages.{context.name}: {what}. Give responses of both labels, or pairs.")
        context.warn(f"{what}, so there is no AUC. Raise test_share.")


StageT = TypeVar("StageT", bound=Stage)


def with_reward_models(stage: StageT, run: RunDirectory) -> StageT:
    """`stage` with a directory for each reward model that its reward names and that is made.

    A shared reward may name a stage that comes later; only stages that are judged by it depend on that one.
    """
    reward = getattr(stage.config, "reward", None)
    if not isinstance(reward, SumReward):
        return stage
    done = {name: each for name, each in scoring_stages(reward).items() if run.stage(each).done.exists()}
    if not done:
        return stage
    parts = dict(reward.parts)
    for name, trained in done.items():
        path = {"path": str(product_of(run, trained)), "stage": None}
        parts[name] = parts[name].replaced(scorer=parts[name].config.scorer.model_copy(update=path))
    return stage.replaced(reward=reward.replaced(parts=parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceQuality:
    """Of a reward model on validation preferences. None where a value is undefined (only one class, equal lengths)."""

    num: int  # pairs, or single responses
    accuracy: float  # pairs in the right order, ties half; single responses on the right side of 0
    auc: float | None  # how often any good response is scored above any bad one, over all prompts; ties count half
    length_correlation: float | None  # Pearson's, of score and length in tokens, of the response only
    length_correlation_in_pairs: float | None = None  # of their differences within a pair, independent of the prompt
    length_correlation_in_labels: float | None = None  # of single responses: each minus its label's mean


def pair_quality(
    chosen: Sequence[float], rejected: Sequence[float], chosen_lengths: Sequence[int], rejected_lengths: Sequence[int]
) -> PreferenceQuality:
    """The quality on pairs; each argument has one number per pair."""
    margins, lengths = np.subtract(chosen, rejected), np.subtract(chosen_lengths, rejected_lengths)
    return PreferenceQuality(
        num=len(margins),
        accuracy=float(np.mean((margins > 0) + 0.5 * (margins == 0))),
        auc=area_under_curve(chosen, rejected),
        length_correlation=correlation([*chosen, *rejected], [*chosen_lengths, *rejected_lengths]),
        # Both directions of each difference, so that the order within pairs has no effect.
        length_correlation_in_pairs=correlation([*margins, *-margins], [*lengths, *-lengths]),
    )


def label_quality(scores: Sequence[float], is_good: Sequence[bool], lengths: Sequence[int]) -> PreferenceQuality:
    """The quality on single responses.

    If bad ones are longer, a good model scores long ones low without regard to length, so the correlation within labels shows
    what length itself contributes.
    """
    good = [score for score, label in zip(scores, is_good, strict=True) if label]
    bad = [score for score, label in zip(scores, is_good, strict=True) if not label]
    right = [0.5 if score == 0 else float((score > 0) == label) for score, label in zip(scores, is_good, strict=True)]
    return PreferenceQuality(
        num=len(scores),
        accuracy=float(np.mean(right)),
        auc=area_under_curve(good, bad),
        length_correlation=correlation(scores, lengths),
        length_correlation_in_labels=correlation(_less_the_mean_of(is_good, scores), _less_the_mean_of(is_good, lengths)),
    )


def area_under_curve(good: Sequence[float], bad: Sequence[float]) -> float | None:
    """The share of all (good, bad) pairs in which the good one is larger, ties half; None if either is empty."""
    if not good or not bad:
        return None
    ordered = np.sort(np.array(bad))
    below, up_to = np.searchsorted(ordered, good, side="left"), np.searchsorted(ordered, good, side="right")
    return float((below + up_to).sum() / (2 * len(good) * len(bad)))


def correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Pearson's; None if one of them is constant."""
    if any(min(values, default=0.0) == max(values, default=0.0) for values in (one, other)):
        return None  # compare the values: rounding could leave 1e-17 after subtracting the mean
    left, right = (np.subtract(values, np.mean(values)) for values in (one, other))
    return float((left * right).sum() / np.sqrt((left**2).sum() * (right**2).sum()))


def _less_the_mean_of(labels: Sequence[bool], values: Sequence[float]) -> list[float]:
    """Each minus the mean of its label; exactly 0 if all values of the label are equal, despite rounding."""
    found = np.array(values, dtype=np.float64)
    for of_label in (np.array(labels), ~np.array(labels)):
        same = found[of_label]
        found[of_label] = same - same.mean() if len(set(same)) > 1 else 0.0
    return list(found)
