"""`nanovllm trace` prints the values of the text it illustrates, through the real scheduler and model runner.

The literals are those of "nano-vLLM Part 2: Block Tables, KV Cache, and the Path to the GPU", sections 2 to 4.
"""

import pytest

from nanovllm.cli import main


def test_blocks_are_called_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace"]) == 0
    assert "page" not in capsys.readouterr().out


@pytest.fixture
def sections(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The trace's lines, without indentation, one list a section."""
    assert main(["trace"]) == 0
    return [[line.strip() for line in text.splitlines()] for text in capsys.readouterr().out.split("\n\n")]


def assert_in_order(lines: list[str], expected: str) -> None:
    """Every expected line is there, and none before the one that is expected before it."""
    rest = iter(lines)
    for line in expected.strip().splitlines():
        assert line.strip() in rest, f"{line.strip()!r} is missing, or not where it is expected, in {lines}"


def test_pool_starts_free(sections: list[list[str]]) -> None:
    assert_in_order(
        sections[0],
        """
        block_size = 4
        free_block_ids = [0, 1, 2, 3, 4, 5, 6, 7]
        used_block_ids = {}
        hash_to_block_id = {}
        """,
    )


def test_prompt_a_takes_new_blocks(sections: list[list[str]]) -> None:
    assert_in_order(
        sections[1],
        """
        A = [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33]]
        A.block_table = [0, 1, 2]
        A.num_cached_tokens = 0
        ref_count(0, 1, 2) = (1, 1, 1)
        free_block_ids = [3, 4, 5, 6, 7]
        used_block_ids = {0, 1, 2}
        prefill:
        input_ids = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33]
        positions = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        slot_mapping = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        cu_seqlens_q = [0, 11]
        cu_seqlens_k = [0, 11]
        postprocess():
        A samples 99: length 12
        """,
    )
    assert not any(line.startswith("block_tables") for line in sections[1]), "a fresh prompt needs no block table"


def test_prompt_b_reuses_the_first_block(sections: list[list[str]]) -> None:
    assert_in_order(
        sections[2],
        """
        B = [[11, 12, 13, 14], [51, 52, 53, 54], [61, 62, 63, 64], [71]]
        B.block_table = [0, 3, 4, 5]
        B.num_cached_tokens = 4
        ref_count(0, 1, 2, 3, 4, 5) = (2, 1, 1, 1, 1, 1)
        prefill:
        input_ids = [51, 52, 53, 54, 61, 62, 63, 64, 71]
        positions = [4, 5, 6, 7, 8, 9, 10, 11, 12]
        slot_mapping = [12, 13, 14, 15, 16, 17, 18, 19, 20]
        cu_seqlens_q = [0, 9]
        cu_seqlens_k = [0, 13]
        block_tables = [[0, 3, 4, 5]]
        """,
    )


def test_decode_of_99_needs_no_new_block(sections: list[list[str]]) -> None:
    assert_in_order(
        sections[2],
        """
        A.block_table = [0, 1, 2]
        decode:
        input_ids = [99]
        positions = [11]
        slot_mapping = [11]
        context_lens = [12]
        block_tables = [[0, 1, 2]]
        prefill:
        postprocess():
        A samples 100: length 13
        """,
    )


def test_full_blocks_are_hashed_after_the_step_that_filled_them(sections: list[list[str]]) -> None:
    maps = [[line for line in s if line.startswith("hash_to_block_id")][-1] for s in sections[:3]]
    blocks = [[int(entry.split(": ")[1]) for entry in m.split("{")[1].rstrip("}").split(", ") if entry] for m in maps]
    assert blocks == [[], [0, 1], [0, 1, 2, 3, 4]]
    hashes = [entry.split(": ")[0] for entry in maps[2].split("{")[1].split(", ")]
    assert len(set(hashes)) == 5


def test_a_crosses_a_block_border_and_releases_in_reverse(sections: list[list[str]]) -> None:
    assert_in_order(
        sections[3],
        """
        A.block_table = [0, 1, 2, 6]
        B.block_table = [0, 3, 4, 5]
        free_block_ids = [7]
        decode:
        input_ids = [100, 72]
        positions = [12, 13]
        slot_mapping = [24, 21]
        context_lens = [13, 14]
        block_tables = [[0, 1, 2, 6], [0, 3, 4, 5]]
        A is done, its block_table was [0, 1, 2, 6]
        block 6: ref_count 1 -> 0
        block 2: ref_count 1 -> 0
        block 1: ref_count 1 -> 0
        block 0: ref_count 2 -> 1
        used_block_ids = {0, 3, 4, 5}
        """,
    )


def test_b_releases_the_shared_block_last(sections: list[list[str]]) -> None:
    assert_in_order(
        sections[4],
        """
        B is done, its block_table was [0, 3, 4, 5]
        block 5: ref_count 1 -> 0
        block 4: ref_count 1 -> 0
        block 3: ref_count 1 -> 0
        block 0: ref_count 1 -> 0
        used_block_ids = {}
        """,
    )


def test_packed_batch_of_c_and_d(sections: list[list[str]]) -> None:
    assert_in_order(
        sections[5],
        """
        C.num_cached_tokens = 4
        D.num_cached_tokens = 0
        input_ids = [41, 42, 43, 81, 82]
        positions = [4, 5, 6, 0, 1]
        cu_seqlens_q = [0, 3, 5]
        cu_seqlens_k = [0, 7, 9]
        """,
    )
