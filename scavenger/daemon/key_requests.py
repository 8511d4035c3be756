"""Users of the site who own runs: what `[owners]` admits, requests for keys, and keys that are suspended while their user is not admitted.

    request (uid, key) --the user and the groups--> admitted: the key is one of NAME's    replies/UID.json says so
                                                '-> refused: why, and what to do
    every `CHECK_S`: the keys of each user that joined are in force while the user is admitted

`admission` and `refusal` are the rules, pure. `KeyRequests` carries them out: each user by itself, so that one broken file, or a user whom
the site's directory does not know just now, holds up no other user. What is in force `enrolment` reads from the key files, as ever.

Boundary: files that other users write, and the site's directory of users, which may take its time: a thread's work, IO.
"""

from __future__ import annotations

import asyncio
import grp
import math
import os
import pwd
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from scavenger.config.site import OwnersSection
from scavenger.errors import AuthError, ScavengerError
from scavenger.host import munge
from scavenger.protocol import keys
from scavenger.protocol.key_requests import KeyReply, KeyRequest, reply, take

#: Requests are read this often.
POLL_S = 2.0
#: Whether those who joined are admitted is checked this often.
CHECK_S = 60.0
#: A user whom the site's directory does not know for so long has left; for less the directory may be away.
GONE_S = 86_400.0
#: Keys of one user that may connect at once: a user who needs more has lost some.
MOST_KEYS = 8
_ASK_ADMIN = "ask the site's admin: owners.users and owners.groups of the daemon's configuration say who may"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class User:
    """A user of the site. `gids`: of all groups that the user is in."""

    uid: int
    name: str
    gids: frozenset[int]


@dataclass(frozen=True, slots=True)
class UserDirectory:
    """The site's users and groups. Each gives None for what it does not know now, which it may know later."""

    user: Callable[[int], User | None]
    gid: Callable[[str], int | None]


def _user(uid: int) -> User | None:
    try:
        entry = pwd.getpwuid(uid)
        return User(uid, entry.pw_name, frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid)))
    except (KeyError, OSError):
        return None


def _gid(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, OSError):
        return None


#: As this host has them: /etc/passwd, LDAP, SSSD.
OF_THIS_HOST = UserDirectory(_user, _gid)


# ---------------------------------------------------------------- the rules


def admission(user: User, owners: OwnersSection, gid: Callable[[str], int | None]) -> bool | None:
    """Whether this user may own runs; None where a group of `owners` that might decide it is not known now."""
    if user.name in owners.deny:
        return False
    if user.name in owners.users:
        return True
    found = [int(group) if group.isdigit() else gid(group) for group in owners.groups]
    if any(one in user.gids for one in found):
        return True
    return None if None in found else False


def refusal(
    name: str,
    request: KeyRequest,
    known: Mapping[str, Sequence[keys.OwnerKey]],
    joined: bool,
    server_public: str = "",
) -> tuple[str, str]:
    """Why an admitted user's key is not accepted, and what to do; "" where it is.

    `known`: every owner's keys. `joined`: this name did. `server_public`: the daemon's own, which all users can read.
    """
    anew = "make a new one: `scavenger join --new`"
    if request.public == server_public:
        return "the key is the daemon's", anew
    if name in known and not joined:
        return f"an owner {name} was enrolled by hand", "ask the site's admin to remove that one first"
    for owner, its in known.items():
        for key in its:
            if key.public == request.public and owner != name:
                return "the key is another owner's", anew
            if key.public == request.public and not key.allowed:
                return "the key was retired", anew
    others = [key for key in known.get(name, ()) if key.allowed and key.public != request.public]
    if len(others) >= MOST_KEYS and not request.only:
        return f"{name} has {MOST_KEYS} keys, none may be added", anew
    return "", ""


# ---------------------------------------------------------------- the files


class KeyRequests:
    """See the module. `directory` may block; `poll` and `send` are called in a thread, one at a time."""

    def __init__(
        self,
        state_dir: Path,
        public_dir: Path,
        owners: OwnersSection,
        clock: Callable[[], float],
        directory: UserDirectory = OF_THIS_HOST,
        munge_socket: str = "",
    ) -> None:
        self._munge_socket = munge_socket
        self._gid = os.getegid()  # that of what is made in the requests folder
        self._unknown: dict[str, float] = {}  # name -> since when the directory does not know the user
        self._state_dir, self._public_dir, self._owners = state_dir, public_dir, owners
        self._clock, self._directory = clock, directory
        self._checked_at = clock()
        self._warned: set[str] = set()

    async def run(self, read_key_files: Callable[[], None]) -> None:
        """Answer requests for as long as the daemon runs. `read_key_files`: puts in force what the files say. A fault here ends nothing."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                replies = await asyncio.to_thread(self.poll)
                if replies:
                    read_key_files()
                    await asyncio.to_thread(self.send, replies)
            except (OSError, ValueError, ScavengerError, subprocess.SubprocessError) as error:
                log.warning("requests for keys are not answered now", reason=str(error))

    def reconfigure(self, owners: OwnersSection) -> None:
        """Admit by this from now on; users who joined before are checked at the next poll."""
        self._owners, self._checked_at = owners, -math.inf

    def poll(self) -> list[tuple[int, KeyReply]]:
        """Decide on what was asked since the last poll; the replies are for `send`, once the key files were read again."""
        replies = [(uid, self._decide(uid, request)) for uid, request in take(self._public_dir)]
        if self._clock() - self._checked_at >= CHECK_S:
            self._checked_at = self._clock()
            for path in sorted(keys.joined_dir(self._state_dir).glob("*")):
                self._check(path)
        return replies

    def send(self, replies: Iterable[tuple[int, KeyReply]]) -> None:
        """Tell those who asked. A user who reads that a key is accepted may connect with it."""
        for uid, sent in replies:
            log.info("a key was asked for", uid=uid, user=sent.name, refused=sent.refused)
            try:
                reply(self._public_dir, uid, sent)
            except OSError as error:
                log.warning("a reply was not written", uid=uid, reason=str(error))

    def _decide(self, uid: int, request: KeyRequest) -> KeyReply:
        user = self._directory.user(uid)
        if user is None:
            return self._reply(request, "", f"the daemon's host knows no user {uid}", _ASK_ADMIN)
        if self._gid in user.gids:
            why = f"{user.name} is of the group (gid {self._gid}) under which the daemon runs"
            return self._reply(
                request, user.name, why, "ask the site's admin to run the daemon under a group of its own"
            )
        if self._owners.proof == "munge" and (why := self._unproved(uid, request)):
            return self._reply(request, user.name, why, "join again, on a host where `munge -n` works")
        admitted = admission(user, self._owners, self._directory.gid)
        if admitted is None:
            why = "the daemon's host does not know a group of owners.groups now"
            return self._reply(
                request, user.name, why, "try again later; if it stays so, ask the site's admin"
            )
        if not admitted:
            return self._reply(request, user.name, f"{user.name} may not own runs", _ASK_ADMIN)
        try:
            joined = keys.joined_uid(self._state_dir, user.name)
            why, remedy = refusal(
                user.name,
                request,
                keys.owner_keys(self._state_dir, self._warn),
                joined is not None,
                keys.read_keypair(keys.server_key_path(self._state_dir)).public,
            )
            if joined not in (None, uid):
                why, remedy = f"{user.name} was another user (uid {joined}) when it joined", _ASK_ADMIN
            if not why:
                self._accept(user, request)
        except (AuthError, OSError) as error:
            log.error("a key could not be accepted", user=user.name, reason=str(error))
            return self._reply(request, user.name, "the daemon could not write the key down", _ASK_ADMIN)
        return self._reply(request, user.name, why, remedy)

    def _unproved(self, uid: int, request: KeyRequest) -> str:
        """Why the request's credential does not show that this user asks; "" where it does."""
        if not request.proof:
            return "the request bears no MUNGE credential (owners.proof)"
        try:
            found = munge.user_of(request.proof, request.claim, self._munge_socket)
        except AuthError as error:
            return error.cause
        return "" if found == uid else "the request's MUNGE credential is another user's"

    @staticmethod
    def _reply(request: KeyRequest, name: str, refused: str, remedy: str) -> KeyReply:
        return KeyReply(request.nonce, name, refused, remedy)

    def _accept(self, user: User, request: KeyRequest) -> None:
        keys.note_joined(self._state_dir, user.name, user.uid)
        if user.name in keys.owner_keys(self._state_dir, self._warn):
            keys.add_owner_key(self._state_dir, user.name, request.public)
            if request.only:
                keys.retire_other_keys(self._state_dir, user.name, request.public)
        else:
            keys.enroll(self._state_dir, user.name, request.public)
        keys.resume_owner(self._state_dir, user.name)

    def _check(self, path: Path) -> None:
        """Suspend the keys of a user who is not admitted any more, and resume those of one who is again.

        What is not known changes nothing; but a user whom the directory does not know for `GONE_S` has left.
        """
        name = path.name
        try:
            admitted = self._admitted(name)
            suspended = keys.is_suspended(self._state_dir, name)
            if admitted is False and not suspended:
                keys.suspend_owner(self._state_dir, name)
                log.warning(
                    "an owner's keys are suspended", user=name, reason="[owners] does not admit the user"
                )
            elif admitted and suspended:
                keys.resume_owner(self._state_dir, name)
                log.warning(
                    "an owner's keys are in force again", user=name, reason="[owners] admits the user"
                )
        except (AuthError, OSError, ValueError) as error:
            self._warn(name, error)

    def _admitted(self, name: str) -> bool | None:
        if name in self._owners.deny:
            return False
        uid = keys.joined_uid(self._state_dir, name)
        user = self._directory.user(uid) if uid is not None else None
        if user is None:
            since = self._unknown.setdefault(name, self._clock())
            return False if self._clock() - since >= GONE_S else None
        self._unknown.pop(name, None)
        return user.name == name and admission(user, self._owners, self._directory.gid)

    def _warn(self, name: str, error: Exception) -> None:
        if (line := f"{name}: {error}") not in self._warned:
            self._warned.add(line)
            log.warning("an owner's files cannot be used", user=name, reason=str(error))
