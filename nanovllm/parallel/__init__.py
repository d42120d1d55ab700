"""Tensor parallelism: shards, collectives, worker processes and the channel that commands them."""
