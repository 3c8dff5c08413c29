"""Tasks stay on disk, whatever they are rows of, and are those that a list would hold."""

import datetime
import gc
import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from strop.errors import TaskError
from strop.tasks import RowTasks, load_rows, make_tasks, open_rows
from strop.tasks.files import RowFile, writing_rows
from strop.tasks.rows import HubRows, JsonlRows, ParquetRows


def rows(num, *, length=10):
    return [{"question": f"{number} я " + "x" * length, "answer": str(number), "level": number % 3} for number in range(num)]


def write(path, content):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in content))
    return path


def written_as(kind, directory, content):
    """A config of a source of these rows."""
    if kind == "jsonl":
        return JsonlRows(path=write(directory / "rows.jsonl", content), facts=("level",))
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="needs the extra strop[data]")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(content), directory / "rows.parquet")
        return ParquetRows(path=directory / "rows.parquet", facts=("level",))
    pytest.importorskip("datasets", reason="needs the extra strop[data]")
    write(directory / "train.jsonl", content)
    return HubRows(name=str(directory), facts=("level",))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_they_are_those_of_the_list_in_any_order(tmp_path, kind):
    config = written_as(kind, tmp_path, rows(40))
    tasks, expected = open_rows(config, split="train"), load_rows(config, split="train")
    assert [tasks[number] for number in reversed(range(40))] == expected[::-1]
    assert expected[7].facts == {"level": "1"}
    source = make_tasks(config, seed=3, split="train")
    of_list = RowTasks(expected, seed=3)
    assert [source.task(index) for index in range(90)] == [of_list.task(index) for index in range(90)]


def test_their_texts_are_not_in_memory(tmp_path):
    config = written_as("jsonl", tmp_path, rows(2000, length=10_000))
    load_rows(config, split="train")  # what is imported and cached by the first reading does not count
    size = 2000 * 10_000
    tracemalloc.start()
    tasks = RowTasks(open_rows(config, split="train"), seed=0)
    assert sum(len(tasks.task(index).question) for index in range(2000)) > size
    _, peak = tracemalloc.get_traced_memory()
    gc.collect()  # what is held is what a collection leaves
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 0.05 * size
    assert peak < 0.1 * size


def test_a_file_that_changes_later_is_read_as_it_was(tmp_path):
    path = write(tmp_path / "rows.jsonl", rows(3))
    tasks = open_rows(JsonlRows(path=path), split="train")
    write(path, [{"question": "q", "answer": "another"}])
    assert [task.answer for task in tasks] == ["0", "1", "2"]


def test_several_threads_may_read_at_once(tmp_path):
    tasks = open_rows(JsonlRows(path=write(tmp_path / "rows.jsonl", rows(500))), split="train")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: tasks[number % 500].answer, range(4000)))
    assert found == [str(number % 500) for number in range(4000)]


def test_any_rows_can_be_kept_on_disk_and_leave_no_file(tmp_path):
    expected = [{"text": "я\n" * number, "ids": tuple(range(number))} for number in range(30)]
    with RowFile(iter(expected), tmp_path) as kept:
        assert [kept[number] for number in reversed(range(30))] == expected[::-1]
        for number in (30, -1):
            with pytest.raises(IndexError):
                kept[number]
    assert list(tmp_path.iterdir()) == []


def test_rows_that_cannot_be_made_leave_no_file(tmp_path):
    def broken():
        yield 1
        raise TaskError("row 2 is none")

    with pytest.raises(TaskError, match="row 2"):
        RowFile(broken(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_json_cannot_hold_is_refused_and_leaves_no_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    with (
        pytest.raises(TaskError, match=r"rows\.jsonl: a row cannot be written as JSON: .*date is not JSON serializable"),
        writing_rows(path) as add,
    ):
        add({"question": "q", "day": datetime.date(2026, 1, 1)})
    assert list(tmp_path.iterdir()) == []
