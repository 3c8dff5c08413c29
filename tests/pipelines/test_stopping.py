"""What ends a command: a signal ends it in order, and nothing else is called one."""

import asyncio
import os
import signal

import pytest

from strop.cli.common import Stopped, run_until_stopped, sigterm_as_interrupt
from strop.reports.console import ConsoleProgress


def test_sigterm_ends_what_runs_in_order():
    ended = []

    async def work():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with sigterm_as_interrupt() as terminated, pytest.raises(Stopped):
        run_until_stopped(work(), ConsoleProgress())
    assert terminated == [signal.SIGTERM]
    assert ended == [True]


def test_a_cancellation_from_inside_is_no_signal():
    async def work():
        raise asyncio.CancelledError("from inside")

    with pytest.raises(asyncio.CancelledError, match="from inside"):
        run_until_stopped(work(), ConsoleProgress())
