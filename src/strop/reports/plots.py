"""Plots as SVG, of one run or of arms over their seeds: lines, bands, stacked areas, boundaries, a legend, notes.

Nothing is loaded from anywhere. Colours are CSS variables, so that a page's light and dark themes apply to the drawing;
`draw(..., is_standalone=True)` includes the theme, for a file of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from markupsafe import Markup

from strop.reports.html import number, render
from strop.reports.number_format import Unit, figure, nice_ticks, tick_labels

Point: TypeAlias = tuple[float, float]
Curve: TypeAlias = Sequence[Point]  # of one run, in order of x
Curves: TypeAlias = Mapping[str, Mapping[str, Sequence[Curve]]]  # metric -> arm -> one curve a seed

NUM_COLOURS = 8
MAX_POINTS = 240  # per line; a longer one is drawn as means of equal spans, with their range as its band

_WIDTH, _PLOT_HEIGHT = 400.0, 150.0
_TOP, _RIGHT, _TICK_ROW, _LEGEND_ROW = 16.0, 14.0, 24.0, 17.0
_CHAR = 5.9  # width of one character at 11 px, on the generous side


class Look(StrEnum):
    """How a series is drawn."""

    LINE = "line"
    FAINT = "faint"  # behind another line that sums it up
    AREA = "area"  # stacked on the areas before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line and what it is called. `band` is (x, low, high), in order of x like `points`; values are finite."""

    label: str
    points: tuple[Point, ...]
    colour: int = 0
    look: Look = Look.LINE
    band: tuple[tuple[float, float, float], ...] = ()

    @property
    def upper(self) -> list[Point]:
        """The upper edge of the band."""
        return [(x, high) for x, _, high in self.band]

    @property
    def lower(self) -> list[Point]:
        """The lower edge of the band, from right to left."""
        return [(x, low) for x, low, _ in reversed(self.band)]

    def raised(self, base: Sequence[float], *, is_foot: bool = False) -> list[Point]:
        """The upper edge of an area on `base`, or its lower edge from right to left."""
        edges = [(x, offset + (0.0 if is_foot else y)) for (x, y), offset in zip(self.points, base, strict=True)]
        return edges[::-1] if is_foot else edges


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A vertical mark, where a stage begins or its settings switch."""

    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot. `missing` names metrics that were not logged; the plot lists them, or shows `absent` if that says why."""

    title: str
    series: tuple[Series, ...]
    unit: Unit = Unit.PLAIN
    x_label: str = "step"
    boundaries: tuple[Boundary, ...] = ()
    missing: tuple[str, ...] = ()
    absent: str = ""
    x_low: float | None = None  # an axis reaches at least this far; None: as far as the figures go
    x_high: float | None = None
    y_low: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where the figures lie on the drawing."""

    left: float
    top: float
    x_range: Point
    y_range: Point

    @property
    def bottom(self) -> float:
        return self.top + _PLOT_HEIGHT

    @property
    def right(self) -> float:
        return _WIDTH - _RIGHT

    def x(self, value: float) -> float:
        low, high = self.x_range
        return round(self.left + (self.right - self.left) * (value - low) / (high - low), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return round(self.bottom - _PLOT_HEIGHT * (value - low) / (high - low), 1)

    def path(self, *lines: Sequence[Point]) -> str:
        """`lines` joined, as the `d` of a <path>."""
        dots = [f"{number(self.x(x))} {number(self.y(y))}" for line in lines for x, y in line]
        return "M" + "L".join(dots)


def draw(plot: Plot, *, is_standalone: bool = False) -> Markup:
    """`plot` as an <svg> element; `is_standalone` adds the title and the theme, for a file of its own.

    The element carries `data-readout`, what a pointer over it may show: the figures at each x.
    """
    series = [replace(thinned(each), colour=each.colour % NUM_COLOURS) for each in plot.series if each.points]
    top = _TOP + (20.0 if is_standalone else 0.0)
    bottom = top + _PLOT_HEIGHT + _TICK_ROW
    missing = plot.missing if series else ()
    legend, end = _legend(series, bottom, num_missing=len(missing))
    drawing: dict[str, object] = {"frame": None}
    if series:
        bases = _stack_bases(series)
        frame, y_ticks = _frame(plot, series, bases, top)
        drawing = {
            "frame": frame,
            "y_ticks": y_ticks,
            "x_ticks": _x_ticks(frame),
            "boundaries": _boundaries(frame, plot.boundaries),
            "drawn": list(zip(series, bases, strict=True)),
            "readout": _readout(frame, plot, series, bases),
        }
    return render(
        "plot.svg.j2",
        plot=plot,
        width=_WIDTH,
        height=max(bottom, end + _LEGEND_ROW * len(missing)) + 6,
        top=top,
        is_standalone=is_standalone,
        legend=legend,
        missing=[(name, end + _LEGEND_ROW * (row + 1)) for row, name in enumerate(missing)],
        **drawing,
    )


def _frame(
    plot: Plot, series: Sequence[Series], bases: Sequence[Sequence[float]], top: float
) -> tuple[_Frame, list[tuple[float, str]]]:
    xs = [x for each in series for x, _ in each.points]
    xs += [bound for bound in (plot.x_low, plot.x_high) if bound is not None]
    ys = [
        y + offset for each, base in zip(series, bases, strict=True) for (_, y), offset in zip(each.points, base, strict=True)
    ]
    ys += [edge for each in series for _, low, high in each.band for edge in (low, high)]
    ys += [0.0] if any(each.look is Look.AREA for each in series) else []
    ys += [] if plot.y_low is None else [plot.y_low]
    y_low, y_high = min(ys), max(ys)
    if y_low == y_high == 0:
        y_high = 1.0
    ticks = nice_ticks(y_low, y_high)
    labels = tick_labels(ticks, plot.unit)
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    left = 14 + max(_CHAR * max(map(len, labels)), _CHAR * len(plot.x_label))
    frame = _Frame(left=round(left, 1), top=top, x_range=(x_low, x_high), y_range=(ticks[0], ticks[-1]))
    return frame, list(zip(ticks, labels, strict=True))


def _x_ticks(frame: _Frame) -> list[tuple[float, str]]:
    """Return the ticks whose labels have room."""
    low, high = frame.x_range
    ticks = [tick for tick in nice_ticks(low, high, count=5, is_integer=True) if low <= tick <= high]
    labels = tick_labels(ticks, Unit.PLAIN) if len(ticks) > 1 else [figure(tick) for tick in ticks]
    return [(x, label) for x, label in zip(ticks, labels, strict=True) if frame.x(x) + len(label) * _CHAR / 2 <= _WIDTH]


def _boundaries(frame: _Frame, boundaries: Sequence[Boundary]) -> list[tuple[float, str]]:
    """Return where every mark lies, and its name if there is room."""
    found, free_from = [], frame.left - 1
    for boundary in boundaries:
        x = min(max(frame.x(boundary.x), frame.left), frame.right)
        width = len(boundary.label) * _CHAR
        has_room = x >= free_from and x + width <= _WIDTH
        found.append((x, boundary.label if has_room else ""))
        free_from = x + width + 6 if has_room else free_from
    return found


def _legend(series: Sequence[Series], bottom: float, *, num_missing: int) -> tuple[list[tuple[Series, float, float]], float]:
    """Return where each name lies below the plot, in as many rows as they need, and the height of the last row."""
    if len(series) + num_missing < 2 and all(each.look is Look.LINE for each in series):
        return [], bottom + 12 - _LEGEND_ROW
    found = []
    x, y = 14.0, bottom + 12
    for each in series:
        width = 20 + len(each.label) * _CHAR + 12
        if x > 14 and x + width > _WIDTH:
            x, y = 14.0, y + _LEGEND_ROW
        found.append((each, x, y))
        x += width
    return found, y


def _readout(frame: _Frame, plot: Plot, series: Sequence[Series], bases: Sequence[Sequence[float]]) -> str:
    """The attribute a pointer's read-out is made from: x positions and names, then of each series its texts and heights."""
    xs = sorted({x for each in series for x, _ in each.points})
    lines = []
    for each, base in zip(series, bases, strict=True):
        if each.look is Look.FAINT:
            continue
        at = {x: (figure(y, plot.unit), frame.y(y + offset)) for (x, y), offset in zip(each.points, base, strict=True)}
        found = [at.get(x, (None, None)) for x in xs]
        lines.append(
            {"name": each.label, "colour": each.colour, "text": [text for text, _ in found], "y": [y for _, y in found]}
        )
    content = {"x": [frame.x(x) for x in xs], "at": [f"{plot.x_label} {figure(x)}" for x in xs], "lines": lines}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _stack_bases(series: Sequence[Series]) -> list[list[float]]:
    """How high each point's foot lies: on the areas before it, or at 0 for a line."""
    heights: dict[float, float] = {}
    bases = []
    for each in series:
        if each.look is not Look.AREA:
            bases.append([0.0] * len(each.points))
            continue
        bases.append([heights.get(x, 0.0) for x, _ in each.points])
        for x, y in each.points:
            heights[x] = heights.get(x, 0.0) + y
    return bases


def thinned(series: Series) -> Series:
    """A line of at most `MAX_POINTS`: a longer one as means of equal spans, with their range as its band."""
    if len(series.points) <= MAX_POINTS:
        return series
    span = math.ceil(len(series.points) / MAX_POINTS)
    blocks = [series.points[start : start + span] for start in range(0, len(series.points), span)]
    points = tuple((block[len(block) // 2][0], sum(y for _, y in block) / len(block)) for block in blocks)
    is_ranged = series.look is Look.LINE and not series.band
    band = series.band[:: max(1, len(series.band) // MAX_POINTS)]
    if is_ranged:
        of_blocks = [(x, [y for _, y in block]) for (x, _), block in zip(points, blocks, strict=True)]
        band = tuple((x, min(ys), max(ys)) for x, ys in of_blocks)
    return replace(series, points=points, band=band)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A plot and the sentence below its title."""

    plot: Plot
    note: str

    @property
    def svg(self) -> Markup:
        return draw(self.plot)


def drawings_of(curves: Curves, *, units: Mapping[str, Unit] | None = None, x_label: str = "step") -> list[Drawing]:
    """Return one drawing a metric, the arms of an experiment side by side; metrics without any arm are left out."""
    plots = compare_plots(curves, units=units, x_label=x_label)
    num_seeds = max((len(seeds) for arms in curves.values() for seeds in arms.values()), default=0)
    note = "Line: mean of the seeds. Band: their range." if num_seeds > 1 else ""
    return [Drawing(plot=plot, note=note) for plot in plots.values() if plot.series or plot.missing]


def compare_plots(curves: Curves, *, units: Mapping[str, Unit] | None = None, x_label: str = "step") -> dict[str, Plot]:
    """One plot a metric, for `plots.draw`. An arm keeps its colour in all of them.

    Args:
        curves: metric -> arm -> one curve a seed. An arm without a curve of a metric is named as missing in its plot.
        units: of the metrics that are not plain figures.

    Raises:
        ValueError: the seeds of an arm have no x in common, so they have no mean.
    """
    colours = {arm: colour for colour, arm in enumerate(dict.fromkeys(arm for arms in curves.values() for arm in arms))}
    plots = {}
    for metric, arms in curves.items():
        given = {arm: [curve for curve in arms.get(arm, ()) if curve] for arm in colours}
        plots[metric] = Plot(
            title=metric,
            series=tuple(_mean_and_range(arm, seeds, colours[arm]) for arm, seeds in given.items() if seeds),
            unit=(units or {}).get(metric, Unit.PLAIN),
            x_label=x_label,
            missing=tuple(f"{metric} of {arm}" for arm, seeds in given.items() if not seeds),
        )
    return plots


def _mean_and_range(arm: str, seeds: Sequence[Curve], colour: int) -> Series:
    """Over the x that all seeds have: a mean over fewer of them would jump where one ends."""
    by_x = [dict(curve) for curve in seeds]
    common = {x: [curve[x] for curve in by_x] for x, _ in seeds[0] if all(x in curve for curve in by_x)}
    if not common:
        raise ValueError(f"arm {arm!r}: its {len(seeds)} curves have no x in common; give them the same axis")
    points = tuple((x, sum(ys) / len(ys)) for x, ys in common.items())
    if len(seeds) == 1:
        return Series(label=arm, points=points, colour=colour)
    band = tuple((x, min(ys), max(ys)) for x, ys in common.items())
    return Series(label=f"{arm} ({len(seeds)} seeds)", points=points, colour=colour, band=band)
