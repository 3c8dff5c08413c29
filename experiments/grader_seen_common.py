r"""Common forms of answers that their writer made without a look at the rules: what models and people put into a box.

`seen_restatements` and `seen_near_misses` yield (kind, answer) for every kind that applies to a label; the value
is not needed, as it follows from the label. Most kinds are lines of tables, "kind: form", where @t is the label and
other letters after @ are parts made from it.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from grader_forms import ONES, TENS, Forms, FormSet

FRACTION, SURD, PI = r"(-?)\\frac\{(\d+)\}\{(\d+)\}", r"(\d+) ?\\sqrt\{(\d+)\}", r"(\d+) ?\\pi"
BASE, CHOICE, WORD = r"(\d+)_\{?(\d+)\}?", r"\\text\{\((\w)\)\}", r"\\text\{(\w+)\}"
PARTS = dict(enumerate(["half", "third", "quarter", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], 2))
UNICODE = {r"\pi": "π", r"^\circ": "°", r"\infty": "∞", r"\cup": "∪", r"\pm": "±", r"\in ": "∈ "}
OTHER = {"Evelyn": "Angela", "Navin": "Luka", "east": "west", "ellipse": "hyperbola", "even": "odd"}

ANY_RIGHT = r"""
dollar signs: $@t$ ;; backslash parentheses: \(@t\) ;; display brackets: \[ @t \] ;; box in the box: \boxed{@t}
bold markdown with maths: **$@t$** ;; four hashes: #### @t ;; therefore sign: \therefore @t ;; display style: \displaystyle @t
full stop: @t. ;; final sentence: The final answer is: $\boxed{@t}$. I hope it is correct. ;; answer prefix: \text{Answer: } @t
chinese sentence: 答案是 $@t$。 ;; answer tag: <answer>@t</answer> ;; check mark: @t \checkmark ;; thin spaces: \, @t \,
so sentence: So the answer is $@t$."""
INT_RIGHT = r"""
bold markdown: **@n** ;; one zero decimal: @n.0 ;; two zero decimals: @n.00 ;; number in text: \text{@n} ;; named x: x = @n
over one: \frac{@n}{1} ;; code span: `@n` ;; extra braces: {@n} ;; json object: {"answer": @n}
bold maths: \mathbf{@n} ;; quotient, then the value: \frac{@d}{2} = @n"""
LARGE_RIGHT = r"comma groups: @c ;; comma groups in braces: @b ;; groups with thin spaces: @s ;; power of ten: @p"
FRACTION_RIGHT = r"""
slash fraction: @s@n/@d ;; large fraction: @s\dfrac{@n}{@d} ;; fraction with over: @s{@n \over @d}
chain of equals: @s\frac{@N}{@D} = @s\frac{@n}{@d}"""
SURD_RIGHT = r"""
computer notation: @a*sqrt(@b) ;; factors swapped: \sqrt{@b} \cdot @a ;; all under the root: \sqrt{@c}"""
CHOICE_RIGHT = r"letter or word alone: @l ;; bold letter or word: \textbf{(@l)} ;; option: Option @l"
WORD_RIGHT = r"letter or word alone: @w ;; bold letter or word: \textbf{@w}"
BASE_RIGHT = r"base in words: @n \text{ (base } @b) ;; parentheses round the digits: (@n)_{@b}"

ANY_WRONG = r"""
no solution: \text{No solution} ;; not determined: \text{Cannot be determined from the given information}
placeholder: \text{[your answer here]} ;; question mark: ? ;; denied: \text{not } @t"""
INT_WRONG = r"""
plus one: @u ;; minus one: @l ;; plus one with decimals: @u.00 ;; plus one named: x = @u ;; a half more: @n.5
minus one in a sentence: The final answer is: $\boxed{@l}$. I hope it is correct. ;; this or the next: @n \text{ or } @u
this and double: @n, @D ;; not equal: x \neq @n ;; below: x < @n ;; sum with a variable: @n + x ;; set of two: \{@l, @n\}
chain goes on: @n + 2 = @v ;; corrected: It is not @n but @u. ;; between: @l < x < @u"""
POSITIVE_WRONG = r"""
with a variable: @nx ;; multiples: @nk, k \in \mathbb{Z} ;; times pi: @n\pi ;; both signs: \pm @n ;; first sign changed: -@n
ten times: @n0 ;; chain doubled: @n \times 2 = @D ;; power of ten too much: @n \times 10^{2}
a tenth: @t ;; range: @n-@v"""
MANY_WRONG = r"squared: @n^2 ;; root: \sqrt{@n} ;; reciprocal: \frac{1}{@n}"
FRACTION_WRONG = r"""
numerator alone: @s@n ;; denominator alone: @s@d ;; product: @s@n \cdot @d ;; times pi: @t\pi ;; squared: \left(@t\right)^2
point for the bar: @s@n.@d ;; reciprocal: @s\frac{@d}{@n} ;; slash fraction of the next: @s@m/@d"""
SURD_WRONG = r"""
factor lost: \sqrt{@b} ;; root or pi lost: @a \cdot @b ;; cube root: @a\sqrt[3]{@b} ;; factor drawn in: \sqrt{@m}
sum for product: @a + \sqrt{@b} ;; both signs: \pm @a\sqrt{@b}"""
PI_WRONG = r"root or pi lost: @n ;; pi squared: @n\pi^2 ;; sum for product: @n + \pi"
BASE_WRONG = r"base ten: @n_{10} ;; digits swapped: @r_{@b}"


def fill(table: str, **parts: object) -> Forms:
    """Yield the kinds of a table, their forms with the parts put in for the letters after @."""
    for entry in re.split(r"\n|;;", table.strip()):
        kind, form = entry.strip().split(": ", 1)
        yield kind, re.sub("@(.)", lambda found: str(parts[found[1]]), form)


def tidy(text: str) -> str:
    r"""The label with braces round the arguments of \frac and \sqrt and without gaps in numbers."""
    text = re.sub(r"\\[dt]?frac ?(\d) ?(?=[\d{])", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}", text)
    return re.sub(r",\\! ?", ",", re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)))


def words(number: int) -> str:
    """A whole number below a hundred, in words."""
    size = abs(number)
    tens = TENS[size // 10 - 2] + ("-" + ONES[size % 10] if size % 10 else "") if size > 19 else ONES[size]
    return "negative " + tens if number < 0 else tens


def decimal(value: Fraction) -> str:
    """The decimal expansion of a number that has one of few places."""
    return f"{float(value):.11f}".rstrip("0").rstrip(".")


def split(text: str, at: str = ",") -> list[str]:
    """The parts of a text between the characters `at` outside of brackets; a sign stays with its part."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char in at and depth == 0 and (char == "," or parts[-1].strip()):
            parts.append("" if char == "," else char)
        else:
            parts[-1] += char
    return [re.sub(r"^([+-]) *", r"\1", part.strip()) for part in parts]


def terms(text: str) -> list[str]:
    """The signed terms of a sum of two or more; empty for anything else."""
    parts = [] if re.search(r"[=,_$]|\\(pm|begin|text|mbox|in)", text) else split(text, "+-")
    return parts if len(parts) > 1 else []


def members(text: str) -> tuple[str, list[str], str]:
    """The opening, the entries and the closing of a point, interval, list, set or column; no entries for anything else."""
    if found := re.fullmatch(r"(\\begin\{pmatrix\})([^&]*)(\\end\{pmatrix\})", text):
        return found[1], [part.strip() for part in found[2].split(r"\\")], found[3]
    found = re.fullmatch(r"((?:x \\in )?(?:\\left)?(?:\\\{|[(\[])|)((?!\d+,\d{3})[^_=$]*?)((?:\\right|\\)?[)\]}]|)", text)
    parts = split(found[2]) if found and r"\cup" not in text and "begin" not in text and (found[1] or "{" not in text) else []
    return (found[1], parts, found[3]) if found and len(parts) > 1 else ("", [], "")


def inequality(text: str) -> str | None:
    """An interval, or a union of some, as inequalities for x; None for anything else, a possible point too."""
    shown = []
    for part in re.sub(r"x \\in |\\left|\\right", "", text).split(r"\cup"):
        found = re.fullmatch(r"([(\[])(.*),(.*)([)\]])", part.strip())
        if not found or not re.search(r"\\infty|\\cup|\[|\]", text):
            return None
        low, high = found[2].strip(), found[3].strip()
        less, more = (r"\le" if bracket in "[]" else "<" for bracket in (found[1], found[4]))
        upward = {"<": ">", r"\le": r"\ge"}[less]
        shown.append(
            f"x {more} {high}"
            if "infty" in low
            else f"x {upward} {low}"
            if "infty" in high
            else f"{low} {less} x {more} {high}"
        )
    return r" \text{ or } ".join(shown)


def whole(text: str) -> int | None:
    """The value of a label that is an integer; None for anything else."""
    return int(tidy(text).replace(",", "")) if re.fullmatch(r"-?(\d+|\d{1,3}(,\d{3})+)", tidy(text)) else None


def seen_restatements(text: str, value: Fraction | None) -> Forms:
    """Yield answers that are equal to the label."""
    label = tidy(text)
    yield from fill(ANY_RIGHT, t=text)
    if label != text:
        yield "braces and gaps tidied", label
    if not re.search(r"=|\\in |\\text\{[A-Z(a-z]", text):
        yield "leading equals sign", "= " + text
    if "-" in text:
        yield "typographic minus", text.replace("-", "−")
    if (number := whole(text)) is not None:
        yield from right_integer(number)
    elif parts := re.fullmatch(FRACTION, label):
        sign, top, low = parts[1], int(parts[2]), int(parts[3])
        yield from fill(FRACTION_RIGHT, s=sign, n=top, d=low, N=2 * top, D=2 * low)
        if 10**9 % low == 0:
            yield "exact decimal", decimal(Fraction(int(f"{sign}{top}"), low))
        elif not sign:
            yield "with its rounded value", rf"\frac{{{top}}}{{{low}}} \approx {top / low:.4g}"
        if top > low and not sign:
            yield "mixed number", rf"{top // low}\frac{{{top % low}}}{{{low}}}"
        elif low in PARTS and not sign:
            yield "in words", f"{ONES[top]} {PARTS[low]}{'s' * (top > 1)}"
    elif re.fullmatch(r"-?\d*\.\d+", text):
        exact = Fraction(text)
        yield "padded decimal", decimal(exact) + "00"
        yield "slash fraction", f"{exact.numerator}/{exact.denominator}"
        yield "chain of equals", rf"\frac{{{exact.numerator}}}{{{exact.denominator}}} = {text}"
    elif r"\frac" in text:
        yield "large fraction", label.replace(r"\frac", r"\dfrac")
    if mixed := re.fullmatch(r"(\d+) ?\\frac\{(\d+)\}\{(\d+)\}", text):
        exact = int(mixed[1]) + Fraction(int(mixed[2]), int(mixed[3]))
        yield from (("slash fraction", str(exact)), ("exact decimal", decimal(exact)))
    shown = re.sub(r"\\sqrt\{(\d+)\}", r"√\1", label)
    for name, sign in UNICODE.items():
        shown = shown.replace(name, sign)
    if shown != label and "\\" not in shown:
        yield "unicode signs", shown
    if surd := re.fullmatch(SURD, label):
        yield from fill(SURD_RIGHT, a=surd[1], b=surd[2], c=int(surd[1]) ** 2 * int(surd[2]))
        yield "with its rounded value", rf"{text} \approx {int(surd[1]) * math.sqrt(int(surd[2])):.2f}"
    if pi := re.fullmatch(PI, text):
        yield from (("computer notation", f"{pi[1]}*pi"), ("factors swapped", rf"\pi \cdot {pi[1]}"))
        yield "with its rounded value", rf"{text} \approx {int(pi[1]) * math.pi:.2f}"
    if parted := terms(text):
        backward = " ".join(part if part[0] in "+-" else "+" + part for part in parted[::-1])
        yield "terms in another order", re.sub(r" ([+-])", r" \1 ", backward.lstrip("+"))
    if re.fullmatch(r"[-+\da-zA-Z^() =]+", text) and re.search(r"\d[a-zA-Z]|\^|\)\(", text):
        code = re.sub(r"(?<=\d)(?=[a-zA-Z])|(?<=\))(?=\()", "*", text)
        yield "computer notation", code.replace("^", "**")
    if "=" in text:
        yield "sides swapped", " = ".join(side.strip() for side in text.split("=")[::-1])
    if angle := re.fullmatch(r"(.*\d)(\^\\circ|\\text\{ degrees\})", text):
        yield from (("unit in words", angle[1] + " degrees"), ("unit in braces", angle[1] + r"^{\circ}"))
    if unit := re.fullmatch(r"([\d.]+) ?\\(?:mbox|text)\{ (\w+)\}(.*)", text):
        yield "unit in words", f"{unit[1]} {'square ' * bool(unit[3])}{unit[2].replace('cm', 'centimeters')}"
    if text.startswith(r"\$"):
        amount = label.removeprefix(r"\$")
        yield from (("unit in words", rf"{amount} \text{{ dollars}}"), ("money sign unescaped", "$" + amount))
    if choice := re.fullmatch(CHOICE, text):
        yield from fill(CHOICE_RIGHT, l=choice[1])
    if word := re.fullmatch(WORD, text):
        yield from fill(WORD_RIGHT, w=word[1])
    if base := re.fullmatch(BASE, text):
        yield from fill(BASE_RIGHT, n=base[1], b=base[2])
    if "pmatrix" in text:
        yield "square brackets of a matrix", text.replace("pmatrix", "bmatrix")
    if comparison := inequality(text):
        yield "inequality", comparison
    opening, inner, closing = members(text) if number is None else ("", [], "")
    if inner and opening in ("(", r"\left("):
        yield "sized brackets", r"\left( " + r",\ ".join(inner) + r" \right" + closing[-1]
    if inner and not opening:
        yield "joined by and", ", ".join(inner[:-1]) + r" \text{ and } " + inner[-1]
        yield "named x", ", ".join(f"x_{i + 1} = {part}" for i, part in enumerate(inner))
    if r"\pm" in text and not opening:
        yield "both signs written out", text.replace(r"\pm", "+") + ", " + text.replace(r"\pm", "-")


def right_integer(number: int) -> Forms:
    """Yield answers that are equal to an integer."""
    size, comma = abs(number), f"{number:,}"
    yield from fill(INT_RIGHT, n=number, d=2 * number)
    if number > 0:
        yield "sum, then the value", f"{number - number // 3} + {number // 3} = {number}"
        yield "digits of full width", "".join(chr(ord(digit) + 0xFEE0) for digit in str(number))
    if size < 100:
        yield from (("in words", words(number)), ("digits and words", f"{number} ({words(number)})"))
    if size > 999:
        power = rf"{decimal(Fraction(number, 10 ** (len(str(size)) - 1)))} \times 10^{{{len(str(size)) - 1}}}"
        yield from fill(LARGE_RIGHT, c=comma, b=comma.replace(",", "{,}"), s=comma.replace(",", r"\,"), p=power)
    if size >= 10**6 and number % 1000 == 0:
        yield "in millions", f"{decimal(Fraction(number, 10**6))} million"
    if (root := math.isqrt(size)) > 1 and root**2 == number:
        yield "power, then the value", f"{root}^2 = {number}"


def seen_near_misses(text: str, value: Fraction | None) -> Forms:
    """Yield answers that are not equal to the label."""
    label = tidy(text)
    yield from fill(ANY_WRONG, t=text)
    if (number := whole(text)) is not None:
        yield from wrong_integer(number)
        return
    runs = list(re.finditer(r"\d+", label))
    for kind, run in zip(
        ("first number raised", "last number raised"), (runs[:1] + runs[1:][-1:])[: 1 + (label[-2:] != "^2")], strict=False
    ):
        yield kind, label[: run.start()] + str(int(run[0]) + 1).zfill(len(run[0])) + label[run.end() :]
    if re.match(r"-?(\d|\\frac|\\sqrt|\\pi|\\cot|[a-z] -)", label) and not re.search(r"\^\\circ|degrees", label):
        yield "first sign changed", label[1:] if label[0] == "-" else "-" + label
    if "pmatrix" not in text and (inner := list(re.finditer(r"(?<=[\w})]) ?[+-] ?(?=[\w\\])", label))):
        sign = inner[-1]
        yield "inner sign changed", label[: sign.start()] + (" - " if "+" in sign[0] else " + ") + label[sign.end() :]
    if parted := terms(text):
        yield "first term alone", parted[0]
    if parts := re.fullmatch(FRACTION, label):
        top, low = int(parts[2]), int(parts[3])
        yield from fill(FRACTION_WRONG, t=label, s=parts[1], n=top, d=low, m=top + 1)
        if top < low != 2 * top and not parts[1]:
            yield "complement", rf"\frac{{{low - top}}}{{{low}}}"
    if surd := re.fullmatch(SURD, label):
        yield from fill(SURD_WRONG, a=surd[1], b=surd[2], m=int(surd[1]) * int(surd[2]))
    if pi := re.fullmatch(PI, text):
        yield from fill(PI_WRONG, n=pi[1])
    if base := re.fullmatch(BASE, text):
        yield from fill(BASE_WRONG, n=base[1], b=base[2], r=base[1][-1] + base[1][1:-1] + base[1][0])
    if choice := re.fullmatch(CHOICE, text):
        after = chr(ord(choice[1]) + 1) if choice[1] < "E" else "A"
        yield from (("other letter", after), ("two letters", rf"\text{{({choice[1]}) or ({after})}}"))
    if (word := re.fullmatch(WORD, text)) and word[1] in OTHER:
        yield "other word", rf"\text{{{OTHER[word[1]]}}}"
        yield "two words", rf"\text{{{word[1]} or {OTHER[word[1]]}}}"
    opening, parts_inside, closing = members(text)
    mark = r" \\ " if "pmatrix" in opening else ", "
    if inequality(text):
        swapped = label.translate(str.maketrans("()[]", "[]()"))
        yield "brackets swapped", swapped.replace(r"[-\infty", r"(-\infty").replace(r"\infty]", r"\infty)")
    elif parts_inside:
        yield "last entry dropped", opening + mark.join(parts_inside[:-1]) + closing
        yield "entry added", opening + mark.join([*parts_inside, "10"]) + closing
        if "(" in opening or "pmatrix" in opening:
            yield "entries in another order", opening + mark.join(parts_inside[::-1]) + closing
    if r"\cup" in text:
        yield from (("cap for cup", text.replace(r"\cup", r"\cap")), ("one part only", text.split(r" \cup")[0]))
    if "pm " in text or re.search(r"\di$", text):
        yield "half of the number lost", text.replace(r"\pm", "+").removesuffix("i")


def wrong_integer(number: int) -> Forms:
    """Yield answers that are not equal to an integer."""
    digits = str(number)
    yield from fill(INT_WRONG, n=number, u=number + 1, l=number - 1, v=number + 2, D=2 * number or 4)
    if number > 0:
        yield from fill(POSITIVE_WRONG, n=number, D=2 * number, v=number + 2, t=decimal(Fraction(number, 10)))
    if number > 1:
        yield from fill(MANY_WRONG, n=number)
    if 0 <= number < 99:
        yield "next in words", words(number + 1)
    if number > 9:
        yield from (("last digit dropped", digits[:-1]), ("last digit doubled", digits + digits[-1]))
        if digits[-1] != digits[-2]:
            yield "digits swapped", digits[:-2] + digits[-1] + digits[-2]


COMMON = FormSet(seen_restatements, seen_near_misses)
