"""From the facts about a run to its outcome. Pure: nothing here waits, and nothing a program says decides an outcome."""

from __future__ import annotations

import signal

from strop.sandbox.inside import wire
from strop.sandbox.node.calls import FinishedCall
from strop.sandbox.node.output import OutputTail
from strop.sandbox.node.places import hide_places
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest, RunResult, RunTimings

_CPU_ERROR_S = 0.1  # between what the kernel counts against the limit and what it reports at the end


def judge(run: FinishedCall, request: RunRequest, *, level: IsolationLevel, queue_s: float, node: str) -> RunResult:
    """The class from facts outside the program; the text from its output, its echo or its traceback."""
    outcome, reason, text, exit_code = _decide(run, request)
    return RunResult(
        outcome=outcome,
        reason=reason,
        text=hide_places(text),
        exit_code=exit_code,
        timings=RunTimings(queue_s=queue_s, setup_s=run.setup_s, run_s=run.run_s, cpu_s=run.ended.cpu_s),
        level=level,
        peak_memory_bytes=run.ended.peak_bytes,
        node=node,
    )


def refuse(reason: str, *, level: IsolationLevel, node: str, outcome: RunOutcome = RunOutcome.REJECTED) -> RunResult:
    """The answer to a request that is never run."""
    return RunResult(
        outcome=outcome, reason=reason, text=f"Not run: {reason}.", exit_code=None, timings=RunTimings(), level=level, node=node
    )


def _decide(run: FinishedCall, request: RunRequest) -> tuple[RunOutcome, str, str, int | None]:
    output, ended, text = run.output, run.ended, run.output.text()
    if not output.is_ready:
        return RunOutcome.INTERNAL, run.record_text or run.stopped_for or f"the child ended with {ended}", "", None
    if run.stopped_for == "timeout":
        return RunOutcome.TIMEOUT, "", text, None
    if run.stopped_for == "output":
        return RunOutcome.KILLED, "output", output.head_text(), None
    if run.stopped_for:
        return RunOutcome.KILLED, run.stopped_for, text, None
    if ended.signal in (signal.SIGKILL, signal.SIGXCPU) and ended.cpu_s >= _cpu_limit_s(request) - _CPU_ERROR_S:
        return RunOutcome.TIMEOUT, "cpu", text, None
    if ended.signal is not None:
        return RunOutcome.KILLED, f"signal {ended.signal}", text, None
    if ended.exit_code != 0:
        said = f"The program exited with code {ended.exit_code}.\n"
        if run.record_kind == wire.RECORD_ERROR:
            said = run.record_text
        return RunOutcome.ERROR, "", text + ("\n" if text and not text.endswith("\n") else "") + said, ended.exit_code
    if output.num_bytes == 0 and run.record_kind == wire.RECORD_ECHO:
        return RunOutcome.ECHO, "", OutputTail.cut(run.record_text, limit=request.output_bytes), 0
    return (RunOutcome.STDOUT if output.num_bytes else RunOutcome.EMPTY), "", text, 0


def _cpu_limit_s(request: RunRequest) -> float:
    return request.wall_s if request.cpu_s is None else request.cpu_s
