"""A tool and an environment are a few lines: those of the guides, with what they import."""

import ast
import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "name", "limit"), [("own-tool", "convert", 15), ("own-environment", "GuessTheNumber", 20)])
def test_the_tool_of_the_guide_is_under_15_lines_and_the_environment_under_20(page, name, limit):
    [(code, node)] = [
        (code, node)
        for code in FENCE.findall((GUIDES / f"{page}.md").read_text(encoding="utf-8"))
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    ]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    body = code.splitlines()[first - 1 : node.end_lineno]
    imports = [line for line in code.splitlines() if line.startswith(("import ", "from "))]
    assert len([line for line in (*imports, *body) if line.strip()]) < limit
