"""The control channel: any length, in order, damage is seen; and the message of a step."""

import os
import random
import threading

import numpy as np
import pytest

from nanovllm.engine.batch import Batch, Chunk
from nanovllm.engine.sequence import Sequence
from nanovllm.parallel import ring
from nanovllm.parallel.frames import FrameError
from nanovllm.parallel.messages import StepDecoder, encode_step
from nanovllm.parallel.ring import RingReceiver, RingSender, create_memory
from nanovllm.sampling_params import SamplingParams


def never() -> None:
    raise AssertionError("the ring should not be full")


@pytest.fixture
def memory():
    fd = create_memory(3)
    yield fd
    os.close(fd)


def test_messages_of_any_length_arrive_in_order(memory):
    rng = random.Random(0)
    sizes = [0, 1, 7, 8, 100, 260_000, 262_144, 262_145, 5_000_000, 3] + [rng.randrange(3000) for _ in range(2000)]
    messages = [rng.randbytes(n) for n in sizes]
    sender = RingSender(memory, 3, lambda: None)
    got: dict[int, list[bytes]] = {1: [], 2: []}

    def receive(rank: int) -> None:
        receiver = RingReceiver(memory, 3, rank)
        for _ in messages:
            got[rank].append(receiver.receive())

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in got]
    for t in threads:
        t.start()
    for message in messages:
        sender.send(message)
    for t in threads:
        t.join(60)
    assert got[1] == messages and got[2] == messages


def test_damage_is_an_error(memory):
    sender, receiver = RingSender(memory, 3, never), RingReceiver(memory, 3, 1)
    sender.send(b"first")
    assert receiver.receive() == b"first"
    sender.send(b"second")
    receiver._ring[24 + 16] ^= 1  # the first frame takes 24 bytes, a header 16
    with pytest.raises(FrameError, match=r"expected frame 1 .*, got frame 1 of 6 bytes"):
        receiver.receive()


def test_a_full_ring_asks_whether_to_go_on(memory):
    sender = RingSender(memory, 3, never)
    with pytest.raises(AssertionError, match="full"):
        for _ in range(100):
            sender.send(bytes(ring._MAX_PIECE))


def test_the_memory_has_no_name(memory):
    before = set(os.listdir("/dev/shm"))
    RingSender(memory, 3, never).send(b"x")
    assert set(os.listdir("/dev/shm")) <= before


def sequence(row: int, tokens: list[int], table: list[int], synced: int, **params) -> Sequence:
    seq = Sequence(tokens, 4, SamplingParams(**params))
    seq.row, seq.block_table, seq.num_synced_blocks = row, table, synced
    return seq


def test_a_step_arrives_as_it_was_scheduled():
    old = sequence(3, list(range(9)), [5, 6, 7], 0)
    plain = sequence(0, list(range(100, 110)), [1, 2], 0)
    special = sequence(1, [9, 8, 7], [4], 0, logprobs=2)
    first = Batch([], [], [Chunk(old, 0, 9, True)])
    second = Batch([old], [10], [Chunk(plain, 4, 8, False), Chunk(special, 0, 3, True)])
    decoder = StepDecoder()
    decoder.decode(encode_step(first))
    old.num_synced_blocks = 3
    old.block_table.append(11)
    batch = decoder.decode(encode_step(second))
    assert [s.row for s in batch.decodes] == [3] and batch.decode_ends == [10]
    assert batch.decodes[0].block_table == [5, 6, 7, 11]
    assert [(c.seq.row, c.start, c.end, c.is_last) for c in batch.chunks] == [(0, 4, 8, False), (1, 0, 3, True)]
    assert [c.seq.token_ids[c.start : c.end] for c in batch.chunks] == [[104, 105, 106, 107], [9, 8, 7]]
    assert batch.chunks[0].seq.block_table == [1, 2]
    assert [c.seq.params.logprobs for c in batch.chunks] == [None, 0]
    fresh = sequence(3, [1, 2], [0], 0)  # another sequence in a row that was used
    assert decoder.decode(encode_step(Batch([], [], [Chunk(fresh, 0, 2, True)]))).chunks[0].seq.block_table == [0]


def test_only_the_tokens_of_the_step_travel():
    """512 prompts of 4,112 tokens, 4,096 of them cached; and one prompt of 300,000."""
    seqs = [sequence(i, list(range(4112)), list(range(257)), 0) for i in range(512)]
    message = encode_step(Batch([], [], [Chunk(s, 4096, 4112, True) for s in seqs]))
    assert len(message) < 512 * (257 + 16 + 16) * 4
    batch = StepDecoder().decode(message)
    assert batch.chunks[511].seq.token_ids[4100:4103] == [4100, 4101, 4102]
    tokens = np.random.default_rng(0).integers(0, 200_000, 300_000).tolist()
    long = Chunk(sequence(0, tokens, list(range(18_750)), 0), 0, 300_000, True)
    received = StepDecoder().decode(encode_step(Batch([], [], [long]))).chunks[0].seq
    assert received.token_ids[0:300_000] == tokens and received.block_table == list(range(18_750))
