"""The connection of this program to Ray: a cluster that runs already, or one of this machine for as long as it is used."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from strop.cluster.node_checks import nodes_that_do_not_see, unlike_nodes
from strop.cluster.placement import ClusterConfig, Node, Placement, Roles, place
from strop.cluster.ray_setup import RAY_ENVIRONMENT, check_installed, first_line, start_or_join
from strop.errors import ActorsLost, EngineLost, MachineError, StropError, UserError

_ResultT = TypeVar("_ResultT")

_ANSWER_S = 30.0  # of an agent that has something to do
_COPY_S = 600.0  # of a file: a gigabyte over a slow network, to many nodes at once
_NUM_LOOKS, _LOOK_S = 7, 0.5  # for the answer of an agent that is only asked how it is
_START_S = 60.0
_FREE_S = 10.0  # until Ray knows that GPUs are free


class _Agent:
    """Runs functions on its node."""

    def run(self, message: bytes, *values: Any) -> Any:
        function, arguments = pickle.loads(message)
        return function(*arguments, *values)


class Connection:
    """Ray, the nodes that can be used, and what is placed on them.

    Attributes:
        ray: the module.
        directory: that all nodes see, or None if only this machine is used.
        placement: of the stage that runs.
        note: is called with a loss, the name of an event and its fields, in any thread.
    """

    def __init__(self, ray: Any, directory: Path | None = None) -> None:
        self.ray, self.directory = ray, directory
        self.note: Callable[..., None] = ignore
        self.placement: Placement | None = None
        self._here: str = ray.get_runtime_context().get_node_id()
        self._agents: dict[str, Any] = {}
        self._engines_left: list[tuple[Node, tuple[int, ...]]] = []  # with the GPUs that they share
        self._taken: Counter[str] = Counter()  # GPUs of each node that the stage's processes have, or will have
        self._free_before: dict[str, float] = {}  # GPUs of each node that were free before
        self._lost: set[str] = set()  # nodes that Ray may still take for alive
        self._lock = threading.Lock()  # over the agents
        self._stage = 0  # counts placements
        self._choosing = threading.Lock()  # over what is placed and taken

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive, this one first, with the GPUs that are not taken."""
        free = self.ray._private.state.available_resources_per_node()  # what another run took is not there for this one
        alive = [each for each in self.ray.nodes() if each["Alive"] and each["NodeID"] not in self._lost]
        num_at = Counter(each["NodeManagerAddress"] for each in alive)
        found = []
        for each in alive:
            number, address, gpus = each["NodeID"], each["NodeManagerAddress"], each["Resources"].get("GPU", 0.0)
            node = Node(
                id=number,
                address=address,
                name=address if num_at[address] == 1 else f"{address} ({number[:6]})",
                gpus=min(free.get(number, {}).get("GPU", 0.0), gpus - self._taken[number]),  # Ray counts the newest ones late
                all_gpus=gpus,
            )
            found.append(node)
        return sorted(found, key=lambda node: (node.id != self._here, node.address, node.id))

    def here(self) -> Node:
        return self.nodes()[0]

    def is_here(self, node: Node) -> bool:
        return node.id == self._here

    def options(self, node: Node, gpus: float = 0.0) -> dict[str, Any]:
        """Return Ray's options of an actor on `node`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {
            "num_cpus": 0,
            "num_gpus": gpus,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
        }

    def start(self, node: Node, function: Callable[..., _ResultT], *arguments: Any, values: Sequence[Any] = ()) -> Any:
        """Begin `function(*arguments, *values)` on `node`; return Ray's reference to its result.

        Args:
            values: references to results, which go from node to node and not through this one.
        """
        with self._lock:
            if node.id not in self._agents:
                options = {**self.options(node), "max_restarts": -1}  # that one is killed says nothing of its node
                self._agents[node.id] = self.ray.remote(_Agent).options(max_concurrency=16, **options).remote()
        return self._agents[node.id].run.remote(pickle.dumps((function, arguments)), *values)

    def run(self, node: Node, function: Callable[..., _ResultT], *arguments: Any, timeout_s: float = _ANSWER_S) -> _ResultT:
        """Return `function(*arguments)`, computed on `node`.

        Raises:
            ActorsLost: the node does not answer. What the function raises.
        """
        if self.is_here(node):
            return function(*arguments)
        if node.id in self._lost:
            raise ActorsLost(f"node {node} is not used any more")
        result: _ResultT
        try:
            result = self.wait(node, self.start(node, function, *arguments), timeout_s)
        except ActorsLost as error:
            if not self._is_of_agent(error) or not self._answers_again(node):
                raise
            result = self.wait(node, self.start(node, function, *arguments), timeout_s)
        return result

    def reach(self, node: Node) -> None:
        """Start what answers for a node, which may have just joined: only then does silence mean anything.

        Raises:
            ActorsLost: it does not start. The node is not used again.
        """
        try:
            self.run(node, os.getpid, timeout_s=_START_S)
        except ActorsLost as error:
            self.set_aside(node, str(error))
            raise

    def wait(self, node: Node, ref: Any, timeout_s: float = _ANSWER_S) -> Any:
        """Return what `start` on `node` has begun. Raises as `run`."""
        try:
            return self.ray.get(ref, timeout=timeout_s)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, StropError) else error from error
        except self.ray.exceptions.RayError as error:
            raise ActorsLost(f"node {node} does not answer: {first_line(error)}") from error

    def place(self, roles: Roles) -> Placement:
        """Set and return the placement of a stage, which has no processes yet. Raises `UserError` if there is no room."""
        with self._choosing:  # what the stage before still looks for is not for this one
            self._stage += 1
            self._taken.clear()
        found, nodes = self._choose(roles, self._free_before, takes=True)
        self.placement, self._free_before = found, {node.id: node.gpus for node in nodes}
        self._engines_left = list(zip(found.engines, found.devices or ((),) * len(found.engines), strict=True))
        return found

    def placement_of(self, roles: Roles) -> Placement:
        """Return where it would all go. Raises `UserError` if the cluster is too small."""
        return self._choose(roles)[0]

    def _choose(self, roles: Roles, free: Mapping[str, float] = {}, *, takes: bool = False) -> tuple[Placement, Sequence[Node]]:
        """Return a placement and the nodes before it. GPUs of processes that have just ended are free later, and waited for.

        Args:
            free: GPUs of nodes that are waited for even if fewer are enough: ranks would be divided over more nodes.
            takes: whether they are taken, so that the next placement gets others.

        Raises:
            UserError: the cluster is too small.
            EngineLost: another stage has begun meanwhile.
        """
        ends_at, stage = time.monotonic() + _FREE_S, self._stage
        while True:
            with self._choosing:
                if takes and stage != self._stage:
                    raise EngineLost("its stage has ended.")
                nodes = self.nodes()
                is_last = all(node.gpus == node.all_gpus for node in nodes) or time.monotonic() > ends_at
                with contextlib.nullcontext() if is_last else contextlib.suppress(UserError):
                    if is_last or all(node.gpus >= free.get(node.id, 0.0) for node in nodes):
                        found = place(nodes, roles)
                        if takes:
                            self._take(found)
                        return found, nodes
            time.sleep(_LOOK_S)

    def _take(self, found: Placement) -> None:
        self._taken.update(node.id for node in found.ranks for _ in range(found.gpus_of_rank))
        self._taken.update(node.id for node in found.engines for _ in range(0 if found.devices else found.gpus_of_engine))

    def take_engine_node(self) -> tuple[Node, int, tuple[int, ...]]:
        """Return the node of the next engine of the placement; when all are there, one that can hold another engine. With it
        the number of its GPUs, or those that it shares with the trainer.

        Raises:
            EngineLost: no node can.
        """
        assert self.placement is not None
        num = self.placement.gpus_of_engine
        if self._engines_left:
            node, shared = self._engines_left.pop(0)
            return node, 0 if shared else num, shared
        if self.placement.devices:
            raise EngineLost("an engine that shares the trainer's GPUs on a cluster is not replaced before the next stage.")
        try:
            return self._choose(Roles(engines=1, gpus_of_engine=num), takes=True)[0].engines[0], num, ()
        except UserError as error:
            raise EngineLost(str(error)) from error

    def give_back(self, node: Node, gpus: float) -> None:
        """Count the GPUs of a process of the stage that has ended as free."""
        with self._choosing:
            self._taken[node.id] -= int(gpus)

    def find_silent(self, nodes: Sequence[Node]) -> Node | None:
        """Return the first of `nodes` that does not say within some seconds how it is. It is not used again."""
        asked = {node: self.start(node, time.monotonic) for node in set(nodes) if not self.is_here(node)}
        missing = list(asked.values())
        # Looks are counted, not timed: when this process itself was held up, the nodes are not to blame.
        for _ in range(_NUM_LOOKS):
            if missing:
                missing = self.ray.wait(missing, num_returns=len(missing), timeout=_LOOK_S)[1]
        for node, ref in asked.items():
            try:
                self.wait(node, ref, 0.0)
            except ActorsLost as error:
                if self._is_of_agent(error) and self._answers_again(node):
                    continue
                self.set_aside(node, str(error))
                return node
        return None

    def _is_of_agent(self, error: ActorsLost) -> bool:
        """Whether the agent of a node has ended, which may say nothing of the node."""
        return isinstance(error.__cause__, self.ray.exceptions.RayActorError)

    def _answers_again(self, node: Node) -> bool:
        """Return whether Ray starts the agent of a node again. Until then its calls fail; on a dead node in another way."""
        ends_at = time.monotonic() + _START_S
        while time.monotonic() < ends_at:
            try:
                self.wait(node, self.start(node, os.getpid))
                return True
            except ActorsLost as error:
                if not isinstance(error.__cause__, self.ray.exceptions.ActorUnavailableError):
                    return False
            time.sleep(_LOOK_S)
        return False

    def set_aside(self, node: Node, why: str) -> None:
        """Use a node no more, though Ray may still take it for alive."""
        if node.id not in self._lost:
            self._lost.add(node.id)
            self.note("node_lost", node=str(node), reason=why)


def ignore(event: str, **fields: Any) -> None:
    """Note nothing."""


_connection: Connection | None = None
_num_users = 0  # also before Ray is started, which waits for its first use
_entering = threading.RLock()  # over these, and the start and end of Ray


@contextlib.contextmanager
def connected(config: ClusterConfig | None, directory: Path | None) -> Iterator[Connection | None]:
    """Use the cluster of a recipe meanwhile for all processes that this program starts.

    Without a config a Ray of this machine that is started in this block lasts until its end, so that stages share one.

    Args:
        directory: that all nodes must see; None: the caller checks the nodes.

    Raises:
        UserError: Ray is not installed, no cluster is at the address, a node has other versions than this one, or does not see
            the directory.
    """
    global _num_users
    if config is None:
        with _entering:
            _num_users += 1
        try:
            yield None
        finally:
            leave()
        return
    connection = enter("cluster", config, directory)
    try:
        if directory is not None:
            for problems in (unlike_nodes(connection), nodes_that_do_not_see(connection, directory.absolute())):
                for problem, remedy in problems:
                    raise UserError(f"{problem} {remedy}")
        yield connection
    finally:
        leave()


def enter(key: str, config: ClusterConfig | None = None, directory: Path | None = None) -> Connection:
    """Return the connection, which is opened for its first user. Without a config it is to a cluster of this machine."""
    global _connection, _num_users
    check_installed(key)
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    with _entering:
        if _connection is None:
            start_or_join(ray, key, config)
            _connection = Connection(ray, directory)
        _num_users += 1
        return _connection


def run_on(node: Node | None, function: Callable[..., _ResultT], *arguments: Any) -> _ResultT:
    """Return `function(*arguments)`, computed on `node`; None is this machine. Raises as `Connection.run`."""
    if node is None:
        return function(*arguments)
    assert _connection is not None
    return _connection.run(node, function, *arguments)


def copy_file(source: Node | None, path: Path, node: Node | None, to: Path) -> None:
    """Copy a file from one node to another, not through this process. None is this machine.

    Raises:
        MachineError: the other node has no room for it.
        ActorsLost: a node does not answer, or the file is not there in time.
    """
    assert _connection is not None
    here = _connection.here()
    content = _connection.start(source or here, path.read_bytes)
    ref, ends_at = _connection.start(node or here, _write, to, values=[content]), time.monotonic() + _COPY_S
    while _connection.ray.wait([ref], timeout=_ANSWER_S)[1] and time.monotonic() < ends_at:
        if (silent := _connection.find_silent([source or here, node or here])) is not None:
            raise ActorsLost(f"node {silent} does not answer")
    _connection.wait(node or here, ref, 0.0)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror}. Free space in {path.parent.parent}.") from error


def take_engine_nodes(num: int) -> list[tuple[Node, int, tuple[int, ...]]] | None:
    """Return what `take_engine_node` does for each of `num` engines, or None if only this machine is used."""
    if _connection is None or _connection.placement is None:
        return None
    taken: list[tuple[Node, int, tuple[int, ...]]] = []
    try:
        for _ in range(num):
            taken.append(_connection.take_engine_node())
    except EngineLost:
        for node, gpus, _ in taken:
            _connection.give_back(node, gpus)
        raise
    return taken


def placed() -> Placement | None:
    """Return where the processes of the running stage go, or None if only this machine is used."""
    return None if _connection is None else _connection.placement


def leave() -> None:
    """End the connection with its last user."""
    global _connection, _num_users
    with _entering:
        assert _num_users > 0
        _num_users -= 1
        if _connection is not None and not _num_users:
            _connection.ray.shutdown()
            _connection = None
