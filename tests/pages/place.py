"""Where commands of pages run: a private Slurm, a daemon on it, a ledger with a finished run, a model, data, a PostgreSQL.

    the paths and names of a page --`Place.real`--> those of a folder of the tests --bash--> status and output

What stands in for what: `systemctl` is a script that starts and ends the daemon (units are played by tests/system/test_site_unit.py); the
user scavenger is this one (users are played by tests/system/test_site_users.py); `ssh` is not run. All else is the real thing.
"""

from __future__ import annotations

import contextlib
import getpass
import grp
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import sqlalchemy as sa

from scavenger import toml
from scavenger.cluster.layout import ClusterLayout, PartitionLayout
from scavenger.cluster.model import PreemptMode
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.ledger import records as r
from scavenger.protocol.messages import EngineSpec
from scavenger.router.core.decision_log import PolicyCode
from tests.ledger.examples import T0, an_episode, written
from tests.pages import warm
from tests.pages.commands import ROOT
from tests.private_postgres import PrivatePostgres, create_database
from tests.system.model import write_small_model
from tests.top import sites
from tests.web.sites import tokenizer

NODES = ("gpu01", "gpu02", "gpu07")
#: Seconds that a command may take here.
PATIENCE_S = 600.0
SYSTEMCTL = """#!/bin/bash
# In place of systemd, which no container of the gate has: starts, ends and asks the daemon of the test.
verb="$1"
pid="$(cat {root}/daemon.pid 2>/dev/null)"
grep -aq {root} "/proc/$pid/cmdline" 2>/dev/null || pid=  # it ended, and the number may be another process's
stop() {{
    [ -n "$pid" ] || return 0
    kill -TERM "$pid" 2>/dev/null
    while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
    rm -f {root}/daemon.pid
}}
start() {{
    kill -0 "$pid" 2>/dev/null && return
    : > {root}/daemon.log
    setsid nohup {python} -m scavenger daemon --config {root}/etc/scavenger.toml >> {root}/daemon.log 2>&1 < /dev/null &
    pid=$!; echo $pid > {root}/daemon.pid
    until grep -q 'serving' {root}/daemon.log; do kill -0 $pid 2>/dev/null || {{ cat {root}/daemon.log; exit 1; }}; sleep 0.05; done
}}
case "$verb" in
    start) start ;;
    enable) [[ "$*" != *--now* ]] || start ;;
    stop) stop ;;
    disable) [[ "$*" != *--now* ]] || stop ;;
    restart) stop; pid=; start ;;
    reload) kill -HUP "$pid" ;;
    reset-failed) ;; # starts are not counted here
    status) kill -0 "$pid" && tail -n 5 {root}/daemon.log ;;
    *) echo "unknown: $*" >&2; exit 1 ;;
esac
"""


def layout() -> ClusterLayout:
    """The pages' partitions: `scavenge` below `normal` on the same nodes, and `reserved`. With slurmdbd."""
    shared = NODES[1:]
    return ClusterLayout(
        nodes=NODES,
        gpus=8,
        accounting=True,
        partitions=(
            PartitionLayout(name="reserved", nodes=NODES[:1], priority_tier=10),
            PartitionLayout(name="normal", nodes=shared, priority_tier=10),
            PartitionLayout(
                name="scavenge",
                nodes=shared,
                priority_tier=1,
                preempt_mode=PreemptMode.REQUEUE,
                grace_s=10.0,
                max_time_s=86_400.0,
            ),
        ),
    )


@dataclass(frozen=True)
class Done:
    status: int
    said: str


@dataclass
class Place:
    """Everything below `root` ends and goes when the block is left."""

    root: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="scvp-")))
    #: What was run here, by its text on the page.
    ran: dict[str, Done] = field(default_factory=dict)

    _server: PrivatePostgres | None = None

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        try:
            self._stack.callback(shutil.rmtree, self.root, ignore_errors=True)
            self.slurm = self._stack.enter_context(SlurmSandbox(layout()))
            for name in ("bin", "home", "var", "mine", "backup", "work", "systemd"):
                (self.root / name).mkdir()
            self._stack.enter_context(warm.warmed(self.root / "warm", self.root / "bin/scavenger"))
            shim = self.root / "bin/systemctl"
            shim.write_text(SYSTEMCTL.format(root=self.root, python=sys.executable))
            shim.chmod(0o755)
            self._stack.callback(self.run, "systemctl stop scavenger")
            # What is submitted waits for this one: whole runs on a Slurm are other tests' affair.
            self._well("sbatch -p reserved --exclusive -o /dev/null --wrap 'sleep infinity'")
            write_small_model(self.root / "model")
            lines = [{"prompt": str(i), "answer": str(i)} for i in range(64)]
            (self.root / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
            return self
        except BaseException:
            self._stack.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ------------------------------------------------------------ names

    def real(self, text: str, put: Mapping[str, str]) -> str:
        """A page's command with its paths, users and placeholders as they are here."""
        user, group = getpass.getuser(), grp.getgrgid(os.getgid()).gr_name
        for name, value in put.items():
            text = text.replace(name, value)
        for name, value in {
            "/opt/scavenger/bin": f"{self.root}/bin",
            "~/scv/bin": f"{self.root}/bin",
            "/etc/scavenger": f"{self.root}/etc",
            "/var/lib/scavenger": f"{self.root}/var",
            "/shared/scavenger": f"{self.root}/shared",
            "/var/tmp/you": f"{self.root}/mine",
            "/backup/": f"{self.root}/backup/",
            "/etc/systemd/system": f"{self.root}/systemd",
        }.items():
            text = text.replace(name, value)
        text = re.sub(r"(?<= -[uo] )scavenger(-engines)?(?= |$)", user, text)
        text = re.sub(r"(?<= -g )scavenger(-engines)?(?= |$)", group, text)
        for name, value in {
            "MODEL": f"{self.root}/model",
            "PROMPTS": f"{self.root}/prompts.jsonl",
            "RUN": "sorting",
        }.items():
            text = re.sub(rf"(?<![\w$-]){name}(?![\w])", value, text)
        elsewhere = re.findall(r"(?<![\w.-])/(?:etc|opt|var/lib|usr/lib|shared|backup)/\S*", text)
        assert elsewhere == [], f"{text!r} would write outside {self.root}: say in `real` what stands for it"
        return text

    def folder(self, page: str) -> Path:
        """Where the commands of a page are typed: beside what a clone has."""
        made = self.root / "work" / Path(page).stem
        if not made.exists():
            made.mkdir()
            for name in ("scripts", "sql", "examples", "benchmarks", "constraints.txt", "tests"):
                (made / name).symlink_to(ROOT / name)
        return made

    @property
    def env(self) -> dict[str, str]:
        environ = {
            name: value
            for name, value in self.slurm.env.items()
            if name not in ("SCAVENGER_CONFIG", "COLUMNS") and not name.startswith("PG")
        }  # a developer's own PGSERVICE or PGHOSTADDR would lead `dropdb` elsewhere
        python = str(Path(sys.executable).parent)
        if self._server is not None:
            query = sa.make_url(self._server.url)
            environ |= {"PGHOST": str(query.query["host"]), "PGUSER": str(query.username)}
        return environ | {
            "PATH": os.pathsep.join([f"{self.root}/bin", python, environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "HOME": f"{self.root}/home",
            "XDG_CONFIG_HOME": f"{self.root}/home/config",
            "SCAVENGER_CONFIG": f"{self.root}/etc/scavenger.toml",
            "SCAVENGER_PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TERM": "dumb",
            "COLUMNS": "200",
        }

    # ------------------------------------------------------------ running

    def run(
        self, text: str, page: str = "none", *, put: Mapping[str, str] | None = None, until: str = ""
    ) -> Done:
        """Run it in bash. `until`: it serves; it is interrupted once it has said so (a pattern)."""
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(
                ["bash", "-c", self.real(text, put or {})],
                cwd=self.folder(page),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

            def said() -> str:
                out.seek(0)
                return out.read()

            end = time.monotonic() + PATIENCE_S
            try:
                while process.poll() is None:
                    assert time.monotonic() < end, f"{text!r} takes over {PATIENCE_S:g} s:\n{said()[-3000:]}"
                    if until and re.search(until, said()):
                        os.killpg(process.pid, signal.SIGTERM)
                        process.wait(60)
                        break
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.05)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            code = process.returncode  # of bash, which may have become the command that a signal ended
            done = Done(code if code >= 0 else 128 - code, said())
        self.ran[text] = done
        return done

    # ------------------------------------------------------------ settings

    def served(self) -> None:
        """A daemon serves that is set up as docs/site.md says, with `owners`; its ledger has a finished run before."""
        if not (self.root / "etc/scavenger.toml").exists():
            self._well("install -d -o scavenger -g scavenger -m 0755 /shared/scavenger")
            self._well(
                "/opt/scavenger/bin/scavenger init /shared/scavenger --site "
                "--ledger sqlite:////var/lib/scavenger/ledger.sqlite3"
            )
            draft = self.root / "shared/scavenger.toml"
            text = draft.read_text()
            assert "[owners]\n" in text
            draft.write_text(text.replace("[owners]\n", f'[owners]\nusers = ["{getpass.getuser()}"]\n'))
            self._well(
                "install -D -o scavenger -m 0600 /shared/scavenger/scavenger.toml /etc/scavenger/scavenger.toml"
            )
            self.finished(f"sqlite:///{self.root}/var/ledger.sqlite3")
        self._well("systemctl start scavenger")

    def stopped(self) -> None:
        self.served()
        self._well("systemctl stop scavenger")

    def finished(self, url: str) -> None:
        """A ledger with a run that ended, moved samples, an agent's episode, decisions and events."""
        path = str(tokenizer(self.root))
        told: list[r.Record] = [
            r.Event(
                "engine_set_aside", 1, "gpu02", "its logprobs disagree with the trainer's", "{}", T0 + 50
            ),
            r.Decision(
                "agreement",
                "set-aside",
                "worker 2",
                "its logprobs disagree",
                "{}",
                T0 + 50,
                PolicyCode.DISAGREES,
            ),
            r.Event("cluster_unavailable", 0, "commands", "slurmctld does not reply", "{}", T0 + 60),
            r.RunEnded(1, "finished", "", T0 + 100),
        ]
        *sound, _, decided = sites.records()  # what is between repeats a prompt, which a run does not
        records = [*sound, decided, an_episode(), told]
        spec = EngineSpec(
            name="reference", model_config="{}", dtype="float32", max_batch=4, context_length=64
        )
        engine = msgspec.json.encode(spec).decode()

        def real(one: r.Record) -> r.Record:
            """What a daemon reads at its start, and a reader of completions."""
            if isinstance(one, r.RunCreated):
                return msgspec.structs.replace(one, tokenizer=path, engine=engine)
            if isinstance(one, r.AttemptGranted):
                return msgspec.structs.replace(one, engine=engine)
            return one

        written(url, [list(map(real, some)) for some in records])

    def small(self, path: Path) -> None:
        """Change a drafted run.toml so that two steps of it are short on a CPU."""
        run = tomllib.loads(path.read_text())
        run["engine"] = {"name": "reference", "max_batch": 8}
        run["run"] |= {"steps": 2}
        run["data"] |= {"prompts_per_step": 2, "samples_per_prompt": 2}
        run["sampling"] = {"max_tokens": 8}
        run["model"]["context_length"] = 32
        path.write_text(toml.dumps(run))

    def postgres(self) -> str:
        """Its URL: a server with a database `scavenger` that has such a ledger, and that `psql` finds by its environment."""
        if self._server is None:
            self._server = self._stack.enter_context(PrivatePostgres({"fsync": "off"}))
        if self.run("psql -d scavenger -c ''").status != 0:
            self.finished(create_database(self._server.url, "scavenger"))
        return self._server.url

    def _well(self, text: str) -> None:
        if text in self.ran and not text.startswith("systemctl"):
            return
        done = self.run(text)
        assert done.status == 0, f"{text}: {done.status}\n{done.said[-3000:]}"
