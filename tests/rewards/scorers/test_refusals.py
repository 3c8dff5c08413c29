"""When a service that refuses is blamed; what is asked of it over HTTP is in test_preference.py and test_judge.py."""

import pytest

from strop.errors import UserError
from strop.rewards.scorers.refusals import Refusals
from strop.web import ServiceRefused

TOO_LONG = ServiceRefused("too long", status=400)


def judge(refusals, prompt, response):
    with refusals.asking((prompt, response)) as numbers:
        refusals.judged(numbers)


def refuse(refusals, prompt, response):
    with refusals.asking((prompt, response)) as [number]:
        refusals.add(TOO_LONG, number)


def after(*lengths):
    refusals = Refusals()
    for num in lengths:
        judge(refusals, "?", "x" * num)
    return refusals


def test_a_service_that_breaks_within_a_step_is_told_of_when_the_next_begins():
    refusals = after(*range(1, 257))
    for num in range(257, 513):
        refuse(refusals, f"{num:03}", "x" * num)
    for num in range(1, 8):
        refuse(refusals, f"{num:03}", "y" * num)
    with pytest.raises(UserError, match=r"8 different responses in a row.* \(264 so far.*It judged longer ones before"):
        refuse(refusals, "008", "y" * 8)


def test_longer_ones_that_are_refused_between_neither_count_nor_end_a_row():
    refusals = after(1, 10, 100)
    batch = [(f"{n:02}", "x" * (10 if n % 2 else 9)) for n in range(16)]
    with refusals.asking(*batch) as numbers:
        for number in numbers[:-2]:
            refusals.add(TOO_LONG, number)
        with pytest.raises(UserError, match=r"8 different responses in a row"):
            refusals.add(TOO_LONG, numbers[-2])


def test_one_very_long_judgement_does_not_put_what_is_too_long_into_a_row():
    refusals = after(*[100] * 20, 100_000)
    for num in range(200, 300):
        refuse(refusals, str(num), "x" * num)
    assert refusals.num_refused == 100


def test_length_is_of_bytes_so_chinese_text_is_compared_with_english():
    refusals = after(100, 100, 100)
    for num in range(20):
        refuse(refusals, f"{num:02}", "长" * 34)
    assert refusals.num_refused == 20
    for num in range(7):
        refuse(refusals, f"{num}", "长" * 33)
    with pytest.raises(UserError, match="8 different requests"):
        refuse(refusals, "7", "长" * 33)


def test_what_is_remembered_of_a_long_run_does_not_grow():
    refusals = after(*[1] * 9000)
    assert len(refusals._judged_bytes) == 8192
    assert not refusals._asked
