"""Only events change the core: their log, each with its time, makes an equal core again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from scavenger.client import Client
from scavenger.config import DaemonConfig
from scavenger.daemon import main
from scavenger.policy import registry
from scavenger.policy.fallback import with_fallback
from scavenger.policy.warm_start import facts
from scavenger.protocol import keys
from scavenger.protocol.messages import WeightsLoaded
from scavenger.router.core.events import GarbageReceived, IntentRevoked, PastRead, PeerIdentity, TopologyRead
from scavenger.router.edge.server import KeyRing
from tests.router import schedule
from tests.router.edge import ScriptedWorker
from tests.router.harness import SPEC, root, specs, started
from tests.router.moves import W1, W2, finish_all
from tests.router.replay import dump, recording, replayed
from tests.router.test_edge import check_groups, collect, config_of, publish
from tests.router.test_warm_start import played


def failed(run: str, error: Exception) -> None:
    raise AssertionError(f"the policy of {run} failed") from error


@pytest.mark.parametrize("seed", range(12))
def test_the_log_of_a_random_schedule_makes_an_equal_core(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each life of its daemon, with every fault that it met."""
    cores = recording(monkeypatch, "tests.router.harness")
    schedule.run(seed, 200)
    assert sum(len(core.log) for core in cores) > 100
    for core in cores:
        assert dump(replayed(core)) == dump(core)


def test_the_log_of_a_run_with_a_policy_that_learns_makes_an_equal_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = recording(monkeypatch, "tests.router.harness")
    bench = started(prompts=4)
    bench.restart()
    core = cores[-1].core
    core.new_policy = cores[-1].policy_of = with_fallback(registry.named("predictive", 1.0), failed)
    run = core.runs["r"]
    untaught = run.policy
    bench.handle(PastRead({run.id: tuple(facts(played()))}))
    assert run.policy is not untaught
    bench.handle(TopologyRead((("n11", "s1"), ("n12", "s2"))))
    assert core.switches == {"n11": "s1", "n12": "s2"}
    bench.handle(GarbageReceived("key", "no message"))
    assert (core.nonsense["key"], len(bench.events("garbage"))) == (1, 1)
    bench.hello(W1)
    bench.open()
    bench.publish(2, 1)
    bench.submit(1, 2)
    leases = bench.join(W1, 2)
    (wanted,) = bench.router.demand(bench.now)
    assert wanted.engines > 0
    bench.tick(2.0)
    bench.join(W2, 2)
    finish_all(bench, W1, leases)
    bench.handle(IntentRevoked(f"job{W2}", "other users wait"))
    bench.router.demand(bench.now)
    bench.say(W1, WeightsLoaded(2, root(2)))
    bench.tick(30.0)
    seen = cores[-1].kinds()
    assert {"LedgerRead", "PastRead", "TopologyRead", "GarbageReceived", "DemandAsked", "CoreTick"} <= seen
    for recorder in cores:
        assert dump(replayed(recorder)) == dump(recorder)


def test_a_core_that_was_changed_beside_its_events_is_not_equal_to_its_log_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the tests above could not fail."""
    cores = recording(monkeypatch, "tests.router.harness")
    bench = started()
    finish_all(bench, W1, bench.join(W1))
    (recorder,) = cores
    assert dump(replayed(recorder)) == dump(recorder)
    bench.router.core.switches["n"] = "s"
    assert dump(replayed(recorder)) != dump(recorder)
    del bench.router.core.switches["n"]
    bench.router.core.runs["r"].settings.max_engines += 1
    assert dump(replayed(recorder)) != dump(recorder)


def test_the_log_of_a_daemon_and_of_the_one_after_it_makes_equal_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole daemons with sockets and a ledger: one is told to stop in the middle of a step, and what it learned is learned again."""
    cores = recording(monkeypatch, "scavenger.daemon.main")
    keys.init_state(tmp_path, "ada")
    daemon = {"state_dir": tmp_path, "listen": "127.0.0.1", "heartbeat_s": 0.2}
    config = DaemonConfig.model_validate(
        {"daemon": daemon, "harvest": {"enabled": False}, "router": {"policy": "predictive"}}
    )

    def first(keyring: KeyRing) -> None:
        engine = engine_of(keyring)
        with Client.connect(tmp_path) as client:
            run = client.open_run(config_of(tmp_path), engine=SPEC, tokenizer="", resume_step=0)
            publish(run, 1)
            engine.start()
            run.submit(1, 1, specs(4, 2))
            run.commit(1, 1, check_groups(collect(run, 4)), {"seconds": 1.0})
            run.submit(2, 1, specs(4, 4))
            collect(run, 1)
        stopped(engine)

    def second(keyring: KeyRing) -> None:
        engine = engine_of(keyring)
        with Client.connect(tmp_path) as client:
            run = client.open_run(config_of(tmp_path), engine=SPEC, tokenizer="", resume_step=1)
            version = run.next_version
            publish(run, version, 1)
            engine.start()
            run.submit(2, version, specs(4, 4))
            run.commit(2, version, check_groups(collect(run, 4)), {})
        stopped(engine)

    def engine_of(keyring: KeyRing) -> ScriptedWorker:
        pair = keys.generate("r", "j")
        keyring.allow(pair.public, PeerIdentity("worker", pair.public, "r", "j"))
        return ScriptedWorker(tmp_path, pair, f"s{len(cores)}")

    def stopped(engine: ScriptedWorker) -> None:
        engine.halt.set()
        engine.join(10)
        assert engine.error is None

    async def live(work: Callable[[KeyRing], None]) -> None:
        one = main.Daemon(config, None)
        serving = asyncio.create_task(one.run())
        while not (tmp_path / "rendezvous.json").exists() and not serving.done():
            await asyncio.sleep(0.01)
        try:
            await asyncio.to_thread(work, one.keyring)
            cores[-1].demand(one.clock())
        finally:
            one.stop.set()
            await serving
        (tmp_path / "rendezvous.json").unlink()

    asyncio.run(live(first))
    asyncio.run(live(second))
    assert len(cores) == 2
    assert {"LedgerRead", "PastRead", "HelloReceived", "TrainerCalled", "Committed"} <= cores[1].kinds()
    for core in cores:
        assert dump(replayed(core)) == dump(core)
