"""What a recipe would do, before it does it: stages, batch arithmetic, and estimates of tokens, memory and time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import torch
import transformers

from strop.pipelines.curations import check_curations, curation_of, files_of
from strop.pipelines.machine import check_machine, is_missing, missing_files, scorers_of
from strop.pipelines.recipe import (
    ConversationsStage,
    CurationStage,
    DemonstrationsStage,
    DpoStage,
    EvalStage,
    ExpertIterationStage,
    ExportStage,
    FilterStage,
    MixStage,
    ModelStage,
    Recipe,
    RejectionSamplingStage,
    RewardModelStage,
    RlStage,
    RolloutStage,
    SampledStage,
    SftStage,
    StageConfig,
    init_of,
)
from strop.pipelines.schedule import Done, first_steps
from strop.pipelines.selection import Starts, named_starts, stages_until
from strop.pipelines.stage_tasks import open_tasks
from strop.pipelines.tiny_model import tiny_llama_config
from strop.reports.scales import counted
from strop.tasks.config import ArithmeticConfig, CountdownConfig, JsonlConfig, LookupConfig, ParquetConfig

_MIB = 2**20
_IDLE_MIB = 600  # an interpreter with torch and transformers imported
# Of the machine's best matrix rate, and of the token limits, what the demo's stages were seen to reach on two cores. Rough.
_DECODE_SHARE = 0.15
_TRAIN_SHARE = 0.35
_TOKEN_SHARE = 1 / 3
_MOST_COUNTED_MIB = 16  # of a file whose rows are counted: some 50 000 problems, in about a second


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage in words and in estimates. Tokens are upper bounds, with every rollout at its limit;
    times take a third of that."""

    name: str
    kind: str
    init: str
    arithmetic: str
    tokens: int
    memory_mib: float  # 0, as the time: the model is not here, so nothing is known
    time_s: float
    schedule: tuple[str, ...] = ()  # what changes on the way, and what it still lacks, a line each


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What estimates need to know of a model."""

    num_parameters: int
    kv_bytes_per_token: int  # in float32


_NO_MODEL = ModelSize(num_parameters=0, kv_bytes_per_token=0)


def plan(recipe: Recipe, *, until: str | None = None, start: Starts = ()) -> list[PlannedStage]:
    """Every stage of `recipe` from `start` until `until`, with rough estimates for this machine.

    Raises:
        ConfigError: there is no such stage.
        UserError: this machine lacks something that such a stage will open.
        TaskError: a file that such a stage will play holds what is no task.
    """
    wanted = stages_until(recipe, until, start)
    if start:  # what lies before it is there already
        wanted = wanted[min(wanted.index(each) for each in named_starts(start)) :]
    not_planned = [name for name in recipe.stages if name not in wanted]
    check_machine(recipe, done=not_planned, is_plan=True)
    check_curations(recipe, done=not_planned, is_plan=True)
    rate = _matmul_flops()
    sizes: dict[str, ModelSize] = {}
    stages = []
    for name, stage in recipe.stages.items():
        if isinstance(stage, ModelStage):
            sizes[name] = _size_of(stage)
        elif origin := init_of(stage):
            sizes[name] = sizes[origin]
        if name in wanted:
            stages.append(_planned(name, stage, recipe, sizes.get(name, _NO_MODEL), rate))
    return stages


def _planned(name: str, stage: StageConfig, recipe: Recipe, size: ModelSize, rate: float) -> PlannedStage:
    weights_mib = size.num_parameters * 4 / _MIB
    engine_width = 2 if recipe.engine.dtype == "bfloat16" else 4
    kv_mib = recipe.engine.slots * recipe.engine.max_length * size.kv_bytes_per_token * engine_width / 4 / _MIB
    engine_mib = recipe.engine.num_engines * (size.num_parameters * engine_width / _MIB + kv_mib)
    tokens, memory, flops = 0, _IDLE_MIB + weights_mib, 0.0
    init = ", ".join(each.stage for each in stage.inputs())
    match stage:
        case ModelStage():
            arithmetic = _origin_in_words(stage, size)
        case SftStage():
            tokens = stage.steps * stage.batch_size * stage.sampling.max_tokens
            flops = 6 * size.num_parameters * tokens / _TRAIN_SHARE
            longest = recipe.engine.max_length if stage.num_demonstrations else stage.trainer.max_tokens_per_microbatch
            memory += 3 * weights_mib + _activations_mib(stage, size, stage.batch_size * longest)
            if stage.num_demonstrations is None:
                arithmetic = (
                    f"{counted(stage.steps, 'step')} x {stage.batch_size} of the conversations of {', '.join(stage.data)}"
                )
            else:
                epochs = stage.steps * stage.batch_size / stage.num_demonstrations
                arithmetic = (
                    f"{counted(stage.steps, 'step')} x {stage.batch_size} of {stage.num_demonstrations} demonstrations ="
                    f" {epochs:.1f} epochs"
                )
            if stage.only_right:
                arithmetic += "; of those that are right alone, so more epochs where some are wrong"
        case RewardModelStage():
            memory += 3 * weights_mib
            arithmetic = f"{counted(stage.epochs, 'epoch')} over {stage.path} in batches of {stage.batch_size}"
        case DpoStage():
            memory += 0 if stage.trainer.lora is not None else 4 * weights_mib  # the reference is one of them
            arithmetic = (
                f"{counted(stage.epochs, 'epoch')} over the pairs of {stage.path} in batches of {stage.batch_size}; up to"
                f" {stage.validation.num_pairs} held out measured every {stage.validation.every_steps} steps"
            )
        case CurationStage():
            config = curation_of(name, stage)
            arithmetic = (
                f"{counted(len(config.sources), 'source')}, {counted(len(config.rules), 'rule')} of {stage.recipe}:"
                f" {', '.join(rule.kind for rule in config.rules)}"
            )
        case FilterStage() | RejectionSamplingStage():
            limit, num_tasks = _played(name, stage, recipe)
            tasks = f"{limit}{counted(num_tasks, 'task')}" if num_tasks else "all tasks"
            arithmetic = f"{tasks} x {counted(stage.k, 'rollout')}"
            tokens = num_tasks * stage.k * stage.sampling.max_tokens
            flops = 2 * size.num_parameters * tokens / _DECODE_SHARE
            memory += engine_mib
        case DemonstrationsStage():
            arithmetic = f"{stage.num_demonstrations} demonstrations"
        case ConversationsStage():
            arithmetic = f"{'all' if stage.limit is None else f'the first {stage.limit}'} conversations of {stage.path}"
        case MixStage():
            told = stage.counts or stage.shares or dict.fromkeys(stage.data, "all")
            arithmetic = ", ".join(f"{name} {share}" for name, share in told.items())
            arithmetic += f" of {stage.total} rows" if stage.total else ""
        case ExportStage():
            arithmetic = "a model directory with card and lineage"
        case EvalStage():
            limit, num_tasks = _played(name, stage, recipe)
            tokens = num_tasks * stage.k * stage.sampling.max_tokens
            flops = 2 * size.num_parameters * tokens / _DECODE_SHARE
            memory += engine_mib
            arithmetic = (
                f"{limit}{counted(num_tasks, 'task')} x {counted(stage.k, 'rollout')} ="
                f" {limit}{counted(num_tasks * stage.k, 'rollout')}, tools {stage.tools}"
            )
        case RlStage():
            rollouts = stage.tasks_per_step * stage.rollouts_per_task
            kept = stage.tasks_per_step * stage.group_size
            responses = _tokens_of_responses(stage, stage.updates_per_step * stage.epochs)
            tokens = rollouts * responses
            trained = kept * responses * stage.epochs
            flops = size.num_parameters * (2 * tokens / _DECODE_SHARE + 8 * trained / _TRAIN_SHARE)
            of_update = kept // stage.updates_per_step * recipe.engine.max_length
            memory += 3 * weights_mib + engine_mib + _activations_mib(stage, size, of_update)
            if stage.max_staleness:  # a copy of what was published
                memory += size.num_parameters * engine_width / _MIB
            if stage.method.critic is not None:  # as large as the policy, and trained as much
                flops += 8 * size.num_parameters * trained / _TRAIN_SHARE
                memory += 4 * weights_mib
            updates = stage.updates_per_step * stage.epochs
            arithmetic = (
                f"{counted(stage.steps, 'step')} x {stage.tasks_per_step} tasks x {stage.rollouts_per_task} rollouts ="
                f" {rollouts} a step; {stage.method.name} keeps {stage.group_size} a task = {kept};"
                f" {counted(updates, 'update')} a step of {kept // stage.updates_per_step} rollouts ="
                f" {counted(stage.num_updates, 'update')}"
            )
            arithmetic += "; each step's rollouts are played while the step before is trained on" if stage.max_staleness else ""
        case ExpertIterationStage():
            rollouts = stage.tasks_per_step * stage.group_size
            updates = stage.epochs * -(-rollouts // stage.batch_size)
            tokens = rollouts * _tokens_of_responses(stage, updates)
            flops = size.num_parameters * (2 * tokens / _DECODE_SHARE + 6 * tokens * stage.epochs / _TRAIN_SHARE)
            of_update = min(stage.batch_size, rollouts) * recipe.engine.max_length
            memory += 3 * weights_mib + engine_mib + _activations_mib(stage, size, of_update)
            arithmetic = (
                f"{counted(stage.steps, 'step')} x {stage.tasks_per_step} tasks x {stage.group_size} rollouts ="
                f" {rollouts} a step; those that are right are imitated for {counted(stage.epochs, 'epoch')} in batches of up"
                f" to {stage.batch_size}: up to {counted(updates, 'update')} a step"
            )
    time_s = _TOKEN_SHARE * flops / rate
    if isinstance(stage, RolloutStage) and stage.budget_s is not None:
        time_s = min(time_s, stage.budget_s)
        arithmetic += f"; fewer where {stage.budget_s:g} s are over before"
    if isinstance(stage, RolloutStage) and stage.end_when:
        arithmetic += f"; fewer where before that {' or '.join(rule.what for rule in stage.end_when)}"
    return PlannedStage(
        name=name,
        kind=stage.kind,
        init=init,
        arithmetic=arithmetic,
        tokens=tokens,
        memory_mib=memory if size.num_parameters else 0.0,
        time_s=time_s,
        schedule=(*(_lines_of_schedule(stage) if isinstance(stage, RolloutStage) else ()), *_missing(stage)),
    )


def _played(name: str, stage: EvalStage | SampledStage, recipe: Recipe) -> tuple[str, int]:
    """How many tasks the stage plays, and before it whether there may be fewer; 0 where nothing says how many there are.

    Raises `TaskError` as `open_tasks` does.
    """
    there = _num_there(name, stage, recipe)
    if there is None:
        return "up to ", stage.num_tasks or 0
    return "", min(there, stage.num_tasks or there)


def _num_there(name: str, stage: EvalStage | SampledStage, recipe: Recipe) -> int | None:
    """How many tasks there are, or as many as are asked for without end; None where that is not known before they are read.

    What is far away (the hub), large, made by other stages or by a program of the user's is not read for a plan.
    """
    if isinstance(stage, SampledStage) and stage.data:
        return None
    match stage.tasks:
        case ArithmeticConfig() | CountdownConfig() | LookupConfig():
            return stage.num_tasks
        case JsonlConfig() | ParquetConfig():
            split = stage.split if isinstance(stage, EvalStage) else "train"
            path = stage.tasks.path if split == "train" else stage.tasks.test_path
            if path is not None and not _is_counted(path.expanduser()):
                return None
            return open_tasks(recipe, name, stage.tasks, seed=recipe.seed, split=split).num_tasks
        case _:
            return None


def _is_counted(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= _MOST_COUNTED_MIB * _MIB


def _missing(stage: StageConfig) -> Iterator[str]:
    for key, path in missing_files(stage):
        yield f"{key}: {path}: NOT FOUND. Put it there, or name another."
    if isinstance(stage, CurationStage):
        for key, path in files_of(stage).items():
            if not path.exists():
                yield f"{key}: {path}: NOT FOUND. Put it there, or name another."
    for key, config in scorers_of(stage):
        if is_missing(config):
            yield f"{key}: {config.path}: NOT FOUND. Make it first, or name another."


def _tokens_of_responses(stage: RolloutStage, updates_per_step: int) -> int:
    """One of each step added up, at its limit, with as many updates a step; what waits for metrics comes as early as it can."""
    if not stage.schedule:
        return stage.steps * stage.sampling.max_tokens
    begun = (Done(steps=step, updates=step * updates_per_step) for step in range(stage.steps))
    firsts = [(first, stage.schedule[place]) for place, first in first_steps(stage.schedule, stage.validated_every).items()]
    return sum(
        max(
            stage.at(done).sampling.max_tokens,
            *(entry.sampling.max_tokens or 0 for first, entry in firsts if first <= done.steps),
            0,
        )
        for done in begun
    )


def _lines_of_schedule(stage: RolloutStage) -> Iterator[str]:
    """Each entry as the recipe has it, and the step that it comes before where that is known: if no update is skipped."""
    updates = stage.updates_per_step * stage.epochs if isinstance(stage, RlStage) else 0
    alone = stage.steps_of_critic_alone if isinstance(stage, RlStage) else 0
    firsts = first_steps(stage.schedule, stage.validated_every)
    for place, entry in enumerate(stage.schedule):
        step = f" (step {alone + -(-entry.at_update // updates) + 1})" if entry.at_update and updates else ""
        step = f" (by a metric; step {firsts[place] + 1} at the earliest)" if place in firsts else step
        yield f"{entry.moment}{step}: {entry.what}"


def _activations_mib(stage: SftStage | RlStage | ExpertIterationStage, size: ModelSize, num_tokens: int) -> float:
    """Of one micro-batch of an update of up to `num_tokens`: about 34 values a token, layer and channel; the KV cache is 2."""
    return min(num_tokens, stage.trainer.max_tokens_per_microbatch) * size.kv_bytes_per_token * 17 / _MIB


def _size_of(stage: ModelStage) -> ModelSize:
    """Of a model that is not here, nothing is known: 0 parameters."""
    if stage.tiny is not None:
        return _count(tiny_llama_config(stage.tiny, vocab_size=stage.tiny.vocab_size, eos_token_id=2))
    assert stage.path is not None  # the config's validator saw to it
    directory = Path(stage.path)
    try:
        if not directory.is_dir():  # `AutoConfig` would ask an absent network six times, for 23 seconds
            directory = Path(huggingface_hub.snapshot_download(stage.path, allow_patterns="config.json"))
        return _count(transformers.AutoConfig.from_pretrained(directory, local_files_only=True))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError):
        return _NO_MODEL


def _origin_in_words(stage: ModelStage, size: ModelSize) -> str:
    if stage.path is None:
        return f"a new model of {size.num_parameters / 1e6:.2f} M parameters"
    if size.num_parameters:
        has_weights = not Path(stage.path).is_dir() or any(Path(stage.path).glob("*.safetensors"))
        return stage.path if has_weights else f"{stage.path}: NO WEIGHTS there (*.safetensors). Make it first, or name another"
    return (
        f"{stage.path}: NOT FOUND, so memory and time are not estimated. Make it first, name another, or, for a hub id, connect"
    )


def _count(config: transformers.PretrainedConfig) -> ModelSize:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    sizes: Mapping[str, int] = config.to_dict()
    head = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    kv_heads = sizes.get("num_key_value_heads") or sizes["num_attention_heads"]
    return ModelSize(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        kv_bytes_per_token=2 * sizes["num_hidden_layers"] * kv_heads * head * 4,
    )


def _matmul_flops() -> float:
    """The best rate, in FLOP/s, of a float32 product of 512 x 1024 by 1024 x 1024 here and now."""
    left, right = torch.ones(512, 1024), torch.ones(1024, 1024)
    best_s = float("inf")
    for _ in range(30):
        started = time.perf_counter()
        left @ right
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * 512 * 1024 * 1024 / best_s
