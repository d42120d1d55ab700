"""Penalties, bias, min_tokens and logprobs against the formulas of their sources, written out in plain Python."""

import math

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logits import Logprobs, needs_processing, process_row

VOCAB = 12


def sequence(prompt: list[int], output: list[int], eos: tuple[int, ...] = (), **params: object) -> Sequence:
    seq = Sequence(prompt, 4, SamplingParams(**params), frozenset(eos))
    seq.token_ids += output
    return seq


def reference(logits: list[float], prompt: list[int], output: list[int], p: SamplingParams) -> list[float]:
    """CTRL's repetition penalty over prompt and output; the OpenAI API's penalties over the output; then the bias."""
    result = []
    for token_id, x in enumerate(logits):
        if token_id in prompt or token_id in output:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        count = output.count(token_id)
        x -= count * p.frequency_penalty + (count > 0) * p.presence_penalty
        result.append(x + (p.logit_bias or {}).get(token_id, 0.0))
    return result


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 1.0},
        {"presence_penalty": -0.7},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {3: 5.0, 11: -9}},
        {"logit_bias": {0: -100.0}},
    ],
)
@pytest.mark.parametrize("output", [[], [3], [3, 3, 5, 3]])
def test_f11_penalties_equal_the_reference_formula(params: dict, output: list[int]) -> None:
    prompt = [1, 5, 1]
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    seq = sequence(prompt, output, **params)
    assert needs_processing(seq)
    expected = reference(logits.tolist(), prompt, output, seq.params)
    process_row(logits, seq, len(output))
    torch.testing.assert_close(logits, torch.tensor(expected))


def test_min_tokens_forbids_eos_and_stop_tokens_until_then() -> None:
    for produced, forbidden in ((0, True), (1, True), (2, False), (3, False)):
        seq = sequence([1], [4] * produced, eos=(2, 7), min_tokens=2, stop_token_ids=[9])
        logits = torch.zeros(VOCAB)
        process_row(logits, seq, produced)
        assert [i for i, x in enumerate(logits.tolist()) if x == -math.inf] == ([2, 7, 9] if forbidden else [])


def test_plain_sequences_need_no_processing() -> None:
    assert not needs_processing(sequence([1], [], temperature=0.5, top_p=0.5, logprobs=3, seed=1))


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[2] = logits[2].sort(descending=True).values
    token_ids = torch.tensor([4, 0, 7])
    entries = Logprobs.of(logits, token_ids, rows=[5, 6, 9], counts=[0, 2, 3]).to_dicts()
    assert list(entries) == [5, 6, 9]
    expected = logits.double().log_softmax(-1)
    for i, (row, count) in enumerate(((5, 0), (6, 2), (9, 3))):
        sampled, order = int(token_ids[i]), expected[i].argsort(descending=True).tolist()
        assert list(entries[row]) == list(dict.fromkeys([sampled, *order[:count]]))
        for token_id, entry in entries[row].items():
            assert entry.logprob == pytest.approx(float(expected[i, token_id]), abs=1e-5)
            assert entry.rank == order.index(token_id) + 1


def test_logprobs_of_a_vocabulary_smaller_than_asked() -> None:
    entries = Logprobs.of(torch.zeros(1, 3), torch.tensor([1]), [0], [20]).to_dicts()
    assert sorted(entries[0]) == [0, 1, 2]
