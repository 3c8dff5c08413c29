"""Runs the arms of a sweep, each with each seed, as `strop train` processes; implements `strop sweep`.

    runs/<name>/  arms.json  sweep.json  sweep.html  logs/<run>.log  <arm>-seed-<k>/ (a run directory each)

All state is on disk, so the same command resumes a sweep.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from strop.errors import RunError
from strop.pipeline.plan import plan
from strop.pipeline.sweep_file import Arm, Sweep, as_words
from strop.recipe.recipe import Recipe
from strop.reports.number_format import Table, duration
from strop.reports.sweep import State, SweepArm, SweepConsole, SweepLog, SweepRun, read_sweep_run, sweep_json, sweep_page
from strop.reports.terminal import print_table
from strop.run_directory import RunDirectory, read_json, write_json, write_text, writing_to
from strop.runs.lineage import copy_stages, num_common, num_done
from strop.runs.manifest import check_directory, differences, locked, shown, write_manifest

_TRAIN = (sys.executable, "-m", "strop.cli")
_SHOW_S = 1.0  # between two updates of the line that shows the active runs
_LOOK_S = 0.1  # between two looks whether a process has ended
_GRACE_S = 120.0  # after an interrupt: the current update ends first
_PR_SET_PDEATHSIG = 1
_MARKS = {State.DONE: "(done)", State.UNFINISHED: "(started)"}  # in the plan of a sweep


Start = Callable[[Sequence[str], Path], "subprocess.Popen[bytes]"]
"""Starts a command whose output is appended to a file."""


class Ended(NamedTuple):
    """A child that has ended."""

    key: str
    status: int  # as in `subprocess`: negative if a signal killed it
    time_s: float


def start_process(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that Ctrl-C reaches only this process, which passes it on."""
    with writing_to(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    with output:
        prepare, stdin = _end_with(os.getpid()), subprocess.DEVNULL
        return subprocess.Popen(
            command, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=prepare
        )


class Children(AbstractContextManager["Children", None]):
    """A context manager. On exit it interrupts children that still run, and kills those that do not end."""

    def __init__(self, start: Start = start_process) -> None:
        self._start = start
        self._children: dict[str, tuple[subprocess.Popen[bytes], float]] = {}

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._children)

    def start(self, key: str, command: Sequence[str], log: Path) -> None:
        self._children[key] = (self._start(command, log), time.monotonic())

    def wait(self, *, at_most_s: float) -> list[Ended]:
        """Wait for the first child that ends, and return all that have ended."""
        deadline = time.monotonic() + at_most_s
        while True:
            statuses = {key: child.poll() for key, (child, _) in self._children.items()}
            ended = [
                Ended(key, status, time.monotonic() - self._children.pop(key)[1])
                for key, status in statuses.items()
                if status is not None
            ]
            if ended or not self._children or time.monotonic() >= deadline:
                return ended
            time.sleep(_LOOK_S)

    def __exit__(self, *raised: object) -> None:
        try:
            self._signal(signal.SIGINT)
            deadline = time.monotonic() + _GRACE_S
            while self._children and time.monotonic() < deadline:
                self.wait(at_most_s=1.0)
        finally:
            self._signal(signal.SIGKILL)
            while self._children:
                self.wait(at_most_s=1.0)

    def _signal(self, number: int) -> None:
        for child, _ in self._children.values():
            child.send_signal(number)


def _end_with(parent: int) -> Callable[[], None]:
    """Return what a new child runs first: it dies with its parent, and accepts SIGINT even if the parent ignores it."""
    libc = ctypes.CDLL(None)  # loaded before the fork

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent was killed before prctl
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell makes background jobs ignore it

    return prepare


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One arm with one seed, and its run directory."""

    arm: Arm
    seed: int
    directory: RunDirectory
    words: tuple[str, ...]  # arguments of `strop`

    @property
    def name(self) -> str:
        return self.arm.run_name(self.seed)

    @property
    def recipe(self) -> Recipe:
        return self.arm.recipes[self.seed]

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        return shlex.join(["strop", *self.words])

    @property
    def num_done(self) -> int:
        """The number of finished stages, from the first on."""
        return num_done(self.directory, self.recipe)

    @property
    def state(self) -> State:
        """The state according to the files of the run."""
        if self.num_done == len(self.recipe.stages) and self.directory.report.exists():
            return State.DONE
        return State.UNFINISHED if self.directory.manifest.exists() else State.WAITING


def plan_runs(sweep: Sweep, directory: Path) -> list[PlannedRun]:
    """Return every run, first all arms of the first seed, so that arms can be compared early.

    Raises:
        RunError: `directory` holds something else, or a sweep that differs in more than added arms and seeds.
    """
    _check_directory(sweep, directory)
    runs = [(arm, seed, RunDirectory(directory / arm.run_name(seed))) for seed in sweep.file.seeds for arm in sweep.arms]
    return [
        PlannedRun(arm=arm, seed=seed, directory=run, words=("train", *sweep.words(arm, seed), "--runs", str(directory)))
        for arm, seed, run in runs
    ]


def print_arms(sweep: Sweep, directory: Path, *, console: Console | None = None) -> None:
    """Print each arm with its changes, the state of its runs and the estimated time of a run on this machine.

    Raises:
        RunError: as `plan_runs`.
        UserError: a file that an arm reads is missing.
    """
    console = Console() if console is None else console
    runs = plan_runs(sweep, directory)
    recipes = [arm.recipes[sweep.file.seeds[0]] for arm in sweep.arms]
    num_shared = min((num_common(recipes[0], other) for other in recipes[1:]), default=0)
    times_s = [[stage.time_s for stage in plan(recipe)] for recipe in recipes]
    rows, to_run_s = [], []
    for arm, of_stages in zip(sweep.arms, times_s, strict=True):
        time_s = sum(of_stages[num_shared:])
        states = {run.seed: run.state for run in runs if run.arm is arm}
        seeds = ", ".join(f"{seed} {_MARKS.get(state, '')}".strip() for seed, state in states.items())
        rows.append((arm.name, "\n".join(as_words(arm.overrides)) or "none", seeds, duration(time_s)))
        to_run_s += [time_s for state in states.values() if state is not State.DONE]
    console.print(sweep.file.name, style="bold", markup=False, highlight=False)
    table = Table(columns=("arm", "changes", "seeds", "a run"), rows=tuple(rows))
    print_table(table, console=console, wrapped=("arm", "changes", "seeds"))
    shared = ""
    if num_shared:
        names, shared_s = ", ".join(list(recipes[0].stages)[:num_shared]), sum(times_s[0][:num_shared])
        shared = f", plus {names}, shared by the arms of a seed (about {duration(shared_s)} a seed)"
    total = f"{len(to_run_s)} runs to go, roughly {duration(sum(to_run_s))} in all{shared}. Nothing was run."
    console.print(total, markup=False, highlight=False, soft_wrap=True)


def write_arms(sweep: Sweep, directory: Path, *, command: str) -> None:
    """Record the sweep in `arms.json`."""
    content = {
        "name": sweep.file.name,
        "command": command,
        "file": str(sweep.path),
        "recipe": str(sweep.recipe),
        "seeds": list(sweep.file.seeds),
        "arms": _arms_json(sweep),
    }
    write_json(directory / "arms.json", content)


def run_sweep(
    sweep: Sweep, directory: Path, *, jobs: int = 1, progress: SweepConsole, command: str = "", start: Start = start_process
) -> SweepLog:
    """Run or resume `sweep` in `directory`. After each run it writes `sweep.html` and `sweep.json`.

    A failed run is listed in the result, and the other runs continue. An interrupt ends the active runs cleanly.

    Args:
        jobs: the number of parallel runs.
        command: the command that the user typed, for the page.
        start: starts the process of a run.

    Raises:
        RunError: the directory holds another sweep, or another process uses it.
    """
    with writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with locked(RunDirectory(directory)):
        runs = {run.name: run for run in plan_runs(sweep, directory)}
        write_arms(sweep, directory, command=command)
        return _Driver(
            sweep=sweep, directory=directory, runs=runs, jobs=jobs, command=command, progress=progress, children=Children(start)
        ).run()


@dataclass(kw_only=True)
class _Driver:
    """Starts runs, collects those that end, and draws the page."""

    sweep: Sweep
    directory: Path
    runs: Mapping[str, PlannedRun]
    jobs: int
    command: str
    progress: SweepConsole
    children: Children
    failures: dict[str, str] = field(default_factory=dict)

    def run(self) -> SweepLog:
        waiting = [run for run in self.runs.values() if run.state is not State.DONE]
        self.progress.started(num_runs=len(self.runs), num_done=len(self.runs) - len(waiting))
        if self.jobs > 1 and any(run.recipe.threads is None for run in waiting):
            self.progress.warn(
                f"{self.jobs} parallel runs, and the recipe does not set threads: each run uses all cores. Divide them, as in"
                " [set] threads = 1, for faster runs."
            )
        self.draw()
        try:
            with self.children:
                while waiting or self.children.running:
                    while len(self.children.running) < self.jobs and (run := self._next(waiting)) is not None:
                        waiting.remove(run)
                        self._start(run)
                    for ended in self.children.wait(at_most_s=_SHOW_S):
                        self._end(ended)
                    self.progress.under_way({name: self.runs[name].directory for name in self.children.running})
        except BaseException:
            self.draw()
            raise
        log = self.draw()
        self.progress.finished(log, self.directory / "sweep.html")
        return log

    def _next(self, waiting: Sequence[PlannedRun]) -> PlannedRun | None:
        """Return the first run that needs no stage which an active run is about to finish."""
        active = [self.runs[name] for name in self.children.running]
        for run in waiting:
            available = self._best_source(run)[1]
            if all(num_common(run.recipe, other.recipe) <= available for other in active if other.seed == run.seed):
                return run
        return None

    def _best_source(self, run: PlannedRun) -> tuple[PlannedRun, int]:
        """Return the run that has finished most of the first stages of `run`, and their number; `run` itself in a tie."""
        best, most = run, run.num_done
        for other in self.runs.values():
            if other.seed == run.seed and other is not run:
                num = min(num_common(run.recipe, other.recipe), other.num_done)
                if num > most:
                    best, most = other, num
        return best, most

    def _start(self, run: PlannedRun) -> None:
        source, num = self._best_source(run)
        if source is not run:
            with writing_to(run.directory.path):
                run.directory.path.mkdir(parents=True, exist_ok=True)
            with locked(run.directory):
                check_directory(run.directory, run.recipe)
                write_manifest(run.directory, run.recipe, run.command)
            copy_stages(run.directory, source.directory, run.recipe, num=num)
        self.progress.run_started(run.name, state=run.state, shared="" if source is run else source.name)
        self.children.start(run.name, [*_TRAIN, *run.words], self._log_of(run))

    def _end(self, ended: Ended) -> None:
        run = self.runs[ended.key]
        log = self.draw() if ended.status == 0 else None
        if log is not None:
            finished = next(each for each in log.runs if each.name == run.name)
            summary = finished.summary(self.sweep.result.partition(".")[2])
            self.progress.run_finished(run.name, summary, ended.time_s)
            return
        self.failures[run.name] = _failure(ended.status, self._log_of(run))
        self.progress.run_failed(run.name, self.failures[run.name], self._log_of(run))
        self.draw()

    def _log_of(self, run: PlannedRun) -> Path:
        return self.directory / "logs" / f"{run.name}.log"

    def _state_of(self, run: PlannedRun) -> State:
        if run.name in self.failures:
            return State.FAILED
        return State.RUNNING if run.name in self.children.running else run.state

    def _read(self, run: PlannedRun) -> SweepRun:
        state, failure = self._state_of(run), self.failures.get(run.name, "")
        stage, result, curves = self.sweep.stage, self.sweep.result, self.sweep.file.curves
        return read_sweep_run(
            run.directory, seed=run.seed, state=state, failure=failure, stage=stage, result=result, curves=curves
        )

    def draw(self) -> SweepLog:
        """Write the page and its JSON file, and return what they show."""
        sweep, arms = self.sweep, []
        for arm in sweep.arms:
            runs = tuple(self._read(run) for run in self.runs.values() if run.arm is arm)
            arms.append(SweepArm(name=arm.name, changes=tuple(as_words(arm.overrides)), runs=runs))
        log = SweepLog(
            name=sweep.file.name,
            description=sweep.file.description,
            command=self.command,
            recipe=str(sweep.recipe),
            common=sweep.common,
            stage=sweep.stage,
            result=sweep.result,
            curves=sweep.file.curves,
            jobs=self.jobs,
            arms=tuple(arms),
        )
        write_json(self.directory / "sweep.json", sweep_json(log))
        write_text(self.directory / "sweep.html", sweep_page(log))
        return log


def _failure(status: int, log: Path) -> str:
    """Return the error in the log of a failed run, or its last line."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    last = next((line for line in reversed(lines) if line.startswith("error:")), lines[-1]).removeprefix("error: ")
    if status == -signal.SIGKILL:
        return f"killed by SIGKILL, for example for lack of memory; last output: {last}"
    return f"{last} ({f'signal {-status}' if status < 0 else f'exit code {status}'})"


def _arms_json(sweep: Sweep) -> dict[str, Any]:
    """Return every arm with its changes and its recipe for the first seed."""
    recipes = {arm.name: next(iter(arm.recipes.values())).model_dump(mode="json") for arm in sweep.arms}
    return {
        arm.name: {
            "changes": dict(arm.overrides),
            "recipe": {key: value for key, value in recipes[arm.name].items() if key not in ("seed", "name")},
        }
        for arm in sweep.arms
    }


def _check_directory(sweep: Sweep, directory: Path) -> None:
    """Raise `RunError` unless `directory` is new, or holds this sweep with at most as many arms and seeds."""
    path = directory / "arms.json"
    if not path.exists():
        if directory.exists() and any(not entry.name.startswith(".") for entry in directory.iterdir()):
            raise RunError(f"{directory}: not empty, and not a sweep directory (no arms.json). Choose another --run-dir.")
        return
    recorded, arms = read_json(path), _arms_json(sweep)
    problems = [f"  arms: {name!r} there, not asked for" for name in recorded["arms"] if name not in arms]
    problems += [f"  seeds: {seed} there, not asked for" for seed in recorded["seeds"] if seed not in sweep.file.seeds]
    for name, arm in arms.items():
        if name in recorded["arms"] and (found := differences(recorded["arms"][name]["recipe"], arm["recipe"])):
            problems.append(f"  of arm {name!r}:\n{shown(found)}")
    if problems:
        lines = "\n".join(problems)
        raise RunError(
            f"{directory} holds another sweep:\n{lines}\nA sweep can get more arms and seeds, but none can change or go. Choose"
            " another --run-dir or name, or remove that directory."
        )
