"""Each seeded fault is injected into otherwise real parts, and is the only thing that the doctor reports."""

from dataclasses import replace

import pytest
import torch

import strop.engine.torch.batch
from faulty_sandbox import FaultySandbox
from strop.doctor import CHECKS, examine_file
from strop.engine.torch.sampling import draw
from strop.errors import MachineError, UserError, WeightsNotProven
from strop.recipe.load import load_recipe
from strop.rollout.chat_template import ChatFormat
from strop.sandbox import ScriptedSandbox
from strop.tools.python import PythonTool
from strop.training.batch import pack
from strop.training.trainer import Trainer

FORGETFUL_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _Wrapped:
    """An engine or trainer that behaves like `inner` wherever a subclass does not say otherwise."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def only_problem(diagnosis):
    """The one problem; every other check must have been made, and have found nothing."""
    assert [finding.check for finding in diagnosis.findings] == list(CHECKS)
    assert len(diagnosis.problems) == 1, [(problem.check, problem.detail) for problem in diagnosis.problems]
    return diagnosis.problems[0]


def test_a_template_that_rewrites_history_is_told_and_harms_nothing(examine_with):
    def forget(parts):
        parts.chat.tokenizer.chat_template = FORGETFUL_TEMPLATE
        return replace(parts, chat=ChatFormat(parts.chat.tokenizer))

    diagnosis = examine_with(forget)
    assert not diagnosis.problems
    [told] = [each.detail for each in diagnosis.findings if each.check == "chat template"]
    assert "rewrites history" in told
    assert told.endswith("they append each turn to the tokens that are there.")


def test_a_stage_that_samples_with_another_prompt_than_its_model_was_taught_with_is_found(examine_with, load):
    sft = (
        'stages.sft={kind="sft", init="base", prompt="short", demonstrator={kind="arithmetic"}, num_demonstrations=4, steps=1}'
    )
    problem = only_problem(examine_with(of=load(sft, "stages.sft.batch_size=4", "stages.rl.init=sft")))
    assert problem.check == "prompts"
    assert "stages.sft teaches with other prompt tokens than stages.rl samples with" in problem.detail
    assert "different from token 1 on: 'system" in problem.detail
    assert problem.remedy == "Give both one prompt; stages.sft.prompt is 'short'."


def test_an_evaluation_with_another_prompt_than_rl_is_found_without_demonstrations(examine_with, load):
    evaluation = 'stages.after={kind="eval", init="rl", num_tasks=2, k=1, prompt="short"}'
    problem = only_problem(examine_with(of=load(evaluation, "engine.max_length=1200")))
    assert problem.check == "prompts"
    assert "stages.rl teaches with other prompt tokens than stages.after samples with" in problem.detail


def test_a_stage_that_samples_from_an_untaught_model_has_no_prompt_to_compare(examine_with):
    (finding,) = [finding for finding in examine_with().findings if finding.check == "prompts"]
    assert finding.detail == "not made: no stage samples from a model that another stage taught with a prompt"


def slice_to_the_right(mask):
    moved = mask.clone()
    moved[:, 1:] = mask[:, :-1]
    return moved


def slice_to_the_left(mask):
    moved = mask.clone()
    moved[:, :-1] = mask[:, 1:]
    return moved


@pytest.mark.parametrize(
    ("shift", "side"),
    [
        (lambda mask: torch.roll(mask, 1, dims=1), "right"),
        (lambda mask: torch.roll(mask, -1, dims=1), "left"),
        (slice_to_the_right, "right"),
        (slice_to_the_left, "left"),
    ],
    ids=["rolled right", "rolled left", "sliced right", "sliced left"],
)
def test_a_shifted_mask_is_found(examine_with, shift, side):
    def pack_shifted(selections, advantages, **settings):
        batch = pack(selections, advantages, **settings)
        return replace(batch, loss_mask=shift(batch.loss_mask))

    diagnosis = examine_with(lambda parts: replace(parts, pack=pack_shifted))
    problem = only_problem(diagnosis)
    assert problem.check == "loss mask"
    assert f"lies 1 to the {side}" in problem.detail
    assert "Do not shift the mask in pack()" in problem.remedy
    assert any(piece.is_trained and piece.origin != "sampled" for piece in diagnosis.rollout)


def draw_from_nucleus(logits, temperatures, uniform, banned, *, is_renormalised, top_p=0.9):
    """`draw`, but from the likeliest tokens that together have `top_p`."""
    scaled = logits / temperatures.unsqueeze(1)
    ordered = scaled.softmax(-1).sort(-1, descending=True)
    is_cut = torch.zeros_like(scaled, dtype=torch.bool)
    is_cut.scatter_(1, ordered.indices, ordered.values.cumsum(-1) - ordered.values >= top_p)
    drawn = draw(logits, temperatures, uniform, is_cut)
    full = scaled.log_softmax(-1).gather(1, drawn[0].long()[:, None]).squeeze(1)
    return drawn if is_renormalised else torch.stack((drawn[0], full.double(), drawn[2]))


@pytest.mark.parametrize("is_renormalised", [True, False], ids=["renormalised log-probs", "full log-probs"])
def test_top_p_is_found_whether_or_not_the_log_probs_tell(examine_with, monkeypatch, is_renormalised):
    def nucleus(logits, temperatures, uniform, banned):
        return draw_from_nucleus(logits, temperatures, uniform, banned, is_renormalised=is_renormalised)

    monkeypatch.setattr(strop.engine.torch.batch, "draw", nucleus)
    problem = only_problem(examine_with())
    assert problem.check == "log-probs"
    assert "top-p of about 0.9" in problem.detail or "top-p of about 0.89" in problem.detail
    assert "Switch top-p and top-k off" in problem.remedy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_temperature_of_the_engine_is_found(examine_with, load, dtype):
    class Hot(_Wrapped):
        async def complete(self, request):
            return await self.inner.complete(replace(request, temperature=1.3))

    low = load(f"engine.dtype={dtype}", f"trainer.precision={dtype}")
    problem = only_problem(examine_with(lambda parts: replace(parts, engine=Hot(parts.engine)), of=low))
    assert problem.check == "log-probs"
    assert "the engine's log-probs are those of temperature 1.3, not of 0.8" in problem.detail
    assert "sampling.temperature = 0.8" in problem.remedy


def test_a_wrong_temperature_of_the_trainer_is_found(examine_with):
    class Forgetful(_Wrapped):
        async def score(self, batch, column):
            return await self.inner.score(replace(batch, temperature=1.0), column)

    problem = only_problem(examine_with(lambda parts: replace(parts, trainer=Forgetful(parts.trainer))))
    assert problem.check == "log-probs"
    assert "the trainer scores at temperature 1, but tokens are sampled at 0.8" in problem.detail
    assert "pack() temperature = 0.8" in problem.remedy


def test_a_temperature_that_is_reported_but_not_sampled_at_is_found(examine_with, monkeypatch):
    def cold(logits, temperatures, uniform, banned):
        drawn = draw(logits, temperatures * 0.5, uniform, banned)
        said = (logits / temperatures.unsqueeze(1)).log_softmax(-1).gather(1, drawn[0].long()[:, None]).squeeze(1)
        return torch.stack((drawn[0], said.double(), drawn[2]))

    monkeypatch.setattr(strop.engine.torch.batch, "draw", cold)
    problem = only_problem(examine_with())
    assert problem.check == "log-probs"
    assert "reports log-probs of temperature 0.8, but draws its tokens with temperature 0.3" in problem.detail


def test_reversed_grader_arguments_are_found(examine_with, load):
    def reverse(parts):
        verifier = parts.reward.answer._verifier
        verify = verifier.verify  # of the healthy part, which is closed with the others
        verifier.verify = lambda gold, prediction, **keys: verify(prediction, gold, **keys)
        return parts

    problem = only_problem(examine_with(reverse, of=load("reward.judge=math_verify")))
    assert problem.check == "reward"
    assert "gold and answer seem to be swapped" in problem.detail
    assert "verify(gold, answer)" in problem.remedy


def test_a_dead_sandbox_is_found(examine_with, recipe_path):
    dead = FaultySandbox(answer={}, dies_after=0)

    def die(parts):
        return replace(parts, tools=(PythonTool(dead, parts.recipe.tools["python"].config),))

    problem = only_problem(examine_with(die, of=load_recipe(recipe_path)))  # whose sandbox would be on this machine
    assert problem.check == "tool round trip"
    assert "the scripted sandbox died" in problem.detail
    assert problem.remedy.startswith("Bring the sandbox back")


def test_a_sandbox_that_cannot_start_leaves_the_other_checks_to_be_made(examine_with, recipe_path, monkeypatch):
    async def fail(self):
        raise MachineError("no namespaces here")

    monkeypatch.setattr("strop.sandbox.local.LocalSandbox.start", fail)
    assert "no namespaces here" in only_problem(examine_with(of=load_recipe(recipe_path))).detail


def test_a_service_that_cannot_be_used_is_found_with_a_remedy_for_a_service(examine_with, load):
    elsewhere = load("sandbox.url=http://127.0.0.1:9")
    problem = only_problem(examine_with(of=elsewhere))
    assert problem.check == "tool round trip"
    assert "no code service answers at http://127.0.0.1:9" in problem.detail
    assert "`strop sandbox run FILE --url http://127.0.0.1:9` shows its fault" in problem.remedy
    assert "STROP_SANDBOX_TOKEN" in problem.remedy
    assert "isolation" not in problem.remedy  # that of this machine


def test_a_service_that_refuses_a_call_is_the_tools_problem_and_not_the_models(examine_with):
    class Refusing(ScriptedSandbox):
        async def run(self, request):
            raise UserError("the code service refused the token.")

    refusing = Refusing(answer={})
    diagnosis = examine_with(lambda parts: replace(parts, tools=(PythonTool(refusing, parts.recipe.tools["python"].config),)))
    assert "refused the token" in only_problem(diagnosis).detail


def test_an_answer_that_earns_nothing_is_found(examine_with, load):
    problem = only_problem(examine_with(of=load("reward.weights={format=1.0}")))
    assert (problem.check, problem.remedy) == ("reward", "Give accuracy a positive weight.")
    assert "a right answer earns no more than a wrong one: the weight of accuracy is 0." in problem.detail


def test_stale_weights_are_found(examine_with):
    class Stale(_Wrapped):
        async def load_weights(self, publication):
            await publication.checksum()

    problem = only_problem(examine_with(lambda parts: replace(parts, engine=Stale(parts.engine))))
    assert problem.check == "publication"
    assert "They are those of before the update" in problem.detail
    assert "Make load_weights copy every tensor" in problem.remedy


def test_weights_that_the_engine_cannot_prove_are_found(examine_with):
    class Suspicious(_Wrapped):
        async def load_weights(self, publication):
            raise WeightsNotProven("version 1 was published with another checksum.")

    problem = only_problem(examine_with(lambda parts: replace(parts, engine=Suspicious(parts.engine))))
    assert problem.check == "publication"
    assert "another checksum" in problem.detail


def test_trained_weights_that_do_not_move_are_found(examine_with):
    async def do_nothing(self, batch, loss, statistics):
        report = await Trainer.update(self.inner, batch, loss, statistics)
        await self.inner._thread.run(lambda: self.inner.learner.model.load_state_dict(before))
        return report

    before = {}

    class Frozen(_Wrapped):
        update = do_nothing

    def freeze(parts):
        before.update({name: tensor.clone() for name, tensor in parts.original.state_dict().items()})
        return replace(parts, trainer=Frozen(parts.trainer))

    problem = only_problem(examine_with(freeze))
    assert problem.check == "publication"
    assert "nothing can be said of publication" in problem.detail


async def _diagnose(path, *overrides):
    return await examine_file(path, overrides, model=None)


def test_an_indivisible_batch_is_found(recipe_path, run):
    diagnosis = run(_diagnose(recipe_path, "stages.rl.updates_per_step=3"))
    (problem,) = diagnosis.findings
    assert problem.check == "recipe"
    assert "tasks_per_step is 4, which is no multiple of updates_per_step = 3" in problem.detail
    assert problem.remedy == "Change one of them."
    assert diagnosis.not_made == tuple(CHECKS)
