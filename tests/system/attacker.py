"""What a user of a site tries against another user's run: a program that test_site_users.py runs as that user, on the hosts of the site.

    attacker.py pose PUBLIC FACTS        as the victim's trainer and engines, with the attacker's own accepted key
    attacker.py forge PUBLIC FACTS       the victim's ids in calls, leases and tokens of a run of the attacker's own
    attacker.py raw PUBLIC               without a key, or with one that nobody accepted
    attacker.py host FACTS               the host's processes, signals, memory, sockets and temporary files
    attacker.py flood PUBLIC SECONDS     whatever its own key can send, as fast as it goes

FACTS is JSON with what an attacker could only guess: the run's name, ids of samples, groups and leases, its engines' names. Prints JSON:
what each attempt was answered with; `got` is what the attacker should not have.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from scavenger.client import Client, Connection
from scavenger.config import RunConfig
from scavenger.errors import Refused, WireError
from scavenger.protocol import keys, messages
from scavenger.weights import manifest as manifests
from scavenger.weights import protocol

SPEC = messages.EngineSpec("reference", "{}", "float32", 1, 24)
TOKEN = b"\1" * protocol.TOKEN_NBYTES


def calls_for(facts: dict[str, Any]) -> list[messages.CallBody]:
    """Every call that a trainer has, about the victim's groups, samples and engines."""
    groups, samples = tuple(facts["groups"]), facts["samples"]
    outcomes = tuple(messages.SampleOutcome(one, "consumed", 0.0, 0.0) for one in samples)
    prompt = messages.GroupSpec(999, messages.pack_tokens([1, 2, 3]), 1, messages.Sampling(4))
    source = messages.WeightSource("tcp://127.0.0.1:1", "", TOKEN)
    return [
        messages.Attach(facts["run"], groups, groups),
        messages.PublishVersion(10**6, 0, b"\2" * 32, b"manifest", (source,)),
        messages.SubmitGroups(facts["step"], facts["version"], "train", (prompt,)),
        messages.SetReserved(False, 10**6),
        messages.EndReserved(tuple(facts["engines"]), "gone"),
        messages.CommitStep(facts["step"], facts["version"], "train", outcomes, {}),
        messages.RecordCheckpoint(facts["step"], facts["version"], b"\2" * 32, "/nowhere", ()),
        messages.Ping(),
        messages.CloseRun("stopped", "by another"),
    ]


def ask(connection: Connection, run: str, attempt: int, body: messages.CallBody) -> str:
    """The code of the refusal, or the kind of the reply; "silence" after 10 s."""
    number = connection.send(run, attempt, body)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        message = connection.receive(0.5)
        if isinstance(message, messages.Rejected):
            return f"rejected: {message.reason}"
        if isinstance(message, messages.Reply) and message.id == number:
            return getattr(message.body, "code", type(message.body).__name__)
    return "silence"


def run_config(name: str) -> RunConfig:
    document = {
        "run": {"name": name, "steps": 1, "state_dir": "/s", "out_dir": "/o", "harvest": False},
        "model": {"path": "/m", "context_length": 24},
        "sampling": {"max_tokens": 8},
    }
    return RunConfig.model_validate(document)


@contextlib.contextmanager
def dealer(public: Path, pair: keys.KeyPair | None) -> Iterator[zmq.Socket[bytes]]:
    """A socket to the daemon as `pair`; None: without CURVE."""
    rendezvous = keys.read_rendezvous(public)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    if pair is not None:
        keys.secure(made, rendezvous.server_key, pair)
    made.connect(rendezvous.endpoint)
    try:
        yield made
    finally:
        made.close()
        context.term()


def hello(run: str, kind: str, facts: dict[str, Any], slot: str = "") -> messages.WorkerHello:
    return messages.WorkerHello(
        protocol=messages.PROTOCOL,
        kind=kind,
        run=run,
        session=secrets.token_hex(8),
        incarnation=9,
        job_id=facts["job"],
        node=facts["node"],
        gpus=1,
        engine="reference",
        code_version="x",
        pid=1,
        held=tuple(messages.Held(sample, epoch, 0) for sample, epoch in facts["leases"]),
        slot=slot,
    )


def heard(made: zmq.Socket[bytes], seconds: float) -> list[messages.Message]:
    """Everything that comes within so many seconds."""
    found: list[messages.Message] = []
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if made.poll(int(left * 1000)):
            frame = made.recv()
            try:
                found.append(messages.decode_to_worker(frame))
            except WireError:
                found.append(messages.decode_to_trainer(frame))
    return found


def pose(public: Path, facts: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    pair = keys.read_keypair(keys.key_path_for(public))
    with Connection.connect(public) as connection:
        for body in calls_for(facts):
            for attempt in (0, 1, 2):
                answers[f"{type(body).__name__} {attempt}"] = ask(connection, facts["run"], attempt, body)
    with Client.connect(public, connect_timeout_s=10.0) as client:
        try:
            client.open_run(run_config(facts["run"]), engine=SPEC, tokenizer="", resume_step=0)
            answers["OpenRun"] = "opened"
        except Refused as error:
            answers["OpenRun"] = f"refused: {error.cause}"
    for kind in ("reserved", "harvested"):
        for slot in ("", *facts["slots"]):
            with dealer(public, pair) as made:
                made.send(messages.encode(hello(facts["run"], kind, facts, slot)))
                said = [type(one).__name__ for one in heard(made, 2.0)]
                answers[f"hello {kind} {slot}"] = " ".join(said)
    return answers


def forge(public: Path, facts: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    pair = keys.read_keypair(keys.key_path_for(public))
    theirs = set(facts["samples"])
    with Client.connect(public, connect_timeout_s=20.0) as client:
        run = client.open_run(run_config("mine"), engine=SPEC, tokenizer="", resume_step=0)
        manifest, _ = manifests.build(1, {"w": ("float32", (4,), memoryview(bytes(16)))})
        run.publish(0, manifest, messages.WeightSource("tcp://127.0.0.1:1", "", TOKEN))
        run.submit(1, 1, [messages.GroupSpec(0, messages.pack_tokens([1, 2]), 1, messages.Sampling(8))])
        with dealer(public, pair) as made:
            made.send(messages.encode(hello("mine", "reserved", facts, facts["slots"][0])))
            said = heard(made, 2.0)
            answers["hello of its own run"] = " ".join(type(one).__name__ for one in said)
            for sample, epoch in facts["leases"]:
                for offset in (0, 1, 5):
                    word = messages.pack_tokens([3]), messages.pack_logprobs([-0.5])
                    chunk = messages.Chunk(
                        sample, epoch, offset, facts["version"], word[0], word[1], word[1], "stop"
                    )
                    made.send(messages.encode(messages.Chunks((chunk,))))
            held = tuple(messages.Held(sample, epoch, 1) for sample, epoch in facts["leases"])
            made.send(messages.encode(messages.Heartbeat(held, 1, facts["version"])))
            said += heard(made, 4.0)
            leased = [lease for one in said if isinstance(one, messages.Assign) for lease in one.leases]
            answers["got"] = [lease.sample_id for lease in leased if lease.sample_id in theirs]
        for body in calls_for(facts):
            if not isinstance(body, messages.CloseRun):
                name = type(body).__name__
                try:
                    answers[f"mine: {name}"] = type(run.call(body)).__name__
                except Refused as error:
                    answers[f"mine: {name}"] = f"refused: {error.cause}"
        answers["got"] += [group.group_id for group in run.poll(3.0)]
        run.close_run("stopped")
    return answers


def raw(public: Path) -> dict[str, Any]:
    host, _, port = keys.read_rendezvous(public).endpoint.removeprefix("tcp://").rpartition(":")
    call = messages.encode(messages.Call(1, "x", 0, messages.Ping()))
    answers: dict[str, Any] = {}
    for name, pair in (("no CURVE", None), ("a key that nobody accepted", keys.generate())):
        with dealer(public, pair) as made:
            with contextlib.suppress(zmq.Again):
                made.send(call, zmq.NOBLOCK)
            answers[name] = "answered" if made.poll(3000) else "nothing"
    for name, data in (
        ("garbage", secrets.token_bytes(65536)),
        ("half a greeting", b"\xff\0\0\0\0\0\0\0\1\x7f\3"),
    ):
        with socket.create_connection((host, int(port)), 5.0) as sock:
            answers[name] = len(everything(sock, data))  # a greeting of ZMTP has 64 bytes and says nothing
    return answers


def everything(sock: socket.socket, data: bytes) -> bytes:
    """What comes back within two seconds."""
    found = b""
    sock.settimeout(2.0)
    with contextlib.suppress(OSError):
        sock.sendall(data)
        while part := sock.recv(65536):
            found += part
    return found


def requests() -> list[bytes]:
    """Requests for weights with proofs of a token that is none of the run's, with none, and with a proof's worth of chance."""
    wrong = [make(TOKEN) for make in (lambda t: protocol.get(t, 1, 0), lambda t: protocol.have(t, 1))]
    wrong += [protocol.map_(TOKEN, version) for version in range(3)]
    for version in range(12):
        for proof in (b"", secrets.token_bytes(16)):
            asked = (
                protocol.Have(version, proof),
                protocol.Map(version, proof),
                protocol.Reach(version, proof),
                protocol.Get(version, 0, proof),
            )
            wrong += [msgspec.msgpack.encode(one) for one in asked]
    return [len(one).to_bytes(4, "little") + one for one in wrong]


def judge(answer: bytes) -> str:
    """What a port of weights said: "refused", which is all that an unproven request may get, or "given"; "" where it is none."""
    if answer == b"\0":  # to `Map`: no descriptor follows
        return "refused"
    size = int.from_bytes(answer[:4], "little")
    try:
        reply = protocol.decode_reply(memoryview(answer[4 : 4 + size]))
    except WireError:
        return ""
    return "refused" if isinstance(reply, protocol.NoSuch) else "given"


def listening() -> list[tuple[str, int]]:
    """TCP ports of this host that somebody listens on."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        address, port = words[1].split(":")
        if words[3] == "0A":
            host = socket.inet_ntoa(struct.pack("<I", int(address, 16)))
            found.append(("127.0.0.1" if host == "0.0.0.0" else host, int(port, 16)))
    return sorted(set(found))


def abstract_sockets() -> list[str]:
    names = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if "@" in line}
    return sorted(name for name in names if name.startswith("@scavenger-weights"))


def attempts_on(folder: Path) -> dict[str, Callable[[], object]]:
    """What may be tried on a process, by its folder in /proc."""
    pid = int(folder.name)
    return {
        "its environment": (folder / "environ").read_bytes,
        "its maps": (folder / "maps").read_bytes,
        "its memory": lambda: (folder / "mem").open("rb").close(),
        "its descriptors": lambda: list((folder / "fd").iterdir()),
        "its working directory": lambda: list((folder / "cwd").iterdir()),
        "stopping it": lambda: os.kill(pid, signal.SIGSTOP),
        "slowing it": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
    }


def on_host(facts: dict[str, Any]) -> dict[str, Any]:
    got: list[str] = []
    tried = {"processes": 0, "ports": 0, "local sockets": 0, "files": 0}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid not in facts["uids"]:
                continue
        except OSError:
            continue
        tried["processes"] += 1
        for name, attempt in attempts_on(folder).items():
            with contextlib.suppress(PermissionError, FileNotFoundError, ProcessLookupError):
                attempt()
                got.append(f"{folder}: {name}")
    frames, weights = requests(), 0
    for host, port in listening():
        for frame in frames:
            tried["ports"] += 1
            said = ""
            with contextlib.suppress(OSError), socket.create_connection((host, port), 2.0) as sock:
                sock.settimeout(1.0)
                sock.sendall(frame)
                said = judge(sock.recv(4096))
            if said == "given":
                got.append(f"port {port}")
            if not said:
                break  # no port of weights: Slurm's, MPI's or torch's
        weights += said == "refused"
    for name in abstract_sockets():
        for frame in frames:
            tried["local sockets"] += 1
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(1.0)
                sock.connect("\0" + name[1:])
                sock.sendall(frame)
                answer, descriptors, _flags, _address = socket.recv_fds(sock, 4096, 4)
                if descriptors or judge(answer) == "given":
                    got.append(f"{name}: {answer[:80]!r} {descriptors}")
    for folder in map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run")):
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file() and path.stat().st_uid in facts["uids"]:
                    tried["files"] += 1
                    path.read_bytes()
                    got.append(str(path))
    return {"got": got, "ports of weights": weights, **tried}


def flood(public: Path, seconds: float) -> dict[str, Any]:
    """From eight connections: pings, garbage, large submissions, greetings; nothing is read. Besides, connections without a key."""
    pair = keys.read_keypair(keys.key_path_for(public))
    rendezvous = keys.read_rendezvous(public)
    host, _, port = rendezvous.endpoint.removeprefix("tcp://").rpartition(":")
    group = messages.GroupSpec(1, bytes(4 * 20_000), 8, messages.Sampling(4))
    frames = [
        messages.encode(messages.Call(1, "flood", 0, messages.Ping())),
        secrets.token_bytes(2000),
        messages.encode(messages.Call(2, "flood", 1, messages.SubmitGroups(1, 1, "train", (group,)))),
        messages.encode(messages.Call(3, f"flood-{secrets.token_hex(4)}", 0, messages.CloseRun("stopped"))),
    ]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = []
    for _ in range(8):
        one = context.socket(zmq.DEALER)
        one.setsockopt(zmq.LINGER, 0)
        keys.secure(one, rendezvous.server_key, pair)
        one.connect(rendezvous.endpoint)
        made.append(one)
    sent = opened = 0
    idle: list[socket.socket] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for one in made:
            for frame in frames:
                with contextlib.suppress(zmq.Again):
                    one.send(frame, zmq.NOBLOCK)
                    sent += 1
        if len(idle) < 300:
            with contextlib.suppress(OSError):
                idle.append(socket.create_connection((host, int(port)), 1.0))
                opened += 1
    for one in made:
        one.close()
    context.term()
    return {"sent": sent, "opened": opened}


def main() -> None:
    what, *words = sys.argv[1:]
    match what:
        case "pose":
            said = pose(Path(words[0]), json.loads(words[1]))
        case "forge":
            said = forge(Path(words[0]), json.loads(words[1]))
        case "raw":
            said = raw(Path(words[0]))
        case "host":
            said = on_host(json.loads(words[0]))
        case _:
            said = flood(Path(words[0]), float(words[1]))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
