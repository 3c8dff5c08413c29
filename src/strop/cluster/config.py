"""The `cluster` table of a recipe."""

from __future__ import annotations

from pydantic import Field

from strop.config import Config


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
