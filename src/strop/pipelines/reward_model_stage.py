"""Trains a reward model on preferences, one update a step, and measures it on prompts that it has not seen."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strop.errors import CannotLearnError, ConfigError, TaskError
from strop.evaluation.preferences import PreferenceQuality, label_quality, pair_quality
from strop.pipelines import checkpoints
from strop.pipelines.reward_model_config import RewardModelStage
from strop.pipelines.skipped import keep_skipped
from strop.pipelines.stage import StageContext, model_of
from strop.pipelines.stage_config import check_schedule
from strop.pipelines.step_figures import cost_metrics
from strop.rewards.scorers.reward_model import ExchangeFormat
from strop.runs import write_directory, write_json
from strop.seeds import derive_seed
from strop.training.preferences import Preference, PreferenceRows, as_rows, read_preferences
from strop.training.reward_model import RewardTrainer, pack_preferences


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sets:
    """What it learns from, what it is measured on, and how many preferences were left out."""

    train: list[PreferenceRows]
    test: list[PreferenceRows]
    num_left_out: int


async def run_reward_model_stage(context: StageContext, stage: RewardModelStage) -> tuple[Path, str]:
    """Train from the last checkpoint to the last step; returns the model directory and one sentence about it.

    Raises:
        TaskError: the preferences cannot be read, or too few are left.
        CannotLearnError: too many updates in a row were skipped.
    """
    init = model_of(context.run, stage.init)
    sets = _read(context, stage, ExchangeFormat(init))
    steps = stage.epochs * -(-len(sets.train) // stage.batch_size)
    try:
        check_schedule(stage.trainer.optimizer, steps, key=f"stages.{context.name}.trainer.optimizer")
    except ValueError as error:
        raise ConfigError(str(error)) from error
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
        f"{steps} updates on {len(sets.train)} preferences; {quality.num} held out: accuracy {quality.accuracy:.3f}, AUC {auc}"
    )


async def _learn(
    context: StageContext, stage: RewardModelStage, trainer: RewardTrainer, train: Sequence[PreferenceRows], steps: int
) -> None:
    async with checkpoints.open_writer(context, trainer, stage) as writer:
        done = await checkpoints.resume(context, trainer)
        context.progress.stage_started(context.name, stage.kind, steps, done)
        metrics = context.metrics(done_steps=done)
        for step in range(done + 1, steps + 1):
            await writer.check()
            started = time.perf_counter()
            batch = _batch(train, step - 1, size=stage.batch_size, seed=context.seed("batches"))
            try:
                report = await keep_skipped(context, pack_preferences(batch), trainer.update(batch), step=step)
            except CannotLearnError:
                await writer.save_if_missing(step - 1)
                raise
            figures = {"update/skipped": float(report.is_skipped), "time/step_s": time.perf_counter() - started}
            if not report.is_skipped:
                figures |= {
                    "reward_model/loss": report.loss,
                    **{f"reward_model/{name}": value for name, value in report.statistics.items()},
                    "update/grad_norm": report.grad_norm,
                    "update/learning_rate": report.learning_rate,
                } | cost_metrics([report])
            metrics.append(step, figures)
            if step % stage.checkpoint_every == 0 and step < steps:
                await writer.save(step)
        metrics.close()


async def _measure(trainer: RewardTrainer, test: Sequence[PreferenceRows]) -> PreferenceQuality:
    rows = [row for each in test for row in each.rows]
    scores, lengths = await trainer.score(rows), [len(row) for row in rows]
    if test[0].is_pair:
        return pair_quality(scores[::2], scores[1::2], lengths[::2], lengths[1::2])
    return label_quality(scores, [each.is_good for each in test], lengths)


def _read(context: StageContext, stage: RewardModelStage, exchanges: ExchangeFormat) -> _Sets:
    found = read_preferences(Path(stage.path))
    if stage.test_path is None:
        train, test = split_by_prompt(found, share=stage.test_share, seed=context.seed("test"))
    else:
        train, test = found, read_preferences(Path(stage.test_path))
        if type(train[0]) is not type(test[0]):
            raise TaskError(f"{stage.test_path}: not of the form of {stage.path}: one has pairs, the other single responses.")
    read = partial(
        as_rows,
        exchanges=exchanges,
        judged_on=stage.judged_on,
        think_tag=stage.think_tag,
        is_prefilled=stage.is_prefilled,
        max_length=stage.max_length,
    )
    kept = [read(train), read(test)]
    fit = [[rows for rows in each if rows is not None] for each in kept]
    num_left_out = len(train) + len(test) - len(fit[0]) - len(fit[1])
    if num_left_out:
        context.warn(
            f"{num_left_out} of {len(train) + len(test)} preferences are left out: a response of more than max_length ="
            f" {stage.max_length} tokens, or without a summary to be judged on"
        )
    if not fit[0] or not fit[1]:
        raise TaskError(
            f"stages.{context.name}: {len(fit[0])} preferences are left to learn from and {len(fit[1])} to be measured on;"
            " there has to be one of each. Raise max_length or test_share, set judged_on = 'response', or give more."
        )
    return _Sets(train=fit[0], test=fit[1], num_left_out=num_left_out)


def split_by_prompt(preferences: Sequence[Preference], *, share: float, seed: int) -> tuple[list[Preference], list[Preference]]:
    """(train, test), no prompt in both; at least one prompt is in the test set."""
    prompts = list(dict.fromkeys(each.prompt for each in preferences))
    random.Random(seed).shuffle(prompts)
    held_out = set(prompts[: max(1, round(share * len(prompts)))])
    return (
        [each for each in preferences if each.prompt not in held_out],
        [each for each in preferences if each.prompt in held_out],
    )


def _batch(train: Sequence[PreferenceRows], step: int, *, size: int, seed: int) -> list[PreferenceRows]:
    """The preferences of a step, a pure function of its arguments: each epoch in another order, its last batch the rest."""
    epoch, position = divmod(step, -(-len(train) // size))
    order = list(range(len(train)))
    random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return [train[index] for index in order[position * size : (position + 1) * size]]


def _move(source: Path, directory: Path) -> None:
    for path in list(source.iterdir()):
        path.rename(directory / path.name)
    source.rmdir()
