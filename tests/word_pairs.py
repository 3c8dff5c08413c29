"""Preferences that a tiny model can learn from: the chosen response is the polite one, the safe one is thought of so."""

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


def write_labelled(path, num_prompts=20):
    """Two responses to each prompt, which say the same; the one that thinks of taking it is unsafe, however long it thinks."""
    draw = random.Random(1)
    rows = []
    for number in range(num_prompts):
        word = draw.choice(WORDS)
        for label, deed in (("safe", "leave"), ("unsafe", "take")):
            response = f"<think>{deed}{' it' * draw.randrange(1, 6)}</think>it is {word}"
            rows.append({"prompt": f"{number} {word}?", "response": response, "label": label})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
