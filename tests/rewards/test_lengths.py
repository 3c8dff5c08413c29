import pytest

from strop.rewards.form import cosine_scaled, relative_lengths, repetition_penalty, soft_overlong


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0), (16_384, 0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1), (30_000, -1)],
)
def test_the_soft_penalty_grows_over_the_last_tokens_and_stays_at_minus_one(num_tokens, expected):
    assert soft_overlong(num_tokens, max_tokens=20_480, cache_tokens=4096) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_tokens", "right", "wrong"),
    [(0, 1.0, 0.0), (500, 0.75, -0.25), (1000, 0.5, -0.5), (2000, 0.5, -0.5)],
)
def test_the_cosine_goes_from_short_to_long_and_stays_there(num_tokens, right, wrong):
    assert cosine_scaled(num_tokens, max_tokens=1000, short=1.0, long=0.5) == pytest.approx(right)
    assert cosine_scaled(num_tokens, max_tokens=1000, short=0.0, long=-0.5) == pytest.approx(wrong)


def test_shorter_than_the_others_is_better_and_never_good_when_wrong():
    assert relative_lengths([10, 20, 30, 10], [True, True, True, False]) == [0.5, 0.0, -0.5, 0.0]
    assert relative_lengths([30, 10], [False, True]) == [-0.5, 0.5]
    assert relative_lengths([7, 7], [True, False]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c d", 0.0),
        ("so it is so it is", -0.25),  # so-it-is, it-is-so, is-so-it, so-it-is: three different of four
        ("So IT is so it IS", -0.25),
        ("no no no no no", -2 / 3),  # one different of three
        ("too short", 0.0),
        ("", 0.0),
        ("对对对对对", -2 / 3),  # every character is a word
    ],
)
def test_the_share_of_repeated_trigrams_is_the_penalty(text, expected):
    assert repetition_penalty(text) == pytest.approx(expected)
