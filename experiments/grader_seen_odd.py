r"""Odd forms of answers that their writer made without a look at the rules: other scripts, programs, colours, hedges.

Both functions start from the type of the label.  A table row is `type: kind | template | template ...`; in a template `@`
stands for the label (or the number in it), `<k>` for the number plus k, `<2x>` for its double, `<n>` for a line break.
A label gets one template of each row that fits it, or all of them where the kind says `all`.
"""

from __future__ import annotations

import re
from fractions import Fraction

from grader_forms import ONES, TENS, Forms, FormSet

GROUPED, FRAC = r"-?\d{1,3}(?:,\d{3})+", r"-?\\[dt]?frac(?:\{\d+\}|\d)(?:\{\d+\}|\d)"
SWAP = dict(zip("()[]", "[]()", strict=True))
WIDE, BOLD, ARABIC, SUP, SUB = (
    str.maketrans("0123456789-", signs)
    for signs in ("０１２３４５６７８９－", "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗−", "٠١٢٣٤٥٦٧٨٩−", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "₀₁₂₃₄₅₆₇₈₉₋")
)
VULGAR = dict(
    zip(
        ["1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "1/8", "3/8", "5/8", "7/8"],
        "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞",
        strict=False,
    )
)
OTHERS = {
    "ellipse": "hyperbola",
    "even": "odd",
    "east": "west",
    "Evelyn": "Carla",
    "Navin": "Luther",
    "cents": "dollars",
    "degrees": "radians",
    "inches": "feet",
    "cm": "m",
}
RULES = (
    ("number", rf"{GROUPED}|-?\d*\.?\d+|-?\d+{FRAC}|{FRAC}"),
    ("angle", r"-?\d+\^(\\circ|\{\\circ\})"),
    ("base", r"\d+_(\d|\{\d\})"),
    ("choice", r"\\text\{\([A-Z]\)\}"),
    ("word", r"\\text\{[A-Za-z]+\}"),
    ("money", r"\\\$[\d.,]+"),
    ("unit", r".*\\(text|mbox)\{.*"),
    ("matrix", r"\\begin\{pmatrix\}.*"),
    ("interval", r".*(\\infty|\\cup|\[|\]|\\in).*"),
    ("set", r"\\\{.*\\\}"),
    ("equation", ".*=.*"),
    ("tuple", r"(\\left)?\([^()]*,[^()]*\)"),
    ("list", r"[^(){}]*,[^(){}]*"),
    ("pm", r".*\\pm.*"),
    ("expression", ".*"),
)
SAME = r"""
any: framed | \boxed{@} | \fbox{$@$} | \underline{\underline{@}} | \bbox[5px, border: 2px solid]{@}
any: coloured | \textcolor{red}{@} | \color{blue}{@} | {\color{red} @} | \colorbox{yellow}{$@$}
any: tag or proof end | @ \tag{1} | @ \quad \blacksquare | @ \qquad \square | @ \quad \text{Q.E.D.}
any: math delimiters | $@$ | \(@\) | \[@\] | $$@$$ | $\displaystyle @$ | \( @ | @ \]
any: left-over token | @<|im_end|> | @<|endoftext|> | @</s> | <|begin_of_box|>@<|end_of_box|>
any: answer tag | <answer>@</answer> | #### @ | [ANS]@[/ANS] | <b>@</b> | {"answer": "@"}
any: lead-in | \text{Answer: } @ | \text{Final answer: } @ | \therefore @ | \Rightarrow\ @ | \text{Solution: } @
any: foreign lead-in | \text{Antwort: } @ | \text{答案：} @ | \text{Respuesta: } @ | \text{Ответ: } @
any: sentence | \text{The answer is } @ \text{.} | \text{Thus, the answer is } @. | \text{We get } @ \text{ as the answer.}
any: full stop and blanks | @ \, . | @。 | @\text{.} | \hspace{1em} @ \; | ~@~ | \phantom{-} @
any: tick | @ \checkmark | @ ✓ | @ \text{ (checked)} | @ \text{ (final answer)}
any: line breaks | <n>  @<n> | @ \\ | \begin{gathered} @ \end{gathered} | \begin{array}{c} @ \end{array}
whole: named | x = @ | N = @ | m+n = @ | S=@ | \text{Total} = @ | @ = x | @=k
whole: assigned | x := @ | answer == @ | x \coloneqq @ | print(@) | ans <- @
whole: point zero | @.0 | @.00 | @. | @.000000
whole: font | \mathbf{@} | \textbf{@} | \mathrm{@} | {\bf @} | \texttt{@} | \boldsymbol{@} | **@**
whole: base ten | @_{10} | @_{\text{ten}} | (@)_{10}
whole: typed object | int(@) | \num{@} | \numprint{@} | Fraction(@, 1) | np.int64(@) | Integer(@) | float(@)
whole: over one | \frac{@}{1} | \dfrac{@}{1} | @/1
whole: brackets or quotes | \left( @ \right) | {{@}} | "@" | “@” | `@`
whole: explained after | @ \text{ because } <-5> + 5 = @ | @ \text{ (since } <30> - 30 = @ \text{)} | @ = <-4> + 4
whole: sum first | <-5> + 5 = @ | x = <20> - 20 = @ | \Rightarrow <-2> + 2 = @ | \frac{<2x>}{2} = @
whole: steps | \begin{array}{r} <-5> \\ +\ 5 \\ \hline @ \end{array} | \begin{aligned} x &= <-6> + 6 \\ &= @ \end{aligned}
whole: other number denied | @ \text{ (not } <1>) | \text{not } <2> \text{ but } @ | \cancel{<1>}\ @ | ~~<2>~~ @
whole: option with value | \text{(B) } @ | \textbf{(C)}\ @ | D) @ | \text{Option A: } @
angle: all units | @° | @ \text{ degrees} | @^{\circ} | \ang{@} | @ deg | @\degree | @º | x = @^\circ | \theta = @°
choice: all styles | @ | (@) | \textbf{(@)} | @. | \text{option @} | Choice (@) | \text{@} | The correct answer is @.
word: all styles | @ | \textbf{@} | "@" | The answer is @. | \mathrm{@} | \text{@.} | \textit{@} | \mbox{@} | \text{It is @}
money: all units | $@ | @ \text{ dollars} | \text{\$}@ | \text{\$@} | \textdollar @ | $ @ | @ dollars | \mathdollar @
"""
WRONG = r"""
any: denied | \text{not } @ | \text{anything but } @ | \text{The answer is not } @ | @ \text{ is not correct}
any: missing | \text{no solution} | \text{undefined} | ? | <n> | \text{I don't know} | N/A | \text{The answer is} | x = | \ldots
whole: two answers | @ \text{ or } <1> | @, <1> | <-1> \text{ or } @ | @ \text{ and } <1> | @; <10> | @ \pm 2i
whole: range | <-1> \text{ to } <1> | \text{between } <-1> \text{ and } <1> | <-1> \le x \le <1> | @ \pm 1
whole: inequality | x > @ | \text{more than } @ | x < @ | x \neq @ | \text{less than } @
positive: with a letter | @x | @n + 1 | @ + C | @i | x^{@} | @y^2 | x_{@} | f(@)
positive: unfinished | @ \times 3 | @ + 7 | 2(@ + 1) | \frac{@}{2} | @ \div 4 | @ - 2
whole: chain goes on | @ + 7 = <7> | @ - 2 = <-2> | @ + 1 = <1> | x = @ - 1 = <-1> | @ + 20 = <20>
whole: chain ends wrong | <-5> + 5 = <1> | x = <-3> + 3 = <-1> | \begin{aligned} x &= <-8> + 8 \\ &= <2> \end{aligned}
whole: taken back | @... \text{ wait, it is } <1> | <1>,\ \text{not } @ | \cancel{@}\ <1> | ~~@~~ <2>
whole: tuple | (@, <1>) | \left( <-1>, @ \right) | (0, @, 1) | [@, <1>, <2>] | \begin{pmatrix} @ \\ 0 \end{pmatrix}
whole: interval | (-\infty, @) | [@, \infty) | x \in (<-1>, @] | \{x : x \ge @\}
positive: family | @ + 7k,\ k \in \mathbb{Z} | @ + 2\pi n | @k \text{ for every } k \in \mathbb{N}
whole: half more | <0>.5 | @\frac{1}{2} | @ 1/2 | @½ | @.25 | @ \text{ remainder } 1 | @ \text{ R } 3
positive: ratio | @ : <1> | <1> : @ | \frac{@}{<11>} | @/<3>
whole: next number | <1> | <-1> | \text{The answer is } <2>. | x = <-2> | \text{Answer: } <10> | \textbf{<-1>}
positive: root or power | \sqrt{@ + 900} | @^2 + 1 | \frac{1}{<1>} | x^2 = @ + 7 | e^{@}
angle: all wrong units | @ \text{ radians} | @^\prime | @\pi | <1>^\circ | @^\circ \text{ or } <10>^\circ
choice: all wrong | not @ | @, F | @ or F | (F) | \text{(A), (B), (C), (D), (E)}
word: all wrong | \text{not @} | \text{neither} | \text{@ or none of them} | \text{everything except @}
money: all wrong | €@ | @ \text{ cents} | -\$@ | \$1@ | \$@ \text{ million} | £@ | \$@ \text{ or } \$1@
"""


def words(number: int, link: str = " ") -> str:
    """Return the English words of a whole number; `link` stands between hundreds and the rest."""
    if number < 0:
        return "minus " + words(-number, link)
    if number < 100:
        return ONES[number] if number < 20 else TENS[number // 10 - 2] + ("-" + ONES[number % 10] if number % 10 else "")
    size, name = next(
        pair for pair in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")) if number >= pair[0]
    )
    gap = link if size == 100 or number % size < 100 else " "
    return f"{words(number // size, link)} {name}" + (gap + words(number % size, link) if number % size else "")


def decimal(value: Fraction, mark: str = r"\overline{@}") -> str:
    """Return the exact decimal of a value, `mark` showing the period; empty if the period is long."""
    whole, rest = divmod(abs(value), 1)
    seen: dict[Fraction, int] = {}
    digits = ""
    while rest and rest not in seen and len(digits) < 20:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, 1)
        digits += str(digit)
    if rest:
        if rest not in seen or not mark:
            return ""
        digits = digits[: seen[rest]] + mark.replace("@", digits[seen[rest] :])
    return ("-" if value < 0 else "") + str(whole) + ("." + digits if digits else "")


def plain(text: str, root: str = "√@") -> str:
    """Return a LaTeX label in plain text with Unicode signs, roots written as `root`."""
    text = re.sub(r"\\left|\\right|\\!|\\(?=cot)", "", text)
    text = re.sub(r"\\(?:text|mbox)\{([^}]*)\}", r"\1", text)
    text = re.sub(r"\\sqrt\{?(\d+)\}?", lambda found: root.replace("@", found[1]), text)
    for old, new in zip(
        [r"\pi", r"\infty", r"\cup", r"^\circ", r"\pm", r"\{", r"\}", r"\in"],
        ["π", "∞", "∪", "°", "±", "{", "}", "∈"],
        strict=False,
    ):
        text = text.replace(old, new)
    text = re.sub(
        r"\\frac(?:\{([^{}]*)\}|(\d))(?:\{([^{}]*)\}|(\d))",
        lambda found: "/".join(part if re.fullmatch(r"[\w√]+", part) else f"({part})" for part in found.groups() if part),
        text,
    )
    return text if root != "√@" else re.sub(r"\^(\d)", lambda found: found[1].translate(SUP), text)


def joined(text: str, star: str, power: str) -> str:
    """Return an expression with a sign `star` for each product and `power` for each power; empty if unreadable."""
    tokens = re.findall(r"sqrt\(\d+\)|\\sqrt\{\d+\}|\\pi|π|\^\d+|\d+|[a-zA-Z]|[-+=()/]", text)
    out = ""
    for last, token in zip(["", *tokens], tokens, strict=False):
        ended = last and (last[-1].isalnum() or last[-1] in ")}")
        out += star if ended and token[0] not in "^-+=)/" else ""
        out += power.replace("@", token[1:]) if token[0] == "^" else f" {token} " if token in "+-=" and ended else token
    return out.replace("π", "pi") if "".join(tokens) == text.replace(" ", "") else ""


def read(text: str, value: Fraction | None) -> tuple[str, Fraction | None, list[str]]:
    """Return the type of a label, its value if it is a plain number, and its terms or entries."""
    bare = re.sub(r"\\!|\s", "", text)
    name = next(name for name, rule in RULES if re.fullmatch(rule, bare))
    if value is None and re.fullmatch(GROUPED, bare):
        value = Fraction(bare.replace(",", ""))
    if name in ("tuple", "list", "set"):
        return name, None, re.split(r"\s*,\s*", re.sub(r"^(\\left)?\\?[({]\s*|\s*(\\right)?\\?[)}]$", "", text))
    parts = [text] if re.search(r"[({][^)}]*[+-]", text) else re.findall(r"[+-]?[^+-]+", text.replace(" ", ""))
    return name, value if name == "number" else None, parts


def table(rules: str, text: str, name: str, value: Fraction | None) -> Forms:
    """Yield the filled templates of the rows that apply to a label."""
    number = int(value) if value is not None and value.denominator == 1 else None
    core, sizes = text if number is None else str(number), ("whole", "positive")[: 1 + (number is not None and number > 0)]
    if name in ("angle", "choice", "word", "money"):
        core = re.sub(r"\\text|\\circ|\\!|[\\${}()^]", "", text)
        number = int(core) if name == "angle" else 0
    for row in rules.strip().splitlines():
        kind, *options = row.split(" | ")
        group = kind.split(":")[0]
        if group in ("any", name) or (number is not None and value is not None and group in sizes):
            index = sum(place * ord(sign) for place, sign in enumerate(kind + text, 3)) % len(options)
            for option in options if " all " in kind else options[index : index + 1]:
                filled = option.replace("<n>", "\n").replace("<2x>", str(2 * (number or 0)))
                filled = re.sub(r"<(-?\d+)>", lambda found: str((number or 0) + int(found[1])), filled)
                yield kind, filled.replace("@", text if group == "any" else core)


def number_forms(text: str, value: Fraction) -> Forms:
    """Yield further restatements of a plain number."""
    top, low, size, sign = value.numerator, value.denominator, abs(value.numerator), "-" if value < 0 else ""
    turn, gaps = sum(map(ord, text)), (r"\,", "{,}", " ", "'", "\u202f", r"\;", ",", r"\text{,}", ",\\!")
    if low == 1:
        shift, named, digits, gap = len(str(size)) - 1, words(top), str(top), gaps[turn % len(gaps)]
        yield "whole: words", (named, named.capitalize(), rf"\text{{{named}}}")[turn % 3]
        yield "whole: words and digits", (f"{digits} ({named})", rf"\text{{{named} }} ({digits})")[turn % 2]
        yield "whole: full-width digits", digits.translate(WIDE)
        yield "whole: other digits", digits.translate((BOLD, ARABIC)[turn % 2])
        yield "whole: sign", f"+{digits}" if top > 0 else (f"−{size}", f"–{size}", f"negative {words(size)}")[turn % 3]
        power = (rf" \times 10^{{{shift}}}", f"e{shift}", f" × 10{str(shift).translate(SUP)}", rf" \cdot 10^{{{shift}}}")
        yield "whole: power of ten", decimal(Fraction(top, 10**shift)) + power[turn % 4] if shift else ""
        yield "whole: digit by digit", sign + "".join(rf"\mathbf{{{digit}}}" for digit in str(size)) if shift else ""
        yield "whole: British words", words(top, " and ") if size > 100 and size % 100 else ""
        yield "whole: grouped", sign + f"{size:,}".replace(",", gap) if shift > 2 else ""
        return
    bare = f"{size}/{low}"
    yield "fraction: slash", (f"{sign}{bare}", f"{top} / {low}", f"({top})/({low})", f"{sign}({bare})")[turn % 4]
    yield "fraction: Unicode", sign + VULGAR.get(bare, f"{str(size).translate(SUP)}⁄{str(low).translate(SUB)}")
    yield (
        "fraction: command",
        sign
        + (r"\tfrac{#}{~}", r"{# \over ~}", r"\cfrac{#}{~}", r"\nicefrac{#}{~}", r"\sfrac{#}{~}")[turn % 5]
        .replace("#", str(size))
        .replace("~", str(low)),
    )
    yield "fraction: spoken", f"{words(top)} over {words(low)}"
    point, (whole, rest) = decimal(value, ""), divmod(size, low)
    yield "fraction: decimal", (point, point and point + "00", point.replace("0.", ".") if size < low else point)[turn % 3]
    yield "fraction: decimal comma", point.replace(".", "," if size < low else "{,}")
    yield "fraction: period", decimal(value) if not point else ""
    yield "fraction: mixed", sign + (rf"{whole}\frac{{{rest}}}{{{low}}}", f"{whole} {rest}/{low}")[turn % 2] if whole else ""


def number_slips(text: str, value: Fraction) -> Forms:
    """Yield further near misses of a plain number."""
    top, low, size, sign = value.numerator, value.denominator, abs(value.numerator), "-" if value < 0 else ""
    tail, turn, swapped = str(size), sum(map(ord, text)), str(size)[:-2] + str(size)[:-3:-1]
    if low > 1:
        part, whole = rf"\frac{{{size}}}{{{low}}}", size // low
        yield "fraction: upside down", (rf"{sign}\frac{{{low}}}{{{size}}}", f"{sign}{low}/{size}")[turn % 2]
        yield "fraction: one part", (f"{top}", f"{low}", f"({size}, {low})", rf"{size} + {low} = {size + low}")[turn % 4]
        yield "fraction: other sign", ("" if top < 0 else "-") + part
        yield "fraction: slip", sign + rf"\frac{{{size + turn % 2}}}{{{low + 1 - turn % 2}}}"
        yield "fraction: two answers", rf"{sign}{part} \text{{ or }} {1 + value}"
        yield "fraction: wrong operation", sign + (rf"\sqrt{{{part}}}", part + "x", part + r"\pi")[turn % 3]
        yield "fraction: point moved", decimal(value / 10, "") or decimal(value * 10) or rf"10 \cdot {sign}{part}"
        yield "fraction: wrong mixed", rf"{sign}{whole + 1}\frac{{{size % low}}}{{{low}}}"
        return
    slip = words(top + 1) if size < 13 else words(size).replace("teen", "ty") if size < 20 else words(top + 10)
    yield "whole: wrong words", slip if slip != words(top) else words(size)
    yield "whole: digits swapped", sign + swapped if size > 9 and swapped != tail and swapped[0] != "0" else ""
    yield "whole: digit lost", sign + tail[:-1] if size > 9 else ""
    yield "whole: other base", f"{top}_{{16}}" if size > 9 else ""
    yield "whole: point moved", decimal(Fraction(top, 10)) if top % 10 else ""
    yield "whole: rounded", str(round(top, 1 - len(tail))) if size > 100 and top % 10 ** (len(tail) - 1) else ""
    if top:
        yield "whole: digit doubled", sign + tail + tail[-1]
        yield "whole: other sign", (str(-top), f"-({top})", rf"0 - {top}")[turn % 3 if top > 0 else 0]
        yield "whole: zero more", f"{top}0"
        yield "whole: wrong power of ten", rf"{decimal(Fraction(top, 10))} \times 10^{{2}}"


def symbol_forms(text: str, name: str, parts: list[str]) -> Forms:
    """Yield restatements of a label with symbols, by its type."""
    bare = re.sub(r"\\left|\\right|^x \\in ", "", text)
    yield "symbols: Unicode", plain(text) if name not in ("matrix", "choice", "word", "money", "base", "number") else ""
    if name in ("expression", "equation") and "cot" not in text:
        yield "symbols: Python", joined(plain(text, "sqrt(@)"), "*", "**@")
        yield "symbols: dots and braces", joined(re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text), r" \cdot ", "^{@}")
    if found := re.fullmatch(r"(\d+) ?(\\sqrt|\\pi)\{?(\d*)\}?", text):
        yield "symbols: spoken", f"{found[1]} times " + (f"the square root of {found[3]}" if found[3] else "pi")
    if name == "expression" and len(parts) > 1:
        yield "sum: other order", "".join(part if part[0] in "+-" else "+" + part for part in parts[::-1]).removeprefix("+")
    yield "equation: sides swapped", " = ".join(text.split("=")[::-1]).strip() if name == "equation" else ""
    if name == "interval":
        spans = [re.fullmatch(r"([(\[])(.*),(.*)([)\]])", piece.strip()) for piece in bare.split(r"\cup")]
        yield "interval: membership", "x \\in " + bare if "in " not in text else bare
        yield "interval: outward brackets", bare.translate(str.maketrans("()", "]["))
        yield (
            "interval: condition",
            r"\{{x : {}\}}".format(
                r" \text{ or } ".join(
                    s[2] + (r" \le x " if s[1] == "[" else " < x ") + (r"\le " if s[4] == "]" else "< ") + s[3]
                    for s in spans
                    if s
                )
            ),
        )
    yield "tuple: sized brackets", r"\bigl( " + r",\ ".join(parts) + r" \bigr)" if name == "tuple" else ""
    yield "matrix: other brackets", text.replace("pmatrix", "bmatrix")
    if name == "matrix":
        yield "matrix: list", "[[" + re.sub(r" *& *", ", ", re.sub(r" *\\\\ *", "], [", text[15:-13].strip())) + "]]"
    yield "list: joined", r" \text{ and } ".join(parts) if name in ("list", "set") else ""
    yield "plus-minus: both", text.replace(r"\pm", "+") + r" \text{ and } " + text.replace(r"\pm", "-") if name == "pm" else ""
    if name == "base":
        digits, base = re.findall(r"\d+", text)
        for form in ("@_{#}", "(@)_#", r"@_{\text{~}}", r"@ \text{ (base } # \text{)}", "@ base #", "@_{(#)}", "@ in base ~"):
            yield "base: all styles", form.replace("@", digits).replace("#", base).replace("~", words(int(base)))
    yield "unit: font", re.sub(r"\\(mbox|text)\{ ?", r"\\;\\mathrm{", text) if name == "unit" else ""


def symbol_slips(text: str, name: str, parts: list[str]) -> Forms:
    """Yield near misses of a label with symbols, by its type."""
    numbers = list(re.finditer(r"\d+", text)) if name not in ("angle", "money") else []
    for kind, found in (("symbols: first number", numbers[:1]), ("symbols: last number", numbers[1:][-1:])):
        yield from ((kind, text[: hit.start()] + str(int(hit[0]) + 1) + text[hit.end() :]) for hit in found)
    for old, new in OTHERS.items():
        yield "words: other word", text.replace(old, new) if re.search(rf"\b{old}\b", text) else ""
    if name == "expression":
        less, last = "".join(parts[:-1]), parts[-1]
        yield "sum: last sign", less + ("-" if last[0] == "+" else "+") + last[1:] if less else ""
        yield "sum: term lost", less
        yield "symbols: negated", rf"-\left({text}\right)"
        yield "symbols: two answers", rf"{text} \text{{ or }} -\left({text}\right)"
        yield "symbols: root lost", re.sub(r"\\sqrt\{?(\d+)\}?", r"(\1)", text) if "sqrt" in text else ""
        yield "symbols: cube root", text.replace(r"\sqrt", r"\sqrt[3]") if r"\sqrt{" in text else ""
        yield "symbols: pi squared", text.replace(r"\pi", r"\pi^2") if "pi" in text else ""
    if name == "equation":
        yield "equation: other sign", text.replace("=", "= -(") + ")" if "= 0" not in text else text.replace("=", ">")
    if name == "interval":
        yield "interval: other brackets", re.sub(r"(?<!infty)[)\]]|[(\[](?!-\\infty)", lambda hit: SWAP[hit[0]], text)
        yield "interval: intersection or part", text.replace("cup", "cap") if "cup" in text else text + r" \cup \{1000\}"
    if name in ("tuple", "list", "set"):
        inner = ", ".join([*parts[:-1], parts[-1].removeprefix("-") if parts[-1][0] == "-" else "-" + parts[-1]])
        yield "entries: last sign", f"({inner})" if name == "tuple" else inner
        yield "entries: one more", f"({', '.join(parts)}, 0)" if name == "tuple" else ", ".join(parts) + ", 0"
        yield "entries: one lost", ", ".join(parts[:-1]) if len(parts) != 2 or name != "tuple" else parts[0]
        yield "tuple: swapped", f"({', '.join([parts[1], parts[0], *parts[2:]])})" if name == "tuple" else ""
    if name == "matrix":
        lines = text[15:-13].split(r"\\")
        yield "matrix: row lost", text[:15] + r"\\".join(lines[:-1]) + text[-13:]
        yield "matrix: rows swapped", r"\begin{pmatrix}" + r"\\".join([lines[1], lines[0], *lines[2:]]) + r"\end{pmatrix}"
    yield "plus-minus: one part", text.replace(r"\pm", "+") if name == "pm" else ""


def seen_restatements(text: str, value: Fraction | None) -> Forms:
    """Yield answers that say the same as a label."""
    name, number, parts = read(text, value)
    yield from table(SAME, text, name, number)
    forms = symbol_forms(text, name, parts) if number is None else number_forms(text, number)
    yield from (form for form in forms if form[1] and form[1] != text)


def seen_near_misses(text: str, value: Fraction | None) -> Forms:
    """Yield answers that look like a label and are wrong."""
    name, number, parts = read(text, value)
    yield from (form for form in table(WRONG, text, name, number) if (name, form[0]) != ("choice", "any: missing"))
    forms = symbol_slips(text, name, parts) if number is None else number_slips(text, number)
    yield from (form for form in forms if form[1] and form[1] != text)


ODD = FormSet(seen_restatements, seen_near_misses)
