"""The picture of what the engines did."""

from __future__ import annotations

import json
import re
import xml.dom.minidom

import pytest
from fake_run import write_run

from strop.errors import RunError
from strop.reports.page import write_report
from strop.reports.timelines import MAX_ENGINES, EngineRow, Timeline, draw, read_timelines


def timeline(num_engines=1, *, rows=(4.0, 2.0), **fields):
    names = [f"e<{index}>" for index in range(num_engines)]
    engines = [EngineRow(name=name, max_rows=4, rows=rows, joined_s=0.0, left_s=10.0, **fields) for name in names]
    return Timeline(title="a step", duration_s=10.0, engines=engines, queue=(3.0, 0.0))


def rectangles(drawing, colour):
    number = r'="([\d.]+)"'
    shape = rf'<rect class="f{colour}" x{number} y="[\d.]+" width{number} height="[\d.]+" opacity{number}'
    return [tuple(float(each) for each in one) for one in re.findall(shape, drawing)]


def test_a_span_is_as_strong_as_the_share_of_rows_that_decode():
    drawing = str(draw([timeline()]))
    xml.dom.minidom.parseString(drawing)
    assert rectangles(drawing, 0) == [(90.0, 430.0, 1.0), (520.0, 430.0, 0.5)]
    assert rectangles(drawing, 1) == [(90.0, 430.0, 1.0)]  # nobody waits in the second half


def test_a_shorter_step_takes_a_shorter_part_of_the_axis():
    short = Timeline(title="short", duration_s=5.0, engines=timeline().engines)
    assert rectangles(str(draw([timeline(), short])), 0)[2:] == [(90.0, 215.0, 1.0), (305.0, 215.0, 0.5)]


def test_a_lost_engine_has_a_cross_that_tells_why_and_text_is_never_markup():
    drawing = str(draw([timeline(loss="<killed>")]))
    assert drawing.count("&lt;killed&gt;") == 1
    assert "e&lt;0&gt;" in drawing
    assert "<killed>" not in drawing


def test_of_many_engines_some_are_drawn():
    assert str(draw([timeline(10 * MAX_ENGINES)])).count("e&lt;") == MAX_ENGINES


def test_a_file_of_its_own_brings_its_colours():
    assert "--c0" in str(draw([timeline()], is_standalone=True))
    assert "--c0" not in str(draw([timeline()]))


def test_the_report_draws_the_first_and_the_last_step_and_says_who_was_lost(tmp_path):
    run = write_run(tmp_path / "demo", num_steps=20)
    page = write_report(run).read_text()
    assert "rl, step 1: " in page
    assert "rl, step 20: " in page
    assert "rl, step 10: " not in page
    assert "1 engine lost" in page
    assert "process 4711 has ended: SIGKILL" in page


def test_a_run_without_timelines_has_no_such_section(tmp_path):
    run = write_run(tmp_path / "demo", num_steps=1)
    run.stage("rl").timeline(1).unlink()
    assert read_timelines(run, "rl") == []
    assert "What the engines did" not in write_report(run).read_text()


def test_busy_rows_are_counted_over_the_time_that_an_engine_was_there(tmp_path):
    run = write_run(tmp_path / "demo", num_steps=1)
    engine = {"name": "a", "max_rows": 4, "kv_shares": [], "rows": [0.0, 4.0], "joined_s": 5.0, "left_s": 10.0, "loss": ""}
    record = {"step": 1, "policy": "scheduler", "duration_s": 10.0, "engines": [engine], "queue": [0.0, 0.0]}
    run.stage("rl").timeline(1).write_text(json.dumps(record))
    assert [each.title for each in read_timelines(run, "rl")] == ["rl, step 1: 10 s, 100.0% of rows busy"]


def test_a_damaged_file_is_named(tmp_path):
    run = write_run(tmp_path / "demo", num_steps=1)
    run.stage("rl").timeline(1).write_text("{")
    with pytest.raises(RunError, match=r"step-000001.timeline.json: not valid JSON"):
        write_report(run)


ENGINE = {
    "name": "a",
    "max_rows": 4,
    "kv_tokens": 64,
    "joined_s": 0.0,
    "left_s": 9.5,
    "loss": "",
    "rows": [1.0],
    "kv_shares": [0.5],
}
RECORD = {"step": 1, "policy": "scheduler", "duration_s": 10.0, "engines": [ENGINE], "queue": [0.0]}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"step": 1}, "duration_s: Field required"),
        ([], "Input should be an object"),
        (RECORD | {"duration_s": -1.0}, "duration_s: .*greater than or equal to 0"),
        (RECORD | {"duration_s": float("nan")}, "duration_s: .*finite"),
        (RECORD | {"queue": 3}, "queue: .*valid array"),
        (RECORD | {"engines": [ENGINE | {"rows": ["many"]}]}, "engines.0.rows.0: .*valid number"),
        (RECORD | {"engines": [ENGINE | {"max_rows": 0}]}, "engines.0.max_rows: .*greater than 0"),
        (RECORD | {"engines": [{"name": "a"}]}, "engines.0.max_rows: Field required"),
    ],
)
def test_a_file_that_is_no_timeline_is_named_with_what_is_wrong_and_a_remedy(record, said, tmp_path):
    run = write_run(tmp_path / "demo", num_steps=1)
    run.stage("rl").timeline(1).write_text(json.dumps(record))
    with pytest.raises(RunError, match=rf"step-000001.timeline.json: not the timeline of a step: {said}.* Delete it"):
        read_timelines(run, "rl")


def test_what_a_later_version_adds_to_a_timeline_is_passed_over(tmp_path):
    run = write_run(tmp_path / "demo", num_steps=1)
    run.stage("rl").timeline(1).write_text(json.dumps(RECORD | {"more": 1, "engines": [ENGINE | {"more": 1}]}))
    assert [len(each.engines) for each in read_timelines(run, "rl")] == [1]
