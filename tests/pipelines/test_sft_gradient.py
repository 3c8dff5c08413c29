"""An SFT stage says so once when its gradient is zero: weights that are gone learn nothing and look as if all were well."""

import torch
from transformers import AutoModelForCausalLM

from scripted_runs import RECIPE, Watching, make_recipe, recipe_of, run_recipe


def told(progress):
    return [each for each in progress.warnings if "the gradient is zero" in each]


def test_a_gradient_of_zero_is_told_once_and_another_is_no_news(tmp_path):
    progress = Watching()
    run = run_recipe(tmp_path / "run", make_recipe(steps=1), progress=progress, until="sft").run
    assert told(progress) == []

    model = AutoModelForCausalLM.from_pretrained(run.stage("base").model)
    for parameter in model.parameters():  # of weights that are all 0 every gradient is 0
        torch.nn.init.zeros_(parameter)
    model.save_pretrained(run.stage("base").model)
    stages = {"base": {"kind": "model", "path": str(run.stage("base").model)}, "sft": RECIPE["stages"]["sft"]}
    recipe = recipe_of(stages)
    run_recipe(tmp_path / "zeros", recipe, progress=progress)
    assert told(progress) == ["step 1: the gradient is zero, so nothing is learnt. A learning rate may be far too high."]
