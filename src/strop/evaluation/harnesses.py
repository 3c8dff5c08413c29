"""Other harnesses against a served model: the commands that run them, and the import of their result files.

`bfcl-eval` and `lm-eval` run in environments of their own and judge by their own rules. Commands and files are those of
`bfcl-eval` 2026.3.23 (BFCL v4) and 2025.8.6.2 (v3) and of `lm-eval` 0.4.13, which were run against a served model.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from strop.errors import ConfigError, RunError
from strop.evaluation.statistics import unseen_share
from strop.run_directory import read_json, read_lines

_SCORE_FILE = re.compile(r"BFCL_(?P<version>v\d+)_(?P<category>\w+)_score\.json")
# Folders between a model's folder and its files: MODEL/non_live/FILE, MODEL/agentic/memory/kv/FILE; none in older releases.
_BFCL_GROUPS = ("live", "non_live", "multi_turn", "agentic", "format_sensitivity", "memory", "kv", "vector", "rec_sum", "score")
_NO_ANSWER = "Error during inference:"
_LM_EVAL_METRICS = ("prompt_level_strict_acc", "acc", "exact_match", "acc_norm", "pass@1")  # the first is IFEval's


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One benchmark's `result.json`, and its problems if the harness lists them all."""

    name: str
    result: Mapping[str, Any]
    problems: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """One entry for each model and benchmark, and notes on what was left out or is unreliable."""

    found: Sequence[Found]
    notes: Sequence[str]


def bfcl_commands(address: str, *, model: str, tokenizer: Path, categories: Sequence[str], out: Path) -> list[str]:
    """Return shell commands that generate with a running server, then judge. `model` is a name that `bfcl models` lists.

    Args:
        address: http://host:port of an OpenAI-compatible server, which must call its model by the absolute path of `tokenizer`.
        tokenizer: the model directory; BFCL renders prompts itself.
        categories: of tests, as in multi_turn or live_simple.
    """
    url = urlsplit(address)
    if url.scheme != "http" or not url.hostname or not url.port:
        raise ConfigError(f"{address!r} is no address that bfcl-eval accepts. Write http://host:port, without a path.")
    folder = out.absolute()
    shared = ["--model", model, "--test-category", ",".join(categories), "--result-dir", str(folder / "result")]
    place = {"LOCAL_SERVER_ENDPOINT": url.hostname, "LOCAL_SERVER_PORT": str(url.port)}
    place |= {"VLLM_ENDPOINT": url.hostname, "VLLM_PORT": str(url.port)}  # names in releases before 2025-10
    variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in place.items())
    generate = ["bfcl", "generate", *shared, "--skip-server-setup", "--local-model-path", str(tokenizer.absolute())]
    judge = ["bfcl", "evaluate", *shared, "--score-dir", str(folder / "score")]
    return [f"{variables} {shlex.join(generate)}", shlex.join(judge)]


def lm_eval_command(address: str, *, model: str, tasks: Sequence[str], out: Path) -> str:
    """Return the shell command that evaluates a chat model behind an OpenAI-compatible server and keeps every sample."""
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{address!r} is no http or https address. Write http://host:port.")
    if bad := [each for each in (model, *tasks) if "," in each or not each]:
        raise ConfigError(f"{bad[0]!r} cannot be a name here: lm-eval separates names by commas.")
    base = f"{address.rstrip('/')}/v1/chat/completions"
    arguments = f"model={model},base_url={base},num_concurrent=16,max_retries=3,tokenized_requests=False"
    words = ["lm_eval", "--model", "local-chat-completions", "--model_args", arguments, "--tasks", ",".join(tasks)]
    return shlex.join([*words, "--apply_chat_template", "--log_samples", "--output_path", str(out.absolute())])


def read_bfcl(directory: Path) -> Imported:
    """Return one result for each model and category, from the score files below `directory`.

    The files list only failures, so there are no problems. BFCL judges a request without an answer as a wrong one; such
    failures are counted (`num_requests_failed`) and noted.

    Raises:
        RunError: there is no score file, one is damaged, or two have the same model, version and category.
    """
    paths = [path for path in sorted(directory.rglob("*_score.json")) if _SCORE_FILE.fullmatch(path.name)]
    if not paths:
        raise RunError(f"{directory}: no BFCL_v*_score.json below. Give the folder that `bfcl evaluate --score-dir` wrote.")
    found: dict[str, tuple[Path, Found]] = {}
    notes = []
    for path in paths:
        each = _bfcl_category(path)
        if each.name in found:
            other = found[each.name][0]
            raise RunError(f"{path} and {other} have the same model, version and category. Give the folder of one.")
        found[each.name] = path, each
        if num := each.result["num_requests_failed"]:
            notes.append(
                f"{path}: {num} of {each.result['num_tasks']} got no answer from the server; BFCL counts them as wrong"
            )
    return Imported(found=[each for _, each in found.values()], notes=notes)


def _bfcl_category(path: Path) -> Found:
    match = _SCORE_FILE.fullmatch(path.name)
    assert match is not None
    version, category = match["version"], match["category"]  # v3 and v4 have different problems under one name
    summary, *failures = read_lines(path) or [{}]
    if not {"accuracy", "total_count"} <= summary.keys():
        raise RunError(f"{path}: its first line has no accuracy and total_count. `bfcl evaluate` did not write it.")
    model = next((part for part in reversed(path.absolute().parent.parts) if part not in _BFCL_GROUPS), "unnamed")
    # Failures with one turn and with several have different names for the answer.
    answers = [each.get("result", each.get("model_result_raw", each.get("model_result"))) for each in failures]
    num_failed = sum(isinstance(each, str) and each.startswith(_NO_ANSWER) for each in answers)
    result = _result(
        harness="bfcl-eval",
        benchmark=f"bfcl-{version}/{category}",
        run=model,
        accuracy=float(summary["accuracy"]),
        num_tasks=int(summary["total_count"]),
    )
    return Found(name=f"{model}-{version}-{category}", result=result | {"num_requests_failed": num_failed}, problems=())


def read_lm_eval(directory: Path) -> Imported:
    """Return one result for each model and task, from the newest results_*.json below `directory` that has it.

    Problems are read where samples were kept. Tasks without a metric that is a share and better when higher are left out.

    Raises:
        RunError: there is no such file, one is damaged, or none has a metric that can be used.
    """
    paths = sorted(directory.rglob("results_*.json"), key=lambda path: path.name, reverse=True)
    if not paths:
        raise RunError(f"{directory}: no results_*.json below. Give the folder that `lm_eval --output_path` wrote.")
    found: dict[str, Found] = {}
    notes = []
    for path in paths:
        tree = read_json(path)
        if not isinstance(tree, dict) or not isinstance(tree.get("results"), dict):
            raise RunError(f"{path}: no table 'results'. lm-eval did not write it.")
        model = str(tree.get("model_name") or path.parent.name).replace("/", "__")
        for task, metrics in tree["results"].items():
            is_empty_group = (tree.get("group_subtasks") or {}).get(task) and not _shares(metrics)
            if is_empty_group or f"{model}-{task}" in found:
                continue
            try:
                found[f"{model}-{task}"] = _lm_eval_task(task, metrics, tree, model, path)
            except RunError as error:
                notes.append(f"left out: {error}")
    if not found:
        raise RunError(f"{directory}: no result of lm-eval that can be used: {'; '.join(notes) or 'its files name no task'}")
    return Imported(found=[*found.values()], notes=notes)


def _lm_eval_task(task: str, metrics: Mapping[str, Any], tree: Mapping[str, Any], model: str, path: Path) -> Found:
    shares = _shares(metrics)
    rises = tree.get("higher_is_better", {}).get(task) or {}
    rising = [key for key in shares if rises.get(key.partition(",")[0]) is not False]
    preferred = [key for name in _LM_EVAL_METRICS for key in rising if key.partition(",")[0] == name]
    headline = next(iter([*preferred, *rising]), None)
    if headline is None:
        raise RunError(f"{path}: task {task!r} has no metric that is better when higher. It has {', '.join(metrics)}.")
    metric, _, answer_filter = headline.partition(",")
    problems = _lm_eval_samples(path, task, metric, answer_filter)
    # A group has no entry of its own in n-samples.
    num = tree.get("n-samples", {}).get(task, {}).get("effective") or metrics.get("sample_len") or len(problems)
    error = metrics.get(f"{metric}_stderr,{answer_filter}")
    result = _result(
        harness="lm-eval",
        benchmark=task,
        run=model,
        accuracy=shares[headline],
        num_tasks=int(num),
        standard_error=error if isinstance(error, int | float) else None,
    )
    names = {key: key.removesuffix(",none") for key in shares}
    about = {"metric": names[headline], "figures": {names[key]: value for key, value in shares.items()}}
    return Found(name=f"{model}-{task}", result=result | about, problems=problems)


def _shares(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers by METRIC,FILTER without standard errors. One metric has a number for each filter of answers."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float) and "," in key and not key.partition(",")[0].endswith("_stderr")
    }


def _lm_eval_samples(path: Path, task: str, metric: str, answer_filter: str) -> list[dict[str, Any]]:
    """Return the problems in the samples of the same run, or [] if a verdict is not 0 or 1."""
    time = path.stem.partition("_")[2]
    samples = read_lines(path.with_name(f"samples_{task}_{time}.jsonl"))
    samples = [line for line in samples if line.get("filter", answer_filter) == answer_filter]
    if any(line.get(metric) not in (0, 1) for line in samples):
        return []
    return [
        {
            "id": str(line.get("doc_id", at)),
            "question": str(line["doc"].get("prompt") or line["doc"].get("question") or json.dumps(line["doc"])),
            "answer": str(line.get("target", "")),
            "correct": [int(line[metric])],
            "parts": {},
            "num_void": 0,
        }
        for at, line in enumerate(samples)
    ]


def _result(
    *, harness: str, benchmark: str, run: str, accuracy: float, num_tasks: int, standard_error: float | None = None
) -> dict[str, Any]:
    """Return a `result.json`, with the interval from the harness's standard error, else from that of a share.

    Where all are right, or all wrong, both errors are 0, so the interval is the exact binomial bound.
    """
    if not 0 <= accuracy <= 1:
        raise RunError(f"{harness} reports an accuracy of {accuracy} for {benchmark!r}, which is not between 0 and 1.")
    num = max(1, num_tasks)
    if accuracy in (0, 1):
        reach = unseen_share(num)
    else:
        reach = 1.96 * ((accuracy * (1 - accuracy) / num) ** 0.5 if standard_error is None else standard_error)
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
