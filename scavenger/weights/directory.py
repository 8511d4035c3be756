"""Who holds which version of one run: the daemon's directory. Pure; references only, never bytes.

The engines of one node share a link, so one of them leads: it fetches from other nodes, and the rest read its memory as it fills. They
are sent to the same holders for the case that it delivers nothing, but those on other nodes are marked as the last to be asked.

Owns holders, who was sent to whom, and the choice among holders. Order of choice: one on the same node that has it or fetches it, then
the fewest receivers at it now, then the same node, then the same switch, then the lowest number. The publisher is always among them; it
is what a receiver falls back to, and what a receiver that comes first begins with. Partial holders are chosen too: receivers who begin
together serve each other while they pull.
What a holder claims is not believed, only tried: a receiver checks every byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from scavenger.protocol.messages import WeightSource

#: Engines that a receiver is sent to, beside the publisher: a few partial ones share what they have nearly as well as all would.
PEERS = 6


@dataclass(slots=True)
class WeightHolder:
    """A worker that serves a version. `readers`: workers that were sent to it and have not loaded the version yet."""

    worker: int
    node: str
    source: WeightSource
    readers: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class SourceChoice:
    sources: tuple[WeightSource, ...]
    reason: str


def in_clear(source: WeightSource) -> bool:
    """Whether bytes from this source cross a network unencrypted."""
    return not source.server_key and not source.endpoint.startswith("file:")


def refused(source: WeightSource, encrypt: bool) -> str:
    """Why an engine's source is named to no other worker; "" where it may be. A file path is refused: others would open it."""
    if source.endpoint.startswith("file:"):
        return f"it names the file {source.endpoint[5:100]}: only a publisher's spool is read from disk"
    if encrypt and in_clear(source):
        return "it serves in the clear, and the run's weights.encrypt is set"
    return ""


class WeightDirectory:
    """Of one run. `switches`: node -> switch, where Slurm's topology is known."""

    def __init__(self, switches: Mapping[str, str] | None = None) -> None:
        self._switches = switches if switches is not None else {}
        self._holders: dict[int, dict[int, WeightHolder]] = {}  # version -> worker -> holder
        self._reading: dict[int, int] = {}  # worker -> version that it is pulling
        self._revisions: dict[int, int] = {}
        self._leaders: dict[
            tuple[int, str], int
        ] = {}  # (version, node) -> the worker that fetches it for the node

    # ---------------------------------------------------------------- what is heard

    def add_holder(self, version: int, worker: int, node: str, source: WeightSource) -> None:
        """The worker serves the version, or a part of it that grows. The caller has asked whether the source is `refused`."""
        known = self._holders.setdefault(version, {})
        present = known.get(worker)
        if present is not None and present.source == source:
            return
        known[worker] = WeightHolder(worker, node, source, present.readers if present is not None else set())
        self._changed(version)

    def drop(self, version: int, worker: int) -> None:
        """It serves the version no longer."""
        if self._holders.get(version, {}).pop(worker, None) is not None:
            for node in [n for (v, n), leader in self._leaders.items() if (v, leader) == (version, worker)]:
                del self._leaders[version, node]
            self._changed(version)

    def gone(self, worker: int) -> None:
        """The worker is dead or has left: no other worker is sent to it any more."""
        self.settled(worker)
        for version in list(self._holders):
            self.drop(version, worker)

    def refuse_clear(self) -> None:
        """The run's weights are to be encrypted from here on: who serves them in the clear is no holder any more."""
        for version, holders in self._holders.items():
            for worker in [worker for worker, holder in holders.items() if in_clear(holder.source)]:
                self.drop(version, worker)

    def settled(self, worker: int) -> None:
        """The worker has loaded the version that it was pulling, or given up."""
        self._unread(worker)
        for (version, node), leader in list(self._leaders.items()):
            if leader == worker and not self.is_holder(version, worker):
                del self._leaders[version, node]
                self._changed(version)  # another engine of the node has to lead

    def _unread(self, worker: int) -> None:
        version = self._reading.pop(worker, None)
        for holder in self._holders.get(version, {}).values() if version is not None else ():
            holder.readers.discard(worker)

    def forget(self, version: int) -> None:
        """The version is over: no worker asks for it again."""
        self._holders.pop(version, None)
        self._revisions.pop(version, None)
        for key in [key for key in self._leaders if key[0] == version]:
            del self._leaders[key]

    def _changed(self, version: int) -> None:
        self._revisions[version] = self._revisions.get(version, 0) + 1

    # ---------------------------------------------------------------- what is asked

    def revision(self, version: int) -> int:
        """Grows whenever the version's holders change."""
        return self._revisions.get(version, 0)

    def available(self, version: int) -> bool:
        """Whether an engine holds all of it."""
        return any(holder.source.complete for holder in self._holders.get(version, {}).values())

    def is_holder(self, version: int, worker: int) -> bool:
        """Whether this worker holds all of it."""
        holder = self._holders.get(version, {}).get(worker)
        return holder is not None and holder.source.complete

    def last_holder(self, version: int) -> int | None:
        """The only worker that holds all of the version, if there is only one."""
        complete = [
            holder.worker for holder in self._holders.get(version, {}).values() if holder.source.complete
        ]
        return complete[0] if len(complete) == 1 else None

    def choose(
        self,
        version: int,
        worker: int,
        node: str,
        publisher: tuple[WeightSource, ...],
        peers: int = PEERS,
        *,
        alone: bool = False,
    ) -> SourceChoice:
        """Where this worker shall pull the version from. It counts as a reader of them until it has `settled`. `alone`: it serves nobody,
        so that it fetches for itself and never leads its node.
        """
        self._unread(worker)
        switch = self._switches.get(node)
        leader = worker if alone else self._leader(version, worker, node)

        def rank(holder: WeightHolder) -> tuple[int, bool, bool, int]:
            far = switch is None or self._switches.get(holder.node) != switch
            return len(holder.readers), holder.node != node, far, holder.worker

        def offered(source: WeightSource, near: bool) -> WeightSource:
            return source if near or leader == worker else msgspec.structs.replace(source, last=True)

        other_holders = [
            holder
            for holder in self._holders.get(version, {}).values()
            if holder.worker != worker and (holder.source.complete or self._leads(version, holder))
        ]
        # One whose memory it can read as it fills comes first, and then the others by their load.
        near_ones = [holder for holder in other_holders if holder.node == node]
        first = [min(near_ones, key=rank)] if near_ones else []
        chosen = [*first, *sorted([holder for holder in other_holders if holder not in first], key=rank)][
            :peers
        ]
        for holder in chosen:
            holder.readers.add(worker)
        self._reading[worker] = version
        near = sum(holder.node == node for holder in chosen)
        reason = f"{len(publisher)} of the publisher, {len(chosen)} of {len(other_holders)} engines, {near} on its node"
        if leader != worker:
            reason += f", for which worker {leader} fetches it"
        sources = [offered(source, near=False) for source in publisher]
        sources += [offered(holder.source, holder.node == node) for holder in chosen]
        return SourceChoice(tuple(sources), reason)

    def _leads(self, version: int, holder: WeightHolder) -> bool:
        """Whether no other engine fetches for its node: one that does not lead has only a part of what its leader has."""
        return self._leaders.get((version, holder.node), holder.worker) == holder.worker

    def _leader(self, version: int, worker: int, node: str) -> int:
        """Who fetches the version for this node: who has all of it, else who was first to be asked, else this worker."""
        known = self._leaders.get((version, node))
        if known is None or not self.is_holder(version, known):
            complete = [
                holder.worker
                for holder in self._holders.get(version, {}).values()
                if holder.node == node and holder.source.complete and holder.worker != worker
            ]
            known = min(complete) if complete else worker if known is None else known
            self._leaders[version, node] = known
        return known
