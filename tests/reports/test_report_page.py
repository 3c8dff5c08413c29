import html
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_run import STAGES, write_run
from tokenizers import Tokenizer

from strop.errors import RunError
from strop.reports.log import Evaluation, RunLog, StageLog, read_run
from strop.reports.page import verdict, write_report
from strop.reports.panels import sections
from strop.reports.rollouts import read_rollouts
from strop.run_directory import RunDirectory, read_json, read_lines, write_json, write_text


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunDirectory:
    return write_run(tmp_path_factory.mktemp("runs") / "demo", num_steps=20)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return write_run(tmp_path / "demo", num_steps=3)


def _page(run: RunDirectory) -> str:
    return write_report(run).read_text(encoding="utf-8")


def _drop_metric(run: RunDirectory, key: str) -> None:
    lines = [{name: value for name, value in line.items() if name != key} for line in read_lines(run.metrics)]
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))


class _Elements(HTMLParser):
    """Every element's name and attributes, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_the_page_opens_with_what_was_learnt(finished):
    page = _page(finished)
    assert page.index("Accuracy rose from 3.1% to 84.2%.") < page.index("Before and after") < page.index("Rollouts")
    assert "Stage before against stage after: the 95% intervals do not overlap." in page


def test_a_warning_is_told_with_its_stage_and_how_often_it_was_given(finished):
    told = re.findall(r"<li>(<b>\w+</b>: step 4: 11 of 16 groups are tied).*?(<small>.*?</small>)?</li>", _page(finished))
    said = ": step 4: 11 of 16 groups are tied"
    assert told == [(f"<b>rl</b>{said}", "<small>3 times</small>"), (f"<b>sft</b>{said}", "")]


def test_the_page_is_one_small_file_that_needs_no_other(finished):
    page = _page(finished)
    assert len(page.encode()) < 3_000_000
    elements = _Elements(page)
    assert not [1 for _, attributes in elements.found if {"src", "href", "srcset"} & attributes.keys()]
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in page
    assert not elements.named("link")


def test_one_run_gives_one_page(finished, tmp_path):
    again = write_run(tmp_path / "demo", num_steps=20)
    assert _page(again) == _page(finished)


def test_every_metric_that_a_run_logs_is_drawn_and_none_is_missing(finished):
    drawn = [drawing.plot for section in sections(read_run(finished)) for drawing in section.drawings]
    assert all(plot.series for plot in drawn)
    assert not [name for plot in drawn for name in plot.missing]


@pytest.mark.parametrize(
    "key",
    [
        "rollout/reward_mean",
        "policy/clip_fraction_low",
        "time/update_s",
        "rollout/tool_calls_dispatched",
        "time/tool_latency_p95_s",
        "sft/loss",
    ],
)
def test_a_metric_deleted_from_the_log_is_named_as_missing(run, key):
    assert not re.search(rf"missing[^<]*(<[^>]*>)*{key}", _page(run))
    _drop_metric(run, key)
    plots = [drawing.plot for section in sections(read_run(run)) for drawing in section.drawings]
    assert [plot.missing for plot in plots if plot.missing] == [(key,)]
    assert key in _page(run)


def test_calls_and_their_latency_are_drawn_for_a_run_that_called_tools(run):
    [section] = [section for section in sections(read_run(run)) if section.title == "Tool calls"]
    calls, latency, _ = (drawing.plot for drawing in section.drawings)
    logged = [line for line in read_lines(run.metrics) if line["stage"] == "rl"]
    assert calls.series[0].points == tuple((line["step"], line["rollout/tool_calls_dispatched"]) for line in logged)
    assert [series.label for series in latency.series] == ["mean", "95th percentile", "median"]
    assert latency.series[1].points == tuple((line["step"], line["time/tool_latency_p95_s"]) for line in logged)
    page = _page(run)
    assert page.index("<h2>Time</h2>") < page.index("<h2>Tool calls</h2>") < page.index("<h2>Rollouts</h2>")
    assert "<h3>Tool calls per step</h3>" in page
    assert "<h3>Tool latency</h3>" in page


def test_each_tool_has_a_histogram_of_durations_whose_legend_counts_one_slow_call(run):
    lines = read_lines(run.metrics)
    of_rl = [line for line in lines if line["stage"] == "rl"]
    of_rl[1]["time/tool_calls/search/100-300s"] = 1.0
    for line in of_rl:
        line["time/tool_calls/search/0.001-0.003s"] = 250.0
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    [section] = [section for section in sections(read_run(run)) if section.title == "Tool calls"]
    python, search = (drawing.plot for drawing in section.drawings[2:])  # the most called first
    assert (python.title, search.title) == ("Durations of python calls", "Durations of search calls")
    quick, slow = search.series
    assert quick.label == f"0.001 to 0.003 s: {250 * len(of_rl):,}"
    assert slow.label == "100 to 300 s: 1"
    assert [y for _, y in slow.points] == [float(place == 1) for place in range(len(of_rl))]
    assert "Everything else in the log" not in [section.title for section in sections(read_run(run))]
    assert "100 to 300 s: 1" in _page(run)


def test_a_server_of_many_tools_leaves_the_page_small(run):
    lines = read_lines(run.metrics)
    size = len(_page(run))
    for line in lines:
        if line["stage"] == "rl":
            line |= {f"time/tool_calls/tool_{n}/{bucket}": 2.0 for n in range(40) for bucket in ("0-0.001s", "over-1000s")}
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    [section] = [section for section in sections(read_run(run)) if section.title == "Tool calls"]
    durations = [drawing for drawing in section.drawings if drawing.plot.title.startswith("Durations")]
    assert len(durations) == 6
    assert "35 tools with fewer calls" in durations[0].note  # 41 with python
    assert {series.label.split(":")[0] for series in durations[1].plot.series} == {"0 to 0.001 s", "over 1000 s"}
    assert len(_page(run)) - size < 60_000


@pytest.mark.parametrize("is_count_logged", [True, False])
def test_a_run_that_called_no_tool_has_no_plot_of_calls(run, is_count_logged):
    lines = []
    for line in read_lines(run.metrics):
        kept = {
            key: value for key, value in line.items() if not key.startswith(("time/tool_", "rollout/tool_calls_dispatched"))
        }
        lines.append(kept | ({"rollout/tool_calls_dispatched": 0.0} if is_count_logged and line["stage"] == "rl" else {}))
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    page = _page(run)
    assert "<h2>Time</h2>" in page
    for absent in ("<h2>Tool calls</h2>", "Tool calls per step", "Tool latency", "tool_calls_dispatched", "tool_latency"):
        assert absent not in page


def test_held_out_accuracy_is_drawn_against_the_time_that_was_trained_where_a_run_says_it(run):
    lines = read_lines(run.metrics)
    of_rl = [line for line in lines if line["stage"] == "rl"]
    for line in of_rl:
        line |= {"time/elapsed_s": 60.0 * line["step"], "budget/left_s": 200.0 - 60 * line["step"], "budget/is_spent": 0.0}
    for line in of_rl[::2]:
        line["validation/accuracy"] = line["step"] / 10
        line |= {"validation/accuracy_low": line["step"] / 10 - 0.05, "validation/accuracy_high": line["step"] / 10 + 0.1}
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    learning = next(section for section in sections(read_run(run)) if section.title == "Learning")
    plots = {drawing.plot.title: drawing.plot for drawing in learning.drawings}
    by_time = plots["Accuracy on held-out tasks by time"]
    [line] = by_time.series
    assert line.points == ((60.0, 0.1), (180.0, 0.3))
    assert [tuple(round(value, 6) for value in edge) for edge in line.band] == [(60.0, 0.05, 0.2), (180.0, 0.25, 0.4)]
    assert (by_time.x_label, by_time.x_low, by_time.x_high) == ("seconds", 0.0, 180.0)
    page = _page(run)
    assert "Left of the budget" in page
    assert "budget/is_spent" not in page
    _drop_metric(run, "time/elapsed_s")
    assert "held-out tasks by time" not in _page(run)


def test_a_step_without_calls_is_a_zero_of_calls_and_has_no_latency(run):
    lines = read_lines(run.metrics)
    quiet = next(line for line in lines if line["stage"] == "rl" and line["step"] == 3)
    for key in [key for key in quiet if key.startswith("time/tool_")]:
        del quiet[key]
    quiet["rollout/tool_calls_dispatched"] = 0.0
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    [section] = [section for section in sections(read_run(run)) if section.title == "Tool calls"]
    calls, latency, _ = (drawing.plot for drawing in section.drawings)
    assert calls.series[0].points[-1] == (3, 0.0)
    assert [[x for x, _ in series.points] for series in latency.series] == [[1, 2]] * 3
    assert (latency.x_low, latency.x_high) == (calls.x_low, calls.x_high) == (1, 3)  # one step lies above the other
    assert not calls.missing
    assert not latency.missing


def test_a_metric_that_nobody_foresaw_is_drawn_too(run):
    lines = [line | {"reward/style_mean": 0.5} for line in read_lines(run.metrics)]
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    assert "reward/style_mean" in _page(run)


def test_figures_that_are_not_finite_are_not_drawn(run):
    with run.metrics.open("a", encoding="utf-8") as file:
        file.write(
            '{"stage": "rl", "step": 4, "rollout/reward_mean": NaN, "update/loss": Infinity, "update/grad_norm": null}\n'
        )
    page = _page(run)
    assert not re.search(r'd="[^"]*(nan|inf)', page)


def test_text_of_a_rollout_is_shown_and_never_run(tmp_path):
    evil = "<script>alert({a})</script></script><img src=x onerror=alert({b})>{c}' \" &amp;"
    run = write_run(tmp_path / "demo", num_steps=1, question=evil)
    page = _page(run)
    elements = _Elements(page)
    assert "<script>alert(" not in page
    assert not elements.named("img")
    assert len(elements.named("script")) == 2  # the strips of tokens, and the page's own
    assert "&lt;script&gt;alert(" in page
    strips = re.search(r'<script type="application/json" id="strips">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(strips)


def test_stages_come_in_the_order_they_ran(finished):
    assert [stage.name for stage in read_run(finished).stages] == list(STAGES)


def test_stages_that_did_not_begin_follow_the_stage_they_need(run):
    run.events.unlink()
    run.metrics.unlink()
    names = [stage.name for stage in read_run(run).stages]
    assert names.index("model") < names.index("sft") < names.index("rl") < names.index("after")


def test_a_step_that_ran_twice_is_drawn_as_it_ran_last(run):
    with run.metrics.open("a", encoding="utf-8") as file:
        file.write('{"stage": "rl", "step": 2, "rollout/reward_mean": 9.5}\n')
    stage = next(stage for stage in read_run(run).stages if stage.name == "rl")
    assert list(stage.steps) == [1, 2, 3]
    assert stage.steps[2] == {"rollout/reward_mean": 9.5}


def test_a_run_that_only_began_has_a_page_that_says_so(tmp_path):
    run = RunDirectory(tmp_path)
    write_json(run.manifest, {"format": 1, "name": "young"})
    page = _page(run)
    assert "No evaluation yet." in page
    assert "No training step was logged" in page
    assert "No rollouts to show" in page


def test_a_directory_without_a_manifest_is_the_users_error(tmp_path):
    with pytest.raises(RunError, match=r"manifest\.json: missing"):
        write_report(RunDirectory(tmp_path))


def _evaluation(stage: str, accuracy: float, reach: float = 0.02, *, terms: str = "", condition: str = "") -> Evaluation:
    figures = {"accuracy": accuracy, "accuracy_low": accuracy - reach, "accuracy_high": accuracy + reach}
    return Evaluation(stage=stage, condition=condition, terms=terms, figures=figures)


def _log(*evaluations: Evaluation, inits: Mapping[str, str] | None = None) -> RunLog:
    stages = tuple(StageLog(name=name, kind="", init=init, is_done=True, steps={}) for name, init in (inits or {}).items())
    return RunLog(name="x", command="", seed="", versions={}, recipe={}, stages=stages, evaluations=evaluations, warnings=())


@pytest.mark.parametrize(
    ("before", "after", "reach", "tone"),
    [(0.2, 0.8, 0.1, "good"), (0.8, 0.2, 0.1, "bad"), (0.5, 0.6, 0.1, "flat"), (0.5, 0.5, 0.1, "flat")],
)
def test_a_change_is_claimed_only_where_the_intervals_lie_apart(before, after, reach, tone):
    assert verdict(_log(_evaluation("a", before, reach), _evaluation("b", after, reach))).tone == tone


def test_an_accuracy_that_did_not_change_stayed_where_it_was():
    assert verdict(_log(_evaluation("a", 0.5, 0.1), _evaluation("b", 0.5, 0.1))).text == "Accuracy stayed at 50.0%."
    assert "from 50.0% to 51.0%: the change" in verdict(_log(_evaluation("a", 0.5, 0.1), _evaluation("b", 0.51, 0.1))).text


def test_before_and_after_speak_of_the_same_tasks():
    log = _log(_evaluation("easy", 0.9, terms="easy"), _evaluation("before", 0.1), _evaluation("after", 0.5))
    assert [each.stage for each in log.before_and_after] == ["before", "after"]
    assert _log(_evaluation("easy", 0.9, terms="easy"), _evaluation("hard", 0.1)).before_and_after is None


STUDENT = {"base": "", "sft": "base", "rl": "sft", "small": "", "student": "small"}
OF = {"after-sft": "sft", "after-rl": "rl", "after-student": "student"}


@pytest.mark.parametrize(
    ("evaluated", "compared"),
    [
        (["after-sft", "after-rl", "after-student"], ["after-sft", "after-rl"]),  # a student descends from no teacher
        (["after-sft", "after-student"], None),
        (["after-rl", "after-sft"], None),  # what came before is none of what came after
    ],
)
def test_before_and_after_are_of_one_line_of_descent(evaluated, compared):
    log = _log(*(_evaluation(name, 0.1 * at) for at, name in enumerate(evaluated)), inits=STUDENT | OF)
    pair = log.before_and_after
    assert (pair and [each.stage for each in pair]) == compared
    assert compared or "an ancestor of the model" in verdict(log).support


STALE = {"model": "", "sft": "model", "rl": "sft", "before": "sft", "during": "sft", "after": "rl"}


def _with_stale(*stale: str) -> RunLog:
    """Before 10%, during 50% and after 80%, of a run whose stages `stale` are so."""
    log = _log(_evaluation("before", 0.1), _evaluation("during", 0.5), _evaluation("after", 0.8), inits=STALE)
    stages = [replace(each, why_stale="sft was made anew" if each.name in stale else "") for each in log.stages]
    return replace(log, stages=tuple(stages))


def test_what_a_stale_stage_found_is_neither_before_nor_after():
    assert [each.stage for each in _with_stale("after").before_and_after] == ["before", "during"]
    assert [each.stage for each in _with_stale("before").before_and_after] == ["during", "after"]
    assert verdict(_with_stale("after")).text == "Accuracy rose from 10.0% to 50.0%."


def test_a_verdict_without_a_pair_names_what_is_stale_and_what_makes_it_anew():
    told = verdict(_with_stale("rl", "during", "after"))
    assert told.text == "After stage before: accuracy 10.0%."
    assert told.support == "Stale, so not compared: during, after. Rerun with `strop train` and --from rl."
    assert verdict(_with_stale("before", "during", "after")).text == "No evaluation matches the recipe."


def test_a_stale_evaluation_is_shown_in_the_table_as_stale_and_nowhere_else(run):
    for name in ("cold", "after"):
        write_json(run.stage(name).stale, {"because": f"what {name} stands on was made anew"})
    page = _page(run)
    assert "After stage before: accuracy 3.1%." in page
    assert "Accuracy rose" not in page
    [table] = re.findall("<h2>Before and after</h2>.*?</table>", page, flags=re.DOTALL)
    rows = re.findall(r"<tr><th>(\w+)(.*?)</th>\s*<td>(.*?)</td>", table)
    assert [(name, "stale</small>" in mark, accuracy) for name, mark, accuracy in rows] == [
        ("before", False, "3.1%"),
        ("cold", True, "34.8%"),
        ("after", True, "84.2%"),
    ]
    assert 'title="what after stands on was made anew">stale' in page
    assert page.count("<td>⟳ stale: ") == 2  # in the table of stages


def test_controls_with_broken_tools_are_not_the_after():
    control = {"terms": "noise", "condition": "tools: noise"}
    log = _log(_evaluation("a", 0.1), _evaluation("x", 0.1, **control), _evaluation("b", 0.8), _evaluation("y", 0.1, **control))
    assert [each.stage for each in log.before_and_after] == ["a", "b"]


def test_without_a_verdict_the_report_shows_the_mean_reward_and_no_accuracy(tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    for path in run.path.glob("stages/*/eval/result.json"):
        result = read_json(path)
        kept = {key: value for key, value in result.items() if not key.startswith(("accuracy", "tool_error"))}
        write_json(path, kept | {"reward_mean": 0.25, "tool_calls_mean": 0.0})
    for key in ("rollout/accuracy", "validation/accuracy", "rollout/tool_error_rate", "rollout/tool_error_rate_correct"):
        _drop_metric(run, key)
    rows = [line | ({"rollout/tool_calls_mean": 0.0} if line["stage"] == "rl" else {}) for line in read_lines(run.metrics)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in rows))
    page = _page(run)
    assert "Mean reward went from 0.250 to 0.250." in page
    assert "<th>mean reward</th>" in page
    assert "<th>accuracy</th>" not in page
    assert "Accuracy on training tasks" not in page
    assert page.count("no tool calls") >= 4
    assert "missing: rollout/tool_error_rate" not in page


def test_rollouts_are_sampled_from_the_first_to_the_last_step_mixed_groups_first(finished):
    log = read_run(finished)
    table = read_rollouts(finished, log)
    assert [step.step for step in table.steps] == [1, 10, 20]
    for step in table.steps:
        first = step.groups[0]
        assert len({rollout.scored.reward for rollout in first.rollouts}) == 2
    rollout = table.steps[0].groups[0].rollouts[0]
    assert rollout.entry["reason"]
    assert dict(rollout.figures).keys() == {"p_err", "p_format", "weight"}
    assert dict(rollout.reward_parts).keys() == {"answer", "format"}


def test_strips_hold_the_tokens_as_they_were_sampled(finished):
    log = read_run(finished)
    table = read_rollouts(finished, log)
    turn = table.steps[0].groups[0].rollouts[0].turns[0]
    policy, observed = table.strips[turn.completion.strip], table.strips[turn.observation.strip]
    assert "".join(policy["t"]) == turn.completion.text
    assert "".join(observed["t"]) == turn.observation.text
    assert policy["f"][:4] == [1, 1, 1, 0]  # forced tokens first, as fake_run makes them
    assert len(policy["i"]) == len(policy["p"]) == len(policy["h"]) == turn.completion.num_tokens
    assert observed.keys() == {"t", "i"}


def test_a_character_of_several_tokens_is_shown_whole_on_the_first(finished):
    answers = [strip["t"] for strip in read_rollouts(finished, read_run(finished)).strips if " ✓" in "".join(strip["t"])]
    assert answers
    assert not any("\ufffd" in piece for pieces in answers for piece in pieces)


def test_without_a_tokenizer_turns_are_shown_as_text(run):
    (run.stage("sft").model / "tokenizer.json").unlink()
    table = read_rollouts(run, read_run(run))
    assert not table.has_tokens
    assert not table.strips
    assert "shown as text" in _page(run)
    assert html.escape("I should work this out", quote=False) in _page(run)


def test_long_rollouts_stay_within_the_budget_and_say_what_is_left_out(run, monkeypatch):
    monkeypatch.setattr("strop.reports.rollouts.TOKEN_BUDGET", 64)
    monkeypatch.setattr("strop.reports.rollouts.TEXT_BUDGET", 64)
    strips = read_rollouts(run, read_run(run)).strips
    assert all(len(strip["i"]) <= 8 for strip in strips)
    strip = next(strip for strip in strips if "gap" in strip)
    assert strip["gap"][0] == 5  # two thirds of 8 before the gap
    assert len(strip["t"]) == len(strip["i"]) == len(strip["p"]) == 8


def test_a_stage_is_numbered_on_from_the_one_before(tmp_path):
    def stage(name: str, first: int) -> StageLog:
        steps = {step: {"rollout/reward_mean": 1.0} for step in (first, first + 1)}
        return StageLog(name=name, kind="rl", init="", is_done=True, steps=steps)

    for first in (0, 1):
        log = RunLog(
            name="x",
            command="",
            seed="",
            versions={},
            recipe={},
            stages=(stage("one", first), stage("two", first)),
            evaluations=(),
            warnings=(),
        )
        plot = sections(log)[0].drawings[0].plot
        assert [x for x, _ in plot.series[0].points] == [first, first + 1, first + 2, first + 3]
        assert [(mark.x, mark.label) for mark in plot.boundaries] == [(first, "one"), (first + 2, "two")]


def test_settings_that_switched_are_marked_in_every_plot_over_steps(tmp_path):
    run = RunDirectory(tmp_path)
    stages = {"one": {"kind": "rl"}, "two": {"kind": "rl"}}
    run.manifest.write_text(json.dumps({"name": "x", "stages": stages}))
    steps = [{"stage": stage, "step": step, "rollout/reward_mean": 1.0} for stage in stages for step in (1, 2, 3)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
    rule, longer = "at_step = 3", "sampling.max_tokens = 90"
    switch = {"event": "scheduled", "stage": "two", "when": rule, "what": longer}
    events = [
        {"event": "stage_started", "stage": "one"},
        {**switch, "step": 2},  # of a stage that was made anew
        {"event": "step_finished", "stage": "two", "step": 2},
        {"event": "stage_started", "stage": "two"},
        {"event": "step_finished", "stage": "two", "step": 2},
        {**switch, "step": 3},
        {"event": "step_finished", "stage": "two", "step": 3},
        {**switch, "step": 4, "what": "sampling.temperature = 0.5"},  # behind the checkpoint
        {"event": "stage_started", "stage": "two"},  # of a try whose engine did not open
        {"event": "stage_started", "stage": "two"},
        {"event": "resumed", "stage": "two", "step": 2},
        {**switch, "step": 3, "when": "at_step = 3", "what": "limits.max_turns = 2"},
        {**switch, "step": 4},  # no step has it yet
        {**switch, "step": 2, "when": "every_updates = 1", "what": "reset_optimizer = true"},
    ]
    run.events.write_text("".join(json.dumps({"time": 0.0, **line}) + "\n" for line in events))
    log = read_run(run)
    assert log.stages[1].switches == {3: "sampling.max_tokens = 90, limits.max_turns = 2", 4: longer}
    marks = {
        tuple((mark.x, mark.label) for mark in drawing.plot.boundaries)
        for section in sections(log)
        for drawing in section.drawings
        if drawing.plot.x_label == "step"
    }
    assert marks == {((1, "one"), (4, "two"), (6, "sampling.max_tokens = 90, limits.max_turns = 2"))}


def test_the_tokenizer_of_the_fixture_round_trips(finished):
    tokenizer = Tokenizer.from_file(str(Path(finished.stage("sft").model / "tokenizer.json")))
    assert tokenizer.decode(tokenizer.encode("naïve ✓").ids) == "naïve ✓"
