"""Supervised fine-tuning: imitate demonstrations, one update a step; with `only_right` those that the reward calls right."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from strop.errors import ConfigError, MachineError, TaskError, UserError
from strop.evaluation.metrics import Verdict, require_verdict, verdict_of
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, Product, Stage, StageResult
from strop.reports.number_format import counted
from strop.rewards import judge_group, make_reward
from strop.rollout.environment import all_of
from strop.rollout.player import Excluded, Judge
from strop.rollout.prompt import load_prompt
from strop.run_directory import iter_lines, shortened
from strop.stages.context import TASK, TRAJECTORY, Row, StageContext, load_chat, product_of
from strop.stages.conversations import as_demonstrations, write_demonstrations
from strop.stages.loop.engines import task_files
from strop.stages.loop.fixed_set import SampledKeys, why_not_right
from strop.stages.loop.rollouts import open_player
from strop.stages.loop.steps import Validator, batch_at, take_updates
from strop.stages.loop.training_stage import TrainingKeys, TrainingStage, check_schedule, checked_steps
from strop.stages.loop.updates import keep_skipped
from strop.tasks.demonstrators import DemonstratorConfig
from strop.tasks.files import RowFile, writing_rows
from strop.tasks.protocol import Split
from strop.tasks.rows import RowSource, iterate_rows
from strop.training.optimizer import UpdateReport
from strop.training.sft import cut_into_rows, pack_demonstrations, sft_token_loss, sft_token_statistics
from strop.training.trainer import Trainer
from strop.types import Group, Task, Trajectory

_JUDGED_AT_ONCE = 32


class SFT(TrainingStage):
    """Supervised fine-tuning on conversations of other stages, or on demonstrations played in the real environment."""

    reads = (Product.CONVERSATIONS,)

    class Config(TrainingKeys):
        """Keys of `kind = "sft"`."""

        data: tuple[str, ...] = Field(default=(), description="Stages whose conversations are imitated.")
        demonstrator: DemonstratorConfig | None = Field(
            default=None, description="What writes the demonstrations, instead of `data`."
        )
        num_demonstrations: int | None = Field(default=None, ge=1, description="Number of demonstrations of `demonstrator`.")
        only_right: bool = Field(default=False, description="Imitate only demonstrations that the reward judges right.")
        truths: RowSource | None = Field(
            default=None, description="With only_right: rows with the right answers, joined to the demonstrations by question."
        )
        steps: int | None = Field(default=None, ge=1, description="Most updates. Default: as many as `epochs` need.")
        epochs: int | None = Field(
            default=None, ge=1, le=10**6, description="Passes over the demonstrations. Default: as many as `steps` need."
        )
        batch_size: int = Field(default=32, ge=1, description="Demonstrations of one update, or rows of `row_length`.")
        row_length: int | None = Field(
            default=None,
            ge=1,
            description="Tokens of a row: demonstrations are placed end to end and cut, and all tokens are imitated, prompts"
            " included. Default: one row each, of which only what the demonstrator says is imitated.",
        )

        @model_validator(mode="after")
        def _is_consistent(self) -> Self:
            self._check_source()
            if self.row_length is None and self.num_demonstrations is not None and self.batch_size > self.num_demonstrations:
                raise ValueError(
                    f"batch_size is {self.batch_size}, but there are only {self.num_demonstrations} demonstrations. Lower"
                    " batch_size, or raise num_demonstrations."
                )
            if self.only_right:
                require_verdict(self.reward, "only_right is true")
            if self.truths is not None and not self.only_right:
                raise ValueError("truths has answers to judge demonstrations by, but only_right is false. Set it to true.")
            if self.steps is None and self.epochs is None:
                raise ValueError("steps and epochs are both missing: give the number of updates, or of passes over the data.")
            if self.steps is not None:
                check_schedule(self.trainer.optimizer, self.steps)
            return self

        def num_updates(self, num_demonstrations: int) -> int:
            """Updates of the stage if so many demonstrations are imitated."""
            of_epochs = math.inf if self.epochs is None else math.ceil(self.epochs * num_demonstrations / self.batch_size)
            return int(min(of_epochs, math.inf if self.steps is None else self.steps))

        def _check_source(self) -> None:
            if bool(self.data) == (self.demonstrator is not None):
                raise ValueError("give either data (stages that make conversations) or demonstrator, and not both.")
            if (self.demonstrator is None) != (self.num_demonstrations is None):
                raise ValueError("num_demonstrations is the number that the demonstrator plays: give both, or neither.")

    config: Config

    @property
    def opens_engines(self) -> bool:
        return self.config.validation is not None

    @property
    def is_judged(self) -> bool:
        return self.config.only_right or self.opens_engines

    def keys(self) -> dict[str, Any]:
        """All but the reward, if it judges nothing."""
        table = self.table()
        return table if self.is_judged else {key: value for key, value in table.items() if key != "reward"}

    def files(self) -> Mapping[str, Path]:
        splits: list[Split] = ["train"] if self.config.demonstrator is not None else []
        truths = {} if self.config.truths is None else task_files("truths", self.config.truths, ["train"])
        return {**task_files("tasks", self.config.tasks, splits), **truths, **self.config.validation_files()}

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        config = self.config
        is_one_row_each = config.num_demonstrations is not None and config.row_length is None
        steps = config.num_updates(config.num_demonstrations or 0) if is_one_row_each else config.steps
        num = (steps or 0) * config.batch_size
        if config.num_demonstrations is None:
            source, longest = f"the conversations of {', '.join(config.data)}", config.trainer.max_tokens_per_microbatch
        elif config.row_length is not None:
            source = f"rows of {config.row_length} tokens of {config.num_demonstrations} demonstrations"
            longest = config.row_length
        else:
            source = f"{config.num_demonstrations} demonstrations = {num / config.num_demonstrations:.1f} epochs"
            longest = recipe.engine.max_length
        taken = counted(config.epochs or 0, "epoch") + " in batches of" if steps is None else f"{counted(steps, 'step')} x"
        only_right = "; more epochs if some are wrong, since only right ones are imitated" if config.only_right else ""
        tokens = num * (config.row_length or config.sampling.max_tokens)
        return Estimate(
            arithmetic=f"{taken} {config.batch_size} of {source}{only_right}",
            trained=config.as_trained(tokens, rows=config.batch_size, longest=longest),
        )

    async def run(self, context: StageContext) -> StageResult:
        """Train from the last checkpoint to the last step. Raises `TaskError` if there are too few demonstrations."""
        config = self.config
        init = product_of(context.run, config.init)
        chat = load_chat(init)
        paths = [product_of(context.run, name) for name in config.data]
        if config.demonstrator is not None:
            paths = [context.directory.data / "demonstrations.jsonl"]
            if not paths[0].exists():  # else an earlier try played them
                num = config.num_demonstrations or 0
                await write_demonstrations(context, config, config.demonstrator, chat, paths[0], num=num)
        demonstrations, source = as_demonstrations(_rows(paths), chat, context.tools), ""
        if config.only_right:
            source = await judge_demonstrations(context, config, _rows(paths))
            verdicts = iter_lines(context.directory.verdicts)
            demonstrations = (each for each, row in zip(demonstrations, verdicts, strict=True) if row["is_kept"])
        if config.row_length is not None:
            demonstrations = cut_into_rows(demonstrations, config.row_length)
        async with AsyncExitStack() as opened:
            on_disk = opened.enter_context(RowFile(demonstrations, context.directory.data))
            source = source or f"{len(on_disk)} demonstrations"
            if config.row_length is not None:
                source = f"{len(on_disk)} rows of {config.row_length} tokens"
            if len(on_disk) < config.batch_size:
                raise TaskError(
                    f"stages.{context.name}: {source}, fewer than batch_size = {config.batch_size}. Lower batch_size, or let"
                    f" {', '.join(config.data) or 'the demonstrator'} make more."
                )
            steps = checked_steps(context, config, config.num_updates(len(on_disk)))
            trainer = Trainer.from_directory(init, config.trainer, total_updates=steps)
            opened.push_async_callback(trainer.close)
            validator = None
            if config.validation is not None:
                player = await opened.enter_async_context(open_player(context, config, init))
                validator = Validator(player, config, config.validation)
            loss, has_warned = 0.0, False

            async def take(step: int) -> tuple[UpdateReport, dict[str, float]]:
                nonlocal loss, has_warned
                started = time.perf_counter()
                rows = batch_at(on_disk, step - 1, batch_size=config.batch_size, seed=context.seed("batches"))
                batch = pack_demonstrations(rows)
                update = trainer.update(batch, sft_token_loss, sft_token_statistics)
                report = await keep_skipped(context, batch, update, step=step)
                elapsed = time.perf_counter() - started
                if report.is_skipped:
                    return report, {}
                loss = report.loss
                if report.grad_norm == 0 and not has_warned:
                    has_warned = True
                    why = "the gradient is zero, so nothing is learnt. A learning rate may be far too high."
                    context.warn(f"step {step}: {why}")
                return report, {
                    "sft/loss": report.loss,
                    "sft/tokens_per_s": sum(len(row.ids) for row in rows) / elapsed,
                    "policy/entropy_nats": report.statistics["entropy_nats"],
                }

            async def validate(step: int) -> dict[str, float]:
                return {} if validator is None else await validator.validate(trainer, step, config, last=steps)

            product = await take_updates(context, config, trainer, steps, take, validate)
        summary = f"{counted(steps, 'update')} on {source}, last loss {loss:.3f}"
        return StageResult(summary=summary, product=product)


def _rows(paths: Sequence[Path]) -> Iterator[Row]:
    return (row for path in paths for row in iter_lines(path))


class Distillation(SFT):
    """SFT on conversations that a teacher wrote: a model that the student was not trained from."""

    class Config(SFT.Config):
        """Keys of `kind = "distil"`: those of `sft` without a demonstrator."""

        def _check_source(self) -> None:
            if self.demonstrator is not None or self.num_demonstrations is not None or not self.data:
                raise ValueError(
                    "kind is 'distil', which imitates a teacher. Name stages with rollouts of the teacher in data (kind ="
                    " 'rejection_sampling'), without demonstrator and num_demonstrations; or set kind = 'sft'."
                )

    config: Config

    def check(self, name: str, recipe: Recipe, machine: Machine) -> Iterator[UserError]:
        origins, stages = [self.init], recipe.stages
        while init := stages[origins[-1]].init:
            origins.append(init)
        for source in self.config.data:
            teachers = list(_teachers_of(source, stages))
            if not teachers:
                yield ConfigError(
                    f"stages.{name}.data names {source!r}, which has no rollouts of a teacher. Name a stage of kind"
                    " 'rejection_sampling', or a mix that has one; or set kind = 'sft'."
                )
            if own := [teacher for teacher in teachers if teacher in origins]:
                yield ConfigError(
                    f"stages.{name}.data: the rollouts of {source!r} are by {own[0]!r}, from which the student is trained."
                    " Start from another model, or set kind = 'sft'."
                )
        yield from super().check(name, recipe, machine)


def _teachers_of(source: str, stages: Mapping[str, Stage]) -> Iterator[str]:
    """The stages whose models wrote conversations of `source`, through mixes."""
    stage = stages[source]
    if isinstance(stage.config, SampledKeys):
        yield stage.init
    elif stage.makes is Product.SAME:
        for each in stage.inputs():
            yield from _teachers_of(each.stage, stages)


def _attempts_in(stage: SFT.Config, rows: Iterable[Row]) -> Iterator[tuple[Task, Trajectory]]:
    """Yield rows of conversations as what can be judged, each at its task with the answer that `truths`, if any, has for it.

    Raises `TaskError` for a row without a task, or without an answer in `truths`.
    """
    truths, answers = stage.truths, dict[str, str]()
    if truths is not None:
        bare = load_prompt(stage.prompt).bare
        answers = {bare(truth.question).strip(): truth.answer for truth in iterate_rows(truths, split="train")}
    for row in rows:
        if "task" not in row:
            raise TaskError(
                f"only_right is true, but conversation {row.get('id')!r} has no true answer to judge it by. Leave only_right"
                " out, or name stages of demonstrations or rejection_sampling in data."
            )
        task = TASK.validate_python(row["task"])
        if truths is not None:
            question = bare(task.question).strip()
            if question not in answers:
                raise TaskError(
                    f"truths: {truths.source('train')} has no row with the question of task {task.id!r} of {task.source},"
                    f" {shortened(repr(question))}. Add the row, or remove the task."
                )
            task = replace(task, answer=answers[question])
        yield task, TRAJECTORY.validate_python(row["trajectory"])


async def judge_demonstrations(context: StageContext, stage: SFT.Config, rows: Iterable[Row]) -> str:
    """Judge `rows` of conversations by the stage's reward, unless an earlier try did, and return the verdicts in words.

    An attempt that cannot be judged because the machine fails is void: it is not kept, and a warning says so.

    Raises:
        TaskError: no attempt is right, or a task has no answer to judge by.
        MachineError: all are void.
    """
    path = context.directory.verdicts
    if not path.exists():
        await _write_verdicts(context, stage, _attempts_in(stage, rows), path)
    dropped = Counter(str(row["reason"]).partition(":")[0] for row in iter_lines(path))
    num, first = dropped.total(), next(iter_lines(path), {})
    num_kept = dropped.pop("", 0)
    context.event("demonstrations_judged", num_kept=num_kept, num_dropped=num - num_kept, dropped=dict(dropped))
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) or "none"
    if num and not num_kept:
        raise TaskError(
            f"stages.{context.name}: none of {num} demonstrations is right ({reasons}). The first is of task {first['id']!r},"
            f" whose true answer is {first['answer']!r}. All verdicts are in {path}. Check that the reward reads answers in the"
            f" form of the demonstrations, or leave only_right out; then rerun the stage with --from {context.name}."
        )
    return f"{num_kept} of {num} demonstrations, those that are right (dropped: {reasons})"


async def _write_verdicts(
    context: StageContext, stage: SFT.Config, attempts: Iterable[tuple[Task, Trajectory]], path: Path
) -> None:
    reward = make_reward(stage.reward, context.runner)
    judge, verdict = Judge(reward=reward, weights=stage.reward.weights), verdict_of(stage.reward)
    num, void = 0, list[str]()
    try:
        with writing_rows(path) as add:
            waiting = iter(attempts)
            while several := list(islice(waiting, _JUDGED_AT_ONCE)):
                if stage.reward.compares_answers and (without := [task.id for task, _ in several if not task.answer.strip()]):
                    raise TaskError(f"stages.{context.name}: only_right is true, but task {without[0]!r} has no true answer.")
                for row in await all_of([_judged(judge, verdict, task, each) for task, each in several]):
                    add(row)
                    num += 1
                    void += [row["reason"]] if row["reason"].startswith("void") else []
            if void and len(void) == num:
                raise MachineError(f"stages.{context.name}: no demonstration of {num} could be judged; the first is {void[0]}")
    finally:
        await reward.close()
    if void:
        context.warn(f"{len(void)} of {num} demonstrations could not be judged and are dropped; the first is {void[0]}")


async def _judged(judge: Judge, verdict: Verdict, task: Task, attempt: Trajectory) -> Row:
    parts: dict[str, float] = {}
    try:
        scored = await judge.score(task, attempt)
        group = judge_group(judge.reward, Group(task=task, task_index=attempt.key.task_index, trajectories=(scored,)))
        if group.trajectories:
            reason, parts = why_not_right(verdict(group.trajectories[0])), dict(group.trajectories[0].reward_parts)
        else:
            why = scored.reward_parts.why if isinstance(scored.reward_parts, Excluded) else "no judge could judge it"
            reason = f"void: {why}"
    except MachineError as error:
        reason = f"void: {error}"
    row = {"id": task.id, "source": task.source, "answer": task.answer}
    return {**row, "is_kept": not reason, "reason": reason, "reward_parts": parts}
