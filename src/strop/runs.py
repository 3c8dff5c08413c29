"""The run directory: where everything of a run lies, and how it is written so that a kill at any moment loses nothing.

    runs/<name>/  manifest.json  metrics.jsonl  updates.jsonl  events.jsonl  report.html
                  stages/<stage>/{rollouts/step-<k>.jsonl, checkpoints/step-<k>/, model/, eval/, done.json}

Files are replaced whole (temporary name, fsync, rename) or appended to by whole lines. A last line without its end is what a
kill leaves; readers drop it. docs/run-directory.md describes each file for other programs.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strop.errors import RunError

FORMAT_VERSION = 1

_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG, errno.ENOTDIR, errno.EEXIST)
_ASIDE = ".old.tmp"  # behind the name of a directory that is being replaced
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)$")


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn a full disk, or a place where nothing may be written, into one message that names the place and the remedy.

    Raises:
        RunError: the disk is full, the place is read-only, or a file stands in its way; any other exception passes through.
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        number = _os_error_behind(error)
        if number not in _NO_PLACE:
            raise
        raise RunError(
            f"{path}: cannot be written: {os.strerror(number)}. What was written before is intact. Free space there (or choose"
            " another place with --runs), then give the same command again: the run goes on from its last checkpoint."
        ) from error


def _os_error_behind(error: BaseException | None) -> int | None:
    """The errno of `error`, or of what it arose from: safetensors names it in its text, torch.save raises over it."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno
        named = _RUST_OS_ERROR.search(str(error))
        if named:
            return int(named.group(1))
        error = error.__cause__ or error.__context__
    return None


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with `value` as JSON, whole or not at all, on disk when this returns.

    Keys keep their order: a recipe's stages have one.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace `path` with `text`, whole or not at all, on disk when this returns."""
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def read_json(path: Path) -> Any:
    """The JSON value in `path`. Raises `RunError` when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{path}: missing. Is {path.parent} a run directory of strop?") from error
    except ValueError as error:
        raise RunError(f"{path}: not valid JSON ({error}). Restore it, or start a run under another name.") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; [] when there is none. A last line that a kill cut short is left out.

    Raises:
        RunError: a line before the last is not JSON.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    values = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is "", or a line cut short
        try:
            values.append(json.loads(line))
        except ValueError as error:
            raise RunError(f"{path}:{number}: not valid JSON ({error}). Remove that line, then try again.") from error
    return values


class LineWriter:
    """Appends whole lines of JSON to one file. A line that a kill cut short is taken off when the file is opened again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing_to(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _drop_cut_line(self._descriptor)

    def append(self, value: Mapping[str, Any]) -> None:
        line = (json.dumps(value, sort_keys=True, allow_nan=False) + "\n").encode()
        with writing_to(self.path):
            size = os.fstat(self._descriptor).st_size
            written = 0
            try:
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except OSError:
                os.ftruncate(self._descriptor, size)  # never half a line before a whole one
                raise

    def sync(self) -> None:
        """Everything appended so far is on disk when this returns."""
        with writing_to(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _drop_cut_line(descriptor: int) -> None:
    end = os.fstat(descriptor).st_size
    position = end
    while position > 0:
        start = max(0, position - 65_536)
        block = os.pread(descriptor, position - start, start)
        newline = block.rfind(b"\n")
        if newline >= 0:
            position = start + newline + 1
            break
        position = start
    if position < end:
        os.ftruncate(descriptor, position)


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Make directory `path` with what `fill` writes into it: complete or not there at all (law 9).

    A directory of that name that exists already is replaced: it stands aside until the new one has its name. What a kill leaves
    in between, `restore_directories` mends.
    """
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _restore(path)
        temporary = path.with_name(f".{path.name}.tmp")
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        try:
            fill(temporary)
            for file in sorted(temporary.rglob("*")):
                if file.is_file():
                    _sync(file)
            _sync(temporary)
            if path.is_dir():
                path.rename(_aside(path))
            temporary.rename(path)
            _sync(path.parent)
        except Exception:  # whatever went wrong, half a directory only takes up room
            shutil.rmtree(temporary, ignore_errors=True)
            _restore(path)
            raise
        shutil.rmtree(_aside(path), ignore_errors=True)


def restore_directories(parent: Path) -> None:
    """Of each directory in `parent` that `write_directory` was replacing when a kill came: the new one, or else the old one."""
    for aside in parent.glob(f".*{_ASIDE}"):
        _restore(aside.with_name(aside.name[1 : -len(_ASIDE)]))


def _restore(path: Path) -> None:
    aside = _aside(path)
    if not aside.is_dir():
        return
    with writing_to(path):
        if path.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(path)
            _sync(path.parent)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}{_ASIDE}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunDirectory:
    """The paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def updates(self) -> Path:
        """Of stages whose steps may have several updates, a line for each; of others a step's line is its update's."""
        return self.path / "updates.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def stage(self, name: str) -> StageDirectory:
        return StageDirectory(self.path / "stages" / name)


class StageDirectory:
    """The paths of one stage of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def model(self) -> Path:
        """The stage's product: a directory that `transformers` loads."""
        return self.path / "model"

    @property
    def best(self) -> Path:
        """The most accurate policy that a validation found, likewise."""
        return self.path / "best"

    @property
    def done(self) -> Path:
        """Written last: while it is missing, the stage is not finished."""
        return self.path / "done.json"

    @property
    def lineage(self) -> Path:
        """What the stage stands on, by content."""
        return self.path / "lineage.json"

    @property
    def stale(self) -> Path:
        """Why what the stage made is not what the run's recipe and data would make now; missing where it is."""
        return self.path / "stale.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def rollouts(self, step: int) -> Path:
        """One line per finished rollout of the step, as it was scored, in order of arrival."""
        return self.path / "rollouts" / f"step-{step:06d}.jsonl"

    def selection(self, step: int) -> Path:
        """Why each rollout of the step was kept or dropped, and its advantage."""
        return self.path / "rollouts" / f"step-{step:06d}.selection.json"

    def validation(self, step: int) -> Path:
        """The rollouts of held-out tasks after the step, likewise."""
        return self.path / "validation" / f"step-{step:06d}.jsonl"

    @property
    def logs(self) -> Path:
        """What engines with processes of their own print."""
        return self.path / "logs"

    def timeline(self, step: int) -> Path:
        """What the engines did while the step was played."""
        return self.path / "rollouts" / f"step-{step:06d}.timeline.json"

    @property
    def skipped(self) -> Path:
        """Batches of updates that were not finite."""
        return self.path / "skipped"

    @property
    def evaluation(self) -> Path:
        return self.path / "eval" / "result.json"
