"""Reads rows, each with its place, from JSON, JSONL and Parquet files and from what the `datasets` package loads.

Everything streams: a file is never in memory whole, except one that is a single JSON list.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from strop.errors import TaskError
from strop.tasks.commits import keep_commit, kept_commit
from strop.tasks.readers import Row

Rows: TypeAlias = Iterator[tuple[str, Row]]
"""(place, row): the place is what an error names, as in train.jsonl:17."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRow:
    """What stands where a row should, and why it is none, in a sentence that does not name its place."""

    problem: str
    text: str


Found: TypeAlias = Iterator[tuple[str, Row | NoRow]]
"""As `Rows`, with what is no row where it stands."""

_EXTRA = "which is not installed. Install it with pip install 'strop[data]'"
_BATCH_ROWS = 1024
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON escapes half of a character beyond the first 65,536; two make one
_JSONL = "It must be a JSONL file in UTF-8"


def read_rows(path: Path) -> Rows:
    """The rows of a file by its ending (.jsonl, .json, .parquet), or of all such files of a directory by their names.

    Raises:
        TaskError: there is no such file, it is not what its ending says, or what stands in it is no row.
    """
    return _rows(find_rows(path))


def read_jsonl(path: Path) -> Rows:
    """One JSON object a line. Raises as `read_rows` does."""
    return _rows(find_jsonl(path))


def _rows(found: Found) -> Rows:
    for place, row in found:
        if isinstance(row, NoRow):
            raise TaskError(f"{place}: {row.problem}.")
        yield place, row


def find_rows(path: Path) -> Found:
    """As `read_rows`, which raises where this gives what is no row."""
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in _READERS and not each.name.startswith("."))
        if not files:
            raise TaskError(f"{path}: no file in it ends with {', '.join(_READERS)}. Give it rows in one of these forms.")
        for file in files:
            yield from find_rows(file)
        return
    yield from _READERS.get(path.suffix, find_jsonl)(path)


def find_jsonl(path: Path) -> Found:
    """One JSON object a line. Blank lines are skipped, and counted."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                row = row_of_line(line, number)
                if row is not None:
                    yield f"{path}:{number + 1}", row
    except OSError as error:
        raise unreadable(path, error) from error


def row_of_line(line: bytes, number: int) -> Row | NoRow | None:
    """What is line `number`, from 0, of a JSONL file; None where the line is blank."""
    try:
        text = line.decode("utf-8-sig" if number == 0 else "utf-8")
    except UnicodeDecodeError as error:
        return NoRow(problem=f"cannot be read: {error}. {_JSONL}", text=line.decode(errors="replace").strip())
    if not text.strip():
        return None
    try:
        row = _row(json.loads(text))
    except (ValueError, RecursionError) as error:
        return NoRow(problem=f"not JSON: {error}. Each line must be one JSON object", text=text.strip())
    return _whole(row) if _HALF.search(text) else row


def unreadable(path: Path, error: OSError) -> TaskError:
    """What is told of a JSONL file for which the system raised `error`."""
    if isinstance(error, FileNotFoundError):
        return missing(path)
    if path.is_dir():
        inside = sorted(path.glob("*.jsonl"))
        return TaskError(
            f"{path}: cannot be read: it is a directory. Give the path of a JSONL file{f', as {inside[0]}' if inside else ''}."
        )
    return TaskError(f"{path}: cannot be read: {error}. {_JSONL}.")


def find_json(path: Path) -> Found:
    """A list of JSON objects."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise missing(path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}. It must be a JSON list in UTF-8.") from error
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path}: not JSON: {error}. It must be one list of JSON objects.") from error
    if not isinstance(rows, list):
        raise TaskError(f"{path}: a JSON {type(rows).__name__}, not a list of objects. One object a line is a .jsonl file.")
    may_have_halves = _HALF.search(text) is not None
    for number, row in enumerate(rows):
        yield f"{path}:row {number}", _whole(_row(row)) if may_have_halves else _row(row)


def read_parquet(path: Path) -> Rows:
    """The rows of a Parquet file, a batch at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TaskError(
            f"{path}: a Parquet file is read with the `pyarrow` package, {_EXTRA}, or save the rows as JSONL."
        ) from error
    if not path.exists():
        raise missing(path)
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    yield f"{path}:row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(
            f"{path}: cannot be read as a Parquet file after {number} rows: {error}. Fetch or write it anew."
        ) from error


def read_hub(name: str, *, subset: str | None, split: str, revision: str | None, split_key: str = "split") -> Rows:
    """The rows of a data set of the hub, or of a directory that `datasets` loads.

    Work that goes on reads a data set of the hub at the commit at which it began to; that commit is kept the first time.

    Args:
        revision: a commit, a tag or a branch; the newest where it is None.
        split_key: what an error calls the key that says which split.

    Raises:
        TaskError: the `datasets` package, the data set or its split is missing, or there is another commit than the one meant.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise TaskError(
            f"{name}: a hub data set is read with the `datasets` package, {_EXTRA}, or save the rows as JSONL and use"
            ' kind = "jsonl".'
        ) from error
    is_local = Path(name).expanduser().is_dir()
    dataset = name if revision is None else f"{name}@{revision}"
    began_with = None if is_local else kept_commit(dataset)
    try:
        # A directory of files has no configurations: the published one is of the hub's copy.
        source = str(Path(name).expanduser()) if is_local else name
        rows = load_dataset(source, None if is_local else subset, split=split, revision=began_with or revision)
    except (ValueError, OSError) as error:  # unknown split or subset; not found, offline; a commit that is gone
        gone = f" It is read at commit {began_with}, as before; if that is gone from the hub, begin anew." if began_with else ""
        raise TaskError(
            f"{name}: its split {split!r} cannot be loaded: {str(error).rstrip('.')}. Check name, subset and {split_key}; a"
            f" machine without network needs a local directory as the name.{gone}"
        ) from error
    commit = None if is_local else _commit_of(rows)
    if commit is not None:
        meant = began_with or revision
        if meant is not None and _COMMIT.fullmatch(meant) and commit != meant:
            raise TaskError(
                f"{name}: commit {meant} is meant, but a machine that cannot reach the hub reads its newest copy, which is of"
                f" {commit}. Let it reach the hub; or, to read the copy, set revision to its commit and begin anew."
            )
        keep_commit(dataset, commit)
    for number, row in enumerate(rows):
        yield f"{name}[{split}] row {number}", row


def _commit_of(rows: Any) -> str | None:
    """At which commit `datasets` read `rows`: its copy of them lies in a directory of that name. None where it tells none."""
    directories = {Path(each["filename"]).parent.name for each in rows.cache_files}
    return next((name for name in directories if _COMMIT.fullmatch(name)), None)


_READERS: dict[str, Callable[[Path], Found]] = {".jsonl": find_jsonl, ".json": find_json, ".parquet": read_parquet}


def missing(path: Path) -> TaskError:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, names, n=1)
    hint = f" Did you mean {path.parent / nearest[0]}?" if nearest else ""
    return TaskError(f"{path}: no such file.{hint} Give the path of a file of rows.")


def _row(value: Any) -> Row | NoRow:
    if isinstance(value, dict):
        return value
    problem = f"a JSON {type(value).__name__}, not an object. Each row must be one JSON object"
    return NoRow(problem=problem, text=json.dumps(value, ensure_ascii=False))


def _whole(row: Row | NoRow) -> Row | NoRow:
    """`row`, but none where it holds a text that no file in UTF-8 can."""
    if isinstance(row, NoRow):
        return row
    half = half_of_a_character(json.dumps(row, ensure_ascii=False))
    return row if half is None else NoRow(problem=f"{half}. Write the whole character, or none", text=json.dumps(row))


def half_of_a_character(text: str) -> str | None:
    """What is told of `text` where half of a character stands alone, which UTF-8 does not have; None where none does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds half of a character, \\u{ord(text[error.start]):04x}"
    return None
