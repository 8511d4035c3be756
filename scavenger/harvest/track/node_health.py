"""Which nodes kill engines, and how long to wait after jobs that die at once. Pure.

A node with `quarantine_after` engine deaths within `quarantine_s` gets no more engines for `quarantine_s`; twice as long each further time
(at most 8 times), and one step less for every `quarantine_s` that it is free without a death. After jobs of an owner that died at once
the owner's next submission waits `backoff_s`, doubled with each further one up to `MAX_BACKOFF_S`, until an engine has proved that jobs
can work.

One owner's broken run is no other owner's affair: where engines of an owner's runs die on two nodes, and none of these runs ever worked,
the runs are at fault and no node is, until `quarantine_s` pass without such a death. A run that once worked may be broken later, by the
weights or the tokenizer that it publishes. So where deaths in one owner's runs alone would quarantine more than two nodes within
`quarantine_s`, or while those are still quarantined, these nodes are free again and only tried last. Deaths in two owners' runs blame the
node.

Engines that could not begin blame the set-up (`set_up`). After one, the owner's next submission waits as above, every owner's where it
concerns all runs, and then one engine of a run is tried at a time, beside those that run, until an engine that started since has worked.
Nothing is held against a set-up whose last such engine ended `MAX_SENTENCE` times `quarantine_s` ago.

A node where an engine's numbers are wrong is quarantined at once. This is its trainer's word: where the trainers of one owner's runs say
so of more than two nodes within `quarantine_s`, or while those are still quarantined, they are at fault, and those nodes are free again.
So one owner's word keeps two nodes from others at most, and it never lengthens what other owners' engines, or their deaths, bring on.

Deaths that are Slurm's doing (preempted, cancelled, a lost node, a time limit) never come here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from scavenger.backoff import backoff_s
from scavenger.harvest.decide.actions import DrainKind, OurJob
from scavenger.harvest.track.set_up import NO_DAEMON, OF_ALL_RUNS, REMEDIES, FailedStart, SetUps
from scavenger.policy.fleet_size import Demand

MAX_BACKOFF_S = 600.0
MAX_SENTENCE = 8
#: Nodes on which engines of an owner's runs must die before the runs are at fault.
NODES_OF_A_FAULT = 2


@dataclass(frozen=True, slots=True)
class HealthRules:
    quarantine_after: int
    quarantine_s: float
    backoff_s: float


@dataclass(slots=True)
class _Record:
    """What is held against one node. `deaths`: (time, run). `strikes` are past quarantines not yet forgotten; `until` is when the present
    one ends, and `runs` are those for whose deaths it is. `strikes_of`: by owner, those on whose trainers' word alone they were."""

    deaths: list[tuple[float, int]] = field(default_factory=list)
    strikes: int = 0
    strikes_of: Counter[str] = field(default_factory=Counter)
    until: float = 0.0
    reason: str = ""
    runs: frozenset[int] = frozenset()
    clean_since: float = 0.0
    accused_by: str = ""  # the owner on whose trainers' word alone the present one is

    def acquit(self, now: float) -> None:
        """The present quarantine was for nothing."""
        if self.accused_by:
            self.strikes_of[self.accused_by] -= 1
        else:
            self.strikes -= 1
        self.until, self.clean_since, self.accused_by = 0.0, now, ""


@dataclass(slots=True)
class _BackOff:
    """After jobs that died at once, in a row. `set_up`: what they could not begin with, "" when they died of something else."""

    failures: int = 0
    failed_at: float = 0.0
    not_before: float = 0.0
    why: str = ""
    set_up: str = ""


#: Whose the failures are that concern every run: a submission that Slurm refused.
_SITE = ""


class Health:
    """Deaths in; quarantined nodes and the end of the back-off out.

    `owners`: of each run, as far as known. `asking`: runs that want engines now. Both are the harvester's to keep; run 0 has no owner.
    """

    def __init__(self, rules: HealthRules) -> None:
        self.owners: Mapping[int, str] = {}
        self.asking: Set[int] = frozenset()
        self._rules = rules
        self._nodes: dict[str, _Record] = {}
        self._backoffs: dict[str, _BackOff] = {}  # by owner
        self._faults: dict[
            str, float
        ] = {}  # owners whose runs are at fault -> when one of their engines last died so
        self._accusations: dict[str, dict[str, float]] = {}  # owner -> node -> when its engine was set aside
        #: Owner -> node -> when deaths in its runs alone were last enough for a quarantine.
        self._alone: dict[str, dict[str, float]] = {}
        self._proven: set[int] = set()  # runs of which an engine worked, or lived long
        self._set_ups = SetUps(MAX_SENTENCE * rules.quarantine_s)

    def _owner(self, run_id: int) -> str:
        return (self.owners.get(run_id) or f"run {run_id}") if run_id else _SITE

    # ---------------------------------------------------------------- nodes

    def died(self, node: str, reason: str, now: float, run_id: int = 0) -> str:
        """An engine of this run died on `node`. Returns why the node is quarantined from now on, or ""."""
        rules = self._rules
        record = self._nodes.setdefault(node, _Record(clean_since=now))
        self._forget(record, now)
        record.deaths = [(at, run) for at, run in record.deaths if now - at < rules.quarantine_s] + [
            (now, run_id)
        ]
        record.clean_since = max(now, record.until)
        if self._acquitted(node, run_id, now):
            return ""
        if len(record.deaths) < rules.quarantine_after or now < record.until:
            return ""
        if not self._blames(node, record, now):
            return ""
        sentence_s = self._sentence(record, record.strikes, now)
        record.strikes, record.accused_by = record.strikes + 1, ""
        count, record.runs = len(record.deaths), frozenset(run for _, run in record.deaths)
        record.deaths = []
        record.reason = f"{count} engines died on it within {rules.quarantine_s:g} s, the last: {reason}; for {sentence_s:g} s"
        return record.reason

    def condemned(self, node: str, reason: str, now: float, run_id: int) -> str:
        """An engine of this run computed wrong numbers on `node`. Returns why the node is quarantined from now on, or ""."""
        owner, record = self._owner(run_id), self._nodes.setdefault(node, _Record(clean_since=now))
        self._forget(record, now)
        said = self._accusations.setdefault(owner, {})
        said[node] = now
        if self._too_many(said, now):
            for accused in self._nodes.values():
                if accused.accused_by == owner and now < accused.until:
                    accused.acquit(now)
            return ""
        if now < record.until:
            return ""
        sentence_s = self._sentence(record, record.strikes + record.strikes_of[owner], now)
        record.strikes_of[owner] += 1
        record.runs, record.accused_by = frozenset((run_id,)), owner
        record.reason = f"an engine on it was set aside: {reason}; for {sentence_s:g} s"
        return record.reason

    def _too_many(self, said: dict[str, float], now: float) -> bool:
        """Whether one owner says so of more nodes than can be their fault. `said`: by node, when; what is over leaves it."""
        for node, at in list(said.items()):
            if now >= max(at + self._rules.quarantine_s, self._nodes[node].until):
                del said[node]
        return len(said) > NODES_OF_A_FAULT

    def _blames(self, node: str, record: _Record, now: float) -> bool:
        """Whether these deaths, enough for a quarantine, are the node's doing. Those of an owner whose engines die on many are not."""
        owners = {self._owner(run) for _, run in record.deaths}
        if len(owners) > 1:
            owners -= {owner for owner in owners if self._too_many(self._alone.get(owner, {}), now)}
            record.deaths = [(at, run) for at, run in record.deaths if self._owner(run) in owners]
        if len(record.deaths) < self._rules.quarantine_after:
            return False
        if len(owners) > 1 or _SITE in owners:
            for one in owners:
                self._alone.get(one, {}).pop(node, None)
            return True
        (owner,) = owners
        alone = self._alone.setdefault(owner, {})
        alone[node] = now
        if not self._too_many(alone, now):
            return True
        record.deaths = []
        for other in alone:
            held = self._nodes[other]
            since = {run for at, run in held.deaths if now - at < self._rules.quarantine_s}
            if now < held.until and not held.accused_by and {*map(self._owner, held.runs | since)} == {owner}:
                held.acquit(now)
        return False

    def _sentence(self, record: _Record, strikes: int, now: float) -> float:
        """Quarantine a node; returns for how many seconds."""
        sentence_s: float = self._rules.quarantine_s * min(2**strikes, MAX_SENTENCE)
        record.until = record.clean_since = now + sentence_s
        return sentence_s

    def _acquitted(self, node: str, run_id: int, now: float) -> bool:
        """Whether this death is the run's own doing. Then nothing is held against any node for runs of its owner that never worked."""
        if not run_id or run_id in self._proven:
            return False
        owner = self._owner(run_id)
        if now - self._faults.get(owner, -math.inf) < self._rules.quarantine_s:
            self._faults[owner] = now  # and goes on
            self._nodes[node].deaths.remove((now, run_id))
            return True

        def at_fault(run: int) -> bool:
            return bool(run) and run not in self._proven and self._owner(run) == owner

        blamed = [
            record
            for record in self._nodes.values()
            if any(at_fault(run) and now - at < self._rules.quarantine_s for at, run in record.deaths)
            or (now < record.until and any(map(at_fault, record.runs)))
        ]
        if len(blamed) < NODES_OF_A_FAULT:
            return False
        self._faults[owner] = now
        for record in blamed:
            record.deaths = [(at, run) for at, run in record.deaths if not at_fault(run)]
            if now < record.until and all(map(at_fault, record.runs)):
                record.acquit(now)
        return True

    def _forget(self, record: _Record, now: float) -> None:
        steps = max(0, int((now - record.clean_since) // self._rules.quarantine_s))
        if steps:
            record.strikes = max(0, record.strikes - steps)
            record.strikes_of = Counter(
                {owner: strikes - steps for owner, strikes in record.strikes_of.items() if strikes > steps}
            )
            record.clean_since += steps * self._rules.quarantine_s

    def quarantined(self, now: float) -> tuple[tuple[str, str], ...]:
        """(node, reason) of every node that is to get no engine now, by name."""
        return tuple(
            (name, record.reason) for name, record in sorted(self._nodes.items()) if now < record.until
        )

    def quarantined_until(self, node: str) -> float:
        """Unix s; of a node that is quarantined."""
        return self._nodes[node].until

    # ---------------------------------------------------------------- the next submission

    def failed_at_once(self, reason: str, now: float, run_id: int = 0) -> None:
        """A job of this run died at once: wait before the owner's next, or every owner's."""
        self._wait(run_id, "jobs in a row died at once", reason, now)

    def submission_failed(self, reason: str, now: float) -> None:
        """Slurm took no job of ours, for a limit of the account perhaps: all wait."""
        self._wait(0, "submissions in a row failed", reason, now)

    def _wait(self, run_id: int, what: str, reason: str, now: float) -> None:
        one = self._backoffs.setdefault(self._owner(run_id), _BackOff())
        one.failures += 1
        one.failed_at = now
        one.not_before = now + backoff_s(self._rules.backoff_s, MAX_BACKOFF_S, one.failures)
        one.why = f"{one.failures} {what}, the last: {reason}"

    def could_not_begin(self, failed: FailedStart, now: float) -> str:
        """An engine ended before it could work. Returns why its node is quarantined from now on, or "": then the set-up is at fault."""
        held = self._set_ups.failed(failed.node, failed.run_id, now)
        if held:
            record = self._nodes.setdefault(failed.node, _Record(clean_since=now))
            record.deaths += [(at, failed.run_id) for at in held[:-1]]
            return self.died(failed.node, failed.words, now, failed.run_id)
        one = self._backoffs.setdefault(
            self._owner(0 if failed.code in OF_ALL_RUNS else failed.run_id), _BackOff()
        )
        one.failures += 1
        one.failed_at = now
        # An engine that gets no reply holds its GPU for minutes first.
        wait_s = MAX_BACKOFF_S if failed.code == NO_DAEMON else self._rules.backoff_s
        one.not_before = now + backoff_s(wait_s, MAX_BACKOFF_S, one.failures)
        one.set_up = one.why = (
            f"engines cannot start, {one.failures} in a row, and no node is blamed for it; the last: {failed.words}. "
            f"Remedy: {REMEDIES[failed.code]}"
        )
        return ""

    def explain(self, failed: FailedStart, last_words: str) -> None:
        """What the job's log ended with, which says more than its exit code."""
        one = self._backoffs.get(self._owner(0 if failed.code in OF_ALL_RUNS else failed.run_id))
        if one is not None and one.set_up and failed.words in one.set_up:
            one.set_up = one.why = one.set_up.replace(failed.words, f"{failed.words}: {last_words}")

    def proved(self, started_at: float, run_id: int = 0, node: str = "", *, worked: bool = False) -> None:
        """An engine that started at `started_at` lives, or works. Only one that started after the last failure proves anything; that
        the set-up is well, only one that `worked`."""
        if run_id:
            self._proven.add(run_id)
        if worked:
            self._set_ups.worked(node, run_id, started_at)
        for owner in {self._owner(run_id), _SITE}:
            one = self._backoffs.get(owner)
            if one is not None and started_at >= one.failed_at and (worked or not one.set_up):
                del self._backoffs[owner]

    def set_up_changed(self) -> None:
        """Another configuration: what could not begin with the old one is tried afresh."""
        self._backoffs = {owner: one for owner, one in self._backoffs.items() if not one.set_up}

    def forget(self, now: float) -> None:
        """A set-up with which nothing failed for long is tried afresh, though no engine has proved it."""
        memory_s = MAX_SENTENCE * self._rules.quarantine_s
        self._backoffs = {
            owner: one
            for owner, one in self._backoffs.items()
            if not one.set_up or now < max(one.not_before, one.failed_at + memory_s)
        }

    def set_up_fault(self) -> str:
        """Why engines cannot start, the reason for all owners first; "" when none is known."""
        return next((one.set_up for _, one in sorted(self._backoffs.items()) if one.set_up), "")

    def on_trial(self, run_id: int) -> str:
        """Why one engine of this run is tried before more are submitted, or ""."""
        return next((one.set_up for one in self._doubts_of(run_id)), "")

    def on_trial_since(self, run_id: int) -> float:
        """When the last engine failed for which one is tried now (Unix s): only one that starts later can prove that others would work."""
        return max((one.failed_at for one in self._doubts_of(run_id)), default=0.0)

    def _doubts_of(self, run_id: int) -> list[_BackOff]:
        both = (self._backoffs.get(self._owner(run_id)), self._backoffs.get(_SITE))
        return [one for one in both if one is not None and one.set_up]

    def doubted(self, now: float) -> frozenset[str]:
        """Nodes that are tried last: engines could not start there, and whether others can is not known; or one owner's died there, and
        on too many others to blame these."""
        died = (alone.keys() for alone in self._alone.values() if self._too_many(alone, now))
        return self._set_ups.doubted(now).union(*died)

    def backoff(self) -> tuple[float, str]:
        """(Unix s before which nothing is submitted, why); (0, "") when there is no back-off.

        That of the site's, and while every run that asks waits for its owner's, the first of these to end.
        """
        owners = {self._owner(run) for run in self.asking} or (self._backoffs.keys() - {_SITE})
        waiting = [self._backoffs.get(owner) for owner in owners]
        first = min((one for one in waiting if one is not None), key=lambda one: one.not_before, default=None)
        held = [one for one in (self._backoffs.get(_SITE), first if None not in waiting else None) if one]
        last = max(held, key=lambda one: one.not_before, default=_BackOff())
        return last.not_before, last.why

    def backoff_of(self, run_id: int) -> tuple[float, str]:
        """The same of one run's owner alone."""
        one = self._backoffs.get(self._owner(run_id), _BackOff())
        return one.not_before, one.why


def without_failing(
    health: Health, demand: Sequence[Demand], jobs: Sequence[OurJob], now: float
) -> list[Demand]:
    """The demand, of which an owner whose jobs die at once wants no more than there is for a while, and then one engine of a run more than
    there is, until an engine has proved that others would work. Other owners' runs go on."""
    health.forget(now)
    health.asking = frozenset(d.run_id for d in demand if d.engines)
    if now < health.backoff()[0]:
        return list(demand)  # no job is submitted: the decision says why
    staying = [job for job in jobs if job.drain_kind is DrainKind.NO]
    present = Counter(job.run_id for job in staying)
    engines = [job for job in staying if not job.standby]

    def within(d: Demand) -> Demand:
        not_before, why = health.backoff_of(d.run_id)
        most, then = d.engines, ""
        if now < not_before:
            most, then = present[d.run_id], f"backs off: {why}"
        elif trial := health.on_trial(d.run_id):
            failed_at = health.on_trial_since(d.run_id)
            of_run = [job for job in engines if job.run_id == d.run_id]
            tried = any(job.waits or job.started_at >= failed_at for job in of_run)
            most, then = len(of_run) + (0 if tried else 1), f"one engine is tried first: {trial}"
        return replace(d, engines=most, reason=f"{d.reason}; {then}") if most < d.engines else d

    return [within(d) for d in demand]
