"""Weights reach every engine or it is given up (law 6)."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from pools import play_all
from virtual_time import run
from worlds import Conversations, FragileEngine, Watcher

from strop.engine.protocol import weights_checksum
from strop.engine.scripted import ScriptedEngine
from strop.errors import EngineLost, ModelError, WeightsNotProven
from strop.rollout.scheduler.engine_pool import EnginePool

WEIGHTS = {f"layer.{index}": torch.full((2, 2), float(index)) for index in range(6)}


class Publisher:
    """Publishes as a trainer does, and counts how often each tensor was asked of it."""

    def __init__(self, weights=WEIGHTS):
        self.weights = weights
        self.num_sent = 0

    async def publish(self, taker, *, version):
        async def stream():
            for named in self.weights.items():
                self.num_sent += 1
                yield named

        checksum = weights_checksum(self.weights.items())
        await taker.load_weights(stream(), version=version, checksum=checksum)
        return checksum


def pool_of(*engines, watcher=None, **options):
    return EnginePool(engines, observer=watcher, stall_timeout_s=60.0, **options)


class Hanging(ScriptedEngine):
    """Takes one tensor, and then none."""

    async def load_weights(self, tensors, *, version, checksum):
        async for _ in tensors:
            await asyncio.Event().wait()


class Dying(ScriptedEngine):
    async def load_weights(self, tensors, *, version, checksum):
        raise ConnectionResetError("the peer hung up")


class Reading(FragileEngine):
    def __init__(self):
        super().__init__()
        self.has_proved = asyncio.Event()

    async def load_weights(self, tensors, *, version, checksum):
        await super().load_weights(tensors, version=version, checksum=checksum)
        self.has_proved.set()


class Sharing(ScriptedEngine):
    """Reads nothing itself: it waits for what another engine of its machine has read."""

    def __init__(self, other):
        super().__init__([])
        self.other = other

    async def load_weights(self, tensors, *, version, checksum):
        await self.other.has_proved.wait()
        self.weights = self.other.weights
        self._policy_version = version


class Slow(FragileEngine):
    async def load_weights(self, tensors, *, version, checksum):
        async def slowly():
            async for named in tensors:
                await asyncio.sleep(10.0)
                yield named

        await super().load_weights(slowly(), version=version, checksum=checksum)


def test_an_engine_that_shares_what_another_reads_keeps_nobody_waiting():
    async def scenario():
        reading, watcher, publisher = Reading(), Watcher(), Publisher()
        pool = pool_of(Sharing(reading), reading, watcher=watcher)
        await pool.publish(partial(publisher.publish, version=3), version=3)
        assert not watcher.engine_events
        assert publisher.num_sent == len(WEIGHTS)

    run(scenario)


def test_a_slow_engine_is_waited_for_and_little_is_kept_for_it():
    async def scenario():
        publisher, most_ahead = Publisher(), 0
        slow, fast, watcher = Slow(), FragileEngine(), Watcher()

        class Counting(Slow):
            async def load_weights(self, tensors, *, version, checksum):
                async def counted():
                    nonlocal most_ahead
                    num = 0
                    async for named in tensors:
                        most_ahead = max(most_ahead, publisher.num_sent - num)
                        num += 1
                        yield named

                await super().load_weights(counted(), version=version, checksum=checksum)

        pool = pool_of(Counting(), slow, fast, watcher=watcher)
        await pool.publish(partial(publisher.publish, version=3), version=3)
        assert not watcher.engine_events
        assert most_ahead <= 4
        assert fast.weights.keys() == slow.weights.keys() == WEIGHTS.keys()

    run(scenario)


def test_each_tensor_is_read_once_and_reaches_every_engine():
    async def scenario():
        engines, publisher = [FragileEngine(), FragileEngine(), FragileEngine()], Publisher()
        pool = pool_of(*engines)
        checksum = await pool.publish(partial(publisher.publish, version=3), version=3)
        assert checksum == weights_checksum(WEIGHTS.items())
        assert publisher.num_sent == len(WEIGHTS)
        assert pool.policy_version == 3
        for engine in engines:
            assert engine.policy_version == 3
            assert engine.weights.keys() == WEIGHTS.keys()

    run(scenario)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(FragileEngine, has_wrong_weights=True), "was published with checksum"),
        (lambda: Hanging([]), "it hangs: the weights of version 1 were not taken within 60 s"),
        (lambda: Dying([]), "could not take weights: ConnectionResetError"),
    ],
    ids=["cannot prove them", "hangs", "dies"],
)
def test_law_6_an_engine_that_does_not_prove_the_weights_is_given_up_and_the_others_go_on(make, reason):
    async def scenario():
        good, watcher, publisher = FragileEngine(), Watcher(), Publisher()
        pool = pool_of(make(), good, watcher=watcher)
        await pool.publish(partial(publisher.publish, version=1), version=1)
        assert watcher.of("lost") == ["engine-0"]
        assert reason in watcher.engine_events[0][2]
        assert list(pool.engines.values()) == [good]
        groups = await play_all(pool)
        assert len(groups) == 4
        await pool.close()

    run(scenario)


def test_law_6_an_engine_that_does_not_prove_the_weights_is_replaced_by_one_that_does():
    async def scenario():
        publisher, watcher = Publisher(), Watcher()

        async def open_another(place, name):
            return FragileEngine(policy_version=-1)

        pool = pool_of(FragileEngine(has_wrong_weights=True), watcher=watcher, open_another=open_another)
        checksum = await pool.publish(partial(publisher.publish, version=1), version=1)
        assert checksum == weights_checksum(WEIGHTS.items())
        assert [kind for kind, _, _ in watcher.engine_events] == ["lost", "joined"]
        [engine] = pool.engines.values()
        assert engine.weights.keys() == WEIGHTS.keys()
        await pool.close()

    run(scenario)


def test_law_6_when_nobody_proves_the_weights_the_run_stops():
    async def scenario():
        async def open_another(place, name):
            return FragileEngine(has_wrong_weights=True)

        pool = pool_of(FragileEngine(has_wrong_weights=True), Dying([]), open_another=open_another)
        with pytest.raises(WeightsNotProven, match=r"no engine is left.*version 1 was published.*the same command"):
            await pool.publish(partial(Publisher().publish, version=1), version=1)

    run(scenario)


def test_weights_are_not_sent_to_a_newcomer_while_the_trainer_may_change_them():
    """It opens when the batch is over: it waits for the next publication, and gets that."""

    async def scenario():
        publisher = Publisher()
        newcomer = FragileEngine(policy_version=-1)

        async def open_another(place, name):
            await asyncio.sleep(500.0)
            return newcomer

        good, bad = FragileEngine(), FragileEngine()
        pool = pool_of(good, bad, open_another=open_another)
        await pool.publish(partial(publisher.publish, version=1), version=1)
        bad.fault = "die"
        await play_all(pool, world=Conversations())
        await asyncio.sleep(2000.0)
        assert newcomer.policy_version == -1
        await pool.publish(partial(publisher.publish, version=2), version=2)
        await asyncio.sleep(1.0)
        assert newcomer.policy_version == 2
        assert newcomer in pool.engines.values()
        await pool.close()

    run(scenario)


def test_engines_of_different_types_cannot_be_proven_by_one_checksum():
    async def scenario():
        pool = pool_of(FragileEngine(), FragileEngine(dtype=torch.bfloat16))
        with pytest.raises(ModelError, match=r"different types.*the same dtype"):
            await pool.publish(partial(Publisher().publish, version=1), version=1)

    run(scenario)


def test_a_stream_that_breaks_is_nobodys_loss():
    async def scenario():
        engines, watcher = [FragileEngine(), FragileEngine()], Watcher()
        pool = pool_of(*engines, watcher=watcher)

        async def publish(taker):
            async def stream():
                yield "layer.0", WEIGHTS["layer.0"]
                raise EngineLost("the trainer fell over")

            await taker.load_weights(stream(), version=1, checksum="")

        with pytest.raises(EngineLost, match="the trainer fell over"):
            await pool.publish(publish, version=1)
        assert not watcher.engine_events

    run(scenario)


def test_an_engine_that_died_while_the_trainer_computed_is_replaced_at_the_next_publication():
    async def scenario():
        opened = []

        async def open_another(place, name):
            opened.append(place)
            return FragileEngine(policy_version=-1)

        first, publisher = FragileEngine(), Publisher()
        pool = pool_of(first, open_another=open_another)
        await pool.publish(partial(publisher.publish, version=1), version=1)
        await play_all(pool)
        await first.close()
        first.load_weights = Dying([]).load_weights
        await pool.publish(partial(publisher.publish, version=2), version=2)
        groups = await play_all(pool)
        versions = {t.completion.policy_version for g in groups for s in g.trajectories for t in s.trajectory.turns}
        assert versions == {2}
        assert opened == [0]
        await pool.close()

    run(scenario)
