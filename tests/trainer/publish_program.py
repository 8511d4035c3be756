"""One MPI rank of a test: `mpirun -n N python publish_program.py MODEL OUT` publishes a few versions from sharded sources and pulls them.

With all weights trained, with adapters, and with adapters of fewer rows than ranks; the first two with a tokenizer. Each version is
compared with what a gather of all gives; then the last rank stops serving. Chunks are of one page, so that they lie across the ranks'
shards as those of a large model do.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from scavenger.config import AlgorithmSection, LoraSection, OptimizerSection
from scavenger.errors import WeightsError
from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights import spool
from scavenger.weights.manifest import Manifest
from scavenger.weights.memory import Buffer
from scavenger.weights.pull import Pull, host_of
from scavenger.weights.source import WeightServer
from scavenger.weights.spool import Spool
from scavenger.weights.transfer import TransferLimits
from tests.trainer.published import digest_of, gathered
from tests.trainer.rows import make_group
from tests.weights.pulling import link_of
from trainer.algorithms.rows import resolve
from trainer.data.batching import balanced
from trainer.loop.comm import Comm, connect, disconnect, join
from trainer.loop.publish import Publisher
from trainer.loop.ranks import Ranks, serve
from trainer.model.learner import Learner

VERSIONS = 6
DTYPE = "bfloat16"
TOKENIZER = bytes(range(256)) * 79 + b"!"  # over several chunks, and by no number of ranks divisible


class Watched(WeightServer):
    """A source that remembers what it was given."""

    def __init__(self, *, local: bool) -> None:
        super().__init__(deltas=4, local=local)
        self.memory: list[int] = []

    def publish(
        self,
        manifest: Manifest,
        blob: bytes | bytearray | memoryview | Buffer,
        chunks: Sequence[int] | None = None,
    ) -> messages.WeightSource:
        assert isinstance(blob, Buffer)
        self.memory.append(os.fstat(blob.fd).st_ino)
        self.nbytes = os.fstat(blob.fd).st_blocks * 512
        return super().publish(manifest, blob, chunks)


async def pulled(
    manifest: Manifest, sources: Sequence[messages.WeightSource], base: tuple[Manifest, Buffer] | None = None
) -> Pull:
    book = link_of(1e4, *{host_of(source) for source in sources})  # so slow that deltas come first
    work = Pull(manifest, keys.generate(), base=base, limits=TransferLimits(stall_s=2.0), rates=book)
    work.offer(sources)
    await work.finish(20.0)
    return work


def train_and_publish(
    ranks: Ranks, version: int, seed: int
) -> tuple[Manifest, tuple[messages.WeightSource, ...]]:
    if version == 1 and ranks.trains_adapters:
        manifest = ranks.build_base(version)
        return manifest, ranks.offer(manifest)
    for micros in balanced([make_group(seed), make_group(seed + 1)], budget=60, ranks=ranks.size):
        ranks.train(micros)
    ranks.update(8.0, 1e-4)
    manifest = ranks.build_version(version, DTYPE)
    return manifest, ranks.offer(manifest)


def dead(manifest: Manifest, sources: Sequence[messages.WeightSource], blob: Buffer) -> dict[str, object]:
    """The last rank serves no longer: what a receiver says without it, and with another engine that has the version."""
    said = ""
    work = Pull(manifest, keys.generate(), limits=TransferLimits(stall_s=0.5))
    work.offer(sources)
    try:
        asyncio.run(work.finish(2.0))
    except WeightsError as error:
        said = str(error)
    with WeightServer() as engine:
        relayed = asyncio.run(pulled(manifest, [*sources, engine.publish(manifest, blob)]))
    return {"dead": said, "relayed": relayed.buffer.view == blob.view}


def together(comm: Comm) -> None:
    """Nobody goes on before all are here."""
    if comm.rank:
        comm.reply(b"")
        comm.receive()
    else:
        comm.replies()
        comm.send([b""] * comm.size)


def publish(
    comm: Comm, learner: Learner, folder: Path, tokenizer: bytes, *, local: bool
) -> dict[str, object]:
    """All ranks, together. Returns rank 0's findings."""
    found: dict[str, object] = {}
    equal, deltas = [], []
    base: tuple[Manifest, Buffer] | None = None
    with Watched(local=local) as source:
        assert isinstance(source, Watched)
        disk = Spool(folder)
        publisher = Publisher(source, disk, tokenizer)
        sources: Sequence[messages.WeightSource] = ()
        ranks = Ranks(comm, learner, publisher)
        root = b""
        for version in range(1, VERSIONS + 1):
            if comm.rank:
                serve(comm, learner, publisher)
            else:
                manifest, given = train_and_publish(ranks, version, version)
                sources = [one for one in given if one.token]
                ranks.stop()
            theirs, blob = gathered(version, learner, DTYPE, root, tokenizer)
            merged = digest_of(learner, DTYPE) if theirs.adapter is not None else b""
            root = root or theirs.root
            source.wait_deltas()
            together(comm)
            if comm.rank == 0:
                work = asyncio.run(pulled(manifest, sources, base))
                base = (manifest, work.buffer)
                deltas.append(work.deltas)
                equal.append(
                    manifest.root == theirs.root and work.buffer.view == blob and manifest.merged == merged
                )
            together(comm)
        disk.wait()
        told = [source.nbytes, len(set(source.memory))]
        if comm.rank:
            comm.reply(json.dumps(told).encode())
            if comm.rank == comm.size - 1:
                source.close()
            comm.reply(b"")
            comm.receive()
        else:
            all_told = [told, *(json.loads(frame) for frame in comm.replies())]
            comm.replies()
            assert base is not None
            stored, on_disk = spool.read(folder / f"version-{disk.versions()[-1]}")
            found = {
                "equal": equal,
                "deltas": deltas,
                "sources": len(sources),
                "owners": sorted({one.owner for one in base[0].shards}),
                "complete": [one.complete for one in sources],
                "total": base[0].total_nbytes,
                "nbytes": [one for one, _ in all_told],
                "buffers": [count for _, count in all_told],
                "spooled": stored.chunk_hashes == manifests.hashes_of(on_disk, stored.chunk_nbytes),
                "left": [path.name for path in folder.glob(".part-*")],
            }
            if comm.size > 1:
                found |= dead(base[0], sources, base[1])
            comm.send([b""] * comm.size)
    return found


def main(model: str, out: str) -> None:
    manifests.CHUNK_NBYTES = 4096
    comm = connect(idle_poll_ms=5.0)
    mesh = join(comm)
    found = {}
    # LoRA of so many rows that each rank has most of some chunk.
    kinds = {"all": LoraSection(), "lora": LoraSection(rank=64, alpha=128.0)}
    if comm.size > 2:
        kinds["narrow"] = LoraSection(rank=2, alpha=4.0)  # A has two rows: the other ranks have none of it
    for name, lora in kinds.items():
        learner = Learner(
            Path(model),
            mesh,
            recipe=resolve(AlgorithmSection(), 8),
            optimizer=OptimizerSection(lr=1e-4),
            temperature=1.0,
            deterministic=False,
            lora=lora,
        )
        tokenizer = b"" if name == "narrow" else TOKENIZER
        folder = Path(out) / f"spool-{comm.size}" / name
        found[name] = publish(comm, learner, folder, tokenizer, local=name != "all")
    disconnect()
    if comm.rank == 0:
        (Path(out) / f"found-{comm.size}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
