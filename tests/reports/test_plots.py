import html
import json
import math
import re
import xml.etree.ElementTree as ET

import pytest

from strop.reports.number_format import Unit, duration, figure, nice_ticks, tick_labels
from strop.reports.panels import trailing_mean
from strop.reports.plots import MAX_POINTS, Boundary, Look, Plot, Series, draw


@pytest.mark.parametrize(
    ("low", "high", "unit", "expected"),
    [
        (0.0, 1.0, Unit.PERCENT, ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (0.31, 0.88, Unit.PLAIN, ["0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-0.02, 0.03, Unit.PLAIN, ["−0.02", "−0.01", "0.00", "0.01", "0.02", "0.03"]),
        (0.0, 2e-5, Unit.PLAIN, ["0", "0.5e-5", "1.0e-5", "1.5e-5", "2.0e-5"]),
        (0.0, 12_000.0, Unit.PLAIN, ["0", "2k", "4k", "6k", "8k", "10k", "12k"]),
        (0.0, 0.02, Unit.PERCENT, ["0.0%", "0.5%", "1.0%", "1.5%", "2.0%"]),
        (3.0, 3.0, Unit.SECONDS, ["1 s", "2 s", "3 s", "4 s", "5 s"]),
        (0.5, math.nextafter(0.5, 1), Unit.PLAIN, ["0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8"]),  # a mean of equal values
    ],
)
def test_ticks_are_round_cover_the_range_and_share_their_decimals(low, high, unit, expected):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert tick_labels(ticks, unit) == expected


def test_ticks_of_steps_are_whole_numbers():
    assert nice_ticks(1, 3, count=5, is_integer=True) == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.8416, Unit.PERCENT, "84.2%"),
        (-0.00001, Unit.PERCENT, "0.0%"),
        (1234.5, Unit.PLAIN, "1,234"),
        (58.57, Unit.PLAIN, "58.6"),
        (-2.236, Unit.PLAIN, "−2.24"),
        (4e-7, Unit.PLAIN, "4e-7"),
        (0.0, Unit.PLAIN, "0"),
        (185.0, Unit.SECONDS, "3 min 05 s"),
    ],
)
def test_figures_are_written_as_people_read_them(value, unit, expected):
    assert figure(value, unit) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, "0 ms"), (0.034, "34 ms"), (2.25, "2.2 s"), (59.7, "1 min 00 s"), (3599.9, "1 h 00 min"), (7800, "2 h 10 min")],
)
def test_durations_never_say_sixty(seconds, expected):
    assert duration(seconds) == expected


def _readout(drawing: str) -> dict:
    return json.loads(html.unescape(re.search(r'data-readout="([^"]*)"', drawing)[1]))


def _line(num_points: int, label: str = "reward") -> Series:
    return Series(label=label, points=tuple((float(x), x / 10) for x in range(num_points)))


def test_a_plot_is_one_well_formed_svg_that_loads_nothing():
    plot = Plot(title="Reward", series=(_line(5), _line(3, "other")), boundaries=(Boundary(x=2, label="rl-2"),))
    for drawing in (draw(plot), draw(plot, is_standalone=True)):
        assert ET.fromstring(drawing).tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", drawing)
        assert "nan" not in drawing
    assert "rl-2" in drawing


def test_readout_holds_the_figures_at_each_x():
    series = (Series(label="a", points=((1, 0.5), (2, 0.25))), Series(label="b", points=((2, 1.0),), colour=1))
    content = _readout(draw(Plot(title="p", series=series, unit=Unit.PERCENT)))
    assert content["at"] == ["step 1", "step 2"]
    assert [line["text"] for line in content["lines"]] == [["50.0%", "25.0%"], [None, "100.0%"]]


def test_areas_stand_on_each_other_and_say_their_own_height():
    areas = tuple(
        Series(label=label, points=((0, y), (1, y)), look=Look.AREA) for label, y in (("rollout", 3.0), ("update", 1.0))
    )
    content = _readout(draw(Plot(title="time", series=areas, unit=Unit.SECONDS)))
    rollout, update = content["lines"]
    assert rollout["text"] == ["3.0 s", "3.0 s"]
    assert update["text"] == ["1.0 s", "1.0 s"]
    assert update["y"][0] == 16.0  # the top of a plot whose axis ends at 3 + 1
    assert rollout["y"][0] == 16.0 + 150 / 4


def test_a_missing_metric_is_named_in_the_plot():
    empty = draw(Plot(title="Reward", series=(), missing=("rollout/reward_mean",)))
    assert "missing from the log" in empty
    assert "rollout/reward_mean" in empty
    partly = draw(Plot(title="Clip", series=(_line(4),), missing=("policy/clip_fraction_low",)))
    assert "missing: policy/clip_fraction_low" in partly
    assert 'class="line s0"' in partly


@pytest.mark.parametrize("look", list(Look))
def test_a_single_point_is_drawn(look):
    drawing = draw(Plot(title="p", series=(Series(label="a", points=((7, 0.0),), look=look),)))
    assert "<circle" in drawing or "<rect" in drawing
    assert "nan" not in drawing


def test_plots_of_the_same_steps_line_up_though_one_has_fewer_figures():
    every = Plot(title="t", series=(Series(label="a", points=((1, 5.0), (3, 6.0), (9, 5.5))),), x_low=1, x_high=9, y_low=0)
    fewer = Plot(title="t", series=(Series(label="a", points=((3, 6.0),)),), x_low=1, x_high=9, y_low=0)
    assert _readout(draw(every))["x"][1] == _readout(draw(fewer))["x"][0]
    assert _readout(draw(fewer))["at"] == ["step 3"]


def test_a_long_line_keeps_its_mean_and_its_range():
    points = tuple((float(x), 1.0 if x % 2 else 0.0) for x in range(MAX_POINTS * 10))
    content = _readout(draw(Plot(title="p", series=(Series(label="a", points=points),))))
    assert len(content["x"]) == MAX_POINTS
    assert set(content["lines"][0]["text"]) == {"0.500"}
    assert 'class="band f0"' in draw(Plot(title="p", series=(Series(label="a", points=points),)))


def test_boundary_names_that_would_overlap_are_left_out_but_their_lines_are_not():
    boundaries = tuple(Boundary(x=x, label=f"stage-{x}") for x in (50, 51, 90))
    drawing = draw(Plot(title="p", series=(_line(101),), boundaries=boundaries))
    assert drawing.count('class="boundary"') == 3
    assert "stage-50" in drawing
    assert "stage-51" not in drawing


def test_labels_are_escaped():
    drawing = draw(Plot(title="<b>", series=(_line(3, '"><script>'), _line(3))), is_standalone=True)
    assert "<script" not in drawing
    assert ET.fromstring(drawing) is not None


def test_trailing_mean_never_looks_ahead():
    assert trailing_mean([(1, 3.0), (2, 5.0), (3, 7.0)], 2) == ((1, 3.0), (2, 4.0), (3, 6.0))
