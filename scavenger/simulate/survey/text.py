"""The survey's answers as a reader meets them: rows of name, value and what it means; the hours as bars. Pure: numbers in, text out.

A survey as a report: its rows, GPUs by owner over time, engines by the hour. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from scavenger.simulate.fleet_stats import HOUR_S
from scavenger.simulate.report import HourOfDay, Series, SimulationReport
from scavenger.simulate.survey.engines import Hour
from scavenger.simulate.survey.survey import Observed, Question, SpeedUp, TraceSurvey
from scavenger.simulate.survey.waits import JOB_END_S, Timing


def of_survey(found: TraceSurvey, speed_up: SpeedUp | str) -> SimulationReport:
    """The page of one survey."""
    facts = tuple((row.name.strip(), row.value, row.meaning) for row in rows(found, speed_up))
    return SimulationReport(
        title="what idle GPUs could give",
        subtitle=title(found.observed, found.question),
        facts=facts,
        owners=(by_owner(found),),
        hours=tuple(HourOfDay(hour.hour, hour.mean) for hour in found.by_hour),
        notes=notes(found, speed_up),
    )


def by_owner(found: TraceSurvey) -> Series:
    """Others' GPUs, engines at work, engines starting, and what stays idle; one value for each instant at which any of them changes."""
    fleet, ask = found.observed.fleet, found.question
    gpus = ask.spec.gpus
    moves: list[tuple[float, int, int]] = [
        (0.0, 0, sum(fleet.initial.values()))
    ]  # (time, which line, change)
    moves += [(change.t_s, 0, change.delta) for change in fleet.changes]
    for engine in found.engines:
        moves += [(engine.start_s, 1, gpus), (engine.end_s, 1, -gpus)]
        ready_s = engine.start_s + ask.ready_s
        if ready_s < engine.end_s:
            moves += [(ready_s, 2, gpus), (engine.end_s, 2, -gpus)]
    times, levels = _levels(moves, fleet.end_s)
    idle, held, working = levels
    lines: list[tuple[str, Sequence[int]]] = [
        ("other users", [fleet.gpus - count for count in idle]),
        ("harvested", working),
        ("starting", [all_of - done for all_of, done in zip(held, working, strict=True)]),
        ("idle", [count - taken for count, taken in zip(idle, held, strict=True)]),
    ]
    return Series(
        "", tuple(times), tuple((name, tuple(map(float, values))) for name, values in lines), fleet.end_s
    )


def _levels(
    moves: Sequence[tuple[float, int, int]], end_s: float
) -> tuple[list[float], tuple[list[int], list[int], list[int]]]:
    """What each of three lines is after each instant before the end."""
    times: list[float] = []
    lines: tuple[list[int], list[int], list[int]] = ([], [], [])
    now = [0, 0, 0]
    for t_s, which, delta in sorted(moves):
        if t_s >= end_s:
            break
        now[which] += delta
        if not times or t_s > times[-1]:
            times.append(t_s)
            for line in lines:
                line.append(0)
        for line, value in zip(lines, now, strict=True):
            line[-1] = value
    return times, lines


BAR = 40
SHORT_S = 86_400.0
NOT_ASKED = "no run was played: --reserved-gpus 0"


@dataclass(frozen=True, slots=True)
class TableRow:
    """`meaning` says how the value came about, in the reader's terms."""

    name: str
    value: str
    meaning: str


def title(observed: Observed, question: Question) -> str:
    """What was looked at."""
    fleet = observed.fleet
    nodes = "1 node" if len(fleet.capacity) == 1 else f"{len(fleet.capacity):,} nodes"
    return f"{fleet.origin}: {fleet.gpus:,} GPUs on {nodes}, {period(observed, question)}"


def period(observed: Observed, question: Question) -> str:
    length_s = observed.fleet.end_s
    length = f"{length_s / 86_400:.1f} days" if length_s >= 2 * 86_400 else duration(length_s)
    if observed.since is None:
        return f"{length} (the source has no dates: hours count from its start)"
    start = datetime.fromtimestamp(observed.since, question.zone)
    return f"{length} from {start:%Y-%m-%d %H:%M} to {start + timedelta(seconds=length_s):%Y-%m-%d %H:%M} {start:%Z}"


def notes(found: TraceSurvey, speed_up: SpeedUp | str) -> tuple[str, ...]:
    """What to know before the table is believed."""
    length_s = found.observed.fleet.end_s
    short = f"it covers {duration(length_s)} only: rates and hours of the day mean little below a day; take two weeks"
    assumptions = () if isinstance(speed_up, str) else speed_up.notes
    return (*((short,) if length_s < SHORT_S else ()), *found.observed.notes, *assumptions)


def rows(found: TraceSurvey, speed_up: SpeedUp | str) -> tuple[TableRow, ...]:
    """The whole table. `speed_up` is a text where there is none: why."""
    return (
        *_idle(found),
        *_engines(found),
        *waits(found.question.timing),
        *_delayed(found),
        _speed_up(found.question, speed_up),
    )


def _idle(found: TraceSurvey) -> tuple[TableRow, ...]:
    ask = found.question
    share = found.idle_mean / found.gpus
    engine = f"{ask.spec.model.name} on {ask.spec.gpus} x {ask.spec.gpu.name}"
    start = f"{ask.notice_s:.0f} s until the daemon sees an idle GPU + {ask.cold_start_s:.0f} s cold start of {engine}"
    return (
        TableRow(
            "idle",
            f"{quantity(found.idle_gpu_h)} GPU-hours",
            f"{found.idle_mean:.1f} of {found.gpus:,} GPUs on average ({share:.0%})",
        ),
        TableRow(
            "of it in slices that outlast a cold start",
            f"{found.outlasting:.1%}",
            f"a GPU idle for over {ask.ready_s:.0f} s: {start}",
        ),
    )


def _engines(found: TraceSurvey) -> tuple[TableRow, ...]:
    ask = found.question
    left = found.usable_gpu_h / found.idle_gpu_h if found.idle_gpu_h else 0.0
    limit = "as many as fit" if ask.most is None else f"at most {ask.most}"
    life = "engines at work whose GPUs others take"
    if found.preemptions_per_h:
        between_s = found.engines_mean / found.preemptions_per_h * HOUR_S
        life += (
            f": one in {duration(between_s)} of an engine's work; half of those taken "
            f"had worked for over {duration(found.typical_life_s)}"
        )
    return (
        TableRow(
            "usable",
            f"{quantity(found.usable_gpu_h)} GPU-hours",
            f"{left:.0%} of the idle ones: whole engines ({limit}), start-ups paid",
        ),
        TableRow("engines at work", f"{found.engines_mean:.1f}", "on average; by the hour below"),
        TableRow("preemptions", f"{found.preemptions_per_h:.3g} an hour", life),
        TableRow(
            "starts in vain",
            f"{found.wasted_starts:.0%}",
            f"{found.wasted:,} of {found.started:,} were taken before they worked, when one starts wherever it fits",
        ),
    )


def waits(timing: Timing) -> tuple[TableRow, ...]:
    """How much longer other users wait, with the arithmetic."""
    hung = (
        f"what a process that ignores SIGTERM has: GraceTime {timing.grace_s:g}, KillWait {timing.kill_wait_s:g}, "
        f"MessageTimeout {timing.message_timeout_s:g} s (docs/admin.md)"
    )
    return (
        TableRow(
            "other users wait longer",
            f"{timing.preemption_s():g} s at most",
            f"a job that preempts an engine: GraceTime {timing.grace_s:g} s + {JOB_END_S:g} s to leave; on a private Slurm 1 s was seen",
        ),
        TableRow("  should an engine hang", f"{timing.hung_s():g} s at most", hung),
    )


def _delayed(found: TraceSurvey) -> tuple[TableRow, ...]:
    some = found.delayed
    if some is None:
        return (TableRow("  jobs concerned", "not known", "the source has no jobs, only idle GPUs"),)
    share = some.jobs / some.of_jobs if some.of_jobs else 0.0
    most_s = some.jobs * found.question.timing.preemption_s()
    meaning = f"of the GPU jobs started where an engine would be: {duration(most_s)} together; fewer, as Slurm takes idle GPUs first"
    if some.usual_mean_s is not None and some.usual_p50_s is not None:
        meaning += f"; as it is, GPU jobs waited {duration(some.usual_mean_s)} each on average (median {duration(some.usual_p50_s)})"
    return (
        TableRow("  jobs concerned", f"at most {some.jobs:,} of {some.of_jobs:,} ({share:.0%})", meaning),
    )


def _speed_up(ask: Question, speed_up: SpeedUp | str) -> TableRow:
    name = f"expected speed-up, {ask.spec.model.name}"
    if isinstance(speed_up, str):
        return TableRow(name, "not computed", speed_up)
    spread = f"95 % CI {speed_up.low:.2f} to {speed_up.high:.2f}"
    gain = f"{speed_up.alone_tokens_per_s:,.0f} to {speed_up.with_tokens_per_s:,.0f} tokens/s"
    return TableRow(name, f"{speed_up.factor:.2f}x", f"{gain}; {spread}; {speed_up.setting}")


def hours(found: Sequence[Hour]) -> tuple[tuple[str, str, str, str], ...]:
    """(hour, bar, mean, for 90 % of the time at least) of each hour."""
    top = max((hour.mean for hour in found), default=0.0) or 1.0
    bars = ["█" * round(BAR * hour.mean / top) for hour in found]
    return tuple(
        (hour_name(hour.hour), bar, f"{hour.mean:.1f}", str(hour.mostly))
        for hour, bar in zip(found, bars, strict=True)
    )


def hour_name(hour: int) -> str:
    return f"{hour:02}-{(hour + 1) % 24:02}"


def duration(seconds: float) -> str:
    """'45 s', '12 min', '3.4 h', '5.2 days'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR_S:.1f} h" if seconds < 48 * HOUR_S else f"{seconds / 86_400:.1f} days"


def quantity(value: float) -> str:
    """Whole from 100 on; else with a decimal, or two where that would be 0."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
