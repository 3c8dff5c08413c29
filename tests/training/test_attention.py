"""Rows laid end to end: the same log-probs and gradients as rows that stand alone."""

import ctypes
import gc
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scored_tokens import token_logprobs
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from strop.errors import ModelError
from strop.training.attention import (
    ATTENTION,
    _attend_rows,
    _Reads,
    keep_attention,
    lay_out,
    row_attention,
    use_row_attention,
)
from strop.training.batch import microbatches, shared_lengths
from strop.training.logprobs import LogprobModule
from strop.training.models import check_logprobs, load_model

A, B = list(range(1, 21)), list(range(31, 51))  # twenty tokens each


def padded(rows):
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return ids, torch.tensor([len(row) for row in rows])


def test_what_a_row_shares_with_the_row_before_stands_once_and_keeps_its_positions():
    layout = lay_out(*padded([[*A, 50, 51], [*A, 50, 52, 53], B]))
    assert layout.ids.tolist() == [[*A, 50, 51, 52, 53, *B]]
    assert layout.positions.tolist() == [[*range(22), 21, 22, *range(20)]]
    assert layout.sizes == (22, 2, 20)
    assert [[(piece.row, piece.length) for piece in pieces] for pieces in layout.shared] == [[], [(0, 21)], []]
    assert layout.places[1, :23].tolist() == [*range(21), 22, 23]


def test_a_branch_of_a_branch_finds_its_beginning_in_several_rows():
    layout = lay_out(*padded([[*A, 50], A + B + [51], A + B + [52]]))
    assert layout.sizes == (21, 21, 1)
    assert [[(piece.row, piece.length) for piece in pieces] for pieces in layout.shared] == [[], [(0, 20)], [(0, 20), (1, 20)]]
    assert layout.places[2, :41].tolist() == [*range(20), *range(21, 41), 42]


def test_a_short_beginning_is_not_worth_sharing():
    assert shared_lengths(*padded([[*A[:15], 60], [*A[:15], 61], [*A[:15], 61]])) == [0, 0, 16]


@pytest.mark.parametrize(("num_own", "expected"), [(495, 20), (497, 0)])  # 495^2 < 12 * 1024 * 20 = 245 760 < 497^2
def test_a_long_row_shares_a_short_beginning_only_where_its_mask_costs_less(num_own, expected):
    row = A + [7] * num_own
    assert shared_lengths(*padded([[*A, 60], row])) == [0, expected]


def test_a_row_that_another_begins_with_has_nothing_for_itself():
    layout = lay_out(*padded([[*A, 50], A]))
    assert layout.sizes == (21, 0)


def random_rows(lengths, parents, vocabulary=61):
    """Each row begins as another one before it, for a part of its length."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = []
    for index, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        row = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        if index:
            source = rows[parent % index]
            kept = min(len(source), length - 1, 10 + parent)
            row[:kept] = source[:kept]
        rows.append(row)
    return padded(rows)


@pytest.fixture(scope="module")
def models(model_directory):
    alone, packed = (load_model(model_directory).eval() for _ in range(2))
    use_row_attention(packed)
    return alone, packed


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(2, 60), st.integers(0, 30)), min_size=1, max_size=6),
    density=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_packed_rows_give_the_log_probs_and_the_gradient_of_rows_that_stand_alone(models, rows, density):
    ids, lengths = random_rows(*zip(*rows, strict=True))
    generator = torch.Generator().manual_seed(len(rows))
    where = (torch.rand(ids.shape, generator=generator) < density) & (torch.arange(ids.shape[1]) < lengths[:, None])
    where[:, 0] = False
    where[:, 1] = True
    factors = torch.randn(ids.shape, generator=generator)
    gradients, values = [], []
    for model, is_packed in zip(models, (False, True), strict=True):
        model.zero_grad()
        logprobs, entropies = token_logprobs(model, ids, where, temperature=0.7, is_packed=is_packed)
        (logprobs * factors + entropies * factors.flip(0)).sum().backward()
        values.append((logprobs.detach(), entropies.detach()))
        gradients.append(dict(model.named_parameters()))
    for first, second in zip(*values, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=5e-6)
    for name, parameter in gradients[0].items():
        assert (parameter.grad - gradients[1][name].grad).norm() <= 1e-5 * parameter.grad.norm() + 2e-6, name


def test_packed_micro_batches_count_what_is_shared_once(make_batch):
    batch = make_batch((40, 40, 40, 40))
    prompt = batch.ids[0, :30]
    ids = batch.ids.clone()
    ids[:2, :30] = prompt
    parts = microbatches(replace(batch, ids=ids), 50, is_packed=True)
    assert sorted(sorted(part.rows.tolist()) for part in parts) == [[0, 1], [2], [3]]  # 40 + 10 = 50
    assert [len(part.rows) for part in microbatches(batch, 80, is_packed=True)] == [2, 2]


def test_a_sliding_window_holds_within_packed_rows():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=0,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    model = Qwen2ForCausalLM(config).eval()
    check_logprobs(LogprobModule(model, max_logits=2**20, is_packed=True), is_packed=True)  # rows of 24 tokens, which share 17
    assert model.config._attn_implementation == ATTENTION


def test_a_model_that_caps_its_scores_is_refused(model_directory):
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="asks for more of its attention"):
        row_attention(LlamaForCausalLM.from_pretrained(model_directory), heads, heads, heads, None, softcap=30.0)


def test_many_tokens_are_filled_up_with_some_that_nobody_reads(models):
    ids, lengths = padded([[1 + (7 * row + place) % 60 for place in range(80)] for row in range(4)])
    layout = lay_out(ids[:, :79], lengths - 1)
    assert (layout.ids.shape[1], sum(layout.sizes)) == (320, 320)  # of 316
    assert sorted(layout.places.flatten().tolist()) == list(range(316))
    where = torch.ones_like(ids, dtype=torch.bool)
    where[:, 0] = False
    alone, packed = (
        token_logprobs(model, ids, where, temperature=1.0, is_packed=is_packed)[0]
        for model, is_packed in zip(models, (False, True), strict=True)
    )
    torch.testing.assert_close(packed, alone, rtol=0, atol=5e-6)


def attended(query, key, value, layout, how):
    if how == "reads":
        return _Reads.apply(query, key, value, layout, 0.25)
    return _attend_rows(query, key, value, layout, 0.25, None).transpose(1, 2)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(2, 60), st.integers(0, 30)), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_reads_that_are_put_together_give_what_rows_give_behind_their_keys_and_the_same_gradients(rows, dtype):
    layout = lay_out(*random_rows(*zip(*rows, strict=True)))
    generator = torch.Generator().manual_seed(len(rows))
    heads = [torch.randn(1, layout.ids.shape[1], num, 16, generator=generator).to(dtype) for num in (4, 2, 2)]
    weights = torch.randn(heads[0].shape, generator=generator).to(dtype)
    results = []
    for how in ("reads", "rows"):
        leaves = [each.clone().requires_grad_() for each in heads]
        outputs = attended(*(leaf.transpose(1, 2) for leaf in leaves), layout, how)
        (outputs * weights).sum().backward()
        assert outputs.dtype is dtype
        results.append([outputs.detach().float(), *(leaf.grad.float() for leaf in leaves)])
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    for of_reads, of_rows in zip(*results, strict=True):
        assert (of_reads - of_rows).norm() <= tolerance * of_rows.norm() + 1e-6


def test_rows_that_share_a_beginning_read_it_together():
    layout = lay_out(*padded([[*A, 50, 51], [*A, 52], [*A, *B[:18], 53], [*A, *B[:18], 54], B]))
    own = [slice(0, 22), slice(22, 23), slice(23, 42), slice(42, 43), slice(43, 63)]
    reads = [(read.queries, read.keys) for read in layout.reads]
    assert reads == [*zip(own, own, strict=True), (slice(22, 43), slice(0, 20)), (slice(42, 43), slice(23, 41))]
    assert [read.is_own for read in layout.reads] == [True] * 5 + [False] * 2
    assert layout.longest == 39


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [7, 24, 41, 200])
def test_a_window_holds_forward_and_backward(window, dtype):
    """The longest row has 41 tokens, and 9 more that fill the micro-batch up come after the last one."""
    layout = lay_out(*padded([[*A, 50, 51], [*A, *B, 53], *([row, *A[1:]] for row in range(60, 75))]))
    assert (layout.longest, layout.ids.shape[1]) == (41, 352)
    heads = [torch.randn(1, 352, num, 16).to(dtype) for num in (4, 2, 2)]
    to_outputs = torch.randn(1, 352, 4, 16).to(dtype)
    places = [layout.places[row, :length].tolist() for row, length in enumerate([22, 41, *[20] * 15])]
    is_seen = torch.zeros(352, 352, dtype=torch.bool)
    for of_row in places:
        for position, place in enumerate(of_row):
            is_seen[place, of_row[max(0, position - window + 1) : position + 1]] = True
    read = sorted({place for of_row in places for place in of_row})
    results = []
    for is_dense in (False, True):
        leaves = [each.detach().clone().to(torch.float32 if is_dense else dtype).requires_grad_() for each in heads]
        query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
        if is_dense:
            scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.25
            weights = scores.masked_fill(~is_seen, -1e9).softmax(-1)
            outputs = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
        else:
            outputs, _ = row_attention(None, query, key, value, None, scaling=0.25, sliding_window=window, layout=layout)
        (outputs[:, read] * to_outputs[:, read]).sum().backward()
        results.append([outputs[:, read].detach().float(), *(leaf.grad[:, read].float() for leaf in leaves)])
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    for ours, dense in zip(*results, strict=True):
        assert (ours - dense).norm() <= tolerance * dense.norm()


def test_a_graph_that_no_backward_pass_goes_through_is_let_go():
    layout = lay_out(*padded([A, B]))
    heads = [torch.randn(1, num, 40, 16, requires_grad=True) for num in (4, 2, 2)]

    def attend(*heads):
        return _Reads.apply(*heads, layout, 0.25)

    scaled = heads[0] * 1.0
    gone = weakref.ref(scaled)
    outputs = checkpoint(attend, scaled, *heads[1:], use_reentrant=False, context_fn=keep_attention)
    del scaled, outputs
    gc.collect()
    assert gone() is None


def test_a_layer_that_is_computed_again_takes_the_attention_that_was_kept():
    layout = lay_out(*padded([A, B]))
    heads = [torch.randn(1, num, 40, 16) for num in (4, 2, 2)]
    first, second = keep_attention()
    with first:
        kept = [_Reads.apply(*heads, layout, 0.25), _Reads.apply(heads[0] + 1, *heads[1:], layout, 0.25)]
    for _ in range(2):  # a graph may be gone through twice
        with second:
            again = [_Reads.apply(heads[0] * float("nan"), *heads[1:], layout, 0.25) for _ in range(2)]
        assert all(torch.equal(one, other) for one, other in zip(again, kept, strict=True))
    assert _Reads.apply(heads[0] * float("nan"), *heads[1:], layout, 0.25).isnan().all()


_GROWTH = """
import ctypes, random
import torch
from strop.training.attention import lay_out, row_attention

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used free keep".split()]

heap = ctypes.CDLL(None).mallinfo2
heap.restype = Heap
draw = random.Random(0)

def attend(lengths):
    for length in lengths:
        query, key = (torch.randn(1, heads, length, 64).bfloat16().requires_grad_() for heads in (9, 3))
        layout = lay_out(torch.zeros(1, length, dtype=torch.int64), torch.tensor([length]))
        for of in (layout, None):
            row_attention(None, query, key, key, None, layout=of)[0].sum().backward()

torch.set_num_threads(1)
attend(range(32, 257, 32))
before = heap().used
attend(draw.sample(range(20, 257), 60))
print((heap().used - before) // 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library does not tell what its heap holds")
def test_rollouts_of_new_lengths_cost_no_memory_that_stays():
    """Sixty lengths in bfloat16 cost 0.2 GB where attention has compiled kernels for each."""
    answer = subprocess.run([sys.executable, "-c", _GROWTH], capture_output=True, text=True, check=True)
    assert int(answer.stdout) < 20  # MiB
