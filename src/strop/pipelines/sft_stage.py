"""Supervised fine-tuning: imitate demonstrations, one update a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from strop.errors import TaskError
from strop.pipelines.conversations import as_demonstrations
from strop.pipelines.demonstration_file import DemonstrationFile
from strop.pipelines.demonstrations import Demonstrations, as_demonstration, batch_at, play_once, played_before
from strop.pipelines.judged import Tally, attempts_in, judge_demonstrations, only_kept
from strop.pipelines.recipe import SftStage
from strop.pipelines.skipped import update_or_keep
from strop.pipelines.stage import StageContext, load_chat, model_of
from strop.pipelines.stage_data import Row, rows_of
from strop.pipelines.stage_tasks import open_tasks
from strop.pipelines.step_figures import cost_metrics
from strop.pipelines.stepping import take_updates
from strop.pipelines.validation import FineTuningValidator, open_fine_tuning_validator, write_product
from strop.reports.scales import counted
from strop.training.opening import open_trainer
from strop.training.protocol import Trainer
from strop.training.sft import Demonstration, pack_demonstrations, sft_token_loss, sft_token_statistics
from strop.types import Task, Trajectory


async def run_sft_stage(context: StageContext, stage: SftStage) -> tuple[Path, str]:
    """Train from the last checkpoint to the last step; returns the model directory and one sentence about it."""
    init = model_of(context.run, stage.init)
    demonstrations = await _demonstrations(context, stage, init)
    tally = await judge_demonstrations(context, stage, _attempts(context, stage)) if stage.only_right else None
    imitated = demonstrations if tally is None else only_kept(context.directory, demonstrations)
    with DemonstrationFile(context.directory.path / "data", imitated) as on_disk:
        _check_number(context, stage, len(on_disk), tally)
        product, loss = await _train(context, stage, init, on_disk)
        told = f"{len(on_disk)} demonstrations" if tally is None else str(tally)
    return product, f"{counted(stage.steps, 'update')} on {told}, last loss {loss:.3f}"


def _check_number(context: StageContext, stage: SftStage, num: int, tally: Tally | None) -> None:
    """Raises `TaskError` where there are fewer than one batch."""
    if num >= stage.batch_size:
        return
    if stage.data:
        there, remedy = f"{', '.join(stage.data)} made {num} conversations", "let those stages make more"
    else:
        there, remedy = f"{num} demonstrations could be played", "give it more tasks that the demonstrator can do"
    if tally is not None:
        there = f"only_right keeps {tally}"
    raise TaskError(
        f"stages.{context.name}: {there}, fewer than batch_size = {stage.batch_size}. Lower batch_size, or {remedy}."
    )


async def _train(context: StageContext, stage: SftStage, init: Path, demonstrations: Demonstrations) -> tuple[Path, float]:
    """Returns the model directory and the last loss."""
    async with AsyncExitStack() as opened:
        trainer = open_trainer(init, stage.trainer, total_updates=stage.steps)
        opened.push_async_callback(trainer.close)
        validator = await opened.enter_async_context(open_fine_tuning_validator(context, stage, init))
        loss = await _imitate(context, stage, trainer, demonstrations, validator)
        return await write_product(context, trainer, stage), loss


async def _demonstrations(context: StageContext, stage: SftStage, init: Path) -> Iterator[Demonstration]:
    """What the stage has to imitate: conversations of other stages, or demonstrations played now."""
    chat = load_chat(init)
    if stage.data:
        return as_demonstrations(_rows(context, stage), chat, context.tools())
    assert stage.demonstrator is not None  # the config's validator saw to it
    assert stage.num_demonstrations is not None
    await play_once(context, stage, stage.demonstrator, chat, num=stage.num_demonstrations)
    return (as_demonstration(each) for each in played_before(context))


def _attempts(context: StageContext, stage: SftStage) -> Iterable[tuple[Task, Trajectory]]:
    """The same as attempts at their tasks, one for each and in the same order."""
    if stage.data:
        return attempts_in(_rows(context, stage))
    tasks = open_tasks(context.recipe, context.name, stage.tasks, seed=context.seed("tasks"), split="train")
    return ((tasks.task(each.key.task_index), each) for each in played_before(context))


def _rows(context: StageContext, stage: SftStage) -> Iterator[Row]:
    return (row for name in stage.data for row in rows_of(context.run, name))


async def _imitate(
    context: StageContext,
    stage: SftStage,
    trainer: Trainer,
    demonstrations: Demonstrations,
    validator: FineTuningValidator | None,
) -> float:
    """Every step that is not behind the last checkpoint; returns the last loss. Raises as `take_updates`."""
    loss, is_told = 0.0, False

    async def take(step: int) -> dict[str, float]:
        nonlocal loss, is_told
        started = time.perf_counter()
        rows = batch_at(demonstrations, step - 1, batch_size=stage.batch_size, seed=context.seed("batches"))
        batch = pack_demonstrations(rows)
        report = await update_or_keep(context, trainer, batch, sft_token_loss, sft_token_statistics, step=step)
        elapsed = time.perf_counter() - started
        figures = {} if validator is None else await validator.validate(trainer, step)
        figures |= {"update/skipped": float(report.is_skipped), "time/step_s": elapsed}
        if report.is_skipped:
            return figures
        loss = report.loss
        if report.grad_norm == 0 and not is_told:
            is_told = True
            context.warn(f"step {step}: the gradient is zero, so nothing is learnt. A learning rate may be far too high.")
        return {
            **figures,
            "sft/loss": report.loss,
            "sft/tokens_per_s": sum(len(row.ids) for row in rows) / elapsed,
            "update/grad_norm": report.grad_norm,
            "update/learning_rate": report.learning_rate,
            "policy/entropy_nats": report.statistics["entropy_nats"],
            **cost_metrics([report]),
        }

    await take_updates(context, stage, trainer, stage.steps, take)
    return loss
