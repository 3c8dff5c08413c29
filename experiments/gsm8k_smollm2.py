"""The demo's program on SmolLM2-135M-Instruct and GSM8K: two RL steps of 4 tasks x 8 rollouts x 128 new tokens, in bfloat16.

    make experiments-gsm8k DATA=path/with/gsm8k

It shows that the program runs on a real model and real data, not that the model becomes good: at least one untied group in each
step, a gradient above 0, weights that changed, the gap between the sampler's and the trainer's log-probs, and a resumed run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

from strop.pipeline.run import train
from strop.recipe.load import load_recipe
from strop.reports.trackers import Progress
from strop.run_directory import RunDirectory, read_json, read_lines, write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
COMMAND = "make experiments-gsm8k DATA=path/with/gsm8k"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="holds gsm8k/train.jsonl and gsm8k/test.jsonl")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m")
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "gsm8k-smollm2")
    options = parser.parse_args(arguments)
    recipe = load_recipe(
        ROOT / "recipes" / "gsm8k-smollm2.toml",
        [
            f"stages.base.path={options.model.resolve()}",
            f"tasks.path={(options.data / 'gsm8k' / 'train.jsonl').resolve()}",
            f"tasks.test_path={(options.data / 'gsm8k' / 'test.jsonl').resolve()}",
        ],
    )
    asyncio.run(train(recipe, options.run, progress=Progress(), command=COMMAND))
    results = summarise(RunDirectory(options.run))
    write_json(RESULTS / "gsm8k-smollm2.json", results)
    lines = read_lines(RunDirectory(options.run).metrics)
    text = "\n".join(
        f"{name:<34} {bar['value']:>10.6g}  {bar['bar']:<8} {bar['holds']}" for name, bar in results["bars"].items()
    )
    log = "\n".join(str({key: line[key] for key in sorted(line)}) for line in lines if line["stage"] == "rl")
    write_text(RESULTS / "gsm8k-smollm2.txt", f"{text}\n\n{log}\n")
    print(text)
    return 0 if all(bar["holds"] for bar in results["bars"].values()) else 1


def summarise(run: RunDirectory) -> dict[str, object]:
    """What the two steps did, from the run directory alone."""
    steps = [line for line in read_lines(run.metrics) if line["stage"] == "rl"]
    untied = []
    for step in steps:
        groups = read_json(run.stage("rl").selection(step["step"]))["groups"]
        untied.append(sum(len({rollout["reward"] for rollout in group["rollouts"]}) > 1 for group in groups))
    before = safetensors.torch.load_file(run.stage("sft").model / "model.safetensors")
    after = safetensors.torch.load_file(run.stage("rl").model / "model.safetensors")
    num_changed = sum(not torch.equal(before[name], after[name]) for name in before)
    values = {
        "untied_groups_min": (float(min(untied)), 1.0, True),
        "grad_norm_min": (min(step["update/grad_norm"] for step in steps), 1e-12, True),
        "tensors_changed_fraction": (num_changed / len(before), 0.5, True),
        "logprob_gap_mean_max_nats": (max(step["policy/logprob_gap_mean"] for step in steps), 0.02, False),
    }
    return {
        "command": COMMAND,
        "bars": {
            name: {
                "value": value,
                "bar": f"{'>=' if is_floor else '<='} {bar:g}",
                "holds": value >= bar if is_floor else value <= bar,
            }
            for name, (value, bar, is_floor) in values.items()
        },
        "evaluations": [read_json(run.stage(name).evaluation) for name in ("before", "after")],
        "steps": steps,
    }


if __name__ == "__main__":
    sys.exit(main())
