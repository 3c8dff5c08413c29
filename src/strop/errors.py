"""The one family of exceptions. Whose fault it is decides the class, because that decides what happens next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question with the nearest of `known`, to put behind a sentence; "" if none is near."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def in_short(words: object) -> str:
    """Return the first 200 characters of `words` on one line."""
    return " ".join(str(words).split())[:200]


class StropError(Exception):
    """Everything that strop raises on purpose."""


class UserError(StropError):
    """A mistake that the user can mend. The message names the thing, its place and the remedy; exit code 2, no traceback."""


class NotThere(UserError):  # noqa: N818 - named for what was found
    """A file, program or model that is not there. A run does not begin without it; a plan names it."""


class ConfigError(UserError):
    """A recipe, or a `--set`, that cannot be understood or does not add up."""


class RunError(UserError):
    """A run directory that cannot be used as asked: another recipe's, half copied, or on a full disk."""


class ModelError(UserError):
    """A model or tokenizer that cannot do what the recipe asks of it."""


class TaskError(UserError):
    """A data set, or a row of it, that is not a task."""


class CannotLearnError(UserError):
    """A run that cannot learn in its current state: all groups tied, every tool call failing, zero gradient."""


class MachineError(StropError):
    """Our fault: a lost worker, a dead engine, overload. Retried on a fresh environment, or the trajectory is void."""


class NodeLost(MachineError):  # noqa: N818 - named for what happened
    """The supervisor of a sandbox died with calls in flight."""


class NodeGone(NodeLost):
    """The supervisor was lost before the call reached it: the call has not run there."""


class LinkBroken(MachineError):  # noqa: N818
    """A peer of the code service sent what is no message, fell silent, or hung up."""


class SessionLost(MachineError):  # noqa: N818
    """A session is gone: its program ended it, its lease ran out, or its supervisor or its service was lost."""


class Overloaded(MachineError):  # noqa: N818
    """The code service holds as much as it may; the same request is welcome a little later."""


class NoNodes(Overloaded):
    """The code service has no supervisor to run anything; it starts one again a little later."""


class EngineLost(MachineError):  # noqa: N818 - named for what happened
    """The engine died, hung or answered garbage."""


class ActorsLost(MachineError):  # noqa: N818 - named for what happened
    """One of several processes that make each call together died, hung or broke."""


class ActorsFailed(MachineError):  # noqa: N818 - named for what happened
    """One of several processes that make each call together raised an error, as it would again if they were started again."""


class TrainerLost(MachineError):  # noqa: N818 - named for what happened
    """A process of the trainer died, hung or broke, and the weights in memory with it."""


class WeightsNotProven(EngineLost):
    """The engine holds other weights than those that were published to it."""


class RequestTooLong(UserError):  # noqa: N818 - named for what happened
    """A request that can never fit in the engine's KV memory, whatever else is running."""


class ToolBroken(MachineError):  # noqa: N818
    """A tool that could not run at all. A wrong call is not this: it is a `ToolResult` that the policy reads."""


class DeadlineExceeded(MachineError):  # noqa: N818
    """Somebody waited too long; the message names who and for what."""
