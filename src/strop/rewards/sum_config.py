"""Says in a recipe which parts a sum of rewards has: what each judges, its weight, and the rows that it is for."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from strop.config import Config
from strop.rewards.language import LANGUAGES
from strop.rewards.scorers.config import AnyScorerConfig
from strop.rewards.scorers.judge import JudgeConfig

# `reward` is seen by a function before it is validated, behind which pydantic takes no list for a tuple unless told so.
Words: TypeAlias = Annotated[tuple[str, ...], Field(strict=False)]


class Part(Config):
    """What every part may say."""

    weight: float = 1.0  # 0: reported, and does not count
    # Facts of a task and the values for which the part applies; elsewhere the sum goes without it. "": no such fact.
    where: dict[str, Words] = Field(default={})


class MathPart(Part):
    """1 if the answer equals the task's, by math_verify, by text, or by either of two graders."""

    kind: Literal["math"]
    answer_in: Literal["answer_tag", "response"] = "answer_tag"  # or the last box anywhere in the last turn
    needs_box: bool = True  # of the answer tag; a response always does
    # exact: equal texts or equal plain numbers. fused: text and sympy as in `r1_zero` with `fast`, or else math_verify
    judge: Literal["math_verify", "exact", "fused"] = "math_verify"
    verify_deadline_s: float = Field(default=2.0, gt=0)
    unreadable_gold: Literal["exclude", "wrong"] = "exclude"  # a task whose own answer cannot be compared with

    @model_validator(mode="after")
    def _reads_what_it_compares(self) -> Self:
        if self.judge != "math_verify" and self.unreadable_gold != "exclude":
            raise ValueError(f"unreadable_gold is 'wrong' but judge is {self.judge!r}, which reads every answer. Remove it.")
        return self


class R1ZeroPart(Part):
    """The graders of CS336 and Dr. GRPO: behind `</think> <answer>`, or in a box anywhere."""

    kind: Literal["r1_zero", "question_only"]
    fast: bool = True  # text and sympy alone; else math_verify as well


class R1ZeroFormatPart(Part):
    """The format that these graders want, 0 or 1, whatever the answer; for weight 0, since it is in their value already."""

    kind: Literal["r1_zero_format", "question_only_format"]


class FormatPart(Part):
    """Form of the whole response, thoughts and then an answer; 0 or 1, of `tag_count` in quarters."""

    kind: Literal["format", "turns_format", "tag_count", "code_format"]
    think_tag: str = Field(default="think", pattern=r"^\w+$")
    is_prefilled: bool = False  # the opening tag belongs to the prompt
    newlines: bool = True  # of `format` and `turns_format`: each tag on a line of its own
    language: str = "python"  # of `code_format`: of the fenced block


class LanguagePart(Part):
    """Share of the words of the chain of thought that are in the target language; DeepSeek-R1."""

    kind: Literal["language"]
    language: str = "en"
    think_tag: str = Field(default="think", pattern=r"^\w+$")

    @field_validator("language")
    @classmethod
    def _is_known(cls, language: str) -> str:
        if language not in LANGUAGES:
            raise ValueError(f"{language!r}: its script is not known. Known are {', '.join(sorted(LANGUAGES))}.")
        return language


class CodePart(Part):
    """Tests of the program in the last fenced block of the last turn."""

    kind: Literal["code"]
    # all: 1 where every test passed; share: the share that did; weighted_sum: all + 0.1 x share; subtasks: by their points
    score: Literal["all", "share", "weighted_sum", "subtasks"] = "all"
    no_code: float = Field(default=0.0, le=0)  # what a rollout without a program scores; -1 in open-r1's cf_code
    tests_fact: str | None = None
    test_batch_size: int | None = Field(default=None, ge=1)  # after a batch with a failure, what it settles is not run
    wall_s: float = Field(default=4.0, gt=0)
    memory_mib: int = Field(default=512, ge=32)

    @model_validator(mode="after")
    def _stops_where_it_may(self) -> Self:
        if self.test_batch_size is not None and self.score in ("share", "weighted_sum"):
            raise ValueError(
                f"test_batch_size is {self.test_batch_size} but score is {self.score!r}, to which every test counts, so that"
                " none is left out. Remove it, or set score = 'all' or 'subtasks'."
            )
        return self


class F1Part(Part):
    """ARPO's layered reward: -1 for a wrong form, else F1 of words, and a bonus for using every tool."""

    kind: Literal["arpo"]
    multi_tool: Words = ("search", "python")
    bonus: float = Field(default=0.1, ge=0)  # r_M
    references_fact: str | None = None  # a fact that holds a JSON list of right answers; else the task's answer alone


class RepetitionPart(Part):
    """A penalty for repeated n-grams of words."""

    kind: Literal["repetition"]
    ngram: int = Field(default=3, ge=1)
    max_penalty: float = Field(default=-1.0, le=0)


class SoftOverlongPart(Part):
    """0 up to max_tokens - cache_tokens of a response, down to -1 at max_tokens; DAPO."""

    kind: Literal["soft_overlong"]
    max_tokens: int = Field(default=20_480, ge=1)
    cache_tokens: int = Field(default=4096, ge=1)

    @model_validator(mode="after")
    def _has_a_free_part(self) -> Self:
        if self.cache_tokens > self.max_tokens:
            raise ValueError(f"cache_tokens is {self.cache_tokens}, more than max_tokens = {self.max_tokens}. Lower it.")
        return self


class CosinePart(Part):
    """Half a cosine over length, between two values for right answers and two for wrong ones."""

    kind: Literal["cosine"]
    accuracy: str = "accuracy"  # the part that says what is right
    max_tokens: int = Field(default=1000, ge=1)
    correct_short: float = 1.0
    correct_long: float = 0.5
    wrong_short: float = 0.0
    wrong_long: float = -0.5
    clamp: bool = True  # False: it rises again beyond max_tokens, as in open-r1


class LengthPart(Part):
    """Shorter than the others of the group is better, and of wrong answers never good; Kimi k1.5."""

    kind: Literal["length"]
    accuracy: str = "accuracy"


class PlainPart(Part):
    """`called`: a tool ran without error. `reasoning_steps`: signs of steps, easily gamed."""

    kind: Literal["called", "reasoning_steps"]


class PreferencePart(Part):
    """What of a rollout another model is shown, and what its number becomes."""

    judged_on: Literal["summary", "response"] = "summary"  # behind the last thought of the last turn, or all that was written
    think_tag: str = Field(default="think", pattern=r"^\w+$")
    is_prefilled: bool = False  # the opening tag belongs to the prompt, so a response without a closing one is all thought
    missing: float = 0.0  # where there is no summary: a thought that does not end, or nothing behind it


class ScorerPart(PreferencePart):
    """What a reward model gives; DeepSeek-R1's helpful one judges the summary, its safety one the response."""

    kind: Literal["scorer"]
    scorer: AnyScorerConfig
    scale: Literal["sigmoid", "raw"] = "sigmoid"  # sigmoid: between 0 and 1, so that `missing` = 0 is never the better choice


class JudgePart(PreferencePart):
    """What a language model gives when it is asked, from 0 (its lowest) to 1 (its highest)."""

    kind: Literal["judge"]
    judge: JudgeConfig


class FunctionPart(Part):
    """A user's own function (task, trajectory) -> float, or None: then the rollout is excluded from its group."""

    kind: Literal["function"]
    function: str  # module:name


AnyPart: TypeAlias = Annotated[
    MathPart
    | R1ZeroPart
    | R1ZeroFormatPart
    | FormatPart
    | LanguagePart
    | CodePart
    | F1Part
    | RepetitionPart
    | SoftOverlongPart
    | CosinePart
    | LengthPart
    | PlainPart
    | ScorerPart
    | JudgePart
    | FunctionPart,
    Field(discriminator="kind"),
]


class SumRewardConfig(Config):
    """A weighted sum of named parts, each for all rows or for some."""

    kind: Literal["sum"]
    parts: dict[str, AnyPart] = Field(min_length=1)

    @property
    def weights(self) -> dict[str, float]:
        return {name: part.weight for name, part in self.parts.items()}

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if not any(self.weights.values()):
            raise ValueError("weights are all 0: every trajectory would get the same reward. Give one part a weight.")
        for name, part in self.parts.items():
            if isinstance(part, CosinePart | LengthPart):
                judged = self.parts.get(part.accuracy)
                if judged is None or isinstance(judged, CosinePart | LengthPart):
                    raise ValueError(
                        f"parts.{name}.accuracy is {part.accuracy!r}, which is no part that judges an answer. The parts are"
                        f" {', '.join(self.parts)}."
                    )
        if "excluded" in self.parts:
            raise ValueError("a part is called 'excluded', which is what marks a rollout that is not judged. Rename it.")
        return self
