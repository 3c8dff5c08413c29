"""Admits requests into slots and advances all of them, one step at a time."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from strop.engine.config import EngineConfig
from strop.engine.protocol import CompletionRequest, Entropies, check_prefix
from strop.engine.torch.cuda_graphs import open_static_steps
from strop.engine.torch.decoder import CHUNK_BUDGET, Decoder, StepSizes, all_sizes, covering
from strop.engine.torch.kv_cache import CHUNK_MAX, Chunk, Conversation, ConversationTable, Row
from strop.engine.torch.sampling import DrawLimits, banned_mask, draw, limited
from strop.engine.torch.weights import PublishedWeights
from strop.errors import EngineLost, StropError, WeightsNotProven
from strop.types import Completion, FinishReason

Detokenizer = Callable[[Sequence[int]], str]
ResultT = TypeVar("ResultT")

_LENGTHS = (0, 1, 2, 4, 8)  # drafts for each conversation, of which the fastest is used
_DRAFT_ROWS = 24  # to which drafts fill a step up
_TRIES = 4  # steps of each length before any is preferred
_RETRY = 32  # steps until another length is measured again
_KEPT = 0.9  # weight of the steps before, when the next one is measured


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request and the tokens sampled so far."""

    request: CompletionRequest
    future: Future[Completion]
    uniforms: list[float]
    awaits: Awaited | None = None  # columns that another conversation is about to compute
    cached_tokens: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)  # of older weights
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    has_stop_string: bool = False
    num_drafted: int = 0  # tokens that were drawn after a draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """The first columns of another conversation, to be copied when they are computed."""

    source: Conversation
    num_columns: int


class DraftTimes:
    """Seconds and tokens of steps, by the number of drafts for each conversation; those long ago weigh little.

    A step of few rows takes little less time than one of `_DRAFT_ROWS`. When few conversations are left, drafts fill it up:
    each is computed as if it had been drawn, the token after it is drawn with its own uniform, and what was drawn after a
    wrong draft is dropped. So drafts change the time that a completion takes, and none of its tokens.
    """

    def __init__(self) -> None:
        self._num_steps = Counter[int]()
        self._sums = dict.fromkeys(_LENGTHS, (0.0, 0.0))  # seconds, tokens

    def choose(self, most: int) -> int:
        """Return the fastest length up to `most`; now and then another one, to measure it."""
        lengths = [length for length in _LENGTHS if length <= most]
        rarest = min(lengths, key=self._num_steps.__getitem__)
        if self._num_steps[rarest] < _TRIES or self._num_steps.total() % _RETRY == 0:
            return rarest
        return min(lengths, key=lambda length: self._sums[length][0] / self._sums[length][1])

    def note(self, length: int, seconds: float, tokens_per_row: float) -> None:
        self._num_steps[length] += 1
        old_seconds, old_tokens = self._sums[length]
        self._sums[length] = _KEPT * old_seconds + seconds, _KEPT * old_tokens + tokens_per_row


class Batch:
    """The requests of one engine and its KV cache. Used by one thread."""

    def __init__(
        self, config: EngineConfig, decoder: Decoder, weights: PublishedWeights, detokenize: Detokenizer | None
    ) -> None:
        self.sizes: StepSizes = all_sizes(decoder)
        self._is_loading = False  # nothing is admitted or computed while weights change
        self._config, self._decoder, self._weights, self._detokenize = config, decoder, weights, detokenize
        self._table = ConversationTable(config.slots)
        self._waiting: deque[Job] = deque()
        self._arrived: list[Job] = []  # while weights change
        self._running: dict[Conversation, Job] = {}  # in order of their start
        self._static = open_static_steps(config, decoder)
        self._draft_times = DraftTimes()

    @property
    def is_running(self) -> bool:
        return bool(self._running) and not self._is_loading

    def arrive(self, job: Job) -> None:
        """Take a request in, at once if it goes on in place, else into the queue."""
        if self._is_loading:
            self._arrived.append(job)
            return
        request = job.request
        parent = self._table.holder(request.extends)
        try:
            if self._is_in_use(request.id):
                raise StropError(f"request {request.id}: an earlier request of that id was not released.")
            if parent is not None:
                check_prefix(request, parent.ids_to_compare(request))
        except StropError as error:
            fail(job.future, error)
            return
        conversation = self._table.continued_by(request)
        if conversation is None:
            self._waiting.append(job)
        elif self._may_sample(job):
            conversation.num_computed = min(conversation.num_computed, len(request.ids) - 1)
            self._table.continue_(conversation, request)
            job.cached_tokens = conversation.num_computed
            self._running[conversation] = job

    def admit(self) -> None:
        """Start waiting requests, in order of arrival, while there are slots."""
        while self._waiting and self._table.next_slot is not None and not self._is_loading:
            job = self._waiting.popleft()
            if not job.future.done() and self._may_sample(job):
                self._start(job)

    def step(self) -> None:
        """Compute a token for every running request with a complete prompt, and chunks of the other prompts."""
        self._close_ranks()
        self._copy_awaited()
        ready = sorted(
            (each for each in self._running if not each.num_missing and self._running[each].awaits is None),
            key=lambda each: each.slot,
        )
        chunks = self._chunks()
        if not self.sizes.can_mix:
            for chunk in chunks:
                self._compute((), [chunk])
            chunks = []
        elif self._static is not None and chunks:
            self._compute((), chunks)
            chunks = []
        rows = [self._row(each, each.ids[-1], 0) for each in ready]
        if self._static is not None and rows and not any(row.limits for row in rows):
            self._take(rows, ready, self._static.step(rows, self.sizes))
        elif chunks or any(row.limits for row in rows):
            logits = self._compute(rows, chunks)
            if rows:
                self._take(rows, ready, self._draw(rows, logits))
        elif rows:
            self._step_with_drafts(rows, ready)

    def discard(self, request_id: str) -> None:
        """Free the slot or queue place of a conversation, by its newest request. Cancels the request if it runs."""
        for jobs in (self._waiting, self._arrived):
            for job in jobs:
                if job.request.id == request_id:
                    jobs.remove(job)
                    job.future.cancel()
                    return
        if conversation := self._table.by_tail(request_id):
            self._copy_awaited()
            if job_running := self._running.pop(conversation, None):
                job_running.future.cancel()
            self._table.close(conversation)
            self._free_followers(conversation)

    def rest(self) -> None:
        """Give back the memory of the KV cache if no conversation holds any of it: what follows is an update, as a rule."""
        if self._table.has_only_released:
            self._table.close_all()
            self._decoder.cache.clear()

    def abandon(self, future: Future[Completion]) -> None:
        """Discard the request whose future this is, unless it has ended."""
        for job in (*self._arrived, *self._waiting, *self._running.values()):
            if job.future is future:
                self.discard(job.request.id)
                return

    def begin_load(self, *, keeps_requests: bool) -> None:
        """Drop all KV caches; do not sample until weights are proven. Requests that are kept compute their context again.

        Raises `StropError` if completions run or wait and are not kept.
        """
        if not keeps_requests:
            self._require_idle("weights cannot be loaded")
        self._is_loading = True
        if keeps_requests:
            self._table.forget_columns()
            firsts: dict[tuple[int, ...], Conversation] = {}  # that compute a prompt again, by prompt
            for conversation, job in self._running.items():
                job.spans = self._spans(job)
                if job.awaits is not None:
                    job.awaits, job.cached_tokens = None, 0
                first = firsts.setdefault(conversation.opening, conversation)
                if first is not conversation and conversation.opening:
                    job.awaits = Awaited(source=first, num_columns=len(conversation.opening) - 1)
        else:
            self._table.close_all()
        self._decoder.cache.clear()
        self._weights.retract("the last publication did not reach its end")

    def end_load(self) -> None:
        """Requests go on, and those that arrived during the load start, or fail if the load failed."""
        if not self._is_loading:
            return
        self._is_loading = False
        if self._running:
            try:
                self._weights.verify(is_idle=False)
            except WeightsNotProven as error:
                for job in list(self._running.values()):
                    fail(job.future, WeightsNotProven(str(error)))
                    self.discard(job.request.id)
        arrived, self._arrived = self._arrived, []
        for job in arrived:
            self.arrive(job)

    def sleep(self) -> None:
        """Give back the memory of KV cache and weights until the next load.

        Raises `StropError` if completions run or wait.
        """
        self._require_idle("the engine cannot sleep")
        self._table.close_all()
        self._decoder.cache.clear()
        self._weights.free()

    def _require_idle(self, what: str) -> None:
        names = [job.request.id for job in (*self._running.values(), *self._waiting)]
        if names:
            raise StropError(
                f"{what} while {len(names)} completions are running or waiting ({', '.join(names[:3])}, ...)."
                " Await or abort them first."
            )

    def _spans(self, job: Job) -> list[tuple[int, int]]:
        """Up to the newest token."""
        num_older = sum(num for _, num in job.spans)
        newest = [(self._weights.version, len(job.ids) - num_older)] if len(job.ids) > num_older else []
        return [*job.spans, *newest]

    def _is_in_use(self, request_id: str) -> bool:
        return self._table.is_held(request_id) or any(job.request.id == request_id for job in self._waiting)

    def _may_sample(self, job: Job) -> bool:
        try:
            self._weights.verify(is_idle=not self._running)
        except WeightsNotProven as error:
            fail(job.future, error)
            return False
        return True

    def _start(self, job: Job) -> None:
        """Give a request a slot. Columns that another conversation holds, or is about to compute, are copied from there.

        The slot of a conversation that was released is taken over, with what is of use in it.
        """
        request = job.request
        if source := self._table.holder(request.extends):
            num_columns = source.lineage[request.extends].reusable_by(request)
            lineage = source.lineage_of_fork(request.at, num_columns)
            if self._table.is_released(source):
                conversation = self._table.open(request, lineage, source=source, slot=source.slot, num_computed=num_columns)
                job.cached_tokens, source = num_columns, None
            else:
                conversation = self._table.open(request, lineage, source=source)
        else:
            source, num_columns = self._table.with_opening(request.ids), len(request.ids) - 1
            conversation = self._table.open(request, {}, opening=request.ids)
        if source is not None:
            job.awaits, job.cached_tokens = Awaited(source=source, num_columns=num_columns), num_columns
        self._running[conversation] = job

    def _close_ranks(self) -> None:
        """Move conversations from the highest slots to free lower ones if that makes a step smaller."""
        table = self._table
        fewest = covering(self.sizes.slots, max(1, table.num_open))
        while table.num_open and table.highest.slot >= fewest:
            conversation, slot = table.highest, table.next_slot
            assert slot is not None
            if conversation.num_computed:
                self._decoder.cache.copy_across(conversation.slot, slot, conversation.num_computed)
            table.move(conversation)

    def _copy_awaited(self) -> None:
        for conversation, job in self._running.items():
            awaited = job.awaits
            if awaited is not None and awaited.source.num_computed >= awaited.num_columns:
                if awaited.num_columns:
                    self._decoder.cache.copy_across(awaited.source.slot, conversation.slot, awaited.num_columns)
                conversation.num_computed = awaited.num_columns
                job.awaits = None

    def _chunks(self) -> list[Chunk]:
        """Return the next chunks of incomplete prompts, oldest requests first.

        The bounds of a chunk depend only on its own conversation, and so do its bits.
        """
        chunks: list[Chunk] = []
        num_left = CHUNK_BUDGET
        for conversation, job in self._running.items():
            start, end = conversation.num_computed, len(conversation.ids) - 1
            while job.awaits is None and start < end:
                length = min(CHUNK_MAX, end - start)
                num_left -= length
                if num_left < 0:
                    return chunks
                chunks.append(Chunk(slot=conversation.slot, start=start, ids=conversation.ids[start : start + length]))
                start += length
                conversation.num_computed = start
        return chunks

    def _step_with_drafts(self, rows: list[Row], ready: list[Conversation]) -> None:
        """Compute drafts next to few rows, as many as pay. Without them each bit is the same."""
        started = time.perf_counter()
        num_before = sum(len(each.ids) for each in ready)
        can_repeat = self.sizes.is_invariant or not self._config.deterministic
        room = max(len(rows), min(_DRAFT_ROWS, self._config.slots))
        most = covering(self.sizes.tokens, room) // len(rows) - 1 if can_repeat else 0
        longest = self._draft_times.choose(most)
        num_left = {each: len(job.uniforms) - len(job.ids) for each, job in self._running.items()}
        drafts = {each: each.attempts.draft(each, longest)[: num_left[each] - 1] for each in ready}
        drafted = [(each, place) for place in range(longest) for each in ready if place < len(drafts[each])]
        rows += [self._row(each, drafts[each][place], place + 1) for each, place in drafted]
        self._take(rows, [*ready, *(each for each, _ in drafted)], self._draw(rows, self._compute(rows, ())))
        if most:
            num_drawn = sum(len(each.ids) for each in ready) - num_before
            self._draft_times.note(longest if drafted else 0, time.perf_counter() - started, num_drawn / len(ready))

    def _row(self, conversation: Conversation, last: int, num_drafts: int) -> Row:
        """Return a conversation's last id, or the draft `last`, which is so many ids after it."""
        job = self._running[conversation]
        num_drawn = len(job.ids) + num_drafts
        return Row(
            slot=conversation.slot,
            id=last,
            position=len(conversation.ids) - 1 + num_drafts,
            is_draft=num_drafts > 0,
            uniform=job.uniforms[num_drawn],
            temperature=job.request.temperature,
            banned=tuple(job.request.stop_ids) if num_drawn < job.request.min_tokens else (),
            limits=_limits(job.request, conversation.ids),
        )

    def _compute(self, rows: Sequence[Row], chunks: Sequence[Chunk]) -> Tensor:
        """(rows, V) logits."""
        shape = self.sizes.shape(
            num_rows=len(rows),
            num_chunk_tokens=sum(len(chunk.ids) for chunk in chunks),
            num_slots=max((row.slot + 1 for row in rows), default=1),
            num_columns=max((row.position + 1 for row in rows), default=1),
        )
        return self._decoder.step(rows, chunks, shape)

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """(3, rows) float64 on the CPU: ids, log-probs, entropies."""
        device = self._decoder.device
        banned = banned_mask(logits, [(place, each) for place, row in enumerate(rows) for each in row.banned])
        temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device)
        uniform = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=device)
        if not any(row.limits for row in rows):
            return draw(logits, temperatures, uniform, banned).cpu()
        logits, banned, entropies = limited(logits, banned, [row.limits for row in rows], [row.temperature for row in rows])
        drawn = draw(logits, temperatures, uniform, banned).cpu()
        for place, entropy in entropies.items():
            drawn[2, place] = entropy
        return drawn

    def _take(self, rows: Sequence[Row], of: Sequence[Conversation], drawn: Tensor) -> None:
        """Append the drawn tokens, and end the requests that are done. What was drawn after a wrong draft is dropped."""
        if not drawn[1].isfinite().all():
            raise EngineLost("the model's logits are not finite: the published weights are broken.")
        for row, conversation, (drawn_id, logprob, entropy) in zip(rows, of, drawn.T.tolist(), strict=True):
            ids, job, token = conversation.ids, self._running.get(conversation), int(drawn_id)
            if job is None or (row.position, row.id) != (len(ids) - 1, ids[-1]):
                continue
            job.num_drafted += row.is_draft
            job.ids.append(token)
            job.logprobs.append(logprob)
            job.entropies.append(entropy)
            if (probe := job.request.probe) is not None and max(1, probe.num_tokens) == len(job.ids):
                probe.tell(tuple(job.entropies))
            conversation.num_computed += 1
            conversation.ids.append(token)
            if finish_reason := self._finish_reason(job, token):
                self._finish(job, conversation, finish_reason)

    def _finish_reason(self, job: Job, token: int) -> FinishReason | None:
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

    def _finish(self, job: Job, conversation: Conversation, finish_reason: FinishReason) -> None:
        del self._running[conversation]
        self._table.end(conversation)
        resolve(
            job.future,
            Completion(
                ids=tuple(job.ids),
                logprobs=tuple(job.logprobs),
                entropies=tuple(job.entropies),
                is_forced=(False,) * len(job.ids),
                spans=tuple(self._spans(job)),
                finish_reason=finish_reason,
                cached_tokens=job.cached_tokens,
                drafted_tokens=job.num_drafted,
            ),
        )

    def _free_followers(self, gone: Conversation) -> None:
        """Let conversations that wait for columns of `gone` compute their prompts themselves."""
        for conversation, job in self._running.items():
            if job.awaits is not None and job.awaits.source is gone:
                job.awaits, job.cached_tokens = None, 0
                conversation.lineage = {job.request.id: conversation.lineage[job.request.id]}


def _limits(request: CompletionRequest, ids: Sequence[int]) -> DrawLimits | None:
    if request.truncation is None and request.entropies is not Entropies.TOP10:
        return None
    return DrawLimits(truncation=request.truncation, entropies=request.entropies, seen=ids)


def resolve(future: Future[ResultT], result: ResultT) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller was cancelled
        future.set_result(result)


def fail(future: Future[Any], error: StropError) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller was cancelled
        future.set_exception(error)
