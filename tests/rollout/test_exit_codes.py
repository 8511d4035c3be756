"""The worker's exit codes are one table: those who read them may not import it, and say the same."""

from __future__ import annotations

import re
from pathlib import Path

from scavenger.harvest.track import observed_jobs, set_up
from scavenger.protocol.worker import events
from trainer import reserved

ROOT = Path(__file__).resolve().parents[2]
CODES = {name.removeprefix("EXIT_"): code for name, code in vars(events).items() if name.startswith("EXIT_")}


def test_who_acts_on_a_code_has_the_worker_s() -> None:
    assert len(CODES) == len(set(CODES.values())) > 5
    assert observed_jobs.REFUSED == events.EXIT_REFUSED
    assert events.EXIT_NO_DAEMON == set_up.NO_DAEMON
    assert {events.EXIT_NO_DAEMON, events.EXIT_ENGINE_FAILED, events.EXIT_CANNOT_START} == set(
        set_up.CANNOT_BEGIN
    )
    assert set_up.REMEDIES.keys() == set_up.CANNOT_BEGIN.keys()
    assert events.EXIT_PREEMPTED in observed_jobs._LEFT_ON_NOTICE
    assert not ({*CODES.values()} - {events.EXIT_PREEMPTED}) & {*observed_jobs._LEFT_ON_NOTICE}, (
        "no other is a leave on notice"
    )
    engine = (reserved.ENGINE_DRAINED, reserved.ENGINE_CANNOT_START, reserved.ENGINE_REFUSED)
    assert engine == (events.EXIT_DRAINED, events.EXIT_CANNOT_START, events.EXIT_REFUSED)


def test_every_code_is_in_the_table_and_in_the_job_script() -> None:
    table = dict(re.findall(r"^    (\d+) +(\w+(?: \w+)?)  ", events.__doc__ or "", re.MULTILINE))
    assert {int(code): name.upper().replace(" ", "_") for code, name in table.items()} == {
        code: name for name, code in CODES.items()
    }
    script = (ROOT / "scripts" / "rollout.sbatch.j2").read_text()
    head = " ".join(line.removeprefix("#").strip() for line in script.splitlines() if line.startswith("#"))
    told = re.search(r"Exit codes of the worker [^:]*: ([^.]*)\.", head.replace("events.py", "events"))
    assert told is not None
    assert dict(one.split(" ", 1) for one in told[1].split(", ")) == table
    assert f'"$code" -ne {events.EXIT_PREEMPTED} ]' in script


def test_the_admin_s_page_names_the_codes_that_blame_a_node_and_that_do_not() -> None:
    page = (ROOT / "docs" / "admin.md").read_text()
    assert f"refuses (exit code {events.EXIT_REFUSED}," in page
    assert f"(exit code {events.EXIT_CANNOT_START}:" in page
