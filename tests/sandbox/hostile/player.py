"""A process that plays cases: one name on each line of its input, one JSON report on each line of its output.

A process of its own, because what holds for a program depends on who started the sandbox, and because it counts what is left:
no other code may open a file or start a child in it meanwhile.

    python -m hostile.player namespaces < names
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys

from strop.errors import UserError
from strop.sandbox import IsolationLevel, Sandbox, SandboxConfig

from .cases import CASES
from .host import Host
from .play import play

_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    level = IsolationLevel(sys.argv[1])
    # What escapes from the sandbox is adopted by this process, where it is counted.
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("this process cannot adopt orphans")
    host = Host()
    before = host.at_rest()
    try:
        box = sandbox_at(level)
    except UserError as refusal:
        _tell({"refused": str(refusal)})
        return
    with box:
        _tell({"level": box.level})
        honest_code, honest_stdin, _ = host.honest_call
        box.run(honest_code, stdin=honest_stdin)
        for line in sys.stdin:
            _tell(dataclasses.asdict(play(box, CASES[line.strip()], host)))
    # Of this process a part of a test run has passed: it may have grown.
    _tell({"left": host.after(before).leftovers_since(before, counts_memory=False)})
    host.close()


def sandbox_at(level: IsolationLevel) -> Sandbox:
    """Raises `UserError` where this machine cannot give `level`."""
    # One fork server for each profile: the call after an attack then comes from the same one.
    return Sandbox(config=SandboxConfig(level=level, min_level=level, max_running=4, fork_servers=1))


def _tell(content: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
