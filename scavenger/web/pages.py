"""What each page shows: rows of the ledger as panels. Knows no HTML and no HTTP; a caller gives the connection.

Text that others chose leaves here printable and cut to length; the template escapes it.

Boundary: no HTTP; tests read pages without a server.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from scavenger.errors import ConfigError, LedgerError, ScavengerError
from scavenger.ledger import queries
from scavenger.ledger.read import tokens
from scavenger.printable import printable
from scavenger.protocol.messages import unpack_tokens
from scavenger.web import charts, questions, texts
from scavenger.web.questions import filled

Row = Mapping[str, Any]
FILTERS = {
    "all": (0, 0),
    "moved": (1, 0),
    "masked": (2, 0),
    "cut off": (3, 0),
    "best": (0, 1),
    "worst": (0, 2),
}
_MOST_CELL, _MOST_TEXT, _MOST_INPUTS = 160, texts.MOST_TEXT, 40_000
_MOST_METRICS = 200
#: Tokens whose probability is drawn, and tokens that a search decodes.
_MOST_HEAT, _MOST_SEARCHED = texts.MOST_PIECES, 1_000_000
#: Samples named in one statement.
_MOST_NAMED = 50
#: Runs whose steps the overview draws.
_DRAWN = 6


@dataclasses.dataclass(frozen=True)
class Cell:
    """`href` is a path below the page's prefix, "" = no link."""

    text: str
    href: str = ""
    right: bool = False
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class Text:
    """A completion or a prompt with what is known of it. `pieces`: (text, level of the mark, title), drawn in place of `body`."""

    title: str
    href: str
    facts: str
    body: str
    pieces: tuple[tuple[str, int, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Panel:
    """What is shown of one statement. `choices`: (name, path, is chosen). `search`: the path that gets what a reader looks for, who looked
    for `wanted` last.
    """

    title: str
    sql: str = ""
    note: str = ""
    charts: tuple[charts.Chart, ...] = ()
    head: tuple[str, ...] = ()
    body: tuple[tuple[Cell, ...], ...] = ()
    texts: tuple[Text, ...] = ()
    choices: tuple[tuple[str, str, bool], ...] = ()
    empty: str = ""
    search: str = ""
    wanted: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    title: str
    panels: tuple[Panel, ...]
    above: tuple[tuple[str, str], ...] = ()


def clean(value: object, most: int = _MOST_CELL) -> str:
    """Printable, at most `most` characters."""
    said = printable(str(value)[: most + 1])
    return said if len(said) <= most else f"{said[: most - 1]}\u2026"


def moment(at: float | None) -> str:
    """Unix seconds as UTC; "-" for none, or for what is no date."""
    if at is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return "-"


def _cell(name: str, value: object, href: str = "") -> Cell:
    if name == "at" or name.endswith("_at"):
        return Cell(moment(value if isinstance(value, int | float) else None))
    if value is None:
        return Cell("-", right=True)
    if isinstance(value, str | bytes | bool):
        return Cell(clean(value), href, tone=name if name == "state" else "")
    if name.endswith(("_id", "unix_s")) or name == "id":
        return Cell(str(value), href, right=True)
    try:
        shown = charts.number(value if isinstance(value, int) else float(str(value)))
    except ValueError:
        shown = str(value)
    return Cell(clean(shown), href, right=True)


def ask(connection: sa.Connection, sql: str) -> list[Row]:
    """The rows of a statement whose numbers are filled in."""
    return [dict(row) for row in connection.exec_driver_sql(sql).mappings()]


def _table(
    title: str,
    sql: str,
    found: Sequence[Row],
    links: Mapping[str, Callable[[Row], str]] | None = None,
    *,
    omit: tuple[str, ...] = (),
    **options: Any,
) -> Panel:
    names = tuple(name for name in (found[0] if found else ()) if name not in omit)
    by = links or {}
    body = tuple(
        tuple(_cell(name, row[name], by[name](row) if name in by else "") for name in names) for row in found
    )
    shown = tuple(clean(name.replace("_", " "), 60) for name in names)
    return Panel(title, sql, head=shown, body=body, empty="" if found else "none", **options)


def _metrics(row: Row) -> dict[str, float]:
    """The finite numbers of a step's metrics; none where they are no object."""
    try:
        found = json.loads(row["metrics"])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    out: dict[str, float] = {}
    for name, value in list(found.items())[:_MOST_METRICS]:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            out[name] = float(value)
    return out


def _steps(connection: sa.Connection, sql: str) -> list[Row]:
    """Steps with their metrics as `numbers`, parsed once."""
    return [{**row, "numbers": _metrics(row)} for row in ask(connection, sql)]


def _one(connection: sa.Connection, sql: str, what: str) -> Row:
    found = ask(connection, sql)
    if not found:
        raise LedgerError(f"the ledger has no {what}", "it may have been purged")
    return found[0]


def _run_link(row: Row) -> str:
    return f"/runs/{row['run_id']}"


def _sample_link(row: Row) -> str:
    return f"/samples/{row['sample_id']}"


def _group_link(row: Row) -> str:
    return f"/groups/{row['group_id']}"


def _decision_link(row: Row) -> str:
    return f"/decisions/{row['id']}"


# ---------------------------------------------------------------- runs


def _marks(found: Sequence[Row]) -> list[tuple[float, str]]:
    return [
        (
            row["left_at"],
            clean(
                f"{moment(row['left_at'])}: {row['kind']} engine on {row['node']} left, {row['reason']}; "
                f"{row['samples']} samples, {row['salvaged']} tokens salvaged, {row['regenerated']} regenerated"
            ),
        )
        for row in found
    ]


def _series(
    name: str, steps: Sequence[Row], marks: Sequence[Row], begin: float, end: float, label: str = ""
) -> charts.Chart:
    points = [
        (row["committed_at"], row["numbers"][name]) for row in reversed(steps) if name in row["numbers"]
    ]
    return charts.series(label or name, points, _marks(marks), begin, end)


def overview(connection: sa.Connection) -> Page:
    """Runs, and the reward and waiting time of the first of them on one time axis."""
    sql = filled(questions.RUNS, most=questions.MOST_RUNS)
    runs = ask(connection, sql)
    panels = [_table("Runs", sql, runs, {"run_id": _run_link, "name": _run_link})]
    drawn = []
    for run in runs[:_DRAWN]:
        asked = filled(questions.STEPS, run_id=run["run_id"], most=questions.MOST_STEPS)
        left = filled(questions.MARKS, run_id=run["run_id"], most=questions.MOST_MARKS)
        drawn.append((run, asked, _steps(connection, asked), left, ask(connection, left)))
    times = [row["committed_at"] for _, _, steps, _, _ in drawn for row in steps]
    times += [run["created_at"] for run, _, steps, _, _ in drawn if steps]
    begin, end = (min(times), max(times)) if times else (0.0, 1.0)
    for run, asked, steps, left, marks in drawn:
        two = tuple(
            _series(name, steps, marks, begin, end, label)
            for name, label in (("reward", "reward"), ("seconds_wait", "seconds waiting in a step"))
        )
        panels.append(
            Panel(
                clean(run["name"], 60),
                f"{asked}\n\n{left}",
                f"steps shown: {len(steps):,}; axis from {moment(begin)} UTC, the same for all runs; a red line is an engine that left",
                charts=two if steps else (),
                empty="" if steps else "no step is committed yet",
            )
        )
    return Page("Runs", tuple(panels))


def run(connection: sa.Connection, run_id: int) -> Page:
    """One run: metrics over time with marks where engines left, its steps, those engines. Raises `LedgerError` where there is none."""
    asked = filled(questions.RUN, run_id=run_id)
    found = _one(connection, asked, f"run {run_id}")
    sql = filled(questions.STEPS, run_id=run_id, most=questions.MOST_STEPS)
    left = filled(questions.MARKS, run_id=run_id, most=questions.MOST_MARKS)
    steps, marks = _steps(connection, sql), ask(connection, left)
    names = sorted({name for row in steps[:20] for name in row["numbers"]})
    first = [name for name in ("reward", "seconds", "seconds_wait", "staleness_mean") if name in names]
    chosen = (first + [name for name in names if name not in first])[:12]
    begin = min((row["committed_at"] for row in steps), default=0.0)
    begin = min(begin, found["created_at"])
    end = max((row["committed_at"] for row in steps), default=begin + 1)
    drawn = tuple(_series(name, steps, marks, begin, end, clean(name, 60)) for name in chosen)
    shown = [
        {
            **{name: row["numbers"].get(name) for name in chosen[:6]},
            **{
                name: row[name] for name in ("step", "attempt", "version", "committed_at")
            },  # a metric hides none
        }
        for row in steps[: questions.MOST_SAMPLES]
    ]
    return Page(
        f"Run {clean(found['name'], 60)}",
        (
            _table("Run", asked, [found], omit=("run_id",)),
            Panel("Search the completions", search=f"/runs/{run_id}/search"),
            Panel(
                "Metrics",
                f"{sql}\n\n{left}",
                "thin: as measured; thick: smoothed; a red line is an engine that left",
                charts=drawn,
                empty="" if drawn else "no step is committed yet",
            ),
            _table("Steps", sql, shown, {"step": lambda row: f"/runs/{run_id}/steps/{row['step']}"}),
            _table("Engines that left", left, marks),
        ),
    )


def search(connection: sa.Connection, contents: Contents, run_id: int, wanted: str) -> Page:
    """The newest samples of a run whose completion has this text. Raises `LedgerError`, `ConfigError`."""
    name = _one(connection, filled(questions.RUN, run_id=run_id), f"run {run_id}")["name"]
    sql = filled(questions.NEWEST, run_id=run_id, most=questions.MOST_SEARCHED)
    newest = ask(connection, sql) if wanted else []
    tokenizer = _tokenizer(connection, run_id)
    found, searched = contents.containing(connection, wanted, [row["sample_id"] for row in newest], tokenizer)
    shown = [{**row, "text": found[row["sample_id"]]} for row in newest if row["sample_id"] in found]
    note = f"{len(shown):,} of the newest {searched:,} samples"
    table = _table(
        "Samples",
        sql,
        shown[: questions.MOST_SAMPLES],
        {"sample_id": _sample_link, "group_id": _group_link},
        note=note,
        search=f"/runs/{run_id}/search",
        wanted=clean(wanted),
    )
    return Page("Search", (table,), ((f"Run {clean(name, 60)}", f"/runs/{run_id}"),))


# ---------------------------------------------------------------- a step


def step(connection: sa.Connection, run_id: int, number: int, chosen: str = "all", bin_: int = -1) -> Page:
    """One train step: what its time went to, rewards in bins, its samples. `bin_`: only this bin's, -1 = all."""
    here = f"/runs/{run_id}/steps/{number}"
    asked = filled(questions.STEP, run_id=run_id, step=number, most=questions.MOST_RUNS)
    attempts = ask(connection, asked)
    metrics = _metrics(attempts[0]) if attempts else {}
    seconds = {name: value for name, value in metrics.items() if name.startswith("seconds_") and value >= 0}
    bars = tuple(
        (clean(name, 28), 0.0, value, f"{charts.number(value)} s", 0) for name, value in seconds.items()
    )
    went = (charts.rows("seconds of the step by part; parts may overlap", bars),) if bars else ()
    values = [{"metric": clean(name), "value": value} for name, value in sorted(metrics.items())]

    sql = filled(questions.REWARDS, run_id=run_id, step=number, most=questions.MOST_REWARDS)
    counts = [(float(row["reward"]), int(row["samples"])) for row in ask(connection, sql)]
    binned = charts.bins(counts)
    hrefs = [f"{here}?only={chosen.replace(' ', '+')}&bin={i}" for i in range(len(binned))]
    ranged = 0 <= bin_ < len(binned)
    low, high = binned[bin_][:2] if ranged else (0.0, 0.0)
    only, order = FILTERS.get(chosen, FILTERS["all"])
    listed = filled(
        questions.SAMPLES,
        run_id=run_id,
        step=number,
        only=only,
        order=order,
        ranged=int(ranged),
        low=low,
        high=high,
        most=questions.MOST_SAMPLES,
    )
    samples = ask(connection, listed)
    if not attempts and not samples and not counts:
        _one(connection, filled(questions.RUN, run_id=run_id), f"run {run_id}")
    choices = [(name, f"{here}?only={name.replace(' ', '+')}", name == chosen) for name in FILTERS]
    if ranged:
        choices.append((f"reward {charts.number(low)} to {charts.number(high)}: show all", here, True))
    return Page(
        f"Step {number}",
        (
            _table("Commits", asked, attempts, omit=("metrics",)),
            Panel(
                "Where its time went",
                asked,
                charts=went,
                head=("metric", "value"),
                body=tuple((Cell(str(row["metric"])), _cell("value", row["value"])) for row in values),
                empty="" if values else "the step has no metrics yet",
            ),
            Panel(
                "Rewards",
                sql,
                "choose a bar to see its samples",
                charts=(charts.histogram("samples by reward", binned, hrefs),) if binned else (),
                empty="" if binned else "no sample has a reward yet",
            ),
            _table(
                "Samples",
                listed,
                samples,
                {"sample_id": _sample_link, "group_id": _group_link},
                note=f"at most {questions.MOST_SAMPLES}",
                choices=tuple(choices),
            ),
        ),
        ((f"Run {run_id}", f"/runs/{run_id}"),),
    )


# ---------------------------------------------------------------- samples


class Read(NamedTuple):
    """A sample's text, printable and cut; why not, where it cannot be read. `pieces` as in `Text`, of its first tokens."""

    prompt: str
    completion: str
    pieces: tuple[tuple[str, int, str], ...] = ()


class Contents:
    """Prompts and completions of a ledger as text; token ids where the run's tokenizer cannot be used."""

    def read(self, connection: sa.Connection, sample_ids: Sequence[int], tokenizer: str) -> list[Read]:
        """A text for each sample, and of a single one its pieces too."""
        found = [_recorded(connection, one) for one in sample_ids]
        asked = [one for one in found if not isinstance(one, Read)]
        ids = [some[:_MOST_TEXT] for one in asked for some in (one["prompt"], one["tokens"])]
        logprobs = (
            [float(x) for x in asked[0]["logprobs"][:_MOST_HEAT]]
            if len(sample_ids) == len(asked) == 1
            else []
        )
        try:
            said, pieces = texts.read(tokenizer, ids, logprobs) if asked else ([], [])
        except ConfigError as error:
            said = [clean(f"({error.cause}; ids:) {' '.join(map(str, some))}", _MOST_TEXT) for some in ids]
            pieces = []
        pairs = iter(list(zip(said[::2], said[1::2], strict=True)))
        read = []
        for one in found:
            if not isinstance(one, Read):
                prompt, completion = next(pairs)
                one = Read(clean(prompt, _MOST_TEXT), clean(completion, _MOST_TEXT), tuple(pieces))
            read.append(one)
        return read

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
        hits = texts.containing(tokenizer, list(known.values()), wanted) if known else {}
        places = list(known)
        return {places[place]: clean(text) for place, text in hits.items()}, len(known)


def _recorded(connection: sa.Connection, sample_id: int) -> Any:
    """Token ids and logprobs; a `Read` that says why not, where they cannot be read."""
    try:
        return json.loads(tokens.shown(connection, sample_id, "json"))
    except ScavengerError as error:
        return Read("", clean(f"({error.cause})", _MOST_TEXT))


def _completions(connection: sa.Connection, sample_ids: Sequence[int], most: int) -> dict[int, list[int]]:
    """Token ids of each of them in order, each cut at the bound of a text, until `most` in all."""
    sql = questions.CHUNKS.format(samples=", ".join(str(int(one)) for one in sample_ids))
    packed: dict[int, bytes] = dict.fromkeys(sample_ids, b"")
    for sample_id, some in connection.exec_driver_sql(sql):
        packed[sample_id] += bytes(some)[: 4 * _MOST_TEXT - len(packed[sample_id])]
    out: dict[int, list[int]] = {}
    for sample_id, some in packed.items():
        if most <= 0:
            break
        out[sample_id] = list(unpack_tokens(some))
        most -= len(some) // 4
    return out


def _tokenizer(connection: sa.Connection, run_id: int) -> str:
    return str(_one(connection, filled(questions.RUN, run_id=run_id), f"run {run_id}")["tokenizer"])


def _facts(row: Row) -> str:
    return clean(
        f"{' '.join(filter(None, (row['state'], row['reason'])))}; "
        f"{row['finish'] or 'not finished'}; reward {charts.number(row['reward'])}, "
        f"advantage {charts.number(row['advantage'])}; {row['accepted_len']:,} tokens; "
        f"{row['moves']} moves"
    )


def group(connection: sa.Connection, contents: Contents, group_id: int) -> Page:
    """Prompt and completions of one group, side by side. Raises `LedgerError` where there is none."""
    sql = filled(questions.GROUP, group_id=group_id, most=questions.MOST_GROUP)
    first = _one(connection, sql, f"group {group_id}")
    found = ask(connection, sql)
    tokenizer = _tokenizer(connection, first["run_id"])
    read = contents.read(connection, [row["sample_id"] for row in found], tokenizer)
    said = tuple(
        Text(f"sample {row['sample_id']}", _sample_link(row), _facts(row), one.completion)
        for row, one in zip(found, read, strict=True)
    )
    return Page(
        f"Group {group_id}",
        (
            Panel("Prompt", texts=(Text("", "", f"{first['prompt_tokens']} tokens", read[0].prompt),)),
            Panel("Completions", sql, f"{len(found)} of {first['n']}", texts=said),
        ),
        (
            (f"Run {first['run_id']}", f"/runs/{first['run_id']}"),
            (f"Step {first['step']}", f"/runs/{first['run_id']}/steps/{first['step']}"),
        ),
    )


def sample(connection: sa.Connection, contents: Contents, sample_id: int) -> Page:
    """One sample over the engines that had it. Raises `LedgerError` where there is none."""
    asked = filled(questions.SAMPLE, sample_id=sample_id)
    found = _one(connection, asked, f"sample {sample_id}")
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
    ended = filled(questions.ENDS, sample_id=sample_id, most=questions.MOST_ENDS)
    (read,) = contents.read(connection, [sample_id], _tokenizer(connection, found["run_id"]))
    likely = (Text("", "", "", "", read.pieces),) if read.pieces else ()
    above = [
        (f"Run {found['run_id']}", f"/runs/{found['run_id']}"),
        (f"Step {found['step']}", f"/runs/{found['run_id']}/steps/{found['step']}"),
        (f"Group {found['group_id']}", _group_link(found)),
    ]
    if found["episode_id"]:
        above.append((f"Episode {found['episode_id']}", f"/episodes/{found['episode_id']}"))
    table = _table("Engines", sql, leases, note="one colour for each epoch (lease)")
    drawn = (charts.rows("time on each engine", spans),) if spans else ()
    return Page(
        f"Sample {sample_id}",
        (
            _table(
                "Sample",
                asked,
                [found],
                {"group_id": _group_link},
                omit=("sample_id", "run_id", "episode_id"),
            ),
            dataclasses.replace(table, charts=drawn),
            Panel(
                "Text",
                texts=(
                    Text("prompt", "", "", read.prompt),
                    Text("completion", "", _facts(found), read.completion),
                ),
            ),
            Panel(
                "How likely each token was",
                asked,
                f"by the engine, as sampled: marked below {', '.join(map(str, texts.LEVELS))}; a mark's title is the probability; "
                f"the first {_MOST_HEAT:,} tokens",
                texts=likely,
                empty="" if likely else "not known without the tokens and the run's tokenizer",
            ),
            _table("What became of it", ended, ask(connection, ended)),
        ),
        tuple(above),
    )


def episode(connection: sa.Connection, contents: Contents, episode_id: int) -> Page:
    """An agent's episode turn by turn. Raises `LedgerError` where it has no turns."""
    sql = filled(questions.EPISODE, episode_id=episode_id, most=questions.MOST_TURNS)
    first = _one(connection, sql, f"turn of an episode {episode_id}")
    found = ask(connection, sql)
    run_id = _one(connection, filled(questions.SAMPLE, sample_id=first["sample_id"]), "such sample")["run_id"]
    tokenizer = _tokenizer(connection, run_id)
    read = contents.read(connection, [row["sample_id"] for row in found], tokenizer)
    said = tuple(
        Text(
            f"turn {row['number']}, sample {row['sample_id']}",
            _sample_link(row),
            clean(
                f"{row['prefix_len']:,} of {row['prompt_tokens']:,} prompt tokens are of the turn before; {row['state']}"
            ),
            one.completion,
        )
        for row, one in zip(found, read, strict=True)
    )
    return Page(
        f"Episode {episode_id}",
        (
            _table("Turns", sql, found, {"sample_id": _sample_link}),
            Panel("What the model said", sql, texts=said),
        ),
        ((f"Run {run_id}", f"/runs/{run_id}"),),
    )


# ---------------------------------------------------------------- the site


def harm(connection: sa.Connection) -> Page:
    """GPU-hours given to each user's runs, and other users' waits while harvested jobs had GPUs there."""
    given = queries.load_report("harvested_gpu_hours_by_user")
    waits = queries.bounded(queries.load_report("other_users_waits"), questions.MOST_WAITS, None)
    by_day, by_partition = queries.load_report("other_users_waiting"), filled(questions.WAITS_BY_DAY)
    return Page(
        "Harm",
        (
            _table(
                "By day: hours in which other users' jobs waited, with harvested jobs there and in all",
                by_day,
                ask(connection, by_day)[-questions.MOST_WAITS :],
                note="of any partition; the hours in which nothing was harvested are those without us",
            ),
            _table(
                "By day and partition: other users' waits while harvested jobs had GPUs there",
                by_partition,
                ask(connection, by_partition)[: questions.MOST_WAITS],
            ),
            _table(
                "Other users' waits",
                waits,
                ask(connection, waits),
                note="Waits that a poll saw while we held GPUs in the job's partitions; not every one is due to us. "
                "The ledger has no other waits.",
            ),
            _table("GPU-hours given, by user", given, ask(connection, given)[: questions.MOST_WAITS]),
        ),
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
    return Page("Decisions", (_table("Decisions", sql, found, {"id": _decision_link}, choices=older),))


def decision(connection: sa.Connection, number: int) -> Page:
    """One decision with its inputs. Raises `LedgerError` where there is none."""
    sql = filled(questions.DECISION, id=number)
    found = _one(connection, sql, f"decision {number}")
    try:
        inputs = json.dumps(json.loads(found["inputs"]), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        inputs = str(found["inputs"])
    return Page(
        f"Decision {number}",
        (
            _table("Decision", sql, [found], omit=("inputs",)),
            Panel("Inputs", sql, texts=(Text("", "", "", clean(inputs, _MOST_INPUTS)),)),
        ),
        (("Decisions", "/decisions"),),
    )
