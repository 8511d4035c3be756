"""A whole run whose ranks have MPICH and not Open MPI, on a real Slurm: by `srun --mpi=pmi2`, and by MPICH's own mpirun."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from tests.system import play

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.long]


@pytest.fixture(scope="module")
def mpich_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with all that this one has, but MPICH and an mpi4py that loads it."""
    folder = tmp_path_factory.mktemp("mpich")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin/python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "mpich",
        "mpi4py",
    ]
    subprocess.run(install, check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Read after the venv's own packages, so that its mpi4py is the one that is found.
    (folder / "lib" / version / "site-packages/others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("environ", "met"),
    [
        ({}, "2 ranks met under srun --mpi=pmi2 of MPICH"),
        ({"SCAVENGER_MPI": "mpirun"}, "2 ranks met under mpirun of MPICH"),
    ],
)
def test_ranks_of_mpich_meet_and_train_alike(
    environ: dict[str, str],
    met: str,
    mpich_python: Path,
    tmp_path: Path,
    small_model: Path,
    undisturbed: play.Result,
) -> None:
    options = SiteOptions("slurm", tmp_path, demo_layout(grace_s=1.0), poll_interval_s=0.5, max_engines=2)
    with DemoSite(options) as site:
        run = play.write_run(site, small_model, run={"steps": 4})
        job = play.submit(site, run, env={"SCAVENGER_PYTHON": str(mpich_python), **environ})
        play.finish(site, job)
        assert met in (site.dir / "train.log").read_text()
        assert play.result(site) == undisturbed.until(4)


@pytest.mark.timeout(300)
def test_a_launcher_of_another_make_is_said_within_seconds(
    mpich_python: Path, tmp_path: Path, small_model: Path
) -> None:
    """MPICH's ranks under srun's PMIx alone: nothing is started, and the job's last line says why and what to do."""
    options = SiteOptions("slurm", tmp_path, demo_layout(grace_s=1.0), poll_interval_s=0.5, max_engines=0)
    with DemoSite(options) as site:
        run = play.write_run(site, small_model)
        environ = {"SCAVENGER_PYTHON": str(mpich_python), "SCAVENGER_MPI": "srun", "SLURM_MPI_TYPE": "pmix"}
        job = play.submit(site, run, env=environ)
        log = site.dir / "train.log"
        said = "2 ranks cannot reach one another by MPI (MPICH"
        play.wait_for("the job's last words", lambda: log.exists() and said in log.read_text(), 60)
        text = log.read_text()
        assert "PMIx" in text
        assert "SLURM_MPI_TYPE" in text
        seen = play.wait_for(
            "the job's end", lambda: (job_ := play.job(site, job)) and job_.state in play.ENDED and job_
        )
        assert seen.end_time - seen.start_time <= 30
