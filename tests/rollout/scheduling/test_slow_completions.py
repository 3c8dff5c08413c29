"""A completion that takes long is told from an engine that hangs, and neither costs more than it must."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pools import assert_exact, play_all, pool_of, undisturbed
from virtual_time import now_s, run
from worlds import Conversations, FragileEngine, Watcher, task, tokens_of

from strop.errors import DeadlineExceeded, EngineLost, StropError
from strop.types import RolloutKey

STUCK = RolloutKey(task_index=0, attempt=0)


def is_of_stuck(request):
    """The first turn of that rollout."""
    return request.id.endswith("/0/0/0/0")


class Stuck(FragileEngine):
    """Healthy, but the first turn of one rollout takes for ever, the first `num_times` that it is asked for."""

    def __init__(self, num_times=10**6, *, own_deadline_s=None):
        super().__init__()
        self.num_left, self.own_deadline_s = num_times, own_deadline_s
        self.num_stuck = 0

    async def complete(self, request):
        if is_of_stuck(request) and self.num_left:
            self.num_left -= 1
            self.num_stuck += 1
            await asyncio.sleep(self.own_deadline_s or 1e6)
            raise DeadlineExceeded(f"request {request.id} was not complete after {self.own_deadline_s} s (engine.deadline_s).")
        return await super().complete(request)


@pytest.mark.parametrize("num_times", [1, 3])
def test_a_slow_completion_of_an_engine_that_answers_others_spoils_only_its_rollout(num_times):
    async def scenario():
        engine, watcher = Stuck(num_times), Watcher()
        pool = pool_of(engine, watcher=watcher, deadline_s=10.0)
        world = Conversations(pace=20.0)  # somebody is always answered
        await play_all(pool, watcher, tasks=[task(index) for index in range(30)], num_rollouts=1, world=world)
        assert engine.num_stuck == num_times
        assert not watcher.engine_events
        assert watcher.started_keys[STUCK] == min(num_times + 1, 3)
        assert watcher.voided_keys == ({STUCK: 1} if num_times == 3 else {})
        return now_s()

    assert run(scenario) >= 10.0 * num_times


@pytest.mark.parametrize("own_deadline_s", [None, 60.0 / 1.1], ids=["the pool's deadline", "the engine's own deadline"])
def test_a_slow_completion_when_all_others_have_ended_costs_no_engine(own_deadline_s):
    """Nobody else is there to be answered, so the engine is asked for a health check."""

    async def scenario():
        engines = [Stuck(own_deadline_s=own_deadline_s) for _ in range(4)]
        watcher = Watcher()
        groups = await play_all(pool_of(*engines, watcher=watcher), watcher)
        assert sum(engine.num_stuck for engine in engines) == 3
        assert not watcher.engine_events
        assert watcher.voided_keys == {STUCK: 1}
        assert len(watcher.finished_keys) == 16
        assert all(engine.holds_nothing for engine in engines)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return tokens_of(groups)

    expected = undisturbed()
    tokens = run(scenario)
    assert {key: ids for key, ids in tokens.items() if key in expected} == {k: v for k, v in expected.items() if k != STUCK}


def test_an_engine_that_hangs_gets_one_health_check_however_many_requests_wait():
    async def scenario():
        good, bad, watcher = FragileEngine(max_running=4), FragileEngine(max_running=4), Watcher()
        bad.fault = "hang"
        pool = pool_of(good, bad, watcher=watcher)
        groups = await play_all(pool, watcher)
        [(_, name, reason)] = watcher.engine_events
        assert name == "engine-1"
        assert "it hangs: engine-1 did not complete request" in reason
        assert reason.endswith("and a health check of one token failed: no answer within another 30 s")
        assert len([request for request in bad.requests if "health check" in request.id]) == 1
        assert_exact(pool, groups, watcher)
        await pool.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EngineLost("the process has ended."), "the process has ended."),
        (RuntimeError("device-side"), "RuntimeError: device-side"),
    ],
)
def test_the_error_of_a_failed_health_check_is_reported(error, said):
    async def scenario():
        class Broken(Stuck):
            async def complete(self, request):
                if "health check" in request.id:
                    raise error
                return await super().complete(request)

        watcher = Watcher()
        with pytest.raises(EngineLost, match="no engine is left"):
            await play_all(pool_of(Broken(), watcher=watcher), watcher)
        [(_, _, reason)] = watcher.engine_events
        assert reason.endswith(f"and a health check of one token failed: {said}")

    run(scenario)


@pytest.mark.parametrize("fault", ["lost", "nan"])
def test_a_turn_that_ends_whatever_engine_it_is_asked_of_costs_two_engines_and_is_void(fault):
    async def scenario():
        class Poisoned(FragileEngine):
            async def complete(self, request):
                completion = await super().complete(request)
                if not is_of_stuck(request):
                    return completion
                if fault == "lost":
                    raise EngineLost("the engine's process has ended.")
                return replace(completion, logprobs=(float("nan"),) * len(completion.ids))

        engines, watcher = [Poisoned(max_running=6) for _ in range(4)], Watcher()
        pool = pool_of(*engines, watcher=watcher)
        groups = await play_all(pool, watcher)
        assert len(watcher.of("lost")) == 2
        assert watcher.voided_keys == {STUCK: 1}
        assert len(watcher.finished_keys) == 16
        return tokens_of(groups)

    expected = undisturbed()
    tokens = run(scenario)
    assert {key: ids for key, ids in tokens.items() if key in expected} == {k: v for k, v in expected.items() if k != STUCK}


def test_a_mistake_of_ours_is_no_loss_of_an_engine():
    async def scenario():
        class Refusing(FragileEngine):
            async def complete(self, request):
                raise StropError("the server refused /generate (400): input too long")

        watcher = Watcher()
        with pytest.raises(StropError, match="input too long") as raised:
            await play_all(pool_of(Refusing(), watcher=watcher), watcher)
        assert not isinstance(raised.value, EngineLost)
        assert not watcher.engine_events

    run(scenario)


@pytest.mark.parametrize("error", [TypeError("'<' not supported"), RuntimeError("CUDA error")])
def test_an_engine_that_breaks_in_a_way_that_nobody_foresaw_is_lost_and_named(error):
    async def scenario():
        class Broken(FragileEngine):
            async def complete(self, request):
                if len(self.requests) > 3:
                    raise error
                return await super().complete(request)

        watcher = Watcher()
        pool = pool_of(FragileEngine(), Broken(), watcher=watcher)
        groups = await play_all(pool, watcher)
        [(_, name, reason)] = watcher.engine_events
        assert name == "engine-1"
        assert reason == f"engine-1 failed: {type(error).__name__}: {error}"
        assert_exact(pool, groups, watcher)
        return tokens_of(groups)

    assert run(scenario) == undisturbed()
