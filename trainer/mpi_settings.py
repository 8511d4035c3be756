"""Which launcher and which settings make one MPI world of all ranks here: decided from trials of a tiny program.

Owns the candidates, their order, and when to stop trying. Pure: what a library says of its version and how each
trial ended are inputs. Knows neither processes nor the training job. MPI carries small control frames only, so any
transport that works will do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

#: Exit codes of `trainer.world_probe`; any other one is the MPI library's or the launcher's own.
NO_MPI, WRONG_SIZE, UNREACHABLE = 64, 65, 66
_MAKES = (
    ("Open MPI", re.compile(r"Open MPI\)? v?(\d[\d.]*)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version (\d[\d.]*)", re.S)),
    ("MPICH", re.compile(r"(?:MPICH|HYDRA).*?Version:\s+(\d[\d.]*)", re.S)),
)
#: More ranks than cores, bound to none. Since Open MPI 5 the launcher is PRRTE, which reads the last two
#: and not the
#: first two; a launcher that does not know one of them ignores it.
OVERSUBSCRIBE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
_OPEN_TCP = (
    "try it in such an allocation: `mpirun -n 2 python -m trainer.world_probe 2 10`; open TCP between the nodes, "
    "or set the OMPI_MCA_* variables that this network needs, or SCAVENGER_MPI=srun|mpirun and SLURM_MPI_TYPE"
)
_TCP = {"OMPI_MCA_btl": "self,tcp"}
#: Open MPI 5 asks the kernel for routes by netlink; where that finds none to the host's own address, its
#: TCP calls
#: ranks of one node unreachable (seen with 5.0.7, whose own choice is shared memory there).
_TCP_5 = _TCP | {"OMPI_MCA_reachable": "weighted"}


@dataclass(frozen=True, slots=True)
class Library:
    """An MPI library or its launcher. `make` is "" for one that is not known, `version` () with it."""

    make: str = ""
    version: tuple[int, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.make} {'.'.join(map(str, self.version))}"
            if self.make
            else "an MPI library of unknown make"
        )


class HostFault(StrEnum):
    """How a host of the job was seen from here, by TCP, at every port that was tried."""

    DROPS = "TCP connections to it are dropped"
    UNREACHABLE = "it is unreachable"


@dataclass(frozen=True, slots=True)
class MpiSettings:
    """Environment variables that are set for the ranks, unless the user set them."""

    name: str
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of the tiny world.

    `code`: its launcher's exit status, None where it did not end in time.
    """

    launcher: str
    settings: MpiSettings
    code: int | None
    words: str = ""


@dataclass(frozen=True, slots=True)
class Try:
    launcher: str
    settings: MpiSettings


@dataclass(frozen=True, slots=True)
class MpiChoice:
    launcher: str
    settings: MpiSettings
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No candidate is left, or none would help. `reason` names each trial and what it reported."""

    reason: str
    remedy: str


def library(text: str) -> Library:
    """From what `mpirun --version` or `MPI.Get_library_version()` prints."""
    for make, pattern in _MAKES:
        if found := pattern.search(text):
            return Library(make, tuple(int(part) for part in found[1].strip(".").split(".")))
    return Library()


def srun_launchers(found: Library, listed: str, named: str = "") -> tuple[str, ...]:
    """`srun` with each process management interface (PMI) that may fit the library, the likeliest first.

    `listed`: what `srun --mpi=list` prints. `named`: the user's own choice (SLURM_MPI_TYPE), which is left alone.
    """
    if named:
        return (f"srun --mpi={named}",)
    # MPICH and its kin speak PMI2 unless they were built with PMIx; Open MPI speaks PMIx.
    order = ("pmi2", "pmix") if found.make in ("MPICH", "Intel MPI") else ("pmix", "pmi2")
    offered = set(re.findall(r"^(?:srun:)?\s*(\w+)\s*$", listed, re.M))
    return tuple(f"srun --mpi={kind}" for kind in order if kind in offered)


def candidates(found: Library) -> tuple[MpiSettings, ...]:
    """Settings to try, in this order. What is not Open MPI needs none of Open MPI's."""
    if found.make != "Open MPI":
        return (MpiSettings("its own settings"),)
    if found.version < (5,):
        return (MpiSettings("TCP alone", _TCP), MpiSettings("its own choice of transport"))
    return (
        MpiSettings("its own choice of transport"),
        MpiSettings("TCP alone, addresses paired by weight", _TCP_5),
        MpiSettings("TCP alone", _TCP),
    )


def decide(
    found: Library,
    launchers: Sequence[str],
    ranks: int,
    trials: Sequence[Trial],
    silent: Mapping[str, HostFault] = {},
) -> Try | MpiChoice | GiveUp:
    """The next trial, or the first candidate whose world met.

    `launchers` in the order in which they are preferred. `silent`: the job's hosts that answer no connection from here; after a trial
    whose ranks did not hear one another, no other is made. One that ended otherwise says nothing of the network.
    """
    if trials and trials[-1].code == 0:
        last = trials[-1]
        failed = f" ({_describe(trials[:-1])})" if trials[:-1] else ""
        met = f"{ranks} ranks met under {last.launcher} of {found} with {last.settings.name}"
        return MpiChoice(last.launcher, last.settings, met + failed)
    if any(trial.code == NO_MPI for trial in trials):
        remedy = (
            "install mpi4py for SCAVENGER_PYTHON and an MPI library (openmpi-bin), on every node of the job"
        )
        return GiveUp(f"ranks cannot load MPI: {trials[-1].words}", remedy)
    if silent and trials and trials[-1].code in (UNREACHABLE, None):
        seen = ", ".join(f"{host} ({fault})" for host, fault in silent.items())
        return GiveUp(
            f"{ranks} ranks cannot reach one another: from this host, {seen}; {_describe(trials)}", _OPEN_TCP
        )
    #: Singletons: launcher and library do not know one another, and no transport changes that.
    hopeless = {trial.launcher for trial in trials if trial.code == WRONG_SIZE}
    tried = {(trial.launcher, trial.settings.name) for trial in trials}
    for launcher in launchers:
        for settings in candidates(found):
            if launcher not in hopeless and (launcher, settings.name) not in tried:
                return Try(launcher, settings)
    return GiveUp(f"{ranks} ranks cannot reach one another by MPI ({found}): {_describe(trials)}", _OPEN_TCP)


def _describe(trials: Sequence[Trial]) -> str:
    """Trials of one launcher that ended alike are named together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for trial in trials:
        groups.setdefault((trial.launcher, trial.words or f"status {trial.code}"), []).append(
            trial.settings.name
        )
    return "; ".join(
        f"{launcher} with {' or '.join(names)}: {words}" for (launcher, words), names in groups.items()
    )
