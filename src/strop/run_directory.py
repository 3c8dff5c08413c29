"""The run directory: the files of a run, and how they are written so that a kill at any moment loses nothing.

    runs/<name>/  manifest.json  metrics.jsonl  updates.jsonl  events.jsonl  report.html
                  stages/<stage>/{rollouts/step-<k>.jsonl, checkpoints/step-<k>/, model/, eval/, done.json}

Files are replaced whole (temporary name, fsync, rename) or appended to by whole lines. A kill may cut the last line short;
readers drop such a line. docs/run-directory.md describes each file for other programs.
"""

from __future__ import annotations

import functools
import glob
import gzip
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, BinaryIO, Concatenate, ParamSpec, TypeVar

from strop.errors import RunError, StropError

_Keys = ParamSpec("_Keys")
_Content = TypeVar("_Content")

FORMAT_VERSION = 1

_ASIDE = ".old.tmp"  # behind the name of a directory that is being replaced
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON escapes half of a character beyond the first 65,536; two make one
_MAX_SHOWN = 200  # characters of a value in a message
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)$")


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn a full disk, or a place where nothing may be written, into one message that names the place and the remedy.

    Raises:
        RunError: the operating system refused, for example because the disk is full or a file is in the way. Any other
            exception passes through.
    """
    try:
        yield
    except StropError:
        raise
    except Exception as error:
        number = _os_error_behind(error)
        if number is None:
            raise
        raise RunError(
            f"{path}: cannot be written: {os.strerror(number)}. What was written before is intact. Free space there (or choose"
            " another place with --runs), then give the same command again: the run resumes from its last checkpoint."
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
        _replace(path, lambda file: file.write(text.encode()))


def parse_json(data: bytes | str) -> Any:
    """Return the JSON value in `data`.

    Raises:
        ValueError: it is no JSON in UTF-8, or it has a thousand levels, a number of thousands of digits or half of a character;
            the message says which.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        value = json.loads(text)
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ValueError(f"holds half of a character, \\u{half:04x}; write the whole character, or none") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"holds a number of more than {sys.get_int_max_str_digits()} digits") from error
    return value


def names_damage(
    read: Callable[Concatenate[RunDirectory, _Keys], _Content],
) -> Callable[Concatenate[RunDirectory, _Keys], _Content]:
    """Decorate a reader of a run directory: contents that strop would not write are a `RunError` that names the directory."""

    @functools.wraps(read)
    def checked(run: RunDirectory, /, *arguments: _Keys.args, **keys: _Keys.kwargs) -> _Content:
        try:
            return read(run, *arguments, **keys)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            fault = f"{type(error).__name__}: {error!s:.300}"
            raise RunError(f"{run.path}: a file is damaged ({fault}). Restore it from a copy.") from error

    return checked


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`. Raises `RunError` if it is missing, unreadable or damaged."""
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise RunError(f"{shortened(path)}: missing. Is {shortened(path.parent)} a run directory of strop?") from error
    except OSError as error:
        raise RunError(f"{shortened(path)}: cannot be read: {error.strerror}. Restore it.") from error
    except ValueError as error:
        raise RunError(f"{path}: {error}. Restore it, or start a run under another name.") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl file; [] if there is none. See `iter_lines`."""
    return list(iter_lines(path))


def iter_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a .jsonl file or of what `pack` made of it; none if there is neither.

    A last line that a kill cut short is left out.

    Raises:
        RunError: the file cannot be read, or another line is not a JSON object.
    """
    for number, line in enumerate(raw_lines(path), start=1):
        if line.endswith(b"\n") or is_whole_line(line):
            yield parse_line(line, f"{path}:{number}")


def raw_lines(path: Path) -> Iterator[bytes]:
    """As `iter_lines`, the lines as they are, with a last one that is cut short."""
    try:
        with _opened(path) as file:
            for line in file:
                yield line
                if not line.endswith(b"\n"):
                    return  # a run is writing it; what it appends meanwhile is no line of its own
    except FileNotFoundError:
        return
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{shortened(path)}: cannot be read: {why}. Restore it, or move it away.") from error


def _opened(path: Path) -> BinaryIO | gzip.GzipFile:
    try:
        return path.open("rb")
    except FileNotFoundError:
        if not packed(path).stat().st_size:  # which gzip reads as no content
            raise EOFError("it is empty") from None
        return gzip.open(packed(path))


def packed(path: Path) -> Path:
    """Where `pack` puts the content of `path`."""
    return path.with_name(f"{path.name}.gz")


def pack(path: Path, lines: Iterable[bytes] | None = None) -> None:
    """Compress a .jsonl file, with `lines` as its content if they are given. Readers of lines notice no difference."""
    with writing_to(path), path.open("rb") if lines is None else nullcontext() as plain:

        def fill(raw: IO[bytes]) -> None:
            with gzip.open(raw, "wb", compresslevel=1) as file:
                if plain is not None:
                    shutil.copyfileobj(plain, file, 2**20)
                file.writelines(lines or ())

        _replace(packed(path), fill)
        path.unlink(missing_ok=True)


def _unpack(path: Path) -> None:
    with gzip.open(packed(path)) as file:
        _replace(path, lambda raw: shutil.copyfileobj(file, raw, 2**20))


def _replace(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Replace `path` with what `fill` writes, whole or not at all, on disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as raw:
            fill(raw)
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(path)
        _sync(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def parse_line(line: bytes, place: str) -> dict[str, Any]:
    """Return the object in a line of a run's file. Raises `RunError` if there is none."""
    try:
        value = parse_json(line)
    except ValueError as error:
        raise RunError(f"{place}: {error}. Remove that line, then try again.") from error
    if not isinstance(value, dict):
        raise RunError(f"{place}: a JSON {type(value).__name__} instead of an object. Remove that line, then try again.")
    return value


def is_whole_line(line: bytes) -> bool:
    """Return whether a last line without a newline is complete, and lost only its newline, or was cut short by a kill."""
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def shortened(value: object) -> str:
    """Return `value` as text for a message, with at most 200 characters."""
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


class LineWriter:
    """Appends whole lines of JSON to one file. Opening a file removes a last line that a kill cut short, and unpacks it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing_to(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() and packed(path).exists():
                _unpack(path)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _mend_last_line(self._descriptor)

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
        """Return when everything appended so far is on disk."""
        with writing_to(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _mend_last_line(descriptor: int) -> None:
    """Drop a last line that a kill cut short; end one that lost only its newline, as `read_lines` reads it."""
    end = os.fstat(descriptor).st_size
    position, tail = end, b""
    while position > 0 and b"\n" not in tail:
        start = max(0, position - 65_536)
        tail = os.pread(descriptor, position - start, start) + tail
        position = start
    last = tail[tail.rfind(b"\n") + 1 :]
    if is_whole_line(last):
        os.write(descriptor, b"\n")
    elif last:
        os.ftruncate(descriptor, end - len(last))


def write_directory(path: Path, fill: Callable[[Path], object]) -> None:
    """Make directory `path` with what `fill` writes into it: complete or not there at all.

    A directory of that name that exists already is replaced: it stands aside until the new one has its name. What a kill leaves
    in between, `restore_directories` mends.
    """
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _restore(path)
        for half in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            shutil.rmtree(half, ignore_errors=True)
        # The name is new: a process of an earlier try, on a machine that was cut off, may still write into its own.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
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
        except Exception:  # half a directory only takes up space
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
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.updates = path / "updates.jsonl"  # a line for each update, of stages whose steps may have several
        self.events = path / "events.jsonl"
        self.report = path / "report.html"
        self.lock = path / ".lock"

    def stage(self, name: str) -> StageDirectory:
        return StageDirectory(self.path / "stages" / name)


class StageDirectory:
    """The paths of one stage of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"  # the stage's product: a directory that `transformers` loads
        self.adapter = path / "adapter"  # of the last policy, if `trainer.lora` is set: a directory that `peft` loads
        self.best = path / "best"  # the most accurate policy that a validation found, as `model`
        self.done = path / "done.json"  # written last: while it is missing, the stage is not finished
        self.lineage = path / "lineage.json"  # the digests of what the stage depends on
        self.stale = path / "stale.json"  # why the recipe and data would now give another result; missing if they would not
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"  # what engines with processes of their own print
        self.skipped = path / "skipped"  # batches of updates that were not finite
        self.evaluation = path / "eval" / "result.json"
        self.data = path / "data"  # what a stage without a model makes: tasks or conversations
        self.kept = self.data / "kept.jsonl"
        self.dropped = self.data / "dropped.jsonl"  # with reasons
        self.verdicts = self.data / "verdicts.jsonl"  # why each demonstration is imitated or not, in order
        self.outcomes = self.data / "outcomes.jsonl"  # how often each task was solved

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def rollouts(self, step: int) -> Path:
        """One line per finished rollout of the step, as it was scored, in order of arrival."""
        return self.path / "rollouts" / f"step-{step:06d}.jsonl"

    def selection(self, step: int) -> Path:
        """Why each rollout of the step was kept or dropped, and its advantage."""
        return self.path / "rollouts" / f"step-{step:06d}.selection.json"

    def timeline(self, step: int) -> Path:
        """What the engines did while the step was played."""
        return self.path / "rollouts" / f"step-{step:06d}.timeline.json"

    def validation(self, step: int) -> Path:
        """The rollouts of held-out tasks after the step, as `rollouts`."""
        return self.path / "validation" / f"step-{step:06d}.jsonl"


def cut_back(path: Path, stage: str, done_steps: int) -> list[Mapping[str, Any]]:
    """Take the stage's lines of later steps off `path`; returns those of it that stay."""
    lines = read_lines(path)
    kept = [line for line in lines if line["stage"] != stage or line["step"] <= done_steps]
    if len(kept) < len(lines):
        write_lines(path, kept)
    return [line for line in kept if line["stage"] == stage]


def copy_lines(path: Path, source: Path, stage: str) -> None:
    """Replace the stage's lines in `path` by those in `source`."""
    if path.exists() or source.exists():
        others = [line for line in read_lines(path) if line["stage"] != stage]
        write_lines(path, [*others, *(line for line in read_lines(source) if line["stage"] == stage)])


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace the .jsonl file `path` with `lines`, whole or not at all."""
    write_text(path, "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def file_digests(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each file. Threads hash files in parallel: hashing releases the GIL."""
    listed = list(paths)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(listed, pool.map(file_digest, listed), strict=True))


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
