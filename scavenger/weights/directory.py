"""Who holds which version of one run: the daemon's directory. Pure; references only, never bytes.

The engines of one node share a link, so one of them leads: it fetches from other nodes, and the rest read its memory as it fills. They
are sent to the same holders for the case that it delivers nothing, but those on other nodes are marked as the last to be asked.

Clusters are joined by slow links, so one engine of a cluster crosses: it fetches the version from outside, and the others of its cluster
take it there as it comes. They are sent to holders outside for the case that it delivers nothing for as long as crossing takes, by the
rate that was learned of that link; where crossing is predicted to take no longer than handing over does, each fetches for itself, until
that takes longer. One that is lost, or gives up, is followed by the next that asks. A crossing that is much faster or slower than the link
was known to be says that it is another link now: the rate is learned anew.

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
from scavenger.weights.choice import MeasuredRate

#: So many versions a trainer serves: the newest of those that no adapters are merged with.
VERSIONS_SERVED = 2
#: Why an order to pull is refused.
NOT_ENCRYPTED = "the run's weights.encrypt is off, and weights cross no link to another cluster in the clear"
#: Until the link to a cluster was measured (bytes a second), and until its rate is known to be another: seconds until engines of a cluster
#: can read what one of them fetches. It says after `ANNOUNCE_S` that it serves, and the others hear of it with the next list of holders.
LINK_NBYTES_PER_S = 25e6
HANDOVER_S = 1.2
#: However fast the link is said to be, one that crosses may be silent for so long (s): deltas may be waited for. And for so long at most.
LEAST_WAIT_S, MOST_WAIT_S = 10.0, 120.0
#: What took less may have been here already: it says that the link is as fast at least.
LEAST_S = 0.5
#: A link that carries so many times what was known of it, or so small a part, has changed. So has one over which engines that each fetch
#: for themselves take so many times `HANDOVER_S`.
CHANGED = 2.0
#: Holders outside that one which crosses is sent to, beside the publisher: for when a rank of that is gone.
ACROSS = 2
#: Engines that a receiver is sent to, beside the publisher: a few partial ones share what they have nearly as well as all would.
PEERS = 6


@dataclass(slots=True)
class WeightHolder:
    """A worker that serves a version. `readers`: workers that were sent to it and have not loaded the version yet."""

    worker: int
    node: str
    cluster: str
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


def not_across(cluster: str, encrypt: bool) -> str:
    """Why no engine of this cluster, "" = the daemon's own, may be told to pull the run's weights; "" where it may. Its source would lie
    beyond a link that others may overhear."""
    return "" if encrypt or not cluster else f"{NOT_ENCRYPTED} (cluster {cluster})"


class WeightDirectory:
    """Of one run. `switches`: node -> switch, where Slurm's topology is known. A node's name is unique over all clusters; the publisher is
    on the daemon's own cluster, ""."""

    def __init__(self, switches: Mapping[str, str] | None = None) -> None:
        self._switches = switches if switches is not None else {}
        self._holders: dict[int, dict[int, WeightHolder]] = {}  # version -> worker -> holder
        self._reading: dict[int, int] = {}  # worker -> version that it is pulling
        self._revisions: dict[int, int] = {}
        self._leaders: dict[
            tuple[int, str], int
        ] = {}  # (version, node) -> the worker that fetches it for the node
        # (version, cluster) -> the worker that fetches it from outside, and since when.
        self._crossing: dict[tuple[int, str], tuple[int, float]] = {}
        # The same where each engine of a cluster fetches for itself: of the first one.
        self._for_itself: dict[tuple[int, str], tuple[int, float]] = {}
        self._doubted: set[str] = (
            set()
        )  # clusters where that took too long: the next version crosses once, and is measured
        #: By cluster: whole bytes of versions over the seconds that crossing took. What came as deltas makes the link faster.
        self.links: dict[str, MeasuredRate] = {}

    # ---------------------------------------------------------------- what is heard

    def add_holder(
        self,
        version: int,
        worker: int,
        node: str,
        source: WeightSource,
        cluster: str = "",
        *,
        nbytes: int = 0,
        now: float = 0.0,
    ) -> None:
        """The worker serves the version, or a part of it that grows. The caller has asked whether the source is `refused`. `nbytes`: of the
        whole version, 0 = not known."""
        if source.complete and nbytes and not self.is_holder(version, worker):
            self._measure_link(version, worker, cluster, nbytes, now)
        known = self._holders.setdefault(version, {})
        present = known.get(worker)
        if present is not None and present.source == source:
            return
        readers = present.readers if present is not None else set()
        known[worker] = WeightHolder(worker, node, cluster, source, readers)
        self._changed(version)

    def _measure_link(self, version: int, worker: int, cluster: str, nbytes: int, now: float) -> None:
        """All of a version is at this worker: learn from it what the link to its cluster carries."""
        key, link = (version, cluster), self._link(cluster)
        first, since = self._for_itself.get(key, (-1, 0.0))
        if first == worker and now - since > CHANGED * HANDOVER_S:
            self._doubted.add(cluster)
        crosses, since = self._crossing.get(key, (-1, 0.0))
        if crosses != worker:
            return
        self._doubted.discard(cluster)
        seconds = max(LEAST_S, now - since)
        rate = nbytes / seconds
        if now - since < LEAST_S and rate <= link.per_s:
            return
        if not link.per_s / CHANGED <= rate <= link.per_s * CHANGED:
            link = MeasuredRate(LINK_NBYTES_PER_S)
        self.links[cluster] = link.measured(nbytes, seconds)

    def _link(self, cluster: str) -> MeasuredRate:
        return self.links.get(cluster, MeasuredRate(LINK_NBYTES_PER_S))

    def drop(self, version: int, worker: int) -> None:
        """It serves the version no longer."""
        if self._holders.get(version, {}).pop(worker, None) is not None:
            for node in [n for (v, n), leader in self._leaders.items() if (v, leader) == (version, worker)]:
                del self._leaders[version, node]
            self._crosses_no_more(version, worker)
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
        for version in {v for (v, _), (one, _since) in self._crossing.items() if one == worker}:
            if not self.is_holder(version, worker):
                self._crosses_no_more(version, worker)
                self._changed(version)  # another engine of the cluster has to cross

    def _crosses_no_more(self, version: int, worker: int) -> None:
        for key in [key for key, (one, _) in self._crossing.items() if (key[0], one) == (version, worker)]:
            del self._crossing[key]

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
        for known in (self._crossing, self._for_itself):
            for key in [key for key in known if key[0] == version]:
                del known[key]

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

    def is_among_last(self, version: int, worker: int, most: int) -> bool:
        """Whether this worker holds all of the version, and `most` do at most."""
        complete = sum(holder.source.complete for holder in self._holders.get(version, {}).values())
        return complete <= most and self.is_holder(version, worker)

    def crosses(self, version: int, cluster: str) -> int | None:
        """The worker that fetches the version for this cluster from outside."""
        found = self._crossing.get((version, cluster))
        return None if found is None else found[0]

    def choose(
        self,
        version: int,
        worker: int,
        node: str,
        publisher: tuple[WeightSource, ...],
        peers: int = PEERS,
        *,
        alone: bool = False,
        cluster: str = "",
        nbytes: int = 0,
        now: float = 0.0,
    ) -> SourceChoice:
        """Where this worker shall pull the version from. It counts as a reader of them until it has `settled`. `alone`: it serves nobody,
        so that it fetches for itself and never leads its node. `nbytes`: of the whole version, 0 = not known.
        """
        self._unread(worker)
        switch = self._switches.get(node)
        leader = worker if alone else self._leader(version, worker, node)

        others_cross, wait_s = self._crossed_for(
            version, worker, cluster, publisher, nbytes, now, leads=leader == worker and not alone
        )

        def rank(holder: WeightHolder) -> tuple[int, bool, bool, int]:
            far = switch is None or self._switches.get(holder.node) != switch
            return len(holder.readers), holder.node != node, far, holder.worker

        def offered(source: WeightSource, near: bool) -> WeightSource:
            return source if near or leader == worker else msgspec.structs.replace(source, last=True)

        def across(source: WeightSource, kept: bool) -> WeightSource:
            """Of another cluster: no memory of it is read from here."""
            after_s = wait_s if others_cross else 0.0
            return msgspec.structs.replace(source, last=kept or others_cross, after_s=after_s, nixl=False)

        known_holders = [
            holder
            for holder in self._holders.get(version, {}).values()
            if holder.worker != worker and (holder.source.complete or self._leads(version, holder))
        ]
        other_holders = [holder for holder in known_holders if holder.cluster == cluster]
        outside = [holder for holder in known_holders if holder.cluster != cluster and holder.source.complete]
        # Those of the publisher's cluster first; none where this is that one, and it serves.
        outside = (
            [] if publisher and not cluster else sorted(outside, key=lambda one: (one.cluster, rank(one)))
        )
        outside = outside[:ACROSS]
        # One whose memory it can read as it fills comes first, and then the others by their load.
        near_ones = [holder for holder in other_holders if holder.node == node]
        first = [min(near_ones, key=rank)] if near_ones else []
        chosen = [*first, *sorted([holder for holder in other_holders if holder not in first], key=rank)][
            :peers
        ]
        for holder in (*chosen, *outside):
            holder.readers.add(worker)
        self._reading[worker] = version
        near = sum(holder.node == node for holder in chosen)
        reason = f"{len(publisher)} of the publisher, {len(chosen)} of {len(other_holders)} engines, {near} on its node"
        if leader != worker:
            reason += f", for which worker {leader} fetches it"
        if cluster:
            reason += f"; {self._reason_across(version, worker, cluster, others_cross, wait_s)}"
            sources = [across(source, kept=False) for source in publisher]
        else:
            sources = [offered(source, near=False) for source in publisher]
        sources += [offered(holder.source, holder.node == node) for holder in chosen]
        sources += [across(holder.source, kept=bool(publisher)) for holder in outside]
        return SourceChoice(tuple(sources), reason)

    def _crossed_for(
        self,
        version: int,
        worker: int,
        cluster: str,
        publisher: tuple[WeightSource, ...],
        nbytes: int,
        now: float,
        *,
        leads: bool,
    ) -> tuple[bool, float]:
        """Whether another engine of the cluster fetches the version from outside, or has; and for how many seconds without a chunk of it
        this one waits. It is the one, where nobody is and it `leads` its node."""
        if publisher and not cluster:
            return False, 0.0  # the version is here
        crossing_s = nbytes / self._link(cluster).per_s
        wait_s = min(MOST_WAIT_S, max(LEAST_WAIT_S, crossing_s + HANDOVER_S))
        whole = any(
            holder.worker != worker and holder.cluster == cluster and holder.source.complete
            for holder in self._holders.get(version, {}).values()
        )
        if whole:
            return True, wait_s
        key = version, cluster
        if nbytes and crossing_s <= HANDOVER_S and cluster not in self._doubted and key not in self._crossing:
            if leads:
                self._for_itself.setdefault(key, (worker, now))
            return False, 0.0
        if leads:
            self._crossing.setdefault(key, (worker, now))
        return key in self._crossing and self._crossing[key][0] != worker, wait_s

    def _reason_across(
        self, version: int, worker: int, cluster: str, others_cross: bool, wait_s: float
    ) -> str:
        rate = self._link(cluster)
        crosses, _ = self._crossing.get((version, cluster), (-1, 0.0))
        if others_cross:
            who = f"worker {crosses} fetches it" if crosses >= 0 else "an engine has it"
            return f"{who} on cluster {cluster}, for which it waits {wait_s:.3g} s; link {rate}"
        what = "for its cluster" if crosses == worker else "for itself"
        return f"it crosses to cluster {cluster} {what}; link {rate}"

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
