"""The two files of an evaluation: `result.json` with its metrics, `problems.jsonl` with the attempts at each problem.

Comparisons read both, for evaluations of strop and of other harnesses; the leaderboard ranks results below directories.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from strop.errors import RunError
from strop.evaluation.metrics import FORM, USUAL, ResponseKind, Verdict, kind_of, rollout_metrics
from strop.evaluation.statistics import average_at_k, majority_at_k, pass_at_k
from strop.run_directory import RunDirectory, StageDirectory, read_json, read_lines, write_json, write_text
from strop.types import Group

RESULT, PROBLEMS = "result.json", "problems.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFiles:
    """The content of one evaluation's directory. `problems` is empty if it has no problems.jsonl (BFCL)."""

    directory: Path
    result: Mapping[str, Any]
    problems: Sequence[Mapping[str, Any]]
    why_stale: str = ""  # "" if its stage is not stale


MAX_VOID_FRACTION = 0.01
"""Of a final result: void rollouts may be longer or harder than the others."""


def figures_of(
    groups: Sequence[Group],
    *,
    seed: int,
    k: int | None = None,
    votes: Sequence[Sequence[str]] | None = None,
    verdict: Verdict = USUAL,
) -> dict[str, Any]:
    """Return the metrics of judged groups. Tasks with only void rollouts are left out and counted.

    Accuracy, pass@k and maj@k cover the tasks for which `verdict` says what is right, and are absent if there is none. Tasks
    with fewer than k attempts that are not void are not in pass@k, and counted.

    Args:
        k: the number of attempts that each task should have; by default the largest number of attempts.
        votes: per group and attempt the normalized answer; without votes there is no maj@k.

    Raises:
        ValueError: every rollout is void.
    """
    played = [group for group in groups if group.trajectories]
    if not played:
        raise ValueError("every rollout is void, so there are no figures")
    verdicts = [_verdicts(group, verdict) for group in groups]
    judged = [each for each in verdicts if each]
    figures: dict[str, Any] = {
        "num_tasks": len(played),
        "num_tasks_void": len(groups) - len(played),
        "num_void": sum(group.num_void for group in groups),
        "num_tasks_without_verdict": len(played) - len(judged),
    }
    if judged:
        accuracy = average_at_k([[float(each) for each in attempts] for attempts in judged], seed=seed)
        k = max(map(len, judged)) if k is None else k
        whole = [attempts for attempts in judged if len(attempts) >= k]
        figures |= {"accuracy": accuracy.mean, "accuracy_low": accuracy.low, "accuracy_high": accuracy.high}
        figures["num_tasks_below_k"] = len(judged) - len(whole)
        if whole:
            figures["pass_at_k"] = pass_at_k(whole, k=k)
            sizes = sorted({k, *(2**power for power in range(k.bit_length()))})
            figures["pass_at"] = {str(each): pass_at_k(whole, k=each) for each in sizes}
        if votes is not None:
            cast = [each for each, of_task in zip(votes, verdicts, strict=True) if of_task]
            figures["maj_at_k"] = majority_at_k(cast, judged)
    figures |= {
        name.removeprefix("rollout/"): value
        for name, value in rollout_metrics(groups, verdict).items()
        if name.startswith("rollout/") and name != "rollout/accuracy"
    }
    scored = [each for group in played for each in group.trajectories]
    has_form = bool(judged) and any(FORM in each.reward_parts for each in scored)
    none = {kind.value: 0 for kind in ResponseKind if has_form and kind is not ResponseKind.WRONG}
    rights = [(each, is_right) for each in scored if (is_right := verdict(each)) is not None]
    figures["kinds"] = none | Counter(kind_of(each, is_right=is_right).value for each, is_right in rights)
    figures["is_final"] = figures["void_fraction"] <= MAX_VOID_FRACTION
    outcomes = Counter(call.outcome.value for each in scored for call in each.trajectory.calls)
    figures["tool_outcomes"] = dict(sorted(outcomes.items()))
    figures["parts"] = _parts(played, seed=seed)
    return figures


def problem_of(group: Group, votes: Sequence[str] | None, verdict: Verdict = USUAL) -> dict[str, Any]:
    """Return one line of `problems.jsonl`. Lists have an entry for each attempt; `correct` is empty without a verdict.

    A part that was not computed for an attempt is None, which is not 0.
    """
    scored = group.trajectories
    lists: dict[str, list[Any]] = {
        "correct": [int(each) for each in _verdicts(group, verdict)],
        "length_tokens": [each.trajectory.num_response_tokens for each in scored],
        "tool_calls": [sum(call.outcome.is_counted for call in each.trajectory.calls) for each in scored],
        "tool_errors": [each.trajectory.num_errors for each in scored],
        "truncated": [int(each.trajectory.is_truncated) for each in scored],
    }
    names = sorted({name for each in scored for name in each.reward_parts})
    return {
        "id": group.task.id,
        "question": group.task.question,
        "answer": group.task.answer,
        **lists,
        "parts": {name: [each.reward_parts.get(name) for each in scored] for name in names},
        **({} if votes is None else {"answers": list(votes)}),
        "num_void": group.num_void,
    }


def refuse_to_replace(directory: Path, result: Mapping[str, Any]) -> None:
    """Raise `RunError` if `directory` holds the result of another benchmark, model or judge than `result`."""
    path = directory / RESULT
    if not path.exists():
        return
    there, here = (json.loads(json.dumps(each)) for each in (read_json(path), result))
    if differing := [key for key in ("benchmark", "run", "reward") if there.get(key) != here.get(key)]:
        raise RunError(
            f"{path}: holds another result, which differs in {', '.join(differing)}. Choose another --name, or remove the"
            " directory."
        )


def write_eval(directory: Path, result: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]) -> None:
    """Write both files. The result comes last: an evaluation without it is not finished."""
    write_text(directory / PROBLEMS, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in problems))
    write_json(directory / RESULT, result)


def read_eval(path: Path) -> EvalFiles:
    """Return the evaluation at `path`: a result.json, its directory, a stage of a run, or a run with one evaluation.

    Raises:
        RunError: there is no evaluation, or more than one.
    """
    found = [path] if path.is_file() else find_results(path)
    if not found:
        problem = f"no evaluation there (no eval/{RESULT})" if path.exists() else "no such directory"
        raise RunError(f"{path}: {problem}. Give a run of `strop eval`, or its stage.")
    if len(found) > 1:
        names = "\n".join(f"  {each.parent}" for each in found[:8])
        raise RunError(f"{path}: holds {len(found)} evaluations. Give one of them:\n{names}")
    result = read_json(found[0])
    if not isinstance(result, dict) or not {"accuracy", "num_tasks"} & result.keys():
        raise RunError(f"{found[0]}: not the result of an evaluation. Give a run of `strop eval`, or its stage.")
    return EvalFiles(
        directory=found[0].parent, result=result, problems=read_lines(found[0].parent / PROBLEMS), why_stale=why_stale(found[0])
    )


def find_results(path: Path) -> list[Path]:
    """Return every `result.json` of an evaluation below `path`, sorted.

    Results that a run has moved to its `stale/` are found only if `path` lies in there.
    """
    if (path / RESULT).is_file():
        return [path / RESULT]
    return sorted(each for each in path.rglob(f"eval/{RESULT}") if each.is_file() and not _is_replaced(each, path))


def place_of(result: Path) -> Path:
    """Return the directory that `result` belongs to: a stage, or an import."""
    folder = result.resolve().parent
    return folder.parent if folder.name == "eval" else folder


def why_stale(result: Path) -> str:
    """Return why the stage that wrote `result` is stale, or ""."""
    marked = StageDirectory(place_of(result)).stale
    return str(read_json(marked).get("because") or "its inputs have changed") if marked.exists() else ""


def _is_replaced(result: Path, below: Path) -> bool:
    """Whether a run below `below` has moved `result` to its `stale/`. A run itself may have the name `stale`."""
    places = [place for place in result.parents if place.name == "stale" and place != below and place.is_relative_to(below)]
    return any((place.parent / "stages").is_dir() or RunDirectory(place.parent).manifest.exists() for place in places)


def _verdicts(group: Group, verdict: Verdict) -> list[bool]:
    """Return one verdict for each attempt, or [] if nothing says whether they are right."""
    found = [verdict(scored) for scored in group.trajectories]
    return [bool(each) for each in found] if None not in found else []


def _parts(groups: Sequence[Group], *, seed: int) -> dict[str, dict[str, float]]:
    """Return each part of the reward as a mean over the tasks that have it, with its interval."""
    names = sorted({name for group in groups for scored in group.trajectories for name in scored.reward_parts})
    found = {}
    for name in names:
        judged = [[each.reward_parts[name] for each in group.trajectories if name in each.reward_parts] for group in groups]
        found[name] = asdict(average_at_k([of_task for of_task in judged if of_task], seed=seed))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One evaluation. `result` is its result.json."""

    benchmark: str
    name: str  # of the run, followed by the stage if the run has several evaluations of the benchmark
    place: Path
    result: Mapping[str, Any]

    @property
    def accuracy(self) -> float:
        return float(self.result["accuracy"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """Benchmarks by name, each with the best entry first; and the reasons why damaged or stale results are left out."""

    benchmarks: Mapping[str, Sequence[Entry]]
    left_out: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmarks": {
                name: [{"name": each.name, "place": str(each.place), **each.result} for each in entries]
                for name, entries in self.benchmarks.items()
            },
            "left_out": list(self.left_out),
        }


def gather(directories: Sequence[Path]) -> Leaderboard:
    """Return every finished evaluation below `directories`. Damaged and stale ones are listed in `left_out`.

    Raises:
        RunError: a directory does not exist, or none holds an evaluation.
    """
    for directory in directories:
        if not directory.exists():
            raise RunError(f"{directory}: no such directory. Give directories that hold runs.")
    paths = dict.fromkeys(path.resolve() for directory in directories for path in find_results(directory))
    entries, left_out = [], []
    for path in paths:
        try:
            entries.append(_entry(path))
        except RunError as error:
            left_out.append(str(error))
    if not entries:
        reasons = "; ".join(left_out) or "there is no eval/result.json"
        raise RunError(f"{', '.join(map(str, directories))}: no evaluation to show: {reasons}. Run `strop eval` first.")
    counts = Counter((each.benchmark, _run_of(each.place)) for each in entries)
    several = {each.place for each in entries if counts[each.benchmark, _run_of(each.place)] > 1}
    entries = [replace(each, name=f"{each.name}/{each.place.name}") if each.place in several else each for each in entries]
    entries.sort(key=lambda each: (each.benchmark, -each.accuracy, each.name, str(each.place)))
    benchmarks: dict[str, list[Entry]] = {}
    for each in entries:
        benchmarks.setdefault(each.benchmark, []).append(each)
    return Leaderboard(benchmarks=benchmarks, left_out=left_out)


def _entry(path: Path) -> Entry:
    result = read_json(path)
    if not isinstance(result, dict) or not isinstance(result.get("accuracy"), int | float):
        why = "no reward says what is right. A function does with right_above"
        raise RunError(f"{path}: cannot be ranked, since it has no 'accuracy': {why}")
    place = place_of(path)
    if because := why_stale(path):
        raise RunError(f"{path}: stale, so it is not ranked: {because}. Rerun it: `strop train` with --from {place.name}")
    return Entry(
        benchmark=str(result.get("benchmark") or result.get("stage") or "unnamed"),
        name=str(result.get("run") or _run_of(place).name),
        place=place,
        result=result,
    )


def _run_of(place: Path) -> Path:
    """Return the run directory of a stage."""
    return place.parent.parent if place.parent.name == "stages" else place
