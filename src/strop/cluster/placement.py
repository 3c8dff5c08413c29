"""The `cluster` table of a recipe, and which node of a cluster runs what: a plan in numbers, before anything is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import Field

from strop.config import Config
from strop.errors import UserError


class ClusterConfig(Config):
    """A Ray cluster that runs already. Its nodes share the directories of the run and of the models.

    Ranks and replicas are counted where they belong: `trainer.workers`, `engine.replicas`, `engine.tensor_parallel`.
    """

    address: str = Field(
        default="auto", min_length=1, description="host:port of the cluster's head. auto: the cluster that this machine is in."
    )
    trainer_nodes: int = Field(
        default=0, ge=0, le=1024, description="Nodes over which trainer.workers are divided evenly. 0: as few as have the GPUs."
    )
    sandbox_nodes: int = Field(
        default=0, ge=0, le=1024, description="Nodes that run a code service each. 0: programs run where strop train runs."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster."""

    id: str  # Ray's
    address: str
    name: str  # for people: the address, and more where several nodes of a machine have the same
    gpus: float  # that are free
    all_gpus: float

    def __str__(self) -> str:
        return self.name


def planned_nodes(gpus: Iterable[int], *, prefix: str = "") -> list[Node]:
    """Return nodes that need not exist, with so many free GPUs each. Their names are numbers after `prefix`."""
    return [
        Node(id=str(number), address="", name=f"{prefix}{number}", gpus=num, all_gpus=num)
        for number, num in enumerate(gpus, start=1)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What a stage needs of a cluster."""

    ranks: int = 0  # of the trainer; 0: it is in the process of strop train
    trainer_nodes: int = 0  # 0: as few as have the GPUs
    engines: int = 0
    gpus_of_rank: int = 0
    gpus_of_engine: int = 0
    shares_gpus: bool = False  # engines are on the GPUs of the ranks
    sandboxes: int = 0

    @property
    def gpus(self) -> int:
        return self.ranks * self.gpus_of_rank + (0 if self.shares_gpus else self.engines * self.gpus_of_engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The node of each rank, engine and code service."""

    ranks: tuple[Node, ...]
    engines: tuple[Node, ...]
    sandboxes: tuple[Node, ...]
    gpus_of_rank: int = 0
    gpus_of_engine: int = 0
    devices: tuple[tuple[int, ...], ...] = ()  # of each engine that shares those of the ranks

    def lines(self) -> Iterator[str]:
        """Yield a line for each node that gets something."""
        parts = {"trainer rank": self.ranks, "engine": self.engines, "code service": self.sandboxes}
        nodes = {node.id: node for nodes in parts.values() for node in nodes}
        for node in sorted(nodes.values(), key=lambda node: node.name):
            counts = {what: Counter(each.id for each in of)[node.id] for what, of in parts.items()}
            yield f"{node}: " + ", ".join(f"{num} {what}{'s' * (num > 1)}" for what, num in counts.items() if num)


def place(nodes: Sequence[Node], roles: Roles) -> Placement:
    """Return where everything goes: ranks on as few nodes as the recipe says, engines and services where the least is.

    An engine's GPUs are of one node. Processes without GPUs may share a node's processors.

    Raises:
        UserError: the cluster is too small; says by how much.
    """
    free = {node.id: int(node.gpus) for node in nodes}
    load = dict.fromkeys(free, 0)

    def take(what: str, num_gpus: int, *, other_than: Sequence[Node] = ()) -> Node:
        fitting = [node for node in nodes if free[node.id] >= num_gpus and node not in other_than]
        if not fitting:
            raise UserError(_too_small(what, nodes, roles))
        # Where GPUs count, the smallest gap, so that whole nodes stay free; else the fewest processes.
        node = min(fitting, key=lambda node: (free[node.id] if num_gpus else 0, load[node.id]))
        free[node.id] -= num_gpus
        load[node.id] += 1
        return node

    # The last nodes, so that they are the same ones in every stage.
    sandboxes = tuple(reversed(nodes[-roles.sandboxes :] if roles.sandboxes else ()))
    if len(sandboxes) < roles.sandboxes:
        raise UserError(
            f"cluster.sandbox_nodes is {roles.sandboxes}, which is more than the nodes of the cluster: {len(nodes)}"
            f" ({', '.join(map(str, nodes))}). Add nodes, or lower the key to {len(nodes)}."
        )
    for node in sandboxes:
        load[node.id] += 1
    ranks: list[Node] = []
    if roles.ranks:
        num_nodes = roles.trainer_nodes or _fewest_nodes(roles, free)
        if roles.ranks % num_nodes:
            raise UserError(
                f"cluster.trainer_nodes is {num_nodes}, which does not divide trainer.workers = {roles.ranks}."
                " Choose a divisor."
            )
        each = roles.ranks // num_nodes
        for _ in range(num_nodes):
            node = take(f"{each} ranks of the trainer", each * roles.gpus_of_rank, other_than=ranks)
            ranks += [node] * each
    shared = list(_shared(ranks, roles.gpus_of_engine))[: roles.engines] if roles.shares_gpus else []
    if roles.shares_gpus and len(shared) < roles.engines:
        raise UserError(_too_small("an engine on the GPUs of the trainer's ranks", nodes, roles))
    engines = [node for node, _ in shared] or [take("an engine", roles.gpus_of_engine) for _ in range(roles.engines)]
    return Placement(
        ranks=tuple(ranks),
        engines=tuple(engines),
        devices=tuple(devices for _, devices in shared),
        sandboxes=sandboxes,
        gpus_of_rank=roles.gpus_of_rank,
        gpus_of_engine=roles.gpus_of_engine,
    )


def _shared(ranks: Sequence[Node], width: int) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Yield the node and the GPUs of each engine that fits on those of the ranks.

    Raises:
        UserError: the ranks leave GPUs of a node free, so that it is not known which ones Ray gives them.
    """
    for node, num in Counter(ranks).items():
        if num != int(node.all_gpus):
            raise UserError(
                f"engine.sleep: {num} ranks of the trainer are on {node}, which has {int(node.all_gpus)} GPUs. Engines share"
                " GPUs of nodes where the trainer has all. Change trainer.workers or cluster.trainer_nodes, or remove the key."
            )
        for first in range(0, num - width + 1, width):
            yield node, tuple(range(first, first + width))


def _fewest_nodes(roles: Roles, free: dict[str, int]) -> int:
    """Return the fewest nodes that have the GPUs of their share of the ranks; 1 if there are not enough."""
    for num in range(1, len(free) + 1):
        share = roles.ranks // num * roles.gpus_of_rank
        if roles.ranks % num == 0 and sum(gpus >= share for gpus in free.values()) >= num:
            return num
    return 1


def _too_small(what: str, nodes: Sequence[Node], roles: Roles) -> str:
    there = ", ".join(f"{node} with {int(node.all_gpus)} GPUs, {int(node.gpus)} of them free" for node in nodes)
    return (
        f"The cluster has no node for {what}. The recipe asks for {roles.ranks} ranks with {roles.gpus_of_rank} GPUs"
        f" each, {roles.engines} engines with {roles.gpus_of_engine} GPUs each on one node and"
        f" {roles.sandboxes} nodes with a code service: {roles.gpus} GPUs. There are {len(nodes)} nodes: {there}. Add nodes, or"
        " lower trainer.workers, cluster.trainer_nodes, engine.replicas, engine.tensor_parallel or cluster.sandbox_nodes."
    )
