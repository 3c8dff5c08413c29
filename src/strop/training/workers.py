"""A model that several processes divide: every call of `Learner`, made on all of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from strop.cluster.actors import ActorGroup
from strop.cluster.connection import placed
from strop.cluster.placement import Node
from strop.errors import ActorsLost, TrainerLost
from strop.training.assembly import LearnerOptions, open_learner
from strop.training.batch import TokenBatch
from strop.training.config import TrainerConfig
from strop.training.optimizer import UpdateReport
from strop.training.weights import Snapshot, WriteCheckpoint

_SIOCGIFADDR = 0x8915  # linux/sockios.h


class LearnerGroup:
    """The calls of `Learner`, each made on all ranks; the result is that of the first rank.

    When a rank dies, hangs or breaks, all are ended and every call raises `TrainerLost`, which names it.
    """

    def __init__(self, options: LearnerOptions) -> None:
        """Start the processes and wait until all have loaded the model.

        Raises as `open_learner`, and `TrainerLost`, and `UserError` where Ray is not installed.
        """
        config = options.config
        placement = placed()
        nodes = placement.ranks if placement is not None else ()
        gpus = placement.gpus_of_rank if placement is not None else 0
        if gpus:
            config = config.model_copy(update={"device": "cuda"})  # this process need not have one
        with _as_trainer():
            self._actors = ActorGroup(
                config.workers,
                what="the trainer",
                key="trainer.workers",
                timeout_s=config.worker_timeout_s,
                nodes=nodes,
                gpus=gpus,
            )
            places = [each.node for each in self._actors.processes]
            addresses = [node.address if len(set(places)) > 1 else "localhost" for node in places]
            ranks = [(config, rank, addresses[rank], places.count(places[rank])) for rank in range(config.workers)]
            try:
                self._actors.make(Rank, ranks)
                self._actors.call("open", options, addresses[0], self._actors.call("listen"))
                self.num_updates: int = self._actors.call("num_updates")
            except BaseException:
                self._actors.close()
                raise

    @property
    def nodes(self) -> list[Node | None]:
        """Return the node of each rank; None is this machine."""
        return [each.elsewhere for each in self._actors.processes]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._ask, name)

    def update(self, batch: TokenBatch, *functions: Callable[..., Any]) -> UpdateReport:
        report: UpdateReport = self._ask("update", batch, *functions)
        self.num_updates = report.update
        return report

    def load(self, directory: Path) -> None:
        self._ask("load", directory)
        self.num_updates = self._ask("num_updates")

    def snapshot_writer(self) -> WriteCheckpoint:
        self._ask("snapshot")
        return partial(self._ask, "write_snapshot")

    def close(self) -> None:
        """End all processes. May be called twice."""
        self._actors.close()

    def _ask(self, call: str, *arguments: Any) -> Any:
        with _as_trainer():
            return self._actors.call(call, *arguments)


@contextlib.contextmanager
def _as_trainer() -> Any:
    try:
        yield
    except ActorsLost as error:
        raise TrainerLost(f"{error}\nThe weights in memory are lost; what is left is the last checkpoint.") from error


class Rank:
    """A `Learner` that makes the calls that it is asked for. Only the first rank returns results."""

    def __init__(self, config: TrainerConfig, rank: int, address: str, ranks_here: int) -> None:
        """
        Args:
            config: of the trainer.
            rank: from 0.
            address: of this node; "localhost" if all ranks are on it.
            ranks_here: how many ranks are on this node.
        """
        self._rank, self._address = rank, address
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
        self._config = config.model_copy(update={"device": str(config.torch_device)})
        if self._config.device == "cuda":
            device = rank % torch.cuda.device_count()  # a rank that sees one device has that one
            torch.cuda.set_device(device)
            self._config = config.model_copy(update={"device": f"cuda:{device}"})
        self._store: TCPStore | None = None
        self._snapshots: list[Snapshot] = []

    def __call__(self, name: str, *arguments: Any) -> Any:
        if name == "listen":
            return self._listen()
        if name == "open":
            return self._open(*arguments)
        if name == "write_snapshot":
            return self._snapshots.pop().write(*arguments)
        found = getattr(self._learner, name)
        result = found(*arguments) if callable(found) else found
        if isinstance(result, Snapshot):
            self._snapshots[:] = [result]
            return None
        return result if self._rank == 0 else None

    def _listen(self) -> int | None:
        """Open, on the first rank, the port at which the ranks find each other. Return it."""
        if self._rank:
            return None
        self._store = TCPStore(self._address, 0, self._config.workers, is_master=True, wait_for_workers=False)
        return self._store.port

    def _open(self, options: LearnerOptions, host: str, port: int) -> None:
        config, timeout = self._config, timedelta(seconds=self._config.worker_timeout_s)
        # The host name of a node need not resolve to the address by which the others reach it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_of(self._address))
        dist.init_process_group(
            "gloo" if config.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=self._store or TCPStore(host, port, config.workers, timeout=timeout),
            rank=self._rank,
            world_size=config.workers,
            timeout=timeout,
        )
        from strop.training.sharded import world_of  # FSDP takes a second to import

        self._learner = open_learner(replace(options, config=config), world_of(config, self._rank))


def _interface_of(address: str) -> str:
    """Return the name of the network interface that has an IPv4 address, and "lo" for this machine's own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return "lo"
