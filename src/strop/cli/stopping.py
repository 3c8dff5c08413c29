"""Stops a command on Ctrl-C or SIGTERM in order, and says how far it had come."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from strop.reports.console import ConsoleProgress


class Stopped(Exception):  # noqa: N818 - named for what happened
    """A signal ended a run in order; the text says where, and is empty where no stage had begun."""

    def __init__(self, place: str, *, is_terminated: bool) -> None:
        super().__init__(place)
        self.is_terminated = is_terminated


def run_until_stopped(work: Coroutine[Any, Any, object], progress: ConsoleProgress) -> None:
    """As `asyncio.run`, with `progress` closed behind it. Raises `Stopped` where Ctrl-C or SIGTERM ends it."""
    before = signal.getsignal(signal.SIGTERM)
    is_terminated = False

    async def cancelled_by_sigterm() -> None:
        """As asyncio does at Ctrl-C, where a shell that put the process into the background has not made that ignored."""
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal is_terminated
            is_terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        await work

    with progress:
        try:
            asyncio.run(cancelled_by_sigterm())
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            if not is_terminated and not isinstance(error, KeyboardInterrupt):
                raise  # no signal did that: a defect, whose traceback says where
            raise Stopped(progress.place, is_terminated=is_terminated) from error
        finally:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def sigterm_as_interrupt() -> Iterator[list[int]]:
    """Where nothing else is done about it, SIGTERM raises what Ctrl-C does; the list has the signal once it has come."""
    come: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        come.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield come
    finally:
        signal.signal(signal.SIGTERM, before)
