"""Two processes in one run directory would write over each other."""

from __future__ import annotations

import fcntl
import os

import pytest

from scripted_runs import make_recipe, run_recipe
from strop.errors import RunError


def test_a_run_directory_that_is_in_use_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    descriptor = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(RunError, match="another strop is running there"):
            run_recipe(tmp_path / "run", make_recipe())
        assert not any((tmp_path / "run").iterdir())
    finally:
        os.close(descriptor)
    run_recipe(tmp_path / "run", make_recipe())
