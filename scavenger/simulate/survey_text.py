"""The survey's answers as a reader meets them: rows of name, value and what it means; the hours as bars. Pure: numbers in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from scavenger.simulate.fleet_stats import HOUR_S
from scavenger.simulate.survey import Observed, Question, SpeedUp, Survey
from scavenger.simulate.survey_engines import Hour
from scavenger.simulate.survey_waits import LEAVING_S, Timing

BAR = 40
SHORT_S = 86_400.0
NOT_ASKED = "no run was played: --reserved-gpus 0"


@dataclass(frozen=True, slots=True)
class Row:
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


def notes(found: Survey, speed_up: SpeedUp | str) -> tuple[str, ...]:
    """What to know before the table is believed."""
    length_s = found.observed.fleet.end_s
    short = f"it covers {duration(length_s)} only: rates and hours of the day mean little below a day; take two weeks"
    played = () if isinstance(speed_up, str) else speed_up.notes
    return (*((short,) if length_s < SHORT_S else ()), *found.observed.notes, *played)


def rows(found: Survey, speed_up: SpeedUp | str) -> tuple[Row, ...]:
    """The whole table. `speed_up` is a text where there is none: why."""
    return (*_idle(found), *_engines(found), *waits(found.question.timing), *_delayed(found), _speed_up(found.question, speed_up))


def _idle(found: Survey) -> tuple[Row, ...]:
    ask = found.question
    share = found.idle_mean / found.gpus
    engine = f"{ask.spec.model.name} on {ask.spec.gpus} x {ask.spec.gpu.name}"
    start = f"{ask.notice_s:.0f} s until the daemon sees an idle GPU + {ask.cold_start_s:.0f} s cold start of {engine}"
    return (
        Row("idle", f"{quantity(found.idle_gpu_h)} GPU-hours", f"{found.idle_mean:.1f} of {found.gpus:,} GPUs on average ({share:.0%})"),
        Row("of it in slices that outlast a cold start", f"{found.outlasting:.1%}", f"a GPU idle for over {ask.ready_s:.0f} s: {start}"),
    )


def _engines(found: Survey) -> tuple[Row, ...]:
    ask = found.question
    left = found.usable_gpu_h / found.idle_gpu_h if found.idle_gpu_h else 0.0
    limit = "as many as fit" if ask.most is None else f"at most {ask.most}"
    life = "engines at work whose GPUs others take"
    if found.preemptions_per_h:
        between_s = found.engines_mean / found.preemptions_per_h * HOUR_S
        life += (
            f": one in {duration(between_s)} of an engine's work; half of those taken had worked for over {duration(found.typical_life_s)}"
        )
    return (
        Row("usable", f"{quantity(found.usable_gpu_h)} GPU-hours", f"{left:.0%} of the idle ones: whole engines ({limit}), start-ups paid"),
        Row("engines at work", f"{found.engines_mean:.1f}", "on average; by the hour below"),
        Row("preemptions", f"{found.preemptions_per_h:.3g} an hour", life),
        Row(
            "starts in vain",
            f"{found.wasted_starts:.0%}",
            f"{found.wasted:,} of {found.started:,} were taken before they worked, when one starts wherever it fits",
        ),
    )


def waits(timing: Timing) -> tuple[Row, ...]:
    """What others wait longer, with the arithmetic."""
    kill = f"KillWait {timing.kill_wait_s:g} + MessageTimeout {timing.message_timeout_s:g}"
    hung = f"max(GraceTime {timing.grace_s:g}, {kill}) + sched_interval {timing.sched_interval_s:g} s"
    return (
        Row(
            "others wait longer",
            f"{timing.leaving_s():g} s at most",
            f"a job that preempts an engine: GraceTime {timing.grace_s:g} s + {LEAVING_S:g} s to leave; on a private Slurm 1 s was seen",
        ),
        Row("  should an engine hang", f"{timing.hung_s():g} s at most", hung),
    )


def _delayed(found: Survey) -> tuple[Row, ...]:
    some = found.delayed
    if some is None:
        return (Row("  jobs concerned", "not known", "the source has no jobs, only idle GPUs"),)
    share = some.jobs / some.of_jobs if some.of_jobs else 0.0
    most_s = some.jobs * found.question.timing.leaving_s()
    meaning = f"of the GPU jobs started where an engine would be: {duration(most_s)} together; fewer, as Slurm takes idle GPUs first"
    if some.usual_mean_s is not None and some.usual_p50_s is not None:
        meaning += f"; as it is, GPU jobs waited {duration(some.usual_mean_s)} each on average (median {duration(some.usual_p50_s)})"
    return (Row("  jobs concerned", f"at most {some.jobs:,} of {some.of_jobs:,} ({share:.0%})", meaning),)


def _speed_up(ask: Question, speed_up: SpeedUp | str) -> Row:
    name = f"expected speed-up, {ask.spec.model.name}"
    if isinstance(speed_up, str):
        return Row(name, "not computed", speed_up)
    spread = f"95 % CI {speed_up.low:.2f} to {speed_up.high:.2f}"
    gain = f"{speed_up.alone_tokens_per_s:,.0f} to {speed_up.with_tokens_per_s:,.0f} tokens/s"
    return Row(name, f"{speed_up.factor:.2f}x", f"{gain}; {spread}; {speed_up.setting}")


def hours(found: Sequence[Hour]) -> tuple[tuple[str, str, str, str], ...]:
    """(hour, bar, mean, for 90 % of the time at least) of each hour."""
    top = max((hour.mean for hour in found), default=0.0) or 1.0
    bars = ["█" * round(BAR * hour.mean / top) for hour in found]
    return tuple((hour_name(hour.hour), bar, f"{hour.mean:.1f}", str(hour.mostly)) for hour, bar in zip(found, bars, strict=True))


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
