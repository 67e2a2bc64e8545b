"""One world: N rank processes that serve cases of up to N ranks, and the watchdog around them."""

from __future__ import annotations

import selectors
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from fsdp_engine.contract.actions import CHECKPOINT_ACTIONS
from fsdp_engine.contract.case import Case
from fsdp_engine.contract.errors import (
    AcceleratorError,
    EngineLoadError,
    EngineRaised,
    NotOffered,
    RankDied,
    RunError,
    UnsupportedCase,
    WorldError,
)
from fsdp_engine.contract.observation import Observation
from fsdp_engine.contract.protocol import EngineTables
from fsdp_engine.world import wire
from fsdp_engine.world.autopsy import collect_stacks, hang, parted, rank_output
from fsdp_engine.world.paths import files_path
from fsdp_engine.world.processes import START_TIMEOUT_S, RankProcess, zygote

GRACE_S = 1.0
"""How long the other ranks get to fail too after the first did."""

DEATH_GRACE_S = 0.25
"""The same after a death, which is told at once."""


class World:
    """`size` ready ranks of one engine. `broken` after anything but an answer from every rank."""

    def __init__(
        self, engine: str, *, size: int, case_timeout_s: float, device: str = "cpu"
    ) -> None:
        self.engine = engine
        self.size = size
        self.broken = False
        self._case_timeout_s = case_timeout_s
        self._num_cases = 0
        self._zygote = zygote(device)
        capacity = self._zygote.capacity
        if capacity is not None and size > capacity:
            raise UnsupportedCase(f"the job has {capacity} ranks, the case asks for {size}")
        self._directory = Path(tempfile.mkdtemp(prefix="fsdp-world-"))
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(size):
                self._ranks.append(
                    self._zygote.fork_rank(directory=self._directory, rank=rank, engine=engine)
                )
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def run(self, case: Case) -> Observation:
        """Run a case on the first ranks.

        Raises:
            UnsupportedCase, EngineRaised, RankDied, RankHung, WorldError: see `contract.errors`.
                All but the first leave the world broken.
        """
        size = case.mesh.world_size
        assert size <= self.size
        assert not self.broken
        if not self._zygote.shares_files and any(
            a.kind in CHECKPOINT_ACTIONS for a in case.program
        ):
            raise UnsupportedCase(
                "checkpoints need a folder that all machines of the job see: TMPDIR"
            )
        self._num_cases += 1
        path = self._directory / f"store{self._num_cases}"
        store = self._zygote.store(self._directory, self._num_cases)
        files = files_path(path)
        self.broken = True
        replies = self._ask(wire.RunCase(case=case, store=store, files=str(files)), size)
        path.unlink(missing_ok=True)
        shutil.rmtree(files, ignore_errors=True)
        refused = [r for r in replies.values() if isinstance(r, wire.Unsupported)]
        if refused:
            self.broken = len(refused) < size
            if self.broken:
                raise WorldError(f"only some ranks refuse the case: {refused[0].reason}")
            kind = UnsupportedCase if refused[0].offered else NotOffered
            raise kind(refused[0].reason)
        done = [reply for _, reply in sorted(replies.items()) if isinstance(reply, wire.Done)]
        first = done[0]
        if len(done) < size or first.numerics is None:
            raise WorldError(f"not all of {size} ranks answered with an observation")
        # They clean up while the caller looks at what they showed.
        self._tell(wire.EndCase(), size)
        self.broken = False
        return Observation(
            numerics=first.numerics,
            ranks=tuple(reply.observation for reply in done),
        )

    def tables(self, asked: wire.AskTables) -> EngineTables:
        """The engine's answers to questions that need no ranks, from rank 0."""
        self.broken = True
        reply = self._ask(asked, 1)[0]
        if not isinstance(reply, wire.TablesReply):
            raise WorldError(f"tables were asked for, {type(reply).__name__} came")
        self.broken = False
        return reply.tables

    def close(self) -> None:
        """End the ranks, at once, and remove what the world left on disk."""
        self.broken = True
        for rank in self._ranks:
            rank.life.close()
            rank.commands.close()
        self._zygote.end_ranks([rank.pid for rank in self._ranks])
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _await_ready(self) -> None:
        replies, dead = self._collect(range(self.size), deadline=time.monotonic() + START_TIMEOUT_S)
        for rank, reply in sorted(replies.items()):
            if isinstance(reply, wire.Failed) and reply.error == AcceleratorError.__name__:
                raise AcceleratorError(reply.message)
            if isinstance(reply, wire.Failed):
                raise EngineLoadError(_load_message(self.engine, reply))
            if not isinstance(reply, wire.Ready):
                raise WorldError(f"rank {rank} began with {type(reply).__name__}, not Ready")
        if dead:
            self._zygote.fetch(self._directory, dead)
            output = rank_output(self._directory, dead[0])
            raise WorldError(f"rank {dead[0]} ended while it loaded {self.engine!r}\n{output}")
        if len(replies) < self.size:
            raise WorldError(f"loading {self.engine!r} took more than {START_TIMEOUT_S:.0f} s")

    def _ask(self, command: wire.Command, size: int) -> dict[int, wire.Reply]:
        """Send a command to the first ranks; an answer from every one of them, or an error."""
        deadline = time.monotonic() + self._case_timeout_s
        self._tell(command, size)
        replies, dead = self._collect(range(size), deadline=deadline)
        failed = {r: reply for r, reply in replies.items() if isinstance(reply, wire.Failed)}
        if dead:  # before failures: the others often raise because of it
            raise self._died(dead, size)
        if failed:
            raise _raised(failed, size)
        if len(replies) < size:
            raise hang(
                self._ranks[:size], self._directory, self._case_timeout_s, self._zygote.fetch
            )
        return replies

    def _tell(self, command: wire.Command, size: int) -> None:
        frame = wire.frame(command)
        for rank in range(size):
            try:
                self._ranks[rank].commands.sendall(frame)
            except OSError:
                break  # a dead rank; collecting replies says how it ended

    def _collect(self, ranks: range, *, deadline: float) -> tuple[dict[int, wire.Reply], list[int]]:
        """Replies until the deadline, or until a grace after the first failure or death."""
        replies: dict[int, wire.Reply] = {}
        dead: list[int] = []
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self._ranks[rank].commands, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    rank = int(key.data)
                    stream = self._ranks[rank].commands
                    selector.unregister(stream)
                    # A rank that stops in the middle of a frame has not answered.
                    stream.settimeout(max(0.1, deadline - time.monotonic()))
                    try:
                        replies[rank] = wire.receive_reply(stream)
                    except TimeoutError:
                        continue
                    except (EOFError, ConnectionError):
                        dead.append(rank)
                        deadline = min(deadline, time.monotonic() + DEATH_GRACE_S)
                        continue
                    finally:
                        stream.settimeout(None)
                    if isinstance(replies[rank], wire.Failed):
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies, dead

    def _died(self, dead: list[int], size: int) -> RunError:
        codes = {r: self._zygote.exit_code(self._ranks[r].pid, timeout_s=1.0) for r in dead}
        alive = {r: self._ranks[r] for r in range(size) if r not in dead}
        self._zygote.fetch(self._directory, range(size))
        how = ", ".join(f"rank {rank} ({_exit(code)})" for rank, code in sorted(codes.items()))
        output = "\n".join(filter(None, (rank_output(self._directory, rank) for rank in dead)))
        where = parted(range(size), self._directory)
        return RankDied(
            f"{len(dead)} of {size} ranks ended during the case: {how}; {where}\n{output}".rstrip(),
            exit_codes=codes,
            stacks=collect_stacks(alive, self._directory, self._zygote.fetch),
        )


def _exit(code: int | None) -> str:
    if code is None:
        return "exit code unknown"
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _load_message(engine: str, reply: wire.Failed) -> str:
    if reply.error == "EngineLoadError":
        return reply.message
    return f"loading engine {engine!r} raised {reply.error}: {reply.message}\n{reply.traceback}"


def _raised(failed: Mapping[int, wire.Failed], size: int) -> EngineRaised:
    rank, first = min(failed.items())
    others = "" if len(failed) == 1 else f" (and {len(failed) - 1} more)"
    return EngineRaised(
        f"rank {rank}{others} of {size} raised {first.error}: {first.message}\n{first.traceback}",
        by_rank={r: reply.traceback for r, reply in failed.items()},
        kinds={r: reply.error for r, reply in failed.items()},
        num_collectives={r: reply.num_collectives for r, reply in failed.items()},
    )
