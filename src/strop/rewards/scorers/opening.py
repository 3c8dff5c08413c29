"""The scorer that a recipe asks for."""

from __future__ import annotations

from strop.rewards.scorers.batching import BatchingScorer
from strop.rewards.scorers.config import AnyScorerConfig, EmbeddedScorerConfig, VllmScorerConfig
from strop.rewards.scorers.protocol import Scorer


def open_scorer(config: AnyScorerConfig) -> Scorer:
    """A scorer that judges in batches; whoever asked closes it. Raises `UserError` when a key or a path is missing."""
    # Their models' library takes seconds to load; nobody pays for it who has no scorer.
    from strop.rewards.scorers.embedded import EmbeddedScorer
    from strop.rewards.scorers.services import HttpScorer, VllmScorer

    scorer: Scorer
    if isinstance(config, EmbeddedScorerConfig):
        scorer = EmbeddedScorer(config)
    elif isinstance(config, VllmScorerConfig):
        scorer = VllmScorer(config)
    else:
        scorer = HttpScorer(config)
    return BatchingScorer(scorer, max_wait_s=config.max_wait_s, max_batch=config.max_batch)
