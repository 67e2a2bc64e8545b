"""verl 0.9.1: whether gradient sync is deferred by default depends on the entry point.

The dataclass and the YAML file of the FSDP engine must have the same default. Control: they have
for reshard_after_forward. Exit status 0: fixed, 1: reproduced, 2: could not run.
"""

import sys
from pathlib import Path

import verl
from omegaconf import OmegaConf  # verl's own requirement
from verl.workers.config import FSDPEngineConfig

SYNC = "use_no_sync_for_gradient_accumulation"

of_class = FSDPEngineConfig()
of_file = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/engine/fsdp.yaml")
control = of_class.reshard_after_forward == of_file.reshard_after_forward
defaults = getattr(of_class, SYNC, None), of_file.get(SYNC)
seen = defaults[0] != defaults[1]
word = ("REPRODUCED" if seen else "FIXED") if control else "COULD NOT RUN"
print(f"{word}: {SYNC} is {defaults[0]} in the dataclass, {defaults[1]} in the YAML file")
sys.exit(int(seen) if control else 2)
