"""The proof that a vLLM worker gives, on modules that are built as vLLM builds them."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from strop.engine.model_directory import directory_checksum
from strop.engine.protocol import NamedTensor, weights_checksum
from strop.engine.servers.extension.strop_weights_proof import prove, prove_adapter, read_weights

SHAPES = {"embed_tokens": (7, 8), "q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "norm": (8,)}
NAMES = {name: f"model.{name}.weight" for name in SHAPES}


class Packing:
    """Multiplies by a copy that it made when the weights were loaded, as vLLM does on a CPU."""

    def process_weights_after_loading(self, module):
        packed = module.weight.detach().clone()
        module.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, packed, bias)

    def apply(self, module, x, bias=None):
        return module.cpu_linear(x, module.weight, bias)


class Matrix(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.quant_method = Packing()


class VocabParallelEmbedding(Matrix):
    """Looked up, not multiplied by; vLLM's class of that name."""


class Model(nn.Module):
    """One fused matrix, and a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.model = nn.Module()
        embedding = nn.Parameter(torch.zeros(7, 8), requires_grad=False)
        self.model.embed_tokens = VocabParallelEmbedding(embedding)
        self.model.qkv_proj = Matrix(nn.Parameter(torch.zeros(16, 8), requires_grad=False))
        self.model.norm = nn.LayerNorm(8, bias=False).requires_grad_(False)
        self.lm_head = Matrix(embedding)
        for module in (self.model.qkv_proj, self.lm_head):
            module.quant_method.process_weights_after_loading(module)

    def load_weights(self, weights):
        held, names = dict(weights), set()
        rows = [held[NAMES[part]] for part in ("q_proj", "k_proj", "v_proj") if NAMES[part] in held]
        if len(rows) == 3:
            self.model.qkv_proj.weight.copy_(torch.cat(rows))
            names.add("model.qkv_proj.weight")
        for name, module in (("embed_tokens", self.model.embed_tokens), ("norm", self.model.norm)):
            if NAMES[name] in held:
                module.weight.copy_(held[NAMES[name]])
                names |= {NAMES[name], "lm_head.weight"}
        return names


def load(model, directory, repacks=("qkv_proj",)):
    """As the transfer engine does. `repacks`: which matrices vLLM's own reload packs again. It forgets a tied head."""
    digests = []
    with ThreadPoolExecutor(2) as threads:
        loaded = model.load_weights(read_weights(directory, digests, threads))
    for name in repacks:
        module = getattr(model.model, name)
        module.quant_method.process_weights_after_loading(module)
    prove(model, loaded, directory, digests, directory_checksum(directory))


@pytest.fixture
def tensors() -> list[NamedTensor]:
    generator = torch.Generator().manual_seed(0)
    return [(NAMES[name], torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def write(tensors, directory):
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


def test_everything_that_was_read_is_multiplied_by_a_tied_head_included(tensors, tmp_path, caplog):
    model = Model()
    load(model, write(tensors, tmp_path))
    head, x = model.lm_head, torch.ones(1, 8)
    assert torch.equal(head.quant_method.apply(head, x), x @ dict(tensors)[NAMES["embed_tokens"]].T)
    assert not caplog.records


def test_a_matrix_whose_packed_copy_is_older_is_named(tensors, tmp_path, monkeypatch):
    model = Model()
    monkeypatch.setattr(Packing, "process_weights_after_loading", lambda self, module: None)
    with pytest.raises(
        ValueError, match=r"older values of 2: (lm_head|model\.qkv_proj)\.weight, (lm_head|model\.qkv_proj)\.weight"
    ):
        load(model, write(tensors, tmp_path), repacks=())


def test_a_weight_that_the_directory_lacks_is_named(tensors, tmp_path):
    with pytest.raises(ValueError, match=r"no values for 1 of them: model\.norm\.weight"):
        load(Model(), write([each for each in tensors if each[0] != NAMES["norm"]], tmp_path))


def test_weights_other_than_those_that_were_published_are_refused(tensors, tmp_path):
    directory, digests, model = write(tensors, tmp_path), [], Model()
    with ThreadPoolExecutor(2) as threads:
        loaded = model.load_weights(read_weights(directory, digests, threads))
    with pytest.raises(ValueError, match=f"published with checksum other, but it holds {directory_checksum(directory)}"):
        prove(model, loaded, directory, digests, "other")


class Manager:
    """Two adapters in slots, as vLLM's manager holds them. Rank 2 in buffers of rank 8; the newest is number 5, in slot 1."""

    def __init__(self):
        self.packed_modules_mapping = Model().packed_modules_mapping
        self.lora_index_to_id = [4, 5, None]
        widths = {"qkv_proj": (8, 4, 4), "o_proj": (8,)}
        self.modules = {
            f"model.{name}": SimpleNamespace(
                lora_a_stacked=[torch.zeros(3, 1, 8, 8) for _ in rows], lora_b_stacked=[torch.zeros(3, 1, n, 8) for n in rows]
            )
            for name, rows in widths.items()
        }

    def list_adapters(self):
        return {4: None, 5: None}


def put_adapter(manager, tensors, slot=1):
    for name, tensor in tensors:
        leaf, part = name.split(".")[-3], name.split(".")[-2]
        fused, at = ("o_proj", 0) if leaf == "o_proj" else ("qkv_proj", ("q_proj", "k_proj", "v_proj").index(leaf))
        module = manager.modules[f"model.{fused}"]
        stacked = module.lora_a_stacked if part == "lora_A" else module.lora_b_stacked
        stacked[at][slot, 0, : tensor.shape[0], : tensor.shape[1]] = tensor


@pytest.fixture
def adapter() -> list[NamedTensor]:
    generator, widths = torch.Generator().manual_seed(0), {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 8}
    return [
        (f"base_model.model.model.{name}.lora_{part}.weight", torch.randn(shape, generator=generator))
        for name, rows in widths.items()
        for part, shape in (("A", (2, 8)), ("B", (rows, 2)))
    ]


def test_an_adapter_that_lies_in_its_slot_is_proven(adapter, tmp_path):
    manager = Manager()
    put_adapter(manager, adapter)
    save_file(dict(adapter), tmp_path / "adapter_model.safetensors")
    prove_adapter(SimpleNamespace(lora_manager=manager), tmp_path, weights_checksum(adapter))


def test_an_adapter_that_the_worker_does_not_compute_with_is_named(adapter, tmp_path):
    save_file(dict(adapter), tmp_path / "adapter_model.safetensors")
    manager = Manager()
    model, checksum = SimpleNamespace(lora_manager=manager), weights_checksum(adapter)
    put_adapter(manager, adapter, slot=0)
    with pytest.raises(ValueError, match="computes with other values of the adapter's matrix base_model"):
        prove_adapter(model, tmp_path, checksum)
    put_adapter(manager, adapter)
    manager.modules["model.qkv_proj"].lora_b_stacked[2][1, 0, 3, 1] += 1
    with pytest.raises(ValueError, match=r"other values of the adapter's matrix .*v_proj\.lora_B"):
        prove_adapter(model, tmp_path, checksum)
    del manager.modules["model.o_proj"]
    put_adapter(manager, [each for each in adapter if "o_proj" not in each[0]])
    with pytest.raises(ValueError, match=r"no layer model\.o_proj"):
        prove_adapter(model, tmp_path, checksum)
    with pytest.raises(ValueError, match="published with checksum other"):
        prove_adapter(model, tmp_path, "other")


def test_a_weight_that_no_module_can_be_asked_about_is_counted(tensors, tmp_path, caplog):
    load(Model(), write([*tensors, ("model.other.weight", torch.zeros(2))], tmp_path))
    [record] = caplog.records
    assert record.getMessage().startswith("1 weights were loaded")
