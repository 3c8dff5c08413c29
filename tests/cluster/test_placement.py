"""Where ranks, engines and code services go, and what is said when they cannot be placed."""

import contextlib
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from strop.cluster.connection import Connection, _check_listens, unlike_nodes, versions
from strop.cluster.placement import Node, Placement, Roles, place
from strop.errors import UserError
from strop.pipeline.plan import roles_of
from strop.recipe.load import load_recipe

DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"


def nodes(*gpus):
    return [
        Node(id=str(k), address=f"10.0.0.{k}", name=f"10.0.0.{k}", cpus=64.0, gpus=n, all_gpus=8) for k, n in enumerate(gpus)
    ]


def ids(places):
    return [node.id for node in places]


def test_ranks_fill_nodes_evenly_and_engines_take_the_gpus_that_are_left():
    roles = Roles(ranks=16, trainer_nodes=2, engines=3, gpus_of_rank=1, gpus_of_engine=4)
    found = place(nodes(8, 8, 8, 4), roles)
    assert ids(found.ranks) == ["0"] * 8 + ["1"] * 8
    assert ids(found.engines) == ["3", "2", "2"]
    assert list(found.lines()) == [
        "10.0.0.0: 8 trainer ranks",
        "10.0.0.1: 8 trainer ranks",
        "10.0.0.2: 2 engines",
        "10.0.0.3: 1 engine",
    ]


def test_ranks_go_to_as_few_nodes_as_have_the_gpus():
    assert ids(place(nodes(8, 8, 8, 8), Roles(ranks=16, gpus_of_rank=1)).ranks) == ["0"] * 8 + ["1"] * 8
    assert ids(place(nodes(4, 4, 8, 4), Roles(ranks=12, gpus_of_rank=1)).ranks) == ["0"] * 4 + ["1"] * 4 + ["3"] * 4
    assert ids(place(nodes(0, 0), Roles(ranks=2)).ranks) == ["0", "0"]


def test_a_node_whose_gpus_are_taken_gets_no_ranks():
    assert ids(place(nodes(2, 8), Roles(ranks=4, gpus_of_rank=1)).ranks) == ["1"] * 4


def test_gpus_that_are_taken_are_waited_for_and_not_replaced_by_processors(monkeypatch):
    """The trainer and the engine of the stage before have just ended, and Ray does not know it yet."""
    keys = ["trainer.workers=4", "trainer.device=auto", "engine.own_process=true", "cluster.address=auto"]
    roles = roles_of(load_recipe(DEMO, keys), "rl", nodes(0))
    assert (roles.ranks, roles.gpus_of_rank, roles.gpus_of_engine) == (4, 1, 1)
    connection, looks = Connection.__new__(Connection), [nodes(0), nodes(3), nodes(8)]  # without Ray
    connection.nodes = lambda: looks.pop(0)
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert ids(connection.place(roles).ranks) == ["0"] * 4
    assert not looks
    connection.nodes = lambda: nodes(8)  # all are free: there is nothing to wait for
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(UserError, match="no node for 16 ranks"):
        connection.place(Roles(ranks=16, gpus_of_rank=1))


def test_an_address_of_something_else_is_refused_and_one_of_ray_is_not():
    """Ray itself would try without end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        for answer, is_ray in ((b"HTTP/1.1 400 Bad Request", False), (bytes(3) + b"\x04" + bytes(5), True), (b"", False)):
            serving = threading.Thread(target=_answer, args=(listening, answer))
            serving.start()
            with contextlib.nullcontext() if is_ray else pytest.raises(ValueError, match="something else listens there"):
                _check_listens(address)
            serving.join()
    for address in ("localhost", "127.0.0.1:6379.", ":6379"):
        with pytest.raises(ValueError, match="it is not host:port, nor auto"):
            _check_listens(address)


def _answer(listening, answer):
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 10)
        connection.sendall(answer)


def test_a_node_with_other_files_of_strop_or_without_a_package_is_named():
    here = versions()
    there = {**here, "strop": "0.1.0 (01234567)"}
    del there["transformers"]

    class Nodes:
        def nodes(self):
            return nodes(0, 0)

        def run(self, node, function, **_):
            return there if node.id == "1" else function()

    [(problem, remedy)] = unlike_nodes(Nodes())
    assert problem == f"node 10.0.0.1 has strop 0.1.0 (01234567) instead of {here['strop']}, no transformers."
    assert remedy == "Install the same versions on 10.0.0.1."


def test_without_gpus_the_load_is_spread():
    found = place(nodes(0, 0, 0), Roles(ranks=2, trainer_nodes=2, engines=2, sandboxes=2))
    assert ids(found.sandboxes) == ["2", "1"]
    assert ids(found.ranks) == ["0", "1"]
    assert ids(found.engines) == ["0", "2"]


def test_code_services_are_on_the_same_nodes_in_every_stage():
    cluster = nodes(8, 8, 8)
    with_trainer = place(cluster, Roles(ranks=16, trainer_nodes=2, gpus_of_rank=1, sandboxes=2))
    with_engines = place(cluster, Roles(engines=12, gpus_of_engine=2, sandboxes=2))
    assert with_trainer.sandboxes == with_engines.sandboxes


def test_engines_that_sleep_share_the_gpus_of_the_ranks_node_by_node():
    roles = Roles(ranks=16, gpus_of_rank=1, engines=3, gpus_of_engine=4, shares_gpus=True)
    found = place(nodes(8, 8), roles)
    assert ids(found.ranks) == ["0"] * 8 + ["1"] * 8
    assert ids(found.engines) == ["0", "0", "1"]
    assert found.devices == ((0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3))
    with pytest.raises(UserError, match=r"no node for an engine on the GPUs of the trainer's ranks. .* 5 engines with 4 GPUs"):
        place(nodes(8, 8), replace(roles, engines=5))
    with pytest.raises(UserError, match=r"engine\.sleep: 4 ranks of the trainer are on 10\.0\.0\.0, which has 8 GPUs"):
        place(nodes(8, 8), replace(roles, ranks=4))


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        (Roles(engines=1, gpus_of_engine=16), "no node for an engine. .* 1 engines with 16 GPUs each on one node .* 16 GPUs"),
        (
            Roles(ranks=16, trainer_nodes=2, gpus_of_rank=1),
            "no node for 8 ranks of the trainer.*2 nodes: 10.0.0.0 with 8 GPUs, 8",
        ),
        (Roles(ranks=3, trainer_nodes=2), "cluster.trainer_nodes is 2, which does not divide trainer.workers = 3"),
        (Roles(sandboxes=3), "no node for a code service"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_numbers(roles, says):
    with pytest.raises(UserError, match=says):
        place(nodes(8, 4), roles)


def test_nothing_is_placed_for_a_stage_that_needs_nothing():
    assert place(nodes(8), Roles()) == Placement(ranks=(), engines=(), sandboxes=())
