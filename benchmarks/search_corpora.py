"""A generated corpus that a search can fail on: many passages about each of many towns whose names share their words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

FACTS = {  # what is told, and a question that says it in other words
    "height": ("{name} lies {number} metres above the sea.", "How many metres high is the town of {name}?"),
    "people": ("At the last census {number} people lived in {name}.", "How many inhabitants were counted in {name}?"),
    "mayor": ("The mayor of {name} is called {other}.", "Who is mayor in {name}?"),
    "bridge": ("The bridge of {name} was finished in {number}.", "When did they finish building the bridge at {name}?"),
    "river": ("The river {other} flows through {name}.", "On which river does {name} lie?"),
    "market": ("On market days {number} stalls stand in {name}.", "How large is the market of {name}?"),
    "school": ("{other} founded the school of {name}.", "Who was the founder of {name}'s school?"),
}
FIRST = ("Upper", "Lower", "Old", "New", "Saint", "Port", "High", "Little")
SYLLABLES = ("ba", "do", "fen", "gar", "hol", "kir", "lum", "mar", "nes", "rou", "sel", "tav", "ul", "wick", "zor")


def facts(num_towns: int, *, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """(id, text, question) of seven facts about each of many towns."""
    draw = random.Random(seed)
    stems = sorted({"".join(draw.choices(SYLLABLES, k=3)).capitalize() for _ in range(num_towns)})
    names = sorted({f"{draw.choice(FIRST)} {draw.choice(stems)}" for _ in range(2 * num_towns)})[:num_towns]
    for name in names:
        for kind, (text, question) in FACTS.items():
            other = "".join(draw.choices(SYLLABLES, k=2)).capitalize()
            told = text.format(name=name, number=draw.randint(100, 9999), other=other)
            yield f"{name}/{kind}", told, question.format(name=name)


def write_corpus(path: Path, rows: Sequence[tuple[str, str, str]]) -> Path:
    path.write_text("".join(json.dumps({"id": id, "text": text}) + "\n" for id, text, _ in rows))
    return path
