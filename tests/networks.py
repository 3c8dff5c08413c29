"""Machines in network namespaces of their own, joined by a switch whose cables can be cut."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from strop.cluster.ray_setup import RAY_ENVIRONMENT
from strop.cluster.start import LocalNode

ROOT = Path(__file__).parents[1]
_SLOW = ("netem", "delay", "100ms", "40ms", "loss", "1%", "rate", "4mbit")
_SLOW_WITHOUT_NETEM = ("tbf", "rate", "2mbit", "burst", "16kb", "latency", "400ms")


class Machines:
    """Use as `with`. Machine k has the address 198.18.0.(k + 1), from the block for tests of networks.

    Skips the test where there is no `ip`, or the user is not root; where STROP_NEEDS_MACHINES is set, as in CI, it fails.
    """

    def __init__(self, num: int, *, last: tuple[str, ...] = (), environment: Mapping[str, str] | None = None) -> None:
        """
        Args:
            last: what the command of the last machine begins with.
            environment: more variables of the last machine.
        """
        mark = secrets.token_hex(2)
        self._switch = f"strop{mark}"
        self.names = [f"strop-{mark}-{k}" for k in range(num)]
        self._ends = [f"st{mark}{k}" for k in range(num)]
        self.nodes = [
            LocalNode(address=f"198.18.0.{k + 1}", prefix=("ip", "netns", "exec", name)) for k, name in enumerate(self.names)
        ]
        self.nodes[-1] = replace(self.nodes[-1], prefix=(*self.nodes[-1].prefix, *last), environment=environment)

    def __enter__(self) -> Self:
        if shutil.which("ip") is None or os.geteuid() != 0:
            end_test = pytest.fail if "STROP_NEEDS_MACHINES" in os.environ else pytest.skip
            end_test("machines in network namespaces need root and iproute2")
        try:
            _ip("link", "add", self._switch, "type", "bridge")
            _ip("link", "set", self._switch, "up")
            for name, end, node in zip(self.names, self._ends, self.nodes, strict=True):
                _ip("netns", "add", name)
                _ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("link", "set", end, "master", self._switch, "up")
                _ip("-n", name, "address", "add", f"{node.address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def join(self, address: str) -> None:
        """Give this machine an address among the others."""
        _ip("address", "add", f"{address}/24", "dev", self._switch)

    def cut(self, number: int) -> None:
        """Whatever is sent to or from this machine from now on is lost without a message."""
        _ip("link", "set", self._ends[number], "down")

    def mend(self, number: int) -> None:
        _ip("link", "set", self._ends[number], "up")

    def slow(self, number: int) -> str:
        """Let its link have little bandwidth, and delay and lose packets where the kernel has netem. Return how."""
        for how in (_SLOW, _SLOW_WITHOUT_NETEM):
            with contextlib.suppress(subprocess.CalledProcessError):
                self._tc(number, "add", *how)
                return " ".join(how)
        raise AssertionError("the kernel has neither netem nor tbf")

    def hasten(self, number: int) -> None:
        self._tc(number, "delete")

    def pids(self, number: int) -> set[int]:
        """The processes of a machine."""
        found = subprocess.run(["ip", "netns", "pids", self.names[number]], check=True, capture_output=True, text=True)
        return set(map(int, found.stdout.split()))

    def _tc(self, number: int, act: str, *how: str) -> None:
        for namespace, device in (((), self._ends[number]), (("-n", self.names[number]), "eth0")):
            subprocess.run(["tc", *namespace, "qdisc", act, "dev", device, "root", *how], check=True, capture_output=True)

    def _remove(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                _ip("netns", "delete", name)  # with its end of the cable, and so the other end
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._switch)


def environment():
    """Of a command on a machine."""
    return {**os.environ, **RAY_ENVIRONMENT, "COLUMNS": "200"}


class Cluster:
    def __init__(self, machines, ray):
        self.machines, self.address, self._ray = machines, ray.address, ray

    def strop(self, *words, on=0):
        """Start a command on a machine; its output is one text."""
        return subprocess.Popen(
            [*self.machines.nodes[on].prefix, sys.executable, "-m", "strop.cli", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment(),
        )

    def run(self, *words, on=0, code=0, timeout_s=280):
        process = self.strop(*words, on=on)
        try:
            said, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        assert process.returncode == code, said
        return said


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
