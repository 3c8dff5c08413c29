import pytest

from strop.curation.rules import IntegerAnswer, SimpleAnswer, SmallNumbers, VerifiableAnswer, bare
from strop.types import Task


def task(answer, question="How many?"):
    return Task(id="t", question=question, answer=answer, source="test")


@pytest.mark.parametrize("answer", ["42", "-7", "$42$", "1,234,567", "1,\\!000", "11,\\! 111,\\! 100", "12{,}000", "−5", "007"])
def test_an_integer_stays_however_it_is_written(answer):
    assert IntegerAnswer().judge(task(answer)) is None


@pytest.mark.parametrize(
    "answer", ["4.5", "1/2", "\\frac{1}{2}", "x", "(100,200)", "1,2", "42 apples", "\\sqrt{4}", "80\\%", ""]
)
def test_what_is_no_integer_is_dropped_with_the_answer_as_the_reason(answer):
    assert repr(bare(answer))[1:-1][:5] in IntegerAnswer().judge(task(answer)) or not answer


def test_a_pair_of_hundreds_is_no_number_of_thousands():
    assert bare("(100,200)") == "(100,200)"
    assert bare("100,200") == "100200"


@pytest.mark.parametrize(
    ("answer", "question", "reason"),
    [
        ("yes", "Is 7 prime?", "right in half of all guesses"),
        ("True", "Is 7 prime?", "right in half of all guesses"),
        ("\\text{(C)}", "Which? (A) 1 (B) 2 (C) 3", "letter of a multiple choice"),
        ("D", "Which? A. 1 B. 2 C. 3 D. 4", "letter of a multiple choice"),
        ("the triangle is isosceles", "What follows?", "prose"),
        ("\\text{Yes}", "Is 7 prime?", "right in half of all guesses"),
        ("$\\mathrm{False}$", "Is 7 prime?", "right in half of all guesses"),
        ("\\text{No}.", "Is 7 prime?", "right in half of all guesses"),
        ("\\textbf{No.}", "Is 7 prime?", "right in half of all guesses"),
        ("No.", "Is 7 prime?", "right in half of all guesses"),
        ("\\text{Evelyn}", "Who is the eldest?", "prose"),
        ("\\text{the function is not continuous}", "What follows?", "prose"),
        ("abx", "Simplify.", "prose"),  # as words are
        ("p = 2", "Prove that p is even.", "asks for a proof"),
        ("n \\geq 2", "Show that n is at least 2.", "asks for a proof"),
    ],
)
def test_what_no_rule_can_verify_is_dropped(answer, question, reason):
    assert reason in VerifiableAnswer().judge(task(answer, question))


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        ("42", "Prove that there is one, and find it."),  # a number can be checked, whatever else is asked
        ("C", "What is the chemical symbol of carbon?"),  # a letter, but no choice
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "Which vector?"),
        ("12\\text{ inches}", "How long?"),
        ("\\frac{\\sin x}{\\operatorname{arctan} 2}", "Simplify."),
        *(("12" + text + "{ inches}", "How long?") for text in ("\\textrm", "\\mathrm")),
        ("\\text{cm}", "In which unit?"),
        *(
            (answer, "Simplify.")
            for answer in ("xyz", "\\frac{abc}{2}", "\\angle ABCD", "arctan(2)", "\\arctan(2)", "\\text{arctan}")
        ),
        ("6", "Show your work and justify your answer."),
    ],
)
def test_what_a_rule_can_verify_stays(answer, question):
    assert VerifiableAnswer().judge(task(answer, question)) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("x" * 81, "81 characters"), ("\\a" * 9, "9 LaTeX commands"), ("1, 2, 3, 4, 5", "5 parts")],
)
def test_an_over_complex_answer_is_dropped(answer, reason):
    assert reason in SimpleAnswer().judge(task(answer))


def test_the_left_side_of_an_equation_is_no_part_of_the_answer():
    assert SimpleAnswer().judge(task("(x, y, z) = (2, 1, 4)")) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("1" * 16, "16 digits"),
        *(
            (written, "18 digits")
            for written in ("N=123,456,789,012,345,678, M=1", "\\$123,456,789,012,345,678", "123 456 789 012 345 678")
        ),
        ("$\\boxed{1,234,567,890,123,456}$", "16 digits"),
        ("2^{1,000,000}", "power of 301030 digits"),
        ("2^{1987}", "power of 599 digits"),
        ("10**400", "power of 401 digits"),
        ("1.5e300", "power of 301 digits"),
        ("3\\cdot 9^{45}-1", "power of 43 digits"),
        ("x^{50}", "power of 16 digits"),
        ("(12)^{40}", "power of 44 digits"),
        ("(x+1)^{50}", "power of 16 digits"),
        ("10^{10^{10}}", "power of very many digits"),
        ("3^{10!}", "power of very many digits"),
        ("2^{100n}", "power of 31 digits"),
        ("10¹⁰⁰", "power of 101 digits"),
        ("100!", "factorial of 158 digits"),
        ("18!", "factorial of 16 digits"),
        ("\\frac{100!}{50!}", "factorial of 158 digits"),
        ("\\binom{1000}{500}", "binomial of 300 digits"),
        ("\\dbinom{100}{50} - 1", "binomial of 30 digits"),
    ],
)
def test_a_huge_number_is_dropped(answer, reason):
    assert reason in SmallNumbers().judge(task(answer))


@pytest.mark.parametrize(
    "answer",
    [
        *("N=123,456,789,012,345", "(100,200,300,400,500,600)", "\\{100,200,300,400,500,600\\}", "1, 200, 300, 400, 500, 600"),
        *("1" * 15, "0.66666666666666666", "x^{10}", "x^{49}", "2^{40}", "10^{14}", "1.5^{40}", "1^{1000}"),
        *("17!", "7!!", "5! = 120", "n!", "\\binom{50}{25}", "\\binom{n}{500}", "\\binom{10}{500}"),
        *("2^{n}", "2^{n-1}", "10^{-20}", "2^{100/3}", "2^{100-90}", "(\\frac{1}{2})^{100}", "2^{\\frac{1}{1000}}"),
        *("90^\\circ", "90^{\\circ}", "a_{100}^2", "(100, 200)^2", "x^", "((((", "^{", "!", "\\frac", "2^{1/0}", "0^0", "-5!"),
        *("\\sqrt{100}", "\\log_{10} 5", "100 \\%", ""),
    ],
)
def test_a_number_of_usual_size_stays_and_so_do_decimals(answer):
    assert SmallNumbers().judge(task(answer)) is None


@pytest.mark.parametrize("part", ["(", "1^", "2^{", "\\frac", "a_", "x^{", "-", "(2)!", "{(", "1+(", "\\binom{"])
def test_an_answer_that_nests_without_end_is_judged_all_the_same(part):
    assert "power of very many digits" in SmallNumbers().judge(task(f"10^{{10^{{10}}}} + {part * 10_000}"))
