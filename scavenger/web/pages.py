"""What each page shows but a step's: rows of the ledger as panels. Knows no HTML and no HTTP; a caller gives the connection.

Boundary: no HTTP; tests read pages without a server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from scavenger.errors import ConfigError, LedgerError
from scavenger.ledger import queries
from scavenger.ledger.read import typed
from scavenger.ledger.read.contents import prompts as contents_of_prompts
from scavenger.ledger.read.contents import recorded
from scavenger.printable import indented
from scavenger.protocol.messages import unpack_differences, unpack_logprobs, unpack_tokens
from scavenger.web import charts, questions, texts
from scavenger.web.panels import (
    Page,
    Panel,
    Row,
    Text,
    ask,
    clean,
    cut_note,
    decision_link,
    episode_link,
    group_link,
    metrics_of,
    moment,
    notes,
    row_of,
    run_link,
    sample_link,
    step_of,
    steps_of,
    table_of,
)
from scavenger.web.questions import filled, filled_list
from scavenger.web.texts import Piece

_MOST_TEXT, _MOST_INPUTS, _MOST_FACTS = texts.MOST_TEXT, 40_000, 1_000
#: Of a completion in a table: characters that are shown, and tokens that are read for them.
MOST_BEGINNING, _MOST_FIRST_TOKENS = 80, 80
#: Tokens of one completion that are marked, and tokens that a search decodes.
_MOST_HEAT, _MOST_SEARCHED = texts.MOST_PIECES, 1_000_000
#: Tokens that a page of several completions marks, over all of them.
_MOST_MARKS = 4_000
#: Samples named in one statement.
_MOST_NAMED = 500
#: How a completion may be marked.
MARKS = ("none", "likely", "apart")
#: Runs whose steps the overview draws.
_DRAWN = questions.MOST_COMPARED
#: Metrics that a page draws: those of a run with four parts of its reward, and what a reader looks at next.
_DRAWN_METRICS = 16
#: What is drawn behind rewards, evaluations, lengths and parts of the reward: whether it goes well, and where its time goes.
_NEXT = (
    "seconds",
    "seconds_wait",
    "staleness_mean",
    "mismatch_k3",
    "grad_norm",
    "entropy",
    "loss",
    "effective_fraction",
)


# ---------------------------------------------------------------- runs


def _marks(found: Sequence[Row]) -> list[tuple[float, str]]:
    """Of each engine that left, whatever the reason: one that Slurm preempted says so."""
    return [
        (
            row["left_at"],
            clean(
                f"{moment(row['left_at'])}: {row['kind']} engine on {row['node']} left, {row['reason']}; "
                + (f"allocation {row['allocation_ended']}; " if row["allocation_ended"] else "")
                + f"{row['samples']} samples, {row['salvaged']} tokens salvaged, {row['regenerated']} regenerated"
            ),
        )
        for row in found
    ]


def ordered(names: Iterable[str]) -> list[str]:
    """Metrics as a reader looks at them: the reward, evaluations, the mean length, the reward's parts, what `_NEXT` names, and the rest by
    name. Pure."""

    def place(name: str) -> tuple[int, int, str]:
        if name in _NEXT:
            return 4, _NEXT.index(name), name
        if name in ("reward", "length_mean"):
            return (0 if name == "reward" else 2), 0, name
        # How a reward is spread, and what became of it, are no parts of it.
        part = name.startswith("reward_") and name not in (
            "reward_std",
            "reward_min",
            "reward_max",
            "reward_version",
        )
        # Of an evaluation its mean reward first: a table has the first six.
        later = 0 if name in ("eval_sampled", "eval_greedy") else 1
        return (1 if name.startswith("eval_") else 3 if part else 5), later, name

    return sorted(names, key=place)


def _by_step(name: str, steps: Sequence[Row]) -> charts.Chart:
    """A metric over the steps' numbers. An engine leaves at a time, so none is marked."""
    points = [(row["step"], row["numbers"][name]) for row in reversed(steps) if name in row["numbers"]]
    first, last = min(row["step"] for row in steps), max(row["step"] for row in steps)
    return charts.series(
        clean(name, 60), points, (), first, last, (f"step {charts.number(first)}", charts.number(last))
    )


def _series(
    name: str, steps: Sequence[Row], marks: Sequence[Row], begin: float, end: float, label: str = ""
) -> charts.Chart:
    points = [
        (row["committed_at"], row["numbers"][name]) for row in reversed(steps) if name in row["numbers"]
    ]
    return charts.series(label or name, points, _marks(marks), begin, end)


def _cut(there: Sequence[Row]) -> bool:
    """Whether there may be more steps than were read."""
    return len(there) >= questions.MOST_STEPS


def _asked_steps(run_id: int, before: int = questions.NO_STEP) -> str:
    return filled(questions.STEPS, run_id=run_id, before=before, most=questions.MOST_STEPS)


def _asked_marks(run_id: int, until: float = questions.NO_TIME) -> str:
    return filled(questions.MARKS, run_id=run_id, until=until, most=questions.MOST_MARKS)


def _axis(run: Row, steps: Sequence[Row]) -> tuple[float, float]:
    """From when to when a run's steps are drawn, in Unix seconds: from its creation where all of them are."""
    times = [row["committed_at"] for row in steps]
    begin = min(times if _cut(steps) else [*times, run["created_at"]])
    return begin, max(times, default=begin + 1)


def overview(connection: sa.Connection, before: int = questions.NO_STEP) -> Page:
    """Runs, and the reward and waiting time of the first of them on one time axis. `before`: a place as in `questions.RUNS`."""
    sql = filled(questions.RUNS, before=before, most=questions.MOST_RUNS)
    runs = ask(connection, sql)
    together = ",".join(str(run["run_id"]) for run in runs[:_DRAWN])
    choices = [("compare the newest runs", f"/compare?runs={together}", False)] if len(runs) > 1 else []
    if len(runs) == questions.MOST_RUNS:
        last = runs[-1]
        place = last["run_id"] + (questions.ACTIVE_PLACE if last["state"] == "active" else 0)
        choices.append(("older", f"/?before={place}", False))
    panels = [table_of("Runs", sql, runs, {"run_id": run_link, "name": run_link}, choices=tuple(choices))]
    drawn = []
    for run in runs[:_DRAWN]:
        asked, left = _asked_steps(run["run_id"]), _asked_marks(run["run_id"])
        drawn.append((run, asked, steps_of(connection, asked), left, ask(connection, left)))
    spans = [_axis(run, steps) for run, _, steps, _, _ in drawn if steps]
    begin, end = (min(a for a, _ in spans), max(b for _, b in spans)) if spans else (0.0, 1.0)
    for run, asked, steps, left, marks in drawn:
        two = tuple(
            _series(name, steps, marks, begin, end, label)
            for name, label in (("reward", "reward"), ("seconds_wait", "seconds waiting in a step"))
        )
        panels.append(
            Panel(
                clean(run["name"], 60),
                f"{asked}\n\n{left}",
                notes(
                    f"steps shown: {'the newest ' if _cut(steps) else ''}{len(steps):,}; axis from {moment(begin)} UTC, "
                    "the same for all runs",
                    "a red line is an engine that left",
                    cut_note(steps),
                ),
                charts=two if steps else (),
                empty="" if steps else "no step is committed yet",
            )
        )
    return Page("Runs", tuple(panels))


def compare(connection: sa.Connection, run_ids: Sequence[int]) -> Page:
    """Metrics of several runs over their steps, one line each; of one that the ledger does not have, a note. Raises `LedgerError` where
    there is none of them."""
    asked, found, missing = [], [], []
    for run_id in run_ids[: questions.MOST_COMPARED]:
        one, sql = filled(questions.RUN, run_id=run_id), _asked_steps(run_id)
        rows = ask(connection, one)
        if not rows:
            missing.append(run_id)
            continue
        found.append((rows[0], steps_of(connection, sql)))
        asked += [one, sql]
    if missing and not found:
        row_of(connection, filled(questions.RUN, run_id=missing[0]), f"run {missing[0]}")
    drawn = _compared(found)
    gone = f"the ledger has no run {', '.join(map(str, missing))}: purged, or never there" if missing else ""
    said = [
        f"run {row['run_id']}: {about}"
        for row, steps in found
        if (about := notes(f"the newest {len(steps):,} steps" if _cut(steps) else "", cut_note(steps)))
    ]
    # A run's number stands in its statement alone: the rows are of several.
    return Page(
        "Runs compared",
        (
            table_of(
                "Runs",
                "\n\n".join(asked[::2]),
                [row for row, _ in found],
                {"run_id": run_link, "name": run_link},
                omit=("tokenizer",),
                note=gone,
            ),
            Panel(
                "Metrics",
                "\n\n".join(asked[1::2]),
                notes("smoothed, by step; the address names the runs: /compare?runs=1,2", *said),
                charts=drawn,
                empty="" if drawn else "no step is committed yet",
            ),
        ),
        (("Runs", "/"),),
    )


def _compared(found: Sequence[tuple[Row, Sequence[Row]]]) -> tuple[charts.Chart, ...]:
    """A chart for each metric of runs with their steps."""
    names = ordered({name for _, steps in found for row in steps[:20] for name in row["numbers"]})

    def line(run: Row, steps: Sequence[Row], name: str) -> tuple[str, list[tuple[float, float]]]:
        points = [(one["step"], one["numbers"][name]) for one in reversed(steps) if name in one["numbers"]]
        return clean(f"{run['run_id']} {run['name']}", 40), points

    return tuple(
        charts.compared(clean(name, 60), [line(row, steps, name) for row, steps in found], "step")
        for name in names[:_DRAWN_METRICS]
    )


def run(
    connection: sa.Connection, run_id: int, *, by_step: bool = False, before: int = questions.NO_STEP
) -> Page:
    """One run: metrics over time with marks where engines left, or over its steps; its steps, those engines. `before`: of steps and
    evaluations below this number, with the engines that had left by the last of them. Raises `LedgerError` where there is no such run."""
    asked = filled(questions.RUN, run_id=run_id)
    found = row_of(connection, asked, f"run {run_id}")
    counted = filled(questions.COUNTS, run_id=run_id)
    (counts,) = ask(connection, counted)
    sql = _asked_steps(run_id, before)
    steps = steps_of(connection, sql)
    begin, end = _axis(found, steps)
    left = _asked_marks(run_id, questions.NO_TIME if before == questions.NO_STEP else end)
    marks = ask(connection, left)
    chosen = ordered({name for row in steps[:20] for name in row["numbers"]})[:_DRAWN_METRICS]
    drawn = tuple(
        _by_step(name, steps) if by_step else _series(name, steps, marks, begin, end, clean(name, 60))
        for name in chosen
    )
    some = _some(len(steps), counts["steps"], before)
    of_marks = _some(len(marks), counts["engines"], before)
    nothing = "no step is before this one" if counts["steps"] else "no step is committed yet"
    metrics = Panel(
        "Metrics",
        f"{sql}\n\n{left}\n\n{counted}",
        _metrics_note(steps, some, "" if by_step else of_marks, by_step=by_step),
        charts=drawn,
        choices=_run_choices(run_id, steps, by_step=by_step, before=before),
        empty="" if drawn else nothing,
    )
    return Page(
        f"Run {clean(found['name'], 60)}",
        (
            table_of("Run", asked, [found], omit=("run_id",)),
            Panel("Search the completions", search=f"/runs/{run_id}/search"),
            metrics,
            table_of(
                "Steps",
                sql,
                _with_numbers(steps, chosen[:6]),
                {"step": lambda row: f"/runs/{run_id}/steps/{row['step']}"},
                note=some,
            ),
            _evaluations(connection, run_id, (begin, end), counts["evaluations"], before),
            *_run_episodes(connection, run_id),
            table_of("Engines that left", left, marks, note=of_marks),
        ),
    )


def _metrics_note(steps: Sequence[Row], some: str, of_marks: str, *, by_step: bool) -> str:
    """`some`, `of_marks`: how many of the steps, and of the engines that left, are drawn; "" = all."""
    return notes(
        "thin: as measured; thick: smoothed",
        some and f"steps: {some}",
        "" if by_step else f"a red line is an engine that left{of_marks and f', of these {of_marks}'}",
        cut_note(steps),
    )


def _some(shown: int, there: int, before: int) -> str:
    """What a reader is told of rows that are not all of what there is, the newest first; "" where they are."""
    newest = "the newest " if before == questions.NO_STEP else ""
    return f"{newest}{shown:,} of {there:,}" if shown < there else ""


def _run_choices(
    run_id: int, steps: Sequence[Row], *, by_step: bool, before: int
) -> tuple[tuple[str, str, bool], ...]:
    """What a run's metrics are drawn over, and where older and the newest steps are."""
    here, newest = f"/runs/{run_id}", before == questions.NO_STEP

    def path(over_steps: bool, below: int) -> str:
        asked = ["by=step"] * over_steps + [f"before={below}"] * (below != questions.NO_STEP)
        return f"{here}?{'&'.join(asked)}" if asked else here

    over = [("over time", path(False, before), not by_step), ("over steps", path(True, before), by_step)]
    older = [("older", path(by_step, min(row["step"] for row in steps)), False)] if _cut(steps) else []
    back = [] if newest else [("newest", path(by_step, questions.NO_STEP), False)]
    return (*(over if steps else []), *older, *back)


def _run_episodes(connection: sa.Connection, run_id: int) -> tuple[Panel, ...]:
    """The newest episodes of a run of agents; no panel where there are none."""
    asked = filled(questions.EPISODES, run_id=run_id, most=questions.MOST_EPISODES)
    links = {"episode_id": episode_link, "name": episode_link}
    found = table_of("Episodes", asked, ask(connection, asked), links, note="of a run of agents, the newest")
    return (found,) if found.body else ()


def _with_numbers(steps: Sequence[Row], names: Sequence[str]) -> list[Row]:
    return [
        {
            **{name: row["numbers"].get(name) for name in names},
            **{
                name: row[name] for name in ("step", "attempt", "version", "committed_at")
            },  # a metric hides none
        }
        for row in steps
    ]


def _evaluations(
    connection: sa.Connection, run_id: int, axis: tuple[float, float], there: int, before: int
) -> Panel:
    """A run's evaluations, drawn on the time axis of its steps. `there`: how many the run has."""
    sql = filled(questions.EVALUATIONS, run_id=run_id, before=before, most=questions.MOST_STEPS)
    found = steps_of(connection, sql)
    names = ordered({name for row in found[:20] for name in row["numbers"]} - {"seconds", "rewards_late"})
    table = table_of(
        "Evaluations",
        sql,
        _with_numbers(found, names[:6]),
        {"step": lambda row: f"/runs/{run_id}/evals/{row['step']}"},
        note=notes(
            "each after the step of its number; choose one to see its samples",
            _some(len(found), there, before),
            cut_note(found),
        )
        if found
        else "",
    )
    # The first one may come before the first step, and the last one after the last.
    times = [*axis, *(row["committed_at"] for row in found)]
    drawn = tuple(
        _series(name, found, (), min(times), max(times), clean(f"evaluation: {name}", 60))
        for name in names[:6]
    )
    return dataclasses.replace(table, charts=drawn)


def search(connection: sa.Connection, contents: Contents, run_id: int, wanted: str) -> Page:
    """The newest samples of a run whose completion has this text. Raises `LedgerError`, `ConfigError`."""
    name = row_of(connection, filled(questions.RUN, run_id=run_id), f"run {run_id}")["name"]
    sql = filled(questions.NEWEST, run_id=run_id, most=questions.MOST_SEARCHED)
    newest = ask(connection, sql) if wanted else []
    tokenizer = _tokenizer(connection, run_id)
    found, searched = contents.containing(connection, wanted, [row["sample_id"] for row in newest], tokenizer)
    shown = [{**row, "text": found[row["sample_id"]]} for row in newest if row["sample_id"] in found]
    note = (
        f"{len(shown):,} of the newest {searched:,} samples; searched were the first {_MOST_TEXT:,} tokens of each, {_MOST_SEARCHED:,} "
        "together; the SQL lists those samples, not those that are found"
        if wanted
        else ""
    )
    table = table_of(
        "Samples",
        sql,
        shown[: questions.MOST_SAMPLES],
        {"sample_id": sample_link, "group_id": group_link},
        note=note,
        search=f"/runs/{run_id}/search",
        wanted=clean(wanted),
    )
    return Page("Search", (table,), ((f"Run {clean(name, 60)}", f"/runs/{run_id}"),))


# ---------------------------------------------------------------- samples


class Read(NamedTuple):
    """A sample's text, printable and cut; why not, where it cannot be read. `pieces` and `rest` of the completion as in `Text`."""

    prompt: str
    completion: str
    pieces: tuple[Piece, ...] = ()
    rest: str = ""


class Contents:
    """Prompts and completions of a ledger as text; token ids where the run's tokenizer cannot be used.

    `ask`: who has texts made of ids, such as a `texts.Child`; None: a process for each page.
    """

    def __init__(self, ask: texts.Ask | None = None) -> None:
        self._ask = ask

    def read(
        self, connection: sa.Connection, sample_ids: Sequence[int], tokenizer: str, *, added: bool = False
    ) -> list[Read]:
        """A text for each sample, the marks of its first tokens with it. `added`: of a turn's prompt what it adds to the turn before."""
        found = recorded(connection, sample_ids, _MOST_TEXT)
        known = {one: row for one, row in found.items() if not row.why}
        groups = list(dict.fromkeys(row.group_id for row in known.values()))
        why = ""
        try:
            prompts = contents_of_prompts(connection, groups, _MOST_TEXT, added=added)
        except LedgerError as error:
            prompts, why = {}, f"({error.cause})"
        ids = [unpack_tokens(prompts.get(one, b"")) for one in groups]
        ids += [unpack_tokens(row.tokens) for row in known.values()]
        most = min(_MOST_HEAT, _MOST_MARKS // max(1, len(known)))
        marked = {
            len(groups) + i: (
                unpack_logprobs(row.logprobs[: 4 * most]),
                unpack_differences(row.differences[: 2 * most]),
            )
            for i, row in enumerate(known.values())
            if row.tokens
        }
        try:
            said, pieces, rest = texts.read(tokenizer, ids, marked, self._ask) if ids else ([], {}, {})
        except ConfigError as error:
            said = [clean(f"({error.cause}; ids:) {' '.join(map(str, some))}", _MOST_TEXT) for some in ids]
            pieces, rest = {}, {}
        prompt_of = {one: clean(why or text, _MOST_TEXT) for one, text in zip(groups, said, strict=False)}
        at = dict(zip(known, range(len(groups), len(ids)), strict=True))
        return [
            Read(
                prompt_of.get(known[one].group_id, ""),
                clean(said[at[one]], _MOST_TEXT),
                pieces.get(at[one], ()),
                rest.get(at[one], ""),
            )
            if one in known
            else Read("", clean(f"({found[one].why if one in found else 'it was purged'})", _MOST_TEXT))
            for one in sample_ids
        ]

    def beginnings(
        self, connection: sa.Connection, run_id: int, sample_ids: Sequence[int]
    ) -> tuple[dict[int, str], str]:
        """(sample: the first characters of its completion on one line, of those that can be read; why not, "" where it can be)."""
        found = recorded(connection, sample_ids, _MOST_FIRST_TOKENS)
        known = {one: unpack_tokens(row.tokens) for one, row in found.items() if row.tokens}
        if not known:
            return {}, ""
        try:
            said, *_ = texts.read(
                _tokenizer(connection, run_id), list(known.values()), ask=self._ask, most=MOST_BEGINNING
            )
        except ConfigError as error:
            return {}, clean(error.cause)
        return {
            one: clean(" ".join(text.split()), MOST_BEGINNING) for one, text in zip(known, said, strict=True)
        }, ""

    def containing(
        self, connection: sa.Connection, wanted: str, sample_ids: Sequence[int], tokenizer: str
    ) -> tuple[dict[int, str], int]:
        """(sample: its text around `wanted`, whatever the case; how many samples were searched). Of at most a million tokens.

        Raises `LedgerError`, and `ConfigError` where the run's tokenizer cannot be used.
        """
        known: dict[int, list[int]] = {}
        for first in range(0, len(sample_ids), _MOST_NAMED):
            left = _MOST_SEARCHED - sum(map(len, known.values()))
            if left <= 0:
                break
            known |= _completions(connection, sample_ids[first : first + _MOST_NAMED], left)
        hits = texts.containing(tokenizer, list(known.values()), wanted, self._ask) if known else {}
        places = list(known)
        return {places[place]: clean(text) for place, text in hits.items()}, len(known)


def _completions(connection: sa.Connection, sample_ids: Sequence[int], most: int) -> dict[int, list[int]]:
    """Token ids of each of them in order, each cut at the bound of a text, until `most` in all."""
    sql = filled_list(questions.CHUNKS, "samples", sample_ids)
    packed: dict[int, bytes] = dict.fromkeys(sample_ids, b"")
    for row in connection.exec_driver_sql(sql).mappings():
        typed.require(row, packed=True)
        sample_id, some = row["sample_id"], row["tokens"]
        packed[sample_id] = (packed[sample_id] + bytes(some))[: 4 * _MOST_TEXT]
    out: dict[int, list[int]] = {}
    for sample_id, some in packed.items():
        if most <= 0:
            break
        out[sample_id] = list(unpack_tokens(some))
        most -= len(some) // 4
    return out


def _tokenizer(connection: sa.Connection, run_id: int) -> str:
    return str(row_of(connection, filled(questions.RUN, run_id=run_id), f"run {run_id}")["tokenizer"])


def _facts(row: Row) -> str:
    return clean(
        f"{' '.join(filter(None, (row['state'], row['reason'])))}; "
        f"{row['finish'] or 'not finished'}; reward {charts.number(row['reward'])}, "
        f"advantage {charts.number(row['advantage'])}; {row['accepted_len']:,} tokens; "
        f"{row['moves']} moves"
    )


def _place(connection: sa.Connection, group_id: int) -> str:
    """ "group 3 of 8 of the step, ..."; "" of an agent's turn."""
    found = ask(connection, filled(questions.PLACE, group_id=group_id))
    if not found:
        return ""
    row = found[0]
    retry = f", retry {row['retry']}" if row["retry"] else ""
    return (
        f"group {row['place']:,} of {row['prompts']:,} of the {'step' if row['purpose'] == 'train' else 'evaluation'}{retry} "
        f"(scavenger samples: --group {row['prompt_index']})"
    )


def _row_columns(connection: sa.Connection, group_id: int) -> tuple[Panel, ...]:
    """What came with a group's prompt, such as its answer; no panel where nothing did."""
    sql = filled(questions.META, group_id=group_id)
    found = ask(connection, sql)
    if not found or found[0]["meta"] in ("", "{}"):
        return ()
    shown, length = indented(str(found[0]["meta"]), _MOST_TEXT), found[0]["meta_length"]
    return (
        Panel(
            "The prompt's row: what the reward function received",
            sql,
            f"its beginning: {length:,} characters are recorded"
            if max(len(shown), length) > _MOST_TEXT
            else "",
            texts=(Text("", "", "", clean(shown, _MOST_TEXT)),),
        ),
    )


def run_of_group(connection: sa.Connection, group_id: int) -> int:
    """The run whose samples these are. Raises `LedgerError` where there is no such group."""
    asked = filled(questions.GROUP, group_id=group_id, most=1)
    return int(row_of(connection, asked, f"group {group_id}")["run_id"])


def run_of_sample(connection: sa.Connection, sample_id: int) -> int:
    """Raises `LedgerError` where there is no such sample."""
    asked = filled(questions.SAMPLE, sample_id=sample_id)
    return int(row_of(connection, asked, f"sample {sample_id}")["run_id"])


def run_of_episode(connection: sa.Connection, episode_id: int) -> int:
    """The run that answered in its first turn. Raises `LedgerError` where it has no turns."""
    asked = filled(questions.EPISODE, episode_id=episode_id, most=1)
    first = row_of(connection, asked, f"turn of an episode {episode_id}")
    return run_of_sample(connection, first["sample_id"])


def group(connection: sa.Connection, contents: Contents, group_id: int) -> Page:
    """Prompt and completions of one group, side by side. Raises `LedgerError` where there is none."""
    sql = filled(questions.GROUP, group_id=group_id, most=questions.MOST_GROUP)
    first = row_of(connection, sql, f"group {group_id}")
    found = ask(connection, sql)
    tokenizer = _tokenizer(connection, first["run_id"])
    read = contents.read(connection, [row["sample_id"] for row in found], tokenizer)
    said = tuple(
        Text(
            f"sample {row['sample_id']}", sample_link(row), _facts(row), one.completion, one.pieces, one.rest
        )
        for row, one in zip(found, read, strict=True)
    )
    return Page(
        f"Group {group_id}",
        (
            Panel(
                "Prompt",
                f"{filled(questions.PROMPT, group_id=group_id)}\n\n{filled(questions.PLACE, group_id=group_id)}",
                _place(connection, group_id),
                texts=(Text("", "", f"{first['prompt_tokens']} tokens", read[0].prompt),),
            ),
            Panel(
                "Completions",
                f"{sql}\n\n{_marked_sql([row['sample_id'] for row in found])}",
                f"{len(found)} of {first['n']}",
                texts=said,
                marks=_marks_of(read, "none"),
            ),
            *_row_columns(connection, group_id),
        ),
        ((f"Run {first['run_id']}", f"/runs/{first['run_id']}"), step_of(first)),
    )


def _marked_sql(sample_ids: Sequence[int]) -> str:
    """What reads completions with the marks of their tokens."""
    return "\n\n".join(
        filled_list(sql, "samples", sample_ids) for sql in (questions.MARKED, questions.DIFFERENCES)
    )


def _marks_of(read: Sequence[Read], first: str) -> tuple[str, ...]:
    """How they may be marked, `first` as the page opens: by differences where any has some."""
    if not any(one.pieces for one in read):
        return ()
    apart = any(";" in piece.title for one in read for piece in one.pieces)
    return (first, *(one for one in MARKS if one != first and (apart or one != "apart")))


def sample(connection: sa.Connection, contents: Contents | None, sample_id: int) -> Page:
    """One sample over the engines that had it. `contents` None: its text is on its group's page, or its episode's. Raises `LedgerError`
    where there is none."""
    asked = filled(questions.SAMPLE, sample_id=sample_id)
    found = row_of(connection, asked, f"sample {sample_id}")
    ended = filled(questions.ENDS, sample_id=sample_id, most=questions.MOST_ENDS)
    return Page(
        f"Sample {sample_id}",
        (
            table_of(
                "Sample",
                f"{asked}\n\n{filled(questions.PLACE, group_id=found['group_id'])}",
                [found],
                {"group_id": group_link},
                omit=("sample_id", "run_id", "episode_id"),
                note=_place(connection, found["group_id"]),
            ),
            _engines_of(connection, sample_id),
            _text_of(connection, contents, found),
            # As its text, on its group's page where that is in the same file.
            *(() if contents is None else _row_columns(connection, found["group_id"])),
            _mismatch(connection, sample_id),
            table_of("What became of it", ended, ask(connection, ended)),
        ),
        _above_sample(found),
    )


def _above_sample(found: Row) -> tuple[tuple[str, str], ...]:
    """The pages that a sample belongs to."""
    of_agent = (f"Episode {found['episode_id']}", episode_link(found))
    return (
        (f"Run {found['run_id']}", run_link(found)),
        step_of(found),
        (f"Group {found['group_id']}", group_link(found)),
        *((of_agent,) if found["episode_id"] else ()),
    )


def _engines_of(connection: sa.Connection, sample_id: int) -> Panel:
    """A sample's leases, each a bar over its time."""
    sql = filled(questions.LEASES, sample_id=sample_id, most=questions.MOST_LEASES)
    leases = ask(connection, sql)
    spans = [
        (
            clean(f"{row['epoch']}: {row['kind']} {row['worker_id']} {row['node']}", 28),
            row["granted_at"],
            max(row["granted_at"], row["until_at"]),
            clean(
                f"epoch {row['epoch']}, version {row['version']}: tokens {row['start_len']} to {row['end_len']}, "
                f"{row['regenerated']} regenerated; {row['reason'] or 'generates'}"
            ),
            row["epoch"] - 1,
        )
        for row in leases
    ]
    table = table_of("Engines", sql, leases, note="one colour for each epoch (lease)")
    return dataclasses.replace(table, charts=(charts.rows("time on each engine", spans),) if spans else ())


def _text_of(connection: sa.Connection, contents: Contents | None, found: Row) -> Panel:
    if contents is None:
        at = f"/episodes/{found['episode_id']}" if found["episode_id"] else group_link(found)
        return Panel("Text", texts=(Text("prompt and completion", at, _facts(found), ""),))
    (read,) = contents.read(connection, [found["sample_id"]], _tokenizer(connection, found["run_id"]))
    return Panel(
        "Text",
        f"{filled(questions.PROMPT, group_id=found['group_id'])}\n\n{_marked_sql([found['sample_id']])}",
        texts=(
            Text("prompt", "", "", read.prompt),
            Text("completion", "", _facts(found), read.completion, read.pieces, read.rest),
        ),
        marks=_marks_of([read], "likely"),
    )


def _mismatch(connection: sa.Connection, sample_id: int) -> Panel:
    """How far trainer and engine differed: over this sample's tokens, and over those of the step that learned from it."""
    sql = filled(questions.LEARNED, sample_id=sample_id)
    own = filled(questions.APART, sample_id=sample_id, most=questions.MOST_RUNS)
    found, apart = ask(connection, sql), ask(connection, own)
    metrics = metrics_of(found[0]) if found else {}
    rows = [
        {
            "metric": "mean",
            "nats": row["mean"],
            "of": f"this sample's {row['n_tokens']:,} tokens, step {row['step']}",
        }
        for row in reversed(apart)
    ]
    rows += [
        {"metric": name, "nats": metrics[name], "of": f"step {found[0]['step']}'s tokens: {of}"}
        for name, of in (
            ("mismatch_k3", "the mean of k3, an estimate of the KL divergence"),
            ("mismatch_p99", "what 99 % of the differences of log-probabilities do not exceed"),
            ("mismatch_max", "the greatest"),
            ("mismatch_nan", "tokens whose difference is no number (NaN), in none of the others but k3"),
        )
        if name in metrics and (name != "mismatch_nan" or metrics[name])
    ]
    table = table_of(
        "How far trainer and engine differed",
        f"{own}\n\n{sql}",
        rows,
        note=notes(
            ""
            if apart
            else "Of each token it is not known here: the ledger keeps it of the share of groups that monitor.token_differences names.",
            cut_note(found),
        ),
    )
    return table if rows else dataclasses.replace(table, empty="no step that learned from it says so")


_OF_CALLS = (
    "of tools whose effects are outside, and which the agent's gateway asked for it; others leave only what they added to "
    "the next turn's prompt"
)


def episode(connection: sa.Connection, contents: Contents, episode_id: int) -> Page:
    """An agent's episode turn by turn, with the calls of its tools. Raises `LedgerError` where it has no turns."""
    sql = filled(questions.EPISODE, episode_id=episode_id, most=questions.MOST_TURNS)
    run_id = run_of_episode(connection, episode_id)
    found = ask(connection, sql)
    ids = [row["sample_id"] for row in found]
    read = contents.read(connection, ids, _tokenizer(connection, run_id), added=True)
    asked = filled(questions.TOOL_CALLS, episode_id=episode_id, most=questions.MOST_CALLS)
    calls = ask(connection, asked)
    of_it = filled(questions.EPISODE_FACTS, episode_id=episode_id)
    facts = row_of(connection, of_it, f"episode {episode_id}")
    return Page(
        _episode_title(episode_id, facts),
        (
            table_of("Episode", of_it, [facts]),
            table_of("Turns", sql, found, {"sample_id": sample_link}),
            *_policies(connection, episode_id),
            table_of("Tool calls", asked, calls, note=_OF_CALLS),
            Panel(
                "Turn by turn",
                f"{sql}\n\n{_marked_sql(ids)}",
                texts=tuple(_turn_by_turn(found, read, calls)),
                marks=_marks_of(read, "none"),
            ),
        ),
        ((f"Run {run_id}", f"/runs/{run_id}"),),
    )


def _episode_title(episode_id: int, facts: Row) -> str:
    """With its name, which says purpose, step, task and place in the group of a run that plays it; step and reward once one took it."""
    known = [f"step {facts['step']}"] if facts["step"] is not None else []
    known += [f"reward {charts.number(facts['reward'])}"] if facts["reward"] is not None else []
    return ", ".join([f"Episode {episode_id}: {clean(facts['name'])} of run {clean(facts['run'])}", *known])


def _turn_by_turn(found: Sequence[Row], read: Sequence[Read], calls: Sequence[Row]) -> Iterator[Text]:
    """Before each turn what its prompt adds, and then each of its samples; of several the last one says which tools came after it."""
    last = {row["number"]: row["sample_id"] for row in found}
    before = None
    for row, one in zip(found, read, strict=True):
        if row["number"] != before:  # the samples of a turn have one prompt
            yield _before_turn(row, one)
        before = row["number"]
        called = _called(calls, row["number"]) if last[row["number"]] == row["sample_id"] else ""
        facts = f"{row['completion_tokens']:,} tokens; {row['state']}; reward {charts.number(row['reward'])}"
        yield Text(
            f"turn {row['number']}, sample {row['sample_id']}",
            sample_link(row),
            clean(facts + called, _MOST_FACTS),
            one.completion,
            one.pieces,
            one.rest,
        )


def _before_turn(row: Row, one: Read) -> Text:
    between = row["between_s"]
    later = "" if between is None else f"; {charts.number(between)} s after the turn before"
    new = f"{row['added_tokens']:,} of {row['prompt_tokens']:,} prompt tokens are new{later}"
    return Text(f"before turn {row['number']}: task, tools and agent", "", clean(new), one.prompt)


def _policies(connection: sa.Connection, episode_id: int) -> tuple[Panel, ...]:
    """Whose turns these are, where other runs answered for agents of the episode; nothing where none did."""
    sql = filled(questions.POLICIES, episode_id=episode_id, most=questions.MOST_POLICIES)
    found = ask(connection, sql)
    if len(found) < 2:
        return ()
    note = "each run's own part of the episode, with its turns; the state is that of its delivery to the run's trainer"
    return (table_of("Policies", sql, found, {"episode_id": episode_link}, note=note),)


def _called(calls: Sequence[Row], turn: int) -> str:
    """The tools that a turn called: each with its seconds, or that no answer is known."""
    of = [
        f"{row['tool']} "
        + (
            f"{charts.number(row['seconds'])} s"
            if row["seconds"] is not None
            else f"not answered ({row['state']})"
        )
        for row in calls
        if row["turn"] == turn
    ]
    return f"; then called {', '.join(of)}" if of else ""


# ---------------------------------------------------------------- the site

_NO_CLUSTER = (
    "This ledger has seen no cluster and has no harvested GPU, so nobody waited for us. A try with --local is so: it "
    "uses its own machine alone. A daemon's first poll brings the tables here."
)


def harm(connection: sa.Connection) -> Page:
    """GPU-hours given to each user's runs, by account and by run, and other users' waits while harvested jobs had GPUs there."""
    panels = (
        _waits_by_day(connection),
        _waits_by_partition(connection),
        _waits(connection),
        _preemptions(connection),
        *_gpu_hours(connection),
    )
    if any(panel.body for panel in panels) or ask(connection, questions.ANY_POLL + ";"):
        return Page("Harm", panels)
    return Page("Harm", (Panel("No shared GPU was used", questions.ANY_POLL + ";", empty=_NO_CLUSTER),))


def _waits_by_day(connection: sa.Connection) -> Panel:
    sql = queries.load_report("other_users_waiting")
    return table_of(
        "By day: hours in which other users' jobs waited, with harvested jobs there and in all",
        sql,
        ask(connection, sql)[-questions.MOST_WAITS :],
        note="of any partition; the hours in which nothing was harvested are those without us",
    )


def _waits_by_partition(connection: sa.Connection) -> Panel:
    sql = filled(questions.WAITS_BY_DAY)
    waited = ask(connection, sql)[: questions.MOST_WAITS]
    several = len({row["cluster"] for row in waited}) > 1
    return table_of(
        f"By day{', cluster' if several else ''} and partition: other users' waits with GPUs of ours there, and without",
        sql,
        [{**row, "cluster": row["cluster"] or "the daemon's own"} for row in waited],
        omit=() if several else ("cluster",),
        note="of partitions that share nodes with the harvest partition. Days differ in more than in us: more jobs wait when "
        "the cluster is full, and then we hold little",
    )


def _waits(connection: sa.Connection) -> Panel:
    sql = queries.bounded(queries.load_report("other_users_waits"), questions.MOST_WAITS, None)
    return table_of(
        "Other users' waits with GPUs of ours there",
        sql,
        ask(connection, sql),
        note="Waits that a poll saw while we held GPUs in the job's partitions; not every one is due to us. "
        "A wait that began and ended between two polls is in sacct alone, to the second.",
    )


def _preemptions(connection: sa.Connection) -> Panel:
    sql = filled(questions.PREEMPTIONS_BY_DAY)
    return table_of(
        "By day: engines that Slurm preempted for other users, and how long their GPUs were ours after they had left",
        sql,
        ask(connection, sql)[: questions.MOST_WAITS],
        note="Whatever the polls saw; Slurm's times are whole seconds. How long is known of engines with notice: others may "
        "have kept their GPUs for all of GraceTime.",
    )


def _gpu_hours(connection: sa.Connection) -> tuple[Panel, Panel]:
    by_account = queries.load_report("harvested_gpu_hours_by_account")
    by_run = queries.load_report("harvested_gpu_hours_by_user")
    return (
        table_of(
            "GPU-hours given, by user and account",
            by_account,
            ask(connection, by_account)[: questions.MOST_WAITS],
            note="The account is that of the run's training job in Slurm. none: Slurm has no account for it; unknown: no training "
            "job of the run was seen in the queue.",
        ),
        table_of("GPU-hours given, by user and run", by_run, ask(connection, by_run)[: questions.MOST_WAITS]),
    )


def decisions(connection: sa.Connection, before: int = 2**62) -> Page:
    """Decisions before one, the newest first."""
    sql = filled(questions.DECISIONS, before=before, most=questions.MOST_DECISIONS)
    found = ask(connection, sql)
    older = (
        (("older", f"/decisions?before={found[-1]['id']}", False),)
        if len(found) == questions.MOST_DECISIONS
        else ()
    )
    return Page("Decisions", (table_of("Decisions", sql, found, {"id": decision_link}, choices=older),))


def decision(connection: sa.Connection, number: int) -> Page:
    """One decision with its inputs. Raises `LedgerError` where there is none."""
    sql = filled(questions.DECISION, id=number)
    found = row_of(connection, sql, f"decision {number}")
    inputs = indented(str(found["inputs"]), _MOST_INPUTS)
    length = found["inputs_length"]
    cut = max(len(inputs), length) > _MOST_INPUTS
    return Page(
        f"Decision {number}",
        (
            table_of("Decision", sql, [found], omit=("inputs", "inputs_length")),
            Panel(
                "Inputs",
                sql,
                f"their beginning: {length:,} characters are recorded" if cut else "",
                texts=(Text("", "", "", clean(inputs, _MOST_INPUTS)),),
            ),
        ),
        (("Decisions", "/decisions"),),
    )
