import pytest

from strop.stages.reward_model import area_under_curve, correlation, label_quality, pair_quality


@pytest.mark.parametrize(
    ("good", "bad", "area"),
    [
        ([2.0, 3.0], [0.0, 1.0], 1.0),
        ([0.0], [1.0], 0.0),
        ([1.0], [1.0], 0.5),
        ([3.0, 1.0], [2.0, 1.0], 0.625),  # 3 beats both; 1 loses to 2 and ties 1: (2 + 0.5) / 4
    ],
)
def test_the_area_is_the_share_of_all_good_and_bad_in_the_right_order(good, bad, area):
    assert area_under_curve(good, bad) == area


def test_without_one_of_the_classes_there_is_no_area():
    assert area_under_curve([], [1.0]) is None


def test_the_correlation_is_pearsons():
    assert correlation([1.0, 2.0, 3.0], [2, 4, 6]) == pytest.approx(1.0)
    assert correlation([1.0, 2.0, 3.0], [3, 1, 2]) == pytest.approx(-0.5)
    assert correlation([1.0, 1.0], [1, 2]) is None


def test_what_never_changes_is_correlated_with_nothing_though_its_mean_is_rounded():
    assert correlation([0.1, 0.1, 0.1], [1, 2, 4]) is None  # their mean in binary is 1.4e-17 above each of them
    assert correlation([1, 2, 4], [0.7] * 3) is None


def test_pairs_are_counted_within_each_and_their_area_over_all():
    # In order within each pair, but the first pair's rejected beats the second's chosen: area 3/4.
    quality = pair_quality([5.0, 2.0], [4.0, 1.0], [10, 20], [10, 20])
    assert (quality.num, quality.accuracy, quality.auc) == (2, 1.0, 0.75)
    assert quality.length_correlation_in_pairs is None  # equal lengths say nothing


def test_a_model_that_scores_by_length_is_found_out_within_pairs():
    quality = pair_quality([3.0, 1.0], [1.0, 5.0], [30, 10], [10, 50])
    assert quality.accuracy == 0.5
    assert quality.length_correlation == pytest.approx(1.0)
    assert quality.length_correlation_in_pairs == pytest.approx(1.0)


def test_single_responses_are_right_on_their_side_of_0():
    quality = label_quality([1.0, -1.0, 2.0, 0.0], [True, False, False, True], [1, 1, 1, 1])
    assert quality.accuracy == 0.625  # right, right, wrong, a half
    assert quality.auc == 0.5  # 1 > -1, 1 < 2, 0 > -1, 0 < 2


def test_of_single_responses_length_is_compared_within_a_label():
    # Bad ones are 20 longer, and 4 lower: over all -0.94. Within each label the longer one is scored 1 higher: 1.
    quality = label_quality([2.0, 3.0, -2.0, -1.0], [True, True, False, False], [10, 12, 30, 32])
    assert quality.length_correlation == pytest.approx(-78 / (17 * 404) ** 0.5)
    assert quality.length_correlation_in_labels == pytest.approx(1.0)
    assert quality.length_correlation_in_pairs is None


def test_scores_that_are_equal_within_each_label_have_nothing_to_do_with_length():
    quality = label_quality([0.1, 0.1, 0.1, -0.7, -0.7, -0.7], [True] * 3 + [False] * 3, [1, 2, 4, 5, 7, 9])
    assert quality.length_correlation_in_labels is None
