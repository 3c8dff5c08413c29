"""What a recipe would do, before it does it: stages, batch arithmetic, and estimates of tokens, memory and time."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from strop import user_code
from strop.cluster.connection import Connection, connected
from strop.cluster.placement import Node, Placement, Roles, place
from strop.config import import_code, nearest_file
from strop.engine.config import AnyEngine, EngineConfig, ServerConfig
from strop.engine.opening import check_interpreter
from strop.errors import ConfigError, NotThere, UserError
from strop.pipeline.hardware import Hardware, cost_here, cost_on
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, Model, PlayedKeys, Product
from strop.reports.terminal import PlannedStage
from strop.run_directory import RunDirectory
from strop.runs.resume import Starts, named_starts, stages_to_run
from strop.tasks.files import missing
from strop.training.config import TrainerConfig


def plan(recipe: Recipe, *, until: str | None = None, start: Starts = (), only: Starts = ()) -> list[PlannedStage]:
    """Every stage of `recipe` that `stages_to_run` selects, from `start` on, with rough estimates.

    The estimates are for the recipe's `hardware`, and for this machine if it names none.

    Raises:
        ConfigError: there is no such stage or hardware, or a function of the user's cannot be imported.
        UserError: this machine lacks something that such a stage will open.
        TaskError: a file that such a stage will play holds what is no task.
    """
    wanted = stages_to_run(recipe, until, start, only)
    if start:  # what lies before it is there already
        wanted = wanted[min(wanted.index(each) for each in named_starts(start)) :]
    for name in wanted:
        stage = recipe.stages[name]
        import_code(stage.config, f"stages.{name}")
        if "tools" in stage.root_keys:
            import_code(recipe.tools, "tools")
    hardware = Hardware.named(recipe.hardware) if recipe.hardware else None
    not_there = check_stages(recipe, wanted, is_plan=True)
    rate = _matmul_flops() if hardware is None else 0.0
    sizes = {origin: recipe.stages[origin].size() for origin in dict.fromkeys(map(recipe.origin_of, wanted))}
    placements = _placements(recipe, wanted, hardware)
    planned = []
    for name in wanted:
        size, engine = sizes[recipe.origin_of(name)], recipe.for_stage(name).engine
        estimate = _estimate(recipe, name, size)
        cost = cost_here(estimate, engine, size, rate) if hardware is None else cost_on(hardware, name, estimate, engine, size)
        nodes = (f"node {line}" for line in placements.get(name, ()))
        planned.append(
            PlannedStage(
                name=name,
                kind=recipe.stages[name].kind,
                init=", ".join(each.stage for each in recipe.stages[name].inputs()),
                arithmetic=estimate.arithmetic,
                tokens=estimate.tokens,
                memory_mib=cost.memory_mib,
                time_s=cost.time_s if estimate.time_limit_s is None else min(cost.time_s, estimate.time_limit_s),
                problem=cost.problem,
                schedule=(*estimate.lines, *_other_terms(recipe, name), *cost.lines, *nodes, *not_there[name]),
            )
        )
    return planned


def check_stages(
    recipe: Recipe, names: Collection[str], *, is_plan: bool = False, run: RunDirectory | None = None
) -> dict[str, list[str]]:
    """Check the stages of these `names` before anything is begun.

    Args:
        is_plan: what is not there may still be made or fetched.
        run: where it will be run; a file in the directory of an earlier stage there may still be made by that stage.

    Returns:
        For a plan, by stage, what is not there.

    Raises:
        UserError: the first problem of a stage; without `is_plan` also if something is not there.
    """
    machine = Machine(is_elsewhere=recipe.cluster is not None or (is_plan and bool(recipe.hardware)))
    made_before: list[Path] = []
    found: dict[str, list[str]] = {}
    of_tools = _missing_files_of_tools(recipe)  # which the first stage opens for all
    for name in names:
        absent: list[str] = []
        for problem in chain(_problems_of(recipe, name, machine), _missing_files(recipe, name, made_before), of_tools):
            if not isinstance(problem, NotThere):
                raise problem
            if not is_plan:
                raise NotThere(f"{problem} Nothing was begun.")
            absent.append(str(problem))
        found[name] = list(dict.fromkeys(absent))
        made_before += [run.stage(name).path.resolve()] if run is not None else []
    return found


def _problems_of(recipe: Recipe, name: str, machine: Machine) -> Iterator[UserError]:
    """Yield what the stage's own check finds. Raises `ConfigError` for a mistake in a user's check."""
    stage = recipe.stages[name]
    what = f"{type(stage).__qualname__}.check"
    with user_code.blaming():
        problems = stage.check(name, recipe.for_stage(name), machine)
        for problem in user_code.expect(problems, Iterable, stage.check, what=what):  # type: ignore[type-abstract]
            if not isinstance(problem, UserError):
                raise user_code.returned(stage.check, problem, "Yield strop.ConfigError(...)", what=what)
            yield problem


def _missing_files(recipe: Recipe, name: str, made_before: Collection[Path]) -> Iterator[UserError]:
    for key, path in recipe.stages[name].files().items():
        if not path.exists() and not any(path.resolve().is_relative_to(each) for each in made_before):
            yield NotThere(f"stages.{name}.{key}: {missing(path)}")
        if key == "path" and path.is_dir():
            yield UserError(f"stages.{name}.{key}: {path}: is a directory. Name a file of it; nothing was begun.")


def _missing_files_of_tools(recipe: Recipe) -> Iterator[NotThere]:
    for table, tool in recipe.tools.items():
        for key, path in tool.files().items():
            if not path.exists():
                yield NotThere(f"tools.{table}.{key}: {path}: no such file or directory.{nearest_file(path)} Mend the path.")


def _placements(recipe: Recipe, names: Collection[str], hardware: Hardware | None) -> dict[str, list[str]]:
    """Return lines for each stage that needs nodes: of the recipe's cluster, or of machines with the hardware."""
    if recipe.cluster is None:
        return {}
    if hardware is not None:
        nodes = hardware.nodes()
        placements = {name: place(nodes, roles_of(recipe, name, nodes)) for name in names}
    else:
        with connected(recipe.cluster, None) as connection:
            assert connection is not None
            placements = check_nodes(connection, recipe, names)
    return {name: list(placement.lines()) for name, placement in placements.items()}


def check_nodes(connection: Connection, recipe: Recipe, names: Iterable[str]) -> dict[str, Placement]:
    """Return where the stages would go now.

    Raises:
        UserError: the cluster is too small for one of them, or a node lacks the environment of its engine.
    """
    nodes = connection.nodes()
    placements = {name: connection.placement_of(roles_of(recipe, name, nodes)) for name in names}
    for name, placement in placements.items():
        for error in missing_environments(connection, recipe.for_stage(name).engine, placement):
            raise error
    return placements


def missing_environments(connection: Connection, engine: AnyEngine, placement: Placement) -> Iterator[UserError]:
    """Yield an error for each node that is to hold such an engine and lacks the server's environment."""
    for node in dict.fromkeys(placement.engines) if isinstance(engine, ServerConfig) else ():
        try:
            connection.run(node, check_interpreter, engine)
        except UserError as error:
            yield UserError(f"node {node}: {error}")


def roles_of(recipe: Recipe, name: str, nodes: Sequence[Node]) -> Roles:
    """Return what a stage needs of a cluster of `nodes`. "auto" devices are GPUs if the cluster has any."""
    assert recipe.cluster is not None
    stage, engine = recipe.stages[name], recipe.for_stage(name).engine
    trainer: Any = getattr(stage.config, "trainer", None)
    has_gpus = any(node.all_gpus for node in nodes)
    is_on_gpu = {"cpu": False, "auto": has_gpus}
    if engine.devices:
        raise ConfigError(f"stages.{name}: a cluster gives engines their devices. Remove engine.devices.")
    is_divided = isinstance(trainer, TrainerConfig) and trainer.workers > 0
    is_started = stage.opens_engines and engine.is_started
    on_gpu = is_on_gpu.get(engine.device, True) if isinstance(engine, EngineConfig) else has_gpus
    width = engine.tensor_parallel if isinstance(engine, ServerConfig) else 1
    gpus_of_rank = int(is_divided and is_on_gpu.get(trainer.device, True))
    return Roles(
        ranks=trainer.workers if is_divided else 0,
        trainer_nodes=recipe.cluster.trainer_nodes,
        engines=engine.num_engines if is_started else 0,
        gpus_of_rank=gpus_of_rank,
        gpus_of_engine=width if on_gpu else 0,
        shares_gpus=engine.sleeps and bool(gpus_of_rank) and is_started,
        sandboxes=recipe.cluster.sandbox_nodes,
    )


def _estimate(recipe: Recipe, name: str, size: Model) -> Estimate:
    """What the stage's own plan says. Raises `ConfigError` for a mistake in a user's plan."""
    stage = recipe.stages[name]
    with user_code.blaming():
        estimate = stage.plan(name, recipe.for_stage(name), Machine(model=size))
    user_code.expect(estimate, Estimate, stage.plan, what=f"{type(stage).__qualname__}.plan")
    return estimate


def _other_terms(recipe: Recipe, name: str) -> Iterator[str]:
    """Where an evaluation asks less, or in other words, of a model that a stage of rollouts trained."""
    stage, before = recipe.stages[name], recipe.stages.get(recipe.stages[name].init)
    config, trained = stage.config, None if before is None or not before.plays else before.config
    if stage.makes is not Product.EVALUATION or not isinstance(config, PlayedKeys) or not isinstance(trained, PlayedKeys):
        return
    if (limit := config.longest_response) < trained.longest_response:
        yield f"responses end at {limit} tokens, but {stage.init!r} trains on up to {trained.longest_response}"
    if config.prompt != trained.prompt:
        yield f"the prompt is {config.prompt!r}, but {stage.init!r} trains on {trained.prompt!r}"


def _matmul_flops() -> float:
    """The best rate, in FLOP/s, of a float32 product of 512 x 1024 by 1024 x 1024 here and now."""
    left, right = torch.ones(512, 1024), torch.ones(1024, 1024)
    best_s = float("inf")
    for _ in range(30):
        started = time.perf_counter()
        left @ right
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * 512 * 1024 * 1024 / best_s
