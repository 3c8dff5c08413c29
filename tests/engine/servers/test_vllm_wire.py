"""Our side of vLLM's wire, against answers as vLLM 0.32 gives them."""

import copy
import math
from pathlib import Path

import pytest

from strop.engine.config import VllmConfig
from strop.engine.model_directory import ModelFacts
from strop.engine.protocol import Entropies, Truncation
from strop.engine.servers import vllm
from strop.engine.servers.server import completion_of
from strop.engine.servers.vllm import parse_memory
from strop.errors import EngineLost
from strop.types import FinishReason

from ..support import make_model, make_request

ANSWER = {
    "request_id": "generate-tokens-1",
    "model": "policy",
    "usage": {
        "prompt_tokens": 70,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 64, "created_cache_tokens": None},
    },
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": 9,
            "token_ids": [45, 9],
            "weight_versions": [{"version": "strop 1 7 abc", "start": 0, "end": 2}],
            "logprobs": {
                "content": [{"token_id": 45, "logprob": -1.5, "rank": 1}, {"token_id": 9, "logprob": 2e-6, "rank": 1}]
            },
        }
    ],
}
_MEMORY = 'vllm:cache_config_info{{block_size="32",engine="0",num_gpu_blocks="{}"}} 1.0\n'
REQUEST = make_request("a", range(66), max_tokens=8, stop_ids=frozenset({9}))


def _answer(**changes):
    body = copy.deepcopy(ANSWER)
    body["choices"][0] |= changes
    return vllm.parse_answer(body, server="the server")


def _completion(answer, request=REQUEST):
    return completion_of(answer, request, server="the server", vocab_size=67, spans=tuple((7, num) for _, num in answer.spans))


def test_an_answer_becomes_a_completion_whose_last_id_is_the_stop_id():
    answer = _answer()
    assert answer.spans == [("strop 1 7 abc", 2)]
    completion = _completion(answer)
    assert completion.ids == (45, 9)
    assert completion.logprobs == (-1.5, 0.0)  # rounding above 0 is cut off
    assert completion.finish_reason is FinishReason.STOP
    assert (completion.cached_tokens, completion.policy_version, completion.entropies) == (64, 7, ())


def test_a_completion_that_was_sampled_from_two_versions_bears_both():
    spans = [{"version": "old", "start": 0, "end": 1}, {"version": "new", "start": 1, "end": 2}]
    assert _answer(weight_versions=spans).spans == [("old", 1), ("new", 1)]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"logprobs": {"content": [{"logprob": -1.0}]}}, "2 ids and 1 logprobs"),
        ({"logprobs": {"content": [{"logprob": -9999.0}, {"logprob": -1.0}]}}, "log-prob -inf at position 0"),
        ({"logprobs": None}, "at choices.0.logprobs of"),
        ({"logprobs": {"content": None}}, "at choices.0.logprobs.content of"),
        ({"logprobs": {"content": [{"logprob": None}, {"logprob": -1.0}]}}, "at choices.0.logprobs.content.0.logprob of"),
        ({"logprobs": {"content": [{"logprob": "-1"}, {"logprob": -1.0}]}}, "at choices.0.logprobs.content.0.logprob of"),
        ({"logprobs": {"content": [{"logprob": True}, {"logprob": -1.0}]}}, "at choices.0.logprobs.content.0.logprob of"),
        ({"token_ids": None}, "at choices.0.token_ids of"),
        ({"token_ids": [None, 9]}, "at choices.0.token_ids.0 of"),
        ({"token_ids": ["45", 9]}, "at choices.0.token_ids.0 of"),
        ({"token_ids": [[45], 9]}, "at choices.0.token_ids.0 of"),
        ({"token_ids": [1.5, 9]}, "at choices.0.token_ids.0 of"),
        ({"token_ids": [45.0, 9]}, "at choices.0.token_ids.0 of"),
        ({"weight_versions": 3}, "at choices.0.weight_versions of"),
        ({"weight_versions": None}, "at choices.0.weight_versions of"),
        ({"weight_versions": []}, "2 ids, and spans of 0 tokens"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 1}]}, "2 ids, and spans of 1 tokens"),
        ({"finish_reason": ["stop"]}, "at choices.0.finish_reason of"),
        ({"token_ids": [67, 9]}, r"outside the vocabulary 0\.\.66: 67"),
        ({"token_ids": [9, 9]}, "goes on after stop id 9"),
        ({"token_ids": [45, 46], "finish_reason": "stop"}, "was stopped, but ends with id 46"),
        ({"token_ids": [45, 46], "finish_reason": "length"}, "2 of 8 tokens"),
        ({"finish_reason": "abort"}, "'abort': somebody aborted it"),
    ],
)
def test_garbage_is_named_with_the_server(changes, match):
    with pytest.raises(EngineLost, match=rf"the server.*{match}"):
        _completion(_answer(**changes))


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "choices",
        {"choices": []},
        {"choices": {}},
        ANSWER | {"usage": {"prompt_tokens_details": {"cached_tokens": "many"}}},
        ANSWER | {"usage": 3},
    ],
)
def test_what_is_no_answer_at_all_is_garbage(body):
    with pytest.raises(EngineLost, match="the server answered with garbage: "):
        vllm.parse_answer(body, server="the server")


def test_nothing_is_cached_where_the_details_are_left_out():
    for usage in (None, {}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {"cached_tokens": None}}):
        assert vllm.parse_answer(ANSWER | {"usage": usage}, server="the server").cached_tokens == 0


@pytest.mark.parametrize("metrics", ["", 'vllm:cache_config_info{block_size="32"} 1.0\n', _MEMORY.format("None")])
def test_a_server_that_does_not_tell_its_memory_is_named(metrics):
    with pytest.raises(EngineLost, match="the server does not tell its KV memory"):
        parse_memory(metrics, server="the server")
    assert parse_memory(_MEMORY.format("22"), server="the server") == (22, 32)


def test_every_field_of_a_request_is_put_into_its_words():
    request = make_request(
        "a", [1, 2], temperature=0.7, seed=-1, max_tokens=9, min_tokens=2, stop_ids=frozenset({7, 3}), stop_strings=("x",)
    )
    body = vllm.to_body(request)
    assert body["token_ids"] == [1, 2]
    params = body["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (0.7, 1.0, 0, 0.0)
    assert (params["max_tokens"], params["min_tokens"], params["stop_token_ids"]) == (9, 2, [3, 7])
    assert (params["stop"], params["detokenize"], params["ignore_eos"], params["logprobs"]) == (["x"], True, True, 0)
    assert params["seed"] == 2**63 - 1  # it takes no more bits
    assert vllm.to_body(make_request("b", [1]))["sampling_params"]["detokenize"] is False


def test_a_request_asks_for_likely_tokens_and_limits_where_it_needs_them():
    limits = Truncation(top_p=0.95, top_k=20, repetition_penalty=1.1)
    params = vllm.to_body(make_request("a", [1], entropies=Entropies.TOP10, truncation=limits))["sampling_params"]
    assert (params["top_p"], params["top_k"], params["min_p"], params["repetition_penalty"]) == (0.95, 20, 0.0, 1.1)
    assert params["logprobs"] == 11


def test_likely_tokens_become_entropies():
    # The sampled token, which is not among the ten likeliest, and those: 0.08 each.
    top = [{"token_id": 66, "logprob": -5.0}, *({"token_id": each, "logprob": math.log(0.08)} for each in range(10))]
    content = [{"token_id": 45, "logprob": -5.0, "top_logprobs": top}, {"token_id": 9, "logprob": 0.0, "top_logprobs": top}]
    request = make_request("a", range(66), max_tokens=8, stop_ids=frozenset({9}), entropies=Entropies.TOP10)
    completion = _completion(_answer(logprobs={"content": content}), request)
    assert completion.entropies == pytest.approx((-10 * 0.08 * math.log(0.08),) * 2)
    sampled_only = [each | {"top_logprobs": top[:1]} for each in content]  # what it sends if no others are asked for
    assert _completion(_answer(logprobs={"content": sampled_only})).entropies == ()


def test_the_command_line_and_kv_memory_follow_from_the_config_and_the_model(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    model = ModelFacts.of(tmp_path)
    config = VllmConfig(python=Path("/env/bin/python"), slots=3, max_length=100, dtype="bfloat16")
    words = vllm.command_line(model, config, Path("/socket folder"))
    for pair in (
        ("--logprobs-mode", "processed_logprobs"),
        ("--generation-config", "/socket folder"),
        ("--load-format", "dummy"),
        ("--max-model-len", "100"),
        ("--max-num-seqs", "3"),
        ("--max-logprobs", "21"),
    ):
        assert words[words.index(pair[0]) + 1] == pair[1]
    assert "--enable-sleep-mode" not in words
    sleeping = vllm.command_line(model, config.model_copy(update={"sleep": True}), Path("/socket folder"))
    assert "--enable-sleep-mode" in sleeping
    assert float(sleeping[sleeping.index("--gpu-memory-utilization") + 1]) < 0.1  # most of it may be the trainer's
    # 3 slots of 4 blocks and one to keep them in use, and one block; keys and values of 2 layers of 2 heads of 32, 2 bytes each
    assert vllm.kv_bytes(model, config) == 16 * 32 * (2 * 2 * 2 * 32) * 2
    assert vllm.kv_bytes(model, config.model_copy(update={"kv_mib": 3})) == 3 << 20


def test_a_server_sees_the_devices_of_its_replica_and_no_module_of_ours(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    config = VllmConfig(
        python=Path("/env/bin/python"), replicas=2, tensor_parallel=2, devices=(4, 5, 6, 7), environment={"A": "b"}
    )
    seen = vllm.environment(config.only(1))
    assert seen["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert seen["A"] == "b"
    assert seen["VLLM_SERVER_DEV_MODE"] == "1"
    assert sorted(path.name for path in Path(seen["PYTHONPATH"]).glob("[!_]*.py")) == [
        "strop_vllm_worker.py",
        "strop_weights_proof.py",
    ]


def test_nan_is_no_number_of_vllms():
    assert _answer(logprobs={"content": [{"logprob": -9999.0}]}).logprobs == [-math.inf]
