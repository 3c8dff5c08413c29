"""Which completions can be answers, and what is said of those that cannot."""

import dataclasses
import math

import pytest

from strop.engine.protocol import check_completion, check_vocabulary
from strop.errors import EngineLost, ModelError
from strop.types import Completion, FinishReason

from .support import make_request

_REQUEST = make_request("a", [1, 2, 3], max_tokens=4, stop_ids=frozenset({9}))
_STOPPED = Completion(
    ids=(5, 6, 9),
    logprobs=(-1.0, -0.5, 1e-7),
    entropies=(1.0, 0.0, 2.0),
    is_forced=(False, False, False),
    spans=((3, 3),),
    finish_reason=FinishReason.STOP,
    cached_tokens=3,
)
_FULL = dataclasses.replace(
    _STOPPED,
    ids=(5, 6, 7, 8),
    logprobs=(-1.0,) * 4,
    entropies=(),
    is_forced=(False,) * 4,
    spans=((3, 4),),
    finish_reason=FinishReason.LENGTH,
)


def _check(completion, request=_REQUEST, vocab_size=10):
    check_completion(request, completion, vocab_size=vocab_size, policy_version=3)


def test_what_a_sound_engine_answers_is_accepted():
    _check(_STOPPED)
    _check(_FULL)
    _check(dataclasses.replace(_STOPPED, ids=(5, 6, 7)), make_request("a", [1, 2, 3], stop_strings=("x",)))
    _check(dataclasses.replace(_STOPPED, ids=(5, 11, 9)), vocab_size=None)
    check_completion(_REQUEST, dataclasses.replace(_STOPPED, spans=((-1, 3),)), vocab_size=10, policy_version=None)


@pytest.mark.parametrize(
    ("completion", "changes", "fault"),
    [
        (_FULL, {"ids": ()}, "has 0 ids, but max_tokens is 4"),
        (_FULL, {"ids": (5,) * 5}, "has 5 ids, but max_tokens is 4"),
        (_STOPPED, {"logprobs": (-1.0, -1.0)}, "has 3 ids and 2 logprobs"),
        (_STOPPED, {"logprobs": ()}, "has 3 ids and 0 logprobs"),
        (_STOPPED, {"entropies": (1.0,)}, "has 3 ids and 1 entropies"),
        (_STOPPED, {"is_forced": ()}, "has 3 ids and 0 is_forced"),
        (_STOPPED, {"ids": (5, 10, 9)}, "an id outside the vocabulary 0..9: 10"),
        (_STOPPED, {"ids": (-1, 6, 9)}, "an id outside the vocabulary 0..9: -1"),
        (_STOPPED, {"logprobs": (-1.0, math.nan, -1.0)}, "log-prob nan at position 1"),
        (_STOPPED, {"logprobs": (-math.inf, -1.0, -1.0)}, "log-prob -inf at position 0"),
        (_STOPPED, {"logprobs": (-1.0, -1.0, 0.01)}, "log-prob 0.01 at position 2"),
        (_STOPPED, {"entropies": (1.0, math.nan, 1.0)}, "entropy nan at position 1"),
        (_STOPPED, {"entropies": (1.0, 1.0, -0.1)}, "entropy -0.1 at position 2"),
        (_STOPPED, {"ids": (5, 9, 9)}, "goes on after stop id 9 at position 1"),
        (_STOPPED, {"ids": (5, 6, 7)}, "stopped, but ends with id 7, and the stop ids are [9]"),
        (_STOPPED, {"finish_reason": FinishReason.LENGTH}, "cut at max_tokens, but ends with stop id 9"),
        (_STOPPED, {"ids": (5, 6, 7), "finish_reason": FinishReason.LENGTH}, "but ends with 3 of 4 tokens"),
        (_STOPPED, {"cached_tokens": 4}, "says that 4 of 3 ids were cached"),
        (_STOPPED, {"spans": ((2, 3),)}, "sampled from policy version 2, but 3 was published"),
        (_STOPPED, {"spans": ((3, 1), (4, 2))}, "sampled from policy version 4, but 3 was published"),
        (_STOPPED, {"spans": ()}, "has 3 ids, and spans of 0 tokens"),
        (_STOPPED, {"spans": ((3, 1), (4, 1))}, "has 3 ids, and spans of 2 tokens"),
        (_STOPPED, {"spans": ((3, 3), (4, 0))}, "has 3 ids, and spans of 3 tokens"),
        (_STOPPED, {"spans": ((3, 1), (2, 2))}, "has spans whose policy versions do not rise"),
        (_STOPPED, {"spans": ((3, 1), (3, 2))}, "has spans whose policy versions do not rise"),
    ],
)
def test_what_no_engine_can_have_sampled_is_garbage_and_named(completion, changes, fault):
    with pytest.raises(EngineLost) as lost:
        _check(dataclasses.replace(completion, **changes))
    assert "invalid completion: the completion of request a" in str(lost.value)
    assert fault in str(lost.value)


def test_weights_that_were_published_meanwhile_may_have_sampled_the_rest():
    spliced = dataclasses.replace(_STOPPED, spans=((3, 1), (4, 2)))
    check_completion(_REQUEST, spliced, vocab_size=10, policy_version=3, newest=4)
    check_completion(_REQUEST, spliced, vocab_size=10, policy_version=2, newest=6)
    with pytest.raises(EngineLost, match="policy version 3, but 4 to 6 was published"):
        check_completion(_REQUEST, spliced, vocab_size=10, policy_version=4, newest=6)


def test_a_stop_before_min_tokens_is_garbage():
    request = make_request("a", [1, 2, 3], max_tokens=8, min_tokens=4, stop_ids=frozenset({9}))
    with pytest.raises(EngineLost, match="stopped after 3 tokens, but min_tokens is 4"):
        _check(_STOPPED, request)


@pytest.mark.parametrize(("ids", "stop_ids"), [([-1, 3], []), ([3], [-1]), ([-1, 10], [])])
def test_a_negative_id_is_named_as_one(ids, stop_ids):
    with pytest.raises(ModelError, match=r"^request a has the negative id -1\. Ids count from 0"):
        check_vocabulary(make_request("a", ids, stop_ids=frozenset(stop_ids)), 10)


def test_the_largest_id_is_named_where_the_vocabulary_is_smaller():
    with pytest.raises(ModelError, match="request a has ids up to 10, but the model's vocabulary has 10"):
        check_vocabulary(make_request("a", [3, 10], stop_ids=frozenset()), 10)
    check_vocabulary(make_request("a", [0, 9], stop_ids=frozenset()), 10)
