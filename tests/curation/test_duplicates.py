import random

import pytest

from strop.curation.config import curate
from strop.curation.rules import ExactDuplicates, NearDuplicates
from strop.types import Task

from .problems import problems

pytest.importorskip("rensa", reason="needs the extra strop[data]")


def task(question, name="t", answer="1"):
    return Task(id=name, question=question, answer=answer, source="test")


def dropped(tasks, *rules):
    return {verdict.task.id: verdict.reason for verdict in curate(tasks, rules) if not verdict.is_kept}


def test_the_first_of_equal_questions_stays_whatever_their_layout():
    tasks = [task("Find $x$.", "a"), task("find  \\(x\\).", "other"), task(" Find $ x $. ", "b"), task("Find $y$.", "c")]
    assert dropped(tasks, ExactDuplicates()) == {"b": "the same question as a"}


def test_operators_make_another_question():
    assert dropped([task("What is 3+4?", "a"), task("What is 3-4?", "b")], ExactDuplicates()) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Compute 3²", "Compute 32"),
        ("Convert 10₂", "Convert 102"),
        ("What is 1 2/3?", "What is 12/3?"),
        ("Multiply $12$ $3$", "Multiply $1$ $23$"),
        ("Find $x^{2}3$", "Find $x^23$"),
    ],
)
def test_other_numbers_make_another_question_however_they_are_set(one, other):
    assert dropped([task(one, "a"), task(other, "b")], ExactDuplicates()) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("$\\int x\\,dx$", "$\\int x dx$"),
        ("$\\left(x\\right)\\;y$", "$(x)y$"),
        ("Compute 3²", "Compute $3^2$"),
        ("Find $x^{2}+1$", "Find $x^2 + 1$"),
        ("Compute 10¹²", "Compute $10^{12}$"),
        ("Add $1\\,000$ and $2,\\!000$", "Add 1000 and 2,000"),
        ("Multiply 12 \n 3", "Multiply 12 3"),
    ],
)
def test_the_same_formula_set_otherwise_makes_no_other_question(one, other):
    assert list(dropped([task(one, "a"), task(other, "b")], ExactDuplicates())) == ["b"]


def test_two_answers_to_one_question_are_told():
    found = dropped([task("Q?", "a", "7"), task("Q?", "b", "23")], ExactDuplicates())
    assert found == {"b": "the same question as a, whose answer is '7' where this one's is '23'"}


def changed(question, num_words):
    said = question.split()
    for position in random.Random(0).sample(range(len(said)), num_words):
        said[position] = f"w{position}"
    return " ".join(said)


def test_a_near_copy_is_dropped_and_a_problem_of_the_same_kind_stays():
    text = " ".join(f"word{number}" for number in range(60))  # 58 triples; one changed word changes 3 of them
    near, far = task(changed(text, 1), "near"), task(changed(text, 12), "far")  # Jaccard 55/61 and about 26/90
    assert list(dropped([task(text, "first"), near, far], NearDuplicates())) == ["near"]


def test_the_same_sentence_with_another_answer_is_another_problem():
    text = " ".join(f"word{number}" for number in range(60))
    tasks = [task(text, "first", "1"), task(changed(text, 1), "second", "2")]
    assert dropped(tasks, NearDuplicates()) == {}


@pytest.mark.parametrize(
    ("first", "second", "is_alike"),
    [
        ("What is the height of the tower?", "What is the height of the bridge?", False),  # 4 of 6 triples: 0.67
        (
            "How tall is the tower that stands in the north of Paris?",
            "How tall is the tower that stands in the north of Lyon?",
            True,
        ),
        ("2+2", "2*2", True),  # signs do not count
        ("What is 2+2?", "What is 2*2?", True),
        ("1+3", "3+1", True),  # too few words for a triple
        ("What is 1+3?", "What is 3+1?", False),
    ],
)
def test_what_is_near_of_short_questions_with_one_answer(first, second, is_alike):
    assert bool(dropped([task(first, "a"), task(second, "b")], NearDuplicates())) is is_alike


def test_planted_near_copies_are_found_among_thousands_without_a_false_alarm():
    rest = problems(1000, seed=1)
    copies = [
        Task(id=f"copy/{each.id}", question=f"{each.question} Explain.", answer=each.answer, source="copy")
        for each in rest[:100]
    ]
    assert set(dropped([*rest, *copies], NearDuplicates())) == {copy.id for copy in copies}


TEMPLATE = (
    "A train leaves the station at noon and travels at {a} km per hour until it reaches a town that is {b} km away. How many"
    " minutes does it take?"
)


def templated(num, *, answers):
    """Problems of one sentence; of any two, two numbers differ, and `answers` says how many answers there are."""
    draw = random.Random(0)
    numbers = [(draw.randint(10, 9999), draw.randint(100, 99999)) for _ in range(num)]
    return [task(TEMPLATE.format(a=a, b=b), f"t{n}", str(n % answers)) for n, (a, b) in enumerate(numbers)]


def copies_of(tasks):
    return [task(f"{each.question} Explain.", f"copy/{each.id}", each.answer) for each in tasks]


def test_problems_of_one_template_with_other_answers_are_never_compared():
    tasks, rule = templated(800, answers=800), NearDuplicates()
    assert set(dropped([*tasks, *copies_of(tasks[:50])], rule)) == {f"copy/t{n}" for n in range(50)}
    assert rule.num_compared <= 60


def test_with_few_answers_what_a_look_at_all_pairs_finds_is_found_and_the_earliest_is_named():
    tasks = templated(500, answers=2)
    tasks += copies_of(tasks[:50])
    signatures = [NearDuplicates().signature(each.question) for each in tasks]
    kept, expected = [], {}
    for index, each in enumerate(tasks):
        alike = [k for k in kept if tasks[k].answer == each.answer and signatures[k].jaccard(signatures[index]) >= 0.8]
        if alike:
            expected[each.id] = f"alike with {tasks[alike[0]].id}"
        else:
            kept.append(index)
    found = {name: reason.partition(" ")[2] for name, reason in dropped(tasks, NearDuplicates()).items()}
    assert found == expected


def test_what_one_problem_costs_is_bounded_and_what_that_may_miss_is_told(caplog):
    tasks, rule = templated(1500, answers=1), NearDuplicates(max_compared=16)
    copies = copies_of(tasks[:50])
    found = dropped([*tasks, *copies], rule)
    assert rule.num_compared <= len(tasks + copies) * 16  # 1 million with no bound
    assert "copy/t0" in found  # the earliest candidates are compared
    assert caplog.text.count("shares text with more than 16 problems with the same answer") == 1


def test_signatures_are_the_same_in_every_process():
    # A curation that is resumed must drop the same problems.
    assert [number.to_bytes(4, "little").hex() for number in NearDuplicates().signature("one two three four").digest()[:2]] == [
        "07cac2c6",
        "fe93e0ca",
    ]


def test_a_pair_at_the_threshold_meets_in_a_band_with_the_probability_0_99():
    chances = [1 - (1 - 0.8**rows) ** (120 // rows) for rows in (6, 7)]
    assert [chance >= 0.99 for chance in chances] == [True, False]
