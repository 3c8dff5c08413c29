"""The workload that every engine of the comparison plays, and how its process is told to. Needs the standard library alone."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NUM_PROMPTS, GROUP_SIZE, NUM_TURNS = 8, 8, 3
PROMPT_TOKENS = (96, 192)  # from, to
COMPLETION_TOKENS, OBSERVATION_TOKENS = 64, 24
TOOL_S = (0.05, 0.5)
MAX_LENGTH = 512  # 432 are needed; this fills whole blocks of the KV cache
NUM_CONVERSATIONS = NUM_PROMPTS * GROUP_SIZE
NUM_COMPLETION_TOKENS = NUM_CONVERSATIONS * NUM_TURNS * COMPLETION_TOKENS


@dataclass(frozen=True)
class Conversation:
    prompt: tuple[int, ...]
    observations: tuple[tuple[int, ...], ...]  # after every turn but the last
    tool_s: tuple[float, ...]
    seed: int


def conversations(seed: int = 0) -> list[Conversation]:
    """Groups of one prompt each, of ids that every tokenizer of this size has; the same for every engine."""
    rng = random.Random(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1000, 40000) for _ in range(length))

    made = []
    for _ in range(NUM_PROMPTS):
        prompt = ids(rng.randint(*PROMPT_TOKENS))
        for _ in range(GROUP_SIZE):
            observations = tuple(ids(OBSERVATION_TOKENS) for _ in range(NUM_TURNS - 1))
            tool_s = tuple(rng.uniform(*TOOL_S) for _ in observations)
            made.append(Conversation(prompt, observations, tool_s, rng.randrange(2**31)))
    return made


def memory_kib(field: str) -> int:
    """A line of /proc/self/status: VmRSS, RssAnon, or another."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


class AnonymousPeak:
    """The most anonymous memory that this process has held, in KiB, looked at every 10 ms.

    Pages of mapped files are left out: the system may take them back at any moment, and reading a model maps its files.
    """

    def __init__(self) -> None:
        self.kib = memory_kib("RssAnon")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.kib = max(self.kib, memory_kib("RssAnon"))
            time.sleep(0.01)


def serve(play: Callable[[], float], peak: AnonymousPeak | None = None) -> None:
    """Play the workload for every line that comes in; answer with what `play` measured, in seconds, and the memory."""
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        seconds = play()
        print(json.dumps({"seconds": seconds, "peak_kib": peak.kib if peak else 0}), flush=True)
