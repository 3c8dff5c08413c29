r"""Forms of answers that the grader's author had not seen at first, made from labels: equal restatements, and near misses.

They were written without a look at the rules of the grader, its tests or its documents. Of the project's forms only
`grader_forms` was known: these differ. The first verdict, before any rule was changed for them, shows how the grader
generalises (docs/rewards.md); later ones do not.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import pi, sqrt

from grader_forms import BASED, Forms, FormSet

_INTEGER = re.compile(r"-?\d+(?:,\d{3})*")
_LIST = re.compile(r"-?\d+(?:, ?-?\d+)+")
_SURD = re.compile(r"(\d*) ?\\sqrt\{?(\d+)\}?")
_PI = re.compile(r"(\d+) ?\\pi")
_COMPLEX = re.compile(r"(-?\d+) ?([+-]) ?(\d+)i")
_BOTH_SIGNS = re.compile(r"(\d+) \\pm (\d* ?\\sqrt\{\d+\})")
_SUM = re.compile(r"-?[\da-hj-zR^]+(?: ?[+-] ?[\da-hj-zR^]+)+")  # without i, which makes a complex number
_PIECE = re.compile(r"([(\[]) ?([^,()\[\]]+?) ?, ?([^,()\[\]]+?) ?([)\]])")
_TUPLE = re.compile(r"\( ?([^()]+,[^()]+?) ?\)")
_MATRIX = re.compile(r"\\begin\{pmatrix\} ?(.*?) ?\\end\{pmatrix\}")
_UNIT = re.compile(r"([\d.]+) ?\\(?:text|mbox)\{ (\w+)\}(?:\^2)?")
_OPTION = re.compile(r"\\text\{\(([A-E])\)\}")
_NAMES = "zero,one,two,three,four,five,six,seven,eight,nine,ten,eleven,twelve,thirteen,fourteen,fifteen,sixteen"
_POWERS = {base**power: f"{base}^{power}" for power in (4, 3, 2) for base in range(2, 32)}
_SIGNS = {"1/2": ("½", "one half"), "1/3": ("⅓", "one third"), "2/3": ("⅔", "two thirds"), "1/4": ("¼", "one quarter")}
_SHORT = {"inches": "in²", "cm": "cm²", "cents": "¢"}
_RIVALS = {"east": "west", "even": "odd", "ellipse": "hyperbola", "Evelyn": "Carla", "Navin": "Luna"}


def seen_restatements(text: str, value: Fraction | None) -> Forms:
    yield "double dollars", f"$${text}$$"
    yield "Minerva's sentence", f"Final Answer: The final answer is ${text}$. I hope it is correct."
    yield "display style", rf"\displaystyle {text}"
    yield "therefore", rf"\therefore {text}"
    yield "group", f"{{{text}}}"
    if value is not None:
        yield "Markdown bold", f"**{text}**"
        yield "mark of GSM8K", f"#### {text}"
        yield "name with an index", f"S_{{10}} = {text}"
    if value is not None and _INTEGER.fullmatch(text):
        number, words = int(value), _NAMES.split(",")
        yield "quotient worked out", rf"\frac{{{2 * number}}}{{2}} = {number}"
        yield "one decimal", f"{number}.0"
        yield "expression asked for", f"m + n = {number}"
        yield "equals in words", f"x equals {number}"
        yield "tick", f"{number} ✓"
        if number > 1:
            yield "units in text", rf"{number} \text{{ units}}"
            yield "segment", f"AB = {number}"
        if 0 <= number < len(words):
            yield "number word", words[number]
        if abs(number) >= 1000:
            yield "comma in braces", f"{number:,}".replace(",", "{,}")
            yield "space between thousands", f"{number:,}".replace(",", " ")
        if number >= 1000 and number % 100 == 0:
            size = len(str(number)) - 1
            yield "scientific notation", rf"{_decimal(Fraction(number, 10**size))} \times 10^{size}"
        if number in _POWERS:
            yield "power worked out", f"{_POWERS[number]} = {number}"
    elif value is not None and value.denominator > 1:
        sign, above, below = "-" if value < 0 else "", abs(value.numerator), value.denominator
        if below < 10000:
            yield "reduction shown", rf"{sign}\frac{{{2 * above}}}{{{2 * below}}} = {sign}\frac{{{above}}}{{{below}}}"
            yield "cfrac", rf"{sign}\cfrac{{{above}}}{{{below}}}"
            yield "over", rf"{sign}{{{above} \over {below}}}"
        if value > 1:
            yield "whole plus the rest", rf"{above // below} + \frac{{{above % below}}}{{{below}}}"
        if 10**8 % below == 0 and "." not in text:
            yield "exact decimal", _decimal(value)
        elif 10**8 % below and abs(value) > Fraction(1, 10):
            yield "exact, then rounded", rf"{text} \approx {float(value):.3f}"
        if value > 0 and 99 % below == 0:
            digits = str(above % below * 9 // below) if 9 % below == 0 else f"{above % below * 99 // below:02d}"
            yield "repeating decimal", rf"{above // below}.\overline{{{digits}}}"
        if re.match(r"0?\.\d", text):
            yield "zero before the point", text[1:] if text[0] == "0" else f"0{text}"
        yield from zip(("fraction sign", "fraction in words"), _SIGNS.get(str(value), ()), strict=False)
    yield from _restated_shapes(text, text.replace(r"\left", "").replace(r"\right", ""))


def _restated_shapes(text: str, plain: str) -> Forms:
    if text.startswith(r"\$"):
        yield "money in words", re.sub(r",\\!", ",", text[2:]) + " dollars"
    if (found := _SURD.fullmatch(text)) is not None:
        factor, inside = int(found[1] or 1), int(found[2])
        yield "half power", (rf"{factor} \cdot " if found[1] else "") + f"{inside}^{{1/2}}"
        yield "exact, then rounded", rf"{text} \approx {factor * sqrt(inside):.2f}"
        if found[1]:
            yield "root simplified", rf"\sqrt{{{factor**2 * inside}}} = {text}"
    if (found := _PI.fullmatch(text)) is not None:
        yield "exact, then rounded", rf"{text} \approx {int(found[1]) * pi:.2f}"
    if (found := BASED.fullmatch(text)) is not None:
        yield "digits in brackets", f"({found[1]})_{{{found[2]}}}"
        yield "base in text", rf"{found[1]}_{{\text{{base }} {found[2]}}}"
    if (found := _COMPLEX.fullmatch(text)) is not None:
        yield "upright unit", rf"{found[1]} {found[2]} {found[3]}\mathrm{{i}}"
    if (found := _BOTH_SIGNS.fullmatch(text)) is not None:
        yield "both signs written out", f"{found[1]} + {found[2]}, {found[1]} - {found[2]}"
    if _LIST.fullmatch(text) and not _INTEGER.fullmatch(text):
        elements = re.split(", ?", text)
        yield "each with a name", r" \text{ or } ".join(f"x = {each}" for each in elements)
        yield "member of a set", rf"x \in \{{{', '.join(elements)}\}}"
    if _SUM.fullmatch(text):
        terms = re.findall(r"[+-]?[^+-]+", text.replace(" ", ""))
        yield "terms backwards", "".join(each if each[0] in "+-" else f"+{each}" for each in terms[::-1]).removeprefix("+")
        if (starred := re.sub(r"(?<=\d)(?=[a-zA-Z])", "*", text)) != text:
            yield "stars for times", starred
        if "^" in text:
            yield "raised digits", re.sub(r"\^(\d)", lambda power: "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(power[1])], text)
    if pieces := _pieces(plain):
        conditions = r" \text{ or } ".join(map(_condition, pieces))
        yield "set builder", rf"\{{x : {conditions}\}}"
        if r"\infty)" in plain:
            yield "plus infinity", text.replace(r", \infty)", r", +\infty)").replace(r",\infty)", r",+\infty)")
        if len(pieces) > 1:
            yield "union as inequalities", conditions
        elif "infty" not in text:
            left, low, high, right = pieces[0]
            yield "from the upper end", f"{high} {_greater(right)} x {_greater(left)} {low}"
    elif (found := _TUPLE.fullmatch(plain)) is not None:
        yield "tuple with a name", f"A = {text}"
        yield "spaces in a tuple", r"\left(" + re.sub(r" ?, ?", r",\\; ", found[1]) + r"\right)"
    if (found := _MATRIX.fullmatch(text)) is not None:
        rows = re.split(r" *\\\\ *", found[1])
        yield "array", rf"\left[\begin{{array}}{{{'c' * (1 + rows[0].count('&'))}}} {found[1]} \end{{array}}\right]"
        yield "gaps between rows", _matrix(found[1].replace(r"\\", r"\\[4pt]"))
        if "&" not in text:
            yield "row transposed", _matrix(" & ".join(rows)) + "^T"
        if "/" in text:
            yield "fractions inside", re.sub(r"(\d+)/(\d+)", r"\\frac{\1}{\2}", text)
    if "," in text and r"\frac" in text:
        yield "slashes inside", re.sub(r"\\frac\{([^{}]+)\}\{(\d+)\}", r"\1/\2", text)
    if (found := _UNIT.fullmatch(text)) is not None and found[2] in _SHORT:
        yield "short unit", f"{found[1]} {_SHORT[found[2]]}"
    if text.endswith(r"^\circ"):
        yield "degree sign", text.replace(r"^\circ", "°")
        yield "angle with a name", rf"\angle ABC = {text}"
    if (found := _OPTION.fullmatch(text)) is not None:
        yield "option", f"Option {found[1]}"
    if (word := text[6:-1]) in _RIVALS:
        yield "word in small letters", word.lower()


def seen_near_misses(text: str, value: Fraction | None) -> Forms:
    if value is not None and value != 0 and "$" not in text:
        yield "opposite", text[1:] if text[0] == "-" else f"-{text}"
        yield "plus or minus", rf"\pm {text.removeprefix('-')}"
        yield "no solution", r"\text{no solution}"
    if value is not None and _INTEGER.fullmatch(text):
        number, words = int(value), _NAMES.split(",")
        yield "one more", str(number + 1)
        yield "sum not worked out", f"{number} + 1"
        yield "three in a row", f"{number - 1}, {number}, {number + 1}"
        yield "exponent", f"2^{{{number}}}"
        yield "interval around it", f"[{number - 1}, {number + 1}]"
        yield "between in words", f"between {number - 1} and {number + 1}"
        yield "more in words", f"more than {number}"
        yield "not in words", f"not {number}"
        if number > 0:
            yield "times a letter", f"{number}y"
            yield "times pi", rf"{number}\pi"
            yield "a tenth", _decimal(Fraction(number, 10))
            yield "and a half", rf"{number}\frac{{1}}{{2}}"
            yield "a hundredth more", f"{number}.01"
        if number > 1:
            yield "root of it", rf"\sqrt{{{number}}}"
        if number % 10 and str(number)[::-1] != str(number) and number > 0:
            yield "digits backwards", str(number)[::-1]
        if -1 <= number < len(words) - 1:
            yield "number word of one more", words[number + 1]
    elif value is not None and value.denominator > 1 and "$" not in text:
        above, below = value.numerator, value.denominator
        yield "numerator one more", rf"\frac{{{above + 1}}}{{{below}}}"
        yield "denominator one more", rf"\frac{{{above}}}{{{below + 1}}}"
        if abs(above) > 1:
            yield "denominator only", str(below)
        yield "numerator plus denominator", str(above + below)
        if 0 < value < 1 and value != Fraction(1, 2):
            yield "complement", rf"\frac{{{below - above}}}{{{below}}}"
        if value > 1:
            yield "only the rest", rf"\frac{{{above % below}}}{{{below}}}"
            yield "bar read as a mixed number", rf"{above}\frac{{1}}{{{below}}}"
    yield from _missed_shapes(text, text.replace(r"\left", "").replace(r"\right", ""))


def _missed_shapes(text: str, plain: str) -> Forms:
    if (found := _SURD.fullmatch(text)) is not None:
        yield "cube root", rf"{found[1]}\sqrt[3]{{{found[2]}}}"
        yield "opposite root", f"-{text}"
        if found[1]:
            yield "factor lost", rf"\sqrt{{{found[2]}}}"
    if (found := _PI.fullmatch(text)) is not None:
        yield "pi lost", found[1]
        yield "pi squared", rf"{found[1]}\pi^2"
    if (found := BASED.fullmatch(text)) is not None:
        yield "last digit changed", f"{found[1][:-1]}{'0' if found[1][-1] == '1' else '1'}_{{{found[2]}}}"
    if (found := _COMPLEX.fullmatch(text)) is not None:
        yield "conjugate", f"{found[1]} {'-' if found[2] == '+' else '+'} {found[3]}i"
        yield "real part only", found[1]
        yield "imaginary part only", f"{found[2].removeprefix('+')}{found[3]}i"
    if (found := _BOTH_SIGNS.fullmatch(text)) is not None:
        yield "plus only", f"{found[1]} + {found[2]}"
    if _LIST.fullmatch(text) and not _INTEGER.fullmatch(text):
        elements = [int(each) for each in text.split(",")]
        if sorted(elements) != sorted(-each for each in elements):
            yield "opposite elements", ", ".join(str(-each) for each in elements)
        yield "last element changed", ", ".join(map(str, [*elements[:-1], elements[-1] + 2]))
    if _SUM.fullmatch(text):
        terms = re.findall(r"[+-]?[^+-]+", text.replace(" ", ""))
        yield "last term lost", "".join(terms[:-1])
    if pieces := _pieces(plain):
        _, low, high, _ = pieces[0]
        if len(pieces) > 1:
            yield "intersection", text.replace(r"\cup", r"\cap")
        elif "infty" in text:
            yield "other ray", rf"(-\infty, {low})" if "infty" in high else rf"({high}, \infty)"
        else:
            yield "ends only", rf"\{{{low}, {high}\}}"
            yield "outside", rf"(-\infty, {low}) \cup ({high}, \infty)"
    elif (found := _TUPLE.fullmatch(plain)) is not None:
        first, *others = re.split(" ?, ?", found[1])
        yield "first coordinate only", first
        yield "coordinate more", f"({', '.join([first, *others, '0'])})"
        if first != "0":
            yield "first coordinate opposite", f"({', '.join([first[1:] if first[0] == '-' else f'-{first}', *others])})"
    if (found := _MATRIX.fullmatch(text)) is not None:
        yield "row lost", _matrix(found[1].rpartition(r"\\")[0].strip())
        yield "opposite matrix", f"-{text}"
    if text.startswith(r"\$"):
        yield "other currency", "€" + re.sub(r",\\!", ",", text[2:])
    if text.endswith(r"^\circ"):
        degrees = int(text.removesuffix(r"^\circ"))
        yield "radians", rf"{degrees} \text{{ radians}}"
    if (found := _OPTION.fullmatch(text)) is not None and found[1] != "D":
        yield "two options", rf"\text{{({found[1]}) and (D)}}"
    if (rival := _RIVALS.get(word := text[6:-1])) is not None:
        yield "rival word", rf"\text{{{rival}}}"
        yield "either word", f"{word} or {rival}"


def _pieces(plain: str) -> list[tuple[str, ...]]:
    """Each part of an interval or of a union of intervals: bracket, end, end, bracket. No parts for what may be a point."""
    found = [_PIECE.fullmatch(part.strip()) for part in plain.removeprefix(r"x \in ").split(r"\cup")]
    parts = [each.groups() for each in found if each is not None]
    is_interval = any(sign in plain for sign in ("infty", "[", "]", r"\cup", "sqrt"))
    return parts if is_interval and len(parts) == len(found) else []


def _condition(piece: tuple[str, ...]) -> str:
    left, low, high, right = piece
    below = f"x {_less(right)} {high}"
    return below if "infty" in low else f"x {_greater(left)} {low}" if "infty" in high else f"{low} {_less(left)} {below}"


def _less(bracket: str) -> str:
    return "<" if bracket in "()" else r"\le"


def _greater(bracket: str) -> str:
    return ">" if bracket in "()" else r"\ge"


def _matrix(rows: str) -> str:
    return rf"\begin{{pmatrix}} {rows} \end{{pmatrix}}"


def _decimal(value: Fraction) -> str:
    return f"{float(value):.10f}".rstrip("0").rstrip(".")


SEEN = FormSet(seen_restatements, seen_near_misses)
