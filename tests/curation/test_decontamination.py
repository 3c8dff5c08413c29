import difflib
import json
import os
import random
import re
from pathlib import Path

import pytest

from strop.curation.config import DecontaminationRule, make_rule
from strop.curation.decontamination import Decontamination
from strop.curation.rules import words
from strop.tasks import load_rows
from strop.tasks.rows import JsonlRows, ParquetRows
from strop.types import Task

from .problems import problems, reworded

DATA = Path(os.environ.get("STROP_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def task(question, name="t"):
    return Task(id=name, question=question, answer="1", source="test")


def planted(benchmark, rest, *, seed):
    """3 thousand problems with 50 of the benchmark's among them, 20 of these with other first and last words."""
    draw = random.Random(seed)
    chosen = draw.sample(benchmark, 50)
    contamination = [*chosen[:30], *map(reworded, chosen[30:])]
    mixed = [*rest[: 3000 - 50], *contamination]
    draw.shuffle(mixed)
    return mixed, {each.id for each in contamination}


def test_a_planted_contamination_is_found_without_one_false_alarm():
    benchmark = problems(1000, seed=1, source="benchmark")
    mixed, contamination = planted(benchmark, problems(3000, seed=2), seed=3)
    rule = Decontamination(benchmark)
    assert {each.id for each in mixed if rule.judge(each)} == contamination


REAL = {
    "gsm8k": {"dataset": "gsm8k"},
    "aime24": {"dataset": "aime24"},
    "math500": {},
    "hotpotqa": {"dataset": "arpo-eval"},
    "bamboogle": {"dataset": "arpo-eval"},
}


def real(name, split="test"):
    path = DATA / name / f"{split}.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}; set STROP_DATA to a directory that holds it")
    return load_rows(JsonlRows(path=path, **REAL[name]), split="train")


@pytest.fixture(scope="module")
def benchmarks():
    return {name: real(name) for name in REAL if name != "aime24"}


@pytest.fixture(scope="module")
def against_all(benchmarks):
    return Decontamination([each for found in benchmarks.values() for each in found])


@pytest.mark.parametrize(
    ("name", "shares"),
    [  # of its problems, as they are, that are found under k = 0, 1, 2 and 4 other words at each end
        ("gsm8k", (1.0, 1.0, 1.0, 0.997)),
        ("math500", (1.0, 0.95, 0.88, 0.74)),  # k = 1 is all of "Simplify $\\sqrt{242}$."
        ("hotpotqa", (1.0, 1.0, 0.96, 0.53)),  # k = 4 is half of the words of half of them
        ("bamboogle", (1.0, 1.0, 0.84, 0.18)),
    ],
)
def test_reworded_problems_of_real_benchmarks_are_found(benchmarks, against_all, name, shares):
    found = [
        sum(against_all.judge(reworded(each, num_words=num_words)) is not None for each in benchmarks[name])
        for num_words in (0, 1, 2, 4)
    ]
    assert [num / len(benchmarks[name]) >= share for num, share in zip(found, shares, strict=True)] == [True] * 4, found


@pytest.mark.parametrize("name", ["gsm8k", "math500", "hotpotqa"])
def test_a_contamination_of_a_real_benchmark_is_found_and_the_other_alarms_are_its_near_copies(benchmarks, against_all, name):
    chosen = random.Random(3).sample(benchmarks[name], 50)
    contamination = [*chosen[:30], *(reworded(each, num_words=1) for each in chosen[30:])]
    dropped = {each.id for each in contamination if against_all.judge(each)}
    # MATH-500 has problems of so few words that none are left between the other ones.
    gone = {each.id for each in contamination if each.id.startswith("reworded") and len(each.question.split()) < 4}
    assert {each.id for each in contamination} - dropped <= gone


@pytest.fixture(scope="module")
def ordinary():
    """Real problems to train on: ARPO's mix, half of it mathematics, and GSM8K's training set."""
    pytest.importorskip("pyarrow", reason="needs the extra strop[data]")
    mix = DATA / "arpo" / "train_10k.parquet"
    if not mix.exists():
        pytest.skip(f"no {mix}; set STROP_DATA to a directory that holds it")
    return [*load_rows(ParquetRows(path=mix, dataset="arpo-mix", bad_rows="skip"), split="train"), *real("gsm8k", "train")]


def in_ten_thousand(benchmark, ordinary, *, num_words, seed):
    """Rows with 50 problems of `benchmark` among them, 20 of these with `num_words` others at each end; and these 50."""
    draw = random.Random(seed)
    chosen = draw.sample(benchmark, 50)
    planted = [*chosen[:30], *(reworded(each, num_words=num_words) for each in chosen[30:])]
    mixed = [*draw.sample(ordinary, 10_000 - 50), *planted]
    draw.shuffle(mixed)
    return mixed, {id(each) for each in planted}


def same_but_for_numbers(one, other):
    """How much of two questions is alike, word by word, where every number is one."""
    said = [[re.sub(r"\d+", "#", word) for word in words(each)] for each in (one, other)]
    return difflib.SequenceMatcher(None, *said, autojunk=False).ratio()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fifty_real_problems_planted_in_ten_thousand_are_all_found_and_what_else_is_an_alarm_is_a_near_copy(ordinary, seed):
    benchmark = [*real("gsm8k"), *real("aime24")]
    rule = Decontamination(benchmark)
    mixed, planted = in_ten_thousand(benchmark, ordinary, num_words=2, seed=seed)
    alarms = [each for each in mixed if rule.judge(each)]
    assert planted <= {id(each) for each in alarms}
    others = [each for each in alarms if id(each) not in planted]
    nearest = [max(same_but_for_numbers(each.question, known.question) for known in benchmark) for each in others]
    told = "".join(f"\n{each.id}, {share:.2f}: {each.question}" for each, share in zip(others, nearest, strict=True))
    # A train, of 270 or of 360 miles in 3 hours, where GSM8K's test set has a plane with the same question.
    assert {each.id for each in others} <= {"train.jsonl:1315", "train.jsonl:5163"}, told
    assert all(share > 0.9 for share in nearest), told


def test_the_papers_strict_rule_drops_for_one_shared_8_gram():
    benchmark = task(
        "The answer is m over n where m and n are relatively prime positive integers, and more of it follows here, about a"
        " circle and its chords."
    )
    mine = task("Let x be m over n where m and n are relatively prime positive integers; that is all.")
    assert Decontamination([benchmark]).judge(mine) is None
    assert 'as in "m over n where m and n are"' in Decontamination([benchmark], min_share=0).judge(mine)


def test_formulas_are_compared_by_their_words_not_by_how_they_are_set():
    benchmark = task(r"Let $f(x) = \frac{3x-2}{x-2}$ be given. What is the value of $f(-2)+f(-1)$?")
    copy = task(r"Let \(f(x)=\dfrac{3x - 2}{x - 2}\) be given.  What is the value of \( f(-2) + f(-1) \)?")
    assert Decontamination([benchmark]).judge(copy).startswith("shares 100%")


def test_a_short_benchmark_problem_is_found_as_a_whole_but_not_as_a_phrase():
    rule = Decontamination([task("Compute $\\sin 60^\\circ$.")])
    assert rule.judge(task("Compute $\\sin{60}^\\circ$")) is not None
    assert rule.judge(task("Please compute $\\sin 60^\\circ$ now.")) is not None
    assert rule.judge(task("Compute $\\sin 60^\\circ$ and add to it the number of days of a leap year.")) is None


def test_the_reason_names_the_benchmark_problem_of_the_largest_share():
    said = [f"word{number}" for number in range(12)]
    short, long = task(" ".join(said), "short"), task(" ".join([*said, *map(str, range(100))]), "long")
    assert "of short of test" in Decontamination([long, short]).judge(task(" ".join(said)))


STEM = (
    "A particle of spin one half and mass m moves in a uniform magnetic field along the z axis and is prepared at time zero in"
    " the state up along x; which gives the expected value of the y component of its spin after a time t?"
)
CHOICES = [
    f"{sign} one half h bar times the {function} of {times} the Larmor frequency, and zero at every {when} that the field lasts"
    for sign, function, times, when in [
        ("plus", "sine", "once", "odd period of the driving laser pulse"),
        ("minus", "cosine", "twice", "even multiple of the decay constant"),
        ("plus", "tangent", "half", "crossing of the two energy levels"),
        ("minus", "cotangent", "thrice", "turn of the rotating frame used here"),
    ]
]


@pytest.mark.parametrize(
    "copy",
    [
        STEM,
        "\n".join([STEM, *(f"{letter}. {text}" for letter, text in zip("ABCD", reversed(CHOICES), strict=True))]),
        "Tell us, please: " + STEM.partition(" ")[2],
    ],
)
def test_a_multiple_choice_is_found_by_its_question_whatever_choices_a_copy_has(copy, tmp_path):
    wrong = {f"Incorrect Answer {number}": text for number, text in enumerate(CHOICES[1:], 1)}
    row = {"Question": STEM, "Correct Answer": CHOICES[0], **wrong}
    (tmp_path / "gpqa.jsonl").write_text(json.dumps(row) + "\n")
    against = JsonlRows(path=tmp_path / "gpqa.jsonl", dataset="gpqa-diamond")
    rule = make_rule(DecontaminationRule(against=(against,)))
    assert "of the 8-grams of gpqa.jsonl:1 of" in rule.judge(task(copy))


@pytest.mark.parametrize(("first", "second"), [("(A)", "(B)"), ("A.", "B."), ("A)", "B)"), ("A:", "B:")])
def test_a_short_question_of_a_multiple_choice_is_found_however_its_choices_are_lettered(first, second):
    of = f"Which moon did Huygens discover?\n  {first} Titan, in sixteen fifty five\n  {second} Rhea, long after all the others"
    rule = Decontamination([task(of), *SHORT])
    assert "of the short t of test" in rule.judge(task("Tell us: which moon did Huygens discover, please?"))


SHORT = [
    task("Who is older, Annie Morton or Terry Richardson?", "older"),
    task("Find the sum of all $x$. Express your answer as a common fraction.", "a"),
    task("What is the mean of 3 and 4? Express your answer as a common fraction.", "b"),
    task("Roll two dice. What is the chance of a 7? Express your answer as a common fraction.", "c"),
]


@pytest.mark.parametrize(
    ("question", "is_copy"),
    [
        ("Tell me this: Annie Morton or Terry Richardson, which?", True),
        (
            "Of Annie Morton or Terry Richardson one was in a film whose maker came from a town in Ohio: which of the two?",
            False,
        ),
        ("Who is older, Bob or Eve?", False),  # a template that holds nothing of its own
        ("How long is it? Express your answer as a common fraction.", False),  # what three have is peculiar to none
        ("Find the mean of 3 and 4, as a decimal.", True),
        ("Find the mean of 3 - 4, as a decimal.", False),
    ],
)
def test_a_short_problem_is_found_by_a_run_of_words_of_its_own(question, is_copy):
    assert (Decontamination(SHORT).judge(task(question)) is not None) is is_copy


def test_a_run_of_words_is_told_with_the_problem_that_it_is_of():
    told = Decontamination(SHORT).judge(task("Tell me this: Annie Morton or Terry Richardson, which?"))
    assert told == 'shares 68% of the short older of test, weighted by rarity: "annie morton or terry richardson"'
