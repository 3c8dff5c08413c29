"""Weights reach every engine or it is given up."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest
import torch
from pools import play_all
from virtual_time import run
from worlds import Conversations, FragileEngine, Watcher

from faulty_engine import FaultyEngine
from strop.engine.protocol import weights_checksum
from strop.engine.publication import Publication
from strop.errors import EngineLost, WeightsNotProven
from strop.rollout.scheduler.engine_pool import EnginePool

WEIGHTS = {f"layer.{index}": torch.full((2, 2), float(index)) for index in range(6)}


class Publisher:
    """Publishes as a trainer does. Implements `strop.engine.publication.WeightSource`."""

    def __init__(self, weights=WEIGHTS):
        self.weights = weights
        self.num_bytes = sum(tensor.nbytes for tensor in weights.values())

    async def tensors(self):
        for named in self.weights.items():
            yield named

    async def checksum(self):
        return weights_checksum(self.weights.items())

    @asynccontextmanager
    async def publish(self, engine, *, version):
        async with Publication(self, version=version) as publication:
            yield publication


def pool_of(*engines, watcher=None, **options):
    return EnginePool(engines, observer=watcher, stall_timeout_s=60.0, **options)


class Hanging(FaultyEngine):
    """Takes one tensor, and then none."""

    async def load_weights(self, publication):
        async for _ in publication.tensors():
            await asyncio.Event().wait()


class Dying(FaultyEngine):
    async def load_weights(self, publication):
        raise ConnectionResetError("the peer hung up")


def test_the_weights_reach_every_engine():
    async def scenario():
        engines, publisher = [FragileEngine(), FragileEngine(), FragileEngine()], Publisher()
        pool = pool_of(*engines)
        checksum = await pool.publish(partial(publisher.publish, version=3), version=3)
        assert checksum == weights_checksum(WEIGHTS.items())
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
def test_an_engine_that_does_not_prove_the_weights_is_given_up_and_the_others_go_on(make, reason):
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


def test_an_engine_that_does_not_prove_the_weights_is_replaced_by_one_that_does():
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


def test_when_nobody_proves_the_weights_the_run_stops():
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


def test_an_error_of_the_trainer_is_no_loss_of_an_engine():
    class Falling(Publisher):
        async def tensors(self):
            yield "layer.0", WEIGHTS["layer.0"]
            raise EngineLost("the trainer fell over")

    async def scenario():
        engines, watcher = [FragileEngine(), FragileEngine()], Watcher()
        pool = pool_of(*engines, watcher=watcher)
        with pytest.raises(EngineLost, match="the trainer fell over"):
            await pool.publish(partial(Falling().publish, version=1), version=1)
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
