"""`strop sandbox ...`: words typed by a person -> a config -> one call of the code service."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from strop.errors import UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunResult

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""
Run programs that nobody trusts: here, or as a service for many trainers.

- `strop sandbox check` attacks this machine's own sandbox and tells which level of isolation holds.
- `strop sandbox run file.py` runs one program in it.
- `strop sandbox serve` offers it over HTTP; `strop sandbox node --join HOST:PORT` adds another machine to a service.
""",
)

_EXIT_TIMEOUT, _EXIT_KILLED, _EXIT_OURS = 124, 137, 125  # as timeout(1), a shell and docker say it

MinLevel = Annotated[
    IsolationLevel,
    typer.Option("--min-level", help="Refuse to start below it: strict (L3), namespaces (L2), confined (L1), process (L0)."),
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="A file that holds the service's token.", show_default=False)
]


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="The program; - for standard input.", metavar="FILE", show_default=False)],
    stdin: Annotated[Path | None, typer.Option("--stdin", help="What the program reads from its standard input.")] = None,
    wall_s: Annotated[float, typer.Option("--wall-s", help="Seconds it may run.")] = 4.0,
    memory_mib: Annotated[int, typer.Option("--memory-mib", help="Memory each of its processes may have.")] = 512,
    min_level: MinLevel = IsolationLevel.NAMESPACES,
    url: Annotated[str | None, typer.Option("--url", help="Of a running service; this machine by default.")] = None,
    token_file: TokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known about the run as one JSON object.")] = False,
) -> None:
    """Run one program. Prints what a policy would see; exits as the program did, 124 on timeout, 137 if it was killed."""
    from strop.sandbox.sync import Sandbox

    code = sys.stdin.read() if str(file) == "-" else _read(file)
    with Sandbox(min_level=min_level, url=url, token=_token(token_file)) as box:
        result = box.run(code, stdin=_read(stdin) if stdin else "", wall_s=wall_s, memory_mib=memory_mib)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    else:
        typer.echo(result.text, nl=bool(result.text) and not result.text.endswith("\n"))
        if result.outcome not in (RunOutcome.STDOUT, RunOutcome.ECHO, RunOutcome.EMPTY):
            typer.echo(f"[{result.outcome}{f': {result.reason}' if result.reason else ''}]", err=True)
    raise typer.Exit(_exit_code(result))


@app.command()
def check(
    level: Annotated[IsolationLevel | None, typer.Option("--level", help="The level to try; the best one by default.")] = None,
    min_level: MinLevel = IsolationLevel.NAMESPACES,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as one JSON object.")] = False,
) -> None:
    """Attack this machine's own sandbox and tell which level of isolation holds. Exits with 2 when that is too little."""
    from rich.console import Console

    from strop.sandbox.node.node import Node

    node = Node(SandboxConfig(level=level, min_level=min_level))

    async def attack() -> UserError | None:
        try:
            async with node:
                return None
        except UserError as error:
            return error

    refusal = asyncio.run(attack())
    if as_json:
        found = {level: found if isinstance(found, str) else found.as_json() for level, found in node.tried.items()}
        typer.echo(json.dumps({"level": None if refusal else node.level, "tried": found}))
    else:
        for tried, report in node.tried.items():
            Console().print(f"{tried} does not start: {report}" if isinstance(report, str) else report.table())
    if refusal is not None:
        raise refusal


def _exit_code(result: RunResult) -> int:
    if result.outcome is RunOutcome.TIMEOUT:
        return _EXIT_TIMEOUT
    if result.outcome is RunOutcome.KILLED:
        return _EXIT_KILLED
    return _EXIT_OURS if result.exit_code is None else result.exit_code


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error


def _token(path: Path | None) -> str | None:
    return None if path is None else _read(path).strip()
