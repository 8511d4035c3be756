"""How many harvested engines a run asks for: up while its trainer waits, down gently, none that cannot earn its start. Pure.

    useful    the most engines of which each still shortens the step (`seed_window.size_fleet`)
    target    within it: grows by the share of the step in which its GPUs did not train (they generated themselves, or waited), holds
              inside a dead band, shrinks by little at a time
    worth     the next engine's saving over its expected life (`survival`) against the GPU time of its cold start
    benefit   from which age on an idle GPU is worth a start, for a run that says what an engine saves it
    Demand    the number and its reason: what the harvester reads of a run

Owns the rules and the state they need from one step to the next. Knows nothing of Slurm, jobs or free capacity, and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scavenger.policy.forecast.survival import SurvivalCurve, settle_s


@dataclass(frozen=True, slots=True)
class FleetSizeRules:
    """`low`..`high`: shares of the step that the trainer may wait without a change. `shrink`: the most that leaves at once, a share.

    `patience`: steps in a row that ask for fewer before any leaves. `weight`: of the newest step in the average wait.
    """

    low: float = 0.05
    high: float = 0.15
    shrink: float = 0.125
    patience: int = 2
    weight: float = 0.5

    def __post_init__(self) -> None:
        if (
            not 0 <= self.low < self.high <= 1
            or not 0 < self.shrink <= 1
            or self.patience < 1
            or not 0 < self.weight <= 1
        ):
            raise ValueError(f"{self}: 0 <= low < high <= 1, 0 < shrink <= 1, patience >= 1, 0 < weight <= 1")


@dataclass(frozen=True, slots=True)
class State:
    """`target`: engines asked for now. `wait`: the averaged share of the step that the trainer waited; None: no step yet."""

    target: int = 0
    wait: float | None = None
    low_steps: int = 0
    reason: str = "no step was seen yet"


def step_ended(state: State, wait_share: float, useful: int, rules: FleetSizeRules) -> State:
    """The target after a step in which the trainer waited for `wait_share` of it, when up to `useful` engines shorten the next.

    Growth aims where the wait vanishes: with n engines and a share w waited, n / (1 - w) do the same work in the time that was not
    waited; at least one more. More than is useful is never grown to; what became useless leaves by `shrink` at a time, and a rest of that
    share stays: the number that is useful is not known better, and an engine that leaves costs a start to get back.
    """
    if not 0 <= wait_share <= 1 or useful < 0:
        raise ValueError(f"a wait share of {wait_share} with {useful} useful engines")
    wait = _averaged(state.wait, wait_share, rules)
    reason = f"the trainer waits {wait:.0%} of a step, {useful} engines are useful, {state.target} asked for"
    if wait > rules.high and useful > state.target:
        grown = max(state.target + 1, math.ceil(max(1, state.target) / max(1 - wait, 0.05) - 1e-9))
        target = min(useful, grown)
        return State(target, wait, 0, f"{reason}: over {rules.high:.0%}, so {target}")
    idle = wait < rules.low or useful < (1 - rules.shrink) * state.target
    low_steps = state.low_steps + 1 if idle else 0
    if idle and low_steps >= rules.patience and state.target > 0:
        least = useful if useful < state.target else 0
        target = max(least, state.target - max(1, math.floor(rules.shrink * state.target)))
        return State(target, wait, low_steps, f"{reason}: for {low_steps} steps too many, so {target}")
    if idle:
        band = f"too many for {low_steps} of {rules.patience} steps"
    elif wait > rules.high:
        band = f"over {rules.high:.0%}, but no more are useful"
    else:
        band = f"within {rules.low:.0%} to {rules.high:.0%}"
    return State(state.target, wait, low_steps, f"{reason}: {band}, so it stays")


def _averaged(wait: float | None, newest: float, rules: FleetSizeRules) -> float:
    return newest if wait is None else (1 - rules.weight) * wait + rules.weight * newest


def restarted(state: State, wait_shares: Sequence[float], asked: int, rules: FleetSizeRules) -> State:
    """After a restart: `asked` engines were asked for when these steps had been seen. What gives engines back counts its steps anew."""
    wait = state.wait
    for share in wait_shares:
        wait = _averaged(wait, share, rules)
    return State(asked, wait, 0, f"{asked} were asked for before the daemon's restart")


def start_with(state: State, useful: int, asked: int = 0) -> State:
    """Before any step was seen the forecast alone decides: all that is useful is asked for.

    `asked`: engines that were asked for before there was a forecast at all. On priors alone none of them is given back: it would have been
    started for nothing, and may be asked for again a step later.
    """
    if state.wait is not None:
        return state
    if asked > useful:
        why = f"no step was seen yet: the {asked} engines that were asked for stay, though the forecast's are {useful}"
        return replace(state, target=asked, reason=why)
    return replace(state, target=useful, reason=f"no step was seen yet: the forecast's {useful} engines")


@dataclass(frozen=True, slots=True)
class NetBenefit:
    """Whether one more engine earns its start."""

    ask: bool
    saved_gpu_s: float
    cost_gpu_s: float
    reason: str


#: An engine whose start is likelier than this to be wasted is not asked for, whatever it would save.
MOST_WASTED = 0.5


def worth(
    saving: float,
    run_gpus: float,
    gpus: int,
    cold_start_s: float,
    life: SurvivalCurve,
    age_s: float = 0.0,
    hold_s: float = 0.0,
    price: float = 1.0,
) -> NetBenefit:
    """One more engine of `gpus` GPUs that shortens a step by the share `saving`, for a run that occupies `run_gpus` GPUs.

    While it serves, it saves `saving * run_gpus` GPU-seconds a second; it serves for E[(life - cold start)+]; its start costs
    `gpus * E[min(life, cold start)]` GPU-seconds. `age_s`: for how long the GPU has been idle. `hold_s`: seconds of each life for which
    it is held without work (between steps), counted with its cost. `price`: of a harvested GPU-second, in the run's own; 0: what is idle
    costs nothing, and no start is wasted.
    """
    serves = life.expected_s(cold_start_s, age_s)
    starting = life.expected_s(0.0, age_s, horizon_s=cold_start_s)
    wasted = 1 - life.survives(cold_start_s, age_s)
    saved, cost = saving * run_gpus * serves, price * gpus * (starting + hold_s)
    reason = (
        f"saves {saving:.2%} of a step of {run_gpus:g} GPUs for {serves:.0f} s expected after a start of {cold_start_s:.0f} s "
        f"({wasted:.0%} are lost before): {saved:.0f} GPU-s against {cost:.0f}"
    )
    if wasted > MOST_WASTED and price > 0:
        return NetBenefit(False, saved, cost, f"{reason}; over {MOST_WASTED:.0%} would be wasted")
    return NetBenefit(saved > cost or (price == 0 and saving > 0), saved, cost, reason)


def break_even(
    run_gpus: float, gpus: int, cold_start_s: float, life: SurvivalCurve, price: float = 1.0
) -> float:
    """The saving at which `worth` turns: what an engine must at least shorten the step by; inf when none outlasts its start."""
    if price == 0:
        return 0.0
    serves = run_gpus * life.expected_s(cold_start_s)
    return price * gpus * life.expected_s(0.0, horizon_s=cold_start_s) / serves if serves > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Benefit:
    """What an engine of a run is worth by its own forecast. `saving`: of a step's time, as a share, on average over the engines that
    the run asks for (each of which pays for itself by the lives of engines); None: it is on trial.

    `run_gpus`, `gpus`: of the run, of an engine; `start_s`: from registration to its first weights; `price` as in `worth`. `curve`: the
    step's seconds with so many harvested engines, as far as they were solved for; inf: it would never end.
    """

    saving: float | None
    run_gpus: float
    gpus: int
    start_s: float
    price: float = 1.0
    curve: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StartBenefit:
    """An idle GPU is taken from this age on; inf: it is not worth a start at any."""

    age_s: float
    reason: str


#: Ages at which an engine that is not worth its start on a GPU that has settled is weighed again, in cold starts.
_LATER = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)


def start_benefit(benefit: Benefit, life: SurvivalCurve, share: float) -> StartBenefit:
    """From which age on a GPU with this life earns the start of an engine. `share`: of starts that shall not be wasted (`settle_s`).

    Where harvested GPUs have no price no start is wasted, whatever becomes of it.
    """
    if benefit.price == 0:
        return StartBenefit(0.0, "what is idle costs nothing, and no start is wasted")
    settled = settle_s(life, benefit.start_s, share) if share > 0 else 0.0
    chance = life.survives(benefit.start_s, age_s=settled)
    reason = f"idle for {settled:.0f} s, {chance:.1%} outlast a start of {benefit.start_s:.0f} s"
    if benefit.saving is None:
        return StartBenefit(settled, reason)
    verdict = None
    for later in _LATER:
        age = settled + later * benefit.start_s
        found = worth(
            benefit.saving,
            benefit.run_gpus,
            benefit.gpus,
            benefit.start_s,
            life,
            age_s=age,
            price=benefit.price,
        )
        if found.ask:
            return StartBenefit(age, f"{reason}; idle for {age:.0f} s, one more {found.reason}")
        verdict = verdict or found
    assert verdict is not None
    return StartBenefit(math.inf, f"{reason}; one more {verdict.reason}: not worth its start, nor later")


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run could use now: `engines` harvested ones, of `gpus_per_engine` on each of `nodes_per_engine` nodes. `reason` explains
    the number.

    `engine`: the run's `engine.name`, which a job imports while it waits for the daemon's answer. `benefit`: what one more engine is worth,
    where the run's policy says so; None: nothing is known, and what is idle is taken. `owner`: who owns the run, "" = not known;
    `owner_gpus`: GPUs that the engines of all of the owner's runs may hold, draining ones counted; None: no limit. `encrypts`: its weights
    travel encrypted. `hands`: names everything that its engines are built from, by which engines of two runs may change hands; "": its
    engines never do. `shares`: names engine and base of a run that shares engines (`run.share_engines`): samples of runs of one such name
    may be in one batch; "": they may not. `max_batch`: of its engines. `queued`: its samples that wait for one.
    """

    run_id: int
    run: str
    engines: int
    gpus_per_engine: int
    reason: str
    engine: str = "reference"
    benefit: Benefit | None = None
    owner: str = ""
    owner_gpus: int | None = None
    nodes_per_engine: int = 1
    encrypts: bool = False
    hands: str = ""
    shares: str = ""
    max_batch: int = 0
    queued: int = 0

    @property
    def gpus(self) -> int:
        """Of one engine, on all of its nodes."""
        return self.gpus_per_engine * self.nodes_per_engine


def without(demand: Sequence[Demand], elsewhere: Mapping[int, int]) -> list[Demand]:
    """The demand, less the engines that each run has on other clusters. Pure."""
    return [
        replace(
            want,
            engines=max(0, want.engines - there),
            reason=f"{want.reason}; {there} of {want.engines} are on other clusters",
        )
        if (there := min(want.engines, elsewhere.get(want.run_id, 0)))
        else want
        for want in demand
    ]


@dataclass(frozen=True, slots=True)
class EnvironmentDemand:
    """How many environment workers in jobs a run lets join, and the file by which they do. `owner`: who owns the run, "" = not known."""

    run_id: int
    run: str
    workers: int
    file: str
    owner: str = ""


def within_owners(demand: Sequence[Demand], most_gpus: Callable[[str], int | None]) -> list[Demand]:
    """The demand, with the engines of each owner's runs within `most_gpus` of the owner together (None: no limit).

    An owner's engines are given out one by one, to the run that has the fewest; of equal ones, to the older. Engines that leave are
    not known here: the harvester counts them (`Demand.owner_gpus`).
    """
    given: dict[int, int] = {}
    for owner in sorted({want.owner for want in demand}):
        left = most_gpus(owner)
        if left is None:
            continue
        its = [want for want in demand if want.owner == owner]
        given |= {want.run_id: 0 for want in its}
        while fitting := [want for want in its if given[want.run_id] < want.engines and want.gpus <= left]:
            chosen = min(fitting, key=lambda want: (given[want.run_id], want.run_id))
            given[chosen.run_id] += 1
            left -= chosen.gpus
    return [
        _cut(replace(want, owner_gpus=most_gpus(want.owner)), given.get(want.run_id, want.engines))
        for want in demand
    ]


def _cut(want: Demand, engines: int) -> Demand:
    if engines >= want.engines:
        return want
    why = f"{want.reason}; its owner may have {engines} of {want.engines} (owners.max_gpus)"
    return replace(want, engines=engines, reason=why)
