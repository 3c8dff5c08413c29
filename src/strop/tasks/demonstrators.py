"""Writes what a demonstrator says turn by turn, to teach a format before reinforcement learning.

A script says the completions of one conversation, one after the other; the real tools answer its calls. Calls are JSON; for a
prompt with another form, rollout/demonstrate.py rewrites them when they are played.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Generator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from strop.config import Choice, Config
from strop.errors import TaskError
from strop.tasks.generated import draw_expression
from strop.types import Task, derive_seed

_CALCULATION = re.compile(r"<<([^<>=]+)=([^<>]+)>>")  # GSM8K writes each calculation of a solution as <<48/2=24>>

_THOUGHTS: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("demonstrators.toml").read_text(encoding="utf-8")
)
_SEARCH_TOOL = "search"
Script: TypeAlias = Generator[str, str, None]
"""Yields what the demonstrator says in each turn, and is sent the text of the observation that follows it."""
GuessFraction: TypeAlias = Annotated[
    float, Field(ge=0, le=1, description="Share of demonstrations that answer without a call, mostly wrongly.")
]


class ArithmeticDemonstrator(Config):
    """Computes with the tool. Deliberately flawed: it guesses some answers, and some of its first calls raise.

    Without a tool it adds column by column, and never calls. `stepwise` it computes one operation at a time.
    """

    kind: Literal["arithmetic"] = "arithmetic"
    guess_fraction: GuessFraction = 0.5
    error_fraction: float = Field(
        default=0.4,
        ge=0,
        le=1,
        description="Share of the others whose first call raises and whose second corrects it; stepwise, of the operations.",
    )
    stepwise: bool = Field(
        default=False,
        description="Compute one operation at a time, from left to right: each in its own call, or in thoughts without a tool.",
    )
    foreign_fraction: float = Field(default=0.0, ge=0, le=1, description="Share of thoughts in Russian, each drawn separately.")

    def script(self, task: Task, *, tool: str, seed: int) -> Script:
        """Raises `TaskError` for a task without an expression, and without a tool for one that is no sum."""
        draw = random.Random(derive_seed("demonstration", seed, task.id))
        of_language = random.Random(derive_seed("demonstration-language", seed, task.id))
        expression = _fact(task, "expression", needed_by="arithmetic")

        def thought(name: str) -> str:
            language = "russian" if of_language.random() < self.foreign_fraction else "english"
            return f"<reason>{_THOUGHTS[language][name]}</reason>"

        if draw.random() < self.guess_fraction:
            guess = draw.randint(10 ** (len(task.answer) - 1), 10 ** len(task.answer) - 1)
            yield thought("guess").format(expression=expression, guess=guess) + _answer(str(guess))
            return
        steps = _operations(task.id, expression) if self.stepwise else [expression]
        if not tool:
            worked = ", ".join(steps) if self.stepwise else _by_columns(task.id, expression)
            yield f"<reason>{expression}: {worked}.</reason>{_answer(task.answer)}"
            return
        value = output = ""
        for step in steps:
            before = thought("read").format(output=value) if value else thought("compute").format(expression=expression)
            code, _, value = step.partition("=")
            if draw.random() < self.error_fraction:
                wrong = draw.choice([f"prnt({code})", f"print({code}", f"print(int({code}, 0))"])
                yield f"{before}{_call(tool, wrong)}"
                before = thought("mend")
            output = yield f"{before}{_call(tool, f'print({code})')}"
        yield f"{thought('read').format(output=output.strip())}{_answer(output.strip())}"


def _operations(task_id: str, expression: str) -> list[str]:
    """`27+45-8` as `27+45=72` and `72-8=64`."""
    first, *others = re.findall(r"(?:^|[+-])\d+", expression)
    if "".join([first, *others]) != expression:
        raise TaskError(
            f"task {task_id!r}: the demonstrator 'arithmetic' adds and subtracts stepwise, nothing else. Set"
            " tasks.operators = ['+', '-']."
        )
    steps, value = [], int(first)
    for each in others:
        steps.append(f"{value}{each}={value + int(each)}")
        value += int(each)
    return steps


def _by_columns(task_id: str, expression: str) -> str:
    """`27+45` as `7+5=12, 2+4+1=7`."""
    terms = expression.split("+")
    if not all(map(str.isdigit, terms)):
        raise TaskError(
            f"task {task_id!r}: without a tool, the demonstrator 'arithmetic' can only add. Set tasks.operators = ['+']."
        )
    steps, carry = [], 0
    for place in range(max(map(len, terms))):
        digits = [term[-1 - place] for term in terms if len(term) > place] + [str(carry)] * (carry > 0)
        carry, digit = divmod(sum(map(int, digits)), 10)
        steps.append(f"{'+'.join(digits)}={10 * carry + digit}")
    return ", ".join(steps)


class CalculationsDemonstrator(Config):
    """Runs the calculations that a worked solution marks, as in GSM8K, and answers with what the tool printed."""

    kind: Literal["calculations"] = "calculations"

    def script(self, task: Task, *, tool: str, seed: int) -> Script:
        """Raises `TaskError` for a task without a worked solution, or without a calculation in it."""
        solution = _fact(task, "answer", needed_by="calculations")
        steps = [left.strip() for left, _ in _CALCULATION.findall(solution)]
        if not steps:
            raise TaskError(f"task {task.id!r}: its solution marks no calculation as <<48/2=24>>, so there is nothing to run.")
        output = yield f"<reason>I compute {'; '.join(steps)}.</reason>{_call(tool, f'print({steps[-1]})')}"
        yield _what_the_tool_says(output)


class CountdownDemonstrator(Config):
    """Tries expressions with the tool until one reaches the target. Deliberately flawed: it guesses some answers."""

    kind: Literal["countdown"] = "countdown"
    max_tries: int = Field(default=3, ge=1, le=1000, description="Most calls of a demonstration; the last runs the solution.")
    guess_fraction: GuessFraction = 0.5

    def script(self, task: Task, *, tool: str, seed: int) -> Script:
        """Raises `TaskError` for a task that is no Countdown problem."""
        draw = random.Random(derive_seed("demonstration", seed, task.id))
        target = _fact(task, "target", needed_by="countdown")
        numbers = [int(number) for number in _fact(task, "numbers", needed_by="countdown").split(", ")]
        others = self._others(draw, numbers, _fact(task, "operators", needed_by="countdown"), Fraction(target))
        if draw.random() < self.guess_fraction:
            guess = draw.choice([*others, task.answer])
            yield f"<reason>I guess {guess}.</reason>{_answer(guess)}"
            return
        before = found = ""
        for expression in [*others[: draw.randrange(self.max_tries)], task.answer]:
            output = yield f"<reason>{before}I try {expression}.</reason>{_call(tool, f'print({expression})')}"
            found = output.strip()
            before = f"{found} is not {target}. "
        yield f"<reason>{found} is {target}.</reason>{_answer(task.answer)}"

    def _others(self, draw: random.Random, numbers: list[int], operators: str, target: Fraction) -> list[str]:
        """Different expressions of the same numbers with other values, as many as a demonstration can need, or fewer."""
        found: dict[str, None] = {}
        for _ in range(8 * self.max_tries):
            expression = draw_expression(draw, numbers, operators)
            if expression is not None and expression.value != target:
                found[expression.text] = None
        return list(found)[: self.max_tries]


class LookupDemonstrator(Config):
    """Looks a number up and computes with it. Deliberately flawed: it skips one of the tools, or first calls one wrongly."""

    kind: Literal["lookup"] = "lookup"
    guess_fraction: GuessFraction = 0.4
    head_fraction: float = Field(
        default=0.4, ge=0, le=1, description="Share of those that look up but then compute without a tool, mostly wrongly."
    )
    error_fraction: float = Field(default=0.3, ge=0, le=1, description="Share of those that compute whose first call raises.")

    def script(self, task: Task, *, tool: str, seed: int) -> Script:
        """Raises `TaskError` for a task that is nothing to look up."""
        draw = random.Random(derive_seed("demonstration", seed, task.id))
        subject, attribute, operation = (
            _fact(task, name, needed_by="lookup") for name in ("subject", "attribute", "operation")
        )
        num_digits = len(task.answer.lstrip("-"))
        guess = str(draw.randint(10 ** (num_digits - 1), 10**num_digits - 1))
        give_up = f"<reason>I guess it.</reason>{_answer(guess)}"
        if draw.random() < self.guess_fraction:
            yield give_up
            return
        number, *links = attribute.split(" of ")
        for link in reversed(links):
            shown = yield _search(subject, link)
            subject = next(iter(re.findall(r"\((\w+)\)", shown)[-1:]), "")  # the last name in brackets
            if draw.random() < self.head_fraction:
                yield give_up
                return
        expression = f"{_last_number((yield _search(subject, number)))}{operation}"
        if not operation:
            yield f"<reason>I found it.</reason>{_answer(expression)}"
            return
        if draw.random() < self.head_fraction:
            yield f"<reason>{expression} is {guess}.</reason>{_answer(guess)}"
            return
        thought = "I compute."
        if draw.random() < self.error_fraction:
            yield f"<reason>{thought}</reason>{_call(tool, f'prnt({expression})')}"
            thought = "That call was wrong."
        output = yield f"<reason>{thought}</reason>{_call(tool, f'print({expression})')}"
        yield _what_the_tool_says(output)


def _search(subject: str, attribute: str) -> str:
    return f"<reason>I look it up.</reason>{_json_call(_SEARCH_TOOL, {'query': f'{attribute} of ({subject})'})}"


def _last_number(shown: str) -> str:
    """Raises `TaskError` where a search shows no number."""
    numbers = re.findall(r"\d+", shown)
    if not numbers:
        raise TaskError(
            f"the demonstrator 'lookup' searched with the tool {_SEARCH_TOOL!r}, which answered {shown[:120]!r}, without a"
            " number. Give the recipe a search tool of this name whose backend reads the tasks' corpus."
        )
    return str(numbers[-1])


class RecordedDemonstrator(Config):
    """Says the fact `response` of a task, in one turn: recorded reasoning and answers."""

    kind: Literal["recorded"] = "recorded"

    def script(self, task: Task, *, tool: str, seed: int) -> Script:
        """Raises `TaskError` for a task without a response."""
        yield _fact(task, "response", needed_by="recorded")


DemonstratorConfig: TypeAlias = Annotated[
    ArithmeticDemonstrator | CalculationsDemonstrator | CountdownDemonstrator | LookupDemonstrator | RecordedDemonstrator,
    Choice(),
]


def _fact(task: Task, name: str, *, needed_by: str) -> str:
    if name not in task.facts:
        known = ", ".join(sorted(task.facts)) or "none"
        raise TaskError(
            f"task {task.id!r} has no fact {name!r}, which the demonstrator {needed_by!r} needs; its facts: {known}."
            " Carry the column along with tasks.facts, or choose another demonstrator."
        )
    return task.facts[name]


def _call(tool: str, code: str) -> str:
    return _json_call(tool, {"code": code, "input": ""})


def _json_call(tool: str, arguments: Mapping[str, str]) -> str:
    return "<tool_call>" + json.dumps({"name": tool, "arguments": arguments}) + "</tool_call>"


def _answer(value: str) -> str:
    return f"<answer>\\boxed{{{value}}}</answer>"


def _what_the_tool_says(output: str) -> str:
    return f"<reason>The tool says {output.strip()}.</reason>{_answer(output.strip())}"
