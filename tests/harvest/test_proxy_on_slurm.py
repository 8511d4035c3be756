"""The harvester where another user's process submits for it, on a real Slurm: what its death costs, and how it goes on.

Here that user is this one, in a thread; that they are two is `tests/cluster/test_proxy.py`'s.
"""

from __future__ import annotations

import asyncio
import getpass
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scavenger.cluster.model import JobState
from scavenger.cluster.proxy import client, server
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.config import ClusterSection, DaemonConfig
from scavenger.ledger import records as rec
from scavenger.protocol import keys
from scavenger.router.core.events import IntentRevoked, JobGone
from tests.harvest.world import FAST, World, layout, running, until
from tests.proxies import served

pytestmark = pytest.mark.slurm


@dataclass
class Proxied(World):
    """Its jobs are submitted at the socket."""

    socket: Path = Path()
    engines: Path = Path()

    def config(self, template: str, **harvest: Any) -> DaemonConfig:
        made = super().config(template, **harvest)
        proxy: dict[str, Any] = {
            "submit_socket": self.socket,
            "engines_user": getpass.getuser(),
            "engines_dir": self.engines,
        }
        cluster = ClusterSection(backend="slurm", absent_s=0.3, **(proxy | FAST))
        daemon = made.daemon.model_copy(update={"public_dir": self.state_dir.parent / "public"})
        return made.model_copy(update={"cluster": cluster, "daemon": daemon})


@pytest.fixture
def sandbox() -> Iterator[SlurmSandbox]:
    with SlurmSandbox(msgspec.structs.replace(layout(), requeue_delay_s=6.0)) as made:
        yield made


def test_a_process_that_dies_loses_no_engine_and_its_successor_submits_again(
    sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    own, hands, engines = SlurmCluster(sandbox.env), SlurmCluster(sandbox.env), tmp_path / "engines"
    server.prepare(engines)
    role = server.SubmitRole(hands, engines, server.EngineJobRules(engines, frozenset({"scavenge"})).check)
    with tempfile.TemporaryDirectory(prefix="scv-") as short:
        socket = Path(short) / "submit"
        line = client.ProxyLine("submit", socket, getpass.getuser(), 20.0)
        site = client.ProxyCluster(own, None, line, getpass.getuser())
        world = Proxied(site, tmp_path, tmp_path / "state", socket=socket, engines=engines)

        async def play() -> None:
            async with running(world.harvester()):
                with served(socket, role):
                    world.want(1)
                    await until("an engine runs", lambda: world.of(rec.AllocationStarted))
                polls = len(world.of(rec.ClusterPolled))
                world.want(2)
                await until("the submission fails", lambda: world.events("submit_refused"))
                assert not world.events("submit_unknown"), "sbatch never ran"
                await until("it polls on", lambda: len(world.of(rec.ClusterPolled)) > polls + 5)
                assert not world.of(IntentRevoked)
                assert not world.of(JobGone)
                assert len(world.jobs(JobState.RUNNING)) == 1
                with served(socket, role):
                    await until("both run", lambda: len(world.of(rec.AllocationStarted)) == 2)
                    assert not world.of(IntentRevoked)
                    live = {job.name for job in world.jobs(JobState.RUNNING)}
                    held = {path.stem for path in (engines / "workers").glob("*.key")}
                    assert live <= held
                    for name in live:
                        theirs, ours = (keys.worker_key_path(at, name) for at in (engines, world.state_dir))
                        assert theirs.read_bytes() == ours.read_bytes()
                    world.want(0)
                    await until("both are closed", lambda: not world.jobs())

        asyncio.run(play())
