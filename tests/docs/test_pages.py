"""What the pages say is so: their code runs, what they link to exists, their maps match the tree."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import typer

from strop import types
from strop.algorithms import Column, LossInputs, Mismatch, PolicyLoss
from strop.cli import app
from strop.doctor import CHECKS
from strop.evaluation.summary import rollout_metrics, tool_call_metrics
from strop.tools.protocol import ToolResult
from strop.types import ToolOutcome

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH_IN_TEXT = re.compile(r"`((?:src|tests|recipes|docs|experiments|benchmarks)/[\w./-]+)`")


def fences(page: str, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(TEXTS[page]) if kind == language]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("page", [page for page in TEXTS if fences(page, "python")])
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str) -> None:
    namespace: dict[str, object] = {"__name__": "page"}
    for code in fences(page, "python"):
        exec(compile(code, page, "exec"), namespace)


def test_the_readmes_loop_is_the_one_that_the_guide_trains_with() -> None:
    loops = []
    for page in ("README.md", "docs/guides/own-loop.md"):
        [code] = [code for code in fences(page, "python") if "async def one_step" in code]
        [body] = re.findall(r"^async def one_step.*?(?=^\S|\Z)", code, re.MULTILINE | re.DOTALL)
        loops.append(re.sub(r"  # .*", "", body).strip())
    assert loops[0] == loops[1]


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
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def anchors(page: Path) -> set[str]:
    """As code hosts make them: lower case, spaces to hyphens, punctuation left out."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_every_file_that_is_named_exists(page: str) -> None:
    for path in PATH_IN_TEXT.findall(TEXTS[page]):
        assert (ROOT / path).exists(), f"{page}: {path}"


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_the_folder_map_matches_the_tree(page: str) -> None:
    [listing] = [code for code in fences(page, "text") if code.startswith("src/strop/")]
    mapped = {
        name.rstrip("/")
        for line in listing.splitlines()
        for name in re.findall(r"(?:^  |(?<=  ))([\w]+(?:/|\.py))(?= |$)", line)
    }
    package = ROOT / "src" / "strop"
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {name for name in mapped if (package / name).exists()} == modules | folders
    for line in listing.splitlines():
        if not line.startswith(" "):
            assert (ROOT / line.split()[0]).exists(), line


def test_the_order_of_the_folder_maps_is_that_of_the_import_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    layers = [name.strip().removeprefix("strop.") for layer in reversed(contract) for name in layer.split("|")]
    for page in ("README.md", "docs/architecture.md"):
        [listing] = [code for code in fences(page, "text") if code.startswith("src/strop/")]
        places = {
            layer: listing.index(f" {layer}{'.py' if (ROOT / 'src/strop' / f'{layer}.py').exists() else '/'}")
            for layer in layers
        }
        ranks = [layer for layer in sorted(layers, key=lambda layer: places[layer]) if layer not in ("seeds", "types")]
        assert ranks == [layer for layer in layers if layer not in ("seeds", "types")], page


def commands() -> Iterator[tuple[str, str]]:
    """Every `strop ...` of the pages, with the page it stands in."""
    for page, text in TEXTS.items():
        for line in re.findall(r"^(?:STROP_LOG=\w+ )?strop ([^#\n]+)", "\n".join(fences(page, "sh")), re.MULTILINE):
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
            if hasattr(command, "commands"):
                if word.endswith(".toml") and "run" in command.commands:  # a recipe where a command could stand
                    command = command.commands["run"]
                    continue
                assert word in command.commands, f"{page}: strop {line}"
                command = command.commands[word]
            elif word.startswith("--"):
                options = {option for parameter in command.params for option in parameter.opts}
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
        policy_version=0,
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
    method = PolicyLoss(dual_clip=3.0, kl_coefficient=0.1, mismatch=Mismatch.MASK_TOKEN)
    for name in method.token_statistics(one, inputs):
        assert f"`policy/{name}`" in TEXTS["docs/run-directory.md"], name


def test_the_troubleshooting_page_names_every_check_of_the_doctor_in_order() -> None:
    [table] = re.findall(r"\| check \|.*?\n\n", TEXTS["docs/guides/troubleshooting.md"], re.DOTALL)
    assert re.findall(r"^\| ([a-z -]+?) \|", table, re.MULTILINE)[2:] == list(CHECKS)


def test_the_messages_of_the_troubleshooting_page_stand_in_the_code() -> None:
    sources = [*(ROOT / "src" / "strop").rglob("*.py"), ROOT / "Makefile"]
    texts = [re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in sources]
    sections = TEXTS["docs/guides/troubleshooting.md"].partition("## Setting up")[2]
    for row in re.findall(r"^\| (`.+?) \| ", sections, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", row):
            words = message.removeprefix("cannot learn: ")
            assert any(words in text for text in texts), f"no message says {message!r}"
