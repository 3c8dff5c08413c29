"""The processes that train one model together; of one alone, the same calls."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


class World:
    """One process alone."""

    rank = 0
    size = 1

    def sum(self, value: Tensor) -> Tensor:
        """Over all ranks; on every one of them."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """One from each rank, on every one of them."""
        return [value]

    def wait(self) -> None:
        """Until all ranks are here."""


class ProcessGroup(World):
    """Ranks of the default process group, which was started before."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        dist.barrier()
