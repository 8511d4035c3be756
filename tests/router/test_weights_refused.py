"""What engines hold is compared with what was published: one that differs gets no sample, a version that none serves stops its run."""

from __future__ import annotations

import pytest

from scavenger.protocol.messages import (
    Denied,
    Drain,
    Goodbye,
    Held,
    Ok,
    Revoke,
    RunStopped,
    WeightsFailed,
    WeightsLoaded,
)
from scavenger.weights import manifest as manifests
from tests.router.harness import Bench
from tests.router.moves import W1, W2
from tests.router.versions import MERGED, OTHER, asked, made, stating, with_stated


def test_an_engine_that_merged_to_what_its_trainer_merged_gets_samples() -> None:
    bench, adapters = with_stated()
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(2, adapters.root, merged=MERGED))
    assert [lease.version for lease in bench.leases(W1)] == [2, 2]
    assert bench.events("weights_refused") == []


@pytest.mark.parametrize(
    ("found", "said"),
    [(OTHER, f"({OTHER.hex()[:16]})"), (b"", "(says nothing of its sum)")],
    ids=["other", "none"],
)
def test_an_engine_that_merged_to_other_weights_gets_no_sample_and_leaves_with_cause_and_remedy(
    found: bytes, said: str
) -> None:
    bench, adapters = with_stated()
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(2, adapters.root, merged=found))
    assert bench.leases(W1) == []
    (event,) = bench.events("weights_refused")
    assert f"version 2 to other weights {said} than its trainer ({MERGED.hex()[:16]})" in event.reason
    assert "run engines and trainer of one release" in event.reason
    (drained,) = bench.take(W1, Drain)
    assert drained.reason == event.reason, "its own log says which, too"
    bench.hello(W2)
    bench.say(W2, WeightsLoaded(2, adapters.root, merged=MERGED))
    assert len(bench.leases(W2)) == 2, "others serve the run"


def test_what_was_merged_is_compared_again_at_each_registration_also_after_a_restart_of_the_daemon() -> None:
    bench, adapters = with_stated()
    bench.restart()
    bench.attach()
    base = made(1)
    assert [bench.call(base), bench.call(adapters)] == [Ok(), Ok()]
    bench.hello(W1, loaded=2, loaded_root=adapters.root, loaded_merged=OTHER)
    assert [order.version for order in asked(bench, W1)] == [2], (
        "not believed: it is asked to load, and to say what it has"
    )
    bench.say(W1, WeightsLoaded(2, adapters.root, merged=OTHER))
    assert bench.leases(W1) == []
    assert len(bench.take(W1, Drain)) == 1
    bench.hello(W2, loaded=2, loaded_root=adapters.root, loaded_merged=MERGED)
    assert asked(bench, W2) == []
    assert [lease.version for lease in bench.leases(W2)] == [2, 2]


def test_a_restored_ledger_knows_what_was_merged_before_its_trainer_is_back() -> None:
    bench, adapters = with_stated()
    bench.restart()
    assert bench.router.core.runs["r"].weights.unproved(2, adapters.root, MERGED) == ""
    assert "other weights" in bench.router.core.runs["r"].weights.unproved(2, adapters.root, OTHER)


def test_the_same_adapters_are_not_published_as_merged_to_something_else() -> None:
    bench, adapters = with_stated()
    answer = bench.call(stating(2, made(1).root, OTHER))
    assert isinstance(answer, Denied)
    assert f"merged to {MERGED.hex()[:16]}" in answer.reason
    assert f"to {OTHER.hex()[:16]}" in answer.reason
    bench.hello(W1)
    (order,) = asked(bench, W1)
    assert manifests.merged_of(order.manifest) == MERGED
    bench.say(W1, WeightsLoaded(2, adapters.root, merged=OTHER))
    assert bench.leases(W1) == []


def test_what_adapters_are_merged_to_stays_stated_when_they_are_published_again_without_it() -> None:
    bench, adapters = with_stated()
    assert bench.call(made(2, made(1).root)) == Ok()
    bench.hello(W1)
    (order,) = asked(bench, W1)
    assert manifests.decode(order.manifest) == manifests.decode(adapters.manifest), (
        "engines still have what to compare with"
    )
    bench.say(W1, WeightsLoaded(2, adapters.root))
    assert bench.leases(W1) == []
    bench.hello(W2)
    bench.say(W2, WeightsLoaded(2, adapters.root, merged=MERGED))
    assert len(bench.leases(W2)) == 2


def test_what_adapters_are_merged_to_may_be_stated_later() -> None:
    bench, adapters = with_stated()
    bench.call(made(3, made(1).root))
    assert bench.call(stating(3, made(1).root, MERGED)) == Ok()
    assert "other weights" in bench.router.core.runs["r"].weights.unproved(
        3, made(3, made(1).root).root, OTHER
    )
    assert adapters.version == 2


def test_a_returning_engine_keeps_no_lease_of_weights_that_are_not_as_published() -> None:
    bench, adapters = with_stated()
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(2, adapters.root, merged=MERGED))
    leases = bench.leases(W1)
    bench.chunk(W1, leases[0], 0, 3)
    held = tuple(Held(lease.sample_id, lease.epoch, 5) for lease in leases)
    bench.hello(W1, loaded=2, loaded_root=adapters.root, loaded_merged=OTHER, held=held)
    (revoked,) = bench.take(W1, Revoke)
    assert revoked.leases == tuple((lease.sample_id, lease.epoch) for lease in leases)
    assert "other weights" in bench.events("stale_leases")[-1].reason
    bench.chunk(W1, leases[0], 3, 2)
    assert bench.sample(leases[0].sample_id).accepted == 3, "what those weights made since is not taken"
    bench.hello(W2)
    bench.say(W2, WeightsLoaded(2, adapters.root, merged=MERGED))
    assert len(bench.leases(W2)) == 2, "another goes on with them"


def test_a_returning_engine_keeps_what_it_ended_with_the_weights_before_those_in_doubt() -> None:
    bench, adapters = with_stated()
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(2, adapters.root, merged=MERGED))
    (first, _) = bench.leases(W1)
    later = stating(3, made(1).root, MERGED)
    bench.call(later)
    bench.hello(
        W1,
        loaded=3,
        loaded_root=later.root,
        loaded_merged=OTHER,
        held=(Held(first.sample_id, first.epoch, 2),),
    )
    bench.chunk(W1, first, 0, 2, finish="stop")
    assert bench.sample(first.sample_id).finish == "stop"


# ---------------------------------------------------------------- what no engine serves


def refusing(bench: Bench, conn: int, version: int = 2, **how: object) -> None:
    bench.hello(conn, **how)  # type: ignore[arg-type]
    bench.say(
        conn,
        WeightsFailed(
            version, f"version {version} was merged here to other weights\n  remedy: suspect", refused=True
        ),
    )


def stopped(bench: Bench) -> list[RunStopped]:
    return bench.take(bench.trainer, RunStopped)


def test_a_version_that_engines_on_enough_nodes_refuse_stops_its_run_with_cause_and_remedy() -> None:
    bench, _ = with_stated()
    bench.hello(50)  # one that still pulls
    refusing(bench, W1)
    refusing(bench, W2)
    assert stopped(bench) == [], "two nodes may have bad memory"
    refusing(bench, 14)
    (told,) = stopped(bench)
    last = "version 2 was merged here to other weights"
    assert told.reason == f"version 2 is served by no engine: 3 on 3 node(s) refused it, the last: {last}"
    assert "start the training job again" in told.remedy
    assert "one release" in told.remedy
    (event,) = bench.events("version_refused")
    assert (event.subject, event.reason) == ("version 2", told.reason)
    refusing(bench, 15)
    assert (stopped(bench), len(bench.events("version_refused"))) == ([], 1), "said once"
    bench.attach()
    assert stopped(bench) == [told], "and to its trainer when it comes back"


def test_two_engines_on_two_nodes_stop_a_run_that_has_no_others() -> None:
    bench, _ = with_stated()
    refusing(bench, W1)
    refusing(bench, W2)
    assert len(stopped(bench)) == 1


def test_one_node_alone_stops_a_run_after_many_lives_of_its_engine() -> None:
    bench, _ = with_stated()
    for life in range(9):
        assert stopped(bench) == [], life
        refusing(bench, 20 + life, node="n1")
        bench.say(20 + life, WeightsFailed(2, "again", refused=True))
        bench.say(20 + life, Goodbye("merged twice to other weights", notice=False, failed=True))
    assert len(stopped(bench)) == 1


@pytest.mark.parametrize("registers", [False, True], ids=["loads it", "registers with it"])
def test_a_version_that_one_engine_holds_as_published_stops_no_run(registers: bool) -> None:
    bench, adapters = with_stated()
    refusing(bench, W1)
    refusing(bench, W1)  # one engine is one, however often it tries
    if registers:
        bench.hello(W2, loaded=2, loaded_root=adapters.root, loaded_merged=MERGED)
    else:
        bench.hello(W2)
        bench.say(W2, WeightsLoaded(2, adapters.root, merged=MERGED))
    for conn in range(30, 40):
        refusing(bench, conn)
    assert stopped(bench) == []


def test_weights_that_did_not_come_stop_no_run() -> None:
    bench, _ = with_stated()
    for conn in range(30, 45):
        bench.hello(conn)
        bench.say(conn, WeightsFailed(2, "no holder answered"))
    assert stopped(bench) == []


def test_engines_that_claim_to_serve_other_weights_count_as_refusing() -> None:
    bench, adapters = with_stated()
    for conn in (30, 31, 32):
        bench.hello(conn)
        bench.say(conn, WeightsLoaded(2, adapters.root, merged=OTHER))
    assert "other weights" in stopped(bench)[0].reason


def test_the_next_trainer_of_a_run_that_was_stopped_so_goes_on() -> None:
    bench, _ = with_stated()
    for conn in (30, 31, 32):
        refusing(bench, conn)
    assert len(stopped(bench)) == 1
    bench.open()
    bench.attach()
    assert stopped(bench) == []


@pytest.mark.parametrize(
    "names_root", [False, True], ids=["of an older release", "loaded before the digest was stated"]
)
def test_a_returning_engine_that_says_nothing_of_its_weights_keeps_what_it_is_at(names_root: bool) -> None:
    bench, adapters = with_stated()
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(2, adapters.root, merged=MERGED))
    leases = bench.leases(W1)
    held = tuple(Held(lease.sample_id, lease.epoch, 0) for lease in leases)
    bench.hello(W1, loaded=2, held=held, loaded_root=adapters.root if names_root else b"")
    assert bench.take(W1, Revoke) == []
    bench.chunk(W1, leases[0], 0, 3)
    assert bench.sample(leases[0].sample_id).accepted == 3


def test_a_digest_that_is_stated_later_and_that_no_engine_reaches_stops_the_run_too() -> None:
    bench, adapters = with_stated()
    bare = made(3, made(1).root)
    bench.call(bare)
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(3, bare.root))
    assert bench.call(stating(3, made(1).root, OTHER)) == Ok()
    for conn in (30, 31, 32):
        refusing(bench, conn, version=3)
    assert "version 3 is served by no engine" in stopped(bench)[0].reason
    assert adapters.version == 2


def test_a_version_that_is_announced_again_as_it_was_stays_proved() -> None:
    bench, adapters = with_stated()
    bench.hello(W1)
    bench.say(W1, WeightsLoaded(2, adapters.root, merged=MERGED))
    for again in (adapters, made(2, made(1).root)):
        assert bench.call(again) == Ok()
    for conn in (30, 31, 32):
        refusing(bench, conn)
    assert stopped(bench) == []
