"""One look at a cluster as rows of name, value and meaning. Pure: a `Look` in, text out."""

from __future__ import annotations

from scavenger.harvest.policy import Submit
from scavenger.simulate import survey_text
from scavenger.simulate.live import Look, Wish
from scavenger.simulate.sacct import COMMAND
from scavenger.simulate.survey_text import Row

NEEDS_TIME = f"one look cannot tell how long GPUs stay idle. Ask accounting:\n    {COMMAND}\n    scavenger simulate --sacct dump.txt"


def rows(found: Look, wish: Wish) -> tuple[Row, ...]:
    """The table of one look."""
    gpus = found.gpus
    size = "1 GPU" if wish.gpus_per_engine == 1 else f"{wish.gpus_per_engine} GPUs"
    spread = ", ".join(f"{nodes} with {count}" for count, nodes in found.idle_by_count) or "none"
    submits = [action for action in found.decision.actions if isinstance(action, Submit) and not action.spare]
    return (
        Row("GPUs idle now", f"{gpus.idle}", f"on {found.nodes} usable nodes of partition {found.partition}; nodes by idle GPUs: {spread}"),
        Row("others use", f"{gpus.others}", f"{found.waiting_others} jobs of others wait for GPUs there"),
        Row("harvested", f"{gpus.harvested}", f"{found.engines} engines run, {found.waiting} wait"),
        Row("unusable", f"{gpus.unusable}", "on nodes of the partition that are down or drained"),
        Row("outside", f"{gpus.reserved}", "on nodes that the partition does not have"),
        Row("engines that fit now", f"{found.fit}", f"of {size} each: {found.room}"),
        Row("the policy would submit", f"{len(submits)}", found.decision.reason),
        *(Row("  each", size, action.reason) for action in submits[:1]),
        *survey_text.waits(found.timing),
    )


def notes(found: Look, configured: bool) -> tuple[str, ...]:
    """What to know before the table is believed. `configured`: the limits are a site's own."""
    said = [] if configured else ["There is no scavenger.toml here: the limits are the daemon's defaults."]
    if found.hypothetical:
        made = "over all nodes with GPUs, GraceTime 0, its PriorityTier below the others'"
        said.append(f"There is no partition {found.partition!r} yet: this shows one {made}.")
    if found.refused:
        said.append(f"The daemon would refuse it as it is: {found.refused}")
    return (*said, NEEDS_TIME)
