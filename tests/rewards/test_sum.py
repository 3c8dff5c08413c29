"""A sum of parts: what each is worth together, which rows it is for, and who is left out of a group."""

import asyncio
import dataclasses

import pytest
from trajectories import called, trajectory, turn

from strop.config import validate
from strop.errors import ConfigError, MachineError, TaskError, UserError
from strop.rewards import Reward, SumReward, judge_group, make_reward
from strop.rollout.player import Judge
from strop.sandbox.protocol import PairVerdict
from strop.types import Completion, FinishReason, Group, RolloutKey, StopReason, Task

RIGHT, WRONG = r"<answer>\boxed{72}</answer>", r"<answer>\boxed{71}</answer>"


def a_task(answer="72", **facts):
    return Task(id="t", question="?", answer=answer, source="test", facts=facts)


def config(**parts):
    return Reward.of({"kind": "sum", "parts": parts})


def score(parts, judged, task=None, service=None):
    settings = config(**parts)

    async def judge():
        reward = make_reward(settings, service)
        try:
            return await Judge(reward=reward, weights=settings.weights).score(task or a_task(), judged)
        finally:
            await reward.close()

    return asyncio.run(judge())


def of_length(num_tokens, text=RIGHT):
    made = trajectory(text)
    completion = Completion(
        ids=(5,) * num_tokens,
        logprobs=(0.0,) * num_tokens,
        entropies=(),
        is_forced=(False,) * num_tokens,
        spans=((0, num_tokens),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )
    return dataclasses.replace(made, turns=(dataclasses.replace(made.turns[0], completion=completion),))


class Verdicts:
    """A service that compares every pair alike, or is lost."""

    def __init__(self, verdict):
        self.verdict = verdict
        self.pairs = []

    async def verify(self, request):
        for index, pair in enumerate(request.pairs):
            self.pairs.append((pair.gold, pair.answer))
            if isinstance(self.verdict, Exception):
                raise self.verdict
            yield index, self.verdict


def test_the_reward_is_the_weighted_sum_of_its_parts():
    parts = {
        "accuracy": {"kind": "math"},
        "format": {"kind": "tag_count", "weight": 0.5},
        "called": {"kind": "called", "weight": 0.25},
        "steps": {"kind": "reasoning_steps", "weight": 0.0},
    }
    scored = score(parts, trajectory(turn("First, ", called()), "<think></think>" + RIGHT))
    assert dict(scored.reward_parts) == pytest.approx({"accuracy": 1, "format": 1, "called": 1, "steps": 1 / 3})
    assert scored.reward == pytest.approx(1.75)


def test_a_part_is_for_the_rows_that_its_facts_name():
    parts = {
        "math": {"kind": "math", "where": {"domain": ["math", "physics"]}},
        "arpo": {"kind": "arpo", "where": {"domain": ["search"]}},
        "repetition": {"kind": "repetition", "weight": 0.1},
    }
    assert set(score(parts, trajectory(RIGHT), a_task(domain="physics")).reward_parts) == {"math", "repetition"}
    assert set(score(parts, trajectory(RIGHT), a_task(domain="search")).reward_parts) == {"arpo", "repetition"}
    assert set(score(parts, trajectory(RIGHT), a_task()).reward_parts) == {"repetition"}
    del parts["repetition"]
    with pytest.raises(TaskError, match=r"task 't': no part of the reward applies to it.*tasks\.facts"):
        score(parts, trajectory(RIGHT), a_task(domain="chess"))


def test_an_empty_text_among_the_values_stands_for_tasks_without_that_fact():
    parts = {
        "accuracy": {"kind": "math", "where": {"kind": ["reasoning", ""]}},
        "repetition": {"kind": "repetition", "where": {"kind": ["helpful"]}},
    }
    for task in (a_task(kind="reasoning"), a_task(domain="math")):
        assert set(score(parts, trajectory(RIGHT), task).reward_parts) == {"accuracy"}
    assert set(score(parts, trajectory(RIGHT), a_task(kind="helpful")).reward_parts) == {"repetition"}


@pytest.mark.parametrize(
    ("part", "text", "expected"),
    [
        ({"kind": "math"}, RIGHT, 1),
        ({"kind": "math"}, WRONG, 0),
        ({"kind": "math"}, r"\boxed{72}", 0),
        ({"kind": "math", "answer_in": "response"}, r"\boxed{1} \boxed{72}", 1),
        ({"kind": "math", "judge": "exact"}, r"<answer>\boxed{72.0}</answer>", 1),
        ({"kind": "math", "judge": "exact"}, r"<answer>\boxed{\frac{144}{2}}</answer>", 0),
        ({"kind": "math", "judge": "fused"}, r"<answer>\boxed{72 \text{ apples}}</answer>", 1),
        ({"kind": "math", "judge": "fused"}, WRONG, 0),
        ({"kind": "math", "judge": "fused"}, r"\boxed{72}", 0),
        ({"kind": "math", "needs_box": False}, "<answer>72</answer>", 1),
        ({"kind": "math", "needs_box": False, "judge": "exact"}, "<answer>72</answer>", 1),
        ({"kind": "math", "needs_box": False, "judge": "exact"}, "<answer>73</answer>", 0),
        ({"kind": "r1_zero"}, "so</think> <answer>72</answer>", 1),
        ({"kind": "r1_zero"}, "so</think><answer>72</answer>", 0),  # without the space
        ({"kind": "r1_zero"}, "so</think>  <answer>72</answer>", 0),  # with two
        ({"kind": "r1_zero"}, "so</think>\n<answer>72</answer>", 0),
        ({"kind": "question_only"}, r"so \boxed{72}", 1),
        ({"kind": "question_only"}, "so 72", 0),
        ({"kind": "format", "newlines": False, "is_prefilled": True}, "so</think><answer>72</answer>", 1),
        ({"kind": "language"}, "we think</think>", 1),
        ({"kind": "arpo"}, r"<think>so</think><answer>\boxed{72}</answer>", 1),
        ({"kind": "repetition"}, "no no no no no", -2 / 3),
    ],
)
def test_every_kind_of_part_judges_what_it_says(part, text, expected):
    assert score({"it": part}, trajectory(text)).reward == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "expected"), [("turns_format", 1), ("format", 0)])
def test_a_rollout_with_calls_has_the_form_of_an_answer_only_turn_by_turn(kind, expected):
    calls = turn("<think>so</think><tool_call>{}</tool_call>", called(), observation="72")
    judged = trajectory(calls, f"<think>so</think>{RIGHT}")
    assert score({"it": {"kind": kind, "newlines": False}}, judged).reward == expected


@pytest.mark.parametrize("kind", ["math", "r1_zero", "question_only"])
def test_a_truncated_rollout_has_no_answer_for_any_judge(kind):
    text = r"so</think> <answer>\boxed{72}</answer>"
    assert score({"it": {"kind": kind}}, trajectory(text)).reward == 1
    assert score({"it": {"kind": kind}}, trajectory(text, stop_reason=StopReason.LENGTH)).reward == 0


@pytest.mark.parametrize("part", [{}, {"judge": "fused"}])
def test_a_pair_that_reaches_its_limit_scores_0_and_a_lost_judge_scores_nothing(part):
    judged, task = trajectory(r"<answer>\boxed{9^{9^9}}</answer>"), a_task(r"\frac{1}{2}")
    parts = {"it": {"kind": "math", **part}}
    assert score(parts, judged, task, Verdicts(PairVerdict.TIMEOUT)).reward == 0
    with pytest.raises(MachineError):
        score(parts, judged, task, Verdicts(MachineError("gone")))


def test_a_task_whose_own_answer_is_no_mathematics_is_excluded_once_asked():
    service = Verdicts(PairVerdict.UNREADABLE)
    task = a_task("x =")
    scored = score({"it": {"kind": "math"}}, trajectory(RIGHT), task, service)
    assert dict(scored.reward_parts) == {"excluded": 1.0}
    assert scored.reward_parts.why == "part 'it': the answer of task 't', 'x =', cannot be read"
    assert service.pairs == [("x =", "x =")]


def test_an_answer_that_is_no_mathematics_is_compared_as_text_by_a_fused_judge():
    task, part = a_task("??"), {"it": {"kind": "math", "judge": "fused"}}
    service = Verdicts(PairVerdict.UNREADABLE)
    answers = (r"<answer>\boxed{ ?? }</answer>", RIGHT)
    assert [score(part, trajectory(answer), task, service).reward for answer in answers] == [1, 0]
    assert len(service.pairs) == 1


def unsure(task, judged):
    return None if "unsure" in judged.turns[0].completion_text else 1.0


def test_what_a_part_cannot_judge_is_excluded_from_the_group_and_counted_as_void():
    parts = {"mine": {"kind": "function", "function": "test_sum:unsure"}, "other": {"kind": "repetition"}}
    settings = config(**parts)
    scored = tuple(score(parts, trajectory(text)) for text in ("a", "unsure", "b"))
    group = Group(task=a_task(), task_index=0, trajectories=scored, num_void=1)
    judged = judge_group(settings, group)
    assert [each.reward for each in judged.trajectories] == [1.0, 1.0]
    assert judged.num_void == 2
    assert judged.excluded == (scored[1].trajectory,)  # branches of it are still in the group's tree
    assert judge_group(settings, judged) == judged  # whoever asks twice


def wrong_type(task, judged):
    return "1"


def test_a_function_that_returns_neither_number_nor_none_is_named():
    with pytest.raises(UserError, match=r"reward function wrong_type .* returned '1' for task 't'\. Return a finite number"):
        score({"it": {"kind": "function", "function": "test_sum:wrong_type"}}, trajectory("a"))


def test_length_is_compared_within_the_group_once_it_is_there():
    parts = {"accuracy": {"kind": "math"}, "short": {"kind": "length", "weight": 0.2}}
    settings = config(**parts)
    scored = tuple(score(parts, each) for each in (of_length(10), of_length(30), of_length(10, WRONG), of_length(20)))
    assert [each.reward for each in scored] == [1.0, 1.0, 0.0, 1.0]
    group = Group(task=a_task(), task_index=0, trajectories=scored)
    judged = judge_group(settings, group)
    assert [each.reward_parts["short"] for each in judged.trajectories] == [0.5, -0.5, 0.0, 0.0]
    assert [each.reward for each in judged.trajectories] == pytest.approx([1.1, 0.9, 0.0, 1.0])
    assert judge_group(settings, judged) == judged  # whoever asks twice


@pytest.mark.parametrize(("text", "expected"), [(RIGHT, 1.75), (WRONG, -0.25)])
def test_the_cosine_asks_the_part_that_says_what_is_right(text, expected):
    parts = {"accuracy": {"kind": "math"}, "cosine": {"kind": "cosine", "max_tokens": 1000}}
    assert score(parts, of_length(500, text)).reward == pytest.approx(expected)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": {"kind": "maths"}}, "Did you mean 'math'"),
        ({"a": {"kind": "math", "weight": 0.0}}, "every trajectory would get the same reward"),
        ({"a": {"kind": "language", "language": "klingon"}}, "its script is not known"),
        ({"a": {"kind": "math", "weight": -1.0}}, r"parts\.a\.weight: .*greater than or equal to 0"),
        ({"a": {"kind": "called", "weight": 1e308}}, r"parts\.a\.weight: .*less than or equal to 1000000"),
        ({"a": {"kind": "math", "verify_deadline_s": 601.0}}, r"verify_deadline_s: .*less than or equal to 600"),
        ({"a": {"kind": "cosine"}}, r"parts\.a\.accuracy is 'accuracy', which is not a part that judges an answer"),
        ({"a": {"kind": "length", "accuracy": "a"}}, "not a part that judges an answer"),
        ({"excluded": {"kind": "called"}}, "Rename it"),
        ({"a": {"kind": "soft_overlong", "max_tokens": 10, "cache_tokens": 20}}, "Lower it"),
        ({}, "at least 1"),
    ],
)
def test_parts_that_cannot_be_meant_are_refused(parts, message):
    with pytest.raises(ConfigError, match=message):
        validate(SumReward.Config, {"parts": parts}, place="recipe")


def test_rollouts_that_were_judged_by_another_reward_stay_as_they_are():
    scored = score({"it": {"kind": "math"}}, trajectory(RIGHT))
    key = RolloutKey(task_index=0, attempt=1)
    other = dataclasses.replace(scored, trajectory=dataclasses.replace(scored.trajectory, key=key))
    group = Group(task=a_task(), task_index=0, trajectories=(scored, other))
    assert judge_group(object(), group) == group


@pytest.mark.parametrize(
    ("grader", "texts"),
    [
        ("r1_zero", ("a </think> <answer>72</answer>", "a </think> <answer>71</answer>", "72")),
        ("question_only", (r"\boxed{72}", r"\boxed{71}", "72")),
    ],
)
def test_a_format_that_does_not_count_tells_right_from_well_formed_and_from_neither(grader, texts):
    parts = {"accuracy": {"kind": grader}, "format": {"kind": f"{grader}_format", "weight": 0.0}}
    scored = [score(parts, trajectory(text)) for text in texts]
    assert [each.reward for each in scored] == [1.0, 0.0, 0.0]
    told = [(each.reward_parts["accuracy"], each.reward_parts["format"]) for each in scored]
    assert told == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]
    cut = dataclasses.replace(trajectory(texts[0]), stop_reason=StopReason.OVERFLOW)
    assert score(parts, cut).reward_parts["format"] == 0.0


def unused(where, *facts):
    parts = {"accuracy": {"kind": "math"}, "other": {"kind": "repetition", "where": where}}
    tasks = [Task(id=str(index), question="?", answer="1", source="test", facts=each) for index, each in enumerate(facts)]
    return config(**parts).unused_parts(tasks)


def test_a_part_that_is_for_one_task_of_several_is_not_unused():
    assert unused({"domain": ["code"]}, {"domain": "math"}, {"domain": "code"}) == {}
    assert unused({"domain": ["code", ""]}, {"domain": "math"}, {}) == {}
    assert unused({}, {}) == {}


def test_the_reason_shows_what_is_required_and_what_tasks_have():
    why = unused({"domain": ["code"]}, *({"domain": each} for each in "abcdef"))["other"]
    assert why == "`where` requires domain = 'code', and the tasks have {'domain': ['a', 'b', 'c', 'd']}."


OWN = """
from strop.rewards.base import NotJudged, RolloutPart

class Digits(RolloutPart):
    class Config(RolloutPart.Config):
        digit: str = "7"

    async def score(self, task, trajectory):
        if task.answer == "?":
            raise NotJudged("no answer")
        if task.answer == "!":
            return None
        return float(task.answer.count(self.config.digit))
"""


def test_a_part_may_be_a_class_of_the_users(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    part = {"kind": f"{tmp_path / 'own.py'}:Digits", "digit": "3", "weight": 0.5}
    reward = make_reward(Reward.of({"kind": "sum", "parts": {"threes": part}}))
    assert reward.weights == {"threes": 0.5}
    assert reward.table()["parts"]["threes"] == {**part, "where": {}}

    def judged(answer):
        return asyncio.run(reward(a_task(answer), trajectory(RIGHT)))

    assert judged("1331") == {"threes": 2.0}
    assert judged("?").why == "part 'threes': no answer"
    with pytest.raises(ConfigError, match=r"Digits\.score .*own\.py, line \d+.* returned None for .* a finite number"):
        judged("!")
