"""A site's scavenger.toml, as `scavenger init` writes it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from scavenger import cli, config


def test_a_site_s_file_is_its_user_s_alone_and_leaves_the_backend_to_be_found(tmp_path: Path) -> None:
    url = "postgresql://scavenger:secret@db/scavenger"
    done = CliRunner().invoke(cli.app, ["init", str(tmp_path / "site"), "--ledger", url])
    assert (done.exit_code, done.exception) == (0, None)
    path = tmp_path / "site" / "scavenger.toml"
    assert path.stat().st_mode & 0o777 == 0o600, "it holds the ledger's password"
    read = config.read_daemon(path)
    assert (read.ledger_url, read.cluster.backend, read.harvest.partition) == (url, "auto", "scavenge")
