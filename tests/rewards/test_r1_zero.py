import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from strop.answer_text import plain_number
from strop.rewards import math_text
from strop.rewards.math_text import MAX_CHARS, equal_by_text, normal_form
from strop.rewards.r1_zero import question_only_reward_fn, r1_zero_reward_fn

RIGHT = {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
WRONG = {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}
UNFORMATTED = {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}


def in_format(answer):
    return f"Let me see. </think> <answer>{answer}</answer>"


def in_box(answer):
    return rf"So it is $\boxed{{{answer}}}$."


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (in_format("72"), RIGHT),
        (in_format(" 72 "), RIGHT),
        (in_format("73"), WRONG),
        (in_format(""), WRONG),
        ("</think>  <answer>72</answer>", UNFORMATTED),  # two spaces
        ("</think><answer>72</answer>", UNFORMATTED),
        ("</think>\n<answer>72</answer>", UNFORMATTED),
        ("</think> <answer>72", UNFORMATTED),
        ("<answer>72</answer>", UNFORMATTED),
        ("72", UNFORMATTED),
        ("", UNFORMATTED),
        (in_format("71") + "<answer>72</answer>", RIGHT),  # the last answer counts
        (in_format("72") + "<answer>71</answer>", WRONG),
        (in_format("72") + " and more", WRONG),  # what follows belongs to the answer: stop at the closing tag
        (in_format("72</answer>"), RIGHT),
        (in_format(r"\boxed{72}"), RIGHT),
        (in_format(r"It is \boxed{71} or \boxed{72}"), RIGHT),
        (in_format(r"72 \boxed{71}"), WRONG),
        (in_format(r"72 \boxed{"), WRONG),
        (in_format(r"\boxed{72} or \boxed{73"), WRONG),
        (in_format(r"$\boxed{\text{72 dollars}}$"), RIGHT),
    ],
)
def test_the_r1_zero_grader_wants_its_tags_and_the_right_answer(response, expected):
    assert r1_zero_reward_fn(response, "72") == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (in_box("72"), RIGHT),
        (in_box("73"), WRONG),
        ("72", UNFORMATTED),
        (r"\boxed{72", UNFORMATTED),
        (r"\boxed{72} or \boxed{", UNFORMATTED),
        (in_format("72"), UNFORMATTED),
        (r"\boxed{71} so \boxed{72}", RIGHT),
        (r"\boxed{72} so \boxed{71}", WRONG),
        (r"\boxed{\boxed{72}}", RIGHT),
    ],
)
def test_the_question_only_grader_wants_a_box(response, expected):
    assert question_only_reward_fn(response, "72") == expected


@pytest.mark.parametrize("gold", [72, 72.0, "72", r"\boxed{72}", ["71", "72"], ("72",)])
def test_a_truth_may_be_a_number_a_box_or_several(gold):
    assert r1_zero_reward_fn(in_format("72"), gold) == question_only_reward_fn(in_box("72"), gold) == RIGHT
    assert r1_zero_reward_fn(in_format("73"), gold) == question_only_reward_fn(in_box("73"), gold) == WRONG


SAME = [
    ("72", "72.0"),
    ("1072", "1,072"),
    ("10,080", r"10,\!080"),
    ("18", r"\$18"),
    ("10", r"10\%"),
    ("0.5", ".5"),
    (r"60^\circ", "60"),
    ("5", r"5 \text{ cm}"),
    ("5", "5 cm^2"),
    (r"\frac{3}{4}", r"\dfrac34"),
    (r"-\frac{1}{2}", "-1/2"),
    (r"\frac{-1}{2}", "-1/2"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    ("5", "x = 5"),
    (r"\sqrt{2}", "sqrt(2)"),
    (r"1 \text{ and } 2", "1 and 2"),
]


TYPESET = [  # what is around an answer and does not belong to it
    ("18", r"\displaystyle 18"),
    ("18", r"$\displaystyle 18$"),
    (r"60^\circ", r"\displaystyle 60^\circ."),
    (r"\text{Evelyn}", r"\text{Evelyn}."),
    (r"\text{Evelyn}", r"$\text{Evelyn}$"),
    (r"\text{Evelyn}", r"\text{Evelyn}\,"),
    (r"15\mbox{ cm}^2", r"15\mbox{ cm}^2."),
]


@pytest.mark.parametrize(("gold", "answer"), TYPESET)
def test_a_style_dollars_and_a_full_stop_around_an_answer_do_not_matter(gold, answer):
    assert r1_zero_reward_fn(in_format(answer), gold, fast=True) == RIGHT
    assert question_only_reward_fn(in_box(answer), gold, fast=True) == RIGHT


def test_cubic_units_with_a_full_stop_are_no_square_ones():
    for fast in (True, False):
        assert r1_zero_reward_fn(in_format(r"15\text{ cm}^3."), r"15\mbox{ cm}^2", fast=fast) == WRONG


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_spellings_of_one_answer_have_one_normal_form(gold, answer):
    assert equal_by_text(gold, answer) is equal_by_text(answer, gold) is True


@pytest.mark.parametrize(
    ("gold", "answer", "expected"), [("72", "73", False), ("", "", False), ("72", "", False), ("p - q", "q - p", None)]
)
def test_plain_numbers_are_told_apart_without_algebra(gold, answer, expected):
    assert equal_by_text(gold, answer) is expected


def test_an_answer_that_is_too_long_is_not_read():
    assert equal_by_text("1" * (MAX_CHARS + 1), "1" * (MAX_CHARS + 1)) is False


@pytest.mark.parametrize("piece", [" ", "(", "\\text{", "\\text ", "{", "1,", "sqrt(", "\\frac", "cm ", "1 ", "\\", "^ ", "-"])
def test_no_text_takes_long_to_normalise(piece):
    started = time.perf_counter()
    normal_form("1" + piece * (MAX_CHARS // len(piece)) + "!")
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("p - q", "-q + p", True),
        ("p - q", "q - p", False),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("2*pi", r"2\pi", True),
        ("7 3/4", r"\frac{31}{4}", True),
        (r"(1, \sqrt{8})", r"(1, 2\sqrt{2})", True),
        (r"[1, \sqrt{8})", r"(1, 2\sqrt{2})", False),  # another interval
        (r"(1, \sqrt{8})", r"(2\sqrt{2}, 1)", False),
        (r"\frac{1}{2}", r"\frac{2}{4}", False),  # not reduced
        ("2", r"\sqrt{4}", False),  # an integer has to be written as one
        ("dear", "read", False),  # words are not products of letters
    ],
)
def test_algebra_is_judged_by_the_rules_of_the_course(gold, answer, expected):
    assert r1_zero_reward_fn(in_format(answer), gold)["reward"] == expected


def test_math_verify_is_asked_last_and_only_where_speed_is_not_asked_for():
    response = in_format("(1, 2)")
    assert r1_zero_reward_fn(response, "1 < x < 2") == WRONG
    assert r1_zero_reward_fn(response, "1 < x < 2", fast=False) == RIGHT
    assert question_only_reward_fn(in_box(r"\frac{2}{4}"), r"\frac{1}{2}", fast=False) == RIGHT
    assert question_only_reward_fn(in_box("q - p"), "p - q", fast=False) == WRONG


def test_an_answer_is_never_executed(tmp_path):
    trace = tmp_path / "trace"
    answer = f"__import__('os').system('touch {trace}')"
    for fast in (True, False):
        assert r1_zero_reward_fn(in_format(answer), "x", fast=fast) == WRONG
    assert not trace.exists()


def test_an_answer_that_hangs_the_judge_is_wrong_after_its_deadline_and_the_next_is_judged():
    assert r1_zero_reward_fn(in_format("-q + p"), "p - q", fast=False) == RIGHT
    started = time.perf_counter()
    assert r1_zero_reward_fn(in_format("9^{9^{9^9}}"), "x", fast=False) == WRONG
    assert time.perf_counter() - started < 10.0  # 1 s for each way; the rest is a new process
    assert r1_zero_reward_fn(in_format("-q + p"), "p - q", fast=False) == RIGHT


def test_many_threads_may_ask_at_once():
    wrong = []

    def ask(number):
        for other in (number, number + 1):
            is_right = r1_zero_reward_fn(in_format(f"{other} + a"), f"a + {number}")["reward"] == 1.0
            if is_right != (other == number):
                wrong.append((number, other))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_fork_asks_a_process_of_its_own():
    assert r1_zero_reward_fn(in_format("-q + p"), "p - q") == RIGHT
    child = os.fork()
    if child == 0:
        is_right = r1_zero_reward_fn(in_format("-q + p"), "p - q")["reward"] == 1.0
        math_text._close()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert r1_zero_reward_fn(in_format("-q + p"), "p - q") == RIGHT


def test_the_judge_ends_with_the_process_that_asked_it():
    code = (
        "import os; from strop.rewards import math_text, r1_zero\n"
        "r1_zero.r1_zero_reward_fn('</think> <answer>-q + p</answer>', 'p - q')\n"
        "print(*(each.pid for each in math_text._verifiers[os.getpid()]._processes), flush=True)"
    )
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False).stdout
    until = time.monotonic() + 10.0
    while Path(f"/proc/{int(said)}").exists() and "Z" not in Path(f"/proc/{int(said)}/stat").read_text().split()[2]:
        assert time.monotonic() < until
        time.sleep(0.02)


DATA = Path(os.environ.get("STROP_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def labels(*names):
    if not all((DATA / name).is_file() for name in names):
        pytest.skip(f"no {' and '.join(names)} in {DATA}; set STROP_DATA to a directory that holds them")
    rows = [json.loads(line) for name in names for line in (DATA / name).read_text().splitlines()]
    return [row["answer"].rpartition("#### ")[2] for row in rows]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("names", [("gsm8k/train.jsonl", "gsm8k/test.jsonl"), ("math500/test.jsonl",)])
def test_every_label_is_right_for_itself_and_a_number_is_wrong_for_the_one_before_it(names, fast):
    golds = labels(*names)
    assert len(golds) >= 500
    for gold in golds if fast or len(golds) == 500 else golds[::5]:  # the text decides, before `fast` makes a difference
        assert r1_zero_reward_fn(in_format(f" {gold} "), gold, fast=fast) == RIGHT, gold
        assert question_only_reward_fn(in_box(gold), gold, fast=fast) == RIGHT, gold
        number = plain_number(gold)
        if number is not None and number == number.to_integral_value():
            assert r1_zero_reward_fn(in_format(f"{number + 1:f}"), gold, fast=fast) == WRONG, gold
            assert question_only_reward_fn(in_box(f"{number + 1:f}"), gold, fast=fast) == WRONG, gold


@pytest.mark.parametrize("fast", [True, False])
def test_labels_that_are_no_numbers_are_right_in_another_spelling_and_wrong_with_one_more(fast):
    golds = [gold for gold in labels("math500/test.jsonl") if plain_number(gold) is None]
    for gold in golds:
        spelt = re.sub(r"\\frac", r"\\dfrac", gold).replace(",", ", ").replace("(", r"\left(").replace(")", r"\right)")
        assert r1_zero_reward_fn(in_format(spelt), gold, fast=fast) == RIGHT, (gold, spelt)
        assert r1_zero_reward_fn(in_format(f"{gold}+1"), gold, fast=fast) == WRONG, gold
