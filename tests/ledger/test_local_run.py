"""The ledger of a run that one process makes alone: sound after every way in which such a process ends, and begins again."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scavenger import config as configs
from scavenger.cli.main import app as commands
from scavenger.errors import LedgerError, LedgerRefused
from scavenger.ledger import local_run, store
from scavenger.ledger.local_run import LocalLedger
from scavenger.ledger.read import reader, reports
from scavenger.protocol import messages
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest, Tensor

SAMPLING = messages.Sampling(4)
PROMPT = messages.pack_tokens((3, 4))


def opened(folder: Path, resume_step: int = 0, **more: Any) -> LocalLedger:
    given: dict[str, Any] = {
        "seed": 0,
        "config": "{}",
        "engine": "{}",
        "tokenizer": "",
        "host": "here",
        "say": print,
    }
    return LocalLedger(folder, "try", resume_step=resume_step, **(given | more))


def version_of(number: int) -> Manifest:
    return manifests.seal(number, (Tensor("w", "float32", (1,), 0, 4),), (bytes(32),), chunk_nbytes=4)


def submit(ledger: LocalLedger, step: int, purpose: str = "train", prompt: int = 0) -> tuple[int, int]:
    spec = messages.GroupSpec(prompt, PROMPT, 2, SAMPLING, "{}")
    return ledger.submitted(step, ledger.next_version, spec, purpose)


def finish(ledger: LocalLedger, sample: int) -> None:
    packed, logprobs = messages.pack_tokens((1, 2)), messages.pack_logprobs((-0.5, -0.25))
    ledger.finished(
        messages.DoneSample(sample, 0, packed, logprobs, logprobs, "stop", 0), ledger.next_version
    )


def take_step(ledger: LocalLedger, step: int, purpose: str = "train", outcome: str = "consumed") -> None:
    group, first = submit(ledger, step, purpose)
    finish(ledger, first)
    finish(ledger, first + 1)
    ledger.delivered(group)
    ends = [
        messages.SampleOutcome(first, outcome, 1.0, 0.5, "", "f"),
        messages.SampleOutcome(first + 1, "masked", math.nan, 0.0, "why"),
    ]
    ledger.committed(step, ledger.next_version, ends, {"reward": 1.0}, purpose)


def begun(folder: Path, resume_step: int = 0, **more: Any) -> LocalLedger:
    ledger = opened(folder, resume_step, **more)
    ledger.published(resume_step, version_of(ledger.next_version), 4)
    return ledger


def url_of(folder: Path) -> str:
    return configs.read_daemon(folder / local_run.CONFIG).ledger_url


def killed(ledger: LocalLedger) -> None:
    """As by SIGKILL: what was written is there, and nothing more comes."""
    assert ledger._writer is not None
    assert ledger._writer.close()


@pytest.fixture(autouse=True)
def sound(tmp_path: Path) -> Iterator[None]:
    yield
    assert reports.check(url_of(tmp_path)) == []


def test_a_try_that_finished_is_read_by_the_configuration_beside_it(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    take_step(ledger, 0, "eval", "evaluated")
    take_step(ledger, 1)
    ledger.checkpointed(1, 1, b"root", "/checkpoint", (1,))
    ledger.ended("finished", "")
    ledger.close()
    engine = store.open_readonly(url_of(tmp_path))
    one, other = reader.samples_of_step(engine, "try", 1)
    run = reader.run_by_name(engine, "try")
    engine.dispose()
    assert (one.tokens, one.reward, one.advantage, one.state, one.finish) == (
        (1, 2),
        1.0,
        0.5,
        "consumed",
        "stop",
    )
    assert (other.state, other.reward) == ("masked", None)
    assert [(lease.kind, lease.node, lease.start_len, lease.end_len) for lease in one.leases] == [
        ("reserved", "here", 0, 2)
    ]
    assert run is not None
    assert (run.state, run.last_step, run.attempt) == ("finished", 1, 1)
    assert (tmp_path / local_run.NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("ending", ["closed", "failed", "killed"])
@pytest.mark.parametrize("resume_step", [0, 1, 2])
def test_a_second_try_goes_on_whatever_became_of_the_first(
    tmp_path: Path, ending: str, resume_step: int
) -> None:
    first = begun(tmp_path)
    take_step(first, 1)
    take_step(first, 2)
    take_step(first, 2, "eval", "evaluated")
    _, sample = submit(first, 3)
    finish(first, sample)
    if ending == "killed":
        killed(first)
    else:
        if ending == "failed":
            first.ended("failed", "why")
        first.close()
    second = begun(tmp_path, resume_step)
    assert (second.attempt, second.next_version) == (2, 2)
    for step in range(resume_step + 1, 4):
        take_step(second, step)
    second.ended("finished", "")
    second.close()
    engine = store.open_readonly(url_of(tmp_path))
    states = [[row.state for row in reader.samples_of_step(engine, "try", step)] for step in (1, 2, 3)]
    engine.dispose()
    taken, left = ["consumed", "masked"], ["superseded", "superseded"]
    assert states == [(left if step > resume_step else []) + taken for step in (1, 2)] + [left + taken]


def told_of_runs(folder: Path) -> str:
    """`scavenger ledger report runs`."""
    asked = ["ledger", "report", "runs", "--format", "csv", "-c", str(folder / local_run.CONFIG)]
    shown = CliRunner().invoke(commands, asked)
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def test_a_try_that_was_told_to_end_is_stopped_until_it_goes_on(tmp_path: Path) -> None:
    first = begun(tmp_path)
    take_step(first, 1)
    submit(first, 2)
    assert ",active," in told_of_runs(tmp_path)
    first.close()
    said = told_of_runs(tmp_path)
    assert ",stopped," in said
    assert local_run.TOLD_TO_END in said
    second = begun(tmp_path, 1)
    said = told_of_runs(tmp_path)
    assert ",active," in said
    assert local_run.TOLD_TO_END not in said
    second.ended("failed", "why")
    second.close()
    assert ",failed," in told_of_runs(tmp_path), "what it became is not told over"


@pytest.mark.parametrize("resume_step", [0, 1])
def test_a_run_that_finishes_with_fewer_steps_than_before_accounts_for_the_others(
    tmp_path: Path, resume_step: int
) -> None:
    """As with `--resume none`, or a lower run.steps."""
    first = begun(tmp_path)
    for step in (1, 2, 3):
        take_step(first, step)
    first.close()
    second = begun(tmp_path, resume_step)
    for step in range(resume_step + 1, 3):
        take_step(second, step)
    second.ended("finished", "")
    second.close()
    engine = store.open_readonly(url_of(tmp_path))
    assert [row.state for row in reader.samples_of_step(engine, "try", 3)] == ["surplus", "surplus"]
    engine.dispose()


def test_another_seed_is_another_run_and_a_checkpoint_of_elsewhere_begins_at_its_step(tmp_path: Path) -> None:
    begun(tmp_path).close()
    other = begun(tmp_path, 5, seed=1)
    assert (other.attempt, other.next_version) == (1, 1)
    take_step(other, 6)
    other.close()


def test_a_ledger_that_cannot_be_written_is_left_and_the_run_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    ledger = begun(tmp_path, say=said.append)
    take_step(ledger, 1)
    begun(tmp_path, 1).close()  # another process took it over
    take_step(ledger, 2)
    take_step(ledger, 3)
    ledger.ended("finished", "")
    ledger.close()
    assert len(said) == 1
    assert "gets nothing more of this try" in said[0]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The local disk of a host on which `tmp_path / "out"` is on a network file system."""

    def refuse(folder: Path) -> None:
        if folder == tmp_path / "out":
            raise LedgerRefused("NFS")

    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr(store, "refuse_network_file_system", refuse)
    monkeypatch.setattr(local_run, "ELSEWHERE", disk)
    return disk


def test_a_folder_on_a_network_file_system_has_its_ledger_on_a_local_disk(tmp_path: Path, disk: Path) -> None:
    out = tmp_path / "out"
    begun(out).close()
    assert url_of(out).startswith(f"sqlite:///{disk}/scavenger-{os.geteuid()}/")
    assert not (out / local_run.NAME).exists()
    for made in disk.glob("**/"):
        assert made == disk or made.stat().st_mode & 0o777 == 0o700
    begun(out).close()  # finds its own again
    begun(tmp_path).close()


def test_a_ledger_is_put_into_no_folder_that_another_user_may_have_laid_out(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, mine, victim = tmp_path / "out", disk / f"scavenger-{os.geteuid()}", tmp_path / "victim"
    victim.mkdir()
    mine.symlink_to(victim)
    with pytest.raises(LedgerError, match="is a link or a file"):
        opened(out)
    mine.unlink()
    begun(out).close()
    (digest,) = mine.iterdir()
    digest.rename(victim / "moved")
    digest.symlink_to(victim / "moved")
    with pytest.raises(LedgerError, match="is a link or a file"):
        opened(out)
    digest.unlink()
    mine.chmod(0o777)
    with pytest.raises(LedgerError, match="can be written by others"):
        opened(out)
    mine.chmod(0o700)
    begun(out).close()
    begun(tmp_path).close()
    (disk / "scavenger-4242").mkdir(mode=0o700)  # this test's user made it, and user 4242 comes to it
    with monkeypatch.context() as context:
        context.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(LedgerError, match="belongs to another user"):
            opened(out)
    assert list(victim.iterdir()) == [victim / "moved"]
