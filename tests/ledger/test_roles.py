"""What `sql/roles.sql` lets people read in PostgreSQL, and that packed arrays are decoded there to the last bit."""

from __future__ import annotations

import math
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from scavenger import resources
from scavenger.cli.main import app
from scavenger.config import DaemonConfig
from scavenger.daemon import check_config
from scavenger.errors import LedgerError, StartFinding
from scavenger.ledger import queries
from scavenger.ledger import records as r
from scavenger.ledger.read.reports import check, report
from scavenger.ledger.schema import metadata
from scavenger.ledger.store import open_engine, open_readonly
from scavenger.protocol.messages import pack_logprobs, pack_tokens
from scavenger.web import steps
from tests.conftest import lacks
from tests.ledger.conftest import new_database
from tests.ledger.examples import T0, everything, group, prologue, written

pytestmark = pytest.mark.postgres

ROLES = ("scavenger_read", "scavenger_contents")
DAEMON = "scavenger_test_daemon"


@dataclass(frozen=True)
class Site:
    """A ledger that the daemon's own role made, in a database of its own."""

    admin: sa.URL

    def url(self, role: str) -> str:
        """The ledger as `role` sees it: the superuser's session, which gives its rights away first."""
        return self.admin.update_query_dict({"options": f"-c role={role}"}).render_as_string(
            hide_password=False
        )

    def psql(self, *argv: str) -> subprocess.CompletedProcess[str]:
        if missing := lacks("psql"):
            pytest.skip(missing)
        conninfo = self.admin.set(drivername="postgresql").render_as_string(hide_password=False)
        return subprocess.run(
            ["psql", "-X", "-q", *argv, conninfo], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )

    def grant(self) -> subprocess.CompletedProcess[str]:
        return self.psql("-f", str(resources.path("sql/roles.sql")))


def execute(url: sa.URL | str, *statements: str) -> None:
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def scalar(url: str, sql: str) -> object:
    engine = open_readonly(url)
    try:
        with engine.connect() as connection:
            return connection.exec_driver_sql(sql).scalar()
    finally:
        engine.dispose()


@contextmanager
def made_site(postgres: sa.URL) -> Iterator[Site]:
    """Roles belong to the whole server: those that this made go with it."""
    engine = sa.create_engine(postgres, poolclass=sa.NullPool)
    with engine.connect() as connection:
        superuser = connection.scalar(sa.text("SELECT rolsuper FROM pg_roles WHERE rolname = current_user"))
        there = set(connection.scalars(sa.text("SELECT rolname FROM pg_roles")))
    engine.dispose()
    if not superuser:
        pytest.skip("SCAVENGER_TEST_PG names no superuser, whom roles need")
    url = sa.make_url(new_database(postgres))
    if DAEMON not in there:
        execute(postgres, f"CREATE ROLE {DAEMON}")
    execute(
        url,
        f'ALTER DATABASE "{url.database}" OWNER TO {DAEMON}',
        f"GRANT CREATE ON SCHEMA public TO {DAEMON}",
    )
    try:
        yield Site(url)
    finally:
        execute(postgres, f'DROP DATABASE "{url.database}" WITH (FORCE)')
        execute(postgres, *(f"DROP ROLE IF EXISTS {role}" for role in (*ROLES, DAEMON) if role not in there))


@pytest.fixture
def site(postgres: sa.URL) -> Iterator[Site]:
    with made_site(postgres) as made:
        yield made


@pytest.fixture(scope="module")
def ledger(postgres: sa.URL) -> Iterator[Site]:
    """A ledger with a history, and with its roles. Tests only read it."""
    with made_site(postgres) as made:
        written(made.url(DAEMON), everything())
        for _ in range(2):  # it may be run again
            done = made.grant()
            assert (done.returncode, done.stderr) == (0, "")
        yield made


def test_a_reader_may_run_every_report(ledger: Site) -> None:
    for name in queries.report_names():
        assert report(ledger.url("scavenger_read"), name, "csv") == report(ledger.url(DAEMON), name, "csv"), (
            name
        )


def test_a_reader_sees_a_step_s_page_and_is_told_what_prompts_need(ledger: Site) -> None:
    engine = open_readonly(ledger.url("scavenger_read"))
    try:
        with engine.connect() as connection:
            page = steps.step(connection, 1, 1, "all", -1)
            assert "needs the role scavenger_contents" in page.panels[-1].note
            with pytest.raises(LedgerError, match="needs the role scavenger_contents"):
                steps.changed(connection, 1, 2, 1)
    finally:
        engine.dispose()


def asked(url: str, folder: Path) -> StartFinding:
    """What `scavenger check-config` says of this ledger."""
    section = {"state_dir": str(folder), "ledger": url}
    (found,) = (
        f for f in check_config.check(DaemonConfig.model_validate({"daemon": section})) if f.what == "ledger"
    )
    return found


def test_a_role_that_cannot_write_is_refused_before_a_daemon_starts_with_it(
    ledger: Site, tmp_path: Path
) -> None:
    assert asked(ledger.url(DAEMON), tmp_path) == StartFinding("ledger", "")
    for role in ("scavenger_read", "scavenger_contents"):
        problem = asked(ledger.url(role), tmp_path).problem
        assert (
            f"the role {role} may not write rows of alembic_version (and of {len(metadata.tables)} more tables)"
            in problem
        )
        assert "name the daemon's own role" in problem


def test_a_database_without_tables_is_said_to_get_them_or_refused(site: Site, tmp_path: Path) -> None:
    assert asked(site.url(DAEMON), tmp_path).note == "its tables are not there yet; they are made"
    schema = "REVOKE CREATE ON SCHEMA public FROM PUBLIC"
    execute(site.admin, schema, "CREATE ROLE scavenger_test_guest")
    try:
        problem = asked(site.url("scavenger_test_guest"), tmp_path).problem
        assert "the role scavenger_test_guest may not make tables in the schema public" in problem
    finally:
        execute(site.admin, "DROP ROLE scavenger_test_guest")


def test_the_readers_configuration_works_as_it_is_printed(ledger: Site, tmp_path: Path) -> None:
    """docs/ledger.md, but for the address of the database."""
    page = resources.path("docs/ledger.md").read_text()
    printed = next(part for part in page.split("```")[1::2] if part.startswith("toml\n# reader.toml"))
    url = "postgresql://ann@db.example.org/scavenger"
    assert url in printed
    path = tmp_path / "reader.toml"
    path.write_text(printed.removeprefix("toml\n").replace(url, ledger.url("scavenger_read")))
    done = CliRunner().invoke(app, ["ledger", "report", "preemptions", "--config", str(path)])
    assert (done.exit_code, "tokens_salvaged" in done.output) == (0, True), done.output


def test_a_reader_may_run_every_report_in_psql(ledger: Site) -> None:
    files = [
        part
        for name in queries.report_names()
        for part in ("-f", str(resources.path(f"sql/reports/{name}.sql")))
    ]
    done = ledger.psql("-v", "ON_ERROR_STOP=1", "-c", "SET ROLE scavenger_read", *files)
    assert (done.returncode, done.stderr) == (0, "")


DENIED = [
    "SELECT tokens FROM chunks",
    "SELECT logprobs FROM chunks",
    "SELECT prompt FROM groups",
    "SELECT meta FROM groups",
    "SELECT config FROM runs",
    "SELECT n_tokens FROM chunks",
    "SELECT tokens FROM v_sample_tokens",
    "SELECT prompt FROM v_sample_tokens",
]
WRITES = [
    "INSERT INTO events (kind, run_id, subject, reason, detail, at) VALUES ('x', 0, '', '', '', 0)",
    "DELETE FROM chunks",
    "UPDATE runs SET name = 'x'",
    "TRUNCATE samples",
    "INSERT INTO v_events (kind, run_id, subject, reason, detail, at)"
    " SELECT kind, run_id, subject, reason, detail, at FROM v_events",
    "UPDATE v_runs SET name = 'x'",
    "DELETE FROM v_chunks",
    "CREATE TABLE mine (x int)",
    "DROP VIEW v_chunks",
    "ALTER TABLE chunks ADD COLUMN x int",
]


def denied(url: str, sql: str) -> str:
    """What the server says to `sql`. The session may write as far as the connection goes: only the role's rights stop it."""
    engine = open_engine(url)
    try:
        with engine.connect() as connection, pytest.raises(sa.exc.ProgrammingError) as caught:
            connection.exec_driver_sql(sql)
        return str(caught.value.orig)
    finally:
        engine.dispose()


@pytest.mark.parametrize("sql", DENIED)
def test_a_reader_sees_no_contents(ledger: Site, sql: str) -> None:
    assert "permission denied" in denied(ledger.url("scavenger_read"), sql)
    scalar(ledger.url("scavenger_contents"), sql)  # the statement itself is sound


def test_nobody_but_the_daemon_writes(ledger: Site) -> None:
    for role in ROLES:
        for sql in WRITES:
            assert any(
                word in denied(ledger.url(role), sql) for word in ("permission denied", "must be owner")
            ), (role, sql)


def test_every_view_is_in_the_hands_of_one_role(ledger: Site) -> None:
    """A view that is new shows up here: it must be given to readers by name, or hold contents."""
    sql = (
        "SELECT relname, has_table_privilege('scavenger_read', oid, 'SELECT') FROM pg_class"
        " WHERE relkind = 'v' AND relnamespace = 'public'::regnamespace"
    )
    engine = open_readonly(ledger.url(DAEMON))
    with engine.connect() as connection:
        seen = dict(tuple(row) for row in connection.exec_driver_sql(sql))
    engine.dispose()
    assert [view for view, readable in sorted(seen.items()) if not readable] == ["v_sample_tokens"]
    assert len(seen) > 20


def test_contents_are_decoded_in_sql(ledger: Site) -> None:
    url = ledger.url("scavenger_contents")
    assert scalar(url, "SELECT tokens FROM v_sample_tokens WHERE sample_id = 11") == [
        11000 + i for i in range(9)
    ]
    assert scalar(url, "SELECT prompt FROM v_sample_tokens WHERE sample_id = 11") == [7, 8, 9]
    # `chunk` counts a chunk's logprobs from its own offset on
    assert scalar(url, "SELECT logprobs FROM v_sample_tokens WHERE sample_id = 11") == [
        -0.5 - i for i in range(9)
    ]
    assert report(url, "preemptions", "csv") == report(ledger.url(DAEMON), "preemptions", "csv")
    assert check(url) == []


def test_the_file_says_what_is_missing(site: Site) -> None:
    done = site.grant()
    assert done.returncode != 0
    assert "has no ledger" in done.stderr
    assert "start this release's daemon" in done.stderr


def test_a_ledger_without_views_is_named_as_the_cause(site: Site) -> None:
    written(site.url(DAEMON), everything())
    engine = open_engine(site.url(DAEMON))
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0004'")
    engine.dispose()
    with pytest.raises(
        LedgerError, match=r"revision 0004, which was never released(.|\n)*scavenger ledger export"
    ):
        report(site.url(DAEMON), "runs")


# ---------------------------------------------------------------- decoding

SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    1.0,
    -1.0,
    2.0**-149,
    -(2.0**-149),
    2.0**-126,
    2.0**-126 - 2.0**-149,
    3.4028234663852886e38,
    -3.4028234663852886e38,
    1.0000001192092896,
    0.1,
]


def test_float32_is_decoded_to_the_last_bit(site: Site) -> None:
    bits = np.random.default_rng(7).integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    values = np.concatenate([np.array(SPECIAL, np.float32), bits[~np.isnan(bits)]])
    ids = [0, 1, -1, 255, 256, 65536, 2**31 - 1, -(2**31), 0x01020304]
    packed = pack_logprobs(values.tolist())
    written(site.url(DAEMON), [prologue(), [group(10, 11, 1, 1, 1), r.LeaseGranted(11, 1, 1, 1, 0, T0)]])
    engine = open_readonly(site.url(DAEMON))
    with engine.connect() as connection:
        floats = connection.scalar(sa.text("SELECT ledger_float32(:packed)"), {"packed": packed})
        nan = connection.scalar(
            sa.text("SELECT ledger_float32(:packed)"), {"packed": struct.pack("<f", math.nan)}
        )
        ints = connection.scalar(sa.text("SELECT ledger_int32(:packed)"), {"packed": pack_tokens(ids)})
        empty = connection.execute(
            sa.text("SELECT ledger_int32(:packed), ledger_float32(:packed)"), {"packed": b""}
        ).one()
        answer = connection.execute(
            sa.text("SELECT tokens, logprobs, raw_logprobs FROM v_sample_tokens")
        ).one()
    engine.dispose()
    assert np.array(floats, np.float32).tobytes() == packed
    assert math.isnan(nan[0])
    assert ints == ids
    assert tuple(empty) == ([], [])
    assert tuple(answer) == ([], [], [])  # a sample without a token
