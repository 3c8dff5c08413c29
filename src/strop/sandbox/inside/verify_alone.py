"""Runs `verify.judge` on every line of stdin, in a plain process. A script: nothing else of strop is importable here."""

import ctypes
import gc
import os
import resource
import signal
import sys
import types

MEMORY_BYTES = 4 << 30
FREE = b"free"  # for the next line

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    package = types.ModuleType("strop_inside")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["strop_inside"] = package
    from strop_inside import verify  # type: ignore[import-not-found]

    if sys.platform == "linux":  # a loop inside C code hears nothing of the end of stdin; elsewhere it must be enough
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair, which closes stdin
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not look like an answer

    def emit(line: bytes) -> None:
        os.write(answers, line + b"\n")

    verify.load()
    gc.freeze()
    emit(FREE)
    for payload in sys.stdin.buffer:
        verify.judge(payload, emit)
        emit(FREE)


main()
