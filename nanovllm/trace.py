"""A worked example: prompts that share a block, step by step through the real scheduler and model runner.

Block size 4, eight blocks, and the prompts of "nano-vLLM Part 2: Block Tables, KV Cache, and the Path to the GPU". Only
the model is a stand-in: the tokens that it samples are written down below, and it keeps the inputs and the context that
every attention layer would get. `nanovllm trace` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import Batch
from nanovllm.engine.block_manager import Block
from nanovllm.engine.context import Context, get_context
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.models.config import ModelConfig, RopeScaling
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 8
_VOCAB_SIZE = 128

# name: (prompt, the tokens that the model will sample: the request ends after the last of them)
REQUESTS: dict[str, tuple[list[int], list[int]]] = {
    "A": ([11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33], [99, 100, 101]),
    "B": ([11, 12, 13, 14, 51, 52, 53, 54, 61, 62, 63, 64, 71], [72, 73, 74]),
    "C": ([11, 12, 13, 14, 41, 42, 43], [44]),
    "D": ([81, 82], [83]),
}


class ScriptedModel(nn.Module):
    """Answers with the token ids in next_ids, one for each row of logits; keeps what its last forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.next_ids: list[int] = []
        self.input_ids = self.positions = torch.empty(0, dtype=torch.int64)
        self.context: Context

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.input_ids, self.positions, self.context = input_ids, positions, get_context()
        return torch.zeros(len(input_ids), 1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = torch.zeros(len(hidden), _VOCAB_SIZE)
        logits[range(len(self.next_ids)), self.next_ids] = 1
        return logits


class _WatchedBlock(Block):
    """Writes every change of its reference count down as (block id, before, after)."""

    __slots__ = ("_ref_count", "changes")

    def __init__(self, block_id: int, changes: list[tuple[int, int, int]]) -> None:
        self.changes, self._ref_count = changes, 0
        super().__init__(block_id)

    @property
    def ref_count(self) -> int:
        return self._ref_count

    @ref_count.setter
    def ref_count(self, value: int) -> None:
        if value != self._ref_count:
            self.changes.append((self.block_id, self._ref_count, value))
        self._ref_count = value


def _model_config() -> ModelConfig:
    """The smallest shape that a runner takes: only the cache is made of it."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=1,
        hidden_size=8,
        intermediate_size=8,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=_VOCAB_SIZE,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=RopeScaling(),
        rotary_dim=8,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=True,
        dtype=torch.float32,
    )


def make_config() -> EngineConfig:
    """The options of an engine for the example."""
    return EngineConfig(
        model="trace",
        device="cpu",
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=NUM_BLOCKS,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )


def make_runner(config: EngineConfig, model: ScriptedModel) -> ModelRunner:
    return ModelRunner(config, _model_config(), model, torch.device("cpu"), torch.float32)


class Trace:
    """The engine's parts, and what is printed of them."""

    def __init__(self) -> None:
        config, self.model = make_config(), ScriptedModel()
        self.runner = make_runner(config, self.model)
        self.scheduler = Scheduler(config, NUM_BLOCKS)
        self.names: dict[int, str] = {}  # seq_id to the letter of the request
        self.ref_counts: list[tuple[int, int, int]] = []  # changes: block id, before, after
        manager = self.scheduler.block_manager
        manager.blocks[:] = [_WatchedBlock(i, self.ref_counts) for i in range(NUM_BLOCKS)]

    def run(self) -> None:
        print(f"block_size = {BLOCK_SIZE}")
        self._show_pool()
        print("\n== Prompt A: new blocks")
        self._add("A")
        self._step()
        print("\n== Prompt B: reuses A's first block; A decodes in the same step")
        self._add("B")
        self._step()
        print("\n== A crosses a block border, and ends")
        self._step()
        print("\n== B ends")
        self._step()
        print("\n== C revives the block that A and B left in the prefix cache; D is packed behind it")
        self._add("C")
        self._add("D")
        self._step()

    def _add(self, name: str) -> None:
        prompt, sampled = REQUESTS[name]
        seq = Sequence(prompt, BLOCK_SIZE, SamplingParams(temperature=0, max_tokens=len(sampled)))
        self.names[seq.seq_id] = name
        print(f"{name} = {[seq.block(i) for i in range(seq.num_blocks)]}")
        self.scheduler.add(seq)

    def _step(self) -> None:
        """What LLMEngine.step does, with a look between its parts."""
        batch = self.scheduler.schedule()
        seqs = batch.decodes + [c.seq for c in batch.chunks]
        print(f"schedule(): {self._describe(batch)}")
        for seq in seqs:
            print(f"  {self._name(seq)}.block_table = {seq.block_table}")
        for chunk in batch.chunks:
            print(f"  {self._name(chunk.seq)}.num_cached_tokens = {chunk.start}")
        self._show_pool(seqs)

        self.model.next_ids = [self._scripted(seq) for seq in batch.sampled]
        token_ids = self.runner.run(batch)
        self._show_inputs()

        tables = {seq.seq_id: list(seq.block_table) for seq in seqs}
        self.ref_counts.clear()
        updated, finished = self.scheduler.postprocess(batch, token_ids)
        print("postprocess():")
        for seq in updated:
            print(f"  {self._name(seq)} samples {seq.token_ids[-1]}: length {len(seq)}")
        if not finished:
            self._show_hashes()
        else:
            for seq in finished:
                print(f"  {self._name(seq)} is done, its block_table was {tables[seq.seq_id]}")
            for block_id, before, after in self.ref_counts:
                print(f"  block {block_id}: ref_count {before} -> {after}")
            self._show_pool()

    def _name(self, seq: Sequence) -> str:
        return self.names[seq.seq_id]

    def _scripted(self, seq: Sequence) -> int:
        return REQUESTS[self._name(seq)][1][seq.num_completion_tokens]

    def _describe(self, batch: Batch) -> str:
        parts = [f"decode {self._name(s)} (position {end - 1})" for s, end in zip(batch.decodes, batch.decode_ends)]
        parts += [f"prefill {self._name(c.seq)} (positions {c.start} to {c.end - 1})" for c in batch.chunks]
        return ", ".join(parts)

    def _show_pool(self, seqs: Seq[Sequence] = ()) -> None:
        manager = self.scheduler.block_manager
        ids = sorted({block_id for seq in seqs for block_id in seq.block_table})
        if ids:
            counts = tuple(manager.blocks[i].ref_count for i in ids)
            print(f"  ref_count({', '.join(map(str, ids))}) = {counts}")
        print(f"  free_block_ids = {list(manager.free_block_ids)}")
        used = ", ".join(map(str, sorted(manager.used_block_ids)))
        print(f"  used_block_ids = {{{used}}}")
        if not seqs:
            self._show_hashes()

    def _show_hashes(self) -> None:
        entries = self.scheduler.block_manager.hash_to_block_id.items()
        print(f"  hash_to_block_id = {{{', '.join(f'{h >> 96:08x}: {block_id}' for h, block_id in entries)}}}")

    def _show_inputs(self) -> None:
        for part, values in step_inputs(self.model).items():
            print(f"{part}:")
            for name, value in values.items():
                print(f"  {name} = {value}")


def step_inputs(model: ScriptedModel) -> dict[str, dict[str, list[Any]]]:
    """What the two attention kernels got last: rows of the decodes, then of the packed prompts, by name."""
    inputs: dict[str, dict[str, list[Any]]] = {}
    context, d = model.context, model.context.num_decode
    for part, rows in (("decode", slice(0, d)), ("prefill", slice(d, None))):
        values = {
            "input_ids": model.input_ids[rows],
            "positions": model.positions[rows],
            "slot_mapping": context.slot_mapping[rows],
        }
        if part == "decode":
            values["context_lens"] = context.decode_context_lens
            tables, lens = context.decode_block_tables, context.decode_context_lens
        else:
            values["cu_seqlens_q"], values["cu_seqlens_k"] = context.cu_seqlens_q, context.cu_seqlens_k
            tables, lens = context.block_tables, context.context_lens
        if not len(values["input_ids"]):
            continue
        inputs[part] = {name: value.tolist() for name, value in values.items()}
        if tables is not None:
            inputs[part]["block_tables"] = _read_part(tables, lens)
    return inputs


def _read_part(tables: Tensor, context_lens: Tensor) -> list[list[int]]:
    """The block tables [B, M] without what no kernel reads: stale entries past a context become -1, as if padded."""
    num_blocks = -(-context_lens // BLOCK_SIZE)
    columns = torch.arange(int(num_blocks.max()))
    return tables[:, : len(columns)].masked_fill(columns >= num_blocks[:, None], -1).tolist()
