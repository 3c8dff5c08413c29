"""DPO: trains a policy on preference pairs, one update a step, and keeps the one that ranks held-out pairs best.

The preferences of a stage, with its keys for them, are those that it learns from, batch by batch, and those that it is measured
on; a reward model has the same.
"""

from __future__ import annotations

import hashlib
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch
from pydantic import Field

from strop.algorithms.method import Column
from strop.errors import TaskError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, StageResult
from strop.reports.number_format import counted
from strop.rollout.demonstrate import said_ids
from strop.rollout.prompt import load_prompt
from strop.rollout.tool_calls import make_call_format
from strop.stages.context import StageContext, load_chat, product_of
from strop.stages.loop.checkpoints import CheckpointedKeys, HeldOutConfig, keep_if_best
from strop.stages.loop.steps import batch_at, take_updates
from strop.stages.loop.training_stage import TrainingStage, checked_steps
from strop.stages.loop.updates import keep_skipped
from strop.tasks.files import RowFile
from strop.training.batch import TokenBatch
from strop.training.optimizer import UpdateReport
from strop.training.preferences import (
    Pair,
    PairIds,
    PairRewards,
    Preference,
    pack_pairs,
    read_preferences,
    rewards_of,
    with_advantages,
)
from strop.training.sft import sft_token_loss, sft_token_statistics
from strop.training.trainer import Trainer

ItemT = TypeVar("ItemT")


class PreferenceKeys(CheckpointedKeys):
    """Keys of a stage that learns from preferences."""

    path: str = Field(description="A .jsonl of preferences: pairs, or single labelled responses.")
    test_share: float = Field(default=0.1, gt=0, lt=1, description="Share of the prompts to measure on.")
    max_length: int = Field(default=8192, ge=2, description="Tokens of prompt and response; longer ones are left out.")
    epochs: int = Field(default=1, ge=1, description="Passes over the preferences.")
    batch_size: int = Field(default=64, ge=1, description="Preferences of one update.")

    def num_updates(self, num: int) -> int:
        """Updates of the stage if it learns from `num` preferences."""
        return self.epochs * -(-num // self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSets(Generic[ItemT]):
    """What a stage learns from and what it is measured on, on disk, and how many preferences were left out."""

    train: RowFile[ItemT]
    test: RowFile[ItemT]
    num_left_out: int

    def batch(self, step: int, stage: PreferenceKeys, context: StageContext) -> list[ItemT]:
        """What is learned from in `step`, counted from 1."""
        return batch_at(self.train, step - 1, batch_size=stage.batch_size, seed=context.seed("batches"), with_rest=True)


class PreferenceStage(TrainingStage):
    """Base of stages that learn from preferences. Messages name what it cannot use, and what gives it more."""

    unusable: ClassVar[str]
    remedy: ClassVar[str]
    config: PreferenceKeys

    def open_sets(
        self, context: StageContext, opened: AsyncExitStack, keep: Callable[[Iterator[Preference]], Iterator[ItemT]]
    ) -> PreferenceSets[ItemT]:
        """Return the preferences of `path`, without those of a share of its prompts, and the others, as `opened` files.

        A warning says how many are left out.

        Args:
            keep: yields what is made of preferences that can be used.

        Raises:
            TaskError: the preferences cannot be read, or none are left to learn from or to measure on.
        """
        found = read_preferences(Path(self.config.path))
        numbers = split_by_prompt((each.prompt for each in found), share=self.config.test_share, seed=context.seed("test"))
        kept = (keep(found[number] for number in of_set) for of_set in numbers)
        train, test = (opened.enter_context(RowFile(each, context.directory.path)) for each in kept)
        num_left_out = len(found) - len(train) - len(test)
        if num_left_out:
            why = self.unusable.format(max_length=self.config.max_length)
            context.warn(f"{num_left_out} of {len(found)} preferences are left out: {why}")
        if not len(train) or not len(test):
            left = f"{len(train)} preferences are left to learn from and {len(test)} to measure on"
            raise TaskError(f"stages.{context.name}: {left}. {self.remedy}")
        return PreferenceSets(train=train, test=test, num_left_out=num_left_out)


def split_by_prompt(prompts: Iterable[str], *, share: float, seed: int) -> tuple[array[int], array[int]]:
    """Return (train, test): numbers of preferences with these `prompts`. No prompt is in both, and neither is empty."""
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


class PairValidationConfig(HeldOutConfig):
    """The policy is measured by its implicit rewards of pairs that are held out."""

    every_steps: int = Field(default=50, ge=1, description="Steps between two measurements.")
    num_pairs: int = Field(default=200, ge=1, description="Number of held-out pairs, the first of them.")


class DPO(PreferenceStage):
    """DPO (arXiv:2305.18290) on pairs of responses; the defaults are those of CS336 assignment 5's supplement."""

    unusable = "a prompt and a response of more than max_length = {max_length} tokens"
    remedy = "Give preferences of more prompts, or raise max_length."
    root_keys = frozenset({"tools"})

    class Config(PreferenceKeys):
        """Keys of `kind = "dpo"`. The model of `init` is also the reference."""

        prompt: str = Field(default="rstar2", description="The prompt in which a pair's prompt is posed.")
        beta: float = Field(default=0.1, gt=0, description="Weight of the KL divergence from the reference.")
        validation: PairValidationConfig = Field(
            default=PairValidationConfig(), description="How held-out pairs are measured during training."
        )

    config: Config

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        config = self.config
        return Estimate(
            arithmetic=f"{counted(config.epochs, 'epoch')} over the pairs of {config.path} in batches of {config.batch_size};"
            f" up to {config.validation.num_pairs} held out measured every {config.validation.every_steps} steps",
            trained=config.as_trained(rows=2 * config.batch_size, longest=config.max_length, num_references=1),
        )

    async def run(self, context: StageContext) -> StageResult:
        """Train from the last checkpoint to the last step.

        Raises:
            TaskError: the preferences cannot be read, are no pairs, or too few are left.
            ConfigError: the schedule of the learning rate needs more updates.
            CannotLearnError: too many updates in a row were skipped.
        """
        config = self.config
        init = product_of(context.run, config.init)
        chat, prompt, tools = load_chat(init), load_prompt(config.prompt), [tool.spec for tool in context.tools]
        calls = make_call_format(prompt.calls, tools)

        def as_ids(preference: Preference) -> PairIds:
            """The prompt as tasks are posed, and each response as one turn of the policy."""
            if not isinstance(preference, Pair):
                raise TaskError(
                    f"stages.{context.name}.path: {config.path} has single responses with labels, and DPO compares two. Give"
                    " rows of prompt, chosen and rejected, or train a reward model on these (kind = 'reward_model')."
                )
            chosen, rejected = (said_ids(response, chat, calls) for response in preference.responses)
            return PairIds(prompt=prompt.ids(chat, preference.prompt, tools), chosen=chosen, rejected=rejected)

        def keep(preferences: Iterator[Preference]) -> Iterator[PairIds]:
            return (pair for pair in map(as_ids, preferences) if pair.length <= config.max_length)

        async with AsyncExitStack() as opened:
            sets = self.open_sets(context, opened, keep)
            steps = checked_steps(context, config, config.num_updates(len(sets.train)))
            trainer = Trainer.from_directory(init, config.trainer, reference=init, total_updates=steps)
            opened.push_async_callback(trainer.close)
            held_out = _HeldOut(context, config, trainer, sets.test)

            async def take(step: int) -> tuple[UpdateReport, dict[str, float]]:
                started, pairs = time.perf_counter(), pack_pairs(sets.batch(step, config, context))
                batch = await _scored(trainer, pairs, (Column.REFERENCE_LOGPROBS, Column.OLD_LOGPROBS))
                figures = {"time/score_s": time.perf_counter() - started}
                rewards = rewards_of(batch, beta=config.beta)
                batch = with_advantages(batch, rewards.margins, beta=config.beta)
                update = trainer.update(batch, sft_token_loss, sft_token_statistics)
                report = await keep_skipped(context, batch, update, step=step)
                if not report.is_skipped:
                    figures |= {f"dpo/{name}": value for name, value in rewards.figures().items()}
                    figures["policy/entropy_nats"] = report.statistics["entropy_nats"]
                return report, figures

            async def validate(step: int) -> dict[str, float]:
                if not config.validation.is_due(step, last=steps):
                    return {}
                started, found = time.perf_counter(), await held_out.measure(step)
                figures = {f"validation/pair_{name}": value for name, value in found.items()}
                return figures | {"time/validation_s": time.perf_counter() - started}

            product = await take_updates(context, config, trainer, steps, take, validate)
        summary = (
            f"{counted(steps, 'update')} on {counted(len(sets.train), 'pair')}; {held_out.num} held out:"
            f" accuracy {held_out.last['accuracy']:.3f}, margin {held_out.last['margin']:.3f}"
        )
        return StageResult(summary=summary, product=product)


class _HeldOut:
    """Measures the policy by its implicit rewards of the first pairs that are held out, and keeps the best one."""

    def __init__(self, context: StageContext, stage: DPO.Config, trainer: Trainer, test: RowFile[PairIds]) -> None:
        self.num = min(stage.validation.num_pairs, len(test))
        self.last: dict[str, float] = {}  # what was found last
        self._context, self._stage, self._trainer, self._test = context, stage, trainer, test
        self._of_reference: list[TokenBatch] = []  # scored once: it never changes

    async def measure(self, step: int) -> dict[str, float]:
        """What is found of the policy after `step`."""
        trainer, size = self._trainer, self._stage.batch_size
        for start in range(0, 0 if self._of_reference else self.num, size):
            pairs = [self._test[number] for number in range(start, min(self.num, start + size))]
            self._of_reference.append(await _scored(trainer, pack_pairs(pairs), (Column.REFERENCE_LOGPROBS,)))
        scored = [await _scored(trainer, batch, (Column.OLD_LOGPROBS,)) for batch in self._of_reference]
        parts = [rewards_of(batch, beta=self._stage.beta) for batch in scored]
        chosen, rejected = torch.cat([part.chosen for part in parts]), torch.cat([part.rejected for part in parts])
        self.last = PairRewards(chosen=chosen, rejected=rejected).figures()
        await keep_if_best(self._context, trainer, step, self.last | {"num_pairs": self.num})
        return self.last


async def _scored(trainer: Trainer, batch: TokenBatch, columns: Sequence[Column]) -> TokenBatch:
    for column in columns:
        batch = await trainer.score(batch, column)
    return batch
