"""The CPU-side directory of the KV-cache pool: which physical block belongs to which sequences, and what it holds.

The K/V bytes themselves are never seen here. `nanovllm trace` prints a worked trace of it, which
docs/inspector.md explains.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Any

import xxhash

from nanovllm.engine.sequence import Sequence

ROOT_HASH = -1  # parent of a prompt's first block
_HASHED_AHEAD = 64  # blocks of a prompt hashed at a time while they are looked up


class Block:
    """Metadata of one physical block. hash is None until the block is full and its K/V was computed."""

    __slots__ = ("block_id", "hash", "parent_hash", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash: int | None = None
        self.parent_hash: int | None = None
        self.token_ids: list[int] = []

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, hash={self.hash}, token_ids={self.token_ids})"


class BlockManager:
    """Assigns blocks to sequences, shares full blocks between equal prefixes, and takes them back.

    Every operation costs time in the blocks it touches, never in the size of the pool.

    Attributes:
        blocks: Block of every id.
        free_block_ids: ids for the next allocations, in order; a free block may still hold a cached prefix.
        used_block_ids: ids in at least one live block table.
        hash_to_block_id: chained hash of a full block to the id that holds it; the first writer stays.
        journal: where changes are written down for an observer (engine/observer.py), None when there is none.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self.hash_to_block_id: dict[int, int] = {}
        self.journal: list[tuple[Any, ...]] | None = None

    def compute_hash(self, token_ids: list[int], parent_hash: int = ROOT_HASH) -> int:
        """128-bit hash of a full block and, through parent_hash, of all tokens before it."""
        parent = b"" if parent_hash == ROOT_HASH else parent_hash.to_bytes(16, "little")
        return xxhash.xxh3_128_intdigest(parent + array("q", token_ids).tobytes())

    def compute_hashes(self, seq: Sequence, count: int) -> list[int]:
        """Chained hashes of seq's full logical blocks, computed for the first `count` at least."""
        hashes, size = seq.block_hashes, self.block_size
        if len(hashes) < count:
            parent = hashes[-1] if hashes else ROOT_HASH
            tokens = array("q", seq.token_ids[len(hashes) * size : count * size])
            for start in range(0, len(tokens), size):
                parent = self.compute_hash(tokens[start : start + size], parent)
                hashes.append(parent)
        return hashes

    def _cached_block(self, seq: Sequence, i: int) -> int | None:
        """The physical block that holds seq's full logical block i behind the same prefix, if any.

        Tokens and the parent's hash are compared, so that a collision of hashes cannot give another prompt's K/V.
        """
        if i >= len(seq.block_hashes):  # where one block is there, more of the prompt's may be
            self.compute_hashes(seq, min(i + (_HASHED_AHEAD if i else 1), seq.num_blocks - 1))
        block_id = self.hash_to_block_id.get(seq.block_hashes[i])
        if block_id is None:
            return None
        block = self.blocks[block_id]
        parent = seq.block_hashes[i - 1] if i else ROOT_HASH
        return block_id if block.parent_hash == parent and block.token_ids == seq.block(i) else None

    def can_allocate(self, seq: Sequence) -> int:
        """Number of leading blocks in the prefix cache if the whole sequence fits now, else -1.

        The last block is never a hit, so that at least one token is computed. A hit on a live block costs no free
        block; a hit on a free one takes that block out of the free list.
        """
        num_cached_blocks = 0
        num_new_blocks = seq.num_blocks
        if self.enable_prefix_caching:
            for i in range(seq.num_blocks - 1):
                block_id = self._cached_block(seq, i)
                if block_id is None:
                    break
                num_cached_blocks += 1
                num_new_blocks -= block_id in self.used_block_ids
        return num_cached_blocks if num_new_blocks <= len(self.free_block_ids) else -1

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        """Gives seq its block table; num_cached_blocks is what can_allocate just returned."""
        assert not seq.block_table, f"allocate: sequence {seq.seq_id} already has blocks {seq.block_table}"
        for h in seq.block_hashes[:num_cached_blocks]:
            block_id = self.hash_to_block_id[h]
            block = self.blocks[block_id]
            if block.ref_count == 0:  # revived: its hash and tokens stay
                del self.free_block_ids[block_id]
                self.used_block_ids.add(block_id)
            block.ref_count += 1
            seq.block_table.append(block_id)
        for _ in range(num_cached_blocks, seq.num_blocks):
            seq.block_table.append(self._allocate_block())
        seq.num_cached_tokens = num_cached_blocks * self.block_size
        if self.journal is not None:
            self.journal.append(("admit", seq.seq_id, list(seq.block_table), num_cached_blocks))

    def can_append(self, seq: Sequence) -> bool:
        """Whether blocks for all len(seq) tokens are there or free."""
        return self._num_missing_blocks(seq) <= len(self.free_block_ids)

    def may_append(self, seq: Sequence) -> None:
        """Extends the block table to ceil(len(seq) / block_size) blocks: before every decode step."""
        num_missing = self._num_missing_blocks(seq)
        for _ in range(num_missing):
            seq.block_table.append(self._allocate_block())
        if self.journal is not None and num_missing > 0:
            self.journal.append(("grow", seq.seq_id, seq.block_table[-num_missing:]))

    def _num_missing_blocks(self, seq: Sequence) -> int:
        return -(-len(seq) // self.block_size) - len(seq.block_table)

    def hash_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """Publishes the blocks that tokens start..end-1, just computed, have filled."""
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        first, last = start // size, end // size
        if first == last:
            return
        hashes, table, token_ids = self.compute_hashes(seq, last), seq.block_table, seq.token_ids
        parent = hashes[first - 1] if first else ROOT_HASH
        for i in range(first, last):
            block = self.blocks[table[i]]
            block.parent_hash, block.hash = parent, hashes[i]
            block.token_ids = token_ids[i * size : (i + 1) * size]
            parent = block.hash
            self.hash_to_block_id.setdefault(parent, table[i])
        if self.journal is not None:
            self.journal.append(("hash", seq.seq_id, first, [f"{h:032x}" for h in hashes[first:last]]))

    def deallocate(self, seq: Sequence) -> None:
        """Drops seq's references, last block first, so that a prefix's tail is reused before its head."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
                if not self._is_published(block):  # nobody can hit it: reuse it first
                    self.free_block_ids.move_to_end(block_id, last=False)
        seq.block_table = []
        seq.num_cached_tokens = 0
        if self.journal is not None:
            self.journal.append(("free", seq.seq_id))

    def _is_published(self, block: Block) -> bool:
        return block.hash is not None and self.hash_to_block_id.get(block.hash) == block.block_id

    def _allocate_block(self) -> int:
        """Takes the first free block, and its old content out of the prefix cache."""
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        if self._is_published(block):
            del self.hash_to_block_id[block.hash]  # type: ignore[arg-type]
        block.hash = block.parent_hash = None
        block.token_ids = []
        block.ref_count = 1
        self.used_block_ids.add(block_id)
        return block_id
