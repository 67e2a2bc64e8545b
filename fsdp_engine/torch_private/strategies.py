"""FSDP1's sharding strategy without a public name. Checked on torch 2.13."""

from __future__ import annotations

from torch.distributed.fsdp import ShardingStrategy

HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2
"""Shard within a group, replicate across, keep parameters gathered after forward."""
