"""What the daemon and the processes that ask Slurm for it take from each other, and for how long: no Slurm and no other user needed."""

from __future__ import annotations

import contextlib
import getpass
import pwd
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest

from scavenger.cluster import framing, job_logs
from scavenger.cluster.model import ClusterInfo, ClusterView, Job, JobLife, JobSpec, JobState, Node
from scavenger.cluster.port import Cluster, RpcCounter
from scavenger.cluster.proxy import client, server
from scavenger.cluster.proxy import messages as wire
from scavenger.errors import ClusterError, ClusterUnavailable, ConfigError, SubmitUnknown
from scavenger.protocol import keys
from tests.clusters import wait_for
from tests.proxies import served

SPEC = JobSpec("scv-a", "", "scavenge", "#!/bin/bash\n", output="/e/logs/scv-a.log", workdir="/e")


class Slurm:
    """The port of one whose cancellations take as long as the test wants."""

    def __init__(self) -> None:
        self.rpc = RpcCounter()
        self.cancelling, self.may_cancel = threading.Event(), threading.Event()
        self.may_cancel.set()

    def info(self) -> ClusterInfo:
        raise ClusterUnavailable("not asked here")

    def view(self) -> ClusterView:
        raise ClusterUnavailable("not asked here")

    def jobs(self) -> tuple[Job, ...]:
        return ()

    def submit(self, spec: JobSpec) -> int:
        return 7

    def cancel(self, job_ids: tuple[int, ...]) -> None:
        self.cancelling.set()
        assert self.may_cancel.wait(20)
        self.rpc.add({"kill": len(job_ids)})

    def requeue(self, job_id: int) -> None:
        pass

    def release(self, job_id: int, node: str) -> None:
        pass

    def accounting(self, job_ids: tuple[int, ...]) -> tuple[JobLife, ...]:
        return ()

    def close(self) -> None:
        pass


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's."""
    with tempfile.TemporaryDirectory(prefix="scv-") as made:
        yield Path(made)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def hands_of(folder: Path, slurm: Cluster) -> server.SubmitRole:
    engines = folder / "engines"
    server.prepare(engines)
    return server.SubmitRole(slurm, engines, lambda _spec: None)


def line_to(path: Path, role: wire.Role = "submit", timeout_s: float = 4.0) -> client.ProxyLine:
    return client.ProxyLine(role, path, getpass.getuser(), timeout_s)


@contextlib.contextmanager
def replying(path: Path, reply: Callable[[socket.socket], object]) -> Iterator[None]:
    """A process that another one took the place of: it takes one request and does as it likes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def take() -> None:
            taken, _ = listener.accept()
            with taken:
                taken.recv(1 << 16)
                with contextlib.suppress(OSError):
                    reply(taken)

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield
        finally:
            thread.join()


def drip(to: socket.socket, data: bytes, every_s: float = 0.05) -> None:
    """For a minute at most."""
    for number in range(min(len(data), round(60 / every_s))):
        to.sendall(data[number : number + 1])
        time.sleep(every_s)


def view_of(job: Job) -> ClusterView:
    return ClusterView(0.0, (), (job,), (), ())


def job(**changes: int) -> Job:
    fields: dict[str, int] = {"job_id": 7, **changes}
    return Job(user="e", partition="p", state=JobState.PENDING, **fields)  # type: ignore[arg-type]


def life(job_id: int) -> JobLife:
    return JobLife(job_id, "scv-a", "PREEMPTED", 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (framing.HEADER.pack(wire.MAX_REPLY_BYTES["submit"] + 1), "more than the bound"),
        (framing.HEADER.pack(4) + b"\xff" * 4, "malformed"),
        (framing.HEADER.pack(40) + b"x", "closed the connection"),
        (framing.frame(wire.ProxyAnswer(wire.SubmitReply(7))), "replies SubmitReply to Identify"),
        (framing.frame(wire.ProxyAnswer(wire.Identity("submit", "e"), {"submit": 10**12})), ""),
        (
            framing.frame(
                wire.ProxyAnswer(wire.Identity("submit", "e"), {f"made-up-{n}": 1 for n in range(9)})
            ),
            "",
        ),
    ],
    ids=["large", "malformed", "cut", "other", "counts", "names"],
)
def test_a_process_that_another_one_took_the_place_of_is_bounded(
    short: Path, sent: bytes, error: str
) -> None:
    """The engines' user may end its process and listen there itself."""
    line = client.ProxyLine("submit", short / "s", getpass.getuser(), 5.0)
    with replying(short / "s", lambda to: to.sendall(sent)):
        if error:
            with pytest.raises(ClusterUnavailable, match=error):
                line.ask(wire.Identify(), wire.Identity)
        else:
            assert line.ask(wire.Identify(), wire.Identity).user == "e"
    assert line.rpc.total == 0


@pytest.mark.parametrize(
    ("request_sent", "error"), [(wire.Identify(), ClusterUnavailable), (wire.SubmitJob(SPEC), SubmitUnknown)]
)
def test_a_reply_that_comes_byte_by_byte_holds_the_daemon_no_longer_than_its_commands_may_take(
    short: Path, request_sent: wire.Request, error: type[ClusterError]
) -> None:
    line = client.ProxyLine("submit", short / "s", getpass.getuser(), 0.5 / client.COMMANDS)
    with replying(short / "s", lambda to: drip(to, framing.HEADER.pack(4000) + b"x" * 4000)):
        began = time.monotonic()
        with pytest.raises(error, match="timed out"):
            line.ask(request_sent, wire.DoneReply)
        assert time.monotonic() - began < 30.0, "long before it would all be here"


def test_a_request_that_comes_byte_by_byte_keeps_its_room_for_a_bounded_time(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.5)
    slurm = Slurm()
    with served(short / "s", hands_of(short, slurm)) as path, socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
        began = time.monotonic()
        with contextlib.suppress(OSError):  # it is closed at the other end
            drip(asking, framing.HEADER.pack(4000) + b"x" * 4000)
        assert time.monotonic() - began < 30.0, "long before it would all be here"
        reply = framing.receive(asking, wire.answers, 1 << 20, "it", time.monotonic() + 5).reply
        assert isinstance(reply, wire.FailedReply)
        assert "timed out" in reply.cause


@pytest.mark.parametrize("job_id", [0, -1, 2**32, 2**64 - 1])
def test_a_job_id_that_slurm_never_gives_is_no_reply(short: Path, job_id: int) -> None:
    """The ledger could not hold the largest of them, which would end the daemon."""
    sent = framing.frame(wire.ProxyAnswer(wire.SubmitReply(job_id)))
    with replying(short / "s", lambda to: to.sendall(sent)), pytest.raises(SubmitUnknown, match="malformed"):
        line_to(short / "s").ask(wire.SubmitJob(SPEC), wire.SubmitReply)


NODE = Node("n", frozenset(), frozenset(), "", 2**64 - 1, 0, 1, 0, 1, 0)


@pytest.mark.parametrize(
    "reply",
    [
        wire.JobsReply((job(job_id=2**64 - 1),)),
        wire.JobsReply((job(job_id=0),)),
        wire.JobsReply((job(restart_count=2**64 - 1),)),
        wire.JobsReply((job(gpus=-1),)),
        wire.ViewReply(view_of(job(job_id=2**64 - 1))),
        wire.ViewReply(ClusterView(0.0, (NODE,), (), (), ())),
        wire.AccountingReply((life(2**64 - 1),)),
    ],
)
def test_what_role_view_counts_is_bounded_too(short: Path, reply: wire.Reply) -> None:
    sent = framing.frame(wire.ProxyAnswer(reply))
    with (
        replying(short / "s", lambda to: to.sendall(sent)),
        pytest.raises(ClusterUnavailable, match="malformed"),
    ):
        line_to(short / "s", "view").ask(wire.GetView(), type(reply))


def test_the_largest_job_id_of_a_federation_is_a_reply(short: Path) -> None:
    sent = framing.frame(wire.ProxyAnswer(wire.JobsReply((job(job_id=63 << 26),))))
    with replying(short / "s", lambda to: to.sendall(sent)):
        [one] = line_to(short / "s", "view").ask(wire.GetJobs(), wire.JobsReply).jobs
    assert one.job_id == 63 << 26


def test_the_engines_user_is_looked_up_once(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory service that fails later would otherwise end the daemon, with a status that systemd does not restart."""
    with pytest.raises(ConfigError, match="no user 'scv-nobody'"):
        client.ProxyLine("submit", short / "s", "scv-nobody", 1.0)
    line = line_to(short / "s")

    def fails(name: str) -> pwd.struct_passwd:
        raise KeyError(name)

    with served(short / "s", hands_of(short, Slurm())):
        monkeypatch.setattr(pwd, "getpwnam", fails)
        line.ask(wire.CancelJobs((1,)), wire.DoneReply)
    with pytest.raises(ClusterUnavailable, match="does not answer"):
        line.ask(wire.CancelJobs((1,)), wire.DoneReply)


def test_a_submission_that_was_never_sent_is_refused_and_no_job_is_looked_for(short: Path) -> None:
    line = line_to(short / "s")
    with pytest.raises(ClusterError, match="does not answer") as found:
        line.ask(wire.SubmitJob(SPEC), wire.SubmitReply)
    assert type(found.value) is ClusterError
    assert found.value.remedy == "systemctl status scavenger-slurm-submit"
    with pytest.raises(ClusterUnavailable):
        line.ask(wire.CancelJobs((1,)), wire.DoneReply)


def test_a_socket_whose_queue_is_full_is_tried_until_a_connection_is_taken(
    short: Path, pool: ThreadPoolExecutor
) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as others:
        listener.bind(str(short / "s"))
        listener.listen(0)
        waiting = 0
        while True:  # other users' connections, until the kernel takes no more
            other = others.enter_context(socket.socket(socket.AF_UNIX))
            other.setblocking(False)
            try:
                other.connect(str(short / "s"))
            except BlockingIOError:
                break
            waiting += 1
        asked = pool.submit(line_to(short / "s").ask, wire.CancelJobs((1,)), wire.DoneReply)
        with pytest.raises(TimeoutError):
            asked.result(0.3)  # it neither failed nor was it served
        for _ in range(waiting):
            listener.accept()[0].close()
        taken, _ = listener.accept()
        with taken:
            taken.recv(1 << 16)
            taken.sendall(framing.frame(wire.ProxyAnswer(wire.DoneReply())))
            assert isinstance(asked.result(20), wire.DoneReply)
        for _ in range(waiting + 1):
            others.enter_context(contextlib.closing(dial(short / "s")))
        line = line_to(short / "s", timeout_s=0.1)
        with pytest.raises(ClusterUnavailable, match="does not answer"):  # after a bounded time
            line.ask(wire.CancelJobs((1,)), wire.DoneReply)


def dial(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        sock.connect(str(path))
    return sock


class Hangs:
    """In place of a function that touches files, on a file system that does not answer."""

    def __init__(self) -> None:
        self.entered, self.back = threading.Semaphore(0), threading.Event()

    def __call__(self, *_args: object) -> None:
        self.entered.release()
        assert self.back.wait(20)


def test_a_file_system_that_hangs_takes_neither_the_room_of_a_cancellation_nor_a_second_tidying(
    short: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = Hangs()
    monkeypatch.setattr(job_logs, "bound", hangs)
    with served(short / "s", hands_of(short, Slurm())) as path:
        engines = client.EnginesUser(line_to(path), short / "engines")
        first = pool.submit(engines.tidy, (), 2**20)
        try:
            assert hangs.entered.acquire(timeout=10)
            with pytest.raises(ClusterUnavailable, match="another Tidy is busy"):
                client.EnginesUser(line_to(path, timeout_s=0.4), short / "engines").tidy((), 2**20)
            assert engines.end_of_log("scv-a") == b""
            line_to(path).ask(wire.CancelJobs((1,)), wire.DoneReply)
        finally:
            hangs.back.set()
        first.result(10)
        engines.tidy((), 2**20)


def test_requests_at_files_that_hang_leave_room_for_slurm(
    short: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = Hangs()
    monkeypatch.setattr(keys, "write_keypair", hangs)
    pair = keys.generate("run", "scv-a")
    with served(short / "s", hands_of(short, Slurm())) as path:
        engines = client.EnginesUser(line_to(path), short / "engines")
        waiting = [pool.submit(engines.put_key, pair) for _ in range(server.MOST_AT_FILES)]
        try:
            for _ in waiting:
                assert hangs.entered.acquire(timeout=10)
            with pytest.raises(ClusterUnavailable, match="4 requests are busy"):
                client.EnginesUser(line_to(path, timeout_s=0.4), short / "engines").put_key(pair)
            line_to(path).ask(wire.CancelJobs((1,)), wire.DoneReply)
        finally:
            hangs.back.set()
        for one in waiting:
            one.result(10)
        engines.put_key(pair)


def test_without_room_a_request_is_turned_away_at_once_and_a_submission_is_refused(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_CLIENTS", 1)
    line = line_to(short / "s", timeout_s=0.6)
    with served(short / "s", hands_of(short, Slurm())) as path, socket.socket(socket.AF_UNIX) as idle:
        idle.connect(str(path))
        with pytest.raises(ClusterUnavailable, match="1 others are under way"):
            line.ask(wire.CancelJobs((1,)), wire.DoneReply)
        with pytest.raises(ClusterError, match="1 others are under way") as found:
            line.ask(wire.SubmitJob(SPEC), wire.SubmitReply)
        assert type(found.value) is ClusterError, "there is no job to look for"
        idle.close()
        wait_for("there is room again", partial(_cancels, line), 10.0)


def _cancels(line: client.ProxyLine) -> bool:
    with contextlib.suppress(ClusterUnavailable):
        line.ask(wire.CancelJobs((1,)), wire.DoneReply)
        return True
    return False


def test_requests_that_wait_for_one_another_count_their_own_rpcs_alone(
    short: Path, pool: ThreadPoolExecutor
) -> None:
    slurm = Slurm()
    slurm.may_cancel.clear()
    role = hands_of(short, slurm)
    with served(short / "s", role) as path:
        lines = [line_to(path) for _ in range(3)]
        asked: list[Future[wire.DoneReply]] = []
        for number, line in enumerate(lines, 1):
            asked.append(pool.submit(line.ask, wire.CancelJobs((number,)), wire.DoneReply))
            assert slurm.cancelling.wait(10)
        time.sleep(0.3)  # the others wait behind the first
        slurm.may_cancel.set()
        for one in asked:
            one.result(10)
    assert [line.rpc.total for line in lines] == [1, 1, 1]


def test_a_cancellation_of_many_jobs_is_counted_whole(short: Path) -> None:
    line = line_to(short / "s")
    many = tuple(range(1, 3 * wire.MOST_RPC))
    with served(short / "s", hands_of(short, Slurm())):
        line.ask(wire.CancelJobs(many), wire.DoneReply)
    assert line.rpc.counts() == {"kill": len(many)}
    assert wire.most_rpc(wire.Identify()) == wire.MOST_RPC


@pytest.mark.parametrize("prefix", ["#SBATCH", "#SLURM", "#PBS", "#BSUB", "#SBATCHES", "#PBS\t"])
def test_a_script_with_options_of_any_batch_system_is_refused(prefix: str) -> None:
    rules = server.EngineJobRules(Path("/e"))
    rules.check(
        JobSpec("scv-a", "", "scavenge", "#!/bin/bash\n # #PBS -q x\n", output=SPEC.output, workdir="/e")
    )
    script = f"#!/bin/bash\n{prefix} -q normal\ntrue\n"
    with pytest.raises(ClusterError, match="lines, which could change any option") as found:
        rules.check(JobSpec("scv-a", "", "scavenge", script, output=SPEC.output, workdir="/e"))
    assert f"has {prefix[:4]}" in found.value.cause


def test_a_name_with_a_newline_behind_it_is_no_job_s() -> None:
    pair = keys.generate("run", "scv-a")
    for name, is_taken in (("scv-a", True), ("scv-a\n", False)):
        data = msgspec.msgpack.encode(wire.PutKey(name, pair))
        with contextlib.nullcontext() if is_taken else pytest.raises(msgspec.ValidationError):
            wire.submit_requests.decode(data)


def test_the_view_of_a_process_of_another_user_is_not_believed(short: Path) -> None:
    line = client.ProxyLine("view", short / "s", "nobody", 5.0)
    with (
        replying(short / "s", lambda to: None),
        pytest.raises(ClusterError, match="and not nobody") as caught,
    ):
        line.ask(wire.GetView(), wire.ViewReply)
    assert "cluster.view_user" in caught.value.remedy
