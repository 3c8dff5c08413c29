"""The run-directory page names every metric and field of a played batch."""

from __future__ import annotations

import re
from pathlib import Path

from strop.rollout.scheduler.admission import EngineSpec
from strop.rollout.scheduler.report import BatchReport, EngineReport, EngineUsage, Ledger, StepFunction

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "run-directory.md").read_text(encoding="utf-8")


def report() -> BatchReport:
    spec = EngineSpec(name="engine-0", kv_blocks=1, block_tokens=1, max_conversations=1)
    engine = EngineReport(spec=spec, usage=EngineUsage(joined_s=0.0), left_s=1.0, loss="")
    return BatchReport(
        policy="scheduler",
        duration_s=1.0,
        engines=(engine, engine),
        ledger=Ledger(offered=1, turns=1, tool_turns=1, request_tokens=1, branch_tokens=1),
        queue=StepFunction(),
        lost_before=(),
    )


def test_every_metric_of_the_scheduler_is_named() -> None:
    metrics = report().as_metrics()
    assert len(metrics) > 15
    for name in metrics:
        assert f"`{name.replace('engine-0', '<engine>')}`" in PAGE, name


def test_every_field_of_a_timeline_is_named() -> None:
    [section] = re.findall(r"^## rollouts/step-k.timeline.json\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    timeline = {"step": 1, **report().as_timeline()}
    for name in (*timeline, *timeline["engines"][0]):
        assert f"`{name}`" in section, name
