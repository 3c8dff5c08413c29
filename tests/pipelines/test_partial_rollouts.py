"""Rollouts in flight over publications (`async_rollouts.partial`): bounded by token, recorded, resumed without a loss."""

import asyncio
import random
from collections import Counter

import pytest

from scripted_runs import RECIPE, RecordingEngine, falling, lines_of, recipe_of, run_recipe
from strop.errors import ConfigError
from strop.pipeline.plan import check_stages
from strop.run_directory import read_json, read_lines
from strop.stages.loop.ledger import StepLedger, read_rollouts
from strop.stages.loop.rollouts import StepRollouts

TASKS, ROLLOUTS = 2, 3


def make_partial_recipe(*, k=2, steps=6, engine=None, scheduler=None, too_old="drop", partial=True, **rl):
    stages = {name: RECIPE["stages"][name] for name in ("base", "sft")}
    keys = {"steps": steps, "tasks_per_step": TASKS, "group_size": ROLLOUTS, "give_up_after": 1000}
    ahead = {"max_staleness": k, "too_old": too_old, "partial": partial}
    stages["rl"] = RECIPE["stages"]["rl"] | keys | {"async_rollouts": ahead} | rl
    root = {"scheduler": scheduler} if scheduler else {}
    return recipe_of(stages, engine={"max_length": 256} | (engine or {"own_process": True}), **root)


class Delayed(RecordingEngine):
    """A completion takes a time that nothing decides; weights that are published meanwhile sample the rest of it."""

    async def _answer(self, *arguments):
        await asyncio.sleep(random.SystemRandom().uniform(0, 0.06))
        return await super()._answer(*arguments)


def spans_of(scored):
    return [span for turn in scored.trajectory.turns for span in turn.completion.spans]


def trained(run, step):
    """The rollouts of the step's selection."""
    groups = read_json(run.stage("rl").selection(step))["groups"]
    return [(record["key"]["task_index"], record["key"]["attempt"]) for group in groups for record in group["rollouts"]]


def assert_nothing_is_lost_or_doubled(run, steps):
    keys = [key for step in range(1, steps + 1) for key in trained(run, step)]
    assert keys == [(task, attempt) for task in range(steps * TASKS) for attempt in range(ROLLOUTS)]


@pytest.mark.timeout(300)
def test_no_token_is_older_than_k_in_200_steps_with_random_delays(tmp_path, monkeypatch):
    steps, k = 200, 2
    started, published, most, together = set(), [], 0, Counter()

    def starting(ledger, key, *, seed):
        nonlocal most
        started.add(key.task_index // TASKS + 1)
        most = max(most, len(started) - published[-1])
        start(ledger, key, seed=seed)

    async def publishing(rollouts, trainer, *, version):
        together[rollouts.player.pool._num_sharing] += 1
        weights = await publish(rollouts, trainer, version=version)
        published.append(version)
        return weights

    start, publish = StepLedger.started, StepRollouts.publish
    monkeypatch.setattr(StepLedger, "started", starting)
    monkeypatch.setattr(StepRollouts, "publish", publishing)
    recipe = make_partial_recipe(k=k, steps=steps, checkpoint_every=50, keep_rollouts=steps)
    run = run_recipe(tmp_path / "run", recipe, make_engine=Delayed).run
    num_spliced = 0
    for line in lines_of(run):
        step, tokens = line["step"], []
        rollouts = read_rollouts(run.stage("rl").rollouts(step))
        for scored in rollouts:
            for turn in scored.trajectory.turns:
                completion = turn.completion
                assert sum(num for _, num in completion.spans) == len(completion.ids) == len(completion.logprobs)
                num_spliced += len(completion.spans) > 1
                tokens += [step - 1 - version for version, num in completion.spans for _ in range(num)]
        assert max(tokens) <= k
        assert min(tokens) >= 0
        assert line["rollout/staleness_max"] == max(tokens)
        assert line["rollout/staleness_mean"] == pytest.approx(sum(tokens) / len(tokens))
    assert most == k + 1
    assert num_spliced > 20
    assert together[k] > 20, "publications waited for rollouts"
    assert_nothing_is_lost_or_doubled(run, steps)


def test_the_file_names_the_checksum_of_every_version_that_sampled_a_token(tmp_path):
    run = run_recipe(tmp_path / "run", make_partial_recipe(), make_engine=Delayed).run
    published = {line["step"]: line["weights"] for line in read_lines(run.events) if line["event"] == "step_finished"}
    for step in range(1, 7):
        for line, scored in zip(
            read_lines(run.stage("rl").rollouts(step)), read_rollouts(run.stage("rl").rollouts(step)), strict=True
        ):
            assert set(map(int, line["weights"])) == {version for version, _ in spans_of(scored)}
            assert all(weights == published[int(each)] for each, weights in line["weights"].items() if each != "0")


@pytest.mark.parametrize("fall", [{"before": 2}, {"after": 2}, {"after": 4}], ids=str)
def test_a_run_that_falls_loses_no_task_and_plays_none_twice(tmp_path, fall):
    recipe = make_partial_recipe(checkpoint_every=2, k=2)
    with falling("rl", **fall):
        run_recipe(tmp_path / "run", recipe, make_engine=Delayed)
    path = tmp_path / "run" / "stages" / "rl" / "rollouts"
    before = Counter(each.trajectory.key for step in range(1, 7) for each in read_rollouts(path / f"step-{step:06d}.jsonl"))
    run = run_recipe(tmp_path / "run", recipe, make_engine=Delayed).run
    assert_nothing_is_lost_or_doubled(run, 6)
    after = Counter(each.trajectory.key for step in range(1, 7) for each in read_rollouts(run.stage("rl").rollouts(step)))
    assert before
    assert sum(after.values()) == 6 * TASKS * ROLLOUTS  # what was dropped is gone
    assert all(line["rollout/staleness_max"] <= 2 for line in lines_of(run))


@pytest.mark.parametrize("too_old", ["drop", "wait"])
def test_rollouts_of_weights_that_are_gone_count_as_of_the_checkpoint_and_may_be_too_old(tmp_path, too_old):
    """The run falls after step 3, whose checkpoint is missing: those of step 4 were sampled by versions 2 and 3."""
    recipe = make_partial_recipe(k=1, checkpoint_every=100, too_old=too_old)
    ended = []

    async def publishing(rollouts, trainer, *, version):
        if version == 4 and not ended:
            ended.append(version)
            raise KeyboardInterrupt
        return await publish(rollouts, trainer, version=version)

    publish = StepRollouts.publish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRollouts, "publish", publishing)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(tmp_path / "run", recipe, make_engine=Delayed)
        run = run_recipe(tmp_path / "run", recipe, make_engine=Delayed).run
    assert_nothing_is_lost_or_doubled(run, 6)
    lines = lines_of(run)
    staleness, dropped = ([line[name] for line in lines] for name in ("rollout/staleness_max", "rollout/dropped_too_old"))
    events = [line["step"] for line in read_lines(run.events) if line["event"] == "rollouts_dropped"]
    if too_old == "drop":
        assert max(staleness) == 1
        assert dropped[:2] == [0, 0]
        assert dropped[2:4] == [TASKS * ROLLOUTS] * 2
        assert events[:2] == [3, 4]
    else:
        assert staleness[:4] == [0, 1, 2, 3]  # all of them count as of version 0
        assert dropped == [0] * 6
        assert events == []


def test_validation_waits_for_the_rollouts_in_flight_and_has_the_engines_to_itself(tmp_path):
    validation = {"every_steps": 2, "num_tasks": 3}
    run = run_recipe(tmp_path / "run", make_partial_recipe(validation=validation), make_engine=Delayed).run
    assert_nothing_is_lost_or_doubled(run, 6)
    for step in (2, 4, 6):
        rollouts = read_rollouts(run.stage("rl").validation(step))
        assert {version for scored in rollouts for version, _ in spans_of(scored)} == {step}


def test_a_schedule_holds_for_the_step_that_it_names_though_steps_are_in_flight_together(tmp_path):
    schedule = [{"at_step": 3, "limits": {"max_turns": 1}}]
    run = run_recipe(tmp_path / "run", make_partial_recipe(schedule=schedule, k=3), make_engine=Delayed).run
    rollouts = [read_rollouts(run.stage("rl").rollouts(step)) for step in range(1, 7)]
    turns = [max(len(scored.trajectory.turns) for scored in of_step) for of_step in rollouts]
    assert min(turns[:2]) > 1
    assert turns[2:] == [1] * 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"k": 0}, "partial rollouts need max_staleness of at least 1"),
        ({"engine": {"own_process": False}}, "async_rollouts is set, but engine and trainer compute in one process"),
        ({"engine": {"kind": "sglang", "addresses": ["http://h:1"]}}, "engines of kind 'sglang' end their requests"),
        ({"scheduler": {"policy": "static"}}, "scheduler.policy = 'static' waits for whole batches"),
    ],
)
def test_what_cannot_be_in_flight_is_refused_before_anything_runs(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_stages(make_partial_recipe(**keys), ["rl"])
