"""`scavenger simulate run.toml`: argument parsing and printing. It calls `scavenger.simulate.play`, which plays the run.

Boundary: one form of a subcommand, with arguments of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scavenger.cli.options import number
from scavenger.errors import ConfigError

if TYPE_CHECKING:
    from scavenger.simulate.decode import Efficiency, SimulatedEngine
    from scavenger.simulate.fleet import FleetTrace
    from scavenger.simulate.plan import RunAssumptions, SimulationPlan
    from scavenger.simulate.survey.survey import Observed

HOUR_S = 3600.0
USUAL = "colocated,disaggregated,ours"  # `play.USUAL`, which takes its time to import


def run_command(
    run_path: Annotated[
        Path, typer.Argument(metavar="RUN.TOML", help="the run; examples/site/run.toml shows one")
    ],
    reserved_gpus: Annotated[
        int, typer.Option("--reserved-gpus", min=1, help="GPUs that train: what its sbatch asks for")
    ] = 8,
    sacct: Annotated[
        Path | None,
        typer.Option("--sacct", help="over this dump of accounting (`scavenger simulate --help`)"),
    ] = None,
    nodes: Annotated[Path | None, typer.Option("--nodes", help="with --sacct: the nodes")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore-partition", help="with --sacct: its jobs' GPUs count as idle"),
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="over this trace (docs/simulate.md)")] = None,
    source: Annotated[str, typer.Option("--source", help="of a spot trace: which instances")] = "",
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", min=1, max=1024, help="of a trace: GPUs of a node or instance")
    ] = 8,
    start_h: Annotated[
        float, number("--from", "hours into the dump or trace at which the run begins", 0)
    ] = 0.0,
    policy: Annotated[
        str,
        typer.Option(
            "--policy", help=f"names with commas between, compared with the first; default: {USUAL}"
        ),
    ] = "",
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="optimizer steps, if the trace lasts so long")
    ] = 10,
    seeds: Annotated[
        int,
        typer.Option("--seeds", min=1, help="runs of each policy, with lengths and cold starts of their own"),
    ] = 3,
    model: Annotated[
        str, typer.Option("--model", help="a preset's name; default: the run's own model.path")
    ] = "",
    gpu: Annotated[str, typer.Option("--gpu", help="the GPU: H100, H200 or A100")] = "H100",
    constants: Annotated[
        Path | None, typer.Option("--constants", help="what `scavenger simulate calibrate --out` wrote")
    ] = None,
    sigma: Annotated[float, number("--sigma", "of answer lengths' logarithms")] = 0.8,
    capped_share: Annotated[
        float, number("--capped-share", "of answers that reach sampling.max_tokens")
    ] = 0.05,
    correlation: Annotated[float, number("--correlation", "of log lengths within a group")] = 0.5,
    drift: Annotated[
        float, number("--drift", "of log lengths from step to step: 0.01 is about 1 % longer each")
    ] = 0.0,
    lengths: Annotated[
        Path | None, typer.Option("--lengths", help="a CSV with a column output_tokens, for the lognormal")
    ] = None,
    lengths_source: Annotated[
        str, typer.Option("--lengths-source", help="with --lengths: rows of this source (a column)")
    ] = "",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="tokens of a prompt")] = 512,
    reserved_price: Annotated[float, number("--reserved-price", "dollars a reserved GPU-hour", 0.01)] = 10.47,
    harvested_price: Annotated[float, number("--harvested-price", "dollars a harvested GPU-hour", 0)] = 2.66,
    html: Annotated[
        Path | None, typer.Option("--html", help="write the report here too, one self-contained page")
    ] = None,
) -> None:
    """Play a run over a trace or a dump with one policy after the other, and compare them."""
    from scavenger.cli import tables
    from scavenger.simulate import comparison, play, presets
    from scavenger.simulate.plan import RunAssumptions, assumptions

    if (sacct is None) == (trace is None):
        raise typer.BadParameter("give one of --sacct and --trace")
    if trace is not None and (nodes is not None or ignore):
        raise typer.BadParameter("--nodes and --ignore-partition go with --sacct")
    if sacct is not None and source:
        raise typer.BadParameter("--source goes with --trace")
    if lengths is None and lengths_source:
        raise typer.BadParameter("--lengths-source goes with --lengths")
    tables.check_writable(html)
    names = play.checked_policy_names(
        [name.strip() for name in policy.split(",")] if policy else list(play.USUAL)
    )
    sampled, origin = _lengths(lengths, lengths_source)
    assumed = RunAssumptions(
        reserved_gpus, prompt_tokens, sigma, capped_share, correlation, drift, sampled, origin
    )
    plan = _plan(run_path, model, gpu, assumed)
    observed = _observed(sacct, nodes, ignore or [], trace, source, gpus_per_node)
    fleet = _from(observed.fleet, start_h)
    efficiency = _efficiency(constants, plan)
    results = tables.run_all(play.policy_runner(plan, fleet, efficiency, steps), names, seeds)
    summary = (*comparison.span(results, steps, presets.COLD_CACHE.mean_s(0.0)), *assumptions(plan, assumed))
    notes = (
        *summary,
        *play.assumed_of_machines(constants is not None),
        *_error_of(constants),
        *observed.notes,
    )
    prices = comparison.Prices(reserved_price, harvested_price)
    tables.print_comparison(
        tables.console(), results, prices, f"{plan.name}: {plan.summary()}; over {fleet.origin}", notes, html
    )


def _plan(path: Path, model: str, gpu: str, assumed: RunAssumptions) -> SimulationPlan:
    from scavenger import config
    from scavenger.simulate import presets
    from scavenger.simulate.plan import of_run, read_model

    run = config.read_run(path)
    return of_run(
        run, presets.model(model) if model else read_model(run.model.path), presets.gpu(gpu), assumed
    )


def _lengths(path: Path | None, source: str) -> tuple[tuple[int, ...], str]:
    """The lengths of a file, and where they are from."""
    from scavenger.simulate import lengths

    if path is None:
        return (), ""
    return lengths.read(path, source), f"{path.name}, source {source}" if source else path.name


def _observed(
    sacct: Path | None,
    nodes: Path | None,
    ignore: list[str],
    trace: Path | None,
    source: str,
    gpus_per_node: int,
) -> Observed:
    import time

    from scavenger.cli import tables
    from scavenger.simulate.clock import Streams
    from scavenger.simulate.survey import sources

    if trace is not None:
        return sources.read_trace(trace, gpus_per_node, source, Streams(0))
    assert sacct is not None  # one of the two was given
    with tables.busy(f"reading {sacct}"):
        return sources.read_sacct(sacct, nodes, ignore, time.time())


def _from(fleet: FleetTrace, start_h: float) -> FleetTrace:
    if start_h * HOUR_S >= fleet.end_s:
        raise ConfigError(
            f"{fleet.origin} ends before hour {start_h:g}", f"it has {fleet.end_s / HOUR_S:.1f} h"
        )
    return fleet.segment(start_h * HOUR_S, fleet.end_s - start_h * HOUR_S) if start_h else fleet


def _efficiency(path: Path | None, plan: SimulationPlan) -> Efficiency:
    from scavenger.simulate import calibrate as constants
    from scavenger.simulate import presets

    if path is None:
        return presets.VLLM_H100
    spec = _spec(plan)
    try:
        return constants.load(path.read_text(encoding="utf-8"), spec)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.cause}", error.remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", "`scavenger simulate calibrate` writes one"
        ) from error


def _error_of(path: Path | None) -> tuple[str, ...]:
    from scavenger.simulate import calibrate as constants

    error = None if path is None else constants.error_of(path.read_text(encoding="utf-8"))
    return (
        ()
        if error is None
        else (f"the engines' constants were fitted with an error of {error:.1%} (root mean square)",)
    )


def _spec(plan: SimulationPlan) -> SimulatedEngine:
    from scavenger.simulate import presets
    from scavenger.simulate.decode import SimulatedEngine

    return SimulatedEngine(plan.model, plan.gpu, presets.UNCALIBRATED, plan.gpus_per_engine)
