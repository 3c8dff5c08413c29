"""Parts of a sum that another model gives, asked over HTTP from a service on this machine."""

import asyncio
import math
from dataclasses import replace

import pytest
from scorers.chat_service import Answer, said, serving
from trajectories import TASK, trajectory

from strop.config import validate
from strop.errors import ConfigError, UserError
from strop.rewards import Reward, SumReward, make_reward
from strop.rewards.base import final_summary
from strop.types import StopReason, Task


def reward(**parts):
    return Reward.of({"kind": "sum", "parts": parts})


def judged(config, *trajectories, task=TASK):
    async def run():
        judge = make_reward(config)
        try:
            return await asyncio.gather(*(judge(task, each) for each in trajectories))
        finally:
            await judge.close()

    return asyncio.run(run())


def scorer(service, **keys):
    return {"kind": "scorer", "scorer": {"kind": "http", "url": service.url, "retries": 1}} | keys


def lengths(asked, _):
    return Answer(body={"scores": [len(each["response"]) for each in asked.body["exchanges"]]})


THOUGHT = trajectory("<think>so and so</think>\nfour")


def test_the_summary_alone_is_judged_or_the_whole_response():
    with serving(lengths) as service:
        config = reward(helpful=scorer(service, scale="raw"), safe=scorer(service, scale="raw", judged_on="response"))
        assert judged(config, THOUGHT) == [{"helpful": 4.0, "safe": 29.0}]
    shown = sorted(
        (each for asked in service.asked for each in asked.body["exchanges"]), key=lambda each: len(each["response"])
    )
    assert shown[0] == {"prompt": "What is 8*9?", "response": "four"}


def test_rollouts_of_a_group_are_judged_in_one_request():
    with serving(lengths) as service:
        parts = judged(reward(helpful=scorer(service, scale="raw")), *(trajectory("x" * n) for n in range(1, 9)))
    assert [each["helpful"] for each in parts] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(service.asked) == 1


def test_a_score_lies_between_0_and_1_unless_it_is_wanted_raw():
    with serving(lambda *_: Answer(body={"scores": [-800.0]})) as service:
        assert judged(reward(helpful=scorer(service)), THOUGHT) == [{"helpful": 0.0}]
    with serving(lambda *_: Answer(body={"scores": [math.log(3)]})) as service:
        assert judged(reward(helpful=scorer(service)), THOUGHT)[0]["helpful"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    "without",
    [
        trajectory("<think>never done"),
        trajectory("<think>done</think>  "),
        trajectory("four", stop_reason=StopReason.LENGTH),
        trajectory("<think>let me see</think><python>print(4)</python>", stop_reason=StopReason.TURN_LIMIT),
        trajectory("<think>let me see</think><python>print(4)</python>", stop_reason=StopReason.TOOL_BUDGET),
        trajectory(),
    ],
)
def test_without_a_summary_nobody_is_asked(without):
    with serving(lengths) as service:
        assert judged(reward(helpful=scorer(service, missing=-1.0)), without) == [{"helpful": -1.0}]
    assert service.asked == []


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),  # the prompt held the opening tag
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>a</think>b<think>c", None),
        ("plain", "plain"),
    ],
)
def test_the_summary_stands_behind_the_last_thought(text, summary):
    assert final_summary(text) == summary


@pytest.mark.parametrize(
    ("texts", "is_asked"),
    [
        (("so and so",), False),  # all of it is the thought that the prompt began
        (("so and so</think>\nfour",), True),
        (("so</think> <python>", "four"), True),  # the thought ended in an earlier turn
        (("so <python>", "four"), False),
    ],
)
def test_a_thought_that_the_prompt_began_is_no_summary(texts, is_asked):
    with serving(lengths) as service:
        found = judged(reward(helpful=scorer(service, scale="raw", missing=-1.0, is_prefilled=True)), trajectory(*texts))
    assert found == [{"helpful": 4.0 if is_asked else -1.0}]
    assert len(service.asked) == is_asked


def refuses_long_ones(asked, _):
    scores = [len(each["response"]) for each in asked.body["exchanges"]]
    return Answer(body={"error": "too long"}, status=400) if max(scores) > 100 else Answer(body={"scores": scores})


def test_a_response_that_the_scorer_refuses_is_excluded_and_the_others_of_its_batch_are_judged(caplog):
    texts = ["a", "b" * 2, "c" * 101, "d" * 4, "e" * 200, "f" * 6]
    with serving(refuses_long_ones) as service:
        found = judged(reward(helpful=scorer(service, scale="raw")), *map(trajectory, texts))
    excluded = {"excluded": 1.0}
    assert found == [{"helpful": 1.0}, {"helpful": 2.0}, excluded, {"helpful": 4.0}, excluded, {"helpful": 6.0}]
    assert "not judged, and excluded from their groups: 2 so far" in caplog.text


def refuses_from(number, status, body=None):
    def answer(asked, at):
        return lengths(asked, at) if at < number else Answer(body=body or {"error": "out of order"}, status=status)

    return answer


def one_by_one(config, *asked):
    async def run():
        judge = make_reward(config)
        try:
            return [await judge(replace(TASK, question=question), trajectory(text)) for question, text in asked]
        finally:
            await judge.close()

    return asyncio.run(run())


def test_a_scorer_that_refuses_many_in_a_row_and_judged_none_stops_the_run():
    limit = 8  # 128 after a first score, as for a judge
    asked = [(f"What is {n}?", "x") for n in range(200)]
    with serving(refuses_from(0, 400)) as service, pytest.raises(UserError) as raised:
        one_by_one(reward(helpful=scorer(service)), *asked)
    assert len(service.asked) == limit
    assert f"{limit} responses in a row were not judged" in str(raised.value)
    assert f"{service.url} answered 400" in str(raised.value)
    assert "out of order" in str(raised.value)


@pytest.mark.parametrize(("status", "num_tries"), [(401, 1), (404, 1), (503, 2)])
def test_a_scorer_that_fails_whatever_it_is_asked_stops_the_run_at_once_after_its_first_scores_too(status, num_tries):
    asked = [(f"What is {n}?", "four") for n in range(20)]
    with serving(refuses_from(3, status)) as service, pytest.raises(UserError, match=f"answered {status}.*out of order"):
        one_by_one(reward(helpful=scorer(service)), *asked)
    assert len(service.asked) == 3 + num_tries


def test_a_judge_gives_a_share_of_its_range_and_excludes_what_it_cannot_judge():
    def answer(asked, _):
        return said("what?" if "zzz" in asked.body["messages"][0]["content"] else "[[7]]")

    with serving(answer) as service:
        judge = {"service": {"url": service.url, "model": "m"}, "lowest": 1.0, "highest": 10.0}
        config = reward(helpful={"kind": "judge", "judge": judge})
        found = judged(config, trajectory("four"), trajectory("zzz"))
    assert found == [{"helpful": pytest.approx(6 / 9)}, {"excluded": 1.0}]


def test_a_judge_may_compare_the_answer_with_the_references_and_decide_in_words():
    def answer(asked, _):
        shown = asked.body["messages"][0]["content"]
        assert shown.startswith("Given a Question and its Golden Answer")
        assert 'Golden Answer: ["Oslo", "Christiania"]' in shown
        return said("Correct." if "Predicted Answer: oslo\n" in shown else "It is INCORRECT; correct is Oslo.")

    words = {"Correct": 1.0, "Incorrect": 0.0, "not correct": 0.0}
    told = [trajectory(f"<think>no</think><answer>{each}</answer>") for each in (r"It is \boxed{oslo}.", "rome")]
    with serving(answer) as service:
        judge = {"service": {"url": service.url, "model": "m"}, "lowest": 0.0, "highest": 1.0}
        judge |= {"score_prompt": "arpo_judge", "words": words}
        config = reward(accuracy={"kind": "judge", "judged_on": "answer", "judge": judge})
        task = Task(id="t", question="Capital?", answer="Oslo", source="s", facts={"references": '["Oslo", "Christiania"]'})
        found = judged(config, *told, trajectory("no answer"), task=task)
    assert found == [{"accuracy": 1.0}, {"accuracy": 0.0}, {"accuracy": 0.0}]
    assert len(service.asked) == 2  # a rollout without an answer is not judged


def test_a_judge_may_compare_the_response_with_the_tasks_answer_in_either_order():
    orders = set()

    def answer(asked, _):
        shown = asked.body["messages"][0]["content"]
        is_first = shown.index("response ") < shown.index("reference")
        orders.add(is_first)
        verdict = "A>B" if is_first is ("response 1" in shown) else "B>A"
        return said(f"[[{'A=B' if 'as good' in shown else verdict}]]")

    with serving(answer) as service:
        judge = {"service": {"url": service.url, "model": "m"}}
        config = reward(accuracy={"kind": "judge", "judged_on": "response", "against_answer": True, "judge": judge})
        task = Task(id="t", question="Q?", answer="The reference", source="s")
        better, worse = ([trajectory(f"response {k}{n}") for n in range(8)] for k in (1, 2))
        found = judged(config, *better, *worse, trajectory("response as good"), task=task)
    assert [each["accuracy"] for each in found] == [1.0] * 8 + [0.0] * 9
    assert orders == {True, False}


def test_a_word_outside_the_range_of_a_judge_is_refused():
    judge = {"service": {"url": "http://a", "model": "m"}, "words": {"Correct": 0.5}}
    with pytest.raises(
        ConfigError, match=r"words gives 'Correct' the value 0\.5, which is outside lowest = 1 and highest = 10"
    ):
        validate(SumReward.Config, {"parts": {"a": {"kind": "judge", "judge": judge}}}, place="recipe")


def test_an_embedded_scorer_says_where_its_model_is():
    parts = {"helpful": {"kind": "scorer", "scorer": {"kind": "embedded"}}}
    with pytest.raises(ConfigError, match="give either path"):
        validate(SumReward.Config, {"parts": parts}, place="recipe")
