"""Starts and watches a program, such as that of a server engine. The program ends when its starter ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from strop.errors import EngineLost

_REAPER = Path(__file__).with_name("reaper.py")
_ASK_S = 0.1  # between two looks whether it is ready
_GRACE_S = 10.0  # to end by itself after SIGTERM
_KILL_S = 30.0  # for the reaper to kill what is left; more than it allows itself
_TAIL_BYTES, _TAIL_LINES = 16_384, 20


class ServerProcess:
    """A running program. It and everything that it started ends with `stop`, or when this process ends, however it ends.

    A reaper is between the two processes. It has its own session, so that Ctrl-C in a terminal does not reach the program.
    """

    def __init__(self, command: str, log: Path, log_start: int, reaper: asyncio.subprocess.Process, said: str) -> None:
        self.log = log
        self.pid = int(said) if said.isdecimal() else 0  # of the program itself, which leads a process group of its own
        self._command, self._log_start, self._reaper = command, log_start, reaper
        self._failure = "" if self.pid else said  # why the command could not be run
        self._oom_kills = num_oom_kills()

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        is_ready: Callable[[], Awaitable[bool]],
        deadline_s: float,
    ) -> Self:
        """A program that is ready.

        Args:
            argv: the command; no shell comes between.
            env: all of its environment.
            log: its stdout and stderr are appended here; missing folders are made.
            is_ready: asked again and again until it says so. What it raises ends the program and is raised here.
            deadline_s: for all of that.

        Raises:
            EngineLost: the command could not be run, ended, or was not ready in time; names it and the tail of its log.
        """
        process = await cls._spawn(argv, env, log)
        try:
            async with asyncio.timeout(deadline_s):
                await process._become_ready(is_ready)
        except TimeoutError as error:
            await process.stop(grace_s=0.0)
            raise EngineLost(process.describe(f"was not ready within {deadline_s:g} s")) from error
        except BaseException:
            await process.stop(grace_s=0.0)
            raise
        return process

    @classmethod
    async def run(cls, argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None = None) -> str:
        """Run a program to its end. Returns what `describe` says if it failed, otherwise "".

        A call that is cancelled ends the program and everything that it started.
        """
        process = await cls._spawn(argv, env, log, cwd)
        try:
            await process.wait()
        finally:
            await process.stop()
        return "" if process._reaper.returncode == 0 else process.describe(process.end)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended. A program that hangs, or was stopped by a signal, is alive."""
        return self._reaper.returncode is None

    @property
    def end(self) -> str:
        """How it ended, as the rest of a sentence: "ended with exit code 1". Empty while it is alive."""
        code = self._reaper.returncode
        if code is None:
            return ""
        if self._failure:
            return f"could not be run: {self._failure}"
        if code < 0:
            return "was lost: its reaper was killed, and it with it"
        return _how_it_ended(code, oom_kills_before=self._oom_kills)

    async def wait(self) -> None:
        """Returns when it has ended."""
        await self._reaper.wait()

    def describe(self, what: str) -> str:
        """An error's text: the command, what happened to it, and the tail of its log."""
        process = f" (pid {self.pid})" if self.pid else ""
        return f"{self._command}{process} {what}. {end_of_log(self.log, self._log_start)}"

    async def stop(self, *, grace_s: float = _GRACE_S) -> None:
        """SIGTERM to its process group, and after `grace_s` SIGKILL to everything that it started. Safe to call twice.

        Raises `EngineLost` when something cannot be killed; else all is gone when it returns.
        """
        if self.is_alive and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                self._reaper.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reaper.wait(), grace_s)
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()  # the reaper kills what is left
        try:
            await asyncio.wait_for(self._reaper.wait(), _KILL_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._reaper.kill()
            raise EngineLost(self.describe(f"could not be killed within {_KILL_S:g} s")) from None

    @classmethod
    async def _spawn(cls, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None) -> Self:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            log_start = output.tell()
            reaper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-B", str(_REAPER), *argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
        assert reaper.stdin is not None
        assert reaper.stdout is not None
        try:
            said = await reaper.stdout.readline()
        except BaseException:
            reaper.stdin.close()
            raise
        return cls(shlex.join(argv), log, log_start, reaper, said.decode().strip())

    async def _become_ready(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Raises `EngineLost` when it ends before."""
        while not await is_ready() and self.is_alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASK_S):
                    await self._reaper.wait()
        if not self.is_alive:
            raise EngineLost(self.describe(f"{self.end} before it was ready"))


def end_of_log(log: Path, start: int) -> str:
    """The last lines of `log` after its first `start` bytes, which are an earlier program's, for an error's text."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
    except OSError as error:
        return f"Its log, {log}, cannot be read: {error.strerror}."
    return "\n  ".join([f"The end of its log, {log}:", *(lines or ["(nothing)"])])


def _how_it_ended(code: int, *, oom_kills_before: int) -> str:
    """The rest of a sentence that begins with a process's name.

    Args:
        code: of its reaper.
        oom_kills_before: `num_oom_kills` when it started.
    """
    if code - 128 not in [*signal.Signals]:
        return f"ended with exit code {code}"
    name = signal.Signals(code - 128).name
    if code - 128 == signal.SIGKILL and num_oom_kills() > oom_kills_before:
        return f"was killed by {name}: the machine ran out of memory (the kernel's OOM killer was at work)"
    return f"was killed by {name}"


def num_oom_kills() -> int:
    """How many processes the kernel has killed on this machine to get memory back."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines())
        return int(counts.get("oom_kill", 0))
    except OSError:
        return 0
