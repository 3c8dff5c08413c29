"""The compiled kernels of a decode step against torch in float32, and what happens where there can be none."""

import logging
import os
import random
import shutil
from types import SimpleNamespace

import pytest
import torch

from strop.engine.model_directory import Architecture
from strop.engine.torch.attention import TorchAttention
from strop.engine.torch.cpu import compiled
from strop.engine.torch.cpu import kernels as kernels_module
from strop.engine.torch.cpu.kernels import KernelAttention, attention_over, kernels_for
from strop.engine.torch.kv_cache import KvCache

from .support import make_model

SIZES = {"head_dim": 64, "num_heads": 6, "num_kv_heads": 2, "hidden_size": 64}
NUM_SLOTS, NUM_COLUMNS = 5, 300
ROUNDING = {torch.bfloat16: 1.0, torch.float32: 5e-4}
"""Of a precision, relative to bfloat16's."""


def kernels_of(dtype=torch.bfloat16, **sizes):
    return kernels_for(SimpleNamespace(**{**SIZES, **sizes}), dtype, torch.device("cpu"))


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request):
    return request.param


@pytest.fixture
def kernels(dtype):
    found = kernels_of(dtype=dtype)
    if found is None:
        pytest.skip("needs a C compiler and a processor with AVX-512 BF16, or AVX2 for float32")
    return found


@pytest.fixture
def no_memory():
    """Of the kernels that this process has compiled, before and after."""
    kernels_module._compiled.cache_clear()
    yield
    kernels_module._compiled.cache_clear()


def scene(dtype, head_dim, num_heads, num_kv_heads, lengths, seed=0):
    """qkv, keys, values, slots of tokens that read so many columns."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-max(*lengths, NUM_COLUMNS) // 128)
    keys, values = (torch.randn(blocks, NUM_SLOTS, num_kv_heads, 128, head_dim, generator=generator).to(dtype) for _ in "kv")
    qkv = 2 * torch.randn(len(lengths), (num_heads + 2 * num_kv_heads) * head_dim, generator=generator)
    slots = torch.tensor([number % NUM_SLOTS for number in range(len(lengths))])
    return qkv.to(dtype), keys, values, slots, torch.tensor(lengths)


def attend(kernels, qkv, keys, values, slots, lengths, num_heads=6):
    """Every token reads in its own slot."""
    return kernels.attend(qkv, keys, values, slots, lengths, slots, torch.zeros_like(slots), num_heads=num_heads)


def columns(cache, slot, length):
    """(kv_heads, length, head_dim), float32."""
    return cache[:, slot].transpose(0, 1).flatten(1, 2)[:, :length].float()


def attended_in_float32(qkv, keys, values, slots, lengths, num_heads):
    num_kv_heads, head_dim = keys.shape[2], keys.shape[4]
    rows = []
    for token, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        query = qkv[token, : num_heads * head_dim].float().view(num_kv_heads, -1, head_dim)
        weights = (query @ columns(keys, slot, length).mT * head_dim**-0.5).softmax(-1)
        rows.append((weights @ columns(values, slot, length)).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads"),
    [(64, 9, 3), (64, 4, 4), (32, 4, 2), (96, 5, 1), (128, 16, 2), (128, 7, 1), (256, 4, 1), (64, 16, 1)],
)
def test_attention_is_that_of_float32_up_to_rounding(kernels, dtype, head_dim, num_heads, num_kv_heads):
    given = scene(dtype, head_dim, num_heads, num_kv_heads, [1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 300])
    found = attend(kernels, *given, num_heads).float()
    expected = attended_in_float32(*given, num_heads)
    assert (found - expected).abs().max() < 0.02 * ROUNDING[dtype]
    assert (found - expected).abs().mean() < 0.002 * ROUNDING[dtype]


@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads"), [(40, 4, 4), (10, 3, 1), (80, 4, 2)])
def test_in_float32_heads_may_have_any_size(head_dim, num_heads, num_kv_heads):
    if (kernels := kernels_of(dtype=torch.float32)) is None:
        pytest.skip("needs a C compiler and a processor with AVX2")
    given = scene(torch.float32, head_dim, num_heads, num_kv_heads, [1, 2, 127, 128, 129, 300])
    found = attend(kernels, *given, num_heads)
    assert (found - attended_in_float32(*given, num_heads)).abs().max() < 2e-6


def test_a_tokens_bits_depend_neither_on_company_nor_on_threads(kernels, dtype):
    draw = random.Random(1)
    lengths = [draw.randint(1, NUM_COLUMNS) for _ in range(40)]
    qkv, keys, values, slots, lengths = scene(dtype, 64, 6, 2, lengths)
    together = attend(kernels, qkv, keys, values, slots, lengths)
    torch.set_num_threads(3)  # the fixture of all engine tests puts it back
    assert torch.equal(attend(kernels, qkv, keys, values, slots, lengths), together)
    for token in range(40):
        one = slice(token, token + 1)
        assert torch.equal(attend(kernels, qkv[one].clone(), keys, values, slots[one], lengths[one]), together[one])
    keys[:, :, :, 60:], values[:, :, :, 60:] = 1e30, -1e30  # what lies behind a token's columns does not matter
    short = lengths < 61
    assert short.any()
    assert torch.equal(attend(kernels, qkv, keys, values, slots, lengths)[short], together[short])


def test_columns_read_in_another_slot_give_the_same_bits(kernels, dtype):
    lengths = [300, 299, 250, 140, 129, 128, 127, 40]
    qkv, keys, values, slots, lengths = scene(dtype, 64, 6, 2, lengths)
    for cache in (keys, values):  # slot 3 holds the first 200 columns of every slot
        by_slot = cache.transpose(0, 1)
        by_slot[:, 0], by_slot[:, 1, :, :72] = by_slot[3, 0].clone(), by_slot[3, 1, :, :72].clone()
    expected = attend(kernels, qkv, keys, values, slots, lengths)
    for num_lent in (0, 1, 15, 16, 100, 127, 128, 129, 200):
        lent = lengths.clamp_max(num_lent)
        spoiled = keys.clone(), values.clone()
        # What is read elsewhere is not read here; functions in float32 read each slot's own.
        for cache in spoiled if dtype is torch.bfloat16 else ():
            for slot in (0, 1, 2, 4):
                whole = num_lent // 16 * 16
                cache[0, slot, :, : min(whole, 128)] = torch.nan
                cache[1, slot, :, : max(0, whole - 128)] = torch.nan
        is_short = lengths < num_lent  # of these, the last columns are still their own
        found = kernels.attend(qkv, *spoiled, slots, lengths, torch.full_like(slots, 3), lent, num_heads=6)
        assert torch.equal(found[~is_short], expected[~is_short]), num_lent
        found = kernels.attend(qkv, keys, values, slots, lengths, torch.full_like(slots, 3), lent, num_heads=6)
        assert torch.equal(found, expected), num_lent


def test_large_scores_neither_overflow_nor_lose_the_largest(kernels, dtype):
    qkv, keys, values, slots, lengths = scene(dtype, 64, 6, 2, [300] * 5)
    qkv, keys = qkv * 40, keys * 40
    given = (qkv, keys, values, slots, lengths)
    assert (attend(kernels, *given).float() - attended_in_float32(*given, 6)).abs().max() < 0.05


def test_what_is_broken_stays_visible(kernels, dtype):
    qkv, keys, values, slots, lengths = scene(dtype, 64, 6, 2, [200, 200])
    keys[1, 0, 1, 10, 3] = torch.nan  # slot 0, second key head, column 138
    found = attend(kernels, qkv, keys, values, slots, lengths).view(2, 6, 64)
    assert found[0, 3:].isnan().all()
    assert found[0, :3].isfinite().all()
    assert found[1].isfinite().all()


def test_padding_gives_zeros(kernels, dtype):
    qkv, keys, values, slots, lengths = scene(dtype, 64, 6, 2, [20, 30, 40, 50])
    found = attend(kernels, qkv, keys, values, slots[:2], lengths[:2])
    assert found[:2].any(1).all()
    assert not found[2:].any()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_places_and_turns_as_torchs_operators_do(kernels, dtype, name):
    config = make_model(name).config
    architecture = Architecture.of(config)
    shape = architecture.num_heads, architecture.num_kv_heads, architecture.head_dim
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(384, shape[2], generator=generator)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    lengths = [1, 130, 77, 300]
    qkv, *_ = scene(dtype, shape[2], shape[0], shape[1], lengths)
    norms = [torch.rand(shape[2], generator=generator).to(dtype) for _ in "qk"] if name == "qwen3" else [None, None]
    positions = torch.tensor(lengths) - 1
    slots = torch.tensor([4, 0, 2, 1])
    caches = []
    for is_compiled in (True, False):
        cache = KvCache(architecture, dtype=dtype, device=torch.device("cpu"), num_slots=NUM_SLOTS, num_columns=NUM_COLUMNS)
        keys, values = cache.keys[0], cache.values[0]
        if is_compiled:
            turned = qkv.clone()
            kernels.place(
                turned, keys, values, slots, positions, num_heads=shape[0], tables=tables, norms=tuple(norms), eps=1e-6
            )
        else:
            num_turned = shape[0] + shape[1]
            heads = qkv.view(4, -1, shape[2]).to(torch.float32, copy=True)
            if norms[0] is not None:
                weights = torch.cat([norm.expand(each, shape[2]) for norm, each in zip(norms, shape[:2], strict=True)])
                heads[:, :num_turned] = torch.nn.functional.rms_norm(heads[:, :num_turned], (shape[2],), eps=1e-6) * weights
            cos, sin = (table[positions].float().unsqueeze(1) for table in tables)
            heads[:, :num_turned] = heads[:, :num_turned] * cos + heads[:, :num_turned].roll(shape[2] // 2, -1) * sin
            assert (turned.view(4, -1, shape[2]).float() - heads)[:, :num_turned].abs().max() < 0.1 * ROUNDING[dtype]
            place = cache.place(slots, positions)
            keys[place], values[place] = heads[:, shape[0] : num_turned].to(dtype), heads[:, num_turned:].to(dtype)
        caches.append(cache)
    ours, theirs = caches
    assert torch.equal(ours.values, theirs.values)
    assert ((ours.keys != 0) == (theirs.keys != 0)).all()
    torch.testing.assert_close(ours.keys, theirs.keys, rtol=0.02 * ROUNDING[dtype], atol=0.02 * ROUNDING[dtype])


def check_norm(norm, dtype, eps):
    x = torch.randn(7, 576, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    weight = torch.rand(576).to(dtype)
    expected = weight * (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(dtype)
    found = norm(x, weight)
    if dtype is torch.bfloat16:
        assert (found != expected).float().mean() < 0.01  # a sum in another order may round another way
    torch.testing.assert_close(found, expected, rtol=0.01 * ROUNDING[dtype], atol=0.0)


def test_norm_rounds_as_the_model_library_does(kernels, dtype):
    check_norm(lambda x, weight: kernels.norm(x, weight, 1e-5), dtype, 1e-5)


def test_norm_without_kernels_rounds_as_the_model_library_does(dtype, no_memory, monkeypatch):
    monkeypatch.setattr(compiled, "has_processor", lambda instructions: False)
    check_norm(attention_of(dtype).norm, dtype, make_model("llama").config.rms_norm_eps)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float16},
        {"head_dim": 80},
        {"head_dim": 288},
        {"head_dim": 288, "dtype": torch.float32},
        {"num_kv_heads": 4},
        {"hidden_size": 40},
    ],
)
def test_other_models_are_left_to_torch(change):
    assert kernels_of(**change) is None


def attention_of(dtype):
    architecture = Architecture.of(make_model("llama").config)
    cache = KvCache(architecture, dtype=dtype, device=torch.device("cpu"), num_slots=2, num_columns=128)
    tables = torch.zeros(128, architecture.head_dim).to(dtype), torch.zeros(128, architecture.head_dim).to(dtype)
    return attention_over(cache, architecture, tables)


def test_kernels_are_compiled_once_a_machine(kernels, dtype, no_memory, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert isinstance(attention_of(dtype), KernelAttention)
    (made,) = (tmp_path / "strop").iterdir()
    before = made.stat()
    kernels_module._compiled.cache_clear()
    assert isinstance(attention_of(dtype), KernelAttention)
    assert made.stat().st_mtime_ns == before.st_mtime_ns
    assert [each.name for each in (tmp_path / "strop").iterdir()] == [made.name]  # nothing half made is left


def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def a_compiler_that_fails(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "unknown flag" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))


def a_directory_that_others_write_to(monkeypatch, tmp_path):
    place = tmp_path / "cache" / "strop"
    place.mkdir(parents=True)
    place.chmod(0o777)


def kernels_that_are_wrong(monkeypatch, tmp_path):
    for dtype, (source, instructions) in kernels_module._SOURCES.items():
        spoiled = tmp_path / source.name
        spoiled.write_text(source.read_text().replace("share = ", "share = 0.9f * "))
        monkeypatch.setitem(kernels_module._SOURCES, dtype, (spoiled, instructions))
    monkeypatch.setattr(compiled, "_COMPILE", ("-O0", *compiled._COMPILE[1:]))  # in seconds less


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_compiler, "there is no C compiler"),
        (a_compiler_that_fails, "unknown flag"),
        (a_directory_that_others_write_to, "can be written to by others"),
        (kernels_that_are_wrong, "differ from torch"),
    ],
)
def test_where_there_can_be_none_torch_does_the_same_and_the_log_says_why(
    kernels, dtype, no_memory, monkeypatch, tmp_path, caplog, spoil, words
):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spoil(monkeypatch, tmp_path)
    assert isinstance(attention_of(dtype), TorchAttention)
    assert words in caplog.text


def test_a_processor_without_the_instructions_is_not_asked_to_run_them(dtype, no_memory, monkeypatch):
    monkeypatch.setattr(compiled, "has_processor", lambda instructions: False)
    monkeypatch.setattr(compiled, "_library", lambda source, instructions: pytest.fail("it was compiled"))
    assert isinstance(attention_of(dtype), TorchAttention)


def test_the_compilers_of_a_machine_are_found_by_name(dtype):
    """Of CI and developers alike: that a machine without them runs the tests above is told here, not hidden."""
    _, instructions = kernels_module._SOURCES[dtype]
    if not compiled.has_processor(instructions) or not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        pytest.skip("needs a C compiler and a processor with AVX-512 BF16, or AVX2 for float32")
    assert kernels_of(dtype=dtype) is not None
