"""Plays a set of tasks that is fixed beforehand, with a policy that does not learn from it meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing

from strop.errors import TaskError
from strop.pipelines.engines import open_fleet, write_timeline
from strop.pipelines.ledger import StepLedger
from strop.pipelines.recipe import FilterStage, RejectionSamplingStage
from strop.pipelines.room import check_engines
from strop.pipelines.stage import StageContext, load_chat, make_player, model_of, weights_digest
from strop.pipelines.stage_data import tasks_to_play
from strop.rewards import judge_group, make_reward
from strop.rollout.play import play
from strop.types import Group

_TASKS_AT_ONCE = 256  # their rollouts are held in memory until their groups are closed


async def play_sampled(context: StageContext, stage: FilterStage | RejectionSamplingStage) -> AsyncIterator[Group]:
    """A group of `k` rollouts for each of the stage's tasks, in their order.

    What an interrupted try finished is not played again (law 9). No more groups are held than are played at once.

    Raises:
        UserError: there are no tasks, or an engine could never hold a rollout of them.
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
    num_closed = 0
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
                    waiting[group.task_index] = judge_group(reward, group)
                    num_closed += 1
                    while next_index in waiting:
                        yield waiting.pop(next_index)
                        next_index += 1
                    context.progress.step({}, num_closed)
            write_timeline(context, number, fleet.last_batch)
    finally:
        await fleet.close()
        await reward.close()
