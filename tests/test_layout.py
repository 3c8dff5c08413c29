"""The size of the package, folder by folder: files, code lines, import circles and the words of its prose."""

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "strop"
FILES = {path.relative_to(SOURCE): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
TREES = {path: ast.parse(source) for path, source in FILES.items()}
MARKERS = re.compile(
    r"\b(anew|whoever|whatever comes|nobody|told|besides?|hangs? on|stands? on|stood on|(?:is|are) missed|at its birth|thrice"
    r"|thereby|therein|behind it|gone on|goes on from|made of it|comes of it|owed|put aside|taken over|as it is there|alone)\b",
    re.IGNORECASE,
)


def docstring_of(node: ast.AST) -> ast.stmt | None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return None
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return first if is_text else None


def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(FILES[path]).readline))


def code_lines(path: Path) -> int:
    """Lines that are neither blank nor part of a comment or docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(TREES[path]):
        if (found := docstring_of(node)) is not None:
            docstrings.update(range(found.lineno, (found.end_lineno or 0) + 1))
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokens_of(path):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def prose_of(path: Path) -> str:
    comments = [token.string for token in tokens_of(path) if token.type == tokenize.COMMENT]
    strings = [node.value for node in ast.walk(TREES[path]) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join([*comments, *(text for text in strings if " " in text)])


def runtime_imports(tree: ast.AST) -> list[str]:
    """The modules that `tree` imports when it is imported itself: not inside functions, not for type checkers."""
    found: list[str] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        else:
            found += runtime_imports(node)
    return found


def module_of(path: Path) -> str:
    parts = ("strop", *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The nodes that are left when those without imports are removed again and again; empty without a circle."""
    left = {name: set(names) for name, names in graph.items()}
    while free := [name for name, names in left.items() if not names & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def graph_of_modules() -> dict[str, set[str]]:
    modules = {module_of(path) for path in FILES}
    graph: dict[str, set[str]] = {}
    for path, tree in TREES.items():
        found = {each for each in runtime_imports(tree) if each in modules}
        # `from strop.doctor import parts` reads the module and not what the package holds.
        packages = {each for each in found if any(other.startswith(f"{each}.") for other in found)}
        graph[module_of(path)] = found - packages - {module_of(path)}
    return graph


BUDGETS = {  # lines of each folder; the budget of the layout; and where that is exceeded by more than a tenth, why
    ".": 2434,  # 1400: compressed rollouts, files that several processes write, services that ask for a pause
    "algorithms": 1925,
    "analysis": 768,  # 900
    "cluster": 1580,  # 2500
    "cli": 1178,  # 2000 with doctor and cs336, which check a cluster's nodes and compare a course's functions
    "cs336": 1144,
    "curation": 1318,  # 1600
    "doctor": 1497,
    "engine": 6871,  # 5000: products in C, engines of users, weights that several nodes publish and read, drafts
    "evaluation": 1519,  # 1400
    "pipeline": 1633,  # 1300: plans for hardware that is not there
    "recipe": 924,
    "reports": 2588,  # 3500
    "rewards": 3571,  # 2600: what the graders of the papers and of the course accept
    "rollout": 4933,  # 4000: branches on servers, rollouts over several engines and nodes, turns in pieces
    "runs": 623,
    "sandbox": 9701,  # 7500: four levels with the attacks that test them, services on several machines
    "simulation": 894,  # 900
    "stages": 5679,  # 3800: DPO, reward models, harnesses, rollouts in flight, sets that end a stage
    "tasks": 2648,  # 2200: published data sets in the forms in which they come
    "tools": 2190,  # 2000
    "training": 5076,  # 4500: forests of rows, long rows over several workers, adapters
}
CROWDED: dict[str, int] = {}  # folders with more than 20 files


def test_the_package_does_not_grow() -> None:
    # The goals are older than some 6 900 of the code lines: what released recipes, graders and hand-outs of the papers ask for
    # (4 400), the cluster and rollouts in flight (2 000), trees, drafts and processors (500).
    assert len(FILES) <= 278  # goal: 280
    assert sum(map(code_lines, FILES)) <= 42_345  # goal: 36 000
    assert sum(source.count("\n") for source in FILES.values()) <= 60_694  # goal: 52 000


def test_every_folder_keeps_its_budget() -> None:
    lines: Counter[str] = Counter()
    for path, source in FILES.items():
        lines[path.parts[0] if len(path.parts) > 1 else "."] += source.count("\n")
    assert lines.keys() == BUDGETS.keys()
    assert {folder: num for folder, num in lines.items() if num > BUDGETS[folder]} == {}


def test_no_folder_has_more_than_20_files() -> None:
    found = Counter(path.parent.as_posix() for path in FILES)
    assert {folder: num for folder, num in found.items() if num > CROWDED.get(folder, 20)} == {}


def test_no_modules_and_no_folders_import_each_other() -> None:
    graph = graph_of_modules()
    assert circle_in(graph) == []
    folders: dict[str, set[str]] = {}
    for name, imported in graph.items():
        for other in imported:
            above, below = (each.split(".")[1] if "." in each else "" for each in (name, other))
            if above and below and above != below:
                folders.setdefault(above, set()).add(below)
    assert circle_in(folders) == []


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_every_file_that_is_no_module_is_part_of_the_package() -> None:
    """An editable install finds a file that a wheel leaves out."""
    package = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    listed = {path for pattern in package["package-data"]["strop"] for path in SOURCE.glob(pattern)}
    assert {path for path in SOURCE.rglob("*.*") if path.is_file() and path.suffix not in (".py", ".pyc")} == listed


def test_the_prose_has_few_markers() -> None:
    prose = "\n".join(map(prose_of, FILES))
    assert 1000 * len(MARKERS.findall(prose)) / len(prose.split()) <= 0.3
