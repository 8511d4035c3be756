"""Engines change hands between runs of two owners, while another user preempts them: each run's result is the one that it has alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger import toml
from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.ledger.read import reports
from scavenger.protocol import keys
from tests.system import play
from tests.system.model import write_small_model

pytestmark = [pytest.mark.mpi, pytest.mark.long]

DEADLINE_S = 8 * play.DEADLINE_S
#: Each run by its seed: they draw other tokens for the same prompts.
SEEDS = {"hers": 7, "his": 8}
CHANGES = 20
PREEMPTIONS = 3
#: A run that wants an engine and has none takes the other's, as soon as that has had it for so long: longer than a job takes to start on a
#: busy machine. So the one engine that the site lets them have goes back and forth, for as long as both want it.
HARVEST = {"change_hands": True, "division": "value", "division_wait_s": 1.0, "division_hold_s": 8.0}


def site_in(folder: Path, backend: str) -> DemoSite:
    layout = demo_layout(grace_s=1.0, requeue_delay_s=0.5)
    return DemoSite(SiteOptions(backend, folder, layout, poll_interval_s=0.3, max_engines=1, harvest=HARVEST))


def submitted(site: DemoSite, model: Path, name: str, key: Path | None) -> int:
    """A training job, longer than any machine takes until what is to be seen has been seen."""
    run: dict[str, object] = {"name": name, "seed": SEEDS[name], "steps": 1000, "max_engines": 1}
    run |= {"key": key} if key is not None else {}
    document = play.run_document(
        site.state_dir,
        site.dir / f"out-{name}",
        model,
        run=run,
        engine={"max_batch": 8, "pace": 6.0},
        reserved={"window": 0.1},
    )
    path = site.dir / f"{name}.toml"
    path.write_text(toml.dumps(document))
    return play.submit(site, path, 1)


def alone(model: Path, folder: Path, name: str, steps: int) -> play.Result:
    """The run by one reserved engine, with nobody beside it."""
    options = SiteOptions("local", folder, demo_layout(grace_s=1.0), poll_interval_s=0.3)
    with DemoSite(options) as site:
        run = {"seed": SEEDS[name], "steps": steps, "harvest": False}
        run_toml = play.write_run(site, model, run=run, engine={"max_batch": 16})
        play.finish(site, play.submit(site, run_toml, 1), DEADLINE_S)
        return play.result(site)


def changed(site: DemoSite) -> list[tuple[str, int]]:
    """(intent, run before) of each change of hands, in order."""
    return play.ask(site, "SELECT intent_id, run_id FROM job_runs ORDER BY id")


def served(site: DemoSite) -> set[tuple[str]]:
    """Runs that trained on tokens of an engine which had worked for the other run before."""
    return set(
        play.ask(
            site,
            "SELECT DISTINCT r.name FROM workers w JOIN job_runs h ON h.intent_id = w.intent_id AND h.run_id <> w.run_id "
            "AND h.until_at <= w.joined_at JOIN chunks c ON c.worker_id = w.worker_id JOIN samples s ON s.sample_id = c.sample_id "
            "JOIN runs r ON r.run_id = w.run_id WHERE s.state = 'consumed'",
        )
    )


def preempted(site: DemoSite, times: int) -> None:
    """Wait until engines left so often because another user had their nodes."""
    ends = "SELECT 1 FROM gpu_allocations WHERE reason = 'preempted'"
    play.wait_for("preemptions", lambda: len(play.ask(site, ends)) >= times, DEADLINE_S)


def lost(site: DemoSite) -> int:
    """Tokens that a change of hands cost: those that other engines made once more."""
    ((count,),) = play.ask(
        site, "SELECT sum(regenerated) FROM workers WHERE reason LIKE 'it goes on for run %'"
    )
    return int(count)


def crossed(site: DemoSite) -> int:
    """Chunks that a worker of one run made for a sample of the other."""
    ((count,),) = play.ask(
        site,
        "SELECT count(*) FROM chunks c JOIN workers w ON w.worker_id = c.worker_id JOIN samples s ON s.sample_id = c.sample_id "
        "JOIN groups g ON g.group_id = s.group_id WHERE w.run_id <> g.run_id",
    )
    return int(count)


def play_out(site: DemoSite) -> None:
    """Until engines changed hands often enough, another user preempted some of those that had, and both runs had their work."""

    def more(than: int) -> None:
        play.wait_for("one more change of hands", lambda: len(changed(site)) > than, DEADLINE_S)

    for taken in range(1, PREEMPTIONS + 1):
        more(taken * CHANGES // (PREEMPTIONS + 1))
        _, _, node = play.wait_for("the engine to be there", lambda: play.workers(site), DEADLINE_S)[0]
        site.submit_other(0.5, 4, node)
        preempted(site, taken)
    more(CHANGES - 1)
    play.wait_for("work of both", lambda: len(served(site)) == len(SEEDS), DEADLINE_S)


def built_anew(site: DemoSite) -> int:
    """Changes of hands for which the engine was to be built anew."""
    built = (
        "SELECT count(*) FROM decisions WHERE code = 'handed_over' AND reason LIKE '%is built anew there%'"
    )
    ((count,),) = play.ask(site, built)
    return int(count)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("backend", "models"),
    [
        ("local", 1),
        pytest.param("slurm", 1, marks=pytest.mark.slurm),
        pytest.param("slurm", 2, marks=pytest.mark.slurm),
    ],
)
def test_each_run_has_the_result_that_it_has_alone(
    backend: str, models: int, tmp_path: Path, small_model: Path
) -> None:
    model = dict.fromkeys(SEEDS, small_model)
    if models == 2:
        model["his"] = tmp_path / "narrower-model"
        write_small_model(model["his"], hidden=16)
    with site_in(tmp_path / "site", backend) as site:
        pair = keys.generate()
        his_key = site.dir / "his.key"
        keys.write_keypair(his_key, pair)
        keys.enroll(site.state_dir, "bob", pair.public)
        jobs = [submitted(site, model["hers"], "hers", None), submitted(site, model["his"], "his", his_key)]
        play_out(site)
        for job in jobs:
            play.cut_short(site, job)
        assert play.over_capacity(site) == ""
        assert reports.check(site.ledger_url) == []
        assert (crossed(site), lost(site)) == (0, 0)
        assert (built_anew(site) > 0) == (models == 2)
        found = {name: play.result_of(site.ledger_url, name) for name in SEEDS}
    for name, result in found.items():
        steps = max(result.steps)
        assert result.until(steps) == alone(model[name], tmp_path / name, name, steps)
