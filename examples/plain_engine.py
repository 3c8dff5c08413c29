"""An engine: any causal model of transformers, also one whose architecture strop's embedded engine does not have."""

import asyncio

import torch
from transformers import AutoModelForCausalLM

from strop import Engine
from strop.engine.protocol import Capabilities, Capacity, check_request, weights_checksum
from strop.engine.torch.sampling import draw, uniforms
from strop.errors import UserError, WeightsNotProven
from strop.types import Completion, FinishReason


class Plain(Engine):
    """Samples one completion at a time, and computes its whole context again: short code, slow."""

    async def open(self, model, *, detokenize):
        return PlainEngine(AutoModelForCausalLM.from_pretrained(model, dtype=self.torch_dtype), self, detokenize)


class PlainEngine:
    def __init__(self, model, config, detokenize):
        self.model, self.detokenize, self.turn = model.eval(), detokenize, asyncio.Lock()
        self.policy_version, self.is_proven, self.num_tokens, self.aborted = 0, True, 0, set()
        self.capabilities = Capabilities(is_deterministic=True, can_fork=False, entropies="full", dtype=config.torch_dtype)
        total, longest = config.slots * config.max_length, config.max_length
        self.capacity = Capacity(total_tokens=total, max_request_tokens=longest, max_running=config.slots)

    async def complete(self, request):
        check_request(request, max_length=self.capacity.max_request_tokens)
        if request.truncation is not None:
            raise UserError("This engine samples from the whole distribution. Leave out top_p, top_k and the like.")
        async with self.turn:
            if not self.is_proven:
                raise WeightsNotProven("The last weights were not those that were published.")
            completion = await asyncio.to_thread(self._sample, request)
        if request.id in self.aborted:
            raise asyncio.CancelledError
        return completion

    @torch.inference_mode()
    def _sample(self, request):
        ids, logprobs, entropies, cache, new = [], [], [], None, torch.tensor([request.ids])
        banned = torch.zeros(1, self.model.config.vocab_size, dtype=torch.bool)
        banned[0, sorted(request.stop_ids)] = True
        numbers = uniforms(request.seed, request.num_before + request.max_tokens)[request.num_before :]  # one for each token
        for position, number in enumerate(numbers, start=request.num_before):
            output = self.model(new, past_key_values=cache, use_cache=True)
            cache, logits = output.past_key_values, output.logits[:, -1].float()
            uniform, ban = torch.tensor([number], dtype=torch.float64), banned if position < request.min_tokens else None
            token, logprob, entropy = draw(logits, torch.tensor([request.temperature]), uniform, ban)[:, 0].tolist()
            ids, logprobs, entropies = [*ids, int(token)], [*logprobs, logprob], [*entropies, entropy]
            new, self.num_tokens = torch.tensor([[int(token)]]), self.num_tokens + 1
            is_stopped = token in request.stop_ids or any(text in self.detokenize(ids) for text in request.stop_strings)
            if is_stopped or request.id in self.aborted:
                break
        return Completion(
            ids=tuple(ids),
            logprobs=tuple(logprobs),
            entropies=tuple(entropies),
            is_forced=(False,) * len(ids),
            spans=((self.policy_version, len(ids)),),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            cached_tokens=0,
        )

    async def progress(self):
        return self.num_tokens

    async def abort(self, request_id):
        self.aborted.add(request_id)

    async def release(self, request_id):
        self.aborted.discard(request_id)

    async def load_weights(self, publication):
        async with self.turn:
            self.is_proven, weights = False, dict(self.model.named_parameters())
            async for name, tensor in publication.tensors():
                weights[name].data.copy_(tensor)
            if weights_checksum(weights.items()) != await publication.checksum():
                raise WeightsNotProven(f"Version {publication.version} is not what this engine holds.")
            self.policy_version, self.is_proven = publication.version, True

    async def close(self):
        pass
