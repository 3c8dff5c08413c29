"""Trains a reward model on preferences, one update a step, and measures it on prompts that it has not seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from strop.errors import TaskError
from strop.evaluation.preferences import PreferenceQuality, label_quality, pair_quality
from strop.pipelines.id_file import IdFile
from strop.pipelines.preference_file import PreferenceFile
from strop.pipelines.preference_sets import PreferenceSets, batch_of_epoch, count_steps, open_sets
from strop.pipelines.recipe import RewardModelStage
from strop.pipelines.skipped import keep_skipped
from strop.pipelines.stage import StageContext, model_of
from strop.pipelines.step_figures import cost_metrics
from strop.pipelines.stepping import take_updates
from strop.reports.scales import counted
from strop.rewards.scorers.reward_model import ExchangeFormat
from strop.runs import write_directory, write_json
from strop.training.preferences import Preference, PreferenceRows, as_rows
from strop.training.reward_model import RewardTrainer, pack_preferences

_MEASURED_AT_ONCE = 1024  # preferences; the others stay on disk


async def run_reward_model_stage(context: StageContext, stage: RewardModelStage) -> tuple[Path, str]:
    """Train from the last checkpoint to the last step; returns the model directory and one sentence about it.

    Raises:
        TaskError: the preferences cannot be read, or too few are left, or those of one label alone.
        CannotLearnError: too many updates in a row were skipped.
    """
    async with AsyncExitStack() as opened:
        return await _train(context, stage, opened)


async def _train(context: StageContext, stage: RewardModelStage, opened: AsyncExitStack) -> tuple[Path, str]:
    init = model_of(context.run, stage.init)
    sets = _open(context, stage, ExchangeFormat(init), opened)
    _check_labels(context, sets)
    steps = count_steps(context, stage, len(sets.train))
    trainer = RewardTrainer(init, stage.trainer, total_updates=steps)
    try:
        await _learn(context, stage, trainer, sets.train, steps)
        quality = await _measure(trainer, sets.test)
        write_json(context.directory.path / "quality.json", quality.as_json() | {"num_left_out": sets.num_left_out})
        temporary = context.directory.path / "reward_model"
        await trainer.save_model(temporary)
        write_directory(context.directory.model, lambda directory: _move(temporary, directory))
    finally:
        await trainer.close()
    auc = "unknown" if quality.auc is None else f"{quality.auc:.3f}"
    return context.directory.model, (
        f"{counted(steps, 'update')} on {counted(len(sets.train), 'preference')}; {quality.num} held out:"
        f" accuracy {quality.accuracy:.3f}, AUC {auc}"
    )


async def _learn(
    context: StageContext, stage: RewardModelStage, trainer: RewardTrainer, train: IdFile[PreferenceRows], steps: int
) -> None:
    async def take(step: int) -> dict[str, float]:
        started = time.perf_counter()
        batch = batch_of_epoch(train, step - 1, size=stage.batch_size, seed=context.seed("batches"))
        report = await keep_skipped(context, pack_preferences(batch), trainer.update(batch), step=step)
        figures = {"update/skipped": float(report.is_skipped), "time/step_s": time.perf_counter() - started}
        if report.is_skipped:
            return figures
        return {
            **figures,
            "reward_model/loss": report.loss,
            **{f"reward_model/{name}": value for name, value in report.statistics.items()},
            "update/grad_norm": report.grad_norm,
            "update/learning_rate": report.learning_rate,
            **cost_metrics([report]),
        }

    await take_updates(context, stage, trainer, steps, take)


async def _measure(trainer: RewardTrainer, test: IdFile[PreferenceRows]) -> PreferenceQuality:
    scores: list[float] = []
    lengths: list[int] = []
    are_good: list[bool] = []
    for start in range(0, len(test), _MEASURED_AT_ONCE):
        part = [test[number] for number in range(start, min(len(test), start + _MEASURED_AT_ONCE))]
        rows = [row for each in part for row in each.rows]
        scores += await trainer.score(rows)
        lengths += (length for each in part for length in each.response_lengths)
        are_good += [each.is_good for each in part]
    if test[0].is_pair:
        return pair_quality(scores[::2], scores[1::2], lengths[::2], lengths[1::2])
    return label_quality(scores, are_good, lengths)


def _open(
    context: StageContext, stage: RewardModelStage, exchanges: ExchangeFormat, opened: AsyncExitStack
) -> PreferenceSets[PreferenceRows]:
    def keep(directory: Path, preferences: Iterator[Preference]) -> PreferenceFile:
        found = as_rows(
            preferences,
            exchanges,
            judged_on=stage.judged_on,
            think_tag=stage.think_tag,
            is_prefilled=stage.is_prefilled,
            max_length=stage.max_length,
        )
        return PreferenceFile(directory, (rows for rows in found if rows is not None))

    return open_sets(
        context,
        stage,
        opened,
        keep,
        why_left_out=f"a response of more than max_length = {stage.max_length} tokens, or without a summary to be judged on",
        remedy="Give preferences of more prompts, raise max_length, or set judged_on = 'response'.",
    )


def _check_labels(context: StageContext, sets: PreferenceSets[PreferenceRows]) -> None:
    """Warn of single responses to be measured on that are all good or all bad.

    Raises:
        TaskError: those to learn from are.
    """
    if _has_one_label(sets.train):
        raise TaskError(
            f"stages.{context.name}: {_all_of_a_label(sets.train)} to learn from, so a model would learn to say that of every"
            " response. Give responses of both labels, or pairs."
        )
    if _has_one_label(sets.test):
        context.warn(
            f"{_all_of_a_label(sets.test)} to be measured on, so there is no AUC. Raise test_share, or name a test_path with"
            " both labels."
        )


def _has_one_label(rows: IdFile[PreferenceRows]) -> bool:
    """Whether all are single responses of one label; reads until it meets the other one."""
    first = rows[0]
    return not first.is_pair and all(rows[number].is_good == first.is_good for number in range(1, len(rows)))


def _all_of_a_label(rows: IdFile[PreferenceRows]) -> str:
    return f"{counted(len(rows), 'response')}, all of them labelled {'safe' if rows[0].is_good else 'unsafe'}, are left"


def _move(source: Path, directory: Path) -> None:
    for path in list(source.iterdir()):
        path.rename(directory / path.name)
    source.rmdir()
