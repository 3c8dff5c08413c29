"""Curates files into a directory: parallel, streaming and resumable.

    <directory>/  kept.jsonl  dropped.jsonl  report.html  curation.json   and, while it runs, parts/

Independent rules run in processes, a chunk of the input at a time; the verdicts of each chunk are a file in parts/. The
comparisons, which must see all tasks in order, then read these files. Memory holds a few chunks, plus a few KB for each kept
task in the comparisons.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

from strop.curation.config import CurationConfig, RuleTally, ScopedRule, Tally, apply, make_rules, write_page
from strop.curation.decontamination import DecontaminationRule
from strop.curation.rules import AgreementRule
from strop.errors import DeadlineExceeded, MachineError, RunError, TaskError
from strop.run_directory import file_digest, read_json, read_lines, write_json, write_text
from strop.tasks.files import keeping_commits, writing_rows
from strop.tasks.rows import LIMITS, UNREADABLE, WHERE, HubRows, RowSource, Verdict, read_tasks
from strop.types import Task

logger = logging.getLogger(__name__)

CHUNK_TASKS = 1000
_FORMAT = 1  # of a result; change it to invalidate finished results
_CHUNK_DEADLINE_S = 600.0

Progress = Callable[[int], None]
"""Receives the number of newly judged rows. An exception ends the curation; the same call resumes it."""


def run_curation(
    config: CurationConfig, directory: Path, *, jobs: int = 2, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Curate, or resume an earlier call, and return the content of curation.json.

    Raises:
        TaskError: a source, a benchmark or the outcomes of a rule cannot be read.
        RunError: the directory holds the result of different rules or inputs.
        MachineError: a process died or hung; the same call resumes.
    """
    made_of = lineage(config)
    done, parts = directory / "curation.json", directory / "parts"
    if done.exists():
        summary: dict[str, Any] = read_json(done)
        if summary.get("inputs", {}).get("digest") != made_of["digest"]:
            raise RunError(
                f"{directory}: holds the result of different rules or files. Choose another --out, or remove it to curate"
                " again."
            )
        shutil.rmtree(parts, ignore_errors=True)  # left if a call was killed before its last line
        return summary
    commits = _open_parts(parts, made_of["digest"])

    def keep() -> None:
        write_json(parts / "inputs.json", {"digest": made_of["digest"], "hub": commits})

    with keeping_commits(commits):
        independent, comparing = make_rules(config)
    keep()
    with keeping_commits(commits, tell=keep):
        _judge_all(config, independent, parts, jobs=jobs, progress=progress, commits=commits)
    tally = _compare_all(comparing, parts, directory, progress)
    tallies = tally.by_rule(_scopes(config))
    summary = _summary(config, tally, tallies, made_of | ({"hub": commits} if commits else {}))
    write_page(directory / "report.html", config.name, summary, tallies, tally.samples())
    write_json(done, summary)
    shutil.rmtree(parts)
    return summary


def _read_parts(directory: Path) -> Iterator[Verdict]:
    """Return all verdicts in the order of the input."""
    for path in sorted(directory.glob("part-*.jsonl")):
        for line in read_lines(path):
            yield Verdict(task=Task(**line["task"]), rule=line["rule"], reason=line["reason"])


def _open_parts(parts: Path, digest: str) -> dict[str, str]:
    """Remove parts of other rules or inputs.

    Returns:
        the commits at which existing parts read data sets of the hub, for the others.
    """
    made_of = parts / "inputs.json"
    begun = read_json(made_of) if made_of.exists() else {}
    is_same = begun.get("digest") == digest
    if parts.exists() and not is_same:
        shutil.rmtree(parts)
    return dict(begun["hub"]) if is_same else {}


def _judge_all(
    config: CurationConfig, rules: list[ScopedRule], parts: Path, *, jobs: int, progress: Progress, commits: dict[str, str]
) -> None:
    """Write a part for each chunk of the input without one.

    Args:
        commits: of the benchmarks, for the processes.
    """
    rows = chain.from_iterable(read_tasks(source, split="train") for source in config.sources)
    numbered = enumerate(iter(lambda: list(islice(rows, CHUNK_TASKS)), []))
    chunks = ((parts / f"part-{number:06d}.jsonl", chunk) for number, chunk in numbered)
    if jobs == 1:
        for path, chunk in chunks:
            if not path.exists():
                _judge_chunk(path, chunk, rules)
            progress(len(chunk))
        return
    context = multiprocessing.get_context("spawn")  # the parent may have threads, such as pyarrow's
    try:
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=(config, commits)) as pool:
            while several := list(islice(chunks, 4 * jobs)):
                for judging in [pool.submit(_judge_chunk, path, chunk) for path, chunk in several if not path.exists()]:
                    try:
                        judging.result(timeout=_CHUNK_DEADLINE_S)
                    except TimeoutError as error:
                        for process in list(pool._processes.values()):
                            process.kill()
                        raise DeadlineExceeded(
                            f"curation: no chunk of {CHUNK_TASKS} tasks was judged within {_CHUNK_DEADLINE_S:.0f} s."
                        ) from error
                progress(sum(len(chunk) for _, chunk in several))
    except BrokenProcessPool as error:
        raise MachineError("curation: a process that judged tasks was killed. The same command resumes.") from error


_worker_rules: list[ScopedRule] = []  # of a worker process


def _start(config: CurationConfig, commits: dict[str, str]) -> None:
    """Set up a worker that ends with its parent. Only the parent handles Ctrl-C."""
    global _worker_rules
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with keeping_commits(commits):
        _worker_rules, _ = make_rules(config)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _judge_chunk(path: Path, chunk: list[Verdict], rules: list[ScopedRule] | None = None) -> None:
    """Write the verdicts of `rules`, by default those of this worker process."""
    verdicts = [apply(each, _worker_rules if rules is None else rules) for each in chunk]
    write_text(path, "".join(json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in verdicts))


def _compare_all(rules: list[ScopedRule], parts: Path, directory: Path, progress: Progress) -> Tally:
    """Apply the rules that compare to all parts, and write kept.jsonl and dropped.jsonl atomically.

    `progress` is called with 0 rows from time to time, so that it can stop this.
    """
    tally = Tally()
    with writing_rows(directory / "kept.jsonl") as keep, writing_rows(directory / "dropped.jsonl") as drop:
        for each in _read_parts(parts):
            verdict = apply(each, rules)
            tally.add(verdict)
            if not tally.num_tasks % CHUNK_TASKS:
                progress(0)
            row = asdict(verdict.task)
            if verdict.is_kept:
                keep(row)
            else:
                drop({"rule": verdict.rule, "reason": verdict.reason, **row})
    return tally


def _scopes(config: CurationConfig) -> dict[str, frozenset[str] | None]:
    """Return the sources of each rule, and of each limit that acts as a rule, in the order in which they judge."""
    first = [WHERE, UNREADABLE] if any(source.config.rows_where for source in config.sources) else [UNREADABLE]
    limits = [key for key in LIMITS if any(getattr(source.config, key) is not None for source in config.sources)]
    return dict.fromkeys([*first, *limits]) | {rule.kind: config.scope(rule) for rule in config.rules}


def _summary(config: CurationConfig, tally: Tally, rules: list[RuleTally], made_of: dict[str, Any]) -> dict[str, Any]:
    by_source = {name: (counts[""], counts.total() - counts[""]) for name, counts in tally.verdicts.items()}
    return {
        "name": config.name,
        "num_tasks": tally.num_tasks,
        "num_kept": tally.num_kept,
        "rules": [{"name": each.name, "num_seen": each.num_seen, "num_dropped": each.num_dropped} for each in rules],
        "sources": {name: {"num_kept": kept, "num_dropped": dropped} for name, (kept, dropped) in by_source.items()},
        "inputs": made_of,
        "config": config.model_dump(mode="json"),
    }


def lineage(config: CurationConfig) -> dict[str, Any]:
    """Return the digests of all inputs, and one digest of all.

    The paths of sources and benchmarks are part of the digest, since their rows carry them as source. Paths of outcomes are
    not: they are in the run directory, which may be moved.

    Raises:
        TaskError: a file does not exist.
    """
    outcomes = {rule.kind: rule.outcomes for rule in config.rules if isinstance(rule, AgreementRule)}
    judged_by = {kind: _digest(path) for kind, path in outcomes.items()}
    named = [path for key, path in named_files(config).items() if not key.endswith(".outcomes")]
    files = {str(path): _digest(path) for path in sorted({each for path in named for each in _below(path)})}
    said = config.model_dump(mode="json")
    for rule in said["rules"]:
        if rule["kind"] in judged_by:
            rule["outcomes"] = judged_by[rule["kind"]]
    whole = hashlib.sha256(json.dumps([_FORMAT, said, files], sort_keys=True).encode()).hexdigest()
    return {"digest": whole, "files": files | {str(path): judged_by[kind] for kind, path in outcomes.items()}}


def named_files(config: CurationConfig) -> dict[str, Path]:
    """Return the files and directories that `config` names, by key; hub data sets only if they are local directories."""
    found: dict[str, Path] = {}
    for number, source in enumerate(config.sources):
        found |= _named_by(source, f"sources.{number}")
    for rule in config.rules:
        if isinstance(rule, DecontaminationRule):
            for number, source in enumerate(rule.against):
                found |= _named_by(source, f"rules.{rule.kind}.against.{number}")
        elif isinstance(rule, AgreementRule):
            found[f"rules.{rule.kind}.outcomes"] = rule.outcomes
    return found


def _named_by(source: RowSource, place: str) -> dict[str, Path]:
    if isinstance(source, HubRows):
        directory = Path(source.config.name or "").expanduser()
        return {f"{place}.name": directory} if source.config.name and directory.is_dir() else {}
    return {f"{place}.{'path' if split == 'train' else 'test_path'}": path for split, path in source.files.items()}


def _below(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (each for each in path.rglob("*") if each.is_file())
    else:
        yield path


def _digest(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise TaskError(
            f"{path}: cannot be read: {error.strerror}. Set the path of a source or rule to a file of rows."
        ) from error
