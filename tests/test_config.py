"""A configuration that cannot be used is refused with the file, the key and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.config import DaemonConfig, RunConfig, read_daemon, read_run, unknown_keys
from scavenger.errors import ConfigError

DAEMON = """
[daemon]
state_dir = "state"
"""
RUN = """
[run]
name = "a"
steps = 3
state_dir = "state"
out_dir = "out"
[model]
path = "model"
context_length = 64
[sampling]
max_tokens = 16
"""


def refused(read: object, path: Path) -> str:
    assert callable(read)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert caught.value.exit_code == 2
    assert str(path) in caught.value.cause, "it names the file"
    return caught.value.cause


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('colour = "red"', ["unknown key 'daemon.colour'"]),
        ('heartbeat_s = "1 s"', ["daemon.heartbeat_s = '1 s'", "a number is wanted"]),
        ("heartbeat_s = 0", ["daemon.heartbeat_s = 0", "greater than 0"]),
        ("heartbeat_s = 5.0", ["heartbeat_s < suspect_s < dead_s"]),
        ("trainer_silent_s = 700.0", ["trainer_silent_s <= trainer_gone_s"]),
        ("port = 70000", ["daemon.port = 70000", "less than or equal to 65535"]),
        ("flush_tokens = 2.5", ["daemon.flush_tokens = 2.5", "integer"]),
        ("flush_ms = 0.5", ["daemon.flush_ms = 0.5", "greater than or equal to 1"]),
        ('[cluster]\nbackend = "pbs"', ["cluster.backend = 'pbs'", "'slurm'"]),
        ("[harvest]\nmax_engines = -1", ["harvest.max_engines = -1", "greater than or equal to 0"]),
        ("[harvest]\nenabled = 7", ["harvest.enabled = 7", "true or false is wanted"]),
        ("[harvest]\ntime_limit_s = inf", ["harvest.time_limit_s = inf", "finite"]),
        ("[cluster]\nmax_rpc_per_min = inf", ["cluster.max_rpc_per_min = inf", "finite"]),
        ("[observe]\nport = 1", ["unknown key 'observe'"]),
    ],
)
def test_a_daemon_s_file_is_refused_with_the_key_and_what_is_allowed(
    tmp_path: Path, more: str, said: list[str]
) -> None:
    path = tmp_path / "scavenger.toml"
    path.write_text(DAEMON + more)
    cause = refused(read_daemon, path)
    assert all(part in cause for part in said), cause


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("steps = 3", "", ["key 'run.steps' is missing"]),
        ("steps = 3", "steps = -1", ["run.steps = -1", "greater than or equal to 0"]),
        ("steps = 3", "steps = 0", ["run.steps = 0", "data.episodes_of"]),
        ("steps = 3", "steps = 3\nsteps_per_day = 4", ["unknown key 'run.steps_per_day'"]),
        ('name = "a"', 'name = "a b"', ["run.name = 'a b'", "pattern"]),
        ("max_tokens = 16", "max_tokens = 64", ["sampling.max_tokens must be below model.context_length"]),
        ("max_tokens = 16", "max_tokens = 16\ntop_p = 0.9", ["allow_truncated = true"]),
        ("max_tokens = 16", "max_tokens = 16\ntop_k = 40", ["allow_truncated = true"]),
        ("max_tokens = 16", "max_tokens = 16\nmin_tokens = 2", ["allow_truncated = true"]),
        (
            "max_tokens = 16",
            "max_tokens = 16\npresence_penalty = 0.5",
            ["a moved sample would count anew", "leave them at 0"],
        ),
        (
            "max_tokens = 16",
            "max_tokens = 16\nfrequency_penalty = -0.5",
            ["a moved sample would count anew", "leave them at 0"],
        ),
        (
            "max_tokens = 16",
            "max_tokens = 16\nrepetition_penalty = 1.1",
            ["repetition_penalty", "the trainer does not compute it"],
        ),
        (
            "max_tokens = 16",
            'max_tokens = 16\n[engine]\npause = "keep"',
            ["carries one version", 'leave it at "abort"'],
        ),
        (
            "max_tokens = 16",
            "max_tokens = 16\ntop_p = 1.5\nallow_truncated = true",
            ["sampling.top_p = 1.5", "less than or equal to 1"],
        ),
        (
            "max_tokens = 16",
            "max_tokens = 16\ntemperature = 0",
            ["sampling.temperature = 0", "greater than 0"],
        ),
        (
            "max_tokens = 16",
            'max_tokens = 16\ntemperature = 2.5\n[engine]\nname = "vllm"',
            ['engine.name = "vllm" needs sampling.temperature <= 2'],
        ),
        ("max_tokens = 16", 'max_tokens = 16\n[data]\ntask = "jsonl"', ["needs data.path"]),
        (
            "max_tokens = 16",
            "max_tokens = 16\n[data]\nsamples_per_prompt = 1",
            ["data.samples_per_prompt = 1", "equal to 2"],
        ),
        (
            "max_tokens = 16",
            "max_tokens = 16\n[data]\nsamples_per_prompt = 4097",
            ["data.samples_per_prompt = 4097", "equal to 4096"],
        ),
        (
            "max_tokens = 16",
            "max_tokens = 16\n[reserved]\nwindow = 1.2",
            ["reserved.window = 1.2", "less than or equal to 1"],
        ),
        (
            "max_tokens = 16",
            'max_tokens = 16\n[weights]\ndtype = "int8"',
            ["weights.dtype = 'int8'", "'bfloat16'"],
        ),
        (
            "[model]",
            "deterministic = true\n[trainer]\ntensor_parallel = 2\n[model]",
            ["deterministic = true needs trainer.replicas = 1", "trainer.tensor_parallel = 1"],
        ),
        (
            "max_tokens = 16",
            "max_tokens = 16\n[trainer]\ncontext_parallel = 2\npacking = false",
            ["context_parallel > 1 needs packing = true"],
        ),
        (
            "max_tokens = 16",
            "max_tokens = 16\n[trainer]\nshare_prefixes = true\npacking = false",
            ["share_prefixes = true needs packing = true and context_parallel = 1"],
        ),
        (
            "max_tokens = 16",
            "max_tokens = 16\n[trainer]\nshare_prefixes = true\ncontext_parallel = 2",
            ["share_prefixes = true needs packing = true and context_parallel = 1"],
        ),
        (
            "max_tokens = 16",
            "max_tokens = 16\n[trainer]\nshare_prefixes = true\n[algorithm]\nrouter_replay = true",
            ["router_replay = true needs trainer.share_prefixes = false"],
        ),
        (
            "[model]",
            "deterministic = true\n[trainer]\nreplicas = 2\n[model]",
            ["deterministic = true needs trainer.replicas = 1"],
        ),
    ],
)
def test_a_run_s_file_is_refused_with_the_key_and_what_is_allowed(
    tmp_path: Path, old: str, new: str, said: list[str]
) -> None:
    path = tmp_path / "run.toml"
    assert old in RUN
    path.write_text(RUN.replace(old, new))
    cause = refused(read_run, path)
    assert all(part in cause for part in said), cause


SCAVENGER_TOML = {
    "cluster.observe_s": "cluster.poll_interval_s",
    "cluster.quick_s": "cluster.fast_poll_interval_s",
    "cluster.observe_floor_s": "cluster.min_poll_interval_s",
    "harvest.courtesy_window_s": "harvest.other_users_window_s",
    "harvest.courtesy_after_s": "harvest.yield_after_s",
    "harvest.peer_yield_s": "harvest.same_tier_yield_s",
    "harvest.outlast": "harvest.min_expected_life",
    "harvest.least_life_s": "harvest.min_runtime_s",
    "harvest.spares": "harvest.standby_jobs",
    "harvest.leave": "harvest.after_drain",
}
RUN_TOML = {"eval.problems": "eval.prompts"}


def test_every_renamed_key_has_a_case_here() -> None:
    assert SCAVENGER_TOML | RUN_TOML == unknown_keys.RENAMED


@pytest.mark.parametrize(("old", "new"), SCAVENGER_TOML.items())
def test_an_old_key_of_scavenger_toml_is_refused_with_its_new_name(
    tmp_path: Path, old: str, new: str
) -> None:
    path = tmp_path / "scavenger.toml"
    section, key = old.split(".")
    path.write_text(f"{DAEMON}[{section}]\n{key} = 1\n")
    assert refused(read_daemon, path) == f"{path}: unknown key {old!r}: it was renamed: write {new}"


@pytest.mark.parametrize(("old", "new"), RUN_TOML.items())
def test_an_old_key_of_run_toml_is_refused_with_its_new_name(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "run.toml"
    section, key = old.split(".")
    path.write_text(f"{RUN}[{section}]\n{key} = 1\n")
    assert refused(read_run, path) == f"{path}: unknown key {old!r}: it was renamed: write {new}"


def test_a_renamed_key_and_a_synonym_lead_to_a_key_that_exists() -> None:
    known = {
        f"{section}.{key}"
        for model in (DaemonConfig, RunConfig)
        for section, field in model.model_fields.items()
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    }
    for table in (unknown_keys.RENAMED, unknown_keys.SYNONYMS):
        assert not known & table.keys()
        assert known >= set(table.values())
    assert known >= set(unknown_keys.ELSEWHERE.values())
    assert not {key.partition(".")[2] for key in known} & unknown_keys.ELSEWHERE.keys(), (
        "a name that is a key"
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[optimizer]\nlearning_rate = 1e-5", "'optimizer.learning_rate': write optimizer.lr"),
        ("[algorithm]\nlearning_rate = 1e-5", "'algorithm.learning_rate': write optimizer.lr"),
        ("[data]\nmax_new_tokens = 5", "'data.max_new_tokens': write sampling.max_tokens"),
        (
            "[training]\nlearning_rate = 1e-5\nnum_generations = 8\nwarmup_steps = 3\nzzz = 1",
            "'training': there is no such section; training.learning_rate is optimizer.lr, "
            "training.num_generations is data.samples_per_prompt, training.warmup_steps is optimizer.warmup_steps",
        ),
        ("[engine]\ntensor_parallel_size = 2", "'engine.tensor_parallel_size': write run.gpus_per_engine"),
        ("[data]\nprompt_per_step = 4", "'data.prompt_per_step': did you mean data.prompts_per_step?"),
        ("[optimiser]\nlr = 1e-5", "'optimiser': did you mean optimizer?"),
        ("[optimizer]\ntemperature = 1", "'optimizer.temperature': did you mean sampling.temperature?"),
        ("[optimizer]\nseed = 1", "'optimizer.seed': did you mean run.seed or data.seed?"),
        (
            '[[reward.functions]]\nfunction = "m:f"\nwieght = 2',
            "'reward.functions.0.wieght': did you mean reward.functions.0.weight?",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_that_was_probably_meant(
    tmp_path: Path, more: str, said: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"{RUN}{more}\n")
    assert refused(read_run, path) == f"{path}: unknown key {said}"


@pytest.mark.parametrize("more", ["[optimizer]\nzzz = 1", "[colours]\nred = 1"])
def test_an_unknown_key_that_is_near_to_none_is_only_named(tmp_path: Path, more: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"{RUN}{more}\n")
    assert "?" not in refused(read_run, path)


def test_nobody_to_generate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("steps = 3", "steps = 3\nharvest = false") + "[reserved]\nworkers = 0\n")
    assert "reserved ones must generate" in refused(read_run, path)


def test_every_fault_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("steps = 3", "steps = -3").replace("context_length = 64", "context = 64"))
    cause = refused(read_run, path)
    assert all(
        part in cause
        for part in ("run.steps", "unknown key 'model.context'", "key 'model.context_length' is missing")
    )


def test_a_missing_file_is_named_as_its_command_takes_it(tmp_path: Path) -> None:
    """A run's is an argument; `--config` of `scavenger samples` is the daemon's file."""
    with pytest.raises(ConfigError) as caught:
        read_run(tmp_path)
    assert "Is a directory" in caught.value.cause
    assert "FOLDER/run.toml" in caught.value.remedy
    assert "--config" not in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        read_daemon(tmp_path / "scavenger.toml")
    assert "--config" in caught.value.remedy


@pytest.mark.parametrize("read", [read_daemon, read_run])
def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path, read: object) -> None:
    path = tmp_path / "some.toml"
    assert "No such file" in refused(read, path)
    path.write_text("[daemon\nstate_dir = ")
    assert "not TOML" in refused(read, path)
    path.write_bytes(b"\xff\xfe")
    assert "not TOML" in refused(read, path)


def test_paths_of_a_run_are_relative_to_its_file_and_the_key_stays_unset(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    config = read_run(path)
    assert config.run.state_dir == tmp_path / "state"
    assert config.run.out_dir == tmp_path / "out"
    assert config.model.path == tmp_path / "model"
    assert config.run.key is None


def test_the_opt_in_to_truncated_sampling_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN + "top_p = 0.9\nallow_truncated = true\n")
    assert read_run(path).sampling.top_p == 0.9


def test_the_daemon_runs_the_predicting_policy_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "scavenger.toml"
    path.write_text('[daemon]\nstate_dir = "state"\n')
    assert read_daemon(path).router.policy == "predictive"
    path.write_text('[daemon]\nstate_dir = "state"\n[router]\npolicy = "standard"\n')
    assert read_daemon(path).router.policy == "standard"
    path.write_text('[daemon]\nstate_dir = "state"\n[router]\npolicy = "clever"\n')
    with pytest.raises(ConfigError, match=r"router.policy = 'clever'.*'predictive' or 'standard'") as refused:
        read_daemon(path)
    assert "docs/config.md" in refused.value.remedy


def test_a_password_in_a_database_s_url_is_in_no_error(tmp_path: Path) -> None:
    path = tmp_path / "scavenger.toml"
    for lines in (
        'ledger = "postgresql://me:secret@db/x"\nheartbeat_s = 5\nsuspect_s = 4',
        'ledger = ["postgresql://me:secret@db/x"]',
    ):
        path.write_text(f'[daemon]\nstate_dir = "/s"\n{lines}\n')
        with pytest.raises(ConfigError) as error:
            read_daemon(path)
        assert "secret" not in str(error.value)
        assert "daemon" in str(error.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('max_batch = "3"', "max_batch = '3': text where a number is wanted; write it without quotes"),
        ("max_batch = true", "max_batch = True: a boolean where a number is wanted"),
    ],
)
def test_what_would_be_converted_is_refused(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[engine]\n{line}\n")
    assert said in refused(read_run, path)


@pytest.mark.parametrize(
    ("value", "said"), [('"false"', "text where true or false"), ("1", "a number where true or false")]
)
def test_a_boolean_is_written_as_one(value: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[run]\nharvest = {value}\n")
    assert said in refused(read_run, path)


ENGINES = 'submit_socket = "/run/s"\nengines_user = "e"\nengines_dir = "/e"\n'


@pytest.mark.parametrize(
    ("daemon", "cluster", "said"),
    [
        ('public_dir = "/p"', ENGINES.replace('engines_user = "e"\n', ""), "set together, or none is"),
        ('public_dir = "/p"', 'engines_dir = "/e"\n', "set together, or none is"),
        ("", ENGINES, "needs daemon.public_dir"),
        ('public_dir = "/p"', ENGINES.replace('"/e"', '"e"'), "is relative"),
        ('public_dir = "/p"', ENGINES + 'backend = "pyslurm"\n', "need Slurm's commands"),
        (
            'public_dir = "/p"',
            'view_socket = "/run/v"\nview_user = "v"\nlocal_dir = "/l"\n',
            "need Slurm's commands",
        ),
        ('public_dir = "/p"', 'view_socket = "/run/v"\n', "set together, or neither is"),
        ('public_dir = "/p"', ENGINES.replace('"e"', '"e;f"'), "engines_user"),
    ],
)
def test_half_a_set_up_of_engines_as_another_user_is_refused(
    daemon: str, cluster: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "scavenger.toml"
    path.write_text(f'[daemon]\nstate_dir = "/s"\n{daemon}\n[cluster]\n{cluster}')
    assert said in refused(read_daemon, path)
    path.write_text(f'[daemon]\nstate_dir = "/s"\npublic_dir = "/p"\n[cluster]\n{ENGINES}')
    assert str(read_daemon(path).engines_home) == "/e"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[reserved]\ngpus_per_engine = 2\n", "is for engines of one GPU"),
        ('[engine.vllm]\nspeculative_config = {method = "ngram"}\n', "are both set"),
    ],
)
def test_what_vllm_does_not_do_together_with_siblings_drafts_is_refused(
    tmp_path: Path, more: str, said: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'{RUN}[engine]\nname = "vllm"\nspeculation = "group"\n{more}')
    assert said in refused(read_run, path)
    path.write_text(f'{RUN}[engine]\nname = "reference"\nspeculation = "group"\n[reserved]\n')
    assert read_run(path).engine.speculation == "group"


SHARES = 'rank = 2\nserve = "unmerged"\n'


@pytest.mark.parametrize(
    ("run", "lora", "more", "said"),
    [
        ("", "", "", "lora.rank above 0"),
        ("", "rank = 2\n", "", 'lora.serve = "unmerged"'),
        ('isolation = "process"\n', SHARES, "", 'run.isolation = "memory"'),
        ("", SHARES, '[engine]\nspeculation = "group"\n', 'engine.speculation = "none"'),
        ("", SHARES, "[engine]\nmove_kv = true\n", "engine.move_kv = false"),
    ],
)
def test_a_run_whose_samples_would_find_another_s_does_not_share_engines(
    tmp_path: Path, run: str, lora: str, more: str, said: str
) -> None:
    path = tmp_path / "run.toml"
    text = RUN.replace("[model]", f"share_engines = true\n{run}[model]") + f"[lora]\n{lora}"
    path.write_text(text + more)
    assert f"run.share_engines = true needs {said}" in refused(read_run, path)
    path.write_text(RUN.replace("[model]", "share_engines = true\n[model]") + f"[lora]\n{SHARES}")
    assert read_run(path).run.share_engines
