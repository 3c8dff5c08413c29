"""The proof that a vLLM worker gives, on modules that are built as vLLM builds them."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from strop.engine.protocol import NamedTensor
from strop.engine.servers.extension.strop_vllm_worker import StropWorker

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


class Worker(StropWorker):
    """`repacks`: which matrices vLLM's own reload packs again. It forgets a tied head."""

    def __init__(self, repacks=("qkv_proj",)):
        self.model = Model()
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.repacks = repacks

    def reload_weights(self, weights_iterator):
        self.model.load_weights(weights_iterator)
        for name in self.repacks:
            module = getattr(self.model.model, name)
            module.quant_method.process_weights_after_loading(module)


@pytest.fixture
def tensors() -> list[NamedTensor]:
    generator = torch.Generator().manual_seed(0)
    return [(NAMES[name], torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def write(tensors, directory):
    save_file(dict(tensors), directory / "model.safetensors")
    return str(directory)


def test_everything_that_was_read_is_multiplied_by_a_tied_head_included(tensors, tmp_path):
    worker = Worker()
    told = worker.strop_load_weights(write(tensors, tmp_path))
    assert (told["missing"], told["stale"], told["unproven"]) == ([], [], 0)
    head, x = worker.model.lm_head, torch.ones(1, 8)
    assert torch.equal(head.quant_method.apply(head, x), x @ dict(tensors)[NAMES["embed_tokens"]].T)


def test_a_matrix_whose_packed_copy_is_older_is_named(tensors, tmp_path, monkeypatch):
    worker = Worker(repacks=())
    monkeypatch.setattr(Packing, "process_weights_after_loading", lambda self, module: None)
    told = worker.strop_load_weights(write(tensors, tmp_path))
    assert sorted(told["stale"]) == ["lm_head.weight", "model.qkv_proj.weight"]


def test_a_weight_that_the_directory_lacks_is_named(tensors, tmp_path):
    told = Worker().strop_load_weights(write([each for each in tensors if each[0] != NAMES["norm"]], tmp_path))
    assert told["missing"] == ["model.norm.weight"]


def test_a_weight_that_no_module_can_be_asked_about_is_counted(tensors, tmp_path):
    told = Worker().strop_load_weights(write([*tensors, ("model.other.weight", torch.zeros(2))], tmp_path))
    assert (told["stale"], told["unproven"]) == ([], 1)
