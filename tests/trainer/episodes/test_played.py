"""Episodes of a real environment of `verifiers`, played by a real environment worker before a real gateway and daemon; a scripted engine.

Everything of an environment run but the tensors: what `test_whole_run.py` does with a model, without one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from scavenger.gateway import identity
from scavenger.ledger import store
from scavenger.ledger.read.prompts import whole_prompts
from scavenger.protocol import messages
from scavenger.protocol.messages import pack_logprobs, unpack_tokens
from tests.gateway.conftest import SECRET, LiveGateway, restarted_with, worker
from tests.gateway.conftest import live as live  # the fixture
from tests.router.harness import SPEC, token
from tests.trainer.episodes.interpreters import needs_verifiers, python_with_verifiers
from trainer.episodes import wire
from trainer.episodes.opening import rehearsed
from trainer.episodes.pool import EnvironmentPool
from trainer.episodes.run import EpisodeRun, PlaySettings

pytestmark = [needs_verifiers, pytest.mark.timeout(600)]
ENVIRONMENT, TURNS, SAMPLES = "counting_env", 3, 2
HOW = messages.Sampling(8, 1.0, 1.0, 0, (0,))


class Keys:
    """The gateway's part in `EpisodeRun`: keys, without HTTP."""

    def begin(self, episode: str) -> str:
        return identity.episode_key(SECRET, episode)

    def check(self) -> None: ...


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


#: Short: the scripted engine's context has 64 tokens, and each character is one.
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@pytest.fixture
def model(tmp_path: Path, live: LiveGateway) -> Path:
    """The folder of the gateway's model, as `transformers` wants one."""
    folder = tmp_path / "model"
    for name, more in (
        ("config.json", {"model_type": "qwen3"}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


def setup(live: LiveGateway, model: Path, **harness: Any) -> wire.Setup:
    args = {"taskset": {"tasks": 4, "turns": TURNS}, "agent": {"harness": {"id": ENVIRONMENT, **harness}}}
    return wire.Setup(
        ENVIRONMENT,
        json.dumps(args),
        json.dumps({"name": "default"}),
        str(model),
        "r",
        SPEC.context_length,
        str(live.http.base_url),
        "branch",
        0,
        0,
        120.0,
    )


def pool(given: wire.Setup) -> EnvironmentPool:
    return EnvironmentPool(given, python=Path(str(python_with_verifiers())), concurrency=8)


def played(run: EpisodeRun, seconds: float = 400.0) -> Iterator[messages.GroupDone]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for group in run.poll(1.0):
            yield group
            return
    raise AssertionError("no group came")


def one_group(live: LiveGateway, playing: EnvironmentPool) -> tuple[EpisodeRun, messages.GroupDone]:
    parts: Any = live.run
    run = EpisodeRun(parts, playing, Keys(), PlaySettings(7, 0, True, False, "v"))
    run.submit(1, 1, [messages.GroupSpec(0, b"", SAMPLES, HOW, '{"task": 2}')])
    return run, next(iter(played(run)))


def turns_of(live: LiveGateway) -> dict[str, list[tuple[list[int], int]]]:
    """By episode: the whole prompt and the sample of each turn, in their order."""
    rows: Any = live.daemon.query(
        "SELECT e.name, u.group_id, s.sample_id FROM episodes e JOIN turns u ON u.episode_id = e.episode_id "
        "JOIN samples s ON s.group_id = u.group_id ORDER BY e.name, u.number"
    )
    engine = store.open_readonly(live.daemon.url)
    try:
        with engine.connect() as connection:  # `groups.prompt` has what a turn adds to its parent's
            prompts = whole_prompts(connection, [group for _, group, _ in rows])
    finally:
        engine.dispose()
    found: dict[str, list[tuple[list[int], int]]] = {}
    for name, group, sample in rows:
        found.setdefault(str(name), []).append((list(unpack_tokens(prompts[group])), int(sample)))
    return found


def check_rows(live: LiveGateway, run: EpisodeRun, group: messages.GroupDone) -> None:
    """The rows are what the ledger has: prompts as they were, and of each turn the engine's tokens and logprobs, trained once."""
    ledger = turns_of(live)
    assert sorted(ledger) == ["train-1.0.0.0", "train-1.0.1.0"]
    for index, sample in enumerate(group.samples):
        turns = ledger[f"train-1.0.{index}.0"]
        assert len(turns) == TURNS
        said = [[token(number, i) for i in range(8)] for _, number in turns]
        rows = run.rows(sample, 0.5, {})
        trained = [
            t
            for row in rows
            for t, one in zip(unpack_tokens(row.completion), row.mask or b"\1" * 10**3, strict=False)
            if one
        ]
        assert trained == [t for turn in said for t in turn]
        assert b"".join(row.behaviour for row in rows) == pack_logprobs([-0.25 - t for t in trained])
        for row in rows:
            whole = list(unpack_tokens(row.prompt + row.completion))
            ends = [prompt + tokens for (prompt, _), tokens in zip(turns, said, strict=True)]
            assert whole in ends, "a row is a conversation as the engine saw it"
        assert sample.reward is not None


def test_the_rows_of_an_episode_are_its_turns_in_the_ledger(live: LiveGateway, model: Path) -> None:
    with worker(live.daemon), pool(setup(live, model)) as playing:
        assert playing.ready.tasks == 4
        run, group = one_group(live, playing)
        check_rows(live, run, group)
        outcomes = [
            messages.SampleOutcome(s.sample_id, "consumed", s.reward or 0.0, 0.5, "", "v")
            for s in group.samples
        ]
        figures: dict[str, float] = {}
        run.commit(1, 1, outcomes, figures)
    states = live.daemon.query("SELECT state, ended_step, advantage FROM samples")
    assert [tuple(row) for row in states] == [("consumed", 1, 0.5)] * TURNS * SAMPLES
    assert [row[0] for row in live.daemon.query("SELECT state FROM episodes")] == ["ended"] * SAMPLES
    assert [row[0] for row in live.daemon.query("SELECT step FROM steps")] == [1]
    assert figures["turns_mean"] == TURNS


def test_turns_that_a_task_rewards_have_their_parts_of_the_episode_s_reward(
    live: LiveGateway, model: Path
) -> None:
    given = setup(live, model)
    args = json.loads(given.arguments)
    args["taskset"]["rewards_turns"] = True
    given = msgspec.structs.replace(given, arguments=json.dumps(args))
    with worker(live.daemon), pool(given) as playing:
        run, group = one_group(live, playing)
        earned_by = {sample.sample_id: run.turn_rewards(sample) for sample in group.samples}
        for sample in group.samples:
            earned = earned_by[sample.sample_id]
            assert list(earned) == list(range(TURNS))
            assert sample.reward is not None
            assert sum(earned.values()) == pytest.approx(sample.reward)
            own = {number: float(number) for number in earned}
            rows = run.rows(sample, 0.5, own)
            assert [advantage for row in rows for _, advantage in row.turns] == list(own.values())
        outcomes = [
            messages.SampleOutcome(s.sample_id, "consumed", s.reward or 0.0, 0.5) for s in group.samples
        ]
        run.commit(1, 1, outcomes, {})
    kept = live.daemon.query(
        "SELECT s.advantage, t.number, t.reward FROM v_turns t JOIN v_samples s ON s.group_id = t.group_id"
    )
    assert sorted(kept) == sorted(
        (float(number), number + 1, earned)
        for sample in group.samples
        for number, earned in earned_by[sample.sample_id].items()
    )


def test_a_worker_that_is_killed_within_an_episode_costs_no_token(
    live: LiveGateway, model: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    with worker(live.daemon), pool(setup(live, model, die_once=str(killed))) as playing:
        run, group = one_group(live, playing)
        assert killed.exists()
        assert playing.losses == 1
        check_rows(live, run, group)
    assert live.count("turns") == TURNS * SAMPLES, "each call is in the ledger once"
    assert live.count("samples") == TURNS * SAMPLES


def run_config(model: Path, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 1, "state_dir": model, "out_dir": model},
            "model": {"path": model, "context_length": 400},
            "sampling": {"max_tokens": 8},
            "data": {
                "environment": ENVIRONMENT,
                "environment_python": python_with_verifiers(),
                "renderer": {"name": "default"},
                **data,
            },
        }
    )


def test_a_check_plays_one_episode_with_a_stub_model(live: LiveGateway, model: Path) -> None:
    words = [40, 41, 42]
    tasks, one, roles = rehearsed(run_config(model), words, print)
    assert tasks.count == 6
    assert (one.calls, len(one.branches)) == (("0.0", "0.1"), 1)
    assert one.branches[0].trained == 2 * len(words)
    assert one.parts["answers"] == 2.0
    assert (roles, one.agents) == ({"agent": "subprocess"}, 1)
    anew = {"agent": {"harness": {"id": ENVIRONMENT, "anew": True}}}
    _, one, _ = rehearsed(run_config(model, environment_args=anew), words, print)
    assert (len(one.branches), len(one.calls), one.agents) == (2, 2, 1)
    assert sum(row.trained for row in one.branches) == 2 * len(words), "each turn is trained once"
    with pytest.raises(ConfigError, match="cannot be loaded") as found:
        rehearsed(run_config(model, environment="no_such_package_anywhere"), words, print)
    assert "no_such_package_anywhere" in found.value.quoted
    with pytest.raises(ConfigError, match="cannot be loaded") as found:
        rehearsed(run_config(model, environment_args={"player": {"max_turns": 1}}), words, print)
    assert "environment_args that it takes (its agents: agent)" in found.value.remedy


def test_a_task_s_own_image_and_folder_take_the_place_of_its_agent_s_container() -> None:
    """As docs/agents.md says of tasks with containers of their own. Nothing is started."""
    asked = (
        "import verifiers.v1 as vf\n"
        "from verifiers.v1.runtimes import ApptainerConfig\n"
        "from verifiers.v1.utils.compile import resolve_runtime_config as resolved\n"
        "task = vf.Task(vf.TaskData(image='/i/task.sif', workdir='/repo'))\n"
        "found = resolved(ApptainerConfig(image='/i/role.sif'), task)\n"
        "print(found.type, found.image, found.workdir)\n"
        "try:\n    resolved(vf.SubprocessConfig(), task)\n"
        "except ValueError as error:\n    print(error)\n"
    )
    told = subprocess.run(
        [str(python_with_verifiers()), "-c", asked], capture_output=True, text=True, check=True
    )
    found, refused = told.stdout.splitlines()
    assert found == "apptainer /i/task.sif /repo"
    assert "requires image '/i/task.sif'" in refused


@pytest.mark.skipif(
    not Path(str(python_with_verifiers())).with_name("uv").exists(),
    reason="uv is not installed beside the Python that has verifiers: its harness `null` needs it",
)
def test_the_example_plays_an_episode_of_several_turns_in_which_the_environment_is_the_user(
    live: LiveGateway, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "examples/guess_number"))
    tasks, one, _ = rehearsed(run_config(model, environment="guess-number"), [40, 41, 42], print)
    assert tasks.count == 64
    assert len(one.calls) == 4, "what the stub says is no number"
    assert (one.reward, one.parts["guessed"], one.parts["numbers"]) == (0.0, 0.0, 0.0)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare here")
def test_a_program_of_a_harness_that_is_locked_runs_without_a_network(
    live: LiveGateway, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The commands of docs/environments.md: what they fetch lies below a home of its own."""
    python = str(python_with_verifiers())
    uv = Path(python).with_name("uv")
    alone = [
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        "sh",
        "-c",
        'ip link set lo up && exec "$@"',
        "-",
    ]
    if not uv.exists() or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no uv beside the Python that has verifiers, or no namespaces for this user")
    root = Path(__file__).parents[3]
    for name, value in (
        ("HOME", str(tmp_path / "home")),
        ("UV_CACHE_DIR", str(tmp_path / "uv")),
        ("PYTHONPATH", os.pathsep.join(map(str, (root, root / "examples/guess_number")))),
    ):
        monkeypatch.setenv(name, value)
    counted = (
        'import verifiers.v1 as vf; env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "guess-number"}})); '
        'print(sum(1 for _ in env.taskset), "tasks")'
    )
    told = subprocess.run([python, "-c", counted], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "64 tasks"
    played_once = (
        "import sys; from pathlib import Path; from tests.trainer.episodes.test_played import rehearsed, run_config\n"
        "_, one, _ = rehearsed(run_config(Path(sys.argv[1]), environment='guess-number'), [40, 41, 42], print)\n"
        "print(len(one.calls), 'calls')"
    )
    play = [sys.executable, "-c", played_once, str(model)]
    fetched = subprocess.run(play, capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"no package index here: {fetched.stderr.strip().splitlines()[-1:]}")
    programs = list((tmp_path / "home/.cache/verifiers/runtimes/scripts").glob("*.py"))
    assert programs
    for program in programs:
        subprocess.run([str(uv), "lock", "--script", str(program)], check=True, capture_output=True)
        subprocess.run([str(uv), "sync", "--script", str(program)], check=True, capture_output=True)
    done = subprocess.run([*alone, *play], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("4 calls\n"), done.stderr


def test_an_episode_that_has_had_its_budget_is_rewarded_and_trained_as_it_is(
    live: LiveGateway, model: Path
) -> None:
    """Its harness stops at the refused call, and that is no failure of it."""
    with (
        restarted_with(live, budget_turns=TURNS - 1) as run,
        worker(live.daemon),
        pool(setup(live, model)) as playing,
    ):
        parts: Any = run
        episodes = EpisodeRun(parts, playing, Keys(), PlaySettings(7, 0, True, False, "v"))
        episodes.submit(1, 1, [messages.GroupSpec(0, b"", SAMPLES, HOW, '{"task": 2}')])
        group = next(iter(played(episodes)))
        assert [sample.finish for sample in group.samples] == ["length"] * SAMPLES
        assert all(sample.reward is not None for sample in group.samples)
        trained = [
            sum(len(row.behaviour) // 4 for row in episodes.rows(one, 0.5, {})) for one in group.samples
        ]
    assert trained == [8 * (TURNS - 1)] * SAMPLES
    assert live.count("turns") == (TURNS - 1) * SAMPLES
