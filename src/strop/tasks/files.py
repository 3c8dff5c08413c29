"""Rows, each with its place: read from JSON, JSONL and Parquet files and data sets of the hub, kept by number, and written."""

from __future__ import annotations

import json
import os
import pickle
import re
import tempfile
import weakref
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from strop.config import nearest_file
from strop.errors import TaskError
from strop.run_directory import parse_json, shortened, writing_to
from strop.tasks.readers import Row

_of_this_work: ContextVar[tuple[tuple[dict[str, str], Callable[[], None]], ...]] = ContextVar("_of_this_work", default=())


@contextmanager
def keeping_commits(commits: dict[str, str], *, tell: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Read data sets at their `commits` within this context, also in threads; record the commit of a new one and call `tell`.

    Of nested contexts, the innermost that has a data set decides its commit, and all record it.

    Args:
        commits: by data set, `org/name` or `org/name@tag`.
    """
    token = _of_this_work.set(((commits, tell), *_of_this_work.get()))
    try:
        yield
    finally:
        _of_this_work.reset(token)


Rows: TypeAlias = Iterator[tuple[str, Row]]
"""(place, row): the place is what an error names, as in train.jsonl:17."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRow:
    """A row that cannot be read: the problem, in a sentence without the place, and the text."""

    problem: str
    text: str


Found: TypeAlias = Iterator[tuple[str, Row | NoRow]]
"""As `Rows`, with unreadable rows in their places."""

_EXTRA = "which is not installed. Install it with pip install 'strop[data]'"
_BATCH_ROWS = 1024
_COMMIT = re.compile(r"[0-9a-f]{40}")


def read_rows(path: Path) -> Rows:
    """Yield the rows of a file by its ending (.jsonl, .json, .parquet), or of all such files of a directory by their names.

    Raises:
        TaskError: there is no such file, it does not have the format of its ending, or a row of it is none.
    """
    for place, row in find_rows(path):
        if isinstance(row, NoRow):
            raise TaskError(f"{place}: {row.problem}.")
        yield place, row


def find_rows(path: Path) -> Found:
    """As `read_rows`, but yield `NoRow` instead of raising."""
    if os.path.isdir(path):  # which is false for a name that is too long, where `path.is_dir` raises
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
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    yield f"{path}:{number}", _row_of_line(line)
    except OSError as error:
        raise _unreadable(path, error) from error


def _row_of_line(line: bytes) -> Row | NoRow:
    """Return what is in a line of a JSONL file that is not blank."""
    try:
        return _row(parse_json(line.removeprefix(BOM_UTF8)))
    except ValueError as error:
        return NoRow(
            problem=f"{error}. Each line must be one JSON object, in UTF-8", text=line.decode(errors="replace").strip()
        )


def _unreadable(path: Path, error: OSError) -> TaskError:
    """Return the error for a file of rows that the system could not read."""
    if isinstance(error, FileNotFoundError):
        return missing(path)
    if isinstance(error, IsADirectoryError):
        inside = sorted(path.glob("*.jsonl"))
        return TaskError(
            f"{path}: cannot be read: it is a directory. Give the path of a JSONL file{f', as {inside[0]}' if inside else ''}."
        )
    return TaskError(f"{shortened(path)}: cannot be read: {error.strerror}. Give the path of a file of rows.")


def find_json(path: Path) -> Found:
    """A list of JSON objects."""
    try:
        rows = parse_json(path.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise TaskError(f"{path}: {error}. It must be one list of JSON objects, in UTF-8.") from error
    if not isinstance(rows, list):
        raise TaskError(f"{path}: a JSON {type(rows).__name__}, not a list of objects. One object a line is a .jsonl file.")
    for number, row in enumerate(rows):
        yield f"{path}:row {number}", _row(row)


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
            # Without threads: in one of them an exception about a damaged page would end the process.
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                for row in batch.to_pylist():
                    yield f"{path}:row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"{path}: cannot be read as a Parquet file after {number} rows: {error}. Fetch or write it again."
        ) from error


def read_hub(name: str, *, subset: str | None, split: str, revision: str | None, split_key: str = "split") -> Rows:
    """The rows of a data set of the hub, or of a directory that `datasets` loads.

    A resumed run reads a data set of the hub at the commit of its first start, which is recorded then.

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
    kept = (commits[dataset] for commits, _ in _of_this_work.get() if dataset in commits)
    began_with = None if is_local else next(kept, None)
    try:
        # A directory of files has no configurations: the published one is of the hub's copy.
        source = str(Path(name).expanduser()) if is_local else name
        rows = load_dataset(source, None if is_local else subset, split=split, revision=began_with or revision)
    except (ValueError, OSError) as error:  # unknown split or subset; not found, offline; a commit that is gone
        gone = f" It is read at commit {began_with}, as before; if that is gone from the hub, start a new run."
        raise TaskError(
            f"{name}: its split {split!r} cannot be loaded: {str(error).rstrip('.')}. Check name, subset and {split_key}; a"
            f" machine without network needs a local directory as the name.{gone if began_with else ''}"
        ) from error
    # `datasets` names the directory of its copy by the commit.
    copies = () if is_local else {Path(each["filename"]).parent.name for each in rows.cache_files}
    commit = next(filter(_COMMIT.fullmatch, copies), None)
    if commit is not None:
        meant = began_with or revision
        if meant is not None and _COMMIT.fullmatch(meant) and commit != meant:
            raise TaskError(
                f"{name}: commit {meant} is meant, but a machine that cannot reach the hub reads its newest copy, which is of"
                f" {commit}. Let it reach the hub; or, to read the copy, set revision to its commit and start a new run."
            )
        for commits, tell in _of_this_work.get():
            if commits.get(dataset) != commit:
                commits[dataset] = commit
                tell()
    for number, row in enumerate(rows):
        yield f"{name}[{split}] row {number}", row


_READERS: dict[str, Callable[[Path], Found]] = {".jsonl": find_jsonl, ".json": find_json, ".parquet": read_parquet}


def missing(path: Path) -> TaskError:
    return TaskError(f"{path}: no such file.{nearest_file(path)} Give the path of a file of rows.")


def _row(value: Any) -> Row | NoRow:
    if isinstance(value, dict):
        return value
    problem = f"a JSON {type(value).__name__}, not an object. Each row must be one JSON object"
    return NoRow(problem=problem, text=json.dumps(value, ensure_ascii=False))


RowT = TypeVar("RowT")
RowT_co = TypeVar("RowT_co", covariant=True)


class IndexedRows(Protocol[RowT_co]):
    """Rows by number, from 0: a list, or a `RowFile`."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> RowT_co: ...


class RowFile(AbstractContextManager["RowFile[RowT]"], Generic[RowT]):
    """Rows by number, from 0, in a file without a name, which is gone when it is closed or the process ends.

    Several threads may read at once. Memory holds 8 bytes a row. A context.
    """

    def __init__(self, rows: Iterable[RowT], directory: Path | None = None) -> None:
        """Write `rows`, one at a time.

        Args:
            directory: where the file is; that of temporary files (TMPDIR) by default.
        """
        place = directory or Path(tempfile.gettempdir())
        self._ends = array("Q")
        with writing_to(place):
            place.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115 - `close` closes it
        self._close = weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        try:
            for row in rows:
                with writing_to(place):
                    file.write(pickle.dumps(row))
                self._ends.append(file.tell())
            with writing_to(place):
                file.flush()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int, /) -> RowT:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = self._ends[number - 1] if number else 0
        row: RowT = pickle.loads(os.pread(self._descriptor, self._ends[number] - start, start))
        return row

    def __iter__(self) -> Iterator[RowT]:
        return (self[number] for number in range(len(self)))

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._close()

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def writing_rows(path: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that adds a row to a new file of JSON lines. After an exception the file is as it was before.

    The function raises `TaskError` for a row with a value that JSON lacks, as dates and bytes of a Parquet file are.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("w", encoding="utf-8")

    def add(row: Mapping[str, Any]) -> None:
        try:
            line = json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n"
        except TypeError as error:
            raise TaskError(
                f"{path}: a row cannot be written as JSON: {error}. Save the column as text or as a number."
            ) from error
        with writing_to(path):
            file.write(line)

    try:
        yield add
        with writing_to(path):
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        with writing_to(path):
            file.close()
        temporary.unlink(missing_ok=True)
