"""What is refused before anything is trained, because the engines' memory could not hold it."""

import json
from dataclasses import dataclass

import pytest

from scripted_runs import RECIPE
from strop.errors import ConfigError
from strop.recipe.recipe import Recipe, resolve
from strop.stages.loop.engines import check_room


@dataclass(frozen=True)
class OneTokenALetter:
    """A chat format whose prompts are as long as their questions."""

    def prompt_ids(self, messages, prefill=""):
        return tuple(range(sum(len(span.text) for message in messages for span in message.spans if not span.is_ours)))


def recipe(**tables):
    tree = RECIPE | tables
    return Recipe.model_validate_json(json.dumps(resolve(tree)))


def questions(path, *lengths):
    path.write_text("".join(json.dumps({"question": "x" * length, "answer": "1"}) + "\n" for length in lengths))
    return {"kind": "jsonl", "path": str(path), "test_path": str(path)}


def test_every_prompt_of_an_evaluation_is_looked_at(tmp_path):
    tasks = questions(tmp_path / "tasks.jsonl", *[20] * 90, 60)
    stages = {
        "base": RECIPE["stages"]["base"],
        "exam": {"kind": "eval", "init": "base", "num_tasks": 91, "k": 1, "tasks": tasks},
    }
    with pytest.raises(ConfigError, match=r"stages.exam: .* task 'tasks.jsonl:91' has 60 tokens, and sampling.max_tokens"):
        check_room(recipe(stages=stages), "base", OneTokenALetter(), [])
    stages["exam"]["num_tasks"] = 90
    check_room(recipe(stages=stages), "base", OneTokenALetter(), [])


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"slots": 4}, r"a conversation takes a whole slot of the embedded engine.* raise engine.slots"),
        ({"kind": "vllm", "python": "/usr/bin/python3", "slots": 4}, r"engine.kv_mib is unset, .* set engine.kv_mib"),
    ],
)
def test_over_subscription_that_can_do_nothing_is_refused_before_anything_is_trained(engine, said):
    engine = {"max_length": 256} | engine
    with pytest.raises(ConfigError, match=r"scheduler.oversubscription = 2 has no effect: " + said):
        check_room(recipe(engine=engine, scheduler={"oversubscription": 2.0}), "base", OneTokenALetter(), [])
    check_room(recipe(engine=engine), "base", OneTokenALetter(), [])


def test_over_subscription_of_paged_memory_is_taken():
    engine = {"kind": "vllm", "python": "/usr/bin/python3", "max_length": 256, "kv_mib": 64}
    check_room(recipe(engine=engine, scheduler={"oversubscription": 2.0}), "base", OneTokenALetter(), [])
