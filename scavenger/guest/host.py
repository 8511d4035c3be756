"""Hosts one rollout engine beside a service: reads the service's metrics, decides, tells the engine how many samples it may hold.

    service /metrics --ServiceView--> policy/serving.py --budget--> standard input of `python -m rollout --guest`
                                                        <--samples, memory-- its standard output

The engine's process begins with the first budget above 0, and stays: without slack it sleeps. It is ended when the service is gone, when
this process is told to end, and when it does not give its memory back within `free_within_s` of a cut: then it is killed, and started again
later. Should this process be killed, its pipe ends, and the engine leaves with all its tokens. The service is never signalled.

Owns the process and the clock. Decides nothing of the budget.

Boundary: a child process, signals, HTTP through `service.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scavenger.errors import ScavengerError
from scavenger.guest import service
from scavenger.guest.metrics import ServiceError
from scavenger.guest.service import ServiceGone
from scavenger.guest.window import Window
from scavenger.policy import serving
from scavenger.policy.serving import Objective, ServingDecision, ServingRules, Verdict
from scavenger.protocol.worker.events import EXIT_DRAINED, EXIT_PREEMPTED

#: For which a leaving engine is waited: it flushes and says goodbye.
LEAVE_S = 10.0
#: A line of the engine's; what is longer is none.
MAX_LINE = 4096


class GuestError(ScavengerError):
    """The guest cannot go on: its engine ended, or the service never came."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """`url`: of the metrics. `folder`: the daemon's public folder, or its state directory. `memory_share`: of the GPU's memory; 0: what the
    run says. `nice`: of the engine's process, for CPUs that the service uses too. `pull_mb_per_s`: of weights, 10^6 bytes; 0: any.
    `start_within_s`: for the service's first page. Times in seconds.
    """

    url: str
    objective: Objective
    folder: Path
    key: Path
    run: str
    engine: str
    memory_share: float = 0.0
    poll_s: float = 1.0
    window_s: float = 30.0
    free_within_s: float = 10.0
    nice: int = 10
    pull_mb_per_s: float = 0.0
    start_within_s: float = 3600.0
    restart_s: float = 60.0
    rules: ServingRules = field(default_factory=ServingRules)


class EngineLine(msgspec.Struct, frozen=True):
    """What the engine's process says of itself (`rollout/host_pipe.py`)."""

    samples: int
    peak: int
    memory: str
    tokens: int
    heard: int  # numbers that it has acted upon


@dataclass(slots=True)
class GuestReport:
    """What the owner's GPUs gave, and whether anybody waited. Seconds, but for `cuts`, `tokens` and `kills`.

    `slow_s`: in which the objective was missed while samples ran, or the window had any; `slow_alone_s`: without. `free_s`: the longest
    from a cut to free memory.
    """

    seconds: float = 0.0
    open_s: float = 0.0
    sample_s: float = 0.0
    slow_s: float = 0.0
    slow_alone_s: float = 0.0
    free_s: float = 0.0
    cuts: int = 0
    kills: int = 0
    tokens: int = 0


def engine_argv(options: HostOptions) -> list[str]:
    """The command of the engine's process."""
    return [
        *("nice", "-n", str(options.nice), sys.executable, "-m", "rollout"),
        *("--state-dir", str(options.folder), "--key", str(options.key)),
        *("--kind", "harvested", "--run", options.run, "--engine", options.engine, "--guest"),
        *("--memory-share", str(options.memory_share), "--pull-mb-per-s", str(options.pull_mb_per_s)),
    ]


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Slurm's numbers of the service's job are not the engine's: nothing of ours may ever act on that job."""
    return {name: value for name, value in environ.items() if not name.startswith("SCAVENGER_")}


class EngineProcess:
    """One worker process. What it said last is `said`; None: nothing yet."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._told = 0  # numbers written
        self._cut: int | None = (
            None  # which of them was the first 0 since one above; None: the last one was above
        )
        self.said: EngineLine | None = None
        self.peak = 0
        self._child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment), bufsize=0
        )
        self._lock = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as stream:
            while line := stream.readline(MAX_LINE):
                try:
                    said = msgspec.json.decode(line, type=EngineLine)
                except msgspec.DecodeError:  # a library's own words
                    sys.stderr.buffer.write(line)
                    continue
                with self._lock:
                    self.said, self.peak = said, max(self.peak, said.peak)

    def take_peak(self) -> int:
        """The most samples at once since the last call, those of now included."""
        with self._lock:
            now = self.said.samples if self.said is not None else 0
            peak, self.peak = max(self.peak, now), now
            return peak

    def tell(self, budget: int) -> None:
        assert self._child.stdin is not None
        self._told += 1
        if budget > 0:
            self._cut = None
        elif self._cut is None:
            self._cut = self._told
        try:
            self._child.stdin.write(f"{budget}\n".encode())
        except OSError:  # it ended; the next look finds its code
            return

    def code(self) -> int | None:
        return self._child.poll()

    def _since_cut(self) -> EngineLine | None:
        """What it said last, if it had heard of the cut then. What it said before says nothing of what it did with a budget since."""
        said = self.said
        return said if said is not None and self._cut is not None and said.heard >= self._cut else None

    def frees(self) -> bool:
        """Whether its memory is free after a cut: it is gone, or it sleeps."""
        said = self._since_cut()
        return self.code() is not None or (said is not None and said.memory == "asleep")

    def generating(self) -> int:
        """Samples now, by its own word; 1 at least where a cut may not have reached it yet."""
        if self.code() is not None:
            return 0
        said = self._since_cut()
        if said is not None:
            return said.samples
        return max(1, self.said.samples if self.said is not None else 0)

    def end(self) -> int:
        """Ask it to leave, and kill it when it does not. Returns its code."""
        if self.code() is None:
            self._child.terminate()
        try:
            self._child.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
        return self._ended()

    def kill(self) -> int:
        self._child.kill()
        return self._ended()

    def _ended(self) -> int:
        code = self._child.wait()
        self._listener.join(LEAVE_S)  # what it said last counts
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        return code


class GuestHost:
    """`run()` works until the service, the run or this process ends, and returns what to exit with."""

    def __init__(
        self,
        options: HostOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self._options, self._clock, self._say = options, clock, say
        self._stopped = False
        #: An Event would hold its lock where a signal comes while it is waited for, and the handler would wait for that lock for ever.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._engine: EngineProcess | None = None
        self._budget = 0
        self._cut_at: float | None = None  # of a cut whose memory is not free yet
        self._start_after = 0.0
        self._window = Window(options.window_s)
        self._told = ""
        self.report = GuestReport()

    def stop(self) -> None:
        self._stopped = True
        self._wake.put(None)

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self.stop())
        began = self._clock()
        try:
            return self._work(began)
        finally:
            if self._engine is not None:
                self._engine.end()
                self._note_tokens()
            self.report.seconds = self._clock() - began
            self._say(json.dumps({"report": msgspec.to_builtins(self.report)}))

    def _work(self, began: float) -> int:
        options = self._options
        state = serving.begin(options.rules, began)
        seen, refused = False, 0
        while not self._stopped:
            due = self._clock() + options.poll_s
            view = None
            try:
                reading = service.fetch(options.url, max(1.0, options.poll_s))
                seen, refused = True, 0
                engine = self._engine
                peak, generating = (engine.take_peak(), engine.generating()) if engine is not None else (0, 0)
                view = self._window.view(self._clock(), reading, peak, generating)
                read = True
                if view is None:
                    state = serving.first_read(state, self._clock())
            except ServiceGone:
                read, refused = False, refused + 1
                if seen and refused >= 2:
                    self._say(json.dumps({"end": "the service is gone"}))
                    return 0
            except ServiceError as error:
                if not seen and not isinstance(error.__cause__, OSError):
                    raise  # it replies, and is no server that is known
                read = False
            if not seen and self._clock() - began > options.start_within_s:
                raise GuestError(
                    f"{options.url} gave no metrics within {options.start_within_s:g} s",
                    "start the service first",
                )
            now = self._clock()
            if view is not None or not read:
                decision = serving.decide(state, view, options.objective, options.rules, now)
                state = decision.state
                if decision.window_anew:
                    self._window.begin_anew()
                self._count(decision)
                self._tell(decision, now)
            code = self._look(now)
            if code is not None:
                return code
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=max(0.0, due - self._clock()))
        return 0

    def _count(self, decision: ServingDecision) -> None:
        report, poll_s = self.report, self._options.poll_s
        said = self._engine.said if self._engine is not None else None
        report.open_s += poll_s * (self._budget > 0)
        report.sample_s += poll_s * (said.samples if said is not None else 0)
        report.slow_s += poll_s * (decision.verdict is Verdict.SLOW)
        report.slow_alone_s += poll_s * (decision.verdict is Verdict.SLOW_ALONE)

    def _tell(self, decision: ServingDecision, now: float) -> None:
        if decision.budget == self._budget and decision.verdict == self._told:
            return
        self._told = decision.verdict
        line = {"budget": decision.budget, "verdict": decision.verdict, "reason": decision.reason}
        self._say(
            json.dumps({**line, "inputs": {name: repr(value) for name, value in decision.inputs.items()}})
        )
        if decision.budget == self._budget:
            return
        if decision.budget == 0:
            self.report.cuts += 1
            self._cut_at = now
        else:
            self._cut_at = None
        self._budget = decision.budget

    def _look(self, now: float) -> int | None:
        """The engine's process: started where it may generate, killed where it does not give way. The code to end with, if it ended."""
        if self._engine is None:
            if self._budget and now >= self._start_after:
                self._engine = EngineProcess(engine_argv(self._options), engine_environment(os.environ))
                self._engine.tell(self._budget)
            return None
        code = self._engine.code()
        if code == EXIT_PREEMPTED:
            self._forget(now)
            return None
        if code is not None:
            self._say(json.dumps({"end": f"the engine's process ended with {code}"}))
            return code if code != EXIT_DRAINED else 0
        if self._cut_at is not None and self._engine.frees():
            self.report.free_s = max(self.report.free_s, now - self._cut_at)
            self._cut_at = None
        elif self._cut_at is not None and now - self._cut_at > self._options.free_within_s:
            self._say(
                json.dumps({"killed": f"no free memory within {self._options.free_within_s:g} s of a cut"})
            )
            self._engine.kill()
            self.report.kills += 1
            self.report.free_s = max(self.report.free_s, now - self._cut_at)
            self._forget(now)
            return None
        self._engine.tell(self._budget)  # the same again too: it replies with what it does
        return None

    def _forget(self, now: float) -> None:
        if self._engine is not None:
            self._engine.end()
        self._note_tokens()
        self._engine, self._cut_at = None, None
        self._start_after = now + self._options.restart_s

    def _note_tokens(self) -> None:
        if self._engine is not None and self._engine.said is not None:
            self.report.tokens += self._engine.said.tokens
