"""Turns messages into token ids through the tokenizer's own chat template, each text encoded once.

Ids that were sampled are never rendered or encoded again ("tokens are the truth"): after a completion, only what the template
puts there is encoded and appended. Text that is not ours (questions, tool output) cannot forge a special token: wherever it
spells one out, it is encoded in two pieces that meet inside the spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jinja2

from strop.errors import ModelError

_LARGEST_MARK = 0xF8FF  # marks are drawn from the private use area, U+E000 to U+F8FF
_REMEMBERED = 64  # last renderings and encodings: rollouts of a group begin alike, and tools often answer alike
_LONGEST_REMEMBERED = 2**16  # characters
WRAPPER = ("<tool_response>\n", "\n</tool_response>")  # rStar2-Agent (arXiv 2508.20722), section 2.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of text and who wrote it. Only in our own text does the spelling of a special token mean that token."""

    text: str
    is_ours: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str
    spans: tuple[Span, ...]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


def message(role: str, text: str) -> Message:
    """A message that is ours from first to last character."""
    return Message(role=role, spans=(Span(text=text, is_ours=True),))


class ChatFormat:
    """A tokenizer and its chat template.

    Without a chat template only raw prompts can be encoded, and a turn ends with the end-of-sequence token.

    Raises:
        ModelError: there is no end-of-sequence token, or the template cannot hold a conversation of the roles user, assistant,
            user.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._rendered = lru_cache(_REMEMBERED)(self._apply_template)
        self._encoded = lru_cache(_REMEMBERED)(self._tokenize)
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"{self._name}: its tokenizer has no eos_token, so a turn could never end. Set tokenizer.eos_token."
            )
        ending = self._special_at_start(self._behind_assistant([])) if getattr(tokenizer, "chat_template", None) else None
        self.end_of_turn_id: int = tokenizer.eos_token_id if ending is None else tokenizer.convert_tokens_to_ids(ending)
        """The id with which the template ends an assistant's turn; the eos id when it writes none."""
        self._end_of_turn = ending

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a turn when they are sampled."""
        return frozenset({self.tokenizer.eos_token_id, self.end_of_turn_id})

    def prompt_ids(self, messages: Sequence[Message], prefill: str = "") -> tuple[int, ...]:
        """The conversation, the opening of the assistant's turn, and `prefill`, which the policy continues.

        Raises:
            ModelError: the template refuses the conversation (a system message, for some).
        """
        return self._encode([*self._render(messages, add_generation_prompt=True), Span(text=prefill, is_ours=True)])

    def raw_ids(self, spans: Sequence[Span]) -> tuple[int, ...]:
        """Return a prompt without the chat template, after the ids with which the tokenizer begins a text."""
        return (*self.tokenizer.encode(""), *self._encode(spans))

    def observation_ids(
        self,
        responses: Sequence[str],
        *,
        completion_ended: bool,
        wrapper: tuple[str, str] = WRAPPER,
        continues_turn: bool = False,
        prefill: str = "",
    ) -> tuple[int, ...]:
        """What follows a completion: the end of its turn, the tool responses under the user role, the next turn's opening.

        Args:
            responses: one text per tool call.
            completion_ended: the completion's last id is `end_of_turn_id`, which is then not repeated.
            wrapper: the text before and after each response.
            continues_turn: only the responses, in the middle of the turn, if the completion has not ended it.
            prefill: the beginning of the next turn.
        """
        spans: list[Span] = []
        for response in responses:
            opening = ("\n" if spans else "") + wrapper[0]
            spans += [Span(text=opening, is_ours=True), Span(text=response, is_ours=False), Span(text=wrapper[1], is_ours=True)]
        if continues_turn and not completion_ended:
            return self._encode(spans)
        behind = self._behind_assistant([Message(role="user", spans=tuple(spans))])
        if completion_ended and self._end_of_turn is not None:
            first = behind[0]
            behind[0] = Span(text=first.text[first.text.index(self._end_of_turn) + len(self._end_of_turn) :], is_ours=True)
        return self._encode([*behind, Span(text=prefill, is_ours=True)])

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """What an assistant says in one turn, as a policy would have sampled it: `text`, tags included, and the end of turn."""
        return (*self._encode([Span(text=text, is_ours=True)]), self.end_of_turn_id)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included: a view for people and for parsers, never encoded again."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def completion_text(self, ids: Sequence[int]) -> str:
        """The text of a completion, without the id that ended its turn."""
        return self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def num_tokens(self, text: str) -> int:
        """How many tokens `text` takes as a tool response."""
        return len(self._encode([Span(text=text, is_ours=False)]))

    def shorten(self, text: str, max_tokens: int) -> str:
        """`text`, or its head and tail around a line that says how much is left out, in at most `max_tokens` tokens.

        The two ends get the same number of characters. A limit below the length of that line gives only the line.
        """
        total = self.num_tokens(text)
        if total <= max_tokens:
            return text
        num_kept = len(text) * max_tokens // total // 2 * 2
        while True:
            half = num_kept // 2
            notice = f"\n[{len(text) - 2 * half} characters left out]\n"
            shortened = text[:half] + notice + text[len(text) - half :]
            if not half or self.num_tokens(shortened) <= max_tokens:
                return shortened if half else notice.strip()
            num_kept = min(num_kept * 9 // 10, num_kept - 2)

    def check_prefix_preserving(self) -> str | None:
        """What is wrong when the template rewrites its history, as those do that drop earlier thoughts; None when it does not.

        Rollouts are safe either way, for they append; a conversation rendered whole would hold other tokens than the
        rollout that it came from.
        """
        turns = [
            message("user", "first question"),
            message("assistant", "<think>\nfirst thought\n</think>\n\nfirst answer"),
            message("user", "second question"),
            message("assistant", "<think>\nsecond thought\n</think>\n\nsecond answer"),
        ]
        for length in range(1, len(turns)):
            is_user_last = turns[length - 1].role == "user"
            shorter = "".join(span.text for span in self._render(turns[:length], add_generation_prompt=is_user_last))
            longer = "".join(span.text for span in self._render(turns[: length + 1], add_generation_prompt=False))
            if not longer.startswith(shorter):
                pairs = enumerate(zip(shorter, longer, strict=False))
                same = next((at for at, (one, other) in pairs if one != other), len(longer))
                return (
                    f"{self._name}: its chat template rewrites history: after message {length + 1} the rendering of the first"
                    f" {length} differs from character {same} on: {shorter[same : same + 40]!r} became"
                    f" {longer[same : same + 40]!r}."
                )
        return None

    @property
    def _name(self) -> str:
        return getattr(self.tokenizer, "name_or_path", "") or "the model"

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[Span]:
        """Return the rendered text, split where text of others begins and ends.

        The template sees marks instead of that text, so the text cannot steer the template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ModelError(
                f"{self._name}: its tokenizer has no chat template, so messages cannot be turned into a prompt. Use a raw"
                " prompt (prompt = 'r1_zero' or 'question_only'), the model's instruct variant, or set tokenizer.chat_template"
                " and save the tokenizer with save_pretrained."
            )
        ours = "".join(span.text for one in messages for span in one.spans if span.is_ours)
        marks = (chr(code) for code in range(0xE000, _LARGEST_MARK + 1) if chr(code) not in ours)
        foreign: dict[str, str] = {}
        conversation: list[tuple[str, str]] = []
        for one in messages:
            content = ""
            for span in one.spans:
                if span.is_ours:
                    content += span.text
                else:
                    mark = next(marks)
                    foreign[mark] = span.text
                    content += mark
            conversation.append((one.role, content))
        rendered = self._rendered(tuple(conversation), add_generation_prompt)
        if not foreign:
            return [Span(text=rendered, is_ours=True)]
        pieces = re.split(f"([{''.join(foreign)}])", rendered)
        return [Span(text=foreign.get(piece, piece), is_ours=piece not in foreign) for piece in pieces]

    def _apply_template(self, conversation: tuple[tuple[str, str], ...], add_generation_prompt: bool) -> str:
        """Return what the template makes of messages, each a role and a content."""
        messages = [{"role": role, "content": content} for role, content in conversation]
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(role for role, _ in conversation)
            raise ModelError(
                f"{self._name}: its chat template refuses a conversation of the roles {roles}: {error}. Choose a prompt"
                " without the role it refuses, or another template."
            ) from error

    def _behind_assistant(self, following: Sequence[Message]) -> list[Span]:
        """What the template writes behind the content of an assistant's turn that `following` comes after."""
        mark = Message(role="assistant", spans=(Span(text="", is_ours=False),))
        spans = self._render([message("user", "question"), mark, *following], add_generation_prompt=bool(following))
        if len(spans) < 3:
            raise ModelError(f"{self._name}: its chat template leaves the assistant's words out of the conversation.")
        return spans[2:]  # before the mark, the mark, after it

    def _special_at_start(self, spans: Sequence[Span]) -> str | None:
        text = spans[0].text.lstrip()
        return max((token for token in self._special_strings if text.startswith(token)), key=len, default=None)

    @cached_property
    def _special_strings(self) -> tuple[str, ...]:
        """Spellings that the tokenizer turns into one id before it looks at anything else."""
        added: dict[str, int] = self.tokenizer.get_added_vocab()
        return tuple(sorted((token for token in added if len(token) > 1 and not token.isspace()), key=len, reverse=True))

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        """Every place where a special token's spelling starts, overlapping ones too."""
        if not self._special_strings:
            return None
        return re.compile(f"(?=({'|'.join(map(re.escape, self._special_strings))}))")

    def _encode(self, spans: Sequence[Span]) -> tuple[int, ...]:
        is_short = sum(len(span.text) for span in spans) <= _LONGEST_REMEMBERED
        return (self._encoded if is_short else self._tokenize)(tuple(spans))

    def _tokenize(self, spans: tuple[Span, ...]) -> tuple[int, ...]:
        text = "".join(span.text for span in spans)
        ids: list[int] = []
        start = 0
        for end in [*self._forgeries(text, spans), len(text)]:
            if start < end:
                ids += self.tokenizer.encode(text[start:end], add_special_tokens=False)
            start = end
        return tuple(ids)

    def _forgeries(self, text: str, spans: Sequence[Span]) -> Iterator[int]:
        """Where to cut `text` so that no special token is found in, or across the border of, text that is not ours."""
        if self._special_pattern is None or all(span.is_ours for span in spans):
            return
        foreign: list[tuple[int, int]] = []  # start and end of each stretch that is not ours
        position = 0
        for span in spans:
            if not span.is_ours and span.text:
                foreign.append((position, position + len(span.text)))
            position += len(span.text)
        for found in self._special_pattern.finditer(text):
            start, end = found.span(1)
            for foreign_start, foreign_end in foreign:
                if start < foreign_end and foreign_start < end:
                    yield max(start + 1, foreign_start)
                    break
