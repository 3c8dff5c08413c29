from __future__ import annotations

import xml.dom.minidom
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from strop.cli import simulate as simulate_command
from strop.errors import UserError
from strop.rollout.scheduler.admission import EngineSpec
from strop.rollout.scheduler.scheduler import SchedulerConfig
from strop.simulation.engines import EngineTiming
from strop.simulation.simulate import Outcome, SimulatedMachine, draw_timelines, schedule_page, simulate
from strop.simulation.trace import heavy_tailed

TIMING = EngineTiming(step_s=0.03, row_s=0.001, kv_token_s=1e-6, prefill_token_s=1e-4)


def outcomes() -> dict[str, Outcome]:
    trace = heavy_tailed(num_groups=8, group_size=4, seed=0)
    machines = [
        SimulatedMachine(
            spec=EngineSpec(name=f"e<{index}>", kv_blocks=4, block_tokens=9216, max_conversations=4), timing=TIMING
        )
        for index in range(2)
    ]
    return {name: simulate(trace, machines, SchedulerConfig(policy=name)) for name in ("static", "scheduler")}  # type: ignore[arg-type]


def test_every_engine_of_every_policy_has_a_row_in_the_picture() -> None:
    drawing = str(draw_timelines(outcomes()))
    xml.dom.minidom.parseString(drawing)
    assert drawing.count("e&lt;0&gt;") == drawing.count("e&lt;1&gt;") == 2


def test_the_page_has_the_figures_beside_the_picture() -> None:
    page = schedule_page("A step", outcomes(), bound_s=100.0)
    assert "<svg" in page
    assert "recomputed tokens" in page
    assert "e<0>" not in page


def test_the_command_prints_a_table_and_writes_page_picture_and_figures(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(simulate_command)
    arguments = ["--engines", "2", "--rollouts", "64", "--trace", "uniform", "--rows", "8", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "makespan" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"schedule.html", "schedule.svg", "schedule.json"}


def test_slots_cannot_be_over_subscribed_and_the_command_says_so() -> None:
    app = typer.Typer()
    app.command()(simulate_command)
    arguments = ["--engines", "1", "--rollouts", "8", "--trace", "uniform", "--rows", "8", "--oversubscription", "2"]
    with pytest.raises(UserError, match=r"--oversubscription 2 has no effect on slots\. Give --kv-tokens"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    result = CliRunner().invoke(app, [*arguments, "--kv-tokens", "20000"], catch_exceptions=False)
    assert result.exit_code == 0
