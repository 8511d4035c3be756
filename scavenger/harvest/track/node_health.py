"""Which nodes kill engines, and how long to wait after jobs that die at once. Pure.

A node with `quarantine_after` engine deaths within `quarantine_s` gets no more engines for `quarantine_s`; twice as long each further time
(at most 8 times), and one step less for every `quarantine_s` that it is free without a death. After jobs that died at once submission
waits `backoff_s`, doubled with each further one up to `MAX_BACKOFF_S`, until an engine has proved that jobs can work.

Deaths that are Slurm's doing (preempted, cancelled, a lost node, a time limit) never come here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scavenger.backoff import backoff_s

MAX_BACKOFF_S = 600.0
MAX_SENTENCE = 8


@dataclass(frozen=True, slots=True)
class HealthRules:
    quarantine_after: int
    quarantine_s: float
    backoff_s: float


@dataclass(slots=True)
class _Record:
    """What is held against one node. `strikes` are past quarantines not yet forgotten; `until` is when the present one ends."""

    deaths: list[float] = field(default_factory=list)
    strikes: int = 0
    until: float = 0.0
    reason: str = ""
    clean_since: float = 0.0


class Health:
    """Deaths in; quarantined nodes and the end of the back-off out."""

    def __init__(self, rules: HealthRules) -> None:
        self._rules = rules
        self._nodes: dict[str, _Record] = {}
        self._failures = 0
        self._failed_at = 0.0
        self._not_before = 0.0
        self._why = ""

    def died(self, node: str, reason: str, now: float) -> str:
        """An engine died on `node`. Returns why the node is quarantined from now on, or ""."""
        rules = self._rules
        record = self._nodes.setdefault(node, _Record(clean_since=now))
        self._forget(record, now)
        record.deaths = [at for at in record.deaths if now - at < rules.quarantine_s] + [now]
        record.clean_since = max(now, record.until)
        if len(record.deaths) < rules.quarantine_after or now < record.until:
            return ""
        sentence_s = rules.quarantine_s * min(2**record.strikes, MAX_SENTENCE)
        record.strikes += 1
        record.until = record.clean_since = now + sentence_s
        count = len(record.deaths)
        record.deaths = []
        record.reason = f"{count} engines died on it within {rules.quarantine_s:g} s, the last: {reason}; for {sentence_s:g} s"
        return record.reason

    def _forget(self, record: _Record, now: float) -> None:
        steps = max(0, int((now - record.clean_since) // self._rules.quarantine_s))
        if steps:
            record.strikes = max(0, record.strikes - steps)
            record.clean_since += steps * self._rules.quarantine_s

    def quarantined(self, now: float) -> tuple[tuple[str, str], ...]:
        """(node, reason) of every node that is to get no engine now, by name."""
        return tuple(
            (name, record.reason) for name, record in sorted(self._nodes.items()) if now < record.until
        )

    def failed_at_once(self, reason: str, now: float) -> None:
        """A job died at once, or a submission was refused: wait before the next."""
        self._failures += 1
        self._failed_at = now
        wait_s = backoff_s(self._rules.backoff_s, MAX_BACKOFF_S, self._failures)
        self._not_before = now + wait_s
        self._why = f"{self._failures} jobs in a row died at once, the last: {reason}"

    def proved(self, started_at: float) -> None:
        """An engine that started at `started_at` lives or works. Only one that started after the last failure proves anything."""
        if started_at >= self._failed_at:
            self._failures, self._not_before, self._why = 0, 0.0, ""

    def backoff(self) -> tuple[float, str]:
        """(Unix s before which nothing is submitted, why); (0, "") when there is no back-off."""
        return self._not_before, self._why
