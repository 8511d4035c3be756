"""Engines, the daemon and who reads the queue are three Unix users: what each can and cannot do, on a real Slurm.

The accounts are ones that every Debian has. Python is not read by them: children of this process become them.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from scavenger.cluster import choose, framing
from scavenger.cluster.model import JobSpec, JobState
from scavenger.cluster.port import Cluster
from scavenger.cluster.proxy import client, server
from scavenger.cluster.proxy import messages as wire
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.config import DaemonConfig
from scavenger.doctor import probe
from scavenger.errors import ConfigError
from scavenger.harvest.decide.actions import Submit
from scavenger.harvest.execute.job_script import job_spec, log_path, read_template
from scavenger.protocol import key_requests, keys
from tests.clusters import layout_for_tests, wait_for
from tests.proxies import DAEMON, ENGINES, STRANGER, VIEWER, Process, do_as, listening_as

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users: needs root"),
]
INTENTS = ("scv-00000000000000a1", "scv-00000000000000a2")

#: In place of the engines' Python: what an engine's process can read. Its log is where it says so.
LOOKS = """\
#!/bin/bash
echo "I am $(id -un), in groups $(id -Gn)"
while [ "$#" -gt 0 ]; do
    case $1 in --key) key=$2 ;; --state-dir) there=$2 ;; esac
    shift
done
head -c 1 "$key" >/dev/null && echo "own key: read"
head -c 1 "$there/rendezvous.json" >/dev/null && echo "rendezvous: read"
for secret in {state} {state}/keys/server.key {state}/keys/owner.key {state}/ledger.sqlite3 {state}/workers/*.key; do
    if ls "$secret" >/dev/null 2>&1 || head -c 1 "$secret" >/dev/null 2>&1; then echo "READ $secret"; fi
done
if echo x >>{public}/rendezvous.json; then echo WROTE; fi
sleep "${{LOOKS_S:-0}}"
"""


class Site:
    """Folders of three accounts, and the processes of two of them."""

    def __init__(self, folder: Path, sandbox: SlurmSandbox) -> None:
        self.folder, self.sandbox = folder, sandbox
        for name, user, mode in (
            ("state", DAEMON, 0o700),
            ("engines", ENGINES, 0o700),
            ("run-submit", ENGINES, 0o755),
            ("run-view", VIEWER, 0o755),
            ("site", DAEMON, 0o755),
        ):
            (folder / name).mkdir()
            os.chown(folder / name, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
            (folder / name).chmod(mode)
        self.state, self.engines = folder / "state", folder / "engines"
        self.public = folder / "site/public"
        self.python = folder / "looks"
        self.python.write_text(LOOKS.format(state=self.state, public=self.public))
        self.python.chmod(0o755)
        self.submit, self.view = folder / "run-submit/socket", folder / "run-view/socket"
        self.config = DaemonConfig.model_validate(
            {
                "daemon": {"state_dir": self.state, "public_dir": self.public},
                "cluster": {
                    "backend": "slurm",
                    "submit_socket": self.submit,
                    "engines_user": ENGINES,
                    "engines_dir": self.engines,
                    "view_socket": self.view,
                    "view_user": VIEWER,
                },
                "harvest": {"partition": "scavenge", "python": str(self.python)},
            }
        )

    def prepare(self) -> None:
        """As the daemon's user."""
        keys.init_state(self.state, "owner")
        keys.write_private(self.state / "ledger.sqlite3", b"every token")
        key_requests.make_public(self.public)
        keys.write_rendezvous(
            self.public, keys.Rendezvous("tcp://127.0.0.1:1", "k" * 40, 1, 1, "here"), public=True
        )

    def serves_jobs(self, partitions: frozenset[str] = frozenset()) -> server.SubmitRole:
        server.prepare(self.engines)
        allow = server.EngineJobRules(self.engines, partitions)
        return server.SubmitRole(SlurmCluster(self.sandbox.env), self.engines, allow.check)

    def submitter(self) -> server.SubmitRole:
        return self.serves_jobs(frozenset({"scavenge"}))

    def viewer(self) -> server.ViewRole:
        return server.ViewRole(SlurmCluster(self.sandbox.env))

    def cluster(self) -> Cluster:
        """As the daemon has it: Slurm's own commands would not even be found."""
        nothing = SlurmCluster({"PATH": "/nonexistent"})
        return client.ProxyCluster(
            nothing, client.view_line(self.config), client.submit_line(self.config), ENGINES
        )

    def spec(self, intent: str) -> JobSpec:
        submit = Submit(1, "run", "scavenge", 1, "wanted")
        return job_spec(self.config, read_template(None), "slurm", "feedbeef", intent, submit)

    def submit_engine(self, intent: str) -> int:
        """As the daemon does, and as its user."""
        pair = keys.generate("run", intent)
        keys.write_keypair(keys.worker_key_path(self.state, intent), pair)
        account = client.engines_user_of(self.config)
        assert account is not None
        account.put_key(pair)
        return self.cluster().submit(self.spec(intent))

    def as_daemon(self, work: Callable[[], object]) -> str:
        return do_as(DAEMON, work)

    def state_of(self, job_id: int) -> JobState:
        jobs = SlurmCluster(self.sandbox.env).jobs()
        return next(job.state for job in jobs if job.job_id == job_id)


@pytest.fixture
def site(slurm_sandbox: SlurmSandbox) -> Iterator[Site]:
    slurm_sandbox.dir.chmod(0o755)  # as /etc/slurm and munge's socket can be reached on a site
    folder = Path(tempfile.mkdtemp(prefix="scv-"))
    folder.chmod(0o755)
    made = Site(folder, slurm_sandbox)
    assert made.as_daemon(made.prepare) == "None"
    yield made
    shutil.rmtree(folder)


@pytest.fixture
def processes(site: Site) -> Iterator[Process]:
    """Both; the submitting one is given."""
    with (
        listening_as(VIEWER, site.view, site.viewer),
        listening_as(ENGINES, site.submit, site.submitter) as submitter,
    ):
        yield submitter


def test_an_engine_runs_as_its_own_user_and_can_read_nothing_of_the_daemon(
    site: Site, processes: Process
) -> None:
    job_id = int(site.as_daemon(lambda: site.submit_engine(INTENTS[0])))
    wait_for("its job is over", lambda: site.state_of(job_id) is JobState.COMPLETED)
    said = log_path(site.engines, INTENTS[0]).read_text()
    assert f"I am {ENGINES}, in groups {ENGINES}" in said
    assert "own key: read" in said
    assert "rendezvous: read" in said
    assert "READ" not in said
    assert "WROTE" not in said
    assert (site.state / "workers" / f"{INTENTS[0]}.key").exists(), "the daemon's own copy, which it believes"
    key = keys.worker_key_path(site.engines, INTENTS[0])
    assert (key.stat().st_uid, key.stat().st_mode & 0o777) == (pwd.getpwnam(ENGINES).pw_uid, 0o600)
    found = site.as_daemon(lambda: next(j.user for j in site.cluster().view().jobs if j.job_id == job_id))
    assert found == ENGINES == site.as_daemon(lambda: site.cluster().info().user)


def test_the_daemon_reads_engines_logs_by_that_process_and_has_old_keys_removed(
    site: Site, processes: Process
) -> None:
    old = time.time() - 2 * server.KEEP_S
    for intent in INTENTS:
        assert site.as_daemon(partial(site.submit_engine, intent)).isdigit()
        wait_for("it has said all", log_path(site.engines, intent).exists)
    engines = client.engines_user_of(site.config)
    assert engines is not None
    wait_for(
        "its words", lambda: ENGINES in site.as_daemon(lambda: engines.end_of_log(INTENTS[0]).decode()), 30.0
    )
    for intent in INTENTS:
        os.utime(keys.worker_key_path(site.engines, intent), (old, old))
    assert site.as_daemon(lambda: engines.tidy({INTENTS[1]}, 2**20)) == "None"
    assert [path.stem for path in (site.engines / "workers").glob("*.key")] == [INTENTS[1]]
    (site.engines / "logs/scv-link.log").symlink_to(site.state / "ledger.sqlite3")
    assert "EnginesUser" not in (said := site.as_daemon(lambda: engines.end_of_log("scv-link"))), said
    assert "every token" not in said
    assert "ClusterError" in said


def test_no_other_user_is_served(site: Site, processes: Process) -> None:
    never = "scv-00000000000000ff"
    for user in (STRANGER, ENGINES):
        for act in (lambda: site.cluster().jobs(), lambda: site.cluster().submit(site.spec(never))):
            said = do_as(user, act, DAEMON)  # with the group's right to connect
            assert f"uid {pwd.getpwnam(user).pw_uid} may not ask this" in said
            if user == STRANGER:
                assert "Permission denied" in do_as(user, act), "the socket's own mode"
    assert never not in [job.name for job in SlurmCluster(site.sandbox.env).jobs()]


def test_what_is_no_request_is_refused_and_the_process_goes_on(site: Site, processes: Process) -> None:
    def garbage() -> None:
        huge = framing.HEADER.pack(wire.MAX_REQUEST_BYTES + 1)
        for data in (huge, b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x01\xc1", b"\x00\x00"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(20)
                sock.connect(str(site.submit))
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                reply = framing.receive(
                    sock, wire.answers, wire.MAX_REPLY_BYTES["submit"], "it", time.monotonic() + 20
                ).reply
                assert isinstance(reply, wire.FailedReply)

    assert site.as_daemon(garbage) == "None"
    path = wire.PutKey("scv-../../../x", keys.generate())
    hands = client.ProxyLine("submit", site.submit, ENGINES, 20.0)
    assert "malformed" in site.as_daemon(lambda: hands.ask(path, wire.DoneReply))
    assert site.as_daemon(lambda: site.submit_engine(INTENTS[0])).isdigit()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"environment": {"LD_PRELOAD": "/tmp/x.so"}}, "environment"),
        ({"script": "#!/bin/bash\n#SBATCH --uid=root\ntrue\n"}, "#SBATCH"),
        ({"script": "true"}, "without #!"),
        ({"partition": "normal"}, "partition 'normal'"),
        ({"output": "/tmp/elsewhere"}, "only"),
        ({"workdir": "/"}, "only"),
        ({"name": "scv-../../x"}, "may not be called"),
    ],
)
def test_a_job_that_is_no_engine_of_this_site_is_refused(
    site: Site, processes: Process, changed: dict[str, object], why: str
) -> None:
    before = len(SlurmCluster(site.sandbox.env).jobs())
    wrong = replace(site.spec(INTENTS[0]), **changed)  # type: ignore[arg-type]
    said = site.as_daemon(lambda: site.cluster().submit(wrong))
    assert said.startswith("ClusterError")
    assert why in said
    assert len(SlurmCluster(site.sandbox.env).jobs()) == before


def test_each_role_takes_its_own_requests_alone_and_slurm_keeps_foreign_jobs_from_it(
    site: Site, processes: Process
) -> None:
    theirs = SlurmCluster(site.sandbox.env).submit(
        JobSpec("theirs", "", "normal", "#!/bin/bash\nsleep 60\n", workdir="/tmp")
    )
    wait_for("it runs", lambda: site.state_of(theirs) is JobState.RUNNING)
    for act in (
        lambda: site.cluster().cancel((theirs,)),
        lambda: site.cluster().requeue(theirs),
        lambda: site.cluster().release(theirs, "node1"),
    ):
        said = site.as_daemon(act)
        assert said.startswith("ClusterError"), said
    view = client.ProxyLine("view", site.view, VIEWER, 20.0)
    said = site.as_daemon(lambda: view.ask(wire.CancelJobs((theirs,)), wire.DoneReply))
    assert "malformed" in said
    hands = client.ProxyLine("submit", site.submit, ENGINES, 20.0)
    assert "malformed" in site.as_daemon(lambda: hands.ask(wire.GetView(), wire.ViewReply))
    assert site.state_of(theirs) is JobState.RUNNING


def test_keys_are_sent_to_no_other_user_s_process(site: Site) -> None:
    with listening_as(VIEWER, site.view, site.viewer):
        wrong = client.ProxyLine("submit", site.view, ENGINES, 20.0)
        account = client.EnginesUser(wrong, site.engines)
        said = site.as_daemon(lambda: account.put_key(keys.generate("run", INTENTS[0])))
        assert f"listens at {site.view}, and not {ENGINES}" in said


def test_a_process_that_died_is_a_slurm_that_does_not_answer_and_its_successor_goes_on(
    site: Site, processes: Process
) -> None:
    job_id = int(site.as_daemon(lambda: site.submit_engine(INTENTS[0])))
    processes.end()
    for act in (
        lambda: site.cluster().cancel((job_id,)),
        lambda: site.submit_engine(INTENTS[1]),
        lambda: choose.preflight(site.config, site.cluster()),
    ):
        said = site.as_daemon(act)
        assert said.startswith("ClusterUnavailable"), said
        assert "systemctl status scavenger-slurm-submit" in said
    assert str(job_id) in site.as_daemon(lambda: [job.job_id for job in site.cluster().view().jobs]), "seen"
    with listening_as(ENGINES, site.submit, site.submitter):
        assert site.as_daemon(lambda: site.cluster().cancel((job_id,))) == "None"
        assert site.as_daemon(lambda: site.submit_engine(INTENTS[1])).isdigit()


@pytest.mark.accounting
def test_an_operator_s_process_shows_the_daemon_the_jobs_that_private_data_hides_from_it() -> None:
    shape = layout_for_tests()
    with (
        tempfile.TemporaryDirectory(prefix="scv-") as short,
        SlurmSandbox(msgspec.structs.replace(shape, qos=True)) as sandbox,
    ):
        conf, folder = Path(sandbox.env["SLURM_CONF"]), Path(short)
        conf.write_text(f"{conf.read_text()}PrivateData=jobs\n")
        sandbox.run("scontrol", "reconfigure")
        sandbox.run("sacctmgr", "-i", "add", "user", VIEWER, "Account=site", "AdminLevel=Operator")
        sandbox.dir.chmod(0o755)
        own = SlurmCluster(sandbox.env)
        theirs = own.submit(JobSpec("theirs", "", "normal", "#!/bin/bash\nsleep 60\n", workdir="/tmp"))
        assert do_as(DAEMON, lambda: [job.job_id for job in own.jobs()]) == "[]", "hidden"
        folder.chmod(0o755)
        (folder / "view").mkdir()
        os.chown(folder / "view", pwd.getpwnam(VIEWER).pw_uid, pwd.getpwnam(VIEWER).pw_gid)
        socket_path = folder / "view/socket"

        def made() -> server.ViewRole:
            cluster = SlurmCluster(sandbox.env)
            return server.ViewRole(cluster, server.OperatorCheck(cluster.environment, 20.0))

        with listening_as(VIEWER, socket_path, made):
            line = client.ProxyLine("view", socket_path, VIEWER, 20.0)
            proxied = client.ProxyCluster(own, line, None, DAEMON)
            assert do_as(DAEMON, lambda: [job.job_id for job in proxied.jobs()]) == f"[{theirs}]"
            assert do_as(DAEMON, lambda: "jobs" in own.info().private) == "True"
            assert do_as(DAEMON, lambda: "jobs" in proxied.info().private) == "False"
            assert do_as(DAEMON, lambda: proxied.cancel((theirs,))).startswith("ClusterError")
            assert str(theirs) in do_as(DAEMON, lambda: [job.job_id for job in proxied.view().jobs])


def test_doctor_s_test_job_runs_as_the_engines_user(site: Site, processes: Process) -> None:
    said = site.as_daemon(lambda: probe.run(site.config, site.sandbox.env).text)
    told = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    assert {told.get(name) for name in ("state_dir", "python", "port", "step", "requeue")} == {"ok"}, said
    site.public.chmod(0o700)
    said = site.as_daemon(lambda: probe.run(site.config, site.sandbox.env).text)
    assert f"state_dir={site.public} cannot be entered" in said


def test_a_folder_that_others_may_enter_and_a_user_that_keeps_nothing_apart_are_refused(site: Site) -> None:
    site.engines.chmod(0o750)
    assert "is not a folder of" in do_as(ENGINES, lambda: server.prepare(site.engines))
    daemon = pwd.getpwnam(DAEMON)
    for uid in (0, daemon.pw_uid):
        with pytest.raises(ConfigError, match="a user of its own"):
            server.check_separate(daemon, uid)
    server.check_separate(daemon, pwd.getpwnam(ENGINES).pw_uid)


def test_another_folder_than_the_process_has_is_named(site: Site, processes: Process) -> None:
    other = client.EnginesUser(client.ProxyLine("submit", site.submit, ENGINES, 20.0), site.folder)
    assert "give both one path" in site.as_daemon(other.check)
    engines = client.engines_user_of(site.config)
    assert engines is not None
    assert site.as_daemon(engines.check) == "None"


def test_a_socket_in_use_is_not_taken_away(site: Site, processes: Process) -> None:
    cluster = SlurmCluster(site.sandbox.env)
    listener = server.ProxyListener(site.submit, pwd.getpwnam(DAEMON), server.ViewRole(cluster))
    with pytest.raises(ConfigError, match="another process serves"):
        listener.open()
    assert site.as_daemon(lambda: client.engines_user_of(site.config).check()) == "None"  # type: ignore[union-attr]
