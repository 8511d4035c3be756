from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scavenger.errors import ConfigError
from scavenger.protocol import messages
from tests.router.harness import started
from trainer import reserved
from trainer.reserved import ENGINE_CANNOT_START, ENGINE_DRAINED, ENGINE_REFUSED, EngineLocation, History


@pytest.mark.parametrize(
    ("workers", "each", "environ", "shared"),
    [
        (1, 1, {}, [True, False, False, False]),
        (1, 2, {}, [True, True, False, False]),
        (1, 1, {"SLURM_GPUS_ON_NODE": "4"}, [True, False, False, False]),
        (2, 2, {"SLURM_GPUS_ON_NODE": "4"}, [True, True, True, True]),
        (3, 2, {"SLURM_GPUS_ON_NODE": "4", "SLURM_NNODES": "2", "SLURM_NODEID": "0"}, [True] * 4),
        (
            3,
            2,
            {"SLURM_GPUS_ON_NODE": "4", "SLURM_NNODES": "2", "SLURM_NODEID": "1"},
            [True, True, False, False],
        ),
        (1, 1, {"SLURM_GPUS_ON_NODE": "4", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}, [False] * 4),
        (1, 1, {"SLURM_NNODES": "2"}, [True] * 4),  # nobody says which GPUs there are
    ],
)
def test_a_rank_knows_whether_an_engine_lies_on_its_gpu(
    workers: int, each: int, environ: dict[str, str], shared: list[bool]
) -> None:
    assert [reserved.shares_gpu(workers, each, gpu, environ) for gpu in range(4)] == shared


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_JOB_NUM_NODES": "1"}, [(0, ""), (0, ""), (0, "")]),
        ({"SLURM_JOB_NUM_NODES": "2"}, [(0, ""), (1, ""), (0, "")]),
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2"}, [(0, "0"), (0, "1"), (0, "0")]),
        (
            {"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "5,7"},
            [(0, "5"), (0, "7"), (0, "5")],
        ),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "2"}, [(0, "0"), (0, "1"), (1, "0")]),
        ({"SLURM_NNODES": "1", "CUDA_VISIBLE_DEVICES": "3"}, [(0, ""), (0, ""), (0, "")]),
    ],
)
def test_engines_are_spread_over_the_job_s_gpus_and_nodes(
    environ: dict[str, str], expected: list[tuple[int, str]]
) -> None:
    assert reserved.engine_locations(3, environ) == tuple(EngineLocation(*place) for place in expected)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_JOB_NUM_NODES": "1"}, [(0, ""), (0, ""), (0, "")]),
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "4"}, [(0, "0,1"), (0, "2,3"), (0, "0,1")]),
        (
            {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "3", "CUDA_VISIBLE_DEVICES": "4,5,7"},
            [(0, "4,5"), (1, "4,5"), (0, "4,5")],
        ),
    ],
)
def test_an_engine_of_several_gpus_has_them_on_one_node(
    environ: dict[str, str], expected: list[tuple[int, str]]
) -> None:
    assert reserved.engine_locations(3, environ, 2) == tuple(EngineLocation(*place) for place in expected)


def test_an_engine_of_more_gpus_than_a_node_has_is_refused() -> None:
    environ = {"SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "2"}
    with pytest.raises(
        ConfigError, match=r"reserved\.gpus_per_engine = 4, and the training job has 2 GPUs on a node"
    ):
        reserved.engine_locations(1, environ, 4)
    assert reserved.engine_locations(0, environ, 4) == ()


def test_an_engine_s_step_is_on_its_node_and_sees_its_gpu_alone() -> None:
    step = ["srun", "--overlap", "--ntasks=1", "--nodes=1", "--mpi=none"]
    assert reserved.step_argv(["engine"], EngineLocation(), 1) == [*step, "engine"]
    assert reserved.step_argv(["engine"], EngineLocation(1, "3"), 2) == [
        *step,
        "--relative=1",
        "env",
        "CUDA_VISIBLE_DEVICES=3",
        "engine",
    ]


def test_the_wait_grows_to_its_bound_and_starts_over_after_a_minute_of_life() -> None:
    history, waits = History(), []
    for _ in range(7):
        history, wait = reserved.ended(history, 70, 1.0, "")
        waits.append(wait)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    history, wait = reserved.ended(history, 70, 60.0, "")
    assert wait == 1.0
    assert reserved.ended(history, 70, 1.0, "")[1] == 2.0


def test_refusals_count_in_a_row_and_not_those_of_a_run_that_is_not_open_yet() -> None:
    history = History()
    for code, error_text, refusals in [
        (ENGINE_REFUSED, "no such key", 1),
        (ENGINE_REFUSED, "no such key", 2),
        (ENGINE_REFUSED, "run 'r' has ended", 2),
        (ENGINE_REFUSED, "no such key", 3),
        (ENGINE_CANNOT_START, "key file /k does not exist", 4),
        (ENGINE_DRAINED, "", 0),
    ]:
        history, _ = reserved.ended(history, code, 1.0, error_text)
        assert history.refusals == refusals


def test_the_daemon_s_words_for_a_closed_run_are_those_that_are_looked_for() -> None:
    bench = started()
    bench.call(messages.CloseRun("failed"))
    bench.hello(9, kind="reserved")
    (rejected,) = bench.take(9, messages.Rejected)
    assert reserved.RUN_ENDED in rejected.reason


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "x\nrollout: no key\n  remedy: make one\nsrun: error: task 0: Exited with exit code 78\n",
            "no key; remedy: make one",
        ),
        ("rollout: first\nrollout: second\n", "second"),
        ("srun: error: no such node\n\n", "srun: error: no such node"),
        ("", "it said nothing"),
    ],
)
def test_an_engine_s_last_words_are_found_among_what_it_wrote(said: str, expected: str) -> None:
    assert reserved.reason(said) == expected


@pytest.mark.parametrize(("code", "said"), [(0, ""), (78, ""), (70, "ended with status 70")])
def test_an_engine_that_ends_with_its_run_is_no_news_unless_it_failed(
    code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = reserved.ReservedEngine(
        [sys.executable, "-S", "-c", f"raise SystemExit({code})"], os.environ, 0, 1
    )
    engine.tend(0.0)
    assert engine.process is not None
    engine.process.wait(90)
    engine.tend(0.0, may_start=False, ending=True)
    assert engine.process is None
    out = capfd.readouterr().out
    assert said in out
    assert bool(out) == bool(said)


def test_an_engine_is_started_again_after_every_end_in_its_own_slot(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is drained, refused, and dies; `now` is the test's, so no wait is waited for."""
    mark = tmp_path / "lives"
    script = f"""
import os, sys
with open({str(mark)!r}, "a") as file:
    print(*(os.environ["SCAVENGER_" + name] for name in ("SLOT", "GPUS", "RESTART_COUNT")), file=file)
print("rollout: life", os.environ["SCAVENGER_RESTART_COUNT"], file=sys.stderr, flush=True)
os._exit([0, 78, 70, 72][int(os.environ["SCAVENGER_RESTART_COUNT"])])
"""
    engine = reserved.ReservedEngine([sys.executable, "-S", "-c", script], os.environ, 4, 2)
    now, deadline, waits = 0.0, time.monotonic() + 90, []
    while len(waits) < 4:
        assert time.monotonic() < deadline
        before = engine.start_at
        engine.tend(now)
        if engine.start_at != before:
            waits.append(engine.start_at - now)
            now = engine.start_at
        time.sleep(0.005)
    assert mark.read_text() == "4 2 0\n4 2 1\n4 2 2\n4 2 3\n"
    assert waits == [1.0, 2.0, 4.0, 8.0]
    out, err = capfd.readouterr()
    assert "reserved engine 4 was let go; again in 1 s" in out
    assert "reserved engine 4 was refused: life 1; again in 2 s" in out
    assert "reserved engine 4 ended with status 70; again in 4 s" in out
    assert "reserved engine 4 cannot start: life 3; again in 8 s" in out
    assert err == "rollout: life 0\nrollout: life 1\nrollout: life 2\nrollout: life 3\n"


def test_what_an_engine_started_goes_with_it_though_it_heeds_no_term(tmp_path: Path) -> None:
    """Its leader ends at TERM; the process that it left holds the GPU."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    leader = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE);"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", leader, child], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        left = int(said.readline())
        reserved.end([process])
    assert process.returncode == -signal.SIGTERM
    deadline = time.monotonic() + 20
    while _lives(left):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.02)  # between two looks at a condition


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_engines_that_heed_no_term_are_ended_together(capsys: pytest.CaptureFixture[str]) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    processes = [
        subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    began = time.monotonic()
    reserved.end(processes)
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 3
    assert time.monotonic() - began < 2 * reserved.STOP_S, "one after the other it would be three times this"
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
