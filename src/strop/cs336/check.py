"""Compares functions of the assignment, as a student wrote them, with strop's, on random and on edge inputs.

Only what the hand-out or the course's tests pin down is compared: neither the metadata of a loss, nor what becomes of an input
that the hand-out leaves open.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from strop import cs336
from strop.errors import ConfigError
from strop.user_code import blaming

_TOLERANCE = 1e-4  # relative and absolute; the course's tests allow 1e-2
_DRAWS = 3  # of each random input

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What was found of one function."""

    name: str
    num_cases: int
    difference: str = ""  # the first one; empty: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """A function of the hand-out, the inputs on which it is compared, and what of its result is."""

    inputs: Callable[[torch.Generator], Iterator[tuple[str, Arguments]]]
    result: Callable[[Any, Arguments], Any] = lambda value, arguments: value


def check_module(path: Path, *, seed: int = 0) -> list[Compared]:
    """Compare the functions of a module, which have the hand-out's names or those of `tests/adapters.py`.

    Raises:
        ConfigError: there is no such file, it cannot be imported, or it has none of the functions.
    """
    module = _load(path)
    named = {name: getattr(module, name, None) or getattr(module, f"run_{name}", None) for name in _PROBLEMS}
    found = {name: function for name, function in named.items() if function is not None}
    if not found:
        raise ConfigError(
            f"{path} has none of the functions of the assignment: {', '.join(_PROBLEMS)}. Give the file that defines them, or"
            " your tests/adapters.py."
        )
    return [_compare(name, function, seed) for name, function in found.items()]


def _load(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"{path} is no Python file. Give the file that defines your functions.")
    root, names = path.parent, [path.stem]
    while (root / "__init__.py").is_file():  # a module of a package may import the others by a dot
        names.insert(0, root.name)
        root = root.parent
    sys.path[:0] = [str(root), str(Path.cwd())]  # what it imports may stand next to it, or where we are
    name = ".".join(names) if len(names) > 1 else f"strop_checked_{path.stem}"  # which hides no module of that name
    with blaming(f"while {path} was imported"):
        if len(names) > 1:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
        spec.loader.exec_module(module)
    return module


def _compare(name: str, function: Callable[..., Any], seed: int) -> Compared:
    problem, num_cases = _PROBLEMS[name], 0
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    for (about, ours), (_, theirs) in zip(*map(problem.inputs, generators), strict=True):
        num_cases += 1
        expected = problem.result(getattr(cs336, name)(**ours), ours)
        try:
            given = problem.result(function(**theirs), theirs)
        except NotImplementedError:
            return Compared(name=name, num_cases=num_cases, difference="is not written yet")
        except Exception as error:  # noqa: BLE001 - whatever a student's function raises is shown to the student
            return Compared(name=name, num_cases=num_cases, difference=f"{about}: it raised {type(error).__name__}: {error}")
        if difference := _difference(given, expected):
            return Compared(name=name, num_cases=num_cases, difference=f"{about}: {difference}")
    return Compared(name=name, num_cases=num_cases)


def _difference(given: Any, expected: Any, place: str = "the result") -> str:
    """The first place where the two differ, in words; empty where they do not."""
    if isinstance(expected, Tensor):
        return _difference_of_tensors(given, expected, place)
    if not isinstance(expected, (Mapping, tuple, list)):
        return "" if given == expected else f"{place} is {given!r}, expected {expected!r}"
    if not isinstance(given, Mapping if isinstance(expected, Mapping) else (tuple, list)):
        return f"{place} is {given!r}, expected a {type(expected).__name__}"
    if isinstance(expected, Mapping):
        if missing := [key for key in expected if key not in given]:
            return f"{place} has no {missing[0]!r}"
    elif len(given) != len(expected):
        return f"{place} has length {len(given)}, expected {len(expected)}"
    keys = expected if isinstance(expected, Mapping) else range(len(expected))
    return next(filter(None, (_difference(given[key], expected[key], f"{place}[{key!r}]") for key in keys)), "")


def _difference_of_tensors(given: Any, expected: Tensor, place: str) -> str:
    if not isinstance(given, Tensor):
        return f"{place} is {given!r}, expected a tensor of shape {tuple(expected.shape)}"
    if given.shape != expected.shape:
        return f"{place} has shape {tuple(given.shape)}, expected {tuple(expected.shape)}"
    same = torch.isclose(given.double(), expected.double(), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
    if same.all():
        return ""
    index = tuple((~same).nonzero()[0].tolist())
    where = f"{place}{list(index)}" if index else place
    return f"{where} is {given[index].item():.6g}, expected {expected[index].item():.6g}"


# The inputs.


def _case(about: str, **arguments: Any) -> tuple[str, Arguments]:
    return about, arguments


def _tokenizer() -> PreTrainedTokenizerFast:
    """Letters and spaces, of which `a` and `b` merge where they stand together."""
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<eos>", "?", "a", "b", "c", "d", " ", "ab"])}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Sequence([])
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")


class _Table(nn.Module):
    """The logits of the next token are a row of a table, chosen by the last token."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(9, 9, generator=generator))

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits[input_ids])


def _pairs(_: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    for about, prompts, outputs in [
        ("prompts and outputs of several lengths", ["ab c", "d"], ["c", "a b d"]),
        ("an output that would merge with its prompt", ["ca", "d"], ["b", "ab"]),
        ("an empty output", ["ab", "c"], ["", "d"]),
    ]:
        yield _case(about, prompt_strs=prompts, output_strs=outputs, tokenizer=_tokenizer())


def _logits(generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    for _ in range(_DRAWS):
        yield _case("random logits", logits=3 * torch.randn(2, 3, 7, generator=generator))
    yield _case("equal logits", logits=torch.zeros(1, 2, 5))
    yield _case("logits of 1000, whose exponential overflows", logits=torch.tensor([[1000.0, 1000.0, 0.0]]))


def _scored(generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    for with_entropy in (True, False):
        ids = torch.randint(0, 9, (2, 6), generator=generator)
        about, given = f"return_token_entropy={with_entropy}", {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        yield _case(about, model=_Table(generator), **given, return_token_entropy=with_entropy)


def _masked(generator: torch.Generator, **more: Any) -> Iterator[tuple[str, Arguments]]:
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]).bool()
    for dim in (None, 0, 1, -1):
        tensor = torch.randn(2, 4, generator=generator)
        yield _case(f"dim={dim}", tensor=tensor, mask=mask | torch.tensor([True, False, False, False]), dim=dim, **more)


def _to_average(generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    yield from _masked(generator)
    mask = torch.tensor([[1, 1], [0, 0]])
    yield _case("a row without a token, whose mean is NaN", tensor=torch.ones(2, 2), mask=mask, dim=1)


def _micro_batch(generator: torch.Generator) -> dict[str, Tensor]:
    log_probs = torch.randn(3, 5, generator=generator).sub(1).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 1]]).bool()
    return {"policy_log_probs": log_probs, "response_mask": mask}


def _sft_steps(generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    for constant in (1.0, 11.0):
        batch = _micro_batch(generator)
        yield _case(f"normalize_constant={constant}", **batch, gradient_accumulation_steps=4, normalize_constant=constant)
    batch = _micro_batch(generator)
    batch["policy_log_probs"].sum().backward()  # type: ignore[no-untyped-call]
    yield _case("a second micro-batch, whose gradient is added", **batch, gradient_accumulation_steps=2)


def _rewards(generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    def judged(response: str, truth: str) -> dict[str, float]:
        reward = float(response) if truth == "right" else 0.0
        return {"reward": reward, "format_reward": 1.0, "answer_reward": reward}

    def grouped(responses: list[str], normalize: bool) -> Arguments:
        judging = {"reward_fn": judged, "rollout_responses": responses, "repeated_ground_truths": ["right"] * len(responses)}
        return {**judging, "group_size": 3, "advantage_eps": 1e-6, "normalize_by_std": normalize}

    for normalize in (True, False):
        for _ in range(_DRAWS):
            responses = [f"{value:.3f}" for value in torch.rand(6, generator=generator).tolist()]
            yield f"random rewards, normalize_by_std={normalize}", grouped(responses, normalize)
        yield f"a group of equal rewards, normalize_by_std={normalize}", grouped(["1"] * 3 + ["0", "1", "1"], normalize)


def _ratios(generator: torch.Generator) -> Arguments:
    new = _micro_batch(generator)["policy_log_probs"]
    old = new.detach() + 0.3 * torch.randn(3, 5, generator=generator)
    return {"policy_log_probs": new, "old_log_probs": old, "advantages": torch.tensor([[1.5], [-0.5], [0.0]]), "cliprange": 0.2}


def _naive(generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    log_probs, rewards = _micro_batch(generator)["policy_log_probs"], torch.tensor([[1.0], [-2.0], [0.0]])
    yield _case("rewards of both signs", raw_rewards_or_advantages=rewards, policy_log_probs=log_probs)


def _clipped(generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    for _ in range(_DRAWS):
        yield "ratios within and beyond the clip range, advantages of both signs", _ratios(generator)


def _losses(generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    for loss_type in ("no_baseline", "reinforce_with_baseline", "grpo_clip"):
        raw_rewards = torch.tensor([[1.0], [0.0], [1.0]])
        yield f"loss_type={loss_type!r}", {**_ratios(generator), "loss_type": loss_type, "raw_rewards": raw_rewards}


def _grpo_steps(generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    mask = _micro_batch(generator)["response_mask"]
    for about, arguments in _losses(generator):
        yield about, {**arguments, "response_mask": mask, "gradient_accumulation_steps": 2}


def _letters(_: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    example = {"subject": "s", "question": "q", "options": ["1", "2", "3", "4"], "answer": "B"}
    for said in ("The correct answer is B.", "The correct answer is D", "I cannot say."):
        yield _case(repr(said), mmlu_example=example, model_output=said)


def _numbers(_: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    for said in ("She has 3 + 5 = 8 eggs, so the answer is 72.", "It costs 18 dollars", "No number here."):
        yield _case(repr(said), model_output=said)


def _preferences(generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    for beta in (0.1, 0.5):
        models = {"lm": _Table(generator), "lm_ref": _Table(generator), "tokenizer": _tokenizer()}
        yield _case(f"beta={beta}", **models, beta=beta, prompt="a b", response_chosen="c d", response_rejected="d d d")


def _documents(_: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pairs.jsonl"
        path.write_text('{"prompt": "a b", "response": "c"}\n{"prompt": "d", "response": "ab ab"}\n', encoding="utf-8")
        yield _case("two documents", tokenizer=_tokenizer(), dataset_path=path, seq_length=8, shuffle=False)


def _with_gradient(value: Any, arguments: Arguments) -> Any:
    return {"loss": value[0].detach(), "gradient": arguments["policy_log_probs"].grad}


def _rows(dataset: Any, _: Arguments) -> list[Any]:
    return [{name: dataset[row][name] for name in ("input_ids", "labels")} for row in range(len(dataset))]


_PROBLEMS = {
    "tokenize_prompt_and_output": _Problem(inputs=_pairs),
    "compute_entropy": _Problem(inputs=_logits),
    "get_response_log_probs": _Problem(inputs=_scored),
    "masked_normalize": _Problem(inputs=lambda generator: _masked(generator, normalize_constant=7.0)),
    "sft_microbatch_train_step": _Problem(inputs=_sft_steps, result=_with_gradient),
    "compute_group_normalized_rewards": _Problem(inputs=_rewards, result=lambda value, _: value[:2]),
    "compute_naive_policy_gradient_loss": _Problem(inputs=_naive),
    "compute_grpo_clip_loss": _Problem(inputs=_clipped, result=lambda value, _: value[0]),
    "compute_policy_gradient_loss": _Problem(inputs=_losses, result=lambda value, _: value[0]),
    "masked_mean": _Problem(inputs=_to_average),
    "grpo_microbatch_train_step": _Problem(inputs=_grpo_steps, result=_with_gradient),
    "get_packed_sft_dataset": _Problem(inputs=_documents, result=_rows),
    "parse_mmlu_response": _Problem(inputs=_letters),
    "parse_gsm8k_response": _Problem(inputs=_numbers),
    "compute_per_instance_dpo_loss": _Problem(inputs=_preferences),
}
"""By the hand-out's name, in its order; then those of the supplement."""
