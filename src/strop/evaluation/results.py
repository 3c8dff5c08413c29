"""An evaluation's two files: `result.json` with its figures, `problems.jsonl` with what each attempt made of every problem.

Comparisons and the leaderboard read them, whoever wrote them: an evaluation of ours, or an adapter of another harness.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import RunError
from strop.evaluation.statistics import average_at_k, majority_at_k, pass_at_k
from strop.evaluation.summary import rollout_metrics
from strop.evaluation.verdict import USUAL, Verdict
from strop.runs import RunDirectory, StageDirectory, read_json, read_lines, write_json, write_text
from strop.types import Group

RESULT, PROBLEMS = "result.json", "problems.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFiles:
    """What lies in one evaluation's directory. `problems` is empty where the evaluation keeps none (an older one, BFCL)."""

    directory: Path
    result: Mapping[str, Any]
    problems: Sequence[Mapping[str, Any]]
    why_stale: str = ""  # why its stage is marked so; "" where it is not


def figures_of(
    groups: Sequence[Group],
    *,
    seed: int,
    k: int | None = None,
    votes: Sequence[Sequence[str]] | None = None,
    verdict: Verdict = USUAL,
) -> dict[str, Any]:
    """The figures of groups that were judged; a task all of whose rollouts were void is left out and counted.

    Accuracy, pass@k and maj@k are of the tasks of which `verdict` says what is right; without any they are left out. A task
    with fewer than k attempts that are not void has no pass@k: it is in none, and counted.

    Args:
        k: the attempts that each task was meant to have; the most that one has by default.
        votes: per group and attempt the answer, equal ones spelt alike; without them there is no maj@k.

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
            figures["pass_at"] = {str(each): pass_at_k(whole, k=each) for each in _powers_of_two(k)}
        if votes is not None:
            cast = [each for each, of_task in zip(votes, verdicts, strict=True) if of_task]
            figures["maj_at_k"] = majority_at_k(cast, judged)
    figures |= {
        name.removeprefix("rollout/"): value
        for name, value in rollout_metrics(groups, verdict).items()
        if name.startswith("rollout/") and name != "rollout/accuracy"
    }
    figures["tool_outcomes"] = _tool_outcomes(groups)
    figures["parts"] = _parts(played, seed=seed)
    return figures


def problem_of(group: Group, votes: Sequence[str] | None, verdict: Verdict = USUAL) -> dict[str, Any]:
    """One line of `problems.jsonl`; lists have an entry for each attempt, `correct` none where nothing says what is right.

    Of a part that an attempt was not given the entry is None: nobody judged it, which is not 0.
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


def refuse_to_replace(directory: Path, result: Mapping[str, Any], *, told_by: Collection[str] | None = None) -> None:
    """Raises `RunError` where `directory` holds a result of something else than `result`, told by these keys, or by all."""
    path = directory / RESULT
    if not path.exists():
        return
    there, here = (json.loads(json.dumps(each)) for each in (read_json(path), result))
    keys = [key for key in told_by or {**there, **here} if there.get(key) != here.get(key)]
    if keys:
        raise RunError(
            f"{path}: holds the result of something else: it differs in {', '.join(keys)}. Give this one a --name of its own,"
            " or remove the directory."
        )


def write_eval(directory: Path, result: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]) -> None:
    """The result comes last: while it is missing the evaluation is not finished."""
    write_text(directory / PROBLEMS, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in problems))
    write_json(directory / RESULT, result)


def read_eval(path: Path) -> EvalFiles:
    """The one evaluation at `path`: its result.json, the directory of it, a stage of a run, or a run with one evaluation.

    Raises:
        RunError: there is none, or more than one.
    """
    found = [path] if path.is_file() else find_results(path)
    if not found:
        hint = "" if path.exists() else " There is no such directory."
        raise RunError(f"{path}: no evaluation lies there (no eval/{RESULT}).{hint} Give a run of `strop eval`, or its stage.")
    if len(found) > 1:
        names = "\n".join(f"  {each.parent}" for each in found[:8])
        raise RunError(f"{path}: holds {len(found)} evaluations. Give one of them:\n{names}")
    result = read_json(found[0])
    if not isinstance(result, dict) or not {"accuracy", "num_tasks"} & result.keys():
        raise RunError(
            f"{found[0]}: no result of an evaluation (neither 'accuracy' nor 'num_tasks'). Give a run of `strop eval`, or its"
            " stage."
        )
    return EvalFiles(
        directory=found[0].parent,
        result=result,
        problems=read_lines(found[0].parent / PROBLEMS),
        why_stale=why_stale(found[0]),
    )


def find_results(path: Path) -> list[Path]:
    """Every `result.json` of an evaluation below `path`, in the order of their places.

    What a run has put aside, to make it anew, is no result of it any more: it is found only where `path` lies in there.
    """
    if (path / RESULT).is_file():
        return [path / RESULT]
    return sorted(each for each in path.rglob(f"eval/{RESULT}") if each.is_file() and not _is_put_aside(each, path))


def place_of(result: Path) -> Path:
    """The directory of the evaluation that wrote `result`, whole: of its stage, or of an import."""
    folder = result.resolve().parent
    return folder.parent if folder.name == "eval" else folder


def why_stale(result: Path) -> str:
    """Why the stage that wrote `result` is marked as one that the recipe would make otherwise now; "" where it is not."""
    marked = StageDirectory(place_of(result)).stale
    return str(read_json(marked).get("because") or "what it stands on has changed") if marked.exists() else ""


def _is_put_aside(result: Path, below: Path) -> bool:
    """Whether a run between `below` and `result` has moved it to its `stale/`. A run may itself be called `stale`."""
    places = [place for place in result.parents if place.name == "stale" and place != below and place.is_relative_to(below)]
    return any((place.parent / "stages").is_dir() or RunDirectory(place.parent).manifest.exists() for place in places)


def _verdicts(group: Group, verdict: Verdict) -> list[bool]:
    """One for each attempt; [] where nothing says whether they are right."""
    found = [verdict(scored) for scored in group.trajectories]
    return [bool(each) for each in found] if None not in found else []


def _powers_of_two(k: int) -> list[int]:
    """1, 2, 4, ... and `k` itself."""
    return sorted({k, *(2**power for power in range(k.bit_length()))})


def _tool_outcomes(groups: Sequence[Group]) -> dict[str, int]:
    calls = (call for group in groups for scored in group.trajectories for call in scored.trajectory.calls)
    return dict(sorted(Counter(call.outcome.value for call in calls).items()))


def _parts(groups: Sequence[Group], *, seed: int) -> dict[str, dict[str, float]]:
    """Each part of the reward, as accuracy is counted: mean over the tasks that it is for, with its interval."""
    names = sorted({name for group in groups for scored in group.trajectories for name in scored.reward_parts})
    found = {}
    for name in names:
        judged = [[each.reward_parts[name] for each in group.trajectories if name in each.reward_parts] for group in groups]
        each = average_at_k([of_task for of_task in judged if of_task], seed=seed)
        found[name] = {"mean": each.mean, "low": each.low, "high": each.high}
    return found
