"""The calls of programs: admission, joining by id, and one answer to every listener.

The answers of calls that have an id are cached: a client that asks again after a lost connection gets the same answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from strop.errors import MachineError, NoNodes, Overloaded, SessionLost
from strop.sandbox.limits import run_refusal
from strop.sandbox.protocol import RunOutcome, RunRequest, RunResult
from strop.sandbox.server.config import DispatchConfig
from strop.sandbox.server.floor import Floor
from strop.sandbox.server.jobs import Answer, Leave, Listener, OnStart, RunJob
from strop.sandbox.server.metrics import Tally
from strop.sandbox.server.queueing import Admission
from strop.sandbox.server.sessions import Session, Sessions

_Key = tuple[str, str]  # client and id


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """One answer with a digest of its request, which is not kept itself."""

    digest: int
    result: RunResult
    expires_at: float

    def is_answer_to(self, request: RunRequest) -> bool:
        return self.digest == hash(request)

    @property
    def num_bytes(self) -> int:
        return 512 + len(self.result.text) + len(self.result.reason)


class IdempotencyCache:
    """Answers by client and id. Limited in age, number and size; the oldest go first."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._answers: OrderedDict[_Key, CachedAnswer] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, key: _Key, request: RunRequest, result: RunResult, *, now: float) -> None:
        self._drop(key)
        answer = self._answers[key] = CachedAnswer(hash(request), result, now + self._config.keep_s)
        self.num_bytes += answer.num_bytes
        while self._answers and (len(self._answers) > self._config.max_kept or self.num_bytes > self._config.max_kept_bytes):
            self._drop(next(iter(self._answers)))

    def find(self, key: _Key, *, now: float) -> CachedAnswer | None:
        answer = self._answers.get(key)
        return answer if answer is not None and answer.expires_at >= now else None

    def expire(self, *, now: float) -> None:
        while self._answers and next(iter(self._answers.values())).expires_at < now:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: _Key) -> None:
        if (answer := self._answers.pop(key, None)) is not None:
            self.num_bytes -= answer.num_bytes


class Runs:
    """Owns a call from its request to its answer. In between it is a job on the floor."""

    def __init__(self, config: DispatchConfig, floor: Floor, sessions: Sessions, admission: Admission, tally: Tally) -> None:
        self.kept = IdempotencyCache(config)
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
        key = (client, request.id)
        session: Session | None = None
        refusal = run_refusal(request)
        if not refusal and request.id:
            running, kept = self._by_id.get(key), self.kept.find(key, now=now)
            if running is not None and running.request == request:
                return self._rejoin(running, listener, on_start)
            if running is None and kept is not None and kept.is_answer_to(request):
                self._tally.num_rejoined += 1
                listener(kept.result)
                return None
            if running is not None or kept is not None:
                refusal = f"the id {request.id!r} belongs to another call of this client"
        if refusal:
            self._answer_at_once(listener, RunOutcome.REJECTED, refusal)
            return None
        if request.session:
            try:
                session = self._sessions.find(request.session)
            except SessionLost as error:
                listener(error)
                return None
        elif (no_nodes := self._floor.no_nodes()) is not None:
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
            self._by_id[key] = job
        if session is None:
            self._floor.put(job)
        else:
            self._sessions.enter(session, job)
        return partial(self._leave, job, listener)

    def cancel(self, call_id: str, client: str) -> bool:
        """End the call of this id with an error for every listener; False if there is none."""
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
                del self._abandoned[job]  # a cell that has begun is not stopped, because it cannot run again
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
            return  # it has its answer
        job.listeners.remove(listener)
        if job.listeners:
            return
        if may_return and job.request.id and self._config.linger_s > 0:
            self._abandoned[job] = self._loop.time()
        else:
            self._withdraw(job)

    def _withdraw(self, job: RunJob) -> None:
        job.listeners.clear()
        self._forget(job)  # at once: the same id may come again before its node has stopped the program
        if job.session is not None and job is not job.session.busy:
            self._sessions.leave(job.session, job)
            job.end()
        else:
            self._floor.withdraw(job)

    def _on_end(self, job: RunJob) -> None:
        self._admission.release(job.client, job.num_bytes)
        self._forget(job)
        answer = job.answer
        if job.session is not None:
            if isinstance(answer, MachineError):
                # It is unknown what the cell has done, so no other cell may build on it.
                if not isinstance(answer, SessionLost):
                    answer = SessionLost(f"session {job.session.id!r} is lost: {answer}")
                self._sessions.lose(job.session, str(answer))
            self._sessions.leave(job.session, job)
        elif isinstance(answer, NoNodes):
            self._tally.num_without_node += 1
        elif isinstance(answer, MachineError):
            outcome = RunOutcome.OVERLOADED if isinstance(answer, Overloaded) else RunOutcome.INTERNAL
            answer = RunResult.not_run(outcome, str(answer), level=self._floor.level)
        if answer is None:
            self._tally.num_cancelled += 1
        else:
            self._publish(job, answer)

    def _publish(self, job: RunJob, answer: Answer) -> None:
        if isinstance(answer, RunResult):
            self._tally.add(answer)
            if job.request.id and not answer.outcome.is_ours:
                self.kept.add(job.key, job.request, answer, now=self._loop.time())
        listeners, job.listeners = job.listeners, []
        for listener in listeners:
            listener(answer)

    def _forget(self, job: RunJob) -> None:
        self._abandoned.pop(job, None)
        if self._by_id.get(job.key) is job:
            del self._by_id[job.key]

    def _answer_at_once(self, listener: Listener, outcome: RunOutcome, reason: str) -> None:
        result = RunResult.not_run(outcome, reason, level=self._floor.level)
        self._tally.add(result)
        listener(result)
