"""Other harnesses against a served model: the commands that run them, and their result files read into ours.

Thin on purpose: `bfcl-eval` and `lm-eval` bring environments of their own, and judge by their own rules. Commands and files
are those of `bfcl-eval` 2026.3.23 (BFCL v4) and 2025.8.6.2 (v3) and of `lm-eval` 0.4.13, which were run against a served model;
docs/evaluation.md says how far.
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
from strop.evaluation.statistics import unseen_share
from strop.runs import read_json, read_lines

_SCORE_FILE = re.compile(r"BFCL_(?P<version>v\d+)_(?P<category>\w+)_score\.json")
_NO_ANSWER = "Error during inference:"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Harvest:
    """What a harness's files say, one entry a model and benchmark; and notes on what is left out or not to be relied on."""

    found: Sequence[Found]
    notes: Sequence[str]


def bfcl_commands(address: str, *, model: str, tokenizer: Path, categories: Sequence[str], out: Path) -> list[Command]:
    """Generate with a server that runs already, then judge. `model` is a name that `bfcl models` lists.

    Args:
        address: http://host:port of an OpenAI-compatible server, which must call its model by the absolute path of `tokenizer`.
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


def read_bfcl(directory: Path) -> Harvest:
    """One result a model and category, from the score files below `directory`.

    They name only what failed, so there are no problems. A request without an answer is a wrong call to BFCL, or a right
    silence where nothing is to be called; such are counted (`num_requests_failed`), and noted.

    Raises:
        RunError: there is no score file, one begins with no summary, or two tell of the same model, version and category.
    """
    paths = [path for path in sorted(directory.rglob("*_score.json")) if _SCORE_FILE.fullmatch(path.name)]
    if not paths:
        raise RunError(
            f"{directory}: no BFCL_v*_score.json lies below. Give the folder that `bfcl evaluate --score-dir` wrote."
        )
    found: dict[str, Found] = {}
    origins: dict[str, Path] = {}
    for path in paths:
        each = _of_category(path)
        if each.name in found:
            raise RunError(
                f"{path} and {origins[each.name]} tell of the same model, version and category. Give the folder of one alone."
            )
        found[each.name], origins[each.name] = each, path
    notes = [
        f"{origins[name]}: {num} of {each.result['num_tasks']} have no answer of the server, and BFCL judged them all the same"
        for name, each in found.items()
        if (num := each.result["num_requests_failed"])
    ]
    return Harvest(found=[*found.values()], notes=notes)


_GROUPS = ("live", "non_live", "multi_turn", "agentic", "format_sensitivity", "memory", "kv", "vector", "rec_sum", "score")
"""Folders between a model's folder and its files: MODEL/non_live/FILE, MODEL/agentic/memory/kv/FILE; none in older releases."""


def _of_category(path: Path) -> Found:
    match = _SCORE_FILE.fullmatch(path.name)
    assert match is not None
    version, category = match["version"], match["category"]  # v3's problems and v4's differ under one category's name
    summary = _first_line(path)
    model = next((part for part in reversed(path.absolute().parent.parts) if part not in _GROUPS), "unnamed")
    result = _result(
        harness="bfcl-eval",
        benchmark=f"bfcl-{version}/{category}",
        run=model,
        accuracy=float(summary["accuracy"]),
        num_tasks=int(summary["total_count"]),
    )
    return Found(name=f"{model}-{version}-{category}", result=result | {"num_requests_failed": _num_failed(path)}, problems=())


def _num_failed(path: Path) -> int:
    """Requests in the place of whose answer an error stands: of all, where result/ lies beside score/, else of failures."""
    lines = read_lines(path)[1:]
    score = next((each for each in path.absolute().parents if each.name == "score"), None)
    if score is not None:
        answers = score.with_name("result") / path.absolute().relative_to(score)
        answers = answers.with_name(path.name.replace("_score.json", "_result.json"))
        lines = read_lines(answers) or lines
    # Failures of single turns and of several have other names for the place.
    said = [each.get("result", each.get("model_result_raw", each.get("model_result"))) for each in lines]
    return sum(isinstance(each, str) and each.startswith(_NO_ANSWER) for each in said)


def read_lm_eval(directory: Path) -> Harvest:
    """One result a model and task, from the newest results_*.json below `directory` that has it.

    With its problems, where samples were kept. Older figures of a model's task are left out, and so are tasks without a figure
    that is a share and better when larger.

    Raises:
        RunError: there is no such file, one is damaged, or none has a figure that can be used.
    """
    paths = sorted(directory.rglob("results_*.json"), key=lambda path: (path.name, path), reverse=True)
    if not paths:
        raise RunError(f"{directory}: no results_*.json lies below. Give the folder that `lm_eval --output_path` wrote.")
    found: dict[str, Found] = {}
    origins: dict[tuple[str, str], Path] = {}
    notes = []
    for path in paths:
        tree = read_json(path)
        if not isinstance(tree, dict) or not isinstance(tree.get("results"), dict):
            raise RunError(f"{path}: no table 'results'. It is not what lm-eval writes.")
        model = str(tree.get("model_name") or path.parent.name)
        for task, figures in _tasks(tree).items():
            newer = origins.setdefault((model, task), path)
            if newer != path:
                notes.append(f"left out: {path}: {task} of {model}, which {newer} has from later on")
                continue
            try:
                each = _of_task(task, figures, tree, model, path)
            except RunError as error:
                notes.append(f"left out: {error}")
            else:
                found[each.name] = each
    if not found:
        raise RunError(f"{directory}: no result of lm-eval that can be used: {'; '.join(notes) or 'its files name no task'}")
    return Harvest(found=[*found.values()], notes=notes)


def _tasks(tree: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The figures of each task, and of each group that adds its tasks up; another group stands there by its name alone."""
    groups = tree.get("group_subtasks") or {}
    return {task: figures for task, figures in tree["results"].items() if _figures(figures) or not groups.get(task)}


def _of_task(task: str, figures: Mapping[str, Any], tree: Mapping[str, Any], model: str, path: Path) -> Found:
    shares = _figures(figures)
    falling = {metric for metric, rises in (tree.get("higher_is_better", {}).get(task) or {}).items() if rises is False}
    rising = [key for key in shares if key.partition(",")[0] not in falling]
    preferred = [key for name in (_HEADLINE.get(task, ""), *_USUAL) for key in rising if key.partition(",")[0] == name]
    headline = next(iter([*preferred, *rising]), None)
    if headline is None:
        raise RunError(
            f"{path}: task {task!r} has no figure that is better when larger. It has {', '.join(figures) or 'nothing'}."
        )
    metric, _, answer_filter = headline.partition(",")
    error = figures.get(f"{metric}_stderr,{answer_filter}")
    problems = _samples(path, task, metric, answer_filter)
    # A group has no entry of its own in n-samples.
    num = tree.get("n-samples", {}).get(task, {}).get("effective") or figures.get("sample_len") or len(problems)
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
    problems: list[dict[str, Any]] = []
    for line in read_lines(path.with_name(f"samples_{task}_{written}.jsonl")):
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
    """As ours, with the interval by the harness's standard error, else the normal one of a share.

    Where all are right, or all wrong, either is 0 and would promise certainty: it is the exact binomial bound then.
    """
    if not 0 <= accuracy <= 1:
        raise RunError(
            f"{harness} tells an accuracy of {accuracy} for {benchmark!r}, which is no share. Is it another version?"
        )
    if accuracy in (0, 1):
        reach = unseen_share(max(1, num_tasks))
    elif reach is None:
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
