"""Writes down what happens to every rollout of a step as it happens, so that a killed step goes on where it can.

Two files a step: the ledger holds what started, which tool calls were open and which rollouts ended; the rollouts file holds
every finished rollout. A rollout is reused only if it was sampled from the very weights that the resumed run holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from strop.errors import RunError
from strop.rollout.environment import CallPlace
from strop.rollout.player import Spent
from strop.rollout.scheduler.report import BatchReport
from strop.rollout.tool_calls import ParsedCall
from strop.run_directory import (
    LineWriter,
    StageDirectory,
    pack,
    packed,
    raw_lines,
    read_json,
    read_lines,
    write_json,
    write_lines,
    write_text,
)
from strop.stages.context import StageContext
from strop.tools.protocol import ToolResult
from strop.types import Group, RolloutKey, ScoredTrajectory, ToolOutcome

Rollouts: TypeAlias = list[ScoredTrajectory]
_SCORED = TypeAdapter(ScoredTrajectory)
SAMPLE_TASKS = 8  # of an old step
_TASK_INDEX = re.compile(rb'"task_index": (\d+)')
_WALL_CLOCK = (ToolOutcome.TIMEOUT, ToolOutcome.KILLED)
"""Outcomes that another machine, or a busier one, might not repeat: they are replayed instead of run again."""


def read_rollouts(path: Path, *, weights: str | None = None) -> list[ScoredTrajectory]:
    """The finished rollouts in `path`, in order of arrival; with `weights`, only those sampled from nothing else."""
    return [
        _SCORED.validate_python(line["rollout"])
        for line in read_lines(path)
        if weights is None or set(line["weights"].values()) <= {weights}
    ]


def settle_rollouts(directory: StageDirectory, *, upto: int, keep: int) -> Iterator[str]:
    """Compress the files of steps up to `upto`, which no try plays again; of all but the last `keep` steps keep a sample.

    That is the rollouts of the first tasks. What says why each rollout was kept stays, without entropies of the others, and the
    ledger goes. Yields what could not be done, in a sentence each; nothing depends on it.
    """
    folder = directory.rollouts(0).parent
    for path in sorted(folder.glob("step-*.jsonl")):
        if _step_of(path) <= upto:
            try:
                pack(path)
            except RunError as error:
                yield str(error)
    for ledger in sorted(folder.glob("step-*.ledger.jsonl*"))[:-keep]:  # those of a sample have none
        if ledger.suffix == ".gz":
            try:
                _keep_sample(directory, _step_of(ledger))
            except RunError as error:
                yield f"the rollouts of step {_step_of(ledger)} are left as they are: {error}"
            ledger.unlink()


def _step_of(path: Path) -> int:
    return int(path.name.partition(".")[0].removeprefix("step-"))


def _keep_sample(directory: StageDirectory, step: int) -> None:
    """Lines are copied as they are: a step of a paper has gigabytes of JSON, and the first `task_index` is the rollout's."""
    rollouts = directory.rollouts(step)
    if not packed(rollouts).exists():
        return
    kept = set(sorted({_task_of(line) for line in raw_lines(rollouts)})[:SAMPLE_TASKS])
    pack(rollouts, (line for line in raw_lines(rollouts) if _task_of(line) in kept))
    if directory.selection(step).exists():
        selection = read_json(directory.selection(step))
        for group in selection["groups"]:
            for record in group["rollouts"] if group["task_index"] not in kept else ():
                record.pop("entropies", None)
        write_json(directory.selection(step), selection)


def _key_of(line: Mapping[str, Any]) -> RolloutKey:
    return RolloutKey(**line["rollout"]["trajectory"]["key"])


def _task_of(line: bytes) -> int:
    found = _TASK_INDEX.search(line)
    return int(found[1]) if found else -1


def void_reasons(rollouts: Path) -> list[str]:
    """Why rollouts of that rollouts file's step are void, one reason each, in canonical order."""
    reasons: dict[RolloutKey, str] = {}
    for line in read_lines(ledger_of(rollouts)):
        if line["event"] == "finished":  # by a later try; that it cannot be judged would follow in a later line
            reasons.pop(RolloutKey(**line["key"]), None)
        elif line["event"] == "voided":
            reasons[RolloutKey(**line["key"])] = line["reason"]
    return [reasons[key] for key in sorted(reasons)]


class StepLedger:
    """The two files of one step, open for appending. Implements `PlayObserver`."""

    def __init__(
        self, rollouts: Path, *, weights: str, published: Mapping[int, str], reuse: Callable[[Rollouts], Rollouts] | None = None
    ) -> None:
        """
        Args:
            weights: checksum of the policy that this step begins with.
            published: checksums by policy version; it may grow while the step is played.
            reuse: chooses from the rollouts that earlier tries finished. Default: those that were sampled from `weights`.
        """
        path = ledger_of(rollouts)
        found = {each.trajectory.key: each for each in read_rollouts(rollouts, weights=None if reuse else weights)}
        reused = list(found.values()) if reuse is None else reuse(list(found.values()))
        self.finished_before = {scored.trajectory.key: scored for scored in reused}
        if reuse is not None and len(reused) < len(found):  # else a later try, which knows newer versions, takes them up again
            lines = read_lines(rollouts)
            write_lines(rollouts, [line for line in lines if _key_of(line) in self.finished_before])
        self._recorded = _wall_clock_results(path)
        self._lines = LineWriter(path)
        self._rollouts = LineWriter(rollouts)
        self._weights, self.is_mixed = weights, reuse is not None  # whether several weights sample the step's rollouts
        self._published = published
        self._displaced: list[Spent] = []
        self.num_replaced = 0  # rollouts whose tokens another one has
        self.void_tokens: list[int] = []  # of each void rollout, when it failed
        self._lines.append({"event": "opened", "weights": weights, "reused": len(self.finished_before)})

    def started(self, key: RolloutKey, *, seed: int) -> None:
        self._lines.append({"event": "started", "key": asdict(key), "seed": seed})

    def finished(self, scored: ScoredTrajectory) -> None:
        rollout = _SCORED.dump_python(scored, mode="json")
        versions = sorted({version for turn in scored.trajectory.turns for version, _ in turn.completion.spans})
        self._rollouts.append({"rollout": rollout, "weights": {str(each): self._published.get(each, "") for each in versions}})
        self._lines.append({"event": "finished", "key": asdict(scored.trajectory.key)})

    def voided(self, key: RolloutKey, *, reason: str, num_tokens: int) -> None:
        self.void_tokens.append(num_tokens)
        self._lines.append({"event": "voided", "key": asdict(key), "reason": reason})

    def displaced(self, key: RolloutKey, spent: Spent) -> None:
        self._displaced.append(spent)
        self._lines.append({"event": "displaced", "key": asdict(key), **asdict(spent)})

    def replaced(self, key: RolloutKey) -> None:
        self.num_replaced += 1
        self._lines.append({"event": "replaced", "key": asdict(key)})

    @property
    def displaced_figures(self) -> dict[str, float]:
        """Metrics of the branches that were given up since the ledger was opened."""
        return {
            "scheduler/branches_displaced": float(len(self._displaced)),
            "scheduler/displaced_tokens": float(sum(spent.generated_tokens for spent in self._displaced)),
            "scheduler/displaced_prefilled_tokens": float(sum(spent.prefilled_tokens for spent in self._displaced)),
        }

    def closed(self, groups: Sequence[Group], *, figures: Mapping[str, float], time_s: float) -> None:
        """The step is played to its end: which rollouts each group has, and what playing them was like.

        Those that no judge could judge are among them: whoever reads them judges the group anew.
        """
        members = []
        for group in groups:
            keys = [asdict(key) for key in sorted(trajectory.key for trajectory in group.tree)]
            members.append({"task_index": group.task_index, "num_void": group.num_void - len(group.excluded), "keys": keys})
        weights = None if self.is_mixed else self._weights
        facts = {"weights": weights, "groups": members, "figures": dict(figures), "time_s": time_s}
        self._lines.append({"event": "closed", **facts})

    async def record_call(self, place: CallPlace, call: ParsedCall, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """See `CallRecorder`."""
        identity = _identify(call.name, call.arguments)
        if (found := self._recorded.get((place, identity))) is not None:
            return found
        self._lines.append({"event": "tool_opened", **asdict(place), "call": identity})
        result = await run()
        self._lines.append({"event": "tool_closed", **asdict(place), "result": asdict(result)})
        return result

    def close(self) -> None:
        """Everything written is on disk when this returns."""
        for writer in (self._lines, self._rollouts):
            writer.sync()
            writer.close()


_CallKey = tuple[CallPlace, str]


def ledger_of(rollouts: Path) -> Path:
    return rollouts.with_suffix(".ledger.jsonl")


def _identify(name: str, arguments: Mapping[str, object]) -> str:
    return json.dumps([name, arguments], sort_keys=True, default=str)


def _wall_clock_results(path: Path) -> dict[_CallKey, ToolResult]:
    calls: dict[CallPlace, str] = {}
    results: dict[_CallKey, ToolResult] = {}
    for line in read_lines(path):
        if line["event"] not in ("tool_opened", "tool_closed"):
            continue
        place = CallPlace(line["seed"], line["turn"], line["index"])
        if line["event"] == "tool_opened":
            calls[place] = line["call"]
        elif line["result"]["outcome"] in _WALL_CLOCK:
            result: dict[str, Any] = line["result"] | {"outcome": ToolOutcome(line["result"]["outcome"])}
            results[(place, calls[place])] = ToolResult(**result)
    return results


def write_timeline(context: StageContext, step: int, report: BatchReport) -> None:
    """Write what the engines did during a step. The report draws it."""
    timeline = {"step": step, **report.as_timeline()}
    write_text(context.directory.timeline(step), json.dumps(timeline, allow_nan=False) + "\n")
