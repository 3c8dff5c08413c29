"""Simulates a step of 16 384 rollouts: the scheduler against the best schedule found with all lengths known, and static.

Prints tables and writes results/scheduler.{json,txt} and the timelines of the heavy trace, results/scheduler.svg. All of it is
simulated but the processor time of the scheduler and, at the end, what `scheduler_live.py` plays; `--simulated` leaves that
out and keeps what it last measured. `make bench-scheduler`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import scheduler_calls
import scheduler_live
from result_file import write_result
from rich.console import Console
from rich.table import Table
from scheduler_offline import best_offline_s

from strop.rollout.scheduler.admission import EngineSpec
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.run_directory import read_json, write_text
from strop.simulation.engines import TRACE_PATH, EngineTiming, load_timing
from strop.simulation.simulate import SimulatedMachine, critical_path_s, draw_timelines, lower_bound_s, simulate
from strop.simulation.trace import TRACES, Trace

RESULTS = Path(__file__).parent / "results"
COMMAND = "make bench-scheduler"
SEED = 0
NUM_GROUPS, GROUP_SIZE = 512, 32  # rStar2-Agent section 4.3
SLOTS, SLOT_TOKENS = 64, 9216  # of each engine: a prompt of up to 1024 and a response of up to 8192 tokens
NUM_ENGINES = 16  # of the bars
SCALE = (8, 16, 32, 64, 128, 512)
SCALE_BARS = {128: 1.05, 512: 1.15}  # of the best offline schedule
GRID_ROLLOUTS, GRID_ENGINES, GRID_GROUPS = 512, (8, 16, 64), (8, 16, 32)
FIFO, OURS, STATIC = SchedulerConfig(order="fifo"), SchedulerConfig(), SchedulerConfig(policy="static")

# An assumption, not a measurement: a 14 B model on one large accelerator, whose step is mostly the reading of weights and KV.
SERVER = EngineTiming(step_s=0.010, row_s=3e-5, kv_token_s=4e-8, prefill_token_s=5e-5)


def slots(num_engines: int, timing: EngineTiming) -> list[SimulatedMachine]:
    """Engines like the embedded one: a conversation takes a slot of the largest length, however short it stays."""
    return [
        SimulatedMachine(
            spec=EngineSpec(
                name=f"engine {index}",
                kv_blocks=SLOTS,
                block_tokens=SLOT_TOKENS,
                max_conversations=SLOTS,
                max_tokens=SLOT_TOKENS,
            ),
            timing=timing,
        )
        for index in range(num_engines)
    ]


def paged(num_engines: int) -> list[SimulatedMachine]:
    """Engines like a server: the same memory in blocks of 16, and rows enough to use it."""
    return [
        SimulatedMachine(
            spec=EngineSpec(
                name=f"engine {index}", kv_blocks=SLOTS * SLOT_TOKENS // 16, block_tokens=16, max_conversations=256
            ),
            timing=SERVER,
        )
        for index in range(num_engines)
    ]


def engines_of_calls() -> dict[str, list[SimulatedMachine]]:
    """The engines of `scheduler_calls.py`, by the origin of their step times."""
    num = scheduler_calls.NUM_ENGINES
    return {"measured": slots(num, load_timing()), "assumed accelerator": slots(num, SERVER)}


def make(name: str) -> Trace:
    return TRACES[name](num_groups=NUM_GROUPS, group_size=GROUP_SIZE, seed=SEED)


def policies(console: Console, timing: EngineTiming) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bars: every trace on `NUM_ENGINES` embedded engines."""
    title = f"{NUM_GROUPS * GROUP_SIZE} rollouts on {NUM_ENGINES} engines of {SLOTS} slots; makespans in s of simulated time"
    table = Table(
        "trace",
        "bound",
        "best offline",
        "which",
        "ours",
        "/ offline",
        "/ bound",
        "fifo",
        "/ bound",
        "static",
        "static / ours",
        "µs/event",
        title=title,
    )
    figures: dict[str, Any] = {}
    bars: dict[str, Any] = {}
    machines = slots(NUM_ENGINES, timing)
    for name in TRACES:
        trace = make(name)
        ours, fifo, static = (simulate(trace, machines, config) for config in (OURS, FIFO, STATIC))
        offline_s, which = best_offline_s(trace, machines)  # never ours: it may turn out worse, and the ratio below 1
        bound_s = lower_bound_s(trace, machines)
        over, over_bound = ours.makespan_s / offline_s, ours.makespan_s / bound_s
        faster = static.makespan_s / ours.makespan_s
        figures[name] = {
            "lower_bound_s": bound_s,
            "best_offline_s": offline_s,
            "best_offline": which,
            "scheduler": ours.as_json(),
            "fifo": fifo.as_json(),
            "static": static.as_json(),
        }
        table.add_row(
            *(name, f"{bound_s:.0f}", f"{offline_s:.0f}", which, f"{ours.makespan_s:.0f}", f"{over:.3f}"),
            *(f"{over_bound:.3f}", f"{fifo.makespan_s:.0f}", f"{fifo.makespan_s / bound_s:.3f}"),
            *(f"{static.makespan_s:.0f}", f"{faster:.2f}", f"{ours.scheduling_us_per_event:.1f}"),
        )
        if name != "unforeseeable":  # nothing tells its long rollouts apart before they run: reported, not held to the bar
            bars[f"{name}_over_best_offline"] = {"value": over, "bar": "<= 1.05", "holds": over <= 1.05}
            bars[f"{name}_over_lower_bound"] = {"value": over_bound, "bar": "<= 1.05", "holds": over_bound <= 1.05}
        lost = ours.ledger.evictions + ours.ledger.recomputed_tokens
        bars[f"{name}_evictions_and_recomputed_tokens"] = {"value": lost, "bar": "== 0", "holds": lost == 0}
        micros = ours.scheduling_us_per_event
        bars[f"{name}_scheduling_us_per_event"] = {"value": micros, "bar": "<= 50", "holds": micros <= 50}
        if name == "heavy":
            bars["heavy_static_over_ours"] = {"value": faster, "bar": ">= 1.5", "holds": faster >= 1.5}
            write_text(RESULTS / "scheduler.svg", str(draw_timelines({"static": static, "scheduler": ours})))
            # How much of that is what static computes twice: both again, with prefills that cost nothing.
            free = slots(NUM_ENGINES, timing.model_copy(update={"prefill_token_s": 0.0}))
            ratio = simulate(trace, free, STATIC).makespan_s / simulate(trace, free, OURS).makespan_s
            figures[name]["static_over_ours_with_free_prefill"] = ratio
            note = f"heavy, with prefills that cost nothing: static / ours {ratio:.2f}"
    console.print(table)
    console.print(note)
    return figures, bars


def grid(console: Console, timing: EngineTiming) -> tuple[dict[str, float], dict[str, Any]]:
    """Static against ours where one wave plays everything or nearly so, and group sizes and engines share factors."""
    table = Table(
        *("trace", "engines", *(f"groups of {size}" for size in GRID_GROUPS)),
        title=f"static / ours, {GRID_ROLLOUTS} rollouts on engines of {SLOTS} slots",
    )
    ratios: dict[str, float] = {}
    for name in TRACES:
        for num in GRID_ENGINES:
            machines, cells = slots(num, timing), []
            for size in GRID_GROUPS:
                trace = TRACES[name](num_groups=GRID_ROLLOUTS // size, group_size=size, seed=SEED)
                ours, static = (simulate(trace, machines, config).makespan_s for config in (OURS, STATIC))
                ratios[f"{name}/{num}/{size}"] = static / ours
                cells.append(f"{static / ours:.3f}")
            table.add_row(name, str(num), *cells)
    console.print(table)
    # Of a uniform trace static makes the best schedule there is: what a prompt costs on more engines is lost.
    least = {name: min(ratio for key, ratio in ratios.items() if key.startswith(name)) for name in TRACES}
    floors = {name: 0.985 if name == "uniform" else 1.0 for name in TRACES}
    bars = {
        f"{name}_grid_static_over_ours": {"value": least[name], "bar": f">= {floor:g}", "holds": least[name] >= floor}
        for name, floor in floors.items()
    }
    return ratios, bars


def scale(console: Console, timing: EngineTiming) -> tuple[dict[str, Any], dict[str, Any]]:
    """The heavy trace on more engines: fewer rollouts a slot, until the longest rollout alone decides."""
    table = Table(
        *("engines", "rollouts a slot", "bound", "longest alone", "best offline", "ours", "/ offline", "/ bound"),
        *("fifo / ours", "busy", "static / ours", "µs/event", "s of real time"),
        title="The heavy trace on 8 to 512 engines",
    )
    trace = make("heavy")
    figures: dict[str, Any] = {}
    bars: dict[str, Any] = {}
    for num in SCALE:
        machines = slots(num, timing)
        started = time.perf_counter()
        ours = simulate(trace, machines, OURS)
        taken = time.perf_counter() - started
        fifo, static = simulate(trace, machines, FIFO), simulate(trace, machines, STATIC)
        offline_s = best_offline_s(trace, machines, row_shares=(1.0,))[0]
        bound_s = lower_bound_s(trace, machines)
        figures[str(num)] = ours.as_json() | {
            "lower_bound_s": bound_s,
            "best_offline_s": offline_s,
            "fifo_s": fifo.makespan_s,
            "static_s": static.makespan_s,
            "real_s": taken,
        }
        if num in SCALE_BARS:
            over, bar = ours.makespan_s / offline_s, SCALE_BARS[num]
            bars[f"heavy_{num}_engines_over_best_offline"] = {"value": over, "bar": f"<= {bar}", "holds": over <= bar}
            micros = ours.scheduling_us_per_event
            bars[f"heavy_{num}_engines_scheduling_us_per_event"] = {"value": micros, "bar": "<= 50", "holds": micros <= 50}
        table.add_row(
            *(str(num), f"{NUM_GROUPS * GROUP_SIZE / (num * SLOTS):.1f}", f"{bound_s:.0f}"),
            *(f"{critical_path_s(trace, machines):.0f}", f"{offline_s:.0f}", f"{ours.makespan_s:.0f}"),
            *(f"{ours.makespan_s / offline_s:.3f}", f"{ours.makespan_s / bound_s:.3f}"),
            *(f"{fifo.makespan_s / ours.makespan_s:.3f}", f"{ours.busy_share:.1%}"),
            *(f"{static.makespan_s / ours.makespan_s:.2f}", f"{ours.scheduling_us_per_event:.1f}", f"{taken:.1f}"),
        )
    console.print(table)
    return figures, bars


def memory(console: Console) -> dict[str, Any]:
    """Where memory comes in blocks, who knows lengths packs more rows: what reserving the largest length costs."""
    table = Table(
        *("reserved", "makespan, s", "/ offline", "KV in use, at most", "evictions", "recomputed tokens"),
        title=f"The heavy trace on {2 * NUM_ENGINES} engines with paged memory, an assumed accelerator",
    )
    trace, machines = make("heavy"), paged(2 * NUM_ENGINES)
    offline_s, which = best_offline_s(trace, machines)
    figures: dict[str, Any] = {"best_offline_s": offline_s, "best_offline": which}
    table.add_row("what each will need (offline)", f"{offline_s:.0f}", "1.000", "", "", "")
    for times in (1.0, 2.0, 3.0, 4.0):
        outcome = simulate(trace, machines, SchedulerConfig(oversubscription=times))
        figures[f"oversubscription_{times:.0f}"] = outcome.as_json()
        table.add_row(
            "the largest length" + (f", memory taken {times:.0f} times" if times > 1 else ""),
            *(f"{outcome.makespan_s:.0f}", f"{outcome.makespan_s / offline_s:.3f}", f"{outcome.peak_kv_share:.1%}"),
            *(f"{outcome.ledger.evictions}", f"{outcome.ledger.recomputed_tokens}"),
        )
    console.print(table)
    return figures


def live(console: Console, *, is_simulated: bool) -> dict[str, Any]:
    """The round on real engines; of an earlier run, or nothing, where only the simulated part was asked for."""
    if not is_simulated:
        measured = asyncio.run(scheduler_live.measure(console, scheduler_live.MODEL, scheduler_live.ROUNDS))
        return {"live": measured}
    path = RESULTS / "scheduler.json"
    before = read_json(path) if path.exists() else {}
    console.print("live round: that of an earlier run" if "live" in before else "live round: not measured")
    return {"live": before["live"]} if "live" in before else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="leave the round on real engines out")
    arguments = parser.parse_args()
    console = Console(record=True, width=170)
    timing = load_timing()
    measured = read_json(TRACE_PATH)
    console.print(f"Step times fitted to {measured['model']} in {measured['dtype']} on {measured['machine']}: {timing}")
    RESULTS.mkdir(exist_ok=True)
    figures, bars = policies(console, timing)
    ratios, more_bars = grid(console, timing)
    calls, bars_of_calls = scheduler_calls.measure(console, engines_of_calls())
    scaled, bars_of_scale = scale(console, timing)
    bars |= more_bars | bars_of_calls | bars_of_scale
    results = {
        "seed": SEED,
        "timing": timing.model_dump(),
        "figures": {
            "policies": figures,
            "static_over_ours": ratios,
            "scale": scaled,
            "paged_memory": memory(console),
            "tool_calls": calls,
        },
    }
    results |= live(console, is_simulated=arguments.simulated)
    if "live" in results:
        lost = results["live"]["evictions_and_recomputed_tokens"]
        bars["live_evictions_and_recomputed_tokens"] = {"value": lost, "bar": "== 0", "holds": lost == 0}
    table = Table("bar", "value", "must be", "holds", title="Bars")
    for name, bar in bars.items():
        table.add_row(name, f"{bar['value']:.3g}", bar["bar"], str(bar["holds"]))
    console.print(table)
    write_text(RESULTS / "scheduler.txt", console.export_text())
    return write_result("scheduler", command=COMMAND, bars=bars, **results)


if __name__ == "__main__":
    sys.exit(main())
