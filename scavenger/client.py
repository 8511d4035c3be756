"""What a trainer uses, ours or another's: open a run, submit prompts, receive completed groups, publish weights, commit steps.

    with Client.connect(state_dir, key) as client:
        run = client.open_run(config, engine=spec, tokenizer=path, resume_step=0)
        run.publish(0, manifest, source)
        run.submit(1, manifest.version, groups)
        while waiting:
            for group in run.poll(timeout_s=0.1):
                ...
        run.commit(1, manifest.version, outcomes, metrics)

Synchronous, without torch, for use from one thread. A second thread tells the daemon that the process lives while the first one computes
(`protocol.heartbeat`). A call returns when the daemon has made it durable. While the daemon restarts or waits for its disk, the call reads
the rendezvous file again, reconnects and is repeated: repeating a call is safe. Knows nothing of how samples are generated.

    Client          a connection that opens runs
    Run             one attempt of a run: all that a trainer does
    Connection      the socket, to the daemon that the state directory's rendezvous file names
    ClientTimeout   after how much silence the client connects anew

Boundary: the public interface for trainers, ours and those of others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Self

import msgspec
import structlog
import zmq

from scavenger.backoff import backoff_s
from scavenger.config import RunConfig
from scavenger.errors import (
    CheckpointAhead,
    DaemonUnavailable,
    LedgerRestored,
    Refused,
    StaleAttempt,
    WireError,
)
from scavenger.protocol import keys, messages
from scavenger.protocol.heartbeat import HeartbeatThread
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest

log = structlog.get_logger()

#: The client's timeout at first, and at least: a daemon answers a ping at once.
MIN_TIMEOUT_S = 4.0
#: The timeout doubles with each connection that is given up for silence, up to this.
MAX_TIMEOUT_S = 64.0
#: A reply that has not come after this time, while other messages do, was lost.
LOST_REPLY_S = 20.0
#: How often `Run.poll` pings.
PING_S = 1.0
#: How often the log says that a daemon answers and does not commit.
STALLED_LOG_S = 60.0
#: All samples are complete at the daemon, and yet groups are missing here: attach again after this time.
MISSING_S = 3.0
#: What a call takes beside its groups.
_ENVELOPE_BYTES = 4096


class ClientTimeout:
    """After how much silence a client gives its connection up; one for all connections of the client.

    It grows, because only whole messages are heard and one group may take long over a slow link. A client that gave up after the same
    silence each time would have the group sent again each time, and never get it.
    """

    def __init__(self, now: float) -> None:
        self.limit = MIN_TIMEOUT_S
        self.heard_at = self._asked_at = self._connected_at = now

    def connected(self, now: float) -> None:
        self.heard_at = self._connected_at = now

    def asked(self, now: float) -> None:
        """A call was sent: silence is counted from here, not from before it."""
        self._asked_at = now

    def heard(self, now: float, *, group: bool) -> None:
        """A message came: the timeout is halved, to no less than twice the silence before the message.

        Not right after connecting: the reply to an Attach is short, and the group behind it may be long.
        """
        if group or now - self._connected_at > self.limit:
            self.limit = min(max(MIN_TIMEOUT_S, 2 * self.silence(now), self.limit / 2), MAX_TIMEOUT_S)
        self.heard_at = now

    def silence(self, now: float) -> float:
        return now - max(self.heard_at, self._asked_at)

    def is_lost(self, now: float, sent_at: float) -> bool:
        """Whether the reply to a call sent at `sent_at` counts as lost, though other messages come."""
        return now - sent_at > max(LOST_REPLY_S, 2 * self.limit)

    def gave_up(self) -> None:
        """A connection was given up for silence."""
        self.limit = min(2 * self.limit, MAX_TIMEOUT_S)


class Connection:
    """A DEALER socket to the daemon, under CURVE. `connect_timeout_s`: how long a daemon may be away."""

    def __init__(self, state_dir: Path, key: keys.KeyPair, connect_timeout_s: float = 600.0) -> None:
        self._state_dir = state_dir
        self._key = key
        self.connect_timeout_s = connect_timeout_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._refusals: zmq.Socket[bytes] | None = None
        self._next_id = 1
        self.generation = 0
        self.timeout = ClientTimeout(time.monotonic())
        self._rendezvous: keys.Rendezvous | None = None

    @property
    def state_dir(self) -> Path:
        """Where the daemon is looked for."""
        return self._state_dir

    @classmethod
    def connect(cls, state_dir: Path, key_path: Path | None = None, connect_timeout_s: float = 600.0) -> Self:
        """Read the key (default: the owner's) and connect. Raises `AuthError`, `DaemonUnavailable`."""
        one = cls(state_dir, keys.read_keypair(key_path or keys.key_path_for(state_dir)), connect_timeout_s)
        try:
            one.reconnect()
        except BaseException:  # a Ctrl-C too: its context would outlive it
            one.close()
            raise
        return one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._drop(linger_ms=500)
        self._context.term()

    def _drop(self, linger_ms: int) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=linger_ms)
            self._socket = None
        if self._refusals is not None:
            self._refusals.close(linger=0)
            self._refusals = None

    def reconnect(self) -> None:
        """Make a new socket to the daemon that the rendezvous file names now. Raises `DaemonUnavailable`, `AuthError`."""
        rendezvous = keys.read_rendezvous(self._state_dir)
        self._drop(linger_ms=0)
        self._socket = self._made(rendezvous)
        # Before the connection: a monitor that is made later misses the refusal.
        self._refusals = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._socket.connect(rendezvous.endpoint)
        self.generation, self._rendezvous = rendezvous.generation, rendezvous
        self.timeout.connected(time.monotonic())

    def is_silent(self) -> bool:
        """Whether to give this connection up: the timeout is over, or another daemon has announced itself."""
        silent = self.timeout.silence(time.monotonic())
        return silent > self.timeout.limit or (silent > MIN_TIMEOUT_S and self._is_elsewhere())

    def is_refused(self) -> bool:
        """Whether the daemon refused this key when the present connection was made: then no reply comes over it."""
        return self._refusals is not None and bool(self._refusals.poll(0))

    def _is_elsewhere(self) -> bool:
        try:
            return keys.read_rendezvous(self._state_dir) != self._rendezvous
        except DaemonUnavailable:
            return True

    def _open(self) -> zmq.Socket[bytes]:
        """One more socket, for another thread."""
        rendezvous = keys.read_rendezvous(self._state_dir)
        socket = self._made(rendezvous)
        socket.connect(rendezvous.endpoint)
        return socket

    def _made(self, rendezvous: keys.Rendezvous) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        keys.secure(socket, rendezvous.server_key, self._key)
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)  # completed groups wait here while the trainer computes
        return socket

    def send(self, run: str, attempt: int, body: messages.CallBody) -> int:
        """Send one call and return its id. Never waits: a call that cannot leave ends in the client's timeout."""
        assert self._socket is not None
        call = messages.Call(self._next_id, run, attempt, body)
        self._next_id += 1
        with contextlib.suppress(zmq.Again):  # after a refused key the socket takes nothing more
            self._socket.send(messages.encode(call), zmq.NOBLOCK)
        self.timeout.asked(time.monotonic())
        return call.id

    def receive(self, timeout_s: float) -> messages.ToTrainer | None:
        """The next message, or None after `timeout_s`."""
        assert self._socket is not None
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return None
        message = messages.decode_to_trainer(self._socket.recv())
        self.timeout.heard(time.monotonic(), group=isinstance(message, messages.GroupDone))
        return message


class NameUse(StrEnum):
    """Whose run has a name on a site."""

    NOBODY = "nobody"
    OURS = "ours"  # of the owner whose key asks
    ANOTHER = "another"


def ask_name(state_dir: Path, key_path: Path | None, run: str, wait_s: float = 5.0) -> NameUse:
    """Whose run is called so at the daemon that `state_dir` (or the public folder) names. Opens nothing, and changes nothing.

    Raises `Refused` where the daemon does not accept the key, `DaemonUnavailable` where no reply comes within `wait_s`, `AuthError` where
    there is no key.
    """
    with Connection.connect(state_dir, key_path) as connection:
        # No attempt has the number 0, so that of a run of ours it is refused as one of an older attempt.
        asked = connection.send(run, 0, messages.Ping(aside=True))
        by = time.monotonic() + wait_s
        while (left_s := by - time.monotonic()) > 0:
            reply = connection.receive(min(left_s, 0.2))
            if isinstance(reply, messages.Reply) and reply.id == asked:
                code = reply.body.code if isinstance(reply.body, messages.Denied) else ""
                return _NAME_USE.get(code, NameUse.OURS)
            if connection.is_refused():
                raise Refused(
                    "the daemon does not accept this key",
                    "`scavenger join PUBLIC_DIR` asks it to; a user whom the site does not let train is told so (docs/site.md)",
                )
        host = keys.read_rendezvous(state_dir).host
        raise DaemonUnavailable(
            f"the daemon on {host} did not reply within {wait_s:g} s",
            "ask the site's admin whether it runs, and whether this host may reach it",
        )


_NAME_USE = {"unknown-run": NameUse.NOBODY, "not-owner": NameUse.ANOTHER}


class Client(Connection):
    """A trainer's connection: `open_run` gives the handle of a run."""

    def __init__(self, state_dir: Path, key: keys.KeyPair, connect_timeout_s: float = 600.0) -> None:
        super().__init__(state_dir, key, connect_timeout_s)
        self._alive: list[HeartbeatThread] = []

    def close(self) -> None:
        for alive in self._alive:
            alive.stop()
        super().close()

    def open_run(
        self,
        config: RunConfig,
        *,
        engine: messages.EngineSpec,
        tokenizer: str,
        resume_step: int,
        host: str = "",
        job_id: int = 0,
    ) -> Run:
        """Become the trainer of `config.run.name`; older attempts are fenced from here on.

        Raises `Refused` when the run belongs to another key or another configuration of the ledger.
        """
        run = config.run
        body = messages.OpenRun(
            messages.PROTOCOL,
            run.name,
            run.seed,
            config.model_dump_json(),
            engine,
            tokenizer,
            run.harvest,
            run.max_engines,
            run.gpus_per_engine,
            resume_step,
            host,
            job_id,
            run.poison_after,
            run.on_poison,
            config.weights.encrypt,
            run.nodes_per_engine,
            config.algorithm.max_off_policy_steps,
            config.algorithm.on_new_version,
            config.algorithm.kv == "keep",
            config.data.curriculum_solved_at if config.data.has_curriculum else None,
            config.data.environment_jobs,
            messages.environment_file(str(run.out_dir.absolute())),
            config.other_policies,
            config.data.episodes_of or "",
            run.steps == 0,
            run.isolation,
            config.data.budget_turns,
            config.data.budget_tokens,
            config.data.budget_s,
        )
        alive = HeartbeatThread(self._open, run.name)
        self._alive.append(alive)
        alive.start()
        opening = Run(self, run.name, alive)
        try:
            answer = opening.call(body)
            if not isinstance(answer, messages.RunOpened):
                raise WireError(f"the daemon answered OpenRun with {type(answer).__name__}")
        except BaseException:
            alive.stop()
            raise
        opening.opened(answer)
        return opening


def _calls_of(groups: Sequence[messages.GroupSpec]) -> list[tuple[messages.GroupSpec, ...]]:
    """A submission in parts that one call may hold, by samples and by bytes; none is one empty part.

    A group of too many samples is the daemon's to refuse, one of too many bytes is refused when it is encoded.
    """
    parts: list[list[messages.GroupSpec]] = [[]]
    samples = nbytes = 0
    for spec in groups:
        size = len(msgspec.msgpack.encode(spec))
        if parts[-1] and (
            samples + spec.n > messages.MAX_CALL_SAMPLES
            or nbytes + size > messages.MAX_MESSAGE_BYTES - _ENVELOPE_BYTES
        ):
            parts.append([])
            samples = nbytes = 0
        parts[-1].append(spec)
        samples += spec.n
        nbytes += size
    return [tuple(part) for part in parts]


class Run:
    """One attempt of one run: the handle that `Client.open_run` gives."""

    def __init__(self, client: Client, name: str, alive: HeartbeatThread) -> None:
        self._client = client
        self._alive = alive
        self._warned_at = float("-inf")
        self.name = name
        self.run_id = self.attempt = self.last_step = 0
        self.next_version = 1
        self.ledger = ""
        self.versions: tuple[tuple[int, int, bytes], ...] = ()
        self.pass_rates: tuple[tuple[int, int, int, int], ...] = ()  # as in `RunOpened`
        self.fleet = messages.Fleet(0, 0, 0, 0, 0)
        self._arrived: list[messages.GroupDone] = []
        #: Group id -> (purpose, step), of groups received and not committed.
        self._known: dict[int, tuple[str, int]] = {}
        #: The same of groups submitted and not received.
        self._submitted: dict[int, tuple[str, int]] = {}
        #: Groups of another run's episodes: here, and not committed; of these, those that `take_deliveries` has not given.
        self._delivered: dict[int, messages.DeliveredGroup] = {}
        self._fresh: list[messages.DeliveredGroup] = []
        self._wanted: messages.WantDeliveries | None = None
        self.episodes_over = ""  # why no further delivery comes
        self._reserved: messages.SetReserved | None = None
        self.reserved_order = 0  # number of what was last said by `set_reserved`
        self._trained: messages.Trained | None = None
        self._published: dict[int, messages.PublishVersion] = {}
        self._pinged_at = self._complete_since = 0.0
        self._closing = False

    def opened(self, answer: messages.RunOpened) -> None:
        self.run_id, self.attempt, self.last_step = answer.run_id, answer.attempt, answer.last_step
        self.next_version, self.versions, self.ledger = answer.next_version, answer.versions, answer.ledger
        self.pass_rates = answer.pass_rates
        self._alive.attempt = answer.attempt

    # ---------------------------------------------------------------- what a trainer does

    def publish(self, step: int, manifest: Manifest, *sources: messages.WeightSource) -> None:
        """Offer a version, whose number is `manifest.version`, greater than all before. The two newest stay announced, and their base."""
        body = messages.PublishVersion(
            manifest.version, step, manifest.root, manifests.encode(manifest), sources, manifest.total_nbytes
        )
        self.call(body)
        self._published[manifest.version] = body
        bases = {manifests.base_of(self._published[kept].manifest) for kept in sorted(self._published)[-2:]}
        for old in sorted(self._published)[:-2]:
            if self._published[old].root not in bases:
                del self._published[old]
        self.next_version = max(self.next_version, manifest.version + 1)

    def submit(
        self, step: int, version: int, groups: Sequence[messages.GroupSpec], purpose: str = "train"
    ) -> tuple[int, ...]:
        """Have groups generated with a published version; returns their ids. Raises `Refused`, for a prompt over the context too."""
        if len({spec.prompt_index for spec in groups}) != len(
            groups
        ):  # the daemon would not see it over several calls
            raise Refused(f"step {step} names a prompt twice", "give each prompt its own prompt_index")
        ids: list[int] = []
        for part in _calls_of(groups):
            answer = self.call(messages.SubmitGroups(step, version, purpose, part))
            if not isinstance(answer, messages.Accepted):
                raise WireError(f"the daemon answered SubmitGroups with {type(answer).__name__}")
            self._submitted.update(
                {group: (purpose, step) for group in answer.group_ids if group not in self._known}
            )
            ids += answer.group_ids
        return tuple(ids)

    def poll(self, timeout_s: float) -> list[messages.GroupDone]:
        """Completed groups that were not returned before; waits up to `timeout_s` for the first.

        Keeps the connection alive: call it at least every few seconds while groups are outstanding. Raises `Refused` when the run
        was stopped (a poisoned sample, an operator), `StaleAttempt` when a newer trainer runs,
        `DaemonUnavailable` after `connect_timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._keep_alive()
            wait = 0.0 if self._arrived else min(deadline - time.monotonic(), PING_S)
            message = self._client.receive(wait)
            if message is not None:
                self._take(message)
            elif self._arrived or time.monotonic() >= deadline:
                arrived, self._arrived = self._arrived, []
                return arrived

    def deliver(
        self, policy: str, step: int, prompt_index: int, shares: Sequence[messages.EpisodeShare]
    ) -> None:
        """Hand what the policy of another run said in episodes of one group to its trainer. Repeating it changes nothing.

        Raises `Refused` where that run has ended, or the turns are not its own.
        """
        self.call(messages.Deliver(policy, step, prompt_index, tuple(shares)))

    def want_deliveries(self, step: int, count: int) -> None:
        """Have up to `count` groups of another run's episodes (`data.episodes_of`) sent for `step`, those that are here among them."""
        self._wanted = messages.WantDeliveries(step, count, tuple(self._delivered))
        self.episodes_over = ""
        self.call(self._wanted)

    def take_deliveries(self) -> list[messages.DeliveredGroup]:
        """Groups that came and were not returned before. `poll` receives them; they are here until a commit names their deliveries."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def set_reserved(self, awake: bool, bytes_held: int = 0) -> None:
        """Wake the run's reserved workers, or have them flush, sleep, and give their samples to others.

        To wake them is to say that this trainer gave back what it could of its GPUs' memory: it holds `bytes_held` yet. That they sleep is
        known once `fleet.order` is `reserved_order` and `fleet.holding` is empty: train no sooner.
        """
        self.reserved_order += 1
        self._reserved = messages.SetReserved(
            awake, self.reserved_order, bytes_held
        )  # a restarted daemon is told again
        self.call(self._reserved)

    def end_reserved(self, names: Sequence[str], reason: str) -> None:
        """Say that the processes of these reserved engines are gone: their samples move, and they hold no memory."""
        self.call(messages.EndReserved(tuple(names), messages.words(reason)))

    def trained(
        self, step: int, groups: int, tokens: int, seconds: float, scored: int = -1, reward_s: float = 0.0
    ) -> None:
        """Report progress with the next ping: `groups` whole groups of the step are trained, `tokens` in all, in `seconds`.

        With steps in advance also `scored`, the step's groups that have their rewards (-1: not said), and `reward_s`, the seconds from a
        group's arrival to its rewards: while the trainer waits for rewards, its reserved engines generate for later steps.
        """
        self._trained = messages.Trained(step, groups, tokens, seconds, scored, reward_s)

    def report_agreement(self, step: int, spans: Sequence[messages.SpanSums]) -> tuple[messages.Suspect, ...]:
        """Tell how engines agree with this trainer on samples that `step` trains (`DoneSample.spans` names them).

        Returns every worker that the daemon has set aside: no sample that holds tokens of it is to be trained.
        """
        most = messages.MAX_SPAN_SUMS
        suspects: tuple[messages.Suspect, ...] = ()
        for first in range(0, len(spans), most) or (0,):
            answer = self.call(messages.ReportAgreement(step, tuple(spans[first : first + most])))
            if not isinstance(answer, messages.Suspects):
                raise WireError(f"the daemon answered ReportAgreement with {type(answer).__name__}")
            suspects = answer.suspects
        return suspects

    def defer_late(self, step: int, groups: Sequence[int]) -> tuple[int, ...]:
        """The trainer has nothing to do but to wait for these groups of `step`: returns those that the next step is to train instead.

        None where one of them would be older than `algorithm.max_off_policy_steps` then, or where too few of the step's groups are whole.
        """
        answer = self.call(messages.DeferLate(step, tuple(groups)))
        if not isinstance(answer, messages.Deferred):
            raise WireError(f"the daemon answered DeferLate with {type(answer).__name__}")
        self._submitted.update(dict.fromkeys(answer.groups, ("train", step + 1)))
        return answer.groups

    def commit(
        self,
        step: int,
        version: int,
        outcomes: Sequence[messages.SampleOutcome],
        metrics: dict[str, float],
        purpose: str = "train",
        episodes: Sequence[messages.EpisodeOutcome] = (),
        decisions: Sequence[messages.DataDecision] = (),
        differences: Sequence[messages.TokenDifferences] = (),
        deliveries: Sequence[messages.DeliveryOutcome] = (),
    ) -> None:
        """Record that the step was taken with exactly these samples, or episodes, which end, or `deliveries` of another run's. Every
        sample of the step's groups needs an outcome. A step that was generated through the gateway alone may name none.

        `decisions`: which groups or prompts were chosen, and by what, for the ledger's `decisions`. `differences`: how far trainer and
        engine are apart at each token of some of the samples, for `token_differences`; `MAX_DIFFERENCES_BYTES` of them at most.
        """
        self.call(
            messages.CommitStep(
                step,
                version,
                purpose,
                tuple(outcomes),
                metrics,
                tuple(episodes),
                tuple(decisions),
                tuple(differences),
                tuple(deliveries),
            )
        )
        taken = {one.sample_id for one in deliveries}
        self._delivered = {
            group: one
            for group, one in self._delivered.items()
            if taken.isdisjoint(e.delivery_id for e in one.episodes)
        }
        over = (purpose, step)
        self._known = {group: of for group, of in self._known.items() if of != over}
        self._submitted = {group: of for group, of in self._submitted.items() if of != over}

    def checkpoint(
        self, step: int, version: int, root: bytes, path: str, kept: Sequence[int] | None = None
    ) -> None:
        """Record a complete checkpoint: what it covers is final.

        `kept`: the steps of all checkpoints that stay on disk, this one's too. Call this before deleting the others: what a resume from a
        kept one needs stays in the ledger. None: the ledger takes it that the newest `checkpoint.keep` are kept. Raises `Refused`.
        """
        self.call(
            messages.RecordCheckpoint(
                step, version, root, path, None if kept is None else tuple(sorted(set(kept)))
            )
        )

    def close_run(self, state: str, reason: str = "") -> None:
        """End the run ("finished" | "failed" | "stopped"): harvested engines leave at once.

        `reason`, as those of outcomes, is shown by the ledger's reports to people who may not see prompts and completions: give it
        `errors.describe(error)` rather than an error's own words.
        """
        self._closing = True
        self.call(messages.CloseRun(state, messages.words(reason)))

    # ---------------------------------------------------------------- the connection

    def call(self, body: messages.CallBody) -> messages.ReplyBody:
        """Send a call until it is answered. Raises `Refused`, `StaleAttempt`, `DaemonUnavailable`."""
        give_up = time.monotonic() + self._client.connect_timeout_s
        call_id = self._client.send(self.name, self.attempt, body)
        sent_at = time.monotonic()
        while True:
            message = self._client.receive(0.2)
            if isinstance(message, messages.Reply) and message.id == call_id:
                return self._judge(message.body)
            if message is not None:
                self._take(message)
            silent = self._client.is_silent()
            if silent:
                self._timed_out()
            if (
                silent
                or self._client.timeout.is_lost(time.monotonic(), sent_at)
                or isinstance(message, messages.HelloAgain)
            ):
                self._recover(give_up)
                call_id = self._client.send(self.name, self.attempt, body)
                sent_at = time.monotonic()

    def _timed_out(self) -> None:
        timeout = self._client.timeout
        silent = timeout.silence(time.monotonic())
        timeout.gave_up()
        log.warning(
            "nothing came from the daemon",
            run=self.name,
            silent_s=round(silent, 1),
            next_s=timeout.limit,
            cause="it is away, or its ledger waits, or one message takes longer than this to arrive: a large group over a slow link",
        )

    def _judge(self, body: messages.ReplyBody) -> messages.ReplyBody:
        if isinstance(body, messages.Denied):
            if body.code == "ahead":
                raise CheckpointAhead(body.reason, body.remedy, body.last_step)
            kind = {"stale": StaleAttempt, "restored": LedgerRestored}.get(body.code, Refused)
            raise kind(body.reason, body.remedy)
        return body

    def _take(self, message: messages.ToTrainer) -> None:
        match message:
            case messages.GroupDone(group_id=group_id):
                self._submitted.pop(group_id, None)
                if group_id not in self._known:
                    self._known[group_id] = (message.purpose, message.step)
                    self._arrived.append(message)
                    self._complete_since = time.monotonic()  # others may be on their way
            case messages.DeliveredGroup(group_id=group_id):
                if group_id not in self._delivered:
                    self._delivered[group_id] = message
                    self._fresh.append(message)
            case messages.EpisodesOver(reason=reason):
                self.episodes_over = reason
            case messages.Fleet():
                self.fleet = message
            case messages.RunStopped(reason=reason, remedy=remedy):
                if not self._closing:  # a stopped run can still be closed, which is what lets its engines go
                    raise Refused(reason, remedy)
            case messages.Rejected(reason=reason, remedy=remedy):
                raise Refused(reason, remedy)
            case messages.Reply(body=messages.Denied() as denied):
                self._judge(denied)

    def _keep_alive(self) -> None:
        """Ping, which finds a daemon that is silent or was restarted; attach again when groups are missing."""
        now = time.monotonic()
        if now - self._pinged_at < PING_S:
            return
        # The last message may be old when the trainer has not polled for a while: only what stays so while we listen counts.
        listening = now - self._pinged_at < 3 * PING_S
        self._pinged_at = now
        if not (listening and self._submitted and self.fleet.outstanding == 0):
            self._complete_since = now
        if now - self._complete_since > MISSING_S:
            self._recover(now + self._client.connect_timeout_s)
        self.call(messages.Ping(trained=self._trained))

    def _recover(self, give_up: float) -> None:
        """Reconnect, attach as this attempt, announce the weights again. Tries until `give_up` (monotonic seconds).

        A daemon that still answers pings is not away: it waits for its ledger (a full disk, say), and this waits with it.
        """
        tries = 0
        while True:
            tries += 1
            try:
                refused = self._client.is_refused()  # by the connection that fell silent
                self._client.reconnect()
                # Before OpenRun was answered there is nothing to attach: the call is repeated, until its time is over.
                if (self.attempt == 0 and not self._is_over(give_up)) or (self.attempt and self._attach()):
                    return
                refused = refused or self._client.is_refused()
                cause = (
                    "it does not accept this key: `scavenger join PUBLIC_DIR` asks it to, or its admin does (`scavenger enroll`)"
                    if refused
                    else "no answer"
                )
            except DaemonUnavailable as error:
                cause = error.cause
            if self._is_over(give_up):
                raise DaemonUnavailable(
                    f"no daemon for {self._client.connect_timeout_s:g} s: {cause}",
                    keys.absent_daemon(self._client.state_dir),
                )
            self._warn(cause)
            time.sleep(backoff_s(0.1, 2.0, tries))  # the daemon's return is not observable otherwise

    def _is_over(self, give_up: float) -> bool:
        return time.monotonic() > max(give_up, self._alive.answered_at + self._client.connect_timeout_s)

    def _warn(self, cause: str) -> None:
        now = time.monotonic()
        if now - self._alive.answered_at > 2 * MIN_TIMEOUT_S:
            log.warning("daemon away", run=self.name, cause=cause)
        elif now - self._warned_at > STALLED_LOG_S:
            self._warned_at = now
            log.warning(
                "the daemon answers but cannot commit, or what it sends is long on its way",
                run=self.name,
                remedy="look at the daemon's log: its disk may be full; else measure the link: one group may be too large for it",
            )

    def _attach(self) -> bool:
        attach = messages.Attach(self.name, tuple(self._known), tuple(self._submitted), self.ledger)
        bodies: list[messages.CallBody] = [attach, *self._published.values()]
        if self._reserved is not None:
            bodies.append(self._reserved)
        if self._wanted is not None:
            bodies.append(msgspec.structs.replace(self._wanted, have=tuple(self._delivered)))
        for body in bodies:
            call_id, sent_at = self._client.send(self.name, self.attempt, body), time.monotonic()
            while True:
                message = self._client.receive(0.2)
                if self._client.is_silent():
                    self._timed_out()
                    return False
                if self._client.timeout.is_lost(time.monotonic(), sent_at):
                    return False
                if message is None:
                    continue
                if isinstance(message, messages.Reply) and message.id == call_id:
                    if isinstance(message.body, messages.Denied) and message.body.code in (
                        "detached",
                        "unknown-run",
                    ):
                        return False
                    self._judge(message.body)
                    break
                self._take(message)
        self._complete_since = time.monotonic()
        return True
