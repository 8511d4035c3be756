"""A private PostgreSQL leaves no process behind, however the one that started it ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from scavenger.cluster import processes
from tests.ledger.examples import WAIT_S
from tests.private_postgres import PrivatePostgres, create_database

pytestmark = pytest.mark.postgres

HOLDER = """
import sys
from tests.private_postgres import PrivatePostgres
with PrivatePostgres({"fsync": "off"}) as server:
    print(server.pid, server.log_path.parent, flush=True)
    sys.stdin.read()
"""


def gone(pid: int) -> bool:
    found = processes.read_proc(pid)
    return found is None or found.state == "Z"


def test_it_serves_databases_and_goes_with_its_block() -> None:
    with PrivatePostgres({"fsync": "off"}) as server:
        pid, home = server.pid, server.log_path.parent
        engine = sa.create_engine(create_database(server.url, "mine"), poolclass=sa.NullPool)
        with engine.connect() as connection:
            found = connection.execute(
                sa.text(
                    "SELECT current_database(), current_setting('fsync'), current_setting('listen_addresses')"
                )
            )
            assert tuple(found.one()) == ("mine", "off", "")
        engine.dispose()
    assert gone(pid)
    assert not home.exists()


def test_it_ends_when_the_process_that_started_it_is_killed() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        try:
            pid, home = holder.stdout.readline().split()
        finally:
            holder.kill()
    try:
        give_up = time.monotonic() + WAIT_S
        while not gone(int(pid)):
            assert time.monotonic() < give_up
            time.sleep(0.02)  # between two looks
    finally:
        shutil.rmtree(Path(home))
