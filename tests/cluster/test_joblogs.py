"""Engines' logs stay within their bound, and no job that still writes loses its log."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

from scavenger.cluster.job_logs import TAIL_BYTES, LogBounds, LogFile, bound, last_words, plan
from tests.proxies import ENGINES, do_as

MB = 2**20


def test_what_is_within_the_bound_is_left_alone() -> None:
    assert plan([LogFile("a.log", MB, 1.0), LogFile("b.log", MB, 2.0)], (), 16 * MB) == LogBounds((), ())


def test_the_oldest_of_ended_jobs_go_first_and_one_that_may_still_write_never() -> None:
    files = [
        LogFile(f"{name}.log", 2 * MB, at)
        for name, at in (("old", 1.0), ("mine", 0.0), ("newer", 2.0), ("newest", 3.0))
    ]
    files += [LogFile(f"x{n}.log", 2 * MB, 10.0 + n) for n in range(6)]
    assert plan(files, {"mine.log"}, 16 * MB) == LogBounds((), ("old.log", "newer.log"))


def test_one_log_that_is_too_large_is_cut_also_while_its_job_writes() -> None:
    assert plan([LogFile("loud.log", 3 * MB, 1.0)], {"loud.log"}, 16 * MB) == LogBounds(("loud.log",), ())


def test_a_log_is_cut_under_the_job_that_appends_to_it_and_keeps_its_last_words(tmp_path: Path) -> None:
    path = tmp_path / "scv-1.log"
    (tmp_path / "notes.txt").write_bytes(b"x" * 5 * MB)
    with path.open("ab", buffering=0) as job:  # as Slurm's --open-mode=append
        for number in range(40_000):
            job.write(b"complaint number %010d, and much more of the same sort\n" % number)
        assert bound(tmp_path, {"scv-1.log"}, 8 * MB) == LogBounds(("scv-1.log",), ())
        job.write(b"the last word\n")
    text = path.read_bytes()
    assert len(text) < 2 * TAIL_BYTES
    assert text.startswith(b"[scavenger: this log was too large")
    assert text.endswith(b"complaint number 0000039999, and much more of the same sort\nthe last word\n")
    assert b"\0" not in text, "an append goes to the end of what is left"
    assert (tmp_path / "notes.txt").stat().st_size == 5 * MB, "not a job's log"


def test_ended_jobs_logs_go_until_the_rest_fits(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / f"scv-{number}.log"
        path.write_bytes(b"x" * (MB // 8))
        os.utime(path, (number, number))
    assert bound(tmp_path, {"scv-0.log"}, MB // 2).remove == ("scv-1.log", "scv-2.log")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"scv-{number}.log" for number in (0, 3, 4, 5)
    ]


def test_the_last_word_is_the_worker_s_own_else_the_last_line_that_is_not_slurm_s(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    assert last_words(path) == ""
    path.write_text("Traceback\nModuleNotFoundError: No module named 'rollout'\nsrun: error: node1: task 0\n")
    assert last_words(path) == "ModuleNotFoundError: No module named 'rollout'"
    path.write_text("rollout: engine 'vllm' cannot be imported\n  remedy: install it\nsrun: error: task 0\n")
    assert last_words(path) == "engine 'vllm' cannot be imported"
    path.write_bytes(b"x" * (2 * TAIL_BYTES) + b"\nrollout: \x1b[2Jno \xff daemon\n")
    assert last_words(path) == "?[2Jno \N{REPLACEMENT CHARACTER} daemon"
    path.write_text("rollout: " + "y" * 1000)
    assert len(last_words(path)) == 300


def test_a_log_that_cannot_be_touched_keeps_no_other_from_its_bound() -> None:
    """One oversized log of mode 000 was enough that none was cut or removed."""
    with tempfile.TemporaryDirectory(prefix="scv-") as made:
        folder = Path(made)
        for number, name in enumerate(("scv-locked", "scv-loud", "scv-old")):
            path = folder / f"{name}.log"
            path.write_bytes(b"x\n" * (MB if name != "scv-old" else TAIL_BYTES // 2))
            os.utime(path, (number - 10 * (name == "scv-old"),) * 2)
        (folder / "scv-locked.log").chmod(0)
        live = {"scv-locked.log", "scv-loud.log"}

        def act() -> LogBounds:
            return bound(folder, live, 2 * TAIL_BYTES)

        if os.geteuid() == 0:  # root may read any file
            user = pwd.getpwnam(ENGINES)
            for path in (folder, folder / "scv-loud.log", folder / "scv-old.log"):
                os.chown(path, user.pw_uid, user.pw_gid)
            said = do_as(ENGINES, act)
        else:
            said = str(act())
        assert said == str(LogBounds(("scv-loud.log",), ("scv-old.log",)))
        assert (folder / "scv-loud.log").stat().st_size < 2 * TAIL_BYTES
        assert (folder / "scv-locked.log").stat().st_size == 2 * MB
