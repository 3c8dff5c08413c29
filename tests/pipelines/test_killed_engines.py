"""Engine processes are killed and stopped in the middle of real RL steps: the ledger is exact, and no token changes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from scripted_runs import Watching, untimed
from strop.engine.opening import open_engines
from strop.pipeline.run import train
from strop.recipe.load import load_recipe
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop.ledger import read_rollouts

TINY = Path(__file__).with_name("tiny.toml")
FAULTS = {1: signal.SIGKILL, 2: signal.SIGSTOP, 3: signal.SIGKILL}  # by step


class Disturber:
    """Opens real engines, and does to the last that serves RL what `FAULTS` says, once rollouts of the step have ended."""

    def __init__(self, run):
        self.run = run
        self.done = []
        self._opened = []
        self._disturbing = None

    async def open_engines(self, model, config, *, detokenize, logs, names):
        engines = await open_engines(model, config, detokenize=detokenize, logs=logs, names=names)
        if logs.parent.name == "rl":
            self._opened += engines
            self._disturbing = self._disturbing or asyncio.ensure_future(self._disturb())
        return engines

    async def _disturb(self):
        for step, fault in FAULTS.items():
            while len(read_lines(self.run.stage("rl").rollouts(step))) < 2:  # noqa: ASYNC110 - of a file
                await asyncio.sleep(0.002)  # a file tells nobody that it grew
            joined = {line["engine"] for line in read_lines(self.run.events) if line["event"] == "engine_joined"}
            serving = self._opened[:2] + [engine for engine in self._opened[2:] if engine.name in joined]
            victim = next(engine for engine in reversed(serving) if engine._actor.is_alive)
            os.kill(victim._actor.pid, fault)
            self.done.append((step, fault))


def play(path, *words, disturber=None):
    progress = Watching()
    recipe = load_recipe(TINY, words)
    opening = open_engines if disturber is None else disturber.open_engines
    asyncio.run(train(recipe, path, progress=progress, open_engines=opening))
    return progress


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_steps_survive_the_end_and_the_silence_of_their_engines(tmp_path):
    play(tmp_path / "calm")
    calm, run = RunDirectory(tmp_path / "calm"), RunDirectory(tmp_path / "run")
    disturber = Disturber(run)
    progress = play(run.path, "stages.rl.engine.replicas=2", "stages.rl.engine.threads=1", disturber=disturber)

    assert [step for step, _ in disturber.done] == [1, 2, 3], "a step was over before it could be disturbed"
    lost = [line for line in read_lines(run.events) if line["event"] == "engine_lost"]
    assert len(lost) == 3
    assert all(line["stage"] == "rl" for line in lost)
    assert all(any(line["reason"] in warning for warning in progress.warnings) for line in lost)
    joined = [line for line in read_lines(run.events) if line["event"] == "engine_joined"]
    assert len(joined) >= 2  # in place of the first two; what comes for the third may find the stage at its end

    metrics = {line["step"]: line for line in read_lines(run.metrics) if line["stage"] == "rl"}
    # That of the last step may be noticed when its batch is over, and no other follows.
    assert sum(line["scheduler/engines_lost"] for line in metrics.values()) in (2, 3)
    assert sum(line["scheduler/restarts"] for line in metrics.values()) >= 1
    for step in (1, 2, 3):
        ours, theirs = (read_rollouts(each.stage("rl").rollouts(step)) for each in (run, calm))
        assert len(ours) == len({scored.trajectory.key for scored in ours}) == 24
        assert tokens(ours) == tokens(theirs)
        assert read_json(run.stage("rl").selection(step))["groups"] == read_json(calm.stage("rl").selection(step))["groups"]
        ledger = read_lines(run.stage("rl").rollouts(step).with_suffix(".ledger.jsonl"))
        for event in ("started", "finished"):  # no rollout began again, though turns did
            keys = [json.dumps(line["key"]) for line in ledger if line["event"] == event]
            assert len(keys) == len(set(keys)) == 24
    models = [each.stage("rl").model / "model.safetensors" for each in (run, calm)]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert untimed(read_json(run.stage("after").evaluation)) == untimed(read_json(calm.stage("after").evaluation))


def tokens(rollouts):
    return {scored.trajectory.key: scored.trajectory.ids for scored in rollouts}
