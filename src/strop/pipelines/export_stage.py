"""Writes a model directory to give away: weights and tokenizer as they are, a model card, and the whole lineage."""

from __future__ import annotations

import shutil
from pathlib import Path

from strop.pipelines.recipe import ExportStage
from strop.pipelines.stage import StageContext, model_of
from strop.runs import read_json, write_directory, write_json

_WRITTEN_ANEW = ("README.md", "lineage.json")


async def run_export_stage(context: StageContext, stage: ExportStage) -> tuple[Path, str]:
    """Copy and write; returns the directory and one sentence about it."""
    context.progress.stage_started(context.name, stage.kind, 1, 0)
    model = model_of(context.run, stage.init)
    chain = [each for each in ancestry(context, stage.init) if context.run.stage(each).lineage.exists()]
    lineage = {name: read_json(context.run.stage(name).lineage) for name in chain}

    def fill(directory: Path) -> None:
        for file in sorted(model.iterdir()):
            if file.is_file() and file.name not in _WRITTEN_ANEW:
                shutil.copyfile(file, directory / file.name)
        write_json(directory / "lineage.json", lineage)
        (directory / "README.md").write_text(model_card(context, stage, chain), encoding="utf-8")

    write_directory(context.directory.model, fill)
    return context.directory.model, f"the model of {stage.init}, with its card and the lineage of {len(chain)} stages"


def ancestry(context: StageContext, name: str) -> list[str]:
    """`name` and every stage that it stands on, in the order in which they ran."""
    stages = context.recipe.stages
    found = {name}
    for each in reversed(list(stages)):  # behind those that it stands on
        if each in found:
            found |= {one.stage for one in stages[each].inputs()}
    return [each for each in stages if each in found]


def model_card(context: StageContext, stage: ExportStage, chain: list[str]) -> str:
    """What somebody has to know who gets the directory and nothing else, as Markdown with the hub's header."""
    recipe = context.recipe
    lines = ["---", "library_name: transformers", "tags: [strop]", "---", "", f"# {recipe.name}", ""]
    lines += [f"{recipe.description}", ""] if recipe.description else []
    lines += ["Made by strop. Its lineage, stage by stage; `lineage.json` has every key:", ""]
    lines += ["| stage | kind | stands on | what came of it |", "| --- | --- | --- | --- |"]
    for name in chain:
        each = recipe.stages[name]
        inputs = ", ".join(f"{one.stage} ({one.key})" for one in each.inputs()) or "–"
        summary = str(read_json(context.run.stage(name).done)["summary"]).replace("|", "\\|")
        lines.append(f"| {name} | {each.kind} | {inputs} | {summary} |")
    lines.append("")
    if stage.results:
        lines += ["| evaluation | of | accuracy | 95 % interval | tasks | k |", "| --- | --- | --- | --- | --- | --- |"]
        for name in stage.results:
            figures = read_json(context.run.stage(name).evaluation)
            [of] = [one.stage for one in recipe.stages[name].inputs() if one.key == "init"]
            accuracy, interval = "–", "–"
            if "accuracy" in figures:
                accuracy = f"{figures['accuracy']:.3f}"
                interval = f"{figures['accuracy_low']:.3f} to {figures['accuracy_high']:.3f}"
            lines.append(f"| {name} | {of} | {accuracy} | {interval} | {figures['num_tasks']} | {figures['k']} |")
        lines.append("")
    return "\n".join(lines)
