"""A `View` as lines and cells: the map of GPUs, the first page, the rows of each table, the screen of `--once`. Pure.

Owns layout and wording. Every line is a `rich.text.Text`, so what others wrote is text and never markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from scavenger.top.view import (
    SERVING,
    DecisionView,
    EngineView,
    EventView,
    Gpus,
    NodeView,
    RunView,
    SampleView,
    View,
    clean,
    count_of,
    shown,
)

#: By field of `Gpus`: the sign of one GPU, its colour, its name.
SIGNS: dict[str, tuple[str, str, str]] = {
    "reserved": ("R", "magenta", "reserved"),
    "other_users": ("o", "blue", "other users"),
    "harvested": ("#", "green", "harvested"),
    "draining": ("d", "yellow", "draining"),
    "idle": (".", "white", "idle"),
    "out": ("x", "red", "out"),
}
#: A node with more GPUs is drawn by counts.
MOST_SIGNS = 16
_NAME_CELLS = 20
#: A row of the map: a line that is not cut may be longer, but none reads a map so wide.
_MOST_MAP_CELLS = 240
_BLOCKS = "▁▂▃▄▅▆▇█"


# ---------------------------------------------------------------- words


def age(seconds: float | None) -> str:
    """ "4 s", "12 min", "3.1 h", "2.0 d"; "-" where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for most, unit_s, unit, digits in ((100, 1, "s", 0), (6000, 60, "min", 0), (172_800, 3600, "h", 1)):
        if seconds < most:
            return f"{seconds / unit_s:.{digits}f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}{unit}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def clock(at: float) -> str:
    """The time of day in UTC."""
    return _utc(at, "%H:%M:%S")


def moment(at: float) -> str:
    return _utc(at, "%Y-%m-%d %H:%M:%S UTC")


def _utc(at: float, form: str) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "-"


def spark(values: Sequence[float]) -> str:
    """A column of blocks a value, between the least and the greatest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join(
        _BLOCKS[min(7, int(8 * (value - low) / (high - low)))] if high > low else _BLOCKS[3]
        for value in values
    )


def fitted(text: str, cells: int) -> str:
    """Exactly so many terminal cells wide; what is cut ends in an ellipsis."""
    if cells <= 0:
        return ""
    if cell_len(text) <= cells:
        return set_cell_size(text, cells)
    return set_cell_size(text, cells - 1) + "…"


def wrapped(text: str, cells: int, most: int) -> list[str]:
    """At most `most` lines of so many cells, broken at spaces; the last one is cut where there is more."""
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        tried = f"{line} {word}" if line else word
        if line and cell_len(tried) > cells:
            lines.append(line)
            line = word
        else:
            line = tried
    lines.append(line)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [fitted(one, cells).rstrip() for one in lines]


# ---------------------------------------------------------------- map


def signs(gpus: Gpus) -> Text:
    """One sign a GPU, in the order of `SIGNS`; a large node by counts."""
    text, large = Text(), count_of(gpus) > MOST_SIGNS
    for name, (sign, colour, _) in SIGNS.items():
        n = getattr(gpus, name)
        if n > 0:
            text.append(f"{sign}{n} " if large else sign * n, style=colour)
    return text


def legend(gpus: Gpus) -> Text:
    text = Text()
    for name, (sign, colour, said) in SIGNS.items():
        text.append(sign, style=colour).append(f" {getattr(gpus, name):,} {said}  ")
    text.rstrip()
    return text


def node_map(nodes: Sequence[NodeView], width: int, height: int) -> list[Text]:
    """Nodes side by side; where they do not fit, nodes of one look together, the most frequent first; then how many are left out."""
    if not nodes or height <= 0:
        return []
    cells = [(node.name, signs(node.gpus)) for node in nodes]
    names = min(_NAME_CELLS, max(cell_len(name) for name, _ in cells))
    column = names + 1 + max(text.cell_len for _, text in cells) + 2
    columns = max(1, (width + 2) // column)
    rows = -(-len(cells) // columns)
    if rows <= height:
        lines = []
        for row in range(rows):
            line = Text()
            for name, text in cells[row::rows]:
                line.append(fitted(name, names) + " ").append_text(text)
                line.append(" " * (column - names - 1 - text.cell_len))
            line.rstrip()
            line.truncate(width)
            lines.append(line)
        return lines
    alike: dict[str, list[tuple[str, Text]]] = {}
    for name, text in cells:
        alike.setdefault(text.plain, []).append((name, text))
    groups = sorted(alike.values(), key=lambda group: -len(group))
    fits = groups if len(groups) <= height else groups[: height - 1]
    lines = []
    for group in fits:
        line = Text(f"{len(group):>5,} x ").append_text(group[0][1]).append("  ")
        line.append(" ".join(name for name, _ in group[:40]))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(fits) < len(groups):
        left = sum(len(group) for group in groups[len(fits) :])
        lines.append(Text(fitted(f"and {left:,} nodes more; see Nodes", width)))
    return lines


# ---------------------------------------------------------------- lines


def head(view: View, width: int) -> Text:
    """Who serves, and how old what is shown is."""
    if view.daemon == SERVING:
        said = f"daemon of {view.host or '?'}, generation {view.generation}, {age(view.status_age_s)} ago"
        style = "bold"
    else:
        # One that cannot be read may be of a daemon that serves.
        what = "NO STATUS" if view.status_age_s is None else "NO DAEMON SERVES"
        said, style = f"{what}: {view.daemon}", "bold red"
    poll = (
        f"Slurm polled {age(view.poll_age_s)} ago"
        if view.poll_age_s is not None
        else "Slurm was not polled yet"
    )
    ledger = f"ledger {age(view.ledger_age_s)} ago" if view.ledger_age_s is not None else "no ledger"
    tail = f"  {poll}  {ledger}  {clock(view.at)} UTC"
    room = max(10, width - cell_len(tail))
    line = Text(fitted(said, min(cell_len(said), room)), style=style).append(tail, style="not bold")
    line.truncate(width, overflow="ellipsis")
    return line


def why(view: View, width: int, most: int) -> list[Text]:
    """Why there are not more engines now; before it what could not be read."""
    lines = [
        Text(line, style="red")
        for problem in view.problems
        if problem not in view.daemon
        for line in wrapped(problem, width, 1)
    ][: most - 1]
    if view.stopped:
        lines += [Text(line, style="bold yellow") for line in wrapped(f"STOPPED by {view.stopped}", width, 1)]
        lines = lines[: most - 1]
    said = wrapped(f"Why not more engines now: {view.why_not_more}", width, most - len(lines))
    return [*lines, *map(Text, said)]


def overview(view: View, width: int, height: int) -> list[Text]:
    """The first page: map, runs, engines, the newest events; each gets lines as there are."""
    lines = [legend(view.gpus)]
    lines[0].truncate(width, overflow="ellipsis")
    runs = [run for run in view.runs if run.state == "active"] or list(view.runs[:1])
    of_runs = [line for run in runs[:4] for line in run_lines(run, width)]
    most_runs = max(2, min(len(of_runs), height // 3))
    room = max(1, min(height // 2, height - most_runs - 4))
    lines += node_map(view.nodes, min(width, _MOST_MAP_CELLS), room)
    if not view.nodes:
        lines.append(Text(fitted("no node is known one by one: no daemon's status is here", width)))
    lines += of_runs[:most_runs]
    lines.append(engines_line(view, width))
    # A preemption's line has its tokens; where each sample went is on Events.
    told = [event for event in view.events if event.kind != "moved"]
    lines += [event_line(event, width) for event in told[: max(0, height - len(lines))]]
    return lines[:height]


def run_lines(run: RunView, width: int) -> list[Text]:
    """A run in two lines."""
    phase = f" {run.phase}" if run.phase else ""
    done = f", {run.samples - run.samples_open:,} of {run.samples:,} samples" if run.samples else ""
    first = f"{run.name}  {run.state}  step {run.step}{phase}{done}  reward {number(run.reward, 3)} {spark(run.rewards)}"
    second = (
        f"  waits {share(run.waits)} of {age(run.step_s)}  version {run.version}, stale {number(run.staleness_mean, 1)}/"
        f"{number(run.staleness_max)}  tokens/s {_rates(run)}"
    )
    return [Text(fitted(first, width).rstrip(), style="bold"), Text(fitted(second, width).rstrip())]


def _rates(run: RunView) -> str:
    if run.tokens_per_s_harvested is None and run.tokens_per_s_reserved is None:
        by = (run.step_tokens_harvested, run.step_tokens_reserved)
        if not run.step_s or by == (None, None):
            return "-"
        rates = [(tokens or 0.0) / run.step_s for tokens in by]
        return f"{number(rates[0])} harvested + {number(rates[1])} reserved (last step)"
    return f"{number(run.tokens_per_s_harvested)} harvested + {number(run.tokens_per_s_reserved)} reserved"


def engines_line(view: View, width: int) -> Text:
    """All engines in one line."""
    known = [engine.kv_use for engine in view.engines if engine.kv_use is not None]
    rates = [engine.tokens_per_s for engine in view.engines if engine.tokens_per_s is not None]
    said = (
        f"{len(view.engines)} engines, {sum(engine.samples for engine in view.engines):,} samples, "
        f"{number(sum(rates) if rates else None)} tokens/s, KV use {share(sum(known) / len(known) if known else None)}; "
        f"{view.jobs_pending_other_users} jobs of other users wait for GPUs"
    )
    return Text(fitted(said, width).rstrip())


def event_line(event: EventView, width: int) -> Text:
    line = Text(f"{clock(event.at)} ").append(event.kind, style="cyan").append(f" {event.text}")
    line.truncate(width, overflow="ellipsis")
    return line


def once(view: View, width: int, height: int) -> list[Text]:
    """One screen without an end to interact with: `--once`."""
    said = [head(view, width), *why(view, width, 3 if height > 9 else 2)]
    return [*said, *overview(view, width, max(6, height - len(said)))]


# ---------------------------------------------------------------- tables

Cells = tuple[Text, ...]


def _cells(*cells: str) -> Cells:
    return tuple(Text(cell) for cell in cells)


NODES = ("node", "GPUs", "harvested", "other", "idle", "out", "engines", "why")


def node_cells(node: NodeView) -> Cells:
    g = node.gpus
    counts = (g.harvested + g.draining, g.other_users, g.idle, g.out, node.engines)
    return (Text(node.name), signs(g), *_cells(*map(str, counts), node.why))


RUNS = ("run", "step", "phase", "waits", "version", "stale", "reward", "tok/s", "harv.", "state")


def run_cells(run: RunView) -> Cells:
    rates = (run.tokens_per_s_harvested, run.tokens_per_s_reserved)
    total = None if rates == (None, None) else sum(rate or 0.0 for rate in rates)
    return _cells(
        run.name,
        str(run.step),
        run.phase or "-",
        share(run.waits),
        str(run.version),
        f"{number(run.staleness_mean, 1)}/{number(run.staleness_max)}",
        number(run.reward, 3),
        number(total),
        share((run.tokens_per_s_harvested or 0.0) / total if total else None),
        run.state,
    )


ENGINES = ("engine", "node", "kind", "state", "tok/s", "KV", "samples", "life", "ver", "run", "job")


def engine_cells(engine: EngineView) -> Cells:
    version = "-" if engine.version is None else str(engine.version)
    return _cells(
        str(engine.worker_id),
        engine.node,
        engine.kind,
        engine.state,
        number(engine.tokens_per_s),
        share(engine.kv_use),
        str(engine.samples),
        age(engine.life_s),
        f"{version} (-{engine.behind})" if engine.behind else version,
        engine.run,
        str(engine.job_id or "-"),
    )


SAMPLES = ("sample", "step", "group", "state", "tokens", "moves", "reward", "engine", "node", "run")


def sample_cells(sample: SampleView) -> Cells:
    return _cells(
        str(sample.sample_id),
        str(sample.step),
        str(sample.group),
        sample.state,
        f"{sample.tokens:,}",
        str(sample.moves),
        number(sample.reward, 3),
        str(sample.worker_id or "-"),
        sample.node or "-",
        sample.run,
    )


EVENTS = ("time", "kind", "run", "what happened")


def event_cells(event: EventView) -> Cells:
    return _cells(clock(event.at), event.kind, event.run, event.text)


DECISIONS = ("time", "action", "code", "node", "reason")


def decision_cells(decision: DecisionView) -> Cells:
    d = decision
    return _cells(clock(d.at), d.action, d.code, d.node or (f"{d.cluster}/-" if d.cluster else "-"), d.reason)


# ---------------------------------------------------------------- details


def detail(
    title: str, facts: Mapping[str, object], parts: Iterable[tuple[str, Iterable[str]]] = ()
) -> list[Text]:
    """A title, facts by name, and lists under headings. Whatever is in it, it is text."""
    lines = [Text(clean(title), style="bold")]
    width = max((cell_len(clean(name)) for name in facts), default=0)
    for name, value in facts.items():
        lines.append(Text(fitted(clean(name), width + 2), style="dim").append(clean(value, 4000)))
    for heading, said in parts:
        lines += [Text(""), Text(clean(heading), style="bold"), *(Text(shown(line, 20_000)) for line in said)]
    return lines


def run_detail(run: RunView) -> list[Text]:
    facts = {
        "state": f"{run.state} {run.reason}",
        "attempt": run.attempt,
        "step": f"{run.step} ({run.purpose}); the last committed one is {run.last_step}",
        "phase": f"{run.phase or 'not known'} {run.phase_reason}",
        "samples": f"{run.samples - run.samples_open:,} of {run.samples:,} complete, {run.groups_trained:,} groups trained",
        "waits": f"{share(run.waits)} of the last step's {age(run.step_s)}",
        "version": f"{run.version}; engines by version: {', '.join(f'{v}: {n}' for v, n in run.engine_versions.items()) or '-'}",
        "staleness": f"mean {number(run.staleness_mean, 2)}, most {number(run.staleness_max)} steps",
        "reward": f"{number(run.reward, 4)}  {spark(run.rewards)}",
        "tokens/s": _rates(run),
        "last step's tokens": f"{number(run.step_tokens_harvested)} harvested, {number(run.step_tokens_reserved)} reserved",
        "training job": run.training_job or "-",
        "trainer heard": f"{age(run.trainer_silent_s)} ago",
    }
    return detail(f"run {run.name}", facts)


def decision_detail(decision: Mapping[str, Any], inputs: Iterable[str]) -> list[Text]:
    """`inputs`: its lines, as JSON has them."""
    names = ("policy", "action", "subject", "code", "reason")
    facts = {"at": moment(decision["at"])} | {name: decision[name] for name in names}
    if decision["cluster"]:
        facts["cluster"] = decision["cluster"]
    return detail(f"decision {decision['id']}", facts, [("inputs", inputs)])
