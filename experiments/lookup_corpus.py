"""Writes a corpus of invented things and their numbers, which a model cannot know without looking them up.

python experiments/lookup_corpus.py recipes/two-tools.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from strop.errors import TaskError
from strop.run_directory import write_text
from strop.types import derive_seed

ATTRIBUTES = ("price", "weight")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SYLLABLES = 3
_MIN_VALUE, _MAX_VALUE = 100, 999


def corpus_lines(*, num_subjects: int, seed: int) -> Iterator[str]:
    """One passage a line, an attribute of a subject each, in random order. Brackets set a name apart for a tokenizer.

    Raises:
        TaskError: there are fewer names than that.
    """
    draw = random.Random(derive_seed("lookup-corpus", seed))
    most = (len(_CONSONANTS) * len(_VOWELS)) ** _SYLLABLES
    if not 1 <= num_subjects <= most // 2:
        raise TaskError(f"{num_subjects} subjects: there must be 1 to {most // 2}, half of all names.")
    names: dict[str, None] = {}
    while len(names) < num_subjects:
        names["".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(_SYLLABLES))] = None
    pairs = [(name, attribute) for name in names for attribute in ATTRIBUTES]
    draw.shuffle(pairs)
    for name, attribute in pairs:
        value = draw.randint(_MIN_VALUE, _MAX_VALUE)
        text = f"The {attribute} of ({name}) is {value}."
        yield json.dumps({"text": text, "subject": name, "attribute": attribute, "value": value})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--num-subjects", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        lines = list(corpus_lines(num_subjects=options.num_subjects, seed=options.seed))
    except TaskError as error:
        parser.error(str(error))
    write_text(options.path, "".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
