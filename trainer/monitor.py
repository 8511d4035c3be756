"""What a run tells people: one JSON line a step in `metrics.jsonl`, one plain line a step on standard output. Rank 0 only.

Owns the two formats. Floats are written with all their digits, so two runs can be compared bit by bit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO


class Monitor:
    """Appends to `<out_dir>/metrics.jsonl`: a resumed run goes on in the same file, its attempt tells the lives apart."""

    def __init__(self, out_dir: Path, *, steps: int, out: TextIO | None = None) -> None:
        out_dir.mkdir(parents=True, exist_ok=True)
        self._file = (out_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._steps = steps
        self._out = out or sys.stdout

    def say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def record(self, kind: str, step: int, attempt: int, metrics: dict[str, float], **more: Any) -> None:
        """`kind`: "train" | "eval"."""
        entry = {"kind": kind, "step": step, "attempt": attempt, "at": time.time(), **metrics, **more}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def step(self, step: int, attempt: int, version: int, metrics: dict[str, float], phases: tuple[str, ...]) -> None:
        self.record("train", step, attempt, metrics, version=version, phases=list(phases))
        self.say(
            f"step {step}/{self._steps}  reward {metrics['reward']:.3f}  loss {metrics['loss']:+.6e}  tokens {metrics['tokens']:.0f}  "
            f"length {metrics['length_mean']:.1f}  moved {metrics['moves']:.0f}  {metrics['seconds']:.1f} s "
            f"(wait {metrics['seconds_wait']:.1f}, train {metrics['seconds_train']:.1f}, publish {metrics['seconds_publish']:.2f})"
        )

    def evaluation(self, step: int, attempt: int, metrics: dict[str, float]) -> None:
        self.record("eval", step, attempt, metrics)
        self.say(f"eval after step {step}: sampled {metrics['eval_sampled']:.3f}, greedy {metrics['eval_greedy']:.3f}")

    def close(self) -> None:
        self._file.close()
