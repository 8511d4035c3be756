"""`scavenger demo --compare`: the same short run twice, undisturbed and preempted, side by side.

Owns the comparison and its table; the runs are the demo's.

Boundary: one mode of the demo, beside its one session.
"""

from __future__ import annotations

import dataclasses
import time

from rich.console import Console
from rich.table import Table

from scavenger.demo import session
from scavenger.demo.metrics import DemoMetrics
from scavenger.host import packages

STEPS = 6


def run(options: session.DemoOptions, console: Console) -> int:
    """Play both runs and print reward and loss step by step; returns 0 when they are equal, else 1."""
    packages.require_training(session.TRAINS)
    backend = session.choose_backend(options.backend, console)
    out = options.out.resolve() / time.strftime("compare-%Y%m%d-%H%M%S")
    out.mkdir(parents=True)
    settings = dataclasses.replace(options.settings, steps=STEPS, eval_prompts=0)
    calm = dataclasses.replace(options, settings=settings, preempt_every_s=0.0)
    busy = dataclasses.replace(options, settings=settings, preempt_every_s=2.5)
    found: list[DemoMetrics] = []
    with session.DemoModel(out, settings.seed) as model:
        for name, chosen in (("undisturbed", calm), ("preempted", busy)):
            console.print(f"{name}: {STEPS} steps")
            with session.Screen(console, STEPS, time.monotonic()) as screen:
                found.append(session.run_demo(chosen, backend, out / name, model, screen)[0])
    console.print(table(*found))
    equal = rows(found[0]) == rows(found[1])
    console.print(
        f"{found[1].moves.moved} samples moved; rewards and losses are {'equal' if equal else 'DIFFERENT'} in every step"
    )
    return 0 if equal else 1


def rows(demo_metrics: DemoMetrics) -> list[tuple[int, str, str]]:
    """(step, reward, loss) with nine decimals."""
    return [
        (s.step, f"{s.metrics['reward']:.9f}", f"{s.metrics['loss']:+.9f}") for s in demo_metrics.trained()
    ]


def table(calm: DemoMetrics, busy: DemoMetrics) -> Table:
    made = Table("step", "reward, undisturbed", "reward, preempted", "loss, undisturbed", "loss, preempted")
    for (step, reward, loss), (_, reward_too, loss_too) in zip(rows(calm), rows(busy), strict=True):
        made.add_row(str(step), reward, reward_too, loss, loss_too)
    return made
