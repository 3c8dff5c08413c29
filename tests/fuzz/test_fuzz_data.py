"""Damaged files of rows: every reader takes them, or names the file."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import JUNK, fuzz, survives
from hypothesis import strategies as st

from strop.tasks import make_tasks
from strop.tasks.conversations import read_conversations
from strop.tasks.files import read_rows
from strop.tasks.rows import JsonlRows, ParquetRows

KEYS = st.sampled_from(
    ["question", "answer", "messages", "role", "content", "tool_calls", "function", "name", "arguments", "id"]
)
VALUES = st.recursive(
    st.one_of(JUNK, KEYS, st.sampled_from(["user", "assistant", "tool", "What is 1 + 1?"]), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)
GOOD: dict[str, Any] = {
    "question": "What is 1 + 1?",
    "answer": "2",
    "messages": [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}],
}
ROWS = st.one_of(
    st.just(GOOD),
    st.dictionaries(KEYS, VALUES, max_size=4),
    st.dictionaries(KEYS, VALUES, max_size=2).map(lambda row: GOOD | row),
)
LINES = st.one_of(
    ROWS.map(lambda row: json.dumps(row).encode()),
    st.binary(max_size=20),
    st.sampled_from(
        [
            b"[" * 3000,
            b'{"question": ' * 3000,
            b"1" * 5000,
            b'{"answer": ' + b"9" * 5000 + b"}",
            b'"\\ud800"',
            b"\xff",
            b"null",
            b"[]",
        ]
    ),
)


@st.composite
def damaged_file(draw: st.DrawFn) -> bytes:
    content = b"\n".join(draw(st.lists(LINES, min_size=1, max_size=4)))
    return draw(
        st.sampled_from([content, content[: len(content) // 2], b"\xef\xbb\xbf" + content, content.replace(b"\n", b"\r\n")])
    )


def all_tasks(path: Path, kind: type[JsonlRows] | type[ParquetRows]) -> None:
    source = make_tasks(kind(path=path), seed=0, split="train")
    for index in range(source.num_tasks or 0):
        source.task(index)


READERS: dict[str, Callable[[Path], object]] = {
    "tasks": lambda path: all_tasks(path, JsonlRows),
    "conversations": lambda path: list(read_conversations(path)),
    "json": lambda path: list(read_rows(path)),
}


def test_damaged_rows_are_read_or_the_file_is_named(tmp_path: Path) -> None:
    def check(content: bytes) -> None:
        for name, read in READERS.items():
            path = tmp_path / ("rows.json" if name == "json" else "rows.jsonl")
            path.write_bytes(content)
            survives(lambda read=read, path=path: read(path), places={str(path)})

    fuzz(damaged_file(), check)


def in_a_child(check: Callable[[], None]) -> None:
    """Run `check` in a fork, whose failure fails here. pyarrow itself ends the process on a few damaged files (SIGABRT)."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            check()
        except BaseException:  # noqa: BLE001 - all that it says goes to the parent
            os.write(writing, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        said = told.read().decode()
    _, status = os.waitpid(child, 0)
    assert not said, said
    assert status in (0, signal.SIGABRT)


def test_damaged_parquet_files_are_read_or_the_file_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"

    def check(drawn: tuple[list[dict[str, Any]], int, int]) -> None:
        rows, place, byte = drawn
        try:
            table = pyarrow.Table.from_pylist(rows)
            parquet.write_table(table, path)
        except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):  # columns of mixed types
            parquet.write_table(pyarrow.Table.from_pylist([GOOD]), path)
        content = bytearray(path.read_bytes())
        if byte:
            content[place % len(content)] ^= byte
            path.write_bytes(content)
        in_a_child(lambda: survives(lambda: all_tasks(path, ParquetRows), places={str(path)}))
        in_a_child(lambda: survives(lambda: list(read_conversations(path)), places={str(path)}))

    fuzz(st.tuples(st.lists(ROWS, min_size=1, max_size=3), st.integers(0, 10**6), st.sampled_from([0, 1, 128, 255])), check)
