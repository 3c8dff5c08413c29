r"""Reads the form of an answer to a mathematical problem before its value is compared.

math_verify compares values and drops what it does not read: it takes the last side of `45001 = 45000`, letters of words as
factors, 10 m for 10 cm. Here relations, names, units, bases, words, brackets and matrices are compared as what they are. What
is left are pairs of expressions, each of which must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from strop.answer_text import plain_number
from strop.rewards.math_text import NUMBER_WORDS, TABLES, TEXT, canonical, written

Pairs: TypeAlias = list[tuple[str, str]]

_RELATION = re.compile(
    r"\\(?:ne|le|ge|approx|to|rightarrow|Rightarrow|implies|iff|equiv|sim|in|mapsto)(?![a-zA-Z])|:=|==|=|<|>"
)
_MAX_SIDES = 4
_EQUALS = ("=", "==", ":=", r"\approx")
_ORDER = {"<": "<", ">": ">", r"\le": "<=", r"\ge": ">="}
_GREEK = r"\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega)"
_NAME = re.compile(
    rf"(?:(?:m\s*)?\\angle\s*[A-Z]{{1,3}}|\\(?:overline|overrightarrow|vec)\s*\{{\w+\}}|\|?[A-Z]{{2,3}}\|?|{_GREEK}|[a-zA-Z]"
    rf"|[a-zA-Z]{{3,}}(?: [a-zA-Z]+){{0,4}})(?:_\{{?[a-zA-Z0-9]{{1,9}}\}}?|'|\^\{{-1\}})*"
    rf"(?:\((?:[a-zA-Z]|{_GREEK}|-?\d+)(?:,\s*\w)*\))?"
)
_BASED = re.compile(
    r"\(?(-?[0-9A-Fa-f]+)\)?\s*"
    r"(?:_\s*\{?\s*\(?(?:base\s+)?(\w+)\)?\s*\}?|(?:in\s+)?\(?\s*base[\s-]+(\w+)\s*\)?)"
)
_BASE_TEN = re.compile(r"^\(?(-?\d[\d,]*)\)?\s*_\s*\{?\s*10\s*\}?$")
_MATRIX = re.compile(
    r"\\begin\s*\{([pbB]?matrix|array)\}\s*(?:\{[lcr| ]*\})?(.*)\\end\s*\{\1\}"
    r"(\s*\^\s*\{?\s*(?:T|t|\\top|\\mathsf\s*\{?T\}?)\s*\}?)?",
    re.DOTALL,
)
_FUNCTION = re.compile(
    r"\\(?:a?r?c?(?:sin|cos|tan)|log|ln|det|sum|int|lim|gcd|max|min|Pr)(?![a-zA-Z])|(?:P|E|Var|lcm|gcd)\s*[(\[]|\|"
)
_LETTER = re.compile(r"[a-zA-Z](?:_\{?\w+\}?)?")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LAST_VARIABLE = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]$|(?<=\s)[a-zA-Z]$|(?<=\d)[a-zA-Z]$")
_SEPARATORS = re.compile(r"\\(?:text|mbox|mathrm)\s*\{\s*(?:or|and)\s*\}|\b(?:or|and)\b|,")
_OR = re.compile(r"\\(?:text|mbox|mathrm)\s*\{\s*or\s*\}|\bor\b|\\lor(?![a-zA-Z])|\\cup(?![a-zA-Z])")

_UNITS = {name: (dimension, Fraction(size)) for dimension, units in TABLES["sizes"].items() for name, size in units.items()}
_ALIASES: dict[str, str] = {alias: name for name, aliases in TABLES["other_names"].items() for alias in aliases}
_MULTIPLIERS: dict[str, int] = TABLES["multipliers"]
_GENERIC = "unit"
_UnitOf: TypeAlias = tuple[str, int] | None
_PERCENT: _UnitOf = ("percent", 1)
_TURNING_WORDS = frozenset([*_MULTIPLIERS, *TABLES["words"]["turning"].split()])  # next to a number: they make another of it
_NOT_A_PHRASE = (_TURNING_WORDS | set(NUMBER_WORDS) | set(TABLES["words"]["counted"].split())) - {"is", "are"}
_PHRASE = re.compile(
    r"(?:[a-zA-Z][a-zA-Z',]{0,20}[ :]+){0,12}[a-zA-Z]{2,20}[ :]+(?=-?(?:\d|\\frac|\\sqrt))(?!\d{1,9}(?:st|nd|rd|th)\b)"
)
_UNIT = re.compile(
    r"(?:\\(?:text|mbox|mathrm|textrm)\s*\{(?P<text>[^{}]*)\}|\\?(?P<percent>%)|\^\s*\{?\s*\\circ\s*\}?(?P<degree>)"
    r"|(?<=[\d)}\s])(?P<bare>[a-zA-Z][a-zA-Z/'. ]{0,60}))\s*(?:\^\s*\{?\s*(?P<power>\d)\s*\}?)?$"
)


def pairs_to_compare(gold: str, answer: str) -> Pairs | None:
    r"""The pairs of expressions, gold first, that must all be equal for `answer` to equal `gold`; None: it does not.

    An empty list: they are equal. Takes time linear in their length.

    - A relation is read: `x = 5` is 5, and the name must be the gold's if that has one; every side of `2 + 3 = 5` must be the
      gold; `3 < x \le 4` is `(3, 4]`; `\ge 5`, `\ne 5` and `4 \to 5` are not 5.
    - Units must be of one dimension and are converted; a gold without a unit, whose problem names it, takes any.
    - A base must be the gold's. Words are compared as words. Brackets and the shape of a matrix must agree.
    """
    gold, answer = canonical(gold), canonical(answer)
    if not gold or not answer:
        return None
    if TEXT.fullmatch(gold) is not None and TEXT.sub(r"\1", gold).lower() == answer.lower():
        return []
    if _word(gold) == "":
        answer = _without_words(answer)
        if plain_number(gold) is not None and _PHRASE.match(answer) is not None:
            return None
    if gold == answer:
        return []
    word = _word(gold)
    if word:
        return [] if word == _word(answer, is_known=True) else None
    if _based(gold) is None:
        answer = _BASE_TEN.sub(r"\1", answer)
    if (is_same := _same_base(gold, answer)) is not None:
        return [] if is_same else None
    if "!!" in answer and "!!" not in gold:
        return None
    return _of_relations(gold, answer)


def _without_words(answer: str) -> str:
    """The answer without a phrase before its number: `She earns 18 dollars` is `18 dollars`; `more than 18` stays."""
    found = _PHRASE.match(answer)
    words = set(re.findall(r"[a-z]+", found[0].lower())) if found is not None else set()
    return answer[found.end() :] if found is not None and words and not words & _NOT_A_PHRASE else answer


def _word(text: str, *, is_known: bool = False) -> str:
    """The words of a text that is no mathematics, in lower case; empty for mathematics, unless `is_known`.

    Three letters in a row are a word, or letters inside a text command; two may be a product.
    """
    bare = TEXT.sub(r"\1", text)
    is_words = is_known or bare != text or re.search(r"[A-Za-z]{3}", bare) is not None
    if not is_words or (not is_known and re.search(r"[\\\d=<>^_+*/{}]", bare)):
        return ""
    words = re.sub(r"[^\w\s-]", " ", bare.lower()).split()
    return " ".join(each for each in words if each not in ("the", "a", "an"))


def _same_base(gold: str, answer: str) -> bool | None:
    """Whether two numbers with a base are the same; an answer may leave the base of the gold out. None: neither has one."""
    bases = _based(gold), _based(answer)
    if bases == (None, None):
        return None
    if bases[0] is None:
        return False
    return bases[1] == bases[0] if bases[1] is not None else answer.strip().lower() == bases[0][0]


def _based(text: str) -> tuple[str, str] | None:
    found = _BASED.fullmatch(TEXT.sub(r"\1", text))
    if found is None:
        return None
    base = (found[2] or found[3]).lower()
    base = str(NUMBER_WORDS.get(base, base))
    return (found[1].lower(), base) if base.isdigit() else None


class _Relations(NamedTuple):
    sides: list[str]
    signs: list[str]  # between them

    @property
    def is_equation(self) -> bool:
        return all(sign in _EQUALS for sign in self.signs)

    @property
    def name(self) -> str:
        """The first or last side, if it is a name."""
        return next((side for side in (self.sides[0], self.sides[-1]) if _NAME.fullmatch(side)), "")


def _split(text: str) -> _Relations:
    """The sides of the relations outside of all brackets."""
    sides, signs, start, depth, place = [], [], 0, 0, 0
    for found in _RELATION.finditer(text):
        depth += sum({"{": 1, "}": -1, "(": 1, ")": -1}.get(sign, 0) for sign in text[place : found.start()])
        place = found.start()
        if depth == 0:
            sides.append(TEXT.sub(r"\1", text[start : found.start()]).strip())
            signs.append(found[0])
            start = found.end()
    return _Relations([*sides, text[start:].strip()], signs)


def _of_relations(gold: str, answer: str) -> Pairs | None:
    wanted, found = _split(gold), _split(answer)
    if not wanted.signs and not found.signs:
        return _of_values(gold, answer)
    if (of_gold := _interval(gold, wanted)) is not None or (found.signs and not found.is_equation):
        of_answer = _interval(answer, found)
        if of_answer is None and found.signs:
            return None
        name, interval = of_gold or ("", gold)
        other, read = of_answer or ("", answer)
        if (name and other and name != other) or (not of_gold and wanted.signs):
            return None
        return _of_values(interval, read) if interval.startswith(("(", "[", r"\{")) else None
    if wanted.signs and not wanted.is_equation:
        return None
    name = wanted.name if wanted.signs else ""
    if wanted.signs and not (name and len(wanted.sides) == 2):
        return [(gold, answer)] if found.signs else None  # an equation between expressions
    value = next(side for side in wanted.sides if side != name) if name else gold
    if not found.signs:
        return _of_values(value, answer)
    other = found.name or ("" if wanted.signs else _sought(found.sides[0]))
    if name and other != name:  # 5 = x and y = 5 differ, q = p / 2 and p = 2q may not
        return [(gold, answer)] if not other or re.search(r"[a-zA-Z]", value) else None
    if (listed := _listed(value, answer)) is not None:
        return _of_values(value, listed)
    sides = [side for side in found.sides if side != other]
    if _OR.search(answer) and not _OR.search(gold):
        return None
    if r"\approx" in found.signs:
        if (compared_side := _approximated(value, sides)) is None:
            return None
        sides = [compared_side]
    if len(sides) > _MAX_SIDES:
        return None
    compared = [_of_values(value, side) for side in sides]
    return None if not sides or None in compared else [pair for each in compared for pair in each or ()]


def _approximated(gold: str, sides: Sequence[str]) -> str | None:
    r"""The side of `\frac13 \approx 0.33` that is compared: the number that is the gold, if that has decimals; else the first.

    None without sides, and where a number is not the one before it, rounded.
    """
    numbers = [number for side in sides if (number := plain_number(side)) is not None]
    for before, number in pairwise(numbers):
        if abs(before - number) > Decimal(5).scaleb(_last_place(number) - 1):
            return None
    if "." in gold and plain_number(gold) in numbers:
        return gold
    return sides[0] if sides else None


def _last_place(number: Decimal) -> int:
    """The power of ten of its last digit that is not 0, at most that of its last decimal: 2 of 1500, -2 of 0.30."""
    exponent = int(number.as_tuple().exponent)
    return exponent if exponent < 0 else int(number.normalize().as_tuple().exponent)


def _sought(side: str) -> str:
    """The side of an equation that says what was asked for, as `m + n`, `\\sin x` and `P(A)`; empty for `2x` and numbers."""
    letters = set(_LETTER.findall(_COMMAND.sub("", side)))
    has_words = re.search(r"[a-zA-Z]{3}", _COMMAND.sub("", side)) is not None
    is_one = _FUNCTION.match(side) is not None or (
        len(letters) > 1 and not has_words and _quantity(side, has_letters=True)[1] is None
    )
    return side if is_one else ""


def _interval(text: str, relations: _Relations) -> tuple[str, str] | None:
    r"""The name and the interval that inequalities or `\in` state; None for any other text."""
    if relations.signs == [r"\in"]:
        return (relations.sides[0], relations.sides[1]) if _NAME.fullmatch(relations.sides[0]) else None
    parts = _OR.split(text)
    if len(parts) > 1 and relations.signs:
        read = [_interval(part.strip(), _split(part.strip())) for part in parts]
        if any(each is None for each in read) or len({each[0] for each in read if each}) > 1:
            return None
        return next(each[0] for each in read if each), r" \cup ".join(each[1] for each in read if each)
    sides, signs = relations
    names = [side for side in sides if _NAME.fullmatch(side)]
    if not signs or len(names) != 1:
        return None
    name = names[0]
    if signs == [r"\ne"]:
        value = next(side for side in sides if side != name)
        return name, rf"(-\infty, {value}) \cup ({value}, \infty)"
    order = [_ORDER.get(sign, "") for sign in signs]
    if "" in order or len(sides) > 3 or len({each[0] for each in order}) > 1:
        return None
    if order[0][0] == ">":  # 4 > x is x < 4
        sides, order = sides[::-1], order[::-1]
    if len(sides) == 2:
        sides, order = ([r"-\infty", *sides], ["<", *order]) if sides[0] == name else ([*sides, r"\infty"], [*order, "<"])
    opening, closing = "[" if len(order[0]) > 1 else "(", "]" if len(order[1]) > 1 else ")"
    return (name, f"{opening}{sides[0]}, {sides[2]}{closing}") if sides[1] == name else None


def _listed(gold: str, answer: str) -> str | None:
    """The values of `x = 1 or x = 2` as a list, of `x = 1, y = 2` as a tuple, if `gold` is one as long; otherwise None."""
    if plain_number(_quantity(gold, has_letters=False)[0]) is not None:  # 32,348 dollars
        return None
    elements = [each.strip() for each in _SEPARATORS.split(answer)]
    read = [_split(each) for each in elements]
    names = [each.name for each in read if each.signs]
    if "," not in gold or len(elements) != gold.count(",") + 1 or not names or "" in names:
        return None
    listed = ", ".join(each.sides[-1] if each.signs else each.sides[0] for each in read)
    if gold[0] == "(":  # the coordinates in the order of their names
        return f"({listed})" if len(set(names)) == len(elements) and names in (sorted(names), ["r", r"\theta"]) else None
    return listed if len({name.partition("_")[0] for name in names}) == 1 and gold[0] != "[" else None


def _of_values(gold: str, answer: str) -> Pairs | None:
    """The same for two texts without relations."""
    if (wanted := _entries(gold)) is not None:
        found = _entries(answer)
        if found is None or [len(row) for row in found] != [len(row) for row in wanted]:
            return None
        return _each([each for row in wanted for each in row], [each for row in found for each in row])
    of_gold, of_answer = _elements(gold), _elements(answer)
    if of_gold is not None and of_answer is not None:
        if of_gold[0] != of_answer[0] or len(of_gold[1]) != len(of_answer[1]):
            return None
        return _each(of_gold[1], of_answer[1])
    if of_gold is not None or (of_answer is not None and "," not in gold):
        return None
    return _of_quantities(gold, answer)


def _each(wanted: Sequence[str], found: Sequence[str]) -> Pairs | None:
    compared = [_of_quantities(*pair) for pair in zip(wanted, found, strict=True)]
    return None if None in compared else [pair for each in compared for pair in each or ()]


def _entries(text: str) -> list[list[str]] | None:
    """The rows of a matrix; None for any other text."""
    found = _MATRIX.fullmatch(text)
    if found is None:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[2]) if row.strip()]
    entries = [[canonical(entry) for entry in row.split("&")] for row in rows]
    is_transposed = found[3] is not None and len(set(map(len, entries))) == 1
    return [list(column) for column in zip(*entries, strict=True)] if is_transposed else entries


def _elements(text: str) -> tuple[str, list[str]] | None:
    """The brackets and elements of a tuple or an interval; None for any other text."""
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]" or "," not in text:
        return None
    elements, depth, start = [], 0, 1
    for place, sign in enumerate(text[1:-1], start=1):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(sign, 0)
        if depth < 0:
            return None  # (1,2) and (3,4)
        if sign == "," and depth == 0:
            elements.append(text[start:place].strip())
            start = place + 1
    return text[0] + text[-1], [*elements, text[start:-1].strip()]


def _of_quantities(gold: str, answer: str) -> Pairs | None:
    """The same for two values, each with or without a unit."""
    wanted, unit = _quantity(gold, has_letters=False)
    found, other = _quantity(answer, has_letters=plain_number(wanted) is not None)
    changes = [each[0] if each is not None and _TURNING_WORDS & set(each[0].split()) else "" for each in (unit, other)]
    if changes[0] != changes[1]:
        return None
    if (pair := _of_percentages(wanted, unit, found, other)) is not None:
        return [pair]
    if unit is not None and other is not None and _GENERIC not in (unit[0], other[0]) and unit != other:
        (name, power), (other_name, other_power) = unit, other
        if power != other_power or name not in _UNITS or other_name not in _UNITS:
            return None
        number = plain_number(found)
        if number is None or _UNITS[name][0] != _UNITS[other_name][0]:
            return None
        found = written(Fraction(number) * (_UNITS[other_name][1] / _UNITS[name][1]) ** power)
    return [] if wanted == found else [(_guarded(wanted), _guarded(found))]


def _of_percentages(gold: str, unit: _UnitOf, answer: str, other: _UnitOf) -> tuple[str, str] | None:
    r"""`\frac34` and 75 per cent, or the reverse, as numbers; None for other pairs, as for 75 and 75 per cent."""
    is_gold = unit == _PERCENT and other is None
    number = plain_number(gold if is_gold else answer)
    bare = answer if is_gold else gold
    if number is None or plain_number(bare) == number or not (is_gold or (other == _PERCENT and unit is None)):
        return None
    share = written(Fraction(number) / 100)
    return (share, bare) if is_gold else (bare, share)


def _guarded(text: str) -> str:
    """`text` in brackets if it ends with a variable, which math_verify would take for a unit: m, s, g, h and the like."""
    return f"({text})" if _LAST_VARIABLE.search(text[-40:]) and "," not in text else text


def _quantity(text: str, *, has_letters: bool) -> tuple[str, tuple[str, int] | None]:
    """A value and its unit with the power; None without a unit, and for an expression whose last letters are variables.

    Args:
        has_letters: whether a single letter behind a number is a unit, as in `5 m`.
    """
    found = _UNIT.search(text[-120:])
    if found is None:
        return text, None
    value = text[: len(text) - len(found[0])].strip()
    if not re.search(r"\d", value) or value.endswith(("^", "_", "\\", "/", "{", "+", "-")):
        return text, None
    if found["percent"] or found["degree"] is not None:
        return value, ("percent" if found["percent"] else "degree", 1)
    words = (found["text"] if found["text"] is not None else found["bare"]).split()
    number = plain_number(value)
    if words and words[0].lower() in _MULTIPLIERS and number is not None:
        value, words = written(Fraction(number) * _MULTIPLIERS[words[0].lower()]), words[1:]
    if found["text"] is None:
        is_letter = [len(word) for word in words] == [1] and (words[0] in _UNITS or words[0] in _ALIASES)
        are_words = all(len(word) > 1 for word in words)
        if number is None or not (are_words or (is_letter and has_letters)):
            return text, None
    name, power = _unit(" ".join(words), int(found["power"] or 1))
    return (value, (name, power)) if name else (value, None)


def _unit(text: str, power: int) -> tuple[str, int]:
    """The name of a unit in the singular and its power: `square inches` is inch, 2."""
    words = text.lower().replace("-", " ").replace(".", " ").split()
    if words[1:] and words[0] in ("more", "fewer"):  # 5 more apples are 5
        words = words[1:]
    for prefix, value in (("square", 2), ("sq", 2), ("cubic", 3)):
        if words[:1] == [prefix]:
            words, power = words[1:], value
    for suffix, value in (("squared", 2), ("cubed", 3)):
        if words[1:] and words[-1] == suffix:
            words, power = words[:-1], value
    if words and len(words[0]) > 2:
        words = [words[0].removesuffix("s"), *words[1:]]
    name = " ".join(words)
    return _ALIASES.get(name, name), power
