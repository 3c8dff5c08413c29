"""A tool: rolls dice."""

import random

from strop import Tool
from strop.tools import ToolResult, ToolSpec
from strop.types import ToolOutcome


class Dice(Tool):
    spec = ToolSpec(name="roll", description="Rolls two dice.", parameters={"type": "object", "properties": {}})

    async def call(self, arguments, *, seed):
        total = sum(random.Random(seed).choices(range(1, 7), k=2))
        return ToolResult(outcome=ToolOutcome.STDOUT, text=str(total), duration_s=0.0)
