"""What the policy may call: one tool a file."""

from strop.tools.function import FunctionTool, tool
from strop.tools.protocol import Tool, ToolResult, ToolSpec
from strop.tools.python import PythonTool, PythonToolConfig

__all__ = ["FunctionTool", "PythonTool", "PythonToolConfig", "Tool", "ToolResult", "ToolSpec", "tool"]
