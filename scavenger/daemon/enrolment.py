"""Who may own runs, as the files under `keys/` say now: given to the key ring, and each change to the ledger.

Boundary: the key files under `keys/`; IO.

Owns what is reported when: a key that comes into force is an event `key_added`, one that goes out of it `key_revoked`, each once, whether
the files changed while a daemon ran or between two. The daemon's own key is among them; those of workers are in the ledger's `jobs`. Only
public keys are reported. Knows no socket and no database: the ledger's past is handed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from scavenger.errors import AuthError
from scavenger.ledger.records import Event, Record
from scavenger.policy.fleet_size import Demand, EnvironmentDemand
from scavenger.protocol import keys
from scavenger.router.core.events import PeerIdentity
from scavenger.router.edge.keyring import KeyRing

log = structlog.get_logger()
Owner = tuple[str, str]  # role ("daemon" | "owner" | "guest" | "cluster"), name


class Enrolment:
    """Keeps the key ring equal to the key files, and records each change. `in_force`: public key -> its owner, as the ledger has it."""

    def __init__(
        self,
        state_dir: Path,
        server_public: str,
        keyring: KeyRing,
        write: Callable[[Sequence[Record]], object],
        clock: Callable[[], float],
        in_force: Mapping[str, Owner],
    ) -> None:
        self._state_dir, self._server_public = state_dir, server_public
        self._keyring, self._write, self._clock = keyring, write, clock
        self._reported = dict(in_force)
        self._owners: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._guests: set[str] = set()  # public keys
        self.clusters: dict[str, str] = {}  # public key of each further cluster's harvester -> the cluster
        self._local = ""  # the key that runs of the state directory's own owner are recorded under
        self._own = set[str]()  # such keys of all owners who are this process's own Unix user
        self._warned: set[str] = set()

    def read(self) -> None:
        """Read the files; a removed or unusable file, a retired or suspended key revokes at once. Raises `OSError`: then all stays."""
        enrolled = keys.owner_keys(self._state_dir, self._warn)
        owners = keys.enrolled_owners(self._state_dir, self._warn)
        for gone in set(self._owners) - set(owners):
            self._keyring.revoke(gone)
        for public, recorded in owners.items():
            self._keyring.allow(public, PeerIdentity("owner", recorded))
        self._owners = owners
        guests = keys.guest_keys(self._state_dir, self._warn)
        for gone in self._guests - {pair.public for pair in guests.values()}:
            self._keyring.revoke(gone)
        for pair in guests.values():
            self._keyring.allow(pair.public, PeerIdentity("worker", pair.public, pair.run, pair.intent))
        self._guests = {pair.public for pair in guests.values()}
        # These open nothing at the router: the link's own port asks here.
        found = keys.cluster_keys(self._state_dir, self._warn)
        self.clusters = {public: name for name, public in found.items()}
        # The ledger's runs name their owner's first key; its reports find the name here.
        names = {its[-1].public: name for name, its in enrolled.items()}
        own = self._own_key()
        self._local = next(
            (its[-1].public for its in enrolled.values() if own in [key.public for key in its]), ""
        )
        self._own = {its[-1].public for name, its in enrolled.items() if self._joined_as(name) == os.getuid()}
        self._own |= {self._local} - {""}
        now = self._clock()
        fresh = {key: name for key, name in names.items() if self._names.get(key) != name}
        events: list[Record] = [
            Event("owner_enrolled", 0, key, name, "{}", now) for key, name in fresh.items()
        ]
        self._names = names
        in_force: dict[str, Owner] = {self._server_public: ("daemon", "")}
        in_force |= {
            key.public: ("owner", name)
            for name, its in enrolled.items()
            for key in its
            if key.public in owners
        }
        in_force |= {pair.public: ("guest", name) for name, pair in guests.items()}
        in_force |= {public: ("cluster", name) for public, name in self.clusters.items()}
        events += changes(
            self._reported,
            in_force,
            {key.public for its in enrolled.values() for key in its if not key.allowed},
            {key.public for its in enrolled.values() for key in its if key.allowed},
            now,
        )
        self._reported = in_force
        if events:
            self._write(events)

    def _warn(self, name: str, error: Exception) -> None:
        if (line := f"{name}: {error}") not in self._warned:
            self._warned.add(line)
            log.error(
                "an owner's file cannot be used: no key of theirs is accepted", owner=name, reason=str(error)
            )

    def _own_key(self) -> str:
        """The public key in `keys/owner.key`, with which the daemon's own user trains; "" where no such file can be used."""
        try:
            return keys.read_keypair(keys.owner_key_path(self._state_dir)).public
        except (AuthError, OSError):
            return ""

    def _joined_as(self, name: str) -> int | None:
        """The uid with which this owner joined; None where that is not known."""
        try:
            return keys.joined_uid(self._state_dir, name)
        except (AuthError, OSError):
            return None

    def unix_user(self, owner_key: str, daemon_user: str) -> str:
        """As whom this owner's training jobs run: the owner is called so, or is the daemon's own user. "" for an unknown owner."""
        return daemon_user if owner_key and owner_key == self._local else self._names.get(owner_key, "")

    def of_owners(self, demand: Iterable[Demand]) -> list[Demand]:
        """The runs' demand with their owners' names instead of keys. A run of an owner none of whose keys is accepted wants nothing: its
        engines leave, however long its training job is still waited for."""
        accepted = set(self._owners.values())
        why = "no key of its owner is accepted (suspended, retired or removed)"
        return [
            replace(want, owner=self._names.get(want.owner, ""))
            if want.owner in accepted
            else replace(want, owner=self._names.get(want.owner, ""), engines=0, reason=why)
            for want in demand
        ]

    def environments_of_owners(self, demand: Iterable[EnvironmentDemand]) -> list[EnvironmentDemand]:
        """The same of environment workers, of the runs of the daemon's own Unix user alone: their jobs run what those runs bring, as the
        user who submits them."""
        accepted = set(self._owners.values()) & self._own
        return [
            replace(want, owner=self._names.get(want.owner, "")) for want in demand if want.owner in accepted
        ]


def changes(
    before: Mapping[str, Owner], after: Mapping[str, Owner], retired: set[str], kept: set[str], at: float
) -> list[Record]:
    """The events of a change of the keys in force. `retired`, `kept`: keys that their owner's file names as not accepted, and as accepted:
    of the latter one that is not in force is suspended. Pure.
    """
    events: list[Record] = []
    for public in sorted(set(before) - set(after)):
        role, name = before[public]
        why = (
            "another key took its place"
            if role == "daemon"
            else "retired"
            if public in retired
            else "suspended: [owners] does not admit the user"
            if public in kept
            else "removed from the owner's file"
        )
        events.append(_event("key_revoked", public, role, name, why, at))
    for public in sorted(public for public in after if before.get(public) != after[public]):
        role, name = after[public]
        earlier = sum(owner == (role, name) for key, owner in after.items() if key != public)
        why = (
            f"accepted beside {earlier} earlier {'key' if earlier == 1 else 'keys'}"
            if earlier
            else "accepted"
        )
        events.append(_event("key_added", public, role, name, why, at))
    return events


def _event(kind: str, public: str, role: str, name: str, why: str, at: float) -> Event:
    return Event(
        kind, 0, public, f"{f'{role} {name}'.strip()}: {why}", json.dumps({"role": role, "name": name}), at
    )
