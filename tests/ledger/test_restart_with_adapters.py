"""A daemon that restarts while the trainer is away reads from the ledger what adapters are merged with: engines that hold both serve on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scavenger.protocol.messages import (
    BaseWeights,
    CloseRun,
    Ok,
    PublishVersion,
    Serving,
    UseWeights,
    WeightsLoaded,
    WeightSource,
)
from scavenger.router.core.transitions import WorkerStatus
from scavenger.weights import manifest as manifests
from tests.ledger.conftest import new_database
from tests.router.harness import SOURCE, Bench, specs
from tests.router.memory_ledger import Ledger, StoredLedger

JOINER, WITH_7, WITH_8 = 11, 12, 13
LAST = 8


def made(number: int, base: bytes = b"") -> PublishVersion:
    """A version as a trainer publishes it: adapters where `base` names what they are merged with. All bases are equal."""
    adapter = manifests.Adapter(base, 2.0, "bfloat16") if base else None
    manifest, _ = manifests.build(
        number, {"w": ("int8", (1,), memoryview(bytes([number if base else 0])))}, adapter=adapter
    )
    return PublishVersion(number, max(0, number - 2), manifest.root, manifests.encode(manifest), (SOURCE,))


def holder(number: int) -> WeightSource:
    return WeightSource(f"tcp://engine{number}:1", "", b"t")


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """The bench's own ledger, in memory, is held to what the databases keep: other tests' restarts are as hard as real ones."""
    if request.param == "memory":
        yield Ledger()
        return
    sqlite = request.param == "sqlite"
    stored = StoredLedger(
        request.getfixturevalue("sqlite_url") if sqlite else new_database(request.getfixturevalue("postgres"))
    )
    yield stored
    stored.close()


def restarted(
    ledger: Ledger, *, samples_of: int, base_again_as: int = 0
) -> tuple[Bench, dict[int, PublishVersion]]:
    """A run with a base and adapters until `LAST`, and samples that wait; then the daemon restarted, and the trainer is not there.

    `base_again_as`: the number, between those of the adapters, under which a trainer that had restarted published the base once more.
    """
    bench = Bench()
    bench.ledger = ledger
    bench.open()
    versions = {1: made(1)}
    for number in range(2, LAST + 1):
        versions[number] = made(number, b"" if number == base_again_as else versions[1].root)
    for body in versions.values():
        assert bench.call(body) == Ok()
    bench.submit(version=samples_of, groups=specs(4, n=1))
    bench.restart()
    return bench, versions


def registers(
    bench: Bench, conn: int, versions: dict[int, PublishVersion], serves: tuple[int, ...], loaded: int = -1
) -> None:
    """An engine finds the new daemon, and says what it serves and what it has loaded."""
    bench.hello(conn, loaded=loaded)
    for number in serves:
        bench.say(conn, Serving(number, versions[number].root, holder(conn)))
    if loaded >= 0:
        bench.say(conn, WeightsLoaded(loaded, versions[loaded].root))


def test_the_newest_manifests_and_those_of_their_bases_are_read_and_no_others(ledger: Ledger) -> None:
    bench, versions = restarted(ledger, samples_of=8, base_again_as=3)
    known = bench.router.core.runs["r"].weights.versions
    assert {v: found.manifest for v, found in known.items() if found.manifest} == {
        v: versions[v].manifest for v in (1, 3, 5, 6, 7, 8)
    }
    assert [known[v].base for v in (1, 3, 8)] == [b"", b"", versions[1].root]


def test_an_ended_run_comes_without_its_bases(ledger: Ledger) -> None:
    bench, _ = restarted(ledger, samples_of=8)
    bench.open()
    assert bench.call(CloseRun("finished")) == Ok()
    bench.restart()
    assert not any(found.manifest for found in bench.router.core.runs["r"].weights.versions.values())


def test_a_joiner_gets_adapters_and_base_from_engines_while_the_trainer_is_away(ledger: Ledger) -> None:
    bench, versions = restarted(ledger, samples_of=8)
    registers(bench, WITH_8, versions, (1, 8), loaded=8)
    registers(bench, JOINER, versions, ())
    base = BaseWeights(1, versions[1].manifest, (holder(WITH_8),), versions[1].root)
    assert bench.take(JOINER, UseWeights) == [
        UseWeights(8, versions[8].manifest, (holder(WITH_8),), base=base)
    ]


def test_an_engine_with_the_version_that_samples_wait_for_generates_on_while_the_trainer_is_away(
    ledger: Ledger,
) -> None:
    bench, versions = restarted(ledger, samples_of=7)
    registers(bench, WITH_8, versions, (1, 8), loaded=8)
    registers(bench, WITH_7, versions, (1, 7), loaded=7)
    bench.tick()
    leases = bench.leases(WITH_7)
    assert [lease.version for lease in leases] == [7] * 4
    workers = bench.router.core.runs["r"].workers.values()
    assert [w.status for w in workers if w.weights.loaded == 7] == [WorkerStatus.READY]
