"""Who runs this process, by name."""

from __future__ import annotations

import getpass
import os


def user_name() -> str:
    """The user's name; `uid61001` where the host knows none, as in a container or while the directory service is away."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        return f"uid{os.getuid()}"
