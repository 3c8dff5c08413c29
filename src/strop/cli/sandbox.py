"""The commands `strop sandbox run`, `check` and `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from strop.errors import UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunResult


class _Commands(TyperGroup):
    """Commands whose errors name options, where the same error in a recipe names keys."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except UserError as error:
            raise UserError(in_options(str(error))) from error


def in_options(message: str) -> str:
    """Return `message` with keys replaced by options: `sandbox.min_level = 'confined'` becomes `--min-level confined`."""
    return re.sub(
        r"(?<![\w./-])sandbox\.(min_level|level|url)(?![\w/-]|\.\w)(?: = '([^']*)')?",
        lambda key: f"--{key[1].replace('_', '-')}{f' {key[2]}' if key[2] else ''}",
        message,
    )


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def _group() -> None:
    """Run untrusted programs, on this machine or as a service for many trainers.

    - `strop sandbox check` attacks the sandbox of this machine and prints which level of isolation holds.
    - `strop sandbox run file.py` runs one program in it.
    - `strop sandbox serve` offers it over HTTP. A recipe can name the services of several machines.
    """


# As timeout(1), a shell and docker use them.
_EXIT_CODES, _EXIT_OURS = {RunOutcome.TIMEOUT: 124, RunOutcome.KILLED: 137}, 125


def _level(text: str) -> IsolationLevel:
    try:
        return IsolationLevel(text)
    except ValueError as error:
        known = ", ".join(f"{level} (L{level.rank})" for level in IsolationLevel)
        raise typer.BadParameter(f"there is no level {text!r}; the levels are {known}.") from error


MinLevel = Annotated[
    IsolationLevel,
    typer.Option(
        parser=_level,
        metavar="LEVEL",
        help="Refuse to start below it: strict (L3), namespaces (L2), confined (L1), process (L0).",
    ),
]
TokenFile = Annotated[Path | None, typer.Option(help="File with the token of the service.")]

Level = Annotated[
    IsolationLevel | None,
    typer.Option(
        parser=_level,
        metavar="LEVEL",
        help="Run at exactly this level. By default at the best that this machine gives, up to namespaces.",
    ),
]
Warm = Annotated[str, typer.Option(help="Profiles whose modules are loaded at the start: bare,numpy,full,verify.")]


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="The program; - for standard input.", metavar="FILE")],
    stdin: Annotated[Path | None, typer.Option(help="File for the standard input of the program; - for ours.")] = None,
    wall_s: Annotated[float, typer.Option(help="Seconds that the program may run.")] = 4.0,
    memory_mib: Annotated[int, typer.Option(help="Memory of each of its processes.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of its random numbers: equal calls give equal texts.")] = 0,
    min_level: MinLevel = IsolationLevel.NAMESPACES,
    level: Level = None,
    url: Annotated[str | None, typer.Option(help="Address of a running service; this machine by default.")] = None,
    token_file: TokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as one JSON object.")] = False,
) -> None:
    """Run one program and print what a policy would see. Exits as the program did; 124 on timeout, 137 if it was killed."""
    from strop.sandbox.sandbox import Sandbox

    if url is not None and level is not None:
        raise UserError(f"--level is for this machine; the service at {url} has its own. Ask for enough with --min-level.")
    code, given = _read(file), _read(stdin) if stdin else ""
    config = SandboxConfig(level=level, min_level=_lowest(min_level, level))
    with Sandbox(config=config, url=url, token=_token(token_file)) as box:
        result = box.run(code, stdin=given, wall_s=wall_s, memory_mib=memory_mib, seed=seed)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    else:
        typer.echo(result.text, nl=bool(result.text) and not result.text.endswith("\n"))
        if result.outcome not in (RunOutcome.STDOUT, RunOutcome.ECHO, RunOutcome.EMPTY):
            reason = _reason(result, wall_s)
            typer.echo(f"[{result.outcome}{f': {reason}' if reason else ''}]", err=True)
    raise typer.Exit(_EXIT_CODES.get(result.outcome, _EXIT_OURS if result.exit_code is None else result.exit_code))


@app.command()
def check(
    level: Level = None,
    min_level: MinLevel = IsolationLevel.NAMESPACES,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Attack the sandbox of this machine and print which level of isolation holds. Exits with 2 if that is too low."""
    from rich.console import Console

    from strop.sandbox.supervisor.node import Node

    node = Node(SandboxConfig(level=level, min_level=_lowest(min_level, level)))

    async def attack() -> UserError | None:
        try:
            async with node:
                return None
        except UserError as error:
            return error

    refusal = asyncio.run(attack())
    if as_json:
        found = {level: found if isinstance(found, str) else found.as_json() for level, found in node.tried.items()}
        typer.echo(json.dumps({"level": None if refusal else node.level, "tried": found, "packages": _packages()}))
    else:
        for tried, report in node.tried.items():
            Console().print(f"{tried} does not start: {report}" if isinstance(report, str) else report.table())
        shown = ", ".join(f"{name} {version}" for name, version in _packages().items())
        typer.echo(f"Programs can import: the standard library, {shown}.")
    if refusal is not None:
        without_table = "\n".join(line for line in str(refusal).splitlines() if not line.startswith("  "))
        raise refusal if as_json else UserError(without_table)


def _packages() -> dict[str, str]:
    """The versions of the packages that the sandbox loads for programs that import them."""
    found = {}
    for name in ("numpy", "scipy", "sympy", "mpmath"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; without a token only this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 for any free port.")] = 8517,
    token_file: TokenFile = None,
    min_level: MinLevel = IsolationLevel.NAMESPACES,
    level: Level = None,
    max_running: Annotated[int | None, typer.Option(help="Programs that compute at once; twice the cores by default.")] = None,
    warm: Warm = "bare,numpy,full,verify",
    grace_s: Annotated[float, typer.Option(min=0, help="Seconds after SIGTERM for running calls.")] = 30.0,
) -> None:
    """Offer the code service over HTTP until SIGTERM. /openapi.json describes its routes; /metrics is for Prometheus."""
    from strop.config import validate

    try:
        from strop.sandbox.server.server import CodeServer, ServeConfig
        from strop.sandbox.server.server import serve as serve_http
    except ImportError as error:
        raise UserError(
            f"the service needs the extra `serve` ({error.name} is missing): pip install 'strop[serve]'."
        ) from error

    if "STROP_LOG" not in os.environ:  # show each start of the supervisor
        logging.getLogger("strop.sandbox").setLevel(logging.INFO)
    token = _token(token_file)
    keys = {"min_level": _lowest(min_level, level), "level": level, "warm": [name for name in warm.split(",") if name]}
    node = validate(
        SandboxConfig, keys if max_running is None else {**keys, "max_running": max_running}, place="strop sandbox serve"
    )
    config = ServeConfig(host=host, port=port, token=token or "", node=node, grace_s=grace_s)

    def announce(server: CodeServer) -> None:
        level = server.dispatcher.box.level
        typer.echo(f"The code service listens on {server.url} ; programs run at level {level} (L{level.rank})")
        if token is None:
            typer.echo("It asks for no token: every user of this machine may use it.")
        sys.stdout.flush()

    asyncio.run(serve_http(config, announce))


def _lowest(min_level: IsolationLevel, level: IsolationLevel | None) -> IsolationLevel:
    """The lowest accepted level; an exact `level` is always accepted."""
    return min(min_level, level or min_level, key=lambda one: one.rank)


def _reason(result: RunResult, wall_s: float) -> str:
    """The reason of the outcome, with the limit where that is an option."""
    if result.outcome is not RunOutcome.TIMEOUT:
        return result.reason
    if result.reason == "cpu":
        return f"cpu: its processes used more CPU time than --wall-s {wall_s:g} allows"
    return f"it ran longer than --wall-s {wall_s:g}"


def _read(path: Path) -> str:
    """The text of a file, or of our standard input for `-`."""
    try:
        return (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).decode()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 (byte {error.start}); programs and their input must be UTF-8.") from error


def _token(path: Path | None) -> str | None:
    return None if path is None else _read(path).strip()
