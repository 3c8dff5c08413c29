r"""Natural forms of answers whose writer knew no grader: equal restatements, and near misses.

No rule was changed after the first verdict on them, so they show how the grader generalises. Every function yields pairs
(kind, answer); the answer is what could stand inside \boxed{...}.
"""

from __future__ import annotations

import re
from fractions import Fraction

from grader_forms import Forms, FormSet

Rules = list[tuple[str, str, str]]  # (kind, pattern of the whole label, template of the answer)

INTEGER = r"-?\d+|-?\d{1,3}(?:,(?:\\!)? ?\d{3})+"
DECIMAL = r"-?\d*\.\d+"
FRACTION = r"-?\\[dt]?frac ?(?:\{\d+\}|\d)(?:\{\d+\}|\d)"
MIXED = r"(\d+) ?\\frac\{(\d+)\}\{(\d+)\}"
SURD = r"(\d+) ?\\sqrt\{?(\d+)\}?"
ROOT = r"(-?)\\sqrt\{(\d+)\}"
PI = r"(\d+) ?\\pi"
TERM = r"(?:\d|[a-zA-Z^]|\\sqrt\{\d+\}|\\pi| )+"
SUM = rf"-?{TERM}(?:[+-]{TERM})+"
RAY = r"\((-?\d+),\\infty\)"
HALF_OPEN = r"\((\d+),(\d+)\]"
UNION = r"(\(.+?\)) \\cup (\(.+?\))"
PAIR = r"(-?\d),(-?\d)"
MATRIX = r"\\begin\{pmatrix\} (.*) \\end\{pmatrix\}"
DEGREES = r"(\d+)\^\\circ"
CHOICE = r"\\text\{\(([A-E])\)\}"
WORD = r"\\text\{([A-Za-z]+)\}"
BASE = r"(\d+)_\{?(\d)\}?"
MONEY = r"\\\$(\d+(?:\.\d\d)?)"
AREA = r"(\d+) ?\\mbox\{ (cm|inches)\}\^2"
PLUS_MINUS = r"(\d+) \\pm (.+)"
NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NEXT_DIGIT = dict(zip("0123456789", "1234567898", strict=True))
OTHER_WORDS = {"even": "odd", "odd": "even", "east": "west", "ellipse": "hyperbola", "Evelyn": "Carla", "Navin": "Luke"}

EQUAL_RULES: Rules = [
    ("number assigned to x", rf"({INTEGER}|{FRACTION}|{SURD}|{PI})", r"x = \1"),
    ("surd with dot", SURD, r"\1 \\cdot \\sqrt{\2}"),
    ("surd in plain text", SURD, r"\1*sqrt(\2)"),
    ("surd with root sign", SURD, "\\1\u221a\\2"),
    ("root in plain text", ROOT, r"\1sqrt(\2)"),
    ("pi with dot", PI, r"\1 \\cdot \\pi"),
    ("pi sign", PI, "\\1\u03c0"),
    ("ray as inequality", RAY, r"x > \1"),
    ("ray with signed infinity", RAY, r"(\1, +\\infty)"),
    ("interval as inequality", HALF_OPEN, r"\1 < x \\le \2"),
    ("member of union", UNION, r"x \\in \1 \\cup \2"),
    ("union swapped", UNION, r"\2 \\cup \1"),
    ("sized parentheses", r"\((-?\d+,[^()]*-?\d+)\)", r"\\left(\1\\right)"),
    ("square brackets around matrix", MATRIX, r"\\begin{bmatrix} \1 \\end{bmatrix}"),
    ("braced degree sign", DEGREES, r"\1^{\\circ}"),
    ("unicode degree sign", DEGREES, "\\1\u00b0"),
    ("word degrees", DEGREES, r"\1 \\text{ degrees}"),
    ("bare choice", CHOICE, r"\1"),
    ("choice in parentheses", CHOICE, r"(\1)"),
    ("bold choice", CHOICE, r"\\textbf{(\1)}"),
    ("bare word", WORD, r"\1"),
    ("bold word", WORD, r"\\textbf{\1}"),
    ("braced base", BASE, r"\1_{\2}"),
    ("base in words", BASE, r"\1 \\text{ (base \2)}"),
    ("amount without sign", MONEY, r"\1"),
    ("amount in dollars", MONEY, r"\1 \\text{ dollars}"),
    ("area with braced power", AREA, r"\1\\,\\text{\2}^{2}"),
    ("both signs written out", PLUS_MINUS, r"\1 + \2, \1 - \2"),
    ("list with and", PAIR, r"\1 \\text{ and } \2"),
    ("list of solutions", PAIR, r"x = \1 \\text{ or } x = \2"),
    ("braced exponent", r"(\d[a-zA-Z])\^(\d)", r"\1^{\2}"),
    ("value without variable", r"x=(\d+)", r"\1"),
    ("factors swapped", r"(\([^()]+\))(\([^()]+\))", r"\2\1"),
]
WRONG_RULES: Rules = [
    ("mixed number without fraction", MIXED, r"\1"),
    ("surd without root", SURD, r"\1 \\cdot \2"),
    ("surd without factor", SURD, r"\\sqrt{\2}"),
    ("cube root", SURD, r"\1\\sqrt[3]{\2}"),
    ("radicand alone", ROOT, r"\1\2"),
    ("pi left out", PI, r"\1"),
    ("ray reversed", RAY, r"(-\\infty, \1)"),
    ("ray closed", RAY, r"[\1, \\infty)"),
    ("brackets exchanged", HALF_OPEN, r"[\1,\2)"),
    ("first part of union", UNION, r"\1"),
    ("intersection", UNION, r"\1 \\cap \2"),
    ("coordinates reversed", r"\((-?\d+),(-?\d+)\)", r"(\2,\1)"),
    ("coordinate missing", r"\((-?\d+,[^()]+),(-?\d+)\)", r"(\1)"),
    ("radians", DEGREES, r"\1 \\text{ radians}"),
    ("two choices", CHOICE, r"\\text{(A), (B)}"),
    ("base ten", BASE, r"\1_{10}"),
    ("cents for dollars", MONEY, r"\1 \\text{ cents}"),
    ("volume for area", AREA, r"\1 \\text{ \2}^3"),
    ("other area unit", AREA, r"\1 \\text{ m}^2"),
    ("plus sign alone", PLUS_MINUS, r"\1 + \2"),
    ("solution missing", PAIR, r"\1"),
    ("last factor missing", r"(\([^()]+\))(\([^()]+\))", r"\1"),
]


def apply_rules(rules: Rules, text: str) -> Forms:
    """Yield the answers of all rules whose pattern fits the whole label."""
    for kind, pattern, template in rules:
        if match := re.fullmatch(pattern, text):
            yield kind, match.expand(template)


def decimal_text(value: Fraction) -> str | None:
    """Return the exact decimal of a value, or None if it needs more than seven places."""
    exact = (value * 10**7).denominator == 1
    whole, part = f"{float(value):.7f}".split(".")
    return f"{whole}.{part}".rstrip("0").rstrip(".") if exact else None


def join_terms(terms: list[str]) -> str:
    """Join terms, each of which may begin with its sign, to a sum."""
    signed = [term if term[0] in "+-" else f"+{term}" for term in terms]
    return signed[0].removeprefix("+") + "".join(f" {term[0]} {term[1:]}" for term in signed[1:])


def integer_restatements(text: str, number: int) -> Forms:
    """Yield equal forms of an integer."""
    plain, grouped = str(number), f"{number:,}"
    yield from (("plain digits", plain), ("one zero decimal", f"{plain}.0"), ("two zero decimals", f"{plain}.00"))
    yield from (("bold math", f"\\mathbf{{{text}}}"), ("bold text", f"\\textbf{{{plain}}}"))
    yield from (("text command", f"\\text{{{plain}}}"), ("markdown bold", f"**{plain}**"))
    if abs(number) >= 1000:
        yield from (("comma groups", grouped), ("braced commas", grouped.replace(",", "{,}")))
        yield from (("tight commas", grouped.replace(",", ",\\!")), ("thin spaces", grouped.replace(",", "\\,")))
    if 0 <= number <= 12:
        yield "number word", f"\\text{{{NUMBER_WORDS[number]}}}"
    if number >= 4:
        yield "sum with result", f"{number - number // 3} + {number // 3} = {plain}"
        if number % 2 == 0:
            yield "product with result", f"{number // 2} \\times 2 = {plain}"
    if number >= 10000 and number % 1000 == 0:
        power = len(plain) - 1
        yield "scientific notation", f"{decimal_text(Fraction(number, 10**power))} \\times 10^{{{power}}}"


def fraction_restatements(value: Fraction) -> Forms:
    """Yield equal forms of a number that is no integer."""
    sign, top, bottom, decimal = "-" if value < 0 else "", abs(value.numerator), value.denominator, decimal_text(value)
    fraction = f"{sign}\\frac{{{top}}}{{{bottom}}}"
    yield from (("plain fraction", fraction), ("display fraction", fraction.replace("frac", "dfrac")))
    yield from (("slash", f"{sign}{top}/{bottom}"), ("small fraction", fraction.replace("frac", "tfrac")))
    yield "sign in the numerator", f"\\frac{{{sign}{top}}}{{{bottom}}}"
    if bottom < top < 20 * bottom and bottom <= 20 and value > 0:
        yield "mixed number", f"{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}"
    if decimal is None:
        yield "fraction with approximation", f"{fraction} \\approx {float(value):.4f}"
    else:
        yield from (("exact decimal", decimal), ("fraction with its decimal", f"{fraction} = {decimal}"))


def unseen_restatements(text: str, value: Fraction | None) -> Forms:
    """Yield answers that mean the same as the label."""
    forms = [("dollar signs", f"${text}$"), ("inline math", f"\\({text}\\)"), ("full stop", f"{text}.")]
    forms += [("spaces around", f" {text} "), ("box in box", f"\\boxed{{{text}}}")]
    forms += [("display style", f"\\displaystyle {text}"), ("sentence", f"\\text{{The answer is }} {text}")]
    forms += [("answer heading", f"\\text{{Answer: }} {text}"), *apply_rules(EQUAL_RULES, text)]
    if value is not None and re.fullmatch(INTEGER, text):
        forms += integer_restatements(text, int(value))
    elif value is not None and re.fullmatch(f"{FRACTION}|{DECIMAL}|{MIXED}", text):
        forms += fraction_restatements(value)
    if re.fullmatch(SUM, text):
        terms = re.findall(r"[+-]?[^+-]+", text.replace(" ", ""))
        forms += [("spaced sum", join_terms(terms)), ("last term first", join_terms(terms[-1:] + terms[:-1]))]
    if " " in text and not re.search(r"\\[a-z]+ [a-zA-Z]", text):
        forms.append(("without spaces", text.replace(" ", "")))
    yield from (form for form in forms if form[1] != text)


def integer_near_misses(number: int) -> Forms:
    """Yield wrong answers for an integer."""
    plain = str(number)
    yield from (("one more", f"{number + 1}"), ("one less", f"{number - 1}"), ("ten more", f"{number + 10}"))
    yield from (("half more", f"{plain}.5"), ("times pi", f"{plain}\\pi"), ("greater than", f"x > {plain}"))
    yield from (("two answers", f"{plain} \\text{{ or }} {number + 1}"), ("list", f"{number - 1}, {plain}"))
    yield "wrong sum", f"{plain} + 5 = {number + 5}"
    yield "sentence with wrong number", f"\\text{{The answer is }} {number + 2}"
    if number != 0:
        yield from (("sign lost or added", f"{-number}"), ("doubled", f"{2 * number}"), ("zero appended", f"{plain}0"))
        yield from (("no solution", "\\text{no solution}"), ("plus or minus", f"\\pm {abs(number)}"))
        yield from (("decimal point moved", f"{decimal_text(Fraction(number, 10))}"), ("over three", f"\\frac{{{plain}}}{{3}}"))
        yield from (("times x", f"{plain}x"), ("times root", f"{plain}\\sqrt{{2}}"))
    if number >= 10 and plain[-1] != plain[-2]:
        yield "last digits exchanged", f"{int(plain[:-2] + plain[-1] + plain[-2])}"


def fraction_near_misses(value: Fraction) -> Forms:
    """Yield wrong answers for a number that is no integer."""
    top, bottom = value.numerator, value.denominator
    yield from (("numerator off", f"\\frac{{{top + 1}}}{{{bottom}}}"), ("denominator off", f"\\frac{{{top}}}{{{bottom + 1}}}"))
    yield from (("upside down", f"{1 / value}"), ("times pi", f"\\frac{{{top}\\pi}}{{{bottom}}}"))
    yield from (("slash off", f"{top}/{bottom + 2}"), ("opposite sign", f"{-value}"), ("numerator alone", f"{top}"))
    yield "plus one", f"{value + 1}"


def unseen_near_misses(text: str, value: Fraction | None) -> Forms:
    """Yield answers that are close to the label but wrong."""
    forms = [("empty", ""), ("undetermined", "\\text{cannot be determined}"), *apply_rules(WRONG_RULES, text)]
    if value is not None and re.fullmatch(INTEGER, text):
        forms += integer_near_misses(int(value))
    elif value is not None and re.fullmatch(f"{FRACTION}|{DECIMAL}|{MIXED}", text):
        forms += fraction_near_misses(value)
    elif digits := re.findall(r"\d", text):
        before, after = text.rsplit(digits[-1], 1)
        forms.append(("last digit off", f"{before}{NEXT_DIGIT[digits[-1]]}{after}"))
        if len(digits) > 1:
            forms.append(("first digit off", text.replace(digits[0], NEXT_DIGIT[digits[0]], 1)))
    elif match := re.fullmatch(CHOICE, text):
        forms += [("other choice", f"\\text{{({'BCDEA'['ABCDE'.index(match[1])]})}}")]
    elif (match := re.fullmatch(WORD, text)) and match[1] in OTHER_WORDS:
        forms += [("other word", f"\\text{{{OTHER_WORDS[match[1]]}}}")]
    if re.fullmatch(SUM, text):
        terms = re.findall(r"[+-]?[^+-]+", text.replace(" ", ""))
        changed = terms[-1].translate(str.maketrans("+-", "-+"))
        forms += [("last sign changed", join_terms([*terms[:-1], changed])), ("last term lost", join_terms(terms[:-1]))]
    yield from (form for form in forms if form[1] != text)


UNSEEN = FormSet(unseen_restatements, unseen_near_misses)
