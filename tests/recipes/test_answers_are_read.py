"""A reward that looks for answers where its prompt does not ask for them is refused when the recipe is read."""

import asyncio

import pytest

from strop.errors import ConfigError
from strop.recipe.load import load_recipe
from strop.rewards import SETTINGS, Reward, make_reward
from strop.rollout.prompt import AnswerForm, load_prompt
from strop.types import Completion, FinishReason, RolloutKey, StopReason, Task, Trajectory, Turn

ASKED = {  # a right answer in the words of each prompt; those of a code block hang on the question, not on the prompt
    "rstar2": r"So it is.</reason><answer>It is \boxed{42}.</answer>",
    "short": r"<answer>\boxed{42}</answer>",
    "arpo": r"<think>So it is.</think><answer>The final answer is \[ \boxed{42} \]</answer>",
    "r1_zero": " So it is.</think> <answer> 42 </answer>",
    "question_only": r"So it is \boxed{42}.",
    "qwen_math": r"So it is \boxed{42}.",
}
READS = {
    AnswerForm.BOX_IN_TAG: {"kind": "math", "judge": "exact"},
    AnswerForm.TAG: {"kind": "math", "judge": "exact", "needs_box": False},
    AnswerForm.BOX: {"kind": "question_only"},
    AnswerForm.R1_ZERO: {"kind": "r1_zero"},
    AnswerForm.ARPO: {"kind": "arpo"},
}
RECIPE = """
name = "answers"
[tasks]
kind = "arithmetic"
[stages.base]
kind = "model"
path = "nowhere"
[stages.rl]
kind = "rl"
init = "base"
method = "grpo"
steps = 4
tasks_per_step = 2
group_size = 2
"""


def earned(part, text):
    """What a right answer, 42, gets of a reward of this part alone."""
    config = Reward.of({"kind": "sum", "parts": {"accuracy": part}})
    completion = Completion(
        ids=(), logprobs=(), entropies=(), is_forced=(), spans=(), finish_reason=FinishReason.STOP, cached_tokens=0
    )
    said = Turn(completion=completion, calls=(), observation_ids=(), completion_text=text, observation_text="")
    key = RolloutKey(task_index=0, attempt=0)
    trajectory = Trajectory(key=key, task_id="t", prompt_ids=(), turns=(said,), stop_reason=StopReason.ANSWERED)

    async def judge():
        reward = make_reward(config)
        try:
            return await reward(Task(id="t", question="6*7", answer="42", source="test"), trajectory)
        finally:
            await reward.close()

    return asyncio.run(judge())["accuracy"]


def refusal(tmp_path, *overrides):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    with pytest.raises(ConfigError) as refused:
        load_recipe(path, overrides)
    return str(refused.value)


def accepted(tmp_path, *overrides):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return load_recipe(path, overrides)


@pytest.mark.parametrize("form", list(READS))
@pytest.mark.parametrize("name", list(ASKED))
def test_the_graders_of_a_prompt_are_those_that_find_a_right_answer_in_its_form(name, form):
    assert (earned(READS[form], ASKED[name]) > 0) == (form in load_prompt(name).graders)


@pytest.mark.parametrize("form", list(READS))
def test_a_reward_reads_the_form_that_its_settings_say(form):
    config = Reward.of({"kind": "sum", "parts": {"accuracy": READS[form]}})
    assert [part.answer_form for part in config.readers().values()] == [form]
    assert set(SETTINGS) == set(AnswerForm)


def test_the_refusal_names_prompt_reward_and_remedies(tmp_path):
    said = refusal(tmp_path, "stages.rl.prompt=question_only")
    assert "recipe.toml: stages.rl: prompt 'question_only' and reward (kind = 'math', needs_box = true) do not fit" in said
    assert r"the reward reads a \boxed{} inside <answer> tags" in said
    assert r"found in a \boxed{} anywhere in the last turn" in said
    assert "Change the reward to a part of kind 'question_only'" in said
    assert (
        "set prompt to one that it reads (alpaca_sft, arpo, plain, rstar2, rstar2_released, short, zero_shot_system_prompt)"
        in said
    )


def test_a_part_that_only_reports_may_read_what_it_likes(tmp_path):
    parts = 'reward={kind="sum", parts={good={kind="r1_zero"}, told={kind="arpo", weight=0.0}}}'
    words = ["stages.rl.prompt=r1_zero", parts]
    assert accepted(tmp_path, *words)
    assert "reward.parts.told" in refusal(tmp_path, "stages.rl.prompt=r1_zero", parts.replace("weight=0.0", "weight=1.0"))


@pytest.mark.parametrize("reward", ['{kind="function", function="my:own"}', '{kind="sum", parts={f={kind="arpo"}}}'])
def test_ones_own_function_and_a_prompt_that_asks_for_no_form_are_believed(tmp_path, reward):
    prompt = "question_only" if "function" in reward else "plain"
    assert accepted(tmp_path, f"stages.rl.prompt={prompt}", f"reward={reward}")


def test_ones_own_prompt_says_its_graders_itself(tmp_path):
    mine = tmp_path / "mine.toml"
    body = 'source = "me"\nmessages = [{role = "user", content = "{question} Answer in a box."}]\n'
    mine.write_text(body + 'graders = ["box"]\n')
    assert f"prompt '{mine}'" in refusal(tmp_path, f"stages.rl.prompt={mine}")
    mine.write_text(body)
    assert accepted(tmp_path, f"stages.rl.prompt={mine}")
    mine.write_text(body + 'graders = ["boxes"]\n')
    assert "graders" in refusal(tmp_path, f"stages.rl.prompt={mine}")
    assert "recipe.toml: stages.rl.prompt: prompt 'rstar': no such prompt" in refusal(tmp_path, "stages.rl.prompt=rstar")


def test_a_stage_that_judges_no_rollout_may_hold_any_pair(tmp_path):
    tuned = 'stages.rl={kind="sft", init="base", data=["d"], steps=1, prompt="question_only"}'
    played = 'stages.d={kind="demonstrations", init="base", demonstrator={kind="arithmetic"}, num_demonstrations=9}'
    assert accepted(tmp_path, tuned, played)
    assert "do not fit" in refusal(tmp_path, tuned, played, "stages.rl.validation={every_steps=1, num_tasks=2, k=1}")
