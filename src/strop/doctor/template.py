"""Does the chat template only ever append?"""

from __future__ import annotations

from strop.doctor.examination import Examination
from strop.doctor.finding import Finding

NAME = "chat template"


async def check_template(examination: Examination) -> Finding:
    """A template that drops earlier thoughts shows the model another history than the one in which its tokens were sampled."""
    chat = examination.parts.chat
    problem = chat.check_prefix_preserving()
    if problem is not None:
        return Finding.from_message(NAME, problem)
    return Finding.fine(NAME, f"only appends to its history; a turn ends with {chat.decode([chat.end_of_turn_id])}")
