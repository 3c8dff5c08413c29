"""The limits of one request, checked before anything is spent on it."""

from __future__ import annotations

from strop.errors import UserError
from strop.sandbox.protocol import AnswerPair, RunRequest, SessionLimits, VerifyRequest

MAX_CODE_BYTES = 262_144
MAX_STDIN_BYTES = 8_000_000
MAX_WALL_S = 600.0
MAX_MEMORY_MIB = 65_536
MAX_PROCESSES = 1024
MAX_FILE_MIB = 4096
MAX_OUTPUT_BYTES = 8_000_000
MAX_LEASE_S = 86_400.0
MAX_CASES = 1024  # tests of one program
_MAX_ANSWER_BYTES = 65_536  # a longer answer to verify is unreadable
_MAX_WORD_BYTES = 256
_PROFILES = ("bare", "numpy", "full")  # of programs


def run_refusal(request: RunRequest) -> str:
    """Why the request is refused; empty if it is not. Takes 2 us for a request within the limits."""
    return (
        _text_refusal("the code", request.code, MAX_CODE_BYTES)
        or ("the code holds a NUL character" if "\0" in request.code else "")
        or _text_refusal("the input", request.stdin, MAX_STDIN_BYTES)
        or _number_refusal("wall_s", request.wall_s, MAX_WALL_S)
        or ("" if request.cpu_s is None else _number_refusal("cpu_s", request.cpu_s, MAX_WALL_S * MAX_PROCESSES))
        or _space_refusal(request)
        or _number_refusal("output_bytes", request.output_bytes, MAX_OUTPUT_BYTES)
        or ("" if not request.profile else _profile_refusal(request.profile))
        or ("" if request.language == "python" else f"the language is {request.language!r}, and only 'python' runs here")
        or _text_refusal("session", request.session, _MAX_WORD_BYTES)
        or _text_refusal("id", request.id, _MAX_WORD_BYTES)
    )


def session_refusal(session: SessionLimits) -> str:
    """Why these limits of a session are refused; empty if they are not."""
    return (
        _space_refusal(session) or _number_refusal("lease_s", session.lease_s, MAX_LEASE_S) or _profile_refusal(session.profile)
    )


def require_verifiable(request: VerifyRequest) -> None:
    """Raise `UserError` for an impossible time limit. Each pair is checked by `is_readable`."""
    if refusal := _number_refusal("pair_wall_s", request.pair_wall_s, MAX_WALL_S):
        raise UserError(f"{refusal}.")


def is_readable(pair: AnswerPair) -> bool:
    """Whether all texts of the pair can be encoded and are within the limit."""
    texts = (pair.gold, pair.answer, *map("".join, pair.differences))
    return not any(_text_refusal("", text, _MAX_ANSWER_BYTES) for text in texts)


def _text_refusal(name: str, text: str, max_bytes: int) -> str:
    if len(text) <= max_bytes and not text.isascii():
        try:
            length = len(text.encode())
        except UnicodeEncodeError:
            return f"{name} holds a lone surrogate, which has no encoding"
    else:
        length = len(text)
    return "" if length <= max_bytes else f"{name} has more than {max_bytes} bytes, which is the limit"


def _space_refusal(limits: RunRequest | SessionLimits) -> str:
    return (
        _number_refusal("memory_mib", limits.memory_mib, MAX_MEMORY_MIB)
        or _number_refusal("max_processes", limits.max_processes, MAX_PROCESSES)
        or _number_refusal("file_mib", limits.file_mib, MAX_FILE_MIB, least=0)
    )


def _profile_refusal(profile: str) -> str:
    return "" if profile in _PROFILES else f"there is no profile {profile[:80]!r}; the profiles are {', '.join(_PROFILES)}"


def _number_refusal(name: str, number: float, most: float, *, least: float | None = None) -> str:
    if (number > 0 if least is None else number >= least) and number <= most:
        return ""
    shown = "a number of many digits" if isinstance(number, int) and abs(number) >= 10**15 else number
    return f"{name} is {shown}; it has to be {'above 0' if least is None else f'at least {least}'} and at most {most:g}"
