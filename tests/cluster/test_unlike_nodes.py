"""What one node lacks is named, with the node and the remedy, before anything is spent."""

import os

import pytest

from networks import Cluster, Machines
from strop.cluster.start import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]
NODE = "198.18.0.2"


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """Two machines; the second has another torch, and does not see the directory of the runs."""
    place = tmp_path_factory.mktemp("unlike")
    metadata = place / "path" / "torch-2.8.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n")
    runs = place / "runs"
    runs.mkdir()
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(metadata.parents[1]), os.environ.get("PYTHONPATH")]))}
    with Machines(2, last=without(runs), environment=environment) as machines, LocalCluster(machines.nodes, cpus=1) as ray:
        yield Cluster(machines, ray), runs


def without(directory):
    """What a command begins with that sees nothing in a directory."""
    return ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {directory} && exec "$@"', "sh")


def test_the_doctor_names_each_lack_its_node_and_the_remedy(unlike):
    cluster, runs = unlike
    said = cluster.run("doctor", "recipes/demo.toml", "--cluster", cluster.address, "--runs", runs, code=2)
    said = " ".join(said.split())
    assert f"node {NODE} has torch 2.8.0 instead of" in said
    assert f"Install the same versions on {NODE}." in said
    assert f"node {NODE} does not see {runs}." in said
    assert f"Mount it on {NODE} at the same path" in said
    assert "2 problems found" in said


def test_a_run_is_refused_before_anything_is_begun(unlike):
    cluster, runs = unlike
    said = cluster.run("train", "recipes/demo.toml", "--cluster", cluster.address, "--runs", runs, code=2)
    assert f"error: node {NODE} has torch 2.8.0 instead of" in said
    assert not list(runs.iterdir())


def test_a_recipe_that_asks_for_more_nodes_is_refused_with_the_numbers(unlike):
    cluster, runs = unlike
    asks = ["--set", "trainer.workers=3", "--set", "cluster.trainer_nodes=3", "--dry-run"]
    said = cluster.run("train", "recipes/demo.toml", "--cluster", cluster.address, "--runs", runs, *asks, code=2)
    assert "The cluster has no node for 1 ranks of the trainer" in said
    assert f"There are 2 nodes: 198.18.0.1 with 0 GPUs, 0 of them free, {NODE} with 0 GPUs" in said


def test_an_address_where_nothing_listens_is_named(unlike):
    cluster, runs = unlike
    said = cluster.run("train", "recipes/demo.toml", "--cluster", "198.18.0.1:1", "--runs", runs, code=2)
    assert "error: cluster.address: no Ray cluster at '198.18.0.1:1'" in said
    assert "strop cluster up --local 2" in said
    assert not list(runs.iterdir())


def test_a_node_without_the_environment_of_its_engine_is_named_before_anything_is_begun(tmp_path):
    python = tmp_path / "vllm" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/true")  # which finds every package
    runs = tmp_path / "runs"
    server = ["engine.kind=vllm", f"engine.python={python}", "engine.replicas=2", "engine.kv_mib=64"]
    words = ["recipes/demo.toml", "--runs", runs, *(word for key in server for word in ("--set", key))]
    with Machines(2, last=without(python.parent)) as machines, LocalCluster(machines.nodes, cpus=1) as ray:
        cluster = Cluster(machines, ray)
        for command in (["train"], ["train", "--dry-run"], ["doctor"]):
            said = cluster.run(*command, *words, "--cluster", cluster.address, code=2)
            assert f"node {NODE}: engine.python: {python} does not exist." in " ".join(said.split())
    assert not runs.exists()
