"""Runs `verify.judge_pair` on every line of stdin, in a plain process. A script: nothing else of strop is importable here.

[gold, answer, differences, is_fast (optional)]    ->    equal, unequal or unreadable
"""

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import types

MEMORY_BYTES = 4 << 30
READY = b"ready"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    package = types.ModuleType("strop_inside")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["strop_inside"] = package
    from strop_inside import verify  # type: ignore[import-not-found]

    if sys.platform == "linux":  # a loop inside C code does not notice the end of stdin
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes stdin
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.dup(1)
    os.dup2(2, 1)  # output of a library must not look like an answer

    def emit(line: bytes) -> None:
        os.write(answers, line + b"\n")

    verify.load()
    gc.freeze()
    emit(READY)
    for line in sys.stdin.buffer:
        emit(verify.judge_pair(*json.loads(line)))


main()
