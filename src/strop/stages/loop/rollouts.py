"""Plays the tasks of a stage on its engines, step by step, and records what was selected from them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from types import MappingProxyType

from torch import Tensor

from strop.algorithms.method import Selection
from strop.engine.model_directory import config_of
from strop.engine.protocol import Capabilities
from strop.engine.publication import Publication
from strop.evaluation.metrics import num_sampled_tokens, verdict_of
from strop.recipe.stage import PlayedKeys
from strop.rewards import SumReward, judge_group, make_reward
from strop.rollout.branching import Branching, branch_metrics, entropy_warning
from strop.rollout.chat_template import ChatFormat
from strop.rollout.environment import ToolEnvironments
from strop.rollout.player import Judge, Player, collect
from strop.rollout.prompt import load_prompt
from strop.rollout.scheduler.engine_pool import EnginePool
from strop.rollout.scheduler.report import BatchReport
from strop.run_directory import write_json
from strop.stages.context import StageContext, load_chat, tasks_to_play
from strop.stages.loop.engines import check_longest, open_engine_pool
from strop.stages.loop.ledger import Rollouts, StepLedger, write_timeline
from strop.stages.loop.training_stage import RolloutKeys
from strop.tasks.protocol import TaskSource
from strop.training.trainer import Trainer
from strop.types import Group, RolloutKey, Task

_FEW_VOIDS, _MUCH_LONGER = 3, 1.5


class GroupPlayer:
    """Plays tasks of one stage on its engines and judges their rollouts. Opened by `open_player`."""

    def __init__(self, context: StageContext, stage: PlayedKeys, pool: EnginePool, model: Path, chat: ChatFormat) -> None:
        self.context, self.pool, self.chat = context, pool, chat
        self._vocab_size: int = config_of(model).vocab_size  # a tokenizer may have fewer ids
        self._prompt = load_prompt(stage.prompt)
        self.reward = make_reward(stage.reward, context.runner)
        self.verdict = verdict_of(stage.reward)
        self._lasting = AsyncExitStack()  # closes the last publication, if it lasts
        self._published: dict[int, str] = {}  # checksums by version

    def check(self, stage: PlayedKeys, tasks: TaskSource) -> None:
        """Raises `ConfigError` if no engine can hold a rollout of the first tasks, or of any of an evaluation."""
        context, held = self.context, self.pool.max_request_tokens
        limit = f"{held}, which is what the KV memory of the largest engine holds"
        check_longest(context.name, stage, tasks, self.chat, context.tools, held=held, limit=limit)

    def ledger(self, path: Path, weights: str, *, reuse: Callable[[Rollouts], Rollouts] | None = None) -> closing[StepLedger]:
        """The ledger of rollouts in the file `path`; see `StepLedger`."""
        self._published.setdefault(self.pool.policy_version, weights)
        return closing(StepLedger(path, weights=weights, published=self._published, reuse=reuse))

    async def play(
        self, stage: PlayedKeys, tasks: Sequence[tuple[int, Task]], ledger: StepLedger, *, num_rollouts: int, seed: int
    ) -> AsyncIterator[Group]:
        """Yield the judged group of each task, in the order in which they end.

        Rollouts that the ledger has are not played again.

        Args:
            stage: as its schedule has it now.
        """
        environments = ToolEnvironments(
            self.chat, self._prompt, self.context.tools, stage.limits, ledger.record_call, stage.environment
        )
        player = Player(
            engine=self.pool,
            environments=environments,
            judge=Judge(reward=self.reward, weights=stage.reward.weights),
            sampling=stage.sampling,
            stop_ids=self.chat.stop_ids,
            stop_strings=environments.stop_strings,
            branching=self.branching(stage),
            shares_engines=ledger.is_mixed,
        )
        finished = ledger.finished_before
        async for group in collect(tasks, player, num_rollouts=num_rollouts, seed=seed, observer=ledger, finished=finished):
            yield judge_group(self.reward, group)

    def branching(self, stage: PlayedKeys) -> Branching | None:
        """Where the rollouts of `stage` fork; None where they do not."""
        return None if stage.forks is None else Branching(config=stage.forks, vocab_size=self._vocab_size)

    async def publish(self, trainer: Trainer, *, version: int, lasts: bool = False, keeps_requests: bool = False) -> str:
        """Give the trainer's weights to every engine; returns their checksum.

        Args:
            lasts: an engine that joins before the next publication gets these weights, though the trainer has changed them.
            keeps_requests: see `Publication`; only if it lasts.
        """
        before, lasting = self._lasting, AsyncExitStack()
        self._lasting, written = lasting, None

        @asynccontextmanager
        async def publish(engine: Capabilities) -> AsyncIterator[Publication]:
            nonlocal written
            if written is None:
                publication = await trainer.publication(engine, version=version)
                if not lasts:
                    async with publication:
                        yield publication
                    return
                publication.keeps_requests = keeps_requests
                await publication.write()
                lasting.push_async_callback(publication.close)
                written = publication
            yield written

        try:
            weights = self._published[version] = await self.pool.publish(publish, version=version)
            return weights
        finally:
            await before.aclose()

    async def close(self) -> None:
        await self.reward.close()
        await self._lasting.aclose()


@asynccontextmanager
async def open_player(context: StageContext, stage: PlayedKeys, model: Path) -> AsyncIterator[GroupPlayer]:
    """Engines with the weights of the directory `model` and a judge, closed on the way out.

    Raises:
        UserError: an engine cannot be opened as the recipe says.
    """
    chat, engine = load_chat(model), context.recipe.engine
    if isinstance(stage, RolloutKeys) and stage.trainer.lora is not None:  # room for adapters that are sampled with at once
        engine = engine.with_adapters(rank=stage.trainer.lora.rank, slots=stage.staleness + 1)
    async with AsyncExitStack() as opened:
        pool = await open_engine_pool(context, engine, model, chat)
        opened.push_async_callback(pool.close)
        player = GroupPlayer(context, stage, pool, model, chat)
        opened.push_async_callback(player.close)
        yield player


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStep:
    """The rollouts of a step, and what playing them was like."""

    groups: Sequence[Group]  # in canonical order
    figures: Mapping[str, float]  # metrics of what the engines did
    time_s: float
    num_tokens: int  # that were sampled in this time: without those of rollouts that an interrupted try had finished

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.time_s


class StepRollouts:
    """Plays the steps of one stage: step k has the k-th `tasks_per_step` tasks of its stream."""

    def __init__(self, player: GroupPlayer, stage: RolloutKeys) -> None:
        """Raises `UserError` if there are no tasks, or no engine can hold a rollout of them."""
        self.player, self._context, self._stage = player, player.context, stage
        self.reuse: Callable[[int, Rollouts], Rollouts] | None = None  # in flight over publications: `StepLedger`'s, by step
        engine = player.context.recipe.engine
        self._sleeps = engine.sleeps or not engine.is_apart
        self._warned_of: set[str] = set()  # parts of the reward
        self._sources: list[tuple[TaskSource, TaskSource]] = []
        for each in stage.with_each_tasks():
            source = tasks_to_play(player.context, each)
            player.check(each, source)
            self._sources.append((each.tasks, source))

    async def publish(self, trainer: Trainer, *, version: int) -> str:
        """Give the trainer's weights to every engine; returns their checksum."""
        in_flight = self.reuse is not None
        return await self.player.publish(trainer, version=version, lasts=self._stage.staleness > 0, keeps_requests=in_flight)

    async def sleep(self) -> None:
        """The rollouts of a step are played: leave memory that engines share with the trainer to it."""
        if self._sleeps:
            await self.player.pool.sleep()

    def tasks_of(self, stage: RolloutKeys) -> TaskSource:
        """The tasks of `stage`, as its schedule has it now."""
        return next(source for tasks, source in self._sources if tasks == stage.tasks)

    async def play(
        self, step: int, stage: RolloutKeys, weights: str, *, refill_rounds: int = 0, is_used: Callable[[Group], bool] = bool
    ) -> PlayedStep:
        """The step's rollouts, sampled from the policy with checksum `weights`.

        Rollouts that an interrupted run finished with the same policy are not played again. Dynamic sampling (DAPO,
        arXiv:2503.14476, section 3.2) plays further tasks in place of groups that are not used; the report of the engines is
        of the first round.

        Args:
            stage: as its schedule has it now.
            refill_rounds: how often, at most, it plays further tasks.
            is_used: whether anything is learned from a group.
        """
        context, tasks, started = self._context, self.tasks_of(stage), time.perf_counter()
        first = (step - 1) * stage.tasks_per_step
        # Tasks in place of others are behind the stage's own, in places of this step only.
        num_refills = refill_rounds * self._stage.tasks_per_step
        first_refill = self._stage.steps * self._stage.tasks_per_step + (step - 1) * num_refills
        refills = iter(range(first_refill, first_refill + num_refills))
        indices = list(range(first, first + stage.tasks_per_step))
        groups: list[Group] = []
        reports: list[BatchReport] = []
        reuse = None if self.reuse is None else partial(self.reuse, step)
        with self.player.ledger(context.directory.rollouts(step), weights, reuse=reuse) as ledger:
            while indices:
                of_round, num = [(index, tasks.task(index)) for index in indices], stage.rollouts_per_task
                playing = self.player.play(stage, of_round, ledger, num_rollouts=num, seed=context.seed("rollouts", step))
                groups += [group async for group in playing]
                reports.append(self.player.pool.last_batch)
                num_missing = stage.tasks_per_step - sum(map(is_used, groups))
                indices = list(islice(refills, num_missing)) if len(reports) <= refill_rounds else []
            groups.sort(key=lambda group: group.task_index)
            if bias := why_voids_bias(ledger.void_tokens, groups):
                context.warn(f"step {step}: {bias}")
            figures = dict(reports[0].as_metrics())
            if refill_rounds:
                figures["groups/refilled"] = float(len(groups) - stage.tasks_per_step)
            if stage.forks is not None:
                figures |= ledger.displaced_figures
                if stage.forks.replace_identical:
                    figures["branching/replaced"] = float(ledger.num_replaced)
            num_tokens, time_s = num_sampled_tokens(groups, but=ledger.finished_before), time.perf_counter() - started
            if self._stage.staleness:  # so that a resumed run finds it
                ledger.closed(groups, figures=figures, time_s=time_s)
        write_timeline(context, step, reports[0])
        self._warn_of_unused_rewards(step, stage, groups)
        return PlayedStep(groups=groups, figures=figures, time_s=time_s, num_tokens=num_tokens)

    def _warn_of_unused_rewards(self, step: int, stage: RolloutKeys, groups: Sequence[Group]) -> None:
        """Warn once of each part of the reward that has no task in a step, unless other tasks are still to come."""
        switched_tasks = [entry.tasks for entry in stage.schedule if entry.tasks is not None]
        if not isinstance(stage.reward, SumReward) or (switched_tasks and switched_tasks[-1] != stage.tasks):
            return
        for name, why in stage.reward.unused_parts([group.task for group in groups]).items():
            if name not in self._warned_of:
                self._warned_of.add(name)
                self._context.warn(
                    f"step {step}: reward.parts.{name} is for none of its {len(groups)} tasks: {why} If no later step has such"
                    " tasks, correct `where`, or add the column to tasks.facts."
                )

    def branch_metrics(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """What the trees of a step amount to, with a warning where entropy had no say in them; empty without branching."""
        branching = self.player.branching(self._stage)
        if branching is None:
            return {}
        seed, num_rollouts = self._context.seed("rollouts", step), self._stage.rollouts_per_task
        metrics = branch_metrics(groups, branching, seed=seed, num_rollouts=num_rollouts)
        if problem := entropy_warning(metrics, branching):
            self._context.warn(f"step {step}: {problem}")
        return metrics


def selection_metrics(selections: Sequence[Selection]) -> dict[str, float]:
    """The number of groups and rollouts that are learned from."""
    return {
        "groups/used": float(sum(bool(selection.kept) for selection in selections)),
        "groups/rollouts_used": float(sum(len(selection.kept) for selection in selections)),
    }


def write_selection(
    context: StageContext,
    step: int,
    selections: Sequence[Selection],
    advantages: Sequence[Sequence[Tensor]],
    entropies: Mapping[RolloutKey, Sequence[float]] = MappingProxyType({}),
) -> None:
    """Write down why each rollout of the step was kept or dropped, with its reward and its largest advantage by size.

    Args:
        entropies: the trainer's, of sampled tokens, for the rollouts that have any.
    """
    groups = []
    for selection, advantages_of_kept in zip(selections, advantages, strict=True):
        of_kept, group = iter(advantages_of_kept), selection.group
        rollouts = []
        for scored, decision in zip(group.trajectories, selection.decisions, strict=True):
            tokens = next(of_kept) if decision.is_kept else None
            key = scored.trajectory.key
            rollouts.append(
                {
                    "key": asdict(key),
                    "is_kept": decision.is_kept,
                    "reason": decision.reason,
                    "figures": dict(decision.figures),
                    "advantage": 0.0 if tokens is None or not tokens.numel() else tokens[tokens.abs().argmax()].item(),
                    "reward": scored.reward,
                    **({"entropies": entropies[key]} if key in entropies else {}),
                }
            )
        facts = {"task": asdict(group.task), "task_index": group.task_index, "num_void": group.num_void}
        groups.append({**facts, "rollouts": rollouts})
    write_json(context.directory.selection(step), {"step": step, "groups": groups})


def why_voids_bias(void_tokens: Sequence[int], groups: Sequence[Group]) -> str:
    """A sentence where void rollouts are longer than the others; else empty.

    Args:
        void_tokens: of each void rollout, when it failed, with the prompt.
    """
    others = [len(scored.trajectory.ids) for group in groups for scored in group.trajectories]
    if len(void_tokens) < _FEW_VOIDS or not others or mean(void_tokens) <= _MUCH_LONGER * mean(others):
        return ""
    return (
        f"{len(void_tokens)} void rollouts had {mean(void_tokens):.0f} tokens on average when they failed, the {len(others)}"
        f" others have {mean(others):.0f}. What is left is biased towards short rollouts."
    )
