import pytest

from strop.evaluation import statistics
from strop.evaluation.statistics import average_at_k, majority_at_k, pass_at_k


@pytest.mark.parametrize(
    ("attempts", "k", "expected"),
    [
        ([[True, False, False, False]], 1, 1 / 4),
        ([[True, False, False, False]], 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        ([[True, True, False, False]], 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        ([[True, True, True, False]], 2, 1.0),  # two wrong ones cannot be drawn
        ([[False, False]], 2, 0.0),
        ([[True, False], [False, False, False]], 1, 1 / 4),  # (1/2 + 0) / 2: each task weighs the same
    ],
)
def test_pass_at_k_counts_the_draws_that_hold_a_right_attempt(attempts, k, expected):
    assert pass_at_k(attempts, k=k) == pytest.approx(expected)


def test_pass_at_k_names_the_task_with_too_few_attempts():
    with pytest.raises(ValueError, match=r"pass@4 needs 4 attempts at each task, but task 1 has 2"):
        pass_at_k([[True] * 4, [True] * 2], k=4)


@pytest.mark.parametrize(
    ("answers", "verdicts", "expected"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8"], [True, False], 0.5),  # a tie: right half of the time
        (["", "", "7"], [False, False, True], 1.0),  # no answer, no vote
        (["", ""], [False, False], 0.0),
    ],
)
def test_majority_decides_and_ties_share(answers, verdicts, expected):
    assert majority_at_k([answers], [verdicts]) == expected


def test_majority_is_averaged_over_tasks():
    assert majority_at_k([["1", "1"], ["2", "3"]], [[True, True], [True, False]]) == 0.75


def test_avg_at_k_equals_pass_at_1_when_void_attempts_left_tasks_of_different_sizes():
    attempts = [[True, False, False, True], [True], [False, False]]
    estimate = average_at_k(attempts, seed=1)
    assert estimate.mean == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert estimate.mean == pytest.approx(pass_at_k(attempts, k=1))


def test_interval_follows_the_number_of_tasks_not_of_attempts():
    """Two tasks, one always right and one never: resampled means are 0, 1/2, 1 with chances 1/4, 1/2, 1/4, whatever k is."""
    for k in (1, 64):
        estimate = average_at_k([[1.0] * k, [0.0] * k], seed=3)
        assert (estimate.low, estimate.mean, estimate.high) == (0.0, 0.5, 1.0)


def test_interval_is_the_normal_one_where_there_are_many_tasks():
    estimate = average_at_k([[1.0]] * 250 + [[0.0]] * 750, seed=5)
    half = 1.96 * (0.25 * 0.75 / 1000) ** 0.5  # 0.0268
    assert estimate.low == pytest.approx(0.25 - half, abs=0.002)
    assert estimate.high == pytest.approx(0.25 + half, abs=0.002)


def test_interval_promises_no_certainty_when_all_tasks_agree():
    assert average_at_k([[0.0]] * 100, seed=0).high == pytest.approx(0.0362, abs=1e-4)  # 1 - 0.025 ** (1 / 100)
    perfect = average_at_k([[1.0, 1.0]], seed=0)
    assert (perfect.low, perfect.mean, perfect.high) == (pytest.approx(0.025), 1.0, 1.0)
    # Half of the attempts at each of 10: 1 - 0.025 ** 0.1 = 0.308 of other problems may be solved always, or never.
    halves = average_at_k([[0.0, 1.0]] * 10, seed=0)
    assert (halves.low, halves.high) == (pytest.approx(0.5 - 0.154, abs=1e-3), pytest.approx(0.5 + 0.154, abs=1e-3))
    beyond = average_at_k([[-2.0]] * 10, seed=0)  # no share, so nothing bounds what is unseen
    assert (beyond.low, beyond.high) == (-2.0, -2.0)


def test_interval_depends_on_the_seed_alone(monkeypatch):
    scores = [[task / 40] for task in range(40)]
    whole = average_at_k(scores, seed=7)
    monkeypatch.setattr(statistics, "_BLOCK", 40 * 30)  # the same draws in 34 blocks instead of one
    assert average_at_k(scores, seed=7) == whole
    assert average_at_k(scores, seed=8) != whole


def test_no_tasks_and_tasks_without_attempts_are_errors():
    with pytest.raises(ValueError, match="no tasks"):
        average_at_k([], seed=0)
    with pytest.raises(ValueError, match="task 1 has no attempt"):
        average_at_k([[1.0], []], seed=0)
    with pytest.raises(ValueError, match="no tasks"):
        pass_at_k([], k=1)
    with pytest.raises(ValueError, match="no tasks"):
        majority_at_k([], [])
