"""Preemption is invisible: whoever generated what, on whichever backend, tokens and rewards are those of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import Site, SiteOptions
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
        backend, tmp_path, demo_layout(grace_s=1.0, requeue_delay_s=0.5), observe_s=0.2, max_engines=engines, router={"policy": policy}
    )
    with Site(options) as site:
        run = play.write_run(site, small_model, run={"steps": 4, "harvest": engines > 0}, engine={"max_batch": 4, "pace": pace})
        training = play.submit(site, run, ranks)
        if engines:
            play.wait_for("a harvested engine at work", lambda: play.busy(site) or play.steps_done(site) == 4)
        lost: set[int] = set()
        while preempt and len(lost) < 4 and play.steps_done(site) < 3:
            for worker, _job, node in play.busy(site):
                if worker not in lost:
                    lost.add(worker)
                    site.submit_other(0.3, 4, node)
        play.finish(site, training)
        assert not play.jobs_left(site)
        if engines:
            assert _harvested_tokens(site) > 0, "no harvested engine generated a token that was trained on"
        if preempt:
            assert play.ask(site, "SELECT count(*) FROM workers WHERE kind = 'harvested' AND samples > 0")[0][0] >= 3, "hardly hit"
            assert play.ask(site, "SELECT count(*) FROM samples WHERE moves > 0")[0][0] > 0, "no sample moved with tokens"
        decided = {kind for (kind,) in play.ask(site, "SELECT DISTINCT policy FROM decisions WHERE code <> ''")}
        wanted = {"standard": {"harvest", "engines"}, "predictive": {"harvest", "engines", "placement", "window"}}[policy]
        assert wanted <= decided, f"the ledger does not explain the run: {decided}"
        return play.result(site)


def _harvested_tokens(site: Site) -> int:
    rows = play.ask(
        site,
        "SELECT coalesce(sum(c.n_tokens), 0) FROM chunks c JOIN workers w ON w.worker_id = c.worker_id "
        "JOIN samples s ON s.sample_id = c.sample_id WHERE w.kind = 'harvested' AND s.state IN ('consumed', 'filtered')",
    )
    return int(rows[0][0])


def test_heavy_preemption_changes_nothing(tmp_path: Path, small_model: Path, undisturbed: play.Result) -> None:
    assert _run(tmp_path, small_model, backend="local", engines=6, preempt=True, pace=6.0) == undisturbed.until(4)


def test_one_harvested_engine_and_one_rank_give_the_same_result(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    """One rank and two add the same gradients, but their norms differ in the last bits: the tokens of every step are equal all the same."""
    alone = _run(tmp_path, small_model, backend="local", engines=1, preempt=False, ranks=1, pace=20.0)
    assert alone == undisturbed.until(4)


def test_the_predicting_policy_changes_who_generates_and_nothing_else(tmp_path: Path, small_model: Path, undisturbed: play.Result) -> None:
    predicted = _run(tmp_path, small_model, backend="local", engines=2, preempt=False, pace=6.0, policy="predictive")
    assert predicted == undisturbed.until(4)
