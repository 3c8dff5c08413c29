import asyncio
import time
from dataclasses import replace

import pytest
from trajectories import TASK, trajectory

from strop.errors import TaskError
from strop.rewards.language import LanguagePart, language_share, scripts_of, thoughts_of


def language_consistency(text, *, language):
    return language_share(thoughts_of([text]), language=language)


def share(thought, language="en"):
    return language_consistency(f"<think>{thought}</think><answer>42</answer>", language=language)


@pytest.mark.parametrize(
    ("thought", "english", "chinese"),
    [
        ("we add the two numbers", 1.0, 0.0),
        ("我们把两个数相加", 0.0, 1.0),
        ("we add 两个数", 2 / 5, 3 / 5),  # two words and three characters
        ("we add 12 + 3.5 = 15.5 двa", 2 / 3, 0.0),  # digits are in neither count
        (r"we add $x + \sin y$ and \(area = y\) and \[\mathbb{R}\]", 4 / 4, 0.0),  # mathematics is in neither
        (r"we add $x + \text{两}$ and \(y\) and \[两 = 2\]", 4 / 6, 2 / 6),  # but text in it is
        ("we run ```python\nfor each in some if each:\n    print('a b')\n``` and `each_one`", 1.0, 0.0),  # nor is code
        ("we run ```python\nprint('两个')  # 数\n``` and `数`", 3 / 7, 4 / 7),  # but text in it is
        ("设 x 为 5", 0.0, 1.0),  # a single letter names a variable
        ("let θ be 9π and x₁ + xᵢ the sum", 1.0, 0.0),  # a Greek one, too, and whatever its index
        ("so 2πr² is Δx and sinθ of ℵ₀ in ℝ", 1.0, 0.0),  # two variables in a row, a function of one
        ("计算 sin(x) 和 log(y)，令 AB = CD", 0.0, 1.0),  # functions and points are of formulas
        ("we add ½ and 3² and µ", 1.0, 0.0),  # digits of other kinds
        ("we add สอง", 2 / 3, 0.0),  # a script that is not listed is another language
        ("we add שתיים and দুই", 3 / 6, 0.0),  # Bengali is cut at its marks
        ("l’été naïve Việt ｗｅ don't", 1.0, 0.0),  # accents, apostrophes and wide letters are Latin
        (r"thus \frac{1}{2} is \boxed{两}", 2 / 3, 1 / 3),
    ],
)
def test_the_share_is_of_words_that_are_neither_number_nor_mathematics_nor_code(thought, english, chinese):
    assert share(thought) == pytest.approx(english)
    assert share(thought, "zh") == pytest.approx(chinese)


HIDDEN = "we think that it is so"


@pytest.mark.parametrize(
    "wrapped",
    [
        "`{}`",
        "```\n{}\n```",
        "```python\n# {}\nx = 1\n```",
        '```python\n"""{}"""\n```',
        '<tool_call>{{"name": "search", "arguments": {{"query": "{}"}}}}</tool_call>',
        '<tool_call>{{"name": "python", "arguments": {{"code": "x = 1  # {}"}}}}</tool_call>',
        '<tool_call>{{"name": "search", "arguments": {{"{}": 1}}}}</tool_call>',
        "<search>{}</search>",
        "${}$",
        r"\(\text{{{}}} = 2\)",
        r"\[{}",
        r"\boxed{{{}}}",
    ],
)
def test_a_thought_cannot_be_hidden_in_code_or_mathematics(wrapped):
    assert scripts_of(wrapped.format(HIDDEN)) == ["latin"] * 6
    assert share("好的 " + wrapped.format(HIDDEN), "zh") == pytest.approx(2 / 8)
    assert share("so " + wrapped.format("我们想")) == pytest.approx(1 / 4)


@pytest.mark.parametrize("blank", ["~", r"\ ", r"\,", r"\;", r"\:", r"\!", "\\\\", "\\\n", r"\quad ", r"\,~"])
def test_blanks_of_latex_part_words(blank):
    hidden = HIDDEN.replace(" ", blank)
    assert share(f"好的 $${hidden}$$", "zh") == share(rf"好的 \(\mathrm{{{hidden}}}\)", "zh") == pytest.approx(2 / 8)


def test_the_keys_of_an_ordinary_call_are_no_words():
    assert scripts_of('<tool_call>{"name": "search", "arguments": {"query_text": "x"}}</tool_call>') == []


def test_unclosed_formulas_take_linear_time():
    started = time.perf_counter()
    scripts_of(r"\(" * 100_000 + "`x" * 100_000)
    assert time.perf_counter() - started < 5


def test_a_row_may_name_its_own_language():
    part = LanguagePart(language_fact="language")
    thought = trajectory("<think>我们想</think>")
    scores = [part.score(replace(TASK, facts=facts), thought) for facts in ({"language": "zh"}, {"language": "en"}, {})]
    assert [asyncio.run(score) for score in scores] == [1.0, 0.0, 0.0]
    with pytest.raises(TaskError, match="task 't': its fact 'language' is 'xx'"):
        asyncio.run(part.score(replace(TASK, facts={"language": "xx"}), thought))


@pytest.mark.parametrize("text", ["", "we think", "<think></think>", "<think>1 + 2</think>", "<think>unclosed"])
def test_without_a_chain_of_thought_there_is_nothing_to_be_consistent(text):
    assert language_consistency(text, language="en") == 0.0


def test_only_the_chain_of_thought_counts_and_it_may_begin_in_the_prompt():
    assert language_consistency("we think</think><answer>四十二</answer>", language="en") == 1.0
    assert thoughts_of(["<reason>so</reason> it is"], think_tag="reason") == "so"


def test_the_thoughts_of_all_turns_count_and_nothing_between_them():
    text = "<think>we think</think>四十二<think>мы думаем</think> 好的</think>"
    assert thoughts_of([text]) == "we think\nмы думаем"
    assert language_consistency(text, language="en") == language_consistency(text, language="ru") == 0.5


@pytest.mark.parametrize(
    ("language", "thought", "expected"),
    [
        ("el", "η γωνία θ είναι sum", 2 / 3),
        ("ja", "これは和です yes", 6 / 7),
        ("zh", "这是和 です", 3 / 5),
        ("ru", "я и ты we", 3 / 4),
        ("ko", "합은 sum", 1 / 2),
    ],
)
def test_other_languages_are_told_by_their_scripts(language, thought, expected):
    assert share(thought, language) == pytest.approx(expected)


def test_each_script_has_its_own_name_and_what_names_variables_has_none():
    assert scripts_of("one δύο три 四 five ארבע x₁ θ `six` $seven$") == ["latin", "greek", "cyrillic", "han", "latin", "HEBREW"]


def test_a_thought_that_goes_on_over_a_call_counts_whole():
    """Else a policy could think in any language before a call, and close its thought after it."""
    turns = ["<think> 我们想 <python>print(1)</python>", " so it is five </think><answer>5</answer>"]
    assert scripts_of(thoughts_of(turns, think_tag="think")) == ["han"] * 3 + ["latin"] * 4
    prefilled = ["we think</think> <tool_call>", "мы думаем</think>", "<think>open"]
    assert thoughts_of(prefilled, think_tag="think") == "we think\nмы думаем"
