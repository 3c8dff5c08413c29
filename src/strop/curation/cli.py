"""`strop data ...`: words typed by a person -> a config -> one call."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""
Turn published data sets into problems and conversations that are worth training on.

- `strop data list` names the data sets whose columns are known.
- `strop data curate FILE --out DIR` passes problems through the rules of a file, and tells what each rule dropped and why.
- `strop data convert toolace data.json sft.jsonl` turns demonstrations into one form, with JSON tool calls.
- `strop data rewrite rows.jsonl better.jsonl --with rewrite.toml` lets a model rewrite what an assistant said.
- `strop data pairs candidates.jsonl pairs.jsonl --judge judge.toml` lets a judge make preference pairs for a reward model.
""",
)


def _tag_name(value: str) -> str:
    if not re.fullmatch(r"\w+", value):
        raise typer.BadParameter(f"{value!r} is no name of a tag: give it without brackets, as in think.")
    return value


Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Processes that judge problems at once.")]


@app.command()
def curate(
    file: Annotated[Path, typer.Argument(help="A TOML file: sources and rules.", metavar="FILE", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The directory to write; made if it is not there.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key, as in name=other. May be given often.", metavar="A.B=C")
    ] = None,
    jobs: Jobs = 2,
) -> None:
    """Pass problems through rules: kept.jsonl, dropped.jsonl with each one's rule and reason, and a page that shows both."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from strop.curation.load import load_curation
    from strop.curation.run import run_curation
    from strop.errors import TaskError

    config = load_curation(file, overrides or [])
    columns = (SpinnerColumn(), TextColumn("{task.description} {task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        judged = progress.add_task("rows judged", total=None)
        summary = run_curation(config, out, jobs=jobs, progress=lambda num: progress.advance(judged, num))
    for rule in summary["rules"]:
        typer.echo(f"{rule['name']:<20} dropped {rule['num_dropped']:>9,} of {rule['num_seen']:>9,}")
    typer.echo(f"{'kept':<20} {summary['num_kept']:>17,} of {summary['num_tasks']:>9,}")
    typer.echo(out / "report.html")
    if not summary["num_kept"]:
        worst = max(summary["rules"], key=lambda rule: int(rule["num_dropped"]))
        raise TaskError(
            f"{file}: nothing is kept. Most fell to {worst['name']} ({worst['num_dropped']} of {summary['num_tasks']}), and"
            " the page shows some of them. Loosen the rule, or name other sources."
        )


@app.command()
def convert(
    dataset: Annotated[str, typer.Argument(help="One that `strop data list` names.", metavar="DATASET", show_default=False)],
    source: Annotated[
        str,
        typer.Argument(
            help="A file (.jsonl, .json, .parquet), a directory, or a hub id.", metavar="SOURCE", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The JSONL file to write.", metavar="OUT", show_default=False)],
    split: Annotated[str | None, typer.Option("--split", help="Of a hub data set; its published one by default.")] = None,
) -> None:
    """Turn demonstrations into conversations of one form, tool calls as JSON; those that cannot be are told, one by one."""
    from strop.tasks.conversations import convert_file

    result = convert_file(dataset, source, out, split=split)
    typer.echo(f"{result.num_converted:,} conversations in {out}; {result.num_dropped:,} dropped, in {result.dropped_path}")


@app.command()
def pairs(
    candidates: Annotated[
        Path, typer.Argument(help="A .jsonl: prompt, first and second on each line.", metavar="CANDIDATES", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The JSONL file to write.", metavar="OUT", show_default=False)],
    judge: Annotated[
        Path, typer.Option("--judge", help="A TOML file with the keys of a judge.", metavar="FILE", show_default=False)
    ],
    judged_on: Annotated[
        Literal["summary", "response"],
        typer.Option("--judged-on", help="What stands behind the thoughts of a response, or all of it."),
    ] = "summary",
    think_tag: Annotated[str, typer.Option("--think-tag", help="Of thoughts: its name alone.", callback=_tag_name)] = "think",
    is_prefilled: Annotated[
        bool, typer.Option("--prefilled", help="The prompts had the opening tag: what never closes it is all thought.")
    ] = False,
    num_judgements: Annotated[int, typer.Option("--judgements", min=1, help="Of each pair, in an order drawn for each.")] = 4,
    threshold: Annotated[
        float, typer.Option("--threshold", min=0.0, max=2.0, help="Keep what differs by more, on the scale -2 to 2.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of what is left out so that neither side is the longer one.")] = 0,
) -> None:
    """Make preference pairs for a reward model: several judgements each, clear ones alone, lengths balanced.

    Goes on after a kill.
    """
    from strop.config import load_toml, validate
    from strop.rewards.scorers.judge import JudgeConfig
    from strop.training.pair_making import make_pairs_file

    config = validate(JudgeConfig, load_toml(judge), place=str(judge))
    making = make_pairs_file(
        candidates,
        out,
        config,
        judged_on=judged_on,
        think_tag=think_tag,
        is_prefilled=is_prefilled,
        num_judgements=num_judgements,
        threshold=threshold,
        seed=seed,
    )
    typer.echo(f"{out}: {asyncio.run(making).summary}")


@app.command()
def rewrite(
    source: Annotated[
        Path, typer.Argument(help="Conversations, or rows with a column of text.", metavar="SOURCE", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The JSONL file to write.", metavar="OUT", show_default=False)],
    file: Annotated[
        Path, typer.Option("--with", help="A TOML file: service, prompt, column.", metavar="FILE", show_default=False)
    ],
) -> None:
    """Let a model rewrite responses; those that it could not go to OUT.failed.jsonl, with the reason. Goes on after a kill."""
    from strop.config import load_toml, validate
    from strop.curation.rewrite import RewriteConfig, rewrite_file

    config = validate(RewriteConfig, load_toml(file), place=str(file))
    typer.echo(f"{out}: {asyncio.run(rewrite_file(config, source, out)).summary}")


@app.command(name="list")
def list_datasets() -> None:
    """The data sets whose columns are known: problems for tasks.dataset, and demonstrations for `strop data convert`."""
    from strop.tasks.converters import CONVERTERS
    from strop.tasks.published import PUBLISHED

    typer.echo("problems (tasks.dataset):")
    for name, known in PUBLISHED.items():
        typer.echo(f"  {name:<26} {known.hub or 'a file':<36} {known.source}")
    typer.echo("demonstrations (strop data convert):")
    for name, converter in CONVERTERS.items():
        typer.echo(f"  {name:<26} {converter.hub or 'a file':<36} {converter.source}")
