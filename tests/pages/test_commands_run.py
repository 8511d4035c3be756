"""Every command that a page shows is run: here in the page's order, or by the test that `table` names for it.

A page's `Here` commands share one `Place`, which is up once for all pages; those marked `long` are left to scripts/test --long.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scavenger import toml
from scavenger.ledger import store
from tests.pages import commands, made_traces
from tests.pages.commands import ROOT, Command
from tests.pages.place import Place
from tests.pages.table import PAGES, QUOTED, By, Entry, Here, Not
from tests.system.play import wait_for

SERVICES = (pytest.mark.slurm, pytest.mark.accounting, pytest.mark.postgres, pytest.mark.timeout(900))
#: Commands that no test can run, at most: a page that needs another one had better show something else.
MOST_NOT = 2


def listed(name: str) -> list[Command]:
    return list(dict.fromkeys(commands.blocks(commands.read(name))))


def in_prose() -> list[str]:
    """Commands that prose quotes and no block has, but for such as begin another one."""
    known = {one.text for name in PAGES for one in listed(name)} | set(QUOTED)
    found = dict.fromkeys(one.text for name in PAGES for one in commands.quoted(commands.read(name)))
    return [
        one
        for one in found
        if not any(other == one or other.startswith(f"{one} ") for other in known - set(QUOTED))
    ]


def entries() -> list[tuple[str, str, Entry]]:
    found = [(page, text, entry) for page, table in PAGES.items() for text, entry in table.items()]
    return found + [("prose", text, entry) for text, entry in QUOTED.items()]


# ---------------------------------------------------------------- the table


def test_every_page_of_the_site_that_shows_commands_is_in_the_table() -> None:
    """History, reference that is made from the code, and pages for who develops this are not."""
    beside = {
        "docs/cli.md",
        "docs/changelog-archive.md",
        "docs/benchmarks-archive.md",
        "docs/benchmarks.md",
        "docs/tour.md",
        "docs/architecture.md",
    }
    with_blocks = {
        path.relative_to(ROOT).as_posix()
        for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
        if any(not one.sql for one in commands.blocks(path.read_text(encoding="utf-8")))
    }
    assert with_blocks - beside - PAGES.keys() == set(), "put the page into tests/pages/table.py"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_has_its_place_in_the_table(page: str) -> None:
    shown = [one.text for one in listed(page) if not one.sql]
    new = [text for text in shown if text not in PAGES[page]]
    gone = [text for text in PAGES[page] if text not in shown]
    assert new == [], "say in tests/pages/table.py whether it runs `Here`, `By` which test, or why `Not`"
    assert gone == [], "no page has it any more: take it out of tests/pages/table.py"


def test_every_command_that_prose_quotes_has_its_place_in_the_table() -> None:
    shown = in_prose()
    assert [text for text in shown if text not in QUOTED] == [], (
        "say in QUOTED of tests/pages/table.py what becomes of it"
    )
    assert [text for text in QUOTED if text not in shown] == [], (
        "no page quotes it any more, or a block has it"
    )


def test_tests_that_the_table_names_are_there() -> None:
    for named in {entry.test for *_, entry in entries() if isinstance(entry, By | Not)}:
        path, _, name = named.partition("::")
        found = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        names = {one.name for one in ast.walk(found) if isinstance(one, ast.FunctionDef)}
        assert name in names, f"{path} has no {name}"


def test_few_commands_are_run_by_nothing() -> None:
    reasons = {text: entry.reason for _, text, entry in entries() if isinstance(entry, Not)}
    assert all(reasons.values())
    assert len(reasons) <= MOST_NOT, "\n".join(f"{text}: {reason}" for text, reason in reasons.items())


# ---------------------------------------------------------------- the commands


class Settings:
    """What a command needs before it, by the names that the table uses."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def make(self, name: str, page: str) -> None:
        made: Callable[[Path], None] = getattr(self, f"_{name}")
        made(self.place.folder(page))

    def _well(self, text: str, page: str = "none") -> str:
        done = self.place.run(text, page)
        assert done.status == 0, f"{text}\n{done.said}"
        return done.said

    def _served(self, folder: Path) -> None:
        self.place.served()

    def _stopped(self, folder: Path) -> None:
        self.place.stopped()

    def _accounts(self, folder: Path) -> None:
        """Slurm has the account `scavenger`, and no user of its name. The daemon asks slurmdbd for nothing of it."""
        self.place.run("sacctmgr -i add account scavenger")

    def _no_accounts(self, folder: Path) -> None:
        """As on a site before its admin has begun."""
        for what in ("user scavenger", "qos scavenge", "account scavenger"):
            self.place.run(f"sacctmgr -i delete {what}")

    def _drafted(self, folder: Path) -> None:
        """The page's run, where an earlier command of it has not made it."""
        self._served(folder)
        if not (folder / "my-run").exists():
            self._well("scavenger init my-run --model MODEL --data PROMPTS", f"docs/{folder.name}.md")

    def _small(self, folder: Path) -> None:
        """The drafted run on the built-in engine, with two short steps: there is no GPU here."""
        self._drafted(folder)
        self.place.small(folder / "my-run/run.toml")

    def _first(self, folder: Path) -> None:
        if not (folder / "first").exists():
            self._well("scavenger init first --tiny", f"docs/{folder.name}.md")

    def _dump(self, folder: Path) -> None:
        """As docs/simulate.md has them made, of this Slurm: some jobs with GPUs have ended on it."""
        if not (folder / "dump.txt").exists():
            self._well("for i in 1 2 3; do srun -p normal --gpus=4 sleep 1; done")
            ended = "sacct -n -a -X -r normal -S now-1hours -E now -o State | grep -c COMPLETED || true"
            wait_for("slurmdbd knows of them", lambda: int(self._well(ended)) >= 3, 60)
            for text in PAGES["docs/simulate.md"]:
                if text.endswith(("> dump.txt", "> nodes.txt")):
                    self._well(text, f"docs/{folder.name}.md")

    def _trace(self, folder: Path) -> None:
        shutil.copy(ROOT / "tests/data/simulate/nodes.csv", folder / "idle.csv")
        run = commands.read("examples/site/run.toml").replace(
            "/shared/models/qwen3-0.6b", f"{self.place.root}/model"
        )
        (folder / "run.toml").write_text(run)

    def _traces(self, folder: Path) -> None:
        """In place of the real ones, which are not in this repository: made-up ones of their names and columns."""
        made_traces.write(folder / "traces")

    def _demo(self, folder: Path) -> None:
        """A recorded run, where the quickstart would have left its own."""
        (folder / "demo-out/run-1/state").mkdir(parents=True)
        (folder / "demo-out/run-1/scavenger.toml").write_text(
            toml.dumps({"daemon": {"state_dir": f"{folder}/demo-out/run-1/state"}})
        )
        recorded = gzip.decompress((ROOT / "tests/data/simulate/demo_ledger.gz").read_bytes())
        (folder / "demo-out/run-1/state/ledger.sqlite3").write_bytes(recorded)
        store.upgrade(f"sqlite:///{folder}/demo-out/run-1/state/ledger.sqlite3")

    def _training(self, folder: Path) -> None:
        """The page's first run, begun: nothing holds its partition any more."""
        self._served(folder)
        self._well("scancel --state=RUNNING --partition=reserved")
        if not (folder / "YOU-first").exists():
            self._well("scavenger init YOU-first --tiny --partition reserved", f"docs/{folder.name}.md")
        self._well("sbatch YOU-first/train.sbatch", f"docs/{folder.name}.md")
        wait_for("the job begins", lambda: list(folder.glob("YOU-first/train-*.log")), 120)

    def _tried(self, folder: Path) -> None:
        """A try without a cluster of the folder's run, to its end."""
        name = "my-run" if (folder / "my-run").exists() else "first"
        if not list(folder.glob(f"{name}/**/local")):
            self._served(folder)
            if name == "first":
                self._first(folder)
            self.place.small(folder / name / "run.toml")
            self._well(f"python -m trainer {name}/run.toml --local", f"docs/{folder.name}.md")

    def _points(self, folder: Path) -> None:
        points = [
            {"batch": batch, "context": 2048, "tokens_per_s": 900.0 * batch / (8 + batch / 16)}
            for batch in (1, 8, 32, 128)
        ]
        (folder / "points.json").write_text(json.dumps(points))

    def _postgres(self, folder: Path) -> None:
        self.place.postgres()

    def _reader(self, folder: Path) -> None:
        """The page's reader.toml, at the database that is here."""
        (text,) = [
            match[3]
            for match in commands.BLOCK.finditer(commands.read("docs/ledger.md"))
            if match[3].startswith("# reader.toml")
        ]
        url = self.place.postgres().replace("ledger@", "ann@").replace("/postgres", "/scavenger")
        was = "postgresql://ann@db.example.org/scavenger"
        assert was in text
        (folder / "reader.toml").write_text(text.replace(was, url))


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with Place() as made:
        yield made


def play(place: Place, page: str, table: dict[str, Entry], *, long: bool = False) -> None:
    """Run its commands, those that take long or all others, and tell of all that went wrong."""
    settings, wrong = Settings(place), []
    for text, entry in table.items():
        if not isinstance(entry, Here) or entry.long is not long:
            continue
        for name in entry.needs:
            settings.make(name, page)
        done = place.run(text, page, put=entry.put, until=entry.until)
        expected = {0, 143, 130} if entry.until else {entry.status}
        if (
            done.status not in expected
            or not re.search(entry.says or entry.until, done.said)
            or "Traceback" in done.said
        ):
            wrong.append(
                f"$ {text}\n-> {done.status}, expected {expected} {entry.says!r}\n{done.said[-1500:]}"
            )
    assert not wrong, "\n\n".join(wrong)


HERE = [page for page, table in PAGES.items() if any(isinstance(one, Here) for one in table.values())]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=SERVICES) for page in HERE], ids=lambda page: Path(page).stem
)
def test_the_commands_of_a_page_run_in_its_order(place: Place, page: str) -> None:
    play(place, page, PAGES[page])


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.accounting
@pytest.mark.timeout(900)
def test_the_commands_that_prose_quotes_run(place: Place) -> None:
    play(place, "prose", QUOTED)


#: Only PostgreSQL has arrays: the page says so.
ARRAYS = "v_sample_tokens"
STATEMENTS = [(page, one.text) for page in PAGES for one in listed(page) if one.sql]


@pytest.mark.slurm
@pytest.mark.accounting
@pytest.mark.postgres
def test_the_statements_of_pages_run_in_sqlite3_and_psql(place: Place) -> None:
    assert len(STATEMENTS) >= 7
    place.served()
    place.postgres()
    wrong = []
    for page, sql in STATEMENTS:
        programs = ["psql -X -v ON_ERROR_STOP=1 -d scavenger -f"]
        if ARRAYS not in sql:
            programs.append("sqlite3 -readonly -bail /var/lib/scavenger/ledger.sqlite3 <")
        (place.folder(page) / "asked.sql").write_text(sql)
        for program in programs:
            done = place.run(f"{program} asked.sql", page)
            if done.status != 0:
                wrong.append(f"{page}, {program}\n{sql}\n{done.said}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.accounting
@pytest.mark.mpi
@pytest.mark.timeout(3000)
def test_the_commands_that_take_long_run(place: Place) -> None:
    for page, table in PAGES.items():
        play(place, page, table, long=True)
    play(place, "prose", QUOTED, long=True)
