"""Rollouts on a pool of healthy engines: the tokens that one engine gives, and nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pools import assert_exact, play_all, pool_of, undisturbed
from virtual_time import run
from worlds import MAX_TOKENS, Conversations, FragileEngine, Watcher, tokens_of

from faulty_engine import FaultyEngine
from strop.engine.protocol import CompletionRequest, Probe
from strop.errors import StropError, UserError
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.types import FinishReason, RolloutKey


@pytest.mark.parametrize("policy", ["scheduler", "static"])
def test_engines_of_unequal_size_share_the_work_and_give_the_tokens_that_one_gives(policy):
    async def scenario():
        engines = [FragileEngine(max_running=2), FragileEngine(kv_tokens=260), FragileEngine()]
        watcher, world = Watcher(), Conversations()
        pool = pool_of(*engines, config=SchedulerConfig(policy=policy))
        groups = await play_all(pool, watcher, world=world)
        assert_exact(pool, groups, watcher)
        assert all(engine.requests and engine.holds_nothing for engine in engines)
        assert world.num_open == 0
        if policy == "scheduler":
            assert engines[0].most_running <= 2
            assert pool.last_batch.ledger.evictions == 0
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


class Moving(FaultyEngine):
    """Its rollouts may move."""

    @property
    def capabilities(self):
        return replace(super().capabilities, is_deterministic=False)


@pytest.mark.parametrize("stop_strings", [(), ("x",)])
@pytest.mark.parametrize("min_tokens", [0, 12])
def test_a_turn_in_pieces_is_the_turn_and_a_lost_engine_costs_a_piece_of_it(min_tokens, stop_strings, monkeypatch):
    monkeypatch.setattr("strop.rollout.scheduler.scheduler._PIECE_TOKENS", 10)
    whole = CompletionRequest(
        id="a",
        ids=(1, 2, 3),
        max_tokens=34,
        stop_ids=frozenset({9}),
        temperature=1.0,
        seed=5,
        min_tokens=min_tokens,
        stop_strings=stop_strings,
    )

    def count(request):
        assert request.ids == (1, 2, 3)
        return range(100, 150)

    async def scenario():
        engines = [Moving(count, latency_s=1.0) for _ in range(3)]
        pool = pool_of(*engines)
        async with pool.batch() as batch:
            lease = await batch.offer(RolloutKey(task_index=0, attempt=0), whole.ids, max_tokens=40)
            sampling = asyncio.create_task(lease.complete(whole))
            await asyncio.sleep(2.5)
            await engines[0].kill()
            completion = await sampling
            lease.close()
        assert completion.ids == tuple(range(100, 134))
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.spans == ((0, 34),)
        used = [each.requests for each in engines if each.requests]
        asked = [[(each.id, each.num_before, each.max_tokens, each.min_tokens) for each in one] for one in used]
        if stop_strings:
            assert asked == [[("a", 0, 34, min_tokens)]]
            return
        third = ("a+20", 20, 10, 0)
        assert asked == [
            [("a", 0, 10, min(min_tokens, 10)), ("a+10", 10, 10, max(0, min_tokens - 10)), third],
            [third, ("a+30", 30, 4, 0)],
        ]
        assert used[1][0].ids == (1, 2, 3, *range(100, 120))
        assert (pool.last_batch.ledger.turns, pool.last_batch.ledger.lost_turns) == (1, 1)
        assert pool.last_batch.ledger.request_tokens == 3  # of a turn once

    run(scenario)


def test_a_conversation_stays_on_its_engine_and_goes_on_from_what_that_holds():
    async def scenario():
        engines = [FragileEngine(max_running=3), FragileEngine(max_running=3)]
        await play_all(pool_of(*engines))
        by_rollout = {}
        for index, engine in enumerate(engines):
            for request in engine.requests:
                by_rollout.setdefault(request.id.rpartition("/")[0], []).append((index, request))
        assert any(len(requests) > 1 for requests in by_rollout.values())
        for requests in by_rollout.values():
            assert len({index for index, _ in requests}) == 1
            assert all(request.extends for _, request in requests[1:])

    run(scenario)


def test_a_branch_goes_on_from_what_its_parent_holds_and_waits_where_that_has_no_room():
    async def scenario():
        engine = FragileEngine(max_running=2)
        pool = pool_of(engine)
        parent, first, second = (RolloutKey(task_index=0, attempt=0, branch=number) for number in range(3))

        def turn(key, ids):
            return CompletionRequest(
                id=f"{key.branch}/{len(ids)}", ids=ids, max_tokens=12, stop_ids=frozenset({9}), temperature=1.0, seed=5
            )

        async with pool.batch() as batch:
            lease = await batch.offer(parent, (1, 2, 3), max_tokens=MAX_TOKENS)
            said = await lease.complete(turn(parent, (1, 2, 3)))
            lease.observed(2)
            context, leases = (1, 2, 3, *said.ids, 4, 5), []

            def branch(entropies):
                leases.extend(lease.branch(key, max_tokens=12) for key in (first, second))

            await lease.complete(replace(turn(parent, context), probe=Probe(num_tokens=1, tell=branch)))
            forked, later = leases  # the second is a third conversation, where two fit
            waiting = asyncio.ensure_future(later.complete(turn(second, context)))
            other = await forked.complete(turn(first, context))
            assert (engine.requests[-1].extends, engine.requests[-1].at) == (engine.requests[1].id, len(context))
            assert other.cached_tokens == len(context) - 1
            assert not waiting.done()
            forked.close()
            last = await waiting
            assert last.cached_tokens == len(context) - 1
            later.close()
            lease.close()
        report = pool.last_batch
        ledger = report.ledger
        assert (ledger.branched, ledger.branches_queued, ledger.offered, ledger.ended) == (2, 1, 1, 3)
        assert report.as_metrics()["scheduler/branch_cached_token_share"] == 1.0
        assert engine.holds_nothing

    run(scenario)


@pytest.mark.parametrize("is_early", [True, False])
def test_what_a_probe_raises_ends_the_turn_and_after_the_turn_it_is_told_nothing(is_early):
    class Telling(FragileEngine):
        """Tells of the first token before the completion ends, and once more long after it."""

        late = None

        async def complete(self, request):
            Telling.late = request.probe
            if is_early:
                asyncio.get_running_loop().call_soon(request.probe.tell, (0.5,))
                await asyncio.sleep(0)
            return await super().complete(request)

    async def scenario():
        told = []

        def refuse(entropies):
            told.append(entropies)
            raise UserError("no branches here")

        async with pool_of(Telling(max_running=2)).batch() as batch:
            lease = await batch.offer(RolloutKey(task_index=0, attempt=0), (1, 2, 3), max_tokens=MAX_TOKENS)
            probe, stop_ids = Probe(num_tokens=1, tell=refuse), frozenset({9})
            request = CompletionRequest(
                id="a", ids=(1, 2, 3), max_tokens=12, stop_ids=stop_ids, temperature=1.0, seed=5, probe=probe
            )
            with pytest.raises(UserError, match="no branches here"):
                await lease.complete(request)
            Telling.late.tell((0.5,))
            assert len(told) == 1
            lease.close()

    run(scenario)


def test_prompts_that_differ_within_a_group_are_each_counted_whole():
    async def scenario():
        pool = pool_of(FragileEngine(kv_tokens=160, max_running=8, block_tokens=16))
        keys = [RolloutKey(task_index=0, attempt=attempt) for attempt in range(2)]
        async with pool.batch() as batch:
            for number, key in enumerate(keys):
                await batch.offer(key, (number,) * 48, max_tokens=32)
        # 48 + 32 tokens are 5 blocks of 16, so two fill all 10; had they shared their prompt, 3 would be free.
        assert pool.last_batch.as_metrics()["scheduler/queue_max"] == 0
        assert pool.last_batch.engines[0].usage.kv_share.max == 1.0
        async with pool.batch() as batch:
            for key in keys:
                await batch.offer(key, (1,) * 48, max_tokens=32)
        assert pool.last_batch.engines[0].usage.kv_share.max == 0.7

    run(scenario)


def test_a_cancelled_batch_leaves_nothing_reserved_and_nothing_running():
    async def scenario():
        engines, world = [FragileEngine(max_running=2), FragileEngine(max_running=3)], Conversations()
        pool = pool_of(*engines)
        playing = asyncio.ensure_future(play_all(pool, world=world))
        await asyncio.sleep(2.5)
        assert world.num_open
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert world.num_open == 0
        assert all(engine.holds_nothing for engine in engines)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        ledger = pool.last_batch.ledger
        assert ledger.offered == ledger.ended == 16
        return tokens_of(await play_all(pool))

    assert run(scenario) == undisturbed()


def test_batches_come_one_at_a_time():
    async def scenario():
        pool = pool_of(FragileEngine())
        first = asyncio.ensure_future(play_all(pool))
        await asyncio.sleep(0.5)
        with pytest.raises(StropError, match="one batch at a time"):
            await play_all(pool)
        await first

    run(scenario)
