"""Products by C against float64, and weights that are packed where they lie."""

import pytest
import torch
import torch.nn.functional as F

from strop.engine.torch.cpu import products as products_module
from strop.engine.torch.cpu.products import CompiledWeight, OneDnnWeight, multiply_shared, pack, products_for
from strop.engine.torch.decoder import CHUNK_BUDGET, Decoder, all_sizes
from strop.engine.torch.weights import DecoderWeights, Matrix

from .support import make_model

CPU = torch.device("cpu")
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 1e-5}


@pytest.fixture(
    params=[(torch.bfloat16, True), (torch.float32, True), (torch.float32, False)], ids=["bfloat16", "float32", "float32-avx2"]
)
def dtype(request, monkeypatch):
    """On any processor that has the instructions, whatever is faster there."""
    dtype, uses_avx512 = request.param
    products_module._compiled.cache_clear()
    monkeypatch.setattr(products_module, "_is_mkl_best", lambda: False)
    monkeypatch.setattr(products_module, "has_processor", lambda instructions: False)
    if not uses_avx512:
        monkeypatch.setattr(products_module, "_uses_avx512", lambda: False)
    yield dtype
    products_module._compiled.cache_clear()


@pytest.fixture
def drawn(dtype):
    def draw(*shape, seed=0):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return draw


@pytest.fixture
def products(drawn):
    found = products_for(drawn(16, 32))
    if found is None:
        pytest.skip("needs a C compiler and a processor with AVX2, and for bfloat16 one with AVX-512 BF16")
    return found


@pytest.mark.parametrize("shape", [(16, 32), (32, 96), (48, 64), (64, 576), (112, 9216), (4112, 160)])
def test_packing_loses_nothing(products, drawn, shape):
    weight = drawn(*shape)
    packed = weight.clone()
    products.pack(packed)
    assert not torch.equal(packed, weight)
    assert torch.equal(products.unpack(packed), weight)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 9, 64, 67])
@pytest.mark.parametrize("shape", [(16, 32), (80, 96), (96, 9216), (4112, 160)])
def test_a_product_is_rounded_once(products, drawn, dtype, shape, num_rows):
    weight, inputs, bias, other = (
        drawn(*shape),
        drawn(num_rows, shape[1], seed=1),
        drawn(shape[0], seed=2),
        drawn(num_rows, shape[0], seed=3),
    )
    packed = weight.clone()
    products.pack(packed)
    exact = inputs.double() @ weight.double().T
    for with_bias in (False, True):
        sums = exact + bias.double() if with_bias else exact
        for operation, expected in (("none", sums), ("add", sums + other), ("mul", sums * other), ("silu", F.silu(sums))):
            given = {"operation": operation, "other": other if operation in ("add", "mul") else None}
            found = products.product(inputs, packed, bias if with_bias else None, is_packed=True, **given)
            assert torch.allclose(found.double(), expected, rtol=ROUNDING[dtype], atol=1e-3), operation
            plain = products.product(inputs, weight, bias if with_bias else None, is_packed=False, **given)
            assert torch.equal(plain, found)


def test_a_row_is_multiplied_alike_wherever_it_is_and_by_any_number_of_threads(products, drawn):
    weight, inputs = drawn(208, 320), drawn(45, 320, seed=1)
    whole = products.product(inputs, weight, is_packed=False)
    for rows in (slice(0, 1), slice(3, 20), slice(44, 45)):
        assert torch.equal(products.product(inputs[rows], weight, is_packed=False), whole[rows])
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(products.product(inputs, weight, is_packed=False), whole)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 64, 67, 2051])  # the last is summed up in two parts or three
@pytest.mark.parametrize("shape", [(16, 32), (80, 96), (112, 160), (4112, 32)])
def test_gradients_are_sums_in_float32(products, drawn, dtype, shape, num_rows):
    weight, inputs, of_outputs = drawn(*shape), drawn(num_rows, shape[1], seed=1), drawn(num_rows, shape[0], seed=2)
    of_inputs = products.input_gradient(of_outputs, weight)
    assert of_inputs.dtype is dtype
    assert torch.allclose(of_inputs.double(), of_outputs.double() @ weight.double(), rtol=ROUNDING[dtype], atol=2e-3)
    total = torch.full(shape, 3.0)
    products.add_weight_gradient(of_outputs, inputs, total)
    assert torch.allclose(total.double(), of_outputs.double().T @ inputs.double() + 3, rtol=1e-5, atol=1e-3)


def test_gradients_are_the_same_by_any_number_of_threads(products, drawn):
    shape, num_rows = (4112, 160), 2051  # several parts in both directions
    weight, inputs, of_outputs = drawn(*shape), drawn(num_rows, shape[1], seed=1), drawn(num_rows, shape[0], seed=2)
    found = []
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            total = torch.zeros(weight.shape)
            products.add_weight_gradient(of_outputs, inputs, total)
            found.append((products.input_gradient(of_outputs, weight), total))
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def test_what_is_not_finite_stays_visible(products, drawn):
    weight, inputs = drawn(32, 64), drawn(9, 64, seed=1)
    inputs[4, 10] = torch.nan
    for operation in ("none", "silu"):
        found = products.product(inputs, weight, is_packed=False, operation=operation)
        assert found[4].isnan().all()
        assert found[[*range(4), *range(5, 9)]].isfinite().all()


def test_silu_of_large_sums_is_the_sum_or_nothing(products, dtype):
    weight, inputs = torch.eye(32).to(dtype), torch.tensor([[1e4, -1e4, 200.0, -200.0] * 8]).to(dtype)
    found = products.product(inputs, weight, is_packed=False, operation="silu")
    assert torch.allclose(found.float(), F.silu(inputs.float()), rtol=ROUNDING[dtype])


def test_a_matrix_is_packed_in_its_own_memory(products, drawn, dtype):
    matrix, weight = Matrix((160, 96), dtype=dtype, device=CPU), drawn(160, 96)
    matrix.dense().copy_(weight)
    held = matrix.dense()
    place = held.data_ptr()
    matrix.seal()
    assert matrix.is_sealed
    assert isinstance(matrix._packed, CompiledWeight)
    assert matrix._packed.memory.data_ptr() == place
    assert torch.equal(matrix.dense(), weight)
    num_writes = matrix.num_writes
    held[0, 0] += 1  # by somebody who has it from before
    assert matrix.num_writes > num_writes
    matrix.unseal()
    assert not matrix.is_sealed
    assert matrix.dense().data_ptr() == place


@pytest.mark.parametrize("shape", [(17, 64), (64, 40)])
def test_other_shapes_go_to_a_library(drawn, shape):
    weight, inputs = drawn(*shape), drawn(5, shape[1], seed=1)
    exact = inputs.double() @ weight.double().T
    assert products_for(weight) is None
    assert torch.allclose(multiply_shared(inputs, weight).double(), exact, rtol=2**-7, atol=0.05)
    packed = pack(weight)
    assert packed is None or isinstance(packed, OneDnnWeight)
    if packed is not None:
        assert torch.allclose(packed.product(inputs).double(), exact, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize(
    ("dtype", "name", "value"), [(torch.bfloat16, "has_processor", True), (torch.float32, "_is_mkl_best", True)]
)
def test_amx_and_mkl_on_processors_of_intel_are_left_to_libraries(monkeypatch, dtype, name, value):
    products_module._compiled.cache_clear()
    monkeypatch.setattr(products_module, name, lambda *_: value)
    try:
        assert products_for(torch.zeros(16, 32, dtype=dtype)) is None
    finally:
        products_module._compiled.cache_clear()


@pytest.mark.parametrize(("in_c", "num_sizes"), [(True, 8), (False, 3)])
def test_a_library_has_few_sizes_of_steps_and_every_content_fits_one(in_c, num_sizes, monkeypatch):
    monkeypatch.setattr(DecoderWeights, "multiply_in_c", in_c)
    decoder = Decoder(make_model("llama").config, dtype=torch.float32, device=CPU, num_slots=60, max_length=100)
    sizes = all_sizes(decoder)
    assert len(sizes.tokens) == 2 * num_sizes
    for num_rows in range(61):
        for num_chunk_tokens in (0, 1, 7, 64, CHUNK_BUDGET):
            if num_rows + num_chunk_tokens:
                shape = sizes.shape(num_rows=num_rows, num_chunk_tokens=num_chunk_tokens, num_slots=1, num_columns=1)
                assert shape.num_tokens >= num_rows + num_chunk_tokens
