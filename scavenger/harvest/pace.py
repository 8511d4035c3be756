"""When to poll the cluster again, and how much of it. Pure: the time, the draw of chance and what a poll costs are given.

    at rest (no demand, no job of ours)          three times `poll_interval_s`: below 2 RPCs a minute, all that is asked seldom counted
    otherwise                                    every `poll_interval_s`
    something is expected, or the demand moved   after `fast_poll_interval_s`, or at once, as far as the RPCs saved up allow
    a poll failed                                `fast_poll_interval_s`, doubling to `MAX_RETRY_S`; from
    `poll_interval_s` on where Slurm asked for fewer RPCs

Every interval is stretched by chance, so that the daemons of a site do not ask in step. RPCs are saved up at `max_rpc_per_min` for
`SAVED_MIN` at most: the polls' average over that time is what the site allows, whatever happens.

Submissions and cancellations are counted too, and are never delayed. They put off what is asked beyond the regular polls. The regular polls
have savings of their own, which only polls spend: a daemon that submits many jobs still sees what becomes of them.

Owns that arithmetic. Knows nothing of views, jobs or commands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from scavenger.backoff import backoff_s
from scavenger.cluster.error_kind import ErrorKind

#: Least time between two polls, whatever asks for one.
MIN_PAUSE_S = 2.0
#: Longest wait between two tries to reach a scheduler that does not answer.
MAX_RETRY_S = 300.0
REST = 3.0
SAVED_MIN = 10.0
#: Intervals are stretched by a factor between these.
STRETCH = (0.9, 1.1)
#: A poll that is late by less than this is not late: it is the time of a poll itself.
SLACK_S = 5.0


class PollKind(StrEnum):
    FULL = "full"  # nodes, jobs, now and then partitions: what a decision needs
    JOBS = "jobs"  # the queue alone: what has become of our jobs


@dataclass(frozen=True, slots=True)
class PaceRules:
    """`floor_s`: the site's: no two polls are closer. `max_rpc_per_min`: requests to the controller, as it counts them."""

    poll_interval_s: float
    fast_poll_interval_s: float
    floor_s: float
    max_rpc_per_min: float


class PollPace:
    """See the module. `draw` gives numbers in [0, 1). Not shared between threads."""

    def __init__(self, rules: PaceRules, draw: Callable[[], float], now: float) -> None:
        self.rules, self._draw = rules, draw
        self._saved = self._most = rules.max_rpc_per_min * SAVED_MIN
        self._saved_for_regular = self._most  # as `_saved`, but no command spends it: never less than that
        self._counted_at = now
        self._full_at = self._poll_at = -math.inf
        self._stretch = 1.0
        self._cost = {PollKind.FULL: 4.0, PollKind.JOBS: 2.0}  # until one was measured
        self.failures = 0
        self._retry_at = -math.inf
        self._began_at: float | None = None  # of the poll under way
        self._began_after_s = 0.0  # how long after the last whole one it began
        self._put_off_s = 0.0  # how long the budget keeps the next whole poll back
        self._commands_s = 0.0  # how long the commands after the last poll took
        self._promised_s = math.inf  # within which the next whole poll is to come
        self._quick_s = 0.0  # the same of a poll of any kind while something is expected; 0: nothing is
        self._late = ""  # what kept the last whole poll from coming in time

    # ---------------------------------------------------------------- what happened

    def begins(self, now: float) -> None:
        """A poll is asked for."""
        self._began_at, self._began_after_s = now, now - self._full_at

    def spent(self, rpcs: int, now: float) -> None:
        """Requests were sent for something else than a poll."""
        self._save(now)
        self._saved = max(-self._most, self._saved - rpcs)

    def polled(self, poll: PollKind, rpcs: int, now: float) -> None:
        """A poll succeeded. What it cost is what the next one of its kind is taken to cost."""
        self._spent_on_poll(rpcs, now)
        self._cost[poll] = float(rpcs)
        self._poll_at = now
        if poll is PollKind.FULL:
            self._late, self._commands_s = self._behind(now), 0.0
            self._full_at = now
        self._roll()
        self.failures, self._retry_at, self._began_at = 0, -math.inf, None

    def failed(self, error_kind: str, rpcs: int, now: float, *, polling: bool = True) -> float:
        """A poll, or a command after one (not `polling`), failed. Returns the seconds until the next try."""
        if polling:
            self._spent_on_poll(rpcs, now)
        else:
            self.spent(rpcs, now)
        self.failures += 1
        self._began_at = None
        self._roll()
        first_s = (
            self.rules.poll_interval_s
            if error_kind == ErrorKind.RATE_LIMITED
            else self.rules.fast_poll_interval_s
        )
        wait_s = max(self.rules.floor_s, backoff_s(first_s, MAX_RETRY_S, self.failures)) * self._stretch
        self._poll_at, self._retry_at = now, now + wait_s
        return wait_s

    def retry(self, now: float) -> None:
        """What failed is known to answer again: the next try need not wait."""
        self._retry_at = min(self._retry_at, now)

    def obey(self, rules: PaceRules, now: float) -> None:
        """Other rules from now on. What was saved up under a larger limit is not spent under a smaller one."""
        self._save(now)
        self.rules, self._most = rules, rules.max_rpc_per_min * SAVED_MIN
        self._saved = max(-self._most, min(self._saved, self._most))
        self._saved_for_regular = max(-self._most, min(self._saved_for_regular, self._most))

    def acted(self, took_s: float) -> None:
        """The commands after a whole poll are done: submissions and cancellations are waited for."""
        self._commands_s = took_s

    # ---------------------------------------------------------------- whether they come as promised

    def behind(self, now: float) -> str:
        """Why, and how far, polls come later than promised; "" = they do not.

        Of the poll that is due, else of the last whole one, until one comes in time.
        """
        if overdue := self._behind(now):
            return overdue
        if self._quick_s and self._began_at is None and now - self._poll_at > self._quick_s + SLACK_S:
            waited = f"something is expected, and the last poll was {now - self._poll_at:.0f} s ago instead of {self._quick_s:.0f} s"
            return f"{waited}: {self._budget()}"
        return self._late

    def _behind(self, now: float) -> str:
        after_s = now - self._full_at
        if math.isinf(after_s) or after_s <= self._promised_s + SLACK_S:
            return ""
        under_way_s = now - self._began_at if self._began_at is not None else 0.0
        causes = {
            f"slurmctld is slow: the poll took {under_way_s:.0f} s": under_way_s,
            f"slurmctld is slow: commands after the last poll took {self._commands_s:.0f} s": self._commands_s,
            self._budget(): self._put_off_s,
        }
        why = max(causes, key=lambda cause: causes[cause])
        if self.failures:
            why = f"Slurm failed {self.failures} times in a row"
        elif causes[why] < 1.0:
            why = "this host is too busy, or was suspended"
        return (
            f"{after_s:.0f} s since the last whole poll where {self._promised_s:.0f} s were promised: {why}"
        )

    def _budget(self) -> str:
        return f"the RPC budget is spent (cluster.max_rpc_per_min = {self.rules.max_rpc_per_min:g})"

    # ---------------------------------------------------------------- what is next

    def next(
        self, now: float, *, expecting: bool, moved: bool, at_rest: bool, by: float = math.inf
    ) -> tuple[float, PollKind]:
        """When the next poll is due, and which. `moved`: a poll was asked for, or a run wants another number of engines.

        `by`: a job was promised GPUs by then, so that a whole poll is due then whatever it costs.
        """
        rules = self.rules
        interval_s = max(rules.poll_interval_s, rules.floor_s) * (REST if at_rest else 1.0)
        self._promised_s = interval_s * STRETCH[1]
        self._quick_s = max(rules.floor_s, rules.fast_poll_interval_s) * STRETCH[1] if expecting else 0.0
        if self.failures:
            return self._retry_at, PollKind.FULL
        regular_s = interval_s * self._stretch
        regular_at = self._full_at + regular_s
        # the budget may put a poll off, but never for longer than the interval itself
        affordable_at = self._affordable(PollKind.FULL, now, regular=True)
        due = (max(regular_at, min(affordable_at, regular_at + regular_s)), PollKind.FULL)
        if (
            affordable_at > now or now < regular_at
        ):  # once it may be asked for, what it waited for stays known
            self._put_off_s = due[0] - regular_at
        soon_at = self._poll_at + max(rules.floor_s, min(MIN_PAUSE_S, rules.fast_poll_interval_s))
        due = min(due, (max(by, soon_at), PollKind.FULL))
        if moved:
            due = min(due, (max(soon_at, self._affordable(PollKind.FULL, now)), PollKind.FULL))
        if expecting:
            quick_at = self._poll_at + max(rules.floor_s, rules.fast_poll_interval_s) * self._stretch
            full = (max(quick_at, self._affordable(PollKind.FULL, now)), PollKind.FULL)
            # never at the expense of the next regular poll, which decides: this one only sees
            left = (
                self._saved
                + max(0.0, regular_at - now) * rules.max_rpc_per_min / 60.0
                - self._cost[PollKind.FULL]
            )
            jobs_at = self._affordable(PollKind.JOBS, now) if left >= self._cost[PollKind.JOBS] else math.inf
            jobs = (max(quick_at, jobs_at), PollKind.JOBS)
            due = min(due, full if full[0] <= jobs[0] else jobs)
        return due

    def _spent_on_poll(self, rpcs: int, now: float) -> None:
        self.spent(rpcs, now)
        self._saved_for_regular = max(-self._most, self._saved_for_regular - rpcs)

    def _affordable(self, poll: PollKind, now: float, *, regular: bool = False) -> float:
        """When the RPCs that it costs are saved up."""
        self._save(now)
        missing = min(self._cost[poll], self._most) - (self._saved_for_regular if regular else self._saved)
        return now if missing <= 0 else now + missing * 60.0 / self.rules.max_rpc_per_min

    def _save(self, now: float) -> None:
        # a clock that was set back saves nothing
        gained = max(0.0, now - self._counted_at) * self.rules.max_rpc_per_min / 60.0
        self._saved = min(self._most, self._saved + gained)
        self._saved_for_regular = min(self._most, self._saved_for_regular + gained)
        self._counted_at = now

    def _roll(self) -> None:
        low, high = STRETCH
        self._stretch = low + (high - low) * self._draw()
