"""Loads the prompts: what a policy reads before its first turn, one TOML file each, with its source."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from strop.config import Config, load_toml, validate
from strop.errors import ConfigError
from strop.rollout.chat import Message, Span
from strop.tools.protocol import ToolSpec

_PLACEHOLDER = re.compile(r"\{(question|tools)\}")


class PromptMessage(Config):
    """One message of a prompt. Only `{question}` and `{tools}` are filled in; any other brace is text."""

    role: Literal["system", "user", "assistant"]
    content: str


class Prompt(Config):
    """Messages with places for the question and the tools, and the words put into the assistant's mouth."""

    source: str
    messages: tuple[PromptMessage, ...]
    prefill: str = ""

    @model_validator(mode="after")
    def _asks_the_question_once(self) -> Self:
        num_places = sum(one.content.count("{question}") for one in self.messages)
        if num_places != 1:
            raise ValueError(f"its messages hold {{question}} {num_places} times: write it in one place, once.")
        return self

    def fill(self, question: str, tools: Sequence[ToolSpec]) -> tuple[Message, ...]:
        """The messages about `question`, with one JSON signature a line for `{tools}`. The question counts as not ours."""
        signatures = "\n".join(json.dumps(tool.as_function(), ensure_ascii=False) for tool in tools)
        filled = []
        for one in self.messages:
            spans = []
            for position, piece in enumerate(_PLACEHOLDER.split(one.content)):
                if position % 2 == 0:
                    spans.append(Span(text=piece, is_ours=True))
                elif piece == "question":
                    spans.append(Span(text=question, is_ours=False))
                else:
                    spans.append(Span(text=signatures, is_ours=True))
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
        return validate(Prompt, load_toml(Path(name_or_path)), place=name_or_path)
    names = prompt_names()
    if name_or_path not in names:
        nearest = difflib.get_close_matches(name_or_path, names, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(
            f"prompt {name_or_path!r}: no such prompt.{hint} The shipped ones are {', '.join(names)}; give a path that ends"
            " in .toml for one of your own."
        )
    path = Path(str(_SHIPPED / f"{name_or_path}.toml"))
    return validate(Prompt, load_toml(path), place=str(path))


_SHIPPED = files("strop.rollout") / "prompts"
