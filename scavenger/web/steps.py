"""Pages of a train step: where its time and its GPUs' seconds went, its rewards and samples, and what changed since an earlier one.

Boundary: one subject of `pages`, which has the others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import sqlalchemy as sa

from scavenger.errors import LedgerError
from scavenger.web import charts, questions
from scavenger.web.pages import Contents
from scavenger.web.panels import (
    Page,
    Panel,
    Row,
    ask,
    clean,
    cut_note,
    episode_link,
    group_link,
    may_read,
    metrics_of,
    notes,
    row_of,
    sample_link,
    table_of,
)
from scavenger.web.questions import filled, filled_bins, filled_list

NEEDS_CONTENTS = "which prompts are the same needs the role scavenger_contents"
FILTERS = {
    "all": (0, 0),
    "moved": (1, 0),
    "masked": (2, 0),
    "filtered": (4, 0),
    "all rewards equal": (5, 0),
    "cut off": (3, 0),
    "best": (0, 1),
    "worst": (0, 2),
}
#: Engines drawn one by one.
_MOST_LANES = 24
#: The parts of a step in its order: the metric, what it is, and whether the parts after it begin at its end.
PARTS = (
    ("seconds_seed", "window: all generate", True),
    ("seconds_to_training", "reserved engines to sleep", False),
    ("seconds_train", "stream: trains", True),
    ("seconds_wait", "tail: waits for samples", True),
    ("seconds_reward", "waits for rewards", True),
    ("seconds_update", "update", True),
    ("seconds_publish", "publish", True),
    ("seconds_checkpoint", "checkpoint", True),
    ("seconds_to_generating", "reserved engines to wake", False),
)


@dataclasses.dataclass(frozen=True)
class Scored:
    """The rewards in bins and the samples of a step or an evaluation. `found`: whether it has any; `filled_bins`: those with samples."""

    rewards: Panel
    samples: Panel
    found: bool
    filled_bins: tuple[int, ...]


def step(
    connection: sa.Connection,
    run_id: int,
    number: int,
    chosen: str = "all",
    bin_: int = -1,
    contents: Contents | None = None,
) -> Page:
    """One train step: what its time went to, rewards in bins, its samples. `bin_`: only this bin's, -1 = all. `contents` None: no sample's
    text."""
    asked = filled(questions.STEP, run_id=run_id, step=number, most=questions.MOST_RUNS)
    attempts = ask(connection, asked)
    metrics = metrics_of(attempts[0]) if attempts else {}
    went = parts(metrics)
    scored = scores(connection, run_id, number, chosen, bin_, contents=contents)
    played = _episodes(connection, run_id, number)
    if not attempts and not scored.found:
        row_of(connection, filled(questions.RUN, run_id=run_id), f"run {run_id}")
    return Page(
        f"Step {number}",
        (
            table_of("Commits", asked, attempts, omit=("metrics", "cut")),
            Panel(
                "Where its time went",
                asked,
                "in a step's order; training and waiting alternate, and each is drawn as one part"
                if went
                else "",
                charts=went,
                empty="" if went else "the step has no metrics yet",
            ),
            _step_engines(connection, run_id, number, attempts[0] if attempts else None),
            *played,
            *(() if played and not scored.found else (scored.rewards, scored.samples)),
            table_of("Metrics", asked, _values(metrics), note=cut_note(attempts[:1])),
            _same_prompts(connection, run_id, number),
        ),
        ((f"Run {run_id}", f"/runs/{run_id}"),),
    )


def _same_prompts(connection: sa.Connection, run_id: int, number: int) -> Panel:
    """Earlier steps that completed prompts of this one."""
    here = f"/runs/{run_id}/steps/{number}"
    back = questions.MOST_BACK
    asked = filled(questions.SAME_PROMPTS, run_id=run_id, step=number, back=back, most=questions.MOST_SINCE)
    readable = may_read(connection, "groups")
    return table_of(
        "The same prompts before",
        asked,
        ask(connection, asked) if readable else [],
        {"since_step": lambda row: f"{here}/since/{row['since_step']}"},
        note=f"of the {back} steps before; choose one to see which prompts' rewards changed since. Any other: {here}/since/STEP"
        if readable
        else f"not shown: {NEEDS_CONTENTS}",
    )


def evaluation(
    connection: sa.Connection,
    run_id: int,
    number: int,
    chosen: str = "all",
    bin_: int = -1,
    contents: Contents | None = None,
) -> Page:
    """The evaluation after a step: its metrics, rewards in bins, its samples. Raises `LedgerError` where there is no such run."""
    asked = filled(questions.EVALUATION, run_id=run_id, step=number, most=questions.MOST_RUNS)
    made = ask(connection, asked)
    scored = scores(connection, run_id, number, chosen, bin_, evaluation=True, contents=contents)
    played = _episodes(connection, run_id, number, evaluation=True)
    if not made and not scored.found and not played:
        row_of(connection, filled(questions.RUN, run_id=run_id), f"run {run_id}")
    return Page(
        f"Evaluation after step {number}",
        (
            table_of("Evaluations", asked, made, omit=("metrics", "cut")),
            table_of("Metrics", asked, _values(metrics_of(made[0]) if made else {}), note=cut_note(made[:1])),
            *played,
            *(() if played and not scored.found else (scored.rewards, scored.samples)),
        ),
        ((f"Run {run_id}", f"/runs/{run_id}"), (f"Step {number}", f"/runs/{run_id}/steps/{number}")),
    )


def _episodes(
    connection: sa.Connection, run_id: int, number: int, *, evaluation: bool = False
) -> tuple[Panel, ...]:
    """The agents' episodes of a step, or of the evaluation after it; no panel where there are none."""
    of = questions.EVALUATION_EPISODES if evaluation else questions.STEP_EPISODES
    sql = filled(of, run_id=run_id, step=number, most=questions.MOST_SAMPLES)
    found = ask(connection, sql)
    rewards = charts.bins([float(row["reward"]) for row in found if row["reward"] is not None])
    table = table_of(
        "Episodes",
        sql,
        found,
        {"episode_id": episode_link, "name": episode_link},
        note=f"at most {questions.MOST_SAMPLES}; turns and tokens are those that were taken, and the others led to nothing",
    )
    drawn = (charts.histogram("episodes by reward", rewards, [""] * len(rewards)),) if rewards else ()
    return (dataclasses.replace(table, charts=drawn),) if found else ()


def _values(metrics: Mapping[str, float]) -> list[Row]:
    return [{"metric": clean(name), "value": value} for name, value in sorted(metrics.items())]


@dataclasses.dataclass(frozen=True)
class _Bins:
    """(low, high, samples) of each bin of rewards, and the statements that they come from. `any`: whether a sample has a reward."""

    found: list[tuple[float, float, int]]
    sql: str
    any: bool


def _bins(connection: sa.Connection, run_id: int, number: int, *, evaluation: bool) -> _Bins:
    of = questions.EVALUATION_REWARD_RANGE if evaluation else questions.REWARD_RANGE
    asked = filled(of, run_id=run_id, step=number)
    ends = [float(row["reward"]) for row in ask(connection, asked) if row["reward"] is not None]
    edges = charts.edges(min(ends), max(ends)) if ends else []
    if not edges:
        return _Bins([], asked, bool(ends))
    of = questions.EVALUATION_REWARDS if evaluation else questions.REWARDS
    sql = filled_bins(of, edges, run_id=run_id, step=number)
    counts = {row["bin"]: int(row["samples"]) for row in ask(connection, sql)}
    binned = [(a, b, counts.get(i, 0)) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    return _Bins(binned, f"{asked}\n\n{sql}", True)


def _rewards(binned: _Bins, here: str, chosen: str) -> Panel:
    """The bins of the page `here`, each a link to its samples."""
    hrefs = [narrowed_path(here, chosen, i) for i in range(len(binned.found))]
    nothing = (
        "its rewards are further apart than a number can say" if binned.any else "no sample has a reward yet"
    )
    return Panel(
        "Rewards",
        binned.sql,
        "choose a bar to see its samples; those whose prompt was generated again are not counted",
        charts=(charts.histogram("samples by reward", binned.found, hrefs),) if binned.found else (),
        empty="" if binned.found else nothing,
    )


def scores(
    connection: sa.Connection,
    run_id: int,
    number: int,
    chosen: str = "all",
    bin_: int = -1,
    *,
    evaluation: bool = False,
    contents: Contents | None = None,
) -> Scored:
    """Of a step, or of the evaluation after it. `bin_`: only this bin's samples, -1 = all. `contents`: who has how each completion
    begins; None: the table has no such column."""
    here = f"/runs/{run_id}/{'evals' if evaluation else 'steps'}/{number}"
    binned = _bins(connection, run_id, number, evaluation=evaluation)
    within = binned.found[bin_][:2] if 0 <= bin_ < len(binned.found) else None
    low, high = within or (0.0, 0.0)
    only, order = FILTERS.get(chosen, FILTERS["all"])
    listed = filled(
        questions.EVALUATION_SAMPLES if evaluation else questions.SAMPLES,
        run_id=run_id,
        step=number,
        only=only,
        order=order,
        ranged=int(within is not None),
        low=low,
        high=high,
        most=questions.MOST_SAMPLES,
    )
    samples, more, why = _begun(connection, run_id, ask(connection, listed), contents)
    table = table_of(
        "Samples",
        listed + more,
        samples,
        {"sample_id": sample_link, "group_id": group_link},
        note=notes(f"at most {questions.MOST_SAMPLES}", why),
        choices=_choices(here, chosen, within),
    )
    full = tuple(i for i, (*_, n) in enumerate(binned.found) if n)
    return Scored(_rewards(binned, here, chosen), table, bool(samples) or binned.any, full)


def _choices(here: str, chosen: str, within: tuple[float, float] | None) -> tuple[tuple[str, str, bool], ...]:
    """The filters of the page `here`; and how to leave the bin of rewards that is shown, None = of every reward."""
    found = [(name, narrowed_path(here, name), name == chosen) for name in FILTERS]
    if within is not None:
        low, high = map(charts.number, within)
        found.append((f"reward {low} to {high}: show all", here, True))
    return tuple(found)


def _begun(
    connection: sa.Connection, run_id: int, samples: list[Row], contents: Contents | None
) -> tuple[list[Row], str, str]:
    """(samples with how each completion begins, the statement for it, why there is none); as they are where these cannot be read."""
    if contents is None or not may_read(connection, "chunks"):
        return samples, "", ""
    ids = [row["sample_id"] for row in samples]
    begun, why = contents.beginnings(connection, run_id, ids)
    more = f"\n\n{filled_list(questions.MARKED, 'samples', ids)}"
    if why:
        return samples, more, why
    return [{**row, "completion": begun.get(row["sample_id"], "")} for row in samples], more, ""


def narrowed_path(here: str, chosen: str, bin_: int = -1) -> str:
    """Where the samples of the page `here` are that a filter and a bin keep."""
    if (chosen, bin_) == ("all", -1):
        return here
    return f"{here}?only={chosen.replace(' ', '+')}{f'&bin={bin_}' if bin_ >= 0 else ''}"


def narrowed(
    connection: sa.Connection, run_id: int, number: int, *, evaluation: bool = False
) -> dict[str, Page]:
    """What each filter of a step (or evaluation) but "all" keeps, and each bin of rewards that has samples, by their paths: the samples
    alone."""
    here = f"/runs/{run_id}/{'evals' if evaluation else 'steps'}/{number}"
    title = f"{'Evaluation after step' if evaluation else 'Step'} {number}"
    every = scores(connection, run_id, number, evaluation=evaluation)
    if not every.found:
        return {}
    asked = [(name, -1) for name in FILTERS if name != "all"] + [("all", i) for i in every.filled_bins]
    above = ((f"Run {run_id}", f"/runs/{run_id}"), (title, here))
    return {
        narrowed_path(here, name, i): Page(
            f"{title}: {name if i < 0 else 'of one reward'}",
            (scores(connection, run_id, number, name, i, evaluation=evaluation).samples,),
            above,
        )
        for name, i in asked
    }


def parts(metrics: Mapping[str, float]) -> tuple[charts.Chart, ...]:
    """A step's seconds, one part after another."""
    at, drawn = 0.0, list[tuple[str, float, float, str, int]]()
    for name, said, follows in PARTS:
        took = metrics.get(name, 0.0)
        if took > 0:
            drawn.append((said, at, at + took, f"{said}: {charts.number(took)} s", len(drawn)))
            at += took if follows else 0.0
    return (charts.rows("seconds of the step by part", drawn),) if drawn else ()


@dataclasses.dataclass(frozen=True)
class _Use:
    """Of the engines that generated a step's samples: `by_worker` has how long and how much, from `begin` to `end` in Unix seconds.
    `asked`: what every statement of theirs is of."""

    by_worker: Mapping[int, Row]
    begin: float
    end: float
    asked: Mapping[str, float]


def _step_engines(connection: sa.Connection, run_id: int, number: int, commit: Row | None) -> Panel:
    """Where each GPU's seconds went from the first lease of a step's samples to its commit, or until now."""
    title = "Where each GPU's seconds went"
    since = (commit["attempt_started_at"] if commit else None) or 0.0
    of = {
        "run_id": run_id,
        "step": number,
        "since": since,
        "until": commit["committed_at"] if commit else questions.NO_TIME,
    }
    asked = filled(questions.STEP_LEASES, **of)
    leased = ask(connection, asked)
    if not leased:
        return Panel(title, asked, empty="no engine had samples of this step yet")
    begin = min(row["granted_at"] for row in leased)
    end = max(begin, commit["committed_at"] if commit else max(row["until_at"] for row in leased))
    use = _Use({row["worker_id"]: row for row in leased}, begin, end, of)
    there = filled(
        questions.STEP_ENGINES, run_id=run_id, since=begin, until=end, most=questions.MOST_STEP_ENGINES
    )
    engines = ask(connection, there)
    drawn, spells = _engine_lanes(connection, engines[:_MOST_LANES], use)
    count = engines[0]["engines"] if engines else 0
    table = table_of(
        title,
        "\n\n".join(filter(None, (asked, there, spells))),
        [_engine_row(row, use) for row in engines],
        note=notes(
            f"from the first lease of its samples to its commit, {charts.span(end - begin)}. Blue: the engine had samples of this step; "
            "grey: it was there and had none: it loads weights, works for another step, or sleeps while its GPU trains",
            f"drawn are the first {_MOST_LANES} of {count:,} engines" if count > _MOST_LANES else "",
            f"listed are {len(engines):,}" if count > len(engines) else "",
        ),
    )
    return dataclasses.replace(table, charts=drawn)


def _here(engine: Row, use: _Use) -> tuple[float, float]:
    """When an engine was there, in Unix seconds."""
    first = max(use.begin, engine["joined_at"])
    return first, max(first, min(use.end, engine["until_at"]))


def _engine_row(engine: Row, use: _Use) -> Row:
    first, last = _here(engine, use)
    own = use.by_worker.get(engine["worker_id"])
    busy, gpus = (own["generating_s"] if own else 0.0), engine["gpus"]
    return {
        "engine": engine["worker_id"],
        "kind": engine["kind"],
        "node": engine["node"],
        "gpus": gpus,
        "gpu_seconds": gpus * (last - first),
        "of_them_generating": gpus * busy,
        "of_them_otherwise": gpus * max(0.0, last - first - busy),
        "tokens": int(own["tokens"]) if own else 0,
    }


def _engine_lanes(
    connection: sa.Connection, engines: Sequence[Row], use: _Use
) -> tuple[tuple[charts.Chart, ...], str]:
    """When each engine was there and had samples of the step, and the statement for it; no gap is drawn that is too short to be seen."""
    if not engines:
        return (), ""
    workers = questions.listed([row["worker_id"] for row in engines])
    gap = (use.end - use.begin) / 500
    sql = filled(questions.STEP_SPELLS.replace("{workers}", workers), **use.asked, gap=gap)
    spells: dict[int, list[tuple[float, float]]] = {}
    for row in ask(connection, sql):
        spells.setdefault(row["worker_id"], []).append((row["granted_at"], row["until_at"]))
    lanes = []
    for row in engines:
        name = clean(f"{row['kind']} {row['worker_id']} {row['node']}", 28)
        own = [
            (a, b, f"{name}: generates for {charts.number(b - a)} s", 0)
            for a, b in spells.get(row["worker_id"], ())
        ]
        lanes.append((name, [(*_here(row, use), f"{name}: here, without samples of this step", 5), *own]))
    return (charts.lanes("engines", lanes, use.begin, use.end),), sql


def changed(connection: sa.Connection, run_id: int, number: int, since: int) -> Page:
    """Prompts that two steps completed, those whose mean reward changed most first. Raises `LedgerError` where there is no such run, or
    the role may not read prompts."""
    if not may_read(connection, "groups"):
        raise LedgerError(NEEDS_CONTENTS, "name a ledger URL with that role")
    sql = filled(questions.CHANGED, run_id=run_id, step=number, since=since, most=questions.MOST_SAMPLES)
    found = ask(connection, sql)
    if not found:
        row_of(connection, filled(questions.RUN, run_id=run_id), f"run {run_id}")
    links = {name: _link_of(name) for name in ("group_then", "group_now")}
    here = f"/runs/{run_id}"
    return Page(
        f"Step {number}: changed since step {since}",
        (
            table_of(
                "Prompts by how much their mean reward changed",
                sql,
                found,
                links,
                note=f"at most {questions.MOST_SAMPLES}",
            ),
        ),
        (
            (f"Run {run_id}", here),
            (f"Step {since}", f"{here}/steps/{since}"),
            (f"Step {number}", f"{here}/steps/{number}"),
        ),
    )


def _link_of(name: str) -> Callable[[Row], str]:
    return lambda row: f"/groups/{row[name]}"
