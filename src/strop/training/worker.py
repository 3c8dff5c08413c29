"""One rank of a trainer over several processes."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from strop.training.assembly import LearnerOptions, open_learner
from strop.training.batch import World
from strop.training.weights import Snapshot


class Rank:
    """A `Learner` that makes the calls that it is asked for. Only the first rank returns results."""

    def __init__(self, options: LearnerOptions, rank: int, meeting: Path, num_threads: int) -> None:
        """
        Args:
            meeting: a file, not there yet, by which the ranks find each other.
        """
        torch.set_num_threads(num_threads)
        config = options.config.model_copy(update={"device": str(options.config.torch_device)})
        if config.device == "cuda":
            torch.cuda.set_device(rank)
            config = config.model_copy(update={"device": f"cuda:{rank}"})
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are here; a host name need not resolve
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and config.device != "cpu" else "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=config.workers,
            timeout=timedelta(seconds=config.worker_timeout_s),
        )
        self._learner = open_learner(replace(options, config=config), World(rank, config.workers))
        self._snapshots: list[Snapshot] = []

    def __call__(self, name: str, *arguments: Any) -> Any:
        if name == "write_snapshot":
            return self._snapshots.pop().write(*arguments)
        found = getattr(self._learner, name)
        result = found(*arguments) if callable(found) else found
        if isinstance(result, Snapshot):
            self._snapshots[:] = [result]
            return None
        return result if self._learner.world.rank == 0 else None
