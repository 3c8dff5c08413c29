"""Runs a trace on simulated engines, with the scheduler of real ones, and bounds that no schedule beats; draws the result.

Time jumps from event to event. The page shows policies next to each other: rStar2-Agent (arXiv 2508.20722), Figure 7.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, ParamSpec

from markupsafe import Markup

from strop.reports.html import render
from strop.reports.number_format import Table, duration, figure
from strop.reports.timelines import EngineRow, Timeline, draw
from strop.rollout.scheduler.admission import EngineSpec
from strop.rollout.scheduler.report import EngineUsage, Ledger
from strop.rollout.scheduler.scheduler import Action, CallTools, Release, Run, Scheduler, SchedulerConfig, make_scheduler
from strop.simulation.engines import EngineTiming, Finished, SimulatedEngine
from strop.simulation.trace import Trace, TracedRollout, TracedTurn
from strop.types import RolloutKey

_P = ParamSpec("_P")
_LIVE_COUNTS = ("request_tokens", "cached_tokens", "drafted_tokens", "branch_tokens", "branch_cached_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """An engine's memory and its speed."""

    spec: EngineSpec
    timing: EngineTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a simulated step."""

    makespan_s: float
    ledger: Ledger
    usage: Mapping[str, EngineUsage]  # rows that decoded, not rows that were requested
    max_conversations: int  # of all engines together
    prefilled_tokens: int
    peak_kv_share: float  # of the fullest engine, memory in use
    max_tools_queued: int
    num_events: int
    scheduling_s: float  # processor time of the scheduler, all events together
    ended: Mapping[RolloutKey, float]  # when each rollout ended

    @property
    def busy_share(self) -> float:
        """Share of the engines' time, up to the end of the step, in which they decoded."""
        busy_s = sum(usage.rows.positive_s(0.0, self.makespan_s) for usage in self.usage.values())
        return busy_s / (self.makespan_s * len(self.usage))

    @property
    def row_share(self) -> float:
        """Rows that decoded, over the rows that the engines have and over time."""
        row_s = sum(usage.rows.integral(self.makespan_s) for usage in self.usage.values())
        return row_s / (self.makespan_s * self.max_conversations)

    @property
    def tail_idle_share(self) -> float:
        """Share of the engines' time between an engine's last token and the end of the step."""
        idle_s = sum(self.makespan_s - usage.rows.last_positive_s(self.makespan_s) for usage in self.usage.values())
        return idle_s / (self.makespan_s * len(self.usage))

    @property
    def scheduling_us_per_event(self) -> float:
        return 1e6 * self.scheduling_s / self.num_events

    def as_json(self) -> dict[str, float]:
        """The metrics, without the timelines and without what only real engines count."""
        names = ("makespan_s", "busy_share", "row_share", "tail_idle_share", "peak_kv_share")
        more = ("prefilled_tokens", "max_tools_queued", "num_events", "scheduling_us_per_event")
        counts = [name for name in Ledger.__dataclass_fields__ if name not in ("runs", *_LIVE_COUNTS)]
        return {name: getattr(self, name) for name in (*names, *more)} | self.ledger.as_metrics(*counts)


def simulate(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    config: SchedulerConfig,
    *,
    tool_workers: int | None = None,
    offers: Mapping[RolloutKey, int] | None = None,
    scheduler: Scheduler | None = None,
) -> Outcome:
    """Simulate one step: the rollouts of `trace`, scheduled as `config` says.

    Args:
        tool_workers: tool calls that run at the same time, others queue; None: no limit.
        offers: the largest length of each response that the scheduler learns, in the order in which rollouts are offered; by
            default the limit, as in reality.
        scheduler: decides in place of the one of `config`.
    """
    simulation = _Simulation(trace, make_scheduler(config) if scheduler is None else scheduler, tool_workers)
    for machine in machines:
        simulation.join(machine)
    for key, max_tokens in (offers or {rollout.key: trace.max_tokens for rollout in trace.rollouts}).items():
        simulation.offer(key, max_tokens=max_tokens)
    return simulation.run()


def lower_bound_s(trace: Trace, machines: Sequence[SimulatedMachine]) -> float:
    """The larger of two bounds: the longest rollout on an empty engine, and all work on engines that are always full."""
    return max(critical_path_s(trace, machines), throughput_bound_s(trace, machines))


def critical_path_s(trace: Trace, machines: Sequence[SimulatedMachine]) -> float:
    """The time of the longest rollout on the best engine for it, with nothing else there and a free prompt."""
    timings = {machine.timing for machine in machines}
    return max(
        min(_unshared_s(rollout, group.prompt_tokens, timing) for timing in timings)
        for group in trace.groups
        for rollout in group.rollouts
    )


def _unshared_s(rollout: TracedRollout, prompt_tokens: int, timing: EngineTiming) -> float:
    sampled, attended, prefilled = tokens_of(rollout, prompt_tokens)
    tools_s = sum(turn.tool_s for turn in rollout.turns)
    engine_s = sampled * (timing.step_s + timing.row_s) + attended * timing.kv_token_s + prefilled * timing.prefill_token_s
    return engine_s + tools_s


def throughput_bound_s(trace: Trace, machines: Sequence[SimulatedMachine]) -> float:
    """The time of all tokens at their price in a full batch, however they are spread over the engines.

    An engine needs at least `alpha` seconds a token sampled (its share of a step with all rows), `gamma` a token attended to,
    `delta` a token prefilled. Any prices (u, v, w) of the three give a bound, by duality of the linear program that spreads
    fractions of the work: (u N + v K + w P) / sum over engines of max(u / alpha, v / gamma, w / delta). The prices of each
    engine are tried. Tools and memory are left out.
    """
    sampled = attended = prefilled = 0
    for group in trace.groups:
        prefilled += group.prompt_tokens
        for rollout in group.rollouts:
            tokens = tokens_of(rollout, group.prompt_tokens)
            sampled, attended, prefilled = sampled + tokens[0], attended + tokens[1], prefilled + tokens[2]
    costs = [prices_of(machine) for machine in machines]
    work = (sampled, attended, prefilled)
    return max(
        sum(price * amount for price, amount in zip(prices, work, strict=True))
        / sum(max(price / cost for price, cost in zip(prices, each, strict=True) if cost > 0) for each in costs)
        for prices in set(costs)
    )


def prices_of(machine: SimulatedMachine) -> tuple[float, float, float]:
    """Seconds of a token sampled, attended to and prefilled."""
    timing = machine.timing
    return (timing.step_s / machine.spec.max_conversations + timing.row_s, timing.kv_token_s, timing.prefill_token_s)


def tokens_of(rollout: TracedRollout, prompt_tokens: int) -> tuple[int, int, int]:
    """Tokens sampled, attended to and prefilled; the prompt is not prefilled."""
    sampled = attended = prefilled = 0
    context = prompt_tokens
    for turn in rollout.turns:
        sampled += turn.num_tokens
        attended += turn.num_tokens * context + turn.num_tokens * (turn.num_tokens - 1) // 2
        prefilled += turn.observation_tokens
        context += turn.num_tokens + turn.observation_tokens
    return sampled, attended, prefilled


@dataclass(slots=True, eq=False, kw_only=True)
class _Progress:
    """How far a rollout is."""

    turns: Sequence[TracedTurn]
    prompt_tokens: int
    context_tokens: int
    num_turns: int = 0  # completed, tools included
    num_sampled: int = 0  # of the turn
    num_asked: int = 0  # by the newest run

    @property
    def turn(self) -> TracedTurn:
        return self.turns[self.num_turns]


class _Simulation:
    """The clock, the engines and the tools around one scheduler."""

    def __init__(self, trace: Trace, scheduler: Scheduler, tool_workers: int | None) -> None:
        self._rollouts = {
            rollout.key: _Progress(turns=rollout.turns, prompt_tokens=group.prompt_tokens, context_tokens=group.prompt_tokens)
            for group in trace.groups
            for rollout in group.rollouts
        }
        self.scheduler = scheduler
        self._engines: dict[str, SimulatedEngine] = {}
        self._plans: dict[str, int] = {}  # by engine: number of the newest plan for its next event
        self._touched: dict[str, SimulatedEngine] = {}  # engines whose next event has changed
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_pushed = 0
        self._now_s = 0.0
        self._idle_tool_workers = float("inf") if tool_workers is None else tool_workers
        self._queued_tools: deque[RolloutKey] = deque()
        self._max_tools_queued = 0
        self._ended: dict[RolloutKey, float] = {}
        self._num_events = 0
        self._scheduling_s = 0.0

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        """Call `act` at a time."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (at_s, self._num_pushed, act))

    def join(self, machine: SimulatedMachine) -> None:
        self._engines[machine.spec.name] = SimulatedEngine(machine.spec, machine.timing)
        self._plans[machine.spec.name] = 0
        self.handle(self.scheduler.engine_joined, machine.spec)

    def offer(self, key: RolloutKey, *, max_tokens: int) -> None:
        self.handle(self.scheduler.offered, key, prompt_tokens=self._rollouts[key].prompt_tokens, max_tokens=max_tokens)

    def handle(self, event: Callable[Concatenate[float, _P], list[Action]], *arguments: _P.args, **named: _P.kwargs) -> None:
        """Report an event to the scheduler and carry out its actions."""
        started = time.thread_time()
        actions = event(self._now_s, *arguments, **named)
        self._scheduling_s += time.thread_time() - started
        self._num_events += 1
        for action in actions:
            match action:
                case Run():
                    self._run(action)
                case Release():
                    self._touch(action.engine).release(action.key, now_s=self._now_s)
                case CallTools() if action.key not in self._ended:  # the last turn has no tools
                    self._call_tools(action.key)

    def run(self) -> Outcome:
        self._plan()
        while self._heap:
            self._now_s, _, act = heapq.heappop(self._heap)
            act()
            self._plan()
        engines, ledger = self._engines.values(), self.scheduler.ledger
        ledger.evictions = sum(engine.evictions for engine in engines)
        return Outcome(
            makespan_s=max(self._ended.values()),
            ledger=ledger,
            usage={engine.spec.name: engine.usage for engine in engines},
            max_conversations=sum(engine.spec.max_conversations for engine in engines),
            prefilled_tokens=sum(engine.prefilled_tokens for engine in engines),
            peak_kv_share=max(engine.peak_tokens / (engine.spec.kv_blocks * engine.spec.block_tokens) for engine in engines),
            max_tools_queued=self._max_tools_queued,
            num_events=self._num_events,
            scheduling_s=self._scheduling_s,
            ended=self._ended,
        )

    def _run(self, run: Run) -> None:
        rollout = self._rollouts[run.key]
        rollout.num_asked = min(run.max_tokens, rollout.turn.num_tokens - rollout.num_sampled)
        self._touch(run.engine).submit(
            run.key,
            run.run,
            prompt_tokens=rollout.prompt_tokens,
            context_tokens=rollout.context_tokens,
            num_tokens=rollout.num_asked,
            now_s=self._now_s,
        )

    def _touch(self, name: str) -> SimulatedEngine:
        engine = self._touched[name] = self._engines[name]
        return engine

    def _call_tools(self, key: RolloutKey) -> None:
        if self._idle_tool_workers > 0:
            self._start_tools(key)
        else:
            self._queued_tools.append(key)
            self._max_tools_queued = max(self._max_tools_queued, len(self._queued_tools))

    def _start_tools(self, key: RolloutKey) -> None:
        self._idle_tool_workers -= 1
        self.at(self._now_s + self._rollouts[key].turn.tool_s, partial(self._finish_tools, key))
        self.handle(self.scheduler.tool_started, key)

    def _finish_tools(self, key: RolloutKey) -> None:
        rollout = self._rollouts[key]
        num_tokens = rollout.turn.observation_tokens
        self._idle_tool_workers += 1
        rollout.context_tokens += num_tokens
        rollout.num_turns += 1
        rollout.num_sampled = 0
        self.handle(self.scheduler.tool_finished, key, num_tokens=num_tokens)
        while self._queued_tools and self._idle_tool_workers > 0:
            self._start_tools(self._queued_tools.popleft())

    def _engine_event(self, name: str, plan: int) -> None:
        if self._plans[name] != plan:  # out of date
            return
        self._now_s, finished = self._touch(name).do_event()
        for each in finished:
            self._finish_completion(each)

    def _finish_completion(self, done: Finished) -> None:
        rollout, scheduler = self._rollouts[done.key], self.scheduler
        rollout.context_tokens += rollout.num_asked
        rollout.num_sampled += rollout.num_asked
        is_turn = rollout.num_sampled == rollout.turn.num_tokens
        if is_turn and rollout.num_turns + 1 == len(rollout.turns):
            self._ended[done.key] = self._now_s
        self.handle(
            scheduler.turn_finished if is_turn else scheduler.piece_finished,
            done.key,
            run=done.run,
            num_tokens=rollout.num_asked,
            recomputed_tokens=done.recomputed_tokens,
        )
        if done.key in self._ended:
            self.handle(self.scheduler.ended, done.key)

    def _plan(self) -> None:
        """Find the next event of every engine that has changed."""
        for name, engine in self._touched.items():
            self._plans[name] += 1
            at_s = engine.next_event_s()
            if at_s is not None:
                self.at(at_s, partial(self._engine_event, name, self._plans[name]))
        self._touched.clear()


_BINS = 240


def draw_timelines(outcomes: Mapping[str, Outcome], *, is_standalone: bool = True) -> Markup:
    """Draw one row for each engine, darker the more rows decode, on one time axis for all policies."""
    return draw([_timeline(name, outcome) for name, outcome in outcomes.items()], is_standalone=is_standalone)


def _timeline(name: str, outcome: Outcome) -> Timeline:
    end_s, most = outcome.makespan_s, _most_rows(outcome)
    return Timeline(
        title=f"{name}: {duration(end_s)}, engines busy {outcome.busy_share:.0%} of the time",
        duration_s=end_s,
        engines=[
            EngineRow(name=engine, max_rows=most, rows=tuple(usage.rows.means(end_s, _BINS)), joined_s=0.0, left_s=end_s)
            for engine, usage in outcome.usage.items()
        ],
    )


def _most_rows(outcome: Outcome) -> int:
    """The most rows that an engine decoded at once."""
    return max(1, *(int(usage.rows.max) for usage in outcome.usage.values()))


def schedule_table(outcomes: Mapping[str, Outcome], *, bound_s: float) -> Table:
    """Return one row for each metric, one column for each policy."""
    each = list(outcomes.values())
    rows: list[tuple[str, ...]] = [
        ("makespan", *(duration(one.makespan_s) for one in each)),
        ("over the lower bound", *(f"{one.makespan_s / bound_s:.3f}" for one in each)),
        ("engines busy", *(f"{one.busy_share:.1%}" for one in each)),
        ("rows that decode", *(f"{one.row_share:.1%}" for one in each)),
        ("idle at the end of the step", *(f"{one.tail_idle_share:.1%}" for one in each)),
        ("KV memory in use, at most", *(f"{one.peak_kv_share:.1%}" for one in each)),
        ("evictions", *(figure(one.ledger.evictions) for one in each)),
        ("recomputed tokens", *(figure(one.ledger.recomputed_tokens) for one in each)),
        ("prefilled tokens", *(figure(one.prefilled_tokens) for one in each)),
        ("tool calls in the queue, at most", *(figure(one.max_tools_queued) for one in each)),
        ("mean wait for a tool", *(duration(one.ledger.tool_wait_s / max(1, one.ledger.tool_turns)) for one in each)),
        ("mean wait for an engine", *(duration(one.ledger.queue_wait_s / max(1, one.ledger.offered)) for one in each)),
        ("longest rollout", *(duration(one.ledger.longest_rollout_s) for one in each)),
        ("scheduling, µs an event", *(f"{one.scheduling_us_per_event:.1f}" for one in each)),
    ]
    return Table(columns=("", *outcomes), rows=tuple(rows))


def schedule_page(title: str, outcomes: Mapping[str, Outcome], *, bound_s: float) -> str:
    """Return the timelines and the table as one self-contained page."""
    return render(
        "schedule.html.j2",
        title=title,
        figures=schedule_table(outcomes, bound_s=bound_s),
        timelines=draw_timelines(outcomes, is_standalone=False),
        num_rows=max(map(_most_rows, outcomes.values())),
    )
