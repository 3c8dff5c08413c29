"""Stages that measure themselves on held-out tasks: the figures, the best policy, and training as it would be without."""

import json
import re
from itertools import chain

import pytest
from transformers import AutoModelForCausalLM

from scripted_runs import (
    RECIPE,
    answer,
    assert_same_training,
    falling,
    lines_of,
    make_recipe,
    recipe_of,
    run_recipe,
    sometimes_right,
    untimed,
)
from strop.errors import EngineLost
from strop.reports.log import read_run
from strop.reports.panels import sections
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.runs.lineage import weights_digest

VALIDATION = {"every_steps": 2, "num_tasks": 4, "k": 2, "temperature": 0.5}


def without_validation(line):
    return {key: value for key, value in untimed(line).items() if not key.startswith("validation/")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("validation") / "run", make_recipe(steps=5, validation=VALIDATION))


def test_the_policy_is_measured_every_so_many_steps_and_after_the_last(whole):
    lines = lines_of(whole.run)
    assert [line["step"] for line in lines if "validation/accuracy" in line] == [2, 4, 5]
    stage = whole.run.stage("rl")
    for line in lines:
        if "validation/accuracy" in line:
            rollouts = [each["rollout"] for each in read_lines(stage.validation(line["step"]))]
            assert len(rollouts) == 8
            right = sum(each["reward_parts"]["accuracy"] for each in rollouts)
            assert line["validation/accuracy"] == pytest.approx(right / 8)
            assert line["validation/accuracy_low"] <= line["validation/accuracy"] <= line["validation/accuracy_high"]
            assert {*chain(*(each["weights"] for each in read_lines(stage.validation(line["step"]))))} == {str(line["step"])}
    tasks = [{each["rollout"]["trajectory"]["task_id"] for each in read_lines(stage.validation(step))} for step in (2, 4, 5)]
    assert tasks[0] == tasks[1] == tasks[2]
    assert {request.temperature for request, _ in whole.engines[1].answers.values()} == {1.0, 0.5}


def test_training_is_what_it_would_be_without(whole, tmp_path):
    bare = run_recipe(tmp_path / "run", make_recipe(steps=5))
    assert [without_validation(line) for line in lines_of(whole.run)] == [untimed(line) for line in lines_of(bare.run)]
    assert weights_digest(whole.run.stage("rl").model) == weights_digest(bare.run.stage("rl").model)


def test_the_best_policy_is_a_model_directory_with_the_step_that_it_is_of(whole):
    found = {line["step"]: line["validation/accuracy"] for line in lines_of(whole.run) if "validation/accuracy" in line}
    record = read_json(whole.run.stage("rl").best / "validation.json")
    assert record["accuracy"] == max(found.values())
    assert record["step"] == min(step for step, accuracy in found.items() if accuracy == record["accuracy"])
    AutoModelForCausalLM.from_pretrained(whole.run.stage("rl").best)
    published = [line["weights"] for line in read_lines(whole.run.events) if line["event"] == "step_finished"]
    told = read_lines(whole.run.stage("rl").validation(record["step"]))
    assert told[0]["weights"] == {str(record["step"]): published[record["step"] - 1]}


def test_the_best_policy_is_handed_on_where_that_is_asked(tmp_path):
    last = tmp_path / "run" / "stages" / "rl" / "rollouts" / "step-000004.jsonl"

    def wrong_in_the_end(conversation, draw):
        return answer("none") if last.exists() else sometimes_right(conversation, draw)

    recipe = make_recipe(steps=4, give_up_after=9, keep_checkpoints=9, validation=VALIDATION | {"product": "best"})
    done = run_recipe(tmp_path / "run", recipe, say=wrong_in_the_end)
    stage = done.run.stage("rl")
    found = {line["step"]: line["validation/accuracy"] for line in lines_of(done.run) if "validation/accuracy" in line}
    assert found[2] > found[4] == 0
    assert read_json(stage.best / "validation.json")["step"] == 2
    assert read_json(stage.done)["model"] == "stages/rl/best"
    assert weights_digest(stage.best) == weights_digest(stage.checkpoint(2) / "model") != weights_digest(stage.model)


def test_a_run_that_falls_while_it_validates_resumes_exactly(whole, tmp_path):
    def falls(conversation, draw):
        path = tmp_path / "run" / "stages" / "rl" / "validation" / "step-000004.jsonl"
        if path.exists() and len(read_lines(path)) >= 3:
            raise RuntimeError
        return sometimes_right(conversation, draw)

    recipe = make_recipe(steps=5, validation=VALIDATION)
    with pytest.raises(EngineLost):
        run_recipe(tmp_path / "run", recipe, say=falls)
    with falling("rl", before=4):
        run_recipe(tmp_path / "run", recipe)
    again = run_recipe(tmp_path / "run", recipe)
    assert_same_training(again.run, whole.run)
    assert weights_digest(again.run.stage("rl").best) == weights_digest(whole.run.stage("rl").best)
    keys = [json.dumps(line["rollout"]["trajectory"]["key"]) for line in read_lines(again.run.stage("rl").validation(4))]
    assert len(keys) == len(set(keys)) == 8, "a rollout was played twice, or not at all"


def test_fine_tuning_and_expert_iteration_are_measured_too(tmp_path):
    learning = {"init": "sft", "tasks_per_step": 2, "group_size": 3, "steps": 2, "give_up_after": 9}
    stages = {
        "base": RECIPE["stages"]["base"],
        "sft": RECIPE["stages"]["sft"] | {"steps": 3, "validation": VALIDATION},
        "ei": learning | {"kind": "expert_iteration", "validation": VALIDATION},
    }
    done = run_recipe(tmp_path / "run", recipe_of(stages))
    assert [line["step"] for line in lines_of(done.run, "sft") if "validation/accuracy" in line] == [2, 3]
    assert [line["step"] for line in lines_of(done.run, "ei") if "validation/accuracy" in line] == [2]
    assert (done.run.stage("sft").best / "model.safetensors").is_file()
    by_time = "Accuracy on held-out tasks by time"
    [of_sft] = [each for each in sections(read_run(done.run)) if each.title == "Supervised fine-tuning"]
    [plot] = [drawing.plot for drawing in of_sft.drawings if drawing.plot.title == by_time]
    assert [seconds for seconds, _ in plot.series[0].points] == [
        line["time/elapsed_s"] for line in lines_of(done.run, "sft") if "validation/accuracy" in line
    ]


def test_the_time_of_fine_tuning_goes_on_in_a_resumed_run(tmp_path):
    fine_tuning = RECIPE["stages"]["sft"] | {"steps": 5, "checkpoint_every": 2}
    recipe = recipe_of({"base": RECIPE["stages"]["base"], "sft": fine_tuning})
    with falling("sft", before=4):
        run_recipe(tmp_path / "run", recipe)
    before = lines_of(RunDirectory(tmp_path / "run"), "sft")
    done = run_recipe(tmp_path / "run", recipe)
    seconds = [line["time/elapsed_s"] for line in lines_of(done.run, "sft")]
    assert seconds[:2] == [line["time/elapsed_s"] for line in before[:2]]
    assert seconds[0] > 0
    assert seconds == sorted(set(seconds))


def test_sets_of_its_own_have_their_own_sampling_limits_and_figures(tmp_path):
    other = RECIPE["tasks"] | {"max_digits": 1}
    validation = VALIDATION | {
        "tasks": {"short": other, "long": RECIPE["tasks"]},
        "num_tasks": 3,
        "top_p": 0.9,
        "max_tokens": 150,
        "max_turns": 2,
    }
    done = run_recipe(tmp_path / "run", make_recipe(steps=2, validation=validation))
    [line] = [line for line in lines_of(done.run) if "validation/accuracy" in line]
    rollouts = [each["rollout"] for each in read_lines(done.run.stage("rl").validation(2))]
    assert len(rollouts) == 2 * 3 * 2
    of_set = {"short": range(3), "long": range(3, 6)}
    for name, places in of_set.items():
        right = [each["reward_parts"]["accuracy"] for each in rollouts if each["trajectory"]["key"]["task_index"] in places]
        assert line[f"validation/{name}/accuracy"] == pytest.approx(sum(right) / 6)
        assert 0 <= line[f"validation/{name}/maj_at_k"] <= 1
    both = [line[f"validation/{name}/accuracy"] for name in of_set]
    assert line["validation/accuracy"] == pytest.approx(sum(both) / 2)
    short = {each["trajectory"]["task_id"] for each in rollouts if each["trajectory"]["key"]["task_index"] < 3}
    assert all(int(number) < 10 for each in short for number in re.findall(r"\d+", each.rpartition("/")[2]))
    requests = [request for request, _ in done.engines[1].answers.values() if request.temperature == 0.5]
    assert {request.truncation.top_p for request in requests} == {0.9}
    assert max(request.max_tokens for request in requests) == 150
    assert all(len(each["trajectory"]["turns"]) <= 2 for each in rollouts)
    trained = [request for request, _ in done.engines[1].answers.values() if request.temperature == 1.0]
    assert {request.truncation for request in trained} == {None}


def test_sampling_that_could_not_stop_is_refused():
    with pytest.raises(ValueError, match=r"sampling\.min_tokens is 4 and sampling\.max_tokens is 3"):
        make_recipe(sampling={"max_tokens": 200, "min_tokens": 4}, validation=VALIDATION | {"max_tokens": 3})


def test_a_set_that_cannot_be_read_is_named_before_the_first_stage(tmp_path):
    mine = {"kind": "jsonl", "path": str(tmp_path / "none.jsonl")}
    validation = VALIDATION | {"split": "train", "tasks": {"mine": mine}}
    recipe = make_recipe(steps=2, validation=validation)
    assert recipe.stages["rl"].files() == {"validation.tasks.mine": tmp_path / "none.jsonl"}
