"""A cell of the policies' table with one seed: its fleet, its scenario, and what each policy did in it.

Owns the setting that all policies meet, and which code a result depends on. Knows nothing of processes, files of results and the page.
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.baselines.points import Setting, scenario
from benchmarks.baselines.registry import simulated_policy
from benchmarks.live_setting import LiveSetting, live_scenario
from benchmarks.policies_table import Result, Unit
from scavenger.simulate import traces
from scavenger.simulate.clock import Streams
from scavenger.simulate.driver import simulate
from scavenger.simulate.fleet import FleetTrace
from scavenger.simulate.lengths import CachedLengths
from scavenger.simulate.outcome import SimulationOutcome
from scavenger.simulate.plan import SimulationPlan
from scavenger.simulate.presets import STACK
from scavenger.simulate.scenario import Scenario

ROOT = Path(__file__).resolve().parents[1]
SEGMENTS = Path(__file__).with_name("segments.json")
LIVE = Path(__file__).with_name("live_setting.py")
MODELS = {"Qwen3-8B": 8, "Qwen3-14B": 8, "Qwen3-32B": 16}  # -> reserved GPUs
CAPS = (1, 2, 4, 8, 0)  # pairs; 0 = uncapped
UNCAPPED = 128
#: A live daemon's heartbeats come every second or so, and Slurm is looked at as often as the site allows: for all policies alike.
HEARTBEAT_S = OBSERVE_S = 10.0
EARTH_END_S = 72 * 3600.0
PRICES = (10.47, 2.66)  # dollars an hour of a reserved and of a harvested GPU


def fleet_of(folder: Path, name: str, seed: int) -> FleetTrace:
    """The segment's fleet. Of spot instances the trace has only the number: which one goes is drawn by the seed."""
    described = json.loads(SEGMENTS.read_text())
    one = next(one for one in described["segments"] if one["name"] == name)
    path = folder / one["trace"]
    if "source" in one:
        whole = traces.read_spot(path, one["source"], STACK.engine_gpus, Streams(seed).stream("instances"))
    else:
        whole = traces.read_nodes(path, 8, EARTH_END_S)
    return whole.segment(one["start_s"], described["length_s"])


@functools.cache
def lengths_of(setting: Setting) -> CachedLengths:
    return CachedLengths(setting.lengths())


def scenario_of(unit: Unit, fleet: FleetTrace) -> Scenario:
    """The published setting over the whole segment, with as many engines as the cell allows; weights are relayed, for all policies."""
    setting = Setting(unit.model, MODELS[unit.model])
    return replace(
        scenario(setting, fleet, steps=0, seed=unit.seed),
        max_engines=unit.pairs or UNCAPPED,
        relay=True,
        heartbeat_s=HEARTBEAT_S,
        poll_interval_s=OBSERVE_S,
        lengths=lengths_of(setting),
    )


def result_of(out: SimulationOutcome, cpu_s: float) -> Result:
    reserved, harvested = PRICES
    parts = ("seed_s", "wait_s", "train_s")
    seed_s, wait_s, train_s = (
        statistics.mean([getattr(step, part) for step in out.steps] or [0.0]) for part in parts
    )
    return Result(
        out.tokens_per_s,
        out.tokens_per_dollar(reserved, harvested),
        out.tokens_per_dollar(reserved, 0.0),
        len(out.steps),
        out.starts,
        out.wasted_starts,
        out.preemptions,
        out.harvested_gpu_hours,
        out.step_seconds / max(1, len(out.steps)),
        seed_s,
        wait_s,
        train_s,
        cpu_s=cpu_s,
    )


@functools.cache
def live_plan(model: str, pairs: int) -> SimulationPlan:
    return LiveSetting(model, MODELS[model]).plan(pairs or UNCAPPED)


def live_of(unit: Unit, fleet: FleetTrace) -> Scenario:
    """The live setting over the whole segment."""
    return live_scenario(live_plan(unit.model, unit.pairs), unit, fleet, HEARTBEAT_S)


#: By `--setting`: what all policies meet.
SETTINGS: Mapping[str, Callable[[Unit, FleetTrace], Scenario]] = {"published": scenario_of, "live": live_of}

Alone = dict[tuple[str, int], Result]


def simulate_unit(
    unit: Unit, folder: Path, policies: Sequence[str], alone: Alone, setting: str = "published"
) -> dict[str, Result]:
    """`alone`: what colocated did by model and seed; added to. `setting`: of `SETTINGS`."""
    cell = SETTINGS[setting](unit, fleet_of(folder, unit.segment, unit.seed))
    found = {}
    for name in policies:
        known = alone.get((unit.model, unit.seed)) if name == "colocated" else None
        if known is not None:
            found[name] = replace(known, cpu_s=0.0)
            continue
        started = time.process_time()
        out = simulate(cell, simulated_policy(name, cell))
        found[name] = result_of(out, time.process_time() - started)
    if "colocated" in found:
        alone[unit.model, unit.seed] = found["colocated"]
    return found


@functools.cache
def code_of() -> str:
    """What a unit's result depends on besides the traces: the modules that are played, the baselines, and the scenario."""
    played = (
        "scavenger/policy",
        "scavenger/protocol",
        "scavenger/router",
        "scavenger/harvest",
        "scavenger/simulate",
        "scavenger/sizing",
        "benchmarks/baselines",
    )
    code_paths = [path for folder in played for path in ROOT.glob(f"{folder}/**/*.py")]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(
        [*code_paths, ROOT / "scavenger/protocol/train_step.py", SEGMENTS, LIVE, Path(__file__)]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def commit_of() -> str:
    """The commit of this tree, for a person to find; `+` where what is played was changed since. Empty without git."""
    try:
        named = _git("rev-parse", "--short=10", "HEAD")
        return named + "+" * bool(_git("status", "--porcelain", "--", "scavenger", "benchmarks"))
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
