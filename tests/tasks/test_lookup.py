"""Problems for two tools: the corpus answers what is asked, and a test asks about nothing that training asked about."""

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from strop.config import validate
from strop.errors import ConfigError, TaskError
from strop.tasks import make_tasks
from strop.tasks.demonstrators import LookupDemonstrator
from strop.tasks.lookup import LookupTasks, read_facts
from strop.tools.search.bm25 import Bm25Config, Bm25Index
from strop.types import Task

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
sys.path.insert(0, str(ROOT / "experiments"))

from lookup_corpus import corpus_lines, main  # noqa: E402  (an experiment, found on the path)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f"{line}\n" for line in corpus_lines(num_subjects=60, seed=1)))
    return path


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fact(subject="bamiro", attribute="price", value=412, **others):
    return {"text": "...", "subject": subject, "attribute": attribute, "value": value} | others


def test_an_answer_is_what_the_corpus_tells_computed_with(corpus):
    told = {(fact.subject, fact.attribute): fact.value for fact in read_facts(corpus)}
    tasks = make_tasks(LookupTasks(path=corpus), seed=0, split="train")
    for task in map(tasks.task, range(200)):
        value = told[task.facts["subject"], task.facts["attribute"]]
        assert int(task.answer) == eval(f"{value}{task.facts['operation']}")
        assert all(task.facts[name] in task.question for name in ("subject", "attribute", "operation"))
        assert str(value) not in task.question.replace(task.facts["operation"], "")


def test_a_question_that_follows_links_is_answered_where_they_lead(tmp_path):
    lines = list(corpus_lines(num_subjects=60, seed=1, num_links=2))
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    told = {(fact.subject, fact.attribute): fact.value for fact in read_facts(path)}
    index = Bm25Index(Bm25Config(kind="bm25", path=str(path), index=str(tmp_path / "index"), language="none"))
    split = {}
    for split_name in ("train", "test"):
        tasks = make_tasks(LookupTasks(path=path, hops=2, operators=()), seed=0, split=split_name)
        for task in map(tasks.task, range(100)):
            at = task.facts["subject"]
            split.setdefault(split_name, set()).add(at)
            for attribute in reversed(task.facts["attribute"].split(" of ")):
                asked, at = at, told[at, attribute]
                (found,) = index.search(f"{attribute} of ({asked})", top_k=1)
                assert f"({asked}) is {at}." in found.text.replace(f"({at})", str(at))
            assert task.facts["value"] == str(at)
            assert task.answer == str(at)
    assert split["train"].isdisjoint(split["test"])


def test_no_subject_of_a_test_is_asked_about_in_training(corpus):
    asked = [
        {make_tasks(LookupTasks(path=corpus), seed=seed, split=split).task(index).facts["subject"] for index in range(500)}
        for seed, split in ((0, "train"), (7, "test"))
    ]
    assert asked[0].isdisjoint(asked[1])
    assert len(asked[0]) > len(asked[1]) > 4


def test_a_task_is_a_pure_function_of_seed_split_and_index(corpus):
    tasks = [make_tasks(LookupTasks(path=corpus), seed=seed, split="train") for seed in (1, 1, 2)]
    first, backwards, other = tasks
    expected = [first.task(index) for index in range(20)]
    assert [backwards.task(index) for index in reversed(range(20))] == expected[::-1]
    assert [other.task(index) for index in range(20)] != expected


def test_a_search_for_what_is_asked_finds_the_number_first(corpus, tmp_path):
    config = Bm25Config(kind="bm25", path=str(corpus), index=str(tmp_path / "index"), language="none")
    index = Bm25Index(config)
    tasks = make_tasks(LookupTasks(path=corpus), seed=0, split="test")
    for task in map(tasks.task, range(50)):
        (found,) = index.search(f"{task.facts['attribute']} of ({task.facts['subject']})", top_k=1)
        assert f"({task.facts['subject']}) is {task.facts['value']}." in found.text


def test_lines_without_a_number_are_passages_and_no_problems(tmp_path):
    path = write(tmp_path / "corpus.jsonl", {"text": "Nothing to see."}, fact())
    assert [each.value for each in read_facts(path)] == [412]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (fact(value="412"), "corpus.jsonl:2: a line with a `value` needs a whole number"),
        ({"text": "...", "subject": "bamiro", "attribute": "maker", "link": 7}, "corpus.jsonl:2: a line with a `value` needs"),
        (fact(subject=None), "corpus.jsonl:2: a line with a `value` needs a whole number there, and texts as"),
        (fact(value=7), "corpus.jsonl:2: the price of bamiro is in .*corpus.jsonl:1 already"),
        ([1], "corpus.jsonl:2: a JSON list, not an object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, message):
    with pytest.raises(TaskError, match=message):
        read_facts(write(tmp_path / "corpus.jsonl", fact(), row))


def test_a_corpus_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(TaskError, match=r"python experiments/lookup_corpus.py FILE"):
        make_tasks(LookupTasks(path=tmp_path / "none.jsonl"), seed=0, split="train")


def test_a_corpus_without_subjects_of_a_split_is_refused(tmp_path):
    path = write(tmp_path / "corpus.jsonl", {"text": "Nothing to see."})
    with pytest.raises(TaskError, match="no line of it tells a number of the test split"):
        make_tasks(LookupTasks(path=path), seed=0, split="test")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"wording": "What is {subject}?"}, r"must hold \{attribute\} once"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tree, message):
    with pytest.raises(ConfigError, match=message):
        validate(LookupTasks.Config, {"path": "corpus.jsonl"} | tree, place="recipe")


LINKED = ["--links", "2", "--num-subjects", "900", "--syllables", "2"]


@pytest.mark.parametrize(("name", "options"), [("two-tools", []), ("deep-search", LINKED)])
def test_the_corpus_of_the_recipe_is_what_the_command_writes(tmp_path, name, options):
    assert main([str(tmp_path / "again.jsonl"), *options]) == 0
    assert (tmp_path / "again.jsonl").read_bytes() == (RECIPES / f"{name}.jsonl").read_bytes()


TASK = Task(
    id="lookup/price/bamiro/+57",
    question="price of (bamiro)+57",
    answer="469",
    source="lookup/train",
    facts={"subject": "bamiro", "attribute": "price", "value": "412", "operation": "+57"},
)
FLAWLESS = {"guess_fraction": 0.0, "head_fraction": 0.0, "error_fraction": 0.0}


def said(demonstrator, observations, seed=0, task=TASK):
    script = demonstrator.script(task, tool="python", seed=seed)
    turns = [next(script)]
    with suppress(StopIteration):
        for text in observations:
            turns.append(script.send(text))
    return turns


def test_the_demonstrator_looks_up_then_computes_then_answers_with_what_came_back():
    turns = said(LookupDemonstrator(**FLAWLESS), ["Page 1: The price of (bamiro) is 412.", "469\n"])
    assert '{"name": "search", "arguments": {"query": "price of (bamiro)"}}' in turns[0]
    assert '"code": "print(412+57)"' in turns[1]
    assert turns[2].endswith("<answer>\\boxed{469}</answer>")


def test_the_demonstrator_searches_for_what_a_link_leads_to():
    linked = replace(TASK, facts={**TASK.facts, "subject": "tolune", "attribute": "price of maker"})
    seen = ["The maker of (tolune) is (bamiro).", "The price of (bamiro) is 412.", "469\n"]
    turns = said(LookupDemonstrator(**FLAWLESS), seen, task=linked)
    assert '"query": "maker of (tolune)"' in turns[0]
    assert '"query": "price of (bamiro)"' in turns[1]
    assert '"code": "print(412+57)"' in turns[2]
    assert len(turns) == 4
    unchanged = replace(linked, facts={**linked.facts, "operation": ""})
    assert said(LookupDemonstrator(**FLAWLESS), seen, task=unchanged)[2].endswith("<answer>\\boxed{412}</answer>")
    guessed = said(LookupDemonstrator(**{**FLAWLESS, "head_fraction": 1.0}), seen, task=linked)
    assert ["<tool_call>" in turn for turn in guessed] == [True, False]


@pytest.mark.parametrize(
    ("flaw", "num_turns", "num_calls"), [("guess_fraction", 1, 0), ("head_fraction", 2, 1), ("error_fraction", 4, 3)]
)
def test_each_flaw_is_shown_where_it_is_asked_for(flaw, num_turns, num_calls):
    turns = said(LookupDemonstrator(**{**FLAWLESS, flaw: 1.0}), ["... is 412.", "Traceback", "469\n"])
    assert (len(turns), sum("<tool_call>" in turn for turn in turns)) == (num_turns, num_calls)


def test_a_demonstrator_whose_search_finds_no_number_says_what_to_mend():
    with pytest.raises(TaskError, match="a search tool of this name"):
        said(LookupDemonstrator(**FLAWLESS), ["There is no tool 'search'."])
