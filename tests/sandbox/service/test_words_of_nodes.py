"""What a node tells the people who run it: on its stderr, in the log, before it joins."""

from __future__ import annotations

import asyncio
import logging

import pytest
from links import until
from services import scripted, serving

from strop.errors import UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.node.__main__ import join_front
from strop.sandbox.node.node import Node
from strop.sandbox.service.node_end import serve_node
from strop.sandbox.service.spawn import log_line

TOKEN = "correct horse battery"


@pytest.mark.parametrize(
    ("said", "level", "logged"),
    [
        ("WARNING programs run at level L1", logging.WARNING, "node n: programs run at level L1"),
        ("INFO all is well", logging.INFO, "node n: all is well"),
        ("Traceback (most recent call last):", logging.WARNING, "node n: Traceback (most recent call last):"),
    ],
)
def test_a_line_of_a_nodes_log_keeps_its_level_and_is_not_marked_twice(
    caplog: pytest.LogCaptureFixture, said: str, level: int, logged: str
) -> None:
    caplog.set_level(logging.INFO, logger="strop.sandbox")
    log_line("n", said)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, logged)]


def test_a_node_asks_who_listens_before_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(node: Node) -> None:
        raise AssertionError("the self-test was begun")

    monkeypatch.setattr(Node, "start", start)
    with pytest.raises(UserError, match=r"no front answers at 127\.0\.0\.1:9"):
        asyncio.run(join_front("127.0.0.1:9", SandboxConfig(), name="n", token=""))


def test_joining_is_logged_on_both_ends_and_a_knock_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with serving(nodes_port=0, nodes_token=TOKEN) as server:
            _, knock = await asyncio.open_connection("127.0.0.1", server.nodes_port)
            knock.close()
            await knock.wait_closed()
            link = await asyncio.open_connection("127.0.0.1", server.nodes_port)
            serve = asyncio.create_task(serve_node(scripted("far", slots=4), *link, token=TOKEN))
            joined = f"joined 127.0.0.1:{server.nodes_port} as far (L2)"
            await until(lambda: joined in caplog.messages and "node far joined" in caplog.text)
        await serve

    caplog.set_level(logging.INFO, logger="strop.sandbox")
    asyncio.run(play())
    assert not [record for record in caplog.records if "could not join" in record.getMessage()]
