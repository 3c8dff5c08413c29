"""Each published data set, on rows written here in its schema, and on the real samples where they are at hand."""

import base64
import json
import os
import pickle
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strop.errors import ConfigError, TaskError
from strop.tasks import load_rows, open_rows
from strop.tasks.readers import PUBLISHED
from strop.tasks.rows import HubRows, JsonlRows, ParquetRows

DATA = Path(os.environ.get("STROP_DATA", Path(__file__).parents[2].parent / "shared" / "data"))

PRIVATE = json.dumps([{"input": "[3]\n4", "output": "7", "testtype": "functional"}])
CONTEST = {
    "question_id": "3550",
    "question_content": "Add.",
    "starter_code": "class Solution:\n    def add(self, a, b):",
    "difficulty": "easy",
    "public_test_cases": '[{"input": "[1]\\n2", "output": "3", "testtype": "functional"}]',
    "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(PRIVATE))).decode(),  # as code_generation_lite has them
    "metadata": '{"func_name": "add"}',
}
OF_FUNCTION = (  # LiveCodeBench's words
    "### Question:\nAdd.\n\n### Format: You will use the following starter code to write the solution to the problem and"
    " enclose your code within delimiters.\n```python\nclass Solution:\n    def add(self, a, b):\n```\n\n### Answer: (use the"
    " provided format with backticks)"
)
OF_PROGRAM = (
    "### Question:\nAdd.\n\n### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do not"
    " directly test on the sample inputs). Enclose your code within delimiters as follows.\n```python\n# YOUR CODE HERE\n```"
    "\n\n### Answer: (use the provided format with backticks)"
)
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer"
    " (without quotes) where $Answer is the answer to the problem.\n\nWhat is 6*7?\n\nRemember to put your answer"
    ' on its own line after "Answer:".'
)
VERL = {"data_source": "mix", "ability": "math", "reward_model": {"ground_truth": "42", "style": "rule"}}
WORKED = "Question: What is 1+1?\nAnswer: Two. So the answer is $2$.\n\nQuestion: What is 6*7?"

# data set, a row in its schema, the question and the answer in it, and one fact
ROWS = [
    ("gsm8k", {"question": "What is 6*7?", "answer": "It is <<6*7=42>>42.\n#### 42"}, "What is 6*7?", "42", "solution"),
    (
        "math",
        {"problem": "What is $6\\cdot 7$?", "level": "Level 1", "type": "Algebra", "solution": "So $\\boxed{\\frac{84}{2}}$."},
        "What is $6\\cdot 7$?",
        "\\frac{84}{2}",
        "subject",
    ),
    (
        "math500",
        {"problem": "p", "solution": "s", "answer": "42", "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"},
        "p",
        "42",
        "level",
    ),
    ("aime24", {"id": 60, "problem": "p", "solution": "s", "answer": "042", "url": "u", "year": "2024"}, "p", "042", "url"),
    ("aime25", {"problem": "p", "answer": "42", "id": "0"}, "p", "42", None),
    ("hmmt25", {"problem_idx": 1, "problem": "p", "answer": "\\sqrt{2}", "problem_type": ["Algebra"]}, "p", "\\sqrt{2}", None),
    ("amc23", {"id": 0, "question": "q", "answer": 27.0, "url": "u"}, "q", "27.0", None),
    (
        "gpqa-diamond",
        {
            "Question": "Which?\n",
            "Correct Answer": "right\n",
            **{f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)},
            "High-level domain": "Physics",
            "Record ID": "rec1",
        },
        "Which?\n\n(A) wrong 1\n(B) right\n(C) wrong 2\n(D) wrong 3\n\nAnswer with the letter of the right choice.",
        "B",
        "domain",
    ),
    (
        "mmlu",
        {"question": "Which?", "subject": "high_school_geography", "choices": ["one", "two", "three", "four"], "answer": 1},
        "Which?\nA. one\nB. two\nC. three\nD. four",
        "B",
        "subject",
    ),
    (
        "ceval",
        {"id": 0, "question": "5+5=____", "A": "5", "B": 10, "C": "20", "D": "25", "answer": "B", "explanation": ""},
        "5+5=____\nA. 5\nB. 10\nC. 20\nD. 25",
        "B",
        None,
    ),
    (
        "dapo-math-17k",
        {**VERL, "prompt": [{"role": "user", "content": DAPO}], "extra_info": {"index": "a1"}},
        "What is 6*7?",
        "42",
        "index",
    ),
    (
        "dapo-math-17k-processed",
        {**VERL, "prompt": "What is 6*7?", "solution": "42", "source_prompt": [], "extra_info": {"index": "a1"}},
        "What is 6*7?",
        "42",
        "ability",
    ),
    (
        "openmathreasoning",
        {"problem": "p", "expected_answer": "42", "problem_type": "has_answer_extracted", "generated_solution": "s"},
        "p",
        "42",
        "problem_type",
    ),
    (
        "project-euler",
        {"id": "1", "title": "t", "description": "Add them.", "difficulty": 5, "solution": "42", "story_problem": "s"},
        "Add them.",
        "42",
        "difficulty",
    ),
    (
        "countdown",
        {"target": 96, "nums": [3, 7, 25]},
        "Use each of the numbers 3, 7, 25 exactly once to write an expression with + - * / that equals 96.",
        "96",
        "numbers",
    ),
    (
        "apps",
        {"problem_id": 1, "question": "Add.", "input_output": '{"inputs": ["1 2"], "outputs": ["3"]}', "difficulty": "easy"},
        OF_PROGRAM,
        '{"inputs": ["1 2"], "outputs": ["3"]}',
        "difficulty",
    ),
    (
        "livecodebench",
        CONTEST,
        OF_FUNCTION,
        '{"fn_name": "add", "inputs": ["[1]\\n2", "[3]\\n4"], "outputs": ["3", "7"]}',
        "difficulty",
    ),
    (
        "tulu3-math",
        {"messages": [{"role": "user", "content": WORKED}], "ground_truth": "42", "dataset": "MATH"},
        "What is 6*7?",
        "42",
        "dataset",
    ),
    (
        "tulu-3-sft-personas-math-filtered",
        {
            "id": "a",
            "prompt": "What is 6*7?",
            "messages": [
                {"role": "user", "content": "What is 6*7?"},
                {
                    "role": "assistant",
                    "content": "Final Answer: The final answer is $42x + \\frac{1}{2}$. I hope it is correct.",
                },
            ],
        },
        "What is 6*7?",
        "42x + \\frac{1}{2}",
        "response",
    ),
    ("dart-math-uniform", {"query": "q", "response": "First $1$, so $\\boxed{42}$."}, "q", "42", "response"),
    (
        "arpo-mix",
        {**VERL, "prompt": [], "extra_info": {"index": 0, "question": "What is 6*7?", "split": "train"}, "metadata": None},
        "What is 6*7?",
        "42",
        "ability",
    ),
    ("arpo-eval", {"question": "Who?", "answer": ["Ann", "Anne"]}, "Who?", "Ann", "references"),
    ("gaia", {"task_id": "a", "Question": "Who?", "answer": "Ann", "Level": 2}, "Who?", "Ann", "level"),
    (
        "hle",
        {"question": "Who?", "answer": "Ann", "answer_type": "exactMatch", "has_image": False, "category": "Math"},
        "Who?",
        "Ann",
        "answer_type",
    ),
    (
        "flashrag",
        {"id": "dev_0", "question": "Who?", "golden_answers": ["James Madison", "Madison"]},
        "Who?",
        "James Madison",
        "references",
    ),
    ("strop", {"id": "a:1", "question": "q", "answer": "42", "source": "s", "facts": {"level": "3"}}, "q", "42", "level"),
]


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, *rows):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra strop[data]")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def test_every_published_data_set_has_a_row_here():
    assert [name for name, *_ in ROWS] == list(PUBLISHED)


@pytest.mark.parametrize(("dataset", "row", "question", "answer", "fact"), ROWS, ids=[name for name, *_ in ROWS])
def test_a_row_of_the_published_schema_becomes_a_task(tmp_path, dataset, row, question, answer, fact):
    (task,) = load_rows(JsonlRows(path=write_jsonl(tmp_path / "rows.jsonl", row), dataset=dataset), split="train")
    assert (task.question, task.answer) == (question, answer)
    assert fact is None or task.facts[fact]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"Thus the sum is $\boxed 2$.", "2"),
        (r"So $\boxed{3}$, and not $\boxed 4$; that is \boxed 12.", "12"),
        (r"At first $\boxed 3$, in the end $\boxed {5}$.", "5"),
        (r"It is \fbox 2.5.", "2.5"),
    ],
)
def test_the_answer_of_a_solution_of_math_may_stand_in_a_box_without_braces(tmp_path, solution, answer):
    row = {"problem": "p", "level": "Level 1", "type": "Algebra", "solution": solution}
    (task,) = load_rows(JsonlRows(path=write_jsonl(tmp_path / "rows.jsonl", row), dataset="math"), split="train")
    assert task.answer == answer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("First $x = 3$.\n\nFinal Answer: The final answer is \\(\\sqrt{2}\\). I hope it is correct.", r"\sqrt{2}"),
        (r"The final answer is $10^{10^{10^{10}}}$.", "10^{10^{10^{10}}}"),  # is not computed
        ("The answer is: 72", "72"),
        ("Final Answer: The final answer is **42**. I hope it is correct.", "42"),
        (r"At first $\boxed{3}$. So $\boxed{\frac{84}{2}}$. I like 7.", r"\frac{84}{2}"),
    ],
)
def test_the_answer_of_a_solution_is_parsed_in_any_thread(tmp_path, solution, answer):
    rows = JsonlRows(path=write_jsonl(tmp_path / "rows.jsonl", {"question": "q", "answer": solution}), truth="parse")
    with ThreadPoolExecutor(1) as threads:
        (task,) = threads.submit(load_rows, rows, split="train").result()
    assert task.answer == answer


def test_a_solution_without_an_answer_is_a_bad_row(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", {"question": "q", "answer": "I do not know."})
    with pytest.raises(TaskError, match=r"rows\.jsonl:1: math-verify finds no answer in the last 500 characters of its 'ans"):
        load_rows(JsonlRows(path=path, truth="parse"), split="train")


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (base64.b64encode(zlib.compress(pickle.dumps(print))).decode(), "it holds builtins.print, not a text"),
        ("cGFja2Vk", "Error -3 while decompressing data"),
    ],
    ids=["a function", "not compressed"],
)
def test_packed_tests_hold_text_only(tmp_path, packed, why):
    path = write_jsonl(tmp_path / "rows.jsonl", CONTEST | {"private_test_cases": packed})
    with pytest.raises(TaskError, match=rf"rows\.jsonl:1: its tests cannot be read: {why}"):
        load_rows(JsonlRows(path=path, dataset="livecodebench"), split="train")


def test_a_row_of_apps_whose_tests_call_a_function_shows_its_head_or_is_skipped(tmp_path):
    row = {"problem_id": 1, "question": "Add.", "input_output": '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}'}
    rows = [row | {"difficulty": "easy", "starter_code": code} for code in ("class Solution:\n    def add(self, a, b):", "")]
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(TaskError, match=r"rows\.jsonl:2: its tests call a function, whose head it does not show"):
        load_rows(JsonlRows(path=path, dataset="apps"), split="train")
    [task] = load_rows(JsonlRows(path=path, dataset="apps", bad_rows="skip"), split="train")
    assert task.question == OF_FUNCTION


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ({"inputs": [], "outputs": []}, "it has 0 inputs and 0 outputs of tests"),
        ({"inputs": ["1"], "outputs": []}, "it has 1 inputs and 0 outputs of tests"),
        ({"inputs": ["1"]}, "its tests cannot be read: 'outputs'"),
        ({"inputs": [[1]], "outputs": [["1"]]}, "its tests cannot be read: "),
        ([], "its tests cannot be read: "),
        ("[" * 3000, "its tests cannot be read: nested too deeply"),
    ],
)
def test_a_row_of_apps_without_tests_is_bad(tmp_path, tests, why):
    written = tests if isinstance(tests, str) else json.dumps(tests)
    row = {"problem_id": 1, "question": "Add.", "input_output": written, "difficulty": "easy"}
    with pytest.raises(TaskError, match=why):
        load_rows(JsonlRows(path=write_jsonl(tmp_path / "rows.jsonl", row), dataset="apps"), split="train")


def test_tests_of_apps_in_lists_of_lines_are_texts(tmp_path):
    tests = {"inputs": [["1", "2"]], "outputs": [["3"]]}
    row = {"problem_id": 1, "question": "Add.", "input_output": json.dumps(tests), "difficulty": "easy"}
    [task] = load_rows(JsonlRows(path=write_jsonl(tmp_path / "rows.jsonl", row), dataset="apps"), split="train")
    assert json.loads(task.answer) == {"inputs": ["1\n2"], "outputs": ["3"]}


@pytest.mark.parametrize("dataset", ["gsm8k", "arpo-mix"])
def test_wrong_columns_name_file_row_column_and_remedy(tmp_path, dataset):
    path = write_jsonl(tmp_path / "rows.jsonl", {"foo": "x", "bar": "y"})
    place, column = r"rows\.jsonl:1", r"no column '.*'\. It has 'foo', 'bar'"
    message = place + ": " + column + r"\. dataset = '.*' is .* name other columns in tasks"
    with pytest.raises(TaskError, match=message):
        load_rows(JsonlRows(path=path, dataset=dataset), split="train")


def test_a_directory_of_parquet_files_is_read_in_the_order_of_their_names(tmp_path):
    for number in (2, 1):
        write_parquet(tmp_path / f"part-{number}.parquet", {"question": f"q{number}", "answer": "1"})
    tasks = load_rows(ParquetRows(path=tmp_path), split="train")
    assert [task.question for task in tasks] == ["q1", "q2"]


def test_a_file_that_is_no_parquet_is_an_error_of_its_own(tmp_path):
    pytest.importorskip("pyarrow", reason="needs the extra strop[data]")
    (tmp_path / "rows.parquet").write_text("not parquet")
    with pytest.raises(TaskError, match=r"rows\.parquet: cannot be read as a Parquet file"):
        load_rows(ParquetRows(path=tmp_path / "rows.parquet"), split="train")


def test_a_local_directory_is_loaded_as_a_hub_data_set_by_its_published_columns(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra strop[data]")
    write_jsonl(tmp_path / "train.jsonl", {"question": "What is 6*7?", "answer": "#### 42"})
    (task,) = load_rows(HubRows(name=str(tmp_path), dataset="gsm8k"), split="train")
    assert task.answer == "42"


def test_a_benchmark_whose_hub_copy_has_one_split_is_read_from_it(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra strop[data]")
    write_jsonl(tmp_path / "train.jsonl", {"problem": "p", "answer": "42"})
    (task,) = load_rows(HubRows(name=str(tmp_path), dataset="hmmt25"), split="test")
    assert task.source.endswith("[train]")


def openmath(problem, kind, answer, **columns):
    """A row as nvidia/OpenMathReasoning has them."""
    return {
        "problem": problem,
        "generated_solution": "<think>...</think>",
        "generation_model": "DeepSeek-R1",
        "problem_type": kind,
        "expected_answer": answer,
        "problem_source": "aops_c6_high_school_olympiads",
        "inference_mode": "cot",
        "pass_rate_72b_tir": "0.5" if kind == "has_answer_extracted" else "n/a",
        "used_in_kaggle": True,
    } | columns


OPENMATH = [
    openmath("p1", "has_answer_extracted", "14"),
    openmath("p2", "no_answer_extracted", "3"),  # what most of a model's solutions say
    openmath("p3", "converted_proof", "1"),
    openmath("p4", "no_answer_extracted", ""),
    openmath("p5", "has_answer_extracted", "15"),
]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_of_openmathreasoning_only_rows_with_an_answer_of_their_authors_are_read_and_the_others_are_told(
    tmp_path, caplog, form
):
    if form == "jsonl":
        config = JsonlRows(path=write_jsonl(tmp_path / "rows.jsonl", *OPENMATH), dataset="openmathreasoning")
    else:
        config = ParquetRows(path=write_parquet(tmp_path / "rows.parquet", *OPENMATH), dataset="openmathreasoning")
    opened = open_rows(config, split="train")
    assert [opened[number].question for number in range(len(opened))] == ["p1", "p5"]
    assert [task.answer for task in load_rows(config, split="train")] == ["14", "15"]
    place = r"rows\.jsonl:2" if form == "jsonl" else r"rows\.parquet:row 1"
    told = (
        r'3 rows were left out under where = \{ problem_type = \["has_answer_extracted"\] \}; the first: '
        + place
        + r": its problem_type is 'no_answer_extracted', not 'has_answer_extracted'\. tasks\.where = \{\} reads all\."
    )
    assert [bool(re.search(told, record.getMessage())) for record in caplog.records] == [True, True]


def test_a_column_that_is_null_is_an_empty_value(tmp_path):
    rows = [{"question": "q1", "answer": "1", "flaw": None}, {"question": "q2", "answer": "2", "flaw": "typo"}]
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    assert [task.answer for task in load_rows(JsonlRows(path=path, where={"flaw": ("",)}), split="train")] == ["1"]


def test_where_no_row_is_as_asked_the_condition_is_told(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", *OPENMATH[1:3])
    told = r'none of its 2 rows is left under where = \{ problem_type = \["has_answer_extracted"\] \}\. Loosen that'
    with pytest.raises(TaskError, match=told):
        load_rows(JsonlRows(path=path, dataset="openmathreasoning"), split="train")


@pytest.mark.parametrize("dataset", [name for name, known in PUBLISHED.items() if not known.test_split][:1])
def test_a_set_without_a_test_split_says_what_to_evaluate_on_instead(dataset):
    """Before anything is fetched: these are not on this machine."""
    one = PUBLISHED[dataset].train_split
    told = (
        rf"tasks\.dataset = '{dataset}' is published without a test split, and what is trained on \('{one}'\) tests nothing\."
        rf' Evaluate on another set .* tasks\.train_split = "{one}\[500:\]" and tasks\.test_split = "{one}\[:500\]"'
    )
    with pytest.raises(TaskError, match=told):
        load_rows(HubRows(dataset=dataset), split="test")


def test_rows_of_the_one_split_can_be_held_back(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra strop[data]")
    rows = [{"target": number, "nums": [number]} for number in range(10)]
    write_jsonl(tmp_path / "train.jsonl", *rows)
    config = HubRows(name=str(tmp_path), dataset="countdown", train_split="train[3:]", test_split="train[:3]")
    assert [task.answer for task in load_rows(config, split="test")] == ["0", "1", "2"]
    assert [task.answer for task in load_rows(config, split="train")] == list("3456789")


def test_a_split_that_is_not_there_names_the_key_that_says_which(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra strop[data]")
    write_jsonl(tmp_path / "train.jsonl", {"question": "q", "answer": "#### 42"})
    with pytest.raises(TaskError, match=r"its split 'test' cannot be loaded: .* Check name, subset and test_split"):
        load_rows(HubRows(name=str(tmp_path), dataset="gsm8k"), split="test")


def test_a_data_set_that_is_not_known_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'math500'"):
        JsonlRows(path=Path("x"), dataset="math-500")


def test_a_question_is_posed_in_words_of_ones_own_with_facts_of_the_task(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", {"question": "{level} {question}", "answer": "1", "level": 3})
    rows = JsonlRows(path=path, facts=["level"], wording="Of level {level}: {question}\nAnswer:")
    assert [task.question for task in load_rows(rows, split="train")] == ["Of level 3: {level} {question}\nAnswer:"]
    with pytest.raises(ConfigError, match=r"wording is 'Answer:': it must hold \{question\} once"):
        JsonlRows(path=path, wording="Answer:")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"choices": "A"}, "its 'choices' is no list of 2 to 10 choices"),
        ({"answer": "B"}, "its 'answer' is 'B', not the number"),
    ],
)
def test_a_row_of_mmlu_without_choices_or_their_number_is_bad(tmp_path, changed, told):
    row = {"question": "Which?", "subject": "s", "choices": ["one", "two"], "answer": 1} | changed
    with pytest.raises(TaskError, match=told):
        load_rows(JsonlRows(path=write_jsonl(tmp_path / "rows.jsonl", row), dataset="mmlu"), split="train")


def test_columns_are_named_by_the_data_set_or_by_the_user_but_not_by_both():
    with pytest.raises(ConfigError, match="Leave question out"):
        JsonlRows(path=Path("x"), dataset="gsm8k", question="problem")


def test_a_hub_data_set_needs_a_name_or_a_published_one():
    with pytest.raises(ConfigError, match="neither name nor dataset is set"):
        HubRows()


SAMPLES = [
    ("gsm8k/train.jsonl", "gsm8k", 7473, "72"),
    ("gsm8k/test.jsonl", "gsm8k", 1319, "18"),
    ("aime24/test.jsonl", "aime24", 30, "204"),
    ("math500/test.jsonl", None, 500, "\\left( 3, \\frac{\\pi}{2} \\right)"),  # its own columns are question and answer
    ("hotpotqa/test.jsonl", "arpo-eval", 200, "Frank Lowy"),
    ("bamboogle/test.jsonl", "arpo-eval", 125, "james madison"),
    ("arpo_eval/2wiki.jsonl", "arpo-eval", 200, "the five boroughs"),
    ("arpo_eval/gaia_first40.jsonl", "gaia", 40, "34689"),
    ("arpo_eval/musique.jsonl", "arpo-eval", 200, "passes over the Rio di Palazzo"),
    ("arpo_eval/simpleqa.jsonl", "arpo-eval", 500, "Michio Sugeno"),
    (
        "arpo_eval/webwalker.jsonl",
        "arpo-eval",
        200,
        "资格申请截止日期为2024年10月27日，北京考点题库考试时间为2024年11月2-3日。",
    ),
    ("arpo_eval/xbench.jsonl", "arpo-eval", 100, "161.27元"),
    ("arpo/train_10k.parquet", "arpo-mix", 9999, "3\\sqrt{3} - 6"),  # row 5274 has no answer
    ("arpo/valid.parquet", "arpo-mix", 180, "Eleanor Of Lancaster"),
]


@pytest.mark.parametrize(("name", "dataset", "num", "first"), SAMPLES, ids=[name for name, *_ in SAMPLES])
def test_the_real_sample_is_read_whole(name, dataset, num, first):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no {path}; set STROP_DATA to a directory that holds {name}")
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="needs the extra strop[data]")
        config = ParquetRows(path=path, dataset=dataset, bad_rows="skip")
    else:
        config = JsonlRows(path=path, dataset=dataset)
    tasks = load_rows(config, split="train")
    assert (len(tasks), tasks[0].answer) == (num, first)


def test_choices_stand_in_one_order_for_a_question_and_at_every_place_over_many():
    read = PUBLISHED["gpqa-diamond"]
    rows = [
        {"Question": f"Which of {number}?", "Correct Answer": "right"}
        | {f"Incorrect Answer {wrong}": f"wrong {wrong}" for wrong in (1, 2, 3)}
        for number in range(200)
    ]
    letters = [read.answer(row) for row in rows]
    assert letters == [read.answer(row) for row in rows]
    assert all(f"({letter}) right" in read.question(row) for letter, row in zip(letters, rows, strict=True))
    assert all(30 <= letters.count(letter) <= 70 for letter in "ABCD")  # 50 each, 6 to either side is one deviation


@pytest.mark.parametrize(("answer", "references"), [("Ann", ["Ann"]), (7, ["7"]), (["Ann", 7], ["Ann", "7"])])
def test_right_answers_are_a_list_of_texts_whatever_the_column_holds(answer, references):
    read = PUBLISHED["arpo-eval"].facts["references"]
    assert json.loads(read({"question": "Who?", "answer": answer})) == references


def test_questions_with_an_image_are_left_out(tmp_path):
    row = {"question": "Who?", "answer": "Ann", "answer_type": "exactMatch", "category": "Math"}
    path = write_jsonl(tmp_path / "hle.jsonl", {**row, "has_image": True}, {**row, "has_image": False})
    assert len(load_rows(JsonlRows(path=path, dataset="hle"), split="train")) == 1
