"""Supervised fine-tuning: imitate demonstrations, one update a step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from strop.errors import ConfigError, TaskError, UserError
from strop.evaluation.metrics import verdict_of
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, Product, Stage, StageResult
from strop.reports.number_format import counted
from strop.rollout.chat_template import ChatFormat
from strop.run_directory import iter_lines
from strop.stages.context import Row, StageContext, load_chat, product_of
from strop.stages.conversations import as_demonstrations
from strop.stages.demonstrations import (
    attempts_in,
    batch_at,
    judge_demonstrations,
    only_kept,
    with_truths,
    write_demonstrations,
)
from strop.stages.loop.engines import task_files
from strop.stages.loop.rollouts import open_player
from strop.stages.loop.steps import take_updates
from strop.stages.loop.training_stage import TrainingKeys, TrainingStage, check_schedule, checked_steps
from strop.stages.loop.updates import keep_skipped
from strop.stages.loop.validation import Validator, write_product
from strop.stages.sampled import SampledKeys
from strop.tasks.demonstrators import DemonstratorConfig
from strop.tasks.files import IndexedRows, RowFile
from strop.tasks.protocol import Split
from strop.tasks.rows import RowSource
from strop.training.optimizer import UpdateReport
from strop.training.sft import Demonstration, cut_into_rows, pack_demonstrations, sft_token_loss, sft_token_statistics
from strop.training.trainer import Trainer


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
            if self.only_right and not verdict_of(self.reward).parts:
                raise ValueError(
                    "only_right is true, but no part of reward says what is right. Give it one that does (math, code, r1_zero,"
                    " question_only, arpo), or leave only_right out."
                )
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

        @property
        def has_own_tasks(self) -> bool:
            return self.demonstrator is not None

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
        return Estimate(
            arithmetic=f"{taken} {config.batch_size} of {source}{only_right}",
            trained=config.as_trained(
                num * (config.row_length or config.sampling.max_tokens), rows=config.batch_size, longest=longest
            ),
        )

    async def run(self, context: StageContext) -> StageResult:
        """Train from the last checkpoint to the last step. Raises `TaskError` if there are too few demonstrations."""
        config = self.config
        init = product_of(context.run, config.init)
        chat = load_chat(init)
        paths = await _conversations(context, config, chat)
        demonstrations = as_demonstrations(_rows(paths), chat, context.tools)
        source = ""
        if config.only_right:
            attempts = attempts_in(_rows(paths))
            attempts = attempts if config.truths is None else with_truths(config, config.truths, attempts)
            source = await judge_demonstrations(context, config, attempts)
            demonstrations = only_kept(context.directory, demonstrations)
        if config.row_length is not None:
            demonstrations = cut_into_rows(demonstrations, config.row_length)
        with RowFile(demonstrations, context.directory.path / "data") as on_disk:
            source = source or f"{len(on_disk)} demonstrations"
            if config.row_length is not None:
                source = f"{len(on_disk)} rows of {config.row_length} tokens"
            if len(on_disk) < config.batch_size:
                raise TaskError(
                    f"stages.{context.name}: {source}, fewer than batch_size = {config.batch_size}. Lower batch_size, or let"
                    f" {', '.join(config.data) or 'the demonstrator'} make more."
                )
            async with AsyncExitStack() as opened:
                steps = checked_steps(context, config, config.num_updates(len(on_disk)))
                trainer = Trainer.from_directory(init, config.trainer, total_updates=steps)
                opened.push_async_callback(trainer.close)
                validator = None
                if config.validation is not None:
                    player = await opened.enter_async_context(open_player(context, config, init))
                    validator = Validator(player, config, config.validation)
                loss = await _imitate(context, config, trainer, on_disk, validator, steps=steps)
                product = await write_product(context, trainer, config, config.validation)
        summary = f"{counted(steps, 'update')} on {source}, last loss {loss:.3f}"
        return StageResult(summary=summary, product=product)


async def _conversations(context: StageContext, stage: SFT.Config, chat: ChatFormat) -> list[Path]:
    """The files of what is imitated: those of other stages, or demonstrations, played unless an earlier try did."""
    if stage.demonstrator is None:
        return [product_of(context.run, name) for name in stage.data]
    assert stage.num_demonstrations is not None  # the validator saw to it
    path = context.directory.path / "data" / "demonstrations.jsonl"
    if not path.exists():
        await write_demonstrations(context, stage, stage.demonstrator, chat, path, num=stage.num_demonstrations)
    return [path]


def _rows(paths: Sequence[Path]) -> Iterator[Row]:
    return (row for path in paths for row in iter_lines(path))


async def _imitate(
    context: StageContext,
    stage: SFT.Config,
    trainer: Trainer,
    demonstrations: IndexedRows[Demonstration],
    validator: Validator | None,
    *,
    steps: int,
) -> float:
    """Take every step after the last checkpoint, and return the last loss. Raises as `take_updates`."""
    loss, has_warned = 0.0, False

    async def take(step: int) -> tuple[UpdateReport, dict[str, float]]:
        nonlocal loss, has_warned
        started = time.perf_counter()
        rows = batch_at(demonstrations, step - 1, batch_size=stage.batch_size, seed=context.seed("batches"))
        batch = pack_demonstrations(rows)
        update = trainer.update(batch, sft_token_loss, sft_token_statistics)
        report = await keep_skipped(context, batch, update, step=step)
        elapsed = time.perf_counter() - started
        if report.is_skipped:
            return report, {}
        loss = report.loss
        if report.grad_norm == 0 and not has_warned:
            has_warned = True
            context.warn(f"step {step}: the gradient is zero, so nothing is learnt. A learning rate may be far too high.")
        return report, {
            "sft/loss": report.loss,
            "sft/tokens_per_s": sum(len(row.ids) for row in rows) / elapsed,
            "policy/entropy_nats": report.statistics["entropy_nats"],
        }

    async def validate(step: int) -> dict[str, float]:
        return {} if validator is None else await validator.validate(trainer, step, stage, last=steps)

    await take_updates(context, stage, trainer, steps, take, validate)
    return loss


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
