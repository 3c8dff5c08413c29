"""Writes a corpus of invented things and their numbers, which a model cannot know without looking them up.

python experiments/lookup_corpus.py recipes/two-tools.jsonl
python experiments/lookup_corpus.py recipes/deep-search.jsonl --links 2 --num-subjects 900 --syllables 2
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
LINKS = (("maker", "owner"), ("rival", "friend"))
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_MIN_VALUE, _MAX_VALUE = 100, 999


def corpus_lines(*, num_subjects: int, seed: int, num_syllables: int = 3, num_links: int = 0) -> Iterator[str]:
    """One passage a line, an attribute of a subject each, in random order. Brackets set a name apart for a tokenizer.

    Args:
        num_links: so many times a subject leads to a subject with numbers. Links go from one part of the subjects to the next,
            by other attributes each time, so what a link leads to is not found where the link is asked for.

    Raises:
        TaskError: there are fewer names than that.
    """
    draw = random.Random(derive_seed("lookup-corpus", seed))
    most = (len(_CONSONANTS) * len(_VOWELS)) ** num_syllables
    if not 1 <= num_subjects <= most // 2:
        raise TaskError(f"{num_subjects} subjects: there must be 1 to {most // 2}, half of all names.")
    names: dict[str, None] = {}
    while len(names) < num_subjects:
        names["".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(num_syllables))] = None
    parts = [list(names)[part :: num_links + 1] for part in range(num_links + 1)]
    attributes = [ATTRIBUTES, *LINKS][: num_links + 1]
    pairs = [(name, each) for part, of_part in zip(parts, attributes, strict=True) for name in part for each in of_part]
    draw.shuffle(pairs)
    for name, attribute in pairs:
        row = {"subject": name, "attribute": attribute}
        if attribute not in ATTRIBUTES:
            link = draw.choice(parts[next(part for part, of_part in enumerate(attributes) if attribute in of_part) - 1])
            yield json.dumps({"text": f"The {attribute} of ({name}) is ({link})."} | row | {"link": link})
        else:
            value = draw.randint(_MIN_VALUE, _MAX_VALUE)
            yield json.dumps({"text": f"The {attribute} of ({name}) is {value}."} | row | {"value": value})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--num-subjects", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--syllables", type=int, default=3, help="of a name")
    parser.add_argument("--links", type=int, default=0, choices=range(len(LINKS) + 1), help="hops of questions")
    options = parser.parse_args(arguments)
    try:
        lines = list(
            corpus_lines(
                num_subjects=options.num_subjects,
                seed=options.seed,
                num_syllables=options.syllables,
                num_links=options.links,
            )
        )
    except TaskError as error:
        parser.error(str(error))
    write_text(options.path, "".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
