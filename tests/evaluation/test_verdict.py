from dataclasses import replace

import pytest
from attempts import attempt, group_of
from pydantic import Field, ValidationError

from strop.errors import RunError
from strop.evaluation.compare import compare
from strop.evaluation.metrics import USUAL, rollout_metrics, verdict_of
from strop.evaluation.results import figures_of, gather, problem_of, read_eval, write_eval
from strop.rewards import MathReward, Reward
from strop.rewards.sum import FunctionReward, function_reward
from strop.stages.expert_iteration import ExpertIteration
from strop.stages.filter import Filter
from strop.stages.rejection_sampling import RejectionSampling

SCORER = {"kind": "scorer", "scorer": {"kind": "embedded", "path": "models/helpful"}}
FUNCTION = {"kind": "function", "function": "math:sqrt"}


def of_sum(**parts):
    return verdict_of(Reward.of({"kind": "sum", "parts": parts}))


def judged(**parts):
    return attempt("", right=True, parts=parts)


@pytest.mark.parametrize(
    ("parts", "values", "is_right"),
    [
        ({"accuracy": {"kind": "math"}, "helpful": SCORER}, {"accuracy": 0.0, "helpful": 0.9}, False),
        ({"accuracy": {"kind": "math"}, "helpful": SCORER}, {"helpful": 0.9}, None),  # a row of the preference alone
        ({"helpful": SCORER}, {"helpful": 0.9}, None),
        ({"form": {"kind": "format"}, "clear": {"kind": "language"}}, {"form": 1.0, "clear": 1.0}, None),
        ({"helpful": SCORER, "tests": {"kind": "code"}}, {"helpful": 0.9, "tests": 1.0}, True),
        ({"helpful": SCORER, "tests": {"kind": "code"}}, {"helpful": 0.9, "tests": 0.0}, False),
        ({"arpo": {"kind": "arpo"}}, {"arpo": -1.0}, False),
        ({"mine": FUNCTION}, {"mine": 0.5}, None),  # it may be a length
        ({"mine": FUNCTION | {"right_above": 0.6}}, {"mine": 0.5}, False),
        ({"mine": FUNCTION | {"right_above": 0.4}}, {"mine": 0.5}, True),
        ({"helpful": SCORER, "mine": FUNCTION | {"weight": 0.0}}, {"helpful": 0.9, "mine": 3.0}, None),  # only reported
        ({"accuracy": SCORER}, {"accuracy": 0.2}, True),  # whoever calls it so says so
    ],
)
def test_what_is_right_is_what_a_part_that_judges_an_answer_says(parts, values, is_right):
    assert of_sum(**parts)(judged(**values)) is is_right


def test_rewards_of_one_judge_say_it_by_their_one_part():
    assert verdict_of(MathReward())(judged(accuracy=1.0, format=0.0)) is True
    assert verdict_of(FunctionReward(function="math:sqrt", right_above=-1))(judged(reward=-0.5)) is True
    assert verdict_of(FunctionReward(function="math:sqrt"))(judged(reward=0.5)) is None
    assert verdict_of(function_reward(lambda task, trajectory: 1.0, right_above=0.6))(judged(reward=0.5)) is False


def test_a_class_says_what_is_right_by_a_part_called_accuracy():
    class Close(Reward):
        class Config(Reward.Config):
            weights: dict[str, float] = Field(default={"close": 1.0}, description="Weights.")

    class Right(Reward):
        class Config(Reward.Config):
            weights: dict[str, float] = Field(default={"accuracy": 1.0, "close": 0.1}, description="Weights.")

    assert verdict_of(Close())(judged(close=0.9)) is None
    assert verdict_of(Right())(judged(accuracy=0.0, close=0.9)) is False


@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        (Filter, {"k": 2, "num_tasks": 2}),
        (RejectionSampling, {"k": 2, "num_tasks": 2}),
        (ExpertIteration, {"steps": 1, "tasks_per_step": 1, "group_size": 2}),
    ],
)
def test_a_stage_that_keeps_what_is_right_asks_for_a_reward_that_says_it(stage, keys):
    with pytest.raises(ValidationError, match=r"no part of reward says what is right\. .*a function with right_above"):
        stage.Config(init="base", tasks={"kind": "arithmetic"}, reward=FUNCTION, **keys)


def test_parts_that_need_a_right_answer_ask_the_function_above_which_value_it_is():
    cosine = {"kind": "cosine", "max_tokens": 100}
    scores = []
    for bound in (0.4, 0.6):
        parts = {"accuracy": {"kind": "function", "function": "math:nan", "right_above": bound}, "cosine": cosine}
        reward = Reward.of({"kind": "sum", "parts": parts})
        scores.append(reward._is_correct(reward.parts["cosine"], {"accuracy": 0.5}))
    assert scores == [True, False]


MIXED = [
    group_of(judged(accuracy=1.0), judged(accuracy=0.0), question="1 + 1?"),
    group_of(judged(helpful=0.9), judged(helpful=0.7), question="How are you?"),
]


def test_rows_without_a_verdict_are_in_no_accuracy_and_neither_right_nor_wrong():
    metrics = rollout_metrics(MIXED)
    assert metrics["rollout/accuracy"] == 0.5
    assert metrics["reward/helpful_mean"] == pytest.approx(0.8)
    tied = [group_of(judged(helpful=0.9)), group_of(judged(accuracy=1.0)), group_of(judged(accuracy=0.0))]
    assert [rollout_metrics(tied[at:])[f"groups/all_{word}"] for at in (0, 1) for word in ("right", "wrong")] == [1, 1, 1, 1]
    assert "rollout/accuracy" not in rollout_metrics(MIXED[1:])


def test_a_group_is_all_right_or_all_wrong_by_its_answers_whatever_else_tells_its_rollouts_apart():
    verdict = of_sum(accuracy={"kind": "math", "weight": 2.0}, form={"kind": "format"})

    def rewarded(accuracy, form):
        parts = {"accuracy": accuracy, "form": form}
        return replace(attempt("", right=True, parts=parts), reward=2 * accuracy + form)

    right, right_without_form = rewarded(1.0, 0.5), rewarded(1.0, 0.0)
    wrong, wrong_without_form = rewarded(0.0, 2.0), rewarded(0.0, 0.0)
    groups = [
        group_of(right, right_without_form, right),
        group_of(wrong, wrong_without_form),
        group_of(right_without_form, wrong),  # both have 2: the rewards are equal, the answers are not
        group_of(right, replace(attempt("", right=True, parts={"form": 1.0}), reward=1.0)),  # one that nothing says it of
        group_of(right, num_void=1),
        group_of(num_void=2),
    ]
    metrics = rollout_metrics(groups, verdict)
    assert (metrics["groups/all_right"], metrics["groups/all_wrong"]) == (2.0, 1.0)


def test_an_evaluation_counts_problems_without_a_verdict_and_leaves_them_out():
    figures = figures_of(MIXED, seed=0, votes=[["2", "3"], ["", ""]])
    assert (figures["num_tasks"], figures["num_tasks_without_verdict"], figures["accuracy"]) == (2, 1, 0.5)
    assert figures["maj_at_k"] == 0.5
    assert figures["parts"]["helpful"]["mean"] == pytest.approx(0.8)
    alone = figures_of(MIXED[1:], seed=0)
    assert not {"accuracy", "pass_at_k", "maj_at_k"} & alone.keys()
    assert alone["num_tasks_without_verdict"] == 1


def put(directory, groups, **about):
    write_eval(directory, figures_of(groups, seed=0) | {"k": 2} | about, [problem_of(group, None) for group in groups])
    return read_eval(directory)


def test_evaluations_are_compared_in_what_both_say_of_a_problem(tmp_path):
    one, other = (put(tmp_path / name, MIXED) for name in ("one", "other"))
    found = compare(one, other)
    assert found.num_shared == 2
    by_name = {each.metric: each for each in found.metrics}
    assert by_name["accuracy"].first == 0.5  # of the one problem with a verdict
    assert by_name["helpful"].first == pytest.approx(0.8)


def test_an_evaluation_without_a_verdict_is_told_and_ranks_nowhere(tmp_path):
    put(tmp_path / "a" / "eval", MIXED[1:])
    with pytest.raises(RunError, match="no reward says what is right"):
        gather([tmp_path])
    put(tmp_path / "b" / "eval", MIXED)
    board = gather([tmp_path])
    assert [len(each) for each in board.benchmarks.values()] == [1]
    assert len(board.left_out) == 1


def test_the_usual_verdict_is_by_name():
    assert USUAL(judged(accuracy=0.0, reward=1.0)) is False
    assert USUAL(judged(helpful=1.0)) is None
