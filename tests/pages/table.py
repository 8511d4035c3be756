# ruff: noqa: E501 - commands are as long as they are
"""What becomes of each command that a page shows: it runs here, another test runs it, or why no test can.

    `Here`  run by tests/pages/test_commands_run.py, in the page's order, in `Place`
    `By`    run by the named test, which has another host, service or hour for it
    `Not`   run by no test here, with the reason, and the test that checks of it what can be: keep these few

A command that a block of a page has twice has one entry. Quoted commands (`QUOTED`) are those of prose that no block has; one that only
begins another command is its name, and needs no entry.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.pages.commands import ROOT


@dataclass(frozen=True)
class Here:
    """`says`: a pattern of its output. `put`: what stands for placeholders. `until`: it serves until it has said that, and is ended then.
    `needs`: settings of `Settings`, made in this order before it. `long`: left to scripts/test --long."""

    status: int = 0
    says: str = ""
    put: Mapping[str, str] = field(default_factory=dict)
    until: str = ""
    needs: tuple[str, ...] = ()
    long: bool = False


@dataclass(frozen=True)
class By:
    test: str


@dataclass(frozen=True)
class Not:
    """`test` runs as much of it as can be, and where it can be all of it."""

    reason: str
    test: str


Entry = Here | By | Not

INSTALL = "tests/test_install_page.py"
DEB = By("tests/system/test_deb.py::test_it_is_installed_started_upgraded_removed_and_purged_without_a_trace")
PIP = By(f"{INSTALL}::test_pip_installs_what_the_page_says")
QUICKSTART = By(
    "tests/system/test_matrix.py::test_the_quickstart_on_each_release_survives_preemptions_and_says_so"
)
TOP = By("tests/top/test_app.py::test_every_page_is_shown_and_every_kind_of_thing_opens")
GPU = By("tests/test_gpu_benchmark.py::test_every_part_works_on_a_gpu_with_tiny_sizes")
HOST = "tests/system/test_page_host.py"
USERS = By(f"{HOST}::test_users_of_daemon_engines_and_view_are_made_and_removed")
PLACES = "tests/pages/test_other_places.py"
FURTHER = By(
    "tests/system/test_further_cluster.py::test_a_harvester_that_is_killed_and_comes_back_loses_nothing_and_doubles_nothing"
)
CHIPS = By(f"{PLACES}::test_the_driver_and_torch_know_the_gpu")
JOIN = By("tests/test_joining.py::test_a_user_joins_a_daemon_that_runs_and_connects_to_it")
WHEELS = By(f"{INSTALL}::test_a_folder_of_wheels_is_all_that_a_host_without_internet_needs")
EXTRA = By(f"{INSTALL}::test_an_extra_is_installed_as_its_page_says")

SERVED = Here(needs=("served",))
SUBMITTED = Here(says="Submitted batch job")
OFFLINE = By(
    "tests/trainer/episodes/test_played.py::test_a_program_of_a_harness_that_is_locked_runs_without_a_network"
)
VERIFIERS = By(
    "tests/trainer/episodes/test_whole_run.py::test_the_same_in_an_interpreter_that_is_made_for_it"
)
GATEWAY = By(
    "tests/system/test_gateway.py::test_an_agent_sees_no_killed_engine_and_no_killed_daemon_and_nothing_is_generated_twice"
)
TRL = By(
    "tests/trainer/test_trl_example.py::test_trl_trains_on_what_engines_generated_and_every_step_is_committed"
)
TRL_ASYNC = By(
    "tests/trainer/test_trl_async_example.py::test_trl_s_asynchronous_trainer_learns_and_sees_no_killed_engine"
)
PRIME_RL = By(
    "tests/trainer/test_prime_rl_example.py::test_prime_rl_s_orchestrator_takes_its_steps_from_harvested_engines"
)
#: In place of what benchmarks play for hours: made-up traces, and of each axis one value.
SOME_JOBS = "--arms none,daemon --grace 0 --nodes 4 --gpus 2"
CELL = "--seeds 1 --cells earth-calm:Qwen3-8B:4"
CHECKED = Here(status=1, says=r"\d+ ok", needs=("served",))

LEARNS = By("tests/system/test_agent_demo.py::test_a_small_model_learns_to_add_with_a_calculator")
FIRST_ENGINE = By(
    "tests/system/test_deb_first_engine.py::test_an_admin_comes_from_the_package_to_an_engine_and_to_who_waited"
)
EVALUATED = By(
    "tests/trainer/test_local.py::test_a_checkpoint_is_evaluated_without_training_and_the_try_stays_as_it_was"
)

PAGES: dict[str, dict[str, Entry]] = {
    "README.md": {
        "./scripts/quickstart": QUICKSTART,
        ".venv/bin/scavenger web --config demo-out/run-*/scavenger.toml": Here(
            needs=("demo",),
            put={".venv/bin/scavenger web": "scavenger web --port 0"},
            until=r"serves http://127.0.0.1:\d+/",
        ),
    },
    "docs/site.md": {
        "useradd --system --uid 991 --user-group --create-home --home-dir /var/lib/scavenger-engines scavenger-engines": USERS,
        "sacctmgr -i add user scavenger-engines Account=scavenger QOS=scavenge DefaultQOS=scavenge": Here(
            needs=("accounts",), says="Adding User"
        ),
        "install -d -o scavenger-engines -g scavenger-engines -m 0700 /shared/scavenger/engines": Here(),
        "install -m 0644 scripts/scavenger-slurm-submit.service /etc/systemd/system/": Here(),
        "systemctl enable --now scavenger-slurm-submit": By(
            "tests/test_service_unit.py::test_the_units_of_other_users_start_the_command_as_it_is"
        ),
        "useradd --system --user-group --no-create-home --home-dir / scavenger-view": USERS,
        "sacctmgr -i add user scavenger-view Account=scavenger AdminLevel=operator": Here(
            needs=("accounts",)
        ),
        "install -m 0644 scripts/scavenger-slurm-view.service /etc/systemd/system/ && systemctl enable --now scavenger-slurm-view": By(
            "tests/test_service_unit.py::test_the_units_of_other_users_start_the_command_as_it_is"
        ),
        "useradd --system --uid 990 --user-group --create-home --home-dir /var/lib/scavenger scavenger": By(
            "tests/system/test_deb.py::test_a_user_that_the_admin_made_keeps_its_uid_and_stays"
        ),
        "python3 -m venv /opt/scavenger": PIP,
        "/opt/scavenger/bin/pip install -c constraints.txt '.[trainer,math]'": PIP,
        "/opt/scavenger/bin/pip install -c constraints.txt '.[postgres]'": PIP,
        "install -d -o scavenger -g scavenger -m 0755 /shared/scavenger": SERVED,
        "/opt/scavenger/bin/scavenger init /shared/scavenger --site --ledger sqlite:////var/lib/scavenger/ledger.sqlite3": SERVED,
        "install -D -o scavenger -m 0600 /shared/scavenger/scavenger.toml /etc/scavenger/scavenger.toml": SERVED,
        "/opt/scavenger/bin/scavenger check-config /etc/scavenger/scavenger.toml": Here(
            needs=("stopped",), says="(?i)scavenge"
        ),
        "/opt/scavenger/bin/scavenger daemon --config /etc/scavenger/scavenger.toml": Here(
            needs=("stopped",), until="serving"
        ),
        "export PATH=/opt/scavenger/bin:$PATH SCAVENGER_CONFIG=/etc/scavenger/scavenger.toml": Here(),
        "scavenger status": Here(needs=("served",), says="generation"),
        "scavenger top": TOP,
        "scavenger ledger report gpus_by_owner_over_time": SERVED,
        "scavenger ledger report harvested_gpu_hours_by_day": SERVED,
        "scavenger ledger report preemptions": Here(needs=("served",), says="preempted"),
        "scavenger ledger report harvest_decisions": Here(needs=("served",), says="max_engines"),
        "scavenger ledger report site_events": SERVED,
        "scavenger ledger report decisions_with_reasons": Here(needs=("served",), says="max_engines"),
        "scavenger ledger report events": SERVED,
        "scavenger ledger check": Here(needs=("served",), says="sound"),
        "squeue -p scavenge -u scavenger": Here(says="JOBID"),
        "export PATH=/opt/scavenger/bin:$PATH": Here(),
        "scavenger join /shared/scavenger/public": JOIN,
        "scavenger init YOU-first --tiny --partition reserved": Here(
            needs=("served",), says="train.sbatch", long=True
        ),
        "scavenger init YOU-first --check": Here(says="nobody has it yet", long=True),
        "sbatch YOU-first/train.sbatch": Here(says="Submitted batch job", long=True),
        "tail -F YOU-first/train-JOB.log": Here(
            until=r"step +\d|reward", needs=("training",), put={"train-JOB.log": "train-*.log"}, long=True
        ),
        "squeue -u scavenger": Here(says="JOBID"),
        "scavenger init my-run --model MODEL --data PROMPTS": Here(needs=("served",), says="train.sbatch"),
        "sbatch my-run/train.sbatch": SUBMITTED,
    },
    "docs/start.md": {
        "./scripts/quickstart": QUICKSTART,
        "cd /project/you/scavenger": Here(put={"/project/you/scavenger": str(ROOT)}),
        "module load python/3.11 openmpi": By(f"{HOST}::test_modules_of_a_site_are_loaded"),
        "python3 -m venv .venv && . .venv/bin/activate": PIP,
        "pip install -c constraints.txt '.[text]'": PIP,
        "pip install '.[trainer,vllm]'": Not(
            "installs several GB of CUDA",
            f"{PLACES}::test_what_a_gpu_s_extras_need_can_be_had_and_fits_together",
        ),
        "scavenger init my-run --model MODEL --data PROMPTS": Here(needs=("served",), says="train.sbatch"),
        "scavenger init my-run --check": Here(needs=("small",), long=True),
        "python -m trainer my-run/run.toml --local": Here(needs=("small",), says="finished|resum", long=True),
        "scavenger samples my-run/run.toml --local --best --limit 9": Here(says="reward", long=True),
        "scavenger web --config my-run/out/local/scavenger.toml": Here(
            put={"scavenger web": "scavenger web --port 0"}, until=r"serves http://127.0.0.1:\d+/", long=True
        ),
        "sbatch my-run/train.sbatch": SUBMITTED,
        "scavenger simulate --sacct dump.txt --nodes nodes.txt --model Qwen3-8B --gpu H100": Here(
            needs=("dump",), says="GPU-hours"
        ),
    },
    "docs/install.md": {
        "./scripts/quickstart": QUICKSTART,
        "python3 -m venv build/venv": PIP,
        "build/venv/bin/pip wheel --no-deps --wheel-dir dist .": PIP,
        "python3 -m venv /opt/scavenger": PIP,
        "/opt/scavenger/bin/pip install -c constraints.txt 'dist/scavenger-0.2.0-py3-none-any.whl[top,web]'": PIP,
        "/opt/scavenger/bin/scavenger version": PIP,
        "/opt/scavenger/bin/pip check": PIP,
        "/opt/scavenger/bin/pip install -c constraints.txt 'dist/scavenger-0.2.0-py3-none-any.whl[trainer,math]'": By(
            f"{INSTALL}::test_the_wheel_plays_the_demo_without_a_clone"
        ),
        "/opt/scavenger/bin/scavenger demo": By(f"{INSTALL}::test_the_wheel_plays_the_demo_without_a_clone"),
        "build/venv/bin/pip wheel --wheel-dir wheels -c constraints.txt 'dist/scavenger-0.2.0-py3-none-any.whl[top,web]'": WHEELS,
        "/opt/scavenger/bin/pip install --no-index --find-links wheels -c constraints.txt 'scavenger[top,web]'": WHEELS,
        "/opt/scavenger/bin/pip install --require-hashes -r requirements-daemon.txt": By(
            f"{INSTALL}::test_pip_installs_known_files_and_no_others"
        ),
        "/opt/scavenger/bin/pip install --no-deps dist/scavenger-0.2.0-py3-none-any.whl": By(
            f"{INSTALL}::test_pip_installs_known_files_and_no_others"
        ),
        "uv venv /opt/scavenger": By(f"{INSTALL}::test_uv_installs_what_the_page_says"),
        "uv pip install --python /opt/scavenger -c constraints.txt 'dist/scavenger-0.2.0-py3-none-any.whl[top,web]'": By(
            f"{INSTALL}::test_uv_installs_what_the_page_says"
        ),
        "pipx run --spec dist/scavenger-0.2.0-py3-none-any.whl --pip-args='-c constraints.txt' scavenger version": By(
            f"{INSTALL}::test_pipx_runs_it_and_installs_its_command"
        ),
        "pipx install --pip-args='-c constraints.txt' dist/scavenger-0.2.0-py3-none-any.whl": By(
            f"{INSTALL}::test_pipx_runs_it_and_installs_its_command"
        ),
        "scavenger version": Here(says="0.2.0"),
        "scripts/build-deb": DEB,
        "useradd --system --uid 990 --user-group --create-home --home-dir /var/lib/scavenger scavenger": FIRST_ENGINE,
        "python3 -m venv /shared/opt/scavenger": PIP,
        "/shared/opt/scavenger/bin/pip install -c constraints.txt '.[trainer,math]'": PIP,
        "editor /etc/scavenger/scavenger.toml": FIRST_ENGINE,
        "runuser -u scavenger -- scavenger doctor --config /etc/scavenger/scavenger.toml --submit": FIRST_ENGINE,
        "export PATH=/shared/opt/scavenger/bin:$PATH XDG_CONFIG_HOME=$PWD/.config": FIRST_ENGINE,
        "scavenger join /shared/scavenger/public": FIRST_ENGINE,
        "scavenger init $USER-first --tiny --partition reserved": FIRST_ENGINE,
        "scavenger init $USER-first --check": FIRST_ENGINE,
        "sbatch $USER-first/train.sbatch --set run.steps=600": FIRST_ENGINE,
        "runuser -u scavenger -- scavenger ledger backup --config /etc/scavenger/scavenger.toml FILE": DEB,
        "systemctl stop scavenger": Here(),
        "apt-get install ./dist/scavenger_*.deb": DEB,
        "apt-get install --allow-downgrades ./OLD.deb": DEB,
        "runuser -u scavenger -- scavenger ledger restore --yes --config /etc/scavenger/scavenger.toml FILE": DEB,
        "systemctl start scavenger": Here(),
        "apt-get install ./dist/scavenger_0.2.0_amd64.deb": DEB,
        "install -d -o scavenger -g scavenger -m 0755 /shared/scavenger": DEB,
        "runuser -u scavenger -- scavenger init /shared/scavenger --site --ledger sqlite:////var/lib/scavenger/ledger.sqlite3": DEB,
        "install -o root -g scavenger -m 0640 /shared/scavenger/scavenger.toml /etc/scavenger/scavenger.toml": DEB,
        "runuser -u scavenger -- scavenger check-config /etc/scavenger/scavenger.toml": DEB,
        "systemctl enable --now scavenger": DEB,
        "systemctl status scavenger --no-pager": DEB,
        "apt-get remove scavenger": DEB,
        "apt-get purge scavenger": DEB,
    },
    "docs/gpu.md": {
        "srun --partition=reserved --gpus=1 --cpus-per-task=16 --mem=96G --time=20 python benchmarks/gpu.py": GPU,
        "scavenger init my-run --model MODEL --data PROMPTS --partition reserved --gpus 8 --gpu H100": Here(
            needs=("served",), says="train.sbatch"
        ),
        "scavenger init my-run --check": Here(needs=("drafted",), says="nobody has it yet", long=True),
        "sbatch --time=1:00:00 my-run/train.sbatch --set run.name=try --set run.out_dir=try --set run.steps=3 --set run.harvest=false": Here(
            says="Submitted batch job"
        ),
        "sbatch my-run/train.sbatch": SUBMITTED,
        "python benchmarks/gpu.py --list": Here(says="mfu"),
        "python benchmarks/gpu.py --parts mfu,step": GPU,
        "python benchmarks/gpu.py --deadline mfu=300 --seconds 900": GPU,
        "python benchmarks/gpu.py --table gpu.jsonl": By(
            "tests/test_gpu_benchmark.py::test_the_table_is_of_the_last_run_ratios_first"
        ),
    },
    "docs/admin.md": {
        "scavenger ledger report harvested_gpu_hours_by_day": SERVED,
        "scavenger ledger report harvested_gpu_hours_by_user": SERVED,
        'squeue -u scavenger -o "%i %j %P %T %b %N %k"': Here(put={"-u scavenger": "-u root"}, says="JOBID"),
        "sacct -X -u scavenger -S now-7days -o JobID,JobName%30,Account,Partition,Elapsed,AllocTRES%40,State": Here(
            put={"-u scavenger": "-u root"}, says="JobName"
        ),
        "python3 -m venv ~/scv && ~/scv/bin/pip install -c constraints.txt .": By(
            f"{INSTALL}::test_each_python_starts_a_daemon_without_torch_and_under_150_mb"
        ),
        "~/scv/bin/scavenger doctor --partition scavenge": CHECKED,
        "install -m 0644 scripts/scavenger.service /etc/systemd/system/": Here(),
        "systemctl enable --now scavenger": Here(needs=("stopped",)),
        "systemctl status scavenger": Here(),
        "export PATH=/opt/scavenger/bin:$PATH SCAVENGER_CONFIG=/etc/scavenger/scavenger.toml": Here(),
        "scavenger status": Here(needs=("served",), says="generation"),
        'sacctmgr -i add account scavenger Description="idle GPUs" Organization=site': Here(
            needs=("no_accounts",)
        ),
        "sacctmgr -i add qos scavenge": Here(put={"qos scavenge": "qos another"}),
        "sacctmgr -i modify qos scavenge set UsageFactor=0 Priority=0 MaxTRESPerUser=gres/gpu=64 MaxSubmitJobsPerUser=70": Here(
            says="Modified qos"
        ),
        "sacctmgr -i add user scavenger Account=scavenger QOS=scavenge DefaultQOS=scavenge": Here(
            needs=("accounts",)
        ),
        "pip install -c constraints.txt '.[top]'": PIP,
        "scavenger top": TOP,
        "scavenger top --once": Here(needs=("served",), says="sorting"),
        "scavenger top --once --json": Here(needs=("served",), says='"schema"'),
        "scavenger top --demo": By("tests/top/test_app.py::test_the_demo_runs_without_anything"),
        "pip install -c constraints.txt '.[otel]'": EXTRA,
        "scavenger otel RUN --follow": By(
            "tests/ledger/test_traces.py::test_a_collector_gets_every_span_with_its_ids_and_times"
        ),
        "runuser -u scavenger -- /opt/scavenger/bin/scavenger drain --now -c /etc/scavenger/scavenger.toml": Here(
            needs=("served",), put={"runuser -u scavenger -- ": "runuser -u root -- "}
        ),
        "systemctl stop scavenger": Here(),
        "scancel -u scavenger -p scavenge": Here(),
        "scavenger ledger report other_users_waiting": SERVED,
        "scavenger ledger report other_users_waits": SERVED,
        "scavenger ledger report gpu_release": SERVED,
        "scavenger ledger report preemptions": Here(needs=("served",), says="preempted"),
        "scavenger ledger report idle_gpu_hours": SERVED,
        "scavenger ledger report harvest_decisions": Here(needs=("served",), says="max_engines"),
        "scavenger ledger report run_cost": Here(needs=("served",), says="sorting"),
        "scavenger ledger report bad_nodes": SERVED,
        "scavenger ledger report site_events --since 7d": SERVED,
        "sacct -a -X -r normal -S now-7days -o JobID,Submit,Eligible,Start,Elapsed,ReqTRES%40": Here(
            says="Eligible"
        ),
        "/opt/scavenger/bin/scavenger ledger export --config /etc/scavenger/scavenger.toml --out /var/lib/scavenger/kept": Here(
            needs=("served",)
        ),
        "systemctl disable --now scavenger": Here(),
        "rm /etc/systemd/system/scavenger.service; systemctl daemon-reload": By(
            f"{HOST}::test_the_unit_is_removed_and_systemd_forgets_it"
        ),
        "rm -r /etc/scavenger /var/lib/scavenger /shared/scavenger /opt/scavenger": By(
            f"{HOST}::test_the_folders_are_removed_and_no_other"
        ),
        "dropdb scavenger": Here(needs=("postgres",)),
        "sacctmgr -i delete user scavenger; sacctmgr -i delete qos scavenge; sacctmgr -i delete account scavenger": Here(
            needs=("accounts",)
        ),
        "userdel scavenger": USERS,
    },
    "docs/fleet.md": {
        "scavenger keys make chemistry.key": Here(says="."),
        "scavenger enroll chemistry --public 'KEY'": Here(
            needs=("served",), put={"'KEY'": '"$(scavenger keys make other.key)"'}, says="chemistry"
        ),
        "scavenger keys guest chat --run math --out chat.key": Here(
            needs=("served",), put={"math": "sorting"}, says="chat"
        ),
        "scavenger keys cluster b --out b.key": Here(needs=("served",), says="wrote"),
        "install -d -o scavenger -m 0700 /etc/scavenger/daemon": Here(),
        "install -o scavenger -m 0600 rendezvous.json b.key /etc/scavenger/daemon/": Here(
            put={"rendezvous.json": "/shared/scavenger/state/rendezvous.json"}
        ),
        "install -m 0644 scripts/scavenger-harvester.service /etc/systemd/system/": Here(),
        "systemctl enable --now scavenger-harvester": FURTHER,
        """srun --overlap vllm serve MODEL --gpu-memory-utilization 0.6 --port 8000 &
srun --overlap scavenger guest --service http://127.0.0.1:8000 --objective "ttft_p99=500ms tpot_p99=60ms" \\
     --daemon /shared/scavenger/public --key chat.key --memory-share 0.3 &
wait %1""": By(
            "tests/system/test_guest.py::test_a_guest_generates_into_slack_gives_way_to_a_burst_and_ends_with_its_service"
        ),
        """srun --overlap vllm serve MODEL --gpu-memory-utilization 0.6 --host 127.0.0.1 --port 8000 &
srun --overlap scavenger guest-proxy --service http://127.0.0.1:8000 --listen 0.0.0.0:8001 &       # callers come here
srun --overlap scavenger guest --service http://127.0.0.1:8001/scavenger/metrics --poll 0.2 --objective "ttft_p99=500ms tpot_p99=60ms" \\
     --daemon /shared/scavenger/public --key chat.key --memory-share 0.3 &""": By(
            "tests/system/test_guest_beside_vllm.py::test_the_benchmark_plays_each_arm_and_says_what_came_of_it"
        ),
    },
    "docs/web.md": {
        "pip install -c constraints.txt '.[web]'": PIP,
        "scavenger web": Here(
            needs=("served",),
            put={"scavenger web": "scavenger web --port 0"},
            until=r"serves http://127.0.0.1:\d+/",
        ),
        "ssh -L 8765:127.0.0.1:8765 daemon-host": By(
            f"{PLACES}::test_a_tunnel_leads_from_a_desk_to_the_port_of_the_web_pages"
        ),
        "scavenger web --export run.html --run RUN": Here(
            needs=("served",), put={"--run RUN": "--run sorting"}
        ),
        "scavenger web --socket /var/lib/scavenger/web.sock": Here(needs=("served",), until="serves /"),
        "ssh -L 8765:/var/lib/scavenger/web.sock daemon-host": By(
            f"{PLACES}::test_a_tunnel_leads_from_a_desk_to_the_socket_of_the_web_pages"
        ),
    },
    "docs/training.md": {
        "scavenger init first --tiny": Here(needs=("served",), says="train.sbatch", long=True),
        "scavenger init my-run --model MODEL --data PROMPTS": Here(needs=("served",), says="train.sbatch"),
        "scavenger init my-run --check": Here(needs=("small",), long=True),
        "scavenger init toy --tiny --data PROMPTS --reward my_reward:score": By(
            "tests/trainer/prepare/test_smallest.py::test_the_command_makes_a_model_for_data_of_a_user_s_own"
        ),
        "scavenger init my-run --model MODEL --data PROMPTS --reward my_reward:score": Here(
            needs=("served",), put={"my-run": "rewarded"}, says="train.sbatch"
        ),
        "python -m trainer my-run/run.toml --local": Here(needs=("small",), says="finished"),
        "sbatch my-run/train.sbatch": SUBMITTED,
        "sbatch my-run/train.sbatch --set algorithm.name=gspo --set run.name=gspo --set run.out_dir=gspo": SUBMITTED,
        "scavenger config show my-run/run.toml --origin": Here(says="my-run/run.toml"),
        "scavenger samples my-run/run.toml": Here(put={"run.toml": "run.toml --local"}, says="reward"),
        "tail -n 2 OUT_DIR/samples.jsonl": Here(put={"OUT_DIR": "my-run/out/local"}, says="completion"),
        "scavenger checkpoint export my-run/run.toml OUT": Here(
            needs=("tried",), put={"OUT": "out-1 --local"}, says="out-1", long=True
        ),
    },
    "docs/models.md": {},
    "docs/data.md": {},
    "docs/rewards.md": {},
    "docs/algorithms.md": {},
    "docs/environments.md": {
        "scavenger init my-run --model MODEL --environment my-env --environment-python /project/you/envs/bin/python": VERIFIERS,
        "scavenger init my-run --check": By(
            "tests/trainer/episodes/test_played.py::test_a_check_plays_one_episode_with_a_stub_model"
        ),
        "pip install -c constraints.txt '.[trainer,gateway]'": EXTRA,
        "python3 -m venv /project/you/envs": VERIFIERS,
        "/project/you/envs/bin/pip install '/project/you/scavenger[verifiers]' my-env uv": VERIFIERS,
        "scavenger init site --listen 127.0.0.1": By(
            "tests/test_cli_init.py::test_a_daemon_s_host_is_announced_by_the_name_that_it_has_where_it_runs"
        ),
        "python -m scavenger.cluster.local.client serve --dir /tmp/you/cluster": By(
            "tests/trainer/test_tiny_cpu.py::test_the_example_plays_to_its_end_and_leaves_nothing"
        ),
        "scavenger daemon --config site/scavenger.toml": By(
            "tests/trainer/test_tiny_cpu.py::test_the_example_plays_to_its_end_and_leaves_nothing"
        ),
        "scavenger init my-run --tiny --environment my-env --environment-python /project/you/envs/bin/python --gpus 0": By(
            "tests/trainer/prepare/test_smallest.py::test_with_an_environment_it_makes_a_model_that_converses_and_has_tools"
        ),
        "scavenger init my-run --tiny --environment my-env --environment-python envs/bin/python --gpus 0 --state-dir site/state": By(
            "tests/trainer/prepare/test_smallest.py::test_with_an_environment_it_makes_a_model_that_converses_and_has_tools"
        ),
        "python -m trainer.launch my-run/run.toml": VERIFIERS,
        "scavenger ledger report episodes --config site/scavenger.toml": VERIFIERS,
        "export HF_HOME=/project/you/hf UV_CACHE_DIR=/project/you/uv": OFFLINE,
        '/project/you/envs/bin/python -c \'import verifiers.v1 as vf; env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "my-env"}})); print(sum(1 for _ in env.taskset), "tasks")\'': OFFLINE,
        "for program in ~/.cache/verifiers/runtimes/scripts/*.py; do /project/you/envs/bin/uv lock --script $program; /project/you/envs/bin/uv sync --script $program; done": OFFLINE,
    },
    "docs/evaluation.md": {
        "python -m trainer my-run/run.toml --local --evaluate": EVALUATED,
        "python -m trainer my-run/run.toml --local --evaluate --resume OUT_DIR/checkpoints/step-00000020": EVALUATED,
    },
    "docs/staleness.md": {},
    "docs/checkpoints.md": {
        "sbatch my-run/train.sbatch": Here(needs=("drafted",), says="Submitted batch job"),
        "sbatch my-run/train.sbatch --resume OUT_DIR/checkpoints/step-00000100 --set optimizer.lr=5e-7": Here(
            needs=("drafted",), says="Submitted batch job"
        ),
        "scavenger checkpoint export run.toml OUT": Here(
            needs=("drafted", "tried"),
            put={"run.toml OUT": "my-run/run.toml out-2 --local"},
            says="out-2",
            long=True,
        ),
        "scavenger checkpoint export run.toml OUT --merged": By(
            "tests/trainer/test_export.py::test_adapters_are_merged"
        ),
    },
    "docs/metrics.md": {},
    "docs/preemption.md": {},
    "docs/how-it-decides.md": {},
    "docs/agents.md": {
        "pip install -c constraints.txt '.[gateway]'": EXTRA,
        "scavenger demo --agent": LEARNS,
        "scripts/chaos --kills 20 --episodes external": By(
            "tests/system/test_chaos.py::test_kills_that_hurt_no_engine_generate_nothing_and_ask_nothing_again"
        ),
        "scavenger gateway run.toml": GATEWAY,
        "srun --partition=cpu --cpus-per-task=4 scavenger environment-worker run.toml": By(
            "tests/system/test_environment_jobs.py::test_one_that_its_user_starts_by_hand_joins_and_leaves"
        ),
        """curl -s -X POST $ENDPOINT/clients -H "Authorization: Bearer $ADMIN_KEY" -d '{"client": "trl"}'""": By(
            "tests/gateway/test_clients.py::test_a_client_s_key_is_had_for_the_admin_s_and_begins_no_episode"
        ),
        """curl -s -X POST $ENDPOINT/episodes -H "Authorization: Bearer $ADMIN_KEY" -d '{"episode": "task-17"}'""": GATEWAY,
        "scavenger ledger report episodes --since 1h": SERVED,
        "scavenger ledger tokens SAMPLE_ID --format text": Here(put={"SAMPLE_ID": "11"}, says="<w11000>"),
        "scavenger ledger report episodes": Here(needs=("served",), says="turn|episode"),
        "scavenger ledger report episodes --since 1h --format csv": SERVED,
        "scavenger ledger report lost_episodes": SERVED,
    },
    "docs/your-trainer.md": {
        "python -m rollout --kind reserved --run NAME --engine vllm --state-dir STATE --key STATE/keys/owner.key --slot 0": TRL,
        'pip install -c constraints.txt ".[trl]"': EXTRA,
        "python examples/trl_grpo.py run.toml": TRL,
        'pip install -c constraints.txt ".[trl,gateway]"': EXTRA,
        "scavenger gateway run.toml --logprobs-mode processed_logprobs &": TRL_ASYNC,
        "python examples/trl_async_grpo.py run.toml": TRL_ASYNC,
        "scavenger gateway run.toml --port 8471 --logprobs-mode processed_logprobs &": PRIME_RL,
        "python examples/prime_rl.py run.toml --output-dir outputs/my-run --port 8472 -- COMMAND": PRIME_RL,
    },
    "docs/recovery.md": {
        "scavenger ledger backup /backup/monday.ledger": SERVED,
        "systemctl stop scavenger": Here(),
        "scavenger ledger restore /backup/monday.ledger": Here(put={"restore": "restore --yes"}),
        "scavenger ledger check": Here(says="sound"),
        "systemctl start scavenger": Here(),
        "scavenger ledger restore": Here(needs=("stopped",), put={"restore": "restore --yes"}),
        "export SCAVENGER_CONFIG=/etc/scavenger/scavenger.toml": Here(),
        "runuser -u scavenger -- scavenger ledger restore /backup/monday.ledger": Here(
            needs=("stopped",),
            put={"runuser -u scavenger -- ": "runuser -u root -- ", "restore": "restore --yes"},
        ),
        "runuser -u scavenger -- scavenger ledger check": Here(
            put={"runuser -u scavenger -- ": "runuser -u root -- "}, says="sound"
        ),
        "systemctl enable --now scavenger": Here(),
        "scavenger daemon --config scavenger.toml --standby": By(
            "tests/ledger/test_succession.py::test_a_second_daemon_is_refused_a_killed_one_is_succeeded_at_once_and_taking_over_is_asked_for"
        ),
        "scavenger daemon --config scavenger.toml --take-over": Here(
            needs=("served",),
            put={"--config scavenger.toml": "--config /etc/scavenger/scavenger.toml"},
            until="serving",
        ),
        "scavenger ledger backup /backup/before-upgrade.ledger": SERVED,
        "/opt/scavenger/bin/pip install -c constraints.txt '.[trainer,math]'": PIP,
        "scavenger keys list": Here(needs=("served",), says="owner"),
        "scavenger ledger report events --format csv | grep -E 'key_(added|revoked)'": Here(
            needs=("served",), says="key_added"
        ),
        "scavenger keys rotate-server": SERVED,
        "systemctl restart scavenger": Here(),
        "scavenger keys rotate-owner": SERVED,
        "scavenger keys retire NAME": Here(put={"NAME": "root"}, says="retired"),
        "scavenger ledger report bad_nodes": SERVED,
        'squeue -u scavenger -o "%i %j %T %N"': Here(put={"-u scavenger": "-u root"}, says="JOBID"),
        'scavenger drain --node gpu17 --reason "new cables"': Here(says="scavenger drain --off --node gpu17"),
        "scavenger ledger report events --format csv | grep engine_set_aside": Here(
            needs=("served",), says="gpu02"
        ),
        "scavenger ledger report decisions_with_reasons | grep disagrees": Here(says="disagrees"),
        "scontrol show job -d JOBID": Here(put={"JOBID": "$(squeue -h -o %i | head -n 1)"}, says="JobId="),
        "nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT": CHIPS,
        "dcgmi diag -r 3": Not(
            "a program of NVIDIA's that no package index here has, on a node with GPUs",
            f"{PLACES}::test_dcgm_s_diagnosis_runs",
        ),
        'scontrol update nodename=NODE state=drain reason="wrong results"': Here(put={"NODE": "gpu07"}),
        "systemctl reset-failed scavenger": Here(),
    },
    "docs/simulate.md": {
        "scavenger simulate --sacct dump.txt --nodes nodes.txt --model Qwen3-8B --gpu H100 --html report.html": Here(
            needs=("dump",), says="GPU-hours"
        ),
        "SLURM_TIME_FORMAT=%s sacct -a -X -D -P -n -S now-14days -E now -o JobIDRaw,Partition,State,Submit,Start,End,NNodes,NodeList,AllocTRES,ReqTRES > dump.txt": Here(
            put={"dump.txt": "own-dump.txt"}
        ),
        "scontrol -a -d -o show node > nodes.txt": Here(put={"nodes.txt": "own-nodes.txt"}),
        "scavenger simulate run.toml --trace idle.csv --policy colocated,ours --steps 10 --seeds 3 --html report.html": Here(
            needs=("trace",), says="ours", put={"--steps 10 --seeds 3": "--steps 2 --seeds 2"}
        ),
        "scavenger simulate replay demo-out/run-*/state/ledger.sqlite3": Here(needs=("demo",), says="error"),
        "scavenger simulate replay postgresql://scavenger@db.example.org/scavenger --run NAME --policy standard": By(
            "tests/simulate/test_replay.py::test_the_command_prints_each_step_and_the_error"
        ),
        "scavenger simulate calibrate points.json --model Qwen3-8B --gpu H100 --out constants.toml": Here(
            needs=("points",), says="constants.toml"
        ),
    },
    "docs/weights.md": {
        "scavenger init DIRECTORY --check": Here(
            needs=("served", "first"), put={"DIRECTORY": "first"}, says="run.name: first", long=True
        ),
        "scavenger weights export SPOOL_DIR/RUN/version-N OUT --model MODEL": By(
            "tests/weights/test_manifest_and_export.py::test_a_spooled_version_outlives_its_process_and_the_command_exports_it"
        ),
    },
    "docs/ledger.md": {
        "scavenger ledger report list": Here(says="preemptions"),
        "scavenger ledger report preemptions": Here(needs=("served",), says="preempted"),
        "scavenger ledger tokens 42 --format text": Here(put={"42": "11"}, says="<w11000>"),
        "scavenger top": TOP,
        "scavenger samples RUN --best --limit 5": Here(says="reward"),
        "scavenger samples RUN --step 3 --group 17 --jsonl": Here(
            put={"3": "1", "17": "0"}, says='"completion"'
        ),
        "sqlite3 -readonly /var/lib/scavenger/ledger.sqlite3": Here(),
        "scavenger ledger report events --since 24h": SERVED,
        "scavenger ledger report events --since 2026-09-01 --until 2026-09-02": SERVED,
        "scavenger ledger report decisions_with_reasons --limit 50000 --format csv": Here(says="max_engines"),
        "psql -d scavenger -f sql/roles.sql": Here(needs=("postgres",)),
        'psql -d scavenger -c "CREATE ROLE ann LOGIN IN ROLE scavenger_read"': Here(says="CREATE ROLE"),
        "scavenger ledger report preemptions --config reader.toml": Here(needs=("reader",), says="preempted"),
        "scavenger ledger check": Here(says="sound"),
        "scavenger ledger upgrade": Here(needs=("stopped",)),
        "scavenger ledger vacuum": Here(needs=("stopped",), says="bytes"),
        "scavenger ledger export --out DIR": Here(put={"DIR": "kept"}),
        "scavenger ledger export --out DIR --run NAME --contents --format csv": Here(
            put={"DIR": "kept-too", "NAME": "sorting"}
        ),
        "scavenger ledger purge --run NAME": Here(put={"NAME": "sorting --yes"}, says="sorting"),
    },
    "docs/slurm-states.md": {
        "scavenger status": Here(needs=("served",), says="generation"),
        "scavenger ledger report events --format csv | grep cluster_": Here(
            needs=("served",), says="cluster_"
        ),
        "scripts/build-pyslurm": By(
            "tests/cluster/test_build_pyslurm.py::test_what_is_missing_is_named_with_where_to_get_it"
        ),
    },
    "docs/events.md": {
        "scavenger ledger report events --since 24h": SERVED,
        "scavenger ledger report site_events --since 7d": SERVED,
    },
    "docs/harmless.md": {
        "python -m benchmarks.harmless --trace earth_jobs_72h.csv.gz": Here(
            needs=("traces",),
            put={
                "earth_jobs_72h.csv.gz": f"traces/earth_jobs_72h.csv.gz {SOME_JOBS} --compress 600 --hours 2"
            },
            says=r"0 s \| daemon",
            long=True,
        )
    },
    "docs/release.md": {},
    "docs/engines.md": {},
    "docs/client.md": {},
    "docs/index.md": {},
    "docs/questions.md": {},
    "docs/comparison.md": {},
}

CANARY = (
    "tests/doctor/test_canary.py::test_on_slurm_an_engine_is_harvested_beside_what_holds_the_daemon_s_port"
)
ENROLLED = By("tests/test_keys.py::test_an_owner_with_a_key_file_elsewhere_adds_the_public_half")
GATE = By(f"{PLACES}::test_the_scripts_that_run_tests_run_those_that_are_chosen")

QUOTED: dict[str, Entry] = {
    "scavenger join FOLDER": JOIN,
    "scavenger drain --node NAME": Here(needs=("served",), put={"NAME": "gpu08"}, says="gpu08"),
    "scavenger init my-run --model MODEL --data PROMPTS --partition NAME --gpus N": Here(
        needs=("served",),
        put={"my-run": "quoted", "--partition NAME --gpus N": "--partition reserved --gpus 2"},
        says="train.sbatch",
    ),
    "sbatch --account ACCOUNT my-run/train.sbatch": Here(
        needs=("served", "first"), put={"ACCOUNT my-run": "root first"}, says="Submitted batch job"
    ),
    "sbatch --account ACCOUNT --qos QOS my-run/train.sbatch": Here(
        needs=("served", "first"),
        put={"ACCOUNT --qos QOS my-run": "root --qos normal first"},
        says="Submitted batch job",
    ),
    "scavenger harvester --cluster b --daemon /etc/scavenger/daemon --key /etc/scavenger/daemon/b.key --config /etc/scavenger/scavenger.toml": FURTHER,
    "./scripts/quickstart --agent": LEARNS,
    "python -m trainer.tiny make --task calculator --out DIR": Here(put={"DIR": "adds"}, long=True),
    "sbatch my-run/train.sbatch --set run.steps=300": Here(
        needs=("served", "first"), put={"my-run": "first"}, says="Submitted batch job"
    ),
    "scavenger ledger restore /backup/before-upgrade.ledger": By(
        "tests/ledger/test_backup.py::test_a_backup_restored_is_the_ledger_as_it_was"
    ),
    "scavenger keys make FILE": By(
        "tests/test_keys.py::test_a_key_made_elsewhere_is_enrolled_by_its_public_half"
    ),
    "scavenger samples RUN --step STEP --group PROMPT_INDEX": Here(
        needs=("served",), put={"RUN": "sorting", "STEP": "1", "PROMPT_INDEX": "0"}, says="reward"
    ),
    "scavenger samples run.toml --best": Here(needs=("served",), put={"run.toml": "sorting"}, says="reward"),
    "scavenger init --site": Here(put={"init --site": "init drafted-site --site"}, says="scavenger.toml"),
    "scavenger daemon --new-ledger": By(
        "tests/ledger/test_identity.py::test_a_ledger_that_is_gone_is_not_begun_anew_unless_that_is_meant"
    ),
    "python -m benchmarks.harmless --hours 6 --compress 10 --together 6": Here(
        needs=("traces",),
        put={
            "--hours 6 --compress 10": f"--trace traces/earth_jobs_72h.csv.gz {SOME_JOBS} --hours 2 --compress 600"
        },
        says=r"0 s \| daemon",
        long=True,
    ),
    "sbatch train.sbatch": Here(
        needs=("served", "first"), put={"train.sbatch": "first/train.sbatch"}, says="Submitted", long=True
    ),
    "scavenger slurm-proxy --role view": By(
        "tests/cluster/test_proxy.py::test_an_operator_s_process_shows_the_daemon_the_jobs_that_private_data_hides_from_it"
    ),
    "scavenger check-config": Here(
        needs=("served",), put={"check-config": "check-config $SCAVENGER_CONFIG"}, says="(?i)harvest"
    ),
    "scavenger doctor": Here(needs=("served",), status=1, says="ok "),
    "scavenger doctor --submit": By(
        "tests/doctor/test_doctor_on_slurm.py::test_the_test_job_tells_of_its_node_and_leaves_nothing"
    ),
    "scavenger drain --off": SERVED,
    "scavenger drain --node gpu07": Here(needs=("served",), says="gpu07"),
    "scavenger drain --off --node gpu07": Here(says="may start there again"),
    "scavenger drain --off --node gpu17": Here(needs=("served",)),
    "scavenger drain --now": Here(needs=("served",), says="cancels all engines"),
    "scavenger join /shared/scavenger/public --new": By(
        "tests/test_joining.py::test_a_new_key_can_retire_the_lost_one_and_a_retired_key_never_comes_back"
    ),
    "python -m trainer YOU-first/run.toml --local": By(
        "tests/trainer/prepare/test_smallest.py::test_it_learns_within_its_steps"
    ),
    "python -m trainer run.toml --local": Here(
        needs=("tried",), put={"run.toml": "first/run.toml"}, says="finished|resum", long=True
    ),
    "scavenger samples run.toml --local": Here(
        needs=("tried",), put={"run.toml": "first/run.toml"}, says="reward", long=True
    ),
    "scavenger ledger report reward_per_step": SERVED,
    "scavenger ledger report harvested_gpu_hours_by_account": SERVED,
    "scavenger enroll NAME --public 'KEY'": ENROLLED,
    "scripts/slurm-matrix --gate": GATE,
    "scripts/slurm-matrix --suite 24.11": GATE,
    "scripts/slurm-matrix --pyslurm": GATE,
    "scripts/test --long": GATE,
    "scripts/test -m gpu": GATE,
    "scripts/test tests/system/test_preemption.py": GATE,
    "scripts/bootstrap --tests": GATE,
    "scavenger init DIR --site --ledger sqlite:////var/tmp/you/ledger.sqlite3": Here(
        put={"DIR": "mine"}, says="scavenger.toml"
    ),
    "scavenger check-config $SCAVENGER_CONFIG": Here(needs=("served",), says="(?i)harvest"),
    "scavenger daemon --dry-run --polls 1": Here(needs=("served",), says="(?i)engine|submit"),
    "scavenger join DIR/public": JOIN,
    'sqlite3 -readonly /var/tmp/you/ledger.sqlite3 "SELECT node, SUM(gpus * (ended_at - started_at)) / 3600 AS gpu_hours FROM v_gpu_allocations GROUP BY node"': Here(
        needs=("served",), put={"/var/tmp/you": "/var/lib/scavenger"}, says="n3"
    ),
    "scripts/chaos --kills 50": By(
        "tests/system/test_chaos.py::test_fifty_kills_zombies_and_black_holes_change_nothing_on_sqlite"
    ),
    "python -m benchmarks.lost": By(
        "tests/test_lost_benchmark.py::test_one_kill_of_each_kind_in_a_whole_run"
    ),
    "scavenger simulate --live": Here(needs=("served",), says="(?i)idle"),
    "scavenger simulate run.toml --trace FILE": Here(
        needs=("trace",), put={"FILE": "idle.csv --steps 2 --seeds 2"}, says="ours"
    ),
    # It looks for a shell among its parents: a process of its own, of a bash with a second command to run.
    "scavenger --install-completion": Here(
        put={"scavenger": f"{Path(sys.executable).parent}/scavenger", "completion": "completion && echo"},
        says="installed",
    ),
    'python -c "import torch; print(torch.cuda.get_device_name())"': CHIPS,
    "scavenger doctor --harvest-one --engine vllm": By(CANARY),
    "scavenger doctor --config /etc/scavenger/scavenger.toml --harvest-one": By(CANARY),
    "scavenger doctor --harvest-one": By(CANARY),
    "scavenger init --check": Here(needs=("served", "first"), put={"init": "init first"}, long=True),
    "scripts/build-pyslurm --python /opt/scavenger/bin/python": By(
        "tests/cluster/test_build_pyslurm.py::test_what_is_missing_is_named_with_where_to_get_it"
    ),
    "scavenger check-config FILE": Here(
        needs=("served",), put={"FILE": "/etc/scavenger/scavenger.toml"}, says="(?i)harvest"
    ),
    "scavenger join PUBLIC_DIR --new": By(
        "tests/test_joining.py::test_a_new_key_can_retire_the_lost_one_and_a_retired_key_never_comes_back"
    ),
    "scavenger keys retire NAME --all": By(
        "tests/test_keys.py::test_an_owner_is_locked_out_at_once_and_comes_back_to_the_same_runs_with_another_key"
    ),
    "scavenger doctor --submit --reach train1:7800 --reach train2:7800": By(
        "tests/doctor/test_doctor_on_slurm.py::test_a_node_without_our_python_or_way_to_our_port_is_a_problem_with_its_remedy"
    ),
    "scavenger doctor --partition NAME": Here(
        needs=("served",), status=1, put={"NAME": "scavenge"}, says="ok "
    ),
    "sbatch --partition=cpu --time=7-0 scripts/scavenger.sbatch scavenger.toml": By(
        "tests/system/test_without_admin.py::test_a_daemon_in_a_cpu_job_comes_back_under_its_id_with_its_ledger_until_it_is_cancelled"
    ),
    "scavenger init my-run --partition NAME --ledger sqlite:////var/tmp/you/ledger.sqlite3": By(
        "tests/system/test_without_admin.py::test_a_run_with_a_daemon_of_its_own_harvests_and_leaves_nothing"
    ),
    "scavenger daemon --carry": By(
        "tests/system/test_without_admin.py::test_a_daemon_in_a_cpu_job_comes_back_under_its_id_with_its_ledger_until_it_is_cancelled"
    ),
    "python -m benchmarks.fleet --keep FILE --traces DIR": Here(
        needs=("traces",),
        put={
            "FILE": "fleet.jsonl",
            "DIR": "traces --runs 2 --mix unlike --segments earth-calm --divisions value,static --hours 0.1 --parts 1",
        },
        says=r"\| value \|",
        long=True,
    ),
    "python -m benchmarks.serving --traces DIR": Here(
        needs=("traces",),
        put={"DIR": "traces --hours 0.05 --interference light --objective 2"},
        says=r"\| ours \|",
        long=True,
    ),
    "python -m benchmarks.serving_live": By(
        "tests/system/test_guest_beside_vllm.py::test_the_benchmark_plays_each_arm_and_says_what_came_of_it"
    ),
    "python -m benchmarks.policies": Here(
        needs=("traces",),
        put={
            "benchmarks.policies": "benchmarks.policies --traces traces --keep kept.jsonl --out policies.md --reduced --seeds 1 --policy ours,colocated"
        },
        says="met",
        long=True,
    ),
    "python -m benchmarks.ablations": Here(
        needs=("traces",),
        put={"benchmarks.ablations": f"benchmarks.ablations --traces traces {CELL}"},
        says="over the bound",
        long=True,
    ),
    "python -m benchmarks.ablations --traces DIR --jobs 2": Here(
        needs=("traces",), put={"DIR": f"traces {CELL}"}, says="over the bound", long=True
    ),
    "python -m benchmarks.sensitivity --jobs 2": Here(
        needs=("traces",),
        put={
            "--jobs 2": "--jobs 2 --seeds 1 --corner-seeds 0 --steps 1 --policies colocated,ours --axes drift"
        },
        says="comparisons",
        long=True,
    ),
    "python benchmarks/harvest.py --trace earth_node_idle_72h.csv.gz": Here(
        needs=("traces",), put={"earth_node": "traces/earth_node"}, says="harvested", long=True
    ),
    "python benchmarks/weights.py": Here(
        put={
            "weights.py": "weights.py --only pull,relay --gigabytes 0.05 --rounds 1 --joiners 2 --megabytes 2"
        },
        says="joiner",
        long=True,
    ),
    "python benchmarks/engine.py": By(
        f"{PLACES}::test_the_engine_benchmark_compares_our_worker_with_bare_vllm"
    ),
    "python tests/simulate/digest.py [--trace FILE]": By(
        "tests/simulate/test_determinism.py::test_another_process_with_other_hashes_decides_the_same"
    ),
    "scavenger checkpoint export run.toml OUT --local": Here(
        needs=("tried",), put={"run.toml OUT": "first/run.toml out"}, says="out", long=True
    ),
    "scavenger ledger report tools": SERVED,
    "scavenger ledger backup FILE": Here(needs=("served",), put={"FILE": "kept.ledger"}),
    "scavenger keys add NAME --public 'KEY'": ENROLLED,
    "scavenger simulate replay LEDGER": Here(
        needs=("demo",), put={"LEDGER": "demo-out/run-1/state/ledger.sqlite3"}, says="error"
    ),
    "scavenger simulate calibrate --out": By(
        "tests/simulate/test_cli.py::test_calibrate_finds_prints_and_writes_the_constants"
    ),
    "python -m pip wheel --no-deps .": PIP,
    "scavenger --help": Here(says="Commands"),
    "scavenger init NAME --model PATH --data PATH": Here(
        put={"NAME": "drafted", "--model PATH": "--model MODEL", "--data PATH": "--data PROMPTS"},
        says="train.sbatch",
    ),
    "scavenger init NAME --check": Here(put={"NAME": "drafted"}, says="nobody has it yet", long=True),
    "python scripts/client_page.py > docs/client.md": By(
        "tests/test_client_page.py::test_the_page_is_what_is_made_from_the_docstrings"
    ),
    "scavenger demo --compare": Here(
        put={"--compare": "--compare --backend local --steps 3 --out compared"}, says="reward", long=True
    ),
}
