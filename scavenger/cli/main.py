"""The `scavenger` command: argument parsing and printing. Each command calls one function of the part that does the work.

Boundary: the command line; `scavenger/__main__.py` only calls it.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

from scavenger import __version__, config
from scavenger.cli import (
    checkpoint,
    doctor,
    drain,
    environment_worker,
    gateway,
    guest,
    guest_proxy,
    harvester,
    init,
    join,
    ledger,
    otel,
    show_status,
    simulate,
    slurm_proxy,
    top,
    web,
    weights,
)
from scavenger.cli import config as cli_config
from scavenger.cli import keys as cli_keys
from scavenger.cli.options import DEFAULT_CONFIG, ConfigOption, OverOption, PolicyName, SetOption, removed
from scavenger.errors import ConfigError, ScavengerError
from scavenger.host import storage
from scavenger.printable import printable
from scavenger.protocol import keys


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Idle GPUs of a Slurm cluster for LLM rollouts.",
)
app.add_typer(ledger.app, name="ledger")
app.add_typer(cli_config.app, name="config")
app.add_typer(cli_keys.app, name="keys")
app.add_typer(simulate.app, name="simulate")
app.add_typer(weights.app, name="weights")
app.command()(doctor.doctor)
app.add_typer(checkpoint.app, name="checkpoint")
app.command()(init.init)
app.command()(join.join)
app.command()(drain.drain)
app.command()(gateway.gateway)
app.command()(environment_worker.environment_worker)
app.command()(guest.guest)
app.command()(guest_proxy.guest_proxy)
app.command()(slurm_proxy.slurm_proxy)
app.command()(harvester.harvester)
app.command()(top.top)
app.command("status")(show_status.show_status)
app.command()(web.web)
app.command()(otel.otel)

err = Console(stderr=True, soft_wrap=True, highlight=False)


def main() -> None:
    """Entry point: errors that a user can act on are printed without a traceback."""
    try:
        app()
    except ScavengerError as error:
        _end(error)
    except OSError as error:
        full = storage.not_written(error)
        if full is None:
            raise
        _end(full)


def _end(error: ScavengerError) -> NoReturn:
    err.print(printable(f"scavenger: {error}"), markup=False)
    sys.exit(error.exit_code)


@app.callback()
def options(
    shown: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Reinforcement learning on a Slurm site's idle GPUs."""


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("demo-out"),
    backend: Annotated[Literal["auto", "slurm", "local"], typer.Option(help="auto, slurm or local")] = "auto",
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps")] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="of the data's order, the samples and the preemptions")
    ] = 0,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="a short run twice, undisturbed and preempted: rewards step by step"),
    ] = False,
    agent: Annotated[
        bool,
        typer.Option(
            "--agent", help="episodes of several turns with a tool; environment workers are lost too"
        ),
    ] = False,
    preempt_every_s: Annotated[
        float | None, typer.Option(min=0, help="mean seconds between other users' jobs; 0 = none")
    ] = None,
    policy: Annotated[PolicyName, typer.Option(help="router.policy: predictive or standard")] = "predictive",
) -> None:
    """Run everything on this machine: a private Slurm, preempted engines, a training job that learns."""
    import dataclasses

    from scavenger.demo import compare as comparison
    from scavenger.demo import session

    if compare and agent:
        raise typer.BadParameter("--compare is of single completions: leave out --agent")
    options = session.DemoOptions(out, agent=agent)
    settings = session.AGENT_SETTINGS if agent else options.settings
    chosen = dataclasses.replace(settings, seed=seed, steps=steps or settings.steps)
    every = options.preempt_every_s if preempt_every_s is None else preempt_every_s
    options = dataclasses.replace(
        options, backend=backend, policy=policy, settings=chosen, preempt_every_s=every
    )
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a batch system's SIGTERM is a Ctrl-C, also where SIGINT was inherited as ignored
        signal.signal(number, signal.default_int_handler)
    try:
        play = comparison.run if compare else session.run
        sys.exit(play(options, Console(highlight=False)))
    except KeyboardInterrupt:
        err.print("stopped; nothing is left running")
        sys.exit(130)


@app.command()
def enroll(
    name: Annotated[str, typer.Argument(help="who this is")],
    public: Annotated[str, typer.Option("--public", help="the public half of the owner's key")],
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Allow a public key to own runs; takes effect within seconds. Remove the file it names to revoke."""
    print(f"wrote {keys.enroll(config.read_daemon(config_path).daemon.state_dir, name, public)}")


@app.command()
def daemon(
    config_path: ConfigOption = DEFAULT_CONFIG,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="fence a daemon that is at work, and go on in its place")
    ] = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="wait until the daemon that is at work ends or falls silent")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what it would decide; submit and write nothing")
    ] = False,
    polls: Annotated[
        int, typer.Option(min=0, help="with --dry-run: end after so many polls; 0 = when stopped")
    ] = 0,
    looks: Annotated[str | None, removed("--looks", "write --polls")] = None,
    carry: Annotated[
        bool,
        typer.Option("--carry", help="take up the ledger that the last daemon left in the state directory"),
    ] = False,
    for_run: Annotated[
        bool, typer.Option("--for-run", help="of one run: at the end its jobs are cancelled; implies --carry")
    ] = False,
    new_ledger: Annotated[
        bool,
        typer.Option(
            "--new-ledger",
            help="the state directory takes the ledger that is named now, and leaves the one it had",
        ),
    ] = False,
    over: OverOption = None,
    sets: SetOption = None,
    die_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Watch the cluster, harvest idle GPUs, route samples; until SIGTERM. Refused while another daemon has the ledger."""
    from scavenger.cluster import choose
    from scavenger.daemon import ledger_handoff
    from scavenger.daemon import main as daemons
    from scavenger.daemon.systemd import Notifier
    from scavenger.daemon.takeover import Manner
    from scavenger.host import descriptors
    from scavenger.observe import logs

    if take_over and standby:
        raise typer.BadParameter("--take-over and --standby contradict each other")
    manner = Manner.TAKE_OVER if take_over else Manner.STAND_BY if standby else Manner.ASK

    logs.configure(os.environ)
    settings = config.read_daemon(config_path, over or (), sets or ())
    descriptors.raise_limit()
    notifier = Notifier(os.environ, os.getpid())
    for name in (
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "WATCHDOG_PID",
    ):  # ours: no command that we run speaks for the daemon
        os.environ.pop(name, None)
    # At a terminal a hang-up ends the daemon, as it does every program there.
    reread = (
        None if os.isatty(0) else functools.partial(config.read_daemon, config_path, over or (), sets or ())
    )
    if die_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True, name="stdin").start()
    cluster = choose.backend(settings)
    choose.preflight(settings, cluster)
    if dry_run:
        from scavenger.daemon import dry_run as dry

        dry.run(settings, cluster, functools.partial(print, flush=True), polls=polls)
        return
    carried = carry or for_run
    if carried:
        ledger_handoff.take_up(settings)
    try:
        granted = daemons.run(
            settings,
            cluster,
            manner,
            reread=reread,
            notifier=notifier,
            cancel_at_end=for_run,
            new_ledger=new_ledger,
        )
    finally:
        cluster.close()
    if carried and granted is not None:
        ledger_handoff.put_down(settings, granted)


@app.command()
def check_config(
    config_path: Annotated[
        Path, typer.Argument(help="the scavenger.toml", envvar="SCAVENGER_CONFIG")
    ] = DEFAULT_CONFIG,
    over: OverOption = None,
    sets: SetOption = None,
) -> None:
    """Say what a scavenger.toml means and whether a daemon could start with it. Writes nothing, submits nothing."""
    from scavenger.daemon import check_config as dry_check

    said, fine = dry_check.report(config_path, config.read_daemon(config_path, over or (), sets or ()))
    print("\n".join(said))
    if not fine:
        raise typer.Exit(ConfigError.exit_code)


def _end_with_stdin() -> None:
    """End as on SIGTERM when stdin ends: the process that started us is gone."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _sort_keys(begun: str) -> list[str]:
    """What Tab offers for `--sort`."""
    from scavenger.cli.samples import KEYS

    return [word for key in KEYS for word in (key, f"-{key}") if word.startswith(begun)]


@app.command()
def samples(
    run: Annotated[
        str, typer.Argument(help="the run's name, or its run.toml; default: the newest run of the ledger")
    ] = "",
    step: Annotated[
        str, typer.Option(help="one, such as 3, or a range, such as 3-7; default: the newest")
    ] = "",
    group: Annotated[int | None, typer.Option(help="only this group (its prompt's index)")] = None,
    purpose: Annotated[Literal["train", "eval"], typer.Option(help="train or eval")] = "train",
    jsonl: Annotated[bool, typer.Option("--jsonl", help="one JSON object a line")] = False,
    sort: Annotated[
        str,
        typer.Option(
            help="reward, advantage, length, finish or moves; -reward: the greatest first",
            autocompletion=_sort_keys,
        ),
    ] = "",
    best: Annotated[bool, typer.Option("--best", help="as --sort=-reward")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="as --sort=reward")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="so many at most")] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="only rewards such as '>=0.5'; may be repeated")
    ] = None,
    length: Annotated[
        list[str] | None, typer.Option(help="only lengths (tokens) such as '>100'; may be repeated")
    ] = None,
    moves: Annotated[list[str] | None, typer.Option(help="only numbers of moves such as '>0'")] = None,
    finish: Annotated[
        Literal["stop", "length"] | None, typer.Option(help="only this finish reason: stop or length")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="of RUN, a run.toml: what `python -m trainer --local` kept")
    ] = False,
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Show samples of a step, or of several: prompt, completion, reward, advantage, finish reason, moves and engines."""
    from scavenger.cli import samples as shown

    if best + worst + bool(sort) > 1:
        raise typer.BadParameter("--best, --worst and --sort exclude one another")
    chosen = shown.Choice(
        sort="-reward" if best else "reward" if worst else sort,
        limit=limit,
        finish=finish or "",
        tests={"reward": reward or (), "length": length or (), "moves": moves or ()},
    )
    name, path = shown.place(run, config_path, local=local)
    url = config.read_daemon(path).ledger_url
    steps = shown.steps_of(step) if step else None
    for line in shown.lines(url, name, steps, group, purpose, jsonl=jsonl, choice=chosen):
        print(line)
