"""Preemption is invisible: whoever generated what, on whichever backend, tokens and rewards are those of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.observe import status
from tests.system import play

pytestmark = pytest.mark.mpi


def _run(
    tmp_path: Path,
    small_model: Path,
    *,
    backend: str,
    engines: int,
    preempt: bool,
    ranks: int = 2,
    pace: float = 0.0,
    policy: str = "standard",
) -> play.Result:
    options = SiteOptions(
        backend,
        tmp_path,
        demo_layout(grace_s=1.0, requeue_delay_s=0.5),
        poll_interval_s=0.2,
        max_engines=engines,
        router={"policy": policy},
    )
    with DemoSite(options) as site:
        # longer than any machine takes until what is to be seen has been seen, then cut short
        run = play.write_run(
            site,
            small_model,
            run={"steps": 80 if engines else 4, "harvest": engines > 0},
            engine={"max_batch": 4, "pace": pace},
        )
        training = play.submit(site, run, ranks)
        if not engines:
            play.finish(site, training)
            return play.result(site)
        lost: set[int] = set()
        while preempt and (len(lost) < 4 or not _hit(site)):
            for worker, _job, node in play.wait_for(
                "engines at work", lambda: [one for one in play.busy(site) if one[0] not in lost]
            ):
                lost.add(worker)
                site.submit_other(0.3, 4, node)
        play.wait_for("harvested engines' tokens that were trained on", lambda: _harvested_tokens(site) > 0)
        wanted = {
            "standard": {"harvest", "engines"},
            "predictive": {"harvest", "engines", "placement", "window"},
        }[policy]
        said = "SELECT DISTINCT policy FROM decisions WHERE code <> ''"
        play.wait_for(
            "the ledger to explain the run", lambda: wanted <= {kind for (kind,) in play.ask(site, said)}
        )
        play.wait_for("four steps", lambda: play.steps_done(site) >= 4)
        done = play.cut_short(site, training)
        return play.result(site).until(done)


def _hit(site: DemoSite) -> bool:
    """Whether three engines were lost with samples (what they had is counted when they leave), and a sample moved with tokens."""
    engines = play.ask(site, "SELECT count(*) FROM workers WHERE kind = 'harvested' AND samples > 0")
    return engines[0][0] >= 3 and play.ask(site, "SELECT count(*) FROM samples WHERE moves > 0")[0][0] > 0


def _harvested_tokens(site: DemoSite) -> int:
    rows = play.ask(
        site,
        "SELECT coalesce(sum(c.n_tokens), 0) FROM chunks c JOIN workers w ON w.worker_id = c.worker_id "
        "JOIN samples s ON s.sample_id = c.sample_id WHERE w.kind = 'harvested' AND s.state IN ('consumed', 'filtered')",
    )
    return int(rows[0][0])


def test_heavy_preemption_changes_nothing(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    found = _run(tmp_path, small_model, backend="local", engines=6, preempt=True, pace=6.0)
    assert found == play.as_long(undisturbed, found, small_model, tmp_path)


def test_one_harvested_engine_and_one_rank_give_the_same_result(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    """One rank and two add the same gradients, but their norms differ in the last bits: the tokens of every step are equal all the same."""
    alone = _run(tmp_path, small_model, backend="local", engines=1, preempt=False, ranks=1, pace=20.0)
    assert alone == play.as_long(undisturbed, alone, small_model, tmp_path)


def test_the_predicting_policy_changes_who_generates_and_nothing_else(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    predicted = _run(
        tmp_path, small_model, backend="local", engines=2, preempt=False, pace=6.0, policy="predictive"
    )
    assert predicted == play.as_long(undisturbed, predicted, small_model, tmp_path)


def test_drafts_from_siblings_change_nothing(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    """The engine verifies what siblings said (`engine.speculation`); what it accepted is what it would have drawn."""
    with DemoSite(SiteOptions("local", tmp_path, demo_layout(grace_s=1.0), poll_interval_s=0.2)) as site:
        run = play.write_run(
            site,
            small_model,
            run={"steps": 80, "harvest": False},
            reserved={"workers": 2},
            engine={
                "max_batch": 2,
                "pace": 20.0,
                "speculation": "group",
            },  # a group of four is on both engines
        )
        training = play.submit(site, run)
        play.wait_for("two steps", lambda: play.steps_done(site) >= 2)
        play.wait_for("accepted drafts in the daemon's status", lambda: _drafts(site)[0] > 0)
        play.wait_for("siblings' tokens sent from engine to engine", lambda: _drafts(site)[1] > 0)
        done = play.cut_short(site, training)
        found = play.result(site).until(done)
    assert found == play.as_long(undisturbed, found, small_model, tmp_path)


@pytest.mark.long
def test_blocks_that_move_with_their_samples_change_nothing(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    """Under preemption with notice: a sample that takes its KV blocks along (`engine.move_kv`) goes on as one that is prefilled."""
    options = SiteOptions(
        "local", tmp_path, demo_layout(grace_s=2.0, requeue_delay_s=0.5), poll_interval_s=0.2, max_engines=4
    )
    with DemoSite(options) as site:
        run = play.write_run(
            site, small_model, run={"steps": 80}, engine={"max_batch": 4, "pace": 10.0, "move_kv": True}
        )
        training = play.submit(site, run)
        lost: set[int] = set()
        while not lost or not _blocks_moved(site):
            for worker, _job, node in play.wait_for(
                "engines at work", lambda: [one for one in play.busy(site) if one[0] not in lost]
            ):
                lost.add(worker)
                site.submit_other(0.3, 4, node)
        steps = play.steps_done(site)
        play.wait_for("a step behind that", lambda: play.steps_done(site) > steps + 1)
        done = play.cut_short(site, training)
        found = play.result(site).until(done)
        taken = "SELECT count(*) FROM decisions WHERE policy = 'kv' AND code = 'blocks'"
        assert play.ask(site, taken)[0][0] > 0, (
            "the ledger says which samples took their blocks along, and why"
        )
    assert found == play.as_long(undisturbed, found, small_model, tmp_path)


def _blocks_moved(site: DemoSite) -> bool:
    return any(one.moved > 2 for one in status.read(site.state_dir).kv_blocks)


def _drafts(site: DemoSite) -> tuple[int, int]:
    """Drafted tokens that were accepted, and siblings' tokens that were sent for drafts."""
    found = status.read(site.state_dir).speculation
    return sum(one.accepted for one in found), sum(one.sent for one in found)
