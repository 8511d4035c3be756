"""What one arm of the harmlessness benchmark gave, and the table of all arms. Pure: knows no Slurm and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harmless_measure import Stay, Use, bounded, percentile


@dataclass(frozen=True, slots=True)
class Timeline:
    """Who was where, for whoever asks why a GPU was idle; s since the arm began. `waited`: (number, submitted, nodes, GPUs a node)."""

    other_users: list[Stay]
    ours: list[Stay]
    waited: list[tuple[int, float, int, int]]
    decided: list[tuple[float, str, str]]


@dataclass(slots=True)
class HarmlessOutcome:
    """One arm's. `stays`: of harvested jobs. `asked`: calls to Slurm by kind."""

    arm: str
    grace_s: float
    delays: dict[int, float]
    same_tier_delays: dict[int, float]
    failed: int
    use: Use
    starts: int
    wasted: int
    preempted: int
    asked: dict[str, int]
    minutes: float
    reasons: dict[str, int] = field(default_factory=dict)
    waited: dict[int, float] = field(
        default_factory=dict
    )  # jobs that did not begin, and for how long they had waited by the end
    timeline: Timeline = field(default_factory=lambda: Timeline([], [], [], []))


def report(outcomes: Sequence[HarmlessOutcome]) -> list[str]:
    """A table, then the same-tier jobs, then the reasons. *Later* is a job's delay less its own in `none`: what harvesting did to that job.

    Where there is an arm `none` the jobs that began in it count, in every arm, also those that did not begin there (`bounded`).
    """
    lines = [
        "| GraceTime | arm | jobs | delay p50 | p99 | max | p99 - none | p99 - floor | later, p50 | p99 | of these did not begin | failed "
        "| GPU use | harvested | starts | preempted | wasted | commands a minute |",
        "| --- " * 18 + "|",
    ]
    for one in outcomes:
        base = {other.arm: other for other in outcomes if other.grace_s == one.grace_s and other is not one}
        counted = next(
            (
                tuple(other.delays)
                for other in outcomes
                if other.arm == "none" and other.grace_s == one.grace_s
            ),
            None,
        )
        mine, theirs = (
            bounded(one.delays, one.waited, counted),
            {arm: bounded(o.delays, o.waited, counted) for arm, o in base.items()},
        )
        delays = list(mine.values())
        p50, p99, most = (percentile(delays, share) for share in (0.5, 0.99, 1.0))
        over = [
            f"{p99 - percentile(list(theirs[arm].values()), 0.99):+.2f} s" if arm in base else ""
            for arm in ("none", "floor")
        ]
        later = [
            f"{percentile(_later(mine, theirs['none']), share):+.2f} s" if "none" in base else ""
            for share in (0.5, 0.99)
        ]
        busy = (one.use.other_users + one.use.ours) / one.use.total
        wasted = f"{one.wasted / one.starts:.1%}" if one.asked and one.starts else ""
        lines.append(
            f"| {one.grace_s:g} s | {one.arm} | {len(delays)} | {p50:.2f} s | {p99:.2f} s | {most:.2f} s | {over[0]} | {over[1]} "
            f"| {later[0]} | {later[1]} | {len(mine.keys() & one.waited.keys())} | {one.failed} | {busy:.1%} | {one.use.share:.1%} "
            f"| {one.starts} | {one.preempted} | {wasted} | {sum(one.asked.values()) / one.minutes:.1f} |"
        )
    for one in outcomes:
        if one.same_tier_delays:
            before = next(
                (other for other in outcomes if other.grace_s == one.grace_s and other.arm == "peers0"), one
            )
            percentiles = ", ".join(
                f"{percentile(list(one.same_tier_delays.values()), share):.2f} s"
                for share in (0.5, 0.99, 1.0)
            )
            later_s = percentile(_later(one.same_tier_delays, before.same_tier_delays), 1.0)
            summary = (
                f"{len(one.same_tier_delays)} same-tier jobs: delay p50, p99, max "
                f"{percentiles}; at most {later_s:+.2f} s later than in peers0"
            )
            lines.append(f"\n{one.arm}, GraceTime {one.grace_s:g} s: {summary}")
    for one in outcomes:
        if one.reasons:
            summary = ", ".join(f"{n} {what}" for what, n in sorted(one.reasons.items()))
            lines.append(
                f"\n{one.arm}, GraceTime {one.grace_s:g} s, decisions: {summary}; commands: {one.asked}"
            )
    return lines


def _later(delays: Mapping[int, float], before: Mapping[int, float]) -> list[float]:
    return [delay - before[number] for number, delay in delays.items() if number in before]
