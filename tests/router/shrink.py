"""From a failing log of ops to a short one that fails in the same way: delta debugging (Zeller and Hildebrandt, 2002: ddmin).

Any part of a log is a log (see `world`), so parts are left out as long as the same failure stays; what is left is printed as
JSON for a file under `replays/`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

from tests.router.schedule import play
from tests.router.site import Op


def signature(error: BaseException) -> str:
    """What failed, whatever the numbers."""
    return f"{type(error).__name__}: " + re.sub(r"\d+", "#", str(error).splitlines()[0] if str(error) else "")


def failure(log: list[Op], alone: bool) -> str:
    """The signature of a log's failure, or an empty string."""
    try:
        play(log, alone)
    except Exception as error:  # noqa: BLE001 (whatever broke is what is looked for)
        return signature(error)
    return ""


def shrink(
    log: list[Op],
    alone: bool = False,
    *,
    seconds: float = 20.0,
    fails: Callable[[list[Op]], str] | None = None,
) -> list[Op]:
    """The shortest log found within `seconds` that fails as `log` does; raises ValueError when that does not fail."""
    test = fails or (lambda ops: failure(ops, alone))
    wanted, until = test(log), time.monotonic() + seconds
    if not wanted:
        raise ValueError("this log does not fail")
    size = max(len(log) // 2, 1)
    while time.monotonic() < until:
        found, at = False, 0
        while at < len(log) and time.monotonic() < until:
            shorter = log[:at] + log[at + size :]
            if test(shorter) == wanted:
                log, found = shorter, True
            else:
                at += size
        if not found and size == 1:
            break
        size = size if found and size == 1 else max(size // 2, 1)
    return log


def as_json(log: list[Op], alone: bool, about: str) -> str:
    """One op a line: to be kept as a file under `replays/`."""
    ops = ",\n    ".join(json.dumps(op) for op in log)
    return f'{{\n  "about": {json.dumps(about)},\n  "alone": {json.dumps(alone)},\n  "ops": [\n    {ops}\n  ]\n}}'
