"""DAPO's dynamic sampling: groups that teach nothing are replaced, within bounds, and a resumed step does the same."""

import re

import pytest
from pydantic import ValidationError

from scripted_runs import answer, lines_of, make_recipe, run_recipe, sometimes_right, untimed
from strop.errors import CannotLearnError
from strop.run_directory import read_json, read_lines
from strop.stages.loop.ledger import StepLedger

METHOD = {"kind": "grpo", "drop_tied": True, "refill_rounds": 3}
RECIPE = {"method": METHOD, "steps": 2, "tasks_per_step": 4, "group_size": 4, "updates_per_step": 2}


def all_right_if_even(conversation, draw):
    """Every rollout of a task with an even sum is right, so that about half of the groups are tied."""
    found = re.search(r"(\d+)\+(\d+)", conversation)
    total = int(found[1]) + int(found[2])
    return answer(total) if total % 2 == 0 else sometimes_right(conversation, draw)


def selection(run, step):
    return read_json(run.stage("rl").selection(step))["groups"]


def used(groups):
    return [group for group in groups if any(rollout["is_kept"] for rollout in group["rollouts"])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("dapo") / "run", make_recipe(**RECIPE), say=all_right_if_even).run


def right(conversation, draw):
    found = re.search(r"(\d+)\+(\d+)", conversation)
    return answer(int(found[1]) + int(found[2]))


def test_a_step_that_keeps_nothing_counts_the_updates_that_it_leaves_out(tmp_path):
    recipe = make_recipe(**RECIPE | {"method": {"kind": "grpo", "drop_tied": True}, "give_up_after": 1})
    run = run_recipe(tmp_path / "run", recipe, say=right).run  # all is right, which is no reason to give up
    assert [(line["groups/used"], line["update/skipped"], line["update/stuck_steps"]) for line in lines_of(run)] == [
        (0, 2, 0)
    ] * 2
    assert [row["why_skipped"] for row in read_lines(run.updates) if row["role"] == "policy" and "step" in row][-2:] == [
        "every group is tied: all 16 rewards are 1."
    ] * 2


def test_groups_that_are_left_out_are_replaced_until_the_step_is_full(whole):
    for step, line in enumerate(lines_of(whole), start=1):
        groups = selection(whole, step)
        assert len(used(groups)) == line["groups/used"] == 4
        assert line["groups/refilled"] == len(groups) - 4 > 0


def test_a_steps_own_tasks_are_those_without_refilling_and_refills_lie_behind_the_stages(whole):
    first, second = ({group["task_index"] for group in selection(whole, step)} for step in (1, 2))
    assert {0, 1, 2, 3} <= first
    assert {4, 5, 6, 7} <= second
    assert all(8 <= index < 20 for index in first - {0, 1, 2, 3})  # 3 rounds of 4 tasks are a step's own
    assert all(20 <= index < 32 for index in second - {4, 5, 6, 7})


def all_right_but_long_if_even(conversation, draw):
    """As above, but right answers differ in how much is said before them."""
    said = all_right_if_even(conversation, draw)
    return "x" * draw.choice([1, 40]) + said if said.startswith("<answer>") else said


PENALISED = {
    "kind": "sum",
    "parts": {
        "accuracy": {"kind": "math", "weight": 2.0},
        "overlong": {"kind": "soft_overlong", "max_tokens": 200, "cache_tokens": 200},
    },
}


@pytest.mark.parametrize("tied_by", ["accuracy", "reward"])
def test_a_group_that_is_all_right_is_replaced_although_some_of_it_are_penalised(tmp_path, tied_by):
    """DAPO judges by accuracy. By the reward such groups differ, and stay."""
    recipe = make_recipe(**RECIPE | {"steps": 1, "reward": PENALISED, "method": METHOD | {"tied_by": tied_by}})
    run = run_recipe(tmp_path / "run", recipe, say=all_right_but_long_if_even).run
    groups = selection(run, 1)
    reasons = {rollout["reason"] for group in groups for rollout in group["rollouts"]}
    [line] = lines_of(run)
    # A right answer earns 2, of which length takes 1 at most; a wrong one earns nothing.
    num_all_right = sum(all(rollout["reward"] > 0 for rollout in group["rollouts"]) for group in groups)
    assert line["groups/all_right"] == num_all_right > 0
    if tied_by == "accuracy":
        assert line["groups/refilled"] > 0
        assert "dropped: tied group, all right (accuracy 1)" in reasons
    else:
        assert line["groups/refilled"] == 0
        assert len(used(groups)) == 4


@pytest.mark.parametrize(
    ("reward", "parts"),
    [
        ({"kind": "math"}, "accuracy"),
        ({"kind": "sum", "parts": {"mine": {"kind": "math"}, "called": {"kind": "called"}}}, "mine"),
    ],
)
def test_ties_by_a_part_that_says_nothing_of_what_is_right_are_refused(reward, parts):
    with pytest.raises(ValidationError, match=rf"tied_by is 'called'.*Such parts: {parts}\. Or set tied_by"):
        make_recipe(reward=reward, method=METHOD | {"tied_by": "called"})


def test_refilling_ends_after_its_rounds_and_the_step_goes_on_with_what_there_is(tmp_path):
    recipe = make_recipe(**RECIPE | {"method": METHOD | {"refill_rounds": 1}, "give_up_after": 1})
    with pytest.raises(CannotLearnError, match="every group is tied"):
        run_recipe(tmp_path / "run", recipe, say=lambda conversation, draw: answer(0))
    [line] = read_lines(tmp_path / "run" / "metrics.jsonl")[-1:]
    assert line["groups/refilled"] == 4  # one round for each of the four that were missing
    assert line["groups/used"] == 0


def test_an_interrupted_refill_goes_on_where_it_was(whole, tmp_path, monkeypatch):
    num_finished = 0
    finish = StepLedger.finished

    def fall(ledger, scored):
        nonlocal num_finished
        finish(ledger, scored)
        num_finished += 1
        if scored.trajectory.key.task_index >= 8:  # in a refill of the first step
            raise KeyboardInterrupt

    monkeypatch.setattr(StepLedger, "finished", fall)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(tmp_path / "run", make_recipe(**RECIPE), say=all_right_if_even)
    monkeypatch.undo()
    again = run_recipe(tmp_path / "run", make_recipe(**RECIPE), say=all_right_if_even).run
    assert [untimed(line) for line in lines_of(again)] == [untimed(line) for line in lines_of(whole)]
    assert [selection(again, step) for step in (1, 2)] == [selection(whole, step) for step in (1, 2)]
    first, second = (run.stage("rl").model / "model.safetensors" for run in (again, whole))
    assert first.read_bytes() == second.read_bytes()
