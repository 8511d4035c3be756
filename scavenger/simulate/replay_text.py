"""A replay as a reader meets it: each step as it was and as it was played, and how good that is. Pure: a `Replay` in, text out."""

from __future__ import annotations

from scavenger.simulate.replay import Replay
from scavenger.simulate.survey_text import Row


def rows(found: Replay) -> tuple[Row, ...]:
    machines, rest = found.machines, [pair for pair in found.pairs if not pair.fitted]
    engines = ", ".join(f"{kind} {spec.step_s(8, 8 * 64) * 1e3:.1f} ms" for kind, spec in sorted(machines.engines.items()))
    curves = f"a decode step of 8 samples of 64 tokens: {engines}; error {machines.rms_error:.1%} rms"
    return (
        Row("median error", f"{found.median_error:.1%}", f"of the times of the {len(rest)} steps that nothing was fitted to"),
        Row("error of their sum", f"{found.total_error:+.1%}", ""),
        Row("a guess would err by", f"{found.guess_error:.1%}", "the fitted steps' median for every step"),
        Row("engines", f"{machines.points} stretches", curves),
        Row(
            "trainer",
            f"{machines.ranks} ranks",
            f"{machines.train_token_s * 1e6:,.1f} us a trained token, {machines.score_group_s * 1e3:,.1f} ms a group to score, "
            f"{machines.update_s:.2f} s an update, {machines.publish_s:.2f} s a publication",
        ),
    )


def steps(found: Replay) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """(columns, cells)."""
    cells = tuple(
        (str(pair.step), f"{pair.live_s:.2f}", f"{pair.played_s:.2f}", f"{pair.error:+.0%}", "fitted" if pair.fitted else "")
        for pair in found.pairs
    )
    return ("step", "live s", "replayed s", "error", ""), cells
