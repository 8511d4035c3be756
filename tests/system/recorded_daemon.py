"""The daemon with a recorder as its router's core: what `python -m scavenger` does, and then the log of each core's events is replayed.

Writes `replayed.json` beside the configuration: the kinds of events, and whether the core made of the log is equal. Only tests start it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scavenger.cli.main import main
from tests.router.replay import dump, recording, replayed


def run() -> None:
    config = Path(sys.argv[sys.argv.index("--config") + 1])
    with pytest.MonkeyPatch.context() as patch:
        cores = recording(patch, "scavenger.daemon.main")
        try:
            main()
        finally:
            (core,) = cores
            kinds = sorted(core.kinds())
            equal = dump(replayed(core)) == dump(core)
            found = {"events": len(core.log), "kinds": kinds, "equal": equal}
            config.with_name("replayed.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run()
