"""`python -m trainer run.toml [--set KEY=VALUE] [--over FILE] [--resume auto|none|DIR] [--local]`: one rank of the training job.

Owns the process: arguments, environment, the set-up and the exit. Started by an MPI launcher on every rank (`scripts/train.sbatch`),
or alone. Exit codes: 0 finished, 2 bad configuration, 3 a newer attempt took over, 75 a rank hung (`watch`), 143 told to end, 130 by
Ctrl-C, 1 anything else. SIGTERM (or SIGUSR1; with `--local` Ctrl-C) makes rank 0 write a checkpoint of the last whole step and end; it
closes nothing, so the run can be resumed.
Before the run is open it ends at once.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # what is imported takes seconds: Ctrl-C ends it without a traceback

import sys

from scavenger.errors import ConfigError
from scavenger.host import packages

if __name__ == "__main__":
    try:
        packages.require_training("the trainer runs on torch")
    except ConfigError as lacks:
        print(f"error: {lacks}", file=sys.stderr)
        sys.exit(lacks.exit_code)

import argparse
import functools
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from blake3 import blake3

from rollout.engines import account
from scavenger import config as configs
from scavenger.client import Client
from scavenger.config import RewardSection, RunConfig
from scavenger.errors import (
    CheckpointAhead,
    LedgerError,
    LedgerRestored,
    ScavengerError,
    StaleAttempt,
    describe,
)
from scavenger.protocol import engine_options, keys, messages
from scavenger.weights import files
from scavenger.weights.source import WeightServer, is_loopback, serving_interface
from scavenger.weights.spool import Spool
from trainer import reserved
from trainer.algorithms.reward_pool import RewardPool, open_pool, refuse_missing
from trainer.algorithms.rows import resolve
from trainer.algorithms.scoring import Scorer, Scoring
from trainer.arguments import add_layers
from trainer.checkpoint import checkpoint
from trainer.data.group_filter import GroupFilter
from trainer.data.prompts import PromptSource, open_tokenizer, stop_tokens, unknown_note, vocabulary
from trainer.engine_control import of_job
from trainer.episodes import delivered
from trainer.episodes.opening import Opened, opened
from trainer.local import Ledger, LocalRun, LocalSource, alone
from trainer.loop.comm import Comm, Solo, connect, disconnect, join, local_rank
from trainer.loop.ending import SIGINT_EXIT, SIGTERM_EXIT, Ending, EndRequested, ignore
from trainer.loop.monitor import Monitor, chosen
from trainer.loop.publish import Publisher
from trainer.loop.ranks import Ranks, serve
from trainer.loop.run import Loop, RunStart
from trainer.loop.sample_log import SampleLog, one_in
from trainer.loop.trainer_run import TrainerRun
from trainer.loop.watchdog import Here, RankWatch, meet
from trainer.model import identity
from trainer.model.learner import Learner, model_config_text
from trainer.model.memory import RankGpu
from trainer.model.replay import routing_nbytes
from trainer.serving import adapters_beside_base, refuse_missing_engine

STALE_EXIT = 3


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer", description="Train a run: one rank of the training job."
    )
    parser.add_argument("config", type=Path, help="run.toml")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|none|DIR",
        help="checkpoint to start from (default: the newest)",
    )
    add_layers(parser)
    parser.add_argument(
        "--local",
        action="store_true",
        help="engine and trainer in this one process, without daemon, Slurm and MPI",
    )
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="with --local: answer the held-out prompts with the checkpoint's weights, and train nothing",
    )
    options = parser.parse_args(argv)
    if options.evaluate and not options.local:
        parser.error(
            "--evaluate needs --local: one process, which leaves the run alone. It takes checkpoints of the run too: --resume DIR"
        )
    return options


def engine_spec(config: RunConfig, say: Callable[[str], None] = print) -> messages.EngineSpec:
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    text = model_config_text(config.model.path)
    unmerged, reason = adapters_beside_base(config, text, "cuda" if torch.cuda.is_available() else "cpu")
    if reason:
        say(f"lora.serve: {reason}")
    return messages.EngineSpec(
        config.engine.name,
        text,
        "float64" if config.run.deterministic else dtype,
        config.engine.max_batch,
        config.model.context_length,
        config.engine.pace,
        config.engine.gpu_memory_share,
        config.engine.eager,
        engine_options.encode(config.engine.vllm),
        routing_nbytes(config) if config.algorithm.router_replay else 0,
        config.lora.rank if unmerged else 0,
        config.algorithm.kv == "keep",
        config.engine.speculation,
        config.engine.move_kv,
        vocabulary(open_tokenizer(config.model.path))
        if config.data.policies or config.data.episodes_of
        else "",
        config.run.share_engines,
    )


def sampling(config: RunConfig) -> messages.Sampling:
    chosen = config.sampling
    stops = stop_tokens(config.model.path, chosen.stop_token_ids)
    return messages.Sampling(
        chosen.max_tokens,
        chosen.temperature,
        chosen.top_p,
        chosen.top_k,
        stops,
        chosen.min_tokens,
        chosen.stop,
    )


def gpu_of(config: RunConfig, rank: int, environ: Mapping[str, str]) -> RankGpu:
    """This rank's, and whether reserved engines lie on it."""
    number = local_rank()
    shared = reserved.shares_gpu(config.reserved.workers, config.reserved.gpus_per_engine, number, environ)
    share = config.engine.gpu_memory_share if config.engine.name == "vllm" else 0.0
    return RankGpu(account.opened(environ, number, f"rank {rank}"), shared, share, rank)


def make_learner(config: RunConfig, comm: Comm) -> Learner:
    recipe = resolve(config.algorithm, config.sampling.max_tokens)
    return Learner(
        config.model.path,
        join(comm),
        recipe=recipe,
        optimizer=config.optimizer,
        temperature=config.sampling.temperature,
        deterministic=config.run.deterministic,
        trainer=config.trainer,
        lora=config.lora,
        gpu=gpu_of(config, comm.rank, os.environ),
        router_replay=config.algorithm.router_replay,
    )


def watched(config: RunConfig, comm: Comm, stack: ExitStack) -> Here:
    """All ranks: begin to watch one another. Where this rank is, for it to say."""
    here = Here()
    watch = RankWatch(meet(comm), here, stuck_s=config.trainer.stuck_s, end_s=config.trainer.stuck_end_s)
    watch.start()
    stack.callback(watch.stop)
    return here


def weights_source(config: RunConfig, comm: Comm, ending: Ending) -> WeightServer:
    """Where this rank serves its share of the weights. Every rank calls it. Raises `ConfigError` where engines could not reach it.

    `ending` is told when it cannot serve any more: engines would wait for this rank's share. Raises `DaemonUnavailable` on rank 0 where
    `weights.listen` is empty and no daemon says where it listens.
    """
    weights, here = config.weights, socket.gethostname()
    lead = comm.share(here.encode()).decode()
    endpoint = ""
    if comm.rank == 0 and not weights.listen:
        endpoint = keys.read_rendezvous(config.run.state_dir).endpoint
    listen = serving_interface(weights.listen, comm.share(endpoint.encode()).decode())
    if lead != here and is_loopback(listen):
        raise ConfigError(
            f"weights on {listen} are reached from {here} alone, and rank 0 is on {lead}: engines could not pull from both",
            'set weights.listen = "0.0.0.0" in run.toml',
        )
    advertise = (
        weights.advertise if lead == here else ""
    )  # it names rank 0's host; another one goes by its own name
    return WeightServer(
        listen,
        advertise,
        encrypt=weights.encrypt,
        deltas=weights.deltas,
        nixl=weights.nixl,
        port=weights.port + local_rank() if weights.port else 0,
        on_fault=ending.fail,
    )


def slurm_job() -> int:
    """The id of the Slurm job that this process is of; 0 = of none."""
    return int(os.environ.get("SLURM_JOB_ID", "0"))


def spool_of(config: RunConfig) -> Spool | None:
    folder = config.weights.spool_dir
    return Spool(folder / config.run.name) if folder else None


def stop_tokenizer(config: RunConfig, comm: Comm) -> bytes:
    """Rank 0's tokenizer.json, to be published with the weights, where engines have to find stop texts; else b"". Every rank calls it.

    Raises `ConfigError` on rank 0.
    """
    if not config.sampling.stop:
        return b""
    return comm.share(files.read_tokenizer(config.model.path) if comm.rank == 0 else b"")


def restore(config: RunConfig, ranks: Ranks, path: Path | None, data: str, chosen: bool) -> RunStart:
    """Load a checkpoint on all ranks. `data`: digest of this run's prompts.

    Raises `ConfigError` when it belongs to another run, to another base model or to other prompts, and the user has not `chosen` it.
    """
    base = identity.digest(config.model.path)
    if path is None:
        return RunStart(base=base)
    state = checkpoint.read_state(path)
    dtype = "float64" if config.run.deterministic else "float32"
    if (state.seed, state.dtype) != (config.run.seed, dtype):
        raise ConfigError(
            f"{path} was written with run.seed = {state.seed} in {state.dtype}, this run has {config.run.seed} in {dtype}",
            "choose another run.out_dir, or start over with --resume none",
        )
    if state.run not in ("", config.run.name) and not chosen:
        raise ConfigError(
            f"{path} belongs to run {state.run!r}, and this is run {config.run.name!r}",
            f"name another run.out_dir, or go on from that run's weights on purpose: --resume {path}",
        )
    if state.data not in ("", data):
        what = f"the prompts or their order are not those of {path}: data.path, [data], the chat template or eval.prompts was changed"
        if not chosen:
            raise ConfigError(what, f"undo that, or go on with the new ones on purpose: --resume {path}")
        if config.data.has_curriculum and state.run in ("", config.run.name):
            raise ConfigError(
                f"{what}; the ledger's pass rates for data.curriculum_* are of the old ones",
                f"give the run another run.name and run.out_dir, with --resume {path}",
            )
        print(f"{what}; goes on with the new ones from position {state.cursor}", flush=True)
    same_base = not state.base or state.base == base
    if not same_base:
        what = (
            f"the weights in model.path = {config.model.path} are not those that the run of {path} began with"
        )
        if not chosen:
            raise ConfigError(
                what,
                "put those back; or begin with the new ones: --resume none, or another run.out_dir; "
                f"or go on from the checkpoint on purpose: --resume {path}",
            )
        print(f"{what}; goes on from the checkpoint all the same", flush=True)
    ranks.load(path, state.updates_taken)
    over = "" if chosen else " (--resume none starts over)"
    print(f"resumed from {path}, after step {state.step}{over}", flush=True)
    # Adapters were once published merged: such a version's root names other bytes. So does that of a version with another tokenizer, or
    # without one: sampling.stop was changed since, or an older release wrote it. And so do adapters of another base.
    same = (state.adapters, state.tokenizer) == (bool(config.lora.rank), ranks.tokenizer)
    root = state.root if same and same_base else ""
    return RunStart(state.step, root, path, state.cursor, state.owes_evaluation, state.late, base)


def set_aside(config: RunConfig, start: RunStart, attempt: int) -> None:
    """Keep later resumes off checkpoints that are not of the history which `attempt` goes on with, and off unfinished ones."""
    checkpoint.sweep(config.run.out_dir)
    for path in checkpoint.abandon(config.run.out_dir, start.step, start.path, attempt):
        print(
            f"attempt {attempt} starts after step {start.step}: a later checkpoint is now {path.name}",
            flush=True,
        )


def lead(config: RunConfig, comm: Comm, options: argparse.Namespace) -> int:
    """Rank 0: set everything up, run the loop, close the run as what it became. Returns the exit code."""
    if options.local:
        refuse_missing_engine(config)
    tokenizer = open_tokenizer(config.model.path)
    spec, how = engine_spec(config), sampling(config)
    with ExitStack() as stack:
        if options.local:
            stack.enter_context(alone(config.run.out_dir))
        reward = config.reward
        played: Opened | delivered.Opened | None = None
        if config.data.environment:
            played = stack.enter_context(opened(config, layers(options), local=options.local))
        elif config.data.episodes_of:
            played = delivered.opened(config, local=options.local)
        prompts = PromptSource(config, tokenizer, print, played.tasks if played else None)
        if options.evaluate:
            refuse_no_evaluation(prompts)
        if played is None:
            refuse_rows(reward, prompts)
            if note := unknown_note(tokenizer, prompts.take(0, config.data.prompts_per_step)):
                print(note, flush=True)
        runner: Scorer = played.scorer if played else stack.enter_context(_runner(reward))
        learner, here, ending = make_learner(config, comm), watched(config, comm, stack), Ending()
        source = LocalSource() if options.local else stack.enter_context(weights_source(config, comm, ending))
        publisher = Publisher(source, spool_of(config), stop_tokenizer(config, comm))
        ranks = Ranks(comm, learner, publisher, here, states_merged=not spec.adapter_rank)
        monitor = Monitor(
            config.run.out_dir, steps=config.run.steps, more=chosen(config, local=options.local)
        )
        stack.callback(monitor.close)
        start, run = begin(config, spec, ranks, source, stack, options.resume, prompts.digest)
        if options.evaluate:
            config, start = nothing_but_evaluation(config, start)
        set_aside(config, start, run.attempt)
        episodes = played.attach(run) if played else None
        run = episodes or run
        if 0 < config.run.steps <= start.step and not options.evaluate:
            monitor.say(done_line(config, start.step))
        every = one_in(
            config.monitor.sample_groups,
            config.data.prompts_per_step,
            2 * sum(len(one.prompts) for one in prompts.evaluations),
        )
        kept = SampleLog(config.run.out_dir, every, tokenizer, monitor.say)
        scoring = Scoring(
            runner,
            tokenizer,
            reward,
            config.algorithm,
            monitor.say,
            config.sampling.max_tokens,
            kept.write,
            episodes,
            [one.name for one in config.data.sets],
            group_filter(config),
        )
        ending.listen(terminal=options.local)
        engines = of_job(os.environ)
        loop = Loop(config, run, ranks, scoring, prompts, how, monitor, start, ending, slurm_job(), engines)
        try:
            loop.run()
            if isinstance(episodes, delivered.DeliveredRun):
                monitor.say(f"answers for its agent until run {config.data.episodes_of} ends")
                monitor.say(episodes.serve(ending.check))
        except delivered.EpisodesOver as over:
            monitor.say(str(over))
        except EndRequested as request:
            saved = checkpoint.select(config.run.out_dir, "auto")
            monitor.say(ended_line(str(request), saved))
            ranks.stop()
            return SIGINT_EXIT if str(request) == "SIGINT" else SIGTERM_EXIT
        except (StaleAttempt, LedgerRestored):
            raise  # the run is another trainer's, or is to be resumed: it stays open
        except BaseException as error:
            if engines is not None:
                engines.run_ends()
            close_failed(run, error)
            raise
        if engines is not None:
            engines.run_ends()
        run.close_run("finished")
        ranks.stop()
        monitor.say(finished_line(config, options))
    return 0


def done_line(config: RunConfig, step: int) -> str:
    """What is said first of a run whose steps are all done. One that another run plays for still answers for its agent."""
    done = f"{step} steps are done, run.steps = {config.run.steps}"
    if config.data.episodes_of:
        return f"takes no more steps: {done}"
    return f"nothing is left to train: {done}; to go on, raise it"


def finished_line(config: RunConfig, options: argparse.Namespace) -> str:
    """What is said last of a run that succeeded."""
    if options.evaluate:
        return f"evaluated, nothing was trained; figures: {config.run.out_dir}/metrics.jsonl"
    if not config.run.steps:
        return "finished: its weights answered as they are, and no step was taken"
    saved = checkpoint.select(config.run.out_dir, "auto")
    laid_over = options.over or options.set
    where = f"-c {config.run.out_dir}/scavenger.toml" if laid_over else f"{options.config} --local"
    more = (
        f"; completions: scavenger samples {where}"
        f"; in a browser: scavenger web -c {config.run.out_dir}/scavenger.toml"
        if options.local
        else ""
    )
    return f"finished: {config.run.steps} steps, saved as {saved}{more}"


def evaluation_of(config: RunConfig, resume: str) -> tuple[RunConfig, str]:
    """`--evaluate`: the configuration with a folder of its own beside the checkpoints, one for each, and the checkpoint as `--resume` names
    it. So what is evaluated is neither gone on with nor gone back from. Raises `ConfigError`.
    """
    mine = config.run.out_dir
    chosen = checkpoint.select(mine, resume)
    if chosen is None and resume == "auto":
        raise ConfigError(
            f"--evaluate: there is no checkpoint in {mine}", "--resume none evaluates the model as it was"
        )
    name = "start"
    if chosen is not None:
        own = checkpoint.select(mine, "auto")
        elsewhere = own is None or chosen.resolve().parent != own.resolve().parent
        # Checkpoints of the run and of the try have the same names.
        name = chosen.name + (f"-{blake3(str(chosen.resolve()).encode()).hexdigest(4)}" if elsewhere else "")
    run = config.run.model_copy(update={"out_dir": mine / "evaluate" / name})
    # A tracker's history is the run's, which stays as it was.
    monitor = config.monitor.model_copy(update={"wandb": "off", "mlflow": ""})
    named = str(chosen.resolve()) if chosen else "none"
    return config.model_copy(update={"run": run, "monitor": monitor}), named


def refuse_no_evaluation(prompts: PromptSource) -> None:
    """Raises `ConfigError` without held-out prompts."""
    if not prompts.evaluations:
        raise ConfigError(
            "--evaluate: the run has no held-out prompts (eval.prompts = 0, no eval.sets)",
            "set eval.prompts, or name a file in eval.path or [[eval.sets]]",
        )


def nothing_but_evaluation(config: RunConfig, start: RunStart) -> tuple[RunConfig, RunStart]:
    """A run that ends where it starts, and owes its evaluation."""
    run = config.run.model_copy(update={"steps": start.step})
    return config.model_copy(update={"run": run}), replace(start, owes_evaluation=True)


def ended_line(signal_name: str, saved: Path | None) -> str:
    """What is said last of a run that a signal ended. `saved`: its newest checkpoint."""
    if signal_name != "SIGINT":
        return f"{signal_name}: the trainer ends; the run can be resumed"
    if saved is None:
        return "stopped by Ctrl-C before the first step was done: there is nothing to go on from"
    return f"stopped by Ctrl-C; saved as {saved}: the same command goes on from there"


def group_filter(config: RunConfig) -> GroupFilter:
    data = config.data
    return GroupFilter(data.filter_min_spread, data.filter_mean_min, data.filter_mean_max)


def _runner(reward: RewardSection) -> RewardPool:
    return open_pool(reward)


def refuse_rows(reward: RewardSection, prompts: PromptSource) -> None:
    """Raises `ConfigError` where the run's prompts lack a column that its reward function compares with."""
    for task in (*prompts.take(0, 1), *(one.prompts[0] for one in prompts.evaluations)):
        refuse_missing(reward, task.meta)


def layers(options: argparse.Namespace) -> list[str]:
    """run.toml and what is laid over it, as other commands take them."""
    return [
        str(options.config),
        *(f"--over={path}" for path in options.over),
        *(f"--set={one}" for one in options.set),
    ]


def begin(
    config: RunConfig,
    spec: messages.EngineSpec,
    ranks: Ranks,
    source: LocalSource | WeightServer,
    stack: ExitStack,
    resume: str,
    data: str,
) -> tuple[RunStart, TrainerRun]:
    """Load a checkpoint and open the run from it. "auto" goes back to the newest one that the ledger knows.

    An older ledger that was restored ends before the newest checkpoints: steps that it does not have cannot be gone on from without
    leaving their samples unaccounted. Raises `ConfigError` where no checkpoint is old enough.
    """
    job, again = slurm_job(), int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    if resume != "auto" and again and (latest := checkpoint.own(config.run.out_dir, job)) is not None:
        print(
            f"--resume {resume} was for the first start of job {job}: it goes on from {latest.name}",
            flush=True,
        )
        resume = "auto"
    chosen = resume not in ("auto", "none")
    start = restore(config, ranks, checkpoint.select(config.run.out_dir, resume), data, chosen)
    while True:
        try:
            return start, open_run(config, spec, start, source, stack)
        except CheckpointAhead as ahead:
            older = checkpoint.newest(config.run.out_dir, ahead.last_step) if resume == "auto" else None
            if older is None:
                raise ConfigError(
                    f"{ahead.cause}, and {config.run.out_dir} has no checkpoint that old",
                    "restore a newer backup of the ledger, or go on from here as another run: another run.name, with --resume DIR",
                ) from ahead
            print(f"{ahead.cause}: going back to {older.name}", flush=True)
            start = restore(config, ranks, older, data, chosen)


def check_reach(config: RunConfig, daemon_host: str, this_host: str) -> None:
    """Raises `ConfigError` when engines cannot pull weights: with a daemon elsewhere engines are elsewhere too, and loopback is not."""
    weights = config.weights
    for key, name in (("listen", weights.listen), ("advertise", weights.advertise)):
        if daemon_host != this_host and is_loopback(name):
            raise ConfigError(
                f'weights.{key} = "{name}" is reached from {this_host} alone, and the daemon is on {daemon_host}: engines could not pull',
                'set weights.listen = "0.0.0.0" in run.toml'
                + (
                    ", and weights.advertise to this host's name or leave it out"
                    if key == "advertise"
                    else ""
                ),
            )


def open_run(
    config: RunConfig,
    spec: messages.EngineSpec,
    start: RunStart,
    source: LocalSource | WeightServer,
    stack: ExitStack,
) -> TrainerRun:
    if isinstance(source, LocalSource):
        if ahead := config.algorithm.max_off_policy_steps:
            print(
                f"algorithm.max_off_policy_steps = {ahead} does nothing in a try: its engine and its trainer take turns, so every step is "
                "on policy (staleness_mean 0)",
                flush=True,
            )
        local_run = LocalRun(spec, source, config.run.seed, local_ledger(config, spec, start))
        stack.callback(local_run.close)
        return local_run
    check_reach(config, keys.read_rendezvous(config.run.state_dir).host, socket.gethostname())
    client = stack.enter_context(Client.connect(config.run.state_dir, config.run.key))
    return client.open_run(
        config,
        engine=spec,
        tokenizer=str(config.model.path / "tokenizer.json"),
        resume_step=start.step,
        host=socket.gethostname(),
        job_id=slurm_job(),
    )


def local_ledger(config: RunConfig, spec: messages.EngineSpec, start: RunStart) -> Ledger | None:
    """What a local try is recorded in, for people to read; None, aloud, where there can be none."""
    from scavenger.ledger.local_run import LocalLedger  # SQL's library, which no other mode needs

    try:
        return LocalLedger(
            config.run.out_dir,
            config.run.name,
            seed=config.run.seed,
            config=config.model_dump_json(),
            engine=msgspec.json.encode(spec).decode(),
            tokenizer=str(config.model.path / "tokenizer.json"),
            resume_step=start.step,
            host=socket.gethostname(),
            say=functools.partial(print, flush=True),
        )
    except (LedgerError, OSError) as error:
        print(f"nothing of this try can be kept for `scavenger samples`: {error}", flush=True)
        return None


def close_failed(run: TrainerRun, error: BaseException) -> None:
    """Tell the daemon why, so that engines leave; when even that fails, the first error still is the one reported."""
    state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    try:
        run.close_run(state, describe(error))
    except ScavengerError as also:
        print(f"the daemon was not told: {also}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parse(argv)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads())
    comm: Comm = Solo()
    code = 0
    try:
        config = configs.read_run(options.config, options.over, options.set)
        if options.local:  # a try neither meets the run itself, nor is taken for its beginning
            config = config.model_copy(
                update={"run": config.run.model_copy(update={"out_dir": config.run.out_dir / "local"})}
            )
            if options.evaluate:
                config, options.resume = evaluation_of(config, options.resume)
        else:
            reserved.refuse_none(config)
        comm = Solo() if options.local else connect(config.trainer.idle_poll_ms)
        if comm.rank == 0:
            code = lead(config, comm, options)
        else:
            # A job that Slurm ends leaves its run to be resumed. Were another rank gone before rank 0, rank 0 would take it for a
            # failure and close the run; so rank 0 goes first, and its launcher ends the rest.
            ignore()
            with ExitStack() as stack:
                learner, here, ending = make_learner(config, comm), watched(config, comm, stack), Ending()
                source = stack.enter_context(weights_source(config, comm, ending))
                publisher = Publisher(source, spool_of(config), stop_tokenizer(config, comm))
                serve(comm, learner, publisher, here, ending.check)
        disconnect()
    except ScavengerError as error:
        return _ended(comm, error, f"error: {error}")
    except KeyboardInterrupt as error:
        if comm.size == 1:
            print("stopped by Ctrl-C", file=sys.stderr, flush=True)
            return SIGINT_EXIT
        return _ended(comm, error, traceback.format_exc())
    except BaseException as error:  # noqa: BLE001  reported whole; other ranks may wait in a collective, so the job must end
        return _ended(comm, error, traceback.format_exc())
    return code


def _ended(comm: Comm, error: BaseException, text: str) -> int:
    print(text, file=sys.stderr, flush=True)
    code = error.exit_code if isinstance(error, ScavengerError) else 1
    code = STALE_EXIT if isinstance(error, StaleAttempt) else code
    if comm.size > 1:
        comm.abort(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
