"""Pages of a train step: where its time and its GPUs' seconds went, its rewards and samples, and what changed since an earlier one.

Boundary: one subject of `pages`, which has the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

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
from scavenger.web.questions import filled, filled_list

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
    here = f"/runs/{run_id}/steps/{number}"
    asked = filled(questions.STEP, run_id=run_id, step=number, most=questions.MOST_RUNS)
    attempts = ask(connection, asked)
    metrics = metrics_of(attempts[0]) if attempts else {}
    went = parts(metrics)
    scored = scores(connection, run_id, number, chosen, bin_, contents=contents)
    played = _episodes(connection, run_id, number)
    shared = filled(
        questions.SAME_PROMPTS,
        run_id=run_id,
        step=number,
        back=questions.MOST_BACK,
        most=questions.MOST_SINCE,
    )
    with_prompts = may_read(connection, "groups")
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
            table_of(
                "The same prompts before",
                shared,
                ask(connection, shared) if with_prompts else [],
                {"since_step": lambda row: f"{here}/since/{row['since_step']}"},
                note=f"of the {questions.MOST_BACK} steps before; choose one to see which prompts' rewards changed since. "
                f"Any other: {here}/since/STEP"
                if with_prompts
                else f"not shown: {NEEDS_CONTENTS}",
            ),
        ),
        ((f"Run {run_id}", f"/runs/{run_id}"),),
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
    rewards = charts.bins([(float(row["reward"]), 1) for row in found if row["reward"] is not None])
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
    sql = filled(
        questions.EVALUATION_REWARDS if evaluation else questions.REWARDS,
        run_id=run_id,
        step=number,
        most=questions.MOST_REWARDS,
    )
    counts = [(float(row["reward"]), int(row["samples"])) for row in ask(connection, sql)]
    binned = charts.bins(counts)
    hrefs = [narrowed_path(here, chosen, i) for i in range(len(binned))]
    ranged = 0 <= bin_ < len(binned)
    low, high = binned[bin_][:2] if ranged else (0.0, 0.0)
    only, order = FILTERS.get(chosen, FILTERS["all"])
    listed = filled(
        questions.EVALUATION_SAMPLES if evaluation else questions.SAMPLES,
        run_id=run_id,
        step=number,
        only=only,
        order=order,
        ranged=int(ranged),
        low=low,
        high=high,
        most=questions.MOST_SAMPLES,
    )
    samples, why = ask(connection, listed), ""
    if contents is not None and may_read(connection, "chunks"):
        ids = [row["sample_id"] for row in samples]
        begun, why = contents.beginnings(connection, run_id, ids)
        listed += f"\n\n{filled_list(questions.MARKED, 'samples', ids)}"
        if not why:
            samples = [{**row, "completion": begun.get(row["sample_id"], "")} for row in samples]
    choices = [(name, narrowed_path(here, name), name == chosen) for name in FILTERS]
    if ranged:
        choices.append((f"reward {charts.number(low)} to {charts.number(high)}: show all", here, True))
    return Scored(
        Panel(
            "Rewards",
            sql,
            "choose a bar to see its samples",
            charts=(charts.histogram("samples by reward", binned, hrefs),) if binned else (),
            empty="" if binned else "no sample has a reward yet",
        ),
        table_of(
            "Samples",
            listed,
            samples,
            {"sample_id": sample_link, "group_id": group_link},
            note=notes(f"at most {questions.MOST_SAMPLES}", why),
            choices=tuple(choices),
        ),
        bool(samples or counts),
        tuple(i for i, (*_, n) in enumerate(binned) if n),
    )


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


def _step_engines(connection: sa.Connection, run_id: int, number: int, commit: Row | None) -> Panel:
    """Where each GPU's seconds went from the first lease of a step's samples to its commit, or until now."""
    since = (commit["attempt_started_at"] if commit else None) or 0.0
    asked = filled(
        questions.STEP_LEASES, run_id=run_id, step=number, since=since, most=questions.MOST_STEP_LEASES
    )
    leases = ask(connection, asked)
    title = "Where each GPU's seconds went"
    if not leases:
        return Panel(title, asked, empty="no engine had samples of this step yet")
    begin = leases[0]["granted_at"]
    end = max(begin, commit["committed_at"] if commit else max(row["until_at"] for row in leases))
    there = filled(
        questions.STEP_ENGINES, run_id=run_id, since=begin, until=end, most=questions.MOST_STEP_ENGINES
    )
    spells: dict[int, list[tuple[float, float]]] = {}
    tokens: dict[int, int] = {}
    for row in leases:
        spells.setdefault(row["worker_id"], []).append((row["granted_at"], min(end, row["until_at"])))
        tokens[row["worker_id"]] = tokens.get(row["worker_id"], 0) + row["tokens"]
    lanes, rows = [], []
    for row in ask(connection, there):
        first, last = max(begin, row["joined_at"]), min(end, row["until_at"])
        own = charts.merged(spells.get(row["worker_id"], ()))
        busy = sum(b - a for a, b in own)
        here = max(0.0, last - first)
        name = clean(f"{row['kind']} {row['worker_id']} {row['node']}", 28)
        lanes.append(
            (
                name,
                [
                    (first, last, f"{name}: here, without samples of this step", 5),
                    *(
                        (a, b, f"{name}: generates for {charts.number(b - a)} s", 0)
                        for a, b in charts.merged(own, (end - begin) / 500)
                    ),
                ],
            )
        )
        rows.append(
            {
                "engine": row["worker_id"],
                "kind": row["kind"],
                "node": row["node"],
                "gpus": row["gpus"],
                "gpu_seconds": row["gpus"] * here,
                "of_them_generating": row["gpus"] * busy,
                "of_them_otherwise": row["gpus"] * max(0.0, here - busy),
                "tokens": tokens.get(row["worker_id"], 0),
            }
        )
    table = table_of(
        title,
        f"{asked}\n\n{there}",
        rows,
        note=f"from the first lease of its samples to its commit, {charts.span(end - begin)}. Blue: the engine had samples of this step; "
        "grey: it was there and had none: it loads weights, works for another step, or sleeps while its GPU trains",
    )
    return dataclasses.replace(
        table, charts=(charts.lanes("engines", lanes[:_MOST_LANES], begin, end),) if lanes else ()
    )


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
