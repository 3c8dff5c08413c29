"""Tasks stay on disk, whatever they are rows of, and are those that a list would hold."""

import errno
import gc
import json
import logging
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from strop.errors import TaskError
from strop.tasks import RowTasks, load_rows, make_tasks, open_rows
from strop.tasks.config import HubConfig, JsonlConfig, ParquetConfig
from strop.tasks.line_file import LineFile


def rows(num, *, length=10):
    return [{"question": f"{number} я " + "x" * length, "answer": str(number), "level": number % 3} for number in range(num)]


def write(path, content):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in content))
    return path


def written_as(kind, directory, content):
    """A config of a source of these rows."""
    if kind == "jsonl":
        return JsonlConfig(path=write(directory / "rows.jsonl", content), facts=("level",))
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="needs the extra strop[data]")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(content), directory / "rows.parquet")
        return ParquetConfig(path=directory / "rows.parquet", facts=("level",))
    pytest.importorskip("datasets", reason="needs the extra strop[data]")
    write(directory / "train.jsonl", content)
    return HubConfig(name=str(directory), facts=("level",))


def all_of(tasks):
    return [tasks[number] for number in range(len(tasks))]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_they_are_those_of_the_list_in_any_order(tmp_path, kind):
    config = written_as(kind, tmp_path, rows(40))
    tasks, expected = open_rows(config, split="train"), load_rows(config, split="train")
    assert [tasks[number] for number in reversed(range(40))] == expected[::-1]
    assert expected[7].facts == {"level": "1"}
    for number in (40, -1):
        with pytest.raises(IndexError):
            tasks[number]
    source = make_tasks(config, seed=3, split="train")
    of_list = RowTasks(expected, seed=3)
    assert [source.task(index) for index in range(90)] == [of_list.task(index) for index in range(90)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_their_texts_are_not_in_memory(tmp_path, kind):
    config = written_as(kind, tmp_path, rows(4000, length=10_000))
    load_rows(config, split="train")  # what is imported and cached by the first reading counts for neither
    size = 4000 * 10_000  # so large that what the process holds beside, a buffer or a table that grows, counts for little
    tracemalloc.start()
    tasks = RowTasks(open_rows(config, split="train"), seed=0)
    assert sum(len(tasks.task(index).question) for index in range(4000)) > size
    _, peak = tracemalloc.get_traced_memory()
    gc.collect()  # what is held is what a collection leaves
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 0.05 * size
    assert peak < (0.1 if kind == "jsonl" else 0.8) * size  # of Parquet 1024 rows are decoded at a time, and twice


def test_lines_that_are_no_tasks_are_passed_over_as_in_a_list(tmp_path, caplog):
    content = ["\ufeff" + json.dumps(rows(1)[0]), "", *rows(3), {"question": "q", "answer": ""}, "  ", *rows(9)]
    config = JsonlConfig(path=write(tmp_path / "rows.jsonl", content), bad_rows="skip", limit=9, max_question_chars=100)
    with caplog.at_level(logging.WARNING):
        tasks = open_rows(config, split="train")
    assert all_of(tasks) == load_rows(config, split="train")
    assert [task.id for task in all_of(tasks)] == [f"rows.jsonl:{line}" for line in (1, 3, 4, 5, 8, 9, 10, 11, 12)]


def test_windows_lines_are_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\r\n" for row in rows(3)))
    assert [task.answer for task in all_of(open_rows(JsonlConfig(path=path), split="train"))] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["{oops"], r"rows.jsonl:1: not JSON"),
        ([*rows(2), {"question": "q"}], r"rows.jsonl:3: no column 'answer'"),
        ([*rows(2), {"question": "q", "answer": ""}], r"rows.jsonl:3: .*Mend or remove the row"),
        ([], r"rows.jsonl: it has no rows"),
    ],
)
def test_each_mistake_is_met_before_any_task_is_asked_for(tmp_path, content, message):
    with pytest.raises(TaskError, match=message):
        open_rows(JsonlConfig(path=write(tmp_path / "rows.jsonl", content)), split="train")


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"rows.jsonl: no such file"):
        open_rows(JsonlConfig(path=tmp_path / "rows.jsonl"), split="train")
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="cannot be read"):
        open_rows(JsonlConfig(path=tmp_path / "rows.jsonl"), split="train")
    with pytest.raises(TaskError, match="cannot be read"):
        open_rows(JsonlConfig(path=tmp_path), split="train")


def test_a_row_that_is_another_than_at_first_is_refused_and_rows_that_are_added_are_not_seen(tmp_path):
    path = write(tmp_path / "rows.jsonl", rows(3))
    tasks = open_rows(JsonlConfig(path=path), split="train")
    with path.open("a") as file:
        file.write(json.dumps(rows(1)[0]) + "\n")
    assert [task.answer for task in all_of(tasks)] == ["0", "1", "2"]
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content.replace(b'"answer": "1"', b'"answer": "7"'))
    assert tasks[0].answer == "0"
    with pytest.raises(TaskError, match=r"rows\.jsonl:2: this line has changed since the file was opened\. Restore the file"):
        tasks[1]


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path):
    path = write(tmp_path / "rows.jsonl", rows(3))
    tasks = open_rows(JsonlConfig(path=path), split="train")
    write(tmp_path / "other.jsonl", [{"question": "q", "answer": "another"}]).replace(path)
    assert [task.answer for task in all_of(tasks)] == ["0", "1", "2"]


def test_several_threads_may_read_at_once(tmp_path):
    tasks = open_rows(JsonlConfig(path=write(tmp_path / "rows.jsonl", rows(500))), split="train")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: tasks[number % 500].answer, range(4000)))
    assert found == [str(number % 500) for number in range(4000)]


def test_a_last_line_without_its_end_counts_unless_a_kill_may_have_cut_it(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n\ntwo")
    assert all_of(LineFile(path)) == [b"one\n", b"\n", b"two"]
    assert all_of(LineFile(path, drops_cut_line=True)) == [b"one\n", b"\n"]


def test_a_disk_that_fails_is_told_with_file_and_line(tmp_path, monkeypatch):
    (tmp_path / "rows.txt").write_bytes(b"one\ntwo\n")
    lines = LineFile(tmp_path / "rows.txt")

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(TaskError, match=r"rows\.txt:2: cannot be read any more: .*Input/output error"):
        lines[1]
