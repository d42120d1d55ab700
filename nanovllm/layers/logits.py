"""What happens to a row of logits before the sampler: penalties, bias, tokens that may not come yet. And logprobs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import Logprob


def needs_processing(seq: Sequence) -> bool:
    """Whether process_row may ever change seq's logits."""
    p = seq.params
    return p.has_penalties or bool(p.logit_bias) or p.min_tokens > 0 or seq.grammar is not None


def process_row(logits: Tensor, seq: Sequence, num_completion_tokens: int) -> None:
    """Applies seq's penalties, logit bias, min_tokens and grammar to its logits, in place.

    Args:
        logits: [vocab] float32.
        num_completion_tokens: tokens generated before the one that these logits choose.
    Source: repetition penalty from CTRL (Keskar et al., 2019), over prompt and output; presence and frequency
    penalties as in the OpenAI API, over the output only.
    """
    p = seq.params
    if p.has_penalties:
        if p.repetition_penalty != 1:
            seen = torch.from_numpy(np.unique(seq.token_ids)).to(logits.device)
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        output = seq.completion_token_ids
        if output:
            ids, counts = np.unique(output, return_counts=True)
            penalty = torch.from_numpy(counts * p.frequency_penalty + p.presence_penalty)
            logits[torch.from_numpy(ids).to(logits.device)] -= penalty.to(logits)
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(p.logit_bias.values())).to(logits)
    held = sorted(seq.eos_token_ids) if num_completion_tokens < p.min_tokens else []
    if seq.grammar is not None:
        allowed = seq.grammar.allowed(seq.completion_token_ids, len(logits))
        if allowed.sum() == allowed[held].sum():  # complete: nothing but its end may come, min_tokens or not
            held = []
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)
    if held:
        logits[torch.tensor(held, device=logits.device)] = -torch.inf


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of some rows of one step, on the device until `to_dicts`.

    rows: index of each among the step's sampled rows; sampled [R], ranks [R] of the sampled tokens; top_values and
    top_ids [R, K]; counts: how many of the K each row asked for.
    """

    rows: list[int]
    counts: list[int]
    token_ids: Tensor
    sampled: Tensor
    ranks: Tensor
    top_values: Tensor
    top_ids: Tensor

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, rows: list[int], counts: list[int]) -> Logprobs:
        """logits: [R, vocab] raw logits of `rows`; token_ids: [R] what was sampled there."""
        logprobs = logits.float().log_softmax(dim=-1)
        sampled = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > sampled).sum(dim=1) + 1
        top_values, top_ids = logprobs.topk(min(max(counts), logits.shape[1]), dim=1)
        return cls(rows, counts, token_ids, sampled[:, 0], ranks, top_values, top_ids)

    def to_dicts(self) -> dict[int, dict[int, Logprob]]:
        """Row to {token id: Logprob}: the sampled token first, then the most likely ones."""
        result = {}
        columns = (self.token_ids, self.sampled, self.ranks, self.top_ids, self.top_values)
        for row, count, token_id, logprob, rank, ids, values in zip(
            self.rows, self.counts, *(c.tolist() for c in columns)
        ):
            entry = {token_id: Logprob(logprob, rank)}
            for i in range(min(count, len(ids))):
                entry.setdefault(ids[i], Logprob(values[i], i + 1))
            result[row] = entry
        return result
