"""What docs/sandbox.md shows works as it stands there, and its tables have the numbers of the code."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from strop.sandbox import protocol as limits
from strop.sandbox.protocol import CodeService, RunRequest, SessionLimits
from strop.sandbox.server.http import ROUTES
from strop.sandbox.server.ndjson import ProblemKind

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sandbox.md").read_text(encoding="utf-8")
TOKEN = "correct horse battery"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a service that a person would start, and a folder with its token."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "token").write_text(f"{TOKEN}\n")
    strop = [sys.executable, "-m", "strop.cli", "sandbox"]
    command = [*strop, "serve", "--port", "0", "--warm", "bare", "--token-file", "token"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"http://\S+", said)
            assert found is not None, said
            yield found[0], folder
        finally:
            process.send_signal(signal.SIGTERM)


def test_the_code_works_on_this_machine_and_the_asynchronous_code_with_a_service(service: tuple[str, Path]) -> None:
    url, _ = service
    simple, code = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(simple, "docs/sandbox.md", "exec"), {"__name__": "page"})
    assert code.endswith("\nasyncio.run(here())\n")
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(code.removesuffix("asyncio.run(here())\n"), "docs/sandbox.md", "exec"), namespace)
    asyncio.run(namespace["there"](url, TOKEN))
    texts = []

    async def use_little(here: CodeService) -> None:
        texts.append((await here.run(RunRequest(code="6 * 7"))).text)

    namespace["use"] = use_little  # all of it was used on the service
    asyncio.run(namespace["here"]())
    assert texts == ["42"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="this machine has no curl")
def test_every_request_of_the_page_is_answered(service: tuple[str, Path]) -> None:
    url, folder = service
    [script] = [code for code in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if "curl" in code]
    prelude = 'set -e\ncurl() { command curl --silent --show-error --fail --max-time 30 "$@"; echo >&2; }\n'
    script = prelude + script.replace("http://127.0.0.1:8517", url)
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for answer in ('"text":"144\\n"', '"key":2', '"verdict":"equal"', '"outcome":"passed"', '"text":"2"', '"status":"ok"'):
        assert answer in done.stdout, answer


def test_the_page_names_every_route_and_every_kind_of_error() -> None:
    named = re.findall(r"^\| `([A-Z]+) (/\S+)` \|", PAGE, re.MULTILINE)
    assert sorted(named) == sorted((route.method.upper(), route.path) for route in ROUTES)
    [table] = re.findall(r"^\| status \| kind.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    for kind in ProblemKind:
        assert f"`{kind}`" in table, kind


def test_the_table_of_limits_has_the_numbers_of_the_code() -> None:
    defaults = {
        field.name: field.default
        for shape in (SessionLimits, RunRequest)
        for field in fields(shape)
        if field.default is not MISSING
    }
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| (\d+) \|", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for name, default, limit in rows:
        assert float(default) == defaults[name], name
        assert float(limit) == getattr(limits, f"MAX_{name.removeprefix('max_').upper()}"), name
    assert f"{limits.MAX_CODE_BYTES}, {limits.MAX_STDIN_BYTES} bytes" in PAGE
