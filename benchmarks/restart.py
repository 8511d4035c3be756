"""How long a restarted daemon needs before it serves: a ledger with samples in flight is made, then read and rebuilt three times.

    python benchmarks/restart.py [--url postgresql://…] [--samples 100000] [--tokens 1000]

100,000 samples of 1,000 tokens are 100 M tokens in 3.1 M chunks, 1.5 GB on disk; making them takes minutes. Without --url: SQLite in a
temporary directory. A ledger named by --url must be empty, and keeps what was written.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time

import msgspec
import sqlalchemy as sa

from scavenger.ledger import records as rec
from scavenger.ledger import store
from scavenger.ledger.read import reader
from scavenger.ledger.write import transaction
from scavenger.protocol.messages import EngineSpec, Sampling, pack_logprobs, pack_tokens
from scavenger.router.core.machine import Router
from scavenger.router.core.payloads import PayloadStore
from scavenger.router.core.state import RouterLimits

N, ENGINES, CHUNK = 16, 1000, 32
AT = 1_790_000_000.0


def fill(engine: sa.Engine, samples: int, chunks: int) -> None:
    """A run of one step, all of whose samples are leased and have `chunks` chunks."""
    generation = transaction.grant_generation(engine, "host", 1, "benchmark", AT)
    spec = msgspec.json.encode(EngineSpec("reference", "{}", "float32", 128, 8192)).decode()
    sampling = msgspec.json.encode(Sampling(4096)).decode()
    prompt, tokens, logprobs = (
        pack_tokens(range(256)),
        pack_tokens(range(CHUNK)),
        pack_logprobs([-1.0] * CHUNK),
    )
    batch = 0
    with transaction.open_connection(engine) as connection:

        def commit(records: list[rec.Record]) -> None:
            nonlocal batch
            batch += 1
            transaction.commit_batch(connection, generation, batch, records, AT)

        commit(
            [
                rec.RunCreated(1, "r", "owner", 1, "{}", spec, "", AT),
                rec.AttemptGranted(1, 1, "host", 1, 0, "{}", spec, AT),
                rec.VersionPublished(1, 1, 0, 1, b"root", b"manifest", 1, AT),
                *(
                    rec.WorkerJoined(w, 1, "harvested", f"i{w}", f"s{w}", 0, w, f"n{w}", 1, "e", AT)
                    for w in range(1, ENGINES + 1)
                ),
            ]
        )
        for first in range(0, samples // N, 500):
            groups = range(first, min(first + 500, samples // N))
            made = [
                rec.GroupCreated(g + 1, 1, "train", 1, g, 0, 1, prompt, N, g * N + 1, sampling, "{}", AT)
                for g in groups
            ]
            leases = [
                rec.LeaseGranted(s, 1, s % ENGINES + 1, 1, 0, AT)
                for g in groups
                for s in range(g * N + 1, g * N + N + 1)
            ]
            commit([*made, *leases])
        for chunk in range(chunks):
            for first in range(1, samples + 1, 20_000):
                some = range(first, min(first + 20_000, samples + 1))
                commit(
                    [
                        rec.ChunkAccepted(
                            s, 1, CHUNK * chunk, tokens, logprobs, logprobs, 1, s % ENGINES + 1, AT
                        )
                        for s in some
                    ]
                )


def measure(url: str, samples: int, tokens: int) -> None:
    samples -= samples % N
    chunks = -(-tokens // CHUNK)
    store.upgrade(url)
    engine = store.open_engine(url)
    try:
        fill(engine, samples, chunks)
        print(
            f"{samples:,} samples in flight, {samples * chunks * CHUNK:,} tokens in the ledger ({engine.dialect.name})"
        )
        for _ in range(3):
            began, cpu = time.perf_counter(), time.process_time()
            snapshot = reader.read_snapshot(engine)
            read = time.perf_counter()
            router = Router(RouterLimits(), 2, PayloadStore(512 * 2**20))
            router.restore(snapshot, AT)
            done = time.perf_counter()
            assert len(router.core.samples) == samples
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"read {read - began:.2f} s, rebuilt {done - read:.2f} s: serving after {done - began:.2f} s "
                f"({time.process_time() - cpu:.2f} s of it this process), {peak:,.0f} MiB at most"
            )
        for many in (1, 16, 400):
            began = time.perf_counter()
            reader.read_payloads(engine, list(range(samples // 2, samples // 2 + many)))
            print(f"tokens of {many} samples read back in {1000 * (time.perf_counter() - began):.1f} ms")
    finally:
        engine.dispose()


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a restarted daemon needs before it serves.")
    parser.add_argument("--url", default="")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scavenger-restart-") as home:
        measure(options.url or f"sqlite:///{home}/ledger.sqlite3", options.samples, options.tokens)


if __name__ == "__main__":
    main()
