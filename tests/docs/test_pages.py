"""The pages are true: their code runs, links and names exist, and the folder map matches the tree."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import typer
from generate import generated

from strop import types
from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Mismatch
from strop.algorithms.method import Column, LossInputs
from strop.cli import app
from strop.doctor import CHECKS
from strop.evaluation.metrics import rollout_metrics, tool_call_metrics
from strop.tools.protocol import ToolResult
from strop.types import ToolOutcome

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
GENERATED = generated()
FENCE = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH_IN_TEXT = re.compile(r"`((?:src|tests|recipes|docs|experiments|benchmarks)/[\w./-]+)`")


def fences(page: str, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(TEXTS[page]) if kind == language]


RUN_ELSEWHERE = "docs/sandbox.md"  # by tests/sandbox/test_page.py, with a service


@pytest.mark.parametrize("page", [page for page in TEXTS if fences(page, "python") and page != RUN_ELSEWHERE])
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str) -> None:
    namespace: dict[str, object] = {"__name__": "page"}
    for code in fences(page, "python"):
        exec(compile(code, page, "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in TEXTS if fences(page, "toml")])
def test_the_toml_of_a_page_is_toml(page: str) -> None:
    for code in fences(page, "toml"):
        tomllib.loads(code)


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page: str) -> None:
    for link in LINK.findall(FENCE.sub("", TEXTS[page])):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        name = target.relative_to(ROOT / "docs").as_posix() if target.is_relative_to(ROOT / "docs") else ""
        text = GENERATED.get(name) or (
            target.read_text(encoding="utf-8") if target.suffix == ".md" and target.is_file() else ""
        )
        assert name in GENERATED or target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(text), f"{page}: {link}"


def anchors(text: str) -> set[str]:
    """Return the anchors of a page as code hosts and the site make them, and those that it names itself."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r"\{#([\w-]+)\}$", text, re.MULTILINE))


@pytest.mark.parametrize("page", TEXTS)
def test_every_file_that_is_named_exists(page: str) -> None:
    for path in PATH_IN_TEXT.findall(TEXTS[page]):
        assert (ROOT / path).exists(), f"{page}: {path}"


LAYOUT_IS_NEW = (ROOT / "src" / "strop" / "stages").is_dir()


@pytest.mark.skipif(not LAYOUT_IS_NEW, reason="the page shows the layout after the move of the folders")
def test_the_folder_map_matches_the_tree() -> None:
    [listing] = [code for code in fences("docs/architecture.md", "text") if code.startswith("src/strop/")]
    mapped = set(re.findall(r"^  (\w+)/ ", listing, re.MULTILINE))
    package = ROOT / "src" / "strop"
    assert mapped == {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}


@pytest.mark.skipif(not LAYOUT_IS_NEW, reason="the page shows the layout after the move of the folders")
def test_the_order_of_the_folder_map_is_that_of_the_import_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    layers = [name.strip().removeprefix("strop.") for layer in reversed(contract) for name in layer.split("|")]
    [listing] = [code for code in fences("docs/architecture.md", "text") if code.startswith("src/strop/")]
    mapped = re.findall(r"^  (\w+)/ ", listing, re.MULTILINE)
    assert mapped == [layer for layer in layers if layer in mapped]


def pages_in(nav: object) -> Iterator[str]:
    """Yield every page of a site's navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_in(each)


def test_every_page_is_in_the_navigation_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    pages = [name.removeprefix("docs/") for name in TEXTS if name.startswith("docs/")]
    assert sorted(pages_in(nav)) == sorted([*pages, *GENERATED])


def commands() -> Iterator[tuple[str, str]]:
    """Yield every `strop ...` command of the pages, with its page."""
    for page, text in TEXTS.items():
        for line in re.findall(r"^(?:STROP_LOG=\w+ |\$ )?strop ([^#\n]+)", "\n".join(fences(page, "sh")), re.MULTILINE):
            yield page, line
        for line in re.findall(r"`(?:STROP_LOG=\w+ )?strop ([^`]+)`", FENCE.sub("", text)):
            yield page, line


def test_every_command_and_option_that_is_named_exists() -> None:
    group = typer.main.get_command(app)
    found = list(commands())
    assert len(found) > 10
    for page, line in found:
        command = group
        for word in line.split():
            if hasattr(command, "commands") and not word.startswith("-"):
                if word.endswith(".toml") and "run" in command.commands:  # a recipe where a command could stand
                    command = command.commands["run"]
                    continue
                assert word in command.commands, f"{page}: strop {line}"
                command = command.commands[word]
            elif word.startswith("--"):
                options = {"--help", *(option for parameter in command.params for option in parameter.opts)}
                assert word in options, f"{page}: strop {line}"


def test_every_target_of_make_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name for text in TEXTS.values() for name in re.findall(r"(?:^|`)make (?:PYTHON=\S+ )?([\w-]+)", text, re.MULTILINE)
    }
    assert {"demo", "test"} <= named <= targets


def test_the_run_directory_page_names_every_field_of_a_rollout_and_every_outcome() -> None:
    page = TEXTS["docs/run-directory.md"]
    nouns = (
        types.ScoredTrajectory,
        types.Trajectory,
        types.Turn,
        types.Completion,
        types.ToolCall,
        types.Task,
        types.RolloutKey,
    )
    for noun in (*nouns, ToolResult):
        for field in fields(noun):
            assert re.search(rf"`(?:\w+\.)?{field.name}`", page), f"{noun.__name__}.{field.name}"
    for enumeration in (ToolOutcome, types.StopReason, types.FinishReason):
        for value in enumeration:
            assert f"`{value}`" in page, value


def test_the_run_directory_page_names_every_metric_of_rollouts() -> None:
    call = types.ToolCall(name="python", arguments="{}", outcome=ToolOutcome.STDOUT, text="1", duration_s=0.1)
    completion = types.Completion(
        ids=(1,),
        logprobs=(0.0,),
        entropies=(),
        is_forced=(False,),
        spans=((0, 1),),
        finish_reason=types.FinishReason.STOP,
        cached_tokens=0,
    )
    turn = types.Turn(completion=completion, calls=(call,), observation_ids=(), completion_text="", observation_text="")
    trajectory = types.Trajectory(
        key=types.RolloutKey(task_index=0, attempt=0),
        task_id="t",
        prompt_ids=(1,),
        turns=(turn,),
        stop_reason=types.StopReason.ANSWERED,
    )
    group = types.Group(
        task=types.Task(id="t", question="?", answer="1", source="by hand"),
        task_index=0,
        trajectories=(types.ScoredTrajectory(trajectory=trajectory, reward=1.0, reward_parts={}),),
    )
    metrics = rollout_metrics([group]) | tool_call_metrics([group])
    assert {"rollout/tool_error_rate", "time/tool_latency_p95_s"} < metrics.keys()
    [histogram] = [name for name in metrics if name.startswith("time/tool_calls/")]
    assert re.fullmatch(rf"time/tool_calls/{call.name}/[\d.]+-[\d.]+s", histogram)
    documented = {*metrics, "time/tool_calls/<tool>/<from>-<to>s"} - {histogram}
    for name in documented:
        assert f"`{name}`" in TEXTS["docs/run-directory.md"], name


def test_the_run_directory_page_says_which_calls_reach_a_tool() -> None:
    [row] = re.findall(r"^\| `rollout/tool_calls_dispatched` \|.*", TEXTS["docs/run-directory.md"], re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == [outcome.value for outcome in ToolOutcome if outcome.is_dispatched]


def test_the_run_directory_page_names_every_statistic_of_an_update() -> None:
    one = torch.zeros(1, 1)
    inputs = LossInputs(
        loss_mask=torch.ones(1, 1, dtype=torch.bool),
        advantages=one,
        sampled_logprobs=one,
        entropies=one,
        columns={Column.OLD_LOGPROBS: one, Column.REFERENCE_LOGPROBS: one},
    )
    method = GRPO(dual_clip=3.0, kl_coefficient=0.1, mismatch=Mismatch.MASK_TOKEN)
    for name in method.token_statistics(one, inputs):
        assert f"`policy/{name}`" in TEXTS["docs/run-directory.md"], name


def test_the_troubleshooting_page_names_every_check_of_the_doctor_in_order() -> None:
    [table] = re.findall(r"\| check \|.*?\n\n", TEXTS["docs/guides/troubleshooting.md"], re.DOTALL)
    assert re.findall(r"^\| ([a-z -]+?) \|", table, re.MULTILINE)[2:] == list(CHECKS)
