"""Does a tool call of the policy come back as an observation?"""

from __future__ import annotations

from strop.doctor.examination import CODE, PRINTED, Examination
from strop.doctor.finding import Finding
from strop.sandbox.config import SandboxConfig
from strop.types import ToolOutcome

NAME = "tool round trip"


async def check_tool(examination: Examination) -> Finding:
    """Follow one call from the policy's text through parser, tool and sandbox, back into the ids that the policy reads."""
    conversation = examination.conversations[0]
    if not conversation.call:
        return Finding.not_made(NAME, "the prompt tells of no tools, or none of the recipe's runs Python")
    turn = conversation.trajectory.turns[0]
    if conversation.tool_fault:
        return Finding(
            check=NAME,
            detail=f"{CODE} could not be run: {conversation.tool_fault}",
            remedy=_remedy(examination.parts.recipe.sandbox),
        )
    if not turn.calls:
        return Finding(
            check=NAME,
            detail=f"the call {conversation.call!r} was not seen in the policy's text {turn.completion_text!r:.200}.",
            remedy="Make the tokenizer keep the text of a call's tags: encoding and decoding it must give the same text.",
        )
    call = turn.calls[0]
    if call.outcome is not ToolOutcome.STDOUT or call.text.strip() != PRINTED:
        return Finding(
            check=NAME,
            detail=f"{CODE} came back as {call.outcome} {call.text!r:.200}, where {PRINTED} is printed.",
            remedy="Run the same program with `strop sandbox run`"
            + (f" --url {url}" if (url := examination.parts.recipe.sandbox.url) else "")
            + "; its result names what went wrong.",
        )
    read = examination.parts.chat.decode(turn.observation_ids)
    if PRINTED not in read:
        return Finding(
            check=NAME,
            detail=f"the tool said {PRINTED}, but the policy reads {read!r:.200}.",
            remedy="Raise limits.max_response_tokens, or use a chat template that shows the words of the user role.",
        )
    num_tokens = len(turn.observation_ids)
    return Finding.fine(NAME, f"{CODE} came back as {PRINTED} in {call.duration_s * 1000:.0f} ms, in {num_tokens} tokens")


def _remedy(sandbox: SandboxConfig) -> str:
    """Of a sandbox that runs nothing."""
    if sandbox.url:
        return (
            "Mend that before training: until then every rollout that calls the tool is void. The recipe's sandbox.url and"
            f" {sandbox.token_env} name the service; `strop sandbox run FILE --url {sandbox.url}` shows its fault alone."
            " Without sandbox.url programs run on this machine."
        )
    return (
        "Bring the sandbox back before training: until then every rollout that calls the tool is void. `strop sandbox check`"
        " shows its fault alone; a machine without namespaces can ask for less isolation with"
        ' sandbox.min_level = "process".'
    )
