"""Says why one request is over a limit, before anything is spent on it."""

from __future__ import annotations

from dataclasses import fields

from strop.sandbox.protocol import AnswerPair, RunRequest, SessionLimits
from strop.sandbox.service.config import RequestLimits

_MAX_WORD_BYTES = 256  # of a profile, a language, an id, a session
_LONGEST_CHARACTER = 4  # bytes, in UTF-8
_RUN_WORDS = tuple(field.name for field in fields(RunRequest) if field.name in ("profile", "language", "session", "id"))


def run_refusal(request: RunRequest, limits: RequestLimits) -> str:
    """Why it is refused; empty when it is not. Costs 2 us for a request that is fine."""
    return (
        _text_refusal("the code", request.code, limits.max_code_bytes)
        or ("the code holds a NUL character" if "\0" in request.code else "")
        or _text_refusal("the input", request.stdin, limits.max_stdin_bytes)
        or _number_refusal("wall_s", request.wall_s, limits.max_wall_s)
        or ("" if request.cpu_s is None else _number_refusal("cpu_s", request.cpu_s, limits.max_wall_s * limits.max_processes))
        or _number_refusal("memory_mib", request.memory_mib, limits.max_memory_mib)
        or _number_refusal("max_processes", request.max_processes, limits.max_processes)
        or _number_refusal("file_mib", request.file_mib, limits.max_file_mib, least=0)
        or _number_refusal("output_bytes", request.output_bytes, limits.max_output_bytes)
        or next((why for name in _RUN_WORDS if (why := _word_refusal(name, getattr(request, name)))), "")
    )


def session_refusal(session: SessionLimits, limits: RequestLimits) -> str:
    """Why these limits of a session are refused; empty when they are not."""
    return (
        _number_refusal("memory_mib", session.memory_mib, limits.max_memory_mib)
        or _number_refusal("max_processes", session.max_processes, limits.max_processes)
        or _number_refusal("file_mib", session.file_mib, limits.max_file_mib, least=0)
        or _number_refusal("lease_s", session.lease_s, limits.max_lease_s)
        or _word_refusal("profile", session.profile)
    )


def is_readable(pair: AnswerPair, limits: RequestLimits) -> bool:
    """Whether both answers, and what is to be compared besides, have an encoding and a bearable length."""
    texts = (pair.gold, pair.answer, *map("".join, pair.differences))
    return not any(_text_refusal("", text, limits.max_answer_bytes) for text in texts)


def _text_refusal(name: str, text: str, max_bytes: int) -> str:
    if text.isascii():
        length = len(text)
    elif len(text) > max_bytes:
        return f"{name} has more than {len(text)} bytes, the limit is {max_bytes}"
    else:
        try:
            length = len(text.encode())
        except UnicodeEncodeError:
            return f"{name} holds a lone surrogate, which has no encoding"
    return "" if length <= max_bytes else f"{name} has {length} bytes, the limit is {max_bytes}"


def _word_refusal(name: str, word: str) -> str:
    if not word:
        return ""
    return _text_refusal(name, word, _MAX_WORD_BYTES) or ("" if word.isprintable() else f"{name} is not one printable word")


def _number_refusal(name: str, number: float, most: float, *, least: float | None = None) -> str:
    is_fine = (number > 0 if least is None else number >= least) and number <= most
    if is_fine:
        return ""
    is_long = isinstance(number, int) and abs(number) >= 10**15  # an int may have more digits than may be shown
    shown = "a number of many digits" if is_long else number
    return f"{name} is {shown}; it has to be {'above 0' if least is None else f'at least {least}'} and at most {most:g}"
