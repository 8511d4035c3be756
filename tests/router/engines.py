"""Workers on a bench: the real `scavenger.protocol.worker.session.Session` over a link without a network,
with an engine that knows every answer.

An answer depends on its sample alone, so that what arrives at the trainer can be compared whoever generated it, in how many pieces.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache

from rollout.engines.speculation.groups import Groups, group_of
from scavenger.protocol.kv import KvBinding
from scavenger.protocol.messages import (
    Chunk,
    Chunks,
    LendSlots,
    SiblingTokens,
    WeightSource,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)
from scavenger.protocol.worker import events as ev
from scavenger.protocol.worker.events import (
    Delta,
    Request,
    WorkerAction,
    WorkerEvent,
    WorkerIdentity,
    WorkerPhase,
)
from scavenger.protocol.worker.session import Session
from scavenger.protocol.worker.work import WorkerLease
from tests.router import blocks, drafts
from tests.router.blocks import KeptBlocks
from tests.router.links import Link

MAX_TOKENS = 8
STOP = 0
LIMITS = ev.WorkerLimits(orphan_s=120.0)


def goal(sample_id: int) -> int:
    """Length of a sample's whole answer."""
    return 1 + (sample_id * 5) % MAX_TOKENS


@lru_cache(maxsize=4096)
def answer(sample_id: int) -> tuple[int, ...]:
    """A sample's whole answer: ends with the stop token, unless it uses its budget up."""
    n = goal(sample_id)
    tokens = [1 + (sample_id * 31 + i * 7) % 96 for i in range(n)]
    return tuple(tokens if n == MAX_TOKENS else [*tokens[:-1], STOP])


@lru_cache(maxsize=4096)
def payload(sample_id: int) -> tuple[bytes, bytes, bytes]:
    """The answer as the wire has it: tokens, logprobs, raw logprobs."""
    tokens = answer(sample_id)
    return (
        pack_tokens(tokens),
        pack_logprobs([-0.5 - t for t in tokens]),
        pack_logprobs([-0.25 - t for t in tokens]),
    )


def finish_at(sample_id: int, length: int) -> str | None:
    if length < goal(sample_id):
        return None
    return "length" if length == MAX_TOKENS else "stop"


class WatchedSession(Session):
    """Tells which phase followed which, a phase that follows itself included."""

    entered: Callable[[WorkerPhase, WorkerPhase], None] = staticmethod(lambda _before, _after: None)

    def _enter(self, phase: WorkerPhase) -> None:
        before = self.phase
        super()._enter(phase)
        self.entered(before, phase)


class SimWorker:
    """One worker process. `todo`: what its driver was asked and has not done yet; ops decide when it does, and whether it works."""

    def __init__(
        self,
        name: int,
        identity: WorkerIdentity,
        intent: str,
        now: float,
        entered: Callable[[WorkerPhase, WorkerPhase], None],
    ) -> None:
        self.name, self.identity, self.intent, self.clock = name, identity, intent, now
        self.session = WatchedSession(identity, LIMITS, now)
        self.session.entered = entered  # type: ignore[method-assign]
        self.link: Link | None = None
        self.todo: deque[WorkerAction] = deque([ev.Connect(0.0)])
        self.requests: dict[int, tuple[int, int]] = {}  # handle -> (sample, length)
        self.groups = Groups()
        self.hears = False  # it was told what siblings said elsewhere: from then on it drafts
        self.told: deque[SiblingTokens] = deque(maxlen=12)  # what its daemon sent it for that
        self.drafted = self.accepted = 0
        self.moves_kv = False
        self.kept: dict[int, KeptBlocks] = {}  # KV blocks of samples that left, by number
        self.fate: deque[str] = deque()  # of the next blocks that it reads
        self.read: Callable[[WeightSource, int, str], KeptBlocks | None] = lambda _source, _number, _fate: (
            None
        )
        self.moves: Counter[str] = Counter()  # what came of the blocks that leases named
        self.stopped = False
        self.left: ev.EndWorker | None = None
        self.built = False
        self.awake = True  # its engine has its memory
        self.spawned = 0  # when, among all of its world
        self.said: deque[Chunks] = deque(maxlen=12)
        self.root: bytes = b""
        self.lends: LendSlots | None = None  # the last order of a loan that came

    @property
    def run(self) -> str:
        return self.identity.run

    def feed(self, event: WorkerEvent) -> None:
        if self.left is None:
            for action in self.session.handle(event, self.clock):
                self._perform(action)

    def _perform(self, action: WorkerAction) -> None:
        match action:
            case ev.SendMessage(message=message):
                if self.link is not None:
                    self.link.up.append(message)
                if isinstance(message, Chunks):
                    self.said.append(message)
            case ev.Add(request=request):
                self._add(request)
            case ev.KeepKv():
                self._keep(action)
            case ev.DropTurnKv(numbers=numbers):
                for number in numbers:
                    self.kept.pop(number, None)
            case ev.LeaveKv(wanted=wanted):
                assert not wanted, "these schedules have no turns: test_kv_turn_schedules"
            case ev.Abort(handles=handles):
                for handle in handles:
                    self._end(handle)
            case ev.HearSiblings(said=said, over=over):
                self.hears = True
                for one in said:
                    name = group_of(one.group.key, one.group.prompt)
                    self.groups.hear(name, one.group.prompt, one.index, one.offset, one.token_ids)
                for group in over:
                    self.groups.drop(group_of(group.key, group.prompt))
            case ev.Connect():
                if self.link is not None:
                    self.link.old, self.link = True, None
                self.todo = deque([action, *(a for a in self.todo if not isinstance(a, ev.Connect))])
            case ev.LoadWeights():
                self._end(*self.requests)
                self.todo = deque([*(a for a in self.todo if not isinstance(a, ev.LoadWeights)), action])
            case ev.Build():
                self.built = True
                if self.moves_kv:
                    self.feed(ev.Built(0, 0, blocks.source_of(self.name), blocks.TOKEN_NBYTES))
            case ev.SleepEngine():
                self._end(*self.requests)
                self.todo.append(action)
            case ev.WakeEngine():
                self.todo.append(action)
            case ev.Lend(order=order):
                self.lends = order
            case ev.EndWorker():
                self.left = action
            case ev.LogNote() | ev.MoreHolders() | ev.PullWeights():  # a load here is one step, from whomever
                pass
            case _:
                raise AssertionError(f"the session asked for {action}")

    def _add(self, request: Request) -> None:
        held = self.session.work.leases.of_handle(request.handle)
        assert held is not None, "the engine was given a request of no lease"
        sample_id, base = held.lease.sample_id, len(request.accepted)
        assert request.accepted == answer(sample_id)[:base], (
            f"sample {sample_id}: moved without its own tokens (I6)"
        )
        assert base + request.max_new_tokens == MAX_TOKENS, (
            f"sample {sample_id}: the budget changed with the lease (I5)"
        )
        self.requests[request.handle] = (self._brings(request, held), base)
        name = group_of(request.key, request.prompt)
        self.groups.enter(request.handle, name, request.key.index, request.prompt, request.accepted)

    def _bound(self, held: WorkerLease, history: str, tokens: tuple[int, ...]) -> KvBinding:
        work = self.session.work
        return blocks.binding(self.run, history, held.lease.version, work.loaded_root, tokens)

    def _keep(self, order: ev.KeepKv) -> None:
        held = self.session.work.leases.of_handle(order.handle)
        assert held is not None, "the blocks of no lease are to be kept"
        sample_id = held.lease.sample_id
        text = (*unpack_tokens(held.lease.prompt), *answer(sample_id))[: order.tokens]
        assert len(text) == order.tokens, "more blocks are to be kept than there are"
        self.kept[order.handle] = blocks.blocks_of(self._bound(held, order.history, text), text)

    def _brings(self, request: Request, held: WorkerLease) -> int:
        """The sample whose blocks the engine goes on from: its own, whether it loads what it found or computes it."""
        order, own = request.kv, held.lease.sample_id
        if order is None:
            return own
        text = (*request.prompt, *request.accepted)[:-1]
        fate = self.fate.popleft() if self.fate else "kept"
        found = self.read(order.source, order.number, fate)
        why = (
            "nothing came" if found is None else blocks.fault(found, self._bound(held, request.history, text))
        )
        self.moves[why or "loaded"] += 1
        self.moves[fate] += 1
        self.feed(ev.KvLoaded(request.handle, len(text), 4 * len(text), 0.001, why))
        if found is None or why or blocks.right(found, held.lease.version, text):
            return own
        return own + 57

    def _end(self, *handles: int) -> None:
        for handle in handles:
            self.requests.pop(handle, None)
            self.groups.leave(handle)

    def _pass(self, handle: int, left: tuple[int, ...]) -> tuple[int, ...]:
        """What one pass makes of a request of which `left` is left to say."""
        draft = self.groups.draft(handle, min(drafts.MAX_DRAFT, len(left) - 1)).tokens if self.hears else ()
        made = drafts.verified(draft, left)
        self.drafted += len(draft)
        self.accepted += len(made) - 1
        self.groups.extend(handle, made)
        return made

    def generate(self, tokens: int) -> None:
        """The engine makes `tokens` passes: each yields a new token of every request, and those of its draft that were right."""
        if not self.requests or not self.session.may_generate:
            return
        deltas = []
        for handle, (sample_id, length) in list(self.requests.items()):
            new: tuple[int, ...] = ()
            for _ in range(tokens):
                if left := answer(sample_id)[length + len(new) :]:
                    new += self._pass(handle, left)
            end = length + len(new)
            finish = finish_at(sample_id, end)
            if finish is None:
                self.requests[handle] = (sample_id, end)
            else:
                self._end(handle)
            deltas.append(
                Delta(handle, new, tuple(-0.5 - t for t in new), tuple(-0.25 - t for t in new), finish)
            )
        self.session.progress += 1
        self.feed(ev.Generated(tuple(deltas)))

    def break_request(self) -> None:
        """The engine gives one request up."""
        if self.requests:
            handle = min(self.requests)
            self._end(handle)
            self.feed(ev.Generated((Delta(handle, (), (), (), error="NaN logprobs"),)))


def forged(kind: str, sample_id: int, epoch: int, version: int, accepted: int) -> Chunk:
    """What no honest worker sends: it must change nothing."""
    tokens = pack_tokens([5])
    logprobs = pack_logprobs([-1.0])
    match kind:
        case "stale epoch":
            return Chunk(sample_id, epoch - 1, accepted, version, tokens, logprobs, logprobs)
        case "other version":
            return Chunk(sample_id, epoch, accepted, version + 1, tokens, logprobs, logprobs)
        case "over budget":
            n = MAX_TOKENS + 1 - accepted
            return Chunk(sample_id, epoch, accepted, version, tokens * n, logprobs * n, logprobs * n)
        case "gap":
            return Chunk(sample_id, epoch, accepted + 1, version, tokens, logprobs, logprobs)
        case "not a number":
            nan = pack_logprobs([float("nan")])
            return Chunk(sample_id, epoch, accepted, version, tokens, nan, nan)
        case "another answer":
            return Chunk(sample_id, epoch, 0, version, pack_tokens([96 + 5]), logprobs, logprobs)
    raise AssertionError(kind)


LIES = ("stale epoch", "other version", "over budget", "gap", "not a number", "another answer")
