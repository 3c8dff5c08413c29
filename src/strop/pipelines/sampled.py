"""Plays a set of tasks that is fixed beforehand, with a policy that does not learn from it meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from strop.curation.outcomes import outcome_of
from strop.errors import MachineError, TaskError
from strop.evaluation.verdict import Verdict
from strop.pipelines.engines import open_fleet, write_timeline
from strop.pipelines.ledger import StepLedger
from strop.pipelines.recipe import FilterStage, RejectionSamplingStage
from strop.pipelines.room import check_engines
from strop.pipelines.stage import StageContext, load_chat, make_player, model_of, weights_digest
from strop.pipelines.stage_data import tasks_to_play
from strop.rewards import judge_group, make_reward
from strop.rollout.play import play
from strop.runs import read_lines
from strop.types import Group

_TASKS_AT_ONCE = 256  # their rollouts are held in memory until their groups are closed


def outcome_row(group: Group, verdict: Verdict) -> dict[str, Any]:
    return asdict(outcome_of(group, verdict))


@dataclass(slots=True)
class _Void:
    """Counts the rollouts that no one could judge, and why; they are in no group."""

    num: int = 0
    num_others: int = 0
    wholly: list[str] = field(default_factory=list)  # tasks without any other rollout
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, group: Group) -> None:
        self.num += group.num_void
        self.num_others += len(group.trajectories)
        if not group.trajectories:
            self.wholly.append(group.task.id)

    def read_reasons(self, ledger: Path) -> None:
        self.reasons.update(str(line["reason"]) for line in read_lines(ledger) if line["event"] == "voided")

    def tell(self, context: StageContext) -> None:
        """Warn of them. Raises `MachineError` where they are all that was played."""
        if not self.num and not self.wholly:
            return
        why = self.reasons.most_common(1)[0][0].rstrip(".") if self.reasons else "the reward could not judge them"
        if not self.num_others:
            raise MachineError(
                f"stages.{context.name}: every rollout of {len(self.wholly)} tasks is void, so nothing is known of them. The"
                f" reason met most often: {why}. All reasons are in {context.directory.rollouts(0).parent}."
            )
        wholly = f"; tasks without any other: {len(self.wholly)} ({', '.join(self.wholly[:3])})" if self.wholly else ""
        context.warn(f"{self.num} rollouts are void and speak for nothing{wholly}. The reason met most often: {why}.")


async def play_sampled(context: StageContext, stage: FilterStage | RejectionSamplingStage) -> AsyncIterator[Group]:
    """A group of `k` rollouts for each of the stage's tasks, in their order.

    What an interrupted try finished is not played again (law 9). No more groups are held than are played at once. What is void
    is told at the end.

    Raises:
        UserError: there are no tasks, or an engine could never hold a rollout of them.
        MachineError: every rollout is void.
    """
    model = model_of(context.run, stage.init)
    chat = load_chat(model)
    source = tasks_to_play(context, stage)
    num = stage.num_tasks if source.num_tasks is None else min(stage.num_tasks or source.num_tasks, source.num_tasks)
    if num is None:
        raise TaskError(f"stages.{context.name}: its tasks have no end. Set num_tasks.")
    context.progress.stage_started(context.name, stage.kind, num, 0)
    fleet = await open_fleet(context, model, chat)
    reward = make_reward(stage.reward, context.runner)
    num_closed, void = 0, _Void()
    try:
        check_engines(context.recipe, context.name, stage, chat, context.tools(), fleet, source=source)
        weights = weights_digest(model)
        for number, start in enumerate(range(0, num, _TASKS_AT_ONCE)):
            indices = range(start, min(start + _TASKS_AT_ONCE, num))
            # A ledger for each part: one that is resumed is read whole, and all rollouts may be more than fit into memory.
            ledger = StepLedger(context.directory.rollouts(number), weights=weights, policy_version=fleet.policy_version)
            with closing(ledger):
                player = make_player(stage, engine=fleet, chat=chat, tools=context.tools(), reward=reward, observe=ledger)
                playing = play(
                    [(index, source.task(index)) for index in indices],
                    player,
                    num_rollouts=stage.k,
                    seed=context.seed("rollouts"),
                    observer=ledger,
                    finished=ledger.finished_before,
                )
                waiting: dict[int, Group] = {}  # closed before one that comes before it
                next_index = start
                async for group in playing:
                    judged = waiting[group.task_index] = judge_group(reward, group)
                    void.add(judged)
                    num_closed += 1
                    while next_index in waiting:
                        yield waiting.pop(next_index)
                        next_index += 1
                    context.progress.step({}, num_closed)
            void.read_reasons(context.directory.rollouts(number).with_suffix(".ledger.jsonl"))
            write_timeline(context, number, fleet.last_batch)
        void.tell(context)
    finally:
        await fleet.close()
        await reward.close()
