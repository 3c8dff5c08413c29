"""The static policy on live engines."""

from __future__ import annotations

import pytest
from pools import TASKS, play_all, pool_of, undisturbed
from virtual_time import run
from worlds import FragileEngine, tokens_of

from strop.errors import EngineLost
from strop.rollout.scheduler.scheduler import SchedulerConfig


def test_the_static_policy_waits_at_its_barrier_even_where_memory_is_short():
    """Twelve rollouts on an engine of three: whoever waits for the barrier gives its memory to those that it waits for."""

    async def scenario():
        engine = FragileEngine(max_running=3, block_tokens=4)
        pool = pool_of(engine, config=SchedulerConfig(policy="static"))
        groups = await play_all(pool, tasks=TASKS[:3])
        assert pool.last_batch.ledger.evictions > 0
        assert pool.last_batch.ledger.recomputed_tokens > 0
        assert pool.last_batch.as_metrics()["scheduler/row_share"] <= 1.0  # twelve were asked of three rows
        return tokens_of(groups)

    expected = {key: ids for key, ids in undisturbed().items() if key.task_index < 3}
    assert run(scenario) == expected


def test_under_the_static_policy_a_lost_engine_ends_the_batch_and_says_what_would_not():
    async def scenario():
        good, bad = FragileEngine(), FragileEngine()
        bad.fault = "die"
        with pytest.raises(EngineLost, match=r'^engine-1 is lost.*scheduler.policy = "scheduler" can'):
            await play_all(pool_of(good, bad, config=SchedulerConfig(policy="static")))

    run(scenario)
