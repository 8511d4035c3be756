"""What deciding costs the daemon, and what it decides: both policies over a demo's fleet, completions and machines, played from its ledger.

    python benchmarks/router_policy.py [LEDGER.sqlite3 ...]

By default the ledger in tests/data (12 steps of 24 completions); `scavenger demo` leaves one under `demo-out/run-*/state`. Virtual time,
one thread, the real core. For each policy the steps' mean time, and the processor's milliseconds that its answers took in each step: on a
machine of two cores a demo's daemon shares them with its engines and its trainer. What an engine's start costs such a machine is not in it.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scavenger.ledger import store
from scavenger.ledger.read import history
from scavenger.ledger.read.reader import rows
from scavenger.policy.history import RunHistory
from scavenger.policy.interface import Standard
from scavenger.policy.predictive.policy import Predictive
from scavenger.simulate.replay.replay import replay

SHIPPED = Path(__file__).parents[1] / "tests/data/simulate/demo_ledger.gz"
QUESTIONS = ("place", "rebalance", "window", "engines", "observe")


def read(path: Path) -> RunHistory:
    engine = store.open_readonly(f"sqlite:///{path.absolute()}", store.MAINTENANCE_S)
    try:
        ((name,),) = rows(engine, "SELECT DISTINCT name FROM runs").rows
        return history.read(engine, name)
    finally:
        engine.dispose()


class Clock:
    """Adds up what the answers of a policy's class take while it is entered."""

    def __init__(self, policy: type) -> None:
        self._policy, self._plain = policy, {name: policy.__dict__[name] for name in QUESTIONS}
        self.spent = dict.fromkeys(QUESTIONS, 0.0)

    def __enter__(self) -> Clock:
        for name, method in self._plain.items():
            setattr(self._policy, name, self._timed(name, method))
        return self

    def __exit__(self, *exc: object) -> None:
        for name, method in self._plain.items():
            setattr(self._policy, name, method)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(policy: object, *about: Any) -> Any:
            started = time.process_time()
            try:
                return method(policy, *about)
            finally:
                self.spent[name] += time.process_time() - started

        return timed


def measure(run_history: RunHistory, name: str, policy: type) -> float:
    """Prints a row; returns the steps' mean seconds."""
    with Clock(policy) as clock:
        replayed = replay(run_history, name)
    steps = len(replayed.pairs)
    mean_s = sum(pair.replayed_s for pair in replayed.pairs) / steps
    each = ", ".join(
        f"{question} {1000 * clock.spent[question] / steps:.1f}"
        for question in QUESTIONS
        if clock.spent[question] > 0
    )
    print(
        f"  {name:<11} {mean_s:6.2f} s a step, {1000 * sum(clock.spent.values()) / steps:6.1f} ms of deciding in it ({each or 'none'})"
    )
    return mean_s


def main(ledgers: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shipped = Path(folder) / "demo.sqlite3"
        if not ledgers:
            shipped.write_bytes(gzip.decompress(SHIPPED.read_bytes()))
            store.upgrade(f"sqlite:///{shipped}")
        for path in map(Path, ledgers or [str(shipped)]):
            run_history = read(path)
            print(
                f"{path.name}: {len(run_history.steps)} steps of {len(run_history.steps[0].completions)} completions"
            )
            standard = measure(run_history, "standard", Standard)
            print(f"  predictive / standard: {measure(run_history, 'predictive', Predictive) / standard:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
