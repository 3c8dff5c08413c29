"""`strop simulate`: simulates one step of rollouts under each policy, prints the metrics and draws the engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from strop.errors import UserError

if TYPE_CHECKING:
    from strop.rollout.scheduler.admission import EngineSpec

_SLOT_TOKENS = 9216  # a prompt of up to 1024 and a response of up to 8192, as in rStar2-Agent's first stage
_BLOCK_TOKENS = 16
_GROUP_SIZE = 32  # rStar2-Agent samples 32 rollouts of a question (section 4.3)


def simulate(
    engines: Annotated[int, typer.Option(min=1, max=4096, help="Number of equal engines.")] = 16,
    rollouts: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Rollouts of the step, in groups of 32. Not for a TRACE file.")
    ] = 16384,
    trace: Annotated[
        str, typer.Option(help="heavy, uniform, adversarial, unforeseeable, or the path of a file.", metavar="TRACE")
    ] = "heavy",
    policy: Annotated[Literal["scheduler", "static", "both"], typer.Option("--policy")] = "both",
    order: Annotated[
        Literal["longest_first", "fifo"], typer.Option(help="Order in which waiting rollouts start.")
    ] = "longest_first",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the trace.")] = 0,
    rows: Annotated[int, typer.Option(min=1, max=1 << 20, help="Conversations that an engine runs at once.")] = 64,
    kv_tokens: Annotated[
        int | None, typer.Option(min=16, max=10**12, help="KV memory of an engine, in blocks of 16 [default: slots of 9216].")
    ] = None,
    oversubscription: Annotated[float, typer.Option(help="How many times KV memory is reserved. Needs --kv-tokens.")] = 1.0,
    tool_workers: Annotated[int | None, typer.Option(min=1, help="Tool calls that run at once.")] = None,
    timing: Annotated[
        Path | None, typer.Option(help="Step times from benchmarks/engine_trace.py [default: the embedded engine].")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for schedule.html, .svg and .json.")] = None,
) -> None:
    """Simulate one step of rollouts: how long it takes, how long engines are idle, what is evicted and computed twice."""
    from strop.config import validate
    from strop.reports.terminal import print_table
    from strop.rollout.scheduler.scheduler import SchedulerConfig
    from strop.run_directory import write_json, write_text
    from strop.simulation.engines import load_timing
    from strop.simulation.simulate import SimulatedMachine, draw_timelines, lower_bound_s, schedule_page, schedule_table
    from strop.simulation.simulate import simulate as run_simulation
    from strop.simulation.trace import TRACES, load_trace

    if kv_tokens is None and oversubscription != 1:
        raise UserError(f"--oversubscription {oversubscription:g} has no effect on slots. Give --kv-tokens as well.")
    if trace in TRACES:
        group_size = min(_GROUP_SIZE, rollouts)
        simulated = TRACES[trace](num_groups=-(-rollouts // group_size), group_size=group_size, seed=seed)
    else:
        simulated = load_trace(Path(trace))
    measured = load_timing() if timing is None else load_timing(timing)
    machines = [
        SimulatedMachine(spec=_memory(f"engine-{index}", rows=rows, kv_tokens=kv_tokens), timing=measured)
        for index in range(engines)
    ]
    policies = ("static", "scheduler") if policy == "both" else (policy,)
    outcomes = {}
    for name in policies:
        settings = {"policy": name, "order": order, "oversubscription": oversubscription}
        config = validate(SchedulerConfig, settings, place="strop simulate")
        outcomes[name] = run_simulation(simulated, machines, config, tool_workers=tool_workers)
    bound_s = lower_bound_s(simulated, machines)
    title = f"{len(simulated.rollouts)} rollouts of the {simulated.name} trace on {engines} engines"
    typer.echo(title)
    print_table(schedule_table(outcomes, bound_s=bound_s))
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot create this directory: {error.strerror}.") from error
    write_text(out / "schedule.html", schedule_page(title, outcomes, bound_s=bound_s))
    write_text(out / "schedule.svg", str(draw_timelines(outcomes)))
    write_json(
        out / "schedule.json", {"title": title, "lower_bound_s": bound_s} | {k: v.as_json() for k, v in outcomes.items()}
    )
    typer.echo(f"{out / 'schedule.html'}")


def _memory(name: str, *, rows: int, kv_tokens: int | None) -> EngineSpec:
    """The memory of an engine: paged if `kv_tokens` is given, else slots."""
    from strop.rollout.scheduler.admission import EngineSpec

    if kv_tokens is None:
        return EngineSpec(name=name, kv_blocks=rows, block_tokens=_SLOT_TOKENS, max_conversations=rows, max_tokens=_SLOT_TOKENS)
    return EngineSpec(name=name, kv_blocks=kv_tokens // _BLOCK_TOKENS, block_tokens=_BLOCK_TOKENS, max_conversations=rows)
