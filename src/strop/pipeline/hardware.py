"""Memory, time and disk that a stage needs: on this machine, or on hardware that need not be there.

Estimates are rough. `ASSUMPTIONS` is what they take for granted; peaks of devices are those that vendors publish for dense
products.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from pydantic import Field

from strop.cluster.placement import Node, planned_nodes
from strop.config import Config, load_toml, validate
from strop.engine.config import AnyEngine, ServerConfig, VllmConfig
from strop.errors import ConfigError, did_you_mean
from strop.recipe.stage import Estimate, Model, Trained
from strop.reports.number_format import counted, duration

_MIB, _GIB = 2**20, 2**30
_IDLE_MIB = 600  # an interpreter with torch and transformers imported
_CONTEXT_GIB = 1.0  # of CUDA, in each process
_DEVICES_OF_A_MACHINE = 8
_SHORTEST = 4096  # tokens of the smallest micro-batch that is proposed where the rows are not known
# Of the machine's best matrix rate, what the demo's stages were seen to reach on two cores.
_DECODE_SHARE, _TRAIN_SHARE = 0.15, 0.35
# Of a device's peaks; assumed, and not measured on one.
_PEAK_SHARE, _BANDWIDTH_SHARE = 0.4, 0.6
_TOKEN_SHARE = 1 / 3  # of the token limits, what the demo's stages were seen to use
_ACTIVATIONS = 34  # values of a token, layer and channel that the backward pass needs
_HOST_BYTES, _DISK_BYTES = 42, 22  # of a token of a long rollout, by `make bench-rollouts`
NOT_COUNTED = "prompts, tool calls, validation, loading and publication are not counted"
ASSUMPTIONS = (
    "assumed: responses of a third of their limit, and one at the limit in each step; decoding at 60% of the bandwidth or 40%"
    f" of the peak, training at 40% of the peak; {NOT_COUNTED}"
)


class Device(Config):
    """One accelerator: the keys of a file that `--hardware 8xFILE.toml` names."""

    memory_gb: float = Field(gt=0, description="Memory in GB (10^9 bytes).")
    bfloat16_tflops: float = Field(gt=0, description="Peak of dense products in bfloat16, in TFLOP/s.")
    float32_tflops: float = Field(gt=0, description="Peak of dense products in float32, in TFLOP/s.")
    bandwidth_tb_s: float = Field(gt=0, description="Bandwidth of its memory, in TB/s.")


DEVICES = {name: Device(**keys) for name, keys in load_toml(Path(__file__).with_name("devices.toml")).items()}


@dataclass(frozen=True, slots=True)
class Hardware:
    """So many devices of one kind."""

    num: int
    name: str
    device: Device

    @classmethod
    def named(cls, text: str) -> Hardware:
        """Hardware such as "8xH100". Raises `ConfigError` if there is no such device, or no such file."""
        match = re.fullmatch(r"(?:(\d{1,6})x)?(.+)", text.strip())
        num, name = (int(match[1] or 1), match[2]) if match else (0, "")
        if num and os.path.isfile(name):  # False for what no file system can hold, where `Path.is_file` raises
            return cls(num, Path(name).stem, validate(Device, load_toml(Path(name)), place=name))
        if not num or name not in DEVICES:
            raise ConfigError(
                f"hardware {text!r}: no such device.{did_you_mean(name, DEVICES)} Write 8xH100, with one of"
                f" {', '.join(DEVICES)}, or 8xFILE.toml with its {', '.join(Device.model_fields)}."
            )
        return cls(num, name, DEVICES[name])

    def __str__(self) -> str:
        return f"{self.num} x {self.name}"

    def nodes(self) -> list[Node]:
        """Return machines of eight devices that hold them all."""
        firsts = range(0, self.num, _DEVICES_OF_A_MACHINE)
        return planned_nodes(min(_DEVICES_OF_A_MACHINE, self.num - first) for first in firsts)

    @property
    def is_several_machines(self) -> bool:
        return self.num > _DEVICES_OF_A_MACHINE

    @property
    def gib(self) -> float:
        return self.device.memory_gb * 1e9 / _GIB

    def flops_per_s(self, precision: str) -> float:
        """What one device computes in a second."""
        peak = self.device.bfloat16_tflops if precision == "bfloat16" else self.device.float32_tflops
        return _PEAK_SHARE * peak * 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a stage is spread over devices. Trainer and engines share them, unless they are apart."""

    ranks: int  # that share the trained model; 0: nothing is trained
    engines: int  # 0: nothing is sampled
    width: int  # devices of one engine
    slots: int
    tokens: int  # of a micro-batch
    is_recomputed: bool  # activation_checkpointing
    fsdp_size: int = 0  # ranks that divide one copy of the weights; 0: all
    devices: tuple[int, ...] = ()  # of the engines, if they are on one machine
    is_apart: bool = False  # the engines' devices are not the trainer's

    def options(self, written: Layout, name: str) -> str:
        """The options of the command line that change `written` into this layout of the stage `name`."""
        before = written._keys()
        changed = {key: now for key, now in self._keys().items() if now not in ("", before.get(key))}
        return " ".join(f"--set stages.{name}.{key}={now}" for key, now in changed.items())

    def _keys(self) -> dict[str, int | str]:
        """The keys of a stage, each with its value as it is written."""
        trainer: dict[str, int | str] = {
            "trainer.workers": self.ranks,
            "trainer.fsdp_size": self.fsdp_size,
            "trainer.max_tokens_per_microbatch": self.tokens,
            "trainer.activation_checkpointing": str(self.is_recomputed).lower(),
        }
        if not self.engines:
            return trainer
        return trainer | {
            "engine.replicas": self.engines,
            "engine.devices": f"[{','.join(map(str, self.devices))}]" if self.devices else "",
            "engine.tensor_parallel": self.width,
            "engine.slots": self.slots,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a stage needs: memory, time, and the roles of its processes in lines."""

    memory_mib: float = 0.0  # of this machine
    time_s: float = 0.0
    lines: tuple[str, ...] = ()
    problem: str = ""  # why it cannot run on the hardware, and what could


def cost_here(estimate: Estimate, engine: AnyEngine, model: Model, rate: float) -> Cost:
    """The cost on this machine, whose products reach `rate` FLOP/s."""
    if not model.num_parameters or (estimate.sampled is None and estimate.trained is None):
        return Cost()
    memory, flops = 4.0 * model.num_parameters, 0.0
    if (trained := estimate.trained) is not None:
        layout = _written(estimate, engine)
        memory = layout.ranks * (_state_bytes(trained, model, layout) + _activation_bytes(trained, model, layout))
        flops += trained.flops_per_parameter * model.num_active * trained.tokens / _TRAIN_SHARE
    if (sampled := estimate.sampled) is not None:
        memory += engine.num_engines * (_weight_bytes(engine, model) + _kv_bytes(engine, model, engine.slots))
        memory += _weight_bytes(engine, model) if estimate.overlaps else 0
        flops += 2 * model.num_active * sampled.tokens / _DECODE_SHARE
    return Cost(memory_mib=_IDLE_MIB + memory / _MIB, time_s=_TOKEN_SHARE * flops / rate)


def cost_on(hardware: Hardware, name: str, estimate: Estimate, engine: AnyEngine, model: Model) -> Cost:
    """The cost of the stage `name` in its layout. One that names no layout is spread over all devices, if it fits so."""
    if not model.num_parameters or (estimate.sampled is None and estimate.trained is None):
        return Cost()
    written = _written(estimate, engine)
    costs = _Costs(hardware, estimate, engine, model)
    fitting = costs.first_that_fits(written)
    is_spread = max(written.ranks, written.engines * written.width) > 1
    layout = written if is_spread else fitting or costs.smallest(written)
    words = "" if fitting is None else fitting.options(written, name)
    lines = list(costs.roles(layout))
    if costs.fits(layout):
        lines += [costs.time(layout), f"for this layout: {words}" if words and layout is fitting else ""]
        return Cost(time_s=sum(costs.times(layout)), lines=tuple(filter(None, lines)))
    remedy = f"It fits with {words}" if words else costs.remedy(written)
    return Cost(
        lines=tuple(lines),
        problem=f"does not fit: {costs.needed_devices(layout)} of {counted(hardware.num, 'device')}, each with"
        f" {costs.needed_gib(layout):,.0f} of {hardware.gib:,.0f} GiB. {remedy}.",
    )


def _written(estimate: Estimate, engine: AnyEngine) -> Layout:
    """The layout that the recipe says."""
    trained = estimate.trained
    return Layout(
        ranks=0 if trained is None else max(1, trained.trainer.workers),
        engines=0 if estimate.sampled is None else engine.num_engines,
        width=engine.tensor_parallel if isinstance(engine, ServerConfig) else 1,
        slots=engine.slots,
        tokens=0 if trained is None else trained.trainer.max_tokens_per_microbatch,
        is_recomputed=trained is not None and trained.trainer.activation_checkpointing,
        fsdp_size=0 if trained is None else trained.trainer.fsdp_size,
        devices=engine.devices,
        is_apart=trained is not None and bool(engine.devices) and min(engine.devices) >= max(1, trained.trainer.workers),
    )


def _halves(first: int, last: int) -> list[int]:
    """`first`, its half, a quarter, and so on, none below `last`."""
    return [first >> power for power in range(first.bit_length()) if first >> power >= last] or [first]


@dataclass(frozen=True, slots=True)
class _Costs:
    """The costs of one stage on one kind of hardware, as functions of its layout."""

    hardware: Hardware
    estimate: Estimate
    engine: AnyEngine
    model: Model

    def layouts(self, written: Layout) -> Iterator[Layout]:
        """Layouts over all devices, first those that compute no more, cross no machine and change sizes least."""
        estimate, num = self.estimate, self.hardware.num
        trained, sampled = estimate.trained, estimate.sampled
        widths = [2**power for power in range(num.bit_length())] if isinstance(self.engine, ServerConfig) else [1]
        widths = [width for width in widths if self.model.num_heads % width == 0]  # a server divides the heads evenly
        num_slots = _halves(written.slots, 1) if sampled is not None else [written.slots]
        num_tokens = _halves(written.tokens, max(_SHORTEST, trained.longest if trained is not None else 0))
        options = product({written.fsdp_size, 0}, {written.is_recomputed, trained is not None}, widths, num_slots, num_tokens)
        for fsdp_size, is_recomputed, width, slots, tokens in sorted(
            options, key=lambda each: (-each[0], each[1], each[2] > _DEVICES_OF_A_MACHINE, -each[3], -each[4])
        ):
            ranks = 0 if trained is None else 1 if trained.in_one_process else num // 2 if estimate.overlaps else num
            if trained is not None and (ranks % max(1, fsdp_size) or ranks % trained.trainer.sequence_parallel):
                continue
            engines = 0 if sampled is None else (num - ranks if estimate.overlaps else num) // width
            if bool(ranks) >= (trained is not None) and bool(engines) >= (sampled is not None):
                first = ranks if estimate.overlaps else 0
                last = first + engines * width
                yield Layout(
                    ranks=ranks,
                    engines=engines,
                    width=width,
                    slots=slots,
                    tokens=tokens,
                    is_recomputed=is_recomputed,
                    fsdp_size=fsdp_size,
                    devices=tuple(range(first, last)) if 1 < last <= _DEVICES_OF_A_MACHINE else (),
                    is_apart=estimate.overlaps,
                )

    def first_that_fits(self, written: Layout) -> Layout | None:
        return next((each for each in self.layouts(written) if self.fits(each)), None)

    def remedy(self, written: Layout) -> str:
        """Where no layout fits: twice, four times, ... as many devices, of which one fits on the first."""
        more = (replace(self.hardware, num=self.hardware.num << power) for power in range(1, 8))
        enough = next((each for each in more if replace(self, hardware=each).first_that_fits(written) is not None), None)
        return f"No layout fits; name {f'{enough}, or larger devices' if enough else 'larger devices, or a smaller model'}"

    def smallest(self, written: Layout) -> Layout:
        """The layout that comes closest where none fits."""
        return min(self.layouts(written), key=self.needed_gib, default=written)

    def fits(self, layout: Layout) -> bool:
        return self.needed_devices(layout) <= self.hardware.num and self.needed_gib(layout) <= self.hardware.gib

    def needed_devices(self, layout: Layout) -> int:
        engines = layout.engines * layout.width
        return layout.ranks + engines if layout.is_apart else max(layout.ranks, engines)

    def needed_gib(self, layout: Layout) -> float:
        """Of the device that needs most, in the phase that needs most."""
        return max(self._phases(layout))

    def _phases(self, layout: Layout) -> tuple[float, float]:
        """GiB of that device while rollouts are sampled, and while the trainer computes. They differ if engines sleep."""
        (state, activations), engine = self._rank(layout), sum(self._engine(layout))
        if layout.is_apart or not self.engine.sleeps:
            needed = max(state + activations, engine) if layout.is_apart else state + activations + engine
            return needed, needed
        return state + engine, state + activations + min(engine, _CONTEXT_GIB)

    def _rank(self, layout: Layout) -> tuple[float, float]:
        """GiB of a trainer's rank: its share of the weights and what belongs to them, and a micro-batch."""
        if (trained := self.estimate.trained) is None:
            return 0.0, 0.0
        state = _state_bytes(trained, self.model, layout) / _GIB
        return state + _CONTEXT_GIB, _activation_bytes(trained, self.model, layout) / _GIB

    def _engine(self, layout: Layout) -> tuple[float, float]:
        """GiB of each device of an engine: its share of the weights, and of the KV memory."""
        if self.estimate.sampled is None:
            return 0.0, 0.0
        weights = _weight_bytes(self.engine, self.model) / layout.width / _GIB
        return weights + _CONTEXT_GIB, _kv_bytes(self.engine, self.model, layout.slots) / layout.width / _GIB

    def times(self, layout: Layout) -> tuple[float, float]:
        """Seconds of sampling and of training; of the longer of both if they overlap."""
        sampling, training = self._sampling_s(layout), self._training_s(layout)
        if self.estimate.overlaps:
            return (sampling, 0.0) if sampling > training else (0.0, training)
        return sampling, training

    def _sampling_s(self, layout: Layout) -> float:
        """All tokens at the rate of full engines, and in each step the end of its longest response by itself."""
        sampled = self.estimate.sampled
        if sampled is None or not sampled.rollouts:
            return 0.0
        length = sampled.tokens / sampled.rollouts / sampled.steps
        at_once = min(layout.slots, -(-sampled.rollouts // layout.engines))
        tail = (1 - _TOKEN_SHARE) * length * self._token_s(layout, 1, length)
        return _TOKEN_SHARE * sampled.tokens / self._sampling_rate(layout, at_once, length) + sampled.steps * tail

    def _sampling_rate(self, layout: Layout, rows: int, length: float) -> float:
        """Tokens that all engines sample in a second, each in `rows` conversations whose limit is `length`."""
        return layout.engines * rows / self._token_s(layout, rows, _TOKEN_SHARE * length)

    def _token_s(self, layout: Layout, rows: int, length: float) -> float:
        """Seconds in which an engine computes one token of each of `rows` conversations of `length` tokens."""
        # A few rows of a mixture of experts read a few of the experts.
        weights = min(self.model.num_parameters, rows * self.model.num_active) * _width(self.engine)
        read = weights + rows * length * self.model.kv_values * _width(self.engine)
        bandwidth = _BANDWIDTH_SHARE * self.hardware.device.bandwidth_tb_s * 1e12
        arithmetic = 2 * self.model.num_active * rows / self.hardware.flops_per_s(self.engine.dtype)
        return max(read / bandwidth, arithmetic) / layout.width

    def training_rate(self, layout: Layout, trained: Trained) -> float:
        """Tokens that all ranks train in a second."""
        flops = (trained.flops_per_parameter + 2 * layout.is_recomputed) * self.model.num_active
        return layout.ranks * self.hardware.flops_per_s(trained.trainer.precision) / flops

    def _training_s(self, layout: Layout) -> float:
        trained = self.estimate.trained
        return 0.0 if trained is None else _TOKEN_SHARE * trained.tokens / self.training_rate(layout, trained)

    def roles(self, layout: Layout) -> Iterator[str]:
        """A line for the trainer, the engines, the host and the disk."""
        trained, sampled = self.estimate.trained, self.estimate.sampled
        disk: list[str] = []
        if trained is not None:
            state, activations = self._rank(layout)
            tokens = _tokens_at_once(trained, layout)
            yield (
                f"trainer: {counted(layout.ranks, 'rank')}, {state + activations:,.1f} GiB each: {state:,.1f} of weights,"
                f" gradients and moments, {activations:,.1f} of a micro-batch of {tokens:,} tokens"
                + (f", divided among {width}" if (width := trained.trainer.sequence_parallel) > 1 else "")
            )
            kept = 12 * trained.saved * self.model.num_parameters / _GIB
            disk += [f"{counted(trained.checkpoints, 'checkpoint')} of {kept:,.0f} GiB" if kept else "checkpoints of adapters"]
        if sampled is not None:
            weights, kv = self._engine(layout)
            yield (
                f"engines: {layout.engines} of {counted(layout.width, 'device')}, {weights + kv:,.1f} GiB on each:"
                f" {weights:,.1f} of weights, {kv:,.1f} of KV for {counted(layout.slots, 'conversation')}"
            )
            tokens = round(_TOKEN_SHARE * sampled.tokens)
            if tokens:
                yield f"host: {_in_words(tokens * _HOST_BYTES / sampled.steps)} for a step's rollouts"
                disk += [f"{_in_words(tokens * sampled.kept * _DISK_BYTES)} of rollouts"]
        sampling, training = self._phases(layout)
        phases = f" ({sampling:,.0f} in sampling, {training:,.0f} in training)" if sampling != training else ""
        on_disk = f"; disk: {', '.join(disk)}" if disk else ""
        yield f"device: {max(sampling, training):,.0f} of {self.hardware.gib:,.0f} GiB{phases}{on_disk}"

    def time(self, layout: Layout) -> str:
        times = {"sampling": self._sampling_s(layout), "training": self._training_s(layout)}
        parts = [f"{duration(seconds)} of {what}" for what, seconds in times.items() if seconds]
        parts += [f"{duration(1e9 / rate)} of {what} for a billion tokens" for what, rate in self._rates(layout).items()]
        hours = self.hardware.num * sum(self.times(layout)) / 3600
        in_all = f"; {hours:,.1f} GPU hours" if hours >= 1 else f"; {hours:.1g} GPU hours" if hours else ""
        overlap = " at the same time" if self.estimate.overlaps and all(times.values()) else ""
        return f"time: {', '.join(parts)}{overlap}{in_all}" if parts else ""

    def _rates(self, layout: Layout) -> dict[str, float]:
        """Tokens a second of sampling and of training, of each whose number of tokens is not known before."""
        trained, sampled, rates = self.estimate.trained, self.estimate.sampled, {}
        if sampled is not None and not sampled.rollouts:
            rates["sampling"] = self._sampling_rate(layout, layout.slots, self.engine.max_length)
        if trained is not None and not trained.tokens:
            rates["training"] = self.training_rate(layout, trained)
        return rates


def _in_words(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB" if num_bytes >= 0.1 * _GIB else f"{num_bytes / _MIB:,.0f} MiB"


def _width(engine: AnyEngine) -> int:
    return 2 if engine.dtype == "bfloat16" else 4


def _weight_bytes(engine: AnyEngine, model: Model) -> float:
    return model.num_parameters * _width(engine)


def _kv_bytes(engine: AnyEngine, model: Model, slots: int) -> float:
    if isinstance(engine, VllmConfig) and engine.kv_mib is not None:
        return engine.kv_mib * _MIB
    return slots * engine.max_length * model.kv_values * _width(engine)


def _state_bytes(trained: Trained, model: Model, layout: Layout) -> float:
    """Of one rank. A single one casts all weights at once, several gather and cast them layer by layer."""
    cast = 2 if trained.trainer.precision == "bfloat16" and layout.ranks <= 1 else 0
    return (4 * trained.copies / max(1, layout.fsdp_size or layout.ranks) + cast) * model.num_parameters


def _activation_bytes(trained: Trained, model: Model, layout: Layout) -> float:
    """Of a rank's tokens of a micro-batch: all activations, or the inputs of the layers and the activations of one."""
    width = 2 if trained.trainer.precision == "bfloat16" else 4
    values = 2 * model.num_layers + _ACTIVATIONS if layout.is_recomputed else _ACTIVATIONS * model.num_layers
    return _tokens_at_once(trained, layout) / trained.trainer.sequence_parallel * model.hidden_size * values * width


def _tokens_at_once(trained: Trained, layout: Layout) -> int:
    return min(trained.tokens_of_update, max(layout.tokens, trained.longest))
