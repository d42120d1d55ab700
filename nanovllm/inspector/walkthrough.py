"""The worked example of nanovllm.trace as events with an explanation each: `page/walkthrough.jsonl`.

    python -m nanovllm.inspector.walkthrough > nanovllm/inspector/page/walkthrough.jsonl

A test holds the file to this module. Unlike in a recording, a step is two events: what schedule() did and the model
got, and what postprocess() made of the result.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from nanovllm.engine.batch import Batch
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.observer import Event, observe
from nanovllm.inspector.record import encode
from nanovllm.sampling_params import SamplingParams
from nanovllm.trace import NUM_BLOCKS, REQUESTS, ScriptedModel, make_config, make_runner, step_inputs

# (requests that arrive, or none: a step; title; text) of every event after the snapshot.
_STORY: list[tuple[str, str, str]] = [
    ("A", "Prompt A arrives", "Eleven tokens: two full logical blocks of four and one of three. It waits."),
    (
        "",
        "schedule(): A gets blocks 0, 1 and 2",
        "Nothing is in the prefix cache, so allocate() takes three free blocks. The table only reserves room: the K/V "
        "of token j is written to slot_mapping[j] = block * 4 + offset by the forward pass of this step.",
    ),
    (
        "",
        "postprocess(): full blocks are hashed",
        "Now blocks 0 and 1 hold K/V, so their hashes are published; the hash of block 1 covers block 0 too. Block 2 "
        "is not full and gets none. A samples 99, whose K/V the next step computes.",
    ),
    ("B", "Prompt B arrives", "Thirteen tokens, and the first four are those of A's first block."),
    (
        "",
        "schedule(): B shares block 0, and A decodes",
        "can_allocate() finds the hash of B's first block under block 0: its reference count becomes 2, and only three "
        "new blocks are taken. B computes positions 4 to 12 and reads the prefix through its block table. In the same "
        "step A decodes 99 at position 11: the last slot of block 2.",
    ),
    (
        "",
        "postprocess(): three more blocks are full",
        "A's third block is full now, and B's second and third; all are published. B's last block holds one token. A "
        "samples 100, B samples 72.",
    ),
    (
        "",
        "schedule(): A crosses a block border",
        "A's token 100 is the first of a new logical block, so may_append() takes block 6 for it: position 12 is slot "
        "24. B's token 72 still fits into block 5.",
    ),
    (
        "",
        "postprocess(): A ends and releases its blocks",
        "In reverse order: 6, 2, 1. Block 0 stays, because B holds it. Blocks 1 and 2 are free, but their K/V and "
        "hashes are still there: the next prompt that begins as A did can have them.",
    ),
    (
        "",
        "schedule(): B decodes alone",
        "One token, one row. B's block table is all that attention needs to find the rest.",
    ),
    (
        "",
        "postprocess(): B ends",
        "All eight blocks are free. Those with a published hash are taken last, so that the cache lives long; blocks 5 "
        "and 6, which were never full, come first.",
    ),
    ("C D", "Prompts C and D arrive", "C begins with the four tokens that A and B had; D is new and has two tokens."),
    (
        "",
        "schedule(): C revives block 0, D is packed behind it",
        "Block 0 leaves the free list with its content: no K/V is computed again for it. Both prompts share one packed "
        "batch: cu_seqlens_q = [0, 3, 5] are the new tokens, cu_seqlens_k = [0, 7, 9] the contexts they attend to.",
    ),
    (
        "",
        "postprocess(): both end",
        "Each asked for one token. The pool is free again, and the prefix cache is ready for whoever comes next.",
    ),
]


class _ScriptedRunner:
    """The real runner, whose model samples what the example says; keeps what schedule() had left free."""

    def __init__(self) -> None:
        self.num_kvcache_blocks = NUM_BLOCKS
        self._model = ScriptedModel()
        self._runner = make_runner(make_config(), self._model)
        self.engine: LLMEngine
        self.inputs: dict[str, Any] = {}
        self.free_blocks: list[int] = []

    def launch(self, batch: Batch) -> Any:
        self.free_blocks = list(islice(self.engine.scheduler.block_manager.free_block_ids, NUM_BLOCKS))
        scripts = (REQUESTS[s.data.request.request_id][1][s.num_completion_tokens] for s in batch.sampled)  # type: ignore[attr-defined]
        self._model.next_ids = list(scripts)
        handle = self._runner.launch(batch)
        self.inputs = step_inputs(self._model)
        return handle

    def collect(self, handle: Any) -> Any:
        return self._runner.collect(handle)


def events() -> list[Event]:
    """A snapshot, then the story."""
    runner = _ScriptedRunner()
    engine = runner.engine = LLMEngine(make_config(), runner)
    seen: list[Event] = []
    observe(engine, seen.append)
    steps = iter(_STORY)
    for arriving, title, text in steps:
        note = {"title": title, "text": text}
        if arriving:
            first = len(seen)
            for name in arriving.split():
                prompt, sampled = REQUESTS[name]
                engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=len(sampled)), name)
            seen[first:] = [{"kind": "change", "ops": [op for e in seen[first:] for op in e["ops"]], "note": note}]
            continue
        engine.step()
        step = seen.pop()
        cut = [op[0] for op in step["ops"]].index("launch") + 1
        before, after = step["ops"][:cut], step["ops"][cut:]
        same = {"kind": "step", "step": step["step"]}
        seen.append(same | {"ops": [*before, ("next", runner.free_blocks)], "note": note, "inputs": runner.inputs})
        _, title, text = next(steps)
        seen.append({"kind": "change", "ops": after, "note": {"title": title, "text": text}})
    del seen[0]["time"]
    return seen


if __name__ == "__main__":
    print("\n".join(map(encode, events())))
