"""Engines that die, hang, or lose their trainer: what counts against a sample, and what a run that nobody trains may hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from scavenger.config import DaemonConfig
from scavenger.policy.agreement import AgreementRules
from scavenger.protocol.messages import Drain, Goodbye, Heartbeat, Held, Rejected, Revoke, RunStopped
from scavenger.router.core.events import JobGone
from scavenger.router.core.state import RouterLimits
from scavenger.router.core.transitions import SampleStatus, WorkerStatus
from tests.router.harness import Bench, started
from tests.router.moves import W1, W2, one_lease


def test_an_engine_that_dies_with_words_counts_against_its_samples_once() -> None:
    """The worker says Goodbye(failed) before it exits; then Slurm reports the job."""
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    bench.say(W1, Goodbye("the engine died: CUDA error", False, failed=True))
    bench.handle(JobGone(f"job{W1}", 0, "FAILED", crashed=True))
    sample = bench.sample(1)
    assert (sample.failures, sample.failed_nodes, sample.accepted) == (1, {f"n{W1}"}, 3)
    bench.join(W2)
    bench.say(W2, Goodbye("SIGTERM", True))
    assert bench.sample(1).failures == 1, "one that was told to leave killed nothing"


def test_nodes_of_one_name_on_two_clusters_are_two() -> None:
    """By the key of its job, not by its word: no node's name has a slash."""
    bench = started(n=1, poison_after=3, encrypt=True)
    for conn, cluster in ((21, ""), (22, "b")):
        assert len(bench.join(conn, node="n1", cluster=cluster)) == 1
        bench.say(conn, Goodbye("the engine died: CUDA error", False, failed=True))
        bench.handle(JobGone(f"job{conn}", 0, "FAILED", crashed=True))
    assert bench.sample(1).failed_nodes == {"n1", "b/n1"}
    bench.hello(23, node="c/n1")
    assert bench.take(23, Rejected)


@pytest.mark.parametrize("on_poison", ["stop", "mask"])
def test_a_sample_that_kills_engines_on_poison_after_nodes_is_poisoned(on_poison: str) -> None:
    bench = started(n=1, poison_after=3, on_poison=on_poison)
    for conn in (21, 22, 23):
        assert len(bench.join(conn)) == 1
        bench.say(conn, Goodbye("the engine died: CUDA error", False, failed=True))
        bench.handle(JobGone(f"job{conn}", 0, "FAILED", crashed=True))
    assert bench.ledger.samples[1].state == "poisoned"
    assert bool(bench.take(1, RunStopped)) == (on_poison == "stop")
    assert bench.join(24) == []


def reserved(bench: Bench, conn: int, slot: str = "0", node: str = "") -> int:
    """How many leases a reserved engine is given."""
    return len(bench.join(conn, kind="reserved", slot=slot, node=node))


def test_a_new_process_in_a_reserved_slot_proves_that_the_one_before_crashed() -> None:
    bench = started(n=1)
    assert reserved(bench, W1, "0", "a") == 1
    assert reserved(bench, W2, "1", "b") == 0, "another slot proves nothing"
    assert bench.sample(1).failures == 0
    reserved(bench, 30, "0", "a")
    assert (bench.sample(1).failures, bench.sample(1).failed_nodes) == (1, {"a"})
    assert bench.sample(1).worker_id == 2


def test_a_reserved_engine_that_left_with_words_or_came_back_did_not_crash() -> None:
    bench = started(n=1)
    reserved(bench, W1)
    bench.hello(30, kind="reserved", session=f"s{W1}", slot="0", held=(Held(1, 1, 0),), loaded=1)
    assert bench.sample(1).status is SampleStatus.LEASED
    bench.say(30, Goodbye("SIGTERM", True))
    reserved(bench, 31)
    assert bench.sample(1).failures == 0


def test_a_reserved_engine_that_was_given_up_for_its_silence_is_charged_when_its_slot_is_filled_again() -> (
    None
):
    bench = started(n=1, poison_after=1)
    reserved(bench, W1)
    bench.tick(13.0)
    assert bench.sample(1).failures == 0, "it may be the network"
    reserved(bench, 30)
    assert bench.ledger.samples[1].state == "poisoned"


def test_reserved_engines_that_died_with_their_trainer_count_against_nobody() -> None:
    bench = started(n=1)
    reserved(bench, W1)
    bench.open()
    bench.publish(2, root_of=1)
    reserved(bench, 30)
    assert all(s.failures == 0 for s in bench.router.core.samples.values())


# ---------------------------------------------------------------- engines that hang


def beat(bench: Bench, conn: int, seconds: float, length: int = 0, progress: int = 0, epoch: int = 1) -> None:
    for _ in range(int(seconds)):
        bench.tick(1.0, 1.0)
        held = (
            (Held(1, epoch, length),)
            if any(w.conn == conn and w.leases for w in bench.router.core.workers.values())
            else ()
        )
        bench.say(conn, Heartbeat(held, progress, 1))


def test_an_engine_that_answers_and_moves_nothing_loses_its_samples_and_leaves() -> None:
    bench, lease = one_lease()
    bench.chunk(W1, lease, 0, 3)
    beat(bench, W1, 290, 3)
    assert bench.sample(1).status is SampleStatus.LEASED
    beat(bench, W1, 15, 3)
    sample = bench.sample(1)
    assert (sample.status, sample.accepted, sample.failures) == (SampleStatus.QUEUED, 3, 1)
    assert bench.router.core.workers[1].status is WorkerStatus.DRAINING
    assert (1, 1) in [x for m in bench.take(W1, Revoke) for x in m.leases]
    assert "stalled" in bench.take(W1, Drain)[0].reason
    assert len(bench.events("engine_stalled")) == 1
    (moved,) = bench.join(W2)
    assert moved.epoch == 2


@pytest.mark.parametrize("moving", ["progress", "length", "chunks"])
def test_an_engine_that_is_slow_but_moves_keeps_its_samples(moving: str) -> None:
    bench, lease = one_lease()
    for turn in range(6):
        beat(bench, W1, 200, turn if moving == "length" else 0, turn if moving == "progress" else 0)
        if moving == "chunks":
            bench.chunk(W1, lease, turn, 1)
    assert bench.sample(1).status is SampleStatus.LEASED
    assert bench.events("engine_stalled") == []


def test_a_disk_that_stands_still_makes_no_engine_stall() -> None:
    bench, lease = one_lease()
    bench.auto = False
    bench.chunk(W1, lease, 0, 3)
    beat(bench, W1, 700, 3)
    bench.auto = True
    bench.settle()
    beat(bench, W1, 100, 3)
    assert bench.sample(1).status is SampleStatus.LEASED


# ---------------------------------------------------------------- a trainer that is gone


def test_a_dead_trainers_queue_harvests_nothing_after_a_while() -> None:
    bench = started(n=2)
    bench.tick(599.0, 1.0)
    (wanted,) = bench.router.demand(bench.now)
    assert wanted.engines > 0, "its samples wait, and it may come back"
    bench.tick(2.0)
    (wanted,) = bench.router.demand(bench.now)
    assert wanted.engines == 0
    assert "taken for dead" in wanted.reason


def test_the_daemon_passes_every_limit_of_its_configuration(tmp_path: Path) -> None:
    keys = {
        "heartbeat_s": 0.5,
        "suspect_s": 5.0,
        "dead_s": 13.0,
        "reconnect_s": 16.0,
        "flush_ms": 50.0,
        "flush_tokens": 8,
        "trainer_silent_s": 61.0,
        "trainer_gone_s": 601.0,
        "engine_stalled_s": 301.0,
    }
    options = ("speculative_config",)
    config = {
        "daemon": {"state_dir": tmp_path, **keys},
        "harvest": {"vllm_options": options, "max_nodes_per_engine": 3},
        "router": {
            "sibling_bytes_per_s": 4096,
            "share_prompts": True,
            "disagreement": "report",
            "disagreement_ratio": 4.0,
            "disagreement_samples": 20,
        },
    }
    limits = RouterLimits.of(DaemonConfig.model_validate(config))
    rules = AgreementRules(samples=20, ratio=4.0)
    found = tuple(getattr(limits, field.name) for field in dataclasses.fields(limits))
    assert found == (*keys.values(), options, "report", rules, 3, 4096, True)
