"""recipes/rstar2-problems.toml with its rules as they are, on rows written here in the published schemas."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from scripted_runs import RECIPE, Watching, run_recipe
from strop.config import validate
from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe, resolve
from strop.run_directory import read_json, read_lines

RECIPES = Path(__file__).parents[2] / "recipes"


def openmath(problem, answer, kind="has_answer_extracted"):
    return {
        "problem": problem,
        "expected_answer": answer,
        "problem_type": kind,
        "problem_source": "aops_c4",
        "inference_mode": "cot",
    }


def dapo(problem, answer):
    asked = f"Solve. where $Answer is the answer to the problem.\n\n{problem}\n\nRemember to put your answer on its own line."
    return {
        "prompt": [{"role": "user", "content": asked}],
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "data_source": "math_dapo",
        "ability": "MATH",
        "extra_info": {"index": problem},
    }


def euler(problem, answer):
    return {"id": "1", "title": "t", "description": problem, "difficulty": 5, "solution": answer}


BENCHMARK = "Ten lamps stand in a row, and each may be red, green or blue; how many rows have no two neighbours of one colour"
ROWS = {
    "openmathreasoning": [
        openmath("Ana adds 6 and 7.", "13"),
        openmath("Bob adds 8 and 9.", "17"),
        openmath("Bob adds 8 and 9.", "17"),  # another solution of it
        openmath("Cy adds 3 and 4.", "8"),  # a wrong label: nobody agrees
        openmath("Di adds 1 and 2.", "3", "no_answer_extracted"),
        openmath("Ed shows that 5 is odd.", "5", "converted_proof"),
        openmath("Flo halves 5.", "5/2"),
        openmath(f"{BENCHMARK}?", "1536"),
    ],
    "dapo-math-17k": [dapo("Gus adds 20 and 1.", "21"), dapo("Gus adds 20 and 1.", "21"), dapo(f"Say. {BENCHMARK}!", "1536")],
    "project-euler": [euler("Add the even numbers below 9.", "20"), euler("Raise 2 to 99.", "633825300114114700748351602688")],
    "math500": [{"problem": f"{BENCHMARK}?", "answer": "1536", "unique_id": "test/counting/1.json"}],
    "aime24": [{"id": 60, "problem": "A cube has a side of 3; find its volume.", "answer": "27"}],
    "aime25": [{"id": "0", "problem": "Find the number of primes below 50.", "answer": "15"}],
    "hmmt25": [{"problem_idx": 1, "problem": "How many squares lie between 10 and 1000?", "answer": "28"}],
    "gpqa-diamond": [
        {"Question": "Which gas is lightest?", "Correct Answer": "hydrogen"}
        | {f"Incorrect Answer {number}": f"gas {number}" for number in (1, 2, 3)}
    ],
    "gsm8k": [{"question": "Tom has 3 pens and buys 4 more. How many has he?", "answer": "3+4=<<3+4=7>>7\n#### 7"}],
    "amc23": [{"id": 0, "question": "A clock loses a minute a day. After how many days is it right again?", "answer": 720.0}],
}


def in_toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {in_toml(each)}" for key, each in value.items()) + "}"
    return "[" + ", ".join(map(in_toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def on_disk(tree, rows):
    """A curation file's sources and benchmarks as files of the same columns; all else as it is shipped."""
    if isinstance(tree, list):
        return [on_disk(each, rows) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("kind") == "hub":
        assert set(tree) == {"kind", "dataset"}
        return {"kind": "jsonl", "dataset": tree["dataset"], "path": str(rows / f"{tree['dataset']}.jsonl")}
    return {key: on_disk(value, rows) for key, value in tree.items()}


@pytest.fixture
def recipe(tmp_path):
    """The shipped recipe, with a tiny model in the judge's place and files in the hub's."""
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "curation").mkdir()
    for name in ("rstar2", "rstar2-candidates"):
        tree = on_disk(tomllib.loads((RECIPES / "curation" / f"{name}.toml").read_text()), tmp_path)
        text = "".join(f"{key} = {in_toml(value)}\n" for key, value in tree.items())
        (tmp_path / "curation" / f"{name}.toml").write_text(text)
    tree = tomllib.loads((RECIPES / "rstar2-problems.toml").read_text())
    tree["stages"]["judge"] = RECIPE["stages"]["base"] | {"prompt": "plain", "tasks": RECIPE["tasks"]}
    tree["engine"] = RECIPE["engine"]
    tree["sampling"] = tree["sampling"] | {"max_tokens": 200}
    for name in ("candidates", "problems"):
        tree["stages"][name]["recipe"] = str(tmp_path / tree["stages"][name]["recipe"])
    return validate(Recipe, resolve(tree), place="recipes/rstar2-problems.toml")


def adds_now_and_then(conversation, draw):
    """The sum of the two numbers of the question, in half of the answers."""
    first, second = re.search(r"adds (\d+) and (\d+)", conversation).groups()
    value = int(first) + int(second) if draw.random() < 0.5 else draw.randint(100, 999)
    return f"So it is $\\boxed{{{value}}}$."


def test_the_shipped_run_keeps_what_two_of_sixteen_answers_agree_with_and_drops_the_rest_by_name(recipe, tmp_path):
    pytest.importorskip("rensa", reason="needs the extra strop[data]")
    progress = Watching()
    run = run_recipe(tmp_path / "run", recipe, say=adds_now_and_then, progress=progress).run
    assert {row["question"] for row in read_lines(run.stage("candidates").path / "data" / "kept.jsonl")} == {
        "Ana adds 6 and 7.",
        "Bob adds 8 and 9.",
        "Cy adds 3 and 4.",
    }
    outcomes = read_lines(run.stage("answers").path / "data" / "outcomes.jsonl")
    assert [row["num_judged"] for row in outcomes] == [16, 16, 16]
    data = run.stage("problems").path / "data"
    kept = [row["question"] for row in read_lines(data / "kept.jsonl")]
    assert kept == ["Gus adds 20 and 1.", "Ana adds 6 and 7.", "Bob adds 8 and 9.", "Add the even numbers below 9."]
    dropped = [(row["question"], row["rule"]) for row in read_lines(data / "dropped.jsonl")]
    assert dropped == [
        ("Gus adds 20 and 1.", "exact_duplicates"),
        (f"Say. {BENCHMARK}!", "decontamination"),
        ("Bob adds 8 and 9.", "agreement"),  # a copy of a candidate, with no answers of its own
        ("Cy adds 3 and 4.", "agreement"),
        ("Di adds 1 and 2.", "where"),
        ("Ed shows that 5 is odd.", "where"),
        ("Flo halves 5.", "integer_answer"),
        (f"{BENCHMARK}?", "agreement"),  # no candidate, for it is a benchmark's
        ("Raise 2 to 99.", "small_numbers"),
    ]
    [wrong] = [row["reason"] for row in read_lines(data / "dropped.jsonl") if row["question"] == "Cy adds 3 and 4."]
    assert wrong == "0 of 16 answers agree with the label, fewer than 2"
    assert read_json(run.stage("problems").lineage)["parents"].keys() == {"answers"}
    assert dict(progress.stages)["problems"].startswith("4 of 13 problems kept; dropped: 2 by where, ")


def test_the_shipped_run_asks_what_the_paper_asks():
    recipe = load_recipe(RECIPES / "rstar2-problems.toml")
    assert list(recipe.stages) == ["candidates", "judge", "answers", "problems"]
    assert (recipe.stages["judge"].config.path, recipe.stages["answers"].config.k) == ("Qwen/Qwen3-32B", 16)
    assert recipe.stages["answers"].config.most_right == 16  # it drops nothing itself
