"""The scheduler against the static policy over a grid of engines, group sizes and traces."""

from __future__ import annotations

import pytest

from strop.rollout.scheduler.admission import EngineSpec
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.simulation.engines import load_timing
from strop.simulation.simulate import SimulatedMachine, simulate
from strop.simulation.trace import TRACES

NUM_ROLLOUTS, SLOTS, SLOT_TOKENS = 512, 64, 9216


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize(("num_engines", "group_size"), [(64, 8)])  # benchmarks/scheduler.py has the whole grid
def test_static_is_never_faster_but_for_the_prompts_where_rollouts_do_not_differ(
    name: str, num_engines: int, group_size: int
) -> None:
    timing = load_timing()
    machines = [
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
    trace = TRACES[name](num_groups=NUM_ROLLOUTS // group_size, group_size=group_size, seed=0)
    ours = simulate(trace, machines, SchedulerConfig())
    static = simulate(trace, machines, SchedulerConfig(policy="static"))
    # Of a uniform trace static makes the best schedule there is where all start at once. Ours computes each prompt on more
    # engines, as is worth it wherever groups differ; an engine's own prefills beyond those of static are all that it may lose.
    most = max(0, ours.prefilled_tokens - static.prefilled_tokens) / num_engines * timing.prefill_token_s
    assert ours.makespan_s <= static.makespan_s + (1.01 * most if name == "uniform" else 0.0)
