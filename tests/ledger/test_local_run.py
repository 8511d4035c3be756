"""The ledger of a run that one process makes alone: sound after every way in which such a process ends, and begins again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scavenger import config as configs
from scavenger.errors import LedgerRefused
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


def test_a_folder_on_a_network_file_system_has_its_ledger_on_a_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, disk = tmp_path / "out", tmp_path / "disk"

    def refuse(folder: Path) -> None:
        if folder == out:
            raise LedgerRefused("NFS")

    monkeypatch.setattr(store, "refuse_network_file_system", refuse)
    monkeypatch.setattr(local_run, "ELSEWHERE", disk)
    begun(out).close()
    assert url_of(out).startswith(f"sqlite:///{disk}/scavenger-")
    assert not (out / local_run.NAME).exists()
    begun(tmp_path).close()
