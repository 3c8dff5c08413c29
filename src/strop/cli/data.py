"""The commands `strop data`: list, convert, curate, rewrite and pair data."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from strop.cli.common import Set

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def _group() -> None:
    """Turn published data sets into problems and conversations for training.

    - `strop data list` lists the data sets whose columns are known.
    - `strop data curate FILE --out DIR` applies the rules of a file to problems, and shows what each rule dropped and why.
    - `strop data convert toolace data.json sft.jsonl` turns demonstrations into one form, with JSON tool calls.
    - `strop data rewrite rows.jsonl better.jsonl --with rewrite.toml` lets a model rewrite the responses.
    - `strop data pairs candidates.jsonl pairs.jsonl --judge judge.toml` lets a judge make preference pairs for a reward model.
    """


def _tag_name(value: str) -> str:
    if not re.fullmatch(r"\w+", value):
        raise typer.BadParameter(f"{value!r} is not the name of a tag. Give it without brackets, as in think.")
    return value


@app.command()
def curate(
    file: Annotated[Path, typer.Argument(help="A TOML file: sources and rules.", metavar="FILE")],
    out: Annotated[Path, typer.Option(help="The directory to write.")],
    overrides: Set = None,
    jobs: Annotated[int, typer.Option(min=1, help="Parallel processes.")] = 2,
) -> None:
    """Apply rules to problems: writes kept.jsonl, dropped.jsonl with rules and reasons, and a page that shows both."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from strop.curation.config import load_curation
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
            f"{file}: nothing is kept. {worst['name']} dropped most ({worst['num_dropped']} of {summary['num_tasks']}); the"
            " page shows samples. Loosen the rule, or use other sources."
        )


@app.command()
def convert(
    dataset: Annotated[str, typer.Argument(help="A name from `strop data list`.", metavar="DATASET")],
    source: Annotated[
        str, typer.Argument(help="A file (.jsonl, .json, .parquet), a directory, or a hub id.", metavar="SOURCE")
    ],
    out: Annotated[Path, typer.Argument(help="The JSONL file to write.", metavar="OUT")],
    split: Annotated[str | None, typer.Option(help="Split of a hub data set; default: the published one.")] = None,
) -> None:
    """Convert demonstrations to one form, with tool calls as JSON. Rows that cannot be converted are listed."""
    from strop.tasks.conversations import convert_file

    result = convert_file(dataset, source, out, split=split)
    typer.echo(f"{result.num_converted:,} conversations in {out}; {result.num_dropped:,} dropped, in {result.dropped_path}")


@app.command()
def pairs(
    candidates: Annotated[Path, typer.Argument(help="A .jsonl: prompt, first and second on each line.", metavar="CANDIDATES")],
    out: Annotated[Path, typer.Argument(help="The JSONL file to write.", metavar="OUT")],
    judge: Annotated[Path, typer.Option(help="A TOML file with the keys of a judge.", metavar="FILE")],
    judged_on: Annotated[
        Literal["summary", "response"], typer.Option(help="Judge the final summary after the thoughts, or the whole response.")
    ] = "summary",
    think_tag: Annotated[str, typer.Option(help="Name of the tag of thoughts.", callback=_tag_name)] = "think",
    is_prefilled: Annotated[bool, typer.Option("--prefilled", help="The prompts ended with the opening tag.")] = False,
    num_judgements: Annotated[
        int, typer.Option("--judgements", min=1, help="Judgements of each pair, each in a random order.")
    ] = 4,
    threshold: Annotated[float, typer.Option(min=0.0, max=2.0, help="Minimum difference of a kept pair, from 0 to 2.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the selection that balances lengths.")] = 0,
) -> None:
    """Make preference pairs for a reward model: several judgements each, only clear ones, lengths balanced.

    The same command resumes.
    """
    from strop.config import load_toml, validate
    from strop.rewards.judge import JudgeConfig
    from strop.training.pair_making import PairMaking

    config = validate(JudgeConfig, load_toml(judge), place=str(judge))
    making = PairMaking(
        judged_on=judged_on,
        think_tag=think_tag,
        is_prefilled=is_prefilled,
        num_judgements=num_judgements,
        threshold=threshold,
        seed=seed,
    )
    typer.echo(f"{out}: {asyncio.run(making.write_file(candidates, out, config)).summary}")


@app.command()
def rewrite(
    source: Annotated[Path, typer.Argument(help="Conversations, or rows with a column of text.", metavar="SOURCE")],
    out: Annotated[Path, typer.Argument(help="The JSONL file to write.", metavar="OUT")],
    file: Annotated[Path, typer.Option("--with", help="A TOML file: service, prompt, column.", metavar="FILE")],
    overrides: Set = None,
) -> None:
    """Let a model rewrite responses or requests. Failures go to OUT.failed.jsonl with the reason. The same command resumes."""
    from strop.config import load_toml, validate
    from strop.curation.rewrite import RewriteConfig, rewrite_file

    config = validate(RewriteConfig, load_toml(file, overrides or []), place=str(file))
    typer.echo(f"{out}: {asyncio.run(rewrite_file(config, source, out)).summary}")


@app.command(name="list")
def list_datasets() -> None:
    """List the data sets whose columns are known: problems for tasks.dataset, demonstrations for `strop data convert`."""
    from strop.tasks.converters import CONVERTERS
    from strop.tasks.readers import PUBLISHED

    titles: dict[str, Any] = {"problems (tasks.dataset):": PUBLISHED, "demonstrations (strop data convert):": CONVERTERS}
    for title, datasets in titles.items():
        typer.echo(title)
        for name, each in datasets.items():
            typer.echo(f"  {name:<26} {each.hub or 'a file'}")
            typer.echo(textwrap.fill(each.source, 80, initial_indent=" " * 6, subsequent_indent=" " * 6))
