"""`scavenger samples`: what a step's samples said, decoded, with everything that happened to them.

Owns the choice of samples, their order, and the layout of the text. The ledger has the tokens; the run names its tokenizer.

Boundary: one subcommand.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scavenger import config
from scavenger.errors import ConfigError, LedgerError
from scavenger.ledger import store
from scavenger.ledger.read import reader
from scavenger.ledger.read.reader import SampleRow
from scavenger.ledger.read.tokenizer import Decoder, load_tokenizer
from scavenger.printable import escaped, printable

#: What samples are sorted by. One that has no such value comes last.
KEYS: dict[str, Callable[[SampleRow], Any]] = {
    "reward": lambda row: row.reward,
    "advantage": lambda row: row.advantage,
    "length": lambda row: row.accepted_len,
    "finish": lambda row: row.finish or None,
    "moves": lambda row: row.moves,
}
COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq}
_TEST = re.compile(r"\s*(>=|<=|>|<|=|)\s*(-?[0-9.]+(?:e-?[0-9]+)?)\s*")


@dataclass(frozen=True, slots=True)
class Choice:
    """`sort`: a key, with `-` before it for the greatest first; "": by prompt. `tests`: of a key, such as ">=0.5"; all must hold."""

    sort: str = ""
    limit: int | None = None
    finish: str = ""
    tests: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def of(self, rows: Sequence[SampleRow]) -> list[SampleRow]:
        """The chosen rows in their order. Raises `ConfigError` for a key or a test that means nothing."""
        tests = [(KEYS[key], *_test(key, text)) for key, texts in self.tests.items() for text in texts]
        found = [row for row in rows if not self.finish or row.finish == self.finish]
        for value, compare, bound in tests:
            found = [row for row in found if value(row) is not None and compare(value(row), bound)]
        if self.sort:
            key = self.sort.removeprefix("-")
            if key not in KEYS:
                raise ConfigError(
                    f"--sort {self.sort}: no such key",
                    f"one of {', '.join(KEYS)}; -reward: the greatest first",
                )
            value = KEYS[key]
            known = [row for row in found if value(row) is not None]
            known.sort(key=value, reverse=self.sort.startswith("-"))
            found = known + [row for row in found if value(row) is None]
        return found[: self.limit]


def _test(key: str, text: str) -> tuple[Callable[[Any, Any], bool], float]:
    match = _TEST.fullmatch(text)
    try:
        if match is not None:
            return COMPARE[match[1] or "="], float(match[2])
    except ValueError:  # "1.2.3"
        pass
    raise ConfigError(f"--{key} {text!r} is no comparison", f"write one such as --{key} '>=0.5'")


def place(run: str, config_path: Path, *, local: bool) -> tuple[str, Path]:
    """The run's name, and the configuration that names its ledger: of a run.toml that of a try with `--local`, where that is asked for
    or no daemon's is there. Raises `ConfigError`."""
    if not run.endswith(".toml"):
        if local:
            raise ConfigError(
                "--local needs the run's file", "write scavenger samples my-run/run.toml --local"
            )
        return run, config_path
    found = config.read_run(Path(run)).run
    tried = found.out_dir / "local" / "scavenger.toml"
    if local or (tried.is_file() and not config_path.is_file()):
        if not tried.is_file():
            raise ConfigError(f"there is no {tried}", f"make a try first: python -m trainer {run} --local")
        return found.name, tried
    return found.name, config_path


def lines(
    url: str,
    run: str,
    step: int | None,
    group: int | None,
    purpose: str,
    *,
    jsonl: bool,
    choice: Choice = Choice(),
) -> Iterator[str]:
    """One line (or JSON object) a sample. `run` "": the newest; `step` None: its newest.

    Raises `LedgerError` for a run or step that the ledger does not know.
    """
    engine = store.open_readonly(url)
    try:
        known = reader.run_by_name(engine, run) if run else reader.newest_run(engine)
        if known is None:
            if run:
                reader.samples_of_step(engine, run, 0)  # says that there is none
            raise LedgerError("the ledger has no run yet", "start one, or name another ledger: --config")
        newest = reader.newest_step(engine, known.run_id, purpose) if step is None else step
        if newest is None:
            agents = reader.newest_step(engine, known.run_id, "turn") is not None
            raise LedgerError(
                f"run {known.name!r} has no {purpose} samples yet"
                + (", only turns of agents" if agents else ""),
                "`scavenger ledger report episodes`, then `scavenger ledger tokens SAMPLE_ID --format text`"
                if agents
                else "",
            )
        rows = reader.samples_of_step(engine, known.name, newest, group, purpose)
        if not rows:
            raise LedgerError(
                f"run {known.name!r} has no {purpose} samples of step {newest}"
                + (f", group {group}" if group is not None else ""),
                f"its last step is {known.last_step}",
            )
        tokenizer = load_tokenizer(known.tokenizer)
    finally:
        engine.dispose()
    found = choice.of(rows)
    if not jsonl and (step is None or len(found) < len(rows)):
        which = "the newest, " if step is None else ""
        what = "step" if purpose == "train" else "evaluation after step"
        yield printable(f"run {known.name}, {what} {newest} ({which}{len(found)} of {len(rows)} samples)")
    rows = tuple(found)
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


def describe(row: SampleRow, tokenizer: Decoder) -> dict[str, Any]:
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
        + (f"  ({item['reason']})" if item["reason"] else "")
    )
