"""The prompts: what a policy reads before its first turn, and in which form it is asked to answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from strop.config import Config, load_toml, validate
from strop.errors import ConfigError, did_you_mean
from strop.rollout.chat_template import ChatFormat, Message, Span
from strop.rollout.tool_calls import Calls
from strop.tools.protocol import ToolSpec


class AnswerForm(StrEnum):
    """Where a grader looks for the answer. A prompt lists those in which its answers are found; a reward has one a grader."""

    BOX_IN_TAG = "box_in_tag"
    TAG = "tag"
    BOX = "box"
    R1_ZERO = "r1_zero"
    ARPO = "arpo"
    CODE = "code"

    @property
    def words(self) -> str:
        """Behind "reads" or "found in"."""
        return _WORDS[self]


_WORDS = {
    AnswerForm.BOX_IN_TAG: r"a \boxed{} inside <answer> tags",
    AnswerForm.TAG: "<answer> tags, with a box in them or without",
    AnswerForm.BOX: r"a \boxed{} anywhere in the last turn",
    AnswerForm.R1_ZERO: "the text after `</think> <answer>`",
    AnswerForm.ARPO: r"thoughts in <think> tags, then a \boxed{} inside the one pair of <answer> tags",
    AnswerForm.CODE: "the last fenced block of Python of the last turn",
}


_PLACEHOLDER = re.compile(r"\{(question|tools)\}")


class PromptMessage(Config):
    """One message of a prompt. Only `{question}` and `{tools}` are filled in; any other brace is text."""

    role: Literal["system", "user", "assistant"] = Field(description="Who says it.")
    content: str = Field(description="The text, with {question} and {tools}.")


class Prompt(Config):
    """Messages, or one raw text, with places for the question and the tools, and how the policy writes calls and answers."""

    source: str = Field(description="Where the prompt is published.")
    messages: tuple[PromptMessage, ...] = Field(default=(), description="The messages before the first turn.")
    raw: str = Field(
        default="", description="Instead of messages: a text to continue, without a chat template. `file` names a file of it."
    )
    prefill: str = Field(default="", description="Text with which each turn of the policy begins.")
    think_tag: str = Field(
        default="reason", pattern=r"^\w+$", description="Name of the tag in which demonstrators of strop write thoughts."
    )
    finished_call: str = Field(
        default="{message}", description="What the policy reads of a call that ran without error, with {message}."
    )
    failed_call: str = Field(
        default="{message}", description="What the policy reads of a call that failed, with {reason} and {message}."
    )
    calls: Calls = Field(default=Calls.JSON, description="How the policy writes tool calls.")
    stop: tuple[str, ...] = Field(default=(), description="Strings at which sampling stops, next to the end of a turn.")
    graders: tuple[AnswerForm, ...] = Field(
        default=(), description="Rewards that find answers in the form that the prompt asks for; none if it asks for none."
    )

    @model_validator(mode="after")
    def _asks_the_question_once(self) -> Self:
        if bool(self.messages) == bool(self.raw):
            raise ValueError("give either messages, or the raw text of a prompt (raw, or file), and not both.")
        texts = [one.content for one in self.messages] or [self.raw]
        num_places = sum(text.count("{question}") for text in texts)
        if num_places != 1:
            raise ValueError(f"its messages hold {{question}} {num_places} times: write it in one place, once.")
        return self

    def ids(self, chat: ChatFormat, question: str, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        """What a policy reads before its first turn.

        Raises:
            ModelError: the chat template refuses the conversation (a system message, for some).
        """
        messages = self.fill(question, tools)
        if self.raw:
            return chat.raw_ids([*messages[0].spans, Span(text=self.prefill, is_ours=True)])
        return chat.prompt_ids(messages, self.prefill)

    def describe_success(self, message: str) -> str:
        """What the policy reads of a call that ran without error. Without a message, the line for it is left out."""
        lines = [line for line in self.finished_call.split("\n") if message or "{message}" not in line]
        return "\n".join(lines).replace("{message}", message)

    def describe_failure(self, reason: str, message: str) -> str:
        """What the policy reads of a call that failed. An exception is its own reason."""
        return self.failed_call.replace("{reason}", reason).replace("{message}", message)

    def bare(self, question: str) -> str:
        """`question` without the words of a raw text around it, as files of whole prompts have them; blanks may differ."""
        before, _, after = self.raw.partition("{question}")
        around = [r"\s+".join(map(re.escape, re.split(r"\s+", text))) for text in (before.lstrip(), after.rstrip())]
        found = re.fullmatch("(.*?)".join(around), question.strip(), re.DOTALL) if any(around) else None
        return question if found is None else found[1]

    def fill(self, question: str, tools: Sequence[ToolSpec]) -> tuple[Message, ...]:
        """The messages about `question`, with one JSON signature a line for `{tools}`. The question counts as not ours.

        A raw text is one message. A question that is already in the words of a raw text, as in files of whole prompts, is taken
        out of them, so that the same ids follow from both.
        """
        question = self.bare(question)
        messages = self.messages or (PromptMessage(role="user", content=self.raw),)
        signatures = "\n".join(json.dumps(tool.as_function(), ensure_ascii=False) for tool in tools)
        places = {"question": Span(text=question, is_ours=False), "tools": Span(text=signatures, is_ours=True)}
        filled = []
        for one in messages:
            pieces = enumerate(_PLACEHOLDER.split(one.content))  # every second one is the name of a place
            spans = [places[piece] if position % 2 else Span(text=piece, is_ours=True) for position, piece in pieces]
            filled.append(Message(role=one.role, spans=tuple(span for span in spans if span.text)))
        return tuple(filled)


def prompt_names() -> list[str]:
    """The prompts that strop ships."""
    return sorted(Path(entry.name).stem for entry in _SHIPPED.iterdir() if entry.name.endswith(".toml"))


def load_prompt(name_or_path: str) -> Prompt:
    """A shipped prompt by its name, or one's own by its path, which ends in `.toml`.

    Raises:
        ConfigError: there is no such prompt, or the file is not one.
    """
    if name_or_path.endswith(".toml"):
        return _read(Path(name_or_path))
    names = prompt_names()
    if name_or_path not in names:
        hint = did_you_mean(name_or_path, names)
        raise ConfigError(
            f"prompt {name_or_path!r}: no such prompt.{hint} The shipped ones are {', '.join(names)}; give a path that ends"
            " in .toml for one of your own."
        )
    return _read(Path(str(_SHIPPED / f"{name_or_path}.toml")))


def _read(path: Path) -> Prompt:
    tree = dict(load_toml(path))
    if isinstance(tree.get("file"), str):
        text = path.parent / str(tree.pop("file"))
        try:
            tree["raw"] = text.read_text(encoding="utf-8").replace("{instruction}", "{question}")  # CS336's supplement
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: its file {text} cannot be read: {error}. Name a text file next to it.") from error
    return validate(Prompt, tree, place=str(path))


_SHIPPED = files("strop.rollout") / "prompts"
