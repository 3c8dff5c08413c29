"""Says with a prompt's own calls what was written with JSON ones, as published data and demonstrators write them."""

from __future__ import annotations

from strop.rollout.call_format import CallFormat
from strop.rollout.chat import ChatFormat
from strop.rollout.tool_calls import CLOSING, OPENING, FailedCall, parse_tool_calls
from strop.tasks.readers import Unreadable

_GOES_ON = "a turn goes on behind its call, where sampling would stop"
_MAX_CALLS = 1000  # of a turn: what a demonstrator wrote is not limited


def retold(text: str, calls: CallFormat) -> tuple[str, int]:
    """`text` with its JSON calls in the form of `calls`, and how many there are. Raises `Unreadable`."""
    found = parse_tool_calls(text, max_calls=_MAX_CALLS)
    if failed := next((call for call in found if isinstance(call, FailedCall)), None):
        raise Unreadable(f"a call cannot be read: {failed.text}")
    if not calls.continues_turn:
        return text, len(found)
    if not found:
        return text, _num_own(text, calls)
    start = text.index(OPENING)
    if len(found) > 1 or not text.rstrip().endswith(CLOSING):
        raise Unreadable(_GOES_ON)
    [call] = found
    try:
        assert not isinstance(call, FailedCall)  # seen above
        return text[:start] + calls.write(call.name, call.arguments), 1
    except ValueError as error:
        raise Unreadable(str(error)) from error


def stops_at_call(text: str, calls: CallFormat) -> bool:
    """Whether sampling ends such a turn at its call, and not at an end of turn: the tool answers in the middle of it."""
    return calls.continues_turn and calls.has_closed_call(text)


def said_ids(text: str, chat: ChatFormat, calls: CallFormat) -> tuple[int, ...]:
    """What would have been sampled where `text` is said in one turn."""
    ids = chat.completion_ids(text)
    return ids[:-1] if stops_at_call(text, calls) else ids


def _num_own(text: str, calls: CallFormat) -> int:
    """Calls that are in the form of `calls` already; one at most. Raises `Unreadable`."""
    found = calls.parse(text, max_calls=1)
    if failed := next((call for call in found if isinstance(call, FailedCall)), None):
        raise Unreadable(f"a call cannot be read: {failed.text}")
    if found and not text.rstrip().endswith(calls.stop_strings):
        raise Unreadable(_GOES_ON)
    return len(found)
