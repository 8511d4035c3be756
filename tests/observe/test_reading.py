"""The figures of a run, as the exporter reads them from the router's own tables."""

from __future__ import annotations

from scavenger.observe import reading
from scavenger.observe.tally import Tally
from scavenger.policy.fleet_size import Demand
from tests.observe.test_status import SEEN
from tests.router.moves import W1, one_lease


def test_engines_samples_versions_and_progress_are_the_core_s() -> None:
    bench, lease = one_lease()
    core = bench.router.core
    (run,) = core.runs.values()
    before = reading.take(
        SEEN, core, Tally(), 0.0, [Demand(run.id, run.name, 7, 1, "")], {"squeue": 5, "scontrol": 10}, 2
    ).values
    assert before["engines"] == {(run.name, "harvested", "ready"): 1}
    assert before["engines_wanted"][run.name,] == 7
    in_flight = {state: count for (_, state), count in before["samples_in_flight"].items()}
    assert in_flight["leased"] == 1
    assert sum(in_flight.values()) == len(core.samples)
    assert before["weights_version"][run.name,] == 1
    assert before["slurm_rpcs"] == {("scontrol",): 10, ("squeue",): 5}
    assert before["quarantined_nodes"][()] == 2

    bench.now += 50.0
    bench.chunk(W1, lease, 0, 2)
    after = reading.take(SEEN, core, Tally(), 0.0, (), {}, 0).values
    assert after["run_progress_timestamp_seconds"][run.name,] == bench.now, "a token is progress"
    assert after["slurm_rpcs"] == {}, "nothing was asked"

    core.workers[next(iter(core.workers))].suspect = True
    assert reading.take(SEEN, core, Tally(), 0.0, (), {}, 0).values["engines"] == {
        (run.name, "harvested", "suspect"): 1
    }
