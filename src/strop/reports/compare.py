"""The same metrics of several arms of an experiment, side by side: one page, or one SVG file a metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from strop.reports.html import render
from strop.reports.panels import Drawing
from strop.reports.plots import Plot, Point, Series
from strop.reports.scales import Table, Unit

Curve: TypeAlias = Sequence[Point]  # of one run, in order of x
Curves: TypeAlias = Mapping[str, Mapping[str, Sequence[Curve]]]  # metric -> arm -> one curve a seed


def compare_page(
    title: str,
    curves: Curves,
    *,
    table: Table | None = None,
    lead: str = "",
    units: Mapping[str, Unit] | None = None,
    x_label: str = "step",
) -> str:
    """A page that needs no other file. See `compare_plots` for `curves`; `lead` says what is compared, and how to read it."""
    drawings = drawings_of(curves, units=units, x_label=x_label)
    return render("compare.html.j2", title=title, lead=lead, figures=table, drawings=drawings)


def drawings_of(curves: Curves, *, units: Mapping[str, Unit] | None = None, x_label: str = "step") -> list[Drawing]:
    """Return one drawing a metric; metrics without any arm are left out."""
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
    common = [x for x, _ in seeds[0] if all(x in curve for curve in by_x)]
    if not common:
        raise ValueError(f"arm {arm!r}: its {len(seeds)} curves have no x in common; give them the same axis")
    values = [[curve[x] for curve in by_x] for x in common]
    return Series(
        label=arm if len(seeds) == 1 else f"{arm} ({len(seeds)} seeds)",
        points=tuple((x, sum(ys) / len(ys)) for x, ys in zip(common, values, strict=True)),
        colour=colour,
        band=tuple((x, min(ys), max(ys)) for x, ys in zip(common, values, strict=True)) if len(seeds) > 1 else (),
    )
