import asyncio

import pytest
from pydantic import ValidationError

from strop.chat_client import ChatServiceConfig
from strop.errors import UserError
from strop.rewards.base import NotJudged
from strop.rewards.judge import JudgeConfig, ModelJudge
from strop.rewards.scorers import Exchange

from .chat_service import Answer, said, serving

GOOD, BAD = "It is 4, for 2 and 2 make 4.", "It is 5."


def judging(service, *, tries=2, **keys):
    chat = ChatServiceConfig(url=service.url, model="judge")
    return JudgeConfig(service=chat, tries=tries, **keys)


def ask(config, *calls):
    async def run():
        judge = ModelJudge(config)
        try:
            return [await judged(call(judge)) for call in calls]
        finally:
            await judge.close()

    return asyncio.run(run())


async def judged(judging):
    try:
        return await judging
    except NotJudged:
        return None


def prefers_good(asked, _):
    """A judge that knows which is better, wherever it stands."""
    text = asked.body["messages"][0]["content"]
    return said(f"Let me see [[A=B]]... no: [[{'A>>B' if text.index(GOOD) < text.index(BAD) else 'B>>A'}]]")


def test_the_verdict_is_of_the_responses_and_not_of_their_places():
    with serving(prefers_good) as service:
        calls = [lambda judge, n=n: judge.compare("2+2?", GOOD, BAD, judgement=n) for n in range(8)]
        assert ask(judging(service), *calls) == [2.0] * 8
    places = {text.index(GOOD) < text.index(BAD) for text in (asked.body["messages"][0]["content"] for asked in service.asked)}
    assert places == {True, False}


def test_a_judge_that_always_takes_the_first_prefers_neither():
    with serving(lambda *_: said("[[A>B]]")) as service:
        calls = [lambda judge, n=n: judge.compare("2+2?", GOOD, BAD, judgement=n) for n in range(32)]
        values = ask(judging(service), *calls)
    assert set(values) == {1.0, -1.0}
    assert abs(sum(values)) <= 16


@pytest.mark.parametrize("verdict", ["A>>B", "A>B", "A=B", "B>A", "B>>A"])
def test_a_verdict_counts_whichever_way_round_it_is_written(verdict):
    turned = verdict[-1] + verdict[1:-1].replace(">", "<") + verdict[0]
    calls = [lambda judge: judge.compare("2+2?", GOOD, BAD)]
    found = []
    for written in (verdict, turned):
        with serving(lambda *_, written=written: said(f"[[{written}]]")) as service:
            found += ask(judging(service), *calls)
    assert None not in found
    assert found[0] == found[1]


@pytest.mark.parametrize(("text", "value"), [("fine [[7]]", 7.0), ("[[3]] rather [[8.5]]", 8.5), ("[[9/10]]", 9.0)])
def test_the_last_number_in_brackets_is_the_score(text, value):
    with serving(lambda *_: said(text)) as service:
        assert ask(judging(service), lambda judge: judge.score(Exchange(prompt="2+2?", response=GOOD))) == [value]
    assert GOOD in service.asked[0].body["messages"][0]["content"]


@pytest.mark.parametrize("text", ["seven", "[[11]]", "[[0]]", "7", ""])
def test_a_reply_without_a_score_is_asked_for_again_as_another_draw(text):
    with serving(lambda _, number: said("[[4]]" if number else text)) as service:
        assert ask(judging(service), lambda judge: judge.score(Exchange(prompt="2+2?", response=GOOD))) == [4.0]
    assert [asked.body["seed"] for asked in service.asked] == [0, 1]


def scores(*exchanges):
    return [lambda judge, p=p, r=r: judge.score(Exchange(prompt=p, response=r)) for p, r in exchanges]


DIFFERENT = [(f"{n}+{n}?", str(n)) for n in range(40)]


def test_a_judge_that_turns_to_nonsense_ends_the_run_after_many_in_a_row(caplog):
    with serving(lambda _, number: said("[[5]]" if number < 3 else "bla bla")) as service:
        with pytest.raises(UserError, match=r"128 responses in a row were not judged.*no verdict in 1 reply.*'bla bla'"):
            ask(judging(service, tries=1), *scores(*((f"{n}?", "x") for n in range(200))))
        assert len(service.asked) == 3 + 128
    warned = [record.getMessage() for record in caplog.records if "no verdict" in record.getMessage()]
    assert [int(text.partition(" so far")[0].rpartition(" ")[2]) for text in warned] == [1, 2, 4, 8, 16, 32, 64]
    assert all(f"the judge 'judge' at {service.url}" in text for text in warned)


def test_nonsense_that_ended_a_run_is_not_kept_so_the_same_calls_go_on_when_the_judge_is_mended(tmp_path):
    with serving(lambda _, number: said("[[5]]" if number < 3 else "bla bla")) as service:
        config = judging(service)
        config = config.model_copy(update={"service": config.service.model_copy(update={"cache": str(tmp_path)})})
        assert ask(config, *scores(*DIFFERENT)) == [5.0] * 3 + [None] * 37
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 3
    with serving(lambda *_: said("[[6]]")) as service:
        moved = config.model_copy(update={"service": config.service.model_copy(update={"url": service.url})})
        assert ask(moved, *scores(*DIFFERENT)) == [5.0] * 3 + [6.0] * 37
        assert len(service.asked) == 37


def test_a_reply_that_was_cut_off_before_its_verdict_is_told_as_such(caplog):
    with serving(lambda *_: said("On the one hand", "length")) as service:
        assert ask(judging(service), *scores(("2+2?", "4"))) == [None]
    assert "the last reply, truncated at service.max_tokens, ends with 'On the one hand'" in caplog.text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"score_prompt": "How good is it?"}, r"has no \$response"),
        ({"score_prompt": "$response $reponse"}, r"\$reponse is not a variable"),
        ({"pair_prompt": "$a or what?"}, r"has no \$b"),
        ({"lowest": 5.0, "highest": 5.0}, "highest is 5 and lowest is 5"),
    ],
)
def test_a_prompt_that_shows_nothing_is_refused(keys, words):
    with pytest.raises(ValidationError, match=words):
        JudgeConfig(service=ChatServiceConfig(url="http://x", model="m"), **keys)


def test_a_response_that_the_service_refuses_to_look_at_has_no_score_and_the_others_have(caplog):
    def answer(asked, _):
        is_long = "zzz" in asked.body["messages"][0]["content"]
        return Answer(body={"error": "maximum context length"}, status=400) if is_long else said("[[5]]")

    calls = [lambda judge, r=r: judge.score(Exchange(prompt="2+2?", response=r)) for r in ["a", *["zzz"] * 20, "b"]]
    with serving(answer) as service:
        assert ask(judging(service), *calls) == [5.0, *[None] * 20, 5.0]
    assert len(service.asked) == 22  # what is refused is not asked for again
    assert "not judged, and excluded from their groups: 16 so far" in caplog.text
