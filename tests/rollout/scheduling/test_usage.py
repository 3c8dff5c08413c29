import random

import pytest

from strop.rollout.scheduling.usage import means_of_spans


def test_what_changes_within_a_span_counts_by_its_time():
    # 0 until 1 s, 4 until 2.5 s, 2 from there on; spans of 1 s.
    assert means_of_spans([(1.0, 4.0), (2.5, 2.0)], 0.0, 4.0, 4) == [0.0, 4.0, 3.0, 2.0]


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_of_all_spans_is_the_mean_over_time_wherever_the_changes_lie(seed):
    draw = random.Random(seed)
    start = draw.uniform(0, 1e5)
    times = sorted(start + draw.uniform(0, 10) for _ in range(50))
    changes = [(at, float(draw.randint(0, 5))) for at in times]
    end = start + 10
    ends = [at for at, _ in changes[1:]] + [end]
    integral = sum(value * (until - at) for (at, value), until in zip(changes, ends, strict=True))
    assert sum(means_of_spans(changes, start, end, 240)) / 240 == pytest.approx(integral / 10)


def test_where_nothing_was_told_and_where_no_time_passed_the_means_are_0():
    assert means_of_spans([], 0.0, 1.0, 3) == [0.0] * 3
    assert means_of_spans([(0.0, 5.0)], 1.0, 1.0, 3) == [0.0] * 3
