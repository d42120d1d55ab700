"""embed_rms_norm, bf16, 151,936 x hidden: python benchmarks/bench_embed_rms_norm.py [--json results.json]"""

import torch
import torch.nn.functional as F
from table import Table, copy, num_sets, random

from nanovllm import ops

VOCAB = 151936


def bench(table: Table, tokens: int, hidden: int) -> None:
    moved = 3 * tokens * hidden * 2
    sets = num_sets(moved)
    out, residual = random(2, sets, tokens, hidden)
    token_ids = torch.randint(VOCAB, (sets, tokens), device="cuda")
    embedding, weight = random(VOCAB, hidden), random(hidden)
    table.row(
        f"{tokens} x {hidden}",
        moved,
        lambda i: ops.embed_rms_norm(out[i], residual[i], token_ids[i], embedding, weight, 1e-6),
        copy=copy(moved),
        eager=lambda i: F.rms_norm(F.embedding(token_ids[i], embedding), (hidden,), weight, 1e-6),
    )


def main() -> None:
    table = Table(__doc__)
    for case in [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 4096)]:
        bench(table, *case)
    table.end()


if __name__ == "__main__":
    main()
