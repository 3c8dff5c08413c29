import pytest

from strop.answer_text import boxed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{72}", ["72"]),
        (r"\boxed {72}", ["72"]),
        (r"\boxed{\frac{1}{2}}", [r"\frac{1}{2}"]),
        (r"\boxed{1} and \boxed{2}", ["1", "2"]),
        (r"\boxed{\boxed{3}}", [r"\boxed{3}", "3"]),
        (r"\boxed{\{1,2\}}", [r"\{1,2\}"]),
        (r"\boxed{\{}", [r"\{"]),
        (r"\boxed{72", []),
        (r"\boxed{\frac{1}{2} and \boxed{5}", ["5"]),  # the first never closes
        ("boxed{72}", []),
        (r"\boxed{", []),
        ("\\boxed{\\", []),
        (r"} { \boxed{1}", ["1"]),
        (r"\\\boxed{1} and \\boxed{2}", ["1", "2"]),  # behind a line break of LaTeX, and with its backslash doubled
        (r"\boxed{a \\boxed{b}}", [r"a \\boxed{b}", "b"]),
    ],
)
def test_a_box_is_what_its_balanced_braces_hold(text, expected):
    assert boxed(text) == expected


def test_an_fbox_is_a_box_only_to_those_who_say_so():
    text = r"\boxed{1}, or \fbox{2}"
    assert boxed(text) == ["1"]
    assert boxed(text, is_fbox_one=True) == ["1", "2"]


@pytest.mark.timeout(5)
@pytest.mark.parametrize("part", [r"\boxed{", "\\", r"\boxed ", r"\boxed{\{", "{", r"\boxed" + " " * 1000])
def test_a_policy_that_repeats_itself_is_read_in_one_pass(part):
    assert boxed(part * 20_000) == []  # a scan from each opening to the end would take minutes
