"""The zero-shot experiment of CS336: what it counts and shows of responses, and which earlier ones it goes on with."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.run_directory import write_json, write_text

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import cs336_zero_shot as zero_shot

SETTINGS = {"model": "models/mine", "model_digest": "1a", "rows_digest": "2b", "num": 27, "max_tokens": 320, "seed": 0}


def response(text, *, form=0, answer=0, truth="18", prompt="Solve it. Janet has 3 ducks that lay eggs."):
    return {"prompt": prompt, "response": text, "ground_truth": truth, "format_reward": form, "answer_reward": answer}


def write_piece(run, start, rows, **counted):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    write_text(run / f"responses-{start:04d}.jsonl", lines)
    nothing = {"num_correct": 0, "num_formatted_wrong": 0, "num_unformatted": 0, "num_cut": 1, "num_tokens": 9, "time_s": 1.0}
    write_json(run / f"responses-{start:04d}.json", nothing | counted)


def test_what_the_answers_page_tells_of_responses_is_counted_and_shown_by_kind(tmp_path):
    said = [
        response("The answer is 18 eggs, and the answer is <answer> nothing"),  # says it once, however often
        response("<answer> answer here </answer>"),
        response("</answer> first <answer>"),  # closes nothing
    ]
    write_piece(tmp_path, 0, said, num_unformatted=3)
    right = response("I see </think> <answer> 18 </answer>", form=1, answer=1)
    wrong = response("I see </think> <answer> 17 </answer>", form=1)
    write_piece(tmp_path, 25, [right, wrong], num_correct=1, num_formatted_wrong=1)
    results = zero_shot.summarise(tmp_path, SETTINGS)
    assert results["model"] == "models/mine"
    found = results["figures"]
    assert found["unformatted_with_an_answer_tag"] == 3
    assert found["unformatted_with_a_closed_answer_tag"] == 1
    assert found["unformatted_saying_the_answer_is"] == 1
    assert found["unformatted_with_the_number"] == 1
    examples = results["examples"]
    assert examples["correct"] == [{"line": 26, "response": "I see </think> <answer> 18 </answer>"}]
    assert examples["formatted_wrong"] == [{"line": 27, "response": "I see </think> <answer> 17 </answer>"}]
    assert [each["line"] for each in examples["unformatted"]] == [1, 2, 3]
    assert examples["unformatted_with_a_closed_answer_tag"] == [{"line": 2, "response": "<answer> answer here </answer>"}]
    text = zero_shot.write_results(tmp_path, SETTINGS, tmp_path / "results")
    assert '   2  "<answer> answer here </answer>"' in text
    assert (tmp_path / "results" / "cs336-zero-shot.txt").read_text() == text + "\n"


def test_of_many_responses_ten_are_shown_from_the_first_line_to_the_last(tmp_path):
    write_piece(tmp_path, 0, [response(f"no {number}") for number in range(1, 41)], num_unformatted=40)
    shown = zero_shot.summarise(tmp_path, SETTINGS)["examples"]["unformatted"]
    assert [each["line"] for each in shown] == [1, 5, 9, 13, 17, 21, 25, 29, 33, 37]


PROMPT = "Answer in tags.\nUser: Janet's ducks lay 16 eggs per day. How many?\nAssistant: <think>"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("I think: Janet's ducks lay 16 eggs per day. So 16.", "I think: [7 words of the prompt] So 16."),
        ("janet's ducks, lay 16 eggs", "[5 words of the prompt]"),  # whatever the case, and whatever stands at a word
        ("ducks lay 16 eggs", "ducks lay 16 eggs"),  # four in a row may be its own
        ("One.\n\nTwo </think>\n<answer>", "One.\n\nTwo </think>\n<answer>"),
        ("lay 16 eggs per day. Or: ducks lay 16 eggs per", "[5 words of the prompt] Or: [5 words of the prompt]"),
        ("x" * 300 + "y" * 200, "x" * 240 + " [...] " + "y" * 120),
        ("", ""),
    ],
)
def test_an_example_is_short_and_repeats_no_problem(said, shown):
    assert zero_shot.shortened(said, PROMPT) == shown


@pytest.fixture
def given(tmp_path):
    """Words of a call on a model and rows of its own, with one piece that is played already."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path / "model")
    write_text(tmp_path / "data" / "gsm8k" / "test.jsonl", '{"question": "1 + 1?", "answer": "#### 2"}\n')
    write_piece(tmp_path / "run", 0, [response("2")], num_unformatted=1)
    places = {"data": "data", "model": "model", "run": "run", "results": "results"}
    return ["--num", "1", *(word for name, place in places.items() for word in (f"--{name}", str(tmp_path / place)))]


def test_responses_of_the_same_model_and_problems_are_gone_on_with(given, tmp_path):
    assert zero_shot.main(given) == 0
    first = json.loads((tmp_path / "results" / "cs336-zero-shot.json").read_text())
    assert first["model"] == "model"
    assert first["figures"]["num_responses"] == 1
    assert zero_shot.main(given) == 0


@pytest.mark.parametrize("changed", ["model", "rows"])
def test_responses_of_another_model_or_of_other_problems_are_refused(given, tmp_path, changed, capsys):
    assert zero_shot.main(given) == 0
    if changed == "model":
        weights = tmp_path / "model" / "config.json"
        weights.write_text(weights.read_text().replace('"initializer_range": 0.02', '"initializer_range": 0.03'))
    else:
        write_text(tmp_path / "data" / "gsm8k" / "test.jsonl", '{"question": "1 + 2?", "answer": "#### 3"}\n')
    assert zero_shot.main(given) == 1
    assert "Give another --run." in capsys.readouterr().err
