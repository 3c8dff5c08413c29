"""A completion that takes long is waited for; an engine that hangs is lost."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from pools import assert_exact, play_all, pool_of, undisturbed
from virtual_time import now_s, run
from worlds import FragileEngine, Watcher, tokens_of

from strop.errors import EngineLost, StropError
from strop.types import RolloutKey

STUCK = RolloutKey(task_index=0, attempt=0)


def is_of_stuck(request):
    """The first turn of that rollout."""
    return request.id.endswith("/0/0/0/0")


class Stuck(FragileEngine):
    """Healthy, but the first turn of one rollout takes for ever, the first `num_times` that it is asked for."""

    def __init__(self, num_times=10**6):
        super().__init__()
        self.num_left, self.num_stuck = num_times, 0

    async def complete(self, request):
        if is_of_stuck(request) and self.num_left:
            self.num_left -= 1
            self.num_stuck += 1
            await asyncio.sleep(1e6)
        return await super().complete(request)


class Slow(FragileEngine):
    """One completion takes an hour, in which the engine computes."""

    async def complete(self, request):
        self.num_running += 1
        try:
            await asyncio.sleep(3600.0 if is_of_stuck(request) else 0.0)
        finally:
            self.num_running -= 1
        return await super().complete(request)


def test_a_slow_completion_is_waited_for_and_neither_void_nor_replaced():
    async def scenario():
        engine, watcher = Slow(), Watcher()
        groups = await play_all(pool_of(engine, watcher=watcher, stall_timeout_s=10.0), watcher)
        assert not watcher.engine_events
        assert not watcher.voided_keys
        assert set(watcher.started_keys.values()) == {1}
        assert now_s() > 3600.0
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


def test_a_lost_request_is_noticed_when_its_engine_computes_nothing_else():
    async def scenario():
        engines = [Stuck(1), Stuck(0)]
        watcher = Watcher()
        groups = await play_all(pool_of(*engines, watcher=watcher, stall_timeout_s=10.0), watcher)
        assert [engine.num_stuck for engine in engines] == [1, 0]
        [(_, name, reason)] = watcher.engine_events
        assert name == "engine-0"
        assert "it hangs: it has computed nothing for 10 s, while request" in reason
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


def test_an_engine_that_hangs_is_lost_and_its_rollouts_continue_elsewhere():
    async def scenario():
        good, bad, watcher = FragileEngine(max_running=4), FragileEngine(max_running=4), Watcher()
        bad.fault = "hang"
        pool = pool_of(good, bad, watcher=watcher)
        groups = await play_all(pool, watcher)
        [(_, name, reason)] = watcher.engine_events
        assert name == "engine-1"
        assert "it has computed nothing for 60 s" in reason
        assert_exact(pool, groups, watcher)
        await pool.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


@pytest.mark.parametrize("answer", [EngineLost("the process has ended."), None])
def test_an_engine_that_cannot_say_what_it_computes_is_lost(answer):
    async def scenario():
        class Broken(Stuck):
            async def progress(self):
                if answer is not None:
                    raise answer
                await asyncio.sleep(1e6)

        watcher = Watcher()
        with pytest.raises(EngineLost, match="no engine is left"):
            await play_all(pool_of(Broken(), watcher=watcher), watcher)
        [(_, _, reason)] = watcher.engine_events
        assert ("it hangs" if answer is None else "the process has ended.") in reason

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
        words = re.escape(f"raised {type(error).__name__}: {error}.")
        assert re.fullmatch(rf"engine-1 failed: complete \({re.escape(__file__)}, line \d+\) {words}", reason)
        assert_exact(pool, groups, watcher)
        return tokens_of(groups)

    assert run(scenario) == undisturbed()
