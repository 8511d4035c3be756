"""vLLM over two nodes: two processes as srun starts them, here on one host, with a rank each; its own multi-node executor, no Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from scavenger.protocol import keys, messages
from scavenger.protocol.messages import Sampling
from scavenger.protocol.worker.events import EXIT_DRAINED, EXIT_PREEMPTED
from scavenger.weights import manifest as manifests
from scavenger.weights.source import WeightServer

pytest.importorskip("torch", reason="the engines need the [trainer] extra")
pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("peft", reason="the adapters need the [lora] extra")
from tests.rollout import models
from tests.rollout.daemon import FakeDaemon
from tests.rollout.test_tensor_parallel import Wide
from tests.rollout.test_vllm import ME, SERVER, _greedy, _lease, command, hear

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]


@asynccontextmanager
async def two_nodes(folder: Path) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """The processes of both nodes, the first node's first."""
    key = folder / "worker.key"
    keys.write_keypair(key, ME)
    argv, environment = command(folder, key)
    job = {
        "SLURM_NTASKS": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SCAVENGER_JOB_ID": str(os.getpid()),
        "SCAVENGER_RESTART_COUNT": "0",
        "SCAVENGER_GPUS": "1",
    }
    started = []
    for place in ("0", "1"):
        with open(folder / f"node{place}.log", "ab") as log:
            own = {**environment, **job, "SLURM_PROCID": place, "SLURMD_NODENAME": f"node{place}"}
            started.append(
                await asyncio.create_subprocess_exec(*argv, "--nodes", "2", env=own, stderr=log, stdout=log)
            )
    try:
        yield started
    finally:
        for one in started:
            if one.returncode is None:
                one.kill()
            await one.wait()


def test_a_rank_on_each_of_two_nodes_answers_as_the_trainer_s_model_and_both_leave_on_notice(
    tmp_path: Path,
) -> None:
    kind: Any = Wide()

    async def main() -> None:
        daemon = FakeDaemon(tmp_path, SERVER, {ME.public})
        with WeightServer() as source:
            async with two_nodes(tmp_path) as (worker, further):
                assert (await hear(daemon, worker, messages.WorkerHello)).gpus == 2
                daemon.send(messages.Welcome(1, 1, "r", kind.spec(), 0.5, 60.0, 8))
                for version in (1, 2):
                    model = kind.model if version == 1 else models.plain_model(kind.text(), seed=5)
                    manifest, blob = models.weights(model, version)
                    order = messages.UseWeights(
                        version, manifests.encode(manifest), (source.publish(manifest, blob),)
                    )
                    daemon.send(order)
                    while (await hear(daemon, worker, messages.WeightsLoaded)).version != version:
                        pass
                    daemon.send(_lease(version, version, Sampling(12, temperature=0.0)))
                    tokens = await daemon.tokens(version, 12, 120.0)
                    assert _greedy(model, list(tokens)), "each rank holds its half of this version"
                worker.terminate()
                further.terminate()  # Slurm signals both
                await daemon.expect(messages.Goodbye)
                daemon.send(messages.GoodbyeAck())
                codes = await asyncio.gather(
                    *(asyncio.wait_for(one.wait(), 20.0) for one in (worker, further))
                )
                assert codes == [EXIT_PREEMPTED, EXIT_DRAINED]
        daemon.close()

    asyncio.run(main())
