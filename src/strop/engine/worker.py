"""The thread that owns the model: it admits requests into slots and advances all of them by one token at a time."""

from __future__ import annotations

import math
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from strop.engine.config import EngineConfig
from strop.engine.conversations import Conversation, ConversationTable, Share
from strop.engine.decoder import Decoder, Prefix
from strop.engine.invariance import all_sizes, invariant_sizes
from strop.engine.protocol import CompletionRequest
from strop.engine.publication import PublishedWeights
from strop.engine.requests import check_prefix
from strop.engine.sampling import Draw, draw, uniforms
from strop.errors import DeadlineExceeded, EngineLost, StropError, WeightsNotProven
from strop.types import Completion, FinishReason

Detokenizer = Callable[[Sequence[int]], str]
ResultT = TypeVar("ResultT")

_STOP_S = 60.0  # how long a step, or a prefill, may still take when the worker is told to stop


@dataclass(slots=True, eq=False, kw_only=True)
class _Job:
    """One request on its way: what was sampled so far."""

    request: CompletionRequest
    future: Future[Completion]
    uniforms: list[float]
    snapshot: _Snapshot | None = None  # of the conversation that it forks, if that was released while this waited
    cached_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    has_stop_string: bool = False

    @property
    def bans_stop_ids(self) -> bool:
        return len(self.ids) < self.request.min_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """What a fork needs of a conversation that is gone."""

    prefix: Prefix  # maybe longer than this fork needs
    num_computed: int  # columns to copy
    lineage: dict[str, Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComputedPrompt:
    prefix: Prefix
    logits: Tensor  # (V,) float32, after its last id


class Worker:
    """Every method without an underscore may be called from any thread; all others run in the worker's own."""

    def __init__(
        self, config: EngineConfig, decoder: Decoder, weights: PublishedWeights, detokenize: Detokenizer | None
    ) -> None:
        self._config, self._decoder, self._weights, self._detokenize = config, decoder, weights, detokenize
        self._table = ConversationTable(config.slots)
        self._waiting: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}  # by slot
        self._refused: dict[str, str] = {}  # a refused request -> the tail of the conversation that it would have gone on
        self._prompts: OrderedDict[tuple[int, ...], _ComputedPrompt] = OrderedDict()  # least recently used first
        self._logits = torch.zeros(
            config.slots, decoder.architecture.vocab_size, dtype=torch.float32, device=decoder.device
        )  # from which the next token of each running row is drawn
        self._sizes = all_sizes(decoder)
        self._is_calibrated = not config.deterministic
        self._is_loading = False

        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: stop
        self._lock = threading.Lock()  # over the next two
        self._outstanding: set[Future[Any]] = set()
        self._end: EngineLost | None = None  # why there is no worker any more
        self._thread = threading.Thread(target=self._run, name="strop-engine", daemon=True)
        self._thread.start()

    @property
    def is_deterministic(self) -> bool:
        """Asked for, and not found false by measurement when the first weights arrived."""
        return self._config.deterministic and (self._sizes.is_invariant or not self._is_calibrated)

    def submit(self, request: CompletionRequest) -> Future[Completion]:
        """Queue a request. Cancel it by `abandon`, with the future that this returned."""
        drawn = uniforms(request.seed, request.max_tokens)
        job = _Job(request=request, future=Future(), uniforms=drawn)
        self._track(job.future)
        self._inbox.put(lambda: self._arrive(job))
        return job.future

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `function` in the worker's thread, between two steps; a `StropError` of it reaches the caller alone."""
        future: Future[ResultT] = Future()
        self._track(future)

        def answer() -> None:
            try:
                _resolve(future, function())
            except StropError as error:
                _fail(future, error)

        self._inbox.put(answer)
        return future

    def refuse(self, request: CompletionRequest) -> None:
        """Note that a request was refused before it came here."""
        self._inbox.put(lambda: self._note_refusal(request))

    def discard(self, request_id: str) -> None:
        """Give back what the newest request of a conversation holds: its slot, its place in the queue; cancel it if it runs."""
        self._inbox.put(lambda: self._discard(request_id))

    def abandon(self, future: Future[Completion]) -> None:
        """Discard the request whose future this is, unless it has ended."""
        self._inbox.put(lambda: self._abandon(future))

    def begin_load(self) -> Future[None]:
        """Drop all KV and refuse to sample until weights are proven. Fails with `StropError` while completions run or wait."""
        return self.call(self._begin_load)

    def end_load(self) -> None:
        """Let the requests that arrived during a load go on, or be refused if it failed."""
        self._inbox.put(self._end_load)

    def prove(self, prove: Callable[[], None]) -> Future[None]:
        """Run `prove`, which proves the weights, then measure what deterministic mode needs to know of them."""

        def prove_and_calibrate() -> None:
            prove()
            if not self._is_calibrated:
                self._sizes = invariant_sizes(self._decoder)
                self._is_calibrated = True

        return self.call(prove_and_calibrate)

    def stop(self) -> None:
        """End the thread; what is outstanding fails with `EngineLost`. Raises `DeadlineExceeded` when it hangs."""
        self._inbox.put(None)
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the engine's worker thread did not end within {_STOP_S} s: a model step hangs.")

    def _track(self, future: Future[Any]) -> None:
        with self._lock:
            if self._end is not None:
                raise EngineLost(str(self._end)) from self._end.__cause__
            self._outstanding.add(future)
        future.add_done_callback(self._outstanding.discard)

    def _run(self) -> None:
        end = EngineLost("the engine was closed.")
        try:
            if self._config.threads is not None:
                torch.set_num_threads(self._config.threads)
            self._serve()
        except BaseException as error:  # noqa: BLE001 - whatever ended this thread is handed to everybody who waits for it
            end = EngineLost(f"the engine's worker died of {type(error).__name__}: {error}")
            end.__cause__ = error
        with self._lock:
            self._end = end
            outstanding = list(self._outstanding)
        for future in outstanding:
            lost = EngineLost(str(end))
            lost.__cause__ = end.__cause__
            _fail(future, lost)

    def _serve(self) -> None:
        while True:
            for command in self._commands():
                if command is None:
                    return
                command()
            with torch.inference_mode():
                self._admit()
                if self._running:
                    self._step()

    def _commands(self) -> Iterator[Callable[[], None] | None]:
        """What was asked meanwhile; waits for something while no request runs."""
        if not self._running:
            yield self._inbox.get()
        while not self._inbox.empty():
            yield self._inbox.get()

    def _arrive(self, job: _Job) -> None:
        request = job.request
        parent = self._table.holder(request.extends)
        try:
            if self._is_in_use(request.id):
                raise StropError(f"request {request.id}: an earlier request of that id was not released.")
            if parent is not None:
                is_whole = parent.tail == request.extends
                check_prefix(request, parent.ids if is_whole else parent.ids[: request.at])
        except StropError as error:
            self._refuse(job, error)
            return
        conversation = self._table.continued_by(request)
        if conversation is None:
            self._waiting.append(job)
        elif self._may_sample(job):
            reused = min(conversation.num_computed, len(request.ids) - 1)
            self._table.continue_(conversation, request)
            with torch.inference_mode():
                self._start(job, conversation, reused)

    def _is_in_use(self, request_id: str) -> bool:
        return self._table.holder(request_id) is not None or any(job.request.id == request_id for job in self._waiting)

    def _refuse(self, job: _Job, error: StropError) -> None:
        self._note_refusal(job.request)
        _fail(job.future, error)

    def _note_refusal(self, request: CompletionRequest) -> None:
        """A conversation is released by its newest request, be it refused."""
        if conversation := self._table.continued_by(request):
            self._refused[request.id] = conversation.tail

    def _admit(self) -> None:
        """Start waiting requests, in order of arrival, while there are slots."""
        while self._waiting and self._table.has_free_slot and not self._is_loading:
            job = self._waiting.popleft()
            if job.future.done() or not self._may_sample(job):
                continue
            request = job.request
            if parent := self._table.holder(request.extends):
                reused = parent.lineage[request.extends].reusable_by(request)
                conversation = self._table.open(request, parent.lineage_of_fork(request.at, reused))
                self._decoder.copy_across(parent.slot, conversation.slot, reused)
                self._start(job, conversation, reused)
            elif job.snapshot is not None:
                conversation = self._table.open(request, job.snapshot.lineage)
                reused = job.snapshot.num_computed
                self._decoder.copy_in(conversation.slot, job.snapshot.prefix, reused)
                self._start(job, conversation, reused)
            else:
                self._start_afresh(job, self._table.open(request, {}))

    def _may_sample(self, job: _Job) -> bool:
        try:
            self._weights.verify(is_thorough=not self._running)
        except WeightsNotProven as error:
            self._refuse(job, error)
            return False
        return True

    def _start(self, job: _Job, conversation: Conversation, reused: int) -> None:
        """Compute the ids after the first `reused`, whose KV is in the slot."""
        ids = job.request.ids
        self._logits[conversation.slot] = self._decoder.prefill(conversation.slot, ids[reused:], reused)
        self._run_job(job, conversation, cached_tokens=reused)

    def _start_afresh(self, job: _Job, conversation: Conversation) -> None:
        """Compute a prompt, or take it over from another request of the group that had the same one."""
        ids, slot = job.request.ids, conversation.slot
        prompt = self._prompts.pop(ids, None)
        cached_tokens = 0
        if prompt is not None:
            self._decoder.copy_in(slot, prompt.prefix, len(ids))
            cached_tokens = len(ids)
        else:
            logits = self._decoder.prefill(slot, ids, 0)
            prompt = _ComputedPrompt(prefix=self._decoder.copy_out(slot, len(ids)), logits=logits)
        self._logits[slot] = prompt.logits
        self._prompts[ids] = prompt
        if len(self._prompts) > self._config.cached_prompts:
            self._prompts.popitem(last=False)
        self._run_job(job, conversation, cached_tokens=cached_tokens)

    def _run_job(self, job: _Job, conversation: Conversation, *, cached_tokens: int) -> None:
        conversation.num_computed = len(conversation.ids)
        job.cached_tokens = cached_tokens
        self._running[conversation.slot] = job

    def _step(self) -> None:
        """Draw one token for every running request, end those that are done, and compute the rest one position further."""
        num_rows, _ = self._sizes.covering(max(self._running) + 1, 1)
        drawn = self._draw(num_rows)
        ids, logprobs, entropies = drawn.ids.tolist(), drawn.logprobs.tolist(), drawn.entropies.tolist()
        if not math.isfinite(sum(logprobs[slot] for slot in self._running)):
            raise EngineLost("the model's logits are not finite: the published weights are broken.")
        fed = [0] * self._config.slots
        positions = [0] * self._config.slots
        num_columns = 0
        for conversation in self._table:
            slot = conversation.slot
            positions[slot] = conversation.num_computed  # idle rows write there too: the next column to be overwritten
            if not conversation.is_running:
                continue
            job, token = self._running[slot], ids[slot]
            job.ids.append(token)
            job.logprobs.append(logprobs[slot])
            job.entropies.append(entropies[slot])
            conversation.ids.append(token)
            if finish_reason := self._finish_reason(job, token):
                self._finish(job, conversation, finish_reason)
                continue
            fed[slot] = token
            conversation.num_computed += 1
            num_columns = max(num_columns, conversation.num_computed)
        if self._running:
            num_rows, num_columns = self._sizes.covering(max(self._running) + 1, num_columns)
            device = self._decoder.device
            self._logits[:num_rows] = self._decoder.decode(
                torch.tensor(fed[:num_rows], device=device), torch.tensor(positions[:num_rows], device=device), num_columns
            )

    def _draw(self, num_rows: int) -> Draw:
        temperatures, drawn = [1.0] * num_rows, [0.0] * num_rows
        banned_rows: list[int] = []
        banned_ids: list[int] = []
        for slot, job in self._running.items():
            temperatures[slot] = job.request.temperature
            drawn[slot] = job.uniforms[len(job.ids)]
            if job.bans_stop_ids:
                banned_rows += [slot] * len(job.request.stop_ids)
                banned_ids += job.request.stop_ids
        device = self._decoder.device
        logits = self._logits[:num_rows]
        banned = None
        if banned_ids:
            banned = torch.zeros_like(logits, dtype=torch.bool)
            banned[banned_rows, banned_ids] = True
        return draw(
            logits,
            torch.tensor(temperatures, device=device),
            torch.tensor(drawn, dtype=torch.float64, device=device),
            banned,
        )

    def _finish_reason(self, job: _Job, token: int) -> FinishReason | None:
        request = job.request
        if token in request.stop_ids:
            return FinishReason.STOP
        if request.stop_strings and self._detokenize is not None:
            # A stop string ends in the newest token or was found before; a token may be as short as a quarter character.
            window = 4 * max(len(stop) for stop in request.stop_strings) + 4
            text = self._detokenize(job.ids[-window:])
            job.has_stop_string = job.has_stop_string or any(stop in text for stop in request.stop_strings)
            if job.has_stop_string and len(job.ids) >= request.min_tokens:
                return FinishReason.STOP
        return FinishReason.LENGTH if len(job.ids) == request.max_tokens else None

    def _finish(self, job: _Job, conversation: Conversation, finish_reason: FinishReason) -> None:
        del self._running[conversation.slot]
        self._table.end(conversation)
        _resolve(
            job.future,
            Completion(
                ids=tuple(job.ids),
                logprobs=tuple(job.logprobs),
                entropies=tuple(job.entropies),
                is_forced=(False,) * len(job.ids),
                policy_version=self._weights.version,
                finish_reason=finish_reason,
                cached_tokens=job.cached_tokens,
            ),
        )

    def _discard(self, request_id: str) -> None:
        request_id = self._refused.pop(request_id, request_id)
        for job in self._waiting:
            if job.request.id == request_id:
                self._waiting.remove(job)
                job.future.cancel()
                return
        if conversation := self._table.by_tail(request_id):
            if job_running := self._running.pop(conversation.slot, None):
                job_running.future.cancel()
            self._table.close(conversation)
            self._keep_for_forks(conversation)

    def _abandon(self, future: Future[Completion]) -> None:
        for job in (*self._waiting, *self._running.values()):
            if job.future is future:
                self._discard(job.request.id)
                return

    def _keep_for_forks(self, gone: Conversation) -> None:
        """Copy what waiting forks of `gone` need and nobody else holds, before its slot is given away."""
        forks = [
            job
            for job in self._waiting
            if job.snapshot is None and job.request.extends in gone.lineage and not self._table.holder(job.request.extends)
        ]
        if not forks:
            return
        lengths = [gone.lineage[job.request.extends].reusable_by(job.request) for job in forks]
        prefix = self._decoder.copy_out(gone.slot, max(lengths))
        for job, length in zip(forks, lengths, strict=True):
            lineage = gone.lineage_of_fork(job.request.at, length)
            job.snapshot = _Snapshot(prefix=prefix, num_computed=length, lineage=lineage)

    def _begin_load(self) -> None:
        if self._is_loading:
            raise StropError("weights are already being loaded into this engine; loads come one at a time.")
        if self._running or self._waiting:
            names = [job.request.id for job in (*self._running.values(), *self._waiting)]
            raise StropError(
                f"weights cannot be loaded while {len(names)} completions are running or waiting ({', '.join(names[:3])}, ...)."
                " Await or abort them first."
            )
        self._is_loading = True
        self._table.close_all()
        self._refused.clear()
        self._prompts.clear()
        self._decoder.clear()
        self._weights.retract("the last publication did not reach its end")

    def _end_load(self) -> None:
        self._is_loading = False


def _resolve(future: Future[ResultT], result: ResultT) -> None:
    try:
        future.set_result(result)
    except InvalidStateError:  # whoever waited has gone
        return


def _fail(future: Future[Any], error: StropError) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:  # whoever waited has gone
        return
