"""A pool that lost engines gets its size back, waits for nobody who cannot come, and is changed by nothing that it refuses."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from pools import fail_at, play_all, pool_of, undisturbed
from test_publication import WEIGHTS, Publisher
from virtual_time import now_s, run
from worlds import FragileEngine, Watcher, tokens_of

from strop.engine.config import VllmConfig
from strop.errors import EngineLost
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.stages.loop.engines import open_engine_pool


def test_an_engine_lost_between_two_batches_is_counted_in_the_next():
    async def scenario():
        publisher, watcher = Publisher(), Watcher()

        class TakesOne(FragileEngine):
            async def load_weights(self, publication):
                if publication.version > 1:
                    raise EngineLost("it fell over")
                await super().load_weights(publication)

        pool = pool_of(FragileEngine(policy_version=-1), TakesOne(policy_version=-1), watcher=watcher)
        lost = []
        for version in (1, 2, 3):
            await pool.publish(partial(publisher.publish, version=version), version=version)
            await play_all(pool)
            lost.append(pool.last_batch.as_metrics()["scheduler/engines_lost"])
        await pool.close()
        return lost, len(watcher.of("lost"))

    assert run(scenario) == ([0, 1, 0], 1)


def test_a_newcomer_that_would_get_other_weights_than_were_published_does_not_join():
    """Whoever published has changed its weights since, and publishes nothing before the next batch."""

    async def scenario():
        publisher, watcher, good, bad = Publisher(), Watcher(), FragileEngine(), FragileEngine()

        async def open_another(place, name):
            return FragileEngine(policy_version=-1)

        pool = pool_of(good, bad, watcher=watcher, open_another=open_another)
        await pool.publish(partial(publisher.publish, version=1), version=1)
        await play_all(pool)
        publisher.weights = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
        bad.fault = "die"
        await play_all(pool)
        assert watcher.of("joined") == []
        assert set(watcher.of("not replaced")) == {"engine-1"}
        assert "weights were changed since version 1 was published" in watcher.engine_events[1][2]
        assert list(pool.engines.values()) == [good]
        await pool.close()

    run(scenario)


def test_a_publication_that_fails_keeps_no_replacement_waiting_for_ever():
    async def scenario():
        publisher, watcher = Publisher(), Watcher()
        good, bad = FragileEngine(), FragileEngine()

        async def open_another(place, name):
            await asyncio.sleep(50.0)
            return FragileEngine(policy_version=-1)

        @asynccontextmanager
        async def broken(engine):
            raise EngineLost("the trainer fell over")
            yield

        pool = pool_of(good, bad, watcher=watcher, open_another=open_another)
        await pool.publish(partial(publisher.publish, version=1), version=1)
        bad.fault = "die"
        await play_all(pool)
        with pytest.raises(EngineLost, match="the trainer fell over"):
            await pool.publish(broken, version=2)
        await asyncio.sleep(100.0)
        with pytest.raises(EngineLost, match="no engine is left"):
            async with asyncio.timeout(1e5):
                await play_all(pool)
        await pool.close()

    run(scenario)


def test_a_newcomer_that_takes_no_weights_is_given_up_and_the_batch_goes_on():
    async def scenario():
        publisher, watcher, opened = Publisher(), Watcher(), []

        class Hanging(FragileEngine):
            async def load_weights(self, publication):
                await asyncio.Event().wait()

        async def open_another(place, name):
            opened.append(Hanging(policy_version=-1) if not opened else FragileEngine(policy_version=-1))
            return opened[-1]

        bad = FragileEngine()
        pool = pool_of(bad, watcher=watcher, open_another=open_another, publish_deadline_s=300.0)
        await pool.publish(partial(publisher.publish, version=1), version=1)
        bad.fault = "die"
        groups = await play_all(pool)
        assert [kind for kind, _, _ in watcher.engine_events] == ["lost", "not replaced", "joined"]
        assert "it hangs: the weights of version 1 were not taken within 300 s" in watcher.engine_events[1][2]
        assert now_s() > 300.0
        await pool.close()
        assert all(engine.is_closed for engine in opened)
        return tokens_of(groups)

    assert run(scenario) == undisturbed()


def test_engines_that_were_not_replaced_in_their_own_step_are_replaced_in_the_next_ones():
    async def scenario():
        async def open_another(place, name):
            places.append(place)
            return FragileEngine()

        places, engines, watcher = [], [FragileEngine() for _ in range(5)], Watcher()
        pool = pool_of(*engines, watcher=watcher, open_another=open_another)
        failing = [asyncio.ensure_future(fail_at(0.3, engine, "die")) for engine in engines[:4]]
        await play_all(pool)
        await asyncio.gather(*failing)
        assert len(watcher.of("not replaced")) == 2
        assert len(pool.engines) == 3
        await play_all(pool)
        assert len(pool.engines) == 5
        assert sorted(places) == [0, 1, 2, 3]
        await play_all(pool)
        assert len(places) == 4
        await pool.close()

    run(scenario)


def test_a_fleet_that_lost_everybody_starts_its_next_batch_with_replacements():
    async def scenario():
        is_mended = False

        async def open_another(place, name):
            if not is_mended:
                raise OSError("the device is busy")
            return FragileEngine()

        first = FragileEngine()
        first.fault = "die"
        pool = pool_of(first, open_another=open_another)
        with pytest.raises(EngineLost, match="no engine is left"):
            await play_all(pool)
        is_mended = True
        return tokens_of(await play_all(pool))

    assert run(scenario) == undisturbed()


def test_closing_waits_for_no_replacement():
    async def scenario():
        opened = []

        async def open_another(index, name):
            await asyncio.sleep(880.0)
            opened.append(FragileEngine())
            return opened[-1]

        engines = [FragileEngine(), FragileEngine()]
        pool = pool_of(*engines, open_another=open_another)
        engines[0].fault = "die"
        await play_all(pool)
        before_s = now_s()
        await pool.close()
        assert now_s() - before_s < 1.0
        assert not opened
        assert all(engine.is_closed for engine in engines)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario)


def test_weights_are_proven_also_by_an_engine_that_opens_with_its_own():
    async def scenario():
        async def open_another(index, name):
            return FragileEngine(policy_version=3)

        watcher, engines = Watcher(), [FragileEngine(), FragileEngine()]
        pool = pool_of(*engines, watcher=watcher, open_another=open_another)
        engines[0].fault = "die"
        await play_all(pool)
        assert watcher.of("joined") == []
        assert "it holds policy version 3, not 0" in watcher.engine_events[1][2]
        await pool.close()

    run(scenario)


def test_closing_ends_a_newcomer_that_waits_for_weights():
    async def scenario():
        newcomer, engines = FragileEngine(policy_version=-1), [FragileEngine(), FragileEngine()]

        async def open_another(place, name):
            await asyncio.sleep(100.0)
            return newcomer

        pool = pool_of(*engines, open_another=open_another)
        await pool.publish(partial(Publisher().publish, version=1), version=1)
        engines[0].fault = "die"
        await play_all(pool)
        await asyncio.sleep(200.0)
        await pool.close()
        assert newcomer.is_closed
        assert newcomer.policy_version == -1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario)


class SlowLoad(FragileEngine):
    """Takes 100 s to load weights, after it has read them."""

    async def load_weights(self, publication):
        await super().load_weights(publication)
        await asyncio.sleep(100.0)


def test_servers_get_the_time_for_weights_that_the_recipe_gives_them():
    async def scenario():
        async def open_engines(model, config, *, detokenize, logs, names):
            return [SlowLoad()]

        config = VllmConfig(python=Path("/python"), stall_timeout_s=20.0, start_timeout_s=600.0)
        context = SimpleNamespace(
            recipe=SimpleNamespace(scheduler=SchedulerConfig()),
            directory=SimpleNamespace(logs=Path("/logs")),
            open_engines=open_engines,
        )
        pool = await open_engine_pool(context, config, Path("/model"), SimpleNamespace(decode=None))
        await pool.publish(partial(Publisher().publish, version=1), version=1)
        assert list(pool.engines) == ["engine-0"]
        await pool.close()

    run(scenario)
