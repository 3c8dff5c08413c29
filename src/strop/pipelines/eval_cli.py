"""`strop eval ...`: words typed by a person -> a config -> one call."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from strop.pipelines.stopping import run_until_stopped

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class EvalGroup(TyperGroup):
    """`strop eval RECIPE ...` is `strop eval run RECIPE ...`: what is no command's name is the recipe of an evaluation."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=EvalGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""
Evaluate models, compare evaluations problem by problem, and keep a leaderboard.

- `strop eval recipes/eval/math.toml --stage aime24 --model DIR` evaluates a model directory; `run` may be left out.
- `strop eval compare runs/a runs/b` tests the difference on the problems that both have.
- `strop eval arena-hard question.jsonl ...` has a judge compare answers with a baseline's.
- `strop eval leaderboard runs` ranks every evaluation below a directory, on a page.
""",
)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.", metavar="RECIPE", show_default=False)],
    model: Annotated[Path, typer.Option("--model", help="The model directory to evaluate.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key, as in stages.rl.steps=10. May be given often.", metavar="A.B=C"),
    ] = None,
    stage: Annotated[str | None, typer.Option("--stage", help="Which evaluation of the recipe; the first by default.")] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Where run directories lie.")] = Path("runs"),
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the result; `eval-<stage>-<digest of the model>` by default.")
    ] = None,
) -> None:
    """Evaluate a model directory as one of the recipe's evaluations would: pass@1 with its interval, pass@k, maj@k, lengths."""
    from strop.pipelines.evaluate import evaluate_model, first_evaluation
    from strop.pipelines.lineage import model_digest
    from strop.pipelines.load import load_recipe
    from strop.pipelines.model_stage import find_model
    from strop.reports.console import ConsoleProgress

    loaded = load_recipe(recipe, overrides or [], name=name)
    if name is None:
        digest = model_digest(find_model(str(model)))[:12]
        loaded = loaded.model_copy(update={"name": f"eval-{stage or first_evaluation(loaded)}-{digest}"})
    progress = ConsoleProgress()
    run_until_stopped(evaluate_model(loaded, model, runs / loaded.name, stage=stage, progress=progress), progress)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="An evaluation: its run, stage, or result.json.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Another one of the same problems.", metavar="B")],
    as_json: Json = False,
) -> None:
    """Compare two evaluations on the problems that both have: paired differences with intervals and permutation tests."""
    from strop.evaluation.compare import compare as compare_files
    from strop.evaluation.results import read_eval
    from strop.reports.evaluations import comparison_lines, comparison_table

    found = compare_files(read_eval(first), read_eval(second))
    for told in found.stale:
        typer.echo(f"warning: {told}", err=True)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    for line in comparison_lines(found):
        typer.echo(line)
    _print_table(comparison_table(found))


@app.command()
def leaderboard(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Directories that hold runs; `runs` by default.", metavar="DIR...")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The page to write; leaderboard.html in the first directory by default.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank every evaluation below some directories within its benchmark: tables, and a page with a JSON file beside it."""
    from strop.evaluation.leaderboard import gather
    from strop.reports.evaluations import leaderboard_page, leaderboard_table
    from strop.runs import write_json, write_text

    places = directories or [Path("runs")]
    board = gather(places)
    page = out or places[0] / "leaderboard.html"
    write_text(page, leaderboard_page(board))
    write_json(page.with_suffix(".json"), board.as_json())
    if as_json:
        typer.echo(json.dumps(board.as_json(), indent=2))
        return
    for benchmark, entries in board.benchmarks.items():
        typer.echo(f"\n{benchmark}")
        _print_table(leaderboard_table(list(entries)))
    for reason in board.left_out:
        typer.echo(f"left out: {reason}", err=True)
    typer.echo(f"\n{page}")


@app.command()
def harness(
    name: Annotated[Literal["bfcl-eval", "lm-eval"], typer.Argument(help="bfcl-eval or lm-eval.", metavar="HARNESS")],
    address: Annotated[str, typer.Option("--address", help="http://host:port of an OpenAI-compatible server.")],
    model: Annotated[str, typer.Option("--model", help="What the server (lm-eval) or the harness (bfcl-eval) calls it.")],
    tasks: Annotated[str, typer.Option("--tasks", help="Tasks or categories, separated by commas.")],
    out: Annotated[Path, typer.Option("--out", help="Where the harness writes.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            help="bfcl-eval: the model directory. The server must call its model by the absolute path of it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the commands that run another harness against a served model, for a shell of its own environment."""
    from strop.errors import ConfigError
    from strop.evaluation.harnesses import bfcl_commands, lm_eval_command

    if name == "lm-eval":
        commands = [lm_eval_command(address, model=model, tasks=tasks.split(","), out=out)]
    elif tokenizer is None:
        raise ConfigError("bfcl-eval renders prompts itself: give --tokenizer, the model directory.")
    else:
        commands = bfcl_commands(address, model=model, tokenizer=tokenizer, categories=tasks.split(","), out=out)
    for command in commands:
        variables = [f"{key}={shlex.quote(value)}" for key, value in command.environment.items()]
        typer.echo(" ".join([*variables, shlex.join(command.words)]))


@app.command(name="import")
def import_results(
    name: Annotated[Literal["bfcl-eval", "lm-eval"], typer.Argument(help="bfcl-eval or lm-eval.", metavar="HARNESS")],
    directory: Annotated[Path, typer.Argument(help="What the harness wrote.", metavar="DIR")],
    runs: Annotated[Path, typer.Option("--runs", help="Where results are put, one directory each.")] = Path("runs"),
    label: Annotated[
        str | None, typer.Option("--name", help="What the directories' names begin with; HARNESS by default.")
    ] = None,
) -> None:
    """Read another harness's result files into ours, for comparisons and the leaderboard."""
    from strop.evaluation.harnesses import read_bfcl, read_lm_eval
    from strop.evaluation.results import refuse_to_replace, write_eval

    harvest = read_bfcl(directory) if name == "bfcl-eval" else read_lm_eval(directory)
    places = [runs / f"{label or name}-{found.name}" for found in harvest.found]
    for place, found in zip(places, harvest.found, strict=True):
        refuse_to_replace(place / "eval", found.result)
    for place, found in zip(places, harvest.found, strict=True):
        write_eval(place / "eval", found.result, found.problems)
        typer.echo(f"{found.result['benchmark']}: {found.result['accuracy']:.3f} of {found.result['num_tasks']} -> {place}")
    for note in harvest.notes:
        typer.echo(note, err=True)


@app.command(name="arena-hard")
def arena_hard(
    questions: Annotated[
        Path, typer.Argument(help="Arena-Hard's question.jsonl, v0.1 or v2.0.", metavar="QUESTIONS", show_default=False)
    ],
    baseline: Annotated[Path, typer.Option("--baseline", help="The baseline's model_answer file.", show_default=False)],
    judge: Annotated[Path, typer.Option("--judge", help="A TOML file with the keys of a judge.", show_default=False)],
    answers: Annotated[
        Path | None, typer.Option("--answers", help="The model's model_answer file.", show_default=False)
    ] = None,
    service: Annotated[
        Path | None, typer.Option("--service", help="Or a TOML file: where the model is served.", show_default=False)
    ] = None,
    think_tag: Annotated[
        str | None, typer.Option("--think-tag", help="Show the judge what stands behind thoughts alone.", show_default=False)
    ] = None,
    category: Annotated[
        list[str] | None, typer.Option("--category", help="Ask questions of this one alone; several times.", show_default=False)
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Where results are put, one directory each.")] = Path("runs"),
    name: Annotated[str | None, typer.Option("--name", help="Of the result; `<questions>-<model>` by default.")] = None,
) -> None:
    """Arena-Hard: how often a judge prefers a model's answers to a baseline's, in both orders. Goes on after a kill."""
    from strop.config import load_toml, validate
    from strop.errors import ConfigError
    from strop.evaluation import arena_hard as arena
    from strop.evaluation.results import refuse_to_replace, write_eval
    from strop.rewards.scorers.chat_client import ChatServiceConfig
    from strop.rewards.scorers.judge import JudgeConfig

    if (answers is None) == (service is None):
        raise ConfigError("give either --answers (a file of the model's answers) or --service (where it is served), not both.")
    asked = arena.read_questions(questions, categories=category)
    config = arena.with_room_to_answer(validate(JudgeConfig, load_toml(judge), place=str(judge)))
    other = arena.read_answers(baseline)
    model = None if service is None else validate(ChatServiceConfig, load_toml(service), place=str(service))
    given = None if answers is None else arena.read_answers(answers)
    said_by = given.model if given else model.model if model else ""
    benchmark = "/".join([questions.resolve().parent.name, *(["+".join(category)] if category else [])])
    place = runs / (name or f"{benchmark}-{said_by}".replace("/", "__"))

    async def judged() -> arena.ArenaResult:
        said = given
        if said is None:
            assert model is not None
            kept = model if model.cache else model.model_copy(update={"cache": str(place / "replies")})
            said = await arena.ask_for_answers(asked, kept, place / "answers.jsonl")
        chat = config.service
        kept_judge = chat if chat.cache else chat.model_copy(update={"cache": str(place / "judgements")})
        patient = config.model_copy(update={"service": kept_judge})
        found = await arena.judge_answers(asked, said, other, patient, think_tag=think_tag)
        return arena.result_of(
            found,
            benchmark=benchmark,
            answers=said,
            baseline=other,
            config=patient,
            num_questions=len(asked),
            think_tag=think_tag,
        )

    result = asyncio.run(judged())
    refuse_to_replace(place / "eval", result.figures, told_by=("benchmark", "run", "reward"))
    write_eval(place / "eval", result.figures, result.problems)
    of = result.figures
    typer.echo(
        f"{of['run']}: preferred in {of['accuracy']:.1%} [{of['accuracy_low']:.1%}, {of['accuracy_high']:.1%}] of"
        f" {of['num_tasks']} questions; {of['num_without_answer']} without an answer, {of['num_cut_off']} cut off,"
        f" {of['num_without_verdict']} without a verdict -> {place}"
    )


def _print_table(table: Any) -> None:
    from rich.console import Console

    from strop.reports.sweep_console import as_rich

    Console().print(as_rich(table), markup=False)
