"""Does the engine sample from the weights that the trainer has just published?"""

from __future__ import annotations

from strop.doctor.examination import Examination, batch_of, compare, sample_rows
from strop.doctor.finding import Finding
from strop.errors import WeightsNotProven
from strop.training.sft import sft_token_loss, sft_token_statistics

NAME = "publication"
_VERSION = 1
_NUM_PROBES = 6
_MORE = 3.0  # times the gap of before; larger weights round a little worse


async def check_publication(examination: Examination) -> Finding:
    """Train once, publish, sample: whose log-probs does the engine report, the new weights' or the old ones'?

    The last check, for afterwards the weights are others.
    """
    parts, before, tolerance = examination.parts, examination.evidence, examination.tolerance_nats
    rows = [conversation.row for conversation in examination.conversations]
    report = await parts.trainer.update(batch_of(rows, parts.temperature), sft_token_loss, sft_token_statistics)
    if report.is_skipped:
        return Finding(
            check=NAME,
            detail=f"an update on sampled tokens was skipped: {report.skip_reason}.",
            remedy='Use trainer.precision = "float32", and look for weights of the model that are not finite.',
        )
    try:
        await parts.trainer.publish(parts.engine, version=_VERSION)
    except WeightsNotProven as error:
        return Finding(
            check=NAME,
            detail=f"the engine could not prove the weights: {error}",
            remedy="Make the engine copy each tensor that it is sent, under its own name, before it computes the checksum.",
        )
    after = await compare(parts, await sample_rows(parts, "after", num=_NUM_PROBES))
    old = after.original(parts.temperature)
    moved = (after.trainer - old).abs().mean().item()
    gap_before = (before.engine - before.trainer).abs().mean().item()
    gap = (after.engine - after.trainer).abs().mean().item()
    gap_to_old = (after.engine - old).abs().mean().item()
    if moved <= tolerance:
        return Finding(
            check=NAME,
            detail=f"one update moved the log-probs by {moved:.2g} nats only, so nothing can be said of publication.",
            remedy="See that the trainer's weights require gradients and that its optimizer holds them.",
        )
    if gap > max(tolerance, _MORE * gap_before):
        is_stale = gap_to_old < gap
        whose = "those of before the update" if is_stale else "neither the new ones nor those of before"
        return Finding(
            check=NAME,
            detail=(
                f"after publication the engine samples from other weights than the trainer's: {gap:.2g} nats from the new ones,"
                f" {gap_to_old:.2g} from those of before. They are {whose}."
            ),
            remedy=(
                "Make load_weights copy every tensor of the stream and drop the KV caches of older weights, then prove the"
                " checksum of what it holds, not of what it was told."
            ),
        )
    if parts.engine.policy_version != _VERSION:
        return Finding(
            check=NAME,
            detail=f"the engine holds the new weights, but calls them version {parts.engine.policy_version}, not {_VERSION}.",
            remedy="Set policy_version to the version that load_weights was given.",
        )
    return Finding.fine(
        NAME, f"one update moved the log-probs by {moved:.2g} nats; the engine followed to within {gap:.2g} of the trainer"
    )
