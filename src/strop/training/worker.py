"""One rank of a trainer over several processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from strop.training.assembly import LearnerOptions, open_learner
from strop.training.batch import World
from strop.training.config import TrainerConfig
from strop.training.weights import Snapshot

_SIOCGIFADDR = 0x8915  # linux/sockios.h


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
        self._learner = open_learner(replace(options, config=config), World(self._rank, config.workers))


def _interface_of(address: str) -> str:
    """Return the name of the network interface that has an IPv4 address, and "lo" for this machine's own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return "lo"
