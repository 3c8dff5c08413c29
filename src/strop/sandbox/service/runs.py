"""Programs at the front: admitted, joined by their id, answered once to everyone who listens."""

from __future__ import annotations

import asyncio
from functools import partial

from strop.errors import MachineError, NoNodes, Overloaded, SessionLost
from strop.sandbox.protocol import RunOutcome, RunRequest, RunResult, RunTimings
from strop.sandbox.service.admission import Admission
from strop.sandbox.service.config import DispatchConfig
from strop.sandbox.service.floor import Floor
from strop.sandbox.service.jobs import Answer, Leave, Listener, OnStart, RunJob
from strop.sandbox.service.kept import KeptAnswers
from strop.sandbox.service.limits import run_refusal
from strop.sandbox.service.sessions import Session, Sessions
from strop.sandbox.service.tally import Tally


class Runs:
    """Owns a call from its request to its answer; in between it is a job on the floor."""

    def __init__(self, config: DispatchConfig, floor: Floor, sessions: Sessions, admission: Admission, tally: Tally) -> None:
        self.kept = KeptAnswers(keep_s=config.keep_s, max_kept=config.max_kept, max_kept_bytes=config.max_kept_bytes)
        self._config = config
        self._floor = floor
        self._sessions = sessions
        self._admission = admission
        self._tally = tally
        self._by_id: dict[tuple[str, str], RunJob] = {}
        self._abandoned: dict[RunJob, float] = {}  # since when; oldest first
        self._loop = asyncio.get_running_loop()

    def submit(self, request: RunRequest, listener: Listener, on_start: OnStart, client: str) -> Leave | None:
        """See `Dispatcher.submit`."""
        now = self._loop.time()
        refusal = run_refusal(request, self._config.limits)
        session: Session | None = None
        if not refusal and request.id:
            key = (client, request.id)
            if (running := self._by_id.get(key)) is not None:
                if running.request == request:
                    return self._rejoin(running, listener, on_start)
                refusal = f"the id {request.id!r} belongs to another call of this client"
            elif (kept := self.kept.find(key, now=now)) is not None:
                if kept.is_answer_to(request):
                    self._tally.num_rejoined += 1
                    listener(kept.result)
                    return None
                refusal = f"the id {request.id!r} belonged to another call of this client"
        if refusal:
            self._answer_at_once(listener, RunOutcome.REJECTED, refusal)
            return None
        if request.session:
            try:
                session = self._sessions.find(request.session)
            except SessionLost as error:
                listener(error)
                return None
        elif (no_nodes := self._floor.no_nodes(since=now)) is not None:
            self._tally.num_without_node += 1
            listener(no_nodes)
            return None
        job = RunJob(request, client, session, self._on_end, now=now)
        if refusal := self._admission.admit(client, job.num_bytes):
            self._answer_at_once(listener, RunOutcome.OVERLOADED, refusal)
            return None
        job.listeners.append(listener)
        job.on_start.append(on_start)
        if request.id:
            self._by_id[job.key] = job
        if session is None:
            self._floor.put(job)
        else:
            self._sessions.enter(session, job)
        return partial(self._leave, job, listener)

    def cancel(self, call_id: str, client: str) -> bool:
        """End the call of this id, and tell whoever listens; False when there is none."""
        job = self._by_id.get((client, call_id))
        if job is None:
            return False
        listeners, job.listeners = job.listeners, []
        self._withdraw(job)
        for listener in listeners:
            listener(MachineError(f"the call {call_id!r} was cancelled by its id"))
        return True

    def end_abandoned(self) -> None:
        now = self._loop.time()
        while self._abandoned:
            job, since = next(iter(self._abandoned.items()))
            if now - since < self._config.linger_s:
                break
            if job.session is not None and job.session.busy is job:
                # A cell runs once: one that has begun is not stopped for a client that may still ask for its answer.
                del self._abandoned[job]
            else:
                self._withdraw(job)
        self.kept.expire(now=now)

    def _rejoin(self, job: RunJob, listener: Listener, on_start: OnStart) -> Leave:
        self._tally.num_rejoined += 1
        self._abandoned.pop(job, None)
        job.listeners.append(listener)
        if job.has_begun:
            on_start()
        else:
            job.on_start.append(on_start)
        return partial(self._leave, job, listener)

    def _leave(self, job: RunJob, listener: Listener, *, may_return: bool) -> None:
        if listener not in job.listeners:
            return  # it was told
        job.listeners.remove(listener)
        if job.listeners:
            return
        if may_return and job.request.id and self._config.linger_s > 0:
            self._abandoned[job] = self._loop.time()
        else:
            self._withdraw(job)

    def _withdraw(self, job: RunJob) -> None:
        self._abandoned.pop(job, None)
        job.listeners.clear()
        if self._by_id.get(job.key) is job:
            del self._by_id[job.key]  # at once: the same id may come again before its node has let go
        if job.session is not None and job is not job.session.busy:
            self._sessions.leave(job.session, job)
            job.end()
        else:
            self._floor.withdraw(job)

    def _on_end(self, job: RunJob) -> None:
        self._admission.release(job.client, job.num_bytes)
        self._abandoned.pop(job, None)
        if job.request.id and self._by_id.get(job.key) is job:
            del self._by_id[job.key]
        answer = job.answer
        if job.session is not None:
            if isinstance(answer, MachineError):
                # Nobody knows what the cell has done, so no other may build on it.
                answer = (
                    answer if isinstance(answer, SessionLost) else SessionLost(f"session {job.session.id!r} is lost: {answer}")
                )
                self._sessions.lose(job.session, str(answer))
            self._sessions.leave(job.session, job)
        elif isinstance(answer, NoNodes):
            self._tally.num_without_node += 1
        elif isinstance(answer, Overloaded):
            answer = self._not_run(RunOutcome.OVERLOADED, str(answer))
        elif isinstance(answer, MachineError):
            answer = self._not_run(RunOutcome.INTERNAL, str(answer))
        if answer is None:
            self._tally.num_cancelled += 1
        else:
            self._tell(job, answer)

    def _tell(self, job: RunJob, answer: Answer) -> None:
        if isinstance(answer, RunResult):
            self._tally.add(answer)
            if job.request.id and not answer.outcome.is_ours:
                self.kept.keep(job.key, job.request, answer, now=self._loop.time())
        listeners, job.listeners = job.listeners, []
        for listener in listeners:
            listener(answer)

    def _answer_at_once(self, listener: Listener, outcome: RunOutcome, reason: str) -> None:
        result = self._not_run(outcome, reason)
        self._tally.add(result)
        listener(result)

    def _not_run(self, outcome: RunOutcome, reason: str) -> RunResult:
        return RunResult(
            outcome=outcome,
            reason=reason,
            text=f"Not run: {reason}." if outcome is RunOutcome.REJECTED else "",
            exit_code=None,
            timings=RunTimings(),
            level=self._floor.level,
        )
