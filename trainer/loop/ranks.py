"""What rank 0 asks of all ranks, one command at a time; every rank runs the same commands in the same order.

Owns the command vocabulary and its table of effects. `Ranks` is rank 0's end, `serve` the others'. All commands but `StopRank` are
collectives of torch.distributed; their frames travel over MPI before, their answers after, never during. `Save` begins only: what it
copied is written by threads of their own, which every rank has ended before it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rollout.engines.checksum import Sum
from scavenger.errors import WeightsError
from scavenger.protocol import messages
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.spool import SCHEME
from trainer.checkpoint import checkpoint
from trainer.checkpoint.saving import Saver
from trainer.data.batching import Micro
from trainer.loop.comm import Comm
from trainer.loop.publish import Publisher
from trainer.loop.watchdog import Here
from trainer.model import merged
from trainer.model.learner import Learner, RowStats


class Train(msgspec.Struct, frozen=True, tag=True):
    micro: Micro


class Proximal(msgspec.Struct, frozen=True, tag=True):
    micro: Micro


class Update(msgspec.Struct, frozen=True, tag=True):
    denominator: float
    lr: float


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Forget the gradients that were summed since the last update."""


class CopyShare(msgspec.Struct, frozen=True, tag=True):
    """Copy and hash your share of the present weights. `base`: of what adapters stand beside, not of the adapters."""

    dtype: str
    base: bool = False


class MergeAdapters(msgspec.Struct, frozen=True, tag=True):
    """Sum up your rows of what engines are to make of base and adapters, rounded to `dtype`."""

    dtype: str


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Serve your share of the version that the last `CopyShare` made. `mark`: write it to the spool, under this name; "" = do not."""

    manifest: bytes
    mark: str


class Save(msgspec.Struct, frozen=True, tag=True):
    path: str


class LoadCheckpoint(msgspec.Struct, frozen=True, tag=True):
    path: str
    updates_taken: int


class ReleaseMemory(msgspec.Struct, frozen=True, tag=True):
    """Give the GPU's memory back, training state too where engines need its place: they are about to take theirs."""


class NoteEngines(msgspec.Struct, frozen=True, tag=True):
    """Engines are about to sleep: see how much of the GPU they take."""


class TakeBack(msgspec.Struct, frozen=True, tag=True):
    """Engines gave the GPU back: begin to bring there what went away from it."""


class StopRank(msgspec.Struct, frozen=True, tag=True):
    pass


Command = (
    Train
    | Proximal
    | Update
    | Discard
    | CopyShare
    | MergeAdapters
    | Offer
    | Save
    | LoadCheckpoint
    | ReleaseMemory
    | NoteEngines
    | TakeBack
    | StopRank
)
_encode = msgspec.msgpack.Encoder().encode
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_row_stats: msgspec.msgpack.Decoder[tuple[RowStats, ...]] = msgspec.msgpack.Decoder(tuple[RowStats, ...])
_sources: msgspec.msgpack.Decoder[tuple[messages.WeightSource, ...]] = msgspec.msgpack.Decoder(
    tuple[messages.WeightSource, ...]
)
_sums: msgspec.msgpack.Decoder[dict[str, Sum]] = msgspec.msgpack.Decoder(dict[str, Sum])
_logprobs: msgspec.msgpack.Decoder[dict[int, bytes]] = msgspec.msgpack.Decoder(dict[int, bytes])


def name_of(command: Command) -> str:
    """A command in words, for the watchdog."""
    match command:
        case Train(micro) | Proximal(micro):
            return f"{type(command).__name__} of {len(micro.rows)} samples, {sum(row.tokens for row in micro.rows)} tokens"
        case Save(path) | LoadCheckpoint(path):
            return f"{type(command).__name__} {path}"
    return type(command).__name__


def execute(learner: Learner, saver: Saver, publisher: Publisher, command: Command) -> bytes:
    """This rank's part of a command; returns the frame that rank 0 gets."""
    if isinstance(command, CopyShare | MergeAdapters | Offer) and not learner.mesh.publishes:
        return b""
    match command:
        case Train(micro):
            return _encode(learner.train(micro))
        case Proximal(micro):
            return _encode(learner.proximal(micro))
        case Update(denominator, lr):
            return _encode(learner.update(denominator, lr))
        case Discard():
            learner.discard_gradients()
        case CopyShare(dtype, base):
            return publisher.make(learner, dtype, base=base)
        case MergeAdapters(dtype):
            return _encode(publisher.sums(learner, dtype))
        case Offer(manifest, mark):
            of, mesh = manifests.decode(manifest), learner.mesh
            return _encode(publisher.offer(of, mark, mesh.shard, mesh.shards))
        case Save(path):
            saver.begin(learner.state(), Path(path))
        case LoadCheckpoint(path, updates_taken):
            checkpoint.load_shards(learner, Path(path), updates_taken)
        case ReleaseMemory():
            return _encode(learner.release())
        case NoteEngines():
            learner.note_engines()
        case TakeBack():
            learner.take_back()
        case StopRank():
            saver.wait()
    return b""


def _nothing() -> None:
    """Nothing can be wrong but what commands say themselves."""


def serve(
    comm: Comm,
    learner: Learner,
    publisher: Publisher,
    here: Here | None = None,
    check: Callable[[], None] = _nothing,
) -> None:
    """Every rank but 0: do what rank 0 says until it says stop. `here` is told where it is.

    `check` raises what a thread of this rank's met: before a command, and while there is none. Rank 0 may wait for samples that cannot come
    as long as this rank's weights are not served.
    """
    saver, here = Saver(), here or Here()
    while True:
        with here.at("waiting for rank 0", idle=True):
            command = _commands.decode(comm.receive(check))
        with here.at(name_of(command), command=True):
            frame = execute(learner, saver, publisher, command)
        if isinstance(command, StopRank):
            return
        comm.reply(frame)


class Ranks:
    """Rank 0's end: each method runs one command on all ranks, its own included."""

    def __init__(
        self,
        comm: Comm,
        learner: Learner,
        publisher: Publisher,
        here: Here | None = None,
        *,
        states_merged: bool = True,
    ) -> None:
        """`states_merged`: versions of adapters say what they are merged to; engines that merge nothing compare nothing."""
        self._comm = comm
        self._here = here or Here()
        self._learner = learner
        self._saver = Saver()
        self._publisher = publisher
        self._states_merged = states_merged
        self._base = b""  # root of the base that was built
        self._division = learner.mesh.division

    @property
    def size(self) -> int:
        return self._comm.size

    @property
    def data_parallel(self) -> int:
        """Micro-batches of one round: with context or tensor parallelism several ranks train one together."""
        return self._division.data_parallel

    @property
    def updates_taken(self) -> int:
        return self._learner.updates_taken

    def _all(self, commands: Sequence[Command]) -> list[bytes]:
        with self._here.at(name_of(commands[0]), command=True):
            self._comm.send([_encode(command) for command in commands])
            mine = execute(self._learner, self._saver, self._publisher, commands[0])
        with self._here.at(f"waiting for answers to {name_of(commands[0])}"):
            return [mine, *self._comm.replies()]

    def _each(self, kind: type[Train | Proximal], one_round: Sequence[Micro]) -> list[bytes]:
        """Micro-batch i on all ranks that train it together. One answer a micro-batch: they find the same."""
        together = self._division.together
        return self._all([kind(micro) for micro in one_round for _ in range(together)])[::together]

    def _published(self, command: Command) -> list[bytes]:
        """Answers of the ranks that publish."""
        return self._all([command] * self.size)[: self._division.shards]

    def train(self, one_round: Sequence[Micro]) -> list[RowStats]:
        """One micro-step: a micro-batch for all ranks that train one together. Gradients add to those of the step."""
        return [stats for frame in self._each(Train, one_round) for stats in _row_stats.decode(frame)]

    def proximal(self, one_round: Sequence[Micro]) -> dict[int, bytes]:
        """Logprobs of the completions under the present weights: sample id -> packed float64."""
        found: dict[int, bytes] = {}
        for frame in self._each(Proximal, one_round):
            found |= _logprobs.decode(frame)
        return found

    def update(self, denominator: float, lr: float) -> float:
        """The optimizer step over everything since the last one. Returns the gradient's norm before clipping."""
        return float(msgspec.msgpack.decode(self._all([Update(denominator, lr)] * self.size)[0], type=float))

    def discard(self) -> None:
        """Forget the gradients that were summed since the last update."""
        self._all([Discard()] * self.size)

    @property
    def trains_adapters(self) -> bool:
        return self._learner.adapter_scale != 0.0

    @property
    def tokenizer(self) -> str:
        """Digest of the tokenizer that versions hold, in hex; "" = none."""
        return self._publisher.tokenizer

    def build_base(self, version: int) -> Manifest:
        """The version that adapters are merged with, in the type in which it was stored. It comes before any version of adapters."""
        made = self._publisher.seal(version, self._published(CopyShare(self._learner.base_dtype, base=True)))
        self._base = made.root
        return made

    def build_version(self, version: int, dtype: str) -> Manifest:
        """Every rank casts, copies and hashes its share of the present weights; only hashes travel here.

        Adapters are published as they are trained; `dtype` is what they and their base are to be rounded to.
        """
        if not self.trains_adapters:
            return self._publisher.seal(version, self._published(CopyShare(dtype)))
        if not self._base:
            raise WeightsError(
                f"version {version} holds adapters, and their base was not published", "build the base first"
            )
        own = str(self._learner.dtype).removeprefix("torch.")
        adapter = manifests.Adapter(self._base, self._learner.adapter_scale, dtype)
        digest = b""
        if self._states_merged:
            digest = merged.digest([_sums.decode(frame) for frame in self._published(MergeAdapters(dtype))])
        return self._publisher.seal(version, self._published(CopyShare(own)), adapter, digest)

    def offer(self, manifest: Manifest) -> tuple[messages.WeightSource, ...]:
        """Every rank serves its share of the version that was just built, beside all that follows. Returns who has what, a disk last."""
        frames = self._published(Offer(manifests.encode(manifest), self._publisher.mark()))
        found = [source for frame in frames for source in _sources.decode(frame)]
        return tuple(sorted(found, key=lambda source: source.endpoint.startswith(SCHEME)))

    def release(self) -> int:
        """Every rank gives back the memory of its GPU that engines need. Returns the bytes that all hold yet; 0 on CPUs."""
        return sum(
            msgspec.msgpack.decode(frame, type=int) for frame in self._all([ReleaseMemory()] * self.size)
        )

    def note_engines(self) -> None:
        """Every rank sees how much of its GPU engines take, while they have it."""
        self._all([NoteEngines()] * self.size)

    def take_back(self) -> None:
        """Every rank begins to bring back to its GPU what went away for engines; returns before that is there."""
        self._all([TakeBack()] * self.size)

    def save(self, path: Path) -> None:
        """Begin to write the present parameters and optimizer state; returns when they are copied."""
        self._all([Save(str(path))] * self.size)

    def is_saved(self) -> bool:
        """Whether all ranks have written what `save` began last. Raises `CheckpointFailed`."""
        return self._saver.is_written()

    def wait_saved(self) -> None:
        with self._here.at("waiting for a checkpoint to be written"):
            self._saver.wait()

    def load(self, path: Path, updates_taken: int) -> None:
        self._all([LoadCheckpoint(str(path), updates_taken)] * self.size)

    def stop(self) -> None:
        self._comm.send([_encode(StopRank())] * self.size)
        execute(self._learner, self._saver, self._publisher, StopRank())
