"""`scavenger check-config`: what a scavenger.toml means, and what a daemon would refuse, all of it at once and without a trace."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scavenger import toml
from scavenger.cli.main import app
from scavenger.cluster.local.client import LocalServer
from scavenger.config import DaemonConfig, read_daemon
from scavenger.daemon import check_config
from scavenger.ledger import store
from scavenger.protocol import keys

ROOT = Path(__file__).resolve().parents[1]


def written(folder: Path, **sections: dict[str, Any]) -> Path:
    path = folder / "scavenger.toml"
    sections["daemon"] = {"state_dir": str(folder / "state")} | sections.get("daemon", {})
    path.write_text(toml.dumps(sections))
    return path


def asked(path: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check-config", str(path)])
    return done.exit_code, done.output


def everything_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_a_configuration_that_a_daemon_would_take_is_explained_and_leaves_no_trace(tmp_path: Path) -> None:
    keys.init_state(tmp_path / "state", "ada")
    with LocalServer(tmp_path / "cluster") as server:
        cluster = {"backend": "local", "local_dir": str(server.dir)}
        path = written(
            tmp_path, cluster=cluster, harvest={"partition": "scavenge", "headroom_gpus": 3, "account": "ml"}
        )
        before = everything_below(tmp_path / "state")
        code, said = asked(path)
        assert everything_below(tmp_path / "state") == before, "the ledger is not made by asking"
    assert code == 0, said
    assert "REFUSED" not in said
    assert f"{path} is well-formed. It means:\n" in said
    for text in (
        "partition scavenge, backend local",
        "3 idle GPUs are always left alone",
        "account ml",
        "tokens of every sample are kept",
    ):
        assert text in said


def test_whose_rights_engines_have_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shared: dict[str, Any] = {"public_dir": str(tmp_path / "public")}
    _, said = asked(written(tmp_path, daemon=shared, cluster={"backend": "slurm"}))
    assert "the daemon's own user: their processes can read its keys and ledger" in said
    assert "engines' user (WARNING: engines of all owners run as the daemon's user" in said
    _, said = asked(written(tmp_path, cluster={"backend": "slurm"}))
    assert "WARNING" not in said, "one user's own daemon"
    proxied = {
        "submit_socket": str(tmp_path / "s"),
        "engines_user": "nobody",
        "engines_dir": str(tmp_path / "e"),
    }
    code, said = asked(written(tmp_path, daemon=shared, cluster={"backend": "slurm", **proxied}))
    assert code == 2
    assert f"engines   run as nobody, by {tmp_path}/s; their keys and logs are in {tmp_path}/e" in said
    assert "REFUSED  engines' user" in said
    assert "systemctl status scavenger-slurm-submit" in said


def test_that_the_daemons_own_python_runs_no_engine_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the Debian package has no torch: every engine would end at once, on a compute node."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def of_package(name: str) -> object:
        return None if name == "torch" else object()

    monkeypatch.setattr(importlib.util, "find_spec", of_package)
    _, said = asked(written(tmp_path, cluster={"backend": "slurm"}))
    assert (
        f"engines' Python (WARNING: the daemon's, {sys.executable}, has no torch: name an environment" in said
    )
    for named in ({"python": "/shared/env/bin/python"}, {"container": "apptainer exec /shared/image.sif"}):
        _, said = asked(written(tmp_path, cluster={"backend": "slurm"}, harvest=named))
        assert "engines' Python (not looked at: `scavenger doctor --submit` tries it" in said


def test_all_that_a_daemon_would_refuse_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(store, "mount_type", lambda path, mounts: "nfs4")
    code, said = asked(
        written(
            tmp_path, harvest={"job_template": str(tmp_path / "nowhere.j2")}, cluster={"backend": "slurm"}
        )
    )
    assert code == 2
    refused = [line.split(maxsplit=1)[1] for line in said.splitlines() if line.strip().startswith("REFUSED")]
    assert refused == ["state and keys", "ledger", "job template", "cluster and partition"]
    for text in (
        "scavenger init",
        "network file system (nfs4)",
        "nowhere.j2",
        "sbatch is not on PATH",
        "module load slurm",
    ):
        assert text in said
    assert (
        "scavenger.toml is well-formed, and a daemon would not start with it: see REFUSED below (state and keys, ledger, "
        in said
    )


def test_a_ledger_that_is_not_there_yet_is_said_to_be_made(tmp_path: Path) -> None:
    path = written(
        tmp_path, daemon={"ledger": f"sqlite:///{tmp_path}/a/b/ledger.sqlite3"}, harvest={"enabled": False}
    )
    found = {finding.what: finding for finding in check_config.check(read_daemon(path))}
    assert (found["ledger"].problem, found["ledger"].note) == (
        "",
        f"the folder {tmp_path}/a/b is not there yet; it is made",
    )
    assert f"ok       ledger (the folder {tmp_path}/a/b is not there yet; it is made)" in asked(path)[1]
    (tmp_path / "a/b").mkdir(parents=True)
    assert [f.note for f in check_config.check(read_daemon(path)) if f.what == "ledger"] == [
        "its file is not there yet"
    ]
    store.upgrade(read_daemon(path).ledger_url)
    assert [f.note for f in check_config.check(read_daemon(path)) if f.what == "ledger"] == [""]


def test_a_folder_in_which_sqlite_cannot_keep_its_log_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(
        tmp_path, daemon={"ledger": f"sqlite:///{tmp_path}/a/ledger.sqlite3"}, harvest={"enabled": False}
    )
    store.upgrade(read_daemon(path).ledger_url)
    access = os.access  # root, as which tests may run, may write anywhere
    monkeypatch.setattr(
        os, "access", lambda place, mode: Path(place) != tmp_path / "a" and access(place, mode)
    )
    (found,) = (f for f in check_config.check(read_daemon(path)) if f.what == "ledger")
    assert f"may not write {tmp_path}/a" in found.problem


def test_a_partition_that_is_in_others_way_is_refused(tmp_path: Path) -> None:
    keys.init_state(tmp_path / "state", "ada")
    with LocalServer(tmp_path / "cluster") as server:
        path = written(
            tmp_path,
            cluster={"backend": "local", "local_dir": str(server.dir)},
            harvest={"partition": "normal"},
        )
        code, said = asked(path)
    assert code == 2
    assert "is not preemptible (PreemptMode=OFF)" in said


def test_a_key_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check-config", str(written(tmp_path, harvest={"max_engine": 3}))])
    assert done.exit_code != 0
    assert "unknown key 'harvest.max_engine'" in str(done.exception)


def test_who_may_train_is_explained(tmp_path: Path) -> None:
    def owners(daemon: Mapping[str, object], **section: object) -> str:
        read = DaemonConfig.model_validate({"daemon": {"state_dir": tmp_path, **daemon}, "owners": section})
        return next(
            line for line in check_config.explain(read, "scavenger", "login1") if line.startswith("owners")
        )

    assert owners({}).endswith("daemon.public_dir is not set")
    public = {"public_dir": tmp_path / "public"}
    assert owners(public).endswith("owners.users and owners.groups are empty")
    said = owners(public, users=["ada"], groups=["ml", "7003"], max_gpus=4, max_gpus_of={"bob": 8})
    assert "users ada and members of ml, 7003 may train, by `scavenger join" in said
    assert said.endswith("engines of each hold 4 GPUs at most, bob 8")


def test_the_sites_example_is_explained() -> None:
    said = "\n".join(
        check_config.explain(read_daemon(ROOT / "examples/site/scavenger.toml"), "scavenger", "login1")
    )
    assert "listens on 0.0.0.0" in said
    assert "engines and trainers connect to login1.example.org" in said
    assert "32768 MiB; 4 h at most" in said


def test_all_limits_are_one_table_in_the_page_and_in_the_command(tmp_path: Path) -> None:
    """Whatever bounds what the daemon takes, asks or keeps; a key that is added as a limit is added to both."""
    page = (ROOT / "docs/admin.md").read_text().split("## What each limit does")[1].split("\n\n")
    table = next(part for part in page if part.startswith("| key |"))
    path = tmp_path / "scavenger.toml"
    path.write_text(f"""
[daemon]
state_dir = "{tmp_path / "state"}"
[owners]
share_of = {{ ada = 3 }}
gpu_types_of = {{ bob = ["a100", "v100"] }}
[harvest]
max_gpus_by_partition = {{ interactive = 4 }}
headroom_by_type = {{ h100 = 8 }}
max_preemptions_per_hour = 20
[[harvest.schedule]]
days = "Mon-Fri"
hours = "8-18"
max_engines = 1
[[harvest.blackout]]
start = 2026-12-24T18:00:00 # TOML's own dates are taken, and text
end = "2026-12-27T08:00:00"
reason = "tests"
""")
    config = read_daemon(path)
    for key, value, what in check_config.limits(config):
        section, _, names = key.partition(".")
        for name in names.split(", "):
            assert f"`{section}.{name}`" in table, f"docs/admin.md lacks {section}.{name}"
            assert name in type(getattr(config, section)).model_fields
        assert value
        assert what
    told = {key for key, _, _ in check_config.limits(config)}
    limiting = ("max_", "headroom_", "share_of", "gpu_types_of", "partitions_of", "schedule", "blackout")
    for section in ("harvest", "owners", "cluster"):
        for name in type(getattr(config, section)).model_fields:
            assert not name.startswith(limiting) or f"{section}.{name}" in told, (
                f"{section}.{name} is not told"
            )
    said = asked(path)[1].split("Its limits")[1]
    for text in (
        r"max_gpus_by_partition +interactive 4 ",
        r"headroom_by_type +h100 8 ",
        r"schedule +Mon-Fri 8-18 h: max_engines 1 ",
        r"blackout +2026-12-24 18:00:00 to 2026-12-27 08:00:00 \(tests\)",
        r"gpu_types_of +bob a100\+v100 ",
        r"max_preemptions_per_hour +20 ",
        r"max_gpus +no limit ",
    ):
        assert re.search(text, said), text
