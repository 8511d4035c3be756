"""The demo's live display: figures in, a rich renderable out. Owns no state but the width of its bars.

Boundary: how the demo looks on a terminal; it knows no process, queue or ledger.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scavenger.demo.metrics import DemoMetrics, Gpus

COLOURS = {
    "idle": "bright_black",
    "harvested": "green",
    "other_users": "red",
    "reserved": "blue",
    "unusable": "yellow",
}
BLOCKS = " ▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int, top: float) -> str:
    """The last `width` values as blocks; `top` is a full block."""
    return "".join(BLOCKS[min(8, max(0, round(8 * v / top)))] for v in values[-width:])


def gpu_bar(gpus: Gpus) -> Text:
    """One square a GPU, coloured by owner."""
    text = Text()
    for owner in ("reserved", "other_users", "harvested", "idle", "unusable"):
        text.append("■ " * int(getattr(gpus, owner)), style=COLOURS[owner])
    return text


def legend(gpus: Gpus) -> Text:
    text = Text()
    for owner in ("reserved", "other_users", "harvested", "idle"):
        text.append(f"■ {owner} {getattr(gpus, owner)}  ", style=COLOURS[owner])
    return text


def render(demo_metrics: DemoMetrics | None, *, elapsed_s: float, phase: str, steps: int) -> RenderableType:
    """The whole display for one moment."""
    title = f"scavenger · {phase} · {elapsed_s:.0f} s"
    if demo_metrics is None or not demo_metrics.gpus:
        return Panel(Text(phase), title=title, border_style="cyan")
    gpus, now, trained = demo_metrics.gpus[-1], demo_metrics.now, demo_metrics.trained()
    rewards = [s.metrics.get("reward", 0.0) for s in trained]
    table = Table.grid(padding=(0, 3))
    table.add_row("GPUs", gpu_bar(gpus))
    table.add_row("", legend(gpus))
    flying = f"{now.samples_in_flight:,} samples · {now.tokens_in_flight:,} tokens · {now.engines_harvested} harvested engines"
    table.add_row("in flight", flying)
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
