"""Word problems without end, of a few dozen sentences that recur with other names and numbers: as real sets are."""

import random

from strop.types import Task

NAMES = ["Ada", "Bela", "Chidi", "Dora", "Emeka", "Freya", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena", "Mira", "Nils"]
THINGS = ["apples", "kites", "marbles", "tickets", "pencils", "stamps", "lanterns", "bricks", "melons", "ribbons", "coins"]
PLACES = ["the market", "a small shop", "her garden", "the harbour", "school", "the town hall", "a farm", "the museum"]
SENTENCES = [
    "{a} has {m} {thing} and buys {n} more at {place} on the way home from work.",
    "Every morning {a} carries {m} {thing} to {place} and comes back with {n} of them in the evening.",
    "At {place}, {b} gives {n} {thing} to {a}, who already owns {m} of them and never sells any.",
    "{a} and {b} share {m} {thing} equally, but {n} of them break before they reach {place}.",
    "A box from {place} holds {m} {thing}, and {a} stacks {n} such boxes beside the door.",
    "{b} paints {m} {thing} a day for {n} days and stores the finished ones at {place}.",
    "The keeper of {place} counts {m} {thing} on Monday and {n} fewer on the following Tuesday.",
    "Of the {m} {thing} that {a} found near {place}, one in {n} turned out to be broken.",
]
QUESTIONS = [
    "How many {thing} does {a} have in the end?",
    "How many {thing} are left in total when the week is over?",
    "What is the smallest number of {thing} that {b} could have started with?",
    "How many more {thing} would {a} need so that everybody gets the same number?",
]


def problem(draw: random.Random, number: int, *, source: str = "rest") -> Task:
    parts = []
    for template in [*draw.sample(SENTENCES, draw.randint(2, 4)), draw.choice(QUESTIONS)]:
        first, second = draw.sample(NAMES, 2)
        parts.append(
            template.format(
                a=first,
                b=second,
                m=draw.randint(11, 999),
                n=draw.randint(2, 99),
                thing=draw.choice(THINGS),
                place=draw.choice(PLACES),
            )
        )
    return Task(id=f"{source}/{number}", question=" ".join(parts), answer=str(draw.randint(1, 999)), source=source)


def problems(num: int, *, seed: int, source: str = "rest") -> list[Task]:
    draw = random.Random(seed)
    return [problem(draw, number, source=source) for number in range(num)]


def reworded(task: Task, *, num_words: int = 4) -> Task:
    """The same problem with other first and last words, which is how a copied problem is often disguised."""
    said = task.question.split()
    new = ["Once", "upon", "a", "time,", "long", "ago,"][:num_words]
    end = ["Tell", "us,", "please,", "quickly."][:num_words]
    return Task(
        id=f"reworded/{task.id}",
        question=" ".join([*new, *said[num_words : len(said) - num_words], *end]),
        answer=task.answer,
        source="planted",
    )
