r"""Two plain notations for answers to mathematical problems, and comparisons in them.

`normal_form` is for comparisons as texts, which need algebra for the rest; that runs in a process of this machine. `canonical`
is what `math_answers` reads: one sign for each thing, numbers in digits, nothing around the answer. It does not change what a
text says: `two thirds`, `⅔`, `$$\dfrac23.$$` and `**2/3** ✓` become fractions, `more than 5` stays.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import tomllib
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

from strop.answer_text import BOX, closes_at, exact_match, last_box, plain_number
from strop.errors import MachineError, UserError
from strop.sandbox.protocol import PairVerdict
from strop.sandbox.verify_process import ProcessVerifier

MAX_CHARS = 4_000  # of one answer; a longer one is not read
MAX_NUMBER_CHARS = 200  # of a number with its unit; patterns for numbers never see more of the policy's text

TABLES = tomllib.loads(Path(__file__).with_name("math_words.toml").read_text(encoding="utf-8"))

_Rule: TypeAlias = tuple[str, str | Callable[[re.Match[str]], str]]


def _rewriting(*rules: _Rule) -> Callable[[str], str]:
    """A function that applies `rules`, each a pattern and its replacement, in their order."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def rewritten(text: str) -> str:
        for pattern, replacement in compiled:
            text = pattern.sub(replacement, text)
        return text

    return rewritten


_WHOLE_FRACTIONS = (  # \frac12 and \frac1{2}
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
)
_UNITS = (
    "degree|deg|cm|mm|km|centimeter|meter|metre|kilometer|mile|inch|foot|feet|ft|yard|second|sec|minute|min|hour|hr|day|week|month"
    "|year|mph|gram|kg|pound|lb|liter|litre|gallon|dollar|cent|percent|unit|point|student|people|square unit"
)
_in_normal_form = _rewriting(
    (r"[−–]", "-"),
    (r"\\(?:mbox|mathrm|textbf|mathbf|textit)(?=\s*\{)", r"\\text"),
    (r"^\\text\s*\{([^{}]*)\}$", r"\1"),
    (r"\\text\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s", ","),
    (r"(?<=[^\s])\s*\\text\s*\{[^{}]*\}(?:\^\{?[23]\}?)?$", ""),  # a unit after something else
    (r"\\(?:left|right)(?![a-zA-Z])|\\[!;,: ]|~", ""),
    (r"\{,\}", ","),
    (r"\\?[$%]|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(l|g|n)eq(?![a-zA-Z])", r"\\\1e"),
    (rf"(?<=[\d}}])\s*(?:{_UNITS})(?:e?s)?\.?(?:\s*\^\s*\{{?[23]\}}?)?$", ""),
    (r"^\s*[a-zA-Z][a-zA-Z0-9]?\s*=([^=]*)$", r"\1"),  # x = 5
    (r"(?<=\d)\s+(?=\d+\s*/\s*\d)", "+"),  # 7 3/4
    (r"\s+", ""),
    (r"\.$", ""),
    *_WHOLE_FRACTIONS,
    (r"\\frac\{-([^{}]*)\}", r"-\\frac{\1}"),
    (r"\\sqrt([0-9a-zA-Z])", r"\\sqrt{\1}"),
    (r"√([0-9a-zA-Z])", r"\\sqrt{\1}"),
    (r"(?<![\\a-zA-Z])sqrt\(([^()]*)\)|√\(([^()]*)\)", r"\\sqrt{\1\2}"),
    (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])|π", r"\\pi "),
    (r"∞", r"\\infty "),
    (r"\*\*", "^"),
    (r"[*·×]|\\times(?![a-zA-Z])", r"\\cdot "),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
)
_FRACTION = re.compile(r"-?\\frac\{\d+\}\{\d+\}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_MAX_LETTERS = 2  # more different ones are words; algebra would multiply their letters, and "dear" would equal "read"
_SPACES = ("\\,", "\\;", "\\:", "\\!", "~")  # in LaTeX

_STYLE = re.compile(r"^\\(?:displaystyle|textstyle)(?![a-zA-Z])\s*")
_BASED = re.compile(r"(\d+)\s*_\s*(?:\{\s*(\d+)\s*\}|(\d+))")
_UNIT_POWER = re.compile(r"[\d}]\s*\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*(?:\^\s*\{?\s*(\d)\s*\}?)?$")


def normal_form(answer: str) -> str:
    """The answer without spaces, case, units, dollar and per cent signs, and with fractions in one notation."""
    text = _in_normal_form(answer.strip())
    if len(text) > 1 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    number = plain_number(text)
    return text.lower().strip() if number is None else f"{number.normalize():f}"


def equal_by_text(gold: str, answer: str) -> bool | None:
    """Whether the two are equal as texts or plain numbers; None: only algebra can say. Takes time linear in their length."""
    if len(gold) > MAX_CHARS or len(answer) > MAX_CHARS:
        return False
    gold, answer = normal_form(gold), normal_form(answer)
    if gold == answer or not gold or not answer:
        return bool(gold) and gold == answer
    return exact_match(gold, answer)


def left_to_algebra(gold: str, answer: str) -> list[tuple[str, str]] | None:
    r"""The pairs of elements whose differences sympy must find to be 0; None: the two are not equal whatever it finds.

    As in the course's grader, an integer is not equal to an expression that has to be computed (`\sqrt{4}` for 2), and a
    fraction that is not reduced is not equal to the reduced one.
    """
    gold, answer = normal_form(gold), normal_form(answer)
    if len(gold) > MAX_CHARS or len(answer) > MAX_CHARS:
        return None
    gold_brackets, gold_elements = _elements(gold)
    answer_brackets, answer_elements = _elements(answer)
    if gold_brackets != answer_brackets or len(gold_elements) != len(answer_elements):
        return None
    pairs = [pair for pair in zip(gold_elements, answer_elements, strict=True) if pair[0] != pair[1]]
    return pairs if all(_may_be_equal(*pair) for pair in pairs) else None


def _elements(text: str) -> tuple[str, list[str]]:
    """The brackets and elements of a tuple or an interval; for other texts no brackets and one element."""
    inner = text[1:-1]
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and "," in inner and not set("()[]") & set(inner):
        return text[0] + text[-1], inner.split(",")
    return "", [text]


def _may_be_equal(gold: str, answer: str) -> bool:
    if not gold or not answer or _is_integer(gold) != _is_integer(answer):
        return False
    if _FRACTION.fullmatch(gold) and _FRACTION.fullmatch(answer):
        return False
    return len(set(re.findall(r"[^\W\d_]", _COMMAND.sub("", gold + answer)))) <= _MAX_LETTERS


def _is_integer(text: str) -> bool:
    number = plain_number(text)
    return number is not None and number == number.to_integral_value()


def left_by_text(gold: str, prediction: str) -> list[tuple[str, str]] | None:
    """The differences left for sympy: empty if the texts are equal; None if the two are not equal whatever sympy finds."""
    is_equal = equal_by_text(gold, prediction)
    if is_equal is None:
        return left_to_algebra(gold, prediction)
    return [] if is_equal else None


def cleaned(answer: str) -> str:
    """The answer without a final full stop, dollar signs around it and style commands; the bare number of \\text{number}."""
    answer = answer.strip()
    if len(answer) > MAX_CHARS:
        return answer
    answer = _without_end(_STYLE.sub("", _without_dollars(_without_end(answer))))
    number = plain_number(answer)
    return answer if number is None else f"{number:f}"


def same_base_and_power(gold: str, answer: str) -> bool | None:
    """Whether two numbers with a base are the same; False if two units have different powers; None for anything else.

    math_verify reads neither: it takes 52_8 for 52_9, and square inches for cubic ones.
    """
    bases = based(gold), based(answer)
    if None not in bases:
        return bases[0] == bases[1]
    units = [_UNIT_POWER.search(text[-MAX_NUMBER_CHARS:]) for text in (gold, answer)]
    return False if len({each[1] or "1" for each in units if each}) > 1 else None


def based(text: str) -> tuple[int, int] | None:
    """Digits and base of a number like 52_8 or 4210_{5}; None for anything else."""
    found = _BASED.fullmatch(text.strip().rstrip(".").strip("$ ")) if len(text) <= MAX_NUMBER_CHARS else None
    return (int(found[1]), int(found[2] or found[3])) if found else None


def _without_dollars(answer: str) -> str:
    """The text between two dollar signs, if there are no others."""
    inner = answer[1:-1]
    is_wrapped = len(answer) > 1 and answer[0] == answer[-1] == "$" and "$" not in inner and not inner.endswith("\\")
    return inner.strip() if is_wrapped else answer


def _without_end(answer: str) -> str:
    """Without a full stop and spaces at the end. Not a regular expression: hostile text could make it backtrack for hours."""
    before = ""
    while before != answer:
        before, answer = answer, answer.rstrip()
        for space in _SPACES:
            answer = answer.removesuffix(space)
        if answer.endswith(".") and not answer.endswith(("..", "\\.")):
            answer = answer[:-1]
    return answer


_SIGNS = str.maketrans(TABLES["signs"])
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "₀₁₂₃₄₅₆₇₈₉₊₋"
_PLAIN_DIGITS = str.maketrans(_RAISED + _LOWERED, "0123456789+-" * 2)
_SLASHED = re.compile(f"([{_RAISED}]{{1,12}})[⁄/]([{_LOWERED}]{{1,12}})")
_VULGAR = re.compile(r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")
_CHOICE = r"(?i)^(?:option|choice)\s+(?=\(?[A-Z]\)?$)"
_in_canonical_form = _rewriting(
    (r"^(?:[Oo]ption\s+)?\(?[A-E][):.]\s+(?=-?\d)", ""),  # the letter of a choice before its value
    (r"\\begin\s*\{(aligned|align\*?|gathered|split)\}(.*)\\end\s*\{\1\}", lambda found: re.sub(r"\\\\|&", " ", found[2])),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*", ""),
    (r"(?<=\d)(?:,?\s?\\[!,;: ]|~|\{,\})\s?(?=\d{3}(?!\d))", ","),  # a comma and a space separate two numbers
    (r"\\(?:displaystyle|textstyle|limits|phantom\{\})(?![a-zA-Z])\s*|\\color\s*\{\w+\}|(?<!\\)\\!|\{\}", ""),
    (r"^\\mathbb\s*\{?R\}?$", r"(-\\infty, \\infty)"),
    (r"^\([a-z](?:, ?[a-z]){1,3}\)\s*=\s*", ""),
    (r"^(-?)\s*\\?\$\s*(\d[\d,]*(?:\.\d+)?)$", r"\1\2 \\text{dollars}"),
    (r"(?<!\\)\\(?:[,;:> ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z]))|~", " "),
    (r"√\s*\(([^()]*)\)|√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1\2}"),
    (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
    (r"\\(?:[dtc]|nice|s|x)frac(?![a-zA-Z])", r"\\frac"),
    *_WHOLE_FRACTIONS,
    (r"\\l(?:eqslant|eq)(?![a-zA-Z])|<=", r"\\le "),
    (r"\\g(?:eqslant|eq)(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\neq(?![a-zA-Z])|\\not\s*=|!=", r"\\ne "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\[lr]brace(?![a-zA-Z])", lambda found: r"\{" if found[0][1] == "l" else r"\}"),
    (r"\\langle(?![a-zA-Z])\s*", "("),
    (r"\s*\\rangle(?![a-zA-Z])", ")"),
    (r"\\\$|\$", ""),
    (r"\\mathrm\s*\{([ie])\}", r"\1"),
    (r"\\degree(?![a-zA-Z])", r"^\\circ "),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])", "^"),
    (r"(?<=[\w)}])\s*\*\s*(?=[\w({\\-])", r"\\cdot "),
    (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    (r"(?<=\d)\s*\\cdot\s*(?=[a-z](?![a-zA-Z]))", ""),  # 2 * i
    (r"^[a-zA-Z]\s*\\in\s*(?=\\\{)", ""),  # x in {1, 2}
    (r"^\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?::|\||\\(?:mid|vert|colon)(?![a-zA-Z]))(.*)\\\}$", r"\1"),
    (r"^[\[(]\s*(\\begin\s*\{array\}.*\\end\s*\{array\})\s*[\])]$", r"\1"),
    (r"(?<!not )(?<!or )\b(?:is equal to|equals|is exactly|equal to)\b", "="),
    (r"^(?:minus|negative)\s+(?=\d)", "-"),
    (r"^([a-zA-Z][a-zA-Z ]{0,40}?) is (?=[-\d\\(\[])", r"\1 = "),
    (_CHOICE, ""),
    (r"\s+", " "),
)
_OPENS = frozenset("0123456789-.$\\([")  # a value, after words
_MARKS = ("**", "__", "``", "*", "`", '"', "'")  # around an answer
_LEADS = re.compile(
    r"(?i)(?:\\therefore(?![a-z])|\\(?:implies|rightarrow)(?![a-z])|=>|=(?!=)|#+"
    r"|(?:so|thus|hence|therefore|finally)(?![a-z])"
    r"|(?:(?:and|so)\s+)?(?:the|my|our)?\s*(?:final\s+|correct\s+)?"
    r"(?:answer|result|solution|ans|答案|ответ|antwort|réponse|respuesta)(?:是|为|\s+is(?![a-z])|\s*:|\s*=|\.)"
    r"|(?:we|i)\s+(?:get|have|find|obtain)(?![a-z])|(?:there|it|that)\s+(?:are|is)(?![a-z]))[\s:,]*"
)
_ENDS = re.compile(
    r"(?:[✓✔✅☑∎■□]\ufe0f?|\\(?:checkmark|blacksquare|square|qed|Box)(?![a-zA-Z])|I hope it is correct\.?|\\tag\{\w+\}|\\\\"
    r"|\\text\s*\{\s*(?:\.|\((?:final answer|checked)\))\s*\}|\((?:final answer|checked)\)|\\[\])]|<\|[a-z_]+\|>|</s>|<eos>)$"
)
_COLOURED = re.compile(r"\\(?:textcolor\s*\{\w+\}|f?colorbox\s*(?:\{\w+\}){1,2}|bbox\s*\[[^\]]*\])\s*(?=\{)")
_POWER_OF_TEN = re.compile(
    r"(-?\d{1,20}(?:\.\d{1,20})?)\s*(?:[eE]\+?(-?\d{1,2})|(?:\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*(-?\d{1,2})\s*\}|(\d)))"
)
_TWICE = re.compile(r"(-?\d[\d,]*)\s*\(([a-zA-Z -]+)\)|([a-zA-Z -]+)\s*\((-?\d[\d,]*)\)")
_TAGGED = re.compile(r"<([a-z]+)>(.*)</\1>|(\{)\s*\"answer\"\s*:(.*)\}", re.DOTALL)
_WRAPPER = re.compile(
    r"\\(?:boldsymbol|mathbf|bm|mathit|mathsf|pmb|boxed|fbox|ensuremath|textbf|textit|texttt|emph|underline)\s*\{"
)
_MAX_LAYERS = 20  # around an answer, which has a few
_DELIMITED = re.compile(r"\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm|operatorname|rm)\s*\{([^{}]*)\}")
_LEADING_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}\s*(?=(.))")
_MIXED = re.compile(
    r"(-?)\s*(\d{1,12})(?:\s*\\frac\s*\{\s*(\d{1,12})\s*\}\s*\{\s*(\d{1,12})\s*\}|\s+(?:and\s+)?(\d{1,12})\s*/\s*(\d{1,12}))"
)
_REPEATING = re.compile(r"(-?)(\d{0,12})\.(\d{0,12})\\(?:overline|bar|dot)\s*\{?(\d{1,12})\}?")
_PARTS: dict[str, int] = TABLES["parts"]
NUMBER_WORDS: dict[str, int] = TABLES["numbers"]


def canonical(text: str) -> str:
    """The text without style, sizes of brackets, dollar signs and a final full stop, and with one notation for each sign."""
    text = _inner(_in_canonical_form(_unwrapped(_COLOURED.sub(r"\\mathbf", _inner(_plain_signs(text))))))
    if (found := TEXT.fullmatch(text)) is not None:
        inner = _inner(found[1].strip())
        is_number = plain_number(inner) is not None or number_in_words(inner) is not None
        text = inner if is_number else rf"\text{{{re.sub(_CHOICE, '', inner)}}}"
    if (found := _TWICE.fullmatch(text)) is not None:
        digits, words = found[1] or found[4], found[2] or found[3]
        if (number := plain_number(digits)) is not None and number_in_words(words) == number:
            text = digits
    if (found := _POWER_OF_TEN.fullmatch(text)) is not None:
        return written(Fraction(found[1]) * Fraction(10) ** int(found[2] or found[3] or found[4]))
    if (found := _MIXED.fullmatch(text)) is not None:
        top, bottom = int(found[3] or found[5]), int(found[4] or found[6])
        if 0 < top < bottom:
            text = rf"{found[1]}\frac{{{int(found[2]) * bottom + top}}}{{{bottom}}}"
    if (found := _REPEATING.fullmatch(text)) is not None:
        sign, whole, fixed, repeated = found.groups()
        value = Fraction(int(f"0{whole}{fixed}")) + Fraction(int(repeated), 10 ** len(repeated) - 1)
        return written(value / (-1 if sign else 1) / 10 ** len(fixed))
    named = number_in_words(text)
    return text if named is None else written(named)


def written(value: Fraction) -> str:
    """In LaTeX."""
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value.numerator)


def number_in_words(text: str) -> Fraction | None:
    """The value of `twenty-five`, `two hundred and six`, `minus three`, `two thirds`; None for any other text."""
    words = re.sub(r"(?<=\w)-(?=\w)", " ", text.lower()).replace(" and ", " ").split() if len(text) <= 100 else []
    if words[:1] in (["minus"], ["negative"]):
        value = number_in_words(" ".join(words[1:]))
        return None if value is None else -value
    if len(words) == 2 and (part := _PARTS.get(words[1].removesuffix("s"))) and words[0] in {"a", *NUMBER_WORDS}:
        return Fraction(1 if words[0] == "a" else NUMBER_WORDS[words[0]], part)
    total = 0
    for word in words:
        if word == "hundred" and 0 < total % 1000 < 10:
            total += 99 * (total % 1000)
        elif word == "thousand" and 0 < total < 1000:
            total *= 1000
        elif word in NUMBER_WORDS and _fits(total, NUMBER_WORDS[word]):
            total += NUMBER_WORDS[word]
        else:
            return None
    return Fraction(total) if words and (total or words == ["zero"]) else None


def _fits(total: int, number: int) -> bool:
    """Whether a number's word may follow what stands before: five after twenty, not after three."""
    return not total % 100 or (number < 10 and total % 100 >= 20 and not total % 10)


def _plain_signs(text: str) -> str:
    text = re.sub(r"([€£])\s?(\d[\d,]*(?:\.\d+)?)", r"\2\1", text)
    text = _SLASHED.sub(
        lambda found: r"\frac{{{}}}{{{}}}".format(*(each.translate(_PLAIN_DIGITS) for each in found.groups())), text
    )
    text = re.sub(f"[{_RAISED}]+", lambda found: "^{" + found[0].translate(_PLAIN_DIGITS) + "}", text)
    text = re.sub(f"[{_LOWERED}]+", lambda found: "_{" + found[0].translate(_PLAIN_DIGITS) + "}", text)
    text = _VULGAR.sub(lambda found: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", found[0]).split("⁄")), text)
    return unicodedata.normalize("NFKC", text.translate(_SIGNS)).strip()  # wide digits, unusual spaces


def _inner(text: str) -> str:
    """Without signs, brackets and words that stand around an answer and are not part of it."""
    for _ in range(_MAX_LAYERS):
        before = text
        if (found := _DELIMITED.fullmatch(text) or _TAGGED.fullmatch(text)) is not None:
            text = (found[4] or found[2] if found.re is _TAGGED else found[1] or found[2]) or ""
        for mark in _MARKS:
            if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
                inner = text[len(mark) : -len(mark)]
                text = text if mark in inner else inner
        text = _ENDS.sub("", text.strip())
        if (found := _LEADING_TEXT.match(text)) is not None and (found[1].strip().endswith(":") or found[2] in _OPENS):
            text = f"{found[1].strip()} {text[found.end() :]}"
        if (lead := _LEADS.match(text)) is not None and lead.end() < len(text):
            text = text[lead.end() :]
        if text.endswith((".", ",", ";")) and not text.endswith((r"\,", r"\;", "..")):
            text = text[:-1].rstrip()
        if text.startswith("{") and text.endswith("}") and closes_at(text, 0) == len(text):
            text = text[1:-1].strip()
        if text == before:
            break
    return text


def _unwrapped(text: str) -> str:
    r"""Without `\boldsymbol{...}` and the like around its parts."""
    for _ in range(_MAX_LAYERS):
        if (found := _WRAPPER.search(text)) is None:
            break
        end = closes_at(text, found.end() - 1)
        text = text[: found.start()] + text[found.end() : end - 1] + text[end:]
    return text


LIMIT_S = 1.0  # of one comparison


def is_equal_to_dr_grpo(gold: str, answer: str, *, is_fast: bool) -> bool:
    """Whether the grader of Dr. GRPO accepts `answer`; see `strop.sandbox.inside.dr_grpo`. Blocks, for `LIMIT_S` at most.

    Args:
        gold: if it has a box, the inside of the last one counts.
        is_fast: without math_verify.

    Raises:
        UserError: pylatexenc is not installed.
        MachineError: answers cannot be compared on this machine.
    """
    need_pylatexenc()
    wanted = last_box(gold) if BOX in gold else gold
    if wanted is None or max(len(wanted), len(answer)) > MAX_CHARS:
        return False
    if wanted == answer:
        return True
    return ask(lambda at, limit_s: at.compare_as_dr_grpo(wanted, answer, is_fast=is_fast, wall_s=limit_s))


def need_pylatexenc() -> None:
    """Raises `UserError` if it is not installed."""
    if importlib.util.find_spec("pylatexenc") is None:
        raise UserError("judge = 'dr_grpo' needs the library pylatexenc: pip install 'strop[cs336]'.")


def ask(question: Callable[[ProcessVerifier, float], PairVerdict]) -> bool:
    """Whether the process finds two answers equal; at its deadline, the second argument, it does not. Raises `MachineError`."""
    verdict = question(_verifiers.setdefault(os.getpid(), ProcessVerifier(max_processes=1)), LIMIT_S)
    if verdict is PairVerdict.INTERNAL:
        raise MachineError("the process that compares answers was lost twice on one pair.")
    return verdict is PairVerdict.EQUAL


_verifiers: dict[int, ProcessVerifier] = {}  # by process id: a forked process must not use its parent's


@atexit.register
def _close() -> None:
    if (verifier := _verifiers.pop(os.getpid(), None)) is not None:
        verifier.close_now()
