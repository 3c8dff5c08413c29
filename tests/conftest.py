"""What every test shares: no network, no chatter, and one whole scripted run that several tests look at."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"


@pytest.fixture(scope="session")
def scripted_run(tmp_path_factory):
    """A whole run on a scripted engine: model, two SFT steps, evaluation, two RL steps, evaluation, report."""
    from scripted_runs import run_recipe

    return run_recipe(tmp_path_factory.mktemp("runs") / "scripted")
