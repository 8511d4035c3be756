"""What the host makes of what its engine's process says. In place of an engine: a process of which each test writes down the words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scavenger.guest.host import EngineProcess

#: Reads a number a line and replies with what the line of `WORDS` that is due says; nothing where that is empty.
STAND_IN = """
import sys
for words in sys.argv[1:]:
    sys.stdin.readline()
    if words:
        print(words, flush=True)
sys.stdin.read()
"""


def words(heard: int, memory: str, samples: int = 0) -> str:
    return json.dumps({"samples": samples, "peak": 0, "memory": memory, "tokens": 0, "heard": heard})


@contextmanager
def engine(*replies: str) -> Iterator[EngineProcess]:
    process = EngineProcess([sys.executable, "-c", STAND_IN, *replies], os.environ)
    try:
        yield process
    finally:
        process.kill()


def until(found: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not found() and time.monotonic() < end:
        time.sleep(0.01)
    return found()


def heard(process: EngineProcess, number: int) -> Callable[[], bool]:
    return lambda: process.said is not None and process.said.heard == number


def test_that_the_engine_slept_before_its_budget_does_not_free_its_memory_after_the_cut() -> None:
    with engine(words(1, "asleep"), "", "", words(4, "falling-asleep"), words(5, "asleep")) as process:
        process.tell(0)
        assert until(heard(process, 1))
        assert process.frees()
        process.tell(2)  # it takes its memory, and its reply is long in coming
        assert not process.frees()
        process.tell(0)
        assert not process.frees(), "what it said is older than the cut: it is to be killed in time"
        process.tell(0)
        assert until(heard(process, 4))
        assert not process.frees()
        process.tell(0)
        assert until(process.frees)


def test_the_reply_to_the_cut_itself_counts_though_the_number_is_repeated() -> None:
    with engine("", words(2, "asleep"), "") as process:
        for budget in (3, 0, 0):
            process.tell(budget)
        assert until(process.frees)


def test_samples_are_its_own_word_and_one_at_least_until_it_has_heard_of_a_cut() -> None:
    with engine(words(1, "awake", 3), "", words(3, "awake", 2), words(4, "asleep")) as process:
        assert process.generating() == 1, "it said nothing yet"
        process.tell(4)
        assert until(lambda: process.generating() == 3)
        process.tell(0)  # its reply is long in coming
        assert process.generating() == 3
        process.tell(0)
        assert until(lambda: process.generating() == 2)
        process.tell(0)
        assert until(lambda: process.generating() == 0)
        process.kill()
        assert process.generating() == 0


def test_an_engine_that_is_gone_holds_no_memory() -> None:
    with engine() as process:
        process.tell(2)
        assert not process.frees()
        process.kill()
        assert process.frees()


#: Raises SIGTERM while the loop waits in Python's own code, whatever lock that holds; without such code, at some line of the loop.
SIGNALLED = """
import pathlib, signal, sys
from scavenger.guest.host import GuestHost, HostOptions
from scavenger.policy.serving import objective_of

seen = 0


def trace(frame, event, arg):
    global seen
    seen += event == "line" and frame.f_code.co_name == "_work"
    waits = frame.f_code.co_name == "wait" and frame.f_back.f_code.co_filename.endswith("guest/host.py")
    if event == "line" and ((waits and frame.f_lineno > frame.f_code.co_firstlineno + 15) or seen > 100):
        sys.settrace(None)
        signal.raise_signal(signal.SIGTERM)
    return trace


root = pathlib.Path("/")
url = "http://127.0.0.1:9/metrics"
host = GuestHost(HostOptions(url, objective_of("ttft_p99=1s"), root, root, "r", "vllm", poll_s=0.01))
sys.settrace(trace)
sys.exit(host.run())
"""


def test_a_signal_while_it_waits_ends_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED], stdout=subprocess.DEVNULL, timeout=30, check=False
    )
    assert done.returncode == 0
