r"""Forms of answers that graders of values get wrong, made from labels: equal restatements, and near misses.

`NEW` are the forms that the judge `form` was written for. `HELD_OUT` are forms that graders' public test suites have (Hendrycks
MATH, Minerva, Qwen2.5-Math, PRM800K), written before that judge and kept apart from its rules: they say how it generalises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

Forms = Iterator[tuple[str, str]]  # kind, answer


class FormSet(NamedTuple):
    """Generators of answers to a label: its text, and its value where it is a plain number or fraction."""

    restatements: Callable[[str, Fraction | None], Forms]
    near_misses: Callable[[str, Fraction | None], Forms]


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"
    " nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
ONES, TENS = _ONES.split(" "), _TENS.split(" ")  # names of 0 to 19, and of 20 to 90

_ROOT = re.compile(r"\\sqrt\{?(\d+)\}?")
BASED = re.compile(r"(\d+)_\{?(\d+)\}?")
_UNIT = re.compile(r"(?P<value>[\d./\\a-z{}]*\d\}?)\s*\\(?:text|mbox)\{\s*(?P<unit>[a-z]+)\s*\}(?P<power>\^2)?")
_INTERVAL = re.compile(r"(?:x \\in )?(?:\\left)?([(\[])\s*([^,()\[\]]+?)\s*,\s*([^,()\[\]]+?)\s*(?:\\right)?([)\]])")
_MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}")
_WORDS = re.compile(r"\\text\{([A-Za-z]{3,})\}")
_FRACTION = re.compile(r"(-?)\\d?frac\s*\{?(\d+?)\}?\s*\{?(\d+)\}?")
_NUMBERS = {8: "eight", 5: "five", 6: "six", 9: "nine"}


def _is_interval(text: str) -> re.Match[str] | None:
    found = _INTERVAL.fullmatch(text)
    is_one = found is not None and ("infty" in text or found[1] != "(" or found[4] != ")" or "sqrt" in text or r"\in" in text)
    return found if is_one else None


def new_restatements(text: str, value: Fraction | None) -> Forms:
    yield "sentence", f"The answer is {text}"
    yield "sentence in dollars", f"So the final answer is: ${text}$."
    yield "bold symbol", rf"\boldsymbol{{{text}}}"
    bare = text.removeprefix("x=").removeprefix("y = ").removeprefix(r"x \in ")
    if value is not None:
        yield "function value", f"f(2) = {text}"
        yield "word as a name", rf"\text{{Total}} = {text}"
    if value is not None and value.denominator == 1 and not text.startswith(("\\", "$")):
        number = int(value)
        yield "sum", f"{number - 1} + 1 = {number}"
        yield "degrees", rf"{number}^\circ"
        yield "bare unit", f"{number} cm"
        yield "unit in roman", rf"{number}\,\mathrm{{kg}}"
    if value is not None and value.denominator > 1 and value > 1:
        whole, rest = divmod(value.numerator, value.denominator)
        yield "mixed number", f"{whole} {rest}/{value.denominator}"
        yield "mixed number in LaTeX", rf"{whole}\frac{{{rest}}}{{{value.denominator}}}"
    if _ROOT.search(text):
        yield "root sign", _ROOT.sub(r"√\1", text)
    if "(" in text and "text" not in text:
        yield "big brackets", re.sub(r"([(\[])", r"\\big\1", re.sub(r"([)\]])", r"\\big\1", _plain_brackets(text)))
    if (found := _is_interval(text)) is not None:
        opening, low, high, closing = found.groups()
        sides = [r"\le" if bracket in "[]" else "<" for bracket in (opening, closing)]
        if r"-\infty" in low:
            yield "inequality", f"x {sides[1]} {high}"
        elif r"\infty" in high:
            above = ">" if sides[0] == "<" else r"\ge"
            yield "inequality", f"x {above} {low}"
        else:
            yield "inequality", f"{low}{sides[0]} x{sides[1]} {high}"
        yield "member of an interval", rf"x \in {bare}"
    if (found := _MATRIX.fullmatch(text)) is not None:
        for name in ("bmatrix", "matrix"):
            yield name, rf"\begin{{{name}}}{found[1]}\end{{{name}}}"
        unspaced = re.sub(r"\s", "", found[1])
        yield "unspaced matrix", rf"\begin{{pmatrix}}{unspaced}\end{{pmatrix}}"
    if (found := _UNIT.fullmatch(text)) is not None and found["unit"] in ("inches", "cm"):
        yield "square unit in words", f"{found['value']} square {found['unit']}"
    if (found := BASED.fullmatch(text)) is not None:
        yield "base in words", rf"{found[1]}_{{\text{{{_NUMBERS.get(int(found[2]), found[2])}}}}}"
        yield "base behind", f"{found[1]} base {found[2]}"
    if (found := _WORDS.fullmatch(text)) is not None:
        yield "word in a sentence", f"The answer is {found[1].upper()}."
    if text.endswith(r"^\circ"):
        yield "degrees in words", text.replace(r"^\circ", " degrees")
        yield "without degrees", text.replace(r"^\circ", "")


def new_near_misses(text: str, value: Fraction | None) -> Forms:
    if value is not None and value.denominator == 1 and not text.startswith(("\\", "$")):
        number = int(value)
        yield "another number equals it", f"{number + 1} = {number}"
        yield "it equals another number", f"{number} = {number + 1}"
        yield "arrow", rf"{number + 1} \to {number}"
        yield "with a base", f"{number}_8"
        yield "with a small base", f"{number}_3"
        yield "chain with another number", f"{number} = {number + 1} = {number}"
        yield "congruent", rf"{number + 7} \equiv {number}"
        yield "or one more", f"{number} or {number + 1}"
        if number in (2, 3):  # of larger ones math_verify computes the factorial of the factorial
            yield "double factorial", f"{number}!!"
    if value is not None:
        yield "not equal", rf"\neq {text}"
        yield "at least", rf"\ge {text}"
        yield "less", f"x < {text}"
        yield "more", f"{text} < x"
    if (found := _UNIT.fullmatch(text)) is not None and found["unit"] in ("inches", "cm", "degrees", "cents"):
        for unit in ("km", "m", "kg"):
            yield "other unit", rf"{found['value']} \text{{ {unit}}}{found['power'] or ''}"
        yield "other power of the unit", rf"{found['value']} \text{{ {found['unit']}}}^3"
    if text.endswith(r"^\circ"):
        yield "other unit", text.replace(r"^\circ", " cm")
    if (found := _WORDS.fullmatch(text)) is not None:
        yield "anagram", found[1][1:] + found[1][0]
    if text.startswith(("x=", "y = ")):
        yield "other name", "z" + text[1:]
    if (found := _is_interval(text)) is not None:
        opening, low, high, closing = found.groups()
        if r"-\infty" not in low:
            yield "other bracket", f"{'[' if opening == '(' else '('}{low},{high}{closing}"
        if r"\infty" not in high:
            yield "other bracket", f"{opening}{low},{high}{']' if closing == ')' else ')'}"
            below = "<" if closing == "]" else r"\le"
            yield "other inequality", f"x {below} {high}"
    if (found := _MATRIX.fullmatch(text)) is not None:
        rows = found[1].split(r"\\")
        upside_down, side = r"\\".join(rows[::-1]), " & ".join(row.replace("&", " ") for row in rows)
        yield "matrix upside down", rf"\begin{{pmatrix}}{upside_down}\end{{pmatrix}}"
        yield "matrix on its side", rf"\begin{{bmatrix}}{side}\end{{bmatrix}}"
    if (found := BASED.fullmatch(text)) is not None:
        yield "other base", f"{found[1]}_{int(found[2]) + 1}"


def held_out_restatements(text: str, value: Fraction | None) -> Forms:
    yield "in round delimiters", rf"\({text}\)"
    yield "in square delimiters", rf"\[ {text} \]"
    yield "mbox and spaces", rf"\;{text}\; "
    if value is not None and value.denominator == 1 and not text.startswith(("\\", "$")):
        number = int(value)
        yield "swapped equation", f"{number} = x"
        yield "trailing dollar word", f"{number} dollars per day"
        yield "decimal point", f"{number}."
        yield "roman unit", rf"{number}\mathrm{{~miles}}"
        yield "approximately", rf"x \approx {number}"
        yield "cents after a point", f"\\${number}.00"
        yield "unicode minus", str(number).replace("-", "\u2212")
        yield "in a color box", rf"\mathbf{{{number}}}"
        yield "percent in words", f"{number} percent"
        if abs(number) >= 1000:
            yield "thin spaces", f"{number:,}".replace(",", r"\,")
    if value is not None and value.denominator > 1:
        sign, size = ("-" if value < 0 else ""), abs(value)
        yield "tfrac", rf"{sign}\tfrac{{{size.numerator}}}{{{size.denominator}}}"
        yield "spaced slash", f"{sign}{size.numerator} / {size.denominator}"
        yield "brackets around", rf"\left({sign}\frac{{{size.numerator}}}{{{size.denominator}}}\right)"
        if size.numerator < 10 and size.denominator < 10:
            yield "frac without braces", rf"{sign}\frac{size.numerator}{size.denominator}"
    if _ROOT.search(text):
        yield "sqrt in words", _ROOT.sub(r"sqrt(\1)", text)
        yield "sqrt without braces", _ROOT.sub(lambda found: rf"\sqrt {found[1]}" if len(found[1]) == 1 else found[0], text)
    if r"\pi" in text:
        yield "pi sign", text.replace(r"\pi", "π")
    if r"\infty" in text:
        yield "infinity sign", text.replace(r"\infty", "∞").replace(r"\cup", "∪")
    if value is None and re.fullmatch(r"-?\d+(?:, ?-?\d+)+", text):
        elements = [each.strip() for each in text.split(",")]
        yield "list with and", f"{', '.join(elements[:-1])} and {elements[-1]}"
        yield "list in another order", ", ".join(elements[::-1])
        yield "set", rf"\{{{', '.join(elements)}\}}"
    if re.fullmatch(r"-?\d+ ?[+-] ?\d*i", text):
        real, imaginary = re.fullmatch(r"(-?\d+) ?([+-] ?\d*i)", text).groups()  # type: ignore[union-attr]
        yield "imaginary part first", f"{imaginary.replace(' ', '').removeprefix('+')}{'' if real[0] == '-' else '+'}{real}"
    if re.fullmatch(r"\\text\{\([A-E]\)\}", text):
        yield "letter", text[7]
        yield "letter in brackets", f"({text[7]})"
    if (found := _WORDS.fullmatch(text)) is not None:
        yield "words in roman", rf"\mathrm{{{found[1]}}}"
    if (found := _UNIT.fullmatch(text)) is not None:
        yield "without its unit", found["value"]
        yield "unit in roman", rf"{found['value']}\,\mathrm{{{found['unit']}}}{found['power'] or ''}"
    if (found := BASED.fullmatch(text)) is not None:
        yield "base in braces", f"{found[1]}_{{{found[2]}}}"


def held_out_near_misses(text: str, value: Fraction | None) -> Forms:
    if value is not None and value not in (0, 1, -1) and not text.startswith("$"):
        yield "reciprocal", str(1 / value)
        yield "hundredth", _decimal(value / 100)
        yield "square", str(value * value)
        yield "digit appended", f"{text}1" if value.denominator == 1 and text[-1].isdigit() else str(value + 11)
        yield "less than or equal", rf"n \leq {text}"
        yield "implied by another", rf"{value + 2} \Rightarrow {text}"
        yield "sum that is wrong", f"{value - 2} + 1 = {text}"
        yield "complex", f"{text} + i"
    if value is not None and value.denominator > 1:
        yield "numerator only", str(value.numerator)
        yield "rounded", str(round(value))
    if value is None and re.fullmatch(r"-?\d+(?:, ?-?\d+)+", text):
        yield "one element less", text.rpartition(",")[0]
        yield "one element more", f"{text}, 99"
    if re.search(r"[a-z]\^?\d? [+-] \d", text):
        yield "one sign changed", re.sub(r" ([+-]) (?=\d)", lambda found: " - " if found[1] == "+" else " + ", text, count=1)
    if _ROOT.search(text):
        yield "root of one more", _ROOT.sub(lambda found: rf"\sqrt{{{int(found[1]) + 1}}}", text)
        yield "without the root", _ROOT.sub(r"(\1)", text)
    if re.fullmatch(r"\\text\{\([A-E]\)\}", text):
        yield "another letter", "F"
    if (found := _WORDS.fullmatch(text)) is not None:
        yield "negated", f"not {found[1]}"
        yield "another word", "none of these"
    if (
        (found := re.fullmatch(r"(?:\\left)?\(\s*(.+?)\s*,\s*(.+?)\s*(?:\\right)?\)", text))
        and found[1] != found[2]
        and "infty" not in text
    ):
        yield "coordinates swapped", f"({found[2]}, {found[1]})"


def _plain_brackets(text: str) -> str:
    return text.replace(r"\left", "").replace(r"\right", "")


def _decimal(value: Fraction) -> str:
    return f"{float(value):.10f}".rstrip("0").rstrip(".")


NEW = FormSet(new_restatements, new_near_misses)
HELD_OUT = FormSet(held_out_restatements, held_out_near_misses)
