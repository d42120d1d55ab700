"""What a run in bf16 may do: choose another token than fp32 only where rounding alone can have turned the order."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nanovllm import RequestOutput
from tests.tiny import tiny_model


class NearTies:
    """A model of transformers in fp32 and in bf16, with the same weights (those of bf16).

    The noise of bf16 is the largest difference of the two models' logits over all texts seen. Another bf16 run has
    noise of that size too, in either of two logits, so its token may be behind fp32's best one by twice as much; and it
    has fp32's own token about as often as transformers in bf16 has it on the same texts.
    """

    def __init__(self, model: PreTrainedModel, device: str = "cpu") -> None:
        self._bf16 = _with_weights_in(torch.bfloat16, model).to(device)
        self._fp32 = _with_weights_in(torch.float32, self._bf16)
        self._known: dict[str, tuple[Tensor, float, Tensor]] = {}  # most runs give the same texts

    @classmethod
    def of_tiny(cls, architecture: str, device: str = "cpu", **sizes: Any) -> NearTies:
        return cls(tiny_model(architecture, **sizes), device)

    @torch.no_grad()
    def _logits(self, model: PreTrainedModel, prompt: list[int], token_ids: list[int]) -> Tensor:
        """Logits [len(token_ids), vocab] that choose each token."""
        ids = torch.tensor([prompt + token_ids], device=model.device)
        return model(ids).logits[0, len(prompt) - 1 : -1].float()

    def check(self, prompts: Sequence[list[int]], outputs: Sequence[RequestOutput], what: str) -> None:
        """Every greedy token is fp32's own or a near tie, most are its own; logprobs, where asked for, are as near.

        Prints the near ties where another token was chosen.
        """
        behind: list[Tensor] = []
        usual: list[Tensor] = []  # whether transformers in bf16 has fp32's own token
        noise = 0.0
        logprob_error = 0.0
        for prompt, out in zip(prompts, outputs, strict=True):
            key = f"{prompt} {out.token_ids}"
            if key not in self._known:
                logits = self._logits(self._fp32, prompt, out.token_ids)
                other = self._logits(self._bf16, prompt, out.token_ids)
                same = other.argmax(dim=1) == logits.argmax(dim=1)
                self._known[key] = logits, float((other - logits).abs().max()), same
            logits, difference, same = self._known[key]
            noise = max(noise, difference)
            usual.append(same)
            chosen = logits.gather(1, torch.tensor(out.token_ids, device=logits.device)[:, None])[:, 0]
            behind.append(logits.max(dim=1).values - chosen)
            for row, entry in zip(logits.log_softmax(-1).tolist(), out.logprobs or []):
                logprob_error = max(logprob_error, *(abs(row[t] - x.logprob) for t, x in entry.items()))
            for i in (behind[-1] > 0).nonzero()[:, 0].tolist():
                print(f"{what}: token {i}: {out.token_ids[i]} is {behind[-1][i]:.4f} behind {int(logits[i].argmax())}")
        worst, own = float(torch.cat(behind).max()), float((torch.cat(behind) == 0).float().mean())
        assert noise > 0 and worst <= 2 * noise, f"{what}: a token is {worst:.3f} behind, the noise is {noise:.3f}"
        share = float(torch.cat(usual).float().mean())
        assert own > 0.95 * share, f"{what}: {own:.1%} of the tokens are fp32's, of transformers' in bf16 {share:.1%}"
        assert logprob_error <= 2 * noise, f"{what}: a logprob is off by {logprob_error:.3f}, the noise is {noise:.3f}"


def _with_weights_in(dtype: torch.dtype, model: PreTrainedModel) -> PreTrainedModel:
    """A copy. Buffers stay as they are: rotary frequencies are fp32 in a bf16 model too."""
    model = deepcopy(model)
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model
