"""Who starts the sandbox: us as we are, a user without any right, or a process in a container with default settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from strop.sandbox import IsolationLevel

_HERE = Path(__file__).parent
_UNPRIVILEGED_UID = 64_123  # of no other user: RLIMIT_NPROC counts the processes of a user


class Context(StrEnum):
    AS_WE_ARE = "as-we-are"  # root, where the tests are run by root
    UNPRIVILEGED = "unprivileged"
    CONTAINER = "container"

    @property
    def launcher(self) -> list[str]:
        """What a command line is prefixed with."""
        if self is Context.UNPRIVILEGED and os.geteuid() == 0:
            return _drop_rights()
        if self is Context.CONTAINER:
            return [sys.executable, str(_HERE.parent / "container.py")]
        return []


def _drop_rights() -> list[str]:
    """Another user without capabilities, who can still reach the interpreter when it lies in root's closed home."""
    drop = [
        *("setpriv", f"--reuid={_UNPRIVILEGED_UID}", f"--regid={_UNPRIVILEGED_UID}", "--clear-groups"),
        *("--bounding-set=-all", "--inh-caps=-all"),
    ]
    closed = [path for path in reversed(Path(sys.base_prefix).parents) if not path.stat().st_mode & 0o001]
    if not closed:
        return drop
    # An open directory in place of the closed one, in a mount namespace of its own, with nothing but the interpreter in it.
    script = (
        'stage=$(mktemp -d) && mount --bind "$1" "$stage" && mount -t tmpfs -o mode=0755 none "$2" && mkdir -p "$1"'
        ' && mount --move "$stage" "$1" && rmdir "$stage" && shift 2 && exec "$@"'
    )
    return ["unshare", "--mount", "--propagation=private", "sh", "-ec", script, "sh", sys.base_prefix, str(closed[0]), *drop]


class Player:
    """A `hostile.player` process in one context, at one level."""

    def __init__(self, context: Context, level: IsolationLevel) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [*context.launcher, sys.executable, "-m", "hostile.player", level.value],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            cwd=_HERE.parent,
        )
        self.greeting = self._read()

    def play(self, name: str) -> Mapping[str, object]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> list[str]:
        """What is left of its sandbox."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        left: list[str] = []
        if self._process.poll() is None:
            self._process.stdin.close()
            if "level" in self.greeting:
                left = self._read()["left"]  # type: ignore[assignment]
        self._process.wait(timeout=30)
        self._process.stdout.close()
        self._said.close()
        return left

    def _read(self) -> Mapping[str, object]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            self._process.wait(timeout=30)
            self._said.seek(0)
            raise AssertionError(f"the player died ({self._process.returncode}): {self._said.read()[-3000:]}")
        content: Mapping[str, object] = json.loads(line)
        return content
