"""Time to read 0.1 MB and 1 MB of hostile text as tool calls: it must grow with the length of the text, not with its square.

python benchmarks/tool_calls.py writes benchmarks/results/tool_calls.json. Times are processor times, the best of five. The bars
hold for floods of tags. Texts that make the JSON decoder fail at every tag are in the table for comparison: each failure is a
Python exception, which costs several microseconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from strop.rollout.tool_calls import parse_tool_calls
from strop.run_directory import write_json

RESULTS = Path(__file__).parent / "results" / "tool_calls.json"
SMALL, LARGE = 100_000, 1_000_000  # characters
MAX_S, MAX_RATIO = 0.1, 15.0
FLOODS = {"opening tags": "<tool_call>", "tags and spaces": "<tool_call>    ", "tags and words": "<tool_call>words"}
OTHERS = {
    "closing tags": "</tool_call>",
    "nested lists": "<tool_call>" + "[" * 500,
    "valid calls": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "empty calls": "<tool_call></tool_call>",
    "open objects": "<tool_call>{",
    "open strings": '<tool_call>["',
}


def seconds(text: str) -> float:
    """Return the processor time of one parse, the best of five."""
    times = []
    for _ in range(5):
        started_at = time.thread_time()
        parse_tool_calls(text, max_calls=4)
        times.append(time.thread_time() - started_at)
    return min(times)


def main() -> int:
    rows = {}
    for name, unit in (FLOODS | OTHERS).items():
        small, large = (seconds((unit * (size // len(unit) + 1))[:size]) for size in (SMALL, LARGE))
        rows[name] = {"seconds_0.1_mb": round(small, 5), "seconds_1_mb": round(large, 5), "ratio": round(large / small, 1)}
    bars = {}
    for name in FLOODS:
        bars[f"{name}, 1 MB in seconds"] = {"value": rows[name]["seconds_1_mb"], "bar": MAX_S}
        bars[f"{name}, 1 MB against 0.1 MB"] = {"value": rows[name]["ratio"], "bar": MAX_RATIO}
    for bar in bars.values():
        bar["holds"] = bar["value"] <= bar["bar"]
    write_json(RESULTS, {"command": "python benchmarks/tool_calls.py", "bars": bars, "texts": rows})
    print(f"{'text':<16} {'0.1 MB':>10} {'1 MB':>10} {'ratio':>6}")
    for name, row in rows.items():
        print(f"{name:<16} {row['seconds_0.1_mb']:>8.4f} s {row['seconds_1_mb']:>8.4f} s {row['ratio']:>6.1f}")
    for name, bar in bars.items():
        print(f"{name}: {bar['value']}, at most {bar['bar']}: {'holds' if bar['holds'] else 'DOES NOT HOLD'}")
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
