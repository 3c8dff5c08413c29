"""A harness: serves a policy, runs the commands of a benchmark against it, and reads the figures from the files they write."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

from pydantic import Field, field_validator

from strop.config import Config
from strop.engine.config import EngineChoice
from strop.engine.servers.engine import ServerEngine
from strop.engine.servers.process import ServerProcess
from strop.errors import ConfigError, NotThere, RunError, UserError
from strop.evaluation.endpoint import Endpoint, EngineEndpoint, ServerEndpoint, serving
from strop.evaluation.results import write_eval
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, Product, Sampled, Stage, StageResult
from strop.rollout.environment import end
from strop.rollout.scheduler.engine_pool import engine_name
from strop.run_directory import read_json, write_json
from strop.runs.lineage import weights_digest
from strop.stages.context import StageContext, load_chat, product_of
from strop.stages.evaluation import identity
from strop.stages.loop.engines import check_engine

PLACEHOLDERS = ("base_url", "port", "model", "out")
_SHOWN = 12  # files or keys in an error


class Figure(Config):
    """Where a figure is found in what the commands wrote."""

    file: str = Field(
        description="The file, a glob below `$out`. Of several the newest is read. JSON, JSONL (its first line) or CSV."
    )
    at: tuple[str, ...] = Field(
        min_length=1, description="Its keys in the JSON value, from the outside in; the column of a CSV."
    )


class Harness(Stage):
    """Figures of another program that evaluates the policy behind an OpenAI-compatible address."""

    makes = Product.EVALUATION
    root_keys = frozenset({"engine"})
    opens_engines = True

    class Config(Stage.Config):
        """Keys of `kind = "harness"`."""

        init: str = Field(description="Stage whose model is served.")
        benchmark: str = Field(min_length=1, description="Name of the benchmark in tables.")
        commands: tuple[str, ...] = Field(
            min_length=1,
            description="Commands, run one after the other without a shell. They may name `$base_url` (http://127.0.0.1:PORT/v1),"
            " `$port`, `$model` (the served directory, also its name), `$out` (a directory for results); `$$` is a dollar.",
        )
        metrics: dict[str, Figure] = Field(
            min_length=1,
            description="Figures by name. `accuracy`, a share, is shown in tables; `accuracy_stderr` gives its interval.",
        )
        environment: dict[str, str] = Field(default={}, description="More environment variables, with the same names in them.")
        cwd: str | None = Field(default=None, description="Where the commands run. Default: the working directory.")
        port: int = Field(default=0, ge=0, lt=65_536, description="Port of the served policy. 0: a free one.")
        engine: EngineChoice | None = Field(
            default=None, description="Keys of `engine` with another value in this stage. Default: the recipe's engine."
        )

        @field_validator("commands", "environment")
        @classmethod
        def _can_be_filled(cls, value: Any) -> Any:
            split = [[each] for each in value.values()] if isinstance(value, dict) else [shlex.split(each) for each in value]
            if not all(split):
                raise ValueError("holds an empty command. Write a program and its arguments.")
            for text in (word for words in split for word in words):
                if not Template(text).is_valid() or set(Template(text).get_identifiers()) - {*PLACEHOLDERS}:
                    known = ", ".join(f"${each}" for each in PLACEHOLDERS)
                    raise ValueError(f"{text!r} names what is not one of {known}. Write a dollar that is only itself as $$.")
            return value

        def argv(self, command: str, **values: str) -> list[str]:
            """Return the words of `command`, the program by its path. Raises `ConfigError` if there is no such program."""
            program, *words = [Template(word).safe_substitute(values) for word in shlex.split(command)]
            is_path = os.sep in program  # as for a shell: relative to where it runs
            wanted = os.path.join(self.cwd or "", program) if is_path else program
            found = shutil.which(wanted, path=None if is_path else self.environment.get("PATH"))
            if found is None:
                raise ConfigError(
                    f"commands: {program} is not {'there' if is_path else 'on the PATH'}, or cannot be run. Install it, or give"
                    " its path, as in .venv-harness/bin/NAME."
                )
            return [os.path.abspath(found), *words]

    config: Config

    def keys(self) -> dict[str, Any]:
        """All but where the policy is served, and what is read once the commands have ended."""
        return {key: value for key, value in self.table().items() if key not in ("port", "metrics")}

    def check(self, name: str, recipe: Recipe, machine: Machine) -> Iterator[UserError]:
        yield from check_engine(recipe, machine)
        if self.config.cwd is not None and not Path(self.config.cwd).is_dir():
            yield NotThere(f"stages.{name}.cwd: {self.config.cwd} is no directory. Make it, or name another.")
            return
        for command in self.config.commands:
            try:
                self.config.argv(command)
            except ConfigError as error:
                yield NotThere(f"stages.{name}.{error}")

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        programs = dict.fromkeys(os.path.basename(shlex.split(command)[0]) for command in self.config.commands)
        return Estimate(arithmetic=f"{self.config.benchmark} by {', then '.join(programs)}", sampled=Sampled())

    async def run(self, context: StageContext) -> StageResult:
        """Run the commands, unless they have ended before, and write `eval/`."""
        config, started = self.config, time.perf_counter()
        context.started(1, 0)
        model = product_of(context.run, config.init).absolute()
        out, ended = (context.directory.path / "out").absolute(), context.directory.path / "commands.json"
        out.mkdir(parents=True, exist_ok=True)
        if not ended.exists():
            write_json(ended, await self._run_commands(context, model, out))
        asked = read_json(ended)
        if asked["num_refused"]:
            context.warn(
                f"{asked['num_refused']} of {asked['num_requests']} requests were refused, and a harness may count them as"
                f" wrong answers. The first: {asked['first_refusal']}"
            )
        metrics = {key: _read(f"stages.{context.name}.metrics.{key}", each, out) for key, each in config.metrics.items()}
        figures = metrics | _interval(metrics, context.name) | asked
        figures |= identity(context, config.init, config.benchmark, weights_digest(model))
        figures["harness"] = os.path.basename(shlex.split(config.commands[-1])[0])
        figures["time_s"] = time.perf_counter() - started
        write_eval(context.directory.evaluation.parent, figures, [])
        return StageResult(summary=", ".join(f"{key} {value:.4g}" for key, value in metrics.items()))

    async def _run_commands(self, context: StageContext, model: Path, out: Path) -> dict[str, Any]:
        """Return what was asked of the policy. Raises `RunError` if a command fails."""
        chat, log = load_chat(model), context.directory.logs / "harness.log"
        engine = context.recipe.engine
        names = [engine_name(index) for index in range(engine.num_engines)]
        engines = await context.open_engines(model, engine, detokenize=chat.decode, logs=context.directory.logs, names=names)
        servers = [each for each in engines if isinstance(each, ServerEngine)]
        served, seed = str(model), context.seed("endpoint")
        endpoint = ServerEndpoint(served, servers, chat) if servers else EngineEndpoint(served, engines, chat, seed=seed)
        try:
            with serving(endpoint, port=self.config.port):
                for command in self.config.commands:
                    await self._run_command(context.name, command, endpoint, out, log)
        finally:
            for each in engines:
                await each.close()
        return {
            "num_requests": endpoint.num_requests,
            "num_refused": endpoint.num_refused,
            "first_refusal": endpoint.first_refusal,
            "tokens": endpoint.num_tokens,
        }

    async def _run_command(self, name: str, command: str, endpoint: Endpoint, out: Path, log: Path) -> None:
        port = str(endpoint.port)
        values = {"base_url": f"http://127.0.0.1:{port}/v1", "port": port, "model": endpoint.model, "out": str(out)}
        own = {key: Template(value).safe_substitute(values) for key, value in self.config.environment.items()}
        argv, cwd = self.config.argv(command, **values), None if self.config.cwd is None else Path(self.config.cwd)
        running = asyncio.create_task(ServerProcess.run(argv, env={**os.environ, **own}, log=log, cwd=cwd))
        try:
            watched: set[asyncio.Future[Any]] = {running, endpoint.lost}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if endpoint.lost.done():
                endpoint.lost.result()
            failure = await running
        finally:
            await end([running])
        if failure:
            raise RunError(
                f"stages.{name}.commands: {failure}\nMend what the command needs and run strop again: it starts with the first"
                f" command. If a key of the stage changes, add --from {name}."
            )


def _interval(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """The bounds of `accuracy` with 95 % confidence, if its standard error is known. Raises `RunError` if it is no share."""
    if (accuracy := metrics.get("accuracy")) is None:
        return {}
    if not 0 <= accuracy <= 1:
        raise RunError(f"stages.{name}.metrics.accuracy is {accuracy:g}, but a share is between 0 and 1. Give it another name.")
    if (error := metrics.get("accuracy_stderr")) is None:
        return {}
    return {"accuracy_low": max(0.0, accuracy - 1.96 * error), "accuracy_high": min(1.0, accuracy + 1.96 * error)}


def _read(key: str, figure: Figure, out: Path) -> float:
    """Return the figure. Raises `RunError`, which says what is there instead, if it is missing or no number."""

    def wrong(problem: str) -> RunError:
        return RunError(f"{key}{problem}. Mend {key} and run strop again: the commands do not run a second time.")

    found = sorted(out.glob(figure.file), key=lambda path: path.stat().st_mtime)
    if not found:
        files = [str(path.relative_to(out)) for path in sorted(out.rglob("*")) if path.is_file()]
        raise wrong(f".file: there is no {figure.file} below {out}. It has {_listed(files)}")
    path = found[-1]
    value: Any
    try:
        text = path.read_text(encoding="utf-8")
        value = next(csv.DictReader(text.splitlines()), {}) if path.suffix == ".csv" else json.JSONDecoder().raw_decode(text)[0]
    except (OSError, ValueError, RecursionError) as error:
        raise wrong(f".file: {path} cannot be read: {error}") from error
    for step in figure.at:
        if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            keys = [str(each) for each in value] if isinstance(value, dict) else []
            raise wrong(f".at: {path} has no {step!r} in {' > '.join(figure.at)}. It has {_listed(keys)}")
    try:
        is_percent = isinstance(value, str) and value.strip().endswith("%")
        number = float(value.strip().removesuffix("%")) / 100 if is_percent else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise wrong(f": {' > '.join(figure.at)} of {path} is {value!r}, not a number")
    return number


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "nothing") + more
