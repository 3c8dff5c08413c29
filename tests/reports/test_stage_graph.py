"""The table of stages and the plots across RL stages."""

import pytest

from strop.reports.log import Evaluation, RunLog, StageLog, StageState, _losses, read_run
from strop.reports.page import stages_table, write_report
from strop.reports.panels import across, stages_in_sequence
from strop.run_directory import LineWriter, RunDirectory, write_json

PROGRAM = {
    "base": ("model", {}),
    "cold": ("sft", {"init": ["base"]}),
    "rl1": ("rl", {"init": ["cold"]}),
    "good": ("rejection_sampling", {"init": ["rl1"]}),
    "general": ("demonstrations", {"init": ["base"]}),
    "mixed": ("mix", {"data": ["good", "general"]}),
    "sft2": ("sft", {"init": ["base"], "data": ["mixed"]}),
    "rl2": ("rl", {"init": ["sft2"]}),
    "after-rl1": ("eval", {"init": ["rl1"]}),
    "after-rl2": ("eval", {"init": ["rl2"]}),
    "release": ("export", {"init": ["rl2"], "results": ["after-rl1", "after-rl2"]}),
}


def stage(name, **keys):
    kind, inputs = PROGRAM[name]
    found = {key: tuple(names) for key, names in inputs.items()}
    init = (*found.get("init", ()), "")[0]
    return StageLog(**{"name": name, "kind": kind, "init": init, "is_done": True, "steps": {}, "inputs": found} | keys)


def program(**changes):
    return [stage(name, **changes.get(name, {})) for name in PROGRAM]


def test_each_stage_has_a_row_with_what_it_reads():
    rows = {row[0]: row for row in stages_table(program()).rows}
    assert list(rows) == list(PROGRAM)
    assert rows["base"][1:3] == ("model", "")
    assert rows["release"][1:3] == ("export", "rl2 (init), after-rl1 (results), after-rl2 (results)")


def test_a_stage_that_is_stale_or_not_there_yet_says_so():
    changes = {
        "mixed": {"why_stale": "good has changed"},
        "sft2": {"is_done": False, "is_begun": True},
        "rl2": {"is_done": False},
    }
    stages = program(**changes)
    states = {each.name: each.state for each in stages}
    assert [states[name] for name in ("rl1", *changes)] == [
        StageState.DONE,
        StageState.STALE,
        StageState.BEGUN,
        StageState.TO_COME,
    ]
    shown = {row[0]: row[3] for row in stages_table(stages).rows}
    assert [shown[name] for name in ("rl1", *changes)] == ["✓ done", "⟳ stale: good has changed", "… not finished", "to come"]


def log_of(stages, evaluations=(), recipe=None):
    return RunLog(
        name="x",
        command="",
        seed="0",
        versions={},
        recipe=recipe or {},
        stages=tuple(stages),
        evaluations=tuple(evaluations),
        warnings=(),
    )


def steps(*accuracies):
    return {
        step: {"rollout/accuracy": accuracy, "rollout/length_tokens_mean": 100.0 * step, "rollout/truncated_fraction": 0.1}
        for step, accuracy in enumerate(accuracies, start=1)
    }


def evaluation(name, accuracy, condition=""):
    figures = {"accuracy": accuracy, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
    return Evaluation(stage=name, condition=condition, terms="", figures=figures)


def accuracy_of(log):
    [plot] = [drawing.plot for drawing in across(log).drawings if drawing.plot.title == "Accuracy"]
    return plot


def evaluations_of(log):
    return [point for series in accuracy_of(log).series if series.label == "evaluations" for point in series.points]


def test_stages_of_rl_follow_each_other_on_one_axis_with_a_boundary_and_their_limits():
    log = log_of(program(rl1={"steps": steps(0.1, 0.3)}, rl2={"steps": steps(0.4, 0.5, 0.6)}))
    assert [drawing.plot.title for drawing in across(log).drawings] == ["Accuracy", "Response length", "Truncated"]
    plot = accuracy_of(log)
    assert [(boundary.x, boundary.label) for boundary in plot.boundaries] == [(1, "rl1"), (3, "rl2")]
    assert plot.series[0].points == ((1, 0.1), (2, 0.3), (3, 0.4), (4, 0.5), (5, 0.6))


def test_an_evaluation_is_drawn_at_the_last_step_of_what_it_measured_and_a_control_nowhere():
    stages = program(rl1={"steps": steps(0.1, 0.3)}, rl2={"steps": steps(0.4, 0.5, 0.6)})
    found = [evaluation("after-rl1", 0.35), evaluation("after-rl2", 0.65), evaluation("after-rl2", 0.05, "tools: none")]
    assert evaluations_of(log_of(stages, found)) == [(2, 0.35), (5, 0.65)]


def test_an_evaluation_whose_stage_is_stale_is_not_drawn():
    stages = program(rl1={"steps": steps(0.1, 0.3)}, rl2={"steps": steps(0.4, 0.5)}, **{"after-rl2": {"why_stale": "rl2"}})
    found = [evaluation("after-rl1", 0.35), evaluation("after-rl2", 0.65)]
    assert evaluations_of(log_of(stages, found)) == [(2, 0.35)]


def test_parallel_stages_and_stale_ones_do_not_follow_each_other():
    """Two arms of RL from one cold start, the second of which has a successor."""
    again = StageLog(name="arm", kind="rl", init="cold", is_done=True, steps=steps(0.9, 0.9), inputs={"init": ("cold",)})
    stages = program(rl1={"steps": steps(0.1, 0.3)}, rl2={"steps": steps(0.4, 0.5)})
    assert [each.name for each in stages_in_sequence(log_of([*stages, again]))] == ["rl1", "rl2"]
    stale = program(rl1={"steps": steps(0.1, 0.3)}, rl2={"steps": steps(0.4, 0.5), "why_stale": "rl1 has changed"})
    assert across(log_of(stale)) is None
    arms = [each for each in stages if each.name != "rl2"] + [again]
    assert [each.name for each in stages_in_sequence(log_of(arms))] == ["arm"]  # neither depends on the other


def test_a_metric_that_no_step_logged_is_named():
    stages = program(
        **{name: {"steps": {1: {"rollout/accuracy": 0.5, "rollout/length_tokens_mean": 9.0}}} for name in ("rl1", "rl2")}
    )
    assert [drawing.plot.missing for drawing in across(log_of(stages)).drawings] == [(), (), ("rollout/truncated_fraction",)]


def test_one_stage_of_rl_has_no_section_across():
    assert across(log_of(program(rl1={"steps": steps(0.1, 0.3)}))) is None


@pytest.fixture
def run(tmp_path):
    """A run that came to its second SFT and has a stale mix."""
    run = RunDirectory(tmp_path / "run")
    stages = {name: {"kind": kind, "inputs": inputs} for name, (kind, inputs) in PROGRAM.items()}
    write_json(run.manifest, {"format": 1, "name": "run", "stages": stages, "recipe": {}})
    for name in ("base", "cold", "rl1", "good", "general", "mixed"):
        write_json(run.stage(name).done, {})
    write_json(run.stage("mixed").stale, {"because": "good has changed"})
    events = LineWriter(run.events)
    for name in ("base", "cold", "rl1"):
        events.append({"event": "stage_started", "stage": name, "time": 0.0, "cores": 4, "gpus": 2})
    # An attempt of a quarter of an hour that was killed, and one of an hour and a quarter.
    for time, event in ((900.0, "step_finished"), (9000.0, "stage_started"), (13500.0, "stage_finished")):
        events.append({"event": event, "stage": "cold", "time": time, "cores": 4, "gpus": 2})
    nodes = ["10.0.0.1: 8 trainer ranks", "10.0.0.2: 2 engines"]
    events.append({"event": "placed", "stage": "cold", "time": 13500.0, "nodes": ["10.0.0.3: 8 trainer ranks"]})
    events.append({"event": "placed", "stage": "cold", "time": 13500.0, "nodes": nodes})
    for event, process in (
        ("node_lost", ""),
        ("engine_lost", ""),
        ("engine_lost", ""),
        ("process_lost", "engine engine-0"),  # one of those two
        ("process_lost", "code service 1"),
        ("process_lost", "the trainer"),
        ("stage_restarted", ""),
        ("warning", ""),
    ):
        events.append({"event": event, "stage": "", "time": 13500.0, "process": process})
    events.close()
    metrics = LineWriter(run.metrics)
    busy = {"time/step_s": 10.0, "time/update_s": 1.0, "time/score_s": 0.5, "time/publish_s": 0.5, "scheduler/busy_share": 0.5}
    calls = {"rollout/tool_calls_dispatched": 20, "time/tool_latency_mean_s": 1.5}
    metrics.append({"stage": "rl1", "step": 1, **busy, "time/rollout_s": 9.0})  # another try
    metrics.append({"stage": "rl1", "step": 1, **busy, **calls, "time/rollout_s": 8.0})
    metrics.append({"stage": "rl1", "step": 2, **busy, "time/rollout_s": 30.0})  # while other steps were trained on
    metrics.append({"stage": "cold", "step": 1, "time/step_s": 10.0})
    metrics.close()
    return run


def test_a_page_shows_the_stages_of_a_run_as_its_directory_has_it(run):
    log = read_run(run)
    states = {each.name: each.state for each in log.stages}
    assert (states["good"], states["mixed"], states["sft2"]) == (StageState.DONE, StageState.STALE, StageState.TO_COME)
    names = [each.name for each in log.stages]
    for name, (_, inputs) in PROGRAM.items():
        assert all(names.index(source) < names.index(name) for each in inputs.values() for source in each), name
    page = write_report(run).read_text(encoding="utf-8")
    assert "<td>⟳ stale: good has changed</td>" in page
    assert {each.name: each.hours for each in log.stages}["cold"] == ("6 core hours", "3 GPU hours")
    assert "1 step, 6 core hours, 3 GPU hours; on 10.0.0.1: 8 trainer ranks; on 10.0.0.2: 2 engines" in page
    assert "2 steps, trainer 20%, engines 45%, 1.5 tool calls at once" in page
    assert "Lost, and started again or done without: 1 node, 2 engines, 1 code service, 1 trainer." in page


def test_a_trainer_that_was_lost_without_a_cluster_is_counted_by_the_restart_of_its_stage():
    assert _losses([{"event": "stage_restarted"}]) == ("1 trainer",)
    engines = [{"event": "process_lost", "process": "engine torch 0"}, {"event": "stage_restarted"}]
    assert _losses(engines) == ("1 engine",)
