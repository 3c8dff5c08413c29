"""A Ray cluster of three machines in network namespaces, for all tests of a process."""

import pytest

from networks import Cluster, Machines
from strop.cluster.start import LocalCluster


@pytest.fixture(scope="module")
def cluster():
    with Machines(3) as machines, LocalCluster(machines.nodes, cpus=1) as ray:
        yield Cluster(machines, ray)
