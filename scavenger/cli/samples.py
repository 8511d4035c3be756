"""`scavenger samples`: what the samples of one step, or of several, said, decoded, with everything that happened to them.

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

import sqlalchemy as sa

from scavenger import config
from scavenger.cli.options import is_readable
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
#: No step is later.
LAST_STEP = 10**18
_STEPS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TEST = re.compile(r"\s*(>=|<=|>|<|=|)\s*(-?[0-9.]+(?:e-?[0-9]+)?)\s*")


@dataclass(frozen=True, slots=True)
class Choice:
    """`sort`: a key, with `-` before it for the greatest first, superseded samples last; "": by prompt. `tests`: of a key, such as
    ">=0.5"; all must hold."""

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
            found.sort(key=lambda row: row.state == "superseded")  # nothing was trained on it
        return found[: self.limit]


def steps_of(text: str) -> range:
    """The steps of `3`, or of `3-7`, both ends included. Raises `ConfigError` for anything else. Pure."""
    match = _STEPS.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--step {text!r} is no step", "write one, such as --step 3, or a range, such as --step 3-7"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ConfigError(
            f"--step {text} ends before it begins", f"the first step comes first: --step {last}-{first}"
        )
    return range(first, last + 1)


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
    or no daemon's can be read. Raises `ConfigError`."""
    if not run.endswith(".toml"):
        if local:
            raise ConfigError(
                "--local needs the run's file", "write scavenger samples my-run/run.toml --local"
            )
        return run, config_path
    found = config.read_run(Path(run)).run
    tried = found.out_dir / "local" / "scavenger.toml"
    if local or (tried.is_file() and not is_readable(config_path)):
        if not tried.is_file():
            raise ConfigError(f"there is no {tried}", f"make a try first: python -m trainer {run} --local")
        return found.name, tried
    return found.name, config_path


def lines(
    url: str,
    run: str,
    steps: range | None,
    group: int | None,
    purpose: str,
    *,
    jsonl: bool,
    choice: Choice = Choice(),
) -> Iterator[str]:
    """One line (or JSON object) a sample, of all `steps` together sorted and limited. `run` "": the newest; `steps` None: its newest one.

    Raises `LedgerError` for a run or steps that the ledger does not know.
    """
    engine = store.open_readonly(url)
    try:
        known = reader.run_by_name(engine, run) if run else reader.newest_run(engine)
        if known is None:
            if run:
                reader.samples_of_step(engine, run, 0)  # says that there is none
            raise LedgerError("the ledger has no run yet", "start one, or name another ledger: --config")
        wanted = steps or _newest(engine, known.run_id, known.name, purpose)
        found, n = list[SampleRow](), 0
        for step in reader.submitted_steps(engine, known.run_id, wanted[0], wanted[-1], purpose):
            rows = reader.samples_of_step(engine, known.name, step, group, purpose)
            found, n = [*found, *rows], n + len(rows)
            if choice.limit is not None:
                found = choice.of(found)  # of many steps no more is kept than is shown
        if not n:
            _refuse_agents(engine, known.run_id, known.name, purpose)
            raise LedgerError(
                f"run {known.name!r} has no {purpose} samples of {_named(wanted)}"
                + (f", group {group}" if group is not None else ""),
                f"its last step is {known.last_step}",
            )
        tokenizer = load_tokenizer(known.tokenizer)
    finally:
        engine.dispose()
    found = choice.of(found)
    if not jsonl and (steps is None or len(found) < n):
        which = "the newest, " if steps is None else ""
        what = "" if purpose == "train" else "evaluation after "
        yield printable(f"run {known.name}, {what}{_named(wanted)} ({which}{len(found)} of {n} samples)")
    shown = -1
    for row in found:
        item = describe(row, tokenizer)
        if jsonl:
            yield escaped(json.dumps(item, ensure_ascii=False))
            continue
        if row.group_id != shown:
            shown = row.group_id
            at = f"step {row.step}, " if len(wanted) > 1 else ""
            yield printable(
                f"{at}group {row.prompt_index} (retry {row.retry})  prompt: {item['prompt']!r}  meta: {row.meta}"
            )
        yield printable(_line(item))


def _newest(engine: sa.Engine, run_id: int, name: str, purpose: str) -> range:
    """A run's newest step. Raises `LedgerError` where it has none."""
    newest = reader.newest_step(engine, run_id, purpose)
    if newest is not None:
        return range(newest, newest + 1)
    _refuse_agents(engine, run_id, name, purpose)
    raise LedgerError(f"run {name!r} has no {purpose} samples yet", "")


def _refuse_agents(engine: sa.Engine, run_id: int, name: str, purpose: str) -> None:
    """Raises `LedgerError` for a run that has turns of agents and nothing of `purpose`: turns are shown elsewhere. Its steps say nothing:
    they are committed whatever filled them."""
    if (
        reader.submitted_steps(engine, run_id, 0, LAST_STEP, purpose)
        or reader.newest_step(engine, run_id, "turn") is None
    ):
        return
    raise LedgerError(
        f"run {name!r} plays episodes: it has no {purpose} samples, only turns of agents",
        "`scavenger ledger report episodes`, then `scavenger ledger tokens SAMPLE_ID --format text`",
    )


def _named(steps: range) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


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
