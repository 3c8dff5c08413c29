"""Language consistency: the share of the words of a chain of thought that are in the target language."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import tomllib
import unicodedata
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

from pydantic import Field, field_validator

from strop.errors import TaskError
from strop.rewards.base import RolloutPart, words
from strop.types import Task, Trajectory

_TABLES = tomllib.loads(Path(__file__).with_name("languages.toml").read_text(encoding="utf-8"))
SCRIPTS: dict[str, re.Pattern[str]] = {name: re.compile(f"[{letters}]") for name, letters in _TABLES["scripts"].items()}
"""The letters of each script, in Unicode's form NFKC."""
LANGUAGES: dict[str, list[str]] = _TABLES["languages"]
"""The scripts of each language."""
_PARTS = re.compile(
    r"```[^\n`]*\n(?P<fence>.*?)(?:```|\Z)|`(?P<ticks>[^`\n]*)`"
    r"|<(?P<tag>tool_call|python|search)>(?P<call>.*?)(?:</(?P=tag)>|\Z)"
    r"|\$\$(?P<display>.*?)(?:\$\$|\Z)|\$(?P<dollars>[^$\n]*)\$|\\\((?P<round>.*?)(?:\\\)|\Z)"
    r"|\\\[(?P<square>.*?)(?:\\\]|\Z)|\\boxed\s*\{(?P<box>[^{}]*)\}",
    re.DOTALL,
)
_TEXT_IN_FORMULAS = re.compile(r"\\(?:text|mbox|textbf|textit|textrm)\s*\{([^{}]*)\}")
_BLANKS = re.compile(r"\\[\s,;:!>\\]|~")  # LaTeX's blanks and its end of a line
_COMMANDS_AND_TAGS = re.compile(r"\\[a-zA-Z]+|</?[A-Za-z_]+>")
# Three words of two letters and more, with no operator between them, are a sentence and no formula.
_SENTENCE = re.compile(r"(?<![A-Za-z])[A-Za-z]{2,}(?:[ \t,.;:!?'\"-]+[A-Za-z]{2,}){2,}")
# Points and functions of formulas without dollar signs.
_OF_FORMULAS = re.compile(r"[A-Z]{2,4}|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|lim|max|min|gcd|lcm|mod")
_MAX_PARSED_CHARS = 20_000  # a longer piece of code is read as text
_OF_VARIABLES = ("latin", "greek")  # a single letter of these is a variable
_SIGNS = ("<font>", "<sub>", "<super>")  # Unicode decompositions of the letters of formulas, superscripts and subscripts
_HEBREW_SIGNS = frozenset("\u2135\u2136\u2137\u2138")  # cardinal numbers


def scripts_of(text: str) -> list[str]:
    """The script of each word of `text`, in order; scripts that are not in `SCRIPTS` by their Unicode name, as `THAI`.

    Code and mathematics are not words, but sentences in them are, and so is every text in other letters. A single Latin or
    Greek letter, with any digits and indices, is a variable and not a word; `log` and `ABCD` are of formulas, too. A word that
    changes scripts counts once per script: `sinθ` is `sin` and a variable.
    """
    found = []
    for word in words(prose(text)):
        if word.isascii():
            found += ["latin"] if len(word) > 1 and _OF_FORMULAS.fullmatch(word) is None else []
            continue
        letters = unicodedata.normalize("NFKC", "".join(letter for letter in word if not _is_sign(letter)))
        for script, run in groupby(filter(None, map(_script, letters))):
            if script not in _OF_VARIABLES or len(list(run)) > 1:
                found.append(script)
    return found


def prose(text: str) -> str:
    """`text` without tags, LaTeX commands and what parses as code or mathematics.

    Of what parses, text stays: sentences in comments and strings, `\\text{}` in formulas, names in letters of other scripts. A
    policy could otherwise hide a thought in any language between backticks or dollar signs.
    """
    parts, end = [], 0
    for found in _PARTS.finditer(text):
        parts.append(_COMMANDS_AND_TAGS.sub(" ", text[end : found.start()]))
        end = found.end()
        name = str(found.lastgroup)
        parts.append(_PROSE_OF.get(name, _prose_of_formula)(found[name]))
    parts.append(_COMMANDS_AND_TAGS.sub(" ", text[end:]))
    return " ".join(parts)


def _prose_of_formula(text: str) -> str:
    text = _BLANKS.sub(" ", text)
    texts = _TEXT_IN_FORMULAS.findall(text)
    return " ".join([*texts, _sentences(_COMMANDS_AND_TAGS.sub(" ", _TEXT_IN_FORMULAS.sub(" ", text)))])


def _prose_of_call(text: str) -> str:
    """Of JSON or Python the sentences in it; a program in a call may be wrong, and is still no prose."""
    try:
        strings = _strings(json.loads(text))
    except (ValueError, RecursionError):
        strings = [text]
    return " ".join(_sentences(each) if (prose := _prose_of_code(each)) == each else prose for each in strings)


def _prose_of_code(text: str) -> str:
    """Of Python the sentences in comments and strings, and names in other letters; all of any other text."""
    if len(text) > _MAX_PARSED_CHARS:
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text.strip())
        tokens = list(tokenize.generate_tokens(io.StringIO(text.strip()).readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return text
    names = [each.string for each in tokens if each.type == tokenize.NAME and not each.string.isascii()]
    texts = [each.string.lstrip("bfruBFRU") for each in tokens if each.type not in _NO_TEXT]
    return " ".join([*names, *map(_sentences, texts)])


_NO_TEXT = (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)


_PROSE_OF = {"fence": _prose_of_code, "ticks": _prose_of_code, "call": _prose_of_call}  # of other parts: of a formula


def _strings(value: object) -> list[str]:
    """Every text in a tree of JSON, those of keys too."""
    if isinstance(value, dict | list):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return [text for each in parts for text in _strings(each)]
    return [value] if isinstance(value, str) else []


def _sentences(text: str) -> str:
    """Runs of three words in ASCII letters, and every word in other letters but variables."""
    others = [word for word in words(text) if not word.isascii()]
    return " ".join([*_SENTENCE.findall(text), *others])


def thoughts_of(turns: Sequence[str], *, think_tag: str = "think") -> str:
    """The closed thoughts of all turns. One may begin in a turn's prompt, and go on over a call into the next turn."""
    opening, closing = f"<{think_tag}>", f"</{think_tag}>"
    found: list[str] = []
    is_open = ""  # what may belong to a thought that is not closed yet
    for turn in turns:
        text = is_open + turn
        *closed, rest = text.split(closing)
        found += [part.rpartition(opening)[2] for number, part in enumerate(closed) if number == 0 or opening in part]
        is_open = "".join(rest.partition(opening)[1:]) if closed else text
    return "\n".join(found)


def language_share(thought: str, *, language: str) -> float:
    """Words in the target language as a share of all words of `thought`. DeepSeek-R1 (arXiv 2501.12948) Eq. 7.

    Digits, mathematics, code and single Latin or Greek letters (variables) are in neither count. 0 without a word.
    """
    found = scripts_of(thought)
    return sum(script in LANGUAGES[language] for script in found) / len(found) if found else 0.0


@cache
def _is_sign(letter: str) -> bool:
    return letter in _HEBREW_SIGNS or unicodedata.decomposition(letter).startswith(_SIGNS)


@cache
def _script(letter: str) -> str:
    """The name of the letter's script; empty for an apostrophe, a mark or a digit."""
    for name, letters in SCRIPTS.items():
        if letters.match(letter):
            return name
    return unicodedata.name(letter, "UNKNOWN").split()[0] if unicodedata.category(letter) in ("Ll", "Lo", "Lt", "Lu") else ""


class LanguagePart(RolloutPart):
    """Share of the words of the chain of thought that are in the target language; DeepSeek-R1."""

    class Config(RolloutPart.Config):
        language: str = Field(default="en", description="The target language: " + ", ".join(sorted(LANGUAGES)) + ".")
        language_fact: str = Field(
            default="", description="Name of the fact of a task that holds its target language. Default: `language` for all."
        )
        think_tag: str = Field(default="think", pattern=r"^\w+$", description="Name of the tag around thoughts.")

        @field_validator("language")
        @classmethod
        def _is_known(cls, language: str) -> str:
            if language not in LANGUAGES:
                raise ValueError(f"{language!r:.200}: its script is not known. Known are {', '.join(sorted(LANGUAGES))}.")
            return language

    config: Config

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        language = task.facts.get(self.config.language_fact, self.config.language)
        if language not in LANGUAGES:
            raise TaskError(
                f"task {task.id!r}: its fact {self.config.language_fact!r} is {language!r:.200}; the script of that language is"
                f" not known. Known are {', '.join(sorted(LANGUAGES))}."
            )
        tag = self.config.think_tag
        thoughts = thoughts_of([turn.completion_text for turn in trajectory.turns], think_tag=tag)
        return language_share(thoughts, language=language)
