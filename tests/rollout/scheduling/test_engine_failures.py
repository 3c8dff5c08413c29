"""Engines that fail: nothing is lost, nothing counted twice, whoever failed is named, and another takes its place."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from pools import assert_exact, fail_at, play_all, pool_of, undisturbed
from test_publication import WEIGHTS, Publisher
from virtual_time import run
from worlds import FAULTS, Conversations, FragileEngine, Watcher, tokens_of

from strop.errors import EngineLost
from strop.rollout.scheduler.scheduler import RunReason, SchedulerConfig


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_the_engine_but_no_rollout_and_no_token(fault):
    async def scenario():
        good, bad = FragileEngine(max_running=4), FragileEngine(max_running=4)
        watcher, spoiling = Watcher(), asyncio.ensure_future(fail_at(1.0, bad, fault))
        pool = pool_of(good, bad, watcher=watcher)
        groups = await play_all(pool, watcher)
        await spoiling
        assert watcher.of("lost") == ["engine-1"]
        assert_exact(pool, groups, watcher)
        assert pool.last_batch.ledger.runs[RunReason.RESTART] >= 1
        assert good.holds_nothing
        await pool.close()
        assert bad.is_closed
        return tokens_of(groups), watcher.engine_events[0][2]

    tokens, reason = run(scenario)
    assert tokens == undisturbed()
    expected = {
        "hang": "it hangs: it has computed nothing for 60 s, while request",
        "die": "process has ended",
        "memory": "MemoryError: no memory is left",
        "network": "ConnectionResetError: the peer hung up",
        "garbage": "returned an invalid completion: the completion of request",
        "nan": "has log-prob nan at position 0",
        "old weights": "was sampled from policy version -1, but 0 was published",
    }
    assert expected[fault] in reason


def test_finished_turns_are_kept_when_their_engine_dies():
    async def scenario():
        good, bad = FragileEngine(max_running=1), FragileEngine(max_running=8)
        spoiling = asyncio.ensure_future(fail_at(3.0, bad, "die"))
        await play_all(pool_of(good, bad))
        await spoiling
        finished = {request.id for request in bad.requests} & {request.id for request in good.requests}
        again = [request for request in good.requests if request.id in finished]
        assert again, "no turn was sampled again: the test proves nothing"
        assert any(not request.id.endswith("/0") for request in again), "each of them was a first turn"
        asked_twice = [request.id for request in good.requests]
        assert len(asked_twice) == len(set(asked_twice))

    run(scenario)


def test_a_lost_engine_is_replaced_by_one_that_got_the_current_weights():
    async def scenario():
        opened = []

        async def open_another(place, name):
            await asyncio.sleep(2.0)
            opened.append(FragileEngine(max_running=4, policy_version=0))
            return opened[-1]

        bad, watcher = FragileEngine(max_running=4), Watcher()
        pool = pool_of(bad, watcher=watcher, open_another=open_another)
        await pool.publish(partial(Publisher().publish, version=4), version=4)
        spoiling = asyncio.ensure_future(fail_at(1.0, bad, "die"))
        groups = await play_all(pool, watcher)
        await spoiling
        assert [kind for kind, _, _ in watcher.engine_events] == ["lost", "joined"]
        [newcomer] = opened
        assert newcomer.policy_version == 4
        assert newcomer.weights.keys() == WEIGHTS.keys()
        assert list(pool.engines) == ["engine-0.2"]
        assert watcher.engine_events[1] == ("joined", "engine-0.2", "engine-0")
        assert_exact(pool, groups, watcher)
        versions = {turn.completion.policy_version for g in groups for s in g.trajectories for turn in s.trajectory.turns}
        assert versions == {4}
        await pool.close()
        assert opened[0].is_closed
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


def test_replacements_of_a_step_are_bounded_and_then_the_rest_goes_on_or_the_batch_ends_naming_everybody():
    async def scenario():
        opened = []

        async def open_another(place, name):
            opened.append(FragileEngine())
            opened[-1].fault = "die"
            return opened[-1]

        first, watcher = FragileEngine(), Watcher()
        first.fault = "die"
        pool = pool_of(first, watcher=watcher, open_another=open_another, config=SchedulerConfig(max_replacements=2))
        world = Conversations()
        with pytest.raises(EngineLost, match=r"no engine is left.* engine-0: .*has ended.*engine-0\.3: .*the same command"):
            await play_all(pool, watcher, world=world)
        assert len(opened) == 2
        assert watcher.of("lost") == ["engine-0", "engine-0.2", "engine-0.3"]
        assert watcher.of("not replaced") == ["engine-0.3"]
        assert world.num_open == 0
        with pytest.raises(EngineLost, match="no engine is left"):
            await play_all(pool)

    run(scenario)


def test_a_batch_that_lasts_replaces_as_many_engines_again_after_each_publication():
    async def scenario():
        async def open_another(place, name):
            return FragileEngine(policy_version=pool.policy_version)

        watcher, publisher = Watcher(), Publisher()
        pool = pool_of(
            FragileEngine(),
            FragileEngine(),
            watcher=watcher,
            open_another=open_another,
            config=SchedulerConfig(max_replacements=1),
        )
        async with pool.batch(shared=True):
            for name in ("engine-0", "engine-1"):
                pool.remove(pool._engines[name], EngineLost("its process has ended"))
            await pool.replacement_settled()
            assert list(pool.engines) == ["engine-0.2"]
            for version, lost in ((1, "engine-1"), (2, "engine-0.2"), (3, "engine-1.2")):
                await pool.publish(partial(publisher.publish, version=version), version=version)
                await pool.replacement_settled()
                if lost in pool.engines:
                    pool.remove(pool._engines[lost], EngineLost("its process has ended"))
                await pool.replacement_settled()
                assert len(pool.engines) == 2, version
        assert watcher.of("not replaced") == ["engine-1"]
        await pool.close()

    run(scenario)


def test_rollouts_that_no_engine_that_is_left_can_hold_end_the_batch_with_their_number():
    async def scenario():
        large, small = FragileEngine(), FragileEngine(max_request_tokens=40)
        spoiling = asyncio.ensure_future(fail_at(1.0, large, "die"))
        with pytest.raises(EngineLost, match=r"\d+ rollouts .* longer than any engine that is left.* engine-0: .*has ended"):
            await play_all(pool_of(large, small))
        await spoiling
        assert not small.requests

    run(scenario)
