"""benchmarks/gpu.py without a GPU: every part works with tiny sizes, and none takes the others' figures with it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks/gpu.py"

#: Parts that go wrong in the ways that parts do, before, between and after the real ones.
PLANTED = """
import os, signal, subprocess, time

def broken(bench):
    bench.figure("some case", "before the fault", 1.0)
    raise RuntimeError("planted")

def endless(bench):
    child = subprocess.Popen(["sleep", "600"])
    bench.figure("some case", "pid", child.pid)
    time.sleep(600)

def killed(bench):
    bench.figure("some case", "before the kill", [1.0, 2.0])
    os.kill(os.getpid(), signal.SIGKILL)
"""
PROGRAM = """
import sys
sys.path[:0] = [{root!r}, {planted!r}]
from benchmarks import gpu
def bad(name, seconds):
    return name, gpu.Part("planted", seconds, (), f"planted_parts:{{name}}")
gpu.PARTS = dict([bad("broken", 60), bad("endless", 0.5), *gpu.PARTS.items(), bad("killed", 60)])
raise SystemExit(gpu.main(["--device", "cpu", "--out", {out!r}, "--scratch", {scratch!r}, "--deadline", "killed=50"]))
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str, Path]:
    """One run of all parts and the planted ones: its lines, what it printed, and its scratch folder."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "planted_parts.py").write_text(PLANTED)
    (folder / "scratch").mkdir()
    out = folder / "gpu.jsonl"
    out.write_text('{"begin": "an earlier run"}\n{"part": "old", "case": "", "note": "of an earlier run"}\n')
    program = PROGRAM.format(
        root=str(ROOT), planted=str(folder), out=str(out), scratch=str(folder / "scratch")
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=220, cwd=folder
    )
    assert done.returncode == 1, done.stdout + done.stderr  # some parts failed
    return gpu.read(out), done.stdout, folder / "scratch"


def test_without_a_gpu_every_part_gives_finite_figures(played: Any) -> None:
    lines, said, scratch = played
    assert "no GPU here: --tiny" in said or "--tiny, on the CPU" in said
    ends = {line["part"]: line for line in lines if "status" in line}
    for name in gpu.PARTS:
        assert ends[name]["status"] == "done", (ends[name], said)
        values = [value for line in lines if line.get("part") == name for value in line.get("values", ())]
        assert values, name
        assert all(math.isfinite(value) for value in values), name
    assert not list(scratch.iterdir())  # models made in place are gone
    saved = [line["values"][0] for line in lines if line.get("name") == "memory, plain over chunks"]
    assert saved[0] > 1.5


def test_a_part_that_fails_or_runs_late_leaves_the_others_figures_and_its_own(played: Any) -> None:
    lines, said, _ = played
    ends = {line["part"]: line for line in lines if "status" in line}
    figures = {line["part"]: line["values"] for line in lines if "values" in line}
    assert (ends["broken"]["status"], ends["broken"]["why"]) == ("failed", "RuntimeError: planted")
    assert ends["endless"]["status"] == "deadline"
    assert ends["killed"]["status"] == "failed"
    assert "status -9" in ends["killed"]["why"]
    assert (figures["broken"], figures["killed"]) == ([1.0], [1.0, 2.0])
    assert "endless: deadline" in said
    child = Path(f"/proc/{int(figures['endless'][0])}/stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_table_is_of_the_last_run_ratios_first(played: Any) -> None:
    lines, said, _ = played
    text = gpu.table(lines)
    assert text in said
    assert "earlier run" not in text
    kinds = [row.split("  ")[-1] for row in text.splitlines()]
    assert kinds.index("ratio") < kinds.index("GB/s")
    assert "1.5 [1, 2]" in text
    begin = [line for line in lines if "begin" in line][-1]
    assert (begin["tiny"], begin["device"]) == (True, "CPU")
    assert begin["torch"]


def test_goals_are_judged_by_the_median() -> None:
    def judged(*values: float) -> str:
        return gpu.Figure("mfu", "", "", values, goal=(0.4, None)).verdict

    assert [judged(0.41), judged(0.1, 0.4, 0.5), judged(0.39, 0.3, 0.9)] == ["met", "met", "MISSED"]
    assert gpu.Figure("step", "", "", (1.2,), goal=(0.9, 1.1)).verdict == "MISSED"


def hiding(*packages: str) -> str:
    """The head of a program in which these cannot be imported."""
    return (
        "import sys\n"
        f"hidden = {packages!r}\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in hidden: raise ModuleNotFoundError(name, name=name)\n"
        "import importlib.util\n"
        "plain = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name.split('.')[0] in hidden else plain(name, *more)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environ, timeout=200
    )


def test_missing_packages_are_named_with_the_way_to_bring_them(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    arguments = ["--device", "cpu", "--parts", "mfu,merge", "--out", str(out), "--scratch", str(tmp_path)]
    done = run_python(
        hiding("pydantic", "blake3") + f"from benchmarks import gpu\nsys.exit(gpu.main({arguments!r}))"
    )
    assert done.returncode == 1, done.stderr
    assert "mfu: not run, it needs pydantic" in done.stdout
    assert "merge: not run, it needs blake3" in done.stdout
    assert "pip download --only-binary=:all:" in done.stdout
    assert "-d wheels blake3 pydantic" in done.stdout
    assert [line["status"] for line in map(json.loads, out.read_text().splitlines()) if "status" in line] == [
        "missing"
    ] * 2


@pytest.mark.parametrize(
    ("packages", "modules"),
    [
        (
            gpu.LEARNER,
            (
                "trainer.model.learner",
                "scavenger.sizing.fit",
                "scavenger.simulate.presets",
                "trainer.loop.comm",
            ),
        ),
        (gpu.ENGINE, ("rollout.engines.decoder", "rollout.engines.merging")),
        (gpu.PARTS["delta"].packages, ("scavenger.weights.delta",)),
    ],
    ids=["learner", "engine", "delta"],
)
def test_parts_need_no_other_packages_than_they_say(
    packages: tuple[str, ...], modules: tuple[str, ...]
) -> None:
    """What a machine with torch and transformers alone lacks of ours."""
    base = (ROOT / "setup.py").read_text().partition("BASE = [")[2].partition("]")[0]
    ours = {name.replace("pyzmq", "zmq").replace("-", "_") for name in re.findall(r'"([\w-]+)>=', base)}
    assert {"zmq", "pydantic", "structlog"} <= ours
    brought = {"numpy", "rich", "jinja2", "typer"}  # by torch and transformers
    hidden = sorted((ours | {"mpi4py", "peft", "vllm", "zstandard"}) - brought - set(packages))
    done = run_python(hiding(*hidden) + "\n".join(f"import {module}" for module in modules))
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_every_part_works_on_a_gpu_with_tiny_sizes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cuda", "--tiny", "--out", str(tmp_path / "gpu.jsonl")],
        capture_output=True,
        text=True,
        check=False,
        timeout=230,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_table_of_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: there is no .*missing\.jsonl: a run writes it"):
        gpu.main(["--table", str(tmp_path / "missing.jsonl")])
