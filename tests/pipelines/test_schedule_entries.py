"""Entries of a schedule: when they hold, what they change, and that a run which resumes goes on with the same."""

import itertools
import json

import pytest

from scripted_runs import RECIPE, assert_same_training, falling, lines_of, make_recipe, recipe_of, run_recipe
from strop.errors import ConfigError, NotThere
from strop.pipeline.plan import check_stages, plan
from strop.recipe import load
from strop.recipe.schedule import Done, ScheduleEntry
from strop.reports.terminal import print_plan
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.runs.lineage import lineages
from strop.tasks import TaskSource, make_tasks
from strop.types import derive_seed

SWITCHES = [
    {"at_step": 2, "sampling": {"temperature": 0.5}, "limits": {"max_turns": 2}},
    {"at_update": 2, "sampling": {"max_tokens": 150}},
]
SEED = derive_seed("run", 0, "rl", "tasks")
TOLD = '{ kind = "arithmetic", num_terms = 2, min_digits = 3, max_digits = 3, operators = ["+"], wording = "{expression}" }'
LARGER = RECIPE["tasks"] | {"min_digits": 3, "max_digits": 3}
R1 = {
    "steps": 5,
    "method": {"kind": "grpo", "kl_coefficient": 0.01, "drop_tied": False},
    "trainer": {"optimizer": {"lr": 1e-2, "warmup_updates": 4}},
    "schedule": [
        {"every_updates": 2, "refresh_reference": True},
        {"at_update": 1, "tasks": LARGER},
        {"at_step": 4, "reset_optimizer": True, "sampling": {"temperature": 0.7}},
    ],
}


def begins_with(steps, updates):
    return Done(steps=steps, updates=updates)


def test_an_entry_holds_from_its_step_or_from_the_first_step_after_its_update():
    at_step, at_update = ScheduleEntry(at_step=3, reset_optimizer=True), ScheduleEntry(at_update=8200, reset_optimizer=True)
    assert [at_step.is_reached(begins_with(step - 1, 0)) for step in (1, 2, 3, 4)] == [False, False, True, True]
    # R1: 16 updates a step, and 8200 is no multiple of 16, so it is the step after 513 * 16 = 8208
    assert not at_update.is_reached(begins_with(512, 8192))
    assert at_update.is_reached(begins_with(513, 8208))


def test_an_entry_is_due_once_or_each_time_that_its_number_is_full_whatever_was_skipped():
    once, often = ScheduleEntry(at_update=3, reset_optimizer=True), ScheduleEntry(every_updates=4, refresh_reference=True)
    moments = [begins_with(steps, updates) for steps, updates in [(0, 0), (1, 2), (2, 2), (3, 4), (4, 6), (5, 8)]]
    steps = list(itertools.pairwise(moments))
    assert [after.steps for before, after in steps if once.is_due(before, after)] == [3]
    assert [after.steps for before, after in steps if often.is_due(before, after)] == [3, 5]


def test_temperature_length_and_turns_are_those_of_the_step(tmp_path):
    done = run_recipe(tmp_path / "run", make_recipe(steps=4, schedule=SWITCHES))
    stage = done.run.stage("rl")
    temperatures, responses, turns = {}, {}, {}
    for step in (1, 2, 3, 4):
        lines = read_lines(stage.rollouts(step))
        rollouts = [line["rollout"] for line in lines]
        turns[step] = max(len(each["trajectory"]["turns"]) for each in rollouts)
        [version] = {int(each) for line in lines for each in line["weights"]}
        of_step = [each for each, made in done.engines[1].answers.values() if made.policy_version == version]
        temperatures[step] = {request.temperature for request in of_step}
        responses[step] = max(request.max_tokens for request in of_step)
    assert temperatures == {1: {1.0}, 2: {0.5}, 3: {0.5}, 4: {0.5}}
    assert (responses[1], responses[2], responses[3]) == (200, 200, 150)
    assert (turns[1], turns[2]) == (3, 2)


def test_updates_are_clipped_by_the_limit_of_their_step(tmp_path):
    never = {"kind": "grpo", "clip_low": 10.0, "clip_high": 10.0}
    switch = [{"at_step": 3, "method": {"clip_high": 0.0}}]
    recipe = make_recipe(steps=4, updates_per_step=3, method=never, schedule=switch)
    lines = lines_of(run_recipe(tmp_path / "run", recipe).run)
    assert [line["policy/clip_fraction_high"] > 0 for line in lines] == [False, False, True, True]
    assert max(line["policy/clip_fraction_low"] for line in lines) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("schedule") / "run", make_recipe(**R1)).run


def test_the_reference_is_refreshed_and_the_optimizer_reset_when_they_are_due(whole):
    lines = lines_of(whole)
    assert [line["update/skipped"] for line in lines] == [0.0] * 5
    is_zero = [line["policy/reference_kl_nats"] == 0 for line in lines]  # measured before the step's one update
    assert is_zero == [True, False, True, False, True]
    rates = [line["update/learning_rate"] for line in lines]
    assert rates == pytest.approx([0.25e-2, 0.5e-2, 0.75e-2, 0.25e-2, 0.5e-2])
    told = [(line["step"], line["when"], line["what"]) for line in read_lines(whole.events) if line["event"] == "scheduled"]
    assert told == [
        (2, "at_update = 1", f"tasks = {TOLD}"),
        (3, "every_updates = 2", "refresh_reference = true"),
        (4, "at_step = 4", "sampling.temperature = 0.7, reset_optimizer = true"),
        (5, "every_updates = 2", "refresh_reference = true"),
    ]


def test_tasks_are_those_of_the_step_from_the_place_that_the_stage_has_come_to(whole):
    sources = [make_tasks(TaskSource.of(each), seed=SEED, split="train") for each in (RECIPE["tasks"], LARGER)]
    for step in range(1, 6):
        source = sources[step > 1]
        expected = {source.task(index).id for index in range(3 * (step - 1), 3 * step)}
        lines = read_lines(whole.stage("rl").rollouts(step))
        assert {line["rollout"]["trajectory"]["task_id"] for line in lines} == expected


def test_a_file_of_tasks_to_come_is_found_beside_the_recipe_and_counts_as_data_of_the_stage(tmp_path, monkeypatch):
    (tmp_path / "later.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    rl = RECIPE["stages"]["rl"] | {"schedule": [{"at_step": 2, "tasks": {"kind": "jsonl", "path": "later.jsonl"}}]}
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE | {"stages": RECIPE["stages"] | {"rl": rl}}))
    monkeypatch.setattr(load, "load_toml", lambda path, overrides, **words: json.loads(path.read_text()))
    recipe = load.load_recipe(tmp_path / "recipe.json")
    assert recipe.stages["rl"].config.schedule[0].tasks.config.path == tmp_path / "later.jsonl"
    [(key, facts)] = lineages(recipe, RunDirectory(tmp_path / "run"))["rl"]["files"].items()
    assert (key, facts["path"]) == ("schedule.0.tasks.path", str(tmp_path / "later.jsonl"))


def test_tasks_to_come_that_are_not_there_are_told_before_the_first_step(tmp_path):
    with pytest.raises(NotThere, match=r"gone\.jsonl"):
        run_recipe(tmp_path / "run", make_recipe(schedule=[{"at_step": 2, "tasks": {"kind": "jsonl", "path": "gone.jsonl"}}]))
    assert not lines_of(RunDirectory(tmp_path / "run"))


def test_tasks_to_come_that_the_engine_cannot_hold_are_told_before_the_first_step(tmp_path):
    long = RECIPE["tasks"] | {"wording": "so " * 60 + "{expression}"}
    with pytest.raises(ConfigError, match="a single rollout cannot fit"):
        run_recipe(tmp_path / "run", make_recipe(schedule=[{"at_step": 2, "tasks": long}]))
    assert not lines_of(RunDirectory(tmp_path / "run"))


def test_a_run_resumes_exactly_between_what_its_schedule_has_done_and_does_next(whole, tmp_path):
    with falling("rl", after=3):
        run_recipe(tmp_path / "run", make_recipe(**R1))
    assert_same_training(run_recipe(tmp_path / "run", make_recipe(**R1)).run, whole)


REFUSED = {
    "no time": (
        {"reset_optimizer": True},
        {},
        "at_step, at_update, every_updates, but there is none",
    ),
    "no change": ({"at_step": 2}, {}, "nothing changes"),
    "a switch again and again": ({"every_updates": 2, "limits": {"max_turns": 1}}, {}, "limits is changed once"),
    "a late step": (
        {"at_step": 5, "reset_optimizer": True},
        {},
        r"entry 1 \(at_step = 5, reset_optimizer = true\): the stage has 4 steps",
    ),
    "no clip": (
        {"at_step": 2, "method": {"clip_high": 0.4}},
        {"method": {"kind": "grpo", "loss": "no_clip"}},
        "method.clip_high is 0.4 but method.loss is 'no_clip', which does not clip",
    ),
    "no reference": ({"at_step": 2, "refresh_reference": True}, {}, "there is no reference, since method.kl_coefficient is 0"),
    "two moments": ({"at_step": 2, "at_update": 2, "reset_optimizer": True}, {}, "there are at_step and at_update"),
    "a cosine that is reset": (
        {"at_step": 2, "reset_optimizer": True},
        {"trainer": {"optimizer": {"schedule": "cosine"}}},
        "would begin again without an end",
    ),
    "tasks that are other stages'": (
        {"at_step": 2, "tasks": {"kind": "jsonl", "path": "more.jsonl"}},
        {"data": ["hard"]},
        "data names stages whose tasks are played, so these never are",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_entry_that_cannot_be_meant_is_refused_by_name(case):
    entry, settings, message = REFUSED[case]
    rl = RECIPE["stages"]["rl"] | {"steps": 4, "schedule": [entry]} | settings
    with pytest.raises(ConfigError, match=message):
        check_stages(recipe_of(RECIPE["stages"] | {"rl": rl}), ["rl"])


def test_the_plan_shows_the_schedule_with_the_step_of_an_update(capsys):
    recipe = make_recipe(steps=9, updates_per_step=3, schedule=[*SWITCHES, {"at_update": 10, "reset_optimizer": True}])
    planned = plan(recipe)
    [rl] = [stage for stage in planned if stage.name == "rl"]
    *entries, distinct = rl.schedule
    assert distinct.startswith("distinct tokens of an update: ")
    assert entries == [
        "at_step = 2: sampling.temperature = 0.5, limits.max_turns = 2",
        "at_update = 2 (step 2): sampling.max_tokens = 150",
        "at_update = 10 (step 5): reset_optimizer = true",
    ]
    assert rl.tokens == 3 * 6 * (200 + 8 * 150)
    print_plan("scripted", "", planned)
    assert "at_update = 10" in capsys.readouterr().out


def test_expert_iteration_has_a_schedule_too(tmp_path):
    stage = {
        "kind": "expert_iteration",
        "init": "sft",
        "steps": 2,
        "tasks_per_step": 2,
        "group_size": 3,
        "give_up_after": 9,
        "schedule": [{"at_step": 2, "sampling": {"temperature": 0.5}}],
    }
    stages = {name: RECIPE["stages"][name] for name in ("base", "sft")} | {"ei": stage}
    done = run_recipe(tmp_path / "run", recipe_of(stages))
    requests = [request for request, _ in done.engines[0].answers.values()]
    assert {request.temperature for request in requests} == {1.0, 0.5}
    assert read_json(RunDirectory(tmp_path / "run").stage("ei").done)["summary"].startswith("2 steps")
    stages["ei"] = stage | {"schedule": [{"at_step": 2, "method": {"clip_high": 0.4}}]}
    with pytest.raises(ConfigError, match="the stage has no method with clip_high"):
        recipe_of(stages)
