"""Record what a restructure must not change, and compare with it.

    .venv/bin/python tests/behaviour/record.py             compare with digests.json; exit 1 if a value differs
    .venv/bin/python tests/behaviour/record.py --write     record the values of this machine in digests.json
    .venv/bin/python tests/behaviour/record.py --keep DIR  keep the runs in DIR

The script runs the recipes in `recipes/` through the public command, one torch thread, and keeps a digest of each value:
the final weights of each stage, the rollouts of each step, the metrics, the outcomes of evaluations and of curation.
Values have names of this script's own. The tables below (`COMMANDS`, `FILES`, `FIELDS`, `NESTED`, `METRICS`, `FIGURES`) map
them to today's commands, files, row fields and metric keys. They are the only place that changes with a rename.

A metric that is in no table is ignored, so new metrics do not matter. To delete a metric, delete its line in the table.
Wall-clock times, rates, memory and the counts of the scheduler, which depend on the clock, are in no table.
Floating-point results differ between processors and versions of torch, so digests.json has one entry for each pair. Record
the entry of a machine on a commit that is known to be right.

Next to a digest, digests.json holds the rounded value. If only the digest differs, the difference is in later digits.
"""

# ruff: noqa: T201 - a script for the command line

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
DIGESTS = HERE / "digests.json"

COMMANDS = {
    "train": ("-m", "strop.cli", "train", "recipes/training.toml", "--runs", "{out}"),
    "curate": ("-m", "strop.cli", "data", "curate", "recipes/curation.toml", "--out", "{out}/curation", "--jobs", "1"),
}
"""What is run, in this folder, with this Python."""

FILES = {
    "metrics": "training/metrics.jsonl",
    "updates": "training/updates.jsonl",
    "stage": "training/stages/*",
    # of one stage
    "weights": "model/model.safetensors",
    "best weights": "best/model.safetensors",
    "demonstrations": "data/demonstrations.jsonl",
    "kept rows": "data/kept.jsonl",
    "dropped rows": "data/dropped.jsonl",
    "outcomes": "data/outcomes.jsonl",
    "rollouts": "rollouts/step-{step}.jsonl",
    "selection": "rollouts/step-{step}.selection.json",
    "validation": "validation/step-{step}.jsonl",
    "problems": "eval/problems.jsonl",
    "figures": "eval/result.json",
    "reward model": "quality.json",
    # of a curation
    "kept": "curation/kept.jsonl",
    "dropped": "curation/dropped.jsonl",
}
"""Where each thing is; a file that a stage does not have is skipped."""

FIELDS = {
    # a line of metrics or updates
    "stage": "stage",
    "role": "role",
    # a line of rollouts
    "trajectory": "rollout.trajectory",
    "reward": "rollout.reward",
    "reward parts": "rollout.reward_parts",
    # a trajectory
    "key": "key",
    "parent": "parent",
    "forked at": "forked_at",
    "prompt": "prompt_ids",
    "turns": "turns",
    "sampled": "completion.ids",
    "forced": "completion.is_forced",
    "logprobs": "completion.logprobs",
    "entropies": "completion.entropies",
    "observation": "observation_ids",
    # a key
    "task index": "task_index",
    "attempt": "attempt",
    "branch": "branch",
    # a selection
    "groups": "groups",
    "members": "rollouts",
    "is kept": "is_kept",
    "advantage": "advantage",
    # a problem of an evaluation
    "question": "question",
    "correct": "correct",
    "answers": "answers",
    "lengths": "length_tokens",
    "calls": "tool_calls",
    "call errors": "tool_errors",
    "part values": "parts",
    # an outcome of a task
    "num right": "num_right",
    "num judged": "num_judged",
    # a curated row
    "row": "id",
    "answer": "answer",
    "messages": "messages",
    "rule": "rule",
}
"""Fields of rows; a dot leads into a nested one."""

NESTED = {
    "accuracy": "accuracy",
    "called": "called",
    "format": "format",
    "preferred": "preferred",
    "mean": "mean",
    "low": "low",
    "high": "high",
    "printed": "stdout",
    "failed": "error",
    "not run": "not_run",
    "benchmark": "decontamination",
    "exact duplicate": "exact_duplicates",
    "no integer": "integer_answer",
    "near duplicate": "near_duplicates",
    "not simple": "simple_answer",
    "large number": "small_numbers",
    "unreadable": "unreadable",
    "not verifiable": "verifiable_answer",
}
"""Names inside values: the parts of a reward, their means, the outcomes of calls, the rules of curation."""

OWN_NAMES = {key: name for name, key in NESTED.items()}

METRICS = {
    # name here: key today
    "accuracy": "rollout/accuracy",
    "accuracy reward": "reward/accuracy_mean",
    "call reward": "reward/called_mean",
    "calls": "rollout/tool_calls_mean",
    "calls run": "rollout/tool_calls_dispatched",
    "call errors": "rollout/tool_error_rate",
    "call errors when right": "rollout/tool_error_rate_correct",
    "format reward": "reward/format_mean",
    "kept": "rollout/kept_fraction",
    "length": "rollout/length_tokens_mean",
    "length when right": "rollout/length_tokens_mean_correct",
    "length when wrong": "rollout/length_tokens_mean_wrong",
    "reward": "rollout/reward_mean",
    "sampled entropy": "rollout/entropy_nats",
    "truncated": "rollout/truncated_fraction",
    "turns": "rollout/turns_mean",
    "void": "rollout/void_fraction",
    "groups all right": "groups/all_right",
    "groups all wrong": "groups/all_wrong",
    "groups used": "groups/used",
    "rollouts used": "groups/rollouts_used",
    "branch rate": "branching/branch_rate",
    "branch decisions": "branching/decisions",
    "branches": "branching/branches_per_task",
    "branch entropy change": "branching/delta_h_mean",
    "branch probability": "branching/probability_mean",
    "branch shared tokens": "branching/tokens_shared",
    "branch wanted rate": "branching/wanted_rate",
    "branch weighted entropy change": "branching/weighted_delta_h_mean",
    "branch weighted entropy change, largest": "branching/weighted_delta_h_abs_max",
    "fresh rollouts": "branching/fresh_per_task",
    "clipped high": "policy/clip_fraction_high",
    "clipped low": "policy/clip_fraction_low",
    "entropy": "policy/entropy_nats",
    "logprob": "policy/logprob_nats",
    "logprob gap": "policy/logprob_gap_mean",
    "logprob gap, largest": "policy/logprob_gap_max",
    "old KL": "policy/old_kl_nats",
    "reference KL": "policy/reference_kl_nats",
    "ratio": "policy/ratio",
    "ratio, largest": "policy/ratio_max",
    "ratio, percentile 1": "policy/ratio_p01",
    "ratio, percentile 99": "policy/ratio_p99",
    "sampler gap": "policy/sampler_gap_nats",
    "sampler gap, largest": "policy/sampler_gap_nats_max",
    "sampler gap, percentile 1": "policy/sampler_gap_nats_p01",
    "sampler gap, percentile 99": "policy/sampler_gap_nats_p99",
    "sampler KL": "policy/sampler_kl_nats",
    "sampler ratio": "policy/sampler_ratio",
    "sampler ratio, largest": "policy/sampler_ratio_max",
    "sampler ratio, percentile 1": "policy/sampler_ratio_p01",
    "sampler ratio, percentile 99": "policy/sampler_ratio_p99",
    "critic clipped": "critic/clip_fraction",
    "critic explained variance": "critic/explained_variance",
    "critic gradient norm": "critic/grad_norm",
    "critic learning rate": "critic/learning_rate",
    "critic loss": "critic/loss",
    "critic return": "critic/return",
    "critic skipped": "critic/skipped",
    "critic value": "critic/value",
    "DPO accuracy": "dpo/accuracy",
    "DPO chosen reward": "dpo/chosen_reward",
    "DPO loss": "dpo/loss",
    "DPO margin": "dpo/margin",
    "DPO rejected reward": "dpo/rejected_reward",
    "reward model accuracy": "reward_model/accuracy",
    "reward model loss": "reward_model/loss",
    "reward model margin": "reward_model/margin",
    "reward model score": "reward_model/score",
    "SFT loss": "sft/loss",
    "gradient norm": "update/grad_norm",
    "learning rate": "update/learning_rate",
    "loss": "update/loss",
    "skipped": "update/skipped",
    "steps without learning": "update/stuck_steps",
    "validated accuracy": "validation/accuracy",
    "validated accuracy, high": "validation/accuracy_high",
    "validated accuracy, low": "validation/accuracy_low",
    "validated call errors": "validation/tool_error_rate",
    "validated length": "validation/length_tokens_mean",
    "validated pair accuracy": "validation/pair_accuracy",
    "validated pair chosen reward": "validation/pair_chosen_reward",
    "validated pair loss": "validation/pair_loss",
    "validated pair margin": "validation/pair_margin",
    "validated pair rejected reward": "validation/pair_rejected_reward",
    "validated pass@k": "validation/pass_at_k",
    "validated truncated": "validation/truncated_fraction",
}
"""Metrics of a step or of an update. Left out: time/, machine/, scheduler/ and rates (*_per_s)."""

FIGURES = {
    # of an evaluation
    "accuracy": "accuracy",
    "accuracy, high": "accuracy_high",
    "accuracy, low": "accuracy_low",
    "attempts": "k",
    "call errors": "tool_error_rate",
    "call errors when right": "tool_error_rate_correct",
    "call outcomes": "tool_outcomes",
    "calls": "tool_calls_mean",
    "length": "length_tokens_mean",
    "length when right": "length_tokens_mean_correct",
    "length when wrong": "length_tokens_mean_wrong",
    "majority": "maj_at_k",
    "part means": "parts",
    "pass@": "pass_at",
    "pass@k": "pass_at_k",
    "problems": "num_tasks",
    "problems below k": "num_tasks_below_k",
    "problems void": "num_tasks_void",
    "problems without verdict": "num_tasks_without_verdict",
    "reward": "reward_mean",
    "tokens": "tokens",
    "truncated": "truncated_fraction",
    "turns": "turns_mean",
    "void": "void_fraction",
    # of a reward model
    "AUC": "auc",
    "length correlation": "length_correlation",
    "length correlation in pairs": "length_correlation_in_pairs",
    "preferences": "num",
    "preferences left out": "num_left_out",
}
"""Figures of an evaluation or of a reward model."""

Values: TypeAlias = dict[str, tuple[str, Any]]
"""For each name a digest, and the value rounded for a reader."""


def main() -> int:
    """Run the recipes, then compare or record. Returns the exit status."""
    options = parse_options()
    machine = machine_name()
    recorded = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    if not options.write and machine not in recorded:
        print(f"digests.json has no entry for {machine}. Record one with --write on a commit that is known to be right.")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        out = (options.keep or Path(temporary)).resolve()
        if out.exists() and any(out.iterdir()):
            print(f"error: {out} is not empty. Give --keep a new folder.", file=sys.stderr)
            return 2
        for command in COMMANDS.values():
            run(command, out)
        values = dict(sorted(values_of(out)))
    if options.write:
        write(recorded | {machine: values})
        print(f"recorded {len(values)} digests for {machine}")
        return 0
    return compare({name: tuple(entry) for name, entry in recorded[machine].items()}, values)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the values of this machine in digests.json")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in this folder, which must be new or empty")
    return parser.parse_args()


def machine_name() -> str:
    """Return the processor, its vector instructions and the version of torch: what floating-point results depend on."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    processor = f"{facts['model name']} ({facts['cpu family']}/{facts['model']})"
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def run(command: Iterable[str], out: Path) -> None:
    """Run one command in this folder; print what it printed if it fails.

    Raises:
        SystemExit: the command failed.
    """
    arguments = [sys.executable, *(word.format(out=out) for word in command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    result = subprocess.run(arguments, cwd=HERE, env=environment, capture_output=True, text=True, timeout=900)
    if result.returncode:
        print(result.stdout + result.stderr, file=sys.stderr)
        raise SystemExit(f"error: {' '.join(arguments[1:])} ended with exit status {result.returncode}")


def values_of(out: Path) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Return the name, the digest and the rounded value of everything that must not change."""
    yield from series(out / FILES["metrics"], "metric")
    yield from series(out / FILES["updates"], "update metric")
    stages = sorted(out.glob(FILES["stage"]))
    for stage in stages:
        for name, (file, read) in READERS.items():
            yield from named(f"{stage.name}/", name, stage, file, read)
    yield from named("curation/", "kept", out, FILES["kept"], kept)
    yield from named("curation/", "dropped", out, FILES["dropped"], dropped)


def named(
    prefix: str, name: str, folder: Path, file: str, read: Callable[[Path], Mapping[str, Any]]
) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Return the values that `read` finds in a file of `folder`, or in one for each step."""
    pattern = file.replace("{step}", "??????")
    for path in sorted([*folder.glob(pattern), *folder.glob(f"{pattern}.gz")]):
        step = re.search(r"step-(\d+)", path.name)
        place = f"{prefix}{name}" + (f" of step {int(step[1])}" if step else "")
        for field, value in read(path).items():
            yield f"{place}: {field}", entry(value)


def series(path: Path, kind: str) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Return each metric of each stage as the list of its values, in the order of the lines."""
    found: dict[str, list[Any]] = {}
    for line in lines(path):
        role = field(line, "role") if FIELDS["role"] in line else ""
        place = f"{field(line, 'stage')}/{kind}{' of the ' + role if role else ''}"
        for name, key in METRICS.items():
            if key in line:
                found.setdefault(f"{place}: {name}", []).append(line[key])
    for name, values in found.items():
        yield name, entry(values)


def weights(path: Path) -> dict[str, Any]:
    """Return a digest of the tensors by name and bytes, and their norm for a reader."""
    hasher = hashlib.blake2b(digest_size=8)
    tensors = dict(sorted(load_file(path).items()))
    for name, tensor in tensors.items():
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    norm = sum(float(tensor.double().square().sum()) for tensor in tensors.values()) ** 0.5
    return {"digest and norm": [hasher.hexdigest(), norm]}


def selected_rollouts(path: Path) -> dict[str, Any]:
    """Return what a training step sampled and selected from.

    A branch that lost its place to another one is left out: which branches were begun before depends on the clock.
    """
    step = re.search(r"step-(\d+)", path.name)
    assert step is not None
    selected = path.parent.parent / FILES["selection"].format(step=step[1])
    if not selected.exists():
        return rollouts(path)
    return rollouts(path, {key_of(field(each, "key")) for group in groups(selected) for each in field(group, "members")})


def rollouts(path: Path, chosen: set[tuple[int, ...]] | None = None) -> dict[str, Any]:
    """Return one list for each field, with one entry for each rollout, in canonical order; of all rollouts or of the chosen."""
    rows = {key_of(field(field(line, "trajectory"), "key")): line for line in lines(path)}
    found: dict[str, list[Any]] = {}
    for key in sorted(rows if chosen is None else chosen):
        trajectory = field(rows[key], "trajectory")
        turns = field(trajectory, "turns")
        parent = field(trajectory, "parent")
        values = {
            "keys": [key, parent and key_of(parent), field(trajectory, "forked at")],
            "tokens": [*field(trajectory, "prompt"), *joined(turns, "sampled", "observation")],
            "loss mask": [*zeros(trajectory, "prompt"), *masks(turns)],
            "logprobs": joined(turns, "logprobs"),
            "entropies": joined(turns, "entropies"),
            "reward": field(rows[key], "reward"),
            "reward parts": field(rows[key], "reward parts"),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def joined(turns: Iterable[Any], *names: str) -> list[Any]:
    """Return the values of these fields, turn after turn."""
    return [value for turn in turns for name in names for value in field(turn, name)]


def masks(turns: Iterable[Any]) -> list[int]:
    """Return 1 for each token that the policy sampled, 0 for forced tokens and observations."""
    found: list[int] = []
    for turn in turns:
        found += [int(not forced) for forced in field(turn, "forced")]
        found += zeros(turn, "observation")
    return found


def zeros(turn: Any, name: str) -> list[int]:
    """Return a zero for each token of a field."""
    return [0] * len(field(turn, name))


def selection(path: Path) -> dict[str, Any]:
    """Return which rollouts of a step were kept, and their advantages, in canonical order."""
    rows = sorted(
        (key_of(field(each, "key")), int(field(each, "is kept")), field(each, "advantage"))
        for group in groups(path)
        for each in field(group, "members")
    )
    return {"kept": [[key, kept] for key, kept, _ in rows], "advantages": [advantage for _, _, advantage in rows]}


def groups(path: Path) -> list[Any]:
    """Return the groups of a selection file."""
    found: list[Any] = field(json.loads(path.read_text()), "groups")
    return found


def key_of(key: Any) -> tuple[int, ...]:
    """Return the numbers that identify a rollout."""
    return tuple(field(key, name) for name in ("task index", "attempt", "branch"))


def conversations(path: Path) -> dict[str, Any]:
    """Return the tokens and the mask of each conversation, in the order of the file."""
    found: dict[str, list[Any]] = {"tokens": [], "loss mask": []}
    for row in lines(path):
        line = row["trajectory"]
        turns = field(line, "turns")
        found["tokens"].append([*field(line, "prompt"), *joined(turns, "sampled", "observation")])
        found["loss mask"].append([*zeros(line, "prompt"), *masks(turns)])
    return found


def table(*names: str) -> Callable[[Path], dict[str, Any]]:
    """Return a reader of these fields of a file of rows, in the order of the file. A field that no row has is left out."""

    def read(path: Path) -> dict[str, Any]:
        found = {name: [field(line, name) for line in lines(path) if FIELDS[name] in line] for name in names}
        return {name: values for name, values in found.items() if values}

    return read


def figures(path: Path) -> dict[str, Any]:
    """Return the figures of a JSON file that are in the table."""
    found = json.loads(path.read_text())
    return {name: found[key] for name, key in FIGURES.items() if key in found}


def kept(path: Path) -> dict[str, Any]:
    """Return which rows a curation kept."""
    return {"rows": [field(line, "row") for line in lines(path)]}


def dropped(path: Path) -> dict[str, Any]:
    """Return which rows each rule of a curation dropped."""
    found: dict[str, list[Any]] = {}
    for line in lines(path):
        found.setdefault(OWN_NAMES.get(field(line, "rule"), field(line, "rule")), []).append(field(line, "row"))
    return found


READERS: dict[str, tuple[str, Callable[[Path], Mapping[str, Any]]]] = {
    "weights": (FILES["weights"], weights),
    "best weights": (FILES["best weights"], weights),
    "demonstrations": (FILES["demonstrations"], conversations),
    "kept rows": (FILES["kept rows"], table("row", "messages", "question", "answer")),
    "dropped rows": (FILES["dropped rows"], table("row", "messages")),
    "outcomes": (FILES["outcomes"], table("num right", "num judged")),
    "rollouts": (FILES["rollouts"], selected_rollouts),
    "selection": (FILES["selection"], selection),
    "validation": (FILES["validation"], rollouts),
    "problems": (
        FILES["problems"],
        table("question", "answer", "correct", "answers", "lengths", "calls", "call errors", "part values"),
    ),
    "figures": (FILES["figures"], figures),
    "reward model": (FILES["reward model"], figures),
}
"""How each file of a stage is read."""


def lines(path: Path) -> list[Any]:
    """Return the rows of a JSONL file."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def field(row: Any, name: str) -> Any:
    """Return a field of a row by its name here.

    Raises:
        SystemExit: the row does not have it.
    """
    for key in FIELDS[name].split("."):
        if key not in row:
            raise SystemExit(
                f"error: a row has no {key!r} but {sorted(row)}. Correct {name!r} in FIELDS of {Path(__file__).name}."
            )
        row = row[key]
    return row


def entry(value: Any) -> tuple[str, Any]:
    """Return the digest of a value, exact to the last bit, and the value rounded; of a long one only its size."""
    value = renamed(value)
    text = json.dumps(value, sort_keys=True)
    short = rounded(value)
    if len(json.dumps(short)) > 400:
        short = f"{len(value)} values, {text.count(',') + 1} numbers"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), short


def renamed(value: Any) -> Any:
    """Return the value with the names of `NESTED` for the keys inside it."""
    match value:
        case list() | tuple():
            return [renamed(each) for each in value]
        case dict():
            return {OWN_NAMES.get(key, key): renamed(each) for key, each in value.items()}
        case _:
            return value


def rounded(value: Any) -> Any:
    """Return the value with six significant digits."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case list() | tuple():
            return [rounded(each) for each in value]
        case dict():
            return {key: rounded(each) for key, each in value.items()}
        case _:
            return value


def compare(expected: Mapping[str, tuple[Any, ...]], got: Values) -> int:
    """Print one line for each value that differs. Returns the exit status."""
    expected = {name: each for name, each in expected.items() if is_in_tables(name)}
    differing = [name for name in sorted(expected) if expected[name][0] != got.get(name, [""])[0]]
    for name in differing:
        print(f"{name}: expected {shown(expected[name])}, got {shown(got.get(name))}")
    if differing:
        print(f"{len(differing)} of {len(expected)} digests differ")
        return 1
    print(f"all {len(expected)} digests equal")
    if unknown := got.keys() - expected.keys():
        print(f"{len(unknown)} values are not recorded for this machine: {', '.join(sorted(unknown))}")
    return 0


def is_in_tables(name: str) -> bool:
    """Say whether a recorded metric or figure is still one that is compared."""
    place, _, own = name.partition(": ")
    if "metric" in place:
        return own in METRICS
    return own in FIGURES if place.endswith(("/figures", "/reward model")) else True


def shown(found: tuple[Any, ...] | None) -> str:
    """Return a digest and its value as text."""
    return "nothing" if found is None else f"{found[0]} {json.dumps(found[1])}"


def write(recorded: Mapping[str, Mapping[str, Any]]) -> None:
    """Write digests.json with one value a line."""
    machines = []
    for machine, values in sorted(recorded.items()):
        rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(values.items()))
        machines.append(f"  {json.dumps(machine)}: {{\n{rows}\n  }}")
    DIGESTS.write_text("{\n" + ",\n".join(machines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
