import json

import pytest

from strop.errors import RunError
from strop.evaluation.compare import compare
from strop.evaluation.results import EvalFiles
from strop.evaluation.statistics import paired_difference


def files(tmp_path, verdicts, *, name="run", **result):
    """An evaluation with these verdicts, by question; everything else about them is equal."""
    problems = [
        {"question": question, "answer": "2", "correct": correct, "length_tokens": [10] * len(correct), "parts": {}}
        for question, correct in verdicts.items()
    ]
    told = {"accuracy": 0.5, "benchmark": "sums", "reward": {"kind": "math"}, "k": 1} | result
    return EvalFiles(directory=tmp_path / name, result=told, problems=problems)


def test_the_difference_is_that_of_the_problems_means_and_swapping_them_gives_its_chance():
    paired = paired_difference([0, 0, 0, 0, 1], [1, 1, 1, 0, 1], seed=0)
    assert paired.difference.mean == pytest.approx(3 / 5)
    assert (paired.num_better, paired.num_worse) == (3, 0)
    assert paired.p_value == pytest.approx(2 / 2**3)  # of the 8 swaps of three problems, two are as far from 0


def test_five_against_one_is_mcnemars_exact_test():
    paired = paired_difference([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0], seed=0)
    assert paired.p_value == pytest.approx(2 * (1 + 6) / 2**6)  # at most one of six on one side, on either


def test_many_problems_are_swapped_at_random_and_the_chance_is_never_zero():
    better = paired_difference([0.0] * 200, [1.0] * 100 + [0.0] * 100, seed=0)
    assert better.p_value == pytest.approx(1 / 10_001)
    assert better.difference.low == pytest.approx(0.5 - 1.96 * (0.25 / 200) ** 0.5, abs=0.01)
    even = paired_difference([0.0, 1.0] * 100, [1.0, 0.0] * 100, seed=0)
    assert even.p_value == 1.0
    fewer = paired_difference([0.0] * 60 + [1.0] * 40, [1.0] * 60 + [0.0] * 40, seed=0)
    assert fewer.p_value == pytest.approx(0.0569, abs=0.01)  # binomial, 60 or more of 100, both sides


def test_pairing_sees_what_two_intervals_would_not():
    """One hundred problems, half of them solved: six more of the rest, and none lost."""
    first = [1.0] * 50 + [0.0] * 50
    second = [1.0] * 56 + [0.0] * 44
    paired = paired_difference(first, second, seed=0)
    assert paired.difference.low > 0
    assert paired.p_value == pytest.approx(2 / 2**6)


def test_no_difference_is_no_certainty():
    none = paired_difference([1.0] * 10, [1.0] * 10, seed=0)
    assert (none.difference.mean, none.p_value) == (0.0, 1.0)
    assert none.difference.high == pytest.approx(1 - 0.025**0.1)
    all_better = paired_difference([0.0] * 10, [1.0] * 10, seed=0)
    assert (all_better.difference.low, all_better.difference.high) == (pytest.approx(1 - 2 * (1 - 0.025**0.1)), 1.0)
    assert all_better.p_value == pytest.approx(2 / 2**10)
    lengths = paired_difference([7.0] * 10, [7.0] * 10, seed=0, is_share=False)
    assert (lengths.difference.low, lengths.difference.high) == (0.0, 0.0)


def test_the_smallest_difference_that_would_be_found_follows_from_the_standard_error():
    """100 problems, 10 better and 10 worse: variance 20 / 99, and z is 1.96 for the level and 0.84 for the power."""
    paired = paired_difference([0.0] * 10 + [1.0] * 10 + [0.0] * 80, [1.0] * 10 + [0.0] * 90, seed=0)
    assert paired.standard_error == pytest.approx((20 / 99 / 100) ** 0.5)  # 0.0449
    assert paired.detectable == pytest.approx((1.959964 + 0.841621) * (20 / 99 / 100) ** 0.5, rel=1e-6)


def test_where_all_problems_differ_alike_a_share_has_a_bound_and_a_length_has_none():
    none = paired_difference([1.0] * 10, [1.0] * 10, seed=0)
    assert none.standard_error == pytest.approx(((1 - 0.025**0.1) / 10) ** 0.5)  # as if so many could differ by 1
    assert paired_difference([0.0] * 10, [1.0] * 10, seed=0).standard_error == none.standard_error
    lengths = paired_difference([7.0] * 10, [9.0] * 10, seed=0, is_share=False)
    assert (lengths.standard_error, lengths.detectable) == (None, None)
    assert paired_difference([7.0], [9.0], seed=0, is_share=False).detectable is None  # one says nothing of others


def test_only_shared_problems_count_and_attempts_may_differ_in_number(tmp_path):
    first = files(tmp_path, {"a": [1, 0], "b": [0, 0], "only first": [1, 1]}, k=2)
    second = files(tmp_path, {"b": [1], "a": [1], "void": []})
    found = compare(first, second)
    assert (found.num_shared, found.num_only_first, found.num_only_second) == (2, 1, 0)
    accuracy = found.metrics[0]
    assert (accuracy.metric, accuracy.first, accuracy.second) == ("accuracy", 0.25, 1.0)
    assert accuracy.paired.difference.mean == 0.75
    assert found.settings == {"k": (2, 1)}
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))["metrics"]
    assert [each["detectable"] for each in told] == [each.paired.detectable for each in found.metrics]


def test_every_figure_that_both_have_is_compared(tmp_path):
    first, second = files(tmp_path, {"a": [1]}), files(tmp_path, {"a": [1]})
    first.problems[0]["parts"] = {"f1": [0.5], "format": [1.0]}
    second.problems[0]["parts"] = {"f1": [1.0]}
    assert [each.metric for each in compare(first, second).metrics] == ["accuracy", "length_tokens", "f1"]


def test_an_attempt_that_nobody_gave_a_part_to_is_in_no_mean_of_it(tmp_path):
    first, second = (files(tmp_path, {"a": [1, 1], "b": [1, 1]}) for _ in range(2))
    for each, of_a, of_b in ((first, [0.5, None], [None, None]), (second, [1.0, 0.5], [1.0, 1.0])):
        each.problems[0]["parts"], each.problems[1]["parts"] = {"f1": of_a}, {"f1": of_b}
    f1 = compare(first, second).metrics[-1]
    assert (f1.metric, f1.first, f1.second) == ("f1", 0.5, 0.75)  # of "a" alone; nobody gave "b" one in the first


def test_truncated_sampling_is_a_setting_that_differs(tmp_path):
    first, second = files(tmp_path, {"a": [1]}, temperature=0.6), files(tmp_path, {"a": [1]}, temperature=0.6, top_p=0.95)
    assert compare(first, second).settings == {"top_p": (None, 0.95)}


def test_equal_values_in_another_order_are_no_difference(tmp_path):
    first, second = (files(tmp_path, {name: [1, 1, 1] for name in "abcdefgh"}) for _ in range(2))
    for each, values in ((first, [0.1, 0.2, 0.3]), (second, [0.3, 0.2, 0.1])):
        for problem in each.problems:
            problem["parts"] = {"f1": values}
    f1 = compare(first, second).metrics[-1]
    assert (f1.paired.difference.mean, f1.paired.p_value) == (0, 1)


def test_a_question_that_is_asked_twice_is_two_problems(tmp_path):
    first, second = files(tmp_path, {"a": [1]}), files(tmp_path, {"a": [0]})
    twice = [EvalFiles(directory=each.directory, result=each.result, problems=[*each.problems] * 2) for each in (first, second)]
    assert compare(*twice).num_shared == 2


@pytest.mark.parametrize(
    ("of_second", "about", "message"),
    [
        (
            {"z": [1]},
            {"benchmark": "products"},
            r"share no problem: the first asks 1 questions of 'sums', the second 1 of 'products'",
        ),
        ({"z": [1]}, {}, r"the second 1 of 'sums'. Compare evaluations of the same benchmark, split and seed"),
        ({"a": [1]}, {"reward": {"kind": "code"}}, r"have different rewards: reward.kind = 'math' and 'code'"),
        ({}, {}, r"second: has no problems.jsonl"),
    ],
)
def test_what_cannot_be_compared_says_why(tmp_path, of_second, about, message):
    with pytest.raises(RunError, match=message):
        compare(files(tmp_path, {"a": [1]}), files(tmp_path, of_second, name="second", **about))


def test_one_question_with_two_answers_is_another_task(tmp_path):
    first, second = files(tmp_path, {"a": [1]}), files(tmp_path, {"a": [1]})
    second.problems[0]["answer"] = "3"
    with pytest.raises(RunError, match=r"the answer to 'a' is '2' in the first and '3' in the second"):
        compare(first, second)


def test_weights_of_parts_and_deadlines_do_not_change_what_is_right(tmp_path):
    first = files(tmp_path, {"a": [1]}, reward={"kind": "math", "weights": {"accuracy": 1.0}})
    assert compare(first, files(tmp_path, {"a": [0]}, reward={"kind": "math", "weights": {"accuracy": 2.0}})).num_shared == 1


def test_a_key_that_an_older_result_lacks_and_that_is_unset_is_no_difference(tmp_path):
    first = files(tmp_path, {"a": [1]}, reward={"kind": "function", "function": "my:reward"})
    newer = files(tmp_path, {"a": [0]}, reward={"kind": "function", "function": "my:reward", "right_above": None})
    assert compare(first, newer).num_shared == 1


def of_parts(*, needs_box=True, **service):
    told = {"url": "http://one:8000", "model": "m", "timeout_s": 60.0} | service
    accuracy = {"kind": "math", "needs_box": needs_box, "weight": 1.0, "verify_deadline_s": 2.0}
    return {"kind": "sum", "parts": {"accuracy": accuracy, "clear": {"kind": "judge", "judge": {"service": told}}}}


def test_a_judge_that_has_moved_is_the_same_judge(tmp_path):
    first = files(tmp_path, {"a": [1]}, reward=of_parts())
    assert compare(first, files(tmp_path, {"a": [0]}, reward=of_parts(url="http://two:9000", timeout_s=5.0))).num_shared == 1


@pytest.mark.parametrize(
    ("changed", "key"),
    [({"needs_box": False}, "reward.parts.accuracy.needs_box"), ({"model": "n"}, "reward.parts.clear.judge.service.model")],
)
def test_what_a_part_decides_by_is_compared(tmp_path, changed, key):
    first = files(tmp_path, {"a": [1]}, reward=of_parts())
    with pytest.raises(RunError, match=f"have different rewards: {key} = "):
        compare(first, files(tmp_path, {"a": [1]}, reward=of_parts(**changed)))


def test_weights_count_where_their_sum_says_what_is_right(tmp_path):
    places = [
        files(tmp_path, {"a": [1]}, reward={"kind": "sum", "parts": {"form": {"kind": "format", "weight": weight}}})
        for weight in (1.0, -1.0)
    ]
    with pytest.raises(RunError, match=r"reward.parts.form.weight = 1.0 and -1.0"):
        compare(*places)
