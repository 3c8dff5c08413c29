"""Other models that judge a response: reward models as `Scorer`s, and language models asked over HTTP."""

from strop.rewards.scorers.batching import BatchingScorer
from strop.rewards.scorers.chat_client import ChatClient, ChatServiceConfig, Reply
from strop.rewards.scorers.config import AnyScorerConfig, EmbeddedScorerConfig, HttpScorerConfig, VllmScorerConfig
from strop.rewards.scorers.judge import JudgeConfig, ModelJudge
from strop.rewards.scorers.opening import open_scorer
from strop.rewards.scorers.protocol import Exchange, Scorer
from strop.rewards.scorers.web import WebServiceConfig
from strop.web import ServiceRefused

__all__ = [
    "AnyScorerConfig",
    "BatchingScorer",
    "ChatClient",
    "ChatServiceConfig",
    "EmbeddedScorerConfig",
    "Exchange",
    "HttpScorerConfig",
    "JudgeConfig",
    "ModelJudge",
    "Reply",
    "Scorer",
    "ServiceRefused",
    "VllmScorerConfig",
    "WebServiceConfig",
    "open_scorer",
]
