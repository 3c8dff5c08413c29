import json
from pathlib import Path

import pytest

from strop.curation.config import curate, make_rule
from strop.curation.rules import (
    Agreement,
    AgreementRule,
    Outcome,
    key_of,
    outcome_of,
    read_outcomes,
)
from strop.errors import TaskError
from strop.types import Group, RolloutKey, ScoredTrajectory, StopReason, Task, Trajectory

FIELDS = ("task_id", "question_digest", "num_right", "num_judged")


def task(name):
    return Task(id=name, question="q", answer="1", source="test")


DIGEST = key_of(task("a"))[1]


def group(name, rewards, *, num_void=0):
    def scored(attempt, reward):
        trajectory = Trajectory(
            key=RolloutKey(task_index=0, attempt=attempt),
            task_id=name,
            prompt_ids=(1,),
            turns=(),
            stop_reason=StopReason.ANSWERED,
        )
        return ScoredTrajectory(trajectory=trajectory, reward=reward, reward_parts={})

    trajectories = tuple(scored(attempt, reward) for attempt, reward in enumerate(rewards))
    return Group(task=task(name), task_index=0, trajectories=trajectories, num_void=num_void)


def outcome(right, judged):
    key = key_of(task("t"))
    return {key: Outcome(task_id=key[0], question_digest=key[1], num_right=right, num_judged=judged)}


def ruled(rule, outcomes, **keys):
    return Agreement(rule=rule.model_construct(outcomes=Path(), **keys), outcomes=outcomes)


def is_right(scored):
    return None if scored.reward < 0 else scored.reward > 0.5


def test_outcomes_that_were_recorded_before_are_of_the_same_questions():
    questions = [r"$\int x\,dx$ of 3² and \dfrac12", "What is 1 2/3?"]
    assert [key_of(Task(id="t", question=each, answer="1", source="test"))[1] for each in questions] == [
        "7cc0e338db0eff3566a5f5638308c2ba",
        "ed0b5128176a42a947c9bafd265e605e",
    ]


def test_void_rollouts_are_neither_right_nor_wrong():
    found = outcome_of(group("t", [1.0, 0.0, 1.0], num_void=5), is_right)
    assert (found.num_right, found.num_judged) == (2, 3)


def test_a_rollout_of_which_nothing_says_whether_it_is_right_is_not_judged():
    found = outcome_of(group("t", [0.1, 1.0, -1.0]), is_right)
    assert (found.num_right, found.num_judged) == (1, 2)


@pytest.mark.parametrize(
    ("right", "reason"), [(0, "0 of 16 answers agree"), (1, "1 of 16 answers agree"), (2, None), (16, None)]
)
def test_a_label_that_two_of_sixteen_answers_reach_stays(right, reason):
    said = ruled(AgreementRule, outcome(right, 16)).judge(task("t"))
    assert said is None if reason is None else said.startswith(reason)


@pytest.mark.parametrize(
    ("right", "judged", "keys", "reason"),
    [
        (1, 1, {}, None),  # the 15 that are void might have agreed
        (0, 0, {}, None),
        (0, 14, {}, None),
        (0, 15, {}, "0 of 15 answers agree with the label, fewer than 2, 1 were not judged"),
        (1, 1, {"num_rollouts": 1}, "1 of 1 answers agree with the label, fewer than 2"),
    ],
)
def test_void_answers_speak_neither_for_a_label_nor_against_it(right, judged, keys, reason):
    assert ruled(AgreementRule, outcome(right, judged), **keys).judge(task("t")) == reason


def test_a_task_that_was_not_played_is_dropped_as_such():
    assert ruled(AgreementRule, {}).judge(task("t")) == "no rollout of it was judged"


def test_the_rules_of_a_file_read_outcomes_whose_rows_of_one_task_add_up(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    rows = [("a", 4, 8), ("a", 4, 8), ("b", 8, 8), ("c", 0, 16)]
    path.write_text(
        "".join(
            json.dumps({"task_id": name, "question_digest": DIGEST, "num_right": right, "num_judged": judged}) + "\n"
            for name, right, judged in rows
        )
    )
    rules = [make_rule(AgreementRule(outcomes=path))]
    verdicts = {verdict.task.id: verdict.rule for verdict in curate(map(task, "abc"), rules)}
    assert verdicts == {"a": "", "b": "", "c": "agreement"}
    assert read_outcomes(path)["a", DIGEST].num_judged == 16


def test_tasks_of_two_sources_with_one_id_have_an_outcome_each(tmp_path):
    easy, hard = (Task(id="train.jsonl:1", question=said, answer="1", source=said) for said in ("1+1", "an integral"))
    path = tmp_path / "outcomes.jsonl"
    path.write_text(
        "".join(
            json.dumps(dict(zip(FIELDS, [*key_of(each), num_right, 8], strict=True))) + "\n"
            for each, num_right in ((easy, 8), (hard, 0))
        )
    )
    rule = make_rule(AgreementRule(outcomes=path, num_rollouts=8))
    assert rule.judge(easy) is None
    assert rule.judge(hard).startswith("0 of 8 answers agree")
    other = Task(id="train.jsonl:1", question="another", answer="1", source="c")
    assert rule.judge(other) == "no rollout of it was judged"


def test_an_outcome_that_does_not_say_of_which_question_it_is_is_refused(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    path.write_text(json.dumps({"task_id": "train.jsonl:1", "num_right": 1, "num_judged": 8}) + "\n")
    with pytest.raises(TaskError, match=r"outcomes\.jsonl:1: no question_digest for task .*key_of"):
        read_outcomes(path)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"task_id": "a", "num_right": 9, "num_judged": 8},
        {"task_id": "a", "num_right": "1", "num_judged": 8},
        {"task_id": 1},
    ],
)
def test_a_row_that_is_no_outcome_is_named(tmp_path, row):
    path = tmp_path / "outcomes.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(TaskError, match=r"outcomes\.jsonl:1: not the outcome of a task"):
        read_outcomes(path)
