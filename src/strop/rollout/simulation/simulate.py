"""Plays a trace on simulated engines, driven by the same scheduler as real ones; time jumps from event to event."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from strop.errors import StropError
from strop.rollout.scheduling import (
    Action,
    CallTools,
    EngineDied,
    EngineDraining,
    EngineJoined,
    EngineSpec,
    EngineUsage,
    Event,
    GroupOffered,
    Ledger,
    Release,
    RolloutEnded,
    RolloutOffer,
    Run,
    SchedulerConfig,
    Tick,
    ToolFinished,
    ToolStarted,
    TurnFinished,
    make_scheduler,
)
from strop.rollout.simulation.engines import EngineTiming, Finished, SimulatedEngine
from strop.rollout.simulation.trace import Trace, TracedGroup, TracedRollout
from strop.types import RolloutKey

Foresight: TypeAlias = Literal["none", "rollouts", "groups"]
"""What a scheduler is told beforehand, as nobody can: nothing; how long each rollout gets, and so to start the longest first;
or the same, but to start the groups first whose rollouts are longest on average, so that each is played together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """An engine's memory and how fast it is."""

    spec: EngineSpec
    timing: EngineTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """An engine joins, drains or dies at a time."""

    at_s: float
    event: EngineDied | EngineDraining | SimulatedMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a simulated step."""

    makespan_s: float
    ledger: Ledger
    usage: Mapping[str, EngineUsage]  # rows that decoded, whoever asked for more
    max_conversations: int  # of all engines together
    evictions: int
    recomputed_tokens: int  # that engines computed though one had them: evictions, suspensions, deaths
    prefilled_tokens: int
    peak_kv_share: float  # of the fullest engine, of tokens that were really there
    max_tools_queued: int
    num_events: int
    scheduling_s: float  # processor time that the scheduler took, all events together
    ended: Mapping[RolloutKey, float]  # when each rollout ended

    @property
    def busy_share(self) -> float:
        """Of the engines' time until the end of the step, how much they decoded anything."""
        return sum(usage.busy_s for usage in self.usage.values()) / (self.makespan_s * len(self.usage))

    @property
    def row_share(self) -> float:
        """Of the conversations that the engines may hold, how many decoded, over time."""
        return sum(usage.row_s for usage in self.usage.values()) / (self.makespan_s * self.max_conversations)

    @property
    def tail_idle_share(self) -> float:
        """Of the engines' time, how much lies between an engine's last token and the end of the step."""
        idle = sum(self.makespan_s - usage.last_busy_s for usage in self.usage.values())
        return idle / (self.makespan_s * len(self.usage))

    @property
    def scheduling_us_per_event(self) -> float:
        return 1e6 * self.scheduling_s / self.num_events

    def as_json(self) -> dict[str, float]:
        """The figures, without the timelines."""
        names = ("makespan_s", "busy_share", "row_share", "tail_idle_share", "peak_kv_share", "evictions", "recomputed_tokens")
        more = ("prefilled_tokens", "max_tools_queued", "num_events", "scheduling_us_per_event")
        return {name: getattr(self, name) for name in (*names, *more)} | dict(self.ledger.as_metrics())


def offers(trace: Trace, *, foresight: Foresight = "none") -> list[GroupOffered]:
    """The groups of a trace, as a scheduler is told of them."""
    return [
        GroupOffered(
            prompt_tokens=group.prompt_tokens,
            rollouts=tuple(
                RolloutOffer(
                    key=rollout.key,
                    max_tokens=trace.max_tokens if foresight == "none" else rollout.response_tokens,
                    expected_tokens=_expected_tokens(rollout, group, foresight),
                )
                for rollout in group.rollouts
            ),
        )
        for group in trace.groups
    ]


def _expected_tokens(rollout: TracedRollout, group: TracedGroup, foresight: Foresight) -> float | None:
    match foresight:
        case "none":
            return None
        case "rollouts":
            return rollout.response_tokens
        case "groups":
            return sum(each.response_tokens for each in group.rollouts) / len(group.rollouts)


def simulate(
    trace: Trace,
    machines: Sequence[SimulatedMachine],
    config: SchedulerConfig,
    *,
    tool_workers: int | None = None,
    disturbances: Sequence[Disturbance] = (),
    foresight: Foresight = "none",
) -> Outcome:
    """The step that `config` makes of `trace`.

    Args:
        tool_workers: how many tool calls run at once, others queue; None: any number.
    """
    simulation = _Simulation(trace, config, tool_workers)
    for machine in machines:
        simulation.join(machine)
    for each in disturbances:
        simulation.at(each.at_s, each.event)
    for event in offers(trace, foresight=foresight):
        simulation.tell(event)
    return simulation.play()


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineEvent:
    engine: SimulatedEngine
    number: int  # of the plan that it belongs to; an engine has one plan at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolDone:
    key: RolloutKey
    num_tokens: int


class _Simulation:
    """The clock, the engines and the tools around one scheduler."""

    def __init__(self, trace: Trace, config: SchedulerConfig, tool_workers: int | None) -> None:
        self._rollouts: dict[RolloutKey, TracedRollout] = {rollout.key: rollout for rollout in trace.rollouts}
        self._context = {rollout.key: group.prompt_tokens for group in trace.groups for rollout in group.rollouts}
        self._prompt_tokens = dict(self._context)
        self._turn = dict.fromkeys(self._rollouts, 0)
        self._scheduler = make_scheduler(config)
        self._engines: dict[str, SimulatedEngine] = {}
        self._gone: list[SimulatedEngine] = []
        self._plans: dict[str, int] = {}
        self._heap: list[
            tuple[float, int, _EngineEvent | _ToolDone | EngineDied | EngineDraining | SimulatedMachine | Tick]
        ] = []
        self._num_pushed = 0
        self._now_s = 0.0
        self._idle_tool_workers = float("inf") if tool_workers is None else tool_workers
        self._tools: deque[RolloutKey] = deque()
        self._max_tools_queued = 0
        self._ended: dict[RolloutKey, float] = {}
        self._num_events = 0
        self._scheduling_s = 0.0
        self._touched: dict[str, SimulatedEngine] = {}
        self._tick_s: float | None = None

    def at(self, at_s: float, what: _EngineEvent | _ToolDone | EngineDied | EngineDraining | SimulatedMachine | Tick) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (at_s, self._num_pushed, what))

    def join(self, machine: SimulatedMachine) -> None:
        self._engines[machine.spec.name] = SimulatedEngine(machine.spec, machine.timing)
        self._plans[machine.spec.name] = 0
        self.tell(EngineJoined(engine=machine.spec))

    def tell(self, event: Event) -> None:
        """Hand an event to the scheduler and do what it asks for."""
        started = time.thread_time()
        actions = self._scheduler.handle(event, now_s=self._now_s)
        self._scheduling_s += time.thread_time() - started
        self._num_events += 1
        for action in actions:
            self._do(action)
        tick_s = self._scheduler.next_tick_s
        if tick_s is not None and tick_s != self._tick_s:
            self._tick_s = tick_s
            self.at(tick_s, Tick())

    def play(self) -> Outcome:
        self._plan()
        while self._heap:
            self._now_s, _, what = heapq.heappop(self._heap)
            if isinstance(what, _EngineEvent):
                self._engine_event(what)
            elif isinstance(what, _ToolDone):
                self._tool_done(what)
            elif isinstance(what, SimulatedMachine):
                self.join(what)
            elif isinstance(what, EngineDied):
                self._gone.append(self._engines.pop(what.name))
                self.tell(what)
            else:
                self.tell(what)
            self._plan()
        if len(self._ended) < len(self._rollouts):
            missing = len(self._rollouts) - len(self._ended)
            raise StropError(f"{missing} rollouts never ended: the engines that are left cannot hold them.")
        engines = [*self._engines.values(), *self._gone]
        makespan = max(self._ended.values())
        for engine in engines:
            engine.usage.move(max(makespan, engine.usage.since_s), 0, 0.0)
        return Outcome(
            makespan_s=makespan,
            ledger=self._scheduler.ledger,
            usage={engine.spec.name: engine.usage for engine in engines},
            max_conversations=sum(engine.spec.max_conversations for engine in engines),
            evictions=sum(engine.evictions for engine in engines),
            recomputed_tokens=self._scheduler.ledger.recomputed_tokens,
            prefilled_tokens=sum(engine.prefilled_tokens for engine in engines),
            peak_kv_share=max(engine.peak_tokens / (engine.spec.kv_blocks * engine.spec.block_tokens) for engine in engines),
            max_tools_queued=self._max_tools_queued,
            num_events=self._num_events,
            scheduling_s=self._scheduling_s,
            ended=self._ended,
        )

    def _do(self, action: Action) -> None:
        if isinstance(action, Run):
            engine = self._touch(action.engine)
            engine.submit(
                action.key,
                action.run,
                prompt_tokens=self._prompt_tokens[action.key],
                context_tokens=self._context[action.key],
                num_tokens=self._rollouts[action.key].turns[self._turn[action.key]].num_tokens,
                now_s=self._now_s,
            )
        elif isinstance(action, Release):
            self._touch(action.engine).release(action.key, now_s=self._now_s)
        elif isinstance(action, CallTools):
            if self._idle_tool_workers > 0:
                self._start_tool(action.key)
            else:
                self._tools.append(action.key)
                self._max_tools_queued = max(self._max_tools_queued, len(self._tools))

    def _touch(self, name: str) -> SimulatedEngine:
        engine = self._engines[name]
        self._touched[name] = engine
        return engine

    def _start_tool(self, key: RolloutKey) -> None:
        self._idle_tool_workers -= 1
        turn = self._rollouts[key].turns[self._turn[key]]
        self.at(self._now_s + turn.tool_s, _ToolDone(key=key, num_tokens=turn.observation_tokens))
        self.tell(ToolStarted(key=key))

    def _tool_done(self, done: _ToolDone) -> None:
        self._idle_tool_workers += 1
        self._context[done.key] += done.num_tokens
        self._turn[done.key] += 1
        self.tell(ToolFinished(key=done.key, num_tokens=done.num_tokens))
        while self._tools and self._idle_tool_workers > 0:
            self._start_tool(self._tools.popleft())

    def _engine_event(self, event: _EngineEvent) -> None:
        name = event.engine.spec.name
        if name not in self._engines or self._plans[name] != event.number:
            return
        self._now_s, finished = self._touch(name).do_event()
        for each in finished:
            self._finished(each)

    def _finished(self, done: Finished) -> None:
        rollout, turn = self._rollouts[done.key], self._turn[done.key]
        num_tokens = rollout.turns[turn].num_tokens
        self._context[done.key] += num_tokens
        if turn + 1 < len(rollout.turns):
            self.tell(TurnFinished(key=done.key, run=done.run, num_tokens=num_tokens, recomputed_tokens=done.recomputed_tokens))
            return
        if done.key in self._ended:
            raise StropError(f"rollout {done.key} ended twice.")
        self._ended[done.key] = self._now_s
        self.tell(RolloutEnded(key=done.key, run=done.run, num_tokens=num_tokens, recomputed_tokens=done.recomputed_tokens))

    def _plan(self) -> None:
        """Look anew for the next event of every engine that was touched."""
        for name, engine in self._touched.items():
            self._plans[name] += 1
            at_s = engine.next_event_s()
            if at_s is not None:
                self.at(at_s, _EngineEvent(engine=engine, number=self._plans[name]))
        self._touched.clear()
