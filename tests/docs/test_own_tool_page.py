"""A tool of one's own is a few lines, and so is an environment: those of the guide, with what they import."""

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "own-tool.md"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("name", "limit"), [("convert", 15), ("Guessing", 20)])
def test_the_tool_of_the_guide_is_under_15_lines_and_its_environment_under_20(name, limit):
    [(code, node)] = [
        (code, node)
        for code in FENCE.findall(PAGE.read_text(encoding="utf-8"))
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    ]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    body = code.splitlines()[first - 1 : node.end_lineno]
    imports = [line for line in code.splitlines() if line.startswith(("import ", "from "))]
    assert len([line for line in (*imports, *body) if line.strip()]) < limit
