"""Three thousand calls of all kinds leave nothing behind. `make bench-sandbox-soak` runs a hundred thousand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "sandbox_soak.py"
NUM_CALLS = 3_000


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.timeout(400)
def test_after_three_thousand_calls_a_service_holds_no_more_than_after_three_hundred(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--calls", str(NUM_CALLS), "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (tmp_path / "sandbox_soak.json").exists(), done.stderr
    results = json.loads((tmp_path / "sandbox_soak.json").read_text())
    assert results["num_calls"] == NUM_CALLS
    assert {name: bar for name, bar in results["bars"].items() if not bar["holds"]} == {}, results["wrong"]
