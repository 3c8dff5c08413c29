"""A fleet on engines that fail: nothing is lost, nothing counted twice, and whoever failed is named."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import now_s, run
from worlds import FAULTS, MAX_TOKENS, Conversations, FragileEngine, Watcher, make_player, task, tokens_of

from strop.engine.protocol import CompletionRequest
from strop.engine.scripted import Reply
from strop.errors import EngineLost, RequestTooLong, StropError, WeightsNotProven
from strop.rollout.fleet import Fleet
from strop.rollout.play import play
from strop.rollout.scheduling import SchedulerConfig, Why
from strop.types import RolloutKey

TASKS = [task(index) for index in range(4)]


async def play_all(fleet, watcher=None, *, tasks=TASKS, num_rollouts=4, seed=3, world=None):
    player = make_player(fleet, world)
    watcher = watcher or Watcher()
    playing = play(tasks, player, num_rollouts=num_rollouts, seed=seed, observer=watcher, finished={})
    return [group async for group in playing]


def fleet_of(*engines, config=None, watcher=None, deadline_s=60.0, **options):
    return Fleet(engines, config, observer=watcher, deadline_s=deadline_s, clock=now_s, **options)


def undisturbed():
    async def scenario():
        return tokens_of(await play_all(fleet_of(FragileEngine())))

    return run(scenario)


def assert_exact(fleet, groups, watcher):
    """Every rollout ended once, and the scheduler counted what the trajectories hold."""
    ledger = fleet.last_batch.ledger
    trajectories = [scored.trajectory for group in groups for scored in group.trajectories]
    assert set(watcher.started_keys.values()) == set(watcher.finished_keys.values()) == {1}
    assert ledger.offered == ledger.ended == len(trajectories) == len(watcher.finished_keys)
    assert ledger.turns == sum(len(each.turns) for each in trajectories)
    assert ledger.sampled_tokens == sum(len(turn.completion.ids) for each in trajectories for turn in each.turns)


async def fail_at(seconds, engine, fault):
    await asyncio.sleep(seconds)
    engine.fault = fault


@pytest.mark.parametrize("policy", ["scheduler", "static"])
def test_engines_of_unequal_size_share_the_work_and_give_the_tokens_that_one_gives(policy):
    async def scenario():
        engines = [FragileEngine(max_running=2), FragileEngine(kv_tokens=260), FragileEngine()]
        watcher, world = Watcher(), Conversations()
        fleet = fleet_of(*engines, config=SchedulerConfig(policy=policy))
        groups = await play_all(fleet, watcher, world=world)
        assert_exact(fleet, groups, watcher)
        assert all(engine.requests and engine.holds_nothing for engine in engines)
        assert world.num_open == 0
        if policy == "scheduler":
            assert engines[0].most_running <= 2
            assert fleet.last_batch.evictions == 0
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


def test_a_conversation_stays_on_its_engine_and_goes_on_from_what_that_holds():
    async def scenario():
        engines = [FragileEngine(max_running=3), FragileEngine(max_running=3)]
        await play_all(fleet_of(*engines))
        by_rollout = {}
        for index, engine in enumerate(engines):
            for request in engine.requests:
                by_rollout.setdefault(request.id.rpartition("/")[0], []).append((index, request))
        assert any(len(requests) > 1 for requests in by_rollout.values())
        for requests in by_rollout.values():
            assert len({index for index, _ in requests}) == 1
            assert all(request.extends for _, request in requests[1:])

    run(scenario)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_the_engine_but_no_rollout_and_no_token(fault):
    async def scenario():
        good, bad = FragileEngine(max_running=4), FragileEngine(max_running=4)
        watcher, spoiling = Watcher(), asyncio.ensure_future(fail_at(1.0, bad, fault))
        fleet = fleet_of(good, bad, watcher=watcher)
        groups = await play_all(fleet, watcher)
        await spoiling
        assert watcher.of("lost") == ["engine-1"]
        assert_exact(fleet, groups, watcher)
        assert fleet.last_batch.ledger.runs[Why.RESTART] >= 1
        assert good.holds_nothing
        await fleet.close()
        assert bad.is_closed
        return tokens_of(groups), watcher.engine_events[0][2]

    tokens, reason = run(scenario)
    assert tokens == undisturbed()
    expected = {
        "hang": "it hangs: engine engine-1 did not complete request",
        "die": "process has ended",
        "memory": "MemoryError: no memory is left",
        "network": "ConnectionResetError: the peer hung up",
        "garbage": "answered garbage: the completion of request",
        "nan": "has log-prob nan at position 0",
        "old weights": "was sampled from policy version -1, but 0 was published",
    }
    assert expected[fault] in reason


def test_finished_turns_are_kept_when_their_engine_dies():
    async def scenario():
        good, bad = FragileEngine(max_running=1), FragileEngine(max_running=8)
        spoiling = asyncio.ensure_future(fail_at(3.0, bad, "die"))
        await play_all(fleet_of(good, bad))
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
        published, opened = [], []

        async def publish(taker):
            checksum = "of version 4"
            published.append(list(taker._engines.values()))
            for engine in published[-1]:
                engine._policy_version = 4
            return checksum

        async def open_another(place):
            await asyncio.sleep(2.0)
            opened.append(FragileEngine(max_running=4, policy_version=0))
            return opened[-1]

        bad, watcher = FragileEngine(max_running=4), Watcher()
        fleet = fleet_of(bad, watcher=watcher, open_another=open_another)
        assert await fleet.publish(publish, version=4) == "of version 4"
        spoiling = asyncio.ensure_future(fail_at(1.0, bad, "die"))
        groups = await play_all(fleet, watcher)
        await spoiling
        assert [kind for kind, _, _ in watcher.engine_events] == ["lost", "joined"]
        assert published[1:] == [opened]
        assert list(fleet.engines) == ["engine-1"]
        assert_exact(fleet, groups, watcher)
        versions = {turn.completion.policy_version for g in groups for s in g.trajectories for turn in s.trajectory.turns}
        assert versions == {4}
        await fleet.close()
        assert opened[0].is_closed
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


def test_replacements_of_a_step_are_bounded_and_then_the_rest_goes_on_or_the_batch_ends_naming_everybody():
    async def scenario():
        opened = []

        async def open_another(place):
            opened.append(FragileEngine())
            opened[-1].fault = "die"
            return opened[-1]

        first, watcher = FragileEngine(), Watcher()
        first.fault = "die"
        fleet = fleet_of(first, watcher=watcher, open_another=open_another, config=SchedulerConfig(max_replacements=2))
        world = Conversations()
        with pytest.raises(EngineLost, match=r"no engine is left.* engine-0: .*has ended.*engine-2: .*the same command"):
            await play_all(fleet, watcher, world=world)
        assert len(opened) == 2
        assert watcher.of("lost") == ["engine-0", "engine-1", "engine-2"]
        assert watcher.of("not replaced") == ["engine-2"]
        assert world.num_open == 0
        with pytest.raises(EngineLost, match="no engine is left"):
            await play_all(fleet)

    run(scenario)


def test_an_engine_that_cannot_be_opened_is_told_and_tried_again_within_the_bound():
    async def scenario():
        num_tries = 0

        async def open_another(place):
            nonlocal num_tries
            num_tries += 1
            if num_tries == 1:
                raise OSError("the device is busy")
            return FragileEngine()

        bad, watcher = FragileEngine(), Watcher()
        bad.fault = "die"
        fleet = fleet_of(bad, watcher=watcher, open_another=open_another)
        groups = await play_all(fleet, watcher)
        assert watcher.engine_events[1] == ("not replaced", "engine-0", "OSError: the device is busy")
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


def test_an_engine_may_join_and_drain_in_mid_step():
    async def scenario():
        first, second, watcher = FragileEngine(max_running=2), FragileEngine(max_running=6), Watcher()
        fleet = fleet_of(first, watcher=watcher)

        async def change():
            await asyncio.sleep(1.0)
            assert await fleet.join(second) == "engine-1"
            await asyncio.sleep(2.0)
            fleet.drain("engine-0")
            return len(first.requests)

        changing = asyncio.ensure_future(change())
        groups = await play_all(fleet, watcher)
        await changing
        assert watcher.of("drained") == ["engine-0"]
        assert first.holds_nothing
        assert second.requests
        assert_exact(fleet, groups, watcher)
        await fleet.close()
        assert first.is_closed
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


def test_law_6_an_engine_of_other_weights_may_not_join():
    async def scenario():
        fleet = fleet_of(FragileEngine())
        with pytest.raises(WeightsNotProven, match="policy version 3 was to join, but version 0"):
            await fleet.join(FragileEngine(policy_version=3))

    run(scenario)


def test_rollouts_that_no_engine_that_is_left_can_hold_end_the_batch_with_their_number():
    async def scenario():
        large, small = FragileEngine(), FragileEngine(max_request_tokens=40)
        spoiling = asyncio.ensure_future(fail_at(1.0, large, "die"))
        with pytest.raises(EngineLost, match=r"\d+ rollouts, .* longer than any engine that is left.* engine-0: .*has ended"):
            await play_all(fleet_of(large, small))
        await spoiling
        assert not small.requests

    run(scenario)


def test_a_task_that_no_engine_could_ever_hold_is_refused_with_the_arithmetic():
    async def scenario():
        fleet = fleet_of(FragileEngine(kv_tokens=48), FragileEngine(kv_tokens=64))
        with pytest.raises(RequestTooLong, match=r"prompt of 1\d tokens and sampling.max_tokens = 60 exceed .* = 64"):
            await play_all(fleet)

    run(scenario)


def test_a_cancelled_batch_leaves_nothing_reserved_and_nothing_running():
    async def scenario():
        engines, world = [FragileEngine(max_running=2), FragileEngine(max_running=3)], Conversations()
        fleet = fleet_of(*engines)
        playing = asyncio.ensure_future(play_all(fleet, world=world))
        await asyncio.sleep(2.5)
        assert world.num_open
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert world.num_open == 0
        assert all(engine.holds_nothing for engine in engines)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        ledger = fleet.last_batch.ledger
        assert ledger.offered == ledger.ended == 16
        return tokens_of(await play_all(fleet))

    assert run(scenario) == undisturbed()


def test_batches_come_one_at_a_time():
    async def scenario():
        fleet = fleet_of(FragileEngine())
        first = asyncio.ensure_future(play_all(fleet))
        await asyncio.sleep(0.5)
        with pytest.raises(StropError, match="one at a time"):
            await play_all(fleet)
        await first

    run(scenario)


def test_the_static_policy_waits_at_its_barrier_even_where_memory_is_short():
    """Twelve rollouts on an engine of three: whoever waits for the barrier gives its memory to those that it waits for."""

    async def scenario():
        engine = FragileEngine(max_running=3)
        fleet = fleet_of(engine, config=SchedulerConfig(policy="static"), block_tokens=4)
        groups = await play_all(fleet, tasks=TASKS[:3])
        assert fleet.last_batch.evictions > 0
        assert fleet.last_batch.ledger.recomputed_tokens > 0
        assert fleet.last_batch.as_metrics()["scheduler/row_share"] <= 1.0  # twelve were asked of three rows
        return tokens_of(groups)

    expected = {key: ids for key, ids in undisturbed().items() if key.task_index < 3}
    assert run(scenario) == expected


def test_under_the_static_policy_a_lost_engine_ends_the_batch_and_says_what_would_not():
    async def scenario():
        good, bad = FragileEngine(), FragileEngine()
        bad.fault = "die"
        with pytest.raises(EngineLost, match=r'engine-1 is lost.*scheduler.policy = "scheduler" would'):
            await play_all(fleet_of(good, bad, config=SchedulerConfig(policy="static")))

    run(scenario)


def test_the_scheduler_takes_less_time_than_static_for_the_same_rollouts():
    def makespan_s(policy):
        async def scenario():
            fleet = fleet_of(FragileEngine(), FragileEngine(), config=SchedulerConfig(policy=policy))
            await play_all(fleet)
            return fleet.last_batch.duration_s

        return run(scenario)

    assert makespan_s("static") > 1.2 * makespan_s("scheduler")


def test_a_slow_tool_gives_its_memory_to_whoever_waits_and_its_rollout_comes_back():
    async def scenario():
        engine = FragileEngine(max_running=2)
        fleet = fleet_of(engine, config=SchedulerConfig(suspend_after_s=0.3))
        groups = await play_all(fleet)
        ledger = fleet.last_batch.ledger
        assert ledger.suspended >= 1
        assert ledger.runs[Why.RESUME] == ledger.suspended
        assert engine.holds_nothing
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


def test_a_branch_goes_on_from_what_its_parent_holds_or_is_refused_and_counted():
    async def scenario():
        engine = FragileEngine(max_running=2)
        fleet = fleet_of(engine)
        parent, first, second = (RolloutKey(task_index=0, attempt=0, branch=number) for number in range(3))

        def turn(key, ids):
            return CompletionRequest(
                id=f"{key.branch}/{len(ids)}", ids=ids, max_tokens=12, stop_ids=frozenset({9}), temperature=1.0, seed=5
            )

        async with fleet.batch() as dispatch:
            seat = (await dispatch.offer({parent: (1, 2, 3)}, max_tokens=MAX_TOKENS))[parent]
            said = await seat.complete(turn(parent, (1, 2, 3)))
            context = (1, 2, 3, *said.ids)
            forked = seat.branch(first, max_tokens=20)
            assert forked is not None
            assert seat.branch(second, max_tokens=20) is None  # a third conversation, where two fit
            other = await forked.complete(turn(first, context))
            assert engine.requests[-1].extends == engine.requests[0].id
            assert other.cached_tokens == len(context) - 1
            forked.leave()
            seat.leave()
        ledger = fleet.last_batch.ledger
        assert (ledger.branched, ledger.branches_refused, ledger.offered, ledger.ended) == (1, 1, 1, 2)
        assert engine.holds_nothing

    run(scenario)


def test_prompts_that_differ_within_a_group_are_each_counted_whole():
    async def scenario():
        fleet = fleet_of(FragileEngine(kv_tokens=160, max_running=8), block_tokens=16)
        keys = [RolloutKey(task_index=0, attempt=attempt) for attempt in range(2)]
        async with fleet.batch() as dispatch:
            await dispatch.offer({keys[0]: (1,) * 48, keys[1]: (2,) * 48}, max_tokens=32)
        # 48 + 32 tokens are 5 blocks of 16, so two fill all 10; had they shared their prompt, 3 would be free.
        assert fleet.last_batch.as_metrics()["scheduler/queue_max"] == 0
        assert fleet.last_batch.engines[0].kv_share_max == 1.0
        async with fleet.batch() as dispatch:
            await dispatch.offer(dict.fromkeys(keys, (1,) * 48), max_tokens=32)
        assert fleet.last_batch.engines[0].kv_share_max == 0.7

    run(scenario)


def test_the_metrics_of_a_step_can_be_redone_by_hand():
    """One engine of two rows; two rollouts of one turn, the first 3 tokens (0.3 s) and the second 5 (0.5 s)."""

    class Counting(FragileEngine):
        def _reply(self, request, number):
            length = 3 if request.id.startswith("0") else 5
            return Reply(ids=(1,) * (length - 1) + (9,), logprobs=(0.0,) * length, entropies=(0.0,) * length)

    async def scenario():
        fleet = fleet_of(Counting(max_running=2, max_request_tokens=10, kv_tokens=20))
        keys = [RolloutKey(task_index=0, attempt=attempt) for attempt in range(3)]

        async def converse(seat, number):
            await seat.complete(
                CompletionRequest(
                    id=f"{number}", ids=(1, 2), max_tokens=8, stop_ids=frozenset({9}), temperature=1.0, seed=number
                )
            )
            seat.leave()

        async with fleet.batch() as dispatch:
            seats = await dispatch.offer(dict.fromkeys(keys, (1, 2)), max_tokens=8)
            await asyncio.gather(*(converse(seats[key], number) for number, key in enumerate(keys)))
        return fleet.last_batch

    report = run(scenario)
    metrics = report.as_metrics()
    # Row 1: 0 to 0.3, then the third rollout from 0.3 to 0.8; row 2: 0 to 0.5. The queue is empty from 0.3 on.
    assert report.duration_s == pytest.approx(0.8)
    assert metrics["scheduler/row_share"] == pytest.approx((0.3 + 0.5 + 0.5) / (2 * 0.8))
    assert metrics["scheduler/busy_share"] == pytest.approx(1.0)
    assert metrics["scheduler/tail_idle_share"] == pytest.approx(0.0)
    assert metrics["scheduler/kv_share_mean"] == pytest.approx((0.5 * 1.0 + 0.3 * 0.5) / 0.8)
    assert metrics["scheduler/queue_mean"] == pytest.approx(0.3 / 0.8, rel=0.01)
    assert metrics["scheduler/queue_max"] == 1
    assert metrics["scheduler/queue_wait_mean_s"] == pytest.approx(0.1)
    assert metrics["scheduler/longest_rollout_s"] == pytest.approx(0.5)
    assert metrics["scheduler/longest_rollout_tokens"] == 5
    timeline = report.as_timeline()
    assert timeline["engines"][0]["rows"][0] == 2
    assert timeline["engines"][0]["rows"][-1] == 1
    assert timeline["queue"][0] == 1
