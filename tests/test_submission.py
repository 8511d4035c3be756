"""What is told of a train.sbatch before it is submitted: on recorded answers, and by a real Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scavenger import submission
from scavenger.cluster import commands
from scavenger.cluster.sandbox import SlurmSandbox
from scavenger.submission import Asks, asks_of

DATA = Path(__file__).parent / "data/doctor"
PARTITIONS = commands.parse_partitions((DATA / "partitions.txt").read_text())
NODES = commands.parse_nodes((DATA / "nodes.txt").read_text())
FITS = Asks("normal", 2, 4, "", 8, 4, 3600.0)
SCRIPT = """#!/bin/bash
#SBATCH --partition={partition}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={ntasks}
#SBATCH --gpus-per-node={gpus}
##SBATCH --qos=none
#SBATCH --time={time}
#SBATCH --requeue
exit 0
"""


def script(folder: Path, **more: object) -> Path:
    fields: dict[str, object] = {"partition": "reserved", "nodes": 1, "ntasks": 1, "gpus": 1, "time": "0:10:00"}
    path = folder / "train.sbatch"
    path.write_text(SCRIPT.format_map(fields | more))
    return path


@pytest.mark.parametrize(
    ("lines", "asks"),
    [
        ("--partition=a\n--nodes=2\n--ntasks=8\n--gpus-per-node=4\n--cpus-per-task=6\n--time=1:00:00", Asks("a", 2, 4, "", 8, 6, 3600)),
        ("--gpus-per-node=h100:8", Asks("", 1, 8, "h100", 8, 1, 0)),
        ("--gres=gpu:2\n--nodes=1-4", Asks("", 1, 2, "", 2, 1, 0)),
        ("--gres=gpu:a100:2", Asks("", 1, 2, "a100", 2, 1, 0)),
        ("--partition a\n#comment", Asks("a", 1, 0, "", 1, 1, 0)),
    ],
)
def test_directives_as_they_are_written(lines: str, asks: Asks) -> None:
    assert asks_of("".join(f"#SBATCH {line}\n" for line in lines.splitlines())) == asks


@pytest.mark.parametrize(
    ("asks", "reserved", "problem"),
    [
        (FITS, 8, ""),
        (replace(FITS, gpu_type="h100"), 8, ""),
        (replace(FITS, partition="gold"), 8, "no such partition"),
        (replace(FITS, gpus=8, ranks=16), 8, "--nodes=2 with 8 GPUs each: partition normal has 0 such nodes (3 nodes of 4 (h100))"),
        (replace(FITS, nodes=9, ranks=36), 8, "has 3 such nodes"),
        (replace(FITS, gpu_type="a100"), 8, "gpu:a100 each"),
        (replace(FITS, cpus_per_rank=99), 8, "a lower --cpus-per-task"),
        (replace(FITS, ranks=16), 8, "--ntasks=16, and 8 GPUs"),
        (FITS, 9, "reserved.workers = 9, and train.sbatch asks for 8 GPUs"),
        (replace(FITS, gpus=0, ranks=1), 1, ""),
    ],
)
def test_what_slurm_or_the_run_contradicts_is_a_problem_with_its_remedy(asks: Asks, reserved: int, problem: str) -> None:
    found = submission.judge(asks, reserved, PARTITIONS, NODES)
    assert problem in found.problem
    assert bool(problem) == bool(found.problem) == ("\nremedy: " in found.problem), found


def test_a_partition_that_is_down_or_too_short_is_a_problem() -> None:
    down = [replace(part, up=False) for part in PARTITIONS]
    assert "is down" in submission.judge(FITS, 8, down, NODES).problem
    short = [replace(part, max_time_s=1800.0) for part in PARTITIONS]
    assert "allows 0.5 h" in submission.judge(FITS, 8, short, NODES).problem


def test_a_partition_whose_jobs_are_preempted_is_told() -> None:
    assert "may preempt it" in submission.judge(replace(FITS, partition="scavenge"), 8, PARTITIONS, NODES).note
    assert "preempt" not in submission.judge(FITS, 8, PARTITIONS, NODES).note


def test_without_slurm_nothing_is_claimed_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = submission.look(script(tmp_path), 0)
    assert (found.skipped, found.problem, "no scontrol" in found.note) == (True, "", True)
    (found,) = submission.look(script(tmp_path), 5)
    assert "reserved.workers = 5" in found.problem, "that needs no Slurm"


@pytest.mark.slurm
def test_slurm_itself_has_the_last_word(slurm_sandbox: SlurmSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm_sandbox.env["SLURM_CONF"])
    monkeypatch.setenv("PATH", slurm_sandbox.env["PATH"])
    fits, tested = submission.look(script(tmp_path), 1)
    assert (fits.problem, tested.problem) == ("", "")
    assert "to start at" in tested.note
    (found,) = submission.look(script(tmp_path, partition="gold"), 1)
    assert "remedy: in train.sbatch, name one of: " in found.problem
    refused = script(tmp_path)
    refused.write_text(refused.read_text().replace("##SBATCH --qos", "#SBATCH --nodelist=nowhere99 --qos"))
    fits, tested = submission.look(refused, 1)
    assert "Slurm would refuse train.sbatch: " in tested.problem
    assert "remedy" in tested.problem
