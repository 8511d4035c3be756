"""Trainers on a bench: publish, evaluate now and then, submit, collect, commit; calls are repeated until they are answered.

A `Campaign` is a run as its researcher sees it: what its checkpoints are, and which weights a step has (a restart may compute others).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from scavenger.protocol.messages import (
    Accepted,
    Attach,
    Call,
    CallBody,
    CloseRun,
    CommitStep,
    Denied,
    EndReserved,
    Fleet,
    GroupDone,
    HelloAgain,
    Message,
    Ok,
    OpenRun,
    Ping,
    PublishVersion,
    RecordCheckpoint,
    Reply,
    ReportAgreement,
    RunOpened,
    RunStopped,
    SampleOutcome,
    SetReserved,
    SpanSums,
    SubmitGroups,
    Suspects,
    TokenDifferences,
)
from scavenger.protocol.reserved_memory import ReservedObservation, observe
from scavenger.protocol.train_step import ReservedAsleep, ReservedHolds
from tests.router.apart import manifest_of
from tests.router.checks import Truth
from tests.router.engines import MAX_TOKENS, finish_at, goal, payload
from tests.router.harness import SOURCE, open_body, specs
from tests.router.links import Link
from trainer.engine_control import Present

PROMPTS, N = 3, 2
PHASES = ("open", "publish", "submit", "collect", "commit", "over")
PATIENCE = 8
#: Turns that a trainer waits for its reserved engines to fall asleep before it ends them.
DEADLINE = 6


@dataclass
class Campaign:
    """`salt` grows when a restart computes other weights; `kept`: steps that have a checkpoint."""

    run: str
    on_poison: str
    salt: int = 0
    encrypt: bool = False  # so that engines beyond a link have its weights
    jobs: int = 0
    kept: list[int] = field(default_factory=lambda: [0])

    def root(self, step: int) -> bytes:
        return b"%s-%d-%d" % (self.run.encode(), self.salt, step)


class SimTrainer:
    """One trainer process. `dead`: ended by a refusal, or by the run's stop."""

    def __init__(
        self,
        name: int,
        campaign: Campaign,
        resume: int,
        link: Link,
        truth: Truth,
        ahead: int = 0,
        on_new_version: str = "switch",
        kv: str = "recompute",
    ) -> None:
        self.ahead, self.on_new_version, self.kv = ahead, on_new_version, kv
        self.asked: dict[int, tuple[int, ...]] = {}  # step -> groups, of steps in advance
        self.name, self.campaign, self.resume, self.link, self.truth = name, campaign, resume, link, truth
        campaign.jobs += 1
        self.job = campaign.jobs
        self.step, self.version, self.next_version, self.attempt = resume + 1, 0, 1, 0
        self.salt = campaign.salt
        self.phase, self.purpose = "open", "train"
        self.have: dict[int, GroupDone] = {}
        self.submitted: tuple[int, ...] = ()
        self.pending: Call | None = None
        self.published: PublishVersion | None = None
        self.reserved: SetReserved | None = None
        self.fleet = Fleet(0, 0, 0, 0, 0)
        self.asleep_in = 0  # turns since they were told to sleep, while they do not
        self.waited = self.calls = self.idle = self.steps_done = 0
        self.evaluated: set[int] = set()
        self.dead = self.wants_checkpoint = False
        self.reported = False  # how engines agree with it, of the present step
        self.suspects: set[int] = set()

    def root(self) -> bytes:
        return b"%s-%d-%d" % (self.campaign.run.encode(), self.salt, self.step)

    # ---- saying

    def call(self, body: CallBody) -> None:
        self.calls += 1
        attempt = 0 if isinstance(body, OpenRun) else self.attempt
        self.pending, self.waited = Call(1000 * self.job + self.calls, self.campaign.run, attempt, body), 0
        self.link.up.append(self.pending)

    def aside(self, body: CallBody) -> None:
        """A call whose answer nobody waits for."""
        self.calls += 1
        self.link.up.append(Call(1000 * self.job + self.calls, self.campaign.run, self.attempt, body))

    def connected(self, link: Link) -> None:
        """Over a new connection: attach, say again what a restarted daemon may have forgotten, repeat what awaits its answer."""
        self.link.old, self.link = True, link
        if self.attempt:
            wanted = {*self.submitted, *(i for ids in self.asked.values() for i in ids)}
            self.aside(Attach(self.campaign.run, tuple(self.have), tuple(wanted - set(self.have))))
            for body in (self.published, self.reserved):
                if body is not None:
                    self.aside(body)
        if self.pending is not None:
            self.call(self.pending.body)

    def act(self) -> bool:
        """One turn; True when it wants a new connection."""
        if self.dead or self.phase == "over":
            return False
        if self.pending is not None:
            self.waited += 1
            return self.waited % PATIENCE == 0
        if self.wants_checkpoint and self.phase != "open" and self.step - 1 > max(self.campaign.kept):
            self.wants_checkpoint = False
            self.call(RecordCheckpoint(self.step - 1, self.version, self.root(), "ckpt"))
        elif (body := self.next_body()) is not None:
            self.call(body)
        else:
            self.call(Ping())
            self.idle += 1
            return self.idle % 25 == 0  # groups may have been lost on their way
        return False

    def next_body(self) -> CallBody | None:
        """What it says next of its step; None while it waits for groups, and when it is over."""
        match self.phase:
            case "open":
                body = open_body(
                    self.resume,
                    on_poison=self.campaign.on_poison,
                    job_id=self.job,
                    ahead=self.ahead,
                    on_new_version=self.on_new_version,
                    kv=self.kv,
                    encrypt=self.campaign.encrypt,
                )
                return msgspec.structs.replace(body, run=self.campaign.run)
            case "publish":
                manifest = manifest_of(self.campaign.run)
                return PublishVersion(self.next_version, self.step - 1, self.root(), manifest, (SOURCE,))
            case "submit":
                return SubmitGroups(
                    self._next_to_ask(),
                    self.version,
                    self.purpose,
                    specs(PROMPTS if self.purpose == "train" else 1, N, MAX_TOKENS),
                )
            case "commit" if not self.reported:
                return ReportAgreement(self.step, self._agreement())
            case "commit":
                return CommitStep(
                    self.step, self.version, self.purpose, self._outcomes(), {}, differences=self._apart()
                )
        return None

    def _next_to_ask(self) -> int:
        """The step that it submits next: its own, and those in advance."""
        if self.purpose == "eval":
            return self.step
        return next(step for step in range(self.step, self.step + self.ahead + 1) if step not in self.asked)

    def _mine(self) -> list[GroupDone]:
        """Of the step under way."""
        return [group for group_id, group in self.have.items() if group_id in self.submitted]

    def _apart(self) -> tuple[TokenDifferences, ...]:
        """Of every second sample."""
        found = [s for group in self._mine() for s in group.samples if s.tokens and s.sample_id % 2]
        return tuple(TokenDifferences(s.sample_id, bytes(len(s.tokens) // 2), 0.0) for s in found)

    def _agreement(self) -> tuple[SpanSums, ...]:
        """What it computes of its groups: engines whose numbers are wrong are thirty times as far from it as others."""
        found = []
        for sample in [s for group in self._mine() for s in group.samples if s.error is None]:
            assert sum(tokens for _, tokens in sample.spans) == len(sample.tokens) // 4, (
                f"sample {sample.sample_id}: nobody generated some of its tokens"
            )
            for worker_id, tokens in sample.spans:
                off = (
                    tokens
                    * (0.3 if worker_id in self.truth.wrong else 0.01)
                    * (1 + sample.sample_id % 3 / 10)
                )
                found.append(SpanSums(sample.sample_id, worker_id, tokens, -off / 4, off, 0.0))
        return tuple(found)

    def _outcomes(self) -> tuple[SampleOutcome, ...]:
        found = []
        for group in self._mine():
            outcome = (
                "evaluated"
                if self.purpose == "eval"
                else "filtered"
                if group.group_id % 5 == 0
                else "consumed"
            )
            for s in group.samples:
                wrong = self.purpose == "train" and any(worker in self.suspects for worker, _ in s.spans)
                if s.error is None:
                    found.append(SampleOutcome(s.sample_id, "masked" if wrong else outcome, 1.0, 0.1))
        return tuple(found)

    def set_reserved(self, awake: bool) -> None:
        self.reserved, self.asleep_in = (
            SetReserved(awake, self.reserved.order + 1 if self.reserved is not None else 1),
            0,
        )
        self.aside(self.reserved)

    def sleeping(self, running: tuple[str, ...]) -> ReservedObservation:
        """What it makes of what it heard, and of the engines that have a process, which its launcher tells it."""
        if (
            self.reserved is None
            or self.reserved.awake
            or not self.attempt
            or self.dead
            or self.phase == "over"
        ):
            return ReservedObservation(None)
        slots = {name.rpartition(".")[0] for name in (*running, *self.fleet.holding)}
        present = Present(slots=tuple(slots), running=running)
        return observe(self.fleet, self.reserved.order, present, launched=True)

    def tend(self, running: tuple[str, ...]) -> tuple[str, ...]:
        """Tell the daemon of engines that are gone; returns those that are to be ended, once the others' time is over."""
        found = self.sleeping(running)
        if found.gone:
            self.aside(EndReserved(found.gone, "its process ended"))
        self.asleep_in = self.asleep_in + 1 if isinstance(found.event, ReservedHolds) else 0
        return found.ending if self.asleep_in > DEADLINE else ()

    def trains(self, running: tuple[str, ...]) -> bool:
        """Whether it may be at work on the GPUs of its reserved engines."""
        return isinstance(self.sleeping(running).event, ReservedAsleep)

    def close(self) -> None:
        if self.phase not in ("open", "over"):
            self.call(CloseRun("finished"))

    # ---- hearing

    def hear(self, message: Message) -> bool:
        """One message; True when it wants a new connection."""
        if self.dead:
            return False
        match message:
            case GroupDone():
                self._arrived(message)
            case HelloAgain():
                return True
            case Fleet():
                self.fleet = message
            case RunStopped():
                self.dead = True
            case Reply(body=Denied(code="stale")):
                self.dead = True
            case Reply(id=number) if self.pending is not None and number == self.pending.id:
                body, self.pending = self.pending.body, None
                return self._answered(body, message.body)
        return False

    def _arrived(self, group: GroupDone) -> None:
        now = (group.purpose, group.step) == (self.purpose, self.step)
        now |= group.purpose == "train" and self.step <= group.step <= self.step + self.ahead
        assert now or not self.submitted, (
            f"group {group.group_id} of step {group.step} came in step {self.step} (I3)"
        )
        for sample in group.samples:
            if sample.error is not None:
                assert self.campaign.on_poison == "mask", (
                    f"sample {sample.sample_id} was masked and the run forbids it (I6)"
                )
                continue
            mine = (sample.tokens, sample.logprobs, sample.raw_logprobs)
            assert mine == payload(sample.sample_id), f"sample {sample.sample_id} has others' tokens (I1)"
            assert sample.finish == finish_at(sample.sample_id, goal(sample.sample_id)), (
                f"sample {sample.sample_id}: {sample.finish}"
            )
        if self.ahead and group.purpose == "train":
            standing = self.truth.standing(self.truth.runs[self.campaign.run])
            used = {version for s in group.samples if s.error is None for version, _, _ in s.versions}
            assert used <= standing, f"group {group.group_id} was generated by weights taken back (I3)"
        else:
            made_with = self.truth.root_of_group(group.group_id)
            assert made_with == self.root(), f"group {group.group_id} was generated by other weights (I3, I4)"
        self.have[group.group_id] = group
        self._collected()

    def _collected(self) -> None:
        if self.phase == "collect" and set(self.submitted) <= self.have.keys():
            self.phase = "commit"

    def _answered(self, body: CallBody, reply: Message) -> bool:
        if isinstance(reply, Denied):
            return self._denied(body, reply)
        match body:
            case OpenRun():
                assert isinstance(reply, RunOpened)
                self.attempt, self.next_version, self.phase = reply.attempt, reply.next_version, "publish"
            case PublishVersion():
                assert self.truth.published(self.campaign.run, body.version), (
                    "a version was answered before its commit (I2)"
                )
                self.version, self.next_version, self.published = body.version, body.version + 1, body
                self.phase, self.purpose = "submit", "train"
                if self.step % 3 == 0 and self.step not in self.evaluated:
                    self.purpose = "eval"
            case SubmitGroups():
                assert isinstance(reply, Accepted)
                if self.purpose == "eval":
                    self.submitted, self.phase = reply.group_ids, "collect"
                else:
                    self.asked[body.step] = reply.group_ids
                    if self.step + self.ahead not in self.asked:
                        return False  # one more is submitted first
                    self.submitted, self.phase = self.asked[self.step], "collect"
                kept = {*self.submitted, *(i for ids in self.asked.values() for i in ids)}
                self.have = {i: g for i, g in self.have.items() if i in kept}
                self._collected()
            case ReportAgreement():
                assert isinstance(reply, Suspects)
                self.suspects = {one.worker_id for one in reply.suspects}
                assert self.suspects <= self.truth.wrong, "a healthy engine was set aside"
                self.reported = True
            case CommitStep():
                assert isinstance(reply, Ok)
                self._committed()
            case RecordCheckpoint() if self.job == self.campaign.jobs and body.step > max(self.campaign.kept):
                self.campaign.kept = [*self.campaign.kept, body.step][
                    -3:
                ]  # what a fenced trainer wrote is set aside
            case CloseRun():
                self.phase = "over"
        return False

    def _committed(self) -> None:
        assert self.truth.taken(self.campaign.run, self.purpose, self.step), (
            "a step was answered before its commit (I2)"
        )
        for group_id in self.submitted:
            self.have.pop(group_id, None)
        self.submitted, self.reported = (), False
        if self.purpose == "eval":
            self.evaluated.add(self.step)
            self.phase, self.purpose = "submit", "train"
            return
        self.asked.pop(self.step, None)
        self.step, self.phase = self.step + 1, "publish"
        self.steps_done += 1

    def _denied(self, body: CallBody, denied: Denied) -> bool:
        if denied.code == "detached":
            return True
        expected = denied.code == "unknown-run" or self._fenced_opening(body) or self._closed(denied)
        assert expected, f"{type(body).__name__} of attempt {self.attempt} was denied: {denied}"
        self.dead = (
            True  # opened on a daemon that died before its commit, or fenced by a repeat of its own opening
        )
        return False

    def _fenced_opening(self, body: CallBody) -> bool:
        """It resumes at a checkpoint beyond what another attempt rewound to meanwhile."""
        return isinstance(body, OpenRun)

    def _closed(self, denied: Denied) -> bool:
        return "ended" in denied.reason

    def checkpoint(self) -> None:
        """Of the last committed step, as soon as nothing else is under way."""
        self.wants_checkpoint = True
