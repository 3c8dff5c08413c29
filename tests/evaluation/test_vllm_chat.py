"""Chat client, judge, preference pairs and Arena-Hard with a real server: SmolLM2 behind vLLM. Run by `make test-vllm`."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rewards.scorers.vllm_service import start_vllm
from strop.chat_client import ChatClient, ChatServiceConfig, Reply
from strop.http import ServiceRefused
from strop.rewards.judge import JudgeConfig, ModelJudge
from strop.run_directory import read_lines
from strop.training.pair_making import PairMaking, read_candidates

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
MODEL = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m"
SERVED, MAX_LENGTH = "smollm2", 1024

# SmolLM2 follows no description of verdicts; what it said in turns before it says again. vLLM reads these tags as such.
_TURN = "<|im_end|>\n<|im_start|>assistant\n[[A>>B]]<|im_end|>\n<|im_start|>user\n"
FOLLOWED = f"Judge: cat or dog?{_TURN}Judge: tea or milk?{_TURN}Judge: $a or $b?"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = {
        "--served-model-name": SERVED,
        "--dtype": "bfloat16",
        "--max-model-len": MAX_LENGTH,
        "--max-num-seqs": 8,
        "--kv-cache-memory-bytes": 256 << 20,
    }
    with asyncio.Runner() as runner:
        server = runner.run(start_vllm(MODEL, tmp_path_factory.mktemp("served"), options))
        yield server
        runner.run(server.close())


def config(server, **keys):
    return ChatServiceConfig(**{"url": f"{server.address}/v1", "model": SERVED, "max_tokens": 16, "timeout_s": 300.0} | keys)


def ask(config, *contents, draw=0):
    """The replies, one after the other, and how many of them came from the service."""

    async def run():
        client = ChatClient(config)
        try:
            replies = [await client.reply([{"role": "user", "content": each}], draw=draw) for each in contents]
        finally:
            await client.close()
        return replies, client.num_asked

    return asyncio.run(run())


def put(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def toml(path, **tables):
    """Keys, and tables of keys."""
    flat = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in flat.items()]
    for name, table in tables.items():
        if name not in flat:
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def begin(*words):
    """`strop ...`, as a person's shell starts it."""
    argv = [sys.executable, "-m", "strop.cli", *map(str, words)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def strop(*words):
    """(status, stdout, stderr) of it."""
    running = begin(*words)
    out, err = running.communicate(timeout=800)
    return running.returncode, out, err


def error_of(err):
    """The one line that tells what ended the program; warnings may stand before it."""
    lines = err.strip().splitlines()
    assert "Traceback" not in err
    [at] = [place for place, line in enumerate(lines) if line.startswith("error: ")]
    return " ".join(lines[at:])


def kept_in(cache):
    """What a cache holds, by file."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(cache.glob("*/*.json"))}


def test_a_reply_ends_where_it_must(server):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    asked = "Write a story about a river."
    [cut], num_asked = ask(config(server, max_tokens=5), asked)
    assert num_asked == 1
    assert cut.finish_reason == "length"
    assert len(tokenizer.encode(cut.text)) == 5
    [whole], _ = ask(config(server, max_tokens=60), "Hi")
    assert whole.finish_reason == "stop"


def test_a_draw_is_one_reply_in_every_run_and_another_draw_is_another(server):
    hot = config(server, temperature=1.0)
    first, again, other = (ask(hot, "Tell me something.", draw=draw)[0][0] for draw in (0, 0, 1))
    assert first == again
    assert first.text != other.text


def test_what_the_server_said_once_is_on_disk_and_it_is_not_asked_again(server, tmp_path):
    kept = config(server, cache=str(tmp_path / "cache"))
    before = server.num_requests()
    replies, num_asked = ask(kept, "Hi", "Name a colour.")
    assert (num_asked, server.num_requests() - before) == (2, 2)
    moved = kept.model_copy(update={"url": f"{server.address.replace('127.0.0.1', 'localhost')}/v1/"})
    assert ask(moved, "Hi", "Name a colour.", "Hi") == ([*replies, replies[0]], 0)
    assert server.num_requests() - before == 2
    assert ask(kept.model_copy(update={"max_tokens": 3}), "Hi")[1] == 1  # another question


def test_what_the_server_refuses_is_told_as_it_is(server):
    with pytest.raises(
        ServiceRefused, match=r"answered 400: .*maximum context length is 1024 .*Is the request too long"
    ) as told:
        ask(config(server), "word " * (2 * MAX_LENGTH))
    assert told.value.is_of_what_was_asked
    with pytest.raises(ServiceRefused, match=r"answered 404: .*does it serve a model called 'another'\?") as told:
        ask(config(server, model="another"), "Hi")
    assert not told.value.is_of_what_was_asked


def test_a_pair_that_is_too_long_for_the_judge_has_no_verdict_and_the_others_have(server):
    async def compare():
        judge = ModelJudge(JudgeConfig(service=config(server), pair_prompt=FOLLOWED))
        try:
            pairs = [("Red.", "I do not know."), ("word " * (2 * MAX_LENGTH), "Blue."), ("It is 12.", "seven")]
            return await asyncio.gather(*(judge.compare_as_shown("Which?", a, b) for a, b in pairs))
        finally:
            await judge.close()

    assert asyncio.run(compare()) == [2.0, None, 2.0]


CANDIDATES = [{"prompt": f"What is {n} + {n}?", "first": f"It is {2 * n}.", "second": "I do not know."} for n in range(12)]


class AlwaysTheFirst:
    """What the served model says to `FOLLOWED`, without it."""

    async def reply(self, messages, *, draw=0):
        return Reply(text="[[A>>B]]", finish_reason="stop")


def test_pairs_outlive_a_judge_that_talks_nonsense_and_one_that_takes_too_long(server, tmp_path):
    candidates, out = put(tmp_path / "candidates.jsonl", CANDIDATES), tmp_path / "pairs.jsonl"
    service = {"url": f"{server.address}/v1", "model": SERVED, "max_tokens": 12, "timeout_s": 300.0}
    words = ("data", "pairs", candidates, out, "--judge", tmp_path / "judge.toml", "--judged-on", "response")

    toml(tmp_path / "judge.toml", tries=1, service=service)
    status, _, err = strop(*words)
    assert status == 2
    assert re.search("8 responses in a row were not judged.* gave no verdict in 1 reply; the last reply", error_of(err))
    assert not out.exists()
    nonsense = kept_in(tmp_path / "pairs.jsonl.replies")

    put(candidates, CANDIDATES[:2])
    toml(tmp_path / "judge.toml", pair_prompt=FOLLOWED, service=service)
    before = server.num_requests()
    strop(*words, "--threshold", 0)
    two = kept_in(tmp_path / "pairs.jsonl.replies")
    assert nonsense.items() <= two.items()
    assert len(two) - len(nonsense) == server.num_requests() - before

    put(candidates, CANDIDATES)
    toml(tmp_path / "judge.toml", pair_prompt=FOLLOWED, service=service | {"timeout_s": 0.02, "retries": 1})
    status, _, err = strop(*words, "--threshold", 0)
    assert status == 2
    told = error_of(err)
    assert "gave no answer within timeout_s = 0.02; that was the last of 2 tries." in told
    assert f"Its replies are stored in {tmp_path / 'pairs.jsonl.replies'}: the same command requests only the others." in told
    assert kept_in(tmp_path / "pairs.jsonl.replies") == two

    toml(tmp_path / "judge.toml", pair_prompt=FOLLOWED, service=service)
    status, said, err = strop(*words, "--threshold", 0)
    assert status == 0, err
    assert two.items() <= kept_in(tmp_path / "pairs.jsonl.replies").items()
    expected = asyncio.run(
        PairMaking(judged_on="response", threshold=0).make(
            ModelJudge(JudgeConfig(service=config(server)), AlwaysTheFirst()), read_candidates(candidates)
        )
    )
    assert len(expected.pairs) == 2  # whom the order favours by chance, of either length
    assert [(row["chosen"], row["rejected"]) for row in read_lines(out)] == [(p.chosen, p.rejected) for p in expected.pairs]
    assert expected.summary in said
