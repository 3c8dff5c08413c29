"""One plot -> one SVG: lines, bands, stacked areas, boundaries, a legend, and a note where a metric is missing.

The drawing is text made here; nothing is loaded from anywhere. Colours are CSS variables, so that a page's light and dark
themes reach into it; `draw(..., is_standalone=True)` carries the theme along, for a file of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from markupsafe import Markup

from strop.reports.scales import Unit, figure, nice_ticks, tick_labels

Point: TypeAlias = tuple[float, float]

NUM_COLOURS = 8
MAX_POINTS = 240  # per line; a longer one is drawn as means of equal spans, with their range as its band

_WIDTH, _PLOT_HEIGHT = 400.0, 150.0
_TOP, _RIGHT, _TICK_ROW, _LEGEND_ROW = 16.0, 14.0, 24.0, 17.0
_CHAR = 5.9  # width of one character at 11 px, on the generous side

THEME = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#18202b;--muted:#5d6877;--line:#dfe3e9;--grid:#eceff3;
--c0:#2563c9;--c1:#d2691e;--c2:#148f77;--c3:#8a4fc4;--c4:#c23b4b;--c5:#96790d;--c6:#4f6478;--c7:#c04a92;
--good:#13795b;--good-soft:#e0f3ec;--bad:#b3303f;--bad-soft:#fbe6e8;--warn:#8a5a00;--warn-soft:#fdf2d9;--soft:#eef2f8}
@media (prefers-color-scheme:dark){:root{--page:#0f1319;--card:#171d26;--ink:#e5eaf1;--muted:#95a1b1;--line:#2a333f;
--grid:#232b36;--c0:#6ea8ff;--c1:#f0995a;--c2:#4cc9ab;--c3:#bd94ee;--c4:#f07f8c;--c5:#d6b94a;--c6:#9db0c4;--c7:#ec8cc6;
--good:#5fd3aa;--good-soft:#16352c;--bad:#f3919c;--bad-soft:#402127;--warn:#e9c15f;--warn-soft:#38301a;--soft:#1e2733}}
"""

STYLE = (
    "svg.plot{display:block;width:100%;height:auto;overflow:visible;font:11px system-ui,-apple-system,'Segoe UI',sans-serif;"
    "font-variant-numeric:tabular-nums}"
    "svg.plot text{fill:var(--muted)}svg.plot .title{fill:var(--ink);font-weight:600;font-size:13px}"
    "svg.plot .grid{stroke:var(--grid)}svg.plot .axis{stroke:var(--line)}"
    "svg.plot .boundary{stroke:var(--muted);stroke-dasharray:2 3;opacity:.7}"
    "svg.plot .line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}"
    "svg.plot .faint{stroke-width:1.1;opacity:.45}svg.plot .dashed{stroke-dasharray:5 3}svg.plot .band{opacity:.16}"
    "svg.plot .area{opacity:.75}svg.plot .note{fill:var(--warn)}svg.plot .missing{fill:none;stroke:var(--line);"
    "stroke-dasharray:4 4}svg.plot .cursor{stroke:var(--muted);opacity:0}"
    + "".join(
        f"svg.plot .s{index}{{stroke:var(--c{index})}}svg.plot .f{index}{{fill:var(--c{index});stroke:none}}"
        for index in range(NUM_COLOURS)
    )
)


class Look(StrEnum):
    """How a series is drawn."""

    LINE = "line"
    FAINT = "faint"  # behind another line that sums it up
    DASHED = "dashed"
    AREA = "area"  # stacked on the areas before it


_LINE_CLASSES = {Look.LINE: "line", Look.FAINT: "line faint", Look.DASHED: "line dashed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line and what it is called. `band` is (x, low, high), in order of x like `points`; values are finite."""

    label: str
    points: tuple[Point, ...]
    colour: int = 0
    look: Look = Look.LINE
    band: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A vertical mark, where a stage begins or its settings switch."""

    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What one plot shows. `missing` names metrics that should be here and are not; the plot says so."""

    title: str
    series: tuple[Series, ...]
    unit: Unit = Unit.PLAIN
    x_label: str = "step"
    boundaries: tuple[Boundary, ...] = ()
    missing: tuple[str, ...] = ()
    x_low: float | None = None  # an axis reaches at least this far; None: as far as the figures go
    x_high: float | None = None
    y_low: float | None = None
    y_high: float | None = None


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


def draw(plot: Plot, *, is_standalone: bool = False) -> Markup:
    """`plot` as an <svg> element; `is_standalone` adds the title and the theme, for a file of its own.

    The element carries `data-readout`, what a pointer over it may show: the figures at each x.
    """
    series = [thinned(each) for each in plot.series if each.points]
    top = _TOP + (20.0 if is_standalone else 0.0)
    body = _figures(plot, series, top) if series else _placeholder(plot.missing, top)
    legend, height = _legend(series, plot.missing if series else (), body)
    head = Markup("")
    if is_standalone:
        head = Markup("<style>{}</style>").format(Markup(THEME + STYLE + "svg.plot{background:var(--card)}")) + Markup(
            '<text class="title" x="12" y="20">{}</text>'
        ).format(plot.title)
    return (
        Markup('<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" role="img" aria-label="{}"{}>').format(
            _number(_WIDTH), _number(height), _spoken(plot), body.readout
        )
        + head
        + body.markup
        + legend
        + Markup("</svg>")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The drawn figures, without the legend below them."""

    markup: Markup
    readout: Markup
    bottom: float


def _figures(plot: Plot, series: Sequence[Series], top: float) -> _Body:
    bases = _stack_bases(series)
    frame, y_ticks, y_labels = _frame(plot, series, bases, top)
    parts = [_y_axis(frame, y_ticks, y_labels), _x_axis(frame, plot), _boundaries(frame, plot.boundaries)]
    parts += [_area(frame, each, base) for each, base in zip(series, bases, strict=True) if each.look is Look.AREA]
    parts += [_band(frame, each) for each in series if each.band]
    parts += [_line(frame, each) for each in series if each.look is not Look.AREA]
    parts.append(
        Markup('<line class="cursor" y1="{}" y2="{}" x1="0" x2="0"/>').format(_number(frame.top), _number(frame.bottom))
    )
    return _Body(markup=Markup("").join(parts), readout=_readout(frame, plot, series, bases), bottom=frame.bottom + _TICK_ROW)


def _placeholder(missing: Sequence[str], top: float) -> _Body:
    middle = top + _PLOT_HEIGHT / 2
    lines = [Markup('<text class="note" x="200" y="{}" text-anchor="middle">missing from the log</text>').format(middle - 8)]
    names = list(missing) or ["no figure of this plot was logged"]
    lines += [
        Markup('<text x="200" y="{}" text-anchor="middle">{}</text>').format(_number(middle + 10 + 15 * row), name)
        for row, name in enumerate(names)
    ]
    box = Markup('<rect class="missing" x="14" y="{}" width="372" height="{}" rx="6"/>').format(top, _number(_PLOT_HEIGHT + 8))
    return _Body(markup=box + Markup("").join(lines), readout=Markup(""), bottom=top + _PLOT_HEIGHT + _TICK_ROW)


def _frame(
    plot: Plot, series: Sequence[Series], bases: Sequence[Sequence[float]], top: float
) -> tuple[_Frame, list[float], list[str]]:
    xs = [x for each in series for x, _ in each.points]
    xs += [bound for bound in (plot.x_low, plot.x_high) if bound is not None]
    ys = [
        y + offset for each, base in zip(series, bases, strict=True) for (_, y), offset in zip(each.points, base, strict=True)
    ]
    ys += [edge for each in series for _, low, high in each.band for edge in (low, high)]
    ys += [0.0] if any(each.look is Look.AREA for each in series) else []
    ys += [bound for bound in (plot.y_low, plot.y_high) if bound is not None]
    y_low, y_high = min(ys), max(ys)
    if y_low == y_high == 0:
        y_high = 1.0
    ticks = nice_ticks(y_low, y_high)
    labels = tick_labels(ticks, plot.unit)
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    left = 14 + max(_CHAR * max(map(len, labels)), _CHAR * len(plot.x_label))
    return _Frame(left=round(left, 1), top=top, x_range=(x_low, x_high), y_range=(ticks[0], ticks[-1])), ticks, labels


def _y_axis(frame: _Frame, ticks: Sequence[float], labels: Sequence[str]) -> Markup:
    row = Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/><text x="{}" y="{}" text-anchor="end">{}</text>')
    return Markup("").join(
        row.format(
            "axis" if index == 0 else "grid",
            _number(frame.left),
            _number(frame.right),
            _number(frame.y(tick)),
            _number(frame.y(tick)),
            _number(frame.left - 7),
            _number(frame.y(tick) + 3.8),
            label,
        )
        for index, (tick, label) in enumerate(zip(ticks, labels, strict=True))
    )


def _x_axis(frame: _Frame, plot: Plot) -> Markup:
    low, high = frame.x_range
    ticks = [tick for tick in nice_ticks(low, high, count=5, is_integer=True) if low <= tick <= high]
    labels = tick_labels(ticks, Unit.PLAIN) if len(ticks) > 1 else [figure(tick) for tick in ticks]
    y = _number(frame.bottom + 16)
    marks = [
        Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(_number(frame.x(tick)), y, label)
        for tick, label in zip(ticks, labels, strict=True)
        if frame.x(tick) + len(label) * _CHAR / 2 <= _WIDTH
    ]
    name = Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(_number(frame.left - 9), y, plot.x_label)
    return Markup("").join([name, *marks])


def _boundaries(frame: _Frame, boundaries: Sequence[Boundary]) -> Markup:
    """Every mark, and the names that have room beside it."""
    parts, free_from = [], frame.left - 1
    for boundary in boundaries:
        x = min(max(frame.x(boundary.x), frame.left), frame.right)
        if x > frame.left:
            parts.append(
                Markup('<line class="boundary" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                    _number(x), _number(x), _number(frame.top), _number(frame.bottom)
                )
            )
        width = len(boundary.label) * _CHAR
        if x >= free_from and x + width <= _WIDTH:
            parts.append(Markup('<text x="{}" y="{}">{}</text>').format(_number(x + 1), _number(frame.top - 5), boundary.label))
            free_from = x + width + 6
    return Markup("").join(parts)


def _line(frame: _Frame, series: Series) -> Markup:
    dots = [(frame.x(x), frame.y(y)) for x, y in series.points]
    if len(dots) == 1:
        return Markup('<circle class="f{}" cx="{}" cy="{}" r="3.5"/>').format(_colour(series), *map(_number, dots[0]))
    path = Markup('<path class="{} s{}" d="{}"/>').format(_LINE_CLASSES[series.look], _colour(series), _path(dots))
    if len(dots) > 12 or series.look is Look.FAINT:
        return path
    circle = Markup('<circle class="f{}" cx="{}" cy="{}" r="2.2"/>')
    return path + Markup("").join(circle.format(_colour(series), _number(x), _number(y)) for x, y in dots)


def _band(frame: _Frame, series: Series) -> Markup:
    if len(series.band) == 1:
        x, low, high = series.band[0]
        return Markup('<line class="line s{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            _colour(series), *map(_number, (frame.x(x), frame.x(x), frame.y(low), frame.y(high)))
        )
    upper = [(frame.x(x), frame.y(high)) for x, _, high in series.band]
    lower = [(frame.x(x), frame.y(low)) for x, low, _ in reversed(series.band)]
    return Markup('<path class="band f{}" d="{}Z"/>').format(_colour(series), _path(upper + lower))


def _area(frame: _Frame, series: Series, base: Sequence[float]) -> Markup:
    edges = [(frame.x(x), frame.y(y + offset), frame.y(offset)) for (x, y), offset in zip(series.points, base, strict=True)]
    if len(edges) == 1:
        x, upper, lower = edges[0]
        return Markup('<rect class="area f{}" x="{}" y="{}" width="28" height="{}"/>').format(
            _colour(series), _number(x - 14), _number(upper), _number(lower - upper)
        )
    outline = [(x, upper) for x, upper, _ in edges] + [(x, lower) for x, _, lower in reversed(edges)]
    return Markup('<path class="area f{}" d="{}Z"/>').format(_colour(series), _path(outline))


def _legend(series: Sequence[Series], missing: Sequence[str], body: _Body) -> tuple[Markup, float]:
    """Names below the plot, in as many rows as they need, then what is missing; with the height of the whole drawing."""
    parts: list[Markup] = []
    x, y = 14.0, body.bottom + 12
    is_named = len(series) + len(missing) > 1 or any(each.look is not Look.LINE for each in series)
    for each in series if is_named else ():
        width = 20 + len(each.label) * _CHAR + 12
        if x > 14 and x + width > _WIDTH:
            x, y = 14.0, y + _LEGEND_ROW
        if each.look is Look.AREA:
            key = Markup('<rect class="area f{}" x="{}" y="{}" width="13" height="9" rx="2"/>').format(
                _colour(each), _number(x), _number(y - 8)
            )
        else:
            key = Markup('<line class="{} s{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                _LINE_CLASSES[each.look], _colour(each), *map(_number, (x, x + 13, y - 3.7, y - 3.7))
            )
        parts += [key, Markup('<text x="{}" y="{}">{}</text>').format(_number(x + 19), _number(y), each.label)]
        x += width
    if not parts:
        y -= _LEGEND_ROW
    for name in missing:
        y += _LEGEND_ROW
        parts.append(Markup('<text class="note" x="14" y="{}">missing: {}</text>').format(_number(y), name))
    return Markup("").join(parts), max(body.bottom, y) + 6


def _readout(frame: _Frame, plot: Plot, series: Sequence[Series], bases: Sequence[Sequence[float]]) -> Markup:
    """The attribute a pointer's read-out is made from: x positions and names, then of each series its texts and heights."""
    xs = sorted({x for each in series for x, _ in each.points})
    lines = []
    for each, base in zip(series, bases, strict=True):
        if each.look is Look.FAINT:
            continue
        at = {x: (figure(y, plot.unit), frame.y(y + offset)) for (x, y), offset in zip(each.points, base, strict=True)}
        lines.append(
            {
                "name": each.label,
                "colour": _colour(each),
                "text": [at[x][0] if x in at else None for x in xs],
                "y": [at[x][1] if x in at else None for x in xs],
            }
        )
    content = {"x": [frame.x(x) for x in xs], "at": [f"{plot.x_label} {figure(x)}" for x in xs], "lines": lines}
    return Markup(' data-readout="{}"').format(json.dumps(content, ensure_ascii=False, separators=(",", ":")))


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
    ranges = tuple(
        (x, min(y for _, y in block), max(y for _, y in block)) for (x, _), block in zip(points, blocks, strict=True)
    )
    return Series(
        label=series.label,
        points=points,
        colour=series.colour,
        look=series.look,
        band=ranges if is_ranged else series.band[:: max(1, len(series.band) // MAX_POINTS)],
    )


def _spoken(plot: Plot) -> str:
    """The plot in one sentence, for those who hear it."""
    facts = [
        f"{each.label} from {figure(each.points[0][1], plot.unit)} to {figure(each.points[-1][1], plot.unit)}"
        for each in plot.series
        if each.points and each.look is not Look.FAINT
    ]
    facts += [f"missing: {name}" for name in plot.missing]
    return f"{plot.title}. " + "; ".join(facts)


def _path(dots: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in dots)


def _colour(series: Series) -> int:
    return series.colour % NUM_COLOURS


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
