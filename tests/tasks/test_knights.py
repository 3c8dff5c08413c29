"""Knights and knaves: one solution each, the same at the same index, never in both splits; and mixtures of sources."""

import itertools
import json
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config import validate
from strop.errors import ConfigError, TaskError
from strop.stages.loop.engines import task_files
from strop.tasks import make_tasks
from strop.tasks.generated import ArithmeticTasks, KnightsTasks
from strop.tasks.protocol import MixedTasks

_FORMS = {
    r"(\w+) is (\w+ \w+)\.": lambda k, a, x: k[a] == x,
    r"(\w+) and (\w+) are of the same kind\.": lambda k, a, b: k[a] == k[b],
    r"(\w+) and (\w+) are of different kinds\.": lambda k, a, b: k[a] != k[b],
    r"(\w+) is (\w+ \w+), and (\w+) is (\w+ \w+)\.": lambda k, a, x, b, y: k[a] == x and k[b] == y,
    r"(\w+) is (\w+ \w+), or (\w+) is (\w+ \w+), or both\.": lambda k, a, x, b, y: k[a] == x or k[b] == y,
    r"If (\w+) is (\w+ \w+), then (\w+) is (\w+ \w+)\.": lambda k, a, x, b, y: k[a] != x or k[b] == y,
}


def solved(question):
    """All solutions of a puzzle, from its text alone."""
    said = re.findall(r'(\w+) says: "([^"]+)"', question)
    found = []
    for world in itertools.product(("a knight", "a knave"), repeat=len(said)):
        kinds = dict(zip((name for name, _ in said), world, strict=True))
        holds = [
            next(rule(kinds, *match.groups()) for form, rule in _FORMS.items() if (match := re.fullmatch(form, text)))
            for _, text in said
        ]
        if all(is_true == (kinds[name] == "a knight") for is_true, (name, _) in zip(holds, said, strict=True)):
            found.append(sorted(name for name, kind in kinds.items() if kind == "a knight"))
    return found


@given(num=st.integers(2, 6), seed=st.integers(0, 5), split=st.sampled_from(["train", "test"]), index=st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_the_text_of_a_puzzle_has_one_solution_which_is_the_answer(num, seed, split, index):
    task = make_tasks(KnightsTasks(min_people=num, max_people=num), seed=seed, split=split).task(index)
    assert solved(task.question) == [[] if task.answer == "none" else task.answer.split(", ")]


def test_a_puzzle_is_a_pure_function_of_seed_split_and_index():
    first, again, other = (make_tasks(KnightsTasks(), seed=seed, split="train") for seed in (1, 1, 2))
    assert [first.task(index) for index in range(20)] == [again.task(index) for index in reversed(range(20))][::-1]
    assert first.task(3) != other.task(3)


def test_what_is_said_in_one_split_is_not_said_in_the_other_under_other_names():
    splits = {split: make_tasks(KnightsTasks(max_people=3), seed=0, split=split) for split in ("train", "test")}
    puzzles = {split: {source.task(index).id.split("/")[1] for index in range(600)} for split, source in splits.items()}
    assert not puzzles["train"] & puzzles["test"]


def test_answers_are_varied():
    source = make_tasks(KnightsTasks(min_people=3, max_people=3), seed=0, split="train")
    numbers = Counter(0 if (answer := source.task(index).answer) == "none" else answer.count(",") + 1 for index in range(300))
    assert set(numbers) == {0, 1, 2, 3}
    assert max(numbers.values()) < 200


def mixture(**weights):
    parts = {"sums": ArithmeticTasks(num_terms=2), "knights": KnightsTasks()}
    return make_tasks(MixedTasks(parts=parts, weights=weights), seed=3, split="train")


def test_a_mixture_takes_from_each_source_in_turn_by_its_weight():
    mixed = mixture(sums=3)
    domains = [mixed.task(index).facts["domain"] for index in range(8)]
    assert Counter(domains[:4]) == {"sums": 3, "knights": 1}
    assert domains[:4] == domains[4:]
    own = make_tasks(ArithmeticTasks(num_terms=2), seed=3, split="train")
    sums = [task for index in range(40) if (task := mixed.task(index)).facts["domain"] == "sums"]
    assert [task.question for task in sums] == [own.task(index).question for index in range(30)]
    assert all(task.id.startswith("sums/arithmetic/") for task in sums)


def test_sources_without_a_weight_come_as_often_as_each_other():
    mixed = mixture()
    assert Counter(mixed.task(index).facts["domain"] for index in range(10)) == {"sums": 5, "knights": 5}


def test_no_test_task_of_a_finite_source_comes_twice(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"q{n}", "answer": "1"}) + "\n" for n in range(5)))
    parts = {"rows": {"kind": "jsonl", "path": str(rows), "test_path": str(rows)}, "knights": {"kind": "knights"}}
    source = make_tasks(MixedTasks(parts=parts, weights={"rows": 2}), seed=0, split="test")
    assert source.num_tasks == 6  # two rounds of two rows and a puzzle
    assert len({source.task(index).id for index in range(6)}) == 6
    assert make_tasks(MixedTasks(parts=parts), seed=0, split="train").num_tasks is None
    with pytest.raises(TaskError, match="needs more test rows than a source has"):
        _ = make_tasks(MixedTasks(parts=parts, weights={"rows": 9}), seed=0, split="test").num_tasks


def test_a_weight_of_no_part_is_refused():
    with pytest.raises(ConfigError, match=r"weights names 'code', which is no part\. The parts are sums"):
        validate(MixedTasks.Config, {"parts": {"sums": {"kind": "arithmetic"}}, "weights": {"code": 2}}, place="tasks")


def test_files_of_all_sources_are_missed_before_a_run_starts(tmp_path):
    parts = {"a": {"kind": "jsonl", "path": str(tmp_path / "a.jsonl")}, "b": {"kind": "arithmetic"}}
    assert task_files("tasks", MixedTasks(parts=parts), ["train"]) == {"tasks.parts.a": tmp_path / "a.jsonl"}
