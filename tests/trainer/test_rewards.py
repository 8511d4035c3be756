from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scavenger.errors import ConfigError, RewardError
from trainer.algorithms import rewards
from trainer.algorithms.rewards import RewardRunner

FUNCTIONS = """
import os, subprocess, sys, time
def good(prompt, completion, meta):
    print("what a function prints breaks nothing")
    return len(prompt) + len(completion) + meta["bonus"]
def raises(prompt, completion, meta):
    raise RuntimeError("no such judge")
def hangs(prompt, completion, meta):
    time.sleep(60)
def length(prompt, completion, meta):
    return len(completion)
def same(prompt, completion, meta):
    return meta == {"answer": -(10**30), "text": chr(0xD800) + chr(0xE9), "list": [2**64, None, 0.5]}
def quotes(prompt, completion, meta):
    raise KeyError(meta["text"])
def starts(prompt, completion, meta):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(meta["pid"], "w") as file:
        file.write(str(child.pid))
    if completion == "hangs":
        time.sleep(60)
    os._exit(3)
def detaches(prompt, completion, meta):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(meta["pid"], "w") as file:
        file.write(str(child.pid))
    if completion == "hangs":
        time.sleep(600)
    os._exit(3)
left = []
def leaks(prompt, completion, meta):
    left.append(bytearray(int(completion) << 20) if completion != "files" else open(os.devnull))
    return len(left)
def leaks_files(prompt, completion, meta):
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    return leaks(prompt, "files", meta)
def takes(prompt, completion, meta):
    return len(bytearray(int(completion) << 20)) >> 20
def forks(prompt, completion, meta):
    if os.fork() == 0:
        return -1.0
    return float(completion)
def reads(prompt, completion, meta):
    return len(subprocess.run(["cat"], stdout=subprocess.PIPE).stdout) + len(sys.stdin.read())
def dies(prompt, completion, meta):
    os._exit(9)
def nan(prompt, completion, meta):
    return float("nan")
def prepares(prompt, completion, meta, *, level):
    return level
prepares.prepare_rewards = lambda *, level: open("level").read()
def never_ready(prompt, completion, meta):
    return 0.0
never_ready.prepare_rewards = lambda: time.sleep(60)
def flaky(prompt, completion, meta):
    seen = os.path.exists(meta["mark"])
    open(meta["mark"], "w").close()
    if not seen:
        raise RuntimeError("first call")
    return 0.5
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judged.py").write_text(FUNCTIONS)
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def runner(name: str, **more: Any) -> RewardRunner:
    return RewardRunner(f"judged:{name}", **({"timeout_s": 5.0, "retries": 1} | more))


@pytest.mark.usefixtures("functions")
def test_a_reward_function_is_called_with_texts_and_meta() -> None:
    with runner("good") as rewards:
        assert [rewards.score("ab", "cde", {"bonus": 0.25}) for _ in range(3)] == [5.25] * 3


@pytest.mark.usefixtures("functions")
def test_whatever_json_holds_reaches_the_function() -> None:
    with runner("same") as rewards:
        assert (
            rewards.score("", "", {"answer": -(10**30), "text": "\ud800é", "list": [2**64, None, 0.5]}) == 1.0
        )
    with runner("quotes") as rewards, pytest.raises(RewardError, match=r"it raised KeyError: .*ud800"):
        rewards.score("", "", {"text": "\ud800"})


@pytest.mark.usefixtures("functions")
def test_a_version_follows_the_module_s_file_unless_the_user_names_one(tmp_path: Path) -> None:
    def version(**more: str) -> str:
        with runner("good", **more) as rewards:
            return rewards.version

    first = version()
    assert first.startswith("judged:good@")
    assert version() == first
    (tmp_path / "judged.py").write_text(FUNCTIONS + "# another judge\n")
    assert version() != first
    assert version(version="v7") == "v7"


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("name", "why"),
    [("raises", "no such judge"), ("dies", "ended with status 9"), ("nan", "the reward is nan")],
)
def test_a_failure_is_an_error_not_a_reward_of_zero(name: str, why: str) -> None:
    with runner(name) as rewards, pytest.raises(RewardError, match=f"failed 2 times: .*{why}"):
        rewards.score("a", "b", {})


@pytest.mark.usefixtures("functions")
def test_a_function_that_hangs_is_killed_at_its_deadline_and_the_next_call_works() -> None:
    with runner("hangs", timeout_s=0.2, retries=0) as rewards:
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"no reward within 0\.2 s") as failed:
            rewards.score("a", "b", {})
        assert type(failed.value) is RewardError, (
            "only a verifier that declares it takes a deadline for a wrong answer"
        )
        assert time.monotonic() - started < 30.0, "half of what it takes by itself"
        with pytest.raises(RewardError):
            rewards.score("a", "b", {})


@pytest.mark.usefixtures("functions")
def test_a_process_that_reads_nothing_is_killed_at_the_deadline_however_long_the_answer_is() -> None:
    long = "x" * 1_000_000
    with runner("length", timeout_s=1.0, retries=0) as rewards:
        assert rewards.score("", long, {}) == 1e6
        assert rewards._process is not None
        stopped = rewards._process
        stopped.send_signal(signal.SIGSTOP)
        os.waitpid(stopped.pid, os.WUNTRACED)
        with pytest.raises(RewardError, match=r"no reward within 1 s"):  # it reads nothing, ever
            rewards.score("", long, {})
        assert stopped.returncode == -signal.SIGKILL
        assert rewards.score("", "abc", {}) == 3.0


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("answer", "why"), [("hangs", "no reward within 2 s"), ("dies", "ended with status 3")]
)
def test_what_a_function_started_ends_with_its_process(tmp_path: Path, answer: str, why: str) -> None:
    with runner("starts", timeout_s=2.0, retries=0) as rewards, pytest.raises(RewardError, match=why):
        rewards.score("", answer, {"pid": str(tmp_path / "pid")})
    wait_until_gone(tmp_path / "pid")


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("answer", "why"), [("hangs", "no reward within 2 s"), ("dies", "ended with status 3")]
)
def test_what_a_function_started_in_a_session_of_its_own_ends_too(
    tmp_path: Path, answer: str, why: str
) -> None:
    with runner("detaches", timeout_s=2.0, retries=0) as rewards, pytest.raises(RewardError, match=why):
        rewards.score("", answer, {"pid": str(tmp_path / "pid")})
    wait_until_gone(tmp_path / "pid")


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(("name", "answer"), [("leaks", "64"), ("leaks_files", "")])
def test_a_function_that_leaks_gets_a_fresh_process_before_a_call_fails_for_it(
    name: str, answer: str
) -> None:
    with runner(name, retries=0, memory_gb=0.25) as rewards:
        seen = [rewards.score("", answer, {}) for _ in range(30)]
    assert seen.count(1.0) > 1, "it never began anew: the test leaks too little"


def wait_until_gone(pid: Path) -> None:
    status, until = Path(f"/proc/{pid.read_text()}/stat"), time.monotonic() + 20.0
    while (
        status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX"
    ):  # whoever adopted it may not have looked yet
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.01)  # between two looks at the condition


@pytest.mark.usefixtures("functions")
def test_a_fork_that_returns_from_the_function_gives_no_second_answer() -> None:
    with runner("forks", retries=0) as rewards:
        assert [rewards.score("", str(n), {}) for n in range(20)] == [float(n) for n in range(20)]


@pytest.mark.usefixtures("functions")
def test_a_function_and_what_it_starts_read_an_empty_input_not_the_calls() -> None:
    with runner("reads", retries=0) as rewards:
        assert [rewards.score("", "", {}), rewards.score("", "", {})] == [0.0, 0.0]


@pytest.mark.usefixtures("functions")
def test_a_call_that_wants_more_memory_than_it_may_have_fails_and_the_next_works() -> None:
    with runner("takes", retries=0, memory_gb=0.25) as rewards:
        assert rewards.score("", "128", {}) == 128.0
        with pytest.raises(RewardError, match="it raised MemoryError"):
            rewards.score("", "320", {})
        assert rewards.score("", "128", {}) == 128.0
    with runner("takes", retries=0, memory_gb=0.0) as rewards:
        assert rewards.score("", "320", {}) == 320.0


@pytest.mark.usefixtures("functions")
def test_a_failure_is_retried(tmp_path: Path) -> None:
    with runner("flaky") as rewards:
        assert rewards.score("a", "b", {"mark": str(tmp_path / "seen")}) == 0.5


@pytest.mark.usefixtures("functions")
def test_what_a_function_prepares_with_its_options_is_part_of_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def version() -> str:
        with runner("prepares", options={"level": 0.5}) as rewards:
            assert rewards.score("", "", {}) == 0.5
            return rewards.version

    (tmp_path / "level").write_text("a rubric")
    first = version()
    assert version() == first
    (tmp_path / "level").write_text("another rubric")
    assert version() != first


@pytest.mark.usefixtures("functions")
def test_a_function_that_is_not_ready_in_time_is_a_configuration_error_that_names_the_key() -> None:
    wanted = r"judged:never_ready' was not ready within 1 s\n.*reward\.start_timeout_s"
    with pytest.raises(ConfigError, match=wanted), runner("never_ready", start_timeout_s=1.0):
        pass


@pytest.mark.parametrize("name", ["nowhere:f", "judged:missing", "no-colon"])
@pytest.mark.usefixtures("functions")
def test_a_function_that_cannot_be_imported_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.function"), RewardRunner(name, timeout_s=1, retries=0):
        pass


@pytest.mark.usefixtures("functions")
def test_a_process_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    mark = tmp_path / "killed"
    text = "import os, signal\nif not os.path.exists({0!r}):\n    open({0!r}, 'w').close()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "struck.py").write_text(
        text.format(str(mark)) + "def good(prompt, completion, meta):\n    return 0.25\n"
    )
    with RewardRunner("struck:good", timeout_s=10.0, retries=1) as runner:
        assert runner.score("", "", {}) == 0.25
    mark.unlink()
    with (
        pytest.raises(ConfigError, match="ended with status -9"),
        RewardRunner("struck:good", timeout_s=10.0, retries=0),
    ):
        pass


@pytest.mark.usefixtures("functions")
def test_options_are_keywords_part_of_the_version_and_checked_at_the_start() -> None:
    text = {"field": "answer"}
    with RewardRunner("trainer.verifiers:exact", timeout_s=5.0, retries=0, options=text) as rewards:
        assert rewards.score("", " 12 ", {"answer": 12}) == 1.0
        version = rewards.version
    with RewardRunner(
        "trainer.verifiers:exact", timeout_s=5.0, retries=0, options=text | {"ignore_case": True}
    ) as rewards:
        assert rewards.version != version
        assert rewards.score("", "Yes", {"answer": "yes"}) == 1.0
    with (
        pytest.raises(
            ConfigError,
            match=r"trainer\.verifiers:exact.*cannot be called: got an unexpected keyword argument 'patern'",
        ),
        RewardRunner("trainer.verifiers:exact", timeout_s=5.0, retries=0, options={"patern": "x"}),
    ):
        pass


def test_a_module_is_found_in_the_run_s_folder_with_its_neighbours_and_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "of_the_run.py").write_text(
        "import beside\ndef f(prompt, completion, meta):\n    return beside.VALUE\n"
    )
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    (tmp_path / "trainer").mkdir()  # a folder of that name is no module of ours
    with RewardRunner("of_the_run:f", timeout_s=10.0, retries=0, folder=tmp_path) as rewards:
        assert rewards.score("", "", {}) == 3.0
    with RewardRunner("trainer.verifiers:exact", timeout_s=10.0, retries=0, folder=tmp_path) as rewards:
        assert rewards.score("", "1", {"answer": 1}) == 1.0
    with (
        pytest.raises(ConfigError, match=f"put its module into {tmp_path}, or where the trainer's Python"),
        RewardRunner("no_such_module:f", timeout_s=10.0, retries=0, folder=tmp_path),
    ):
        pass


def test_a_process_that_the_kernel_cannot_end_yet_delays_nobody_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for a shared folder that hangs, where SIGKILL waits too. In place of such a folder: a wait that does not end."""
    monkeypatch.setattr(rewards, "ENDING_S", 0.05)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def waits(timeout: float | None = None) -> int:
        assert timeout is not None, "a wait without a bound"
        raise subprocess.TimeoutExpired("sleep", timeout)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(process, "wait", waits)
            assert rewards._end(process, "SCAVENGER_NO_SUCH_MARK=1") == -signal.SIGKILL
    finally:
        process.wait()
