"""Simulates a step with 45 000 tool calls on 64 engines, with the scheduler of real runs and services of several sizes.

Step times are those that `engine_trace.py` measured on two cores, and those that are assumed of an accelerator. Lengths, turns
and latencies of calls are assumed: those of the heavy trace. A call that finds all workers of the services busy waits for one.
Part of `make bench-scheduler`; by itself it writes its figures into results/scheduler.json under "figures", "tool_calls".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.run_directory import read_json, write_json
from strop.simulation.simulate import SimulatedMachine, lower_bound_s, simulate
from strop.simulation.trace import Trace, heavy_tailed

RESULTS = Path(__file__).parent / "results" / "scheduler.json"
NUM_ENGINES, NUM_CALLS, GROUP_SIZE, SEED = 64, 45_000, 32, 0
WORKERS = (None, 256, 64, 32)  # of all services together


def make_trace() -> Trace:
    """The first groups of a heavy trace that make `NUM_CALLS` calls."""
    trace, num_calls, groups = heavy_tailed(num_groups=1024, group_size=GROUP_SIZE, seed=SEED), 0, []
    for group in trace.groups:
        if num_calls < NUM_CALLS:
            groups.append(group)
            num_calls += sum(len(rollout.turns) - 1 for rollout in group.rollouts)
    return Trace(name="heavy", max_tokens=trace.max_tokens, groups=tuple(groups))


def measure(console: Console, engines: Mapping[str, Sequence[SimulatedMachine]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The step with each kind of engine and each number of workers, and the bars."""
    trace = make_trace()
    calls = [turn.tool_s for rollout in trace.rollouts for turn in rollout.turns[:-1]]
    table = Table(
        *("step times", "workers", "makespan, s", "/ bound", "engines busy", "calls waiting, at most", "mean wait, s"),
        *("evictions", "µs/event", "s of real time"),
        title=f"{len(calls)} calls of {sum(calls) / len(calls):.2f} s, {len(trace.rollouts)} rollouts, {NUM_ENGINES} engines",
    )
    runs: dict[str, Any] = {}
    for name, machines in engines.items():
        bound_s = lower_bound_s(trace, machines)
        for workers in WORKERS:
            started = time.perf_counter()
            outcome = simulate(trace, machines, SchedulerConfig(), tool_workers=workers)
            real_s, wait_s = time.perf_counter() - started, outcome.ledger.tool_wait_s / len(calls)
            more = {"lower_bound_s": bound_s, "mean_call_wait_s": wait_s, "real_s": real_s}
            runs[f"{name}, {workers or 'no limit'}"] = outcome.as_json() | more
            table.add_row(
                *(name, str(workers or "no limit"), f"{outcome.makespan_s:.0f}", f"{outcome.makespan_s / bound_s:.3f}"),
                *(f"{outcome.busy_share:.1%}", f"{outcome.max_tools_queued}", f"{wait_s:.2f}", f"{outcome.ledger.evictions}"),
                *(f"{outcome.scheduling_us_per_event:.1f}", f"{real_s:.0f}"),
            )
    console.print(table)
    num_turns = len(calls) + len(trace.rollouts)
    is_whole = all(
        each["scheduler/turns"] == num_turns and each["scheduler/tool_turns"] == len(calls) for each in runs.values()
    )
    lost = sum(each["scheduler/evictions"] + each["scheduler/recomputed_tokens"] for each in runs.values())
    micros = max(each["scheduling_us_per_event"] for each in runs.values())
    return {"num_calls": len(calls), "call_s": sum(calls), "runs": runs}, {
        "calls_every_turn_and_call_once": {"value": is_whole, "bar": "== True", "holds": is_whole},
        "calls_evictions_and_recomputed_tokens": {"value": lost, "bar": "== 0", "holds": lost == 0},
        "calls_scheduling_us_per_event": {"value": micros, "bar": "< 50", "holds": micros < 50},
    }


def main() -> int:
    from scheduler import engines_of_calls  # which imports this file

    figures, bars = measure(Console(width=170), engines_of_calls())
    results = read_json(RESULTS)
    results["figures"]["tool_calls"], results["bars"] = figures, results["bars"] | bars
    write_json(RESULTS, results)
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
