"""When a run that teaches nothing stops, and when it goes on. (That it stops: tests/test_laws.py.)"""

from __future__ import annotations

import re

import pytest

from scripted_runs import RECIPE, Watching, answer, call, make_recipe, recipe_of, run_recipe
from strop.errors import CannotLearnError
from strop.run_directory import read_lines


def right(conversation, draw):
    left, plus = re.search(r"(\d+)\+(\d+)", conversation).groups()
    return answer(str(int(left) + int(plus)))


def test_a_policy_that_is_always_right_is_no_reason_to_give_up(tmp_path):
    progress = Watching()
    run_recipe(tmp_path / "run", make_recipe(steps=4, give_up_after=2), say=right, progress=progress)
    assert progress.warnings == []
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["stage"] == "rl"]
    assert [(line["rollout/accuracy"], line["groups/all_right"], line["update/stuck_steps"]) for line in lines] == [
        (1.0, 3, 0)
    ] * 4


class ByStage(Watching):
    def warning(self, text, *, stage=""):
        super().warning(f"{stage}: {text}")


def test_a_warning_of_a_stage_comes_with_its_name(tmp_path):
    progress = ByStage()
    with pytest.raises(CannotLearnError):
        run_recipe(tmp_path / "run", make_recipe(steps=2, give_up_after=1), say=endless, progress=progress)
    assert progress.warnings[0].startswith("rl: step 1 cannot learn: ")
    assert "step 1 cannot learn" in (tmp_path / "run" / "report.html").read_text()


def endless(conversation, draw):
    return "x" * 1000


def always_fails(conversation, draw):
    return call("prnt(1)") if "<tool_response>" not in conversation else answer("none")


def rarely_fails(conversation, draw):
    if "<tool_response>" not in conversation and draw.random() < 0.03:
        return call("prnt(1)")
    return right(conversation, draw) if draw.random() < 0.5 else answer("none")


def test_a_rare_call_that_fails_is_no_reason_to_give_up(tmp_path):
    progress = Watching()
    run_recipe(tmp_path / "run", make_recipe(steps=6, give_up_after=1), say=rarely_fails, progress=progress)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["stage"] == "rl"]
    assert any(line.get("rollout/tool_error_rate") == 1.0 for line in lines)
    assert progress.warnings == []


def some_endless(conversation, draw):
    return endless(conversation, draw) if draw.random() < 0.3 else answer("none")


def stuck(directory, say, **words):
    """What a user is told behind the first step of a run that never learns anything."""
    progress = Watching()
    with pytest.raises(CannotLearnError) as raised:
        run_recipe(directory, say=say, progress=progress, **words)
    prefix = "step 1 cannot learn: "
    return [text.removeprefix(prefix) for text in progress.warnings if text.startswith(prefix)], str(raised.value)


CUT_OFF = " were cut off at sampling.max_tokens."
NAME_ERROR = "tool calls failed; the last said \"NameError: name 'prnt' is not defined\"."


def test_a_tie_says_that_some_rollouts_were_cut_off(tmp_path):
    [told], _ = stuck(tmp_path / "run", some_endless, recipe=make_recipe(steps=2, give_up_after=1))
    [line] = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["stage"] == "rl"]
    num = round(18 * line["rollout/truncated_fraction"])
    assert 1 < num < 18
    assert told == f"every group is tied: all 18 rewards are 0. {num} of 18 rollouts{CUT_OFF}"


def test_a_tie_says_that_every_tool_call_failed(tmp_path):
    told, error = stuck(tmp_path / "run", always_fails, recipe=make_recipe(steps=2, give_up_after=1))
    assert told == ["every group is tied: all 18 rewards are 0.", f"every one of 18 {NAME_ERROR}"]
    assert told[1] in error


@pytest.mark.parametrize(
    ("say", "expected"),
    [(endless, [f" 12 of 12 rollouts{CUT_OFF}"]), (always_fails, ["", f"every one of 12 {NAME_ERROR}"])],
    ids=["cut off", "failing calls"],
)
def test_expert_iteration_says_the_same_where_nothing_is_right(tmp_path, say, expected):
    stage = {"kind": "expert_iteration", "init": "base", "tasks_per_step": 3, "group_size": 4, "batch_size": 3}
    stages = {"base": RECIPE["stages"]["base"], "ei": stage | {"steps": 2, "give_up_after": 1}}
    recipe = recipe_of(stages)
    told, _ = stuck(tmp_path / "run", say, recipe=recipe)
    assert told == [f"none of 12 rollouts is right, so there is nothing to imitate.{expected[0]}", *expected[1:]]
