"""Preference pairs that a tiny model can learn from: the chosen response is the polite one."""

import json
import random

WORDS = ["red", "blue", "tall", "cold", "sweet", "loud"]


def write_pairs(path, num=24):
    """The chosen one says "please"."""
    draw = random.Random(0)
    rows = []
    for number in range(num):
        word = draw.choice(WORDS)
        rows.append({"prompt": f"{number} {word}?", "chosen": f"please {word}", "rejected": f"really {word}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
