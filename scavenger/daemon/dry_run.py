"""`scavenger daemon --dry-run`: polls the cluster as the daemon does, and prints what it would decide. Submits and writes nothing.

Boundary: one subcommand.

There are no runs without a daemon that serves them, so a run is supposed that could use every engine that the limits allow: what is printed
is the most that harvesting would take now. Each poll is decided from scratch, without the jobs that earlier ones would have submitted.
Owns the rhythm and the words; `harvest.decide.decide` decides. Nothing here can submit: the cluster's `info` and `view` alone are called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from scavenger.cluster.model import ClusterView
from scavenger.cluster.port import Cluster
from scavenger.cluster.proxy import client
from scavenger.config import DaemonConfig
from scavenger.errors import ClusterUnavailable
from scavenger.harvest.decide import decide as policy
from scavenger.harvest.decide.decide import HarvestDecision, HarvestLimits, Submit
from scavenger.harvest.decide.free_capacity import gpu_use
from scavenger.harvest.harvester import DRAIN_NOTICE_S
from scavenger.harvest.limits import StopState, rules_of
from scavenger.harvest.track.tracker import Tracker
from scavenger.policy.fleet_size import Demand


def supposed(most: int, gpus_per_engine: int) -> Demand:
    return Demand(1, "dry-run", most, gpus_per_engine, f"supposed: a run that could use {most} engines")


def decide(view: ClusterView, limits: HarvestLimits, gpus_per_engine: int, now: float) -> HarvestDecision:
    """What the daemon would do about this view, had it no job yet. Pure."""
    return policy.decide(view, [supposed(limits.caps.max_engines, gpus_per_engine)], (), limits, now)


def lines(config: DaemonConfig, view: ClusterView, decision: HarvestDecision, now: float) -> Iterator[str]:
    have = gpu_use(view, config.harvest.partition, frozenset(), now)
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield (
        f"{at}  partition {config.harvest.partition}: {have.idle} GPUs idle, "
        f"{have.other_users} with other users, {have.unusable} unusable; "
        f"{have.jobs_pending_other_users} jobs of other users pending; {have.reserved} GPUs on other nodes"
    )
    yield f"  {decision.reason}"
    for action in decision.actions:
        if isinstance(action, Submit) and action.standby:
            yield f"  would submit a standby job (no GPU until it is released, then {action.gpus}): {action.reason}"
        elif isinstance(action, Submit):
            where = f" on {','.join(action.nodelist)}" if action.nodelist else ""
            size = f"{action.gpus} GPU{'s' if action.gpus > 1 else ''}"
            size += f" on each of {action.nodes} nodes" if action.nodes > 1 else ""
            yield f"  would submit a job of {size} to {action.partition}{where}: {action.reason}"


def run(
    config: DaemonConfig,
    cluster: Cluster,
    say: Callable[[str], None],
    *,
    polls: int = 0,
    gpus_per_engine: int = 1,
    clock: Callable[[], float] = time.time,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Print decisions, one poll every `cluster.poll_interval_s`; `polls` of them, 0 = until it is stopped."""
    say("dry run: nothing is submitted, and no ledger and no key is written")
    stop_state, info, done = StopState(lambda: config), None, 0
    tracker = Tracker(rules_of(config, "dry-run", client.jobs_user(config)))  # of a daemon without jobs
    while True:
        try:
            info = info or cluster.info()
            view = cluster.view()
        except ClusterUnavailable as error:
            say(f"  nothing is decided: {error.cause}")
        else:
            now = clock()
            stop_state.poll()
            limits = stop_state.update_limits(view, info, tracker, DRAIN_NOTICE_S, now)
            for line in lines(config, view, decide(view, limits, gpus_per_engine, now), now):
                say(line)
        done += 1
        if done == polls:
            return
        say(f"  the next poll is in {config.cluster.poll_interval_s:g} s")
        wait(config.cluster.poll_interval_s)
