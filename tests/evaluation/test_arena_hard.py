"""Arena-Hard on rows written here in the published schemas, judged by a server on this machine."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from rewards.scorers.chat_service import said, serving
from strop.chat_client import ChatServiceConfig
from strop.cli import app
from strop.errors import RunError, TaskError
from strop.evaluation.arena_hard import (
    Answers,
    Judged,
    Match,
    Question,
    read_answers,
    read_questions,
    win_rate,
)
from strop.evaluation.compare import compare
from strop.evaluation.results import read_eval
from strop.rewards.judge import JudgeConfig
from strop.run_directory import read_json, read_lines

NAMES = ["a", "b", "c"]
V2 = {
    "questions": [
        {"uid": name, "category": "hard_prompt", "subcategory": "coding", "language": "English", "prompt": f"ask {name}"}
        for name in NAMES
    ],
    "answers": [
        {
            "uid": name,
            "ans_id": f"x{name}",
            "model": "ours",
            "messages": [
                {"role": "user", "content": f"ask {name}"},
                {"role": "assistant", "content": {"answer": f"ours says {name}"}},
            ],
            "tstamp": 1.0,
            "metadata": {"token_len": 3},
        }
        for name in NAMES
    ],
}
V01 = {
    "questions": [
        {"question_id": name, "category": "arena-hard-v0.1", "cluster": "sums", "turns": [{"content": f"ask {name}"}]}
        for name in NAMES
    ],
    "answers": [
        {
            "question_id": name,
            "answer_id": f"x{name}",
            "model_id": "ours",
            "choices": [{"index": 0, "turns": [{"content": f"ours says {name}", "token_len": 3}]}],
            "tstamp": 1.0,
        }
        for name in NAMES
    ],
}
BASELINE = Answers(model="theirs", texts={name: f"theirs says {name}" for name in NAMES})
OURS = Answers(model="ours", texts={name: f"ours says {name}" for name in NAMES})
QUESTIONS = [Question(id=name, prompt=f"ask {name}", category="all") for name in NAMES]


def put(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("version", [V2, V01], ids=["v2.0", "v0.1"])
def test_questions_and_answers_are_read_in_both_published_schemas(version, tmp_path):
    questions = read_questions(put(tmp_path / "question.jsonl", version["questions"]))
    assert [(each.id, each.prompt) for each in questions] == [(name, f"ask {name}") for name in NAMES]
    assert read_answers(put(tmp_path / "ours.jsonl", version["answers"])) == OURS


@pytest.mark.parametrize(
    ("read", "rows", "message"),
    [
        (read_questions, [{"uid": "a"}], r"rows.jsonl:1: no question of Arena-Hard"),
        (read_questions, [{"question_id": "a", "turns": [{"content": "1"}, {"content": "2"}]}], "no question of Arena-Hard"),
        (read_questions, [], "it has no questions"),
        (read_questions, V2["questions"][:1] * 2, "'a' occurs twice"),
        (read_answers, [{"uid": "a", "model": "m", "messages": []}], r"rows.jsonl:1: no answer of Arena-Hard"),
        (read_answers, [V2["answers"][0], V2["answers"][1] | {"model": "other"}], r"answers of 2 models \(other, ours\)"),
    ],
)
def test_a_file_of_another_form_is_named(read, rows, message, tmp_path):
    with pytest.raises(TaskError, match=message):
        read(put(tmp_path / "rows.jsonl", rows))


def judge_config(service, **keys):
    return JudgeConfig(service=ChatServiceConfig(url=service.url, model="judge"), tries=1, **keys)


def shown(asked):
    """The two answers, in the order in which the judge sees them."""
    text = asked.body["messages"][0]["content"]
    return [text.split(f"<answer_{side}>\n")[1].split(f"\n</answer_{side}>")[0] for side in "ab"]


def likes(winner, verdict=">>"):
    def answer(asked, _):
        first, _second = shown(asked)
        return said(f"[[A{verdict}B]]" if first.startswith(winner) else f"[[B{verdict}A]]")

    return answer


def match(service, **keys):
    shared = {"benchmark": "arena-hard", "questions": QUESTIONS, "answers": OURS, "baseline": BASELINE}
    return Match(**shared | {"config": judge_config(service)} | keys)


def judged_by(answer, **keys):
    with serving(answer) as service:
        found = asyncio.run(match(service, **keys).judge())
    return found, service


def test_each_pair_is_shown_in_both_orders_and_a_verdict_is_of_the_answer_and_not_of_its_place():
    found, service = judged_by(likes("ours"))
    assert [each.verdicts for each in found] == [(2.0, 2.0)] * 3
    orders = [tuple(text.split()[0] for text in shown(asked)) for asked in service.asked]
    assert sorted(orders) == [("ours", "theirs")] * 3 + [("theirs", "ours")] * 3


def test_a_judge_that_always_takes_the_first_prefers_neither():
    found, _ = judged_by(lambda *_: said("[[A>B]]"))
    assert [each.verdicts for each in found] == [(-1.0, 1.0)] * 3
    assert win_rate([each.wins for each in found], seed=0).mean == 0.5


@pytest.mark.parametrize(
    ("verdicts", "wins"),
    [
        ((2.0, 2.0), (6.0, 6.0)),  # a clear verdict counts three times
        ((1.0, -2.0), (1.0, 4.0)),
        ((0.0, 1.0), (1.5, 2.0)),
        ((-1.0, -1.0), (0.0, 2.0)),
    ],
)
def test_a_clear_verdict_counts_as_three_slight_ones(verdicts, wins):
    assert Judged(question=QUESTIONS[0], verdicts=verdicts).wins == wins


def test_the_win_rate_is_of_summed_verdicts_and_its_interval_draws_questions():
    found = win_rate([(6.0, 6.0), (0.0, 2.0)], seed=0)
    assert found.mean == 0.75  # 6 of 8, and not the mean of 1 and 0
    assert (found.low, found.high) == (0.0, 1.0)  # one question twice, either of them
    many = win_rate([(6.0, 6.0), (0.0, 2.0)] * 100, seed=0)
    assert 0.65 < many.low < 0.75 < many.high < 0.85
    assert win_rate([(2.0, 2.0)] * 10, seed=0).low == pytest.approx(0.025 ** (1 / 10))  # all won is no certainty
    by_place = win_rate([(3.0, 6.0)] * 10, seed=0)  # nor is a judge that goes by place: 0.308 of others may be won or lost
    assert (by_place.low, by_place.high) == (pytest.approx(0.346, abs=1e-3), pytest.approx(0.654, abs=1e-3))


def result(found, service, **keys):
    return match(service, **keys).result(found)


def test_questions_without_both_verdicts_or_without_an_answer_are_left_out_and_counted():
    def answer(asked, _):
        first, _second = shown(asked)
        if first == "ours says b":
            return said("I cannot say")  # in one of both orders
        return likes("ours", ">")(asked, 0)

    part = Answers(model="ours", texts={name: OURS.texts[name] for name in "ab"})
    with serving(answer) as service:
        found = asyncio.run(match(service, answers=part).judge())
    figures, problems = result(found, service, answers=part)
    assert (figures["num_tasks"], figures["num_without_verdict"], figures["num_without_answer"]) == (1, 1, 1)
    assert figures["accuracy"] == 1.0
    assert [each["verdicts"] for each in problems] == [[1.0, 1.0]]


def test_thoughts_are_not_shown_to_the_judge():
    thinking = Answers(model="ours", texts={"a": "<think>long</think>\nours, in short", "b": "<think>never ends"})
    with serving(likes("ours")) as service:
        asyncio.run(match(service, answers=thinking, think_tag="think").judge())
    texts = {text for asked in service.asked for text in shown(asked) if not text.startswith("theirs")}
    assert texts == {"ours, in short", ""}


def test_files_of_two_versions_of_the_benchmark_are_told_of():
    other = Answers(model="theirs", texts={"z": "?"})
    with serving(likes("ours")) as service, pytest.raises(TaskError, match="none of 3 questions is answered by both"):
        asyncio.run(match(service, baseline=other).judge())


def test_questions_of_one_category_are_read_alone_since_each_has_a_baseline_of_its_own(tmp_path):
    poem = {"uid": "p", "category": "creative_writing", "prompt": "ask p"}
    path = put(tmp_path / "question.jsonl", [*V2["questions"], poem])
    assert [each.id for each in read_questions(path)] == [*NAMES, "p"]
    assert [each.id for each in read_questions(path, categories=["creative_writing"])] == ["p"]
    with pytest.raises(TaskError, match=r"has the category 'poems'\. The categories are hard_prompt, creative_writing\."):
        read_questions(path, categories=["poems"])


def test_the_command_writes_what_comparisons_and_the_leaderboard_read_and_goes_on_where_it_was(tmp_path):
    data = tmp_path / "arena-hard-v2.0"
    put(data / "question.jsonl", V2["questions"])
    rows = [
        row | {"model": "theirs", "messages": [{"content": {"answer": f"theirs says {row['uid']}"}}]} for row in V2["answers"]
    ]
    put(data / "theirs.jsonl", rows)
    put(data / "ours.jsonl", V2["answers"])

    def typed(service, name, *more):
        judge = put(tmp_path / "judge.toml", [])
        judge.write_text(f'tries = 1\n[service]\nurl = "{service.url}"\nmodel = "judge"\n')
        words = [data / "question.jsonl", "--baseline", data / "theirs.jsonl", "--answers", data / "ours.jsonl"]
        words += ["--judge", judge, "--runs", tmp_path / "runs", "--name", name, *more]
        done = CliRunner().invoke(app, ["eval", "arena-hard", *map(str, words)])
        if done.exception is not None:
            raise done.exception
        return done.output

    with serving(likes("ours", ">")) as service:
        assert "ours: preferred in 100.0%" in typed(service, "one")
        assert len(service.asked) == 6
        typed(service, "one")
        assert len(service.asked) == 6
        assert {asked.body["max_tokens"] for asked in service.asked} == {4096}  # it is asked to answer first
        with pytest.raises(RunError, match=r"one/eval/result\.json: .* which differs in reward\..* --name"):
            typed(service, "one", "--think-tag", "think")
    with serving(likes("theirs", ">>")) as service:
        typed(service, "two")
    first, second = (read_eval(tmp_path / "runs" / name) for name in ("one", "two"))
    assert read_json(first.directory / "result.json")["benchmark"] == "arena-hard-v2.0"
    assert [each["verdicts"] for each in read_lines(first.directory / "problems.jsonl")] == [[1.0, 1.0]] * 3
    [accuracy] = compare(first, second).metrics
    assert (accuracy.metric, accuracy.first, accuracy.second) == ("accuracy", 1.0, 0.0)
