"""The whole run of the demo on three machines in network namespaces: 2 trainer ranks, 2 engines and 2 code services.

    make bench-cluster

Shows the evaluations next to those of the demo in one process (`experiments/results/demo.json`, seeds 0, 1 and 2). Needs root
and iproute2. Writes results/cluster_learning.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result_file import write_result

from strop.cluster.ray_setup import RAY_ENVIRONMENT
from strop.cluster.start import LocalCluster
from strop.run_directory import RunDirectory, read_json, read_lines

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from networks import Machines  # noqa: E402 - of the tests

COMMAND = "make bench-cluster"
LAYOUT = {
    "stages.rl.trainer.workers": 2,
    "engine.replicas": 2,
    "cluster.trainer_nodes": 2,
    "cluster.sandbox_nodes": 2,
    "sandbox.level": "confined",
}
SHOWN = ("accuracy", "accuracy_low", "accuracy_high", "tool_error_rate_correct", "length_tokens_mean")


def train(runs: Path) -> RunDirectory:
    """Train and evaluate the demo."""
    sets = [word for key, value in LAYOUT.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    with Machines(3) as machines, LocalCluster(machines.nodes, cpus=1) as ray:
        words = ["train", "recipes/demo.toml", "--runs", str(runs), "--cluster", ray.address, *sets]
        command = [*machines.nodes[0].prefix, sys.executable, "-m", "strop.cli", *words]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **RAY_ENVIRONMENT})
    return RunDirectory(runs / "demo")


def main() -> int:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="strop-cluster-", dir=sys.argv[1] if len(sys.argv) > 1 else None) as scratch:
        run = train(Path(scratch))
        found = {name: read_json(run.stage(name).evaluation) for name in ("before", "after")}
        steps = [line for line in read_lines(run.metrics) if line["stage"] == "rl"]
        events = read_lines(run.events)
    one_process = [seed["grpo_roc"] for seed in read_json(ROOT / "experiments" / "results" / "demo.json")["figures"].values()]
    after, before = found["after"]["accuracy"], found["before"]["accuracy"]
    lowest = min(each["after"]["accuracy"] for each in one_process)
    lost = [event for event in events if event["event"] in ("engine_lost", "stage_restarted")]
    bars = {
        "accuracy before RL": {"value": before, "bar": "<= 0.5", "holds": before <= 0.5},
        "accuracy after RL": {"value": after, "bar": ">= 0.9", "holds": after >= 0.9},
        "engines and trainers lost": {"value": len(lost), "bar": "== 0", "holds": not lost},
    }
    print(f"accuracy {before} -> {after}; in one process at least {lowest} after RL")
    return write_result(
        "cluster_learning",
        command=COMMAND,
        bars=bars,
        nodes={event["stage"]: event["nodes"] for event in events if event["event"] == "placed"},
        seconds=round(time.perf_counter() - started),
        load_average=round(os.getloadavg()[2], 1),
        evaluations={name: {key: each[key] for key in SHOWN} for name, each in found.items()},
        one_process=[{name: each[name] for name in ("before", "after")} for each in one_process],
        accuracy_by_step=[step["rollout/accuracy"] for step in steps],
        sampler_gap_by_step=[step.get("policy/logprob_gap_mean") for step in steps],
    )


if __name__ == "__main__":
    raise SystemExit(main())
