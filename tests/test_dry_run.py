"""`scavenger daemon --dry-run` prints what would be submitted and why, and does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from typer.testing import CliRunner

from scavenger import toml
from scavenger.cli.main import app
from scavenger.cluster.local.client import LocalServer
from scavenger.cluster.model import ClusterInfo, ClusterView, JobSpec
from scavenger.cluster.port import Cluster
from scavenger.config import DaemonConfig
from scavenger.daemon import dry_run
from scavenger.errors import ClusterUnavailable
from tests.harvest.views import INFO


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """The command sets logging up for a process of its own."""
    yield
    structlog.reset_defaults()


def test_decisions_are_printed_and_nothing_is_submitted_or_written(tmp_path: Path) -> None:
    with LocalServer(tmp_path / "cluster") as server:
        path = tmp_path / "scavenger.toml"
        document: dict[str, Any] = {
            "daemon": {"state_dir": tmp_path / "state"},
            "cluster": {"backend": "local", "local_dir": server.dir},
            "harvest": {"partition": "scavenge", "max_engines": 3, "headroom_gpus": 10},
        }
        path.write_text(toml.dumps(document))
        done = CliRunner().invoke(app, ["daemon", "--config", str(path), "--dry-run", "--polls", "1"])
        jobs = server.cluster().view().jobs
    assert done.exit_code == 0, done.output
    assert "12 GPUs idle" in done.output
    assert done.output.count("would submit a job of 1 GPU to scavenge") == 2, "the headroom is kept"
    assert jobs == ()
    assert not (tmp_path / "state").exists()


class Silent:
    """A cluster that answers at the second look only, and that nobody may ask to do anything."""

    def __init__(self) -> None:
        self.polls = 0

    def info(self) -> ClusterInfo:
        return INFO

    def view(self) -> ClusterView:
        self.polls += 1
        if self.polls == 1:
            raise ClusterUnavailable("squeue gave no answer within 20 s")
        return ClusterView(1000.0, (), (), ())

    def submit(self, spec: JobSpec) -> int:
        raise AssertionError("a dry run submitted")

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        raise AssertionError("a dry run cancelled")

    def requeue(self, job_id: int) -> None:
        raise AssertionError("a dry run requeued")

    def close(self) -> None:
        """Nothing is held."""


def test_a_cluster_that_does_not_answer_is_said_and_asked_again(tmp_path: Path) -> None:
    config = DaemonConfig.model_validate(
        {"daemon": {"state_dir": tmp_path}, "cluster": {"poll_interval_s": 7.0}}
    )
    said: list[str] = []
    waits: list[float] = []
    dry_run.run(
        config, cast(Cluster, Silent()), said.append, polls=2, clock=lambda: 1000.0, wait=waits.append
    )
    assert "nothing is decided: squeue gave no answer within 20 s" in said[1]
    assert said[2] == "  the next poll is in 7 s"
    assert "0 GPUs idle" in said[3]
    assert len([line for line in said if "next poll" in line]) == 1, "none follows the last"
    assert waits == [7.0]


def test_what_stops_the_daemon_stops_its_dry_run(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    stop.write_text("drain maintenance until noon\n")
    config = DaemonConfig.model_validate({"daemon": {"state_dir": tmp_path}, "harvest": {"stop_file": stop}})
    said: list[str] = []
    dry_run.run(
        config, cast(Cluster, Silent()), said.append, polls=2, clock=lambda: 1000.0, wait=lambda _s: None
    )
    assert "maintenance until noon" in "\n".join(said)
