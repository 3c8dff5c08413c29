"""Trains a reward model on preferences, one update a step, and measures it on prompts that it has not seen."""

from __future__ import annotations

import hashlib
import random
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strop.errors import CannotLearnError, ConfigError, TaskError
from strop.evaluation.preferences import PreferenceQuality, label_quality, pair_quality
from strop.pipelines import checkpoints
from strop.pipelines.demonstrations import shuffled
from strop.pipelines.preference_file import PreferenceFile
from strop.pipelines.reward_model_config import RewardModelStage
from strop.pipelines.skipped import keep_skipped
from strop.pipelines.stage import StageContext, model_of
from strop.pipelines.stage_config import check_schedule
from strop.pipelines.step_figures import cost_metrics
from strop.rewards.scorers.reward_model import ExchangeFormat
from strop.runs import write_directory, write_json
from strop.seeds import derive_seed
from strop.training.preferences import PreferenceLines, PreferenceRows, as_rows, read_preferences
from strop.training.reward_model import RewardTrainer, pack_preferences

_MEASURED_AT_ONCE = 1024  # preferences; the others stay on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sets:
    """What it learns from and what it is measured on, on disk, and how many preferences were left out."""

    train: PreferenceFile
    test: PreferenceFile
    num_left_out: int


async def run_reward_model_stage(context: StageContext, stage: RewardModelStage) -> tuple[Path, str]:
    """Train from the last checkpoint to the last step; returns the model directory and one sentence about it.

    Raises:
        TaskError: the preferences cannot be read, or too few are left.
        CannotLearnError: too many updates in a row were skipped.
    """
    async with AsyncExitStack() as opened:
        return await _train(context, stage, opened)


async def _train(context: StageContext, stage: RewardModelStage, opened: AsyncExitStack) -> tuple[Path, str]:
    init = model_of(context.run, stage.init)
    sets = _read(context, stage, ExchangeFormat(init), opened)
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
    context: StageContext, stage: RewardModelStage, trainer: RewardTrainer, train: PreferenceFile, steps: int
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


async def _measure(trainer: RewardTrainer, test: PreferenceFile) -> PreferenceQuality:
    scores: list[float] = []
    lengths: list[int] = []
    are_good: list[bool] = []
    for start in range(0, len(test), _MEASURED_AT_ONCE):
        part = [test[number] for number in range(start, min(len(test), start + _MEASURED_AT_ONCE))]
        rows = [row for each in part for row in each.rows]
        scores += await trainer.score(rows)
        lengths += map(len, rows)
        are_good += [each.is_good for each in part]
    if test[0].is_pair:
        return pair_quality(scores[::2], scores[1::2], lengths[::2], lengths[1::2])
    return label_quality(scores, are_good, lengths)


def _read(context: StageContext, stage: RewardModelStage, exchanges: ExchangeFormat, opened: AsyncExitStack) -> _Sets:
    found = read_preferences(Path(stage.path))
    if stage.test_path is None:
        prompts = (each.prompt for each in found)
        train, test = split_by_prompt(prompts, share=stage.test_share, seed=context.seed("test"))
        sets = [(found, train), (found, test)]
    else:
        other = read_preferences(Path(stage.test_path))
        if type(found[0]) is not type(other[0]):
            raise TaskError(f"{stage.test_path}: not of the form of {stage.path}: one has pairs, the other single responses.")
        sets = [(each, array("Q", range(len(each)))) for each in (found, other)]
    read = partial(
        as_rows,
        exchanges=exchanges,
        judged_on=stage.judged_on,
        think_tag=stage.think_tag,
        is_prefilled=stage.is_prefilled,
        max_length=stage.max_length,
    )

    def of(preferences: PreferenceLines, numbers: array[int]) -> Iterator[PreferenceRows]:
        return (rows for rows in read(preferences[number] for number in numbers) if rows is not None)

    fit = [opened.enter_context(PreferenceFile(context.directory.path, of(*each))) for each in sets]
    num_found = sum(len(numbers) for _, numbers in sets)
    num_left_out = num_found - len(fit[0]) - len(fit[1])
    if num_left_out:
        context.warn(
            f"{num_left_out} of {num_found} preferences are left out: a response of more than max_length ="
            f" {stage.max_length} tokens, or without a summary to be judged on"
        )
    if not len(fit[0]) or not len(fit[1]):
        raise TaskError(
            f"stages.{context.name}: {len(fit[0])} preferences are left to learn from and {len(fit[1])} to be measured on;"
            " there has to be one of each. Raise max_length or test_share, set judged_on = 'response', or give more."
        )
    return _Sets(train=fit[0], test=fit[1], num_left_out=num_left_out)


def split_by_prompt(prompts: Iterable[str], *, share: float, seed: int) -> tuple[array[int], array[int]]:
    """(train, test): the numbers of preferences with these `prompts`, no prompt in both; one at least is in the test set."""
    places: dict[bytes, int] = {}  # by a digest of each prompt, since prompts may be long: its place among them
    of_row = array("Q")
    for prompt in prompts:
        digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        of_row.append(places.setdefault(digest, len(places)))
    order = array("Q", range(len(places)))
    random.Random(seed).shuffle(order)
    held_out = set(order[: max(1, round(share * len(order)))])
    return (
        array("Q", (number for number, place in enumerate(of_row) if place not in held_out)),
        array("Q", (number for number, place in enumerate(of_row) if place in held_out)),
    )


def _batch(train: PreferenceFile, step: int, *, size: int, seed: int) -> list[PreferenceRows]:
    """The preferences of a step, a pure function of its arguments: each epoch in another order, its last batch the rest."""
    epoch, position = divmod(step, -(-len(train) // size))
    order = shuffled(len(train), derive_seed(seed, "epoch", epoch))
    return [train[index] for index in order[position * size : (position + 1) * size]]


def _move(source: Path, directory: Path) -> None:
    for path in list(source.iterdir()):
        path.rename(directory / path.name)
    source.rmdir()
