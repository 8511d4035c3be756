"""`python -m tests.system.wrong_engine FOLDER -m rollout ...`: an engine whose GPU computes wrong, if it is the first that starts.

Which one is wrong is settled by who makes FOLDER/wrong. Its tokens are drawn at temperature 1.2, whatever it is asked for.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from tests.system.play import ROOT

TEMPERATURE = 1.2


def python(folder: Path) -> Path:
    """What `harvest.python` is set to."""
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.system.wrong_engine {folder} "$@"\n'
    )
    program.chmod(0o755)
    return program


def spoil() -> None:
    import msgspec

    from rollout.engines import decoder
    from rollout.engines.sampling import draw

    def too_warm(logits: Any, sampling: Any, *more: Any) -> Any:
        warm = [msgspec.structs.replace(one, temperature=TEMPERATURE) for one in sampling]
        return draw(logits, warm, *more)

    setattr(decoder, "draw", too_warm)  # noqa: B010


def main() -> None:
    folder, flag, module = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    assert flag == "-m", sys.argv
    sys.argv = sys.argv[3:]
    try:
        (folder / "wrong").mkdir()
    except FileExistsError:
        pass
    else:
        spoil()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
