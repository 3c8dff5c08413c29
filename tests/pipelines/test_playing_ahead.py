"""Steps are played while earlier ones are trained on (`async_rollouts`): bounded, recorded, refused where it cannot hold.

Scripted engines here; `test_resume_ahead.py` has real ones, and kills them.
"""

import asyncio
import threading
import time

import pytest
from test_dynamic_sampling import METHOD, all_right_if_even

from scripted_runs import (
    RECIPE,
    Fallen,
    RecordingEngine,
    assert_same_training,
    falling,
    lines_of,
    recipe_of,
    run_recipe,
)
from strop.errors import ConfigError, RunError
from strop.pipeline.plan import check_stages, plan
from strop.reports.log import read_run
from strop.reports.rollouts import read_rollouts as read_table
from strop.run_directory import read_json, read_lines
from strop.stages.loop import checkpoints
from strop.stages.loop.async_rollouts import read_closed
from strop.stages.loop.ledger import StepLedger, read_rollouts
from strop.stages.loop.rollouts import StepRollouts
from strop.training import learner

APART = {"own_process": True}
SLEEPING = {"kind": "vllm", "addresses": ["http://127.0.0.1:8000"], "max_length": 256, "sleep": True}
STEPS = 4


def make_ahead_recipe(*, engine=APART, k=1, too_old="drop", **rl):
    stages = {name: RECIPE["stages"][name] for name in ("base", "sft")}
    ahead = {"max_staleness": k, "too_old": too_old}
    stages["rl"] = RECIPE["stages"]["rl"] | {"steps": STEPS, "async_rollouts": ahead} | rl
    return recipe_of(stages, engine={"max_length": 256} | engine)


def events(run, name):
    return [line for line in read_lines(run.events) if line["event"] == name]


def versions(run, step):
    """Of the weights that sampled the step's turns."""
    rollouts = read_rollouts(run.stage("rl").rollouts(step))
    return {turn.completion.policy_version for scored in rollouts for turn in scored.trajectory.turns}


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("ahead") / "run", make_ahead_recipe())


def test_every_step_but_the_first_is_one_publication_behind_and_says_so(ahead):
    assert [versions(ahead.run, step) for step in range(1, STEPS + 1)] == [{0}, {0}, {1}, {2}]
    lines = lines_of(ahead.run)
    assert [line["rollout/staleness_mean"] for line in lines] == [0.0, 1.0, 1.0, 1.0]
    assert [line["rollout/staleness_max"] for line in lines] == [0.0, 1.0, 1.0, 1.0]
    assert not list(ahead.run.stage("rl").path.glob(f"rollouts/step-{STEPS + 1:06d}*")), "no step follows the last"


def test_each_version_is_the_policy_that_the_trainer_had_then(ahead):
    """Rollouts name the checksum of their weights, and a step's event that of the weights which it published."""
    published = {line["step"]: line["weights"] for line in read_lines(ahead.run.events) if line["event"] == "step_finished"}
    assert len(set(published.values())) == STEPS, "the policy never changed: the test proves nothing"
    for step in (3, 4):
        lines = read_lines(ahead.run.stage("rl").rollouts(step))
        assert [line["weights"] for line in lines] == [{str(step - 2): published[step - 2]}] * len(lines)


def test_the_gap_of_log_probs_is_shown_for_equal_weights_only(ahead):
    assert ["policy/logprob_gap_mean" in line for line in lines_of(ahead.run)] == [True, False, False, False]
    assert all("policy/sampler_kl_nats" in line for line in lines_of(ahead.run))


def test_what_older_weights_sampled_is_corrected_for_by_default(ahead):
    method = read_json(ahead.run.manifest)["recipe"]["stages"]["rl"]["method"]
    assert method["mismatch"] == "truncate_token"
    assert all("policy/mismatch_weight" in line for line in lines_of(ahead.run))


def test_the_report_says_how_far_behind_a_rollout_is(ahead):
    steps = {view.step: view for view in read_table(ahead.run, read_run(ahead.run)).steps if view.stage.name == "rl"}
    said = {step: {each.policy_version for group in view.groups for each in group.rollouts} for step, view in steps.items()}
    assert said[1] == {"0"}
    assert said[2] == {"0 (1 behind)"}
    assert said[4] == {"2 (1 behind)"}


@pytest.mark.parametrize("k", [0, 2, 9])
def test_a_rollout_is_k_publications_old_where_so_many_were_made(tmp_path, k):
    run = run_recipe(tmp_path / "run", make_ahead_recipe(k=k)).run
    assert [versions(run, step) for step in range(1, STEPS + 1)] == [{max(0, step - 1 - k)} for step in range(1, STEPS + 1)]
    assert [line["rollout/staleness_max"] for line in lines_of(run)] == [min(step, k) for step in range(STEPS)]


def test_a_staleness_of_0_trains_as_a_run_without_it(tmp_path):
    ahead, at_once = (
        run_recipe(tmp_path / name, make_ahead_recipe(**rl)).run
        for name, rl in {"ahead": {"k": 0}, "at once": {"async_rollouts": None}}.items()
    )
    policies = [(run.stage("rl").model / "model.safetensors").read_bytes() for run in (ahead, at_once)]
    assert policies[0] == policies[1]


def test_no_more_than_k_and_one_batches_are_in_flight_or_wait(tmp_path, monkeypatch):
    started, published, most = set(), [], 0

    def starting(ledger, key, *, seed):
        nonlocal most
        started.add(key.task_index // 3 + 1)
        most = max(most, len(started) - published[-1])
        start(ledger, key, seed=seed)

    async def publishing(rollouts, trainer, *, version):
        published.append(version)
        return await publish(rollouts, trainer, version=version)

    start, publish = StepLedger.started, StepRollouts.publish
    monkeypatch.setattr(StepLedger, "started", starting)
    monkeypatch.setattr(StepRollouts, "publish", publishing)
    run_recipe(tmp_path / "run", make_ahead_recipe(k=2))
    assert most == 3
    assert sorted(started) == [1, 2, 3, 4]


def dropped(run):
    return [(line["step"], line["rollouts"], line["policy_version"]) for line in events(run, "rollouts_dropped")]


@pytest.mark.parametrize("too_old", ["drop", "wait"])
def test_rollouts_that_a_lower_k_makes_too_old_are_dropped_and_counted_or_waited_for(tmp_path, too_old):
    with falling("rl", after=2):
        run_recipe(tmp_path / "run", make_ahead_recipe(k=2))  # the rollouts of steps 3 and 4 are of versions 0 and 1
    run = run_recipe(tmp_path / "run", make_ahead_recipe(k=1, too_old=too_old)).run
    drops = too_old == "drop"
    assert [line["rollout/dropped_too_old"] for line in lines_of(run)] == [0, 0, *([18, 18] if drops else [0, 0])]
    assert dropped(run) == ([(3, 18, 0), (4, 18, 1)] if drops else [])
    assert [line["rollout/staleness_max"] for line in lines_of(run)] == [0, 1, *([0, 1] if drops else [2, 2])]
    assert [versions(run, step) for step in (3, 4)] == ([{2}, {2}] if drops else [{0}, {1}])
    for step in range(1, STEPS + 1):
        keys = [scored.trajectory.key for scored in read_rollouts(run.stage("rl").rollouts(step))]
        assert len(set(keys)) == len(keys) == 18


def test_a_higher_k_begins_further_steps_from_the_weights_of_the_checkpoint(tmp_path):
    with falling("rl", after=1):
        run_recipe(tmp_path / "run", make_ahead_recipe(k=1))
    run = run_recipe(tmp_path / "run", make_ahead_recipe(k=3)).run
    assert [versions(run, step) for step in range(1, STEPS + 1)] == [{0}, {0}, {1}, {1}]
    assert [line["rollout/dropped_too_old"] for line in lines_of(run)] == [0, 0, 0, 0]


def test_nothing_is_played_ahead_unless_asked(scripted_run):
    run = scripted_run.run
    assert [versions(run, step) for step in (1, 2)] == [{0}, {1}]
    ledger = read_lines(run.stage("rl").path / "rollouts" / "step-000002.ledger.jsonl")
    assert not any(line["event"] == "closed" for line in ledger)


class SlowEngine(RecordingEngine):
    """Samples for a while, without computing."""

    async def complete(self, request):
        await asyncio.sleep(0.1)
        return await super().complete(request)


def test_rollouts_run_while_the_trainer_computes(tmp_path, monkeypatch):
    """Engine and trainer both only sleep here, so the time that a step saves is that of the shorter of both."""

    def slow_update(self, *arguments):
        time.sleep(0.3)
        return update(self, *arguments)

    update = learner.Learner.update
    monkeypatch.setattr(learner.Learner, "update", slow_update)
    lines = lines_of(run_recipe(tmp_path / "run", make_ahead_recipe(steps=3), make_engine=SlowEngine).run)
    for line in lines[1:-1]:
        assert line["time/rollout_s"] >= 0.2
        assert line["time/update_s"] >= 0.3
        assert line["time/step_s"] < line["time/rollout_s"] + line["time/update_s"] - 0.1


def test_an_engine_in_the_place_of_a_lost_one_gets_what_was_published_and_not_what_is_trained_meanwhile(tmp_path, monkeypatch):
    loads, num_updates, is_trained = [], 0, threading.Event()

    def counting_update(self, *arguments):
        nonlocal num_updates
        report = update(self, *arguments)
        num_updates += 1
        if num_updates == 2:
            is_trained.set()
        return report

    class Doomed(RecordingEngine):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            engines.append(self)

        async def complete(self, request):
            if self is engines[0] and self.policy_version == 1:
                assert await asyncio.to_thread(is_trained.wait, 30)
                await self.kill("it was unplugged.")
            return await super().complete(request)

        async def load_weights(self, publication):
            await super().load_weights(publication)
            loads.append((engines.index(self), publication.version, await publication.checksum(), num_updates))

    engines = []
    update = learner.Learner.update
    monkeypatch.setattr(learner.Learner, "update", counting_update)
    run = run_recipe(tmp_path / "run", make_ahead_recipe(), make_engine=Doomed).run
    published = {line["step"]: line["weights"] for line in read_lines(run.events) if line["event"] == "step_finished"}
    assert next(load for load in loads if load[0] == 1) == (1, 1, published[1], 2)
    assert [versions(run, step) for step in range(1, STEPS + 1)] == [{0}, {0}, {1}, {2}]


def assert_same_rl(run, other):
    """Equal in all that no clock said, and nothing was played twice."""
    assert_same_training(run, other)
    for step in range(1, STEPS + 1):
        rollouts = read_rollouts(run.stage("rl").rollouts(step))
        assert len({scored.trajectory.key for scored in rollouts}) == len(rollouts), "a rollout was played twice"


@pytest.mark.parametrize("fall", [{"before": 3}, {"after": 1}], ids=["before a checkpoint", "behind the first checkpoint"])
def test_a_run_that_falls_ends_with_the_same_weights(ahead, tmp_path, fall):
    with falling("rl", **fall):
        run_recipe(tmp_path / "run", make_ahead_recipe())
    assert_same_rl(run_recipe(tmp_path / "run", make_ahead_recipe()).run, ahead.run)


def test_a_run_that_falls_in_its_first_update_ends_with_the_same_weights(ahead, tmp_path, monkeypatch):
    def fall(*arguments):
        raise Fallen

    with monkeypatch.context() as patch:
        patch.setattr(learner.Learner, "update", fall)
        with pytest.raises(Fallen):
            run_recipe(tmp_path / "run", make_ahead_recipe())
    assert_same_rl(run_recipe(tmp_path / "run", make_ahead_recipe()).run, ahead.run)


DAPO = {
    "method": METHOD | {"tied_by": "accuracy"},  # three rounds of refills
    "tasks_per_step": 4,
    "group_size": 4,
    "updates_per_step": 2,
}


def test_a_run_that_falls_in_a_refill_of_a_step_that_is_played_ahead_ends_with_the_same_weights(tmp_path, monkeypatch):
    """The checkpoint of the first step is there, or is being written."""
    step, undisturbed = 3, run_recipe(tmp_path / "undisturbed", make_ahead_recipe(**DAPO), say=all_right_if_even).run
    refills = range(STEPS * 4 + (step - 1) * 12, STEPS * 4 + step * 12)
    num_refilled, finish = 0, StepLedger.finished

    def fall(ledger, scored):
        nonlocal num_refilled
        finish(ledger, scored)
        num_refilled += scored.trajectory.key.task_index in refills
        if num_refilled == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(StepLedger, "finished", fall)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(tmp_path / "run", make_ahead_recipe(**DAPO), say=all_right_if_even)
    monkeypatch.undo()
    run = run_recipe(tmp_path / "run", make_ahead_recipe(**DAPO), say=all_right_if_even).run
    assert_same_rl(run, undisturbed)
    assert all(line["groups/refilled"] > 0 for line in lines_of(run))
    assert [versions(run, each) for each in range(1, STEPS + 1)] == [{0}, {0}, {1}, {2}]
    ledger = read_lines(run.stage("rl").path / "rollouts" / f"step-{step:06d}.ledger.jsonl")
    nothing, reused = (line["reused"] for line in ledger if line["event"] == "opened")
    assert nothing == 0
    assert reused >= 4 * 4 + 2  # its own rollouts and those of its refills that had ended


def test_a_checkpoint_is_there_when_the_next_rollouts_are(tmp_path, monkeypatch):
    """Or a run that resumes from it would need weights that nobody has."""
    closed = {}

    async def saving(writer, step):
        if writer.context.name == "rl":
            closed[step] = read_closed(writer.context.directory.rollouts(step + 1), lambda index: None) is not None
        await save(writer, step)

    save = checkpoints.CheckpointWriter.save
    monkeypatch.setattr(checkpoints.CheckpointWriter, "save", saving)
    run_recipe(tmp_path / "run", make_ahead_recipe())
    assert closed == {1: True, 2: True, 3: True}


def test_rollouts_that_are_gone_are_not_made_up_for_by_others(tmp_path):
    with falling("rl", after=2):
        run_recipe(tmp_path / "run", make_ahead_recipe())
    path = tmp_path / "run" / "stages" / "rl" / "rollouts" / "step-000003.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-1]))
    with pytest.raises(RunError, match=r"step-000003.jsonl: 1 rollouts that step-000003.ledger.jsonl has are missing"):
        run_recipe(tmp_path / "run", make_ahead_recipe())


def test_a_schedule_holds_for_the_step_that_it_names_however_early_it_is_played(tmp_path):
    schedule = [
        {"at_step": 3, "sampling": {"temperature": 0.5}, "limits": {"max_turns": 1}},
        {"at_update": 1, "reset_optimizer": True},
    ]
    done = run_recipe(tmp_path / "run", make_ahead_recipe(schedule=schedule))
    requests = [request for request, _ in done.engines[0].answers.values()]
    told = [read_lines(done.run.stage("rl").rollouts(step)) for step in range(1, STEPS + 1)]
    turns = [max(len(line["rollout"]["trajectory"]["turns"]) for line in lines) for lines in told]
    assert [num > 1 for num in turns] == [True, True, False, False]
    assert {request.temperature for request in requests} == {1.0, 0.5}
    assert sum(request.temperature == 1.0 for request in requests) == sum(
        len(line["rollout"]["trajectory"]["turns"]) for lines in told[:2] for line in lines
    )


@pytest.mark.parametrize(
    ("rl", "engine", "message"),
    [
        ({}, {}, "stages.rl.async_rollouts is set, but engine and trainer compute in one process"),
        ({"max_staleness": 1}, APART, r"stages.rl.max_staleness.*Did you mean 'async_rollouts.max_staleness'\?"),
        ({}, SLEEPING, "stages.rl.async_rollouts plays rollouts while the trainer computes, but engine.sleep is true"),
        ({"k": -1}, APART, "async_rollouts.max_staleness.*greater than or equal to 0"),
        (
            {"method": {"kind": "grpo", "mismatch": "off"}},
            APART,
            "method.mismatch is 'off'. Leave method.mismatch out",
        ),
        (
            {"schedule": [{"at_update": 2, "limits": {"max_turns": 2}}]},
            APART,
            r"schedule entry 1 \(at_update = 2, limits.max_turns = 2\) depends on updates that are not known yet",
        ),
    ],
)
def test_what_cannot_hold_is_refused_before_anything_runs(rl, engine, message):
    with pytest.raises(ConfigError, match=message):
        check_stages(make_ahead_recipe(engine=engine, **rl), ["rl"])


@pytest.mark.parametrize("engine", [{"replicas": 2}, {"devices": [0]}, {"kind": "vllm", "addresses": ["http://h:1"]}])
def test_whatever_computes_elsewhere_may_play_ahead(engine):
    recipe = make_ahead_recipe(engine=engine)
    assert recipe.engine.is_apart
    assert recipe.stages["rl"].config.staleness == 1


def test_the_plan_tells_it():
    [told] = [stage.arithmetic for stage in plan(make_ahead_recipe()) if stage.name == "rl"]
    assert told.endswith("each step's rollouts are played while the step before is trained on")
