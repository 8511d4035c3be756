"""The generator of `ledger.py`, in a process of its own: one trainer and many engines that speak the real protocol over CURVE.

Each connection is one worker that holds many samples. Its flush is one `Chunks` message: prebuilt once from what `wire` encodes, then
patched (ids, offsets, payloads) in place, so that the generator costs little; the first message of each template is decoded again and
compared. Acks are decoded and counted sample by sample. Commands and answers are JSON lines on stdin and stdout, one answer a command.

Knows nothing of the daemon's inside.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq

from scavenger.protocol import keys, messages

CHUNK = 32
POOL = 8  # different payloads, so that no two chunks in a row are equal
SENTINEL = 0x7F0A0000
HEARTBEAT_S = 1.0


class Template:
    """A message that lists n equal parts, as bytes to patch: encoded once by `wire`, its integers widened to 32 bits."""

    def __init__(self, empty: messages.Message, part: msgspec.Struct, n: int) -> None:
        head = messages.encode(empty)
        assert head[-1] == 0x90, "the parts are the last field"
        self.head = head[:-1] + b"\xdd" + struct.pack(">I", n)
        self.encoded = msgspec.msgpack.encode(part)
        self.rows = np.tile(np.frombuffer(self.encoded, np.uint8), (n, 1))

    def at(self, sentinel: bytes) -> int:
        assert self.encoded.count(sentinel) == 1, "a sentinel is found once"
        return self.encoded.index(sentinel)

    def number(self, sentinel: int) -> int:
        return self.at(b"\xce" + struct.pack(">I", sentinel)) + 1

    def put(self, at: int, values: Any) -> None:
        self.rows[:, at : at + 4] = np.asarray(values, ">u4").reshape(-1, 1).view(np.uint8)

    def message(self) -> bytes:
        return self.head + self.rows.tobytes()


class Payloads:
    """A pool of random tokens and logprobs, shared by all connections."""

    def __init__(self, samples: int) -> None:
        rng = np.random.default_rng(7)
        shape = (POOL, samples, CHUNK)
        self.tokens = rng.integers(0, 150_000, shape).astype("<i4").view(np.uint8)
        self.logprobs = rng.uniform(-12, 0, shape).astype("<f4").view(np.uint8)
        self.raw_logprobs = rng.uniform(-12, 0, shape).astype("<f4").view(np.uint8)


class FakeEngine:
    """One connection: a worker with its leases, what it has sent and what is durable of it."""

    def __init__(
        self, context: zmq.Context[Any], spec: dict[str, Any], number: int, incarnation: int = 0
    ) -> None:
        self.number, self.pair, self.incarnation = number, spec["engines"][number], incarnation
        self.run = spec["run"]
        self.socket = connect(context, spec, self.pair)
        self.leases: dict[int, messages.Lease] = {}
        self.arrived: list[tuple[int, float]] = []  # (sample, when its Assign was here)
        self.have: dict[int, int] = {}
        self.sent = self.durable = self.sent_tokens = self.durable_tokens = self.flushes = 0
        self.under_way: list[
            tuple[int, float]
        ] = []  # (durable tokens that answer the flush, when it was sent)
        self.latencies: list[float] = []
        self.version = -1
        self.heard = 0
        self.beat_at = 0.0
        self.say(
            messages.WorkerHello(
                messages.PROTOCOL,
                "harvested",
                self.run,
                f"{number}-{incarnation}",
                incarnation,
                number + 1,
                f"n{number}",
                1,
                "bench",
                "0",
                1,
            )
        )

    def say(self, message: messages.Message) -> None:
        self.socket.send(messages.encode(message))

    def hear(self) -> None:
        """Take all that has arrived."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(messages.decode_to_worker(frame))

    def _take(self, message: messages.ToWorker) -> None:
        match message:
            case messages.Ack(durable=durable):
                have, gained = self.have, 0
                for held in durable:
                    gained += held.length - have[held.sample_id]
                    have[held.sample_id] = held.length
                self._gained(gained)
            case messages.Assign(leases=leases):
                now = time.monotonic()
                for lease in leases:
                    self.leases[lease.sample_id] = lease
                    self.have[lease.sample_id] = len(lease.accepted) // 4
                    self.arrived.append((lease.sample_id, now))
            case messages.UseWeights(version=version):
                self.version = version
                self.say(messages.WeightsLoaded(version, ROOT))
            case messages.HeartbeatAck(number=number):
                self.heard = number
            case messages.Welcome():
                pass
            case _:
                raise SystemExit(f"engine {self.number} was told {message!r}"[:500])

    def _gained(self, tokens: int) -> None:
        self.durable_tokens += tokens
        now = time.monotonic()
        while self.under_way and self.under_way[0][0] <= self.durable_tokens:
            self.latencies.append(now - self.under_way.pop(0)[1])

    def prepare(self, payloads: Payloads) -> None:
        """Build the flush of all samples held."""
        held = sorted(self.leases.values(), key=lambda lease: lease.sample_id)
        n = len(held)
        self.held, self.payloads = held, payloads
        marks = [bytes([200 + i]) * (4 * CHUNK) for i in range(3)]
        ids = (SENTINEL, SENTINEL + 1, SENTINEL + 2, SENTINEL + 3)
        flush = self.flush_template = Template(
            messages.Chunks(()), messages.Chunk(*ids, marks[0], marks[1], marks[2]), n
        )
        self.payload_at = [flush.at(mark) for mark in marks]
        self.offset_at = flush.number(ids[2])
        flush.put(flush.number(ids[0]), [lease.sample_id for lease in held])
        flush.put(flush.number(ids[1]), [lease.epoch for lease in held])
        flush.put(flush.number(ids[3]), [lease.version for lease in held])
        self.offsets = np.array([self.have[lease.sample_id] for lease in held], np.int64)
        self._verify(self._flush_bytes(), held)

    def _verify(self, message: bytes, held: list[messages.Lease]) -> None:
        pool = self.payloads
        chunks = tuple(
            messages.Chunk(
                lease.sample_id,
                lease.epoch,
                int(self.offsets[i]),
                lease.version,
                pool.tokens[0][i].tobytes(),
                pool.logprobs[0][i].tobytes(),
                pool.raw_logprobs[0][i].tobytes(),
            )
            for i, lease in enumerate(held)
        )
        assert messages.decode_to_daemon(message) == messages.Chunks(chunks), (
            "a patched message is the one that `wire` would make"
        )

    def _flush_bytes(self) -> bytes:
        template, n = self.flush_template, len(self.held)
        which = self.flushes % POOL
        pools = (self.payloads.tokens, self.payloads.logprobs, self.payloads.raw_logprobs)
        for at, pool in zip(self.payload_at, pools, strict=True):
            template.rows[:, at : at + 4 * CHUNK] = pool[which][:n]
        template.put(self.offset_at, self.offsets)
        return template.message()

    def flush(self, due: float | None = None) -> None:
        """Send the next chunk of every sample. `due`: when it should have been sent, which is when its latency begins."""
        message = self._flush_bytes()
        self.sent_tokens += CHUNK * len(self.held)
        self.under_way.append((self.sent_tokens, time.monotonic() if due is None else due))
        self.socket.send(message, copy=False)
        self.offsets += CHUNK
        self.flushes += 1

    def beat(self, now: float) -> None:
        """A heartbeat with everything held, when one is due."""
        if now - self.beat_at >= HEARTBEAT_S:
            self.beat_at = now
            lengths = zip(self.held, self.offsets.tolist(), strict=True) if self.leases else ()
            held = tuple(messages.Held(lease.sample_id, lease.epoch, length) for lease, length in lengths)
            self.say(messages.Heartbeat(held, self.flushes, self.version, 0.0, self.heard))


ROOT = b"r" * 32


def connect(context: zmq.Context[Any], spec: dict[str, Any], pair: dict[str, str]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    keys.secure(socket, spec["server_key"], msgspec.convert(pair, keys.KeyPair))
    socket.linger = 0
    socket.connect(spec["endpoint"])
    return socket


class Fleet:
    """All connections, on one thread."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.context: zmq.Context[Any] = zmq.Context()
        self.trainer = connect(self.context, spec, spec["owner"])
        self.calls = 0
        self.engines: dict[int, FakeEngine] = {}
        self.poller = zmq.Poller()
        self.payloads = Payloads(spec["samples_each"])

    # ---------------------------------------------------------------- the trainer

    def call(self, body: messages.CallBody, attempt: int = 1) -> messages.ReplyBody:
        self.calls += 1
        self.trainer.send(messages.encode(messages.Call(self.calls, self.spec["run"], attempt, body)))
        while True:
            message = messages.decode_to_trainer(self.trainer.recv())
            if isinstance(message, messages.Reply) and message.id == self.calls:
                assert not isinstance(message.body, messages.Denied), message.body
                return message.body

    def open(self, _: dict[str, Any]) -> dict[str, Any]:
        s = self.spec
        engine = messages.EngineSpec("bench", "{}", "float32", s["samples_each"], 20_000)
        self.call(
            messages.OpenRun(messages.PROTOCOL, s["run"], 0, "{}", engine, "", True, 4096, 1, 0, "h", 1), 0
        )
        self.call(
            messages.PublishVersion(
                1, 0, ROOT, b"m", (messages.WeightSource("tcp://127.0.0.1:1", "k", b"t"),)
            )
        )
        prompt = messages.pack_tokens(range(64))
        left, step = s["samples"], 1
        while left:
            groups = min(1000, left // 8)
            specs = tuple(messages.GroupSpec(i, prompt, 8, messages.Sampling(16_384)) for i in range(groups))
            self.call(messages.SubmitGroups(step, 1, "train", specs))
            left, step = left - 8 * groups, step + 1
        return {}

    # ---------------------------------------------------------------- the engines

    def join(self, command: dict[str, Any]) -> dict[str, Any]:
        """Connect engines; wait until these hold `want` samples together and their weights are loaded."""
        numbers, want = command["numbers"], command["want"]
        for number in numbers:
            self.disconnect(number)
            engine = self.engines[number] = FakeEngine(
                self.context, self.spec, number, command.get("incarnation", 0)
            )
            self.poller.register(engine.socket, zmq.POLLIN)
        mine = [self.engines[n] for n in numbers]
        self._until(lambda: all(e.version >= 0 for e in mine) and sum(len(e.leases) for e in mine) >= want)
        return {}

    def disconnect(self, number: int) -> None:
        engine = self.engines.pop(number, None)
        if engine is not None:
            self.poller.unregister(engine.socket)
            engine.socket.close()

    def _until(
        self, done: Callable[[], bool], each: Callable[[], None] = lambda: None, wait_ms: int = 50
    ) -> None:
        deadline = time.monotonic() + 120
        by_socket = {engine.socket: engine for engine in self.engines.values()}
        while not done():
            for socket, _ in self.poller.poll(wait_ms):
                by_socket[socket].hear()
            each()
            assert time.monotonic() < deadline, "the daemon answers too slowly, or not at all"

    def prepare(self, _: dict[str, Any]) -> dict[str, Any]:
        for engine in self.engines.values():
            if engine.leases:
                engine.prepare(self.payloads)
        return {"samples": [len(e.leases) for e in self.engines.values()]}

    def ingest(self, command: dict[str, Any]) -> dict[str, Any]:
        """As fast as acks come: `flushes` a connection, at most `window` of them not durable yet."""
        engines = [e for e in self.engines.values() if e.leases]
        target = {e.number: e.flushes + command["flushes"] for e in engines}
        before = sum(e.durable_tokens for e in engines)
        for e in engines:
            e.latencies.clear()

        def go_on() -> None:
            now = time.monotonic()
            for e in engines:
                if e.flushes < target[e.number] and len(e.under_way) < command["window"]:
                    e.flush()
                e.beat(now)

        cpu, thread, started = time.process_time(), time.thread_time(), time.monotonic()
        go_on()
        self._until(lambda: all(e.flushes >= target[e.number] and not e.under_way for e in engines), go_on)
        took = time.monotonic() - started
        tokens = sum(e.durable_tokens for e in engines) - before
        return {
            "took_s": took,
            "tokens": tokens,
            "cpu_s": time.process_time() - cpu,
            "thread_s": time.thread_time() - thread,
            "latencies": [x for e in engines for x in e.latencies],
        }

    def paced(self, command: dict[str, Any]) -> dict[str, Any]:
        """A flush of each connection every `every_s`, the connections evenly apart; latency counts from when a flush was due."""
        engines = [e for e in self.engines.values() if e.leases]
        for e in engines:
            e.latencies.clear()
        started = time.monotonic()
        every, count = command["every_s"], command["flushes"]
        due = {e.number: started + every * i / len(engines) for i, e in enumerate(engines)}
        target = {e.number: e.flushes + count for e in engines}
        before = sum(e.durable_tokens for e in engines)

        def go_on() -> None:
            now = time.monotonic()
            for e in engines:
                if e.flushes < target[e.number] and due[e.number] <= now:
                    e.flush(due[e.number])
                    due[e.number] += every
                e.beat(now)

        self._until(
            lambda: all(e.flushes >= target[e.number] and not e.under_way for e in engines), go_on, wait_ms=2
        )
        took = time.monotonic() - started
        return {
            "took_s": took,
            "tokens": sum(e.durable_tokens for e in engines) - before,
            "latencies": [x for e in engines for x in e.latencies],
        }

    def die(self, command: dict[str, Any]) -> dict[str, Any]:
        """These engines are gone, without a word; their samples are expected at the others."""
        self.lost = {sample for n in command["numbers"] for sample in self.engines[n].leases}
        for number in command["numbers"]:
            self.disconnect(number)
        for engine in self.engines.values():
            engine.arrived.clear()
        return {"samples": len(self.lost)}

    def moved(self, _: dict[str, Any]) -> dict[str, Any]:
        """Wait until all samples of the dead are leased at the others; when each arrived."""
        engines = list(self.engines.values())
        self._until(lambda: sum(len(e.arrived) for e in engines) >= len(self.lost), wait_ms=5)
        arrived = {sample: at for e in engines for sample, at in e.arrived}
        assert arrived.keys() == self.lost, "every lost sample was leased elsewhere, and no other"
        return {"at": sorted(arrived.values())}


def main() -> None:
    fleet = Fleet(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(fleet, command.pop("do"))(command)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
