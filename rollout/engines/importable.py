"""`python -m rollout.engines.importable ENGINE`: whether this Python has what an engine needs. Exit code 0, or 1 and the reason.

Owns what each engine imports, at once and later. Loads no model and opens no socket. `scavenger doctor --submit` runs it where engines run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence

from rollout.engines.registry import MODULES

#: What each engine needs beside its own module, which imports some of it only when a model is built.
NEEDS: Mapping[str, Sequence[str]] = {
    "reference": ("torch", "transformers", "safetensors"),
    "vllm": ("torch", "transformers", "vllm", "vllm.v1.engine.async_llm", "vllm.sampling_params"),
}


def lacking(engine: str) -> str:
    """Why this Python cannot run the engine, on one line, or ""."""
    if engine not in NEEDS:
        return f"there is no engine {engine!r}: one of {', '.join(sorted(NEEDS))}"
    for name in (*NEEDS[engine], MODULES[engine]):
        try:
            importlib.import_module(name)
        except (
            ImportError,
            OSError,
            RuntimeError,
            AttributeError,
            ValueError,
            TypeError,
        ) as error:  # OSError: a shared library's
            reason = " ".join(str(error).split()) or "no reason given"
            return f"{sys.executable} cannot import {name}: {type(error).__name__}: {reason}"
    return ""


def main(argv: Sequence[str]) -> int:
    (engine,) = argv
    reason = lacking(engine)
    print(reason or "ok", flush=True)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
