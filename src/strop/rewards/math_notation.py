r"""Writes an answer to a mathematical problem in one notation: one sign for each thing, numbers in digits, nothing around it.

What a text says is not changed: `two thirds`, `⅔`, `$$\dfrac23.$$` and `**2/3** ✓` become fractions, `more than 5` stays.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from strop.sandbox.numbers import plain_number
from strop.tasks.boxes import closes_at

_SIGNS = {"−": "-", "–": "-", "°": r"^\circ ", "¢": r"\text{ cents}"}
_SIGNS |= {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "→": r"\to ", "∈": r"\in ", "∪": r"\cup "}
_SIGNS |= {"∞": r"\infty ", "π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∴": r"\therefore "}
_SIGNS |= {
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "θ": r"\theta ",
    "º": r"^\circ ",
    "。": ".",
    "€": r"\text{ euros}",
    "£": r"\text{ pounds}",
}
_SIGNS |= {"“": '"', "”": '"', "‘": "'", "’": "'"}
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "₀₁₂₃₄₅₆₇₈₉₊₋"
_PLAIN_DIGITS = str.maketrans(_RAISED + _LOWERED, "0123456789+-" * 2)
_SLASHED = re.compile(f"([{_RAISED}]{{1,12}})[⁄/]([{_LOWERED}]{{1,12}})")
_VULGAR = re.compile(r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")
_CHOICE = r"(?i)^(?:option|choice)\s+(?=\(?[A-Z]\)?$)"
# Applied in this order: (pattern, replacement).
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
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
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
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
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"
    " nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8}
_PARTS |= {"ninth": 9, "tenth": 10}
NUMBER_WORDS = {word: value for value, word in enumerate(_SMALL.split(" "))}
NUMBER_WORDS |= {word: 10 * ten for ten, word in enumerate(_TENS.split(" "), start=2)}


def canonical(text: str) -> str:
    """The text without style, sizes of brackets, dollar signs and a final full stop, and with one notation for each sign."""
    text = _unwrapped(_COLOURED.sub(r"\\mathbf", _inner(_plain_signs(text))))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _inner(text)
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
        return written(_repeating(*found.groups()))
    value = number_in_words(text)
    return text if value is None else written(value)


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
    text = "".join(_SIGNS.get(sign, sign) for sign in text)
    return unicodedata.normalize("NFKC", text).strip()  # wide digits, unusual spaces


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


def _repeating(sign: str, whole: str, fixed: str, repeated: str) -> Fraction:
    value = Fraction(int(f"0{whole}{fixed}")) + Fraction(int(repeated), 10 ** len(repeated) - 1)
    return value / Fraction(-(10 ** len(fixed)) if sign else 10 ** len(fixed))
