"""Over real sockets and a real ledger: a backup put back, another host, another release and other keys, while engines and trainers work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from scavenger.client import Client
from scavenger.config import DaemonConfig
from scavenger.daemon import ownership
from scavenger.errors import CheckpointAhead, LedgerRestored, Refused, StaleAttempt
from scavenger.ledger.maintain import backup
from scavenger.ledger.read import reports
from scavenger.protocol import keys, messages
from tests.ledger.conftest import new_database
from tests.ledger.conftest import postgres as postgres
from tests.router.edge import LiveDaemon, ScriptedWorker
from tests.router.harness import specs
from tests.router.test_edge import check_groups, collect, eventually, open_run, publish


def unsound(url: str) -> list[str]:
    """What `ledger check` finds. These workers have no jobs and nothing harvests: no allocation is to be found for them."""
    return [found for found in reports.check(url) if "an engine without an allocation" not in found]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LiveDaemon]:
    with LiveDaemon(tmp_path / "state") as live:
        yield live


@pytest.fixture
def workers(daemon: LiveDaemon) -> Iterator[list[ScriptedWorker]]:
    """Started by the test."""
    made = [ScriptedWorker(daemon.state_dir, daemon.worker_key(f"j{i}"), f"s{i}", 0.03) for i in range(3)]
    yield made
    end(made)


def end(made: list[ScriptedWorker]) -> None:
    for worker in made:
        worker.halt.set()
    for worker in made:
        if worker.ident is not None:
            worker.join(10)
        assert worker.error is None


def test_after_a_restore_everybody_ends_or_begins_anew_and_the_ledger_is_sound(
    daemon: LiveDaemon, workers: list[ScriptedWorker], tmp_path: Path
) -> None:
    config = DaemonConfig.model_validate({"daemon": {"state_dir": daemon.state_dir}})
    with Client.connect(daemon.state_dir) as old:
        run = open_run(old, daemon)
        publish(run, 1)
        for worker in workers:
            worker.start()
        run.submit(1, 1, specs(4, 2))
        run.commit(1, 1, check_groups(collect(run, 4)), {})
        run.submit(2, 1, specs(4, 4))
        found = collect(run, 1)
        backup.backup(
            daemon.url, tmp_path / "copy"
        )  # in mid-step: leases are open, and will be closed in the history that is given up
        run.commit(2, 1, check_groups(found + collect(run, 4 - len(found))), {})
        publish(run, 2, step=2)
        run.submit(3, 2, specs(4, 4))
        collect(run, 1)
        daemon.kill()
        generation = ownership.restore_ledger(
            config, tmp_path / "copy", force=True
        ).generation  # committed a moment ago, elsewhere
        daemon.start()
        assert daemon.writer.generation == generation + 1
        with pytest.raises(LedgerRestored, match="restored from a backup"):
            collect(run, 1000)
    with Client.connect(daemon.state_dir) as new:
        with pytest.raises(CheckpointAhead) as ahead:
            open_run(new, daemon, resume_step=2)
        assert ahead.value.last_step == 1
        run = open_run(new, daemon, resume_step=1)
        assert run.attempt == 2
        run.call(
            messages.PublishVersion(
                run.next_version,
                1,
                b"root-2",
                b"manifest",
                (messages.WeightSource("tcp://127.0.0.1:1", "key", b"t"),),
            )
        )
        run.submit(2, 2, specs(4, 4))
        run.commit(2, 2, check_groups(collect(run, 4, 30)), {})
        run.close_run("finished")
    assert unsound(daemon.url) == []
    assert daemon.query("SELECT state, count(*) FROM samples WHERE state = 'consumed' GROUP BY state") == [
        ("consumed", 24)
    ]
    began = "SELECT count(*) FROM generations WHERE code_version LIKE 'restored from %'"
    assert daemon.query(began) == [(1,)]
    written = "SELECT count(*) FROM events WHERE kind = 'history_began' AND reason LIKE 'restored from %'"
    assert daemon.query(written) == [(1,)]


def test_a_worker_goes_on_over_a_daemon_s_restart(daemon: LiveDaemon, workers: list[ScriptedWorker]) -> None:
    """An upgrade with jobs running: the newer daemon takes their leases up where they were."""
    with Client.connect(daemon.state_dir) as client:
        run = open_run(client, daemon)
        publish(run, 1)
        workers[2]._pace = 0.1
        workers[2].start()
        run.submit(1, 1, specs(2, 2))
        eventually(lambda: daemon.query("SELECT count(*) FROM chunks") != [(0,)])
        daemon.kill()
        daemon.start()
        run.commit(1, 1, check_groups(collect(run, 2, 30)), {})
    assert daemon.query("SELECT max(epoch) FROM leases") == [(1,)], "every lease went on under its epoch"


def test_keys_are_changed_under_a_run_and_nobody_notices_who_should_not(
    daemon: LiveDaemon, workers: list[ScriptedWorker]
) -> None:
    state = daemon.state_dir
    with Client.connect(state) as old:
        run = open_run(old, daemon)
        publish(run, 1)
        for worker in workers:
            worker.start()
        run.submit(1, 1, specs(4, 2))
        found = collect(run, 1)
        keys.rotate_owner(state, "owner")
        keys.rotate_server(state)
        daemon.allow_owners()
        daemon.stop()
        daemon.start()
        collect(run, 4 - len(found), 30)
        assert daemon.query("SELECT count(*) FROM workers") == [(3,)], (
            "the engines found the daemon under its new key"
        )
        with Client.connect(state) as new:  # reads the new key
            second = open_run(new, daemon)
            assert second.attempt == 2, "the run is the same owner's"
            with pytest.raises(StaleAttempt):
                run.call(messages.SetReserved(True))
            keys.retire_owner_keys(state, "owner")
            daemon.allow_owners()
            with pytest.raises(Refused, match="this key was revoked"):
                run.call(messages.SetReserved(True))
            second.call(messages.SetReserved(True))
            keys.retire_all_owner_keys(state, "owner")
            daemon.allow_owners()
            with pytest.raises(Refused, match="this key was revoked"):
                second.call(messages.SetReserved(True))
        keys.rotate_owner(state, "owner")
        daemon.allow_owners()
        with Client.connect(state) as back:
            assert open_run(back, daemon).attempt == 3, "the run stays the owner's"


@pytest.mark.postgres
def test_a_daemon_started_elsewhere_on_the_same_database_takes_over(tmp_path: Path, postgres: sa.URL) -> None:
    """Failover: the first daemon hangs on its host, and is alive when the second has taken over."""
    url = new_database(postgres)
    with LiveDaemon(tmp_path / "state", url) as first:
        made = [ScriptedWorker(first.state_dir, first.worker_key(f"j{i}"), f"s{i}", 0.05) for i in range(2)]
        with Client.connect(first.state_dir) as client:
            run = open_run(client, first)
            publish(run, 1)
            for worker in made:
                worker.start()
            run.submit(1, 1, specs(6, 4))
            found = collect(run, 1)
            for worker in made:  # some samples are left for a transaction after the takeover
                worker._pace = 1.0
            with LiveDaemon(first.state_dir, url, first.keyring) as second:
                assert first.fenced.wait(20), "its next transaction is refused"
                for worker in made:
                    worker._pace = 0.05
                found += collect(run, 6 - len(found), 30)
                run.commit(1, 1, check_groups(found), {})
                assert client.generation == second.writer.generation == 2
                assert second.query("SELECT state, count(*) FROM samples GROUP BY state") == [
                    ("consumed", 24)
                ]
                assert unsound(url) == []
                end(made)
