"""What the policy may call: one tool a file."""

from strop.tools.function import tool
from strop.tools.limits import open_tools
from strop.tools.protocol import Tool, ToolResult, ToolSpec
from strop.tools.python import Python

__all__ = ["Python", "Tool", "ToolResult", "ToolSpec", "open_tools", "tool"]
