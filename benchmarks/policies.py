"""Policies against each other: every cell of (segment x model x fleet cap), many seeds, with 95 % confidence. Writes `policies.md`.

    python -m benchmarks.policies --traces DIR --keep FILE [--seeds 10] [--jobs 2] [--reduced] [--policy ours,rlboost,...]
        [--setting live] [--out FILE.md]
    python -m benchmarks.policies --traces DIR --keep FILE --no-run        (the page of what is there so far)

Cells are never averaged over segments, whose starts are fixed in `segments.json`. The setting is that of the published points
(`published.STACK`), whatever the policy; with `--setting live` it is what `scavenger init` writes and the daemon's defaults
(`live_setting`), on a page of its own. A unit of work is one cell with one seed: all its policies meet the same fleet, lengths and cold
starts, so ratios are taken seed by seed. Colocated, which uses no fleet, is played once for a model and a seed. `--jobs` processes take one
unit after the other, seed by seed, so that an unfinished table has all cells. What they find is kept in `--keep FILE`, unit by unit: ended
at any moment, by whatever, the same command goes on from there.

The page has the rows that miss a goal (`policies_table.GOALS`), each with the reason and where the step's seconds went, and the starts of
engines. Units that another code played than this tree's are marked, and played again with `--again`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import harvest
from benchmarks.baselines.registry import KNOWN
from benchmarks.live_setting import POLL_S, described
from benchmarks.policies_cells import (
    CAPS,
    MODELS,
    ROOT,
    SEGMENTS,
    SETTINGS,
    Alone,
    code_of,
    commit_of,
    live_plan,
    simulate_unit,
)
from benchmarks.policies_table import COMPARED, Found, Result, Unit, cpu, page
from scavenger.errors import ConfigError

EARTH = "earth_node_idle_72h.csv.gz"

# ---------------------------------------------------------------- processes


def work(folder: Path, policies: Sequence[str], setting: str) -> None:
    """A worker process: units come as JSON lines, results leave as JSON lines."""
    alone: Alone = {}
    code, commit = code_of(), commit_of()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)  # samples live for a step, and name no cycle that is not taken apart
    for line in sys.stdin:
        unit = Unit(**json.loads(line))
        results = simulate_unit(unit, folder, policies, alone, setting)
        found = {name: asdict(one) for name, one in results.items()}
        line = {"unit": asdict(unit), "found": found, "code": code, "commit": commit, "setting": setting}
        print(json.dumps(line), flush=True)


def spread(units: Sequence[Unit], jobs: int, argv: Sequence[str]) -> Iterator[str]:
    """Hand the units to `jobs` processes, each the next one when it is done with one; yields what they answer, a line each.

    They are in sessions of their own: an interrupt from the terminal ends them by this one's hand alone.
    """
    todo, lines = deque(units), queue.Queue[str | None]()
    workers = [
        subprocess.Popen(
            argv,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        for _ in range(jobs)
    ]
    threads = [threading.Thread(target=_feed, args=(worker, todo, lines), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for _ in units:
            line = lines.get()
            if line is None:
                raise SystemExit("a process ended before its unit: see its error above")
            yield line
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for thread in threads:
            thread.join()
        for worker in workers:
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()


def _feed(worker: subprocess.Popen[str], todo: deque[Unit], lines: queue.Queue[str | None]) -> None:
    """One process's units, one at a time. `None` when it has ended without an answer."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    while todo:
        try:
            unit = todo.popleft()
        except IndexError:  # another process took the last one
            return
        try:
            worker.stdin.write(json.dumps(asdict(unit)) + "\n")
            worker.stdin.flush()
        except BrokenPipeError:
            lines.put(None)
            return
        line = worker.stdout.readline()
        lines.put(line if line.endswith("\n") else None)
        if not line:
            return


# ---------------------------------------------------------------- what is kept


class Kept:
    """Results by unit, and the file that has them: each is there before the next is asked for.

    `codes`: by what code each was made, and its commit where it is known.
    """

    def __init__(self, path: Path | None, policies: Sequence[str], setting: str = "published") -> None:
        self.found: Found = {}
        self._setting = setting
        self.codes: dict[Unit, tuple[str, str]] = {}
        self._path, self._policies = path, policies
        if path is None or not path.exists():
            return
        whole = path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):  # who wrote the last line was killed while it did
            print(f"{path}: its last line is not whole, and is left out", file=sys.stderr)
            os.truncate(path, end)
        for number, line in enumerate(whole[:end].decode().splitlines(), 1):
            self._read(line, f"{path}, line {number}")

    def add(self, line: str) -> None:
        """One answer of a process."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(line)
        self._read(line, "a process's answer")

    def _read(self, line: str, where: str) -> None:
        try:
            one = json.loads(line)
            unit, found = (
                Unit(**one["unit"]),
                {name: Result(**result) for name, result in one["found"].items()},
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{where}: {error!r} in what should be a unit's results", "give --keep another file"
            ) from error
        if (played := one.get("setting", "published")) != self._setting:
            raise ConfigError(
                f"{where} was played in the {played} setting, not in the {self._setting} one",
                "give --keep another file, or --setting as it was",
            )
        missing = [name for name in self._policies if name not in found]
        if missing:
            raise ConfigError(
                f"{where} was played without {missing[0]}",
                "give --keep another file, or name its policies with --policy",
            )
        self.found[unit] = found
        self.codes[unit] = one.get("code", ""), one.get("commit", "")

    def of_other_code(self, code: str) -> dict[Unit, str]:
        """Units that were played by other code than this, and by which."""
        return {
            unit: f"commit {commit}" if commit else f"code {made}"
            for unit, (made, commit) in self.codes.items()
            if made != code
        }


# ---------------------------------------------------------------- the command


def units_of(asked: argparse.Namespace) -> list[Unit]:
    segments = [one["name"] for one in json.loads(SEGMENTS.read_text())["segments"]]
    if asked.reduced:
        return [
            Unit(segment, "Qwen3-8B", 4, seed)
            for segment in ("earth-volatile", "spot-volatile")
            for seed in range(2)
        ]
    return [
        Unit(segment, model, cap, seed)
        for seed in range(asked.seeds)
        for segment in segments
        for model in MODELS
        for cap in CAPS
    ]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--traces", type=Path, required=True, help="folder of the traces named in segments.json"
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--reduced", action="store_true", help="two cells, two seeds: minutes")
    parser.add_argument("--policy", default=",".join(COMPARED))
    parser.add_argument("--setting", choices=SETTINGS, default="published", help="what all policies meet")
    parser.add_argument(
        "--out", type=Path, help="default: policies.md, or policies-live.md, beside this file"
    )
    parser.add_argument("--keep", type=Path, help="file of results: read first, added to unit by unit")
    parser.add_argument("--no-run", action="store_true", help="play nothing: the page of what --keep has")
    parser.add_argument("--again", action="store_true", help="play again what another code played")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    asked.traces = asked.traces.resolve()
    if asked.out is None:
        name = "policies.md" if asked.setting == "published" else f"policies-{asked.setting}.md"
        asked.out = Path(__file__).with_name(name)
    asked.policies = asked.policy.split(",")
    unknown = [name for name in asked.policies if name not in KNOWN]
    if unknown:
        parser.error(f"no policy {unknown[0]!r}: there are {', '.join(KNOWN)}")
    return asked


def run(asked: argparse.Namespace, kept: Kept, replies: Iterable[str], todo: int, units: int) -> None:
    """Keep what comes, and tell how far it is. `todo`: answers to come; `units`: of the whole table."""
    started, before = time.monotonic(), units - todo
    for done, line in enumerate(replies, 1):
        kept.add(line)
        passed = time.monotonic() - started
        left_s = passed / done * (todo - done)
        print(
            f"{before + done} of {units} units, {passed / 60:.1f} min, {left_s / 60:.0f} min to go",
            file=sys.stderr,
        )


def summary(asked: argparse.Namespace, kept: Kept, units: int) -> list[str]:
    """How the page came about."""
    size = "--reduced" if asked.reduced else f"--seeds {asked.seeds}"
    if asked.setting != "published":
        size += f" --setting {asked.setting}"
    lines = [
        f"`python -m benchmarks.policies --traces DIR --keep FILE {size} --jobs {asked.jobs}`: {len(kept.found)} of {units} units,"
    ]
    lines += [
        f"{cpu(kept.found, asked.policies)}. This tree: commit {commit_of() or 'unknown'}, code {code_of()}."
    ]
    of_other_code = Counter(kept.of_other_code(code_of()).values())
    if of_other_code:
        counts = "; ".join(f"{number} by {name}" for name, number in sorted(of_other_code.items()))
        lines += [
            "",
            f"**{sum(of_other_code.values())} of {len(kept.found)} units, marked \\*, were not played by this code: {counts}.**",
        ]
    return lines


def live_notes(found: Found) -> list[str]:
    """What the live setting is, for each model of the page."""
    lines = [
        "The **live** setting: what `scavenger init` writes for the model on H100 (80 GB), the daemon's defaults, polls of",
        f"Slurm every {POLL_S:g} s (an open run expects something), heartbeats every 10 s. Engines have two GPUs,",
        "as the fleets of the other page. Links, cold starts, toggles and speeds are assumed as in the published",
        "setting: no GPU has measured ours.",
    ]
    return [
        *lines,
        *(
            f"- {described(live_plan(model, 1))}"
            for model in MODELS
            if any(unit.model == model for unit in found)
        ),
    ]


def idle_time(folder: Path) -> list[str]:
    """The goal of what is idle, with demand unbounded: the whole Earth trace replayed by the daemon's rule (`benchmarks/harvest.py`)."""
    lines = [
        "",
        "## What is idle",
        "",
        (
            f"{EARTH}, 72 h, every idle GPU wanted, taken by the daemon's rule "
            f"(`harvest.min_expected_life`). Harvested: of the idle GPU time in"
        ),
        f"slices that outlast a cold start of {harvest.COLD_S:g} s. Wasted: starts that others ended before. The rule's 98.5 %",
        "and its bounds were chosen on this same trace.",
        "",
        f"| polls of Slurm | harvested (wanted: at least {100 * harvest.LEAST_HARVESTED:.0f} %) | starts | "
        f"wasted (wanted: under {100 * harvest.MOST_WASTED:.0f} %) | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for poll_s, which in ((harvest.POLL_INTERVAL_S, ", the default"), (10.0, "")):
        found = harvest.of_trace(folder / EARTH, poll_s)
        met = found.harvested >= harvest.LEAST_HARVESTED and found.wasted < harvest.MOST_WASTED
        summary = f"{100 * found.harvested:.1f} % | {found.starts:,} | {100 * found.wasted:.1f} %"
        lines.append(f"| every {poll_s:g} s{which} | {summary} | {'met' if met else '**missed**'} |")
    return [*lines, ""]


def main() -> None:
    asked = parsed()
    if asked.worker:
        work(asked.traces, asked.policies, asked.setting)
        return
    kept = Kept(asked.keep, asked.policies, asked.setting)
    units = units_of(asked)
    stale = kept.of_other_code(code_of())
    todo = (
        []
        if asked.no_run
        else [unit for unit in units if unit not in kept.found or (asked.again and unit in stale)]
    )
    argv = [
        sys.executable,
        "-m",
        "benchmarks.policies",
        "--traces",
        str(asked.traces),
        "--policy",
        asked.policy,
        "--setting",
        asked.setting,
        "--worker",
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if todo:
            run(asked, kept, spread(todo, max(1, min(asked.jobs, len(todo))), argv), len(todo), len(units))
    except KeyboardInterrupt:
        raise SystemExit(
            f"{len(kept.found)} of {len(units)} units are kept in {asked.keep}: the same command goes on from there"
        ) from None
    if not kept.found:
        raise SystemExit("there is no unit yet: run without --no-run")
    month, lines, of_other_code = (
        f"{datetime.date.today():%B %Y}",
        summary(asked, kept, len(units)),
        kept.of_other_code(code_of()).keys(),
    )
    if asked.setting == "live":
        text = page(kept.found, asked.policies, month, lines, of_other_code, live_notes(kept.found))
    else:
        text = page(kept.found, asked.policies, month, lines, of_other_code)
        text += "\n".join(idle_time(asked.traces))
    asked.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
