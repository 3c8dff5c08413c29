import random

import pytest

from strop.rollout.scheduler.report import StepFunction

CHANGES = [(1.0, 4.0), (2.5, 2.0), (5.0, 0.0)]  # 0 until 1 s, 4 until 2.5 s, 2 until 5 s


def test_integrals_and_means_by_hand():
    function = StepFunction(CHANGES)
    assert function.means(4.0, 4) == [0.0, 4.0, 3.0, 2.0]
    assert function.integral(4.0) == 4 * 1.5 + 2 * 1.5
    assert function.positive_s(2.0, 9.0) == 3.0
    assert (function.last_positive_s(4.0), function.last_positive_s(9.0)) == (4.0, 5.0)
    assert function.max == 4.0


@pytest.mark.parametrize("seed", range(2))
def test_the_mean_of_all_spans_is_the_mean_over_time_wherever_the_changes_lie(seed):
    draw = random.Random(seed)
    times = sorted(draw.uniform(0, 10) for _ in range(50))
    function = StepFunction([(at, float(draw.randint(0, 5))) for at in times])
    assert sum(function.means(10, 240)) / 240 == pytest.approx(function.integral(10) / 10)


def test_without_changes_and_without_time_the_means_are_0():
    assert StepFunction().means(1.0, 3) == [0.0] * 3
    assert StepFunction([(0.0, 5.0)]).means(0.0, 3) == [0.0] * 3
