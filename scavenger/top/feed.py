"""Where `scavenger top` reads: the daemon's status file and its ledger, through a connection that cannot write. And the files that drain.

    status.json  --_daemon-->  DaemonFacts  -+
    ledger       --_ledger-->  LedgerFacts  -+-->  Inputs

Owns what is asked, how much of it, and that a source which is away is said and does not end the reader: each refresh opens the ledger anew,
so a daemon may go, come back, or have its ledger replaced. Knows nothing of what is shown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa
from rich.text import Text

from scavenger.config import DaemonConfig
from scavenger.daemon.ownership import process_there
from scavenger.errors import ConfigError, DaemonUnavailable, NotInLedger, ScavengerError
from scavenger.harvest import limits as harvest_limits
from scavenger.host.user import user_name
from scavenger.ledger import queries
from scavenger.ledger.read import contents, typed
from scavenger.ledger.read.reader import connected
from scavenger.observe import status
from scavenger.printable import indented
from scavenger.protocol.keys import cluster_dir
from scavenger.protocol.messages import unpack_tokens
from scavenger.top import text
from scavenger.top.view import DaemonFacts, Inputs, LedgerFacts, Row
from scavenger.web import texts

#: How much is read at a refresh.
MOST_RUNS, MOST_STEPS, MOST_ENGINES, MOST_SAMPLES = 8, 20, 2_000, 200
MOST_DEPARTURES, MOST_MOVES, MOST_DECISIONS, MOST_EVENTS = 60, 150, 150, 100
#: Moves are looked for in this step and those before it.
STEPS_BACK = 2
MOST_LEASES, MOST_ENDS = 500, 200
_MOST_INPUT_LINES, _MOST_INPUTS = 400, 40_000
#: Tokens, characters and lines of a prompt or a completion.
_MOST_TOKENS, _MOST_TEXT, _MOST_TEXT_LINES = 32_000, 100_000, 5_000


class Feed(Protocol):
    """What the application needs: one moment after the other, single things in detail, and draining. All may block; none writes to a
    ledger."""

    def read(self) -> Inputs:
        """What is known now. Raises nothing for a source that is away."""

    def sample(self, sample_id: int) -> list[Text]:
        """Raises `ScavengerError` where it cannot be read."""

    def node(self, name: str) -> list[Text]:
        """Raises `ScavengerError` where it cannot be read."""

    def decision(self, decision_id: int) -> list[Text]:
        """Raises `ScavengerError` where it cannot be read."""

    def may_not_drain(self) -> str:
        """Why this user cannot drain and undrain; "" where he can."""

    def drain(self, node: str, *, off: bool) -> str:
        """Drain a node, or undrain it; "" = all of them. What was done. Raises `ScavengerError`."""


class SiteFeed:
    """Of a daemon's configuration. `clock`: Unix seconds."""

    def __init__(self, config: DaemonConfig, clock: Callable[[], float] = time.time) -> None:
        self._url, self._state_dir = config.ledger_url, config.daemon.state_dir
        self._clock = clock

    # ---------------------------------------------------------------- one moment

    def read(self) -> Inputs:
        now = self._clock()
        daemon: DaemonFacts | None = None
        ledger: LedgerFacts | None = None
        no_daemon = no_ledger = ""
        try:
            seen = status.read(self._state_dir)
            daemon = _daemon(seen, now, process_there(seen.host, seen.pid))
        except DaemonUnavailable as error:
            no_daemon = _said(error)
        try:
            with connected(self._url) as connection:
                ledger = _ledger(connection)
        except ScavengerError as error:
            no_ledger = f"the ledger is not read: {_said(error)}"
        return Inputs(now, daemon, no_daemon, ledger, no_ledger)

    # ---------------------------------------------------------------- single things

    def sample(self, sample_id: int) -> list[Text]:
        with connected(self._url) as connection:
            found = _one(connection, "top_sample", f"sample {sample_id}", sample_id=sample_id)
            leases = _rows(connection, "top_sample_leases", sample_id=sample_id, most=MOST_LEASES)
            ends = _rows(connection, "top_sample_ends", sample_id=sample_id, most=MOST_ENDS)
        facts = {
            "run": found["run"],
            "belongs to": f"{found['purpose']} step {found['step']}, group {found['prompt_index']} (retry {found['retry']}), "
            f"sample {found['sample_index']} of {found['n']}",
            "state": f"{found['state']} {found['reason']}",
            "finish": found["finish"] or "-",
            "tokens": f"{found['accepted_len']:,} after a prompt of {found['prompt_tokens']:,}; {found['regenerated']:,} generated again",
            "moves": found["moves"],
            "reward": f"{text.number(found['reward'], 4)}, advantage {text.number(found['advantage'], 4)}",
        }
        went = [
            f"{text.clock(row['granted_at'])}  epoch {row['epoch']}: engine {row['worker_id']} {row['kind']} on {row['node']}, "
            f"job {row['job_id']}, version {row['version']}, tokens {row['start_len']:,} to {row['end_len']:,}; "
            f"{row['reason'] or 'generates'}"
            for row in leases
        ]
        became = [
            f"{text.clock(row['at'])}  {row['state']} {row['reason']} (step {row['step']}, attempt {row['attempt']})"
            for row in ends
        ]
        parts = [("where it went", went or ["no engine had it yet"]), ("what became of it", became)]
        parts += self._contents(sample_id, str(found["tokenizer"]))
        return text.detail(f"sample {sample_id}", facts, [part for part in parts if part[1]])

    def _contents(self, sample_id: int, tokenizer: str) -> list[tuple[str, list[str]]]:
        """Prompt and completion, their beginnings where they are long; why not, where they cannot be read."""
        try:
            with connected(self._url) as connection:
                found = contents.recorded(connection, [sample_id], _MOST_TOKENS + 1).get(sample_id)
                if found is None or found.why:
                    return [("prompt and completion", [found.why if found is not None else "purged by now"])]
                prompts = contents.prompts(connection, [found.group_id], _MOST_TOKENS + 1, added=False)
        except ScavengerError as error:
            return [("prompt and completion", [_said(error)])]
        read = [unpack_tokens(prompts.get(found.group_id, b"")), unpack_tokens(found.tokens)]
        ids = [some[:_MOST_TOKENS] for some in read]
        more = [len(some) > _MOST_TOKENS for some in read]
        try:
            # In a process of its own: the file is the run's owner's, and may end whoever reads it.
            said, _, _ = texts.read(tokenizer, ids, most=_MOST_TEXT)
        except ConfigError as error:
            said = [f"(no text: {_said(error)}) ids {list(some)}"[: _MOST_TEXT + 1] for some in ids]
        return [("prompt", _beginning(said[0], more[0])), ("completion", _beginning(said[1], more[1]))]

    def node(self, place: str) -> list[Text]:
        """Of a node; `place`: its name, on a further cluster CLUSTER/NODE."""
        cluster, _, name = place.rpartition("/")
        with connected(self._url) as connection:
            held = _rows(connection, "top_node_allocations", cluster=cluster, node=name, most=30)
            faults = _rows(connection, "top_node_faults", cluster=cluster, node=name, most=30)
        allocations = [
            f"{text.moment(row['started_at'])}  job {row['job_id']} (restart {row['restart_count']}), {row['gpus']} GPUs for "
            f"{text.age((row['ended_at'] or self._clock()) - row['started_at'])}: {row['reason'] or 'holds them'}"
            for row in held
        ]
        wrong = [
            f"{text.moment(row['at'])}  {row['kind']}: {row['reason']}"
            + (f", until {text.moment(row['until_at'])}" if row["until_at"] else "")
            for row in faults
        ]
        folder = cluster_dir(self._state_dir, cluster) if cluster else self._state_dir
        drained = _drained(folder).get(name, "no")
        return text.detail(
            f"node {place}",
            {"drained by us": drained},
            [("allocations", allocations or ["none"]), ("faults", wrong or ["none"])],
        )

    def decision(self, decision_id: int) -> list[Text]:
        with connected(self._url) as connection:
            found = _one(connection, "top_decision", f"decision {decision_id}", id=decision_id)
        lines = indented(str(found["inputs"]), _MOST_INPUTS).splitlines()
        return text.decision_detail(found, lines[:_MOST_INPUT_LINES])

    # ---------------------------------------------------------------- draining

    def may_not_drain(self) -> str:
        if not self._state_dir.is_dir():
            return f"the state directory {self._state_dir} is not on this host"
        if not os.access(self._state_dir, os.W_OK | os.X_OK):
            return f"{user_name()} may not write to {self._state_dir}: ask as the daemon's user"
        return ""

    def drain(self, node: str, *, off: bool) -> str:
        if why := self.may_not_drain():
            raise ScavengerError(f"nothing was drained: {why}")
        if "/" in node:
            cluster, _, name = node.partition("/")
            raise ScavengerError(
                f"nothing was drained: {name} is of cluster {cluster}", "use `scavenger drain` there"
            )
        who = f"{user_name()} (scavenger top)"
        try:
            if not node:
                return self._drain_all(who, off=off)
            if off:
                was = harvest_limits.resume_node(self._state_dir, node)
                return f"{node}: engines may start there again" if was else f"{node} was not drained"
            harvest_limits.drain_node(self._state_dir, node, who)
        except OSError as error:
            raise ScavengerError(f"{self._state_dir} cannot be written: {error.strerror}") from error
        return f"drains engines on {node}; none starts there until it is undrained"

    def _drain_all(self, who: str, *, off: bool) -> str:
        if off:
            return (
                "harvests again" if harvest_limits.resume(self._state_dir) else "harvesting was not drained"
            )
        harvest_limits.drain(self._state_dir, who, at_once=False)
        return "drains all engines; none is submitted until it is undrained"


def _said(error: ScavengerError) -> str:
    """Cause and remedy in one line."""
    return f"{error.cause}; {error.remedy}" if error.remedy else error.cause


def _beginning(said: str, more: bool) -> list[str]:
    """Its lines; the last one says where there is more. `more`: not all tokens were read for it."""
    lines = said[:_MOST_TEXT].splitlines()
    if not more and len(said) <= _MOST_TEXT and len(lines) <= _MOST_TEXT_LINES:
        return lines
    return [
        *lines[:_MOST_TEXT_LINES],
        "\u2026 (cut; `scavenger ledger tokens SAMPLE --format text` has all of the completion)",
    ]


def _drained(state_dir: Path) -> Mapping[str, str]:
    try:
        return harvest_limits.drained_nodes(state_dir)
    except OSError:
        return {}


def _daemon(seen: status.Status, now: float, runs: bool | None) -> DaemonFacts:
    h = seen.harvest
    everywhere = [
        (name, one)
        for name, one in (("", h), *((further.name, further.harvest) for further in seen.clusters))
        if one is not None
    ]
    return DaemonFacts(
        seen.at,
        seen.generation,
        seen.host,
        status.absent(seen, now, runs),
        seen.ledger_state,
        h is not None,
        h.partition if h is not None else "",
        h.seen_at if h is not None else 0.0,
        h.concluded if h is not None else "",
        tuple(_conditions(seen)),
        h.stopped if h is not None else "",
        sum(one.jobs_pending_other_users for _, one in everywhere),
        tuple(
            msgspec.structs.replace(node, name=f"{name}/{node.name}") if name else node
            for name, one in everywhere
            for node in one.nodes
        ),
        seen.engines,
        seen.runs,
        {job.run: f"job {job.job_id} {job.ended or job.state}" for job in seen.training},
    )


def _conditions(seen: status.Status) -> Iterator[str]:
    """What keeps harvesting down besides the decision, the gravest first."""
    h = seen.harvest
    if h is None:
        return
    if h.stopped:
        yield f"harvesting is stopped by {h.stopped}"
    if h.set_up:
        yield f"engines cannot start: {h.set_up}"
    if h.polls_fail:
        yield f"polls of Slurm fail: {h.polls_fail}"
    if seen.hidden and seen.blind:
        yield f"{seen.hidden}; {status.BLIND}"
    if h.unread:
        yield f"it is not known whether harvesting is stopped: {h.unread}"


def _ledger(connection: sa.Connection) -> LedgerFacts:
    (now,) = _rows(connection, "top_now") or [{"at": 0.0}]
    runs = _rows(connection, "top_runs", most=MOST_RUNS)
    steps: dict[int, Sequence[Row]] = {}
    moves: dict[int, Sequence[Row]] = {}
    samples: dict[int, Sequence[Row]] = {}
    for number, row in enumerate(runs):
        run_id, active = row["run_id"], row["state"] == "active"
        steps[run_id] = _rows(connection, "top_steps", run_id=run_id, most=MOST_STEPS)
        if active or not number:  # of those that ended only the newest, where none is open
            since = max(0, row["last_step"] + 1 - STEPS_BACK)
            moves[run_id] = _rows(connection, "top_moves", run_id=run_id, since_step=since, most=MOST_MOVES)
            samples[run_id] = _rows(
                connection, "top_samples", run_id=run_id, step=row["last_step"], most=MOST_SAMPLES
            )
    concluded = _rows(connection, "top_concluded")
    poll = _rows(connection, "top_poll")
    return LedgerFacts(
        float(now["at"] or 0.0),
        runs,
        steps,
        _rows(connection, "top_engines", most=MOST_ENGINES),
        _rows(connection, "top_departures", most=MOST_DEPARTURES),
        moves,
        samples,
        _rows(connection, "top_decisions", most=MOST_DECISIONS),
        concluded[0] if concluded else None,
        _rows(connection, "top_events", most=MOST_EVENTS),
        poll[0] if poll else None,
    )


def _rows(connection: sa.Connection, query: str, **parameters: Any) -> Sequence[Row]:
    """Raises `LedgerError` where a value is of another type than its column."""
    found = [dict(row) for row in connection.execute(sa.text(queries.load(query)), parameters).mappings()]
    for row in found:
        typed.require(row)
    return found


def _one(connection: sa.Connection, query: str, what: str, **parameters: Any) -> Row:
    found = _rows(connection, query, **parameters)
    if not found:
        raise NotInLedger(f"the ledger has no {what}", "it may have been purged")
    return found[0]
