"""The service over HTTP, as a client sees it that knows nothing of strop: each call its answer, each mistake its words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter

import aiohttp
import pytest
from links import until
from openapi_spec_validator import OpenAPIV31SpecValidator
from prometheus_client.parser import text_string_to_metric_families
from services import answers_by_key, asking, echo, run_lines, scripted, serving

from scripted_node import ScriptedNode
from strop.sandbox import protocol as limits
from strop.sandbox.protocol import RunRequest, RunResult, SessionLimits
from strop.sandbox.server import run_stream
from strop.sandbox.server.dispatcher import DispatchConfig
from strop.sandbox.server.ndjson import TooLong

TOKEN = "correct horse battery"


def test_one_program_is_one_request_and_one_answer() -> None:
    async def play() -> None:
        async with serving(scripted()) as server, asking(server) as http:
            async with http.post("/v1/run", data=b'{"code": "print(1)"}') as response:
                assert response.status == 200
                assert response.content_type == "application/json"
                result = await response.json()
            assert (result["outcome"], result["text"], result["level"], result["node"]) == (
                "stdout",
                "ran print(1)",
                "namespaces",
                "n",
            )

    asyncio.run(play())


def test_a_batch_of_every_kind_of_call_keeps_its_keys() -> None:
    async def play() -> None:
        async with serving(scripted(latency_s=0.05)) as server, asking(server) as http:
            body = run_lines(
                *((number, {"code": f"call {number}", "seed": number}) for number in range(60)),
                ("long code", {"code": "x" * 300_000}),
                ("long input", {"code": "x", "stdin": "y" * 8_000_001}),
                ("misspelled", {"code": "x", "wal_s": 1.0}),
                ("wrong type", {"code": "x", "wall_s": "1"}),
                ("no code", {"stdin": "x"}),
                ("never", {"code": "x", "wall_s": 1e300}),
                ("lost", {"code": "x", "session": "gone"}),
            )
            body += b'{"key": "surrogate", "request": {"code": "\\ud800"}}\n\n  \n[1, 2]\n'
            async with http.post("/v1/runs", data=body) as response:
                assert response.content_type == "application/x-ndjson"
                answers = answers_by_key(await response.read())
            assert [answers.pop(number)["result"]["text"] for number in range(60)] == [
                f"ran call {number}" for number in range(60)
            ]
            assert answers.pop("lost")["error"]["kind"] == "session_lost"
            assert {answer["result"]["outcome"] for answer in answers.values()} == {"rejected"}
            assert {key: answer["result"]["reason"].split(": ", 1)[-1] for key, answer in answers.items()} == {
                "long code": "the code has more than 262144 bytes, which is the limit",
                "long input": "the input has more than 8000000 bytes, which is the limit",
                "misspelled": "request.wal_s: Unexpected keyword argument",
                "wrong type": "request.wall_s: Input should be a valid number",
                "no code": "request.code: Field required",
                "never": "wall_s is 1e+300; it has to be above 0 and at most 600",
                "surrogate": answers["surrogate"]["result"]["reason"].split(": ", 1)[-1],
                None: answers[None]["result"]["reason"].split(": ", 1)[-1],
            }
            assert "Invalid JSON" in answers["surrogate"]["result"]["reason"]

    asyncio.run(play())


class OneHangs(ScriptedNode):
    async def run(self, request: RunRequest) -> RunResult:
        if request.code == "7":
            await asyncio.sleep(60)
        return await super().run(request)


def test_results_are_streamed_as_each_call_ends() -> None:
    """One that takes a minute holds up none of the others (nor does the end of the request: it has none yet)."""

    async def play() -> None:
        async with serving(OneHangs(answer=echo, num_slots=8)) as server, asking(server) as http:
            more = asyncio.Event()

            async def body():
                yield run_lines(*((number, {"code": str(number), "seed": number}) for number in range(20)))
                await more.wait()

            async with http.post("/v1/runs", data=body()) as response:
                seen = b""
                while seen.count(b"}}") < 19:
                    seen += await asyncio.wait_for(response.content.readany(), 2)
                assert sorted(answers_by_key(seen)) == [number for number in range(20) if number != 7]

    asyncio.run(play())


def test_a_line_that_is_too_long_is_rejected_by_its_key_and_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        monkeypatch.setattr(limits, "MAX_CODE_BYTES", 1000)
        monkeypatch.setattr(limits, "MAX_STDIN_BYTES", 1000)  # so a line may have 77 536 bytes
        async with serving(scripted()) as server, asking(server) as http:
            body = run_lines(("huge", {"code": "x" * 20_000_000}), ("next", {"code": "x"}))
            async with http.post("/v1/runs", data=body) as response:
                answers = answers_by_key(await response.read())
            assert "more than 77536 bytes" in answers["huge"]["result"]["reason"]
            assert answers["next"]["result"]["text"] == "ran x"

    asyncio.run(play())


def test_who_asks_for_it_is_told_that_a_node_has_taken_a_call_which_takes_its_time() -> None:
    async def play() -> None:
        node = scripted(slots=1, latency_s=600)
        async with serving(node) as server, asking(server, **{"X-Strop-Starts": "1"}) as http:
            body = run_lines(*((n, {"code": str(n), "id": str(n)}) for n in range(2)))
            async with http.post("/v1/runs", data=body) as response, asyncio.timeout(20):
                assert await next_line(response) == {"key": 0, "started": True}
                assert [request.code for request in node.requests] == ["0"]  # the other is still queued
                await http.post("/v1/cancel", json={"ids": ["0"]})
                cancelled = await next_line(response)
                assert (cancelled["key"], "was cancelled by its id" in str(cancelled)) == (0, True)
                assert await next_line(response) == {"key": 1, "started": True}
                await http.post("/v1/cancel", json={"ids": ["1"]})
                assert "was cancelled by its id" in str(await next_line(response))
                assert await response.content.read() == b""  # nothing is open any more: the stream ends

    asyncio.run(play())


async def next_line(response: aiohttp.ClientResponse) -> object:
    while not (line := (await response.content.readline()).strip()):
        pass
    return json.loads(line)


def test_clients_take_turns() -> None:
    async def play() -> None:
        async with serving(scripted(slots=1, latency_s=0.02)) as server, asking(server) as many:
            flood = asyncio.create_task(read(many, run_lines(*((n, {"code": str(n), "seed": n}) for n in range(2000)))))
            await until(lambda: server.dispatcher.admission.held.num > 1900)
            started_at = time.monotonic()
            async with many.post("/v1/run", data=b'{"code": "x"}', headers={"X-Strop-Client": "another"}) as response:
                assert response.status == 200
            assert time.monotonic() - started_at < 0.5
            flood.cancel()

    asyncio.run(play())


async def read(http: aiohttp.ClientSession, body: bytes) -> dict[object, dict[str, object]]:
    async with http.post("/v1/runs", data=body) as response:
        return answers_by_key(await response.read())


def test_calls_of_a_connection_that_goes_away_are_cancelled_those_with_an_id_a_little_later() -> None:
    async def play() -> None:
        node = scripted(slots=4, latency_s=60)
        async with serving(node, dispatch=DispatchConfig(linger_s=0.5)) as server, asking(server) as http:
            calls = [(n, {"code": str(n), "seed": n} | ({"id": f"i{n}"} if n < 2 else {})) for n in range(10)]
            streaming = asyncio.create_task(read(http, run_lines(*calls)))
            single = asyncio.create_task(http.post("/v1/run", data=b'{"code": "single"}'))
            await until(lambda: server.dispatcher.admission.held.num == 11)
            started_at = time.monotonic()
            streaming.cancel()
            single.cancel()
            await until(lambda: server.dispatcher.admission.held.num == 2)
            assert time.monotonic() - started_at < 0.4
            await until(lambda: server.dispatcher.admission.held.num == 0)
            await until(lambda: node.num_in_flight == 0)
            assert time.monotonic() - started_at > 0.4

    asyncio.run(play())


def test_a_request_that_comes_again_with_its_id_gets_the_same_answer_from_the_same_run() -> None:
    async def play() -> None:
        node = scripted(latency_s=0.05)
        async with serving(node) as server, asking(server) as http:
            body = b'{"code": "x", "id": "7"}'
            first, second = await asyncio.gather(http.post("/v1/run", data=body), http.post("/v1/run", data=body))
            third = await http.post("/v1/run", data=body)
            assert await first.read() == await second.read() == await third.read()
            assert len(node.requests) == 1

    asyncio.run(play())


def test_calls_are_ended_by_their_ids() -> None:
    async def play() -> None:
        node = scripted(latency_s=60)
        async with serving(node) as server, asking(server) as http:
            streaming = asyncio.create_task(
                read(http, run_lines(*((n, {"code": str(n), "seed": n, "id": str(n)}) for n in range(3))))
            )
            await until(lambda: node.num_in_flight == 3)
            async with http.post("/v1/cancel", json={"ids": ["0", "2", "unknown"]}) as response:
                assert await response.json() == {"num_cancelled": 2}
            await until(lambda: node.num_in_flight == 1)
            streaming.cancel()

    asyncio.run(play())


def test_verdicts_are_streamed_and_a_refusal_is_a_status() -> None:
    async def play() -> None:
        async with (
            serving(scripted(latency_s=0.005), dispatch=DispatchConfig(max_held=2, client_share=1.0)) as server,
            asking(server) as http,
        ):
            pairs = [{"gold": str(n), "answer": str(n % 2)} for n in range(40)]
            async with http.post("/v1/verify", json={"pairs": pairs}) as response:
                verdicts = [json.loads(line) for line in (await response.read()).splitlines() if line]
            assert sorted(verdict["index"] for verdict in verdicts) == list(range(40))
            assert {verdict["index"] for verdict in verdicts if verdict["verdict"] == "equal"} == {0, 1}
            async with http.post("/v1/verify", json={"pairs": []}) as response:
                assert (response.status, (await response.read()).strip()) == (200, b"")
            async with http.post("/v1/verify", json={"pairs": pairs * 3}) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"

    asyncio.run(play())


def test_a_program_is_tested_against_what_it_must_print() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=lambda request: f"{int(request.stdin) * 2}\n")
        async with serving(node) as server, asking(server) as http:
            tests = [{"stdin": "1", "expected": "2"}, {"stdin": "2", "expected": "5"}, {"stdin": "3", "expected": "6"}]
            async with http.post("/v1/tests", json={"code": "x", "tests": tests}) as response:
                report = await response.json()
            assert [case["outcome"] for case in report["cases"]] == ["passed", "wrong_output", "not_run"]

    asyncio.run(play())


def test_a_session_lives_from_its_opening_to_its_close() -> None:
    async def play() -> None:
        node = scripted()
        async with serving(node) as server, asking(server) as http:
            session = (await (await http.post("/v1/sessions", json={"lease_s": 60})).json())["session"]
            await http.post("/v1/run", json={"code": "a = 1", "session": session})
            fork = (await (await http.post(f"/v1/sessions/{session}/fork")).json())["session"]
            await http.post("/v1/run", json={"code": "a = 2", "session": fork})
            assert [[cell.code for cell in cells] for cells in node.cells.values()] == [["a = 1"], ["a = 1", "a = 2"]]
            for _ in range(2):
                assert (await http.delete(f"/v1/sessions/{session}")).status == 200
            assert (await http.post("/v1/run", json={"code": "a", "session": session})).status == 410

    asyncio.run(play())


def test_a_session_that_is_opened_with_an_empty_body_has_the_default_limits() -> None:
    async def play() -> None:
        async with serving(scripted()) as server, asking(server) as http:
            async with http.post("/v1/sessions") as response:
                assert response.status == 200
                session = (await response.json())["session"]
            assert server.dispatcher.box._sessions[session].limits == SessionLimits()

    asyncio.run(play())


def test_metrics_count_what_happened() -> None:
    async def play() -> None:
        async with serving(scripted("a", slots=7)) as server, asking(server) as http:
            await read(http, run_lines(("good", {"code": "x"}), ("bad", {"code": "\0"})))
            async with http.get("/metrics") as response:
                families = {family.name: family for family in text_string_to_metric_families((await response.read()).decode())}
            calls = {sample.labels["outcome"]: sample.value for sample in families["strop_sandbox_calls"].samples}
            assert (calls["stdout"], calls["rejected"], calls["timeout"]) == (1, 1, 0)
            assert families["strop_sandbox_node_slots"].samples[0].value == 7
            queue = {sample.name: sample.value for sample in families["strop_sandbox_queue_seconds"].samples}
            assert queue["strop_sandbox_queue_seconds_count"] == 1

    asyncio.run(play())


def test_the_description_is_legal_openapi_and_names_every_route() -> None:
    async def play() -> None:
        async with serving(scripted()) as server, asking(server) as http:
            async with http.get("/openapi.json") as response:
                described = await response.json()
            OpenAPIV31SpecValidator(described).validate()
            answers = described["paths"]["/v1/run"]["post"]["responses"]
            assert answers["410"]["description"] == "The session is lost; `error.message` says why."
            assert "try again a little later" in answers["503"]["description"]
            routes = {
                (route.resource.canonical, route.method.lower())
                for route in server.http.app.router.routes()
                if route.method != "HEAD"
            }
            assert routes == {(path, method) for path, operations in described["paths"].items() for method in operations}
            schemas = described["components"]["schemas"]
            assert set(schemas["RunRequest"]["properties"]) == set(RunRequest.__dataclass_fields__)
            assert schemas["RunRequest"]["required"] == ["code"]
            assert "overloaded" in schemas["RunOutcome"]["enum"]

    asyncio.run(play())


def test_one_stream_holds_a_bounded_number_of_calls_and_takes_the_rest_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stream, "MAX_OPEN", 300)

    async def play() -> None:
        async with serving(scripted(slots=100, latency_s=0.05)) as server, asking(server) as http:
            num = 3000
            reading = asyncio.create_task(
                read(http, run_lines(*((n, {"code": str(n), "seed": n, "stdin": "x" * 1000}) for n in range(num))))
            )
            most = 0
            while not reading.done():
                most = max(most, server.dispatcher.admission.held.num)
                await asyncio.sleep(0.01)
            answers = await reading
            assert 300 <= most < 2900
            assert all(answers[n]["result"]["text"] == f"ran {n}" for n in range(num))

    asyncio.run(play())


def test_other_clients_have_their_turn_while_the_lines_of_one_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read_in, turn = Counter[int](), 0

    def take(stream: run_stream.RunStream, line: bytes | TooLong) -> None:
        read_in[turn] += 1
        take_line(stream, line)

    take_line = run_stream.RunStream._take
    monkeypatch.setattr(run_stream.RunStream, "_take", take)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def play() -> None:
        async with serving(scripted(slots=100)) as server, asking(server) as http:
            counting = asyncio.create_task(count_turns())
            await read(http, run_lines(*((n, {"code": str(n)}) for n in range(3000))))
            counting.cancel()

    asyncio.run(play())
    assert sum(read_in.values()) >= 3000
    assert max(read_in.values()) <= 64


def test_a_client_that_reads_nothing_holds_up_nobody_else() -> None:
    async def play() -> None:
        node = ScriptedNode(answer=lambda request: "x" * 100_000, num_slots=8, max_latency_s=0.01)
        async with serving(node) as server, asking(server) as http:
            reader, writer = await asyncio.open_connection(server.config.host, server.port)
            body = run_lines(*((n, {"code": "x" * 2000}) for n in range(2000)))
            writer.write(b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await asyncio.sleep(0.3)
            for _ in range(20):
                async with http.post("/v1/run", data=b'{"code": "y"}') as response:
                    assert response.status == 200
            writer.close()
            await until(lambda: server.dispatcher.admission.held.num == 0)
            assert reader

    asyncio.run(play())


def test_a_client_that_leaves_too_much_unread_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stream, "MAX_UNREAD_BYTES", 4_000_000)

    async def play() -> None:
        node = ScriptedNode(answer=lambda request: "x" * 100_000, num_slots=8, max_latency_s=0.01)
        async with serving(node) as server:
            reader, writer = await asyncio.open_connection(server.config.host, server.port)
            body = run_lines(*((n, {"code": "x"}) for n in range(1000)))
            writer.write(b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: server.dispatcher.tally.num_cancelled > 0)
            await until(lambda: server.dispatcher.admission.held.num == 0)
            with contextlib.suppress(ConnectionResetError):  # or the end: as the kernel sees it
                assert len(await reader.read()) < 50_000_000
            writer.close()

    asyncio.run(play())
