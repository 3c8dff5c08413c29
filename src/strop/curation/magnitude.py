r"""Tells how many digits the powers, factorials and binomials in an answer have, without working them out.

`10^{10^{10}}`, `100!` and `\binom{1000}{500}` are numbers of a few characters that nobody writes out. What is read here is as
much of LaTeX, and of plain text, as writes such numbers; all else is skipped. A letter is of unknown size: in a sum or a
product it is left out of account, a power of it is taken as one of 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal

# Decimals reach to 10 ** (10 ** 18); beyond, they are infinite, and what cannot be told is no number. Nothing is raised.
_ARITHMETIC = Context(prec=28, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
_UNKNOWN = Decimal("NaN")
_BASE_OF_UNKNOWN = Decimal(2)
_MOST_NESTED = 30  # groups, exponents and arguments in one another; what lies deeper is skipped

_TOKEN = re.compile(r"\d+(?:\.\d+)?|\\[a-zA-Z]+|\*\*|!!|[a-zA-Z]|\S")
_SPACES = re.compile(r"\\[!,;: ]|\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr)(?![a-zA-Z])|\\q?quad(?![a-zA-Z])|~")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*[{(]\s*[\d,]+\s*[)}]")  # where a comma can only be one of thousands
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_RAISED_DIGITS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}")
_COMBINATIONS = re.compile(r"(?<![a-zA-Z])(?:C|\\(?:mathrm|text)\{C\})\s*_\s*\{?\s*(\d+)\s*\}?\s*\^\s*\{?\s*(\d+)\s*\}?")
_OPENING, _CLOSING = frozenset("({["), frozenset(")}]")
_TIMES = frozenset({"*", "\\cdot", "\\times", "×", "·"})
_OVER = frozenset({"/", "\\div", "÷"})
_POWER = frozenset({"^", "**"})
_FRACTIONS = frozenset({"\\frac", "\\dfrac", "\\tfrac", "\\cfrac"})
_BINOMIALS = frozenset({"\\binom", "\\dbinom", "\\tbinom"})


@dataclass(frozen=True, slots=True)
class Magnitude:
    """How large a number in an answer is."""

    what: str  # "power", "factorial" or "binomial"
    num_digits: float  # before the decimal point; infinite where even these are too many to count


def magnitudes(answer: str) -> Iterator[Magnitude]:
    """Those of the powers, factorials and binomials in `answer` that are 1 or more."""
    text = _EXPONENT.sub(lambda found: found[0].replace(",", "") if _GROUPED.search(found[0]) else found[0], answer)
    text = _RAISED_DIGITS.sub(lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
    text = _COMBINATIONS.sub(r"\\binom{\1}{\2}", _CHOOSE.sub(r"\\binom{\1}{\2}", _SPACES.sub(" ", text)))
    reader = _Reader(_TOKEN.findall(text))
    reader.read_all()
    for what, number in reader.found:
        if number.is_infinite():
            yield Magnitude(what, math.inf)
        elif not number.is_nan() and number.adjusted() >= 0:
            yield Magnitude(what, number.adjusted() + 1)


@dataclass(frozen=True, slots=True)
class _Value:
    number: Decimal  # of the parts that are known; no number where none is
    is_whole: bool = True  # whether all parts are known


_NOTHING = _Value(_UNKNOWN, is_whole=False)


class _Reader:
    """Reads tokens from left to right, and remembers the large numbers that it met."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0
        self.found: list[tuple[str, Decimal]] = []

    def read_all(self) -> None:
        while self._at < len(self._tokens):
            before = self._at
            self._sum()
            if self._at == before:
                self._at += 1

    @property
    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _takes(self, of: frozenset[str]) -> bool:
        if self._next not in of or not self._next:
            return False
        self._at += 1
        return True

    def _sum(self) -> _Value:
        value = self._product()
        while self._next in ("+", "-") and self._next:
            sign = -1 if self._next == "-" else 1
            self._at += 1
            other = self._product()
            value = _joined(value, other, _ARITHMETIC.add(value.number, _ARITHMETIC.multiply(other.number, Decimal(sign))))
        return value

    def _product(self) -> _Value:
        value = self._signed()
        while True:
            before = self._at
            is_over = self._takes(_OVER)
            if not is_over and not self._takes(_TIMES) and not self._starts_a_factor():
                return value
            other = self._signed()
            if self._at == before:  # too deep
                return value
            value = _joined(value, other, (_quotient if is_over else _ARITHMETIC.multiply)(value.number, other.number))

    def _starts_a_factor(self) -> bool:
        token = self._next
        return bool(token) and (token in _OPENING or token[0].isalnum() or (token[0] == "\\" and token not in _TIMES | _OVER))

    def _signed(self) -> _Value:
        sign = 1
        while self._next in ("+", "-", "−") and self._next:
            sign = sign if self._next == "+" else -sign
            self._at += 1
        value = self._power()
        return _Value(_ARITHMETIC.multiply(value.number, Decimal(sign)), is_whole=value.is_whole)

    def _power(self) -> _Value:
        base = self._with_factorials()
        if not self._takes(_POWER):
            return base
        exponent = self._exponent().number
        if exponent.is_nan():
            return _NOTHING
        size = _ARITHMETIC.abs(base.number)
        if not base.is_whole:
            size = _BASE_OF_UNKNOWN if size.is_nan() else max(size, _BASE_OF_UNKNOWN)
        result = _ARITHMETIC.power(size, exponent)
        self.found.append(("power", result))
        return _Value(result, is_whole=base.is_whole)

    def _exponent(self) -> _Value:
        """One that has an exponent itself is read with it: a tower counts from the top."""
        if self._depth >= _MOST_NESTED:
            return _NOTHING
        self._depth += 1
        value = self._signed()
        self._depth -= 1
        return value

    def _with_factorials(self) -> _Value:
        value = self._atom()
        while self._next in ("!", "!!"):
            number = _double_factorial(value.number) if self._next == "!!" else _factorial(value.number)
            self._at += 1
            self.found.append(("factorial", number))
            value = _Value(number, is_whole=value.is_whole)
        return value

    def _atom(self) -> _Value:
        token = self._next
        if not token or self._depth >= _MOST_NESTED:
            return _NOTHING
        if token in _OPENING:
            return self._group()
        if token in _FRACTIONS | _BINOMIALS:
            self._at += 1
            first, second = self._argument(), self._argument()
            if token in _FRACTIONS:
                return _joined(first, second, _quotient(first.number, second.number))
            number = _binomial(first.number, second.number)
            self.found.append(("binomial", number))
            return _Value(number, is_whole=first.is_whole and second.is_whole)
        if token[0].isdecimal():
            self._at += 1
            return _Value(_ARITHMETIC.create_decimal(token))
        if token[0].isalpha() or token[0] == "\\":
            self._at += 1
            if self._takes(frozenset("_")):
                self._argument()
        return _NOTHING

    def _argument(self) -> _Value:
        """Of a command or an index."""
        self._depth += 1
        value = self._atom()
        self._depth -= 1
        return value

    def _group(self) -> _Value:
        """What stands in brackets; more than one thing, as in (1, 2), is no number."""
        self._at += 1
        self._depth += 1
        value = self._sum()
        while self._next and self._next not in _CLOSING:
            before = self._at
            self._sum()
            self._at += self._at == before
            value = _NOTHING
        self._at += 1
        self._depth -= 1
        return value


def _quotient(one: Decimal, other: Decimal) -> Decimal:
    return _UNKNOWN if other == 0 else _ARITHMETIC.divide(one, other)


def _joined(one: _Value, other: _Value, together: Decimal) -> _Value:
    """`together`, or the one of both that is known."""
    number = together
    if one.number.is_nan() or other.number.is_nan():
        number = other.number if one.number.is_nan() else one.number
    return _Value(number, is_whole=one.is_whole and other.is_whole)


def _from_log(log: float) -> Decimal:
    """e to the power of `log`."""
    return _UNKNOWN if math.isnan(log) else _ARITHMETIC.power(Decimal(10), Decimal(log) / Decimal(math.log(10)))


def _log_factorial(number: Decimal) -> float:
    """Infinite beyond floats; no number where there is none, as of a negative one."""
    if number.is_nan() or number < 0:
        return math.nan
    try:
        return math.lgamma(float(number) + 1)
    except OverflowError:
        return math.inf


def _factorial(number: Decimal) -> Decimal:
    return _from_log(_log_factorial(number))


def _double_factorial(number: Decimal) -> Decimal:
    """As of an even number: an odd one has a fifth less."""
    if number.is_nan() or number.is_infinite():
        return number
    half = _ARITHMETIC.divide(number, Decimal(2))
    return _from_log(float(half) * math.log(2) + _log_factorial(half))


def _binomial(n: Decimal, k: Decimal) -> Decimal:
    if n.is_nan() or k.is_nan() or k > n:
        return _UNKNOWN
    return _from_log(_log_factorial(n) - _log_factorial(k) - _log_factorial(_ARITHMETIC.subtract(n, k)))
