"""A Ray cluster of three machines in network namespaces, for all tests of a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from networks import Machines

from strop.cluster.connection import RAY_ENVIRONMENT
from strop.cluster.local import LocalCluster

ROOT = Path(__file__).parents[2]


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


@pytest.fixture(scope="module")
def cluster():
    with Machines(3) as machines, LocalCluster(machines.nodes, cpus=1) as ray:
        yield Cluster(machines, ray)
