"""Which metrics of a run are drawn together, and what each drawing says: the log of a run -> sections of plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.reports.log import Metrics, RunLog, StageLog
from strop.reports.plots import Boundary, Look, Plot, Point, Series
from strop.reports.scales import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot to be: the metrics it shows, with the name of each line."""

    title: str
    metrics: Mapping[str, str]
    note: str  # what to look for, in a sentence
    unit: Unit = Unit.PLAIN
    optional: frozenset[str] = frozenset()  # not every run logs these; their absence is not worth a word
    look: Look = Look.LINE
    y_low: float | None = 0.0
    y_high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A plot and the sentence below its title."""

    plot: Plot
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Plots under one heading; `is_open` is False for what only a closer look needs."""

    title: str
    drawings: tuple[Drawing, ...]
    is_open: bool = True


LEARNING = (
    Panel(
        title="Reward",
        metrics={"rollout/reward_mean": "reward"},
        note="Mean over the step's rollouts, before any is dropped.",
        y_low=None,
    ),
    Panel(
        title="Accuracy on training tasks",
        metrics={"rollout/accuracy": "accuracy"},
        note="Share of the step's rollouts whose answer is right.",
        unit=Unit.PERCENT,
        y_high=1.0,
    ),
    Panel(
        title="Tool errors",
        metrics={
            "rollout/tool_error_rate_correct": "in correct trajectories",
            "rollout/tool_error_rate": "in all trajectories",
        },
        note="Share of calls that the policy got wrong.",
        unit=Unit.PERCENT,
    ),
    Panel(
        title="Response length",
        metrics={"rollout/length_tokens_mean": "tokens"},
        note="Tokens after the prompt, tool output included.",
    ),
    Panel(
        title="Truncated and void",
        metrics={"rollout/truncated_fraction": "truncated", "rollout/void_fraction": "void"},
        note="Out of tokens; lost by a fault of ours, left out.",
        unit=Unit.PERCENT,
    ),
    Panel(
        title="Turns and tool calls",
        metrics={"rollout/turns_mean": "turns", "rollout/tool_calls_mean": "tool calls"},
        note="Mean of a rollout.",
    ),
)

OPTIMISATION = (
    Panel(
        title="Entropy",
        metrics={"policy/entropy_nats": "entropy"},
        note="Nats a token. A fall to zero ends exploration.",
    ),
    Panel(
        title="Clip fraction",
        metrics={"policy/clip_fraction_low": "below", "policy/clip_fraction_high": "above"},
        note="Share of trained tokens whose ratio left the clip range.",
        unit=Unit.PERCENT,
    ),
    Panel(
        title="Groups",
        metrics={"groups/used": "used", "groups/all_right": "all right", "groups/all_wrong": "all wrong"},
        note="A group whose rollouts all agree teaches nothing.",
    ),
    Panel(
        title="Gradient norm",
        metrics={"update/grad_norm": "gradient norm"},
        note="Before clipping.",
    ),
    Panel(
        title="Loss",
        metrics={"update/loss": "loss"},
        note="Of a policy gradient: its level says little.",
        y_low=None,
    ),
    Panel(
        title="Learning rate",
        metrics={"update/learning_rate": "learning rate"},
        note="Of the step's last update.",
    ),
    Panel(
        title="Sampler against trainer",
        metrics={"policy/logprob_gap_mean": "mean", "policy/logprob_gap_max": "largest"},
        note="Log-prob gap of the same tokens, in nats.",
    ),
    Panel(
        title="Probability ratio",
        metrics={"policy/ratio": "mean", "policy/ratio_max": "largest"},
        note="New over old probability of a trained token.",
        optional=frozenset({"policy/ratio_max"}),
        y_low=None,
    ),
)

TIME = (
    Panel(
        title="Time by phase",
        metrics={
            "time/rollout_s": "rollout",
            "time/score_s": "score",
            "time/update_s": "update",
            "time/publish_s": "publish",
            "time/checkpoint_s": "checkpoint",
        },
        note="Of each step, one phase on top of the other.",
        unit=Unit.SECONDS,
        optional=frozenset({"time/checkpoint_s"}),
        look=Look.AREA,
    ),
    Panel(
        title="Throughput",
        metrics={"rollout/tokens_per_s": "tokens per second"},
        note="Tokens sampled per second of rollout.",
    ),
    Panel(
        title="Whole step",
        metrics={"time/step_s": "step"},
        note="From the first rollout to the published weights.",
        unit=Unit.SECONDS,
    ),
)

ENGINES = (
    Panel(
        title="Engines at work",
        metrics={
            "scheduler/row_share": "rows that decode",
            "scheduler/busy_share": "engines that decode",
            "scheduler/tail_idle_share": "idle at the end",
        },
        note="Shares of the engines' time; at the end: once nobody waits.",
        unit=Unit.PERCENT,
        y_high=1.0,
    ),
    Panel(
        title="KV memory reserved",
        metrics={"scheduler/kv_share_mean": "mean", "scheduler/kv_share_max": "largest"},
        note="Share of what the engines have. Static reserves nothing.",
        unit=Unit.PERCENT,
        optional=frozenset({"scheduler/kv_share_mean", "scheduler/kv_share_max"}),
        y_high=1.0,
    ),
    Panel(
        title="Rollouts that wait for an engine",
        metrics={"scheduler/queue_mean": "mean", "scheduler/queue_max": "most"},
        note="Over the time of the step.",
    ),
    Panel(
        title="Waits",
        metrics={
            "scheduler/queue_wait_mean_s": "for an engine",
            "scheduler/tool_wait_mean_s": "for tools to start",
            "scheduler/tool_run_mean_s": "for tools to answer",
        },
        note="Mean of a rollout, and of a turn.",
        unit=Unit.SECONDS,
        optional=frozenset({"scheduler/tool_wait_mean_s", "scheduler/tool_run_mean_s"}),
    ),
    Panel(
        title="Longest rollout",
        metrics={"scheduler/longest_rollout_s": "longest"},
        note="From its first turn to its end; the step takes no less.",
        unit=Unit.SECONDS,
    ),
    Panel(
        title="Longest response",
        metrics={"scheduler/longest_rollout_tokens": "tokens"},
        note="Of one rollout, tool output included.",
    ),
    Panel(
        title="Found in the cache",
        metrics={"scheduler/cached_token_share": "cached"},
        note="Share of the requests' tokens that were not computed again.",
        unit=Unit.PERCENT,
        y_high=1.0,
    ),
    Panel(
        title="Computed twice",
        metrics={"scheduler/recomputed_tokens": "tokens"},
        note="After evictions, suspensions and lost engines.",
    ),
    Panel(
        title="Lost and refused",
        metrics={
            "scheduler/engines_lost": "engines lost",
            "scheduler/restarts": "turns begun again",
            "scheduler/evictions": "evictions",
            "scheduler/suspended": "suspended",
            "scheduler/branches_refused": "branches refused",
        },
        note="How often in a step; a healthy one has none.",
    ),
)
_BY_ENGINE = "scheduler/row_share/"  # one metric an engine: the timeline shows more

TOOL_CALLS = (  # rStar2-Agent (arXiv 2508.20722), Figure 6, as two plots: calls and seconds share no axis
    Panel(
        title="Tool calls per step",
        metrics={"rollout/tool_calls_dispatched": "calls"},
        note="Those that reached a tool, in all rollouts together.",
    ),
    Panel(
        title="Tool latency",
        metrics={
            "time/tool_latency_mean_s": "mean",
            "time/tool_latency_p95_s": "95th percentile",
            "time/tool_latency_p50_s": "median",
        },
        note="Of one call, from dispatch to result, queues included.",
        unit=Unit.SECONDS,
    ),
)

FINE_TUNING = (
    Panel(title="Loss", metrics={"sft/loss": "loss"}, note="Nats a token of the demonstrator's turns."),
    Panel(title="Gradient norm", metrics={"update/grad_norm": "gradient norm"}, note="Before clipping."),
    Panel(title="Learning rate", metrics={"update/learning_rate": "learning rate"}, note="Of the step's last update."),
    Panel(title="Throughput", metrics={"sft/tokens_per_s": "tokens per second"}, note="Tokens trained on per second."),
    Panel(title="Time", metrics={"time/step_s": "step"}, note="Seconds of each step.", unit=Unit.SECONDS),
)


_ALL = (*LEARNING, *OPTIMISATION, *TIME, *TOOL_CALLS, *ENGINES, *FINE_TUNING)


def sections(log: RunLog) -> list[Section]:
    """Every metric that the run logged, and every one that it should have, under headings; what matters most first.

    Tool calls have a section only where there were some.
    """
    tuned = [stage for stage in log.stages if _is_fine_tuning(stage)]
    trained = [stage for stage in log.stages if stage not in tuned and (stage.steps or stage.kind == "rl")]
    found: list[Section] = []
    if trained:
        found += [
            _section("Learning", LEARNING, trained, is_open=True),
            _section("Optimisation", OPTIMISATION, trained, is_open=True),
            _section("Time", TIME, trained, is_open=True),
        ]
    if _called_tools(trained):
        found.append(_section("Tool calls", TOOL_CALLS, trained, is_open=True))
    if any(key.startswith("scheduler/") for stage in trained for key in stage.metrics):
        found.append(_section("Engines", ENGINES, trained, is_open=False))
    if tuned:
        found.append(_section("Supervised fine-tuning", FINE_TUNING, tuned, is_open=not trained))
    drawn = {key for panel in _ALL for key in panel.metrics}
    logged = {key for stage in log.stages for key in stage.metrics if not key.startswith(_BY_ENGINE)}
    others = sorted(logged - drawn - {"scheduler/engines", "scheduler/lost_turns"})
    if others:
        panels = [Panel(title=key, metrics={key: key}, note="", y_low=None) for key in others]
        found.append(_section("Everything else in the log", panels, [*tuned, *trained], is_open=False))
    return found


def trailing_mean(points: Sequence[Point], window: int) -> tuple[Point, ...]:
    """Each point's mean with up to `window` - 1 points before it: it never looks ahead of what was known at that step."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    return tuple((x, (sums[end] - sums[max(0, end - window)]) / min(end, window)) for end, (x, _) in enumerate(points, start=1))


def _is_fine_tuning(stage: StageLog) -> bool:
    return stage.kind == "sft" or any(key.startswith("sft/") for key in stage.metrics)


def _called_tools(stages: Sequence[StageLog]) -> bool:
    keys = [key for panel in TOOL_CALLS for key in panel.metrics]
    return any(metrics.get(key, 0.0) > 0 for stage in stages for metrics in stage.steps.values() for key in keys)


def _section(title: str, panels: Sequence[Panel], stages: Sequence[StageLog], *, is_open: bool) -> Section:
    drawings = tuple(Drawing(plot=_plot(panel, stages), note=panel.note) for panel in panels)
    return Section(title=title, drawings=drawings, is_open=is_open)


def _plot(panel: Panel, stages: Sequence[StageLog]) -> Plot:
    offsets = _offsets(stages)
    steps = [
        (offset + step, metrics) for stage, offset in zip(stages, offsets, strict=True) for step, metrics in stage.steps.items()
    ]
    logged = {key for _, metrics in steps for key in metrics}
    series: list[Series] = []
    for colour, (key, label) in enumerate(panel.metrics.items()):
        if key in logged:
            series += _lines(panel, label, _points(panel, key, steps), colour)
    return Plot(
        title=panel.title,
        series=tuple(series),
        unit=panel.unit,
        boundaries=_boundaries(stages, offsets),
        missing=tuple(key for key in panel.metrics if key not in logged and key not in panel.optional),
        x_low=min((x for x, _ in steps), default=None),  # every plot of a section has the same steps, whatever each logged
        x_high=max((x for x, _ in steps), default=None),
        y_low=panel.y_low,
        y_high=panel.y_high,
    )


def _points(panel: Panel, key: str, steps: Sequence[tuple[int, Metrics]]) -> tuple[Point, ...]:
    """Where `key` was logged. In a stack, a phase that a step did not have took no time there."""
    if panel.look is Look.AREA:
        return tuple((x, metrics.get(key, 0.0)) for x, metrics in steps if not panel.metrics.keys().isdisjoint(metrics))
    return tuple((x, metrics[key]) for x, metrics in steps if key in metrics)


def _lines(panel: Panel, label: str, points: tuple[Point, ...], colour: int) -> list[Series]:
    """One line; where there is one metric and enough steps, its trailing mean with the steps themselves faint behind it."""
    window = len(points) // 10
    if panel.look is Look.AREA or len(panel.metrics) > 1 or window < 2:
        return [Series(label=label, points=points, colour=colour, look=panel.look)]
    return [
        Series(label="each step", points=points, colour=colour, look=Look.FAINT),
        Series(label=f"{label}, mean of {window} steps", points=trailing_mean(points, window), colour=colour),
    ]


def _offsets(stages: Sequence[StageLog]) -> list[int]:
    """Where each stage begins on the common axis: right after the last step of the one before."""
    offsets: list[int] = []
    last: int | None = None
    for stage in stages:
        offsets.append(0 if last is None or not stage.steps else last + 1 - min(stage.steps))
        if stage.steps:
            last = offsets[-1] + max(stage.steps)
    return offsets


def _boundaries(stages: Sequence[StageLog], offsets: Sequence[int]) -> tuple[Boundary, ...]:
    if len(stages) < 2:
        return ()
    return tuple(
        Boundary(x=offset + min(stage.steps), label=stage.name)
        for stage, offset in zip(stages, offsets, strict=True)
        if stage.steps
    )
