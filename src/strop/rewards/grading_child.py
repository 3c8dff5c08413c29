"""The program of `grading_process`: compares the pair on each line of stdin, and writes one line about it to stdout.

    [limit in seconds, "algebra" or "math_verify", gold, answer]    ->    equal, unequal or unreadable

It executes nothing of what it reads. It ends when stdin does; a comparison that outlives the process that asked is ended by a
watchdog of its own, which hears even inside C code.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import signal
import sys

from strop.rewards.grading import equal_by_algebra
from strop.sandbox.inside import verify

READY = b"ready"
MEMORY_BYTES = 4 << 30

_GRACE_S = 1.0  # past the limit, at which whoever asked kills this process


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    verdicts = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not look like a verdict
    verify.load()
    gc.freeze()
    os.write(verdicts, READY + b"\n")
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin.buffer:
            limit_s, how, gold, answer = json.loads(line)
            faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=nowhere)
            verdict = _compare(how, gold, answer)
            faulthandler.cancel_dump_traceback_later()
            os.write(verdicts, verdict + b"\n")


def _compare(how: str, gold: str, answer: str) -> bytes:
    try:
        if how == "math_verify":
            return verify.compare(gold, answer)
        return verify.EQUAL if equal_by_algebra(gold, answer) else verify.UNEQUAL
    except Exception:  # noqa: BLE001 - what a pair raises, MemoryError and RecursionError among it, is that pair's
        return verify.UNREADABLE


if __name__ == "__main__":
    main()
