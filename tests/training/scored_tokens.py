from strop.training.logprobs import LogprobModule


def token_logprobs(model, ids, where, *, temperature, max_logits=2**25, is_packed=False, is_banned=None, banned_ids=()):
    module = LogprobModule(model, max_logits=max_logits, is_packed=is_packed)
    return module(ids, where, temperature, is_banned, banned_ids)
