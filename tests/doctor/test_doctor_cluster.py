"""What the doctor says of the nodes of a cluster, from what each of them reports."""

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.cluster.placement import Node, place
from strop.doctor import cluster
from strop.recipe.load import load_recipe

NAMES = ("one", "two", "three")


class Reporting:
    """A connection to nodes that are all this machine, but for what some of them report."""

    def __init__(self, *, gpus=0):
        self.reports = {(name, cluster._level): ("namespaces", "") for name in NAMES}
        self.reports |= {(name, cluster._num_gpus): gpus for name in NAMES}
        self.ray = SimpleNamespace(wait=self.wait_there)
        self._nodes = [Node(id=name, address="127.0.0.1", name=name, gpus=gpus, all_gpus=gpus) for name in NAMES]

    def nodes(self):
        return self._nodes

    def run(self, node, function, *arguments, timeout_s=0.0):
        if (node.name, function) in self.reports:
            return self.reports[node.name, function]
        return function(*arguments)

    def start(self, node, function, *arguments, values=()):
        return function(*arguments, *values)

    def wait(self, node, ref):
        return ref

    def wait_there(self, refs, *, timeout, fetch_local):
        assert not fetch_local  # what is fetched before the clock starts is not measured

    def placement_of(self, roles):
        return place(self._nodes, roles)


@pytest.fixture
def examine(monkeypatch, tmp_path):
    """Examine the nodes of a connection; returns the findings by their checks, and the number of problems."""

    def examine(connection, *overrides):
        monkeypatch.setattr(cluster, "connected", lambda config, directory: contextlib.nullcontext(connection))
        monkeypatch.setattr(cluster, "_TRANSFER_BYTES", 1 << 20)
        recipe = load_recipe(Path("recipes/demo.toml"), ['cluster.address="auto"', *overrides])
        diagnosis = cluster.examine_cluster(recipe, tmp_path / "runs")
        assert not list(tmp_path.iterdir())
        return {finding.check: finding for finding in diagnosis.findings}, len(diagnosis.problems)

    return examine


def test_nodes_without_a_fault_are_measured_in_both_directions(examine):
    found, num = examine(Reporting())
    assert num == 0
    assert "within " in found["clocks"].detail
    pairs = [part.rpartition(" MB/s")[0].rsplit(" ", 1)[0] for part in found["ports"].detail.split("; ")]
    assert pairs == ["one to two", "two to one", "one to three", "three to one"]


def test_a_clock_that_is_off_is_named_with_how_far(examine):
    connection = Reporting()
    connection.reports["two", time.time] = time.time() + 90
    found, num = examine(connection)
    assert num == 1
    assert found["clocks"].detail.startswith("the clock of node two is off by +")
    assert found["clocks"].remedy.startswith("Synchronise the clock of two")


def test_a_node_whose_driver_shows_fewer_gpus_than_ray_was_given_is_named(examine):
    connection = Reporting(gpus=8)
    connection.reports["three", cluster._num_gpus] = 7
    found, num = examine(connection)
    assert num == 1
    assert found["GPUs"].detail == "node three gave Ray 8 GPUs, but torch finds 7 there."
    assert found["GPUs"].remedy.endswith("start its Ray with --num-gpus 7.")


def test_a_node_of_a_code_service_whose_isolation_is_too_low_is_named(examine):
    connection = Reporting()
    connection.reports["three", cluster._level] = ("none", "the kernel has no Landlock.")
    assert examine(connection)[1] == 0  # programs run on the first node
    found, num = examine(connection, "cluster.sandbox_nodes=2")
    assert num == 1
    assert found["sandbox"].detail == "node three: the kernel has no Landlock."
    assert found["sandbox"].remedy.startswith("Run `strop sandbox check` on three")


def test_a_port_that_is_closed_in_one_direction_is_named(examine):
    connection = Reporting()
    connection.reports["one", cluster._connect] = "timed out"
    found, num = examine(connection)
    assert num == 2  # from two, and from three
    assert found["ports"].detail == "node one does not reach three: timed out."
    assert found["ports"].remedy.startswith("Open all TCP ports")


def test_what_cannot_be_placed_is_one_problem(examine):
    found, num = examine(Reporting(), "cluster.sandbox_nodes=4")
    assert num == 1
    assert (
        found["placement"].detail
        == "cluster.sandbox_nodes is 4, which is more than the nodes of the cluster: 3 (one, two, three)."
    )
    assert found["placement"].remedy == "Add nodes, or lower the key to 3."
    assert found["engine"].detail == "no stage can be placed"
