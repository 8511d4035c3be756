"""What the ledger says after a chaos run, by queries of its own and against what the watcher saw. Every count must be 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scavenger.demo.site import DemoSite
from scavenger.ledger.read import reports
from tests.chaos.watch import Watcher
from tests.system import agents, play

#: Both would train on something twice: one sample consumed twice by steps that survive or within one attempt, and one place of the data
#: (step, prompt, index) filled by two samples.
_TWICE = """
SELECT e.sample_id, e.step, e.attempt FROM sample_ends e WHERE e.state IN ('consumed', 'filtered')
GROUP BY e.sample_id, e.step, e.attempt HAVING count(*) > 1
UNION ALL
SELECT e.sample_id, 0, 0 FROM sample_ends e JOIN samples s ON s.sample_id = e.sample_id
JOIN steps v ON v.run_id = s.run_id AND v.purpose = 'train' AND v.step = e.step AND v.attempt = e.attempt AND v.rewound_by IS NULL
WHERE e.state IN ('consumed', 'filtered') GROUP BY e.sample_id HAVING count(*) > 1
UNION ALL
SELECT min(s.sample_id), g.step, g.prompt_index FROM samples s JOIN groups g ON g.group_id = s.group_id
WHERE g.purpose = 'train' AND s.state IN ('consumed', 'filtered') GROUP BY g.step, g.prompt_index, s.sample_index HAVING count(*) > 1
"""
#: A chunk that its lease could not bring: without such a lease, after the lease's end, or after a newer epoch had added tokens.
_STALE = """
SELECT c.sample_id, c.epoch, c.start_len FROM chunks c
LEFT JOIN leases l ON l.sample_id = c.sample_id AND l.epoch = c.epoch AND l.worker_id = c.worker_id AND l.version = c.version
WHERE l.sample_id IS NULL OR (l.ended_at IS NOT NULL AND c.start_len + c.n_tokens > l.end_len)
UNION ALL
SELECT c.sample_id, c.epoch, c.start_len FROM chunks c
JOIN chunks newer ON newer.sample_id = c.sample_id AND newer.epoch > c.epoch AND newer.id < c.id
"""
_FILLED = """
SELECT g.step, g.prompt_index, s.sample_index FROM samples s JOIN groups g ON g.group_id = s.group_id
WHERE g.purpose = 'train' AND s.state IN ('consumed', 'filtered')
"""
#: Of each version whose tokens were trained in a step: the optimizer steps between them.
_AGES = """
SELECT DISTINCT g.step, g.step - 1 - v.step FROM chunks c
JOIN samples s ON s.sample_id = c.sample_id
JOIN groups g ON g.group_id = s.group_id
JOIN weight_versions v ON v.run_id = g.run_id AND v.version = c.version
WHERE g.purpose = 'train' AND s.state IN ('consumed', 'filtered')
"""
_FINAL = """
SELECT s.sample_id, s.state, c.tokens FROM samples s LEFT JOIN chunks c ON c.sample_id = s.sample_id ORDER BY s.sample_id, c.start_len
"""


#: Of episodes; their names end with the number of their life.
_OTHER_LIVES = "SELECT name FROM episodes WHERE name NOT LIKE '%.0' ORDER BY name"
_IN_DOUBT = "SELECT count(*) FROM events WHERE kind = 'tool_call_in_doubt'"
_AGAIN = "SELECT sample_id, regenerated FROM samples WHERE regenerated > 0 ORDER BY sample_id"


@dataclass(frozen=True, slots=True)
class Agents:
    """Of a run with episodes: its tool; whether its effects are outside; whether any engine was hurt."""

    tool: agents.ToolServer
    external: bool
    engines_hurt: bool


@dataclass(frozen=True, slots=True)
class Audit:
    """`counts`: what must be 0. `facts`: what says that there was something to see. `found`: a line for each finding."""

    counts: Mapping[str, int]
    facts: Mapping[str, int]
    found: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not any(self.counts.values())


def audit(
    site: DemoSite,
    watcher: Watcher,
    reference: play.Result,
    off_policy: int = 0,
    episodes: Agents | None = None,
) -> Audit:
    """Ask everything. The ledger must be reachable, and the run at its end.

    With `off_policy` steps in advance its tokens depend on when weights came, and differ from the undisturbed run's; then it is asked
    whether any was trained beyond them.
    """
    found: list[str] = []
    wrong = list(watcher.seen.wrong)
    seen = watcher.seen.tokens
    lost, which = watcher.seen.lost(_final(site))
    twice, stale = play.ask(site, _TWICE), play.ask(site, _STALE)
    filled = set(play.ask(site, _FILLED)) if episodes is None else agents.tokens_of(site.ledger_url).keys()
    skipped = sorted(reference.tokens.keys() - filled)
    problems = reports.check(site.ledger_url)
    found += [*which, *wrong]
    found += [f"consumed twice: sample, step, attempt or prompt = {row}" for row in twice]
    found += [f"stale chunk accepted: sample, epoch, start = {row}" for row in stale]
    found += [f"skipped: step, prompt, index = {place}" for place in skipped]
    found += [f"ledger check: {line}" for line in problems]
    counts = {
        "committed tokens lost": lost,
        "chunks that were seen to change, overlap or come late": len(wrong),
        "samples consumed twice": len(twice),
        "prompts skipped": len(skipped),
        "stale chunks accepted": len(stale),
        "findings of `scavenger ledger check`": len(problems),
    }
    facts = _facts(site, seen, watcher)
    in_doubt = 0
    if episodes is not None:
        in_doubt = _episodes(site, episodes, counts, facts, found)
    if off_policy:
        ages = play.ask(site, _AGES)
        beyond = sorted((step, age) for step, age in ages if not 0 <= age <= off_policy)
        found += [
            f"trained beyond {off_policy} steps: step {step} has tokens {age} old" for step, age in beyond
        ]
        counts["steps with tokens older than allowed"] = len(beyond)
        facts["steps with tokens of older weights"] = len({step for step, age in ages if age > 0})
    elif not problems and not in_doubt:  # an agent that was told of a doubt goes on otherwise
        result = play.result(site) if episodes is None else agents.result(site)
        tokens, steps = _differences(result, reference, found)
        counts["samples with other tokens than undisturbed"] = tokens
        counts["steps with another reward or loss than undisturbed"] = steps
    return Audit(counts, facts, tuple(found))


def _episodes(
    site: DemoSite, episodes: Agents, counts: dict[str, int], facts: dict[str, int], found: list[str]
) -> int:
    """What must be 0 of a run whose trainer nobody hurt. Returns how many calls of its tool were in doubt."""
    lives = play.ask(site, _OTHER_LIVES)
    counts["episodes that were begun anew"] = len(lives)
    found += [f"an episode was begun anew: {name}" for (name,) in lives]
    if episodes.external:
        twice = episodes.tool.twice()
        counts["calls of a tool that was asked twice"] = len(twice)
        found += [f"a tool was asked twice: episode, turn = {call}" for call in twice]
    if not episodes.engines_hurt:
        again = play.ask(site, _AGAIN)
        counts["tokens generated again"] = sum(tokens for _, tokens in again)
        found += [f"tokens were generated again: sample, tokens = {row}" for row in again]
    facts["calls of the tool"] = len(episodes.tool.asked)
    facts["turns"] = int(play.ask(site, "SELECT count(*) FROM turns")[0][0])
    facts["calls of the tool in doubt"] = in_doubt = int(play.ask(site, _IN_DOUBT)[0][0])
    return in_doubt


def _final(site: DemoSite) -> list[tuple[int, str, bytes]]:
    joined: dict[int, tuple[str, bytearray]] = {}
    for sample, state, tokens in play.ask(site, _FINAL):
        joined.setdefault(sample, (state, bytearray()))[1].extend(tokens or b"")
    return [(sample, state, bytes(tokens)) for sample, (state, tokens) in joined.items()]


def _differences(result: play.Result, reference: play.Result, found: list[str]) -> tuple[int, int]:
    places = {
        key
        for key in result.tokens.keys() | reference.tokens.keys()
        if result.tokens.get(key) != reference.tokens.get(key)
    }
    steps = {
        key
        for key in result.steps.keys() | reference.steps.keys()
        if result.steps.get(key) != reference.steps.get(key)
    }
    found += [f"other tokens at step, prompt, index = {key}" for key in sorted(places)]
    found += [
        f"step {key}: reward, loss = {result.steps.get(key)}, undisturbed {reference.steps.get(key)}"
        for key in sorted(steps)
    ]
    return len(places), len(steps)


_FACTS = {
    "daemons": "SELECT count(*) FROM generations",
    "attempts of the trainer": "SELECT count(*) FROM attempts",
    "steps committed again": "SELECT count(*) FROM steps WHERE purpose = 'train' AND rewound_by IS NOT NULL",
    "engines": "SELECT count(*) FROM workers",
    "samples": "SELECT count(*) FROM samples",
    "samples moved with tokens": "SELECT count(*) FROM samples WHERE moves > 0",
    "samples superseded": "SELECT count(*) FROM samples WHERE state = 'superseded'",
    "tokens generated again": "SELECT coalesce(sum(regenerated), 0) FROM samples",
    "tokens in the ledger": "SELECT coalesce(sum(n_tokens), 0) FROM chunks",
    "chunks refused": "SELECT count(*) FROM events WHERE kind = 'chunk_refused'",
}


def _facts(site: DemoSite, seen: int, watcher: Watcher) -> dict[str, int]:
    facts = {name: int(play.ask(site, sql)[0][0]) for name, sql in _FACTS.items()}
    return {
        **facts,
        "tokens witnessed": seen,
        "looks of the witness": watcher.seen.looks,
        "looks in vain": watcher.blind,
    }


def table(title: str, audit: Audit, faults: Mapping[str, int]) -> str:
    """For people: what was done, what must be 0, what was there."""
    width = max(len(name) for name in (*audit.counts, *audit.facts, *faults))
    lines = [title, ""]
    for heading, rows in (("faults", faults), ("must be 0", audit.counts), ("seen", audit.facts)):
        lines += [heading, *(f"  {name:<{width}}  {count:>9,}" for name, count in rows.items()), ""]
    return "\n".join([*lines, *audit.found[:40]])
