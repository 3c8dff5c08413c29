"""Every preset runs from first stage to last on a tiny model, with nothing changed but model, data, sizes and lengths."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from presets import NAMES, differing, parsed, preset_path, resolved
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from strop.config import validate
from strop.pipelines.load import load_recipe
from strop.pipelines.recipe import Recipe, TinyModel, resolve
from strop.pipelines.tiny_model import make_tiny_model
from strop.pipelines.train import train
from strop.reports.progress import Silent
from strop.rollout.prompt import load_prompt
from strop.runs import read_lines
from strop.tasks.conversations import call_text

_STAGE, _ENTRY = r"stages\.\w+\.", r"stages\.\w+\.schedule\[\d+\]\."
ALLOWED = {
    _STAGE + r"path": "the model; of conversations and preferences the data",
    _STAGE + r"reward\.parts\.\w+\.scorer\.path": "the model that judges",
    rf"({_STAGE}|{_ENTRY})tasks\.(kind|path|test_path|dataset|name|question|answer|facts)": "the data: rows of a file",
    r"tools\.search\.backend\.\w+": "the data that a search finds: kept results, whose table is another one than a service's",
    _STAGE + r"(steps|batch_size|num_demonstrations|num_tasks|k)": "sizes",
    _STAGE + r"counts\.\w+": "sizes of a mix",
    _STAGE + r"(tasks_per_step|group_size|updates_per_step|branching\.initial_rollouts)": "sizes of a step",
    _STAGE + r"validation\.(num_tasks|every_steps)": "sizes",
    r"engine\.max_length|" + _STAGE + r"sampling\.max_tokens": "lengths in tokens",
    _STAGE + r"reward\.parts\.\w+\.(max|cache)_tokens": "lengths in tokens, which follow sampling.max_tokens",
    _ENTRY + r"sampling\.max_tokens": "lengths in tokens",
    _ENTRY + r"(at_step|at_update|every_updates)": "lengths in steps and updates: as many as a stage of two steps has",
    _STAGE + r"trainer\.optimizer\.warmup_updates": "a length in updates",
    r"threads|engine\.slots": "the size of the machine, of which a preset says nothing",
}
"""What may differ between a preset and what is run of it here, leaf by leaf of the resolved recipes, and why."""
_ROLLOUTS = {"rl": {"steps": 1, "tasks_per_step": 2, "group_size": 4}, "expert_iteration": {"steps": 1, "tasks_per_step": 2}}
NOWHERE = {"model": "m", "able": "a", "scorer": "q", "rows": "r", "said": "c", "results": "s", "judged": "j"}
"""Places for a recipe that is looked at, and not run."""


def scaled_down(
    name: str, *, model: str, able: str, scorer: str, rows: str, said: str, results: str, judged: str
) -> dict[str, object]:
    """Keys and values for `--set`, by the stages that the preset has. What keeps right rollouts alone begins with `able`."""
    tree = parsed(name)
    kinds = {stage["kind"] for stage in tree["stages"].values()}
    data = {"kind": "jsonl", "path": rows, "test_path": rows, "facts": ["response"]}
    sets: dict[str, object] = {"threads": 1, "tasks": data, "engine.slots": 8, "engine.max_length": 2048}
    sets["sampling.max_tokens"] = 32
    if "search" in tree.get("tools", {}):
        sets["tools.search.backend"] = {"kind": "kept", "path": results}
    if "overlong" in tree.get("reward", {}).get("parts", {}):
        sets |= {"reward.parts.overlong.max_tokens": 32, "reward.parts.overlong.cache_tokens": 8}
    for part, keys in tree.get("reward", {}).get("parts", {}).items():
        if "scorer" in keys:
            sets[f"reward.parts.{part}.scorer.path"] = scorer
    for stage_name, stage in tree["stages"].items():
        sizes: dict[str, object] = dict(_ROLLOUTS.get(stage["kind"], {}))
        match stage["kind"]:
            case "model":
                sizes = {"path": able if "rejection_sampling" in kinds else model}
            case "filter":
                sizes = {"num_tasks": 2}
            case "rejection_sampling":
                sizes = {"num_tasks": 8, "k": 4}
            case "demonstrations":
                sizes = {"num_demonstrations": 4}
            case "mix":
                sizes = {f"counts.{each}": 2 for each in stage["counts"]}
            case "reward_model":
                sizes = {"path": f"{judged}/{stage['judged_on']}.jsonl", "batch_size": 2}
            case "eval":
                sizes = {"num_tasks": 2, "k": min(2, stage["k"])}
            case "conversations":
                sizes = {"path": said}
            case "sft" | "distil":
                sizes = {"steps": 2, "batch_size": 2} | ({} if "data" in stage else {"num_demonstrations": 4})
                if "warmup_updates" in stage["trainer"]["optimizer"]:
                    sizes["trainer.optimizer.warmup_updates"] = 1
        if "updates_per_step" in stage:
            sizes["updates_per_step"] = min(2, stage["updates_per_step"])
        if "branching" in stage:
            sizes["branching.initial_rollouts"] = 2
        if "validation" in stage:
            sizes |= {"validation.num_tasks": 2, "validation.every_steps": 1}
        if "schedule" in stage:
            sizes |= {"steps": 2, "schedule": [sooner(entry, data) for entry in stage["schedule"]]}
        if "tasks" in stage:
            sizes["tasks"] = data
        if "max_tokens" in stage.get("sampling", {}):
            sizes["sampling.max_tokens"] = 32
        sets |= {f"stages.{stage_name}.{key}": value for key, value in sizes.items()}
    return sets


def sooner(entry, data):
    """The same change, in time for a stage of two steps; other tasks are the same ones, of several kinds."""
    sizes = {"at_step": 2, "at_update": 2, "every_updates": 2}
    changed = {key: sizes.get(key, value) for key, value in entry.items()}
    if "sampling" in entry:
        changed["sampling"] = entry["sampling"] | {"max_tokens": 48}
    if "tasks" in entry:
        changed["tasks"] = data | {"facts": [*data["facts"], "kind"]}
    return changed


def run_of(name: str, places: Mapping[str, str], *further: str) -> Recipe:
    """What is run of a preset: itself with other models and data, fewer of everything, and `further` words of `--set`."""
    sets = scaled_down(name, **places)
    return load_recipe(preset_path(name), [*(f"{key}={as_toml(value)}" for key, value in sets.items()), *further])


def forbidden(changed: Iterable[str]) -> list[str]:
    """Those of the leaves that are neither model nor data, size nor length."""
    return [path for path in changed if not re.fullmatch("|".join(ALLOWED), path)]


@cache
def changes(name: str) -> list[str]:
    """Every leaf in which what is run of a preset differs from it."""
    return differing(as_json(resolved(name)), as_json(run_of(name, NOWHERE)))


def as_json(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json")


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(each) for each in value) + "]"
    return json.dumps(value)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_run_of_a_preset_differs_from_it_in_model_data_sizes_and_lengths_alone(name):
    assert forbidden(changes(name)) == []


@pytest.mark.parametrize("pattern", ALLOWED)
def test_what_may_differ_does_so_in_some_preset(pattern):
    assert any(re.fullmatch(pattern, path) for name in NAMES for path in changes(name))


@pytest.mark.parametrize(
    ("name", "override", "found"),
    [
        ("rstar2-paper", "stages.rl.method.clip_high=0.5", ["stages.rl.method.clip_high"]),
        ("rstar2-paper", "stages.rl.trainer.optimizer.lr=1.0", ["stages.rl.trainer.optimizer.lr"]),
        ("rstar2-paper", "sampling.temperature=0.5", ["stages.base.sampling.temperature", "stages.rl.sampling.temperature"]),
        ("rstar2-paper", "stages.rl.limits.max_turns=3", ["stages.rl.limits.max_turns"]),
        ("rstar2-paper", "tasks.limit=9", ["stages.base.tasks.limit", "stages.rl.tasks.limit"]),
        (
            "rstar2-paper",
            "stages.rl.schedule=[{at_step=2, reset_optimizer=true, sampling={max_tokens=48, temperature=0.5}}]",
            ["stages.rl.schedule[0].reset_optimizer", "stages.rl.schedule[0].sampling.temperature"],
        ),
        (
            "r1-rl1",
            "stages.rl.schedule=[]",
            ["stages.rl.schedule", "stages.rl.schedule[0].refresh_reference", "stages.rl.schedule[0].reset_optimizer"],
        ),
    ],
)
def test_what_makes_a_method_may_not_be_changed_to_make_a_preset_run(name, override, found):
    changed = differing(as_json(resolved(name)), as_json(run_of(name, NOWHERE, override)))
    assert sorted(forbidden(changed)) == found


@pytest.mark.parametrize("name", NAMES)
def test_a_smaller_schedule_changes_the_same_keys(name):
    sets = scaled_down(name, **NOWHERE)
    for stage_name, stage in parsed(name)["stages"].items():
        for before, after in zip(stage.get("schedule", []), sets.get(f"stages.{stage_name}.schedule", []), strict=True):
            assert list(before) == list(after)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random model whose tokenizer knows the prompts, rows to train on, and results of a search."""
    directory = tmp_path_factory.mktemp("small")
    texts = [
        message.text for prompt in ("rstar2", "arpo", "r1_zero", "qwen_math") for message in load_prompt(prompt).fill("1+1", [])
    ]
    sizes = TinyModel(
        vocab_size=1024, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, max_length=4096, num_texts=10
    )
    make_tiny_model(sizes, texts, directory / "model", seed=0)
    rows = [
        {
            "question": f"What is {n}+1?",
            "prompt": f"What is {n}+1?",
            "answer": str(n + 1),
            "response": f"So. </think> <answer> {n + (n % 4 > 0)} </answer>",  # wrong in two of eight
            "kind": ("reasoning", "helpful", "safety")[n % 3],
        }
        for n in range(8)
    ]
    call = call_text("python", {"code": "print(1+1)", "input": ""})
    turns = [("user", "1+1?"), ("assistant", call), ("tool", "2"), ("assistant", "So 2.")]
    said = [{"messages": [{"role": role, "content": text} for role, text in turns]}] * 4
    (directory / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    scorer = AutoModelForSequenceClassification.from_pretrained(directory / "model", num_labels=1, pad_token_id=0)
    scorer.save_pretrained(directory / "scorer")
    AutoTokenizer.from_pretrained(directory / "model").save_pretrained(directory / "scorer")
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "results.json").write_text(json.dumps({"one": "1"}))
    for judged_on, preferences in preferences_by_what_is_judged().items():
        (directory / f"{judged_on}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in preferences))
    return {
        "model": str(directory / "model"),
        "able": str(able_model(directory)),
        "judged": str(directory),
        "scorer": str(directory / "scorer"),
        "said": str(directory / "said.jsonl"),
        "rows": str(directory / "rows.jsonl"),
        "results": str(directory / "results.json"),
    }


def able_model(directory: Path) -> Path:
    """The small model after it has learnt the responses of the rows by heart, so that some of its rollouts are right."""
    tree = {
        "name": "able",
        "threads": 1,
        "prompt": "r1_zero",
        "tasks": {"kind": "jsonl", "path": str(directory / "rows.jsonl"), "facts": ["response"]},
        "stages": {
            "base": {"kind": "model", "path": str(directory / "model")},
            "able": {
                "kind": "sft",
                "init": "base",
                "demonstrator": {"kind": "recorded"},
                "num_demonstrations": 8,
                "steps": 80,
                "batch_size": 8,
                "trainer": {"optimizer": {"lr": 1e-2}},
            },
        },
    }
    recipe = validate(Recipe, resolve(tree), place="able")
    return asyncio.run(train(recipe, directory / "able", progress=Silent(), command="test")).run.stage("able").model


def preferences_by_what_is_judged() -> dict[str, list[dict[str, str]]]:
    """Twenty of each sort: pairs, of which a summary is judged, and single responses with a label."""
    prompts = [f"What is {n}+1?" for n in range(20)]
    pairs = [{"prompt": prompt, "chosen": "Two.", "rejected": "I would rather not say."} for prompt in prompts]
    labels = [("Two.", "safe"), ("I took it away.", "unsafe")]
    single = [{"prompt": prompt, "response": text, "label": label} for prompt in prompts[:10] for text, label in labels]
    return {"summary": pairs, "response": single}


# These are quick and reach most of what presets have: a filter, RoC, calls and an evaluation; a schedule, KL and scorers; and a
# whole program, with demonstrations, rejection sampling, a mix, reward models and exports.
QUICK = ("rstar2-stage3", "r1-rl2", "r1-pipeline")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in NAMES if each not in QUICK)])
def test_a_preset_runs_from_its_first_stage_to_its_last(name, small, tmp_path):
    torch.set_num_threads(1)
    recipe = run_of(name, small)
    result = asyncio.run(train(recipe, tmp_path / "run", progress=Silent(), command="test"))
    for stage_name, stage in recipe.stages.items():
        assert (tmp_path / "run" / "stages" / stage_name / "done.json").exists(), stage_name
        if stage.kind in ("rl", "expert_iteration", "sft", "distil"):
            steps = [line for line in read_lines(result.run.metrics) if line["stage"] == stage_name]
            assert len(steps) == stage.steps, stage_name
