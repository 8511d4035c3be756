"""The `scavenger simulate` commands: argument parsing and printing. Each calls one function of the part that does the work.

`scavenger simulate ...` without a command is `scavenger simulate site ...`, the question that a site asks; with a run.toml, `run ...`.

`scavenger simulate replay`: argument parsing and printing. It calls `scavenger.simulate.replay.replay`, which plays the run.

Boundary: one subcommand.
"""

from __future__ import annotations

import itertools
import sys
import time
from datetime import datetime, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from scavenger.cli.options import DEFAULT_CONFIG, ConfigOption, PolicyName, number, removed
from scavenger.cli.simulate_run import run_command
from scavenger.errors import ConfigError, LedgerError
from scavenger.simulate.sacct import COMMAND, NODES_COMMAND

if TYPE_CHECKING:
    from scavenger.policy.history import RunHistory


def replay_command(
    ledger: Annotated[
        str,
        typer.Argument(metavar="LEDGER", help="an SQLite file, or the URL in daemon.ledger; it is only read"),
    ],
    run: Annotated[
        str, typer.Option("--run", help="the run's name; not needed where the ledger has one run")
    ] = "",
    policy: Annotated[
        PolicyName | None,
        typer.Option("--policy", help="predictive or standard; default: the one that it ran under"),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=0, help="of the trainer; 0: as a deterministic run's steps tell")
    ] = 0,
) -> None:
    """Play a run of the past again from its ledger: its step times as the simulator has them, beside what they were.

    Machines are fitted to every other step; the error is that of the steps in between.
    """
    from scavenger.cli import tables
    from scavenger.simulate.replay import replay as replay_text
    from scavenger.simulate.replay.replay import replay

    with tables.busy(f"reading {ledger}"):
        run_history = _read(ledger, run)
    with tables.busy(f"playing {len(run_history.steps)} steps"):
        found = replay(run_history, policy or "", ranks)
    console = tables.console()
    console.print(f"run {run_history.name}, policy {found.policy}", style="bold", markup=False)
    columns, cells = replay_text.steps(found)
    tables.print_table(console, columns, cells)
    tables.print_rows(console, replay_text.rows(found))


def _read(ledger: str, run: str) -> RunHistory:
    from scavenger.ledger import store
    from scavenger.ledger.read import history
    from scavenger.ledger.read.reader import rows

    engine = store.open_readonly(
        ledger if "://" in ledger else f"sqlite:///{Path(ledger).absolute()}", store.MAINTENANCE_S
    )
    try:
        names = [name for (name,) in rows(engine, "SELECT DISTINCT name FROM runs ORDER BY name").rows]
        if not run and len(names) != 1:
            raise LedgerError(
                f"the ledger has {len(names)} runs: {', '.join(names) or 'none'}", "name one with --run"
            )
        return history.read(engine, run or names[0])
    finally:
        engine.dispose()


if TYPE_CHECKING:
    from scavenger.config import DaemonConfig
    from scavenger.simulate.survey.survey import Observed, Question

DEFAULT_COMMAND, RUN_COMMAND = "site", "run"
HELP = f"""What would idle GPUs give here, and what would others notice? Reads only.

From the site's accounting, as a user who may see all jobs. Make the dump with

\b
{COMMAND}
{NODES_COMMAND}

and ask with

\b
scavenger simulate --sacct dump.txt --nodes nodes.txt --model Qwen3-8B --gpu H100

or poll the cluster as it is now (`--live`), or read a trace (`--trace`). To play a training run over a trace or a dump, policy by
policy: `scavenger simulate run --help`. To play a run of the past again: `scavenger simulate replay --help`. Constants of an engine come
from measurements: `scavenger simulate calibrate --help`. What each figure means: docs/simulate.md.
"""


class SiteByDefault(TyperGroup):
    """Options without a command are those of `site`; with a run's file, those of `run`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # click types ctx as its own Context
        if not args or args[0] not in self.commands:
            args = [_default(args), *(args or ["--help"])]
        return super().parse_args(ctx, args)


def _default(args: list[str]) -> str:
    """A run's file among the arguments asks for the run, whatever stands before it; else it is the site that is asked about."""
    files = (arg for before, arg in itertools.pairwise(["", *args]) if not before.startswith("-"))
    return (
        RUN_COMMAND
        if any(arg.endswith(".toml") and not arg.startswith("-") for arg in files)
        else DEFAULT_COMMAND
    )


class PlainHelp(TyperCommand):
    """Help without boxes: commands in it stay whole lines, to be copied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"rich_markup_mode": None}))


app = typer.Typer(
    cls=SiteByDefault,
    rich_markup_mode=None,
    help="What idle GPUs would give: from accounting, live, or a trace.",
)

app.command(RUN_COMMAND, no_args_is_help=True)(run_command)
app.command("replay", no_args_is_help=True)(replay_command)

Model = Annotated[
    str, typer.Option("--model", help="the model that engines would serve: Qwen3-8B, Qwen3-14B or Qwen3-32B")
]
Gpu = Annotated[str, typer.Option("--gpu", help="the GPU: H100, H200 or A100")]
Gpus = Annotated[int, typer.Option("--gpus-per-engine", min=1, help="GPUs of one engine, on one node")]


@app.command(DEFAULT_COMMAND, cls=PlainHelp, help=HELP)
def site_command(
    sacct: Annotated[
        Path | None, typer.Option("--sacct", help="the dump of accounting; .gz is read too")
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option("--nodes", help="the nodes, for those that were always idle")
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="one poll of the cluster that this host belongs to; changes nothing"),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="a trace of idle GPUs, jobs or spot instances (docs/simulate.md)"),
    ] = None,
    source: Annotated[str, typer.Option("--source", help="of a spot trace: which instances")] = "",
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", min=1, max=1024, help="of a trace: GPUs of a node or instance")
    ] = 8,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore-partition",
            help="its jobs' GPUs count as idle, as an existing harvest partition's do; repeatable",
        ),
    ] = None,
    model: Model = "Qwen3-8B",
    gpu: Gpu = "H100",
    gpus: Gpus = 1,
    engines: Annotated[
        int | None, typer.Option("--engines", min=1, help="engines at most; default: as many as fit")
    ] = None,
    cold_start_s: Annotated[
        float | None, number("--cold-start", "s until an engine works; default: by model", 0)
    ] = None,
    notice_s: Annotated[
        float, number("--notice", "s until the daemon sees an idle GPU (cluster.poll_interval_s)", 0)
    ] = 60.0,
    grace_s: Annotated[float, number("--grace", "the harvest partition's GraceTime, s", 0)] = 0.0,
    kill_wait_s: Annotated[float, number("--kill-wait", "slurm.conf's KillWait, s", 0)] = 30.0,
    message_timeout_s: Annotated[
        float, number("--message-timeout", "slurm.conf's MessageTimeout, s", 0)
    ] = 10.0,
    sched_interval: Annotated[
        str | None, removed("--sched-interval", "the bound no longer depends on it; leave it out")
    ] = None,
    reserved_gpus: Annotated[
        int,
        typer.Option("--reserved-gpus", min=0, help="of the run whose speed-up is played; 0: none, at once"),
    ] = 8,
    timezone: Annotated[
        str,
        typer.Option("--timezone", help="for the hours of the day, as Europe/Berlin; default: this host's"),
    ] = "",
    partition: Annotated[
        str,
        typer.Option(
            "--partition", help="the harvest partition: its nodes only; with --live it may be a planned one"
        ),
    ] = "",
    gpu_type: Annotated[
        str, typer.Option("--gpu-type", help="nodes with these GPUs only, as Slurm calls them (with --nodes)")
    ] = "",
    html: Annotated[
        Path | None, typer.Option("--html", help="write the report here too, one self-contained page")
    ] = None,
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    from scavenger.cli import tables

    if sum((sacct is not None, live, trace is not None)) != 1:
        raise typer.BadParameter("give one of --sacct, --live and --trace")
    if source and trace is None:
        raise typer.BadParameter("--source goes with --trace")
    tables.check_writable(html)
    if live:
        if html is not None:
            raise typer.BadParameter("--live has no report: one poll is no series")
        _decide_live(config_path, partition, gpus, engines)
        return
    from scavenger.simulate import presets
    from scavenger.simulate.survey.survey import Question
    from scavenger.simulate.survey.waits import Timing

    spec = presets.engine(model, gpu, gpus)
    timing = Timing(grace_s, kill_wait_s, message_timeout_s)
    cold_s = presets.COLD_CACHE.mean_s(spec.model.weight_bytes) if cold_start_s is None else cold_start_s
    only = (gpu_type, partition)
    observed = _observed(sacct, nodes, ignore or [], only, trace, source, gpus_per_node)
    _survey(
        observed,
        Question(spec, cold_s, notice_s, engines, timing, _zone(timezone, observed.since)),
        reserved_gpus,
        html,
    )


def _observed(
    sacct: Path | None,
    nodes: Path | None,
    ignore: list[str],
    only: tuple[str, str],
    trace: Path | None,
    source: str,
    gpus_per_node: int,
) -> Observed:
    from scavenger.cli import tables
    from scavenger.simulate.clock import Streams
    from scavenger.simulate.survey import sources

    if sacct is not None:
        with tables.busy(f"reading {sacct}"):
            return sources.read_sacct(sacct, nodes, ignore, time.time(), sources.Only(*only))
    assert trace is not None  # one of the two was given
    if nodes is not None or ignore or any(only):
        raise typer.BadParameter("--nodes, --ignore-partition, --partition and --gpu-type go with --sacct")
    return sources.read_trace(trace, gpus_per_node, source, Streams(0))


def _survey(observed: Observed, question: Question, reserved_gpus: int, html: Path | None) -> None:
    from scavenger.cli import tables
    from scavenger.simulate import play
    from scavenger.simulate.report import html as page
    from scavenger.simulate.survey import text
    from scavenger.simulate.survey import text as survey_text
    from scavenger.simulate.survey.sources import DOUBT
    from scavenger.simulate.survey.survey import survey

    with tables.busy("placing engines"):
        found = survey(observed, question)
    with tables.busy("playing a run over a few hours"):
        speed_up = (
            survey_text.NOT_ASKED if reserved_gpus < 1 else play.predict(observed, question, reserved_gpus)
        )
    console = tables.console()
    for note in observed.notes:
        if note.startswith(DOUBT):
            console.print(note, style="bold red", markup=False)
    console.print(survey_text.title(observed, question), style="bold", markup=False)
    tables.print_rows(console, survey_text.rows(found, speed_up))
    tables.print_hours(console, survey_text.hours(found.by_hour))
    for note in survey_text.notes(found, speed_up):
        console.print(f"note: {note}", markup=False)
    if html is not None:
        tables.write(html, page(text.of_survey(found, speed_up)))
        console.print(f"wrote {html}", markup=False)


def _decide_live(config_path: Path, partition: str, gpus: int, engines: int | None) -> None:
    from scavenger.cli import tables
    from scavenger.cluster import choose
    from scavenger.harvest.limits import StopState, rules_of
    from scavenger.harvest.track.tracker import Tracker
    from scavenger.simulate import live
    from scavenger.simulate import live as live_text

    _log_warnings_only()
    settings = _settings(config_path, partition)
    cluster = choose.backend(settings)
    try:
        info = choose.answer(cluster)
        view = cluster.view()
    finally:
        cluster.close()
    now = time.time()
    stop_state = StopState(lambda: settings)
    stop_state.poll()
    limits = stop_state.update_limits(view, info, Tracker(rules_of(settings, "", info.user)), 0.0, now)
    wish = live.EngineRequest(gpus, engines)
    found = live.poll(view, info, wish, limits, now, settings.harvest.qos)
    console = tables.console()
    seen = datetime.fromtimestamp(view.observed_at).astimezone()
    console.print(f"{found.cluster}, {seen:%Y-%m-%d %H:%M:%S %Z}", style="bold", markup=False)
    tables.print_rows(console, live_text.rows(found, wish))
    for note in live_text.notes(found, _configured(config_path)):
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _configured(path: Path) -> bool:
    """Whether there is a configuration, or should be one: a path that was given must exist."""
    from scavenger.config import layers

    return path != DEFAULT_CONFIG or layers.is_there(path)


def _log_warnings_only() -> None:
    import logging

    import structlog

    level = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=level, logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def _settings(path: Path, partition: str) -> DaemonConfig:
    """The daemon's configuration; where there is none yet, its defaults. `partition` goes before the file's."""
    from scavenger import config

    if _configured(path):
        settings = config.read_daemon(path)
    else:
        settings = config.DaemonConfig(daemon=config.DaemonSection(state_dir=Path()))
    if not partition:
        return settings
    return settings.model_copy(
        update={"harvest": settings.harvest.model_copy(update={"partition": partition})}
    )


@app.command("calibrate", no_args_is_help=True)
def calibrate_command(
    points: Annotated[
        Path, typer.Argument(help='JSON: [{"batch": 8, "context": 2048, "tokens_per_s": 900}, ...]')
    ],
    model: Model,
    gpu: Gpu,
    gpus: Gpus = 1,
    out: Annotated[Path | None, typer.Option("--out", help="write the constants here, as TOML")] = None,
) -> None:
    """Fit an engine's constants to measured tokens a second over batch and context."""
    from scavenger.cli import tables
    from scavenger.simulate import calibrate, presets
    from scavenger.simulate import calibrate as calibrate_text
    from scavenger.simulate import calibrate as constants

    spec = presets.engine(model, gpu, gpus)
    fit = calibrate.fit(spec, calibrate.read(points))
    console = tables.console()
    title, columns, cells = calibrate_text.residuals(spec, fit)
    console.print(title, style="bold", markup=False)
    tables.print_rows(console, calibrate_text.rows(spec, fit))
    tables.print_table(console, columns, cells)
    for note in fit.notes:
        console.print(f"note: {note}", markup=False)
    if out is not None:
        if fit.rms_error > calibrate.USABLE_ERROR:
            raise ConfigError(
                f"{out} is not written: an error of {fit.rms_error:.0%} is no fit",
                "measure again, at least 10 points",
            )
        tables.write(out, constants.dump(spec, fit))
        console.print(f"wrote {out}", markup=False)


def _zone(name: str, since: float | None) -> tzinfo:
    """The zone of this name; without one this host's offset from UTC when the dump begins; UTC for a trace without dates."""
    from datetime import UTC
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    if not name:
        local = None if since is None else datetime.fromtimestamp(since).astimezone().tzinfo
        return local or UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ConfigError(
            f"no time zone {name!r} is known here", "give one as Europe/Berlin, or install tzdata"
        ) from error
