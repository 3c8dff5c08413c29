"""The pages are in plain English: few of the words that mark another style."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MARKERS = re.compile(
    r"\b(?:anew|whoever|whatever comes|nobody|told|besides?|hangs? on|stands? on|stood on|(?:is|are) missed|at its birth|thrice"
    r"|thereby|therein|behind it|gone on|goes on from|made of it|comes of it|owed|put aside|taken over|as it is there|alone)\b",
    re.IGNORECASE,
)
PER_THOUSAND = 0.3


def prose(text: str) -> str:
    """Return a page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL))


def found(texts: list[str]) -> tuple[int, int]:
    """Return the markers and the words of some texts."""
    texts = [prose(text) for text in texts]
    return sum(len(MARKERS.findall(text)) for text in texts), sum(len(text.split()) for text in texts)


def test_the_pages_have_few_markers() -> None:
    markers, words = found([page.read_text(encoding="utf-8") for page in PAGES])
    assert words > 15_000
    where = [f"{page.name}: {hit}" for page in PAGES for hit in MARKERS.findall(prose(page.read_text(encoding="utf-8")))]
    assert markers <= PER_THOUSAND * words / 1000, where


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Make it anew, and nobody is told.", 3),
        ("It hangs on what stands on it.", 2),
        ("`alone_steps` and `alone` are code.\n\n```sh\ntold\n```\n", 0),
        ("He was untold, bold and standing.", 0),
    ],
)
def test_markers_are_whole_words_outside_of_code(text: str, number: int) -> None:
    assert found([text])[0] == number
