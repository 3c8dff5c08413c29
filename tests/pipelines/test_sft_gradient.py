"""An SFT stage says so once when its gradient is zero: weights that are gone learn nothing and look as if all were well."""

from dataclasses import replace

from scripted_runs import Watching, make_recipe, run_recipe
from strop.pipelines import sft_stage


def test_a_gradient_of_zero_is_told_once(tmp_path, monkeypatch):
    async def without_gradient(*args, **options):
        return replace(await update(*args, **options), grad_norm=0.0)

    update, progress = sft_stage.update_or_keep, Watching()
    monkeypatch.setattr(sft_stage, "update_or_keep", without_gradient)
    run_recipe(tmp_path / "run", make_recipe(steps=1), progress=progress)
    assert [each for each in progress.warnings if "the gradient is zero" in each] == [
        "step 1: the gradient is zero, so nothing is learnt. A learning rate may be far too high."
    ]


def test_a_gradient_that_is_not_zero_is_no_news(tmp_path):
    progress = Watching()
    run_recipe(tmp_path / "run", make_recipe(steps=1), progress=progress)
    assert not [each for each in progress.warnings if "the gradient is zero" in each]
