"""The checks: chat template, prompts, loss mask, log-probs, tool round trip, known answers, batch arithmetic, publication."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from strop.answer_text import plain_number
from strop.doctor.examination import CODE, PRINTED, Evidence, Examination, batch_of, compare, logprobs_at, origins, sample_rows
from strop.doctor.finding import NotMade, Origin, Problem
from strop.doctor.own_code import answered, trajectory_of
from strop.errors import MachineError, UserError, WeightsNotProven
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Machine, PlayedKeys, PosedKeys
from strop.rewards.base import AnswerPart, NotJudged
from strop.rollout.prompt import load_prompt
from strop.sandbox.config import TOKEN_VARIABLE, SandboxConfig
from strop.stages.loop.engines import check_room
from strop.training.sft import sft_token_loss, sft_token_statistics
from strop.types import StopReason, Task, ToolOutcome

_VERSION = 1
_NUM_PROBES = 6
_NUM_UPDATES = 4  # one moved the log-probs of a small model by less than the tolerance of bfloat16
_MORE = 3.0  # times the gap of before; larger weights round a little worse
_CONVICTING_NATS = 12.0  # a fit to tokens that were drawn as they should be gains this much once in e^12 times
_FITTED_TOKENS = 96  # of a large vocabulary, more would take long
_RANGE = 8.0  # temperatures are looked for from 1/8 of the recipe's to 8 times it


async def check_template(examination: Examination) -> str:
    """Does the chat template only append? Rollouts and fine-tuning always do; the chat endpoint of a server does not."""
    chat = examination.parts.chat
    if not chat.tokenizer.chat_template:
        raise NotMade("the model has no chat template, and its prompts are raw")
    if problem := chat.check_prefix_preserving():
        return f"{problem} Rollouts and fine-tuning are not affected: they append each turn to the tokens that are there."
    return f"only appends to its history; a turn ends with {chat.decode([chat.end_of_turn_id])}"


async def check_prompts(examination: Examination) -> str:
    """Compare the prompt of each stage that samples with the prompts that taught its model, token by token."""
    parts = examination.parts
    question, specs = parts.tasks[0].question, [tool.spec for tool in parts.tools]

    def ids(prompt: str) -> tuple[int, ...]:
        return load_prompt(prompt).ids(parts.chat, question, specs)

    num = 0
    for name, stage in parts.recipe.stages.items():
        if not stage.plays or not isinstance(stage.config, PlayedKeys):
            continue
        for teacher, prompt in _prompts_taught(parts.recipe, name):
            taught, sampled = ids(prompt), ids(stage.config.prompt)
            num += 1
            if taught != sampled:
                first = next((at for at, pair in enumerate(zip(taught, sampled, strict=False)) if pair[0] != pair[1]), 0)
                shown = [parts.chat.decode(each[first : first + 12]) for each in (taught, sampled)]
                raise Problem(
                    f"stages.{teacher} teaches with other prompt tokens than stages.{name} samples with: {len(taught)} and"
                    f" {len(sampled)}, different from token {first} on: {shown[0]!r} and {shown[1]!r}.",
                    f"Give both one prompt; stages.{teacher}.prompt is {prompt!r}.",
                )
    if not num:
        raise NotMade("no stage samples from a model that another stage taught with a prompt")
    return f"{num} stages sample with the prompt tokens that their model was taught with"


def _prompts_taught(recipe: Recipe, name: str) -> Iterator[tuple[str, str]]:
    """The nearest stage from which the model of `name` comes that plays or imitates conversations, and its prompts."""
    while (name := getattr(recipe.stages[name].config, "init", None) or "") in recipe.stages:
        stage = recipe.stages[name]
        if stage.plays and isinstance(stage.config, PlayedKeys):
            yield name, stage.config.prompt
            return
        if hasattr(stage.config, "demonstrator"):
            yield from _prompts_of(recipe, name)
            return


def _prompts_of(recipe: Recipe, name: str) -> Iterator[tuple[str, str]]:
    """The prompts of the conversations that a stage makes or imitates, with the stages that make them."""
    config = recipe.stages[name].config
    if data := getattr(config, "data", ()):
        for each in data:
            yield from _prompts_of(recipe, each)
    elif isinstance(config, PosedKeys):
        yield name, config.prompt


async def check_mask(examination: Examination) -> str:
    """Is the loss on the tokens that the policy sampled, and on no other? Provenance is what the conversations recorded."""
    mask = examination.batch.loss_mask
    expected = torch.zeros_like(mask)
    num_of: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for index, conversation in enumerate(examination.conversations):
        found: list[str] = [*origins(conversation.trajectory)]
        found += ["padding"] * (mask.shape[1] - len(found))
        num_of.update(found)
        for position, origin in enumerate(found):
            is_sampled = expected[index, position] = origin == Origin.SAMPLED
            if is_sampled != bool(mask[index, position]):
                wrong[f"{origin} tokens {'left out' if is_sampled else 'trained on'}"] += 1
    shown = ", ".join(f"{num} {what}" for what, num in wrong.most_common())
    # The column at the edge holds what was there, nothing, or the other edge.
    sides = {"right": mask[:, 1:].equal(expected[:, :-1]), "left": mask[:, :-1].equal(expected[:, 1:])}
    if wrong and (side := next((side for side, is_moved in sides.items() if is_moved), "")):
        raise Problem(
            f"the packed mask lies 1 to the {side} of the tokens that were sampled: {shown}.",
            "Do not shift the mask in pack(): column t is about the token ids[:, t]; the step from a token to the logits that"
            " predict it belongs only to LogprobModule.",
        )
    if wrong:
        raise Problem(
            f"the packed mask is not the provenance of the tokens: {shown}.",
            "Let pack() take the mask from Trajectory.loss_mask, row by row and unchanged.",
        )
    num_sampled, num_rollouts = num_of[Origin.SAMPLED], len(examination.conversations)
    others = ", ".join(f"{num_of[origin]} {origin}" for origin in Origin if origin is not Origin.SAMPLED)
    return f"trains on the {num_sampled} sampled tokens of {num_rollouts} rollouts, not on {others}"


async def check_logprobs(examination: Examination) -> str:
    """Do sampler and trainer mean the same distribution, and is it the one that was sampled from?

    The gap |engine - trainer| compares what each says of a token. The tokens show which distribution they were drawn from,
    whatever was said of them: each suspect (another temperature, top-p, top-k) is fitted, and convicted when it makes them
    likelier by more than chance would.
    """
    evidence, temperature = examination.evidence, examination.parts.temperature
    gap = (evidence.engine - evidence.trainer).abs()
    gain_nats, truncation = max(_truncations(evidence, temperature))
    drawn_at = _best_temperature(lambda tried: -evidence.original(tried).double().sum().item(), temperature)
    tempering_nats = (evidence.original(drawn_at) - evidence.original(temperature)).double().sum().item()
    is_gap = not gap.mean().item() <= examination.tolerance_nats
    if gain_nats > max(_CONVICTING_NATS, tempering_nats):
        said = f" Reported log-probs are {gap.mean():.2g} nats from the trainer's." if is_gap else ""
        raise Problem(
            f"sampling is truncated: all {len(gap)} tokens look drawn with {truncation}.{said}",
            "Switch top-p and top-k off in the engine: the policy gradient needs tokens of the whole distribution.",
        )
    if is_gap:
        raise _explained_gap(evidence, gap.mean().item(), temperature)
    if tempering_nats > _CONVICTING_NATS:
        raise Problem(
            f"the engine reports log-probs of temperature {temperature:g}, but draws its tokens with temperature"
            f" {drawn_at:.2g}.",
            f"Make the engine sample at sampling.temperature = {temperature:g}, not only report it.",
        )
    return (
        f"engine and trainer differ by {gap.mean():.2g} nats on average, {gap.max():.2g} at most, over {len(gap)} tokens at"
        f" temperature {temperature:g} (allowed: {examination.tolerance_nats:.2g}); nothing is truncated"
    )


def _explained_gap(evidence: Evidence, gap: float, temperature: float) -> Problem:
    """Suspect the one that is farther from the plain forward; a temperature that closes the distance convicts."""
    yardstick = evidence.original(temperature)
    distances = {each: (said - yardstick).abs().mean().item() for each, said in evidence.said.items()}
    suspect = max(distances, key=lambda each: distances[each])
    said, logits, tokens = (each[:_FITTED_TOKENS] for each in (evidence.said[suspect], evidence.logits, evidence.tokens))

    def distance_at(tried: float) -> float:
        return (said - logprobs_at(logits, tokens, tried)).abs().mean().item()

    fitted = _best_temperature(distance_at, temperature)
    measured, distance = f"engine and trainer differ by {gap:.2g} nats on average", distances[suspect]
    # Rounding is left by any explanation.
    if distance_at(fitted) > min(distance / 2, max(distance / 10, 1.5 * evidence.rounding_nats)):
        return Problem(
            f"{measured}; the {suspect} is the one that differs from a plain forward, and no temperature explains it.",
            f"Compare the {suspect}'s weights, dtype and rope settings with the model directory's config.json;"
            ' engine.dtype = "float32" with trainer.precision = "float32" shows whether it is rounding.',
        )
    if suspect == "engine":
        return Problem(
            f"{measured}: the engine's log-probs are those of temperature {fitted:.3g}, not of {temperature:g}.",
            f"Make the engine divide its logits by the request's temperature, sampling.temperature = {temperature:g}.",
        )
    return Problem(
        f"{measured}: the trainer scores at temperature {fitted:.3g}, but tokens are sampled at {temperature:g}.",
        f"Score at the temperature of sampling: give pack() temperature = {temperature:g}, and divide the logits by it.",
    )


def _truncations(evidence: Evidence, temperature: float) -> list[tuple[float, str]]:
    """Return by how many nats top-p and top-k, each as tight as the tokens allow, make the tokens likelier.

    What a truncation leaves out is missing from the tokens' total probability.
    """
    probabilities = (evidence.logits / temperature).softmax(-1)
    of_token = probabilities.gather(-1, evidence.tokens[:, None])
    rank = (probabilities > of_token).sum(-1)  # (n,) tokens that are likelier
    ordered = probabilities.sort(-1, descending=True).values.double()
    above = ordered.cumsum(-1) - ordered  # (n, V) mass of what is likelier than the token at each rank
    largest_mass, largest_rank = above.gather(-1, rank[:, None]).max(), int(rank.max())
    kept = {
        f"top-p of about {largest_mass.item():.2f}": torch.where(above <= largest_mass, ordered, 0.0).sum(-1),
        f"top-k of about {largest_rank + 1}": ordered[:, : largest_rank + 1].sum(-1),
    }
    return [(-mass.log().sum().item(), name) for name, mass in kept.items()]


def _best_temperature(loss: Callable[[float], float], centre: float) -> float:
    """Return where `loss` is least within a factor of `_RANGE` of `centre`: a bounded search after a coarse grid."""
    steps = 8
    grid = [centre * _RANGE ** (step / steps) for step in range(-steps, steps + 1)]
    best = min(range(len(grid)), key=lambda index: loss(grid[index]))
    low, high = math.log(grid[max(0, best - 1)]), math.log(grid[min(len(grid) - 1, best + 1)])
    return math.exp(minimize_scalar(lambda log: loss(math.exp(log)), bounds=(low, high), method="bounded").x)


async def check_tool(examination: Examination) -> str:
    """Follow one call from the policy's text through parser, tool and sandbox, back into the ids that the policy reads."""
    conversation, sandbox = examination.conversations[0], examination.parts.recipe.sandbox
    if not conversation.call:
        raise NotMade("the prompt lists no tools, or none of the recipe's runs Python")
    turn = conversation.trajectory.turns[0]
    if conversation.tool_fault:
        raise Problem(f"{CODE} could not be run: {conversation.tool_fault}", _remedy_for_sandbox(sandbox))
    if not turn.calls:
        raise Problem(
            f"the call {conversation.call!r} was not seen in the policy's text {turn.completion_text!r:.200}.",
            "Make the tokenizer keep the text of a call's tags: encoding and decoding it must give the same text.",
        )
    call = turn.calls[0]
    if call.outcome is not ToolOutcome.STDOUT or call.text.strip() != PRINTED:
        raise Problem(
            f"{CODE} came back as {call.outcome} {call.text!r:.200}, where {PRINTED} is printed.",
            f"Run the same program with {_commands(sandbox)}; its result names what went wrong.",
        )
    read = examination.parts.chat.decode(turn.observation_ids)
    if PRINTED not in read:
        raise Problem(
            f"the tool said {PRINTED}, but the policy reads {read!r:.200}.",
            "Raise limits.max_response_tokens, or use a chat template that shows the words of the user role.",
        )
    num_tokens = len(turn.observation_ids)
    return f"{CODE} came back as {PRINTED} in {call.duration_s * 1000:.0f} ms, in {num_tokens} tokens"


def _commands(sandbox: SandboxConfig) -> str:
    """The commands that run a program in the sandbox, one for each service."""
    urls = (sandbox.url,) if isinstance(sandbox.url, str) else sandbox.url
    return " or ".join(f"`strop sandbox run FILE{f' --url {url}' if url else ''}`" for url in urls)


def _remedy_for_sandbox(sandbox: SandboxConfig) -> str:
    void = "before training: until then every rollout that calls the tool is void."
    if sandbox.url:
        return (
            f"Mend that {void} The recipe's sandbox.url and {TOKEN_VARIABLE} name the service;"
            f" {_commands(sandbox)} shows its fault. Without sandbox.url programs run on this machine."
        )
    return (
        f"Bring the sandbox back {void} `strop sandbox check` shows its fault; a machine without namespaces can ask for less"
        ' isolation with sandbox.min_level = "process".'
    )


async def check_arithmetic(examination: Examination) -> str:
    """Do the prompts and the longest response of each stage fit in the engine and in the model?"""
    parts, recipe = examination.parts, examination.parts.recipe
    check_room(recipe, parts.origin, parts.chat, parts.tools)
    max_tokens, known = parts.stage.sampling.max_tokens, parts.original.config.max_position_embeddings
    if parts.longest_prompt + max_tokens > known:
        raise Problem(
            f"a prompt of {parts.longest_prompt} tokens and sampling.max_tokens = {max_tokens} make"
            f" {parts.longest_prompt + max_tokens}, but the model knows {known} positions.",
            f"Lower sampling.max_tokens to {max(1, known - parts.longest_prompt)}, or take a model of a longer context.",
        )
    estimates = {name: stage.plan(name, recipe.for_stage(name), Machine()) for name, stage in recipe.stages.items()}
    shown = [f"{name}: {estimate.arithmetic}" for name, estimate in estimates.items() if estimate.tokens]
    fit = f"prompts of up to {parts.longest_prompt} tokens + {max_tokens} fit the engine's {parts.engine_config.max_length}"
    method = getattr(parts.stage, "method", None)
    notes = [] if method is None else method.notes(getattr(parts.stage, "updates_in_step", 1))
    return "; ".join([*shown, *notes, fit])


async def check_publication(examination: Examination) -> str:
    """Does the engine sample from the weights that the trainer published? Train, publish, sample, compare log-probs.

    This check changes the weights, so it is the last.
    """
    parts, before, tolerance = examination.parts, examination.evidence, examination.tolerance_nats
    rows = [conversation.trajectory for conversation in examination.conversations]
    for _ in range(_NUM_UPDATES):
        report = await parts.trainer.update(batch_of(rows, parts.temperature), sft_token_loss, sft_token_statistics)
    if report.is_skipped:
        raise Problem(
            f"an update on sampled tokens was skipped: {report.skip_reason}.",
            'Use trainer.precision = "float32", and look for weights of the model that are not finite.',
        )
    try:
        await parts.trainer.publish(parts.engine, version=_VERSION)
    except WeightsNotProven as error:
        raise Problem(
            f"the engine could not prove the weights: {error}",
            "Make the engine copy each tensor that it is sent, under its own name, before it computes the checksum.",
        ) from error
    after = await compare(parts, await sample_rows(parts, "after", num=_NUM_PROBES))
    old = after.original(parts.temperature)
    moved = _gap(after.trainer, old)
    gap, gap_to_old = _gap(after.engine, after.trainer), _gap(after.engine, old)
    if moved <= tolerance:
        raise Problem(
            f"{_NUM_UPDATES} updates moved the log-probs by only {moved:.2g} nats, so nothing can be said of publication.",
            "See that the trainer's weights require gradients and that its optimizer holds them.",
        )
    if gap > max(tolerance, _MORE * _gap(before.engine, before.trainer)):
        whose = "those of before the update" if gap_to_old < gap else "neither the new ones nor those of before"
        raise Problem(
            f"after publication the engine samples from other weights than the trainer's: {gap:.2g} nats from the new ones,"
            f" {gap_to_old:.2g} from those of before. They are {whose}.",
            "Make load_weights copy every tensor of the publication and drop the KV caches of older weights, then prove the"
            " checksum of what it holds.",
        )
    if parts.engine.policy_version != _VERSION:
        raise Problem(
            f"the engine holds the new weights, but calls them version {parts.engine.policy_version}, not {_VERSION}.",
            "Set policy_version to the version that load_weights was given.",
        )
    how_far = f"{_NUM_UPDATES} updates moved the log-probs by {moved:.2g} nats"
    return f"{how_far}; the engine followed to within {gap:.2g} of the trainer"


def _gap(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().mean().item()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """What a policy says to a task whose answer is `gold`, and whether that is right."""

    gold: str
    text: str  # of its last turn
    is_right: bool
    what: str
    observed: str = ""  # what a tool answered in the turn before
    stop_reason: StopReason = StopReason.ANSWERED
    facts: Mapping[str, str]


def _known(gold: str, answer: str, *, is_right: bool = True) -> KnownAnswer:
    return KnownAnswer(gold=gold, text=answered(answer), is_right=is_right, what=f"{answer} for {gold}", facts={})


# Parts that compare as mathematics. math_verify takes an interval for an inequality of the gold answer, and not the reverse.
_ONE_WAY = (_known("1<x<2", "(1,2)"), _known("x>1", r"(1,\infty)"))
_EQUAL = (_known("72", "72.0"), _known("1072", "1,072"), _known("0.5", r"\frac{1}{2}"))
_UNEQUAL = tuple(_known("72", wrong, is_right=False) for wrong in ("73", "27", "7.2", "-72"))
_MATHEMATICS = (*_EQUAL, *_UNEQUAL, _known(r"\frac{1}{2}", r"\frac{2}{1}", is_right=False))


async def check_answers(examination: Examination) -> str:
    """Judge known answers with each part that compares answers. Say which are misjudged, and what mistake that looks like."""
    reward, tasks = examination.parts.reward, examination.parts.tasks[:3]
    parts = {name: part for name in reward.verifying_parts if (part := reward.answer_part(name)) is not None}
    if not parts:
        raise NotMade("no part of the reward compares answers")
    num, misjudged = 0, []
    try:
        for part in parts.values():
            known = [*_of_tasks(part, tasks), *(_MATHEMATICS if part.equality != "text" else ())]
            known += _ONE_WAY if part.equality == "intervals" else ()
            num += len(known)
            misjudged += [each for each in known if await _is_misjudged(part, each)]
    except (MachineError, UserError) as error:
        raise Problem(
            f"the judge was lost: {error}", "Mend what it says. Answers are compared by the code service, where programs run."
        ) from error
    if misjudged and all(each in _ONE_WAY for each in misjudged):
        shown = ", ".join(each.what for each in misjudged)
        raise Problem(
            f"symmetric pairs are judged well, but {shown} counts as wrong: gold and answer seem to be swapped.",
            "Call the verifier as verify(gold, answer), in this order: the comparison is not symmetric.",
        )
    if misjudged:
        shown = "; ".join(f"{each.what} counts as {'wrong' if each.is_right else 'right'}" for each in misjudged[:4])
        raise Problem(
            f"{len(misjudged)} of {num} known answers are misjudged: {shown}.",
            "Mend extraction or comparison of answers before training: the policy learns whatever the judge rewards.",
        )
    weights = reward.weights
    if weights is not None and not any(weights.get(name, 0.0) > 0 for name in parts):
        raise Problem(
            f"a right answer earns no more than a wrong one: the weight of {' and '.join(parts)} is 0.",
            f"Give {next(iter(parts))} a positive weight.",
        )
    return f"judges all {num} known answers as it should ({', '.join(parts)})"


def _of_tasks(part: AnswerPart, tasks: Sequence[Task]) -> list[KnownAnswer]:
    """The gold answer of each task is right, if it is given as the policy's answer; a number with one digit more is wrong."""
    known = []
    for task in tasks:
        if not part.applies_to(task):
            continue
        gold = task.answer
        right = replace(_known(gold, gold), what=f"{gold} for {gold} ({task.id})", facts=task.facts)
        known.append(right)
        if (number := plain_number(gold)) is not None:
            more = f"{number * 10 + 1:f}"
            known.append(replace(right, text=answered(more), is_right=False, what=f"{more} for {gold} ({task.id})"))
        known += [
            replace(right, text=f"It is {gold}.", is_right=False, what=f"{gold} without an answer tag or box"),
            replace(right, text="", observed=answered(gold), is_right=False, what=f"{gold} that only the tool said"),
            replace(right, stop_reason=StopReason.LENGTH, is_right=False, what=f"{gold} in a cut-off rollout"),
        ]
    return known


async def _is_misjudged(part: AnswerPart, known: KnownAnswer) -> bool:
    task = Task(id="known answer", question="", answer=known.gold, source="doctor", facts=known.facts)
    trajectory = trajectory_of(task, known.text, observed=known.observed, stop_reason=known.stop_reason)
    try:
        return (await part.score(task, trajectory) > 0) is not known.is_right
    except NotJudged:
        return known.is_right
