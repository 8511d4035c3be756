"""Unix users by name and number. Asks LDAP or SSSD where the site has one, for as long as that takes: never while a request waits.

Boundary: shared by both ends of `proxy`, the daemon and the commands.
"""

from __future__ import annotations

import os
import pwd

from scavenger.errors import ConfigError


def own_user() -> str:
    """This process's Unix user. Raises `ConfigError`."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        raise ConfigError(
            f"this process runs as uid {os.getuid()}, and this host knows no such user",
            "does `getent passwd` name it? if not, see to LDAP or SSSD",
        ) from error


def uid_of(user: str) -> int:
    """Raises `ConfigError`."""
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError as error:
        raise ConfigError(
            f"there is no user {user!r} on this host", "make it on every node, with one uid (docs/site.md)"
        ) from error
