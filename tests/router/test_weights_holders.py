"""The core's directory of weights: engines that hold a version are told to those that need it."""

from __future__ import annotations

import json

from scavenger.protocol.messages import (
    BaseWeights,
    Denied,
    Drain,
    Goodbye,
    Ok,
    PublishVersion,
    Serving,
    UseWeights,
    WeightsFailed,
    WeightsLoaded,
    WeightSource,
    Welcome,
)
from scavenger.router.core import worker_commands
from scavenger.weights.directory import LEAST_WAIT_S, NOT_ENCRYPTED, PEERS
from tests.router.harness import SOURCE, Bench, root, specs, started
from tests.router.moves import W1, W2, finish_all
from tests.router.versions import asked, made

W3 = 13


def engine(number: int, complete: bool = True) -> WeightSource:
    return WeightSource(f"tcp://engine{number}:1", "", b"t", complete=complete)


def encrypted(number: int, complete: bool = True) -> WeightSource:
    return WeightSource(f"tcp://engine{number}:1", f"key{number}", b"t", complete=complete)


def holding(bench: Bench, conn: int, number: int, version: int = 1) -> None:
    bench.join(conn, version)
    bench.say(conn, Serving(version, root(version), engine(number)))
    asked(bench, conn)


def test_a_joiner_is_sent_to_the_trainer_and_to_the_engines_that_hold_the_version() -> None:
    bench = started(n=1)
    bench.hello(W1)
    assert bench.take(W1, Welcome)[0].relay
    assert [m.sources for m in asked(bench, W1)] == [(SOURCE,)]
    bench.say(W1, WeightsLoaded(1, root(1)))
    bench.say(W1, Serving(1, root(1), engine(1)))
    bench.hello(W2)
    assert [m.sources for m in asked(bench, W2)] == [(SOURCE, engine(1))]


def test_one_engine_of_a_cluster_fetches_a_version_for_the_others_of_it() -> None:
    """Which cluster an engine is on its key says. Nothing but the bytes differs: no source is read by NIXL from there."""
    bench = started(n=1, encrypt=True)
    bench.hello(W1, cluster="b")
    bench.hello(W2, cluster="b")
    bench.hello(W3)
    (crosses,), (waits,), (here,) = (asked(bench, conn) for conn in (W1, W2, W3))
    assert [source.last for source in (*crosses.sources, *here.sources)] == [False, False]
    assert [(source.last, source.after_s) for source in waits.sources] == [(True, LEAST_WAIT_S)]
    bench.say(W1, Serving(1, root(1), encrypted(1, complete=False)))
    bench.tick(0.5)
    (more,) = asked(bench, W2)
    assert [(source.endpoint, source.last) for source in more.sources] == [
        (SOURCE.endpoint, True),
        ("tcp://engine1:1", False),
    ]
    bench.say(W1, Goodbye("SIGTERM", True))
    bench.tick(0.5)
    (more,) = asked(bench, W2)
    assert more.sources == (SOURCE,), "it crosses now"


def test_no_engine_of_a_further_cluster_is_told_to_pull_in_the_clear_and_it_leaves_with_the_reason() -> None:
    bench = started(n=1)
    bench.hello(W1, cluster="b")
    bench.hello(W2)
    assert asked(bench, W1) == []
    assert [NOT_ENCRYPTED in one.reason for one in bench.take(W1, Drain)] == [True]
    assert [NOT_ENCRYPTED in one.reason for one in bench.events("hello_refused")] == [True]
    assert len(asked(bench, W2)) == 1, "one of the daemon's own cluster is"


def test_a_run_that_is_opened_again_without_encryption_loses_its_engines_beyond_the_link() -> None:
    bench = started(n=1, encrypt=True)
    bench.join(W1, cluster="b")
    bench.join(W2)
    assert [len(asked(bench, conn)) for conn in (W1, W2)] == [1, 1]
    bench.open()
    bench.publish(2)
    bench.submit(version=2, step=2)
    bench.tick(1.0)
    assert asked(bench, W1) == [], "no order to pull goes there any more"
    assert [NOT_ENCRYPTED in one.reason for one in bench.take(W1, Drain)] == [True]
    assert len(asked(bench, W2)) == 1
    (event,) = bench.events("pull_refused")
    assert NOT_ENCRYPTED in event.reason
    assert json.loads(event.detail) == {"code": "not_encrypted"}


def test_what_an_engine_says_under_another_root_is_not_passed_on() -> None:
    bench = started(n=1)
    bench.join(W1)
    bench.say(W1, Serving(1, root(2), engine(1)))
    bench.say(W1, Serving(9, root(9), engine(1)))
    bench.hello(W2)
    assert [m.sources for m in asked(bench, W2)] == [(SOURCE,)]


def test_a_dead_holder_leaves_at_once() -> None:
    bench = started(n=1)
    holding(bench, W1, 1)
    bench.say(W1, Goodbye("SIGTERM", True))
    bench.hello(W2)
    assert [m.sources for m in asked(bench, W2)] == [(SOURCE,)]


def test_one_that_pulls_hears_of_new_holders_but_not_in_each_moment() -> None:
    bench = started(n=1)
    bench.hello(W2)
    assert len(asked(bench, W2)) == 1
    bench.hello(W1)
    bench.say(W1, Serving(1, root(1), engine(1, complete=False)))
    bench.tick(0.25)
    assert asked(bench, W2) == []
    bench.tick(0.5)
    assert asked(bench, W2) == [UseWeights(1, b"", (SOURCE, engine(1, complete=False)), more=True)]
    bench.tick(1.0)
    assert asked(bench, W2) == []
    bench.say(W2, WeightsLoaded(1, root(1)))
    bench.say(W1, Serving(1, root(1), engine(1)))
    bench.tick(1.0)
    assert asked(bench, W2) == [], "it has the version"


def test_a_joiner_loads_from_engines_while_the_trainer_restarts() -> None:
    bench = started(n=1)
    holding(bench, W1, 1)
    bench.open()
    bench.hello(W2)
    assert [m.sources for m in asked(bench, W2)] == [(engine(1),)]
    bench.say(W1, Goodbye("SIGTERM", True))
    bench.hello(W3)
    assert asked(bench, W3) == [], "nobody holds it: the trainer publishes it again"


def test_what_lies_on_a_disk_outlives_the_trainer() -> None:
    bench = started(n=1)
    disk = WeightSource("file:///spool/version-2", "", b"")
    bench.call(PublishVersion(2, 0, root(2), b"manifest", (SOURCE, disk)))
    bench.open()
    bench.submit(version=2, step=2)
    bench.hello(W1)
    assert [m.sources for m in asked(bench, W1)][-1] == (disk,)


def test_holders_at_the_same_switch_come_first_once_the_topology_is_learnt() -> None:
    bench = started(n=1)
    for number in range(PEERS + 1):  # one more than a receiver is sent to, the nearest last
        conn = 20 + number
        bench.hello(conn, node=f"far{number}" if number < PEERS else "near")
        bench.say(conn, WeightsLoaded(1, root(1)))
        bench.say(conn, Serving(1, root(1), engine(number)))
    bench.router.core.switches.update({"here": "s1", "near": "s1"})
    bench.hello(W2, node="here")
    assert engine(PEERS) in asked(bench, W2)[-1].sources
    bench.restart()
    assert bench.router.core.runs["r"].weights.directory._switches is bench.router.core.switches


def test_a_refused_source_is_told_once_with_its_reason() -> None:
    bench = started(n=1)
    bench.join(W1)
    for _ in range(3):
        bench.say(W1, Serving(1, root(1), WeightSource("file:///dev/zero/weights.bin", "", b"")))
    told = [one for one in bench.ledger.events if one.kind == "serving_refused"]
    assert [one.reason for one in told] == [
        "it names the file ///dev/zero/weights.bin: only a publisher's spool is read from disk"
    ]
    bench.hello(W2)
    assert [m.sources for m in asked(bench, W2)] == [(SOURCE,)]


def test_an_encrypted_run_says_so_to_engines_and_passes_on_no_source_in_the_clear() -> None:
    bench = started(n=1)
    bench.open(encrypt=True)
    disk = WeightSource("file:///spool/version-2/weights.bin", "", b"")
    bench.call(PublishVersion(2, 0, root(2), b"manifest", (SOURCE, disk)))
    bench.open(encrypt=True)
    bench.submit(version=2, step=2)
    bench.hello(W1)
    assert [(m.sources, m.encrypt) for m in asked(bench, W1)][-1] == ((disk,), True), (
        "of the disk alone nobody could tell"
    )
    bench.say(W1, WeightsLoaded(2, root(2)))
    bench.say(W1, Serving(2, root(2), engine(1)))
    bench.hello(W2)
    assert [m.sources for m in asked(bench, W2)][-1] == (disk,)
    bench.restart()
    assert bench.router.core.runs["r"].settings.encrypt, "the ledger has the run's configuration"


def test_the_last_holder_of_a_version_that_is_still_needed_keeps_it() -> None:
    bench = started(n=1)
    bench.join(W2)  # takes the sample of version 1
    holding(bench, W1, 1)
    bench.publish(2, step=1)
    core = bench.router.core
    run, idle = core.runs["r"], core.workers[2]
    worker_commands.steer(core, idle, 2)
    bench.tick()
    assert [m.keep for m in asked(bench, W1) if m.version == 2] == [()], "its trainer serves it"
    idle.weights.asked, run.weights.versions[1].sources = 1, ()
    worker_commands.steer(core, idle, 2)
    bench.tick()
    assert [m.keep for m in asked(bench, W1) if m.version == 2] == [(1,)]


def test_a_failed_pull_frees_the_holders_that_it_was_sent_to() -> None:
    bench = started(n=1)
    holding(bench, W1, 1)
    bench.hello(W2)
    holder = bench.router.core.runs["r"].weights.directory._holders[1][1]
    assert holder.readers == {2}
    bench.say(W2, WeightsFailed(1, "no luck"))
    assert holder.readers == set()


def test_an_old_version_is_forgotten_with_its_holders() -> None:
    bench = started(n=1)
    leases = bench.join(W1)
    bench.say(W1, Serving(1, root(1), engine(1)))
    run = bench.router.core.runs["r"]
    for version in range(2, 8):
        bench.publish(version, step=version)
    assert run.weights.directory.available(1)
    finish_all(bench, W1, leases)
    bench.commit_step(1, [leases[0].sample_id])
    assert not run.weights.directory.available(1)


# ---------------------------------------------------------------- adapters and their base


def with_adapters() -> tuple[Bench, PublishVersion, PublishVersion]:
    """A bench whose run published a base, 1, and adapters, 2, of which one sample is asked."""
    bench = Bench()
    bench.open()
    base = made(1)
    adapters = made(2, base.root)
    assert [bench.call(base), bench.call(adapters)] == [Ok(), Ok()]
    bench.submit(version=2, groups=specs(1, n=1))
    bench.auto = True
    return bench, base, adapters


def test_adapters_come_with_their_base_and_with_those_who_hold_it() -> None:
    bench, base, adapters = with_adapters()
    bench.hello(W1)
    whole = UseWeights(
        2, adapters.manifest, (SOURCE,), base=BaseWeights(1, base.manifest, (SOURCE,), base.root)
    )
    assert asked(bench, W1) == [whole]
    bench.hello(W2)
    asked(bench, W2)
    bench.say(W1, Serving(1, base.root, engine(1)))
    bench.tick(1.0)
    assert asked(bench, W2) == [
        UseWeights(2, b"", (SOURCE,), more=True, base=BaseWeights(1, b"", (SOURCE, engine(1)), base.root))
    ]
    bench.say(W1, WeightsLoaded(2, adapters.root))
    assert len(bench.leases(W1)) == 1


def test_adapters_of_a_base_that_the_run_never_published_are_refused_with_its_hash() -> None:
    bench, _, _ = with_adapters()
    answer = bench.call(made(3, root(9)))
    assert isinstance(answer, Denied)
    assert root(9).hex() in answer.reason
    assert 3 not in bench.router.core.runs["r"].weights.versions


def test_a_joiner_loads_adapters_and_base_from_engines_while_the_trainer_restarts() -> None:
    bench, base, adapters = with_adapters()
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(2, adapters.root))
    bench.say(W1, Serving(2, adapters.root, engine(2)))
    bench.open()
    bench.hello(W2)
    assert asked(bench, W2) == [], (
        "adapters without anybody who has their base: the trainer publishes it again"
    )
    bench.say(W1, Serving(1, base.root, engine(1)))
    bench.hello(W3)
    assert asked(bench, W3) == [
        UseWeights(
            2, adapters.manifest, (engine(2),), base=BaseWeights(1, base.manifest, (engine(1),), base.root)
        )
    ]


def test_the_base_that_a_restarted_trainer_publishes_again_serves_for_the_old_adapters_too() -> None:
    bench, _, adapters = with_adapters()
    bench.open()
    again = made(3)
    bench.call(again)
    bench.call(adapters)
    bench.submit(version=2, groups=specs(1, n=1))
    bench.hello(W1)
    assert asked(bench, W1)[-1].base == BaseWeights(3, again.manifest, (SOURCE,), again.root)


def test_a_worker_that_still_pulls_the_base_hears_of_its_new_number_and_holders() -> None:
    bench, base, _ = with_adapters()
    bench.hello(W1)
    asked(bench, W1)
    again = made(3)
    assert again.root == base.root
    bench.call(again)
    bench.tick(1.0)
    assert asked(bench, W1) == [
        UseWeights(2, b"", (SOURCE,), more=True, base=BaseWeights(3, b"", (SOURCE,), base.root))
    ]


def test_a_base_outlives_the_versions_between_and_a_restart_of_the_daemon() -> None:
    bench, base, adapters = with_adapters()
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(2, adapters.root))
    leases = bench.leases(W1)
    newest = adapters
    for number in range(3, 9):
        newest = made(number, base.root, step=number)
        bench.call(newest)
    finish_all(bench, W1, leases)
    bench.commit_step(1, [leases[0].sample_id], version=2)
    run = bench.router.core.runs["r"]
    assert [v for v, known in run.weights.versions.items() if known.manifest] == [1, 5, 6, 7, 8]
    bench.restart()
    bench.attach()
    bench.call(base)
    bench.call(newest)
    bench.submit(version=8, step=2, groups=specs(1, n=1))
    bench.hello(W2)
    assert asked(bench, W2)[-1].base == BaseWeights(1, base.manifest, (SOURCE,), base.root)
