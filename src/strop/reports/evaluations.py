"""A paired comparison of evaluations, and the leaderboard as tables and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from strop.evaluation.compare import Comparison, MetricComparison
from strop.evaluation.results import Entry, Leaderboard
from strop.reports.html import render
from strop.reports.number_format import NONE, Table, Unit, cell, figure


def comparison_table(comparison: Comparison) -> Table:
    """Return one row a metric: both values, their difference, its interval and p-value, and its sign in how many problems."""
    return Table.of(map(_comparison_row, comparison.metrics))


def benchmark_table(results: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Table | None:
    """Return a row for each model and a column for each benchmark; None unless there are several benchmarks.

    Args:
        results: the stage that made the model, the benchmark, the result. Of several of one cell the last is shown.
    """
    cells = {(model, benchmark): _accuracy(result) for model, benchmark, result in results}
    benchmarks = tuple(dict.fromkeys(benchmark for _, benchmark in cells))
    rows = tuple(
        (model, *(cells.get((model, each), NONE) for each in benchmarks))
        for model in dict.fromkeys(model for model, _ in cells)
    )
    return Table(columns=("model", *benchmarks), rows=rows) if len(benchmarks) > 1 else None


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return the lines above the table."""
    num_left_out = comparison.num_only_first + comparison.num_only_second
    lines = [
        f"{comparison.benchmark}: {comparison.num_shared} problems in both"
        + (f", {num_left_out} left out" if num_left_out else "")
    ]
    lines += [f"{key}: {_setting(first)} and {_setting(second)}" for key, (first, second) in comparison.settings.items()]
    accuracy = next((each for each in comparison.metrics if each.metric == "accuracy"), None)
    if accuracy is not None and accuracy.detectable is not None:
        smallest = figure(accuracy.detectable, Unit.PERCENT)
        lines.append(f"true differences in accuracy of {smallest} or more are found with 80% probability")
    elif accuracy is not None:
        lines.append("too few problems: no true difference in accuracy is found with 80% probability")
    return lines


def leaderboard_table(entries: Sequence[Entry]) -> Table:
    """Return the entries of one benchmark in their order."""
    return Table.of(map(_entry_row, entries))


def leaderboard_page(board: Leaderboard) -> str:
    """Return a page that needs no other file."""
    num = sum(len(entries) for entries in board.benchmarks.values())
    return render("leaderboard.html.j2", board=board, num=num, table_of=leaderboard_table)


def _comparison_row(metric: MetricComparison) -> dict[str, str]:
    unit = Unit.PERCENT if metric.is_share else Unit.PLAIN
    difference = metric.paired.difference
    return {
        "metric": metric.metric,
        "first": figure(metric.first, unit),
        "second": figure(metric.second, unit),
        "difference": _signed(difference.mean, unit),
        "95% interval": f"{_signed(difference.low, unit)} to {_signed(difference.high, unit)}",
        "p": "< 0.001" if metric.paired.p_value < 0.001 else f"{metric.paired.p_value:.3f}",
        "up/down": f"{metric.paired.num_better}/{metric.paired.num_worse}",
    }


def _signed(value: float, unit: Unit) -> str:
    text = figure(value, unit)
    return f"+{text}" if value > 0 and text.strip("0.%") else text


def _entry_row(entry: Entry) -> dict[str, str]:
    result = entry.result
    return {
        "run": entry.name,
        "pass@1": _accuracy(result),
        "95% interval": interval(result),
        "pass@k": _pass_at_k(result),
        "maj@k": shown(result, "maj_at_k"),
        "tasks × k": f"{result.get('num_tasks', '?')} × {result.get('k', '?')}",
        "length": shown(result, "length_tokens_mean", Unit.PLAIN),
        "truncated": shown(result, "truncated_fraction"),
        "tool errors": shown(result, "tool_error_rate"),
        "settings": _settings(result),
    }


def shown(result: Mapping[str, Any], key: str, unit: Unit = Unit.PERCENT) -> str:
    """Return a figure of an evaluation as a cell of a table, also if it has none."""
    return cell(result.get(key), unit)


def interval(result: Mapping[str, Any]) -> str:
    """Return the interval of an evaluation's accuracy as a cell of a table."""
    has_both = "accuracy_low" in result and "accuracy_high" in result
    return f"{shown(result, 'accuracy_low')} – {shown(result, 'accuracy_high')}" if has_both else NONE


def _accuracy(result: Mapping[str, Any]) -> str:
    """Return the accuracy, marked where too many rollouts are void."""
    return figure(result["accuracy"], Unit.PERCENT) + ("" if result.get("is_final", True) else " (not final)")


def _settings(result: Mapping[str, Any]) -> str:
    """Return what two entries of one benchmark may differ in."""
    if "harness" in result:
        return str(result["harness"])
    settings = [
        f"{result['prompt']}" if "prompt" in result else "",
        f"t {result['temperature']:g}" if "temperature" in result else "",
        f"top-p {result['top_p']:g}" if result.get("top_p", 1.0) < 1 else "",
        f"{result['max_tokens']:,} tokens" if "max_tokens" in result else "",
        f"{result['engine']} {result.get('dtype', '')}".strip() if "engine" in result else "",
        f"tools: {result['tools']}" if result.get("tools", "real") != "real" else "",
    ]
    return ", ".join(each for each in settings if each)


def _pass_at_k(result: Mapping[str, Any]) -> str:
    """Return pass@k, with the number of problems that have too few attempts for it."""
    below = int(result.get("num_tasks_below_k", 0))
    return shown(result, "pass_at_k") + (f" (without {below})" if below else "")


def _setting(value: Any) -> str:
    return "not recorded" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
