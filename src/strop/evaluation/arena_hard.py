"""Arena-Hard (arXiv 2406.11939): how often a judge prefers a model's answers to a baseline's, each pair shown in both orders.

Questions and answers are files of the published schemas, v0.1 (`question_id`, `turns`; `choices`) and v2.0 (`uid`, `prompt`;
`messages`). A clear verdict (>>) counts as three slight ones, as in the published script. Its interval draws verdicts; ours
draws questions, since the verdicts on one of them hang together.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strop.errors import TaskError
from strop.evaluation.arena_hard_prompt import PROMPT
from strop.evaluation.statistics import Estimate, unseen_share
from strop.rewards.scorers.chat_client import ChatClient, ChatServiceConfig, Reply
from strop.rewards.scorers.judge import JudgeConfig, ModelJudge
from strop.rewards.scorers.refusals import Refusals
from strop.rewards.text import final_summary
from strop.runs import write_text
from strop.tasks.files import read_rows
from strop.web import ServiceRefused

logger = logging.getLogger(__name__)

_JUDGE_TOKENS = 4096  # of a judgement, which holds the judge's own answer
_TIMEOUT_S = 1800.0  # of a reply that comes as one: 16 384 tokens at 10 a second
_MAX_TOKENS = 16_384  # of an answer, where the service's file says nothing: a judge's 1024 cut thoughts off
_CLEAR = 3  # how many slight verdicts a clear one is
_NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request of the benchmark."""

    id: str
    prompt: str
    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What one model answered, by question."""

    model: str
    texts: Mapping[str, str]
    cut_off: frozenset[str] = frozenset()  # questions whose answers ended at max_tokens; a published file does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Both verdicts on one question, from -2 (the baseline is much better) to 2; None where a reply holds none."""

    question: Question
    verdicts: tuple[float | None, float | None]  # the baseline shown first, then the model shown first

    @property
    def is_whole(self) -> bool:
        return None not in self.verdicts

    @property
    def wins(self) -> tuple[float, float]:
        """(won, of so many): a verdict is won, lost or half won, and a clear one counts as several."""
        each = [
            ((found > 0) + 0.5 * (found == 0), _CLEAR if abs(found) == 2 else 1) for found in self.verdicts if found is not None
        ]
        return sum(won * weight for won, weight in each), float(sum(weight for _, weight in each))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaResult:
    """As result.json and problems.jsonl hold it."""

    figures: dict[str, Any]
    problems: tuple[dict[str, Any], ...]


def read_questions(path: Path, *, categories: Collection[str] | None = None) -> list[Question]:
    """Those of `categories`, or all.

    Raises:
        TaskError: a file that cannot be read, a row that is no question, none at all, or a category that none is of.
    """
    found = [_question(place, row) for place, row in read_rows(path)]
    if not found:
        raise TaskError(f"{path}: it has no questions.")
    if twice := [id for id, num in Counter(each.id for each in found).items() if num > 1]:
        raise TaskError(f"{path}: question {twice[0]!r} stands there twice. Remove one.")
    known = dict.fromkeys(each.category for each in found)
    if unknown := [name for name in categories or () if name not in known]:
        raise TaskError(f"{path}: no question is of the category {unknown[0]!r}. They are of {', '.join(known)}.")
    return [each for each in found if not categories or each.category in categories]


def with_room_to_answer(config: JudgeConfig) -> JudgeConfig:
    """`config` with tokens and time for a judge that is asked to answer first, where it does not say how many."""
    service = config.service
    room = {"max_tokens": _JUDGE_TOKENS, "timeout_s": _TIMEOUT_S}
    unsaid = {key: value for key, value in room.items() if key not in service.model_fields_set}
    return config.model_copy(update={"service": service.model_copy(update=unsaid)})


def read_answers(path: Path) -> Answers:
    """One model's answers. Raises `TaskError` for a row that is none, or for several models in one file."""
    texts: dict[str, str] = {}
    models, cut_off = set(), set()
    for place, row in read_rows(path):
        id, model, text = _answer(place, row)
        texts[id] = text
        models.add(model)
        told = row.get("metadata")
        if isinstance(told, Mapping) and told.get("finish_reason") == "length":
            cut_off.add(id)
    if len(models) != 1:
        raise TaskError(f"{path}: answers of {len(models)} models ({', '.join(sorted(models))}). A file has those of one.")
    return Answers(model=models.pop(), texts=texts, cut_off=frozenset(cut_off))


async def ask_for_answers(questions: Sequence[Question], service: ChatServiceConfig, out: Path) -> Answers:
    """What a served model answers, written to `out` in the schema of v2.0; a request that it refuses has no answer.

    Answers have up to 16 384 tokens and half an hour where `service` does not say how many. One that is cut off there is
    judged as it is, and a warning tells how many are.

    Raises:
        ServiceRefused: the service failed, or refused all of its first requests, or several different ones in a row.
    """
    room = {"max_tokens": _MAX_TOKENS, "timeout_s": _TIMEOUT_S}
    unsaid = {key: value for key, value in room.items() if key not in service.model_fields_set}
    service = service.model_copy(update=unsaid)
    client, refusals = ChatClient(service, is_kept=lambda text: bool(text.strip())), Refusals(what="without an answer")

    async def ask(question: Question) -> Reply | None:
        with refusals.asking((question.prompt,)) as asking:
            try:
                reply = await client.reply([{"role": "user", "content": question.prompt}])
            except ServiceRefused as refused:
                refusals.add(refused, *asking)
                return None
            refusals.judged(asking)
        return reply

    try:
        replies = await asyncio.gather(*map(ask, questions))
    finally:
        await client.close()
    given = {question.id: reply for question, reply in zip(questions, replies, strict=True) if reply is not None}
    rows = [
        {
            "uid": question.id,
            "model": service.model,
            "messages": [
                {"role": "user", "content": question.prompt},
                {"role": "assistant", "content": {"answer": given[question.id].text}},
            ],
            "metadata": {"finish_reason": given[question.id].finish_reason},
        }
        for question in questions
        if question.id in given
    ]
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    cut_off = frozenset(id for id, reply in given.items() if reply.finish_reason == "length")
    if cut_off:
        logger.warning(
            "%d of %d answers were cut off at max_tokens = %d, and are judged as they are. Raise max_tokens in the file of the"
            " service; all are then asked for anew.",
            len(cut_off),
            len(given),
            service.max_tokens,
        )
    return Answers(model=service.model, texts={id: reply.text for id, reply in given.items()}, cut_off=cut_off)


async def judge_answers(
    questions: Sequence[Question], answers: Answers, baseline: Answers, config: JudgeConfig, *, think_tag: str | None = None
) -> list[Judged]:
    """Both verdicts on every question that model and baseline have answered.

    Args:
        think_tag: of thoughts in the model's answers, which are not shown: DeepSeek-R1 (arXiv 2501.12948) had its final summary
            judged alone, so that length does not count. An answer without one is shown as an empty one.

    Raises:
        TaskError: there is no such question.
        ServiceRefused: the judge failed, or gave no verdict on several questions in a row.
    """
    both = [question for question in questions if question.id in answers.texts and question.id in baseline.texts]
    if not both:
        raise TaskError(
            f"none of {len(questions)} questions is answered by both {answers.model!r} and {baseline.model!r}. Are the files of"
            " one version of the benchmark?"
        )
    judge = ModelJudge(config if config.pair_prompt else config.model_copy(update={"pair_prompt": PROMPT}))

    async def judged(question: Question) -> Judged:
        said, other = answers.texts[question.id], baseline.texts[question.id]
        if think_tag is not None:
            said = final_summary(said, think_tag=think_tag) or ""
        first = await judge.compare_as_shown(question.prompt, other, said)
        second = await judge.compare_as_shown(question.prompt, said, other)
        return Judged(question=question, verdicts=(None if first is None else -first, second))

    try:
        return list(await asyncio.gather(*map(judged, both)))
    finally:
        await judge.close()


def result_of(
    judged: Sequence[Judged],
    *,
    benchmark: str,
    answers: Answers,
    baseline: Answers,
    config: JudgeConfig,
    num_questions: int,
    think_tag: str | None = None,
    seed: int = 0,
) -> ArenaResult:
    """The win rate with its interval, in all and by category; questions without both verdicts are left out and counted.

    Raises:
        TaskError: no question has both verdicts.
    """
    whole = [each for each in judged if each.is_whole]
    if not whole:
        raise TaskError(f"none of {len(judged)} questions has a verdict in both orders, so there is no win rate.")
    rate = win_rate([each.wins for each in whole], seed=seed)
    categories = dict.fromkeys(each.question.category for each in whole)
    by_category = {
        name: win_rate([each.wins for each in whole if each.question.category == name], seed=seed) for name in categories
    }
    firsts = Counter(_told(each.verdicts[0]) for each in whole)
    seconds = Counter(_told(each.verdicts[1]) for each in whole)
    judge = config.service
    figures = {
        "harness": f"arena-hard, judged by {judge.model} against {baseline.model}",
        "benchmark": benchmark,
        "run": answers.model.replace("/", "__"),
        "num_tasks": len(whole),
        "num_without_verdict": len(judged) - len(whole),
        "num_without_answer": num_questions - len(judged),
        "num_cut_off": sum(each.question.id in answers.cut_off for each in judged),
        "k": 1,
        "accuracy": rate.mean,
        "accuracy_low": rate.low,
        "accuracy_high": rate.high,
        "by_category": {name: {"mean": each.mean, "low": each.low, "high": each.high} for name, each in by_category.items()},
        "verdicts": {"baseline_first": dict(firsts), "model_first": dict(seconds)},
        "reward": {
            "kind": "arena_hard",
            "judge": {"model": judge.model, "temperature": judge.temperature, "max_tokens": judge.max_tokens},
            "pair_prompt": config.pair_prompt or PROMPT,
            "baseline": baseline.model,
            "think_tag": think_tag,
        },
    }
    problems = tuple(
        {
            "id": each.question.id,
            "question": each.question.prompt,
            "answer": baseline.texts[each.question.id],
            "correct": [each.wins[0] / each.wins[1]],
            "verdicts": list(each.verdicts),
            "parts": {},
            "num_void": 0,
        }
        for each in whole
    )
    return ArenaResult(figures=figures, problems=problems)


def win_rate(wins: Sequence[tuple[float, float]], *, seed: int) -> Estimate:
    """Summed wins over summed verdicts, with the 95 % bootstrap interval over questions; shares from 0 to 1.

    Args:
        wins: of each question, (won, of so many).
    """
    won, of = (np.array(column, dtype=np.float64) for column in zip(*wins, strict=True))
    mean = float(won.sum() / of.sum())
    if np.all(won / of == won[0] / of[0]):  # all resamples would agree and promise certainty: the exact bound over questions
        reach = unseen_share(len(won))
        return Estimate(mean=mean, low=mean - reach * mean, high=mean + reach * (1 - mean))
    generator = np.random.default_rng(seed)
    rates = np.empty(_NUM_RESAMPLES)
    for start in range(0, _NUM_RESAMPLES, 1000):
        drawn = generator.integers(len(won), size=(1000, len(won)))
        rates[start : start + 1000] = won[drawn].sum(axis=1) / of[drawn].sum(axis=1)
    low, high = np.quantile(rates, [0.025, 0.975])
    return Estimate(mean=mean, low=float(low), high=float(high))


def _told(verdict: float | None) -> str:
    return {2.0: "much better", 1.0: "better", 0.0: "equal", -1.0: "worse", -2.0: "much worse"}[verdict or 0.0]


def _question(place: str, row: Mapping[str, Any]) -> Question:
    id, prompt = row.get("uid", row.get("question_id")), row.get("prompt")
    turns = row.get("turns")
    if prompt is None and isinstance(turns, list) and len(turns) == 1 and isinstance(turns[0], Mapping):
        prompt = turns[0].get("content")
    if not isinstance(id, str | int) or not isinstance(prompt, str):
        raise TaskError(
            f"{place}: no question of Arena-Hard: it has neither uid and prompt (v2.0) nor question_id and one turn of text"
            " (v0.1)."
        )
    return Question(id=str(id), prompt=prompt, category=str(row.get("category") or "all"))


def _answer(place: str, row: Mapping[str, Any]) -> tuple[str, str, str]:
    id, model = row.get("uid", row.get("question_id")), row.get("model", row.get("model_id"))
    try:
        said = row["messages"][-1]["content"] if "messages" in row else row["choices"][0]["turns"][-1]["content"]
        text = said["answer"] if isinstance(said, Mapping) else said
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(id, str | int) or not isinstance(model, str) or not isinstance(text, str):
        raise TaskError(
            f"{place}: no answer of Arena-Hard: it has neither uid, model and messages (v2.0) nor question_id, model_id and"
            " choices (v0.1)."
        )
    return str(id), model, text
