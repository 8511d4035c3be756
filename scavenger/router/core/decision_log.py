"""What of a policy's decisions is written down, so that the ledger explains a run and is not flooded by it. Pure.

    place, rebalance   one row for each answer: how many samples, where, the reasons, and what the policy reckoned with (`by`)
    window, engines,
    admission          one row when the answer is another one than before
    affinity           one row for the turns placed at once, of which an engine has a prefix; one where some begin to wait for it
    kv                 one row for each sample that moves and whose engine kept its KV blocks
    agreement          one row for each engine that is found to be wrong, with all numbers

Rows of each kind are bounded (`row_budget.Budget`). What goes into a row is made only where the budget allows it; what was left out is
counted in the next row's `inputs`. Owns the codes and the words.

Boundary: what is written down of decisions; the driver decides nothing of it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from scavenger.ledger import records as rec
from scavenger.policy import affinity
from scavenger.policy.admission import Admission
from scavenger.policy.affinity import Placed
from scavenger.policy.fleet_size import Benefit
from scavenger.policy.interface import Explains, SampleMove, SamplePlacement
from scavenger.policy.kv import KvDecision
from scavenger.router.core.row_budget import EVERY_S, Budget
from scavenger.router.core.state import ActiveRun
from scavenger.router.core.tables import Core

#: Moves of one answer that are named one by one, and kinds of reasons of one answer that are counted.
NAMED = 16
KINDS = 8
#: What is told only when it is another than before: a run of short steps opens and closes its window each second or two.
CHANGES, CHANGES_EVERY_S = ("window", "engines", "admission"), 1.0


class PolicyCode(StrEnum):
    """A decision in a word. Ledgers hold these and reports rely on them: they are added to, never renamed."""

    PLACED = "placed"
    MOVED = "moved"
    MERGED = "merged"  # moved so that engines may go: the step's tail
    OPENED = "opened"
    CLOSED = "closed"
    ALL_DONE = "all_done"  # closed, since nothing is left to generate
    KEPT_OPEN = "kept_open"  # though every sample of the step may have come: for the next step
    UNDECIDED = "undecided"  # the trainer's own rule decides
    FLEET = "fleet"
    CACHED = "cached"  # a turn goes to the engine that has its prefix
    ELSEWHERE = "elsewhere"  # it does not: the queue there is longer than the prefill
    AWAITED = "awaited"  # it waits for that engine, which is full
    PUT_OFF = "put-off"  # late groups of the step under way are trained in the next
    ADMITS = "admits"  # how many samples an engine may hold, those of later steps included
    DISAGREES = "disagrees"  # an engine's numbers are not its trainer's, while its peers' are
    BLOCKS = "blocks"  # a moved sample takes its KV blocks along
    PREFILLED = "prefilled"  # it does not: its prefill is predicted to be no slower


def placed(core: Core, run: ActiveRun, answers: Sequence[SamplePlacement]) -> None:
    """Samples were leased. A policy without reasons (`Standard`) has nothing to tell."""
    explained = [answer for answer in answers if answer.reason]
    if explained:
        subject, why = _of_many(explained[0].sample_id, explained[0].reason, len(explained))
        _write(
            core,
            run,
            "placement",
            "lease",
            PolicyCode.PLACED,
            subject,
            why,
            lambda: _placements_row(run, explained),
        )


def routed(core: Core, run: ActiveRun, placed: Sequence[Placed], waits: Sequence[Placed]) -> None:
    """Samples of turns were leased, or begin to wait for the engine that has their prefix. Told of those whose prefix an engine has."""
    for action, some in (("lease", [one for one in placed if one.holder_id]), ("wait", waits)):
        if not some:
            continue
        there = some[0].worker_id == some[0].holder_id
        code = (
            PolicyCode.AWAITED if action == "wait" else PolicyCode.CACHED if there else PolicyCode.ELSEWHERE
        )
        subject, why = _of_many(some[0].sample_id, some[0].reason, len(some))
        _write(core, run, "affinity", action, code, subject, why, functools.partial(affinity.inputs_of, some))


def moved(core: Core, run: ActiveRun, moves: Iterable[SampleMove]) -> None:
    all_of = list(moves)
    if all_of:
        first = all_of[0]
        subject, why = _of_many(
            first.sample_id, f"{first.whole}: {first.reason}" if first.whole else first.reason, len(all_of)
        )
        code = PolicyCode.MERGED if first.merges else PolicyCode.MOVED
        _write(core, run, "rebalance", "move", code, subject, why, lambda: _of_moves(run, all_of))


def _of_many(sample_id: int, why: str, samples: int) -> tuple[str, str]:
    """Subject and reason of one row for several samples."""
    return f"sample {sample_id}", why if samples == 1 else f"{why} (and {samples - 1} more samples)"


def _placements_row(run: ActiveRun, placements: Sequence[SamplePlacement]) -> dict[str, Any]:
    """`reasons`: how often each was the reason, up to its first comma, where its figures begin."""
    kinds = Counter(answer.reason.partition(",")[0] for answer in placements)
    found: dict[str, Any] = {
        "samples": len(placements),
        "by_worker": dict(Counter(str(answer.worker_id) for answer in placements)),
    }
    found |= {"reasons": dict(kinds.most_common(KINDS))}
    return found | (
        {"by": by} if isinstance(run.policy, Explains) and (by := run.policy.placed_by(placements)) else {}
    )


def _of_moves(run: ActiveRun, moves: Sequence[SampleMove]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "samples": len(moves),
        "moves": [[m.sample_id, m.from_worker, m.to_worker] for m in moves[:NAMED]],
    }
    if any(move.gain_s for move in moves):
        found["gain_s"] = sum(move.gain_s for move in moves)
    return found | (
        {"by": by} if isinstance(run.policy, Explains) and (by := run.policy.moved_by(moves)) else {}
    )


def window(core: Core, run: ActiveRun, all_done: bool, inputs: Mapping[str, float]) -> None:
    """The policy says another thing of the window than before: `run.window`, by these figures."""
    said = run.decisions.window
    opened = PolicyCode.KEPT_OPEN if run.decisions.keep_open else PolicyCode.OPENED
    code = {"open": opened, "close": PolicyCode.ALL_DONE if all_done else PolicyCode.CLOSED}.get(
        said, PolicyCode.UNDECIDED
    )
    why = run.decisions.window_reason or "no policy decides"
    _write(
        core,
        run,
        "window",
        said or "none",
        code,
        run.name,
        why,
        lambda: {"step": run.progress.newest[1], "by": dict(inputs)},
    )


def engines(core: Core, run: ActiveRun, number: int, reason: str, benefit: Benefit | None) -> None:
    """How many harvested engines the run could use; told when it is another number, with what the last of them is worth."""
    before = run.decisions.engines
    if number != before and _write(
        core,
        run,
        "engines",
        "want",
        PolicyCode.FLEET,
        run.name,
        reason,
        lambda: _of_engines(run, number, before, benefit),
    ):
        run.decisions.engines = number  # what was left out is said as soon as there is room


def admission(core: Core, run: ActiveRun, decided: Admission) -> None:
    """How many samples an engine may hold for later steps' sake is another number than before."""
    _write(
        core,
        run,
        "admission",
        "limit",
        PolicyCode.ADMITS,
        run.name,
        decided.reason,
        lambda: {"step": run.progress.newest[1], "by": dict(decided.inputs)},
    )


def kv_moved(core: Core, run: ActiveRun, sample_id: int, decided: KvDecision) -> None:
    """Whether a sample that was leased anew takes along the KV blocks that its last engine kept."""
    code = PolicyCode.BLOCKS if decided.take else PolicyCode.PREFILLED
    action = "transfer" if decided.take else "prefill"
    _write(
        core, run, "kv", action, code, f"sample {sample_id}", decided.reason, lambda: dict(decided.inputs())
    )


def turns_kept(core: Core, run: ActiveRun, decided: KvDecision) -> None:
    """Whether engines keep the blocks of turns that they finish is decided otherwise than for the turn before."""
    code = PolicyCode.BLOCKS if decided.take else PolicyCode.PREFILLED
    action = "keep" if decided.take else "forget"
    _write(core, run, "kv", action, code, run.name, decided.reason, lambda: dict(decided.inputs()))


def turns_handed_over(
    core: Core, run: ActiveRun, worker_id: int, kept: int, handed: int, nbytes: int, reason: str
) -> None:
    """How many turns' blocks go from an engine that leaves to others. `reason`: of the last one of them."""
    code = PolicyCode.BLOCKS if handed else PolicyCode.PREFILLED
    why = f"{handed} of {kept} turns' blocks go to other engines; of the last: {reason}"
    _write(
        core,
        run,
        "kv",
        "hand-over",
        code,
        f"worker {worker_id}",
        why,
        lambda: {"kept": kept, "handed": handed, "nbytes": nbytes},
    )


def put_off(core: Core, run: ActiveRun, step: int, groups: Sequence[int], reason: str) -> None:
    """Late groups of a step are trained in the next one."""
    _write(
        core,
        run,
        "late",
        "put-off",
        PolicyCode.PUT_OFF,
        run.name,
        reason,
        lambda: {"step": step, "groups": list(groups[:NAMED])},
    )


def _of_engines(run: ActiveRun, number: int, before: int | None, benefit: Benefit | None) -> dict[str, Any]:
    found: dict[str, Any] = {"engines": number, "before": before, "by": benefit}
    return found | (
        {"sized": by} if isinstance(run.policy, Explains) and (by := run.policy.sized_by()) else {}
    )


def set_aside(
    core: Core, run: ActiveRun, action: str, subject: str, reason: str, numbers: Mapping[str, Any]
) -> None:
    """An engine's logprobs disagree with the trainer's. `action`: "set-aside", or "report" where nothing is done about it."""
    _write(core, run, "agreement", action, PolicyCode.DISAGREES, subject, reason, lambda: dict(numbers))


def _write(
    core: Core,
    run: ActiveRun,
    policy: str,
    action: str,
    code: PolicyCode,
    subject: str,
    reason: str,
    inputs_of: Callable[[], dict[str, Any]],
) -> bool:
    """Whether there was budget for it."""
    budget = run.decisions.budgets.setdefault(
        policy, Budget(at=core.now, every_s=CHANGES_EVERY_S if policy in CHANGES else EVERY_S)
    )
    if not budget.take(core.now):
        core.count("decisions_left_out")
        return False
    inputs = inputs_of() | {"run": run.name}
    if budget.left_out:
        inputs["left_out"], budget.left_out = budget.left_out, 0
    core.record(
        rec.Decision(policy, action, subject, reason, msgspec.json.encode(inputs).decode(), core.now, code)
    )
    return True
