"""The demo's report: one self-contained HTML page, and its summary for the terminal. Pure: figures in, text out.

Boundary: pure; the page is made from figures alone, without a site.
"""

from __future__ import annotations

from dataclasses import dataclass

from scavenger import resources
from scavenger.demo.metrics import DemoMetrics
from scavenger.observe import plots

OWNERS = (
    ("reserved (training job)", "#5b6ee1", "reserved"),
    ("other users", "#d9634c", "other_users"),
    ("harvested", "#37a66b", "harvested"),
    ("idle", "#d8dce3", "idle"),
    ("unusable", "#8a8f98", "unusable"),
)


@dataclass(frozen=True, slots=True)
class Context:
    """What the ledger does not know: where things lie and how long it took. `waited_s`: the longest wait of another user's job."""

    backend: str
    ledger_path: str
    took_s: float
    other_users_jobs: int
    other_users_waited_s: float | None
    grace_s: float


def summary(demo_metrics: DemoMetrics, context: Context) -> list[tuple[str, str]]:
    """The report's table, one (name, value) a line."""
    now, moves, steps = demo_metrics.now, demo_metrics.moves, demo_metrics.trained()
    rows = [
        ("cluster", context.backend),
        ("took", f"{context.took_s:.0f} s"),
        ("optimizer steps", str(len(steps))),
        ("training samples", f"{moves.samples:,}, each delivered exactly once"),
        (
            "",
            f"{moves.trained:,} trained on, {moves.filtered:,} filtered (all rewards of their group were equal)",
        ),
        ("tokens generated", f"{now.tokens_total:,}, evaluations included"),
        ("engines lost", f"{len(demo_metrics.lost)} ({now.preemptions} preemptions seen by the daemon)"),
        ("tokens salvaged", f"{now.tokens_salvaged:,}, evaluations included"),
        ("tokens generated again", f"{now.tokens_regenerated:,}"),
        (
            "training samples moved",
            f"{moves.moved:,} ({moves.share:.0%}), the most moves of one sample: {moves.most}",
        ),
    ]
    if context.other_users_waited_s is not None:
        waited = f"{context.other_users_waited_s:.1f} s at most, {context.other_users_jobs} jobs (GraceTime {context.grace_s:g} s)"
        rows.append(("other users waited", waited))
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
        start=start,
        queries=queries(context.ledger_path),
    )
