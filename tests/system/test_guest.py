"""A rollout engine beside an inference service: real daemon, trainer, worker and `scavenger guest`; the service's load is mocked."""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from tests.guest.service import MockService, service
from tests.system import play
from tests.system.guests import holds, hosted, said

pytestmark = pytest.mark.mpi


#: For the reference engine and the stand-in, which say something new each fifth of a second.
OPTIONS = ("--engine", "reference", "--most", "4", "--poll", "0.2", "--nice", "0")


@contextmanager
def training_alone(folder: Path, model: Path) -> Iterator[tuple[DemoSite, int]]:
    """A site that harvests nothing, and its training job, whose reserved engine gives its samples away as soon as another one is there."""
    options = SiteOptions("local", folder, demo_layout(grace_s=0.5), poll_interval_s=0.2, max_engines=0)
    with DemoSite(options) as site:
        run = play.write_run(
            site, model, run={"steps": 80}, engine={"max_batch": 8, "pace": 3.0}, reserved={"window": 0.0}
        )
        yield site, play.submit(site, run)


def test_a_guest_generates_into_slack_gives_way_to_a_burst_and_ends_with_its_service(
    tmp_path: Path, small_model: Path, undisturbed: play.Result
) -> None:
    log = tmp_path / "guest.out"
    with training_alone(tmp_path, small_model) as (site, training), service() as beside:
        with hosted(site, beside.url, log, *OPTIONS) as process:
            play.wait_for(
                "the guest to hold samples with tokens", lambda: play.busy(site) and holds(site) <= 4
            )

            cuts = _burst(site, beside, log)
            play.wait_for("the guest to give all samples back", lambda: holds(site) == 0)
            step = play.steps_done(site)
            play.wait_for("the run to go on without it", lambda: play.steps_done(site) > step)
            assert holds(site) == 0
            back = play.ask(
                site,
                "SELECT count(*) FROM leases l JOIN workers w ON w.worker_id = l.worker_id WHERE w.intent_id = 'guest-svc' "
                "AND l.reason = 'given back'",
            )
            assert back[0][0] > 0

            beside.wait(0)
            play.wait_for("the guest to hold samples again", lambda: holds(site) > 0)
            beside.end()
            assert process.wait(30) == 0
        report = said(log)[-1]["report"]
        assert report["tokens"] > 0
        assert report["sample_s"] > 0
        assert report["cuts"] == cuts
        assert report["kills"] == 0
        assert report["free_s"] < 5
        play.wait_for("the guest to be gone", lambda: not play.workers(site))
        done = play.cut_short(site, training)
        found = play.result(site).until(done)
        assert found == play.as_long(undisturbed, found, small_model, tmp_path)


def _burst(site: DemoSite, beside: MockService, log: Path) -> int:
    """Let requests wait until the guest is cut with samples of its own running. Returns its cuts.

    The guest knows its engine's samples by the engine's last word, which may be older than the ledger that this test reads. A burst that
    comes in between meets, by all that the guest knows, a service that is slow alone: then there is another one.
    """
    while True:
        cuts = len(_zeros(log)) + 1
        beside.wait(9)
        last = play.wait_for("the guest to be cut", functools.partial(_zeros, log, cuts))[-1]
        if "is cut from" in last["reason"]:
            return cuts
        assert last["verdict"] == "slow-alone"
        beside.wait(0)
        play.wait_for("the guest to hold samples with tokens again", lambda: play.busy(site))


def _zeros(log: Path, at_least: int = 0) -> list[dict[str, Any]]:
    """The first line of each time that the budget was 0 after it had been above; none where these are fewer than `at_least`."""
    budgets = [line for line in said(log) if "budget" in line]
    found = [
        line for before, line in itertools.pairwise(budgets) if before["budget"] > 0 and line["budget"] == 0
    ]
    return found if len(found) >= at_least else []


def test_a_guest_that_is_killed_takes_its_engine_along_and_nothing_else(
    tmp_path: Path, small_model: Path
) -> None:
    log = tmp_path / "guest.out"
    with training_alone(tmp_path, small_model) as (site, training), service() as beside:
        with hosted(site, beside.url, log, *OPTIONS) as process:
            play.wait_for("the guest to hold samples", lambda: holds(site) > 0)
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            play.wait_for("its engine to have said goodbye", lambda: not play.workers(site))
        left = play.ask(site, "SELECT reason FROM workers WHERE intent_id = 'guest-svc'")
        assert "hosts it has ended" in left[0][0]
        step = play.steps_done(site)
        play.wait_for("the run to go on", lambda: play.steps_done(site) > step)
        play.cut_short(site, training)
