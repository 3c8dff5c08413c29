import json
import math
from types import SimpleNamespace

import pytest
from tiny import log_table, word_tokenizer

from strop.cs336 import evaluate_vllm, load_prompt, log_generations, r1_zero_reward_fn
from strop.errors import ConfigError

RIGHT, WRONG, UNFORMATTED = (
    "6 * 7 </think> <answer> 42 </answer>",
    "6 + 7 </think> <answer> 13 </answer>",
    "</think><answer> 42 </answer>",
)


class Script:
    """Says what it is told to, as `vllm.LLM` would; a prompt may have several completions."""

    def __init__(self, *answers):
        self.answers = answers
        self.asked = []

    def generate(self, prompts, sampling_params):
        self.asked.append((prompts, sampling_params))
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text) for text in texts]) for texts in self.answers]


def test_evaluation_counts_three_kinds_of_responses_and_writes_each_of_them(tmp_path):
    model, params, path = Script([RIGHT], [WRONG], [UNFORMATTED], [RIGHT]), object(), tmp_path / "new" / "zero-shot.jsonl"
    prompts = [f"{number}?" for number in range(4)]
    figures = evaluate_vllm(model, r1_zero_reward_fn, prompts, params, ["42"] * 4, path)
    assert model.asked == [(prompts, params)]
    assert figures == {
        "reward": 0.5,
        "format_reward": 0.75,
        "answer_reward": 0.5,
        "num_responses": 4,
        "num_correct": 2,
        "num_formatted_wrong": 1,
        "num_unformatted": 1,
    }
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[1] == {
        "prompt": "1?",
        "response": WRONG,
        "ground_truth": "42",
        "format_reward": 1.0,
        "answer_reward": 0.0,
        "reward": 0.0,
    }
    assert [row["reward"] for row in rows] == [1, 0, 0, 1]


def test_every_completion_of_a_prompt_counts():
    figures = evaluate_vllm(Script([RIGHT, WRONG], [RIGHT, RIGHT]), r1_zero_reward_fn, ["a", "b"], None, ["42", "42"])
    assert (figures["num_responses"], figures["reward"]) == (4, 0.75)


@pytest.mark.parametrize(
    ("prompts", "truths", "answers"), [(["a"], [], [[RIGHT]]), ([], [], []), (["a", "b"], ["1", "2"], [[RIGHT]])]
)
def test_lists_that_do_not_fit_together_are_refused(prompts, truths, answers):
    with pytest.raises(ValueError, match=r"one truth for each prompt|answered 1 of 2 prompts"):
        evaluate_vllm(Script(*answers), r1_zero_reward_fn, prompts, None, truths)


def test_logged_generations_tell_of_rewards_entropy_and_lengths_by_outcome(tmp_path):
    # After `a` (4) the next word is one of two, after `b` (5) one of four, after anything else certain.
    certain = [1.0, 0, 0, 0, 0, 0, 0, 0]
    policy = log_table([certain] * 4 + [[0.5, 0.5] + [0.0] * 6, [0.25] * 4 + [0.0] * 4] + [certain] * 2)

    def says_c(response, truth):
        is_right = float("c" in response)
        return {"reward": is_right, "format_reward": 1.0, "answer_reward": is_right}

    path = tmp_path / "log.jsonl"
    model = Script(["a b c"], ["a"], ["b a"], [""])
    rows, figures = log_generations(
        model, policy, word_tokenizer(), says_c, ["a", "b", "d", "d"], ["t"] * 4, None, path, batch_size=3
    )
    ln2 = math.log(2)
    # The entropy of a token is that of the distribution it was drawn from, which follows the word before it.
    assert [row["token_entropy"] for row in rows] == [
        pytest.approx((1 + 1 + 2) * ln2 / 3, abs=1e-6),
        pytest.approx(2 * ln2, abs=1e-6),
        pytest.approx((0 + 2) * ln2 / 2, abs=1e-6),
        None,
    ]
    assert [row["num_tokens"] for row in rows] == [3, 1, 2, 0]
    assert (rows[0]["prompt"], rows[0]["response"], rows[0]["ground_truth"], rows[0]["reward"]) == ("a", "a b c", "t", 1.0)
    assert figures["token_entropy"] == pytest.approx(8 * ln2 / 6, abs=1e-6)
    assert (figures["length"], figures["length_correct"], figures["length_incorrect"]) == (1.5, 3.0, 1.0)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_a_mean_over_no_response_is_left_out():
    rewards = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}
    _, figures = log_generations(
        Script(["a"]), log_table([[1.0] * 8] * 8), word_tokenizer(), lambda *_: rewards, ["a"], ["t"], None
    )
    assert "length_correct" not in figures
    assert figures["length_incorrect"] == 1.0


def test_the_prompts_are_those_of_the_assignment():
    r1_zero = load_prompt("r1_zero")
    assert r1_zero.startswith(
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it."
    )
    assert r1_zero.endswith(" </answer>.\nUser: {question}\nAssistant: <think>")
    assert load_prompt("question_only").format(question="What is {6} * 7?") == "What is {6} * 7?"
    asked = load_prompt("zero_shot_system_prompt").format(instruction="Who?\nAnswer:")
    assert asked.startswith("# Instruction\nBelow is a list of conversations between a human and an AI assistant (you).\n")
    assert asked.endswith("controversial topics.\n\n# Query:\n```Who?\nAnswer:```\n\n# Answer:\n```\n")
    assert load_prompt("alpaca_sft").endswith("\n\n### Instruction:\n{instruction}\n\n### Response:\n{response}\n")
    with pytest.raises(ConfigError, match=r"'r1': no such prompt\. Those of the assignment are r1_zero, question_only"):
        load_prompt("r1")
