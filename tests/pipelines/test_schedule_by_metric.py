"""Entries of a schedule that wait for a metric: when they hold, what they change, and that a fall changes none of it."""

import json
import re

import pytest

from scripted_runs import (
    RECIPE,
    Fallen,
    Watching,
    answer,
    assert_same_training,
    falling,
    lines_of,
    make_recipe,
    recipe_of,
    run_recipe,
)
from strop.errors import ConfigError
from strop.pipeline.plan import check_stages, plan
from strop.recipe.schedule import Done, RulesWatch, ScheduleEntry, reached
from strop.reports.log import read_run
from strop.reports.terminal import print_plan
from strop.run_directory import read_lines
from strop.stages.context import StageMetrics

VALIDATION = {"every_steps": 2, "num_tasks": 2, "k": 1}
LONGER = {"when": {"truncated_above": 0.1, "over_steps": 2}, "sampling": {"max_tokens": 90}}
LADDER = {
    "steps": 6,
    "give_up_after": 9,
    "sampling": {"max_tokens": 40},
    "method": {"kind": "grpo", "kl_coefficient": 0.01, "drop_tied": False},
    "trainer": {"optimizer": {"lr": 1e-2, "warmup_updates": 9}},
    "validation": VALIDATION,
    "schedule": [
        LONGER,
        {"when": {"truncated_above": 0.1}, "sampling": {"max_tokens": 150}},
        {"when": {"plateau_of": 1, "min_gain": 0.99}, "refresh_reference": True, "reset_optimizer": True},
    ],
}


def entry(**keys):
    return ScheduleEntry.model_validate_json(json.dumps(keys))


def truncated(*values):
    return [{"stage": "rl", "step": step, "rollout/truncated_fraction": value} for step, value in enumerate(values, start=1)]


def switches_of(run):
    """As the report marks them."""
    return next(stage.switches for stage in read_run(run).stages if stage.name == "rl")


def told_by(run):
    return [line for line in read_lines(run.events) if line["event"] == "scheduled"]


class Reader(Watching):
    """Keeps what is told of the schedule, and behind which step."""

    def __init__(self):
        super().__init__()
        self.told, self.last = [], 0

    def step(self, metrics, step):
        self.last = step

    def note(self, text):
        self.told.append((self.last, text))


def wordy(conversation, draw):
    """A right or a wrong answer behind more or fewer words, so that it is the limit which says how many get there."""
    left, right = re.search(r"(\d+)\+(\d+)", conversation).groups()
    return "and so on " * draw.choice([0, 5, 15]) + answer(draw.choice([int(left) + int(right), 1]))


def test_a_rule_holds_once_and_for_good_from_the_first_step_after_which_it_is_true():
    schedule = [entry(at_step=2, limits={"max_turns": 2}), entry(**LONGER)]
    watch, steps, found = RulesWatch(schedule, []), truncated(0.15, 0.05, 0.35, 0.0, 0.5), []
    for num in range(1, 6):
        watch.look(steps[:num])
        found.append(watch.held)
    assert found == [frozenset(), frozenset(), {1}, {1}, {1}]  # not before two steps, above and not at the bar, and for good
    assert watch.why == {1: "20.0% of the rollouts of the last 2 steps were truncated (truncated_above = 0.1, over_steps = 2)"}
    assert reached(schedule, Done(steps=3, updates=3, held=watch.held)) == schedule
    assert reached(schedule, Done(steps=3, updates=3)) == schedule[:1]


@pytest.mark.parametrize(
    ("upper", "shares", "held"),
    [
        ({}, [0.5], {0}),  # the same step does not climb two rungs
        ({}, [0.5, 0.5], {0, 1}),
        ({}, [0.0, 0.0, 0.5, 0.0], {0}),
        ({"over_steps": 2}, [0.5, 0.2], {0}),  # the window is of steps on this rung
        ({"over_steps": 2}, [0.5, 0.2, 0.2], {0, 1}),
    ],
)
def test_entries_that_change_the_same_are_a_ladder_and_each_rung_is_judged_by_its_own_steps(upper, shares, held):
    schedule = [
        entry(when={"truncated_above": 0.1}, sampling={"max_tokens": 90}),
        entry(when={"truncated_above": 0.1, **upper}, sampling={"max_tokens": 150}),
    ]
    watch = RulesWatch(schedule, [])
    for num in range(1, len(shares) + 1):
        watch.look(truncated(*shares)[:num])
    assert watch.held == held
    assert RulesWatch(schedule, truncated(*shares)).why == watch.why  # as a run that resumes has it


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("by_metric") / "run", make_recipe(**LADDER), say=wordy, progress=Reader())


def test_lengths_rise_while_too_many_rollouts_are_truncated_and_the_moments_stay(whole):
    lines = lines_of(whole.run)
    shares = [line["rollout/truncated_fraction"] for line in lines]
    assert min(shares[:3]) > 0.1
    longest = {}
    for step in range(1, 7):
        [version] = {int(each) for line in read_lines(whole.run.stage("rl").rollouts(step)) for each in line["weights"]}
        of_step = [request for request, made in whole.engines[1].answers.values() if made.policy_version == version]
        longest[step] = max(request.max_tokens for request in of_step)
    assert longest == {1: 40, 2: 40, 3: 90, 4: 150, 5: 150, 6: 150}
    rates = [line["update/learning_rate"] / 1e-2 * 9 for line in lines]
    assert rates == pytest.approx([1, 2, 3, 4, 1, 2])  # two switches keep the optimizer; what the plateau asks for resets it
    is_zero = [line["policy/reference_kl_nats"] == 0 for line in lines]
    assert is_zero == [True, False, False, False, True, False]


def test_a_switch_is_told_with_its_figures_in_the_log_and_behind_the_step_that_led_to_it(whole):
    shares = [line["rollout/truncated_fraction"] for line in lines_of(whole.run)]
    mean = f"{sum(shares[:2]) / 2:.1%}"
    [first, second, third] = told_by(whole.run)
    assert (first["step"], first["when"], first["what"]) == (
        3,
        "when = { truncated_above = 0.1, over_steps = 2 }",
        "sampling.max_tokens = 90",
    )
    rule = "truncated_above = 0.1, over_steps = 2"
    assert first["because"] == f"{mean} of the rollouts of the last 2 steps were truncated ({rule})"
    assert (second["step"], second["what"]) == (4, "sampling.max_tokens = 150")
    assert (third["step"], third["what"]) == (5, "refresh_reference = true, reset_optimizer = true")
    assert "in the validation since (plateau_of = 1, min_gain = 0.99)" in third["because"]
    assert whole.progress.told == [
        (each["step"] - 1, f"from step {each['step']}: {each['what']}, since {each['because']}")
        for each in (first, second, third)
    ]
    assert switches_of(whole.run) == {each["step"]: each["what"] for each in (first, second, third)}


def fallen_after_a_line_of_metrics(directory, step):
    """A run that fell when the step's line was written, of which no checkpoint is there yet."""
    append = StageMetrics.append

    def written_and_fallen(metrics, number, *more):
        append(metrics, number, *more)
        if number == step and metrics.steps[-1]["stage"] == "rl":
            raise Fallen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageMetrics, "append", written_and_fallen)
        with pytest.raises(Fallen):
            run_recipe(directory, make_recipe(**LADDER), say=wordy)


@pytest.mark.parametrize("fallen_after", ["metrics", "checkpoint"])
def test_law_9_a_run_resumes_exactly_around_what_its_metrics_switch(whole, tmp_path, fallen_after):
    if fallen_after == "metrics":
        fallen_after_a_line_of_metrics(tmp_path / "run", 2)
    else:
        with falling("rl", after=4):
            run_recipe(tmp_path / "run", make_recipe(**LADDER), say=wordy)
    again = run_recipe(tmp_path / "run", make_recipe(**LADDER), say=wordy).run
    assert_same_training(again, whole.run)
    told = [[(line["step"], line["what"], line["because"]) for line in told_by(run)] for run in (again, whole.run)]
    assert told[0] == told[1]
    assert switches_of(again) == switches_of(whole.run)


def test_what_a_stage_ends_with_switches_nothing(tmp_path):
    recipe = make_recipe(
        steps=9, sampling={"max_tokens": 40}, schedule=[LONGER], end_when=[{"truncated_above": 0.1, "over_steps": 2}]
    )
    done = run_recipe(tmp_path / "run", recipe, say=wordy)
    assert [line["step"] for line in lines_of(done.run)] == [1, 2]
    assert told_by(done.run) == []


def test_the_plan_tells_that_a_metric_switches_and_when_at_the_earliest(capsys):
    planned = plan(make_recipe(**LADDER))
    [rl] = [stage for stage in planned if stage.name == "rl"]
    assert rl.schedule == (
        "when = { truncated_above = 0.1, over_steps = 2 } (by a metric; step 3 at the earliest): sampling.max_tokens = 90",
        "when = { truncated_above = 0.1 } (by a metric; step 4 at the earliest): sampling.max_tokens = 150",
        "when = { plateau_of = 1, min_gain = 0.99 } (by a metric; step 5 at the earliest):"
        " refresh_reference = true, reset_optimizer = true",
        "clipping has no effect: one update per step, whose ratio is 1",
    )
    assert rl.tokens == 3 * 6 * (40 + 40 + 90 + 150 + 150 + 150)  # no more than this, whatever the metrics say
    print_plan("scripted", "", planned)
    assert "by a metric" in capsys.readouterr().out


PLATEAU = {"when": {"plateau_of": 2}, "sampling": {"max_tokens": 90}}
REFUSED = {
    "no rule": ({**LONGER, "when": {}}, {}, "a rule has one of truncated_above, plateau_of"),
    "a rule and a step": ({**LONGER, "at_step": 2}, {}, "there are at_step and when"),
    "no validation": (
        PLATEAU,
        {},
        r"schedule entry 1 \(when = { plateau_of = 2 }, sampling.max_tokens = 90\): it waits for held-out accuracy, but the"
        r" stage has no validation. Give it one \(validation.every_steps\), or leave the rule out",
    ),
    "a late plateau": (
        PLATEAU,
        {"validation": VALIDATION},
        "it could hold after step 6 at the earliest, but the stage has 4 steps",
    ),
    "a long window": (
        {**LONGER, "when": {"truncated_above": 0.1, "over_steps": 4}},
        {},
        "it could hold after step 4 at the earliest, but the stage has 4 steps, so it has no effect",
    ),
    "playing ahead": (
        LONGER,
        {"async_rollouts": {"max_staleness": 1}},
        r"schedule entry 1 \(when = .*\) depends on updates or metrics that are not known yet when a step is played ahead",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_rule_that_cannot_be_meant_is_refused_when_the_recipe_is_read(case):
    entry, settings, message = REFUSED[case]
    rl = RECIPE["stages"]["rl"] | {"steps": 4, "schedule": [entry]} | settings
    with pytest.raises(ConfigError, match=message):
        check_stages(recipe_of(RECIPE["stages"] | {"rl": rl}), ["rl"])
