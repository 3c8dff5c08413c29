"""Other harnesses against a served model: the commands that run them, and their result files read into ours.

Thin on purpose: `bfcl-eval` and `lm-eval` bring environments of their own, and judge by their own rules. Commands and files
are those that their publishers document; neither harness was run here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from strop.errors import ConfigError, RunError
from strop.runs import read_json, read_lines

_SCORE_FILE = re.compile(r"BFCL_v\d+_(?P<category>\w+)_score\.json")
_SAMPLES = "samples_{task}_*.jsonl"
_HEADLINE = {"ifeval": "prompt_level_strict_acc"}
_USUAL = ("acc", "exact_match", "acc_norm", "pass@1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Words to run in a shell of the harness's own environment, with variables to set."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One benchmark's `result.json`, and its problems where the harness tells them all."""

    name: str
    result: Mapping[str, Any]
    problems: Sequence[Mapping[str, Any]]


def bfcl_commands(address: str, *, model: str, tokenizer: Path, categories: Sequence[str], out: Path) -> list[Command]:
    """Generate with a server that runs already, then judge. `model` is a name that `bfcl models` lists.

    Args:
        address: http://host:port of an OpenAI-compatible server.
        tokenizer: the model directory; BFCL renders prompts itself.
        categories: of tests, as in multi_turn or live_simple.
    """
    url = urlsplit(address)
    if url.scheme != "http" or not url.hostname or not url.port:
        raise ConfigError(f"{address!r} is no address that bfcl-eval can be given. Write http://host:port, without a path.")
    result, score = str(out.absolute() / "result"), str(out.absolute() / "score")
    shared = ("--model", model, "--test-category", ",".join(categories), "--result-dir", result)
    served = {"LOCAL_SERVER_ENDPOINT": url.hostname, "LOCAL_SERVER_PORT": str(url.port)}
    # Releases before 2025-10 read these names.
    served |= {"VLLM_ENDPOINT": url.hostname, "VLLM_PORT": str(url.port)}
    generate = ("bfcl", "generate", *shared, "--skip-server-setup", "--local-model-path", str(tokenizer.absolute()))
    judge = ("bfcl", "evaluate", *shared, "--score-dir", score)
    return [Command(words=generate, environment=served), Command(words=judge, environment={})]


def lm_eval_command(address: str, *, model: str, tasks: Sequence[str], out: Path, num_concurrent: int = 16) -> Command:
    """Evaluate a chat model behind an OpenAI-compatible server, with every sample kept; its names in ours are kept, too."""
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{address!r} is no http or https address. Write http://host:port.")
    if bad := [each for each in (model, *tasks) if "," in each or not each]:
        raise ConfigError(f"{bad[0]!r} cannot be a name here: lm-eval separates names by commas.")
    base = f"{address.rstrip('/')}/v1/chat/completions"
    arguments = f"model={model},base_url={base},num_concurrent={num_concurrent},max_retries=3,tokenized_requests=False"
    words = ("lm_eval", "--model", "local-chat-completions", "--model_args", arguments, "--tasks", ",".join(tasks))
    return Command(
        words=(*words, "--apply_chat_template", "--log_samples", "--output_path", str(out.absolute())), environment={}
    )


def read_bfcl(directory: Path) -> list[Found]:
    """One result a category, from the score files below `directory`; they name only what failed, so there are no problems.

    Raises:
        RunError: there is no score file, or one begins with no summary.
    """
    paths = [path for path in sorted(directory.rglob("*_score.json")) if _SCORE_FILE.fullmatch(path.name)]
    if not paths:
        raise RunError(
            f"{directory}: no BFCL_v*_score.json lies below. Give the folder that `bfcl evaluate --score-dir` wrote."
        )
    found = []
    for path in paths:
        category = _SCORE_FILE.fullmatch(path.name)
        assert category is not None
        summary = _first_line(path)
        model = next((part for part in reversed(path.relative_to(directory).parts[:-1]) if part not in _GROUPS), directory.name)
        found.append(
            Found(
                name=f"{model}-{category['category']}",
                result=_result(
                    harness="bfcl-eval",
                    benchmark=f"bfcl/{category['category']}",
                    run=model,
                    accuracy=float(summary["accuracy"]),
                    num_tasks=int(summary["total_count"]),
                ),
                problems=(),
            )
        )
    return found


_GROUPS = ("live", "non_live", "multi_turn", "agentic", "format_sensitivity", "memory", "score")
"""Folders of later releases between a model's folder and its files."""


def read_lm_eval(directory: Path) -> list[Found]:
    """One result a task, from the newest results_*.json below `directory`, with its problems where samples were kept.

    Raises:
        RunError: there is no such file, or a task in it has no figure that is a share.
    """
    paths = sorted(directory.rglob("results_*.json"), key=lambda path: path.name)
    if not paths:
        raise RunError(f"{directory}: no results_*.json lies below. Give the folder that `lm_eval --output_path` wrote.")
    tree = read_json(paths[-1])
    if not isinstance(tree, dict) or not isinstance(tree.get("results"), dict):
        raise RunError(f"{paths[-1]}: no table 'results'. It is not what lm-eval writes.")
    model = str(tree.get("model_name") or paths[-1].parent.name)
    groups = tree.get("group_subtasks") or {}
    # A group that adds nothing up stands among the results by its name alone; its tasks stand there, too.
    tasks = {task: figures for task, figures in tree["results"].items() if _figures(figures) or not groups.get(task)}
    return [_of_task(task, figures, tree, model, paths[-1]) for task, figures in tasks.items()]


def _of_task(task: str, figures: Mapping[str, Any], tree: Mapping[str, Any], model: str, path: Path) -> Found:
    shares = _figures(figures)
    preferred = [key for name in (_HEADLINE.get(task, ""), *_USUAL) for key in shares if key.partition(",")[0] == name]
    headline = next(iter([*preferred, *shares]), None)
    if headline is None:
        raise RunError(f"{path}: task {task!r} has no figure. It has {', '.join(figures) or 'nothing'}.")
    metric, _, answer_filter = headline.partition(",")
    error = figures.get(f"{metric}_stderr,{answer_filter}")
    problems = _samples(path, task, metric, answer_filter)
    num = tree.get("n-samples", {}).get(task, {}).get("effective", len(problems))
    result = _result(
        harness="lm-eval",
        benchmark=task,
        run=model.replace("/", "__"),
        accuracy=shares[headline],
        num_tasks=int(num),
        reach=1.96 * error if isinstance(error, int | float) else None,
    )
    told = {"metric": _plain(headline), "figures": {_plain(key): value for key, value in shares.items()}}
    return Found(name=f"{result['run']}-{task}", result=result | told, problems=problems)


def _figures(figures: Mapping[str, Any]) -> dict[str, float]:
    """Those of a task by METRIC,FILTER, errors left away: one metric has as many figures as there are filters of answers."""
    return {
        key: float(value)
        for key, value in figures.items()
        if isinstance(value, int | float) and "," in key and not key.partition(",")[0].endswith("_stderr")
    }


def _plain(key: str) -> str:
    """METRIC where there is no filter, which lm-eval calls none."""
    return key.removesuffix(",none")


def _samples(path: Path, task: str, metric: str, answer_filter: str) -> list[dict[str, Any]]:
    """The problems that were tried, by the samples of the same time; [] where a verdict is no yes or no."""
    written = path.stem.partition("_")[2]
    paths = [each for each in sorted(path.parent.glob(_SAMPLES.format(task=task))) if each.stem.endswith(written)]
    problems: list[dict[str, Any]] = []
    for line in read_lines(paths[-1]) if paths else []:
        if line.get("filter", answer_filter) != answer_filter:
            continue  # the same attempt again, its answer read in another way
        verdict = line.get(metric)
        if not isinstance(verdict, bool | int | float) or verdict not in (0, 1):
            return []
        question = line.get("doc", {}).get("prompt") or line.get("doc", {}).get("question") or json.dumps(line.get("doc"))
        problems.append(
            {
                "id": str(line.get("doc_id", len(problems))),
                "question": str(question),
                "answer": str(line.get("target", "")),
                "correct": [int(verdict)],
                "parts": {},
                "num_void": 0,
            }
        )
    return problems


def _result(
    *, harness: str, benchmark: str, run: str, accuracy: float, num_tasks: int, reach: float | None = None
) -> dict[str, Any]:
    """As ours, with the interval by the harness's standard error, else the normal one of a share."""
    if not 0 <= accuracy <= 1:
        raise RunError(
            f"{harness} tells an accuracy of {accuracy} for {benchmark!r}, which is no share. Is it another version?"
        )
    if reach is None:
        reach = 1.96 * (accuracy * (1 - accuracy) / max(1, num_tasks)) ** 0.5
    return {
        "harness": harness,
        "benchmark": benchmark,
        "run": run,
        "num_tasks": num_tasks,
        "k": 1,
        "accuracy": accuracy,
        "accuracy_low": max(0.0, accuracy - reach),
        "accuracy_high": min(1.0, accuracy + reach),
    }


def _first_line(path: Path) -> Mapping[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            summary = json.loads(file.readline())
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: its first line is no JSON ({error}). Run `bfcl evaluate` again.") from error
    if not isinstance(summary, dict) or not {"accuracy", "total_count"} <= summary.keys():
        raise RunError(f"{path}: its first line has no accuracy and total_count. It is not what `bfcl evaluate` writes.")
    return summary
