"""Where ranks, engines and code services go, and what is said when they cannot be placed."""

import asyncio
import contextlib
import os
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.cluster.connection import Connection, take_engine_nodes
from strop.cluster.node_checks import nodes_that_do_not_see, unlike_nodes, versions
from strop.cluster.placement import Node, Placement, Roles, place
from strop.cluster.ray_setup import _check_listens
from strop.errors import ActorsLost, EngineLost, UserError
from strop.pipeline.plan import roles_of
from strop.pipeline.run import _place
from strop.recipe.load import load_recipe

DEMO = Path(__file__).parents[2] / "recipes" / "demo.toml"


def nodes(*gpus):
    return [Node(id=str(k), address=f"10.0.0.{k}", name=f"10.0.0.{k}", gpus=n, all_gpus=8) for k, n in enumerate(gpus)]


def ids(places):
    return [node.id for node in places]


class FakeRay:
    """What a connection asks of Ray: nodes with so many GPUs each, of which as many are free until a test says other ones."""

    class exceptions:  # noqa: N801 - Ray's name
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

        class RayActorError(RayError):
            pass

        class ActorUnavailableError(RayActorError):
            pass

    def __init__(self, *gpus):
        self.all_gpus, self.free, self.silent = gpus, list(gpus), set()
        self.errors = {}  # of the next calls to a node
        state = SimpleNamespace(available_resources_per_node=lambda: {str(k): {"GPU": n} for k, n in enumerate(self.free)})
        self._private = SimpleNamespace(state=state)
        self.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "0")

    def connect(self):
        connection = Connection(self)
        connection.options = lambda node: {"node": node.id}  # without Ray's own classes
        return connection

    def nodes(self):
        keys = {"Alive": True}
        return [
            {"NodeID": str(k), "NodeManagerAddress": f"10.0.0.{k}", "Resources": {"GPU": n}, **keys}
            for k, n in enumerate(self.all_gpus)
        ]

    def free_in(self, monkeypatch, *looks):
        """Let so many GPUs of each node be free, and after each pause as many as come next."""
        looks = list(looks)
        self.free = looks.pop(0)
        monkeypatch.setattr("time.sleep", lambda _: setattr(self, "free", looks.pop(0)))

    def remote(self, kind):
        return self

    def options(self, *, node, **_):
        run = SimpleNamespace(remote=lambda message: (node, message))
        return SimpleNamespace(remote=lambda: SimpleNamespace(run=run))

    def wait(self, refs, **_):
        return refs, []

    def get(self, ref, timeout):
        node, message = ref
        if self.errors.get(node):
            raise self.errors[node].pop(0)
        if node in self.silent:
            raise self.exceptions.RayError("timed out.")
        function, arguments = pickle.loads(message)
        return function(*arguments)


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


def test_a_stage_starts_again_on_the_nodes_that_are_left_though_they_are_fewer_than_the_code_services():
    recipe = load_recipe(DEMO, ["cluster.address=auto", "cluster.sandbox_nodes=3"])
    connection, noted = FakeRay(0, 0, 0).connect(), []
    context = SimpleNamespace(
        recipe=recipe,
        name="rl",
        event=lambda event, **fields: noted.append(fields),
        progress=SimpleNamespace(note=noted.append),
    )
    connection.set_aside(connection.nodes()[2], "it is silent")
    asyncio.run(_place(connection, context))
    assert noted[0]["nodes"] == ["10.0.0.0: 1 engine, 1 code service", "10.0.0.1: 1 code service"]


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
    ray = FakeRay(8)
    connection = Connection(ray)
    ray.free_in(monkeypatch, [0], [3], [8])
    assert ids(connection.place(roles).ranks) == ["0"] * 4
    assert ray.free == [8]
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))  # all are free: there is nothing to wait for
    with pytest.raises(UserError, match="no node for 16 ranks"):
        connection.place(Roles(ranks=16, gpus_of_rank=1))


def test_ranks_that_start_again_get_the_node_whose_gpus_are_free_in_a_moment(monkeypatch):
    """On a node with 8 GPUs and one with 4: half of the ranks would find room on each before Ray knows that all have ended."""
    ray = FakeRay(8, 4)
    connection, roles = Connection(ray), Roles(ranks=8, gpus_of_rank=1)
    assert ids(connection.place(roles).ranks) == ["0"] * 8
    ray.free_in(monkeypatch, [4, 4], [7, 4], [8, 4])
    assert ids(connection.place(roles).ranks) == ["0"] * 8
    ray.free_in(monkeypatch, [4, 4])  # another program has taken some
    monkeypatch.setattr("strop.cluster.connection._FREE_S", -1.0)
    assert ids(connection.place(roles).ranks) == ["0"] * 4 + ["1"] * 4


def test_engines_that_are_replaced_at_the_same_moment_get_gpus_of_their_own(monkeypatch):
    """Ray counts a process some time after it was begun; a node of two engines is lost."""
    ray = FakeRay(4, 1, 1, 1)
    connection = Connection(ray)
    connection.place(Roles(ranks=4, engines=2, gpus_of_rank=1, gpus_of_engine=1))
    placed = [connection.take_engine_node()[0] for _ in range(2)]
    assert ids(placed) == ["1", "2"]
    connection.set_aside(placed[0], "it was cut off")
    assert ids(connection.take_engine_node()[:1]) == ["3"]
    connection.give_back(placed[1], 1)
    assert ids(connection.take_engine_node()[:1]) == ["2"]
    ray.free[3] = 0  # Ray knows of that one by now
    monkeypatch.setattr("strop.cluster.connection._FREE_S", -1.0)
    with pytest.raises(EngineLost, match="no node for an engine"):
        connection.take_engine_node()


def test_a_choice_for_an_engine_waits_for_the_one_before(monkeypatch):
    connection, going = Connection(FakeRay(1, 1)), threading.Event()
    connection.place(Roles())
    connection.placement = replace(connection.placement, gpus_of_engine=1)
    look = connection.nodes

    def look_slowly():
        found = look()
        going.wait(0.2)  # the other one looks meanwhile
        return found

    monkeypatch.setattr(connection, "nodes", look_slowly)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: connection.take_engine_node()[0].id, range(2)))
    assert sorted(found) == ["0", "1"]


def test_what_an_ended_stage_still_looks_for_takes_nothing_from_the_next(monkeypatch):
    monkeypatch.setattr("strop.cluster.connection._LOOK_S", 0.02)
    ray = FakeRay(2, 1)
    connection = ray.connect()
    connection.place(Roles(ranks=2, gpus_of_rank=1, engines=1, gpus_of_engine=1))
    connection.take_engine_node()
    ray.free = [0, 0]
    with ThreadPoolExecutor() as threads:
        late = threads.submit(connection.take_engine_node)
        time.sleep(0.1)
        again = threads.submit(connection.place, Roles(ranks=2, gpus_of_rank=1, engines=1, gpus_of_engine=1))
        assert isinstance(late.exception(timeout=5), EngineLost)
        ray.free = [2, 1]
        assert ids(again.result(timeout=5).engines) == ["1"]


def test_engines_that_do_not_all_fit_take_nothing(monkeypatch):
    monkeypatch.setattr("strop.cluster.connection._FREE_S", 0.0)
    connection = FakeRay(3).connect()
    connection.place(Roles(ranks=2, gpus_of_rank=1, gpus_of_engine=1))
    monkeypatch.setattr("strop.cluster.connection._connection", connection)
    with pytest.raises(EngineLost):
        take_engine_nodes(2)
    assert len(take_engine_nodes(1)) == 1


def test_a_node_where_nothing_starts_that_answers_for_it_is_set_aside():
    ray = FakeRay(0, 0)
    connection, noted = ray.connect(), []
    connection.note = lambda event, **fields: noted.append((event, fields))
    _, other = connection.nodes()
    ray.silent = {other.id}
    with pytest.raises(ActorsLost, match=r"node 10\.0\.0\.1 does not answer: timed out"):
        connection.reach(other)
    assert ids(connection.nodes()) == ["0"]
    assert noted == [("node_lost", {"node": "10.0.0.1", "reason": "node 10.0.0.1 does not answer: timed out"})]
    ray.silent = set()  # it is not asked again, though it would answer
    with pytest.raises(ActorsLost, match=r"node 10\.0\.0\.1 is not used any more"):
        connection.run(other, os.getpid)


def test_a_node_whose_agent_has_ended_is_used_when_ray_has_started_it_again_and_set_aside_when_it_is_dead(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    ray, kinds = FakeRay(0, 0), FakeRay.exceptions
    connection = ray.connect()
    _, other = connection.nodes()
    ended = [kinds.RayActorError("it died"), kinds.ActorUnavailableError("it starts"), kinds.ActorUnavailableError("it starts")]
    ray.errors[other.id] = list(ended)
    assert connection.run(other, os.getpid) == os.getpid()
    ray.errors[other.id] = list(ended)
    assert connection.find_silent([other]) is None
    ray.errors[other.id] = [*ended, kinds.RayError("its node is dead")]
    assert connection.find_silent([other]) == other
    assert ids(connection.nodes()) == ["0"]


def test_a_node_that_answers_is_used():
    connection = FakeRay(0, 0).connect()
    for node in connection.nodes():
        connection.reach(node)
    assert ids(connection.nodes()) == ["0", "1"]


def test_what_not_all_nodes_see_is_named_and_nothing_is_left(tmp_path):
    class Nodes:
        def nodes(self):
            return nodes(0, 0)

        def run(self, node, function, mark):
            return function(mark) if node.id == "0" else None

    directory = tmp_path / "runs" / "demo"
    [(problem, remedy)] = nodes_that_do_not_see(Nodes(), directory)
    assert problem == f"node 10.0.0.1 does not see {directory}."
    assert remedy.startswith("Mount it on 10.0.0.1 at the same path")
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").touch()
    assert len(list(nodes_that_do_not_see(Nodes(), directory))) == 1


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


def test_a_node_whose_strop_cannot_say_its_version_is_named():
    class Nodes:
        def nodes(self):
            return nodes(0, 0)

        def run(self, node, function, **_):
            if node.id == "1":
                raise ModuleNotFoundError("No module named 'strop.cluster.node_checks'")
            return function()

    assert list(unlike_nodes(Nodes())) == [("node 10.0.0.1 has another strop.", "Install the same versions on 10.0.0.1.")]


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
        (
            Roles(sandboxes=3),
            r"^cluster\.sandbox_nodes is 3, .* of the cluster: 2 \(10\.0\.0\.0, 10\.0\.0\.1\)\. Add nodes, or lower .* 2\.$",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_numbers(roles, says):
    with pytest.raises(UserError, match=says):
        place(nodes(8, 4), roles)


def test_nothing_is_placed_for_a_stage_that_needs_nothing():
    assert place(nodes(8), Roles()) == Placement(ranks=(), engines=(), sandboxes=())
