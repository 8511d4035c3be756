"""What is told of a train.sbatch before it is submitted: on recorded answers, and by a real Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scavenger.cluster.model import PreemptMode
from scavenger.cluster.sandbox.sandbox import SlurmSandbox
from scavenger.cluster.slurm import commands
from scavenger.cluster.slurm.directives import Asks, asks_of
from scavenger.doctor import train_script

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
    fields: dict[str, object] = {
        "partition": "reserved",
        "nodes": 1,
        "ntasks": 1,
        "gpus": 1,
        "time": "0:10:00",
    }
    path = folder / "train.sbatch"
    path.write_text(SCRIPT.format_map(fields | more))
    return path


def note(asks: Asks, preempts_by: str) -> str:
    return train_script.judge(asks, 8, PARTITIONS, NODES, preempts_by).note


@pytest.mark.parametrize(
    ("lines", "asks"),
    [
        (
            "--partition=a\n--nodes=2\n--ntasks=8\n--gpus-per-node=4\n--cpus-per-task=6\n--time=1:00:00",
            Asks("a", 2, 4, "", 8, 6, 3600),
        ),
        ("--gpus-per-node=h100:8", Asks("", 1, 8, "h100", 8, 1, 0)),
        ("--gres=gpu:2\n--nodes=1-4", Asks("", 1, 2, "", 2, 1, 0, more_nodes=True)),
        ("--gres=gpu\n--nodes=2-2", Asks("", 2, 1, "", 2, 1, 0)),
        ("--gres=nic:1,gpu:2", Asks("", 1, 2, "", 2, 1, 0)),
        ("--gres=gpu:a100:2", Asks("", 1, 2, "a100", 2, 1, 0)),
        ("--partition a\n#comment", Asks("a", 1, 0, "", 1, 1, 0)),
        (
            "-p a -N2 -n 8\n-G h100:8 -c6 # it's 8 of them\n-t 1:00:00 -H",
            Asks("a", 2, 0, "h100", 8, 6, 3600, total_gpus=8),
        ),
        ("--gpus=8", Asks("", 1, 0, "", 8, 1, 0, total_gpus=8, more_nodes=True)),
        ("-n 8\n--gpus-per-node=4", Asks("", 1, 4, "", 8, 1, 0, more_nodes=True)),
        ("--nodes=2 --ntasks-per-node=4 --gpus-per-node=4", Asks("", 2, 4, "", 8, 1, 0)),
        ('--job-name="-p b" --requeue --output=a#-p b', Asks("", 1, 0, "", 1, 1, 0)),
        (
            "--gpus-per-task=1 -n 8",
            Asks("", 1, 0, "", 8, 1, 0, more_nodes=True, unread=("gpus-per-task",), sized=False),
        ),
        ("--gpus-per-node=4 --gpus=8", Asks("", 1, 4, "", 4, 1, 0, unread=("gpus",), sized=False)),
        (
            "--ntasks=8 --ntasks-per-node=4 -N 2",
            Asks("", 2, 0, "", 8, 1, 0, unread=("ntasks-per-node",), sized=False),
        ),
        ("--nodes=4k", Asks("", 1, 0, "", 1, 1, 0, more_nodes=True, unread=("nodes",), sized=False)),
        ("--gres=gpu:a:1,gpu:b:1", Asks("", 1, 0, "", 1, 1, 0, unread=("gres",), sized=False)),
        ("-p a,b --mem=8G", Asks("a,b", 1, 0, "", 1, 1, 0, unread=("mem", "partition"))),
        ("-Z 3", Asks("", 1, 0, "", 1, 1, 0, unread=("Z",), sized=False)),
    ],
)
def test_directives_as_they_are_written(lines: str, asks: Asks) -> None:
    assert asks_of("".join(f"#SBATCH {line}\n" for line in lines.splitlines())) == asks


def test_directives_end_with_the_first_command_as_sbatch_reads_them() -> None:
    assert asks_of("#!/bin/sh\n\n# -p b\n#SBATCH -p a\n  # on\n#SBATCH -N 2\nset -e\n#SBATCH -p b\n") == Asks(
        "a", 2, 0, "", 1, 1, 0
    )


@pytest.mark.parametrize(
    ("asks", "each", "problem"),
    [
        (FITS, 2, ""),
        (
            FITS,
            4,
            "reserved.workers = 3, and train.sbatch asks for 8 GPUs: each reserved engine needs 4 of one node",
        ),
        (FITS, 3, "remedy: reserved.workers = 2 in run.toml"),
        (FITS, 8, "reserved.gpus_per_engine = 8, and train.sbatch asks for 4 GPUs a node"),
        (replace(FITS, gpus=0, total_gpus=8), 9, "reserved.gpus_per_engine = 9"),
        (replace(FITS, gpus=0, total_gpus=8), 4, "reserved.workers = 2 in run.toml"),
        (replace(FITS, gpus=0, ranks=1), 8, ""),
    ],
)
def test_reserved_engines_of_several_gpus_must_find_them_on_one_node(
    asks: Asks, each: int, problem: str
) -> None:
    found = train_script.judge(asks, 3, PARTITIONS, NODES, "partition_prio", each)
    assert problem in found.problem
    assert bool(problem) == bool(found.problem), found


@pytest.mark.parametrize(
    ("asks", "reserved", "problem"),
    [
        (FITS, 8, ""),
        (replace(FITS, gpu_type="h100"), 8, ""),
        (replace(FITS, partition="gold"), 8, "no such partition"),
        (
            replace(FITS, gpus=8, ranks=16),
            8,
            "--nodes=2 with 8 GPUs each: partition normal has 0 such nodes (3 nodes of 4 (h100))",
        ),
        (replace(FITS, nodes=9, ranks=36), 8, "has 3 such nodes"),
        (replace(FITS, gpu_type="a100"), 8, "gpu:a100 each"),
        (replace(FITS, cpus_per_rank=99), 8, "a lower --cpus-per-task"),
        (replace(FITS, ranks=16), 8, "--ntasks=16, and 8 GPUs"),
        (FITS, 9, "reserved.workers = 9, and train.sbatch asks for 8 GPUs"),
        (replace(FITS, gpus=0, ranks=1), 1, ""),
        (replace(FITS, gpus=0, total_gpus=8), 8, ""),
        (replace(FITS, gpus=0, total_gpus=8, ranks=9), 8, "--ntasks=9, and 8 GPUs"),
        (
            replace(FITS, gpus=0, total_gpus=7, ranks=7),
            8,
            "reserved.workers = 8, and train.sbatch asks for 7 GPUs",
        ),
        (
            replace(FITS, gpus=0, total_gpus=16, nodes=3),
            8,
            "--gpus=16: partition normal has fewer GPUs (3 nodes of 4 (h100))",
        ),
        (replace(FITS, nodes=1, more_nodes=True, cpus_per_rank=20), 8, ""),
        (replace(FITS, gpus=99, ranks=999, unread=("gpus-per-task",), sized=False), 8, ""),
        (replace(FITS, partition="gold", unread=("gpus-per-task",), sized=False), 8, "no such partition"),
        (replace(FITS, gpus=8, ranks=16, unread=("mem",)), 8, "partition normal has 0 such nodes"),
        (replace(FITS, partition="normal,gold", unread=("partition",)), 8, ""),
    ],
)
def test_what_slurm_or_the_run_contradicts_is_a_problem_with_its_remedy(
    asks: Asks, reserved: int, problem: str
) -> None:
    found = train_script.judge(asks, reserved, PARTITIONS, NODES, "partition_prio")
    assert problem in found.problem
    assert bool(problem) == bool(found.problem) == ("\nremedy: " in found.problem), found


def test_a_partition_that_is_down_or_too_short_is_a_problem() -> None:
    down = [replace(part, up=False) for part in PARTITIONS]
    assert "is down" in train_script.judge(FITS, 8, down, NODES, "partition_prio").problem
    short = [replace(part, max_time_s=1800.0) for part in PARTITIONS]
    assert "allows 0.5 h" in train_script.judge(FITS, 8, short, NODES, "partition_prio").problem


def test_a_partition_whose_jobs_are_preempted_is_told() -> None:
    guest = replace(FITS, partition="scavenge")
    assert "LOOK: jobs of normal may preempt it" in note(guest, "partition_prio")
    assert "preempt" not in note(FITS, "partition_prio")
    assert "preempt" not in note(guest, "none"), "tiers only order the queue there"
    off = [replace(part, preempt_mode=PreemptMode.OFF) for part in PARTITIONS]
    assert "preempt" not in train_script.judge(guest, 8, off, NODES, "partition_prio").note


@pytest.mark.parametrize("partition", ["scavenge", "normal", ""])
def test_where_slurm_preempts_by_qos_tiers_are_not_taken_for_an_answer(partition: str) -> None:
    told = note(replace(FITS, partition=partition), "qos")
    assert "preempts by QOS" in told
    assert "LOOK" not in told


def test_directives_that_are_not_read_are_named_and_nothing_is_told_of_a_size_that_they_change() -> None:
    found = train_script.judge(
        asks_of("#SBATCH -p normal -n 8 --gpus-per-task=1 --mem=8G\n"), 8, PARTITIONS, NODES, "partition_prio"
    )
    told = "partition normal, of a size that is not known; not read here: --gpus-per-task, --mem"
    assert (found.problem, found.skipped, found.note) == ("", True, told)
    found = train_script.judge(
        asks_of("#SBATCH -p normal -N2 --gpus-per-node=4 --mem=8G\n"), 8, PARTITIONS, NODES, "partition_prio"
    )
    assert (found.problem, found.skipped, found.note) == (
        "",
        True,
        "partition normal, 2 x 4 GPUs, 8 ranks; not read here: --mem",
    )
    found = train_script.judge(asks_of("#SBATCH -p normal -G 8\n"), 8, PARTITIONS, NODES, "partition_prio")
    assert (found.skipped, found.note) == (False, "partition normal, 8 GPUs in all, 8 ranks")


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is all of PATH; its scontrol answers as the recorded site."""
    folder = tmp_path / "bin"
    folder.mkdir()
    printed = f'while IFS= read -r line; do echo "$line"; done <"{DATA}/$what$s.txt"'
    program(folder, "scontrol", f'for what; do :; done; s=s; [ "$what" = config ] && s=; {printed}')
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("sbatch", "why"),
    [
        ("", "there is no sbatch on this host's PATH"),
        ("while :; do :; done", "sbatch gave no answer within 0.5 s"),
        (
            "echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
            "Unable to contact slurm controller",
        ),
        ("echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1", "Socket timed out"),
    ],
)
def test_no_answer_is_no_refusal(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, why: str
) -> None:
    if sbatch:
        program(answers, "sbatch", sbatch)
    if "while" in sbatch:
        monkeypatch.setattr(train_script, "DEADLINE_S", 0.5)
    fits, tested = train_script.check(script(tmp_path), 1)
    assert (fits.problem, fits.skipped) == ("", False), fits
    assert (tested.problem, tested.skipped) == ("", True)
    assert why in tested.note


def test_slurm_s_own_names_of_a_partition_s_gpus(
    answers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = train_script.gpu_nodes("normal")
    assert found.types == ("h100",)
    assert found.memory_mb == 1000000
    assert train_script.gpu_nodes("normal", 64) == train_script.GpuNodes(), "no node has so many GPUs"
    assert train_script.gpu_nodes("no-such-partition") == train_script.GpuNodes()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert train_script.gpu_nodes("normal") == train_script.GpuNodes(), "no Slurm: nothing is claimed"


def test_a_refusal_is_told_in_slurms_words(answers: Path, tmp_path: Path) -> None:
    words = "Invalid account or account/partition combination specified"
    program(answers, "sbatch", f"echo 'sbatch: error: {words}' >&2; exit 1")
    _, tested = train_script.check(script(tmp_path), 1)
    assert tested.problem.startswith(f"Slurm would refuse train.sbatch: {words}\nremedy: ")
    assert not tested.skipped


def test_a_script_that_cannot_be_read_is_a_problem_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "train.sbatch"
    for line, remedy in (("--time=soon", "--time as Slurm writes it"), ('--job-name="a', "close the quotes")):
        path.write_text(f"#SBATCH {line}\n")
        (found,) = train_script.check(path, 1)
        assert f"\nremedy: {remedy}" in found.problem


def test_without_slurm_nothing_is_claimed_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = train_script.check(script(tmp_path), 0)
    assert (found.skipped, found.problem, "no scontrol" in found.note) == (True, "", True)
    (found,) = train_script.check(script(tmp_path), 5)
    assert "reserved.workers = 5" in found.problem, "that needs no Slurm"


@pytest.mark.slurm
def test_slurm_itself_has_the_last_word(
    slurm_sandbox: SlurmSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm_sandbox.env["SLURM_CONF"])
    monkeypatch.setenv("PATH", slurm_sandbox.env["PATH"])
    fits, tested = train_script.check(script(tmp_path), 1)
    assert (fits.problem, tested.problem) == ("", "")
    assert "to start at" in tested.note
    (found,) = train_script.check(script(tmp_path, partition="gold"), 1)
    assert "remedy: in train.sbatch, name one of: " in found.problem
    refused = script(tmp_path)
    refused.write_text(refused.read_text().replace("##SBATCH --qos", "#SBATCH --nodelist=nowhere99 --qos"))
    fits, tested = train_script.check(refused, 1)
    assert "Slurm would refuse train.sbatch: " in tested.problem
    assert "remedy" in tested.problem
