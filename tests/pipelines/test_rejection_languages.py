"""Which conversations rejection sampling takes for ones of several languages."""

import pytest

from strop.stages.rejection_sampling import foreign_share


@pytest.mark.parametrize(
    "text",
    [
        "Let θ be the angle of the two, so that the area is 9π.",
        "With x₁ and xᵢ for α′ the sum is ½, and 2πr² is µ.",
        "Then sinθ = Δx for all x in ℝ.",
        "угол θ равен x",
        "日本の和は x です",  # one language of two scripts
        "ตอบ 42",
        "42 = 6 * 7",
    ],
)
def test_variables_and_their_indices_are_no_words_of_another_language(text):
    assert foreign_share(text) == 0


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("the sum คน is", 1 / 4),
        ("the sum is ארבעים", 1 / 4),
        ("শত the sum is", 1 / 4),
        ("the sum είναι this", 1 / 4),
        ("שלום คน the sum", 1 / 2),
        ("שלום คน", 1 / 2),  # two scripts that are not listed are two
    ],
)
def test_a_word_of_any_other_script_is_seen(text, share):
    assert foreign_share(text) == pytest.approx(share)
