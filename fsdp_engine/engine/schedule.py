"""The learning rate by step."""

from __future__ import annotations

import math

from fsdp_engine.engine.config import OptimizerConfig, warmup_steps


def lr_factor(config: OptimizerConfig, step: int) -> float:
    """What `lr` is multiplied by at optimizer step `step`, counted from 0.

    Warmup rises linearly from 0 at step 0 to 1 at step `warmup_steps`. Then 1 (constant), or
    `(1 + m) / 2 + (1 - m) / 2 * cos(2 pi num_cycles p)` and at least `m` (cosine), with `m` =
    `min_lr_ratio` and `p` the fraction of the remaining steps that are done.
    """
    warmup = warmup_steps(config)
    if step < warmup:
        return step / max(1, warmup)
    if config.lr_scheduler_type == "constant":
        return 1.0
    low = config.min_lr_ratio
    progress = (step - warmup) / max(1, config.total_training_steps - warmup)
    wave = math.cos(2 * math.pi * config.num_cycles * progress)
    return max(low, (1 + low) / 2 + (1 - low) / 2 * wave)
