"""What leases and moves were reckoned with, in numbers for the ledger: expected tokens, engines' curves, the price of a move. Pure.

Looks at the moment by which they were decided (`Outlook.decided_by`) and at nothing anew, so that being asked changes no answer and costs
little. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.router import offload
from scavenger.router.policy import Inputs, Move, Placement
from scavenger.router.predictive_outlook import Outlook
from scavenger.router.predictive_view import Picture
from scavenger.router.window import Serving

ORDERS = ("longest first", "group after group")  # as `predictive_serving` numbers them


def of_placements(answers: Sequence[Placement], outlook: Outlook, service: Serving) -> Inputs:
    """`looked_at`: when the order was found. Of the first answer its expected tokens and its engine; of all what is expected together."""
    picture = outlook.decided_by
    if picture is None:
        return {}
    first = answers[0]
    return {
        "looked_at": picture.now,
        "order": ORDERS[service.order],
        "limit": service.reason or "all samples at a time",
        **_expected(picture, [answer.sample_id for answer in answers]),
        **_engine(outlook, picture, first.worker_id, ""),
    }


def of_moves(moves: Sequence[Move], outlook: Outlook, margin: float) -> Inputs:
    """What the moves cost their targets, and the first one's two engines. `margin`: what all moves off an engine must win of its time."""
    picture = outlook.decided_by
    if picture is None:
        return {}
    first, leaving = moves[0], {move.sample_id for move in moves}
    curves = {worker.id: picture.curve(worker) for worker in picture.workers if worker.serves}
    cost: dict[str, float] = {}
    if curves:
        price = offload.Price(outlook.forecast.prefill_s(next(iter(curves.values()))), outlook.forecast.transfer_s, margin)
        held = [sample for worker_id in {move.from_worker for move in moves} for sample in picture.held.get(worker_id, ())]
        have = sum(sample.prompt_tokens + sample.length for sample in held if sample.id in leaving)
        cost = {"prefill_s": price.token_s, "transfer_s": price.move_s, "cost_s": price.move_s * len(moves) + price.token_s * have}
    return {
        "looked_at": picture.now,
        "margin": margin,
        **cost,
        **_expected(picture, sorted(leaving)),
        **_engine(outlook, picture, first.from_worker, "from_"),
        **_engine(outlook, picture, first.to_worker, "to_"),
    }


def _expected(picture: Picture, sample_ids: Sequence[int]) -> dict[str, float]:
    known = [picture.expected[sample_id] for sample_id in sample_ids if sample_id in picture.expected]
    return {"expected_tokens": sum(known), "longest_expected": max(known)} if known else {}


def _engine(outlook: Outlook, picture: Picture, worker_id: int, which: str) -> dict[str, float]:
    """How many leases it had, and its decode step: `step_s` + `sample_s` for each sample + `token_s` for each token of context."""
    worker = next((one for one in picture.workers if one.id == worker_id), None)
    if worker is None:
        return {}
    curve = picture.curve(worker)
    named = {"leases": worker.leases, "step_s": curve.base, "sample_s": curve.per_sample, "token_s": curve.per_token}
    return {f"{which}{name}": value for name, value in named.items()}
