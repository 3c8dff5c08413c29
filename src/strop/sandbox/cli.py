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


def _level(text: str) -> IsolationLevel:
    try:
        return IsolationLevel(text)
    except ValueError as error:
        known = ", ".join(f"{level} (L{level.rank})" for level in IsolationLevel)
        raise typer.BadParameter(f"there is no level {text!r}; the levels are {known}.") from error


MinLevel = Annotated[
    IsolationLevel,
    typer.Option(
        "--min-level",
        parser=_level,
        metavar="LEVEL",
        help="Refuse to start below it: strict (L3), namespaces (L2), confined (L1), process (L0).",
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="A file that holds the service's token.", show_default=False)
]

Level = Annotated[
    IsolationLevel | None,
    typer.Option("--level", parser=_level, metavar="LEVEL", help="The level to run at; the best one by default."),
]
MaxRunning = Annotated[
    int | None,
    typer.Option("--max-running", help="Programs that compute at once; twice the cores by default.", show_default=False),
]
Warm = Annotated[str, typer.Option("--warm", help="Profiles whose modules are loaded at the start: bare,numpy,full,verify.")]


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="The program; - for standard input.", metavar="FILE", show_default=False)],
    stdin: Annotated[
        Path | None, typer.Option("--stdin", help="What the program reads from its standard input; - for ours.")
    ] = None,
    wall_s: Annotated[float, typer.Option("--wall-s", help="Seconds it may run.")] = 4.0,
    memory_mib: Annotated[int, typer.Option("--memory-mib", help="Memory each of its processes may have.")] = 512,
    min_level: MinLevel = IsolationLevel.NAMESPACES,
    url: Annotated[str | None, typer.Option("--url", help="Of a running service; this machine by default.")] = None,
    token_file: TokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known about the run as one JSON object.")] = False,
) -> None:
    """Run one program. Prints what a policy would see; exits as the program did, 124 on timeout, 137 if it was killed."""
    from strop.sandbox.sync import Sandbox

    code = _read(file)
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
    level: Level = None,
    min_level: MinLevel = IsolationLevel.NAMESPACES,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as one JSON object.")] = False,
) -> None:
    """Attack this machine's own sandbox and tell which level of isolation holds. Exits with 2 when that is too little."""
    from rich.console import Console

    from strop.sandbox.node.node import Node

    lowest = min(min_level, level or min_level, key=lambda one: one.rank)
    node = Node(SandboxConfig(level=level, min_level=lowest))

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


@app.command()
def serve(
    host: Annotated[str, typer.Option("--host", help="Where it listens; without a token only on this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 for any that is free.")] = 8517,
    token_file: TokenFile = None,
    local_nodes: Annotated[int, typer.Option("--local-nodes", help="Nodes that are started on this machine.")] = 1,
    nodes_host: Annotated[str, typer.Option("--nodes-host", help="Where nodes of other machines join.")] = "127.0.0.1",
    nodes_port: Annotated[int | None, typer.Option("--nodes-port", help="The same; none can join by default.")] = None,
    nodes_token_file: Annotated[Path | None, typer.Option("--nodes-token-file", help="A file that holds their token.")] = None,
    min_level: MinLevel = IsolationLevel.NAMESPACES,
    level: Level = None,
    max_running: MaxRunning = None,
    warm: Warm = "bare,numpy,full,verify",
    grace_s: Annotated[float, typer.Option("--grace-s", help="After SIGTERM, for what still runs.")] = 30.0,
) -> None:
    """Offer the code service over HTTP until SIGTERM. /openapi.json describes its routes; /metrics is for Prometheus."""
    from strop.config import validate
    from strop.sandbox.service.config import ServeConfig

    try:
        from strop.sandbox.service.server import CodeServer
        from strop.sandbox.service.server import serve as serve_http
    except ImportError as error:
        raise UserError(
            f"the service needs the extra `serve` ({error.name} is missing): pip install 'strop[serve]'."
        ) from error

    if not local_nodes and nodes_port is None:
        raise UserError("a service without nodes answers nobody. Give it --local-nodes, or --nodes-port for nodes to join.")
    token = _token(token_file)
    settings = {
        "host": host,
        "port": port,
        "tokens": {} if token is None else {"default": token},
        "nodes_host": nodes_host,
        "nodes_port": nodes_port,
        "nodes_token": _token(nodes_token_file) or "",
        "num_local_nodes": local_nodes,
        "node": _node_settings(min_level, level, max_running, warm),
        "grace_s": grace_s,
    }

    def announce(server: CodeServer) -> None:
        nodes = ", ".join(f"{seat.node.name} (L{seat.node.level.rank})" for seat in server.dispatcher.floor.seats) or "none yet"
        typer.echo(f"The code service listens on {server.url} ; nodes: {nodes}")
        if server.nodes_port is not None:
            typer.echo(f"Nodes join with: strop sandbox node --join {nodes_host}:{server.nodes_port}")
        if token is None:
            typer.echo("It asks for no token: whoever is on this machine may use it.")
        sys.stdout.flush()

    asyncio.run(serve_http(validate(ServeConfig, settings, place="strop sandbox serve"), announce))


@app.command()
def node(
    join: Annotated[str, typer.Option("--join", help="Where the service takes nodes, as HOST:PORT.", show_default=False)],
    token_file: TokenFile = None,
    name: Annotated[str | None, typer.Option("--name", help="In every reply; host and process id by default.")] = None,
    min_level: MinLevel = IsolationLevel.NAMESPACES,
    level: Level = None,
    max_running: MaxRunning = None,
    warm: Warm = "bare,numpy,full,verify",
) -> None:
    """Run programs for a service on another machine until SIGTERM, which drains this node first."""
    from strop.config import validate
    from strop.sandbox.node.__main__ import join_front

    config = validate(SandboxConfig, _node_settings(min_level, level, max_running, warm), place="strop sandbox node")
    asyncio.run(join_front(join, config, name=name, token=_token(token_file) or ""))


def _node_settings(
    min_level: IsolationLevel, level: IsolationLevel | None, max_running: int | None, warm: str
) -> dict[str, object]:
    profiles = [name for name in warm.split(",") if name]
    settings: dict[str, object] = {"min_level": min_level, "level": level, "warm": profiles}
    return settings | ({} if max_running is None else {"max_running": max_running})


def _exit_code(result: RunResult) -> int:
    if result.outcome is RunOutcome.TIMEOUT:
        return _EXIT_TIMEOUT
    if result.outcome is RunOutcome.KILLED:
        return _EXIT_KILLED
    return _EXIT_OURS if result.exit_code is None else result.exit_code


def _read(path: Path) -> str:
    """The text of a file, or of our own standard input for `-`."""
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error


def _token(path: Path | None) -> str | None:
    return None if path is None else _read(path).strip()
