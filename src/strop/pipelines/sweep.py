"""Runs the arms of a sweep, each with each seed, as `strop train` runs them; the one call behind `strop sweep`.

    runs/<name>/  arms.json  sweep.json  sweep.html  logs/<run>.log  <arm>-seed-<k>/ (a run directory each)

What is done is on disk alone, so the same command goes on after any end of the last one.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from strop.pipelines.children import Children, Ended, Start, start_process
from strop.pipelines.claim import alone_in, claim
from strop.pipelines.common_stages import num_common, take_over
from strop.pipelines.sweep_file import Sweep, as_words
from strop.pipelines.sweep_plan import PlannedRun, claim_directory, plan_runs
from strop.reports.sweep import run_summary, sweep_json, sweep_page
from strop.reports.sweep_console import SweepProgress
from strop.reports.sweep_log import State, SweepArm, SweepLog, SweepRun, read_sweep_run
from strop.runs import RunDirectory, write_json, write_text, writing_to

_LOOK_EVERY_S = 1.0
_TRAIN = (sys.executable, "-m", "strop.cli")


def run_sweep(
    sweep: Sweep,
    directory: Path,
    *,
    jobs: int = 1,
    progress: SweepProgress,
    command: str = "",
    start: Start = start_process,
) -> SweepLog:
    """Run, or go on with, `sweep` in `directory`; draws `sweep.html` and `sweep.json` anew after each run that ends.

    A run that fails is named in what is returned, and the others go on. An interrupt ends the runs that are under way cleanly.

    Args:
        jobs: how many runs at once.
        command: how the user asked for it.
        start: starts a run's process.

    Raises:
        RunError: the directory holds another sweep, or another process is running there.
    """
    with writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with alone_in(RunDirectory(directory)):
        runs = plan_runs(sweep, directory)
        jobs_before = claim_directory(sweep, directory, command=command, jobs=jobs)
        driver = _Driver(
            sweep=sweep,
            directory=directory,
            runs=runs,
            jobs=jobs,
            max_jobs=max(jobs, jobs_before),
            command=command,
            progress=progress,
            children=Children(start),
        )
        return driver.run()


@dataclass(kw_only=True)
class _Driver:
    """Which runs wait, run and failed."""

    sweep: Sweep
    directory: Path
    runs: Sequence[PlannedRun]
    jobs: int
    max_jobs: int
    command: str
    progress: SweepProgress
    children: Children[str]
    failures: dict[str, str] = field(default_factory=dict)

    def run(self) -> SweepLog:
        waiting = [run for run in self.runs if run.state is not State.DONE]
        self.progress.started(num_runs=len(self.runs), num_done=len(self.runs) - len(waiting), warning=self._contention())
        self.draw()
        try:
            with self.children:
                while waiting or self.children.running:
                    while len(self.children.running) < self.jobs and (run := self._next(waiting)) is not None:
                        waiting.remove(run)
                        self._start(run)
                    for ended in self.children.wait(at_most_s=_LOOK_EVERY_S):
                        self._end(ended)
                    self.progress.under_way({name: self._by_name[name].directory for name in self.children.running})
        except BaseException:
            self.draw()
            raise
        log = self.draw()
        self.progress.finished(log, self.directory / "sweep.html")
        return log

    def _contention(self) -> str:
        """Why several runs at once would get in each other's way; empty where they do not."""
        if self.jobs == 1 or all(run.recipe.threads is not None for run in self.runs):
            return ""
        return (
            f"{self.jobs} runs at once, and the recipe leaves threads to torch: each takes all cores. Give each a share, as in"
            " [set] threads = 1, for runs that are faster together."
        )

    @cached_property
    def _by_name(self) -> Mapping[str, PlannedRun]:
        return {run.name: run for run in self.runs}

    def _next(self, waiting: Sequence[PlannedRun]) -> PlannedRun | None:
        """The first that need not wait for stages which a running one is making for it."""
        running = [self._by_name[name] for name in self.children.running]
        for run in waiting:
            there = self._best_source(run)[1]
            if all(num_common(run.resolved, other.resolved) <= there for other in running if other.seed == run.seed):
                return run
        return None

    def _best_source(self, run: PlannedRun) -> tuple[PlannedRun, int]:
        """Where most of the stages that `run` begins with are finished, and how many; itself where nothing is gained."""
        best, most = run, run.num_done
        for other in self.runs:
            if other.seed == run.seed and other is not run:
                num = min(num_common(run.resolved, other.resolved), other.num_done)
                if num > most:
                    best, most = other, num
        return best, most

    def _start(self, run: PlannedRun) -> None:
        source, num = self._best_source(run)
        if source is not run:
            with writing_to(run.directory.path):
                run.directory.path.mkdir(parents=True, exist_ok=True)
            with alone_in(run.directory):
                claim(run.directory, run.recipe, run.command, may_grow=True)  # as `plan_runs` looked at it
            take_over(run.directory, source.directory, run.resolved, num=num)
        self.progress.run_started(run.name, state=run.state, shared="" if source is run else source.name)
        self.children.start(run.name, [*_TRAIN, *run.words], self._log_of(run))

    def _end(self, ended: Ended[str]) -> None:
        run = self._by_name[ended.key]
        if ended.status == 0:
            summary = run_summary(_read(self.sweep, run, State.DONE, ""), self.sweep.result)
            self.progress.run_finished(run.name, summary, ended.time_s)
        else:
            self.failures[run.name] = _why(ended.status, self._log_of(run))
            self.progress.run_failed(run.name, self.failures[run.name], self._log_of(run))
        self.draw()

    def _log_of(self, run: PlannedRun) -> Path:
        return self.directory / "logs" / f"{run.name}.log"

    def draw(self) -> SweepLog:
        """Write the page and its figures; what they say."""
        states = {
            run.name: State.FAILED
            if run.name in self.failures
            else State.RUNNING
            if run.name in self.children.running
            else run.state
            for run in self.runs
        }
        log = SweepLog(
            name=self.sweep.file.name,
            description=self.sweep.file.description,
            command=self.command,
            recipe=str(self.sweep.recipe),
            common=self.sweep.common,
            stage=self.sweep.stage,
            result=self.sweep.result,
            curves=self.sweep.file.curves,
            jobs=self.max_jobs,
            arms=tuple(
                SweepArm(
                    name=arm.name,
                    changes=tuple(as_words(arm.overrides)),
                    runs=tuple(
                        _read(self.sweep, run, states[run.name], self.failures.get(run.name, ""))
                        for run in self.runs
                        if run.arm is arm
                    ),
                )
                for arm in self.sweep.arms
            ),
        )
        write_json(self.directory / "sweep.json", sweep_json(log))
        write_text(self.directory / "sweep.html", sweep_page(log))
        return log


def _read(sweep: Sweep, run: PlannedRun, state: State, failure: str) -> SweepRun:
    return read_sweep_run(
        run.directory,
        seed=run.seed,
        state=state,
        failure=failure,
        stage=sweep.stage,
        result=sweep.result,
        curves=sweep.file.curves,
    )


def _why(status: int, log: Path) -> str:
    """The last that a run said before it failed."""
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    said = next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "it said nothing")
    said = said.removeprefix("error: ")
    if status == -signal.SIGKILL:
        return f"killed, by hand or for want of memory, after it said: {said}"
    return f"{said} ({f'signal {-status}' if status < 0 else f'exit code {status}'})"
