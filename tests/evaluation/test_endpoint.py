"""The OpenAI-compatible endpoint: over the embedded engine with a tiny model, and in front of a server that has its own."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx2
import pytest
from aiohttp import web

from engine.servers.fake_vllm import FakeVllm
from engine.support import make_model, make_request
from strop.engine.config import EngineConfig, VllmConfig
from strop.engine.opening import open_engines
from strop.errors import EngineLost
from strop.evaluation.endpoint import EngineEndpoint, ServerEndpoint, serving
from strop.rollout.chat_template import message
from strop.stages.context import load_chat

QUESTION = {"role": "user", "content": "12+30"}


@asynccontextmanager
async def endpoint(run, *, slots=8, seed=1):
    """A client of the endpoint, and what is behind it."""
    model = run.run.stage("base").model
    chat = load_chat(model)
    config = EngineConfig(slots=slots, max_length=256, device="cpu", threads=1)
    [engine] = await open_engines(model, config, detokenize=chat.decode)
    try:
        served = EngineEndpoint("policy", [engine], chat, seed=seed)
        with serving(served):
            base = f"http://127.0.0.1:{served.port}"
            async with httpx2.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:
                yield client, served, engine, chat
    finally:
        await engine.close()


async def ask(client, path="chat/completions", **body):
    body = {"messages": [QUESTION], **body} if path == "chat/completions" else body
    response = await client.post(f"/v1/{path}", json={"model": "anything", "max_tokens": 8, **body})
    return response.status_code, response.json()


def text(answer):
    return [each["message"]["content"] for each in answer["choices"]]


def test_an_answer_is_what_the_engine_samples_from_the_models_own_template(scripted_run):
    async def run():
        async with endpoint(scripted_run) as (client, served, engine, chat):
            status, answer = await ask(client, temperature=0)
            ids = chat.prompt_ids([message("user", QUESTION["content"])])
            request = make_request("direct", ids, max_tokens=8, temperature=0.0, stop_ids=chat.stop_ids)
            completion = await engine.complete(request)
            await engine.release("direct")
            assert status == 200
            assert text(answer) == [chat.tokenizer.decode(list(completion.ids), skip_special_tokens=True)]
            num = len(completion.ids)
            assert answer["usage"] == {"prompt_tokens": len(ids), "completion_tokens": num, "total_tokens": len(ids) + num}
            assert (served.num_requests, served.num_tokens) == (1, num)
            # The same prompt as text and as ids, without the template.
            rendered = chat.decode(ids)
            for prompt in (rendered, [rendered], list(ids), [list(ids)]):
                _, raw = await ask(client, "completions", prompt=prompt, temperature=0)
                assert [each["text"] for each in raw["choices"]] == text(answer), prompt
            models = (await client.get("/v1/models")).json()
            assert [each["id"] for each in models["data"]] == ["policy"]

    asyncio.run(run())


def test_requests_that_come_together_are_sampled_together(scripted_run):
    async def run():
        async with endpoint(scripted_run, slots=16) as (client, _, engine, _):
            body = {"max_tokens": 32}
            before = engine.num_steps
            alone = [await ask(client, seed=at, **body) for at in range(16)]
            num_alone, before = engine.num_steps - before, engine.num_steps
            together = await asyncio.gather(*(ask(client, seed=at, **body) for at in range(16)))
            assert engine.num_steps - before < num_alone / 3
            assert [status for status, _ in alone + together] == [200] * 32

    asyncio.run(run())


def test_equal_requests_get_answers_of_their_own_and_the_same_in_another_run(scripted_run):
    async def texts(others):
        async with endpoint(scripted_run) as (client, _, _, _):
            asked = [ask(client, n=2), *(ask(client, messages=[{"role": "user", "content": each}]) for each in others)]
            first, *_ = await asyncio.gather(*asked)
            _, second = await ask(client)
            return text(first[1]) + text(second)

    one, other = asyncio.run(texts([])), asyncio.run(texts(["1+1", "2+2"]))
    assert one == other
    assert len(set(one)) == 3


def test_an_answer_ends_before_its_stop_string(scripted_run):
    async def run():
        async with endpoint(scripted_run) as (client, _, _, _):
            [whole] = text((await ask(client, temperature=0, max_tokens=24))[1])
            stop = whole[len(whole) // 2]
            _, answer = await ask(client, temperature=0, max_tokens=24, stop=stop)
            assert text(answer) == [whole[: whole.index(stop)]]
            assert answer["choices"][0]["finish_reason"] == "stop"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": 1000}, "Lower max_tokens, or raise engine.max_length"),
        ({"tools": [{"type": "function"}]}, "the embedded engine has no 'tools'"),
        ({"stream": True}, "the embedded engine has no 'stream'"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(scripted_run, body, said):
    async def run():
        async with endpoint(scripted_run) as (client, served, _, _):
            status, answer = await ask(client, **body)
            assert status == 400
            assert said in answer["error"]["message"]
            assert (served.num_refused, served.first_refusal) == (1, answer["error"]["message"])
            assert (await ask(client))[0] == 200  # the engine serves on

    asyncio.run(run())


def test_a_body_that_is_no_json_and_an_unknown_page_are_refused(scripted_run):
    async def run():
        async with endpoint(scripted_run) as (client, _, _, _):
            assert (await client.post("/v1/completions", content=b"{")).status_code == 400
            assert (await client.post("/v1/embeddings", json={})).status_code == 404
            assert (await client.get("/metrics")).status_code == 404

    asyncio.run(run())


def test_a_lost_engine_is_known_to_the_caller_and_to_the_client(scripted_run):
    async def run():
        async with endpoint(scripted_run) as (client, served, engine, _):

            async def complete(request):
                raise EngineLost("gone")

            engine.complete = complete
            status, _ = await ask(client)
            assert status == 500
            with pytest.raises(EngineLost, match="gone"):
                await served.lost

    asyncio.run(run())


class ChatVllm(FakeVllm):
    """With the chat route of vLLM: it repeats what it was asked."""

    @asynccontextmanager
    async def serve(self):
        self.asked = []
        async with super().serve() as address:
            yield address

    def add_routes(self, router):
        super().add_routes(router)
        router.add_get("/v1/models", self._models)
        router.add_post("/v1/chat/completions", self._chat)

    async def _models(self, _):
        return web.json_response({"data": [{"id": "/models/served"}]})

    async def _chat(self, request):
        body = await request.json()
        self.asked.append(body)
        if body["model"] != "/models/served":
            return web.json_response({"message": "no such model"}, status=404)
        choices = [{"message": {"content": json.dumps(body["tools"])}}]
        return web.json_response({"choices": choices, "usage": {"completion_tokens": 3}})


def test_a_server_answers_itself_whatever_it_is_asked(scripted_run, tmp_path):
    """All of its keys reach it, under the name of its model, with the ids that end a turn."""
    chat = load_chat(scripted_run.run.stage("base").model)

    async def run():
        server = ChatVllm()
        make_model("llama").save_pretrained(tmp_path)
        async with server.serve() as address:
            config = VllmConfig(addresses=(address,), max_length=100)
            engines = await open_engines(tmp_path, config, detokenize=None)
            try:
                served = ServerEndpoint("policy", engines, chat)
                with serving(served):
                    base = f"http://127.0.0.1:{served.port}"
                    async with httpx2.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:
                        status, answer = await ask(client, tools=[{"name": "search"}])
                        streamed, _ = await ask(client, stream=True)
            finally:
                await engines[0].close()
        assert (status, streamed) == (200, 400)
        assert json.loads(text(answer)[0]) == [{"name": "search"}]
        assert served.num_tokens == 3
        [asked] = server.asked
        assert asked["stop_token_ids"] == sorted(chat.stop_ids)
        assert (asked["max_tokens"], asked["messages"]) == (8, [QUESTION])

    asyncio.run(run())
