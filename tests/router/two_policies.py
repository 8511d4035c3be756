"""A bench with two runs: `r` plays episodes, and `s` answers for one of their agents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from scavenger.protocol.messages import (
    PROTOCOL,
    Attach,
    Call,
    CallBody,
    CommitStep,
    Deliver,
    DeliveredEpisode,
    DeliveredGroup,
    DeliveredRow,
    DeliveryOutcome,
    EpisodeOutcome,
    EpisodeShare,
    OpenRun,
    OpenTurn,
    PublishVersion,
    RecordCheckpoint,
    ReplyBody,
    RunOpened,
    Sampling,
    TurnAdvantage,
    WantDeliveries,
    WeightsLoaded,
    WorkerHello,
    pack_tokens,
)
from scavenger.router.core.events import HelloReceived, PeerIdentity, TrainerCalled
from tests.router.harness import CONFIG, OWNER, SOURCE, SPEC, Bench, payload, root

GATEWAY, PLAYER, OTHER = 90, 1, 2
PROMPT = pack_tokens([5, 6, 7])
TOKENS = 4


def open_body(
    run: str,
    resume_step: int = 0,
    *,
    steps: int = 9,
    ahead: int = 1,
    budget: Mapping[str, float] | None = None,
) -> OpenRun:
    """`budget`: of each episode of `r` (`turns`, `tokens`, `s`)."""
    bounds: dict[str, Any] = {f"budget_{key}": most for key, most in (budget or {}).items()}
    data = {"policies": {"other": {"run": "s"}}} | bounds if run == "r" else {"episodes_of": "r"}
    section = CONFIG["run"] | {"name": run, "steps": steps}
    config = json.dumps({"run": section, "data": data, "algorithm": {"max_off_policy_steps": ahead}})
    return OpenRun(
        PROTOCOL,
        run,
        7,
        config,
        SPEC,
        "",
        True,
        8,
        1,
        resume_step,
        "host",
        1,
        3,
        "stop",
        max_off_policy_steps=ahead,
        policies=("s",) if run == "r" else (),
        episodes_of="" if run == "r" else "r",
        serves_only=steps == 0,
        **(bounds if run == "r" else {}),
    )


def ask(episode: str, policy: str = "", number: int = 0) -> OpenTurn:
    request = sha256(f"{policy} {episode} {number}".encode()).digest()
    return OpenTurn(episode, request, sha256(request).digest(), PROMPT, 1, Sampling(TOKENS), (), policy)


def turn_advantages(one: DeliveredEpisode) -> tuple[TurnAdvantage, ...]:
    """Twice what each rewarded turn earned."""
    return tuple(TurnAdvantage(turn.number, 2 * turn.reward) for row in one.rows for turn in row.turns)


class TwoRuns(Bench):
    """Both runs' trainers are on connections of their own. `attempts`, `version`: of each run; `shown`: groups that `s` was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts = {"r": 0, "s": 0}
        self.versions = {"r": 0, "s": 0}

    def of(
        self, run: str, body: CallBody, conn: int = 0, who: PeerIdentity = OWNER, attempt: int | None = None
    ) -> ReplyBody | None:
        self.call_id += 1
        at = conn or (PLAYER if run == "r" else OTHER)
        fenced = self.attempts[run] if attempt is None else attempt
        fenced = 0 if isinstance(body, OpenRun | OpenTurn) else fenced
        self.handle(TrainerCalled(at, who, Call(self.call_id, run, fenced, body)))
        return self.answer(self.call_id, at)

    def begin(self, run: str, resume_step: int = 0, **how: Any) -> ReplyBody | None:
        reply = self.of(run, open_body(run, resume_step, **how))
        if isinstance(reply, RunOpened):
            self.attempts[run] = reply.attempt
        return reply

    def announce(self, run: str, step: int) -> None:
        self.versions[run] += 1
        version = self.versions[run]
        self.of(run, PublishVersion(version, step, root(version), b"manifest", (SOURCE,)))

    def engine(self, conn: int, run: str) -> None:
        """One more engine of a run, with its newest weights."""
        who = PeerIdentity("worker", f"key-{conn}", run, f"job{conn}")
        self.hello_of(conn, run, who)
        self.say(conn, WeightsLoaded(self.versions[run], root(self.versions[run])))

    def hello_of(self, conn: int, run: str, who: PeerIdentity, **how: object) -> None:
        said = {
            "protocol": PROTOCOL,
            "kind": "harvested",
            "run": run,
            "session": f"s{conn}",
            "incarnation": 0,
            "job_id": conn,
            "node": f"n{conn}",
            "gpus": 1,
            "engine": "reference",
            "code_version": "0",
            "pid": 1,
            "loaded_version": -1,
            "held": (),
        }
        self.handle(HelloReceived(conn, who, WorkerHello(**(said | how))))  # type: ignore[arg-type]  # fields by name, of mixed types

    def generate(self, *conns: int) -> None:
        """Engines generate all that they were given."""
        for conn in conns:
            for lease in self.leases(conn):
                begin = len(lease.accepted) // 4
                self.chunk(conn, lease, begin, lease.sampling.max_tokens - begin)

    def attach_again(self, run: str) -> None:
        self.of(run, Attach(run, ()))

    def sample_of(self, body: OpenTurn) -> int:
        """The sample of a turn, by its request."""
        [turn] = [t for t in self.ledger.turns.values() if t.request == body.request]
        return next(i for i, row in self.ledger.samples.items() if row.group_id == turn.group_id)

    def share(self, episode: str, index: int = 0, reward: float = 1.0, turns: int = 1) -> EpisodeShare:
        """What `s` said in an episode, each turn as a row of its own."""
        asked = [ask(episode, "s", number) for number in range(turns)]
        rows = []
        for one in asked:
            sample = self.sample_of(one)
            length = len(self.ledger.samples[sample].tokens) // 4 or TOKENS  # fewer where a budget said so
            tokens, logprobs, _, _ = payload(sample, 0, length)
            rows.append(DeliveredRow(PROMPT, tokens, b"", logprobs))
        return EpisodeShare(episode, index, reward, tuple(one.request for one in asked), tuple(rows))

    def deliver(self, *shares: EpisodeShare, step: int = 1, prompt: int = 0) -> ReplyBody | None:
        return self.of("r", Deliver("s", step, prompt, shares))

    def want(self, step: int = 1, count: int = 8, have: tuple[int, ...] = ()) -> list[DeliveredGroup]:
        self.of("s", WantDeliveries(step, count, have))
        return self.take(OTHER, DeliveredGroup)

    def train(self, step: int, *groups: DeliveredGroup) -> ReplyBody | None:
        """The trainer of `s` takes a step with these."""
        taken = tuple(
            DeliveryOutcome(one.delivery_id, "consumed", one.reward, 0.5, turns=turn_advantages(one))
            for group in groups
            for one in group.episodes
        )
        return self.of("s", CommitStep(step, self.versions["s"], "train", (), {}, deliveries=taken))

    def settle_episodes(self, step: int, *episodes: str) -> ReplyBody | None:
        """The trainer of `r` takes a step with its part of these."""
        outcomes = tuple(EpisodeOutcome(one, "masked", 0.0, 0.0) for one in episodes)
        return self.of("r", CommitStep(step, self.versions["r"], "train", (), {}, outcomes))

    def checkpoint(self, run: str, step: int) -> None:
        self.of(run, RecordCheckpoint(step, self.versions[run], root(1), f"/c/{step}", (step,)))


def opened(**how: int) -> TwoRuns:
    """Both runs are open, with weights and an engine each (11 of `r`, 12 of `s`)."""
    return begun(TwoRuns(), **how)


def begun(bench: TwoRuns, **how: int) -> TwoRuns:
    """As `opened`, of runs that are made already."""
    bench.begin("s", **how)
    bench.announce("s", 0)
    bench.begin("r")
    bench.announce("r", 0)
    bench.engine(11, "r")
    bench.engine(12, "s")
    return bench


def played(bench: TwoRuns, *episodes: str) -> None:
    """Each episode has a turn of both policies, which are whole."""
    for episode in episodes:
        for policy in ("", "s"):
            bench.of("r", ask(episode, policy), GATEWAY)
    bench.generate(11, 12)
