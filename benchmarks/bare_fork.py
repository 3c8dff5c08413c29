"""The limit that the code service is measured against: the same isolated fork of the same warm process, and nothing around it.

Each process forks a confined child with its work already in place, reads its output to the end and reaps it; no queue, no
supervisor, no transport. `calls_per_s` runs one such loop for each core. Run as a script, this file is the loop itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types


def calls_per_s(code: str, *, level: str, profile: str, seconds: float, num_loops: int) -> float:
    """Programs per second through `num_loops` loops at once."""
    from strop.sandbox.protocol import IsolationLevel
    from strop.sandbox.supervisor.fork_servers import BOOT, ENVIRONMENT, command

    more = {"code": code, "seconds": seconds, "inside": str(BOOT.parent)}
    arguments = command(__file__, level=IsolationLevel(level), profile=profile, **more)
    loops = [subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) for _ in range(num_loops)]
    return sum(float(loop.communicate()[0]) for loop in loops)


def _loop(settings: dict[str, object]) -> None:
    package = types.ModuleType("strop_inside")
    package.__path__ = [str(settings["inside"])]
    sys.modules["strop_inside"] = package
    from strop_inside import kernel, main, wire  # type: ignore[import-not-found]

    main.fix_addresses()
    cage, pid_namespace = main.start(settings)
    code = str(settings["code"]).encode()
    work = wire.WORK.pack(wire.JOB_PROGRAM, 0, 512 << 20, 5, 32, 16, len(code), 0) + code
    count, started_at = 0, time.monotonic()
    while time.monotonic() < started_at + float(str(settings["seconds"])):
        exchange = os.memfd_create("exchange", os.MFD_CLOEXEC)
        os.ftruncate(exchange, wire.RECORD_BYTES)
        os.pwrite(exchange, work, wire.RECORD_BYTES)
        wake, (output, to_write) = os.eventfd(1, os.EFD_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        kernel.check(kernel.libc.setns(pid_namespace, kernel.CLONE_NEWPID), "setns")
        kernel.check(kernel.libc.unshare(kernel.CLONE_NEWPID), "unshare a pid namespace")
        if (pid := os.fork()) == 0:
            main.live(cage, exchange, wake, to_write, "")
        os.close(to_write)
        text = b""
        while part := os.read(output, 65_536):
            text += part
        _, status = os.waitpid(pid, 0)
        assert status == 0, text
        assert text.startswith(wire.READY), text
        assert len(text) > 1, text
        for descriptor in (exchange, wake, output):
            os.close(descriptor)
        count += 1
    os.write(1, b"%f" % (count / (time.monotonic() - started_at)))


if __name__ == "__main__":
    _loop(json.loads(sys.argv[1]))
