"""Reads a run directory into typed values for a report, also while the run continues: absent files are absent metrics."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from strop.reports.number_format import counted
from strop.run_directory import RunDirectory, StageDirectory, read_json, read_lines

Metrics: TypeAlias = Mapping[str, float]


class StageState(StrEnum):
    """The progress of a stage, in words for a reader."""

    DONE = "done"
    STALE = "stale"
    BEGUN = "not finished"
    TO_COME = "to come"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLog:
    """One stage of a run and what it logged at each step."""

    name: str
    kind: str  # model, sft, eval, rl, ...; "" if the manifest has none
    init: str  # the stage or path of its initial model; "" if the manifest has none
    is_done: bool
    steps: Mapping[int, Metrics]  # in order of step; the last line of a step that ran twice
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the stages that it reads, by key
    switches: Mapping[int, str] = field(default_factory=dict)  # permanent changes of its schedule, by their first step
    is_begun: bool = False
    hours: tuple[str, ...] = ()  # of all cores and GPUs of the machine, in words
    nodes: tuple[str, ...] = ()  # of a cluster, each with what ran there last
    why_stale: str = ""  # why the recipe would now give another result; "" if it would not

    @property
    def state(self) -> StageState:
        if self.why_stale:
            return StageState.STALE
        if self.is_done:
            return StageState.DONE
        return StageState.BEGUN if self.is_begun or self.steps else StageState.TO_COME

    @property
    def is_stepped(self) -> bool:
        """Whether each of its steps is a batch of rollouts to learn from."""
        return any(key.startswith("rollout/") for key in self.metrics)

    @property
    def utilisation(self) -> tuple[str, ...]:
        return utilisation(self.steps.values())

    @property
    def metrics(self) -> set[str]:
        """The keys that any of its steps logged."""
        return {key for metrics in self.steps.values() for key in metrics}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of one evaluation. Absent metrics are absent from `figures`."""

    stage: str
    condition: str  # change of its tools: "none", "noise"; "" for real tools
    terms: str  # tasks and settings: only evaluations with equal terms are compared
    figures: Metrics
    init: str = ""  # the stage whose model it is of
    benchmark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """One warning, the stage that gave it, and how often it did."""

    stage: str
    text: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """Everything that a report shows about a run, except rollouts."""

    name: str
    command: str
    seed: str
    versions: Mapping[str, str]
    recipe: Mapping[str, str]  # flat: "stages.rl.steps" -> "60"
    stages: tuple[StageLog, ...]
    evaluations: tuple[Evaluation, ...]
    warnings: tuple[Warned, ...]
    losses: tuple[str, ...] = ()  # nodes, engines, code services and trainers that were lost, counted

    @property
    def stale(self) -> dict[str, str]:
        """Stale stages by name, with the reason."""
        return {stage.name: stage.why_stale for stage in self.stages if stage.state is StageState.STALE}

    @property
    def current_evaluations(self) -> tuple[Evaluation, ...]:
        """Evaluations that are not stale. Only these appear in headlines, comparisons and plots."""
        return tuple(each for each in self.evaluations if each.stage not in self.stale)

    @property
    def has_accuracy(self) -> bool:
        """Whether some evaluation has a reward that says what is right."""
        return any("accuracy" in each.figures for each in self.evaluations)

    @property
    def before_and_after(self) -> tuple[Evaluation, Evaluation] | None:
        """The last evaluation that has a comparable earlier one, and the first of those; None if there is none.

        Both are current, have the same terms, and the later model was trained from the earlier one. A student and its teacher
        are not compared. Evaluations without tools or with noisy tools are controls: they are compared only if no others are.
        """
        for is_control in (False, True):
            candidates = [each for each in self.current_evaluations if bool(each.condition) is is_control]
            for last in reversed(candidates):
                line = self._line_of(last)
                first = next(each for each in candidates if each.terms == last.terms and self._init_of(each) in line)
                if first is not last:
                    return first, last
        return None

    def _init_of(self, evaluation: Evaluation) -> str:
        """The stage of the evaluated model; "" if the manifest has none."""
        return next((stage.init for stage in self.stages if stage.name == evaluation.stage), "")

    def _line_of(self, evaluation: Evaluation) -> set[str]:
        """The stages of the evaluated model and of its ancestors."""
        inits = {stage.name: stage.init for stage in self.stages}
        line: set[str] = set()
        name = self._init_of(evaluation)
        while name not in line:
            line.add(name)
            name = inits.get(name) or name
        return line


def read_run(run: RunDirectory) -> RunLog:
    """Read what `run` has logged so far.

    Raises:
        RunError: there is no manifest, or a file is damaged.
    """
    manifest: dict[str, Any] = read_json(run.manifest)
    rows, events = read_lines(run.metrics), read_lines(run.events)
    stages: dict[str, dict[str, Any]] = manifest.get("stages") or {}  # in the order in which they run
    recipe = manifest.get("recipe") or {}
    return RunLog(
        name=str(manifest.get("name") or run.path.name),
        command=str(manifest.get("command", "")),
        seed=str(manifest.get("seed", "")),
        versions={str(key): str(value) for key, value in (manifest.get("versions") or {}).items()},
        recipe=_flat(recipe),
        stages=tuple(_stage(run, name, said, rows, events) for name, said in stages.items()),
        evaluations=tuple(
            _evaluation(name, read_json(path), (recipe.get("stages") or {}).get(name) or {})
            for name in stages
            if (path := run.stage(name).evaluation).exists()
        ),
        warnings=_warnings(events),
        losses=_losses(events),
    )


def why_stale(stage: StageDirectory) -> str:
    """Return why the recipe would now give another result of this stage; "" if it would not."""
    return str(read_json(stage.stale).get("because", "")) if stage.stale.exists() else ""


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of `values` that are finite numbers."""
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _stage(
    run: RunDirectory, name: str, said: Mapping[str, Any], rows: list[dict[str, Any]], events: list[dict[str, Any]]
) -> StageLog:
    directory = run.stage(name)
    placed = [event["nodes"] for event in events if (event.get("event"), event.get("stage")) == ("placed", name)]
    return StageLog(
        name=name,
        kind=str(said.get("kind", "")),
        init=str(said.get("init", "")),
        is_done=directory.done.exists(),
        steps=steps_of(rows, name),
        switches=_switches(events, name),
        inputs={str(key): tuple(map(str, stages)) for key, stages in (said.get("inputs") or {}).items()},
        is_begun=directory.path.exists(),
        hours=machine_hours(events, name),
        nodes=tuple(placed[-1]) if placed else (),
        why_stale=why_stale(directory),
    )


def steps_of(rows: list[dict[str, Any]], stage: str) -> dict[int, Metrics]:
    """The metrics of each step of `stage`, of its last line if it ran twice."""
    steps = {
        int(row["step"]): {key: value for key, value in finite(row).items() if key != "step"}
        for row in rows
        if row.get("stage") == stage and "step" in row
    }
    return dict(sorted(steps.items()))


def _switches(events: list[dict[str, Any]], stage: str) -> dict[int, str]:
    """Return the permanent changes of the last attempt, and of earlier attempts those before the resumed checkpoint."""
    found: dict[int, dict[str, None]] = {}
    before, has_begun = found, False
    for event in (each for each in events if each.get("stage") == stage):
        match event.get("event"):
            case "stage_started" if has_begun:  # an attempt without a step changes nothing
                before, found, has_begun = found, {}, False
            case "resumed":
                found, has_begun = {step: whats for step, whats in before.items() if step <= int(event["step"]) + 1}, True
            case "step_finished":
                has_begun = True
            case "scheduled" if not str(event["when"]).startswith("every_"):
                found.setdefault(int(event["step"]), {})[str(event["what"])] = None
    return {step: ", ".join(whats) for step, whats in sorted(found.items())}


def machine_hours(events: Iterable[Mapping[str, Any]], stage: str) -> tuple[str, ...]:
    """Hours of the cores and the GPUs of the machine over all attempts of `stage`, each up to its last event."""
    hours: dict[str, float] = dict.fromkeys(["core", "GPU"], 0.0)
    start: Mapping[str, Any] = {}
    seconds = 0.0
    for event in (each for each in events if each.get("stage") == stage):
        if event.get("event") == "stage_started":
            start, seconds = event, 0.0
        elapsed = float(event["time"]) - float(start.get("time", event["time"]))
        for kind, key in (("core", "cores"), ("GPU", "gpus")):
            hours[kind] += (elapsed - seconds) * float(start.get(key, 0)) / 3600
        seconds = elapsed
    return tuple(f"{value:.2g} {kind} hours" for kind, value in hours.items() if value > 0)


def utilisation(steps: Iterable[Metrics]) -> tuple[str, ...]:
    """The share of the time of `steps` in which trainer and engines worked, and the mean number of calls at once; in words.

    Rollouts of several steps may overlap (`async_rollouts`), so those of a step count for its own time at most.
    """
    engines_s = trainer_s = calls_s = total_s = 0.0
    for step in (each for each in steps if "scheduler/busy_share" in each):
        total_s += step["time/step_s"]
        engines_s += step["scheduler/busy_share"] * min(step["time/rollout_s"], step["time/step_s"])
        trainer_s += sum(step.get(f"time/{phase}_s", 0.0) for phase in ("score", "update", "publish"))
        calls_s += step.get("rollout/tool_calls_dispatched", 0.0) * step.get("time/tool_latency_mean_s", 0.0)
    if not total_s:
        return ()
    shares = (f"{name} {seconds / total_s:.0%}" for name, seconds in (("trainer", trainer_s), ("engines", engines_s)))
    return (*shares, *([f"{calls_s / total_s:.2g} tool calls at once"] if calls_s else []))


def _evaluation(stage: str, result: Mapping[str, Any], recipe: Mapping[str, Any]) -> Evaluation:
    tools = str(result.get("tools", "real"))
    terms = [recipe.get(key) for key in ("tasks", "split", "sampling", "limits")]
    terms += [recipe.get("num_tasks", result.get("num_tasks")), tools, recipe.get("benchmark")]
    return Evaluation(
        stage=stage,
        condition="" if tools == "real" else f"tools: {tools}",
        terms=json.dumps(terms, sort_keys=True),
        figures=finite(result),
        init=str(result.get("init", "")),
        benchmark=str(result.get("benchmark", "")),
    )


def _warnings(events: list[dict[str, Any]]) -> tuple[Warned, ...]:
    warnings = (event for event in events if event.get("event") == "warning")
    counts = Counter((str(event.get("stage", "")), str(event.get("text", ""))) for event in warnings)
    return tuple(Warned(stage=stage, text=text, count=count) for (stage, text), count in counts.items())


def _losses(events: list[dict[str, Any]]) -> tuple[str, ...]:
    counts = Counter(str(event.get("event")) for event in events)
    of = [str(event.get("process")) for event in events if event.get("event") == "process_lost"]
    found = {
        "node": counts["node_lost"],
        "engine": max(counts["engine_lost"], sum(process.startswith("engine ") for process in of)),  # also while it started
        "code service": sum(process.startswith("code service") for process in of),
        "trainer": of.count("the trainer") if of else counts["stage_restarted"],  # only a cluster names processes
    }
    return tuple(counted(num, what) for what, num in found.items() if num)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = str(value)
    return leaves
