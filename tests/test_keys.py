"""Keys are changed while jobs run: nobody is locked out before the old key is retired, and everybody who should be is after."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from scavenger import config, toml
from scavenger.cli import main
from scavenger.errors import AuthError
from scavenger.ledger import store
from scavenger.protocol import keys


@pytest.fixture
def state(tmp_path: Path) -> Path:
    keys.init_state(tmp_path, "ada")
    return tmp_path


def test_both_keys_of_an_owner_act_for_the_same_runs_until_the_older_is_retired(state: Path) -> None:
    first = keys.read_keypair(keys.owner_key_path(state)).public
    assert keys.enrolled_owners(state) == {first: first}
    keys.rotate_owner(state, "ada")
    second = keys.read_keypair(keys.owner_key_path(state)).public
    assert keys.enrolled_owners(state) == {second: first, first: first}
    assert keys.retire_owner_keys(state, "ada") == 1
    assert keys.enrolled_owners(state) == {second: first}
    keys.rotate_owner(state, "ada")
    third = keys.read_keypair(keys.owner_key_path(state)).public
    assert keys.enrolled_owners(state) == {third: first, second: first}
    assert keys.retire_owner_keys(state, "ada") == 1
    with pytest.raises(AuthError, match="its newest stays"):
        keys.retire_owner_keys(state, "ada")
    assert keys.enrolled_owners(state) == {third: first}


def test_the_list_names_every_key_with_its_role_and_state_and_nothing_secret(state: Path) -> None:
    pairs = [keys.read_keypair(keys.owner_key_path(state))]
    keys.write_private(
        state / "keys" / "owners" / "old.pub", f"{'o' * 40}\nwas {'p' * 40}\n".encode()
    )  # of a release before
    keys.rotate_owner(state, "ada")
    keys.retire_owner_keys(state, "ada")
    pairs += [
        keys.read_keypair(keys.owner_key_path(state)),
        keys.read_keypair(keys.server_key_path(state)),
        keys.generate("sort", "scv-1"),
    ]
    keys.write_keypair(keys.worker_key_path(state, "scv-1"), pairs[-1])
    keys.write_rendezvous(state, keys.Rendezvous("tcp://h:1", pairs[2].public, 1, 1, "h", "u"))
    found = keys.listed(state)
    assert [(key.role, key.who, key.public) for key in found] == [
        ("daemon", "", pairs[2].public),
        ("owner", "ada", pairs[1].public),
        ("owner", "ada", pairs[0].public),
        ("owner", "old", "o" * 40),
        ("owner", "old", "p" * 40),
        ("worker", "sort scv-1", pairs[3].public),
    ]
    assert [key.state.partition(" at ")[0] for key in found] == [
        "in use",
        "accepted, and in keys/owner.key",
        "retired",
        "accepted",
        "retired",
        "accepted while its job lives",
    ]
    assert all(abs(key.since - time.time()) < 60 for key in found if key.who != "old")
    assert {key.since for key in found if key.who == "old"} == {0.0}
    keys.rotate_server(state)
    (state / "scavenger.toml").write_text(toml.dumps({"daemon": {"state_dir": str(state)}}))
    said = CliRunner().invoke(main.app, ["keys", "list", "--config", str(state / "scavenger.toml")])
    assert said.exit_code == 0, said.output
    assert "in use from the daemon's next start" in said.output
    assert not any(
        pair.secret in said.output for pair in [*pairs, keys.read_keypair(keys.server_key_path(state))]
    )


def test_an_owner_with_a_key_file_elsewhere_adds_the_public_half(state: Path) -> None:
    mine, fresh = keys.generate().public, keys.generate().public
    path = keys.enroll(state, "bob", mine)
    for _ in range(2):
        keys.add_owner_key(state, "bob", fresh)
    assert {key: of for key, of in keys.enrolled_owners(state).items() if of == mine} == {
        fresh: mine,
        mine: mine,
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(AuthError, match="40 characters"):
        keys.add_owner_key(state, "bob", "short")
    with pytest.raises(AuthError, match="does not exist"):
        keys.add_owner_key(state, "nobody", fresh)
    with pytest.raises(AuthError, match="not a key of owner 'bob'") as refused:
        keys.rotate_owner(state, "bob")
    for command in ("keys make FILE", "keys add bob --public KEY", "keys rotate-owner ada"):
        assert f"`scavenger {command}`" in refused.value.remedy
    keys.note_joined(state, "bob", 1000)
    with pytest.raises(AuthError, match="not a key of owner 'bob'") as refused:
        keys.rotate_owner(state, "bob")
    assert "as bob: `scavenger join PUBLIC_DIR --new`" in refused.value.remedy


def test_who_names_no_folder_is_not_told_to_start_a_daemon(tmp_path: Path) -> None:
    assert "start it" in keys.absent_daemon(tmp_path)
    assert "there is no folder" in keys.absent_daemon(tmp_path / "nowhere")


def keys_command(state: Path, *words: str) -> Result:
    config_path = state / "scavenger.toml"
    config_path.write_text(toml.dumps({"daemon": {"state_dir": str(state)}}))
    return CliRunner().invoke(main.app, ["keys", *words, "--config", str(config_path)])


def test_a_leaked_key_that_stays_accepted_is_never_called_retired(state: Path) -> None:
    """Issue: `keys retire bob` printed "0 keys retired" and ended with status 0; the only key of bob stayed accepted."""
    leaked, fresh = keys.generate().public, keys.generate().public
    keys.enroll(state, "bob", leaked)
    for name, needed in (("bob", "keys add bob --public KEY"), ("ada", "keys rotate-owner ada")):
        said = keys_command(state, "retire", name)
        assert isinstance(said.exception, AuthError)
        assert said.exception.exit_code == 2
        assert "none was retired" in said.exception.cause
        assert f"`scavenger {needed}`" in said.exception.remedy
        assert f"`scavenger keys retire {name} --all`" in said.exception.remedy
    assert leaked in keys.enrolled_owners(state)
    keys.add_owner_key(state, "bob", fresh)
    assert "1 key retired" in keys_command(state, "retire", "bob").output
    assert {key for key, of in keys.enrolled_owners(state).items() if of == leaked} == {fresh}


def test_an_owner_is_locked_out_at_once_and_comes_back_to_the_same_runs_with_another_key(state: Path) -> None:
    first = keys.generate().public
    keys.enroll(state, "bob", first)
    second = keys.generate().public
    keys.add_owner_key(state, "bob", second)
    said = keys_command(state, "retire", "bob", "--all")
    assert said.exit_code == 0, said.output
    for line in ("2 keys retired", "engines of its runs leave", "refused", "keys add bob --public KEY"):
        assert line in said.output
    assert first not in keys.enrolled_owners(state).values()
    for words in (("retire", "bob"), ("retire", "bob", "--all"), ("add", "bob", "--public", second)):
        said = keys_command(state, *words)
        assert isinstance(said.exception, AuthError), words
    assert first not in keys.enrolled_owners(state).values(), "no retired key comes back"
    third = keys.generate().public
    keys.add_owner_key(state, "bob", third)
    assert keys.enrolled_owners(state)[third] == first, "the runs are recorded under the first key"


def test_the_owner_of_the_state_directory_who_was_locked_out_makes_a_new_key(state: Path) -> None:
    old = keys.read_keypair(keys.owner_key_path(state)).public
    said = keys_command(state, "retire", "ada", "--all")
    assert "`scavenger keys rotate-owner ada`" in said.output
    keys.rotate_owner(state, "ada")
    assert keys.enrolled_owners(state) == {keys.read_keypair(keys.owner_key_path(state)).public: old}


def test_a_key_that_a_full_disk_keeps_accepted_is_told_in_one_line(state: Path) -> None:
    """A limit on files' sizes stands for the disk: the same call fails, at the same place."""
    keys.rotate_owner(state, "ada")
    (state / "scavenger.toml").write_text(toml.dumps({"daemon": {"state_dir": str(state)}}))
    command = f"ulimit -f 0; exec {sys.executable} -m scavenger keys retire ada -c {state}/scavenger.toml"
    said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 1
    assert f"{state}/keys/owners/ada.pub cannot be written" in said.stderr
    assert "the command is not done" in said.stderr
    assert "remedy: " in said.stderr
    assert "Traceback" not in said.stderr
    assert len(keys.enrolled_owners(state)) == 2


def test_a_name_that_is_no_owner_s_is_told_where_the_owners_are(state: Path) -> None:
    with pytest.raises(AuthError, match="does not exist") as refused:
        keys.retire_owner_keys(state, "nobody")
    assert "`scavenger keys list`" in refused.value.remedy


def test_the_daemons_jobs_are_known_by_the_same_name_after_its_key_was_changed(state: Path) -> None:
    def uid() -> str:
        return keys.site_uid(state, keys.read_keypair(keys.server_key_path(state)).public)

    before, old = uid(), keys.read_keypair(keys.server_key_path(state)).public
    for _ in range(2):
        keys.rotate_server(state)
        assert uid() == before
    assert keys.read_keypair(keys.server_key_path(state)).public != old
    (state / "keys" / "uid").write_text("nonsense")
    with pytest.raises(AuthError, match="eight hex digits"):
        uid()


def test_a_file_of_an_owner_that_holds_anything_else_is_refused(state: Path) -> None:
    keys.write_private(state / "keys" / "owners" / "ada.pub", b"was it a key\n")
    with pytest.raises(AuthError, match="does not hold CURVE public keys"):
        keys.enrolled_owners(state)


def test_a_key_made_elsewhere_is_enrolled_by_its_public_half(state: Path, tmp_path: Path) -> None:
    out = tmp_path / "chemistry.key"
    made = CliRunner().invoke(main.app, ["keys", "make", str(out)])
    public = made.output.strip()
    assert made.exit_code == 0
    assert keys.read_keypair(out).public == public
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    keys.enroll(state, "chemistry", public)
    assert public in keys.enrolled_owners(state)
    again = CliRunner().invoke(main.app, ["keys", "make", str(out)])
    assert isinstance(again.exception, AuthError)
    assert "exists" in str(again.exception)
    assert keys.read_keypair(out).public == public


def test_a_guest_is_renewed_only_once_its_new_key_is_written(state: Path, tmp_path: Path) -> None:
    first = keys.invite_guest(state, "chat", "math", tmp_path / "first.key")
    assert keys.read_keypair(tmp_path / "first.key") == first
    for out, why in ((tmp_path / "first.key", "exists"), (tmp_path / "none" / "a.key", "cannot be written")):
        with pytest.raises(AuthError, match=why):
            keys.invite_guest(state, "chat", "math", out)
    (tmp_path / "link.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuthError, match="exists"):
        keys.invite_guest(state, "chat", "math", tmp_path / "link.key")
    assert keys.guest_keys(state)["chat"].public == first.public
    assert keys.read_keypair(tmp_path / "first.key") == first

    again = keys.invite_guest(state, "chat", "math", tmp_path / "second.key")
    assert keys.guest_keys(state)["chat"].public == again.public != first.public
    assert stat.S_IMODE((tmp_path / "second.key").stat().st_mode) == 0o600


def test_a_guest_of_a_run_that_is_not_there_is_not_invited(state: Path, tmp_path: Path) -> None:
    site = tmp_path / "scavenger.toml"
    site.write_text(f'[daemon]\nstate_dir = "{state}"\n')
    store.upgrade(config.read_daemon(site).ledger_url)
    argv = ["keys", "guest", "chat", "--run", "mth", "--out", str(tmp_path / "a.key"), "--config", str(site)]
    done = CliRunner().invoke(main.app, argv)
    assert done.exit_code != 0
    assert "no run called 'mth'" in str(done.exception) + done.output
    assert not (tmp_path / "a.key").exists()
    assert keys.guest_keys(state) == {}
