"""Arena-Hard (arXiv 2406.11939): how often a judge prefers a model's answers to a baseline's, each pair shown in both orders.

Questions and answers are files of the published schemas, v0.1 (`question_id`, `turns`; `choices`) and v2.0 (`uid`, `prompt`;
`messages`). A clear verdict (>>) counts as three slight ones, as in the published script. The published interval resamples
verdicts; this one resamples questions, since the two verdicts on a question are not independent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strop.errors import TaskError
from strop.evaluation.statistics import Estimate, bootstrap_interval, bounded_share
from strop.rewards.base import final_summary
from strop.rewards.judge import JudgeConfig, ModelJudge, builtin_prompt
from strop.tasks.files import read_rows

_JUDGE_DEFAULTS = {"max_tokens": 4096, "timeout_s": 1800.0}  # a judgement holds the judge's own answer
_CLEAR_WEIGHT = 3

PROMPT = builtin_prompt("arena_hard")
"""The default prompt of the judge, with the criteria of the paper in other words. To compare with published results, give the
published prompt as `pair_prompt` of the judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request of the benchmark."""

    id: str
    prompt: str
    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers of one model, by question id."""

    model: str
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Both verdicts on one question, from -2 (the baseline is much better) to 2, or None where a reply has no verdict."""

    question: Question
    verdicts: tuple[float | None, float | None]  # the baseline shown first, then the model shown first

    @property
    def wins(self) -> tuple[float, float]:
        """(won, total): a verdict is won, lost or half won, and a clear one counts three times."""
        found = [each for each in self.verdicts if each is not None]
        weights = [_CLEAR_WEIGHT if abs(each) == 2 else 1 for each in found]
        won = sum(weight * ((each > 0) + 0.5 * (each == 0)) for weight, each in zip(weights, found, strict=True))
        return won, float(sum(weights))


def read_questions(path: Path, *, categories: Collection[str] = ()) -> list[Question]:
    """Return the questions of `categories`, or all. Raises `TaskError` for a bad row, no question or an unknown category."""
    found = [_question(place, row) for place, row in read_rows(path)]
    if not found:
        raise TaskError(f"{path}: it has no questions.")
    if twice := [id for id, num in Counter(each.id for each in found).items() if num > 1]:
        raise TaskError(f"{path}: question {twice[0]!r} occurs twice. Remove one.")
    known = dict.fromkeys(each.category for each in found)
    if unknown := [name for name in categories if name not in known]:
        raise TaskError(f"{path}: no question has the category {unknown[0]!r}. The categories are {', '.join(known)}.")
    return [each for each in found if not categories or each.category in categories]


def read_answers(path: Path) -> Answers:
    """Return one model's answers. Raises `TaskError` for a bad row, or for several models in one file."""
    rows = [_answer(place, row) for place, row in read_rows(path)]
    models = sorted({model for _, model, _ in rows})
    if len(models) != 1:
        raise TaskError(f"{path}: answers of {len(models)} models ({', '.join(models)}). Give a file with the answers of one.")
    return Answers(model=models[0], texts={id: text for id, _, text in rows})


def with_room_to_answer(config: JudgeConfig) -> JudgeConfig:
    """Return `config` with more tokens and time, where it sets none, for a judge that first answers by itself."""
    more = {key: value for key, value in _JUDGE_DEFAULTS.items() if key not in config.service.model_fields_set}
    return config.model_copy(update={"service": config.service.model_copy(update=more)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The answers of a model against those of a baseline.

    Args:
        benchmark: its name in tables.
        think_tag: the tag of thoughts in the model's answers. The judge sees only the final summary, as in DeepSeek-R1 (arXiv
            2501.12948), so that length does not count; without a summary it sees an empty answer.
    """

    benchmark: str
    questions: Sequence[Question]
    answers: Answers
    baseline: Answers
    config: JudgeConfig
    think_tag: str | None = None

    async def judge(self) -> list[Judged]:
        """Return both verdicts on every question that model and baseline have answered.

        Raises:
            TaskError: no question is answered by both.
            ServiceRefused: the judge failed, or gave no verdict on several questions in a row.
        """
        ours, theirs, config = self.answers.texts, self.baseline.texts, self.config
        both = [question for question in self.questions if question.id in ours and question.id in theirs]
        if not both:
            raise TaskError(
                f"none of {len(self.questions)} questions is answered by both {self.answers.model!r} and"
                f" {self.baseline.model!r}. Check that the files belong to one version of the benchmark."
            )
        judge = ModelJudge(config if config.pair_prompt else config.model_copy(update={"pair_prompt": PROMPT}))

        async def judged(question: Question) -> Judged:
            mine, other = ours[question.id], theirs[question.id]
            if self.think_tag is not None:
                mine = final_summary(mine, think_tag=self.think_tag) or ""
            first = await judge.compare_as_shown(question.prompt, other, mine)
            second = await judge.compare_as_shown(question.prompt, mine, other)
            return Judged(question=question, verdicts=(None if first is None else -first, second))

        try:
            return list(await asyncio.gather(*map(judged, both)))
        finally:
            await judge.close()

    def result(self, judged: Sequence[Judged]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the content of result.json and problems.jsonl: the win rate.

        Questions without both verdicts are left out and counted.

        Raises:
            TaskError: no question has both verdicts.
        """
        whole = [each for each in judged if None not in each.verdicts]
        if not whole:
            raise TaskError(f"none of {len(judged)} questions has a verdict in both orders, so there is no win rate.")
        rate = win_rate([each.wins for each in whole], seed=0)
        judge = self.config.service
        figures = {
            "harness": f"arena-hard, judged by {judge.model} against {self.baseline.model}",
            "benchmark": self.benchmark,
            "run": self.answers.model.replace("/", "__"),
            "num_tasks": len(whole),
            "num_without_verdict": len(judged) - len(whole),
            "num_without_answer": len(self.questions) - len(judged),
            "k": 1,
            "accuracy": rate.mean,
            "accuracy_low": rate.low,
            "accuracy_high": rate.high,
            "reward": {
                "kind": "arena_hard",
                "judge": judge.model_dump(include={"model", "temperature", "max_tokens"}),
                "pair_prompt": self.config.pair_prompt or PROMPT,
                "baseline": self.baseline.model,
                "think_tag": self.think_tag,
            },
        }
        problems = [
            {
                "id": each.question.id,
                "question": each.question.prompt,
                "answer": self.baseline.texts[each.question.id],
                "correct": [each.wins[0] / each.wins[1]],
                "verdicts": list(each.verdicts),
                "parts": {},
                "num_void": 0,
            }
            for each in whole
        ]
        return figures, problems


def win_rate(wins: Sequence[tuple[float, float]], *, seed: int) -> Estimate:
    """Return summed wins over summed verdicts, from 0 to 1, with the 95% bootstrap interval over questions.

    Args:
        wins: (won, total) of each question.
    """
    won, total = (np.array(column, dtype=np.float64) for column in zip(*wins, strict=True))
    mean = float(won.sum() / total.sum())
    if np.all(won / total == won[0] / total[0]):  # all resamples would agree
        return bounded_share(mean, len(won))
    low, high = bootstrap_interval([won, total], lambda won, total, axis: won.sum(axis) / total.sum(axis), seed=seed)
    return Estimate(mean=mean, low=low, high=high)


def _question(place: str, row: Mapping[str, Any]) -> Question:
    id, prompt, turns = row.get("uid", row.get("question_id")), row.get("prompt"), row.get("turns")
    if prompt is None and isinstance(turns, list) and len(turns) == 1 and isinstance(turns[0], Mapping):
        prompt = turns[0].get("content")
    if not isinstance(id, str | int) or not isinstance(prompt, str):
        raise TaskError(
            f"{place}: no question of Arena-Hard: it needs uid and prompt (v2.0), or question_id and one turn of text (v0.1)."
        )
    return Question(id=str(id), prompt=prompt, category=str(row.get("category") or "all"))


def _answer(place: str, row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return question, model and text."""
    id, model = row.get("uid", row.get("question_id")), row.get("model", row.get("model_id"))
    try:
        content = row["messages"][-1]["content"] if "messages" in row else row["choices"][0]["turns"][-1]["content"]
        text = content["answer"] if isinstance(content, Mapping) else content
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(id, str | int) or not isinstance(model, str) or not isinstance(text, str):
        raise TaskError(
            f"{place}: no answer of Arena-Hard: it needs uid, model and messages (v2.0), or question_id, model_id and choices"
            " (v0.1)."
        )
    return str(id), model, text
