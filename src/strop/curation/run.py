"""Curates files into a directory: parallel, streaming, and after a kill from where it was.

    <directory>/  kept.jsonl  dropped.jsonl  report.html  curation.json   and, while it goes on, parts/

The rules that judge a task by itself run in processes, a chunk of the input at a time; each chunk's verdicts are a file in
parts/. The comparisons, which must see all tasks in order, then pass over these files. Nothing holds more than a few chunks,
save what the comparisons remember of each kept task: a few KB.
"""

from __future__ import annotations

import difflib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from strop.curation.config import CurationConfig
from strop.curation.curate import Alone, Judged, compare, make_rules
from strop.curation.inputs import VERDICTS, lineage
from strop.curation.page import write_page
from strop.curation.parts import UNREADABLE, left_out, part_path, read_parts, row_of, unreadable, write_part
from strop.curation.tally import RuleTally, Tally
from strop.curation.verdict import AnyRule, comparisons, rules_alone
from strop.errors import DeadlineExceeded, MachineError, RunError
from strop.runs import read_json, write_json, writing_to
from strop.tasks.commits import keeping_commits
from strop.tasks.rows import LIMITS, WHERE, BadRow, LeftOut, read_tasks
from strop.types import Task

logger = logging.getLogger(__name__)

CHUNK_TASKS = 1000
_CHUNK_DEADLINE_S = 600.0

AnyRow: TypeAlias = Task | LeftOut | BadRow

Progress = Callable[[int], None]
"""Told how many more rows were judged. What it raises ends the curation, which the same call goes on with."""


def run_curation(
    config: CurationConfig, directory: Path, *, jobs: int = 2, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Curate, or go on where an earlier call was stopped; returns what curation.json holds.

    Raises:
        TaskError: a source, a benchmark or the outcomes of a rule cannot be read.
        RunError: the directory holds the result of other rules or inputs.
        MachineError: a process died or hung; the same call goes on.
    """
    made_of = lineage(config)
    done, parts = directory / "curation.json", directory / "parts"
    if done.exists():
        summary: dict[str, Any] = read_json(done)
        if summary.get("inputs", {}).get("digest") != made_of["digest"]:
            raise RunError(
                f"{directory}: holds the result of other rules or of files that have changed since. Choose another --out, or"
                " remove it to curate anew."
            )
        shutil.rmtree(parts, ignore_errors=True)  # of a call that was killed between its last two lines
        return summary
    commits = _open_parts(parts, made_of["digest"])

    def keep() -> None:
        write_json(parts / "inputs.json", {"digest": made_of["digest"], "verdicts": VERDICTS, "hub": commits})

    with keeping_commits(commits):
        rules = make_rules(config)
    keep()
    with keeping_commits(commits, tell=keep):
        _judge_all(config, rules, parts, jobs=jobs, progress=progress, commits=commits)
    tally = _compare_all(rules, parts, directory, progress)
    _tell_of_unmet_sources(config, tally)
    told = tally.by_rule(_scopes(config, rules))
    summary = _summary(config, tally, told, made_of | ({"hub": commits} if commits else {}))
    write_page(directory / "report.html", config.name, summary, told, tally.samples())
    write_json(done, summary)
    shutil.rmtree(parts)
    return summary


def _open_parts(parts: Path, digest: str) -> dict[str, str]:
    """Parts of the same rules and inputs are gone on with; of others, or of a strop that judged otherwise, they go.

    Returns:
        at which commits the parts that are there read data sets of the hub, and the others are to.
    """
    made_of = parts / "inputs.json"
    begun = read_json(made_of) if made_of.exists() else {}
    is_same = isinstance(begun, dict) and begun.get("digest") == digest  # once it was the digest alone, without the commits
    if parts.exists() and not (is_same and begun.get("verdicts") == VERDICTS):
        shutil.rmtree(parts)
    return dict(begun["hub"]) if is_same else {}


def _judge_all(
    config: CurationConfig, rules: list[AnyRule], parts: Path, *, jobs: int, progress: Progress, commits: dict[str, str]
) -> None:
    """Write a part for each chunk of the input that has none yet.

    Args:
        commits: at which the benchmarks were read, and are to be read by other processes.
    """
    rows = chain.from_iterable(read_tasks(source, split="train") for source in config.sources)
    chunks = enumerate(_chunks(rows))
    if jobs == 1:
        alone = Alone(rules)
        for number, chunk in chunks:
            if not part_path(parts, number).exists():
                write_part(part_path(parts, number), [_judge(alone, each) for each in chunk])
            progress(len(chunk))
        return
    context = multiprocessing.get_context("spawn")  # the parent may hold threads, of pyarrow for one
    try:
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=(config, commits)) as pool:
            running: dict[Future[None], int] = {}
            for number, chunk in chunks:
                if part_path(parts, number).exists():
                    progress(len(chunk))
                    continue
                if len(running) >= 2 * jobs:
                    progress(_collect(running, pool))
                running[pool.submit(_judge_chunk, part_path(parts, number), chunk)] = len(chunk)
            while running:
                progress(_collect(running, pool))
    except BrokenProcessPool as error:  # which whoever hands in or collects the next chunk is told
        raise MachineError("curation: a process that judged tasks was killed. The same command goes on from there.") from error


def _chunks(rows: Iterator[AnyRow]) -> Iterator[list[AnyRow]]:
    while chunk := list(islice(rows, CHUNK_TASKS)):
        yield chunk


def _collect(running: dict[Future[None], int], pool: ProcessPoolExecutor) -> int:
    """Wait until some chunk is judged; returns how many rows are."""
    done, _ = wait(running, timeout=_CHUNK_DEADLINE_S, return_when=FIRST_COMPLETED)
    if not done:
        for process in list(pool._processes.values()):
            process.kill()
        raise DeadlineExceeded(f"curation: no chunk of {CHUNK_TASKS} tasks was judged within {_CHUNK_DEADLINE_S:.0f} s.")
    num_rows = 0
    for future in done:
        num_rows += running.pop(future)
        future.result()
    return num_rows


_alone: Alone | None = None  # of a worker process


def _start(config: CurationConfig, commits: dict[str, str]) -> None:
    """Set a worker up, and see to it that it does not outlive a parent that is killed. Ctrl-C is the parent's to answer."""
    global _alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with keeping_commits(commits):
        _alone = Alone(make_rules(config))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _judge_chunk(path: Path, chunk: list[AnyRow]) -> None:
    assert _alone is not None
    write_part(path, [_judge(_alone, each) for each in chunk])


def _judge(alone: Alone, row: AnyRow) -> Judged:
    match row:
        case Task():
            return alone.judge(row)
        case LeftOut():
            return left_out(row)
        case BadRow():
            return unreadable(row)


def _compare_all(rules: list[AnyRule], parts: Path, directory: Path, progress: Progress) -> Tally:
    """The comparisons over all parts; writes kept.jsonl and dropped.jsonl, each whole or not at all.

    `progress` is called now and then, with no more rows, so that it can end this.
    """
    tally = Tally()
    kept, dropped = directory / ".kept.jsonl.tmp", directory / ".dropped.jsonl.tmp"
    with writing_to(directory):
        with kept.open("w", encoding="utf-8") as kept_file, dropped.open("w", encoding="utf-8") as dropped_file:
            for verdict in compare(read_parts(parts), rules):
                tally.add(verdict)
                if not tally.num_tasks % CHUNK_TASKS:
                    progress(0)
                row = row_of(verdict.task)
                if verdict.is_kept:
                    _write(kept_file, row)
                else:
                    _write(dropped_file, {"rule": verdict.rule, "reason": verdict.reason, **row})
            for file in (kept_file, dropped_file):
                file.flush()
                os.fsync(file.fileno())
        kept.replace(directory / "kept.jsonl")
        dropped.replace(directory / "dropped.jsonl")
    return tally


def _write(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _scopes(config: CurationConfig, rules: list[AnyRule]) -> dict[str, frozenset[str] | None]:
    """By the name of each rule, and of what stands for one, in the order in which they judge, the sources that it judges."""
    first = [WHERE, UNREADABLE] if any(source.rows_where for source in config.sources) else [UNREADABLE]
    limits = [key for key in LIMITS if any(getattr(source, key) is not None for source in config.sources)]
    scope_of: dict[str, frozenset[str] | None] = {rule.kind: config.scope(rule) for rule in config.rules}
    names = [*(rule.name for rule in rules_alone(rules)), *(rule.name for rule in comparisons(rules))]
    return dict.fromkeys([*first, *limits]) | {name: scope_of[name] for name in names}


def _tell_of_unmet_sources(config: CurationConfig, tally: Tally) -> None:
    """A name that no row has as its source is misspelt, or the rows are others than were meant: its rule judged none of it."""
    for rule in config.rules:
        for name in rule.sources:
            if config.called(name).isdisjoint(tally.verdicts):
                nearest = difflib.get_close_matches(name, tally.verdicts, n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                known = ", ".join(sorted(tally.verdicts)[:8])
                logger.warning(
                    "sources of %s has %r, which no row has as its source, so the rule judged none of it. Rows have: %s.%s",
                    *(rule.kind, name, known, hint),
                )


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
