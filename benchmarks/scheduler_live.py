"""Plays heavy-tailed rollouts on two real engines, under the scheduler and under static: the ratio of what they take.

Lengths, turns and tool latencies are those of a trace; the tokens are sampled by a real model, with no stop id, so that every
policy samples the same number. Policies alternate within one run. Part of `make bench-scheduler`; alone it writes its
figures into results/scheduler.json under "live".
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strop.engine.config import EngineConfig
from strop.engine.opening import open_engines
from strop.engine.protocol import CompletionRequest, InferenceEngine
from strop.rollout.scheduler.batch import Lease, RolloutBatch
from strop.rollout.scheduler.engine_pool import EnginePool
from strop.rollout.scheduler.report import BatchReport
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.run_directory import read_json, write_json
from strop.simulation.trace import Trace, TracedGroup, TracedRollout, heavy_tailed
from strop.types import derive_seed

RESULTS = Path(__file__).parent / "results" / "scheduler.json"
MODEL = Path("models/smollm2-135m")
SEED = 0
NUM_ENGINES, SLOTS = 2, 8
NUM_GROUPS, GROUP_SIZE = 8, 8
MAX_TOKENS, MAX_PROMPT = 256, 64
ROUNDS = 2
VOCABULARY = 40_000  # ids below it are words of any model that this is run with


def make_trace() -> Trace:
    """Four rollouts a slot, a thirty-second as long as those of the simulated step."""
    return heavy_tailed(num_groups=NUM_GROUPS, group_size=GROUP_SIZE, seed=SEED, max_tokens=MAX_TOKENS)


async def play(trace: Trace, engines: Sequence[InferenceEngine], policy: str) -> BatchReport:
    """The step that `policy` makes of the trace."""
    config = SchedulerConfig.model_validate({"policy": policy})
    fleet = EnginePool(engines, config)
    async with fleet.batch() as dispatch:
        await asyncio.gather(*(play_group(group, trace.max_tokens, dispatch) for group in trace.groups))
    return fleet.last_batch


async def play_group(group: TracedGroup, max_tokens: int, dispatch: RolloutBatch) -> None:
    prompt = words(min(group.prompt_tokens, MAX_PROMPT), "prompt", group.rollouts[0].key.task_index)
    leases = [await dispatch.offer(rollout.key, prompt, max_tokens=max_tokens) for rollout in group.rollouts]
    await asyncio.gather(*(converse(*each, prompt) for each in zip(group.rollouts, leases, strict=True)))


async def converse(rollout: TracedRollout, seat: Lease, context: tuple[int, ...]) -> None:
    place = (rollout.key.task_index, rollout.key.attempt)
    try:
        for number, turn in enumerate(rollout.turns):
            request = CompletionRequest(
                id=f"{place[0]}/{place[1]}/{number}",
                ids=context,
                max_tokens=turn.num_tokens,
                stop_ids=frozenset(),
                temperature=1.0,
                seed=derive_seed(SEED, *place, number),
            )
            completion = await seat.complete(request)
            if turn is rollout.turns[-1]:
                return
            await asyncio.sleep(turn.tool_s)
            observation = words(turn.observation_tokens, "observation", *place, number)
            context += completion.ids + observation
            seat.observed(len(observation))
    finally:
        seat.close()


def words(num: int, *place: int | str) -> tuple[int, ...]:
    """Ids that nobody sampled, the same in every run."""
    return tuple(100 + derive_seed(SEED, *place, position) % (VOCABULARY - 100) for position in range(num))


async def measure(console: Console, model: Path, rounds: int) -> dict[str, Any]:
    """Both policies in turn, `rounds` times; the figures and their ratio."""
    trace = make_trace()
    sampled = sum(turn.num_tokens for rollout in trace.rollouts for turn in rollout.turns)
    config = EngineConfig(
        replicas=NUM_ENGINES,
        threads=1,
        slots=SLOTS,
        max_length=MAX_PROMPT + MAX_TOKENS,
        dtype="bfloat16",
        deterministic=False,
    )
    runs: dict[str, list[BatchReport]] = {"static": [], "scheduler": []}
    with tempfile.TemporaryDirectory() as logs:
        engines = await open_engines(model, config, detokenize=None, logs=Path(logs))
        try:
            await play(heavy_tailed(num_groups=2, group_size=2, seed=1, max_tokens=64), engines, "scheduler")  # warm
            for _ in range(rounds):
                for policy, reports in runs.items():
                    reports.append(await play(trace, engines, policy))
                    console.print(f"{policy}: {reports[-1].duration_s:.1f} s")
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))
    title = (
        f"{len(trace.rollouts)} rollouts on {NUM_ENGINES} engines of {SLOTS} slots, {model.name} in bfloat16, {sampled} tokens"
    )
    table = Table("policy", "s", "tokens/s", "rows busy", "idle at the end", "evictions", "recomputed", "cached", title=title)
    for policy, reports in runs.items():
        for report in reports:
            each = report.as_metrics()
            table.add_row(
                *(policy, f"{report.duration_s:.1f}", f"{sampled / report.duration_s:.0f}"),
                *(f"{each['scheduler/row_share']:.1%}", f"{each['scheduler/tail_idle_share']:.1%}"),
                *(f"{each['scheduler/evictions']:.0f}", f"{each['scheduler/recomputed_tokens']:.0f}"),
                f"{each['scheduler/cached_token_share']:.1%}",
            )
    console.print(table)
    ratios = [a.duration_s / b.duration_s for a, b in zip(runs["static"], runs["scheduler"], strict=True)]
    console.print(f"static / ours, round by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    ours = [report.as_metrics() for report in runs["scheduler"]]
    return {
        "model": model.name,
        "rollouts": len(trace.rollouts),
        "sampled_tokens": sampled,
        "engines": NUM_ENGINES,
        "slots": SLOTS,
        "static_over_ours": statistics.median(ratios),
        "static_over_ours_by_round": ratios,
        "evictions_and_recomputed_tokens": sum(
            each["scheduler/evictions"] + each["scheduler/recomputed_tokens"] for each in ours
        ),
        "runs": {
            policy: [{"duration_s": report.duration_s, **report.as_metrics()} for report in reports]
            for policy, reports in runs.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    started = time.perf_counter()
    console = Console(width=150)
    figures = asyncio.run(measure(console, arguments.model, arguments.rounds))
    results = read_json(RESULTS) if RESULTS.exists() else {}
    write_json(RESULTS, results | {"live": figures})
    console.print(f"{time.perf_counter() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
