"""Axis ticks at round numbers, and how a figure or a table is written for a reader."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    """What a figure counts; decides how it is written."""

    PLAIN = "plain"
    PERCENT = "percent"  # of a fraction: 0.125 is written 12.5%
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Figures in rows; the first cell of a row names it."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str]]) -> Table:
        """Return the table of rows whose cells are named by their columns; all rows have the same."""
        rows = list(rows)
        return cls(columns=tuple(rows[0]) if rows else (), rows=tuple(tuple(row.values()) for row in rows))


_SHARE = re.compile(r"(accuracy|error_rate(_correct)?|fraction|pass_at_k|share(_mean|_max)?|utilisation)$|clip_fraction")


def unit_of(metric: str) -> Unit:
    """Return how a metric, or a figure of an evaluation, is written."""
    if _SHARE.search(metric):
        return Unit.PERCENT
    return Unit.SECONDS if metric.endswith("_s") and not metric.endswith("per_s") else Unit.PLAIN


def counted(number: int, noun: str) -> str:
    """As in "1 step" and "2 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nice_ticks(low: float, high: float, *, count: int = 4, is_integer: bool = False) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten: about `count` steps that cover [low, high].

    Where `low` equals `high`, but for what rounding leaves, the range is opened around the value, so there are always at least
    two ticks, and they differ.
    """
    if math.isclose(low, high, rel_tol=1e-12):
        reach = abs(low) / 2 or 0.5
        low, high = low - reach, high + reach
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((nice * power for nice in (1, 2, 5, 10)), key=lambda nice: abs(math.log(nice / rough)))
    if is_integer:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)]


def tick_labels(ticks: list[float], unit: Unit) -> list[str]:
    """Labels of one axis, all with the decimals that its step needs."""
    step = ticks[1] - ticks[0]
    scale = 100 if unit is Unit.PERCENT else 1
    suffix = {Unit.PERCENT: "%", Unit.SECONDS: " s", Unit.PLAIN: ""}[unit]
    largest = max(abs(tick) for tick in ticks) * scale
    divisor, mark = 1.0, ""
    if largest >= 1e7 or step * scale < 1e-4:
        exponent = math.floor(math.log10(largest) + 1e-9)
        divisor, mark = 10.0**exponent, f"e{exponent}"
    elif largest >= 10_000:
        divisor, mark = 1000.0, "k"
    decimals = max(0, -math.floor(math.log10(step * scale / divisor) + 1e-9))
    return [(_signed(f"{tick * scale / divisor:,.{decimals}f}{mark}") if tick or not mark else "0") + suffix for tick in ticks]


def figure(value: float, unit: Unit = Unit.PLAIN) -> str:
    """One figure for a sentence or a table: three significant digits, no more decimals than a reader wants."""
    if unit is Unit.PERCENT:
        return _signed(f"{value * 100:.1f}%")
    if unit is Unit.SECONDS:
        return duration(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e7 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return _signed(f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}")
    if size >= 100 or value == int(value):
        return _signed(f"{value:,.0f}")
    return _signed(f"{value:.{1 if size >= 10 else 2 if size >= 1 else 3}f}")


NONE = "–"
"""In a table, for a figure that does not exist."""


def cell(value: float | None, unit: Unit = Unit.PLAIN) -> str:
    """As `figure`, in a table where some figures do not exist."""
    return NONE if value is None else figure(value, unit)


def duration(seconds: float) -> str:
    """A time as people say it: 0.42 s, 12 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 0.9995e-3 and seconds > 0:
        return "< 1 ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _signed(text: str) -> str:
    """With a true minus sign, and none before a zero."""
    if not text.startswith("-"):
        return text
    return text[1:] if not text.strip("-0.,%ke ") else "−" + text[1:]
