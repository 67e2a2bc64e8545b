"""Every error this project raises on purpose, as one tree.

FsdpPropertiesError
├── CaseError (also ValueError)        a case or case file that describes no legal run
├── ConfigError (also ValueError)      an engine configuration that is refused
├── EngineStateError (also RuntimeError)  a call that the engine's present state does not allow
├── CheckpointError (also RuntimeError)   a checkpoint that cannot be written, or is refused
├── EngineLoadError                    an engine name that leads to no engine
├── AcceleratorError                   the device cannot be had in this process
└── RunError                           a case that ran and showed no observation
    ├── UnsupportedCase                the engine says in words why it does not apply
    │   └── NotOffered                 it has an action that the engine does not list
    ├── EngineRaised                   at least one rank raised inside the engine
    ├── RankDied                       at least one rank process ended
    ├── RankHung                       the deadline passed
    └── WorldError                     the world itself failed (start-up, wire)
"""

from __future__ import annotations


class FsdpPropertiesError(Exception):
    """Root of the tree: catch it to catch everything raised here on purpose."""


class CaseError(FsdpPropertiesError, ValueError):
    """A case, or a file that holds one, describes no legal run. Names the field and the value."""


class ConfigError(FsdpPropertiesError, ValueError):
    """An engine refuses its configuration. Names the field, the value and what would be legal."""


class EngineStateError(FsdpPropertiesError, RuntimeError):
    """A call that the engine's present state does not allow. Says what would allow it."""


class CheckpointError(FsdpPropertiesError, RuntimeError):
    """A checkpoint that cannot be written, or that is refused. Names what is wrong in which file.

    Where one is refused nothing has been touched, on any rank.
    """


class EngineLoadError(FsdpPropertiesError):
    """The name given for an engine leads to none, or its import raised."""


class AcceleratorError(FsdpPropertiesError):
    """A device cannot be had: no GPU is there, or the simulated one cannot be built."""


class RunError(FsdpPropertiesError):
    """A case was run and there is no observation of it."""


class UnsupportedCase(RunError):
    """The engine declares, with a reason, that the case does not apply to it."""


class NotOffered(UnsupportedCase):
    """The case has an action that is not among those that the engine says it has."""


class EngineRaised(RunError):
    """At least one rank raised inside the engine.

    `by_rank` maps the rank to its traceback as text, `kinds` to the exception's class name
    (`ConfigError` for a refused configuration), `num_collectives` to how many collectives the
    rank had issued by then.
    """

    def __init__(
        self,
        message: str,
        *,
        by_rank: dict[int, str],
        kinds: dict[int, str],
        num_collectives: dict[int, int],
    ) -> None:
        super().__init__(message)
        self.by_rank = by_rank
        self.kinds = kinds
        self.num_collectives = num_collectives


class RankDied(RunError):
    """At least one rank process ended before it answered.

    `exit_codes` maps the dead ranks to their exit codes (negative: the signal), `stacks` maps
    ranks to the Python stacks that could still be read.
    """

    def __init__(
        self, message: str, *, exit_codes: dict[int, int | None], stacks: dict[int, str]
    ) -> None:
        super().__init__(message)
        self.exit_codes = exit_codes
        self.stacks = stacks


class RankHung(RunError):
    """The deadline passed.

    `stacks` has every rank's Python stack, `divergence` one sentence on where the ranks'
    collective logs first differ.
    """

    def __init__(self, message: str, *, stacks: dict[int, str], divergence: str) -> None:
        super().__init__(message)
        self.stacks = stacks
        self.divergence = divergence


class WorldError(RunError):
    """The world itself failed: a rank did not start, or its answer could not be read."""
