import importlib.util
import json
import os
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from strop.config import Config, validate
from strop.errors import ConfigError, TaskError
from strop.tasks import RowTasks, TaskSource, load_rows, make_tasks
from strop.tasks.rows import HubRows, JsonlRows, ParquetRows, read_tasks
from strop.types import Task

DATA = Path(os.environ.get("STROP_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
needs_gsm8k = pytest.mark.skipif(
    not (DATA / "gsm8k").is_dir(), reason=f"no GSM8K in {DATA}; set STROP_DATA to a directory that holds gsm8k/train.jsonl"
)

ROW = {"question": "How many?", "answer": "Half of 48 is <<48/2=24>>24.\n#### 24"}


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def load(path, split="train", **config):
    return load_rows(JsonlRows(path=path, **config), split=split)


def numbered(count):
    return [Task(id=str(number), question="q", answer="a", source="test") for number in range(count)]


def test_a_row_becomes_a_task(tmp_path):
    (task,) = load(write(tmp_path / "rows.jsonl", ROW), answer_after="####")
    assert (task.id, task.question, task.answer) == ("rows.jsonl:1", "How many?", "24")
    assert task.facts == {"solution": "Half of 48 is <<48/2=24>>24."}


def test_columns_are_chosen_numbers_are_text_and_facts_are_carried(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"problem": "p", "label": 7, "level": 3})
    (task,) = load(path, question="problem", answer="label", facts=("level",))
    assert (task.question, task.answer, task.facts) == ("p", "7", {"level": "3"})


def test_blank_lines_are_skipped_and_still_counted(tmp_path):
    assert [task.id for task in load(write(tmp_path / "rows.jsonl", "", ROW, "", ROW))] == ["rows.jsonl:2", "rows.jsonl:4"]


def test_the_easy_rows_are_kept(tmp_path):
    hard = {"question": "How many?", "answer": "<<1=1>> <<2=2>> <<3=3>>\n#### 3"}
    path = write(tmp_path / "rows.jsonl", hard, {**ROW, "question": "x" * 100}, ROW, ROW)
    kept = load(path, answer_after="####", max_solution_steps=2, max_question_chars=50, limit=1)
    assert [task.id for task in kept] == ["rows.jsonl:3"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{oops"], r"rows.jsonl:1: not valid JSON"),
        (["[" * 100_000], r"rows.jsonl:1: nested too deeply"),
        ([{**ROW, "note": "\ud83d"}], r"rows.jsonl:1: holds half of a character, \\ud83d; write the whole character"),
        ([{"question": "q", "answer": float("nan")}], r"rows.jsonl:1: its 'answer' is nan, which is no number"),
        (["[1]"], r"rows.jsonl:1: a JSON list, not an object"),
        ([ROW, {"question": "q", "answer": ""}], r"rows.jsonl:2: its 'answer' holds no '####'"),
        ([{"question": "q", "answer": "x ####  "}], r"rows.jsonl:1: a row without an answer"),
        ([{"question": "q", "answer": None}], r"rows.jsonl:1: its 'answer' is empty"),
        ([{"question": " ", "answer": "#### 1"}], r"rows.jsonl:1: a row without a question"),
        (
            [{"problem": "q", "answer": "#### 1"}],
            r"rows.jsonl:1: no column 'question'. It has 'problem', 'answer'.* name other columns in tasks",
        ),
        ([{"question": "q", "answer": ["#### 1"]}], r"rows.jsonl:1: its 'answer' is a list"),
        ([], r"rows.jsonl: it has no rows"),
    ],
)
def test_a_row_that_is_no_task_is_named_with_its_place(tmp_path, rows, message):
    with pytest.raises(TaskError, match=message):
        load(write(tmp_path / "rows.jsonl", *rows), answer_after="####")


def put(path, *lines):
    """A file of these lines: rows, or what stands where one should."""
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n")
    return path


GOOD = {"question": "q", "answer": "1"}
RAGGED = [
    # columns of the config, the good rows, the bad one, the message
    ({}, GOOD, {"question": "q"}, "no column 'answer'. It has 'question'"),
    ({"facts": ("level",)}, {**GOOD, "level": "3"}, GOOD, "no column 'level'. It has 'question', 'answer'"),
    (
        {"answer": "gold.value"},
        {"question": "q", "gold": {"value": "1"}},
        {"question": "q", "gold": {}},
        "'gold.value'. It has",
    ),
    ({}, GOOD, b'{"question": "q", "ans', "not valid JSON: Invalid control character at"),
    ({}, GOOD, b'{"question": "q\xff", "answer": "1"}', "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 15"),
]


@pytest.mark.parametrize(("columns", "good", "bad", "problem"), RAGGED)
def test_a_bad_row_stops_the_reading_or_is_skipped_and_counted(tmp_path, caplog, columns, good, bad, problem):
    path = put(tmp_path / "rows.jsonl", good, bad, good)
    with pytest.raises(TaskError) as caught:
        load_rows(JsonlRows(path=path, **columns), split="train")
    assert str(caught.value).startswith(f"{path}:2: ")
    assert problem in str(caught.value)
    assert str(caught.value).endswith('or leave such rows out with tasks.bad_rows = "skip".')
    tasks = load_rows(JsonlRows(path=path, bad_rows="skip", **columns), split="train")
    assert [task.id for task in tasks] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert f"1 rows are not tasks and were left out; the first: {path}:2: " in caplog.text


def test_bad_rows_of_a_directory_are_skipped_in_each_kind_of_file(tmp_path, caplog):
    put(tmp_path / "a.jsonl", GOOD, b"{oops", GOOD)
    (tmp_path / "b.json").write_text(json.dumps([{"question": "q"}, 7, GOOD]))
    tasks = load_rows(ParquetRows(path=tmp_path, bad_rows="skip"), split="train")
    assert [task.id for task in tasks] == ["a.jsonl:1", "a.jsonl:3", "b.json:row 2"]
    assert "3 rows are not tasks and were left out" in caplog.text


def test_a_line_that_is_no_row_is_given_with_its_text(tmp_path):
    path = put(tmp_path / "rows.jsonl", GOOD, b"{oops \xff", b"{oops")
    _, *bad = read_tasks(JsonlRows(path=path), split="train")
    assert [each.rule for each in bad] == ["unreadable"] * 2
    assert [json.loads(each.task.question) for each in bad] == [{"text": "{oops \ufffd"}, {"text": "{oops"}]


def test_rows_of_which_none_is_a_task_are_told_with_the_first(tmp_path):
    path = put(tmp_path / "rows.jsonl", {**GOOD, "answer": None}, b"{oops")
    with pytest.raises(
        TaskError, match=r"none of its 2 rows is a task\. .* The first that is no task: .*:1: its 'answer' is empty"
    ):
        load(path, bad_rows="skip")
    with pytest.raises(TaskError, match=r"left under limit = 3\. Loosen that\. The first that is no task: .*:1: its 'answer'"):
        load(path, bad_rows="skip", limit=3)


def test_a_directory_in_place_of_a_file_is_called_one_and_a_file_in_it_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"cannot be read: it is a directory\. Give the path of a JSONL file\.$"):
        load_rows(JsonlRows(path=tmp_path), split="train")
    put(tmp_path / "train.jsonl", GOOD)
    with pytest.raises(TaskError, match=r"it is a directory\. Give the path of a JSONL file, as \S*/train\.jsonl\.$"):
        load_rows(JsonlRows(path=tmp_path), split="train")


def test_filters_that_leave_nothing_are_named(tmp_path):
    with pytest.raises(TaskError, match="none of its 1 rows is left under max_question_chars = 3"):
        load(write(tmp_path / "rows.jsonl", ROW), max_question_chars=3)


def test_a_missing_file_is_named_with_the_nearest(tmp_path):
    write(tmp_path / "train.jsonl", ROW)
    with pytest.raises(TaskError, match=r"trian\.jsonl: no such file\. Did you mean .*train\.jsonl\?"):
        load(tmp_path / "trian.jsonl")


def test_test_rows_come_from_a_file_of_their_own(tmp_path):
    train, test = write(tmp_path / "train.jsonl", ROW), write(tmp_path / "test.jsonl", ROW)
    assert load(train, split="test", test_path=test)[0].id == "test.jsonl:1"
    with pytest.raises(TaskError, match=r"Set tasks\.test_path"):
        load(train, split="test")


def test_an_epoch_holds_every_task_once_and_each_has_its_own_order():
    source = RowTasks(numbered(50), seed=1)
    first, second = ([source.task(epoch * 50 + position).id for position in range(50)] for epoch in (0, 1))
    assert set(first) == set(second) == {str(number) for number in range(50)}
    assert first != second != sorted(second, key=int)


def test_the_order_is_the_seeds_and_not_the_readers():
    one, other = RowTasks(numbered(50), seed=1), RowTasks(numbered(50), seed=1)
    assert [one.task(index) for index in range(200)] == [other.task(index) for index in reversed(range(200))][::-1]
    assert [one.task(index) for index in range(50)] != [RowTasks(numbered(50), seed=2).task(index) for index in range(50)]


def test_test_rows_keep_the_order_of_their_file(tmp_path):
    path = write(tmp_path / "rows.jsonl", *[ROW] * 20)
    source = make_tasks(JsonlRows(path=path, test_path=path), seed=1, split="test")
    assert [source.task(index).id for index in range(20)] == [f"rows.jsonl:{number}" for number in range(1, 21)]


def test_an_empty_set_is_refused():
    with pytest.raises(TaskError, match="empty"):
        RowTasks([], seed=0)


def test_a_hub_data_set_without_the_package_names_the_extra():
    if importlib.util.find_spec("datasets"):
        pytest.skip("the datasets package is installed")
    with pytest.raises(TaskError, match=r"pip install 'strop\[data\]'"):
        load_rows(HubRows(name="openai/gsm8k"), split="train")


class _Recipe(Config):
    tasks: TaskSource


def test_a_recipe_chooses_the_source_by_kind_and_an_unknown_kind_names_the_nearest():
    recipe = validate(_Recipe, {"tasks": {"kind": "jsonl", "path": "rows.jsonl"}}, place="recipe")
    assert recipe.tasks == JsonlRows(path=Path("rows.jsonl"))
    with pytest.raises(ConfigError, match="Did you mean 'jsonl'"):
        validate(_Recipe, {"tasks": {"kind": "json"}}, place="recipe")


def test_counting_steps_needs_a_solution_to_count_in():
    with pytest.raises(ValueError, match="Set answer_after"):
        TypeAdapter(TaskSource).validate_python({"kind": "jsonl", "path": Path("x"), "max_solution_steps": 2})


@needs_gsm8k
def test_gsm8k_is_read_whole_with_its_final_answers():
    train = load(DATA / "gsm8k" / "train.jsonl", answer_after="####")
    assert len(train) == 7473
    assert (train[0].answer, train[1].answer) == ("72", "10")
    easy = load(DATA / "gsm8k" / "train.jsonl", answer_after="####", max_solution_steps=2)
    assert 0 < len(easy) < len(train)
