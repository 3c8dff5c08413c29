"""The commands `strop eval ...`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from strop.cli.common import DryRun, OnHardware, RecipePath, Runs, Set, print_dry_run, run_until_stopped


class EvalGroup(TyperGroup):
    """Makes `strop eval RECIPE ...` short for `strop eval run RECIPE ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=EvalGroup, no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def _group() -> None:
    """Evaluate models, compare evaluations problem by problem, and rank them.

    - `strop eval recipes/eval/math.toml --stage aime24 --model DIR` evaluates a model directory (short for `eval run`).
    - `strop eval compare runs/a runs/b` tests the difference on the problems that both have.
    - `strop eval arena-hard question.jsonl ...` lets a judge compare answers with a baseline's.
    - `strop eval leaderboard runs` ranks every evaluation below a directory, on a page.
    """


@app.command()
def run(
    recipe: RecipePath,
    model: Annotated[Path, typer.Option(help="The model directory to evaluate.")],
    overrides: Set = None,
    stage: Annotated[str | None, typer.Option(help="An evaluation of the recipe; default: the first.")] = None,
    runs: Runs = Path("runs"),
    name: Annotated[str | None, typer.Option(help="Name of the result; default: `eval-<stage>-<digest of the model>`.")] = None,
    dry_run: DryRun = False,
    hardware: OnHardware = None,
) -> None:
    """Evaluate a model directory with one of the recipe's evaluations: pass@1 with its interval, pass@k, maj@k, lengths."""
    from strop.pipeline.from_python import choose_evaluation, evaluate_model, evaluation_of, evaluations_in
    from strop.recipe.load import load_recipe
    from strop.reports.console import ConsoleProgress
    from strop.reports.terminal import printable
    from strop.runs.lineage import digest_of
    from strop.stages.model import find_model

    loaded = load_recipe(recipe, overrides or [], name=name)
    chosen = choose_evaluation(loaded, stage, overrides or [])
    others = [each for each in evaluations_in(loaded) if each != chosen] if stage is None else []
    if others:
        typer.echo(printable(f"other evaluations of this recipe (--stage): {', '.join(others)}"))
    if dry_run:
        print_dry_run(evaluation_of(loaded, str(model), chosen), hardware)
        return
    typer.echo(printable(f"evaluating {model} with stage {chosen!r} of {recipe}"))
    if name is None:
        digest = digest_of(find_model(str(model)))[:12]
        loaded = loaded.model_copy(update={"name": f"eval-{chosen}-{digest}"})
    progress = ConsoleProgress()
    run_until_stopped(evaluate_model(loaded, model, runs / loaded.name, stage=chosen, progress=progress), progress)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="An evaluation: its run, stage, or result.json.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Another evaluation of the same problems.", metavar="B")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare two evaluations on the problems that both have: paired differences with intervals and permutation tests."""
    from strop.evaluation.compare import compare as compare_files
    from strop.evaluation.results import read_eval
    from strop.reports.evaluations import comparison_lines, comparison_table
    from strop.reports.terminal import print_table, printable

    found = compare_files(read_eval(first), read_eval(second))
    for reason in found.stale:
        typer.echo(printable(f"warning: {reason}"), err=True)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    for line in comparison_lines(found):
        typer.echo(printable(line))
    print_table(comparison_table(found), wrapped=("metric",))


@app.command()
def leaderboard(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Directories that hold runs; default: `runs`.", metavar="DIR...")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The page; default: leaderboard.html in the first directory.")] = None,
) -> None:
    """Rank every evaluation below some directories within its benchmark: tables, and a page with a JSON file next to it."""
    from strop.evaluation.results import gather
    from strop.reports.evaluations import leaderboard_page, leaderboard_table
    from strop.reports.terminal import print_table, printable
    from strop.run_directory import write_json, write_text

    places = directories or [Path("runs")]
    board = gather(places)
    page = out or places[0] / "leaderboard.html"
    write_text(page, leaderboard_page(board))
    write_json(page.with_suffix(".json"), board.as_json())
    for benchmark, entries in board.benchmarks.items():
        typer.echo(printable(f"\n{benchmark}"))
        table = leaderboard_table(entries)
        print_table(table, without=("pass@k", "length", "truncated", "tool errors"), wrapped=("run", "settings"))
    for reason in board.left_out:
        typer.echo(printable(f"left out: {reason}"), err=True)
    typer.echo(f"\n{page}")


@app.command(name="arena-hard")
def arena_hard(
    questions: Annotated[Path, typer.Argument(help="Arena-Hard's question.jsonl, v0.1 or v2.0.", metavar="QUESTIONS")],
    baseline: Annotated[Path, typer.Option(help="The baseline's model_answer file.")],
    judge: Annotated[Path, typer.Option(help="A TOML file with the keys of a judge.")],
    answers: Annotated[Path, typer.Option(help="The model's model_answer file.")],
    think_tag: Annotated[str | None, typer.Option(help="Tag of thoughts, which the judge does not see.")] = None,
    category: Annotated[list[str] | None, typer.Option(help="Ask only questions of this category. Repeatable.")] = None,
    runs: Runs = Path("runs"),
    name: Annotated[str | None, typer.Option(help="Name of the result; default: `<questions>-<model>`.")] = None,
) -> None:
    """Arena-Hard: how often a judge prefers a model's answers to a baseline's, in both orders. The same command resumes."""
    from strop.config import load_toml, validate
    from strop.evaluation import arena_hard as arena
    from strop.evaluation.results import refuse_to_replace, write_eval
    from strop.reports.terminal import printable
    from strop.rewards.judge import JudgeConfig

    asked = arena.read_questions(questions, categories=category or ())
    config = arena.with_room_to_answer(validate(JudgeConfig, load_toml(judge), place=str(judge)))
    ours, theirs = arena.read_answers(answers), arena.read_answers(baseline)
    benchmark = "/".join([questions.resolve().parent.name, *(["+".join(category)] if category else [])])
    place = runs / (name or f"{benchmark}-{ours.model}".replace("/", "__"))
    if not config.service.cache:
        cached = config.service.model_copy(update={"cache": str(place / "judgements")})
        config = config.model_copy(update={"service": cached})
    match = arena.Match(benchmark=benchmark, questions=asked, answers=ours, baseline=theirs, config=config, think_tag=think_tag)
    found, problems = match.result(asyncio.run(match.judge()))
    refuse_to_replace(place / "eval", found)
    write_eval(place / "eval", found, problems)
    typer.echo(
        printable(
            f"{found['run']}: preferred in {found['accuracy']:.1%} [{found['accuracy_low']:.1%},"
            f" {found['accuracy_high']:.1%}] of {found['num_tasks']} questions; {found['num_without_answer']} without an"
            f" answer, {found['num_without_verdict']} without a verdict -> {place}"
        )
    )
