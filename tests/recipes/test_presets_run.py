"""Every preset runs from first stage to last on a tiny model, with nothing changed but model, files, sizes and lengths.

`make test-presets` also prints what was changed.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from presets import NAMES, ROOT, parsed, preset_path
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from strop.config import validate
from strop.pipeline.run import train
from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe, resolve
from strop.reports.trackers import Progress
from strop.rollout.prompt import load_prompt
from strop.run_directory import read_lines
from strop.stages.model import TinyModel, make_tiny_model
from strop.tasks.conversations import call_text

VLLM_PYTHON = Path(os.environ.get("STROP_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
_ROLLOUTS = {"rl": {"steps": 2, "tasks_per_step": 2, "group_size": 4}, "expert_iteration": {"steps": 2, "tasks_per_step": 2}}


def scaled_down(
    name: str, *, vllm: str = "", model: str, able: str, scorer: str, rows: str, said: str, results: str, judged: str
) -> dict[str, object]:
    """Keys and values for `--set`, by the stages that the preset has. What keeps right rollouts alone begins with `able`.

    Args:
        vllm: the interpreter of vLLM, for presets of that engine; "": they sample with the embedded one.
    """
    tree = parsed(name)
    kinds = {stage["kind"] for stage in tree["stages"].values()}
    sets: dict[str, object] = {"threads": 1, "engine.slots": 8, "engine.max_length": 2048}
    if "tasks" in tree:
        sets["tasks"] = of_files(tree["tasks"], rows)
    sets["sampling.max_tokens"] = 32
    if tree.get("engine", {}).get("kind") == "vllm":
        sets |= {"engine.python": vllm, "engine.eager": True} if vllm else {"engine": {"kind": "torch"}}
    if backend := tree.get("tools", {}).get("search", {}).get("backend"):
        local = backend | {"path": f"{rows}/corpus.jsonl", "index": f"{rows}/index"}
        sets["tools.search.backend"] = local if backend["kind"] == "bm25" else {"kind": "kept", "path": results}
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
            case "dpo":
                sizes = {"path": f"{judged}/dialogues.jsonl", "batch_size": 2, "test_share": 0.5, "validation.every_steps": 1}
            case "eval":
                sizes = {"num_tasks": 2, "k": min(2, stage["k"])}
            case "conversations":
                sizes = {"path": said}
            case "sft" | "distil":
                sizes = {"steps": 20, "epochs": 20, "batch_size": 2} | ({} if "data" in stage else {"num_demonstrations": 4})
                if "warmup_updates" in stage["trainer"]["optimizer"]:
                    sizes["trainer.optimizer.warmup_updates"] = 1
        if "row_length" in stage:
            sizes["row_length"] = 16
        if "updates_per_step" in stage:
            sizes["updates_per_step"] = min(2, stage["updates_per_step"])
        if "branching" in stage:
            sizes["branching.initial_rollouts"] = 2
        if "validation" in stage and stage["kind"] != "dpo":
            sizes |= {
                "validation.num_tasks": 2,
                "validation.every_steps": 1,
                "validation.k": min(2, stage["validation"].get("k", 1)),
            }
            if "tasks" in stage["validation"]:
                sets_of = stage["validation"]["tasks"]
                sizes["validation.tasks"] = {name: of_files(table, rows) for name, table in sets_of.items()}
        if "schedule" in stage:
            sizes["schedule"] = [sooner(entry, rows) for entry in stage["schedule"]]
        if "end_when" in stage:
            sizes |= {"steps": 3, "give_up_after": 9, "end_when": [rule | {"over_steps": 1} for rule in stage["end_when"]]}
        sizes |= {key: of_files(stage[key], rows) for key in ("truths", "tasks") if key in stage}
        if "max_tokens" in stage.get("sampling", {}):
            sizes["sampling.max_tokens"] = 32
        if "max_length" in stage.get("engine", {}):
            sizes["engine.max_length"] = 2048
        sets |= {f"stages.{stage_name}.{key}": value for key, value in sizes.items()}
    return sets


def of_files(table, rows):
    """The same columns, read from the file of `rows` with them; generated tasks stay what they are."""
    if table["kind"] == "mixture":
        return table | {"parts": {name: of_files(part, rows) for name, part in table["parts"].items()}}
    if table["kind"] not in ("hub", "jsonl", "parquet"):
        return table
    kind = "jsonl" if table["kind"] == "jsonl" else "parquet"
    path = f"{rows}/{table.get('dataset') or Path(table.get('path', table.get('name'))).stem}.{kind}"
    columns = {key: table[key] for key in ("dataset", "question", "answer", "facts", "bad_rows") if key in table}
    return {"kind": kind, "path": path, "test_path": path} | columns


def sooner(entry, rows):
    """The same change, in time for a stage of two steps."""
    sizes = {"at_step": 2, "at_update": 2, "every_updates": 2}
    changed = {key: sizes.get(key, value) for key, value in entry.items()}
    if "sampling" in entry:
        changed["sampling"] = entry["sampling"] | {"max_tokens": 48}
    if "tasks" in entry:
        changed["tasks"] = of_files(entry["tasks"], rows)
    return changed


def run_of(name: str, places: Mapping[str, str], *, vllm: str = "") -> Recipe:
    """Return a preset with other models and data, and fewer of everything."""
    sets = scaled_down(name, vllm=vllm, **places)
    return scaled(preset_path(name), [f"{key}={as_toml(value)}" for key, value in sets.items()])


def scaled(path: Path, sets: list[str]) -> Recipe:
    print(f"{path.stem} is scaled by", *sets, sep="\n    --set ")  # noqa: T201  (for `make test-presets`)
    return load_recipe(path, sets)


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(each) for each in value) + "]"
    return json.dumps(value)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random model whose tokenizer knows the prompts, rows to train on, and results of a search."""
    directory = tmp_path_factory.mktemp("small")
    texts = [message.text for prompt in PROMPTS for message in load_prompt(prompt).fill("1+1", [])]
    sizes = TinyModel(
        vocab_size=1024, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, max_length=4096, num_texts=10
    )
    make_tiny_model(sizes, texts, directory / "model", seed=0)
    call = call_text("python", {"code": "print(1+1)", "input": ""})
    turns = [("user", "1+1?"), ("assistant", call), ("tool", "2"), ("assistant", "So 2.")]
    said = [{"messages": [{"role": role, "content": text} for role, text in turns]}] * 4
    (directory / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    scorer = AutoModelForSequenceClassification.from_pretrained(directory / "model", num_labels=1, pad_token_id=0)
    scorer.save_pretrained(directory / "scorer")
    AutoTokenizer.from_pretrained(directory / "model").save_pretrained(directory / "scorer")
    for file, rows in rows_by_file().items():
        (directory / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / f"{file}.parquet")
    (directory / "results.json").write_text(json.dumps({"one": "1"}))
    passages = ("Paris is in France.", "Rome is in Italy.")
    (directory / "corpus.jsonl").write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
    for judged_on, preferences in preferences_by_what_is_judged().items():
        (directory / f"{judged_on}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in preferences))
    dialogues = [
        {
            name: f"\n\nHuman: What is {n}+1?\n\nAssistant: {said}" + "\n\nHuman: Sure?\n\nAssistant: Yes." * (n == 7)
            for name, said in (("chosen", f"It is {n + 1}."), ("rejected", "I do not know."))
        }
        for n in range(8)
    ]
    (directory / "dialogues.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dialogues))
    return {
        "model": str(directory / "model"),
        "able": str(able_model(directory)),
        "judged": str(directory),
        "scorer": str(directory / "scorer"),
        "said": str(directory / "said.jsonl"),
        "rows": str(directory),
        "results": str(directory / "results.json"),
    }


def rows_by_file() -> dict[str, list[dict[str, object]]]:
    """Eight sums, in the columns of each data set that presets name, and of each file that has none of these names."""
    sums = [(n, f"What is {n}+1?", str(n + 1)) for n in range(8)]
    said = [f"So. </think> <answer> {n + (n % 4 > 0)} </answer>" for n in range(8)]  # wrong in two of eight
    own = [{"problem": question, "answer": answer, "unique_id": str(n), "id": n} for n, question, answer in sums]
    plain = [{"question": question, "answer": answer, "response": said[n]} for n, question, answer in sums]
    verl = {"data_source": "mix", "ability": "math", "prompt": []}
    whole = load_prompt("r1_zero")
    kinds = ("reasoning", "helpful", "safety")
    return {
        **dict.fromkeys(("math500", "aime24", "aime25", "hmmt25", "math_12k", "math_lvl3to5_8k", "train"), own),
        "math": [{"problem": q, "level": "1", "type": "Algebra", "solution": rf"So $\boxed{{{a}}}$."} for _, q, a in sums],
        "gpqa-diamond": [
            {"Question": q, "Correct Answer": a, "Record ID": str(n)} | {f"Incorrect Answer {k}": f"-{k}" for k in (1, 2, 3)}
            for n, q, a in sums
        ],
        "dapo-math-17k-processed": [{**verl, "prompt": q, "solution": a, "extra_info": {"index": str(n)}} for n, q, a in sums],
        "apps": [
            {"problem_id": n, "question": q, "input_output": json.dumps({"inputs": ["1"], "outputs": [a]})} for n, q, a in sums
        ],
        "arpo-mix": [
            {**verl, "extra_info": {"index": n, "question": q}, "reward_model": {"ground_truth": a, "style": "rule"}}
            for n, q, a in sums
        ],
        "gaia": [{"task_id": str(n), "Question": q, "answer": a, "Level": 1} for n, q, a in sums],
        "strop": [
            {"id": str(n), "question": q, "answer": a, "source": "s", "facts": {"kind": kinds[n % 3]}} for n, q, a in sums
        ],
        "sft": [{"prompt": whole.fill(q, [])[0].text, "response": said[n]} for n, q, _ in sums],
        "ultrachat-train": [{"prompt": q, "response": said[n]} for n, q, _ in sums],
        **dict.fromkeys(("r1-cold-start", "r1-general-sft"), plain),
    }


def able_model(directory: Path) -> Path:
    """The small model after it has learnt the responses of the rows by heart, so that some of its rollouts are right."""
    tree = {
        "name": "able",
        "threads": 1,
        "prompt": "deepseek_r1_zero",
        "tasks": {"kind": "jsonl", "path": str(directory / "r1-cold-start.jsonl"), "facts": ["response"]},
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
    return asyncio.run(train(recipe, directory / "able", progress=Progress(), command="test")).run.stage("able").model


def preferences_by_what_is_judged() -> dict[str, list[dict[str, str]]]:
    """Twenty of each sort: pairs, of which a summary is judged, and single responses with a label."""
    prompts = [f"What is {n}+1?" for n in range(20)]
    pairs = [{"prompt": prompt, "chosen": "Two.", "rejected": "I would rather not say."} for prompt in prompts]
    labels = [("Two.", "safe"), ("I took it away.", "unsafe")]
    single = [{"prompt": prompt, "response": text, "label": label} for prompt in prompts[:10] for text, label in labels]
    return {"summary": pairs, "response": single}


# These are quick and reach most of what presets have: a filter, RoC, calls and an evaluation; a schedule, KL and scorers; and a
# whole program, with demonstrations, rejection sampling, a mix, reward models and exports.
PROMPTS = ("rstar2", "arpo", "r1_zero", "deepseek_r1_zero", "qwen_math")
QUICK = ("rstar2-stage3", "r1-rl2", "r1-pipeline")


# A server for each stage takes a minute: CI has one preset of ARPO and one of R1, `make test-presets` all of them.
IN_CI = ("arpo-deepsearch-8b-released", "r1-rl2")
# The RL stages of r1-pipeline are those of r1-rl1 and r1-rl2.
ON_VLLM = [name for name in NAMES if parsed(name).get("engine", {}).get("kind") == "vllm" and name != "r1-pipeline"]


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in IN_CI else pytest.mark.slow) for each in ON_VLLM])
def test_a_preset_runs_on_the_server_that_it_names(name, small, tmp_path):
    torch.set_num_threads(1)
    recipe = run_of(name, small, vllm=str(VLLM_PYTHON))
    assert recipe.engine.kind == "vllm"
    result = asyncio.run(train(recipe, tmp_path / "run", progress=Progress(), command="test"))
    steps = [line for line in read_lines(result.run.metrics) if line["stage"] == "rl"]
    assert [step["rollout/void_fraction"] for step in steps] == [0, 0]
    assert all((tmp_path / "run" / "stages" / stage / "done.json").exists() for stage in recipe.stages)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_trainer_next_to_a_vllm_server_makes_two_steps_of_the_courses_grpo(tmp_path):
    torch.set_num_threads(1)
    sizes = {"sft.num_demonstrations": 64, "sft.steps": 40, "rl.steps": 2}
    sizes |= {"rl.validation.num_tasks": 4, "rl.validation.every_steps": 1}
    sets = ["threads=1", f"engine.python={VLLM_PYTHON}", *(f"stages.{key}={value}" for key, value in sizes.items())]
    recipe = scaled(ROOT / "recipes" / "cs336-server.toml", sets)
    result = asyncio.run(train(recipe, tmp_path / "run", progress=Progress(), command="test", only=("rl",)))
    steps = [line for line in read_lines(result.run.metrics) if line["stage"] == "rl"]
    assert [step["rollout/void_fraction"] for step in steps] == [0, 0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in NAMES if each not in QUICK)])
def test_a_preset_runs_from_its_first_stage_to_its_last(name, small, tmp_path):
    torch.set_num_threads(1)
    recipe = run_of(name, small)
    result = asyncio.run(train(recipe, tmp_path / "run", progress=Progress(), command="test"))
    for stage_name, stage in recipe.stages.items():
        assert (tmp_path / "run" / "stages" / stage_name / "done.json").exists(), stage_name
        if stage.kind in ("rl", "expert_iteration", "sft", "distil"):
            steps = [line for line in read_lines(result.run.metrics) if line["stage"] == stage_name]
            assert len(steps) == stage.config.steps, stage_name
