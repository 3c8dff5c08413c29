"""A model that several processes divide: every call of `Learner`, made on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from strop.cluster.actors import Actors
from strop.cluster.connection import placed
from strop.cluster.placement import Node
from strop.errors import ActorsLost, TrainerLost
from strop.training.assembly import LearnerOptions
from strop.training.batch import TokenBatch
from strop.training.optimizer import UpdateReport
from strop.training.weights import WriteCheckpoint
from strop.training.worker import Rank


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
            self._actors = Actors(
                config.workers,
                what="the trainer",
                key="trainer.workers",
                timeout_s=config.worker_timeout_s,
                nodes=nodes,
                gpus=gpus,
            )
        places = self._actors.nodes
        addresses = [node.address if len(set(places)) > 1 else "localhost" for node in places]
        try:
            with _as_trainer():
                self._actors.make(
                    Rank, [(config, rank, addresses[rank], places.count(places[rank])) for rank in range(config.workers)]
                )
                port = self._actors.call("listen")
                self._actors.call("open", options, addresses[0], port)
            self.num_updates: int = self._ask("num_updates")
        except BaseException:
            self._actors.close()
            raise

    @property
    def nodes(self) -> list[Node | None]:
        """Return the node of each rank; None is this machine."""
        return self._actors.nodes_elsewhere()

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
