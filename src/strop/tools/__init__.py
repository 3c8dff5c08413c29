"""What the policy may call: one tool a file."""

from strop.tools.function import Function, FunctionTool, tool
from strop.tools.limits import open_tools
from strop.tools.protocol import Tool, ToolKind, ToolResult, ToolSpec
from strop.tools.python import Python, PythonTool

__all__ = [
    "Function",
    "FunctionTool",
    "Python",
    "PythonTool",
    "Tool",
    "ToolKind",
    "ToolResult",
    "ToolSpec",
    "open_tools",
    "tool",
]
