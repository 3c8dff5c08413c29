import io
from pathlib import Path

from rich.console import Console

from strop.reports.console import ConsoleProgress
from strop.reports.terminal import PlannedStage, print_plan
from strop.run_directory import RunDirectory, write_json

_METRICS = {
    "rollout/reward_mean": 0.512,
    "rollout/tool_error_rate": 0.123,
    "rollout/length_tokens_mean": 98.44,
    "rollout/tokens_per_s": 1903.2,
    "update/loss": 0.1,
}


def _progress(*, is_terminal: bool = False) -> tuple[ConsoleProgress, io.StringIO, list[float]]:
    shown, now = io.StringIO(), [0.0]
    console = Console(file=shown, force_terminal=is_terminal, width=120, color_system=None)
    return ConsoleProgress(console, clock=lambda: now[0]), shown, now


def test_each_rl_step_is_one_plain_line_with_the_time_left():
    progress, shown, now = _progress()
    progress.stage_started("rl", "rl", 12, 2)
    now[0] = 60.0
    progress.step(_METRICS, 4)  # two of the ten steps left took a minute
    lines = shown.getvalue().splitlines()
    assert lines[1] == "rl · 12 steps, 2 done before"
    assert lines[2] == "   4/12   reward 0.512   tool errors 12.3%   length 98.4   1,903 tokens/s   4 min 00 s left"
    assert "\x1b" not in shown.getvalue()


def test_a_step_says_what_branches_save():
    progress, shown, _ = _progress()
    progress.stage_started("rl", "rl", 12, 0)
    saved = {"calls": 1 / 3, "sampled": 0.206, "prefilled": 0.362}
    progress.step({**_METRICS, **{f"branching/{name}_saved_fraction": share for name, share in saved.items()}}, 1)
    assert "branches save 33.3% of calls   20.6% of sampled tokens   36.2% of observed tokens" in shown.getvalue()


def test_quick_stages_are_not_a_line_a_step():
    progress, shown, _ = _progress()
    progress.stage_started("cold start", "sft", 500, 0)
    for step in range(1, 501):
        progress.step({"sft/loss": 1.0}, step)
    assert shown.getvalue().count("loss 1") == 20
    progress.stage_started("before", "eval", 100, 0)
    for step in range(1, 101):
        progress.step({}, step)
    assert shown.getvalue().count("/100") == 4
    assert "before · eval · 100 tasks" in shown.getvalue()


def test_a_terminal_gets_a_bar_and_its_cursor_back():
    progress, shown, _ = _progress(is_terminal=True)
    for stage in ("rl", "rl-2"):
        progress.stage_started(stage, "rl", 2, 0)
        progress.step(_METRICS, 1)
        progress.stage_finished(stage, "done")
    with progress:
        progress.stage_started("after", "eval", 8, 0)
        progress.step({}, 1)
    text = shown.getvalue()
    assert "1/2" in text
    assert "━" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_what_changes_on_the_way_has_a_line_of_its_own_behind_that_of_the_step():
    progress, shown, _ = _progress()
    progress.stage_started("rl", "rl", 2, 0)
    progress.step(_METRICS, 1)
    progress.note("from step 2: reward.weights = { accuracy = 1.0 } (at_step = 2)")
    assert shown.getvalue().splitlines()[-1] == "  → from step 2: reward.weights = { accuracy = 1.0 } (at_step = 2)"


def test_a_warning_names_the_stage_that_it_is_about():
    progress, shown, _ = _progress()
    progress.warning("step 4: nothing is learnt", stage="rl")
    progress.warning("stages.rl.trainer.workers is 2")
    assert shown.getvalue().splitlines() == ["  ! rl: step 4: nothing is learnt", "  ! stages.rl.trainer.workers is 2"]


def test_what_the_user_wrote_is_not_taken_for_markup():
    progress, shown, _ = _progress()
    progress.warning("all rewards are [red]0[/red]")
    progress.finished([{"stage": "[bold]after[/bold]", "accuracy": 0.5}], Path("runs/[x]/report.html"))
    assert "[red]0[/red]" in shown.getvalue()
    assert "[bold]after[/bold]" in shown.getvalue()
    assert "report: runs/[x]/report.html" in shown.getvalue()


def test_the_end_shows_before_and_after():
    progress, shown, _ = _progress()
    after = {"stage": "after", "accuracy": 0.842, "accuracy_low": 0.787, "accuracy_high": 0.893, "tool_error_rate": 0.062}
    progress.finished([{"stage": "before", "accuracy": 0.031}, after], Path("report.html"))
    before, last = [line for line in shown.getvalue().splitlines() if line.startswith(("before", "after"))]
    assert before.split()[:2] == ["before", "3.1%"]
    assert last.split()[:6] == ["after", "84.2%", "78.7%", "–", "89.3%", "6.2%"]


def test_the_end_marks_what_is_stale(tmp_path):
    progress, shown, _ = _progress()
    write_json(RunDirectory(tmp_path).stage("after").stale, {"because": "rl was made anew"})
    progress.finished([{"stage": "before", "accuracy": 0.275}, {"stage": "after", "accuracy": 0.592}], tmp_path / "report.html")
    before, last = [line for line in shown.getvalue().splitlines() if line.startswith(("before", "after"))]
    assert before.split()[:2] == ["before", "27.5%"]
    assert last.split()[:3] == ["after", "(stale)", "59.2%"]


def test_the_end_fits_into_80_columns_without_breaking_a_figure_and_breaks_names_at_hyphens():
    shown = io.StringIO()
    progress = ConsoleProgress(Console(file=shown, width=80, color_system=None), clock=lambda: 0.0)
    figures = {"accuracy": 0.842, "accuracy_low": 0.787, "accuracy_high": 0.893, "tool_error_rate_correct": 0.062}
    figures |= {"length_tokens_mean": 1234.5, "truncated_fraction": 1.0}
    names = ["after-student", "after-the-second-stage-of-reinforcement"]
    progress.finished([{"stage": name, **figures} for name in names], Path("report.html"))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    [first] = [line for line in lines if line.startswith("after-student")]
    assert first.split() == ["after-student", "84.2%", "78.7%", "–", "89.3%", "–", "6.2%", "1,234", "100.0%"]
    rows = [line.split()[0] for line in lines[lines.index(first) + 1 :] if line.strip() and not line.startswith("report")]
    assert "".join(rows) == "after-the-second-stage-of-reinforcement"
    assert all(row.endswith("-") for row in rows[:-1])


def test_without_a_verdict_the_end_shows_the_mean_reward_and_without_calls_no_error_rate():
    progress, shown, _ = _progress()
    progress.finished([{"stage": "after", "reward_mean": 0.512, "tool_calls_mean": 0.0}], Path("report.html"))
    assert "mean reward" in shown.getvalue()
    assert "accuracy" not in shown.getvalue()
    [row] = [line for line in shown.getvalue().splitlines() if line.startswith("after")]
    assert row.split() == ["after", "0.512", "–", "no", "tool", "–", "–", "–"]


def test_escape_sequences_do_not_reach_the_terminal():
    progress, shown, _ = _progress()
    hostile = "\x1b]0;title\x07\x9b31m\u202ename"
    progress.stage_started(hostile, "eval", 4, 0)
    progress.warning(hostile, stage=hostile)
    progress.stage_finished(hostile, hostile)
    progress.finished([{"stage": hostile, "accuracy": 0.5}], Path("report.html"))
    stage = PlannedStage(
        name=hostile,
        kind="rl",
        init=hostile,
        arithmetic=hostile,
        schedule=(hostile,),
        problem=hostile,
        tokens=1,
        memory_mib=1.0,
        time_s=1.0,
    )
    for width in (80, 160):
        print_plan(hostile, hostile, [stage], console=Console(file=shown, width=width, color_system=None))
    assert not set(shown.getvalue()) & set("\x1b\x07\x9b\u202e")
    assert r"\x1b]0;title" in shown.getvalue()


def test_a_plan_is_shown_with_its_estimates():
    shown = io.StringIO()
    stage = PlannedStage(
        name="rl",
        kind="rl",
        init="sft",
        arithmetic="30 steps x 16 tasks",
        schedule=(),
        tokens=12345,
        memory_mib=810.4,
        time_s=185.0,
    )
    print_plan("demo", "A tiny model.", [stage], console=Console(file=shown, width=120))
    assert "≤ 12,345" in shown.getvalue()
    assert "810 MiB" in shown.getvalue()
    assert "about 3 min 05 s in all" in shown.getvalue()


def test_a_plan_on_80_columns_breaks_no_name_no_figure_and_no_word_and_leaves_nothing_out():
    stages = [
        PlannedStage(
            name="distilled-student",
            kind="rejection_sampling",
            init="the-small-base-model, rejection-of-reasoning, general-demonstrations",
            arithmetic="107 steps x 512 tasks x 16 rollouts = 8192 a step; grpo_roc keeps 8 a task = 4096; 16 updates a step",
            schedule=("at_update = 1300 (step 83): tasks = { kind = 'jsonl', path = 'data/r1-general.jsonl' }",),
            tokens=28_722_593_792,
            memory_mib=1604.2,
            time_s=9185.0,
        ),
        PlannedStage(name="base", kind="model", init="", arithmetic="m", schedule=(), tokens=0, memory_mib=0.0, time_s=0.0),
    ]
    shown = io.StringIO()
    print_plan("demo", "", stages, console=Console(file=shown, width=80))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    whole = " ".join(shown.getvalue().split())
    assert f"distilled-student · rejection_sampling · from {stages[0].init}" in whole
    assert f"{stages[0].arithmetic} {stages[0].schedule[0]} ≤ 28,722,593,792 tokens, 1,604 MiB, 2 h 33 min" in whole
    assert lines[lines.index("base · model") + 1] == "  m"
    headings = [line.split()[0] for line in lines[1:] if not line.startswith(" ")]
    assert headings == ["distilled-student", "base", "about", "Nothing"]
