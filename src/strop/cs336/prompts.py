"""The assignment's prompts, byte for byte: plain text for models without a chat template."""

from __future__ import annotations

from importlib.resources import files

from strop.errors import ConfigError

SOURCES = {
    "r1_zero": "DeepSeek-R1 (arXiv 2501.12948), Table 1, in the words of CS336 assignment 5, section 3; ends with an open tag.",
    "question_only": "CS336 assignment 5, section 8; Dr. GRPO (arXiv 2503.20783) has it as 'no template'.",
    "alpaca_sft": "Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca), as the supplement of CS336 assignment 5 has it.",
    "zero_shot_system_prompt": "The supplement of CS336 assignment 5, section 2, after URIAL (arXiv 2312.01552).",
}
"""The prompts that `load_prompt` knows, with their sources."""


def load_prompt(name: str) -> str:
    """The template; fill its fields (`{question}`, or `{instruction}` and `{response}`) with `str.format`.

    Raises:
        ConfigError: there is no such prompt.
    """
    if name not in SOURCES:
        raise ConfigError(f"prompt {name!r}: no such prompt. Those of the assignment are {', '.join(SOURCES)}.")
    return (files("strop.rollout") / "prompts" / f"{name}.prompt").read_text(encoding="utf-8")
