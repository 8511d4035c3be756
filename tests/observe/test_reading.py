"""The figures of a run, as the exporter reads them from the router's own tables."""

from __future__ import annotations

from scavenger.observe import reading
from scavenger.observe.tally import Tally
from scavenger.policy.fleet_size import Demand
from scavenger.protocol.messages import Heartbeat, Held
from scavenger.router.core.worker_counts import fleet_of
from tests.observe.test_status import SEEN
from tests.router.moves import W1, one_lease


def test_engines_samples_versions_and_progress_are_the_core_s() -> None:
    bench, lease = one_lease()
    core = bench.router.core
    (run,) = core.runs.values()
    before = reading.take(
        SEEN,
        core,
        Tally(),
        0.0,
        [Demand(run.id, run.name, 7, 1, "")],
        {"": {"squeue": 5, "scontrol": 10}},
        {"": 2},
    ).values
    assert before["engines"] == {(run.name, "harvested", "ready"): 1}
    assert before["engines_wanted"][run.name,] == 7
    in_flight = {state: count for (_, state), count in before["samples_in_flight"].items()}
    assert in_flight["leased"] == 1
    assert sum(in_flight.values()) == len(core.samples)
    assert before["weights_version"][run.name,] == 1
    assert before["slurm_rpcs"] == {("scontrol", ""): 10, ("squeue", ""): 5}
    assert before["quarantined_nodes"][("",)] == 2

    bench.now += 50.0
    bench.chunk(W1, lease, 0, 2)
    after = reading.take(SEEN, core, Tally(), 0.0, (), {}, {}).values
    assert after["run_progress_timestamp_seconds"][run.name,] == bench.now, "a token is progress"
    assert after["slurm_rpcs"] == {}, "nothing was asked"

    core.workers[next(iter(core.workers))].suspect = True
    assert reading.take(SEEN, core, Tally(), 0.0, (), {}, {}).values["engines"] == {
        (run.name, "harvested", "suspect"): 1
    }


def test_drafts_are_counted_over_engines_that_come_and_go() -> None:
    bench, lease = one_lease()
    core = bench.router.core
    (run,) = core.runs.values()

    def counted() -> tuple[float, ...]:
        values = reading.take(SEEN, core, Tally(), 0.0, (), {}, {}).values
        return tuple(
            values[name][run.name,] for name in ("drafted_tokens", "accepted_drafts", "verifications")
        )

    def beat(drafted: int, accepted: int, verifications: int) -> None:
        held = (Held(lease.sample_id, lease.epoch, 0),)
        totals = (drafted, accepted, verifications)
        bench.say(W1, Heartbeat(held, 0, 1, 0.0, 0, 0.0, "awake", 0, 0, 0.0, -1, *totals))

    assert counted() == (0, 0, 0)
    beat(20, 11, 5)
    beat(20, 11, 5)
    assert counted() == (20, 11, 5), "totals, not increments"
    beat(30, 17, 8)
    assert counted() == (30, 17, 8)
    beat(0, 0, 0)
    beat(4, 1, 1)
    assert counted() == (34, 18, 9), (
        "what says that it shrank is another engine, or lies: a counter never shrinks"
    )


def test_what_engines_drafted_before_a_daemon_began_is_not_counted_by_it() -> None:
    bench, lease = one_lease()

    def beat(conn: int, drafted: int, accepted: int, verifications: int) -> None:
        totals = (drafted, accepted, verifications)
        held = (Held(lease.sample_id, lease.epoch, 0),)
        bench.say(conn, Heartbeat(held, 0, 1, 0.0, 0, 0.0, "awake", 0, 0, 0.0, -1, *totals))

    beat(W1, 20, 11, 5)
    bench.restart()
    bench.hello(W1, held=(Held(lease.sample_id, lease.epoch, 0),), loaded=1)
    beat(W1, 20, 11, 5)
    beat(W1, 24, 13, 6)
    (run,) = bench.router.core.runs.values()
    assert (run.speculated.drafted, run.speculated.accepted, run.speculated.verifications) == (4, 2, 1)
    fleet = fleet_of(run)
    assert (fleet.drafted, fleet.accepted, fleet.verifications) == (4, 2, 1), "its trainer is told the same"
