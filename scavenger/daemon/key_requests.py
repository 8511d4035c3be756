"""Who may own runs by being a user of this site: requests for keys are admitted by `[owners]`, and those admitted are looked at again.

    request (uid, key) --uid's name and groups--> admitted: the key is one of NAME's     answers/UID.json says so
                                              '-> refused: why, what to do
    every `CHECK_S`: whoever joined and is admitted no more loses all keys

Owns the rules and the note of who joined (`keys/joined/NAME`). What is in force, `enrolment` reads from the key files as ever.

Boundary: files that other users write, and the site's directory of users, which may take its time: a thread's work, IO.
"""

from __future__ import annotations

import contextlib
import grp
import math
import os
import pwd
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from scavenger.config.site import OwnersSection
from scavenger.errors import AuthError
from scavenger.protocol import keys
from scavenger.protocol.key_requests import KeyAnswer, KeyRequest, answer, take

#: Who joined is looked up this often.
CHECK_S = 60.0
#: Keys of one user that may connect at once: a user who needs more has lost some.
MOST_KEYS = 8
_ASK_ADMIN = "ask the site's admin: owners.users and owners.groups of the daemon's configuration say who may"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class User:
    """A user of the site. `groups`: their names, and their gids as text."""

    uid: int
    name: str
    groups: frozenset[str]


def look_up(uid: int) -> User | None:
    """As the host's directory has the user now; None where it knows none, which it may again later."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return None
    gids = os.getgrouplist(entry.pw_name, entry.pw_gid)
    names = set()
    for gid in gids:
        with contextlib.suppress(KeyError):
            names.add(grp.getgrgid(gid).gr_name)
    return User(uid, entry.pw_name, frozenset(names | {str(gid) for gid in gids}))


def is_admitted(user: User, owners: OwnersSection) -> bool:
    return user.name in owners.users or bool(user.groups & set(owners.groups))


class KeyRequests:
    """See the module. Call `poll` now and then, from one thread at a time; then read the key files again, and `give`."""

    def __init__(
        self,
        state_dir: Path,
        public_dir: Path,
        owners: OwnersSection,
        clock: Callable[[], float],
        look_up: Callable[[int], User | None] = look_up,
    ) -> None:
        self._state_dir, self._public_dir, self._owners = state_dir, public_dir, owners
        self._clock, self._look_up = clock, look_up
        self._checked_at = clock()

    def obey(self, owners: OwnersSection) -> None:
        """Admit by this from now on; who joined before is looked at again."""
        self._owners, self._checked_at = owners, -math.inf

    def poll(self) -> list[tuple[int, KeyAnswer]]:
        """Decide on what was asked since the last poll; the answers are for `give`, once the key files were read again.

        Raises `OSError`, `AuthError`: then the next poll goes on.
        """
        answers = [(uid, self._decide(uid, request)) for uid, request in take(self._public_dir)]
        if self._clock() - self._checked_at >= CHECK_S:
            self._checked_at = self._clock()
            self._check_joined()
        return answers

    def give(self, answers: Iterable[tuple[int, KeyAnswer]]) -> None:
        """Whoever reads that a key is accepted may connect with it."""
        for uid, given in answers:
            answer(self._public_dir, uid, given)
            log.info(
                "a key was asked for", uid=uid, user=given.name, public=given.public, refused=given.refused
            )

    def _decide(self, uid: int, request: KeyRequest) -> KeyAnswer:
        user = self._look_up(uid)
        if user is None:
            return KeyAnswer(request.public, "", f"the daemon's host knows no user {uid}", _ASK_ADMIN)
        if not is_admitted(user, self._owners):
            return KeyAnswer(request.public, user.name, f"{user.name} may not own runs", _ASK_ADMIN)
        try:
            why = self._refusal(user, request, keys.owner_keys(self._state_dir))
            if not why:
                self._accept(user, request)
        except AuthError as error:
            return KeyAnswer(request.public, user.name, error.cause, _ASK_ADMIN)
        return KeyAnswer(
            request.public, user.name, why, "make a new one: `scavenger join --new`" if why else ""
        )

    def _refusal(self, user: User, request: KeyRequest, known: dict[str, list[keys.OwnerKey]]) -> str:
        for name, its in known.items():
            for key in its:
                if key.public == request.public and name != user.name:
                    return "the key is another owner's"
                if key.public == request.public and not key.allowed:
                    return "the key was retired"
        others = [key for key in known.get(user.name, ()) if key.allowed and key.public != request.public]
        if len(others) >= MOST_KEYS and not request.only:
            return f"{user.name} has {MOST_KEYS} keys, none may be added"
        return ""

    def _accept(self, user: User, request: KeyRequest) -> None:
        if user.name in keys.owner_keys(self._state_dir):
            keys.add_owner_key(self._state_dir, user.name, request.public)
            if request.only:
                keys.retire_other_keys(self._state_dir, user.name, request.public)
        else:
            keys.enroll(self._state_dir, user.name, request.public)
        keys.write_private(self._joined(user.name), f"{user.uid}\n".encode())

    def _joined(self, name: str) -> Path:
        return self._state_dir / "keys" / "joined" / name

    def _check_joined(self) -> None:
        """Whoever joined and may not own runs any more. A user whom the directory does not name just now keeps what they have."""
        for path in sorted((self._state_dir / "keys" / "joined").glob("*")):
            user = self._look_up(int(path.read_text()))
            if user is None or (user.name == path.name and is_admitted(user, self._owners)):
                continue
            keys.revoke_owner(self._state_dir, path.name)
            path.unlink()
            log.warning("an owner's keys were revoked", user=path.name, reason="no longer named by [owners]")
