"""`scavenger samples`: what a step's samples said, decoded, with everything that happened to them.

Owns the reading and the layout of the text. The ledger has the tokens; the run names its tokenizer.

Boundary: one subcommand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from scavenger.errors import LedgerError
from scavenger.ledger import store
from scavenger.ledger.read import reader
from scavenger.ledger.read.reader import SampleRow
from scavenger.ledger.read.tokens import load_tokenizer
from scavenger.printable import escaped, printable


def lines(url: str, run: str, step: int, group: int | None, purpose: str, *, jsonl: bool) -> Iterator[str]:
    """One line (or JSON object) a sample. Raises `LedgerError` for a run or step that the ledger does not know."""
    engine = store.open_readonly(url)
    try:
        known = reader.run_by_name(engine, run)
        rows = reader.samples_of_step(engine, run, step, group, purpose)
        if not rows:
            raise LedgerError(
                f"run {run!r} has no {purpose} samples of step {step}"
                + (f", group {group}" if group is not None else ""),
                f"its last step is {known.last_step}"
                if known is not None
                else "look for its name: scavenger ledger report list",
            )
        tokenizer = load_tokenizer(known.tokenizer if known is not None else "")
    finally:
        engine.dispose()
    shown = -1
    for row in rows:
        item = describe(row, tokenizer)
        if jsonl:
            yield escaped(json.dumps(item, ensure_ascii=False))
            continue
        if row.group_id != shown:
            shown = row.group_id
            yield printable(
                f"group {row.prompt_index} (retry {row.retry})  prompt: {item['prompt']!r}  meta: {row.meta}"
            )
        yield printable(_line(item))


def describe(row: SampleRow, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything about one sample, as JSON has it."""
    return {
        "sample_id": row.sample_id,
        "step": row.step,
        "group": row.prompt_index,
        "retry": row.retry,
        "index": row.index,
        "prompt": tokenizer.decode(list(row.prompt), skip_special_tokens=False),
        "completion": tokenizer.decode(list(row.tokens), skip_special_tokens=False),
        "reward": row.reward,
        "advantage": row.advantage,
        "state": row.state,
        "reason": row.reason,
        "finish": row.finish,
        "tokens": row.accepted_len,
        "contents": row.contents,
        "moves": row.moves,
        "engines": [
            {
                "worker": x.worker_id,
                "kind": x.kind,
                "node": x.node,
                "job": x.job_id,
                "from": x.start_len,
                "to": x.end_len,
                "end": x.reason,
            }
            for x in row.leases
        ],
    }


def _line(item: dict[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:+.3f}"

    gone = item["contents"] in reader.GONE
    completion = f"({item['tokens']} tokens, {item['contents']})" if gone else repr(item["completion"])
    engines = " > ".join(f"{e['kind']}@{e['node']}[{e['from']}:{e['to']}]" for e in item["engines"])
    return (
        f"  {item['index']:>3}  {completion:<24} reward {number(item['reward'])}  advantage {number(item['advantage'])}  "
        f"{item['state']:<10} {item['finish']:<7} moves {item['moves']}  {engines}"
    )
