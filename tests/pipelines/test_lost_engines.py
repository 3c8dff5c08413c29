"""A run whose engines fail: it says so, goes on where it can, and ends with the weights of a run in which nothing failed."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from scripted_runs import RecordingEngine, Watching, make_recipe, run_recipe, untimed
from strop.errors import ActorsLost, ConfigError, EngineLost
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop.ledger import read_rollouts
from strop.stages.loop.rollouts import why_voids_bias
from strop.types import RolloutKey


def with_engines(replicas, *, max_replacements=2, **rl):
    recipe = make_recipe(**rl)
    engine = recipe.engine.model_copy(update={"replicas": replicas})
    scheduler = recipe.scheduler.model_copy(update={"max_replacements": max_replacements})
    return recipe.model_copy(update={"engine": engine, "scheduler": scheduler})


class Mortal:
    """Makes engines of which the n-th to be opened dies at its m-th request; `deaths` says which and when."""

    def __init__(self, deaths):
        self.deaths = dict(deaths)
        self.num_opened = 0

    def __call__(self, policy, **options):
        lost_at = self.deaths.get(self.num_opened)
        self.num_opened += 1
        return MortalEngine(policy, lost_at, **options)


class MortalEngine(RecordingEngine):
    def __init__(self, policy, dies_at, **options):
        super().__init__(policy, **options)
        self.dies_at = dies_at
        self.is_closed = False

    async def close(self):
        self.is_closed = True
        await super().close()

    async def complete(self, request):
        if self.dies_at is not None and len(self.requests) >= self.dies_at:
            raise EngineLost("process 4711 has ended: SIGKILL.")
        return await super().complete(request)


def assert_same_outcome(run, other):
    """Equal in all that no clock said."""
    assert [untimed(line) for line in read_lines(run.metrics)] == [untimed(line) for line in read_lines(other.metrics)]
    for stage in ("before", "after"):
        assert untimed(read_json(run.stage(stage).evaluation)) == untimed(read_json(other.stage(stage).evaluation))
    weights = [each.stage("rl").model / "model.safetensors" for each in (run, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    for step in (1, 2):
        keys = [scored.trajectory.key for scored in read_rollouts(run.stage("rl").rollouts(step))]
        assert len(keys) == len(set(keys)) == 18


def events(run, name):
    return [line for line in read_lines(run.events) if line["event"] == name]


def test_engines_that_die_in_every_stage_change_nothing_but_the_log(scripted_run, tmp_path):
    # Two of the first evaluation and one in place of the first, which dies; the same of RL; two of the last evaluation.
    mortal, progress = Mortal({0: 3, 3: 9}), Watching()
    done = run_recipe(tmp_path / "run", with_engines(2), make_engine=mortal, progress=progress)
    assert_same_outcome(done.run, scripted_run.run)
    lost = [(line["stage"], line["engine"]) for line in events(done.run, "engine_lost")]
    assert lost[:2] == [("before", "engine-0"), ("rl", "engine-0")]
    assert {line["reason"] for line in events(done.run, "engine_lost")} == {"process 4711 has ended: SIGKILL."}
    assert "engine-0 is lost: process 4711 has ended: SIGKILL." in progress.warnings
    assert {(line["engine"], line["replaces"]) for line in events(done.run, "engine_joined")} == {("engine-0.2", "engine-0")}
    assert "engine-0.2 replaces engine-0." in progress.warnings
    restarts = sum(line.get("scheduler/restarts", 0) for line in read_lines(done.run.metrics))
    assert restarts >= 1
    assert all(engine.is_closed for engine in done.engines)


def test_where_no_engine_is_left_the_run_stops_and_the_same_command_goes_on(scripted_run, tmp_path):
    recipe = with_engines(1, max_replacements=0)
    with pytest.raises(EngineLost, match=r"no engine is left.* SIGKILL.*the same command"):
        run_recipe(tmp_path / "run", recipe, make_engine=Mortal({1: 25}))  # within the first step of RL
    run = RunDirectory(tmp_path / "run")
    num_finished = len(read_rollouts(run.stage("rl").rollouts(1)))
    assert 0 < num_finished < 18
    again = run_recipe(tmp_path / "run", recipe)
    assert_same_outcome(again.run, scripted_run.run)
    [opened] = [line for line in read_lines(run.stage("rl").rollouts(1).with_suffix(".ledger.jsonl")) if line.get("reused")]
    assert opened["reused"] == num_finished


@pytest.fixture
def on_a_cluster(monkeypatch):
    """What a run asks of a cluster, without one."""

    @contextmanager
    def connected(config, directory):
        yield SimpleNamespace()

    async def place(connection, context):
        pass

    monkeypatch.setattr("strop.pipeline.run.connected", connected)
    monkeypatch.setattr("strop.pipeline.run.check_nodes", lambda *_: None)
    monkeypatch.setattr("strop.pipeline.run._place", place)


@pytest.mark.usefixtures("on_a_cluster")
def test_where_no_engine_of_a_cluster_is_left_the_stage_starts_again(scripted_run, tmp_path):
    recipe = with_engines(1, max_replacements=0, checkpoint_every=1)
    progress, mortal = Watching(), Mortal({1: 5, 2: 45})  # in the first step of RL, and in the second
    done = run_recipe(tmp_path / "run", recipe, make_engine=mortal, progress=progress)
    restarts = events(done.run, "stage_restarted")
    assert [(each["stage"], each["from_step"]) for each in restarts] == [("rl", 0), ("rl", 1)]
    assert any("SIGKILL" in each and "rl starts again from step 1." in each for each in progress.warnings)
    assert not any("same command" in each for each in progress.warnings)
    assert_same_outcome(done.run, scripted_run.run)


@pytest.mark.usefixtures("on_a_cluster")
def test_engines_that_cannot_be_opened_end_the_run_at_once(tmp_path):
    def make_engine(policy, **options):
        raise EngineLost("the server did not start")

    with pytest.raises(EngineLost, match="did not start"):
        run_recipe(tmp_path / "run", make_engine=make_engine)
    assert not events(RunDirectory(tmp_path / "run"), "stage_restarted")


@pytest.mark.usefixtures("on_a_cluster")
def test_an_engine_whose_process_dies_while_it_starts_is_started_again(tmp_path):
    killed = []

    def make_engine(policy, **options):
        if not killed:
            killed.append("engine torch 0")
            raise EngineLost("it ended during start") from ActorsLost("it ended during start")
        return RecordingEngine(policy, **options)

    run = run_recipe(tmp_path / "run", make_engine=make_engine).run
    assert [each["stage"] for each in events(run, "stage_restarted")] == ["before"]


@pytest.mark.usefixtures("on_a_cluster")
def test_a_stage_that_loses_its_engines_again_and_again_ends_the_run(tmp_path):
    with pytest.raises(EngineLost, match="SIGKILL"):
        run_recipe(tmp_path / "run", with_engines(1, max_replacements=0), make_engine=Mortal(dict.fromkeys(range(1, 9), 2)))
    assert [each["from_step"] for each in events(RunDirectory(tmp_path / "run"), "stage_restarted")] == [0, 0, 0]


def test_a_step_writes_what_its_engines_did(tmp_path):
    done = run_recipe(tmp_path / "run", with_engines(2))
    lines = {line["step"]: line for line in read_lines(done.run.metrics) if line["stage"] == "rl"}
    for step in (1, 2):
        timeline = read_json(done.run.stage("rl").timeline(step))
        assert timeline["step"] == step
        assert [engine["name"] for engine in timeline["engines"]] == ["engine-0", "engine-1"]
        for engine in timeline["engines"]:
            mean = sum(engine["rows"]) / len(engine["rows"])
            share = mean * timeline["duration_s"] / (engine["left_s"] - engine["joined_s"]) / engine["max_rows"]
            assert share == pytest.approx(lines[step][f"scheduler/row_share/{engine['name']}"], rel=0.02, abs=1e-6)
        assert lines[step]["scheduler/engines"] == 2
        assert lines[step]["scheduler/evictions"] == lines[step]["scheduler/recomputed_tokens"] == 0
        assert 0 < lines[step]["scheduler/longest_rollout_s"] <= timeline["duration_s"]
    assert "rl, step 2: " in done.run.report.read_text()
    assert read_json(done.run.stage("before").timeline(0))["policy"] == "scheduler"


def test_the_number_of_engines_and_the_scheduler_may_change_between_two_tries(tmp_path):
    first = run_recipe(tmp_path / "run", with_engines(1))
    recipe = with_engines(3)
    static = recipe.model_copy(update={"scheduler": recipe.scheduler.model_copy(update={"policy": "static"})})
    assert run_recipe(tmp_path / "run", static).result.evaluations == first.result.evaluations


def test_a_rollout_that_cannot_fit_is_refused_before_anything_is_trained(tmp_path):
    recipe = make_recipe()
    small = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"max_length": 210})})
    with pytest.raises(ConfigError) as told:
        run_recipe(tmp_path / "run", small)
    words = str(told.value)
    assert "stages.before: a single rollout cannot fit into KV memory: the prompt of task 'arithmetic" in words
    assert "sampling.max_tokens = 200, together " in words
    assert "the limit is engine.max_length = 210" in words
    assert "or lower sampling.max_tokens to " in words
    assert not (tmp_path / "run" / "stages" / "sft").exists()


def test_engines_that_turn_out_too_small_are_refused_before_the_first_rollout(tmp_path):
    with pytest.raises(ConfigError, match=r"together \d+; the limit is 128, which is what the KV memory of the largest engine"):
        run_recipe(tmp_path / "run", engine_options={"kv_tokens": 128})
    assert not (tmp_path / "run" / "stages" / "before" / "rollouts").exists()


def test_a_hanging_engine_is_noticed_by_the_deadline_of_the_recipe(scripted_run, tmp_path):
    class Hanging(MortalEngine):
        async def complete(self, request):
            if self.dies_at is not None and len(self.requests) >= self.dies_at:
                await asyncio.Event().wait()
            return await super().complete(request)

    class Opening(Mortal):
        def __call__(self, policy, **options):
            engine = super().__call__(policy, **options)
            return Hanging(policy, engine.dies_at, **options)

    recipe = with_engines(2)
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"stall_timeout_s": 2.0})})
    done = run_recipe(tmp_path / "run", recipe, make_engine=Opening({2: 5}))
    [lost] = events(done.run, "engine_lost")
    assert lost["stage"] == "rl"
    assert lost["reason"].startswith("it hangs: it has computed nothing for 2 s")
    assert_same_outcome(done.run, scripted_run.run)
    assert RolloutKey(task_index=0, attempt=0) in {
        scored.trajectory.key for scored in read_rollouts(done.run.stage("rl").rollouts(1))
    }


@pytest.mark.parametrize(
    ("void_tokens", "expected"),
    [
        ([20, 20], ""),  # too few to say
        ([12, 12, 12], ""),
        ([20, 30, 40], "3 void rollouts had 30 tokens on average when they failed, the 2 others have 10."),
    ],
)
def test_void_rollouts_that_are_longer_than_the_others_are_reported(void_tokens, expected):
    trajectory = SimpleNamespace(ids=[0] * 10)
    groups = [SimpleNamespace(trajectories=[SimpleNamespace(trajectory=trajectory)] * 2)]
    assert why_voids_bias(void_tokens, groups).startswith(expected)
    assert bool(why_voids_bias(void_tokens, groups)) == bool(expected)
