"""A real HTTP server on this machine that answers as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rewards.scorers.chat_service import QuietServer


@dataclass(kw_only=True)
class Asked:
    """One request."""

    method: str
    path: str
    params: dict[str, str]
    headers: dict[str, str]
    body: Any
    time: float


@dataclass(kw_only=True)
class Answer:
    """`body` is sent as JSON, unless it is bytes; None hangs up in the middle of the answer."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


class WebServer:
    """`answer` gets each request, and its number from 0."""

    def __init__(self, answer: Callable[[Asked, int], Answer], port: int = 0) -> None:
        self.asked: list[Asked] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self._reply()

            def do_POST(self) -> None:
                self._reply()

            def _reply(self) -> None:
                address = urlsplit(self.path)
                raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                asked = Asked(
                    method=self.command,
                    path=address.path,
                    params={name: values[0] for name, values in parse_qs(address.query).items()},
                    headers={name.lower(): value for name, value in self.headers.items()},
                    body=json.loads(raw) if raw else None,
                    time=time.monotonic(),
                )
                with outer._lock:
                    outer.asked.append(asked)
                    number = len(outer.asked) - 1
                told = answer(asked, number)
                time.sleep(told.delay_s)
                body = told.body if isinstance(told.body, bytes) else json.dumps(told.body).encode()
                try:
                    self.send_response(told.status)
                    for name, value in told.headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body) + (100 if told.body is None else 0)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    pass  # it did not wait

        self._server = QuietServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(answer: Callable[[Asked, int], Answer]) -> Iterator[WebServer]:
    server = WebServer(answer)
    try:
        yield server
    finally:
        server.close()
