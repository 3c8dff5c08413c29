"""Every reader of rows and of run files answers what is no row with one clear error that names the file."""

import pytest

from strop.cs336.supplement import _read_pairs
from strop.curation.rules import read_outcomes
from strop.errors import RunError, TaskError, UserError
from strop.evaluation.arena_hard import read_questions
from strop.run_directory import read_json, read_lines
from strop.tasks import load_rows, open_rows
from strop.tasks.conversations import read_conversations
from strop.tasks.lookup import read_facts
from strop.tasks.rows import JsonlRows
from strop.tools.search.bm25 import read_corpus
from strop.training.pair_making import read_candidates
from strop.training.preferences import read_preferences

READERS = {
    "tasks": lambda path: load_rows(JsonlRows(path=path), split="train"),
    "tasks on disk": lambda path: open_rows(JsonlRows(path=path), split="train"),
    "conversations": lambda path: list(read_conversations(path)),
    "preferences": read_preferences,
    "candidates": read_candidates,
    "facts": read_facts,
    "outcomes": read_outcomes,
    "questions": read_questions,
    "corpus": read_corpus,
    "pairs": _read_pairs,
    "run file": read_json,
    "lines": read_lines,
}
ROWS = {
    "nested": (b'{"question": ' + b"[" * 3000 + b"]" * 3000 + b"}", "nested too deeply"),
    "number": (b'{"question": ' + b"9" * 5000 + b"}", "number of more than"),
    "half": (b'{"question": "\\ud800"}', "half of a character"),
    "encoding": (b'{"question": "\xff"}', "(?i)UTF-8"),
    "cut": (b'{"question": ', "not valid JSON"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ROWS)
def test_a_row_that_is_none_is_one_error_with_its_reason(tmp_path, reader, kind):
    row, reason = ROWS[kind]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(row + b"\n")
    with pytest.raises((RunError, TaskError, UserError), match=reason) as raised:
        READERS[reader](path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("reader", sorted(READERS.keys() - {"pairs"}))
@pytest.mark.parametrize("kind", ["directory", "long name", "below a file", "unreadable"])
def test_a_path_that_is_no_file_is_one_error(tmp_path, reader, kind):
    path = tmp_path / ("x" * 300 if kind == "long name" else "rows.jsonl")
    if kind == "directory":
        path.mkdir()
    elif kind == "below a file":
        path.write_text("{}")
        path = path / "rows.jsonl"
    elif kind == "unreadable":
        path.symlink_to("rows.jsonl")  # a loop, which root cannot read either
    with pytest.raises((RunError, TaskError, UserError)) as raised:
        READERS[reader](path)
    assert str(path)[:150] in str(raised.value)
