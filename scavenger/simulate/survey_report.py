"""A survey as a report: its rows, GPUs by owner over time, engines by the hour. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.simulate import survey_text
from scavenger.simulate.report import HourOfDay, Report, Series
from scavenger.simulate.survey import SpeedUp, Survey


def of_survey(found: Survey, speed_up: SpeedUp | str) -> Report:
    """The page of one survey."""
    facts = tuple((row.name.strip(), row.value, row.meaning) for row in survey_text.rows(found, speed_up))
    return Report(
        title="what idle GPUs could give",
        subtitle=survey_text.title(found.observed, found.question),
        facts=facts,
        owners=(by_owner(found),),
        hours=tuple(HourOfDay(hour.hour, hour.mean) for hour in found.by_hour),
        notes=survey_text.notes(found, speed_up),
    )


def by_owner(found: Survey) -> Series:
    """Others' GPUs, engines at work, engines starting, and what stays idle; one value for each instant at which any of them changes."""
    fleet, ask = found.observed.fleet, found.question
    gpus = ask.spec.gpus
    moves: list[tuple[float, int, int]] = [(0.0, 0, sum(fleet.initial.values()))]  # (time, which line, change)
    moves += [(change.t_s, 0, change.delta) for change in fleet.changes]
    for engine in found.engines:
        moves += [(engine.start_s, 1, gpus), (engine.end_s, 1, -gpus)]
        ready_s = engine.start_s + ask.ready_s
        if ready_s < engine.end_s:
            moves += [(ready_s, 2, gpus), (engine.end_s, 2, -gpus)]
    times, levels = _levels(moves, fleet.end_s)
    idle, held, working = levels
    lines: list[tuple[str, Sequence[int]]] = [
        ("others", [fleet.gpus - count for count in idle]),
        ("harvested", working),
        ("starting", [all_of - done for all_of, done in zip(held, working, strict=True)]),
        ("idle", [count - taken for count, taken in zip(idle, held, strict=True)]),
    ]
    return Series("", tuple(times), tuple((name, tuple(map(float, values))) for name, values in lines), fleet.end_s)


def _levels(moves: Sequence[tuple[float, int, int]], end_s: float) -> tuple[list[float], tuple[list[int], list[int], list[int]]]:
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
