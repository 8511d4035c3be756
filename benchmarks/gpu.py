"""One command on a GPU: how fast and how large the parts are that no CPU can show. Ten minutes on one H100 or H200.

    python benchmarks/gpu.py [--parts mfu,head] [--out gpu.jsonl] [--seconds 590] [--deadline mfu=200] [--list]

Needs torch, transformers, numpy and safetensors, and a few small packages that it names at the start, with how to bring them where there is
no network; no vLLM. Models are made in place, of Qwen3's shapes with random weights. Each part is a process of its own with a deadline: one
that fails, runs out of memory or runs late leaves the others' figures, and its own up to there. Figures are appended to `--out` as they
come, a JSON object a line; the table at the end is made of these lines alone (`--table FILE` makes it again). docs/gpu.md says what each
line means. Without a GPU the same parts run with tiny sizes on the CPU, in seconds, which proves that they work and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# A script's own folder stands first on the path, and there some files would hide packages of their names.
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place).resolve() != HERE)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # one rank: it talks to nobody

LEARNER = ("msgspec", "pydantic", "structlog")
ENGINE = ("msgspec", "blake3", "xxhash")
#: What every part needs. Beside these a part's own `packages`.
COMMON = ("torch", "transformers", "numpy", "safetensors")


@dataclass(frozen=True, slots=True)
class Part:
    """`where`: "module:function", called with a `Bench`. `deadline_s`: on a GPU. `packages`: needed beside `COMMON`, by the names of PyPI,
    which are those of the imports."""

    what: str
    deadline_s: float
    packages: tuple[str, ...]
    where: str


def _part(name: str, what: str, deadline_s: float, *packages: str) -> tuple[str, Part]:
    return name, Part(what, deadline_s, tuple(dict.fromkeys(packages)), f"benchmarks.gpu_parts:{name}")


PARTS: dict[str, Part] = dict(
    (
        _part("mfu", "model FLOP utilisation of a training step, 0.6B to 4B, 8k tokens", 150, *LEARNER),
        _part("step", "peak memory of a step against what `scavenger init --check` predicts", 75, *LEARNER),
        _part("head", "memory and time of the output head by chunks against the plain one", 50, *LEARNER),
        _part("offload", "training state to pinned host memory and back", 50, *LEARNER),
        _part("toggle", "from training to generating and back, engine beside learner", 75, *LEARNER, *ENGINE),
        _part(
            "delta",
            "encode and apply a version's delta, on cores and on the GPU",
            40,
            *("msgspec", "blake3", "xxhash", "zstandard", "structlog"),
        ),
        _part("merge", "LoRA adapters merged into their base", 30, *ENGINE),
        _part("reference", "greedy tokens of the reference engine against the CPU's, float32", 50, *ENGINE),
        _part("mismatch", "|trainer's logprob - engine's| in bfloat16", 60, *LEARNER, *ENGINE),
    )
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: `values` of the repeats, in `unit` ("" for a ratio). `goal`: least and most, None where there is no bound."""

    part: str
    case: str
    name: str
    values: tuple[float, ...]
    unit: str = ""
    goal: tuple[float | None, float | None] = (None, None)
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def verdict(self) -> str:
        least, most = self.goal
        if least is None and most is None:
            return ""
        good = (least is None or self.median >= least) and (most is None or self.median <= most)
        return "met" if good else "MISSED"


@dataclass(slots=True)
class Outcome:
    """What became of a part: done, failed, deadline, missing (packages) or left out (no time)."""

    part: str
    status: str
    seconds: float
    why: str = ""


@dataclass(slots=True)
class Settings:
    """Of all parts. `scratch`: where models made in place lie, shared by the parts."""

    device: str
    tiny: bool
    scratch: str
    gpu: dict[str, Any] = field(default_factory=dict)


class Bench:
    """A part's view of the run: what to measure on, for how long, and where figures go."""

    def __init__(
        self, name: str, settings: Settings, deadline: float, send: Callable[[dict[str, Any]], None]
    ) -> None:
        self.name, self.settings = name, settings
        self._deadline, self._send = deadline, send

    @property
    def device(self) -> str:
        return self.settings.device

    @property
    def tiny(self) -> bool:
        return self.settings.tiny

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def figure(
        self,
        case: str,
        name: str,
        values: float | Iterable[float],
        unit: str = "",
        *,
        least: float | None = None,
        most: float | None = None,
        note: str = "",
    ) -> None:
        """Goals hold on a GPU only: tiny sizes on a CPU measure nothing."""
        found = (float(values),) if isinstance(values, int | float) else tuple(float(v) for v in values)
        goal = (None, None) if self.tiny else (least, most)
        self._send(asdict(Figure(self.name, case, name, found, unit, goal, note)))

    def note(self, case: str, text: str) -> None:
        """What could not be measured, and why."""
        self._send({"part": self.name, "case": case, "note": text})


# ---------------------------------------------------------------- packages


def missing_packages(part: Part) -> list[str]:
    return [name for name in (*COMMON, *part.packages) if importlib.util.find_spec(name) is None]


def remedy(packages: Sequence[str]) -> str:
    """How to bring packages to a machine without a network: wheels for this Python and machine. Their own needs come along."""
    python, machine = f"{sys.version_info.major}.{sys.version_info.minor}", os.uname().machine
    platforms = " ".join(f"--platform manylinux{kind}_{machine}" for kind in ("2014", "_2_17", "_2_28"))
    names = " ".join(sorted(packages))
    return (
        f"with a network:   {sys.executable} -m pip install {names}\n"
        f"without one, on a machine that has it:\n"
        f"  pip download --only-binary=:all: --python-version {python} --implementation cp {platforms} -d wheels {names}\n"
        f"and here:\n"
        f"  {sys.executable} -m pip install --no-index --find-links wheels --target wheels/site {names}\n"
        f"  PYTHONPATH=wheels/site {sys.executable} benchmarks/gpu.py"
    )


def told_packages(parts: Mapping[str, Part]) -> str:
    """ "" where nothing is missing."""
    lacking = {name: found for name, part in parts.items() if (found := missing_packages(part))}
    if not lacking:
        return ""
    lines = [f"  {name}: not run, it needs {', '.join(found)}" for name, found in lacking.items()]
    every = {package for found in lacking.values() for package in found}
    return "\n".join(["packages are missing:", *lines, remedy(sorted(every))])


# ---------------------------------------------------------------- the device


_PROBE = """
import json, torch
if torch.cuda.is_available():
    free, total = torch.cuda.mem_get_info()
    print(json.dumps({"name": torch.cuda.get_device_name(), "free": free, "total": total, "cuda": torch.version.cuda,
                      "capability": list(torch.cuda.get_device_capability())}))
"""


def probe() -> dict[str, Any]:
    """The GPU that torch would take, asked by a process of its own, so that this one never begins to use CUDA; {} = none."""
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return found


def settings_of(device: str, tiny: bool, scratch: str) -> tuple[Settings, str]:
    """What to run on, and a sentence that says it."""
    seen = any(Path("/dev").glob("nvidia[0-9]*"))
    gpu = probe() if device == "cuda" or (device == "auto" and seen) else {}
    if gpu:
        size = "tiny sizes, which measure nothing" if tiny else "full sizes"
        return Settings("cuda", tiny, scratch, gpu), f"{gpu['name']}, {gpu['total'] / 1e9:.1f} GB: {size}"
    if device == "cuda":
        raise SystemExit(
            "error: torch sees no GPU here: look at nvidia-smi, and whether torch was built for CUDA"
        )
    why = "there is a GPU and torch sees none" if seen else "no GPU here"
    return Settings(
        "cpu", True, scratch
    ), f"{why}: --tiny, on the CPU; these figures prove that it works and measure nothing"


def scratch_folder(wanted: str) -> Path:
    """For about 14 GB of models: main memory where there is plenty of it, else the disk."""
    if wanted:
        return Path(tempfile.mkdtemp(prefix="scavenger-gpu-", dir=wanted))
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 40e9
    return Path(tempfile.mkdtemp(prefix="scavenger-gpu-", dir=memory if roomy else None))


# ---------------------------------------------------------------- one part in its process


def _child(pipe: Any, name: str, part: Part, settings: Settings, seconds: float) -> None:
    os.setsid()  # so that it ends with whatever it started
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def send(line: dict[str, Any]) -> None:
        pipe.send_bytes(json.dumps(line).encode())

    try:
        module, function = part.where.split(":")
        bench = Bench(name, settings, time.monotonic() + seconds, send)
        getattr(importlib.import_module(module), function)(bench)
        send({"end": ""})
    except BaseException as error:  # noqa: BLE001  told, and the process ends
        traceback.print_exc()
        send(
            {
                "end": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            }
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of a part that failed


def run_part(
    name: str, part: Part, settings: Settings, seconds: float, take: Callable[[dict[str, Any]], None]
) -> Outcome:
    """Run it to its end or for `seconds`; figures go to `take` as they come.

    On a GPU in a fresh interpreter; without one in a copy of this process, which has imported what parts import.
    """
    context: Any = multiprocessing.get_context("spawn" if settings.device == "cuda" else "fork")
    here, there = context.Pipe(duplex=False)
    began = time.monotonic()
    process = context.Process(target=_child, args=(there, name, part, settings, seconds))
    process.start()
    there.close()
    status, why = "failed", ""
    try:
        while True:
            left = began + seconds - time.monotonic()
            if left <= 0 or not here.poll(left):
                status, why = "deadline", f"ended after its {seconds:g} s"
                break
            line = json.loads(here.recv_bytes())
            if "end" in line:
                status, why = ("failed", line["end"]) if line["end"] else ("done", "")
                break
            take(line)
    except EOFError:
        process.join(5.0)
        why = f"its process ended with status {process.exitcode}"
        if process.exitcode in (-signal.SIGKILL, 137):
            why += ": killed, perhaps for want of host memory"
    finally:
        _end(process)
        here.close()
    return Outcome(name, status, time.monotonic() - began, why)


def _end(process: Any) -> None:
    """The process and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended, or is too young to have a group of its own
        process.kill()
    process.join()


# ---------------------------------------------------------------- all parts


def run(
    parts: Mapping[str, Part], settings: Settings, out: Path, seconds: float, deadlines: Mapping[str, float]
) -> list[Outcome]:
    """Every part in turn; each line is in `out` before the next is waited for."""
    ends = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    with out.open("a", encoding="utf-8") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        write(
            {
                "begin": datetime.now(UTC).isoformat(timespec="seconds"),
                "device": settings.gpu.get("name", "CPU"),
                "tiny": settings.tiny,
                "gpu": settings.gpu,
                **versions(),
            }
        )
        for name, part in parts.items():
            if lacking := missing_packages(part):
                outcome = Outcome(name, "missing", 0.0, f"it needs {', '.join(lacking)}")
            elif (left := min(deadlines.get(name, part.deadline_s), ends - time.monotonic())) <= 0:
                outcome = Outcome(name, "left out", 0.0, f"no time is left of --seconds {seconds:g}")
            else:
                print(f"-- {name}: {part.what} (at most {left:.0f} s)", flush=True)

                def take(line: dict[str, Any]) -> None:
                    write(line)
                    print(f"   {said(line)}", flush=True)

                outcome = run_part(name, part, settings, left, take)
            outcomes.append(outcome)
            write(
                {
                    "part": name,
                    "status": outcome.status,
                    "seconds": round(outcome.seconds, 2),
                    "why": outcome.why,
                }
            )
            print(
                f"   {name}: {outcome.status}, {outcome.seconds:.1f} s{': ' * bool(outcome.why)}{outcome.why}",
                flush=True,
            )
    return outcomes


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    done = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found | {"commit": done.stdout.strip()}


def preload(parts: Iterable[Part]) -> None:
    """Import once what the copies of this process need; what cannot be imported fails in its own part."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in {part.where.split(":")[0] for part in parts if not missing_packages(part)}:
        with suppress(Exception):
            loaded = importlib.import_module(module)
            for name in getattr(loaded, "PRELOAD", ()):
                with suppress(ImportError):
                    importlib.import_module(name)


# ---------------------------------------------------------------- the table


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def said(line: Mapping[str, Any]) -> str:
    if "values" not in line:
        return f"{line['case']}: {line['note']}"
    figure = figure_of(line)
    spread = f" [{shown(min(figure.values))}, {shown(max(figure.values))}]" if len(figure.values) > 1 else ""
    parts = [
        f"{figure.case}: {figure.name} {shown(figure.median)}{spread}",
        figure.unit,
        figure.verdict,
        figure.note,
    ]
    return "  ".join(part for part in parts if part)


def figure_of(line: Mapping[str, Any]) -> Figure:
    least, most = line["goal"]
    return Figure(
        line["part"],
        line["case"],
        line["name"],
        tuple(line["values"]),
        line["unit"],
        (least, most),
        line["note"],
    )


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Of the file's last run. Ratios first: they mean something without the machine."""
    last: list[Mapping[str, Any]] = []
    for line in lines:
        last = [line] if "begin" in line else [*last, line]
    figures = [figure_of(line) for line in last if "values" in line]
    rows = [("part", "case", "figure", "median [least, most]", "unit", "goal")]
    for figure in sorted(figures, key=lambda one: bool(one.unit)):
        least, most = figure.goal
        bounds = " to ".join(shown(bound) if bound is not None else "" for bound in (least, most))
        goal = f"{bounds.strip()} {figure.verdict}" if figure.verdict else ""
        spread = f"{shown(figure.median)} [{shown(min(figure.values))}, {shown(max(figure.values))}]"
        rows.append((figure.part, figure.case, figure.name, spread, figure.unit or "ratio", goal))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    text += [
        f"{line['part']}, {line['case']}: {line['note']}"
        for line in last
        if "note" in line and "values" not in line
    ]
    text += [
        f"{line['part']}: {line['status']}: {line['why']}"
        for line in last
        if line.get("status", "done") != "done"
    ]
    return "\n".join(text)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of an earlier run. Ends with a message where there are none."""
    if not path.is_file():
        raise SystemExit(f"error: there is no {path}: a run writes it (--out)")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


# ---------------------------------------------------------------- the command


def chosen(text: str) -> dict[str, Part]:
    names = list(PARTS) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise SystemExit(f"error: --parts: there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return {name: PARTS[name] for name in names}


def deadline(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"there is no part {name!r}")
    return name, float(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--parts", default="all", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu.jsonl"), help="figures are appended as they come"
    )
    parser.add_argument("--seconds", type=float, default=590.0, help="of all parts together")
    parser.add_argument("--deadline", type=deadline, action="append", default=[], metavar="PART=SECONDS")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes; taken by itself where there is no GPU"
    )
    parser.add_argument("--scratch", default="", help="a folder with 14 GB for models made in place")
    parser.add_argument("--list", action="store_true", help="tell the parts, and which packages they lack")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="only print the table of an earlier run's file"
    )
    options = parser.parse_args(argv)
    if options.table:
        print(table(read(options.table)))
        return 0
    parts = chosen(options.parts)
    lacking = told_packages(parts)
    if lacking:
        print(lacking, flush=True)
    if options.list:
        for name, part in parts.items():
            print(f"{name:10} {part.deadline_s:4.0f} s  {part.what}")
        return 0
    folder = scratch_folder(options.scratch)
    try:
        settings, sentence = settings_of(options.device, options.tiny, str(folder))
        print(sentence, flush=True)
        if settings.device == "cpu":
            preload(parts.values())
        outcomes = run(parts, settings, options.out, options.seconds, dict(options.deadline))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{sentence}\n{table(read(options.out))}\nlines: {options.out}", flush=True)
    return 0 if all(outcome.status == "done" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
