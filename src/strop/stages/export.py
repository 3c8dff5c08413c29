"""Writes a model directory to give away: weights and tokenizer as they are, a model card, and the whole lineage."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import Field

from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Input, Machine, Product, Stage, StageResult
from strop.run_directory import read_json, write_directory, write_json
from strop.stages.context import StageContext, product_of


class Export(Stage):
    """A model directory to give away, with a model card and the lineage of every stage that it comes from."""

    makes = Product.MODEL

    class Config(Stage.Config):
        """Keys of `kind = "export"`."""

        init: str = Field(description="Stage whose model is exported.")
        results: tuple[str, ...] = Field(default=(), description="Evaluations that the model card quotes.")

    config: Config

    def inputs(self) -> tuple[Input, ...]:
        return (*super().inputs(), *Input.each("results", self.config.results, Product.EVALUATION))

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        return Estimate(arithmetic="a model directory with card and lineage")

    async def run(self, context: StageContext) -> StageResult:
        """Copy the model, and write the card and the lineage."""
        context.started(1, 0)
        init = self.config.init
        model = product_of(context.run, init)
        chain = [each for each in context.recipe.with_parents([init]) if context.run.stage(each).lineage.exists()]
        lineage = {name: read_json(context.run.stage(name).lineage) for name in chain}

        def fill(directory: Path) -> None:
            for file in sorted(model.iterdir()):
                if file.is_file():
                    shutil.copyfile(file, directory / file.name)
            write_json(directory / "lineage.json", lineage)
            (directory / "README.md").write_text(model_card(context, self.config, chain), encoding="utf-8")

        write_directory(context.directory.model, fill)
        summary = f"the model of {init}, with its card and the lineage of {len(chain)} stages"
        return StageResult(summary=summary, product=context.directory.model)


def model_card(context: StageContext, stage: Export.Config, chain: list[str]) -> str:
    """Return the model card: Markdown with the hub's header, for readers who have only the directory."""
    recipe = context.recipe
    lines = ["---", "library_name: transformers", "tags: [strop]", "---", "", f"# {recipe.name}", ""]
    lines += [f"{recipe.description}", ""] if recipe.description else []
    lines += ["Made by strop. Its lineage, stage by stage; `lineage.json` has every key:", ""]
    lines += ["| stage | kind | reads from | result |", "| --- | --- | --- | --- |"]
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
            accuracy = f"{figures['accuracy']:.3f}" if "accuracy" in figures else "–"
            has_interval = "accuracy_low" in figures
            interval = f"{figures['accuracy_low']:.3f} to {figures['accuracy_high']:.3f}" if has_interval else "–"
            size = f"{figures.get('num_tasks', '–')} | {figures.get('k', '–')}"
            lines.append(f"| {name} | {recipe.stages[name].init} | {accuracy} | {interval} | {size} |")
        lines.append("")
    return "\n".join(lines)
