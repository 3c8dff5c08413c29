import json
import os
import random
from decimal import Decimal
from pathlib import Path

import pytest

from strop.answer_text import exact_match, plain_number

DATA = Path(os.environ.get("STROP_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
GSM8K = DATA / "gsm8k" / "train.jsonl"
needs_gsm8k = pytest.mark.skipif(
    not GSM8K.is_file(), reason=f"no GSM8K in {DATA}; set STROP_DATA to a directory that holds gsm8k/train.jsonl"
)

FORMS_OF_1072 = [
    "1072", "1,072", "1072.0", "1072.", "1072.00", "+1072", " 1072 ", r"\text{1072}", r"\text{ 1,072 }", r"\mathrm{1072}",
    "$1072", r"\$1072", r"\$1,072.00", "$1072$", r"$\$1072$", "1{,}072", r"1\,072", r"1{,}\!072", "+ 1072",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS_OF_1072[:-1])
def test_a_number_is_the_same_in_every_form_in_which_people_write_it(form):
    assert exact_match("1072", form) is True
    assert exact_match(form, "1072") is True


@pytest.mark.parametrize(
    "form", ["1071", "1073", "-1072", "10720", "107", "2", "1072.01", "1,073", "0", "$1071", r"\text{1071}"]
)
def test_another_number_is_wrong_without_asking_anybody(form):
    assert exact_match("1072", form) is False


@pytest.mark.parametrize(
    "form",
    [
        "1,07",
        "10,72",
        "1072%",
        r"1072\%",
        "1072 apples",
        "x=1072",
        r"\frac{2144}{2}",
        "1e3",
        "",
        "-",
        ".",
        "$",
        "$$",
        "٧٢",
        "1_072",
        "--5",
    ],
)
def test_what_is_no_plain_number_is_left_to_mathematics(form):
    assert plain_number(form) is None
    assert exact_match("1072", form) is None


def test_the_same_text_is_equal_whatever_it_means_and_nothing_is_equal_to_nothing():
    assert exact_match(r"\text{Evelyn}", r" \text{Evelyn}") is True
    assert exact_match("", "") is False


def test_a_number_of_a_thousand_digits_is_not_computed_with():
    assert plain_number("9" * 1000) is None


def test_small_differences_count():
    assert exact_match("0.1", "0.10") is True
    assert exact_match("0.1", "0.1000000000000000000000000000000000001") is False
    assert exact_match("-0.5", "-.5") is True


@needs_gsm8k
def test_no_real_label_of_gsm8k_is_rejected_in_any_form_nor_accepted_when_off_by_a_little():
    labels = [json.loads(line)["answer"].rpartition("####")[2].strip() for line in GSM8K.open(encoding="utf-8")]
    assert len(labels) == 7473
    draw = random.Random(0)
    for label in labels:
        number = plain_number(label)
        assert number is not None, label
        for form in (
            f"{number}",
            f"{number}.0" if number == int(number) else f"{number}0",
            f"{number:,}",
            f"${number}$",
            rf"\text{{{number}}}",
        ):
            assert exact_match(label, form) is True, (label, form)
        for near in (number + 1, number - 1, number * 10 + 1, number + draw.randint(2, 99), number + Decimal("0.01")):
            assert exact_match(label, f"{near:f}") is False, (label, near)
        if number:
            assert exact_match(label, f"{-number}") is False
