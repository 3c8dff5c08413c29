"""The compiled functions in both precisions against torch's in float32, and what happens where there can be none."""

import logging
import shutil
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from strop.engine.torch.cpu import compiled
from strop.training.attention import _Reads, attention_kernels, lay_out
from strop.training.cpu import kernels as kernels_module
from strop.training.cpu.kernels import Read, Waves
from strop.training.cpu.lean_layers import elementwise_kernels, gated, rms_norm
from strop.training.logprobs import head_logprobs

EXACT = torch.float64
"""There are no kernels for it: torch computes in float32."""
ROUNDING = {torch.bfloat16: 1.0, torch.float32: 1e-3}
"""Of a precision, relative to bfloat16's."""
NOTHING = {torch.bfloat16: 1e-4, torch.float32: 1e-5}
"""The largest norm of a gradient that is 0."""


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def kernels(dtype):
    heads = torch.zeros(1, 1, 1, 32, dtype=dtype)
    found = attention_kernels(heads, heads, heads)
    if found is None:
        pytest.skip("needs a C compiler and a processor with AVX-512 BF16, or AVX2 for float32")
    return found


def rows_of(lengths, shared):
    """Ids and lengths of rows, each with so many of its first tokens those of the row before it."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(0, 1000, (len(lengths), max(lengths)), generator=generator)
    for row in range(1, len(lengths)):
        num = min(shared[row], lengths[row] - 1, lengths[row - 1])
        ids[row, :num] = ids[row - 1, :num]
    return ids, torch.tensor(lengths)


def some_heads(dtype, num_tokens, num_heads, num_kv_heads, dim, seed=0):
    """Queries, keys, values and the gradient of what is read, as the model library lays them out."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, num_tokens, num, dim, generator=generator).to(dtype).transpose(1, 2)
        for num in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    ]


def outputs_and_gradients(heads, layout, dtype=None):
    """Of `_Reads`: in the precision of the heads by the kernels, in `EXACT` by torch."""
    *leaves, to_outputs = (each.detach().to(dtype or each.dtype) for each in heads)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    outputs = _Reads.apply(*leaves, layout, 0.2)
    outputs.backward(to_outputs.transpose(1, 2))
    return [outputs.detach(), *(leaf.grad for leaf in leaves)]


def assert_near(ours, exact):
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype in ROUNDING
        assert (one - other).norm() <= 0.005 * ROUNDING[one.dtype] * other.norm() + NOTHING[one.dtype]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 250)), min_size=1, max_size=6),
    sizes=st.sampled_from([(4, 2, 32), (9, 3, 64), (2, 2, 96), (3, 1, 128)]),
)
def test_what_is_read_and_its_gradients_are_torch_s(kernels, dtype, rows, sizes):
    layout = lay_out(*rows_of(*zip(*rows, strict=True)))
    heads = some_heads(dtype, layout.ids.shape[1], *sizes)
    assert_near(outputs_and_gradients(heads, layout), outputs_and_gradients(heads, layout, EXACT))


def test_processors_without_tiles_are_served_by_the_same_source(monkeypatch):
    monkeypatch.setattr(kernels_module, "AMX", frozenset())
    kernels_module._compiled.cache_clear()
    try:
        if kernels_module.compiled(torch.bfloat16) is None:
            pytest.skip("needs a C compiler and a processor with AVX-512 BF16")
        layout = lay_out(*rows_of([150, 200, 37], [0, 140, 20]))
        heads = some_heads(torch.bfloat16, layout.ids.shape[1], 4, 2, 64)
        assert_near(outputs_and_gradients(heads, layout), outputs_and_gradients(heads, layout, EXACT))
    finally:
        kernels_module._compiled.cache_clear()


def test_a_compiler_without_amx_makes_the_functions_without_it(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-mamx*) echo "unknown flag" >&2; exit 1;; esac\nexec gcc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not compiled.has_processor(compiled.AVX512_BF16 | compiled.AMX) or shutil.which("gcc") is None:
        pytest.skip("needs gcc and a processor with AMX")
    kernels_module._compiled.cache_clear()
    try:
        assert kernels_module.compiled(torch.bfloat16) is not None
    finally:
        kernels_module._compiled.cache_clear()


def test_rows_of_many_tiles_whose_scores_are_far_apart(kernels, dtype, monkeypatch):
    """A later tile with larger scores outweighs the ones before it; shared reads come last."""
    monkeypatch.setattr("strop.training.attention._LONG", 1024)
    layout = lay_out(*rows_of([700, 650, 651], [0, 600, 640]))
    assert layout.waves.starts.tolist() == [0, 3, 4, 5]
    query, key, value, to_outputs = some_heads(dtype, layout.ids.shape[1], 2, 1, 64)
    key = key * torch.linspace(0.1, 6.0, key.shape[2])[:, None].to(dtype)
    heads = [query, key, value, to_outputs]
    assert_near(outputs_and_gradients(heads, layout), outputs_and_gradients(heads, layout, EXACT))


def test_log_normalizers_are_those_of_all_keys_that_a_token_sees(kernels, dtype):
    layout = lay_out(*rows_of([40, 41], [0, 30]))
    query, key, value, _ = some_heads(dtype, 51, 2, 2, 32)
    _, normalizers = kernels.attend(query, key, value, layout.waves, 0.2)
    seen = {row: layout.places[row, : layout.positions[0, token] + 1] for row, token in ((0, 20), (1, 50))}
    for row, token in ((0, 20), (1, 50)):
        scores = 0.2 * query[0, :, token].float() @ key[0, :, seen[row]].float().mT
        expected = torch.stack([scores[head, head].logsumexp(0) for head in range(2)])
        torch.testing.assert_close(normalizers[0, :, token], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("lengths", "shared"), [([90, 150, 151, 60], [0, 80, 100, 20]), ([540, 1100, 1108], [0, 530, 530])])
def test_the_number_of_threads_changes_no_bit(kernels, dtype, lengths, shared, monkeypatch):
    monkeypatch.setattr("strop.training.attention._LONG", 2048)
    layout = lay_out(*rows_of(lengths, shared))
    heads = some_heads(dtype, layout.ids.shape[1], 6, 2, 64)
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(outputs_and_gradients(heads, layout))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_how_heads_lie_in_memory_changes_no_bit(kernels, dtype):
    layout = lay_out(*rows_of([70, 70], [0, 33]))
    heads = some_heads(dtype, layout.ids.shape[1], 4, 2, 32)
    whole = [each.contiguous() for each in heads]
    apart = [each.mT.contiguous().mT for each in heads]  # the numbers of a head are not side by side
    results = [outputs_and_gradients(each, layout) for each in (heads, whole, apart)]
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_what_is_not_a_number_stays_none(kernels, dtype):
    layout = lay_out(*rows_of([200, 140], [0, 0]))
    query, key, value, to_outputs = some_heads(dtype, layout.ids.shape[1], 2, 1, 32)
    query[0, 1, 150] = torch.nan
    outputs, of_query, *_ = outputs_and_gradients([query, key, value, to_outputs], layout)
    assert outputs[0, 150, 1].isnan().all()
    assert of_query[0, 1, 150].isnan().all()
    assert outputs[0, 150, 0].isfinite().all()
    assert outputs[0, 151:].isfinite().all()


def test_of_a_wave_no_two_reads_write_to_the_same_place():
    own = [slice(0, 10), slice(10, 20), slice(20, 30), slice(30, 40)]
    shared = [
        (slice(10, 20), slice(0, 5)),
        (slice(30, 40), slice(20, 25)),
        (slice(10, 30), slice(0, 3)),
        (slice(15, 18), slice(6, 8)),
    ]
    reads = [Read(queries=each, keys=each, is_own=True) for each in own]
    reads += [Read(queries=queries, keys=keys, is_own=False) for queries, keys in shared]
    waves = Waves.of(reads)
    assert waves.starts.tolist() == [0, 4, 6, 7, 8]
    assert waves.reads[4:].tolist() == [[10, 10, 0, 5, 0], [30, 10, 20, 5, 0], [10, 20, 0, 3, 0], [15, 3, 6, 2, 0]]


@pytest.mark.parametrize("lengths", [[1200, 1990], [540, 1100, 1400], [1300, 2100, 2600]])
def test_long_shared_reads_are_split_into_blocks_without_a_place_in_common(lengths):
    shared = [0, *(length - 500 for length in lengths[:-1])]
    reads = lay_out(*rows_of(lengths, shared)).reads
    waves = Waves.of(reads)
    tokens = torch.zeros(sum(lengths), sum(lengths), dtype=torch.int64)
    for first, last in pairwise(waves.starts.tolist()):
        queries, keys = Counter(), Counter()
        for query, num_queries, key, num_keys, _ in waves.reads[first:last].tolist():
            queries.update(range(query, query + num_queries))
            keys.update(range(key, key + num_keys))
            tokens[query : query + num_queries, key : key + num_keys] += 1
        assert max(*queries.values(), *keys.values()) == 1
    for read in reads:
        tokens[read.queries, read.keys] -= 1
    assert not tokens.any()
    assert len(waves.reads) > len(reads)


def test_what_is_read_in_blocks_is_torch_s(kernels, dtype, monkeypatch):
    monkeypatch.setattr("strop.training.attention._LONG", 2048)
    layout = lay_out(*rows_of([540, 1100, 1108], [0, 530, 530]))
    assert len(layout.waves.reads) > len(layout.reads)
    heads = some_heads(dtype, layout.ids.shape[1], 3, 1, 64)
    assert_near(outputs_and_gradients(heads, layout), outputs_and_gradients(heads, layout, EXACT))


@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim"),
    [
        (EXACT, 64, 64),
        (torch.float32, 44, 44),
        (torch.bfloat16, 48, 48),
        (torch.bfloat16, 64, 32),
        (torch.bfloat16, 512, 512),
    ],
)
def test_heads_that_it_is_not_made_for_are_torch_s(dtype, dim, value_dim):
    heads, values = torch.zeros(1, 2, 3, dim, dtype=dtype), torch.zeros(1, 2, 3, value_dim, dtype=dtype)
    assert attention_kernels(heads, heads, values) is None


def test_long_rows_in_float32_are_torch_s_where_it_has_wider_instructions(monkeypatch):
    heads = torch.zeros(1, 2, 3, 64)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    assert attention_kernels(heads, heads, heads, 513) is None
    assert attention_kernels(heads, heads, heads, 512) is kernels_module.compiled(torch.float32)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert attention_kernels(heads, heads, heads, 513) is kernels_module.compiled(torch.float32)


def test_kernels_that_are_wrong_are_not_used_and_the_log_says_so(kernels, dtype, monkeypatch, tmp_path, caplog):
    layout = lay_out(*rows_of([50, 60], [0, 30]))
    heads = some_heads(dtype, layout.ids.shape[1], 4, 2, 32)
    expected = outputs_and_gradients(heads, layout)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_COMPILE", ("-O0", *compiled._COMPILE[1:]))  # in seconds less
    source, instructions = kernels_module._SOURCES[dtype]
    spoiled, text = tmp_path / source.name, source.read_text()
    shutil.copy(source.with_name("rows.h"), tmp_path)
    mistakes = [("1.0f / total[i]", "0.9f / total[i]"), ("temperature + logf(sum)", "temperature - logf(sum)")]
    if dtype is torch.bfloat16:
        mistakes += [("set1_ps(scale);", "set1_ps(0.9f * scale);"), ("mean, of_unit", "dots, of_unit")]
    else:
        mistakes += [("of->scale - normalizers", "0.9f * of->scale - normalizers"), ("from[i] * mean", "from[i] * dots")]
    for right, wrong in mistakes:
        assert right in text
        spoiled.write_text(text.replace(right, wrong))
        kernels_module._compiled.cache_clear()
        try:
            with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
                patched.setitem(kernels_module._SOURCES, dtype, (spoiled, instructions))
                by_torch = outputs_and_gradients(heads, layout)
        finally:
            kernels_module._compiled.cache_clear()
        assert "differ from torch" in caplog.text
        assert_near(by_torch, [each.to(EXACT) for each in expected])
        caplog.clear()


def test_norms_and_gates_are_torch_s_for_any_number_of_rows(kernels, dtype):
    generator = torch.Generator().manual_seed(1)
    for num_rows, width in ((1, 16), (63, 32), (64, 48), (65, 64), (200, 576)):
        gate, up, to_outputs = (torch.randn(1, num_rows, width, generator=generator).to(dtype) for _ in range(3))
        weight = torch.rand(width, generator=generator).to(dtype)
        results = []
        for precision in (dtype, EXACT):
            leaves = [each.detach().to(precision).requires_grad_() for each in (gate, weight, up)]
            outputs = rms_norm(leaves[0], leaves[1], 1e-5), gated(leaves[0], leaves[2])
            (sum(outputs) * to_outputs.to(precision)).sum().backward()
            results.append([*(each.detach() for each in outputs), *(leaf.grad for leaf in leaves)])
        for ours, exact in zip(*results, strict=True):
            assert ours.dtype is dtype
            assert (ours - exact).norm() <= 0.01 * ROUNDING[dtype] * exact.norm()


@pytest.mark.parametrize("heads", [torch.zeros(3, 24).bfloat16(), torch.zeros(3, 32, dtype=EXACT)])
def test_inputs_that_they_are_not_made_for_are_torch_s(heads):
    assert elementwise_kernels(heads) is None
    assert elementwise_kernels(torch.zeros(3, 32).bfloat16(), torch.zeros(16).bfloat16()) is None
    assert elementwise_kernels(torch.zeros(3, 32).bfloat16(), torch.zeros(32)) is None


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_log_probs_and_entropies_of_a_large_vocabulary_are_those_in_float64(kernels, dtype, scale):
    """torch's own sum over 50 000 tokens in float32 is off by 2e-4 here."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = (scale * torch.randn(20, 50_003, generator=generator)).to(dtype), torch.arange(20) * 2_600
    logprobs, entropies, _ = kernels.head(logits, targets, 0.9)
    every = (logits.double() / 0.9).log_softmax(-1)
    torch.testing.assert_close(logprobs, every.gather(1, targets[:, None])[:, 0].float(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropies, -(every.exp() * every).sum(-1).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("of_logprobs", "of_entropies"), [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_the_head_s_gradients_are_torch_s(kernels, dtype, monkeypatch, of_logprobs, of_entropies):
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(num, 24, generator=generator).to(dtype) for num in (70, 83)]
    targets = torch.randint(0, 83, (70,), generator=generator)
    results = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr("strop.training.logprobs.compiled", lambda dtype: None)
        hidden, weight = (each.clone().requires_grad_() for each in inputs)
        logprobs, entropies = head_logprobs(hidden, weight, None, targets, temperature=0.7, max_logits=32 * 83)
        weighted = [factor * each for factor, each in ((of_logprobs, logprobs), (of_entropies, entropies)) if factor]
        sum(each.square() for each in weighted).sum().backward()
        results.append([logprobs.detach(), entropies.detach(), hidden.grad.float(), weight.grad.float()])
    for ours, torch_s in zip(*results, strict=True):
        assert (ours - torch_s).norm() <= 0.01 * ROUNDING[dtype] * torch_s.norm()


@pytest.mark.parametrize("within", ["checkpoint", "autocast", "inference mode"])
def test_they_are_proven_whatever_the_first_caller_is_within(kernels, dtype, within):
    inputs, weight = torch.randn(4, 32).to(dtype).requires_grad_(), torch.ones(32).to(dtype)

    def run(x):
        return rms_norm(x, weight, 1e-5) * x

    kernels_module._compiled.cache_clear()
    if within == "checkpoint":
        checkpoint(run, inputs, use_reentrant=False).sum().backward()
    elif within == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            run(inputs).sum().backward()
    else:
        with torch.inference_mode():
            run(inputs)
    assert kernels_module._compiled.cache_info().currsize == 1
    assert elementwise_kernels(inputs) is not None


def test_targets_are_read_wherever_and_however_they_lie_and_others_are_refused(kernels, dtype):
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([[0, 1], [39, 1], [3, 1], [4, 1], [17, 1], [16, 1]])
    expected = kernels.head(logits, ids[:, 0].clone(), 1.0)[0]
    assert torch.equal(kernels.head(logits, ids[:, 0], 1.0)[0], expected)
    assert torch.equal(kernels.head(logits, ids[:, 0].int(), 1.0)[0], expected)
    for id_ in (40, -100):
        with pytest.raises(IndexError, match=f"token id {id_} is none of the 40"):
            kernels.head(logits, torch.tensor([0, 0, id_, 0, 0, 0]), 1.0)


def test_log_probs_of_large_logits_at_a_low_temperature_do_not_cancel(kernels, dtype):
    logits = (2000 + torch.randn(8, 100, generator=torch.Generator().manual_seed(0)).mul(8)).to(dtype)
    targets = logits.float().argmax(1)
    for temperature in (1.0, 0.01):
        logprobs, entropies, _ = kernels.head(logits, targets, temperature)
        every = (logits.double() / temperature).log_softmax(-1)
        torch.testing.assert_close(logprobs.double(), every.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-6)
        assert (entropies >= 0).all()


def test_heads_of_mixed_precision_are_torch_s():
    heads = torch.zeros(1, 2, 3, 64).bfloat16()
    assert attention_kernels(heads, heads.float(), heads) is None
