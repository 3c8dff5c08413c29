"""Runs one program: shows its last value as IPython does, and errors with a traceback of its own frames.

Untrusted code runs in this process. Its record is not trusted: it may choose a text there, never an outcome. Every name that is
used after the program is bound before it, since a program may replace any of them.
"""

from __future__ import annotations

import atexit
import builtins
import linecache
import mmap
import os
import resource
import signal
import sys
import traceback
from _ast import Expr, Expression, Module, PyCF_ONLY_AST
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn, TextIO

from . import wire

MAX_FRAMES = 2_000  # twice the recursion limit; formatting millions takes longer than a program may run
SPARE_BYTES = 32 << 20  # for the traceback of a program without free memory
OWN_FILES = {__file__}


def run_program(
    code: str,
    shown: mmap.mmap,
    # Bound here: the program may replace any of them.
    exit_now: Callable[[int], NoReturn] = os._exit,
    getpid: Callable[[], int] = os.getpid,
    run_exit_hooks: Callable[[], None] = atexit._run_exitfuncs,
    modules: dict[str, ModuleType] = sys.modules,
) -> NoReturn:
    own_pid, streams = getpid(), (sys.stdout, sys.stderr)
    signal.signal(wire.FLUSH_SIGNAL, lambda number, frame: flush(streams))
    exit_code, kind, text = run(code, fresh_main(), "<code>", stderr=streams[1])
    try:
        if (threading := modules.get("threading")) is not None:
            threading._shutdown()  # waits for threads that are not daemons, as the interpreter does
        run_exit_hooks()
    except BaseException as error:
        if not exit_code:
            exit_code, kind, text = 1, wire.RECORD_ERROR, format_error(error)
    if getpid() != own_pid:  # a fork of the program that returned here; it has no record
        if kind == wire.RECORD_ERROR:
            attempt(streams[1].write, text)
    elif kind != wire.RECORD_NOTHING:
        write_record(shown, kind, text)
    flush(streams)
    exit_now(exit_code)


def run(
    code: str, names: dict[str, object], file: str, *, stderr: TextIO, make_text: Callable[[object], str] = repr
) -> tuple[int, bytes, str]:
    """Run the program. Returns its exit code, and kind and text of what it shows: its last value, or its error."""
    try:
        value = execute(code, names, file)
        return (0, wire.RECORD_NOTHING, "") if value is None else (0, wire.RECORD_ECHO, make_text(value))
    except SystemExit as error:
        return exit_code_of(error, stderr), wire.RECORD_NOTHING, ""
    except BaseException as error:
        return 1, wire.RECORD_ERROR, format_error(error)


def fresh_main() -> dict[str, object]:
    """The names of a new `__main__`. It is registered, since pickle and multiprocessing look it up."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main.__dict__


def execute(code: str, names: dict[str, object], file: str) -> object:
    """Run the program. Returns the value of a last statement that is an expression without a semicolon, otherwise None."""
    code = code.removeprefix("\ufeff")
    # Lines as the compiler counts them; a last line without a newline would shift the carets of a traceback.
    lines = [f"{line}\n" for line in code.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    linecache.cache[file] = (len(code), None, lines, file)
    tree = compile(code, file, "exec", PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, Module)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, Expr):
        tree.body.pop()
    else:
        last = None
    body: CodeType = compile(tree, file, "exec", dont_inherit=True)
    flags = body.co_flags & 0x1FF0000  # of `from __future__`
    tail = None if last is None else compile(Expression(last.value), file, "eval", flags, dont_inherit=True)
    exec(body, names)
    if last is None or tail is None:
        return None
    value: object = eval(tail, names)
    return None if _is_silenced(code, last) else value


def _is_silenced(code: str, last: Expr) -> bool:
    """Whether a semicolon follows the last statement, which hides its value as in IPython."""
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    lines = code.encode().splitlines(keepends=True)  # columns count bytes
    after = lines[last.end_lineno - 1][last.end_col_offset :]
    return after.lstrip().startswith(b";")


def exit_code_of(error: SystemExit, stderr: TextIO) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    attempt(lambda: stderr.write(f"{error.code}\n"))
    return 1


def format_error(
    error: BaseException, format_exception: Callable[[BaseException], list[str]] = traceback.format_exception
) -> str:
    """The traceback without the frames of the runner."""
    try:
        memory_bytes = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in OWN_FILES:
            frames = frames.tb_next
        error.__traceback__ = _fold(frames)
        if isinstance(error, SyntaxError) and error.text is None and str(error.filename).startswith("<c") and error.lineno:
            error.text = linecache.getline(str(error.filename), error.lineno)
        text = "".join(format_exception(error))
    except BaseException as broken:  # the text of the exception raises, or the program broke the formatter
        text = f"{type(error).__name__} (its traceback cannot be shown: {type(broken).__name__})\n"
    return _cut(text, wire.MAX_TRACEBACK_CHARS)


def _fold(frames: TracebackType | None) -> TracebackType | None:
    """The same frames; if there are more than `MAX_FRAMES`, the first half and the last half of that number."""
    count, frame = 0, frames
    while frame is not None:
        count, frame = count + 1, frame.tb_next
    if count <= MAX_FRAMES or frames is None:
        return frames
    last_of_head, first_of_tail = frames, frames
    for index in range(count - MAX_FRAMES // 2):
        assert first_of_tail.tb_next is not None
        first_of_tail = first_of_tail.tb_next
        if index == MAX_FRAMES // 2 - 2:
            last_of_head = first_of_tail
    last_of_head.tb_next = first_of_tail
    return frames


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def write_record(shown: mmap.mmap, kind: bytes, text: str) -> None:
    start, encoded = wire.STAMP.size + wire.RECORD_HEADER.size, encode_record(text)
    shown[start : start + len(encoded)] = encoded
    shown[wire.STAMP.size : start] = wire.RECORD_HEADER.pack(kind, len(encoded))


def encode_record(text: str) -> bytes:
    room = wire.RECORD_BYTES - wire.STAMP.size - wire.RECORD_HEADER.size
    # No character takes more than eight bytes, so the cut splits none.
    return _cut(text, room // 8).encode("utf-8", "backslashreplace")[:room]


def flush(streams: Iterable[TextIO]) -> None:
    for stream in streams:
        attempt(stream.flush)


def attempt(action: Callable[..., object], *arguments: str) -> None:
    """Run `action` and ignore errors: a program may have closed or replaced its streams."""
    try:
        action(*arguments)
    except BaseException:
        return
