"""The root of every recipe: shared tables, the graph of stages and its order; JSON schemas for editors and `taplo check`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field, field_validator

from strop import user_code
from strop.algorithms.losses import Mismatch
from strop.cluster.placement import ClusterConfig
from strop.config import Config
from strop.engine.config import EngineChoice, EngineConfig
from strop.errors import ConfigError, did_you_mean
from strop.recipe.stage import Input, Product, Stage
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.sandbox.config import SandboxConfig
from strop.tools.protocol import ToolKind
from strop.tools.python import Python

SHARED_TABLES = ("tasks", "prompt", "sampling", "limits", "reward", "environment", "trainer")
"""Tables of the recipe's root that are defaults of every stage; a stage's own keys are put over them."""
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # a directory of the run, and a step of a key
SERVERS = ("vllm", "sglang")
"""Kinds of engine that compute in a process and with kernels of their own."""


class Recipe(Config):
    """A whole program as one value. Its stages are a graph; `stages` holds them in the order in which they run."""

    name: str = Field(
        min_length=1,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run and of its directory: letters, digits, `.`, `_`, `-`.",
    )
    description: str = Field("", description="One sentence for the plan and the report.")
    hardware: str = Field(
        "", description="What the plan is made for, as in `8xH100`; `--hardware` overrides it. Default: this machine."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of every random value.")
    threads: int | None = Field(None, ge=1, le=1024, description="Threads of torch. Default: torch decides.")
    tools: dict[str, ToolKind] = Field(
        default_factory=lambda: dict[str, ToolKind](python=Python()),
        description="What the policy may call: tables by name. Default: the Python tool.",
    )
    sandbox: SandboxConfig = Field(SandboxConfig(), description="How programs run.")
    engine: EngineChoice = Field(EngineConfig(), description="The engines that sample.")
    scheduler: SchedulerConfig = Field(SchedulerConfig(), description="Which rollout goes to which engine.")
    cluster: ClusterConfig | None = Field(
        None, description="The machines that a run uses. Default: this one; `--cluster` overrides the address."
    )
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field((), description="Where metrics are copied to.")
    stages: dict[str, Stage] = Field(min_length=1, description="The stages by name: letters, digits, `-`, `_`.")

    @field_validator("stages", mode="after")
    @classmethod
    def _in_running_order(cls, stages: dict[str, Stage]) -> dict[str, Stage]:
        """Return the stages in the order in which they run: as they are written, but each after its inputs."""
        for name in stages:
            if not _STAGE_NAME.fullmatch(name):
                raise ValueError(
                    f"stages.{name}: {name!r} cannot be the name of a directory and part of a key. Name the stage with letters,"
                    " digits, - and _, a letter or digit first."
                )
        makes = {name: stage.makes for name, stage in stages.items()}
        return {name: stages[name] for name in in_order(makes, {name: _inputs(stage) for name, stage in stages.items()})}

    def for_stage(self, name: str) -> Recipe:
        """Return the recipe as the stage `name` sees it: with the stage's own engine, if it has one."""
        own = getattr(self.stages[name].config, "engine", None)
        return self if own is None else self.model_copy(update={"engine": own})

    def with_parents(self, names: Iterable[str]) -> list[str]:
        """Return these stages and every stage that they depend on, in the order in which they run."""
        found = set(names)
        for name in reversed(self.stages):  # each before the stages that it reads from
            if name in found:
                found |= {each.stage for each in self.stages[name].inputs()}
        return [name for name in self.stages if name in found]

    def origin_of(self, name: str) -> str:
        """The stage whose weights the stage `name` was trained from in the first place: itself where it has no `init`."""
        while init := self.stages[name].init:
            name = init
        return name


def _inputs(stage: Stage) -> tuple[Input, ...]:
    """Raises `ConfigError` if a user's `inputs` raises, or returns something else."""
    what = f"{type(stage).__qualname__}.inputs"
    with user_code.blaming():
        found = user_code.expect(stage.inputs(), tuple, stage.inputs, what=what)
    if not all(isinstance(each, Input) for each in found):
        raise user_code.returned(stage.inputs, found, "Return a tuple of strop.recipe.stage.Input", what=what)
    return found


Inputs: TypeAlias = Mapping[str, Sequence[Input]]
"""What each stage reads, by the stage's name."""


def in_order(makes: Mapping[str, Product], inputs: Inputs) -> list[str]:
    """Return the stages such that each comes after its inputs, and otherwise as they are written.

    Raises:
        ValueError: an input does not exist or makes something else, or stages depend on each other in a circle.
    """
    if problems := [problem for name in inputs for problem in _unknown(name, inputs)]:
        raise ValueError(" ".join(problems))
    order: list[str] = []
    waiting = list(inputs)
    while waiting:
        ready = next((name for name in waiting if all(each.stage in order for each in inputs[name])), None)
        if ready is None:
            raise ValueError(f"{_circle(waiting, inputs)}. Let one of them start from another stage.")
        order.append(ready)
        waiting.remove(ready)
    if problems := _of_wrong_kind(order, makes, inputs):
        raise ValueError(" ".join(problems))
    return order


def _unknown(name: str, inputs: Inputs) -> list[str]:
    problems = []
    for each in inputs[name]:
        if each.stage not in inputs:
            others = [other for other in inputs if other != name]
            hint = did_you_mean(each.stage, others) or f" The other stages: {', '.join(others) or 'none'}."
            problems.append(f"stages.{name}.{each.key} names {each.stage!r}, which is no stage of the recipe.{hint}")
    return problems


def _of_wrong_kind(order: Sequence[str], declared: Mapping[str, Product], inputs: Inputs) -> list[str]:
    makes: dict[str, Product] = {}
    problems = []
    for name in order:
        makes[name] = makes[inputs[name][0].stage] if declared[name] is Product.SAME else declared[name]
    for name in order:
        wrong = [each for each in inputs[name] if makes[each.stage] not in each.wants]
        for each in wrong:
            fitting = [other for other in order if other != name and makes[other] in each.wants]
            problems.append(
                f"stages.{name}.{each.key} names {each.stage!r}, which makes {makes[each.stage]}, but needs"
                f" {' or '.join(each.wants)}. Stages that make this: {', '.join(fitting) or 'none'}."
            )
        kinds = {makes[each.stage] for each in inputs[name] if each.key == "data"}
        if not wrong and len(kinds) > 1:
            problems.append(f"stages.{name}.data names stages that make {' and '.join(sorted(kinds))}. Name only one kind.")
    return problems


def _circle(waiting: Sequence[str], inputs: Inputs) -> str:
    """Return the first circle among stages of which each waits for another."""
    path = [waiting[0]]
    while True:
        following = next(each.stage for each in inputs[path[-1]] if each.stage in waiting)
        if following in path:
            circle = [*path[path.index(following) :], following]
            return "stages depend on each other in a circle: " + " -> ".join(circle)
        path.append(following)


def resolve(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tree` with the shared tables of its root moved into every stage that has these keys.

    A key of a stage overrides the shared one; a table with another `kind` replaces the shared table. A stage's `engine` is put
    over the root's in the same way, but only where the stage has one. A table of `tools` whose
    name is a kind of tool is of that kind. RL on samples of a server, or of older weights, corrects for their probabilities
    unless the method says otherwise.
    """
    shared = {key: tree[key] for key in SHARED_TABLES if key in tree}
    resolved = {key: value for key, value in tree.items() if key not in shared}
    engine, stages, tools = (resolved.get(key) for key in ("engine", "stages", "tools"))
    if isinstance(stages, Mapping):
        resolved["stages"] = {
            name: _resolved(stage, shared, engine) if isinstance(stage, Mapping) else stage for name, stage in stages.items()
        }
    if isinstance(tools, Mapping):
        resolved["tools"] = {name: _with_kind(name, table) for name, table in tools.items()}
    return resolved


def written_at(tree: Mapping[str, Any], path: tuple[str, ...]) -> tuple[str, ...]:
    """Return where in `tree` the value at `path` of the resolved recipe is written: in a shared table, or at `path`."""
    if len(path) < 3 or path[0] != "stages" or path[2] not in SHARED_TABLES:
        return path
    shared = path[2:]
    return shared if _depth(tree, shared) > _depth(tree, path) - 2 else path


def _read_by(stage: Mapping[str, Any], shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of the `shared` tables that a stage of this kind has."""
    try:
        keys = Stage.class_of(str(stage.get("kind"))).Config.model_fields
    except ConfigError:
        return {}  # validation says what is wrong with the kind
    return {key: table for key, table in shared.items() if key in keys}


def _depth(tree: Any, path: tuple[str, ...]) -> int:
    """How many steps of `path` there are in `tree`."""
    for steps, key in enumerate(path):
        if not isinstance(tree, Mapping) or key not in tree:
            return steps
        tree = tree[key]
    return len(path)


def _resolved(stage: Mapping[str, Any], shared: Mapping[str, Any], engine: Any) -> Mapping[str, Any]:
    """Put a stage over the shared tables; let RL on other probabilities truncate its weights if `mismatch` is not set."""
    stage = _merge(_read_by(stage, shared), stage)
    if isinstance(own := stage.get("engine"), Mapping):
        engine = _merge(engine if isinstance(engine, Mapping) else {}, own)
        stage = {**stage, "engine": engine}
    is_server = isinstance(engine, Mapping) and engine.get("kind") in SERVERS
    ahead = stage.get("async_rollouts")
    is_stale = isinstance(ahead, Mapping) and ahead.get("max_staleness")
    if stage.get("kind") != "rl" or "method" not in stage or not (is_server or is_stale):
        return stage
    method = stage["method"]
    method = {"kind": method} if isinstance(method, str) else method
    if not isinstance(method, Mapping) or ":" in str(method.get("kind")):
        return stage  # validation says what is wrong with it; a method of the user's has keys of its own
    return {**stage, "method": {"mismatch": Mismatch.TRUNCATE_TOKEN.value, **method}}


def _with_kind(name: str, tool: Any) -> Any:
    """Return a tool's table with its kind: by default the kind that its name is."""
    return {"kind": name, **tool} if isinstance(tool, Mapping) and name in ToolKind.kinds else tool


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    if "kind" in over and "kind" in under and over["kind"] != under["kind"]:
        return dict(over)
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe as it is written, before shared tables are merged into its stages."""
    schema = file_schema(Recipe)
    shared: dict[str, list[Any]] = {key: [] for key in SHARED_TABLES}
    for stage in schema["$defs"]["Stage"]["anyOf"]:
        for key in SHARED_TABLES:
            table = stage.get("properties", {}).get(key)
            if table is not None and table not in shared[key]:
                shared[key].append(table)
    schema["properties"] |= {
        key: {"description": "Shared by all stages that have this key.", "anyOf": tables} for key, tables in shared.items()
    }
    return schema


def file_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a TOML file with the keys of `model`."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_without_required(model.model_json_schema())}


def _without_required(node: Any) -> Any:
    """Return a part of a schema that asks for no key of strop's tables, not even `kind`.

    Any key may come from a shared table, from a default or from `--set`; `strop train --dry-run` says what is missing.
    """
    if isinstance(node, list):
        return [_without_required(each) for each in node]
    if not isinstance(node, Mapping):
        return node
    is_table_of_strop = node.get("additionalProperties") is False
    dropped = ["required"] if is_table_of_strop else []
    return {key: _without_required(value) for key, value in node.items() if key not in dropped}
