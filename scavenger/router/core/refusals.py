"""When a run has to stop because no engine serves a version that it published. Pure.

One engine that refuses a version may have bad memory: another engine is tried. Where engines on `poison_after` nodes refuse it, or on all
nodes that there are, the version itself is wrong, or what its trainer states of it. Its samples would wait for ever, so the run stops.
Owns the count of refusals; one engine that holds the version as it was published clears it.
"""

from __future__ import annotations

from scavenger.errors import ONE_RELEASE
from scavenger.protocol.messages import RunStopped, words
from scavenger.router.core.state import ActiveRun, Version, Worker
from scavenger.router.core.tables import Core

#: Engines on fewer nodes than `poison_after`: a site of one node never reaches more.
LIVES_A_NODE = 3
LEAST_NODES = 2
REMEDY = (
    "start the training job again: it goes on from its newest checkpoint and publishes anew. Where that is refused too,"
    f" publish weights of the run's own model; {ONE_RELEASE}"
)


def proved(run: ActiveRun, version: int) -> None:
    """An engine holds the version as it was published."""
    known = run.weights.versions[version]
    known.proved = True
    known.refusers.clear()


def refused(core: Core, worker: Worker, version: int, reason: str) -> None:
    """An engine that had every byte of the version will not serve it. Enough of them stop the run, once."""
    run, known = worker.run, worker.run.weights.versions.get(version)
    if known is None or known.proved or run.stopped:
        return
    life, node = core.life_of(worker)
    known.refusers[life] = node
    if not _by_enough(core, run, known):
        return
    nodes, last = len(set(known.refusers.values())), reason.partition("\n")[0]
    run.stopped = words(
        f"version {version} is served by no engine: {len(known.refusers)} on {nodes} node(s) refused it, the last: {last}"
    )
    run.stop_remedy = REMEDY
    core.event(
        "version_refused", run.id, f"version {version}", run.stopped, engines=len(known.refusers), nodes=nodes
    )
    core.send_durable(run.trainer.conn, RunStopped(run.stopped, run.stop_remedy))


def _by_enough(core: Core, run: ActiveRun, known: Version) -> bool:
    nodes = len(set(known.refusers.values()))
    if nodes >= run.settings.poison_after or len(known.refusers) >= LIVES_A_NODE * run.settings.poison_after:
        return True
    others = any(core.life_of(worker)[0] not in known.refusers for worker in run.workers.values())
    return nodes >= LEAST_NODES and not others
