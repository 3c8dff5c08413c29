"""DPO: trains a policy on preference pairs, one update a step, and keeps the one that ranks held-out pairs best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from strop.algorithms.protocol import Column
from strop.errors import TaskError
from strop.pipelines.id_file import IdFile
from strop.pipelines.pair_file import PairFile
from strop.pipelines.preference_sets import batch_of_epoch, count_steps, open_sets
from strop.pipelines.recipe import DpoStage
from strop.pipelines.skipped import update_or_keep
from strop.pipelines.stage import StageContext, load_chat, model_of
from strop.pipelines.step_figures import cost_metrics
from strop.pipelines.stepping import take_updates
from strop.pipelines.validation import keep_if_best, write_product
from strop.reports.scales import counted
from strop.rollout.call_format import make_call_format
from strop.rollout.chat import ChatFormat
from strop.rollout.prompt import load_prompt
from strop.rollout.retelling import said_ids
from strop.training.batch import TokenBatch
from strop.training.dpo import (
    PairIds,
    PairRewards,
    pack_pairs,
    pair_token_loss,
    pair_token_statistics,
    rewards_of,
    with_advantages,
)
from strop.training.opening import open_trainer
from strop.training.preferences import Pair, Preference
from strop.training.protocol import Trainer


async def run_dpo_stage(context: StageContext, stage: DpoStage) -> tuple[Path, str]:
    """Train from the last checkpoint to the last step; returns the model directory and one sentence about it.

    Raises:
        TaskError: the preferences cannot be read, are no pairs, or too few are left.
        ConfigError: the schedule of the learning rate has no use for so few updates.
        CannotLearnError: too many updates in a row were skipped.
    """
    init = model_of(context.run, stage.init)
    as_ids = _reader(context, stage, load_chat(init))

    def keep(directory: Path, preferences: Iterator[Preference]) -> PairFile:
        return PairFile(directory, (pair for pair in map(as_ids, preferences) if pair.length <= stage.max_length))

    async with AsyncExitStack() as opened:
        sets = open_sets(
            context,
            stage,
            opened,
            keep,
            why_left_out=f"a prompt and a response of more than max_length = {stage.max_length} tokens",
            remedy="Give preferences of more prompts, or raise max_length.",
        )
        steps = count_steps(context, stage, len(sets.train))
        trainer = open_trainer(init, stage.trainer, reference=init, total_updates=steps)
        opened.push_async_callback(trainer.close)
        held_out = _HeldOut(context, stage, trainer, sets.test)
        found = await _learn(context, stage, trainer, sets.train, held_out, steps)
        product = await write_product(context, trainer, stage)
        return product, (
            f"{counted(steps, 'update')} on {counted(len(sets.train), 'pair')}; {held_out.num} held out:"
            f" accuracy {found['accuracy']:.3f}, margin {found['margin']:.3f}"
        )


def _reader(context: StageContext, stage: DpoStage, chat: ChatFormat) -> Callable[[Preference], PairIds]:
    """Poses the prompt of a pair as the stage's tasks are posed; a response is what the policy would say in one turn."""
    prompt, tools = load_prompt(stage.prompt), [tool.spec for tool in context.tools()]
    calls = make_call_format(prompt.calls, tools)

    def read(preference: Preference) -> PairIds:
        if not isinstance(preference, Pair):
            raise TaskError(
                f"stages.{context.name}.path: {stage.path} has single responses with labels, and DPO compares two. Give rows of"
                " prompt, chosen and rejected, or train a reward model on these (kind = 'reward_model')."
            )
        chosen, rejected = (said_ids(response, chat, calls) for response in preference.responses)
        return PairIds(prompt=prompt.ids(chat, preference.prompt, tools), chosen=chosen, rejected=rejected)

    return read


async def _learn(
    context: StageContext, stage: DpoStage, trainer: Trainer, train: IdFile[PairIds], held_out: _HeldOut, steps: int
) -> Mapping[str, float]:
    """Every step that is not behind the last checkpoint; returns what was last found of the held-out pairs."""
    found: Mapping[str, float] = {}

    async def take(step: int) -> dict[str, float]:
        nonlocal found
        started = time.perf_counter()
        pairs = batch_of_epoch(train, step - 1, size=stage.batch_size, seed=context.seed("batches"))
        batch = await _scored(trainer, pack_pairs(pairs), (Column.REFERENCE_LOGPROBS, Column.OLD_LOGPROBS))
        score_s = time.perf_counter() - started
        rewards = rewards_of(batch, beta=stage.beta)
        batch = with_advantages(batch, rewards.margins, beta=stage.beta)
        report = await update_or_keep(context, trainer, batch, pair_token_loss, pair_token_statistics, step=step)
        figures = {
            "update/skipped": float(report.is_skipped),
            "time/score_s": score_s,
            "time/step_s": time.perf_counter() - started,
        }
        if not report.is_skipped:
            figures |= {
                **{f"dpo/{name}": value for name, value in rewards.figures().items()},
                "update/grad_norm": report.grad_norm,
                "update/learning_rate": report.learning_rate,
                "policy/entropy_nats": report.statistics["entropy_nats"],
            } | cost_metrics([report])
        if stage.validation.is_due(step, last=steps):
            started = time.perf_counter()
            found = await held_out.measure(step)
            figures |= {f"validation/pair_{name}": value for name, value in found.items()}
            figures["time/validation_s"] = time.perf_counter() - started
        return figures

    await take_updates(context, stage, trainer, steps, take)
    return found


class _HeldOut:
    """Measures the policy by its implicit rewards of the first pairs that are held out, and keeps the best one."""

    def __init__(self, context: StageContext, stage: DpoStage, trainer: Trainer, test: IdFile[PairIds]) -> None:
        self.num = min(stage.validation.num_pairs, len(test))
        self._context, self._stage, self._trainer, self._test = context, stage, trainer, test
        self._of_reference: list[TokenBatch] = []  # scored once: it never changes

    async def measure(self, step: int) -> dict[str, float]:
        """What is found of the policy after `step`."""
        parts: list[PairRewards] = []
        for batch in await self._batches():
            parts.append(rewards_of(await _scored(self._trainer, batch, (Column.OLD_LOGPROBS,)), beta=self._stage.beta))
        chosen, rejected = torch.cat([part.chosen for part in parts]), torch.cat([part.rejected for part in parts])
        found = PairRewards(chosen=chosen, rejected=rejected).figures()
        if self._stage.validation.keep_best:
            await keep_if_best(self._context, self._trainer, step, found | {"num_pairs": self.num})
        return found

    async def _batches(self) -> list[TokenBatch]:
        for start in range(0, 0 if self._of_reference else self.num, self._stage.batch_size):
            pairs = [self._test[number] for number in range(start, min(self.num, start + self._stage.batch_size))]
            self._of_reference.append(await _scored(self._trainer, pack_pairs(pairs), (Column.REFERENCE_LOGPROBS,)))
        return self._of_reference


async def _scored(trainer: Trainer, batch: TokenBatch, columns: Sequence[Column]) -> TokenBatch:
    for column in columns:
        batch = await trainer.score(batch, column)
    return batch
