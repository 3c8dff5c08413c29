"""`python late_driver.py RECIPE RUN [hold] [A.B=C ...]`: train with a real sandbox whose answers come late, in no order.

With `hold`, the first checkpoint of the second RL step stops half written and never ends. `A.B=C` is what `--set` takes.
"""

import asyncio
import random
import signal
import sys
import time
from pathlib import Path

from strop.pipeline.run import train
from strop.recipe.load import load_recipe
from strop.reports.trackers import Progress
from strop.sandbox.local import LocalSandbox
from strop.training.weights import Snapshot

MAX_LATENCY_S = 0.3


class LateSandbox:
    """A real sandbox behind a slow line."""

    def __init__(self, sandbox):
        self.sandbox = sandbox
        self.draw = random.SystemRandom()

    async def run(self, request):
        result = await self.sandbox.run(request)
        await asyncio.sleep(self.draw.uniform(0, MAX_LATENCY_S))
        return result

    def verify(self, request):
        return self.sandbox.verify(request)


def write_half(snapshot, directory):
    if "/rl/" not in str(directory) or "step-000002" not in directory.name:
        write_whole(snapshot, directory)
        return
    snapshot.write_weights(directory)
    time.sleep(3600)


write_whole = Snapshot.write


async def main(recipe, run, overrides):
    async with LocalSandbox() as sandbox:
        await train(load_recipe(recipe, overrides), run, progress=Progress(), runner=LateSandbox(sandbox))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has jobs in the background ignore it
    words = sys.argv[3:]
    if words[:1] == ["hold"]:
        Snapshot.write = write_half
        del words[0]
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), words))
