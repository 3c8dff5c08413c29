"""Reads the rollouts of one stage, counted step by step, also while the run continues."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from pydantic import TypeAdapter, ValidationError

from strop.analysis.statistics import Figures, count, with_entropies
from strop.errors import RunError, UserError
from strop.reports.log import RunLog, StageLog, read_run
from strop.reports.rollouts import find_tokenizer, token_texts
from strop.run_directory import RunDirectory, names_damage, read_json, read_lines
from strop.types import RolloutKey, ScoredTrajectory

_MAX_KNOWN = 4096  # turns whose texts are remembered
_SCORED = TypeAdapter(ScoredTrajectory)
_FILE = re.compile(r"step-(\d+)\.jsonl(\.gz)?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """One stage of a run, step by step."""

    run: str
    stage: str
    steps: Mapping[int, Figures]
    num_without_entropies: int  # number of skipped rollouts

    @property
    def total(self) -> Figures:
        return sum(self.steps.values(), Figures())


def parse_steps(text: str) -> list[range]:
    """Return the ranges of steps in a text such as `1-10,25`.

    Raises:
        UserError: the text has another form.
    """
    ranges = []
    for word in text.split(","):
        match = _RANGE.fullmatch(word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise UserError(f"--steps {text}: {word.strip()!r} is no step and no range of steps. Write it as in 1-10,25.")
        ranges.append(range(first, last + 1))
    return ranges


@names_damage
def read_analysis(run: RunDirectory, *, stage: str | None = None, steps: Sequence[range] | None = None) -> Analysis:
    """Count the tokens of the rollouts of `stage` in `steps` (default: all).

    The default stage is the last one that trains on rollouts, else the last one with rollouts.

    Raises:
        RunError: there is no such stage or step, it has no rollouts, they hold no entropies, or a file is damaged.
    """
    log = read_run(run)
    chosen = _stage(run, log, stage)
    tokenizer = find_tokenizer(run, log, chosen)
    if tokenizer is None:
        raise RunError(
            f"{run.path}: no tokenizer.json of stage {chosen.name!r} or of one before it, so its tokens have no text. Put the"
            f" tokenizer.json of the model that the run began with into {run.stage(chosen.name).model}."
        )
    texts = lru_cache(_MAX_KNOWN)(partial(token_texts, tokenizer))  # of the ids of a turn
    figures: dict[int, Figures] = {}
    num_without = 0
    for step in _steps(run, chosen.name, steps):
        trained = _trained_entropies(run, chosen.name, step)
        counted = []
        for scored in _played(run, chosen.name, step):
            whole = with_entropies(scored.trajectory, trained.get(scored.trajectory.key, ()))
            if whole is None:
                num_without += 1
            else:
                counted.append((whole, [texts(turn.completion.ids) for turn in whole.turns]))
        figures[step] = count(counted)
    if not sum(each.num_rollouts for each in figures.values()):
        raise RunError(_nothing_to_count(run, chosen.name, num_without))
    return Analysis(run=log.name, stage=chosen.name, steps=figures, num_without_entropies=num_without)


def _nothing_to_count(run: RunDirectory, stage: str, num_without: int) -> str:
    place = f"{run.stage(stage).path / 'rollouts'}"
    if num_without:
        return (
            f"{place}: no entropies, which servers (vLLM, SGLang) do not report. Set log_entropies = true in a stage of kind"
            " rl, and its trainer scores them; or evaluate the model with `strop eval` and engine.kind = 'torch', and analyse"
            " that run."
        )
    return f"{place}: no rollout has finished yet. Try again when one has."


def _stage(run: RunDirectory, log: RunLog, name: str | None) -> StageLog:
    with_rollouts = [stage for stage in log.stages if _recorded(run, stage.name)]
    if not with_rollouts:
        raise RunError(
            f"{run.path}: no rollouts to analyse: no stage has a rollouts/step-<k>.jsonl. Stages that play tasks (rl, eval and"
            " their like) write them, once their first rollout has finished."
        )
    if name is None:
        return next((stage for stage in reversed(with_rollouts) if stage.is_stepped), with_rollouts[-1])
    found = next((stage for stage in with_rollouts if stage.name == name), None)
    if found is None:
        known = any(stage.name == name for stage in log.stages)
        problem = "the stage has no rollouts" if known else "the run has no such stage"
        names = ", ".join(stage.name for stage in with_rollouts)
        raise RunError(f"--stage {name}: {problem} in {run.path}. Stages with rollouts: {names}.")
    return found


def _recorded(run: RunDirectory, stage: str) -> list[int]:
    directory = run.stage(stage).rollouts(0).parent
    found = (_FILE.fullmatch(path.name) for path in directory.glob("step-*.jsonl*"))
    return sorted({int(match[1]) for match in found if match})


def _steps(run: RunDirectory, stage: str, wanted: Sequence[range] | None) -> list[int]:
    recorded = _recorded(run, stage)
    if wanted is None:
        return recorded
    steps = [step for step in recorded if any(step in each for each in wanted)]
    if not steps:
        span = str(recorded[0]) if len(recorded) == 1 else f"{recorded[0]} to {recorded[-1]}"
        raise RunError(f"--steps: stage {stage!r} of {run.path} has rollouts of none of these. It has step {span}.")
    return steps


def _trained_entropies(run: RunDirectory, stage: str, step: int) -> dict[RolloutKey, Sequence[float]]:
    """The trainer's, of the rollouts that the step trained on; see `strop.analysis.statistics`."""
    path = run.stage(stage).selection(step)
    groups = read_json(path).get("groups", []) if path.exists() else []
    records = [record for group in groups for record in group["rollouts"] if "entropies" in record]
    return {RolloutKey(**record["key"]): record["entropies"] for record in records}


def _played(run: RunDirectory, stage: str, step: int) -> Iterator[ScoredTrajectory]:
    """Return rollouts in canonical order. Of a rollout that was repeated after a kill, only the last was trained on."""
    path = run.stage(stage).rollouts(step)
    played: dict[RolloutKey, ScoredTrajectory] = {}
    for number, line in enumerate(read_lines(path), start=1):
        try:
            scored = _SCORED.validate_python(line.get("rollout"))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise RunError(
                f"{path}:{number}: not a rollout: {field or 'rollout'}: {first['msg']}. Remove that line."
            ) from error
        played[scored.trajectory.key] = scored
    return iter(played[key] for key in sorted(played))
