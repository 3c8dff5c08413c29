"""Where the processes of engines are born: imports everything once, then forks for each order that comes.

An import of torch and transformers takes seconds of processor time; a fork takes milliseconds and shares what was imported.
This process never computes: it has one thread, and no CUDA context, or a fork of it would not work.

Its arguments are two inherited descriptors: the link to its client and the shared weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback

from strop.engine.process_child import EngineOrder, live
from strop.engine.processes.nursery import MAX_ORDER_BYTES

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    link, shared_weights = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    woken, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    _tell(link, {"ready": len(os.listdir("/proc/self/task"))})  # threads; imports may start some
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == woken:
                os.read(woken, 4096)
                continue
            said, descriptors, _, _ = socket.recv_fds(link, MAX_ORDER_BYTES, 2)
            if not said:
                return 0  # the children get a death signal, and whoever keeps this process kills what is left
            _obey(link, shared_weights, json.loads(said), descriptors)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                _tell(link, {"died": ended[0], "status": os.waitstatus_to_exitcode(ended[1])})


def _obey(link: socket.socket, shared_weights: int, said: dict[str, object], descriptors: list[int]) -> None:
    if "kill" in said:
        with contextlib.suppress(ProcessLookupError):  # nobody else reaps it, so the number is still its own
            os.kill(int(str(said["kill"])), signal.SIGKILL)
        return
    nursery = os.getpid()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            link.close()
            status = _begin(nursery, shared_weights, said, descriptors)
        except BaseException:  # noqa: BLE001 - the last words of this process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for descriptor in descriptors:
        os.close(descriptor)
    _tell(link, {"born": said["fork"], "pid": pid})


def _begin(nursery: int, shared_weights: int, said: dict[str, object], descriptors: list[int]) -> int:
    """The life of a child. Returns its exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != nursery:
        return 1
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    theirs, log = descriptors
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    order = EngineOrder.model_validate_json(json.dumps(said["order"]))
    os.environ.update(order.environment)
    return live(order, socket.socket(fileno=theirs), shared_weights)


def _tell(link: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the client has gone: seen by the next look
        link.send(json.dumps(message).encode())


if __name__ == "__main__":
    sys.exit(main())
