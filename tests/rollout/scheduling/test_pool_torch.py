"""The pool on real models: seeds belong to turns, so how many engines there are, and which of them die, changes no token."""

from __future__ import annotations

import asyncio

import pytest
from worlds import Conversations, Watcher, make_player, task, tokens_of

from strop.engine.config import EngineConfig
from strop.engine.torch.engine import TorchEngine
from strop.rollout.player import collect
from strop.rollout.scheduler.engine_pool import EnginePool
from strop.rollout.scheduler.scheduler import RunReason, SchedulerConfig
from strop.stages.model import TinyModel, make_tiny_model

TASKS = [task(index) for index in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    sizes = TinyModel(vocab_size=320, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2)
    make_tiny_model(sizes, ["Count to 3."] * 10, directory, seed=0)
    return directory


def open_engines(model, *slots, **keys):
    configs = [EngineConfig(slots=each, max_length=128, device="cpu", **keys) for each in slots]
    return [TorchEngine.from_directory(model, config) for config in configs]


class EagerWatcher(Watcher):
    """Tells when the first rollout has ended."""

    def __init__(self):
        super().__init__()
        self.has_finished_one = asyncio.Event()

    def finished(self, scored):
        super().finished(scored)
        self.has_finished_one.set()


async def play_all(pool, watcher=None):
    playing = collect(
        TASKS, make_player(pool, Conversations(pace=0.02)), num_rollouts=4, seed=3, observer=watcher or Watcher(), finished={}
    )
    return [group async for group in playing]


@pytest.fixture(scope="module")
def alone(model):
    """The tokens that one engine with room for everybody gives."""

    async def scenario():
        [engine] = open_engines(model, 16)
        try:
            return tokens_of(await play_all(engine))
        finally:
            await engine.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("policy", "slots", "piece_tokens"),
    [("scheduler", (2, 3), 1024), ("scheduler", (2, 3), 5), ("scheduler", (6, 6), 1), ("static", (2,), 5)],
)
def test_neither_the_number_of_engines_nor_the_policy_changes_a_token(model, alone, slots, policy, piece_tokens, monkeypatch):
    monkeypatch.setattr("strop.rollout.scheduler.scheduler._PIECE_TOKENS", piece_tokens)
    may_move = piece_tokens < 1024

    async def scenario():
        engines = open_engines(model, *slots, deterministic=not may_move)
        pool = EnginePool(engines, SchedulerConfig(policy=policy))
        try:
            return tokens_of(await play_all(pool)), pool.last_batch
        finally:
            await pool.close()

    tokens, report = asyncio.run(scenario())
    assert tokens == alone
    assert len({len(ids) for ids in tokens.values()}) > 3
    assert all(engine.row_s > 0 for engine in report.engines)
    if policy == "scheduler":
        assert report.ledger.evictions == report.ledger.recomputed_tokens == 0
        assert report.ledger.runs[RunReason.CONTINUE] > 0
        assert (sum(report.ledger.runs.values()) > report.ledger.turns) == may_move


def test_an_engine_that_ends_in_mid_step_costs_no_rollout_and_no_token(model, alone):
    async def scenario():
        good, bad = open_engines(model, 4, 4)
        watcher = EagerWatcher()
        pool = EnginePool([good, bad], observer=watcher)

        async def end():
            await watcher.has_finished_one.wait()
            await bad.close()

        ending = asyncio.ensure_future(end())
        try:
            groups = await play_all(pool, watcher)
            await ending
            return tokens_of(groups), pool.last_batch, watcher
        finally:
            await pool.close()

    tokens, report, watcher = asyncio.run(scenario())
    assert tokens == alone
    assert watcher.of("lost") == ["engine-1"]
    assert watcher.engine_events[0][2] == "the engine was closed."
    assert set(watcher.started_keys.values()) == set(watcher.finished_keys.values()) == {1}
    assert report.ledger.offered == report.ledger.ended == 12
    assert report.ledger.runs[RunReason.RESTART] >= 1
