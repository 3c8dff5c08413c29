"""The root of every recipe: what is shared, and the named stages of a run with what each stands on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from strop.algorithms.mismatch import Mismatch
from strop.config import Config
from strop.engine.config import EngineChoice, EngineConfig
from strop.pipelines.data_config import (
    ConversationsStage,
    CurationStage,
    DemonstrationsStage,
    ExportStage,
    FilterStage,
    MixStage,
    RejectionSamplingStage,
    SampledStage,
)
from strop.pipelines.distillation import problem_with_distillation
from strop.pipelines.dpo_config import DpoStage
from strop.pipelines.graph import Node, in_order
from strop.pipelines.reward_model_config import RewardModelStage
from strop.pipelines.stage_config import (
    EvalStage,
    ExpertIterationStage,
    ModelStage,
    RlStage,
    RolloutStage,
    SftStage,
    Stage,
    TinyModel,
    TrainingStage,
    init_of,
)
from strop.rollout.scheduling import SchedulerConfig
from strop.sandbox.config import SandboxConfig
from strop.tools.python import PythonToolConfig
from strop.tools.toolbox import TOOL_KINDS, ToolConfig

__all__ = [
    "ConversationsStage",
    "CurationStage",
    "DemonstrationsStage",
    "DpoStage",
    "EvalStage",
    "ExpertIterationStage",
    "ExportStage",
    "FilterStage",
    "MixStage",
    "ModelStage",
    "PlayedStage",
    "Recipe",
    "RejectionSamplingStage",
    "RewardModelStage",
    "RlStage",
    "RolloutStage",
    "SampledStage",
    "SftStage",
    "Stage",
    "StageConfig",
    "SteppedStage",
    "TinyModel",
    "TrainingStage",
    "init_of",
    "relative_to",
    "resolve",
    "written_at",
]

SHARED_TABLES = ("tasks", "prompt", "sampling", "limits", "reward", "trainer")
"""Tables of the recipe's root that are defaults of every stage; a stage's own keys are put over them."""
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # a directory of the run, and a step of a key
SERVERS = ("vllm", "sglang")
"""Kinds of engine that compute in a process and with kernels of their own."""

StageConfig: TypeAlias = Annotated[
    ModelStage
    | DemonstrationsStage
    | ConversationsStage
    | SftStage
    | EvalStage
    | RlStage
    | ExpertIterationStage
    | CurationStage
    | FilterStage
    | RejectionSamplingStage
    | MixStage
    | RewardModelStage
    | DpoStage
    | ExportStage,
    Field(discriminator="kind"),
]
"""Every kind of stage. What runs each is in the table of train.py."""
PlayedStage: TypeAlias = EvalStage | RlStage | ExpertIterationStage | FilterStage | RejectionSamplingStage
"""Its tasks are played on engines."""
SteppedStage: TypeAlias = RlStage | ExpertIterationStage
"""It learns from its own rollouts, step by step."""


def _python_alone() -> dict[str, ToolConfig]:
    return {"python": PythonToolConfig()}


class Recipe(Config):
    """A whole program as one value. Its stages are a graph; `stages` holds them in the order in which they run."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    seed: int = 0
    threads: int | None = Field(default=None, ge=1)  # of torch; None: its own choice
    tools: dict[str, ToolConfig] = Field(default_factory=_python_alone)
    sandbox: SandboxConfig = SandboxConfig()
    engine: EngineChoice = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    stages: dict[str, StageConfig] = Field(min_length=1)

    @field_validator("stages", mode="after")
    @classmethod
    def _stages_stand_on_each_other(cls, stages: dict[str, StageConfig]) -> dict[str, StageConfig]:
        """In the order in which they run: as they are written, but each behind those that it stands on."""
        for name in stages:
            if not _STAGE_NAME.fullmatch(name):
                raise ValueError(
                    f"stages.{name}: {name!r} cannot be the name of a directory and part of a key. Name the stage with letters,"
                    " digits, - and _, a letter or digit first."
                )
        nodes = {name: Node(makes=stage.makes, inputs=stage.inputs()) for name, stage in stages.items()}
        return {name: stages[name] for name in in_order(nodes)}

    @model_validator(mode="after")
    def _distils_from_a_teacher(self) -> Self:
        for name, stage in self.stages.items():
            if not isinstance(stage, SftStage) or stage.kind != "distil":
                continue
            if problem := problem_with_distillation(name, self.stages):
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _can_branch(self) -> Self:
        for name, stage in self.stages.items():
            if not isinstance(stage, RlStage) or stage.branching is None:
                continue
            if not isinstance(self.engine, EngineConfig):
                raise ValueError(
                    f"stages.{name}.branching weighs the entropy of what is sampled, over the whole vocabulary, and"
                    f" engine.kind = {self.engine.kind!r} does not tell it. Use engine.kind = 'torch', or leave branching out."
                )
            if self.scheduler.policy == "static":
                raise ValueError(
                    f"stages.{name}.branching and scheduler.policy = 'static' do not go together: it deals rollouts once and"
                    " for all, so a branch would wait for memory of rollouts that wait for it. Set scheduler.policy ="
                    " 'scheduler'."
                )
        return self

    @model_validator(mode="after")
    def _can_play_ahead(self) -> Self:
        for name, stage in self.stages.items():
            if isinstance(stage, RlStage) and stage.max_staleness and not self.engine.is_apart:
                raise ValueError(
                    f"stages.{name}.max_staleness is {stage.max_staleness}, but the engine computes in the trainer's own"
                    " process, where they would only take turns. Set engine.own_process = true, use several replicas or a"
                    " server (engine.kind), or set max_staleness = 0."
                )
        return self

    @model_validator(mode="after")
    def _fits_the_engine(self) -> Self:
        for name, stage in self.stages.items():
            is_played = isinstance(stage, PlayedStage) or (isinstance(stage, TrainingStage) and stage.validation is not None)
            longest = stage.longest_response if isinstance(stage, TrainingStage) else stage.sampling.max_tokens
            if is_played and longest >= self.engine.max_length:
                raise ValueError(
                    f"stages.{name}.sampling.max_tokens is {longest}, but the engine holds conversations of"
                    f" engine.max_length = {self.engine.max_length} tokens, prompt included. Raise engine.max_length, or lower"
                    " max_tokens."
                )
        return self


def resolve(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the shared tables of its root put under every stage, and taken from the root.

    A stage's key beats the shared one; a table that changes its `kind` replaces the shared table whole. A table of `tools`
    that is called as a kind of tool is of that kind. RL on what a server engine sampled corrects for its probabilities, unless
    the method says otherwise: a server computes with kernels of its own, and the gap is no mere rounding. So does RL on what
    older weights sampled.
    """
    shared = {key: tree[key] for key in SHARED_TABLES if key in tree}
    resolved = {key: value for key, value in tree.items() if key not in shared}
    stages = resolved.get("stages")
    if isinstance(stages, Mapping):
        resolved["stages"] = {
            name: _merge(shared, stage) if isinstance(stage, Mapping) else stage for name, stage in stages.items()
        }
    engine = resolved.get("engine")
    is_server = isinstance(engine, Mapping) and engine.get("kind") in SERVERS
    if isinstance(resolved.get("stages"), Mapping):
        resolved["stages"] = {
            name: _with_correction(stage) if is_server or _is_played_ahead(stage) else stage
            for name, stage in resolved["stages"].items()
        }
    tools = resolved.get("tools")
    if isinstance(tools, Mapping):
        resolved["tools"] = {name: _with_kind(name, table) for name, table in tools.items()}
    return resolved


def written_at(tree: Mapping[str, Any], path: tuple[str, ...]) -> tuple[str, ...]:
    """Where in `tree` stands what lies at `path` once it is resolved: in a shared table, or where it is."""
    if len(path) < 3 or path[0] != "stages" or path[2] not in SHARED_TABLES:
        return path
    shared = path[2:]
    return shared if _depth(tree, shared) > _depth(tree, path) - 2 else path


def _depth(tree: Any, path: tuple[str, ...]) -> int:
    """How many steps of `path` there are in `tree`."""
    for steps, key in enumerate(path):
        if not isinstance(tree, Mapping) or key not in tree:
            return steps
        tree = tree[key]
    return len(path)


def _is_played_ahead(stage: Any) -> bool:
    return isinstance(stage, Mapping) and bool(stage.get("max_staleness"))


def _with_correction(stage: Any) -> Any:
    """An RL stage whose method says nothing of the mismatch between sampler and trainer truncates its weights."""
    if not isinstance(stage, Mapping) or stage.get("kind") != "rl" or "method" not in stage:
        return stage
    method = stage["method"]
    method = {"name": method} if isinstance(method, str) else method
    if not isinstance(method, Mapping):
        return stage  # the config says what is wrong with it
    return {**stage, "method": {"mismatch": Mismatch.TRUNCATE_TOKEN.value, **method}}


def _with_kind(name: str, tool: Any) -> Any:
    """A tool's table that does not say its kind is of the kind that it is called by."""
    return {"kind": name, **tool} if isinstance(tool, Mapping) and name in TOOL_KINDS else tool


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    if "kind" in over and "kind" in under and over["kind"] != under["kind"]:
        return dict(over)
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def relative_to(directory: Path, path: str) -> str:
    """`path` as the user meant it: a local directory beside the recipe where there is one, else as written (a hub id)."""
    beside = directory / path
    return str(beside) if not Path(path).is_absolute() and beside.exists() else path
