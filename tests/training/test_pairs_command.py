"""`strop data pairs`, with a judge that is a real server on this machine."""

import json

import pytest
from typer.testing import CliRunner

from rewards.scorers.chat_service import Answer, said, serving
from strop.cli import app
from strop.errors import ConfigError, TaskError, UserError
from strop.training.preferences import Pair, read_preferences

ROWS = [
    {"prompt": "q", "first": "GOOD", "second": "POOR"},
    {"prompt": "r", "first": "POOR", "second": "GOOD"},
    {"prompt": "dull", "first": "GOOD", "second": "POOR"},
]


def judged(asked, _):
    text = asked.body["messages"][0]["content"]
    strength = ">" if "dull" in text else ">>"
    return said(f"[[A{strength}B]]" if text.index("GOOD") < text.index("POOR") else f"[[B{strength}A]]")


def pairs(directory, service, rows=ROWS, *options, keys=""):
    (directory / "candidates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "judge.toml").write_text(f'service = {{ url = "{service.url}", model = "m"{keys} }}\n')
    words = [directory / "candidates.jsonl", directory / "pairs.jsonl", "--judge", directory / "judge.toml", *options]
    result = CliRunner().invoke(app, ["data", "pairs", *map(str, words)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_it_writes_what_a_reward_model_reads_and_says_what_is_left_out(tmp_path):
    with serving(judged) as service:
        told = pairs(tmp_path, service)
    assert "2 pairs; left out: 0 without a summary, 0 without a verdict, 1 not clear, 0 for equal lengths" in told
    assert list(read_preferences(tmp_path / "pairs.jsonl")) == [
        Pair(prompt="q", chosen="GOOD", rejected="POOR"),
        Pair(prompt="r", chosen="GOOD", rejected="POOR"),
    ]
    assert len(service.asked) <= 3 * 4


def test_a_second_call_asks_the_judge_for_nothing_and_writes_the_same(tmp_path):
    with serving(judged) as service:
        pairs(tmp_path, service)
        first = (tmp_path / "pairs.jsonl").read_bytes()
        num_asked = len(service.asked)
        pairs(tmp_path, service)
    assert len(service.asked) == num_asked
    assert (tmp_path / "pairs.jsonl").read_bytes() == first


def test_what_a_judge_said_before_it_failed_is_kept_and_not_asked_for_again(tmp_path):
    def fails_after_5(asked, number):
        return judged(asked, number) if number < 5 else Answer(body={"error": "no memory"}, status=500)

    keys = ", retries = 0, max_running = 1, temperature = 1.0"
    with serving(fails_after_5) as service, pytest.raises(UserError) as failed:
        pairs(tmp_path, service, keys=keys)
    assert str(failed.value).endswith(
        f"Its replies are stored in {tmp_path}/pairs.jsonl.replies: the same command requests only the others."
    )
    assert not (tmp_path / "pairs.jsonl").exists()
    with serving(judged) as service:
        assert "2 pairs" in pairs(tmp_path, service, keys=keys)
    assert len(service.asked) == 3 * 4 - 5


def test_the_judges_own_cache_stays_the_one(tmp_path):
    with serving(judged) as service:
        pairs(tmp_path, service, keys=f', cache = "{tmp_path}/mine"')
    assert list((tmp_path / "mine").iterdir())
    assert not (tmp_path / "pairs.jsonl.replies").exists()


def test_a_summary_is_what_is_judged_unless_the_whole_response_is_asked_for(tmp_path, caplog):
    rows = [*ROWS, {"prompt": "s", "first": "<reason>POOR?</reason>GOOD", "second": "<reason>GOOD! POOR"}]
    with serving(judged) as service:
        told = pairs(tmp_path, service, rows, "--think-tag", "reason")
        assert "2 pairs; left out: 1 without a summary" in told
        assert "1 of 4 candidates have a response without a summary" in caplog.text
        assert "left out: 0 without a summary" in pairs(tmp_path, service, rows, "--judged-on", "response")
        with pytest.raises(TaskError, match=r"0 pairs; left out: 4 without a summary.*--judged-on response"):
            pairs(tmp_path, service, rows, "--think-tag", "reason", "--prefilled")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "q", "first": "GOOD"}], r"candidates\.jsonl:1: second is missing; the row has first, prompt"),
        ([["GOOD", "POOR"]], r"candidates\.jsonl:1: a JSON list, not an object"),
        ([], "no rows, so there is nothing to judge"),
        ([ROWS[2]], r"0 pairs; left out: .* 1 not clear.*Lower the threshold"),
    ],
)
def test_candidates_of_which_no_pair_can_come_are_an_error_and_no_file(tmp_path, rows, message):
    with serving(judged) as service, pytest.raises(TaskError, match=message):
        pairs(tmp_path, service, rows)
    assert not (tmp_path / "pairs.jsonl").exists()


def test_a_file_that_describes_no_judge_is_named(tmp_path):
    (tmp_path / "judge.toml").write_text("tries = 2\n")
    words = [str(tmp_path / "c.jsonl"), str(tmp_path / "p.jsonl"), "--judge", str(tmp_path / "judge.toml")]
    with pytest.raises(ConfigError, match=r"judge\.toml: .*service"):
        raise CliRunner().invoke(app, ["data", "pairs", *words]).exception


def test_a_tag_with_its_brackets_is_refused_before_anything_is_read():
    words = ["data", "pairs", "none.jsonl", "out.jsonl", "--judge", "none.toml", "--think-tag", "<think>"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "without brackets" in result.output
