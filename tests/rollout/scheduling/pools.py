"""Fleets of engines that fail when they are told to, what they play, and what must be true of it."""

from __future__ import annotations

import asyncio

from virtual_time import run
from worlds import FragileEngine, Watcher, make_player, task, tokens_of

from strop.rollout.player import collect
from strop.rollout.scheduler.engine_pool import EnginePool

TASKS = [task(index) for index in range(4)]


async def play_all(pool, watcher=None, *, tasks=TASKS, num_rollouts=4, seed=3, world=None):
    player = make_player(pool, world)
    watcher = watcher or Watcher()
    playing = collect(tasks, player, num_rollouts=num_rollouts, seed=seed, observer=watcher, finished={})
    return [group async for group in playing]


def pool_of(*engines, config=None, watcher=None, stall_timeout_s=60.0, **options):
    return EnginePool(engines, config, observer=watcher, stall_timeout_s=stall_timeout_s, **options)


def undisturbed():
    async def scenario():
        return tokens_of(await play_all(pool_of(FragileEngine())))

    return run(scenario)


def assert_exact(pool, groups, watcher):
    """Every rollout ended once, and the scheduler counted what the trajectories hold."""
    ledger = pool.last_batch.ledger
    trajectories = [scored.trajectory for group in groups for scored in group.trajectories]
    assert set(watcher.started_keys.values()) == set(watcher.finished_keys.values()) == {1}
    assert ledger.offered == ledger.ended == len(trajectories) == len(watcher.finished_keys)
    assert ledger.turns == sum(len(each.turns) for each in trajectories)
    assert ledger.sampled_tokens == sum(len(turn.completion.ids) for each in trajectories for turn in each.turns)


async def fail_at(seconds, engine, fault):
    await asyncio.sleep(seconds)
    engine.fault = fault
