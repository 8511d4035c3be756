"""What the daemon says to every user of the site: `<public_dir>/public-status.json`, and `scavenger status` of who may not read its state.

Owns the file, what is left out of it, its rhythm and its words. It holds counts, the partition's and the cluster's name and a sentence
without names (`harvest.decide.public_reason`): no run, owner, user, job, node, prompt, address or path, and no text that another process
wrote. A reader believes a file of the public folder's owner alone, and of that no more than these types and bounds allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import structlog

from scavenger.asyncio_helpers import LEAST_S, within, written
from scavenger.errors import AuthError, DaemonUnavailable
from scavenger.observe import status
from scavenger.parsing import MALFORMED
from scavenger.printable import amount, printable
from scavenger.protocol import keys

log = structlog.get_logger()

FILE = "public-status.json"
#: How often it is looked whether something changed, and how old the file becomes where nothing did.
CHECK_S, WRITE_S = 3.0, 10.0
#: Figures older than this are of a daemon that stopped, hangs, or cannot write there.
STALE_S = 3 * WRITE_S
#: Further clusters that are told, by name. With the texts' bounds the file fits into what `keys.read_trusted` reads.
MOST_CLUSTERS, _MOST_WHY, _MOST_PARTITION = 12, 240, 64

_MOST_COUNT, _MOST_TIME = 10**9, 1e11
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST_COUNT)]
#: Unix seconds; 0 = never.
Time = Annotated[float, msgspec.Meta(ge=0, le=_MOST_TIME)]
State = Literal["SERVING", "CLOSED", "FENCED", "FAILED"]
_STATES: Mapping[str, State] = {
    status.SERVING: "SERVING",
    status.CLOSED: "CLOSED",
    status.FENCED: "FENCED",
    status.FAILED: "FAILED",
}


class PublicHarvest(msgspec.Struct, frozen=True):
    """Of one partition. Engines are those of all runs: `starting` hold GPUs and have not connected yet, `pending` wait for some, standby
    jobs not counted. GPUs, `polled_at` (Unix s, 0 = never) and `why` are of the last complete poll; `why`: why there are no more engines.
    """

    partition: Annotated[str, msgspec.Meta(max_length=_MOST_PARTITION)]
    polled_at: Time
    gpus_idle: Count
    gpus_harvested: Count
    gpus_other_users: Count
    running: Count
    starting: Count
    pending: Count
    stopped: bool  # by the site's admin, or its stop file
    nodes_drained: Count  # on which `scavenger drain --node` lets no engine start
    set_up_fault: bool  # engines cannot start, whichever node they start on
    polls_fail: bool  # nothing is known of the queue since `polled_at`
    why: Annotated[str, msgspec.Meta(max_length=_MOST_WHY)]


class PublicCluster(msgspec.Struct, frozen=True):
    """A further cluster. `harvest`: None until its harvester has dialled in once."""

    name: Annotated[str, msgspec.Meta(max_length=32)]
    harvest: PublicHarvest | None


class PublicStatus(msgspec.Struct, frozen=True):
    """`at`: when it was written (Unix s). `harvest`: None where nothing is harvested (`harvest.enabled = false`)."""

    at: Time
    generation: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    state: State
    harvest: PublicHarvest | None
    clusters: Annotated[tuple[PublicCluster, ...], msgspec.Meta(max_length=MOST_CLUSTERS)] = ()


def of(seen: status.Status) -> PublicStatus:
    """What every user may know of it. Pure."""
    clusters = tuple(PublicCluster(one.name, _of_harvest(one.harvest)) for one in seen.clusters)
    return PublicStatus(
        seen.at, seen.generation, _STATES[seen.state], _of_harvest(seen.harvest), clusters[:MOST_CLUSTERS]
    )


def _of_harvest(h: status.Harvest | None) -> PublicHarvest | None:
    if h is None:
        return None
    running = h.engines if h.connected is None else min(h.connected, h.engines)
    return PublicHarvest(
        _bounded(h.partition, _MOST_PARTITION),
        h.seen_at if 0 <= h.seen_at <= _MOST_TIME else 0.0,
        _count(h.idle),
        _count(h.gpus),
        _count(h.gpus_other_users),
        _count(running),
        _count(h.engines - running),
        _count(h.waiting),
        bool(h.stopped),
        _count(h.drained),
        bool(h.set_up),
        bool(h.polls_fail),
        _bounded(h.public, _MOST_WHY),
    )


def _count(n: int) -> int:
    """What a further cluster's harvester counted is its own word: it is not to make the file one that no reader takes."""
    return min(max(n, 0), _MOST_COUNT)


def _bounded(text: str, most: int) -> str:
    """One byte a character, or two where JSON escapes it: the file's size is bounded with the text's length."""
    return printable(text).encode("ascii", "replace").decode("ascii").replace("\n", " ")[:most]


def path(public_dir: Path) -> Path:
    return public_dir / FILE


def write(public_dir: Path, seen: PublicStatus) -> None:
    """Replace the file, readable by all. Raises `OSError`."""
    keys.write_public(path(public_dir), msgspec.json.encode(seen))


def read(public_dir: Path) -> PublicStatus:
    """Raises `DaemonUnavailable` where there is none or it holds something else, `AuthError` where another user than the folder's owner
    could have written it.
    """
    try:
        return msgspec.json.decode(keys.read_trusted(path(public_dir)), type=PublicStatus)
    except FileNotFoundError as error:
        raise DaemonUnavailable(
            f"no daemon has written {path(public_dir)}",
            "ask the site's admin whether the daemon runs, and is of this release",
        ) from error
    except OSError as error:
        raise DaemonUnavailable(
            f"{path(public_dir)} cannot be read: {error.strerror}", "ask the site's admin"
        ) from error
    except MALFORMED as error:
        raise DaemonUnavailable(
            f"{path(public_dir)} is no public status: {error}", "ask the site's admin; the daemon replaces it"
        ) from error


def write_last(public_dir: Path, seen: PublicStatus) -> None:
    """Replace the file at a daemon's end, unless a newer generation has written its own. Raises `OSError`."""
    with contextlib.suppress(DaemonUnavailable, AuthError):
        if read(public_dir).generation > seen.generation:
            return
    write(public_dir, seen)


async def publish(
    public_dir: Path,
    look: Callable[[], PublicStatus],
    stop: asyncio.Event,
    *,
    check_s: float = CHECK_S,
    write_s: float = WRITE_S,
) -> None:
    """Write what `look` gives when it changed, seen every `check_s` seconds, and every `write_s`, until `stop`.

    A file that cannot be written ends nothing, and a folder that hangs keeps an end waiting for `LEAST_S` at most.
    """
    loop = asyncio.get_running_loop()
    tried_at, before = -math.inf, PublicStatus(0.0, 0, "CLOSED", None)
    while not stop.is_set():
        seen = look()
        if msgspec.structs.replace(seen, at=before.at) != before or loop.time() - tried_at >= write_s:
            tried_at, before = loop.time(), seen
            try:
                await written(functools.partial(write, public_dir, seen), at_end_s=LEAST_S)
            except OSError as error:
                log.warning(
                    "public status not written; tried again", path=str(path(public_dir)), reason=str(error)
                )
        await within(stop, check_s)


# ---------------------------------------------------------------- the reader's end


def absent(seen: PublicStatus, now: float) -> str:
    """Why no daemon serves, as far as the file tells; "" when it does. Pure."""
    if seen.state != status.SERVING:
        return f"{seen.state}, since {status.utc(seen.at)}"
    if now - seen.at > STALE_S:
        return f"SILENT for {now - seen.at:.0f} s: the daemon may be down, or cannot write there"
    if seen.at - now > STALE_S:
        return f"its file is of {status.utc(seen.at)}, which is to come: one of two clocks is wrong"
    return ""


def lines(public_dir: Path, seen: PublicStatus, now: float) -> list[str]:
    """For a terminal. Pure."""
    gone = absent(seen, now)
    said = [f"NO DAEMON SERVES: {gone}; the figures are its last ones"] if gone else []
    said.append(
        f"public    what {path(public_dir)} tells all users, {max(0.0, now - seen.at):.0f} s old; the rest is for the daemon's user"
    )
    if seen.harvest is None:
        said.append("harvest   nothing is harvested here (harvest.enabled = false)")
    said += _harvested(seen.harvest, now)
    for cluster in seen.clusters:
        said.append(f"cluster   {cluster.name}{'' if cluster.harvest else ': not heard yet'}")
        said += [f"  {line}" for line in _harvested(cluster.harvest, now)]
    return list(map(printable, said))


def _harvested(h: PublicHarvest | None, now: float) -> list[str]:
    if h is None:
        return []
    engines = f"{amount(h.running, 'engine')} of all runs running, {h.starting} starting, {h.pending} pending"
    said = [f"harvest   partition {h.partition}: {engines}"]
    if h.stopped:
        said.append("          STOPPED by the site's admin")
    if h.nodes_drained:
        said.append(f"          {amount(h.nodes_drained, 'node')} drained: no engine starts there")
    if h.set_up_fault:
        said.append("          SET-UP AT FAULT: engines cannot start; ask the site's admin")
    polled = f"seen {max(0.0, now - h.polled_at):.0f} s ago" if h.polled_at else "not seen yet"
    gpus = f"{h.gpus_idle} GPUs idle, {h.gpus_harvested} harvested, {h.gpus_other_users} used by other users"
    said.append(f"slurm     {polled}{f': {gpus}' if h.polled_at else ''}")
    if h.polls_fail:
        said.append("          POLLS FAIL: nothing is submitted or cancelled until one succeeds")
    said.append(f"decided   {h.why or 'nothing yet'}")
    return said
