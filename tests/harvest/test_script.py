"""The job of one engine: named after its intent, quoted, with no secret in it."""

from __future__ import annotations

import subprocess
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from scavenger import __version__
from scavenger.config import ClusterSection, DaemonConfig, DaemonSection, HarvestSection
from scavenger.errors import ConfigError
from scavenger.harvest.decide.decide import Submit
from scavenger.harvest.execute.job_script import job_spec, read_template
from scavenger.protocol import keys

INTENT = "scv-000000000000000a"
SUBMIT = Submit(1, "my run; touch oops", "scavenge", 2, "because", exclude=("node3",))


def config(state_dir: Path) -> DaemonConfig:
    harvest = HarvestSection(cpus_per_engine=3, account="guests", qos="scavenger", time_limit_s=600)
    return DaemonConfig(
        daemon=DaemonSection(state_dir=state_dir),
        cluster=ClusterSection(local_dir=state_dir / "c"),
        harvest=harvest,
    )


@pytest.mark.parametrize("backend", ["slurm", "local"])
def test_the_shipped_template_makes_a_valid_script_without_secrets(tmp_path: Path, backend: str) -> None:
    state_dir = tmp_path / "it's $HOME"
    pair = keys.generate("run", INTENT)
    keys.write_keypair(keys.worker_key_path(state_dir, INTENT), pair)
    spec = job_spec(config(state_dir), read_template(None), backend, "feedbeef", INTENT, SUBMIT)
    done = subprocess.run(["bash", "-n"], input=spec.script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert pair.secret not in repr(astuple(spec))
    assert "tcp://" not in spec.script
    assert "'my run; touch oops'" in spec.script
    assert ("srun" in spec.script) == (backend == "slurm")


def test_the_intent_is_in_name_and_comment_and_the_limits_are_the_configured_ones(tmp_path: Path) -> None:
    spec = job_spec(config(tmp_path), read_template(None), "slurm", "feedbeef", INTENT, SUBMIT)
    assert (spec.name, spec.comment) == (INTENT, f"scavenger:feedbeef:{INTENT}")
    assert (spec.partition, spec.gpus, spec.cpus_per_task, spec.exclude) == ("scavenge", 2, 3, ("node3",))
    assert (spec.requeue, spec.account, spec.qos) == (True, "guests", "scavenger")
    assert 450 <= spec.time_s <= 600


@pytest.mark.parametrize("backend", ["slurm", "local"])
@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_the_job_imports_the_run_s_engine(tmp_path: Path, backend: str, engine: str) -> None:
    spec = job_spec(
        config(tmp_path), read_template(None), backend, "feedbeef", INTENT, replace(SUBMIT, engine=engine)
    )
    (worker,) = [line for line in spec.script.splitlines() if line.startswith("worker=")]
    assert worker.removesuffix(")").split()[-4:-1] == ["--engine", engine, "--code"]


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="job_template"):
        read_template(tmp_path / "nothing.j2")


def with_harvest(state_dir: Path, **harvest: object) -> DaemonConfig:
    return DaemonConfig(daemon=DaemonSection(state_dir=state_dir), harvest=HarvestSection(**harvest))  # type: ignore[arg-type]


def test_a_job_names_the_release_that_it_was_submitted_for_and_what_a_node_may_fetch(tmp_path: Path) -> None:
    plain = job_spec(with_harvest(tmp_path), read_template(None), "slurm", "u", INTENT, SUBMIT).script
    assert f" --code {__version__})" in plain
    capped = job_spec(
        with_harvest(tmp_path, pull_mb_per_s=250), read_template(None), "slurm", "u", INTENT, SUBMIT
    ).script
    assert f" --code {__version__} --pull-mb-per-s 250.0)" in capped


def test_the_owner_of_a_run_is_charged_where_the_account_or_wckey_says_so(tmp_path: Path) -> None:
    settings = with_harvest(tmp_path, account="rl-{owner}", wckey="{owner}")
    template = read_template(None)
    hers = job_spec(settings, template, "slurm", "u", INTENT, replace(SUBMIT, owner="ada"))
    assert (hers.account, hers.wckey) == ("rl-ada", "ada")
    unowned = job_spec(settings, template, "slurm", "u", INTENT, replace(SUBMIT, owner=""))
    assert (unowned.account, unowned.wckey) == ("", ""), "Slurm's default account, not one called {owner}"


def test_limits_are_staggered_by_the_intent_alone_and_end_before_a_reservation(tmp_path: Path) -> None:
    settings = with_harvest(tmp_path, time_limit_s=3600, time_min_s=900, time_stagger=0.5, wckey="rl", nice=7)
    specs = [
        job_spec(settings, read_template(None), "slurm", "feedbeef", f"scv-{n:016x}", SUBMIT)
        for n in range(40)
    ]
    limits = [spec.time_s for spec in specs]
    assert min(limits) < 2200
    assert max(limits) > 3200
    assert all(1800 <= limit <= 3600 for limit in limits)
    assert limits == [
        job_spec(settings, read_template(None), "slurm", "feedbeef", f"scv-{n:016x}", SUBMIT).time_s
        for n in range(40)
    ]
    assert {(round(spec.time_min_s / spec.time_s, 6), spec.wckey, spec.nice) for spec in specs} == {
        (0.25, "rl", 7)
    }
    booked = job_spec(
        settings,
        read_template(None),
        "slurm",
        "feedbeef",
        INTENT,
        replace(SUBMIT, most_s=1199.0, cpus=2, memory_mb=5),
    )
    assert (booked.time_s, booked.cpus_per_task, booked.memory_mb) == (1140.0, 2, 5)
    no_less = with_harvest(tmp_path, time_limit_s=3600, time_min_s=3600)
    assert job_spec(no_less, read_template(None), "slurm", "feedbeef", INTENT, SUBMIT).time_min_s == 0.0


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (
            "--container-image='my image.sqsh' --container-mounts=/shared",
            ["--container-image=my image.sqsh", "--container-mounts=/shared"],
        ),
        ("apptainer exec --nv $HOME/x.sif", ["apptainer", "exec", "--nv", "$HOME/x.sif"]),
        ("", []),
    ],
)
def test_a_container_stands_before_the_engine_and_nothing_in_it_is_expanded(
    tmp_path: Path, container: str, words: list[str]
) -> None:
    script = job_spec(
        with_harvest(tmp_path, container=container), read_template(None), "slurm", "u", INTENT, SUBMIT
    ).script
    line = next(line.strip() for line in script.splitlines() if line.strip().startswith("srun "))
    show = f"set -f; worker=(W); printf '%s\\0' {line.removeprefix('srun ')}"
    said = subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True).stdout.split(
        "\0"
    )[:-1]
    assert [
        word
        for word in said
        if word not in ("--ntasks=1", "--kill-on-bad-exit=1", "--mpi=none", "--input=none")
    ] == [*words, "W"]


def test_a_container_line_with_an_open_quote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="words"):
        job_spec(
            with_harvest(tmp_path, container="apptainer exec 'x"),
            read_template(None),
            "slurm",
            "u",
            INTENT,
            SUBMIT,
        )


@pytest.mark.parametrize(("after_drain", "requeues"), [("requeue", ["requeue"]), ("wait", [])])
def test_on_notice_the_job_requeues_itself_or_waits_for_slurm_to_do_it(
    tmp_path: Path, after_drain: str, requeues: list[str]
) -> None:
    """The script with Slurm's commands played: the engine leaves on notice; the job runs for two more looks, then Slurm takes it."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    said = tmp_path / "said"
    looks = f'echo >> {tmp_path}/n; [ "$(wc -l < {tmp_path}/n)" -le 2 ] && echo RUNNING || echo PENDING'
    plays = {"srun": "exit 75", "sleep": "exit 0", "scontrol": f'echo "$1" >> {said}', "squeue": looks}
    for name, line in plays.items():
        (bin_dir / name).write_text(f"#!/bin/bash\n{line}\n")
        (bin_dir / name).chmod(0o755)
    script = job_spec(
        with_harvest(tmp_path, after_drain=after_drain), read_template(None), "slurm", "u", INTENT, SUBMIT
    ).script
    env = {"PATH": f"{bin_dir}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-s"], input=script, text=True, capture_output=True, env=env, timeout=20, check=False
    )
    assert done.returncode == 75
    assert (said.read_text().split() if said.exists() else []) == requeues


def test_a_worker_s_code_that_comes_in_two_pieces_is_one(tmp_path: Path) -> None:
    """`read` gives up after a second with what it has: of 75 the job once took the 5 alone, and tried the worker's import."""
    script = (Path(__file__).parents[2] / "scripts/rollout.sbatch.j2").read_text()
    loop = script[script.index("code=137") : script.index("# These are not the worker's words")]
    path = tmp_path / "job"
    path.write_text(f"ended=\nexec 3< <(sleep 0.9; printf 7; sleep 1.5; echo 5)\n{loop}exit $code\n")
    assert subprocess.run(["bash", str(path)], check=False).returncode == 75
