from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from strop.errors import ConfigError, UserError
from strop.rollout.scheduler.admission import EngineSpec
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.simulation.engines import DecodePoint, EngineTiming, MeasuredTrace, PrefillPoint, load_timing
from strop.simulation.simulate import SimulatedMachine, critical_path_s, lower_bound_s, simulate, throughput_bound_s
from strop.simulation.trace import TRACES, Trace, TracedGroup, TracedRollout, TracedTurn, heavy_tailed, load_trace
from strop.types import RolloutKey

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from scheduler_offline import best_offline_s

TIMING = EngineTiming(step_s=1.0, row_s=0.5, kv_token_s=0.0, prefill_token_s=0.25)


def machine(name: str = "a", *, kv_tokens: int = 1000, rows: int = 100, timing: EngineTiming = TIMING) -> SimulatedMachine:
    return SimulatedMachine(
        spec=EngineSpec(name=name, kv_blocks=kv_tokens // 10, block_tokens=10, max_conversations=rows), timing=timing
    )


def trace(*rollouts: tuple[TracedTurn, ...], prompt_tokens: int = 4, max_tokens: int = 90) -> Trace:
    """One group."""
    traced = tuple(
        TracedRollout(key=RolloutKey(task_index=0, attempt=attempt), turns=turns) for attempt, turns in enumerate(rollouts)
    )
    group = TracedGroup(prompt_tokens=prompt_tokens, rollouts=traced)
    return Trace(name="test", max_tokens=max_tokens, groups=(group,))


def turn(num_tokens: int, tool_s: float = 0.0, observation_tokens: int = 0) -> TracedTurn:
    return TracedTurn(num_tokens=num_tokens, tool_s=tool_s, observation_tokens=observation_tokens)


def test_a_lone_rollout_takes_its_prefill_its_steps_and_its_tool() -> None:
    outcome = simulate(trace((turn(3, 10.0, 8), turn(2))), [machine()], SchedulerConfig())
    assert outcome.makespan_s == pytest.approx(4 * 0.25 + 3 * 1.5 + 10.0 + 8 * 0.25 + 2 * 1.5)


def test_the_metrics_hold_each_simulated_count_once_and_no_other() -> None:
    metrics = simulate(trace((turn(2),)), [machine()], SchedulerConfig()).as_json()
    names = [name.removeprefix("scheduler/") for name in metrics]
    assert len(set(names)) == len(names)
    assert {"evictions", "recomputed_tokens", "sampled_tokens"} <= set(names)
    assert not {"request_tokens", "cached_tokens", "drafted_tokens", "branch_tokens", "branch_cached_tokens"} & set(names)


def test_rows_that_decode_together_share_the_step() -> None:
    outcome = simulate(trace((turn(4),), (turn(2),)), [machine()], SchedulerConfig())
    assert outcome.makespan_s == pytest.approx(4 * 0.25 + 2 * 2.0 + 2 * 1.5)  # two rows for 2 steps, one for 2 more


def test_attention_costs_what_each_step_reads() -> None:
    timing = EngineTiming(step_s=1.0, row_s=0.0, kv_token_s=0.1, prefill_token_s=0.0)
    outcome = simulate(trace((turn(3),)), [machine(timing=timing)], SchedulerConfig())
    assert outcome.makespan_s == pytest.approx(3 * 1.0 + 0.1 * (4 + 5 + 6))


def test_who_joins_in_mid_step_begins_with_the_next() -> None:
    rollouts = ((turn(1, 0.7, 0), turn(1)), (turn(4),))
    # 1 s prefill, a step of 2 rows until 3 s. The tool ends at 3.7, in a step of one row that ends at 4.5; then 2, then 1.5.
    assert simulate(trace(*rollouts), [machine()], SchedulerConfig()).makespan_s == pytest.approx(1 + 2 + 1.5 + 2 + 1.5)


def test_static_waits_for_the_slowest_of_a_turn_and_the_scheduler_does_not() -> None:
    rollouts = ((turn(2, 5.0), turn(8)), (turn(20, 5.0), turn(2)))
    ours = simulate(trace(*rollouts), [machine()], SchedulerConfig())
    static = simulate(trace(*rollouts), [machine()], SchedulerConfig(policy="static"))
    first = RolloutKey(task_index=0, attempt=0)
    assert ours.ended[first] < 30 < static.ended[first]
    assert ours.makespan_s < static.makespan_s


def test_rollouts_that_move_within_turns_end_sooner_and_sample_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    played, engines = heavy_tailed(num_groups=16, group_size=32, seed=0), "abcdefgh"
    outcomes = []
    for piece_tokens in (10**9, 256):
        monkeypatch.setattr("strop.rollout.scheduler.scheduler._PIECE_TOKENS", piece_tokens)
        machines = [machine(name, kv_tokens=10**6, timing=load_timing()) for name in engines]
        outcomes.append(simulate(played, machines, SchedulerConfig()))
    whole, pieces = outcomes
    assert pieces.makespan_s < 0.95 * whole.makespan_s
    assert pieces.ledger.moved_tokens > whole.ledger.moved_tokens
    for name in ("turns", "sampled_tokens", "observation_tokens", "ended"):
        assert getattr(pieces.ledger, name) == getattr(whole.ledger, name)


def test_full_reservation_never_evicts_where_static_and_over_subscription_do() -> None:
    rollouts = tuple((turn(90),) for _ in range(6))
    tight = [machine(kv_tokens=300)]
    ours = simulate(trace(*rollouts), tight, SchedulerConfig())
    assert (ours.ledger.evictions, ours.ledger.recomputed_tokens) == (0, 0)
    for config in (SchedulerConfig(policy="static"), SchedulerConfig(oversubscription=2.0)):
        outcome = simulate(trace(*rollouts), tight, config)
        assert outcome.ledger.evictions > 0
        assert outcome.ledger.recomputed_tokens > 0
        assert outcome.peak_kv_share <= 1
        assert len(outcome.ended) == 6


def test_tools_beyond_the_workers_queue() -> None:
    rollouts = tuple((turn(1, 10.0), turn(1)) for _ in range(3))
    outcome = simulate(trace(*rollouts), [machine()], SchedulerConfig(), tool_workers=1)
    assert outcome.max_tools_queued == 2
    assert outcome.ledger.tool_wait_s == pytest.approx(10 + 20)


def test_every_token_and_turn_of_a_trace_is_counted_once() -> None:
    small = heavy_tailed(num_groups=12, group_size=8, seed=3)
    outcome = simulate(small, [machine(f"engine-{index}", kv_tokens=20_000) for index in range(4)], SchedulerConfig())
    assert set(outcome.ended) == {rollout.key for rollout in small.rollouts}
    assert outcome.ledger.evictions == 0
    assert outcome.ledger.sampled_tokens == sum(turn.num_tokens for rollout in small.rollouts for turn in rollout.turns)
    assert outcome.ledger.ended == outcome.ledger.offered == 96
    assert outcome.ledger.turns == sum(len(rollout.turns) for rollout in small.rollouts)


@pytest.mark.parametrize("name", TRACES)
def test_nobody_beats_the_bound_and_one_seed_gives_one_schedule(name: str) -> None:
    small = TRACES[name](num_groups=8, group_size=8, seed=1)
    machines = [machine(f"engine-{index}", kv_tokens=9_000 * (1 + index), rows=8) for index in range(3)]
    bound = lower_bound_s(small, machines)
    assert bound <= best_offline_s(small, machines)[0]
    ours = simulate(small, machines, SchedulerConfig())
    assert bound <= ours.makespan_s == simulate(small, machines, SchedulerConfig()).makespan_s


def test_the_bounds_by_hand() -> None:
    one = trace((turn(3, 10.0, 8), turn(2)), (turn(6),))
    assert critical_path_s(one, [machine()]) == pytest.approx(3 * 1.5 + 10 + 8 * 0.25 + 2 * 1.5)
    # 11 tokens at 1 / 2 + 0.5 s with two rows, 4 + 8 prefilled at 0.25, on two engines.
    assert throughput_bound_s(one, [machine("a", rows=2), machine("b", rows=2)]) == pytest.approx((11 + 3) / 2)


def test_a_heavy_trace_has_a_twentieth_of_its_rollouts_at_the_limit() -> None:
    lengths = [rollout.response_tokens for rollout in heavy_tailed(num_groups=128, group_size=16, seed=0).rollouts]
    assert max(lengths) == 8192
    assert sum(length == 8192 for length in lengths) / len(lengths) == pytest.approx(0.05, abs=0.02)


def test_the_fit_finds_the_coefficients_that_made_the_measurements() -> None:
    points = tuple(
        DecodePoint(rows=rows, kv_tokens=kv_tokens, seconds=0.03 + 0.001 * rows + 2e-6 * kv_tokens)
        for rows in (1.0, 16.0, 64.0)
        for kv_tokens in (100.0, 5000.0)
    )
    made = MeasuredTrace(
        command="", model="", dtype="", machine="", decode=points, prefill=(PrefillPoint(tokens=100, seconds=0.5),)
    )
    timing = made.fit()
    assert timing.step_s == pytest.approx(0.03)
    assert timing.row_s == pytest.approx(0.001)
    assert timing.kv_token_s == pytest.approx(2e-6)
    assert timing.prefill_token_s == pytest.approx(0.005)


def test_a_trace_of_your_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"max_tokens": 20, "groups": [{"prompt_tokens": 4, "rollouts": [[[5, 0.5, 3], [6, 0, 0]]]}]}')
    mine = load_trace(path)
    assert (mine.name, mine.max_tokens, mine.groups[0].prompt_tokens) == ("mine", 20, 4)
    assert mine.rollouts[0].turns == (turn(5, 0.5, 3), turn(6))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ('[{"prompt_tokens": 4, "rollouts": [[]]}]', "groups.0.rollouts.0: .*at least 1"),
        ('[{"prompt_tokens": 4, "rollouts": [[[5, -1, 3], [5, 0, 0]]]}]', "groups.0.rollouts.0.0.1: .*-1"),
        ('[{"prompt_tokens": 4, "rollouts": [[[5, NaN, 3], [5, 0, 0]]]}]', "groups.0.rollouts.0.0.1: .*nan"),
        ('[{"prompt_tokens": 4, "rollouts": [[[5, 9, 0]]]}]', "the last turn of rollout 0 of group 0 has tools"),
        (
            '[{"prompt_tokens": 4, "rollouts": [[[5, 0, 0]], [[50, 0, 3], [60, 0, 0]]]}]',
            "rollout 1 of group 0 has 113 tokens, above max_tokens = 100",
        ),
    ],
)
def test_a_trace_that_could_not_be_is_refused_with_its_place(groups: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(f'{{"max_tokens": 100, "groups": {groups}}}')
    with pytest.raises(UserError, match=rf"mine.json: (.|\n)*{said}"):
        load_trace(path)


@pytest.mark.parametrize("text", ["[1, 2]", "nonsense", '{"a": 1}'])
def test_a_file_that_is_no_trace_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"mine.json: (.|\n)*docs/scheduler.md shows the form"):
        load_trace(path)


@pytest.mark.parametrize(
    ("decode", "prefill", "said"),
    [
        ([], [{"tokens": 1.0, "seconds": 1.0}], "decode: .*at least 1"),
        ([{"rows": 1.0, "kv_tokens": 0.0, "seconds": 0.0}], [{"tokens": 1.0, "seconds": 1.0}], "decode.0.seconds"),
    ],
)
def test_measurements_that_could_not_be_are_refused(
    decode: list[object], prefill: list[object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "measured.json"
    words = dict.fromkeys(("command", "model", "dtype", "machine"), "")
    path.write_text(json.dumps({**words, "decode": decode, "prefill": prefill}))
    with pytest.raises(ConfigError, match=said):
        load_timing(path)
