"""Does the two-tools task need both of its tools? The recipe as it is, then its policy without each of them.

    make experiments-two-tools

Runs recipes/two-tools.toml whole, and evaluates the policy that it ends with on the same held-out problems with a tool taken
away: a call of it is answered as one of a tool that is not there. Since that policy was taught both tools, two more arms begin
at the same cold start and make the recipe's RL with one tool alone, so that they may learn to do without the other. RL gives up
when several steps in a row earn no reward at all, which is then the arm's result: its accuracy in all rollouts until there.
A second call goes on where the first ended. Writes experiments/results/two-tools.{json,txt}.

The bars: accuracy at most 0.5 after the cold start and at least 0.7 after RL with both tools; at most 0.3 with a tool taken
away, and at most 0.3 of RL with one tool alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.errors import CannotLearnError, UserError
from strop.pipeline.run import train
from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe
from strop.reports.trackers import Progress
from strop.run_directory import RunDirectory, read_lines, write_json, write_text
from strop.stages.rl import RL

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "two-tools.toml"
RESULTS = ROOT / "experiments" / "results"
COMMAND = "make experiments-two-tools"
TOOLS = ("search", "python")
SHOWN = ("accuracy", "accuracy_low", "accuracy_high", "tool_calls_mean", "tool_error_rate", "length_tokens_mean")
COUNTS = ("num_tasks", "k", "gave_up_after_steps")
BARS = (  # evaluation, its accuracy is to be, this
    ("before", "<=", 0.5),
    ("after", ">=", 0.7),
    *((f"without {name}", "<=", 0.3) for name in TOOLS),
    ("without any tool", "<=", 0.3),
    *((f"RL with {name} alone", "<=", 0.3) for name in TOOLS),
)


async def run_all(runs: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Every evaluation by its name; runs are resumable directories below `runs`."""
    recipe = load_recipe(RECIPE, overrides)
    evaluations: dict[str, Any] = {}

    async def run(name: str, of: Recipe) -> RunDirectory:
        result = await train(of.model_copy(update={"name": name}), runs / name, progress=Progress(), command=COMMAND)
        evaluations.update({titles[figures["stage"]]: figures for figures in result.evaluations})
        return result.run

    titles = {"before": "before", "after": "after"}
    whole = await run("whole", recipe)
    policy, start = whole.stage("rl").model, whole.stage("sft").model
    for name in TOOLS:
        titles = {"after": f"without {name}"}
        await run(f"without-{name}", evaluated(with_tools(recipe, set(TOOLS) - {name}), policy))
    titles = {"after": "without any tool"}
    await run("without-any", evaluated(recipe, policy, tools="none"))
    for name in TOOLS:
        titles = {"after": f"RL with {name} alone"}
        directory = RunDirectory(runs / f"{name}-alone")
        if not has_given_up(directory, recipe):
            try:
                await run(directory.path.name, trained(with_tools(recipe, {name}), start))
            except CannotLearnError:
                if not has_given_up(directory, recipe):
                    raise
        if has_given_up(directory, recipe):
            evaluations[titles["after"]] = given_up(directory, recipe)
    return evaluations


def has_given_up(run: RunDirectory, recipe: Recipe) -> bool:
    """Whether the last steps of its RL earned nothing that could be learnt from, so that it ended."""
    steps = _steps(run)
    return bool(steps) and steps[-1].get("update/stuck_steps", 0) >= _rl(recipe).give_up_after


def given_up(run: RunDirectory, recipe: Recipe) -> dict[str, Any]:
    """What the rollouts of RL amount to, from the first step to the one at which it gave up."""
    steps, rl = _steps(run), _rl(recipe)
    keys = ("accuracy", "tool_calls_mean", "length_tokens_mean")
    mean = {key: sum(step[f"rollout/{key}"] for step in steps) / len(steps) for key in keys}
    return {**mean, "num_tasks": len(steps) * rl.tasks_per_step, "k": rl.group_size, "gave_up_after_steps": len(steps)}


def _rl(recipe: Recipe) -> RL.Config:
    stage = recipe.stages["rl"]
    assert isinstance(stage, RL)
    return stage.config


def _steps(run: RunDirectory) -> list[dict[str, Any]]:
    """Of equal size: none has a rollout that is void, or a mean of steps would be no mean of rollouts."""
    steps = [line for line in read_lines(run.metrics) if line["stage"] == "rl"] if run.metrics.exists() else []
    assert not any(step["rollout/void_fraction"] for step in steps), f"{run.metrics}: a step has rollouts that are void"
    return steps


def with_tools(recipe: Recipe, names: set[str]) -> Recipe:
    """The recipe with these of its tools alone; a call of another is one of an unknown tool."""
    return recipe.model_copy(update={"tools": {name: tool for name, tool in recipe.tools.items() if name in names}})


def evaluated(recipe: Recipe, model: Path, *, tools: str = "real") -> Recipe:
    """The recipe's last evaluation of the model in a directory."""
    after = recipe.stages["after"].replaced(init="model", tools=tools)
    return recipe.model_copy(update={"stages": {"model": _opened(recipe, model), "after": after}})


def trained(recipe: Recipe, model: Path) -> Recipe:
    """The recipe's RL from the model in a directory, and its last evaluation."""
    rl = recipe.stages["rl"].replaced(init="model")
    stages = {"model": _opened(recipe, model), "rl": rl, "after": recipe.stages["after"]}
    return recipe.model_copy(update={"stages": stages})


def _opened(recipe: Recipe, model: Path) -> Any:
    return recipe.stages["base"].replaced(path=str(model.resolve()), tiny=None, demonstrator=None)


def summarise(found: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The figures of each evaluation, and the bars."""
    figures = {
        name: {key: round(each[key], 4) for key in SHOWN if key in each} | {key: each[key] for key in COUNTS if key in each}
        for name, each in found.items()
    }
    bars = {}
    for name, sign, bar in BARS:
        value = figures[name]["accuracy"]
        bars[name] = {"value": value, "bar": f"{sign} {bar}", "holds": value <= bar if sign == "<=" else value >= bar}
    return {"command": COMMAND, "set": list(overrides), "figures": figures, "bars": bars}


def table(results: Mapping[str, Any]) -> str:
    """A row for each evaluation, then the bars."""
    rows = [f"{'evaluation':<22} {'accuracy':>8}  {'95% interval':<16} {'calls':>6} {'errors':>7} {'tokens':>7}"]
    for name, each in results["figures"].items():
        errors = f"{each['tool_error_rate']:.1%}" if "tool_error_rate" in each else "-"
        rows.append(
            f"{name:<22} {each['accuracy']:>8.1%}  {_interval(each):<16}"
            f" {each['tool_calls_mean']:>6.2f} {errors:>7} {each['length_tokens_mean']:>7.1f}"
        )
    rows.append("")
    for name, bar in results["bars"].items():
        verdict = "holds" if bar["holds"] else "DOES NOT HOLD"
        rows.append(f"accuracy, {name:<22} {bar['value']:>7.1%}  {bar['bar']:<7} {verdict}")
    return "\n".join(rows)


def _interval(each: Mapping[str, Any]) -> str:
    if "gave_up_after_steps" in each:
        return f"gave up, step {each['gave_up_after_steps']}"
    return f"{each['accuracy_low']:.1%} to {each['accuracy_high']:.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "experiments-two-tools")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for two-tools.json and two-tools.txt")
    parser.add_argument("--set", action="append", default=["threads=1"], help="a key of the recipe, as of strop train")
    arguments = parser.parse_args(argv)
    try:
        found = asyncio.run(run_all(arguments.runs, arguments.set))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = summarise(found, arguments.set)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "two-tools.json", results)
    text = table(results)
    write_text(arguments.out / "two-tools.txt", text + "\n")
    print(text)
    return 0 if all(bar["holds"] for bar in results["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
