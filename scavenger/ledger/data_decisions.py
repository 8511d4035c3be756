"""What a trainer decided about a step's data, as rows of `decisions`. Pure.

Owns the words: a trainer says numbers alone, because people read these rows who may see neither prompts nor completions.
"""

from __future__ import annotations

import msgspec

from scavenger.ledger import records as rec
from scavenger.ledger import redaction
from scavenger.protocol.messages import DataDecision

#: policy -> (action, code, reason). Ledgers hold the codes, and reports rely on them: they are added to, never renamed.
WORDS = {
    "filter": ("filter", "filtered", "{left_out} of {all} groups are not trained, by their rewards"),
    "curriculum": (
        "choose",
        "passed-over",
        "{taken} prompts are taken, and {left_out} passed over by their pass rates",
    ),
    "replay": (
        "replay",
        "replayed",
        "{taken} of {all} groups of earlier steps that are kept are trained once more",
    ),
}


def row(run: str, step: int, decision: DataDecision, at: float) -> rec.Decision:
    """`at`: Unix s."""
    action, code, words = WORDS[decision.policy]
    taken, left_out = decision.taken, decision.left_out
    reason = words.format(taken=taken, left_out=left_out, all=taken + left_out)
    inputs = {
        "run": run,
        "step": step,
        "taken": taken,
        "left_out": left_out,
        "by": redaction.metrics(decision.inputs),
    } | ({"groups": decision.groups} if decision.groups else {})
    return rec.Decision(
        decision.policy, action, run, f"step {step}: {reason}", msgspec.json.encode(inputs).decode(), at, code
    )
