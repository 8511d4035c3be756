"""A daemon notes under which name it knows an owner's key, so that reports can name users, and each change of a key."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from scavenger.config import DaemonConfig
from scavenger.daemon.enrolment import Enrolment
from scavenger.daemon.main import Daemon
from scavenger.daemon.takeover import Manner
from scavenger.ledger import records as r
from scavenger.ledger import store
from scavenger.ledger.read import reader
from scavenger.policy.fleet_size import Demand, EnvironmentDemand
from scavenger.protocol import keys
from scavenger.router.core.events import PeerIdentity
from scavenger.router.edge.keyring import KeyRing
from tests.ledger.examples import T0, WAIT_S, written
from tests.ledger.histories import fetch
from tests.ledger.test_keeper import restorable

TOLD = "SELECT kind, subject, reason FROM events WHERE kind IN ('key_added', 'key_revoked') ORDER BY id"
NOTED = "SELECT reason FROM events WHERE kind = 'owner_enrolled' ORDER BY id"


def test_each_owner_is_noted_once_with_its_name(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    keys.init_state(state_dir, "ada")
    ada = keys.read_keypair(keys.owner_key_path(state_dir)).public
    config = DaemonConfig.model_validate({"daemon": {"state_dir": state_dir}, "harvest": {"enabled": False}})
    written(config.ledger_url, restorable())

    async def live() -> None:
        daemon = Daemon(config, None, Manner.TAKE_OVER)
        serving = asyncio.create_task(daemon.run())
        async with asyncio.timeout(WAIT_S):
            while not await asyncio.to_thread(fetch, config.ledger_url, NOTED):
                assert not serving.done(), await serving
                await asyncio.sleep(0.02)
            keys.enroll(state_dir, "bob", "b" * 40)
            while len(await asyncio.to_thread(fetch, config.ledger_url, NOTED)) < 2:
                assert not serving.done(), await serving
                await asyncio.sleep(0.02)
        daemon.stop.set()
        await serving

    asyncio.run(live())
    assert fetch(config.ledger_url, NOTED) == [("ada",), ("bob",)], "each once, not at every look"
    names = fetch(
        config.ledger_url, "SELECT subject, reason FROM events WHERE kind = 'owner_enrolled' ORDER BY id"
    )
    assert names == [(ada, "ada"), ("b" * 40, "bob")]


def test_each_change_of_a_key_leaves_its_trace_once_whether_a_daemon_ran_or_not(
    tmp_path: Path, url: str
) -> None:
    state = tmp_path / "keys-of"
    keys.init_state(state, "ada")
    server, ada = (
        keys.read_keypair(keys.server_key_path(state)).public,
        keys.read_keypair(keys.owner_key_path(state)).public,
    )
    ring = KeyRing()

    def life(*changes: Callable[[], object]) -> list[tuple[object, ...]]:
        """A daemon's life, in which the files change; what it told the ledger."""
        before = len(fetch(url, TOLD))
        told: list[r.Record] = []
        engine = store.open_readonly(url)
        public = keys.read_keypair(keys.server_key_path(state)).public
        enrolment = Enrolment(state, public, ring, told.extend, lambda: T0, reader.keys_in_force(engine))
        enrolment.read()
        for change in changes:
            change()
            enrolment.read()
        enrolment.read()
        engine.dispose()
        written(url, [told])
        return fetch(url, TOLD)[before:]

    store.upgrade(url)
    assert sorted(life()) == sorted(
        [("key_added", server, "daemon: accepted"), ("key_added", ada, "owner ada: accepted")]
    )
    assert life() == [], "a restart is no change"
    told = life(lambda: keys.rotate_owner(state, "ada"), lambda: keys.retire_owner_keys(state, "ada"))
    new = keys.read_keypair(keys.owner_key_path(state)).public
    assert told == [
        ("key_added", new, "owner ada: accepted beside 1 earlier key"),
        ("key_revoked", ada, "owner ada: retired"),
    ]
    assert (ring.identity(new), ring.identity(ada)) == (PeerIdentity("owner", ada), None)
    keys.rotate_server(state)
    keys.enroll(state, "bob", "b" * 40)
    fresh = keys.read_keypair(keys.server_key_path(state)).public
    told = life(lambda: (state / "keys" / "owners" / "bob.pub").unlink())
    assert told[0] == ("key_revoked", server, "daemon: another key took its place")
    assert sorted(told[1:3]) == sorted(
        [("key_added", fresh, "daemon: accepted"), ("key_added", "b" * 40, "owner bob: accepted")]
    )
    assert told[3:] == [("key_revoked", "b" * 40, "owner bob: removed from the owner's file")]
    secrets = [
        keys.read_keypair(path).secret for path in (keys.server_key_path(state), keys.owner_key_path(state))
    ]
    assert not any(secret in str(fetch(url, "SELECT * FROM events")) for secret in secrets)


def test_a_run_of_an_owner_without_an_accepted_key_wants_no_engines(tmp_path: Path) -> None:
    state = tmp_path / "state"
    keys.init_state(state, "daemon")
    first = keys.generate().public
    keys.enroll(state, "ada", first)
    enrolment = Enrolment(state, "server", KeyRing(), lambda _: None, lambda: T0, {})

    def wanted() -> tuple[str, int]:
        enrolment.read()
        [want] = enrolment.of_owners([Demand(1, "run", 4, 1, "useful", owner=first)])
        assert (want.engines == 0) == ("no key of its owner is accepted" in want.reason)
        return want.owner, want.engines

    assert wanted() == ("ada", 4)
    keys.suspend_owner(state, "ada")
    assert wanted() == ("ada", 0)
    keys.resume_owner(state, "ada")
    keys.add_owner_key(state, "ada", keys.generate().public)
    keys.retire_owner_keys(state, "ada")
    assert wanted() == ("ada", 4), "another key of the owner's is accepted"
    (state / "keys" / "owners" / "ada.pub").unlink()
    assert wanted() == ("", 0)


def test_training_jobs_run_as_the_user_whom_the_owner_is_called_after_or_as_the_daemon_s(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    keys.init_state(state, "us")
    ours = keys.read_keypair(keys.owner_key_path(state)).public
    bob, stranger = keys.generate().public, keys.generate().public
    keys.enroll(state, "bob", bob)
    enrolment = Enrolment(state, "server", KeyRing(), lambda _: None, lambda: T0, {})

    def users() -> list[str]:
        enrolment.read()
        return [enrolment.unix_user(key, "scavenger") for key in (ours, bob, stranger, "")]

    assert users() == ["scavenger", "bob", "", ""]
    keys.rotate_owner(state, "us")
    assert users() == ["scavenger", "bob", "", ""], "runs are recorded under the owner's first key"
    keys.owner_key_path(state).unlink()
    assert users() == ["us", "bob", "", ""]


def test_only_runs_of_the_daemon_s_own_user_have_environment_workers_in_jobs(tmp_path: Path) -> None:
    """Whoever else names a file of that user's is enrolled, but another user: the job would not be theirs."""
    state = tmp_path / "state"
    keys.init_state(state, "us")
    ours = keys.read_keypair(keys.owner_key_path(state)).public
    bob, joined = keys.generate().public, keys.generate().public
    keys.enroll(state, "bob", bob)
    keys.enroll(state, "joined", joined)
    enrolment = Enrolment(state, "server", KeyRing(), lambda _: None, lambda: T0, {})
    asked = [EnvironmentDemand(i, "run", 1, "/file", one) for i, one in enumerate((ours, bob, joined, ""))]

    def wanted() -> list[str]:
        enrolment.read()
        return [one.owner for one in enrolment.environments_of_owners(asked)]

    assert wanted() == ["us"]
    keys.note_joined(state, "joined", os.getuid())
    keys.note_joined(state, "bob", os.getuid() + 1)
    assert wanted() == ["us", "joined"]
    keys.suspend_owner(state, "joined")
    assert wanted() == ["us"]


def test_a_daemon_that_does_not_harvest_ends_what_it_cannot_follow(tmp_path: Path, url: str) -> None:
    """What an earlier one left open would be charged, and wait, for as long as this one commits."""
    state_dir = tmp_path / "state"
    keys.init_state(state_dir, "ada")
    config = DaemonConfig.model_validate(
        {"daemon": {"state_dir": state_dir, "ledger": url}, "harvest": {"enabled": False}}
    )
    left_open: list[r.Record] = [
        r.TrainingJobStarted(1, 800, "ada", 1, 4, T0),
        r.OtherUserWaits(901, "bob", "gpu", 4, T0, T0, T0),
    ]
    written(url, [*restorable(), left_open])
    ended = (
        "SELECT outcome FROM v_other_users_waits WHERE job_id = 901 AND ended_at IS NOT NULL"
        " UNION ALL SELECT user_name FROM v_training_jobs WHERE job_id = 800 AND ended_at IS NOT NULL"
    )

    async def live() -> None:
        daemon = Daemon(config, None, Manner.TAKE_OVER)
        serving = asyncio.create_task(daemon.run())
        async with asyncio.timeout(WAIT_S):
            while not await asyncio.to_thread(fetch, url, NOTED):
                assert not serving.done(), await serving
                await asyncio.sleep(0.02)
        daemon.stop.set()
        await serving

    asyncio.run(live())
    assert sorted(fetch(url, ended)) == [("ada",), ("unseen",)]
