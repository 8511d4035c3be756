"""What the demo shows: the live display, the summary in the terminal, and one self-contained HTML page. Pure: metrics in, text out.

Boundary: pure; everything is made from metrics alone, without a site.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scavenger import resources
from scavenger.demo.episode import EpisodeFigures, drawn
from scavenger.demo.metrics import DemoMetrics, GpuCounts
from scavenger.observe import plots

OWNERS = (
    ("reserved (training job)", "#5b6ee1", "reserved"),
    ("other users", "#d9634c", "other_users"),
    ("harvested", "#37a66b", "harvested"),
    ("idle", "#d8dce3", "idle"),
    ("unusable", "#8a8f98", "unusable"),
)


TERMINAL_COLOURS = {
    "idle": "bright_black",
    "harvested": "green",
    "other_users": "red",
    "reserved": "blue",
    "unusable": "yellow",
}
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Context:
    """What the ledger's figures do not say: where things lie and how long it took. `waited_s`: the longest wait of another user's job.

    `episodes`: where agents were trained. `workers_killed`: environment workers that the demo killed.
    """

    backend: str
    ledger_path: str
    took_s: float
    other_users_jobs: int
    other_users_waited_s: float | None
    grace_s: float
    episodes: EpisodeFigures | None = None
    workers_killed: int = 0


def sparkline(values: list[float], width: int, top: float) -> str:
    """The last `width` values as blocks; `top` is a full block."""
    return "".join(BLOCKS[min(8, max(0, round(8 * v / top)))] for v in values[-width:])


def gpu_bar(gpus: GpuCounts) -> Text:
    """One square a GPU, coloured by owner."""
    text = Text()
    for owner in ("reserved", "other_users", "harvested", "idle", "unusable"):
        text.append("■ " * int(getattr(gpus, owner)), style=TERMINAL_COLOURS[owner])
    return text


def legend(gpus: GpuCounts) -> Text:
    text = Text()
    for owner in ("reserved", "other_users", "harvested", "idle"):
        text.append(f"■ {owner} {getattr(gpus, owner)}  ", style=TERMINAL_COLOURS[owner])
    return text


def display(demo_metrics: DemoMetrics | None, *, elapsed_s: float, phase: str, steps: int) -> RenderableType:
    """The live display at one moment. `steps`: of the whole run."""
    title = f"scavenger · {phase} · {elapsed_s:.0f} s"
    if demo_metrics is None or not demo_metrics.gpus:
        return Panel(Text(phase), title=title, border_style="cyan")
    gpus, now, trained = demo_metrics.gpus[-1], demo_metrics.now, demo_metrics.trained()
    rewards = [s.metrics.get("reward", 0.0) for s in trained]
    table = Table.grid(padding=(0, 3))
    table.add_row("GPUs", gpu_bar(gpus))
    table.add_row("", legend(gpus))
    in_flight = f"{now.samples_in_flight:,} samples · {now.tokens_in_flight:,} tokens · {now.engines_harvested} harvested engines"
    table.add_row("in flight", in_flight)
    table.add_row(
        "preemptions survived",
        f"{now.preemptions} · {now.tokens_salvaged:,} tokens salvaged · {now.tokens_regenerated:,} generated again",
    )
    moves = demo_metrics.moves
    table.add_row(
        "samples moved", f"{moves.moved:,} of {moves.samples:,} ({moves.share:.0%}), one {moves.most} times"
    )
    last = f"{rewards[-1]:.3f}" if rewards else "-"
    table.add_row("reward per step", Text(f"{sparkline(rewards, 60, 1.0)} {last}", style="cyan"))
    table.add_row("step", f"{len(trained)} of {steps} · {now.tokens_total:,} tokens generated")
    return Panel(Group(table), title=title, border_style="cyan")


def drawing(frame: RenderableType, shown: TextIO) -> str:
    """The display as an SVG that loads nothing; it is printed to `shown` too."""
    console = Console(record=True, width=118, file=shown)
    console.print(frame)
    svg = console.export_svg(title="./scripts/quickstart")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # rich's come from another host


def line(demo_metrics: DemoMetrics | None, *, elapsed_s: float, phase: str, steps: int) -> str:
    """The same in one plain line, for a log."""
    if demo_metrics is None or not demo_metrics.gpus:
        return f"[{elapsed_s:4.0f} s] {phase}"
    if not demo_metrics.trained():
        return f"[{elapsed_s:4.0f} s] {phase}: engines start, held-out problems are answered before step 1"
    now, trained = demo_metrics.now, demo_metrics.trained()
    reward = f"{trained[-1].metrics.get('reward', 0.0):.3f}" if trained else "-"
    return (
        f"[{elapsed_s:4.0f} s] step {len(trained)}/{steps}  reward {reward}  harvested engines {now.engines_harvested}  "
        f"{now.tokens_in_flight} tokens in flight  preemptions {now.preemptions}  {now.tokens_salvaged} tokens salvaged"
    )


def summary(demo_metrics: DemoMetrics, context: Context) -> list[tuple[str, str]]:
    """The report's table, one (name, value) a line."""
    now, moves, steps = demo_metrics.now, demo_metrics.moves, demo_metrics.trained()
    sample = "training samples" if context.episodes is None else "turns"
    rows = [
        ("cluster", context.backend),
        ("took", f"{context.took_s:.0f} s"),
        ("optimizer steps", str(len(steps))),
        *_episodes(demo_metrics, context),
        (sample, f"{moves.samples:,}, each delivered exactly once"),
        (
            "",
            f"{moves.trained:,} trained on, {moves.filtered:,} filtered (all rewards of their group were equal)",
        ),
        ("tokens generated", f"{now.tokens_total:,}, evaluations included"),
        ("engines lost", f"{len(demo_metrics.lost)} ({now.preemptions} preemptions seen by the daemon)"),
        ("tokens salvaged", f"{now.tokens_salvaged:,}, evaluations included"),
        ("tokens generated again", f"{now.tokens_regenerated:,}"),
        (
            f"{sample} moved",
            f"{moves.moved:,} ({moves.share:.0%}), the most moves of one sample: {moves.most}",
        ),
    ]
    if context.other_users_waited_s is not None:
        waited = f"{context.other_users_waited_s:.1f} s at most, {context.other_users_jobs} jobs (GraceTime {context.grace_s:g} s)"
        rows.append(("other users waited", waited))
    if context.episodes is not None and steps:
        first, last = (s.metrics.get("turns_mean", 0.0) for s in (steps[0], steps[-1]))
        rows.append(("turns of an episode", f"{first:.2f} in the first step, {last:.2f} in the last"))
    evaluations = demo_metrics.evaluations()
    if len(evaluations) >= 2:
        before, after = evaluations[0].metrics, evaluations[-1].metrics
        for name, label in (
            ("eval_sampled", "held-out accuracy, sampled"),
            ("eval_greedy", "held-out accuracy, greedy"),
        ):
            if name in before and name in after:
                rows.append(
                    (
                        label,
                        f"{before[name]:.3f} before, {after[name]:.3f} after ({after[name] - before[name]:+.3f})",
                    )
                )
    return rows


def _episodes(demo_metrics: DemoMetrics, context: Context) -> list[tuple[str, str]]:
    """What agents' runs have besides."""
    found = context.episodes
    if found is None:
        return []
    total = {
        name: sum(s.metrics.get(name, 0.0) for s in demo_metrics.steps)
        for name in ("environment_workers_lost", "episodes_resumed")
    }
    return [
        ("episodes", f"{found.episodes:,}, {found.turns / max(1, found.episodes):.2f} turns each"),
        (
            "environment workers lost",
            f"{total['environment_workers_lost']:.0f} ({context.workers_killed} killed by the demo); "
            f"{total['episodes_resumed']:.0f} episodes went on in another one",
        ),
    ]


def queries(ledger_path: str) -> str:
    """Three queries worth trying, from wherever one stands."""
    ask = f"sqlite3 -readonly -header -column {ledger_path}"
    return "\n".join(
        (
            "# what happened to the engines that were lost, and to their tokens",
            f"{ask} < {resources.path('sql/reports/preemptions.sql')}",
            "# the life of the sample that moved most, from its prompt to its end",
            f"{ask} < {resources.path('sql/reports/sample_life.sql')}",
            "# why the daemon did what it did",
            f"{ask} 'SELECT action, reason, count(*) FROM decisions GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 10'",
        )
    )


def html(demo_metrics: DemoMetrics, context: Context, title: str, subtitle: str) -> str:
    """The page. Nothing in it is fetched from elsewhere, and every text in it is escaped."""
    start = demo_metrics.gpus[0].at if demo_metrics.gpus else 0.0
    times = [g.at - start for g in demo_metrics.gpus]
    series = [
        (label, colour, [float(getattr(g, name)) for g in demo_metrics.gpus])
        for label, colour, name in OWNERS
    ]
    steps = demo_metrics.trained()
    return plots.render(
        "scavenger/demo/report.html.j2",
        title=title,
        subtitle=subtitle,
        rows=summary(demo_metrics, context),
        gpus=plots.stacked(times, series, "seconds", "GPUs"),
        reward=plots.line(
            [s.step for s in steps], [s.metrics.get("reward", 0.0) for s in steps], "step", "reward", 1.0
        ),
        salvaged=plots.bars([e.salvaged for e in demo_metrics.lost], "lost engine", "tokens"),
        lost=demo_metrics.lost,
        episode=drawn(context.episodes.one) if context.episodes and context.episodes.one else "",
        start=start,
        queries=queries(context.ledger_path),
    )
