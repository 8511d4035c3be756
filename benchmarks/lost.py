"""Work lost per crash: generation seconds that a kill of each kind of process costs a run of agents. Real processes, on this machine.

    python -m benchmarks.lost [--kills 50] [--minutes 60] [--turns 40] [--tokens 100] [--tool-s 2] [--pace 20] [--only KIND,...] [--seed 0]

A whole site on the local backend: the daemon with its ledger in SQLite, harvested workers with the reference engine, a training job of one
rank with its gateway, its environment workers and a reserved engine. Episodes take turns: `--tokens` generated at `--pace` a second, then a
tool of `--tool-s`, `--turns` times (5 minutes as the defaults stand). In each round each kind of process is killed once (the trainer in one
round of five), at a random moment while all of them are at work:

    engine, with notice   another user's job takes its GPU, so that the cluster sends SIGTERM and, after the grace, SIGKILL
    engine, without       SIGKILL
    gateway, daemon, environment worker, trainer    SIGKILL; the daemon is started again as its unit does, the trainer is submitted again

Each engine notes every token that it generates (`benchmarks/lost_witness.py`). What was generated and is not in the ledger in the end, or
was generated twice, or belongs to an episode's life that was given up, is lost (`benchmarks/lost_account.py`), and is charged to the kill
that cost it, in seconds of the engine's own measured rate of one slot. The tool's effects are outside: a call that it was asked twice
counts.

Goals: below 1 s for an engine with notice; without, what one flush (100 ms) holds of each of its samples; 0 for all others, and no call of
the tool twice. Status 0 where all are met.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import lost_witness
from benchmarks.lost_account import Account, Generated, Kill, Loss, Turn, account, token_seconds
from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.errors import ClusterUnavailable
from tests.chaos.choose import Process
from tests.chaos.parts import is_there, observe
from tests.system import agents, play
from tests.system.model import write_small_model

NOTICE, NO_NOTICE = "engine, with notice", "engine, without"
GATEWAY, DAEMON, ENVIRONMENT, TRAINER = "gateway", "daemon", "environment worker", "trainer"
IDLE = "environment worker without episodes"  # not in the table: what it cost is counted as unexplained
KINDS = (NOTICE, NO_NOTICE, GATEWAY, DAEMON, ENVIRONMENT, TRAINER)
TRAINER_ROUNDS = 5
GOAL_NOTICE_S, FLUSH_S = 1.0, 0.1
#: What is killed is chosen at a moment so long, at most, after all were at work again.
MOST_DELAY_S = 2.0
WHOLE_S = 300.0
#: Engines that the site may have; environment workers of the training job.
ENGINES, WORKERS = 3, 4
#: Of all turns: what names the caller's request, tokens in the ledger, the episode's name, when it was asked for.
_TURNS = """
SELECT u.request, s.sample_index, s.accepted_len, e.name, u.begun_at
FROM turns u JOIN episodes e ON e.episode_id = u.episode_id JOIN samples s ON s.group_id = u.group_id
"""
#: Tokens of turns that no step took, of episodes that one took: their agent went another way.
_NOT_TAKEN = """
SELECT COALESCE(sum(s.accepted_len), 0) FROM samples s JOIN turns u ON u.group_id = s.group_id
WHERE s.state NOT IN ('open', 'complete', 'consumed', 'filtered', 'surplus')
AND u.episode_id IN (SELECT u.episode_id FROM turns u JOIN samples s ON s.group_id = u.group_id WHERE s.state IN ('consumed', 'filtered'))
"""
_PLAYED = re.compile(r"an environment worker ended .* goes on with its (\d+) episodes")
_NEWEST_CHUNK = "SELECT COALESCE(max(id), 0) FROM chunks"
_NEWEST_TURN = "SELECT COALESCE(max(begun_at), 0) FROM turns"
_HELD = "SELECT count(*) FROM leases WHERE ended_at IS NULL AND worker_id = {}"
_BOUNDS = "SELECT worker_id, notice, regenerated FROM workers"


@dataclass(slots=True)
class Seen:
    """What a moment's look found; a look that finds all at work gives who may be killed."""

    engines: list[tuple[int, int, str]]
    processes: list[Process]


class Crashes:
    """A run of agents, of whose processes one is killed after another."""

    def __init__(self, folder: Path, model: Path, options: argparse.Namespace) -> None:
        self.options, self.folder, self.model = options, folder, model
        self.dice = random.Random(options.seed)
        self.kills: list[Kill] = []
        self.workers: dict[int, int] = {}  # of a killed engine, by the kill's number
        self.until = 0.0
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.program = lost_witness.python(self.notes)

    # ---------------------------------------------------------------- the site

    def play(self, say: Callable[[str], None]) -> str:
        """Kill until all were killed often enough or the time is over. Returns why it ended before, "" if it did not."""
        options = self.options
        site_options = SiteOptions(
            "local",
            self.folder / "site",
            demo_layout(nodes=ENGINES + 2, gpus=1, grace_s=10.0, requeue_delay_s=0.5),
            poll_interval_s=0.2,
            max_engines=ENGINES,
            daemon={"reconnect_s": 10.0},
            harvest={
                "python": str(self.program),
                "max_pending": ENGINES,
                "quarantine_after": 100_000,
                "backoff_s": 0.02,
            },
            router={"policy": "standard"},
        )
        with agents.ToolServer(options.tool_s).serving() as self.tool, DemoSite(site_options) as self.site:
            self.run_toml = self._write_run()
            self.training = self._submit()
            failure = ""
            try:
                self._rounds(say)
            except AssertionError as error:
                failure = f"{error}\n{play.logs(self.site)}"
            except KeyboardInterrupt:
                failure = "interrupted"
            self.steps = play.steps_done(self.site)
            play.cut_short(self.site, self.training)
            self.turns = [_turn(*row) for row in play.ask(self.site, _TURNS)]
            self.not_taken = int(play.ask(self.site, _NOT_TAKEN)[0][0])
            self.bounds = {worker: tokens for worker, _, tokens in play.ask(self.site, _BOUNDS)}
            self.generated = lost_witness.read(self.notes)
            return failure

    def _write_run(self) -> Path:
        options = self.options
        self.environment = agents.Environment(
            self.model,
            "plain",
            {"turns": options.turns, "tool": self.tool.url},
            agents.write_interpreter(self.site.dir / "python-of-environments"),
            options.turns * (options.tokens + 2) + 32,
        )
        return agents.write_run(
            self.site,
            self.environment,
            run={"steps": 10_000, "poison_after": 100_000, "max_engines": ENGINES},
            engine={"max_batch": options.episodes // ENGINES, "pace": options.pace},
            data={
                "prompts_per_step": 2,
                "samples_per_prompt": options.episodes // 2,
                "environment_workers": WORKERS,
                "environment_concurrency": options.episodes // WORKERS,  # so that none is idle
                "effects": "external",
                "on_doubt": "tell",
            },
            sampling={"max_tokens": options.tokens, "min_tokens": options.tokens, "allow_truncated": True},
            # The reserved engine generates only where no harvested one is left.
            reserved={"window": 0.0, "wake_after_s": 60.0},
            checkpoint={"every": 1},
        )

    def _submit(self) -> int:
        env = self.environment.env | {"SCAVENGER_PYTHON": str(self.program)}
        return play.submit(self.site, self.run_toml, 1, env)

    # ---------------------------------------------------------------- kills

    def _rounds(self, say: Callable[[str], None]) -> None:
        """Each kind once a round, the trainer once in five: its start anew takes longest, and forgives environment workers their losses."""
        wanted = [kind for kind in KINDS if not self.options.only or kind in self.options.only.split(";")]
        self._wait_until_whole(play.DEADLINE_S * 4)
        began = time.monotonic()
        for number in range(1, self.options.kills + 1):
            if time.monotonic() > began + 60 * self.options.minutes:
                return
            kinds = [kind for kind in wanted if kind != TRAINER or number % TRAINER_ROUNDS == 0]
            for kind in self.dice.sample(kinds, len(kinds)):
                while not self._killed(kind):
                    say(f"{time.monotonic() - began:6.0f} s  {kind}: it played nothing, another one")
                say(f"{time.monotonic() - began:6.0f} s  round {number}  {kind}")
            self.until = time.time()

    def _killed(self, kind: str) -> bool:
        """Kill one and wait until all are at work. False: it had nothing to do, and counts as no kill of its kind."""
        before = self._episodes_of_lost_workers()
        self.kills.append(self._kill(kind, self._at_a_random_moment(kind)))
        self._look_after(kind)
        self._wait_until_whole(WHOLE_S)
        if kind != ENVIRONMENT or any(self._episodes_of_lost_workers()[len(before) :]):
            return True
        self.kills[-1] = replace(self.kills[-1], kind=IDLE)
        return False

    def _episodes_of_lost_workers(self) -> list[int]:
        """Of each environment worker that was lost, how many it played, in the words of the training job's log."""
        log = self.site.dir / "train.log"
        said = log.read_text(errors="replace") if log.exists() else ""
        return [int(count) for count in _PLAYED.findall(said)]

    def _at_a_random_moment(self, kind: str) -> Seen:
        """All are at work, and were until a random moment: one in which a step ends is waited out. Where an engine is killed another one is
        left."""
        engines = 2 if kind in (NOTICE, NO_NOTICE) else 1
        while True:
            self._wait_until_whole(WHOLE_S, engines)
            time.sleep(self.dice.uniform(0.0, MOST_DELAY_S))  # a random moment; what is waited for is above
            if (seen := self._whole(engines)) is not None:
                return seen

    def _wait_until_whole(self, deadline_s: float, engines: int = 1) -> None:
        play.wait_for("all to be at work", lambda: self._whole(engines), deadline_s, 0.2)

    def _whole(self, least: int) -> Seen | None:
        """Who may be killed, where every process is there and `least` engines are at work: since the last kill a turn was begun, and tokens
        come."""
        last = self.kills[-1].at if self.kills else 0.0
        if not self.site.serving or play.ask(self.site, _NEWEST_TURN) <= [(last,)]:
            return None
        processes = observe(self.site, self.run_toml, None)
        parts = Counter(process.part for process in processes)
        if not parts["gateway"] or not parts["rank"] or parts["environment"] < WORKERS:
            return None
        before = play.ask(self.site, _NEWEST_CHUNK)
        time.sleep(0.3)  # what is asked is whether tokens come within so long
        engines = play.busy(self.site)
        if len(engines) < least or play.ask(self.site, _NEWEST_CHUNK) <= before:
            return None
        return Seen(engines, processes)

    def _kill(self, kind: str, seen: Seen) -> Kill:
        number = len(self.kills) + 1
        if kind in (NOTICE, NO_NOTICE):
            worker, job, node = self.dice.choice(seen.engines)
            pid = play.engine_pid(self.site, job)
            ((held,),) = play.ask(self.site, _HELD.format(worker))
            self.workers[number] = worker
            kill = Kill(number, kind, time.time(), pid, True, held)
            if kind == NOTICE:
                self.site.submit_other(0.3, 1, node)
            else:
                os.kill(pid, signal.SIGKILL)
            return kill
        part = {GATEWAY: "gateway", DAEMON: "daemon", ENVIRONMENT: "environment", TRAINER: "rank"}[kind]
        victim = self.dice.choice([process for process in seen.processes if process.part == part])
        kill = Kill(number, kind, time.time(), victim.pid)
        os.kill(victim.pid, signal.SIGKILL)
        play.wait_for("its end", lambda: not is_there(victim), every_s=0.02)
        return kill

    def _look_after(self, kind: str) -> None:
        """What a unit and a person do."""
        if kind == DAEMON:
            self.site.end_daemon(self.site.daemon)
            self.site.start_daemon()
        elif kind == TRAINER:
            play.wait_for("the training job's end", self._job_ended)
            self.training = self._submit()

    def _job_ended(self) -> bool:
        try:
            jobs = self.site.cluster.view().jobs
        except ClusterUnavailable:
            return False
        job = next((job for job in jobs if job.job_id == self.training), None)
        return job is None or (job.state in play.ENDED and not job.flags)

    # ---------------------------------------------------------------- what it cost

    def account(self) -> Account:
        return account(self.generated, self.turns, self.kills, self.until or time.time())


def _turn(request: bytes, index: int, durable: int, name: str, begun_at: float) -> Turn:
    """By the stream of random numbers that its tokens were drawn from, as the router names it."""
    numbers = int.from_bytes(request[:7], "big"), int.from_bytes(request[7:14], "big")
    place, _, life = name.rpartition(".")
    return Turn(f"turn/{numbers[0]}/{numbers[1]}/{index}", place, int(life), durable, begun_at)


# ---------------------------------------------------------------- said


def met(kind: str, losses: Sequence[Loss]) -> bool:
    """Whether every kill of this kind kept to its goal."""
    if kind == NOTICE:
        return all(loss.seconds < GOAL_NOTICE_S for loss in losses)
    if kind == NO_NOTICE:
        return all(
            tokens <= math.ceil(FLUSH_S / loss.token_s)
            for loss in losses
            for tokens in loss.by_sample.values()
        )
    return all(loss.tokens == 0 for loss in losses)


GOALS = {NOTICE: "below 1 s", NO_NOTICE: "one flush a sample"}


def row(kind: str, losses: Sequence[Loss]) -> str:
    """A line of the table."""
    seconds = [loss.seconds for loss in losses]
    tokens, held = sum(loss.tokens for loss in losses), [loss.kill.samples for loss in losses]
    most = max(loss.most_s for loss in losses)
    of = f"{tokens} of {sum(held)} samples" if any(held) else str(tokens)
    over = sum(not met(kind, [loss]) for loss in losses)
    return (
        f"| {kind} | {len(losses)} | {statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f}) | {most:.3f} | {of} | "
        f"{GOALS.get(kind, '0')} | {f'MISSED by {over}' if over else 'met'} |"
    )


def beats(generated: Sequence[Generated], kill: Kill) -> float:
    """The longest time between two beats of a killed engine in its last second: how far it was kept from the CPU. Seconds."""
    ends = sorted({one.at for one in generated if one.pid == kill.pid and kill.at - 1 < one.at <= kill.at})
    return max((after - at for at, after in itertools.pairwise([*ends, kill.at])), default=0.0)


def report(crashes: Crashes, failure: str) -> bool:
    found = crashes.account()
    rate, _ = token_seconds(crashes.generated)
    twice = crashes.tool.twice()
    print(
        "| kind | kills | generation seconds lost a kill: median (range) | most of one sample | tokens, in all | goal | |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    unexplained = found.unexplained + sum(loss.tokens for loss in found.losses if loss.kill.kind == IDLE)
    sound = not failure and not twice and not crashes.not_taken and not unexplained
    for kind in KINDS:
        if losses := [loss for loss in found.losses if loss.kill.kind == kind]:
            print(row(kind, losses))
            sound &= met(kind, losses)
    for loss in found.losses:
        if loss.kill.engine and not met(loss.kill.kind, [loss]):
            tokens = ", ".join(map(str, sorted(loss.by_sample.values())))
            late = 1000 * beats(crashes.generated, loss.kill)
            print(
                f"over its goal: {loss.kill.kind}, tokens of its samples {tokens}; up to {late:.0f} ms between its last beats"
            )
    bound = sum(
        crashes.bounds.get(crashes.workers[kill.number], 0)
        for kill in crashes.kills
        if kill.kind == NO_NOTICE
    )
    lives = {turn.place for turn in crashes.turns if turn.life}
    print(
        f"{found.generated:,} tokens generated, {1000 * rate:.1f} ms a token of a slot (median); {crashes.steps} steps; "
        f"{len(crashes.turns):,} turns of {len({turn.place for turn in crashes.turns})} episodes, {len(lives)} of them begun anew\n"
        f"calls of the tool: {len(crashes.tool.asked):,}, asked twice: {len(twice)}; tokens of turns that no step took: "
        f"{crashes.not_taken}; lost without a kill at work: {unexplained}; the ledger's bound for engines without notice: {bound}"
    )
    if failure:
        print(f"ended before all kills were made: {failure}")
    return sound


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="of each kind; of the trainer a fifth")
    parser.add_argument("--minutes", type=float, default=60.0, help="no round begins after so many")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100, help="of a turn")
    parser.add_argument("--tool-s", type=float, default=2.0)
    parser.add_argument("--pace", type=float, default=20.0, help="tokens a second and sample")
    parser.add_argument("--episodes", type=int, default=12, help="of a step, all at once")
    parser.add_argument("--only", default="", help=f"kinds, separated by `;`: {'; '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="scv-") as name:
        folder = Path(name)
        write_small_model(folder / "model")
        crashes = Crashes(folder, folder / "model", options)
        failure = crashes.play(lambda line: print(line, file=sys.stderr, flush=True))
        return 0 if report(crashes, failure) else 1


if __name__ == "__main__":
    sys.exit(main())
