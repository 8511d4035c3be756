"""`scavenger otel`: train steps as OpenTelemetry traces, to a collector. Argument parsing and the wait for the next step.

Boundary: one subcommand; what it sends needs parts that other commands do not load.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from scavenger import config
from scavenger.cli.options import DEFAULT_CONFIG, ConfigOption, number
from scavenger.errors import ConfigError

if TYPE_CHECKING:
    from scavenger.observe import traces


def otel(
    run: Annotated[str, typer.Argument(help="the run's name")],
    config_path: ConfigOption = DEFAULT_CONFIG,
    endpoint: Annotated[
        str,
        typer.Option(help="the collector, as http://127.0.0.1:4318; default: OTEL_EXPORTER_OTLP_ENDPOINT"),
    ] = "",
    step: Annotated[int | None, typer.Option(min=1, help="only this step")] = None,
    after: Annotated[int, typer.Option(min=0, help="steps beyond this one")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="go on with each step that is committed")] = False,
    interval: Annotated[float, number("--interval", "seconds between polls, with --follow", least=1.0)] = 5.0,
) -> None:
    """Send a run's committed steps to an OpenTelemetry collector: a trace a step, a span each sample and each of its leases.

    Ids are made of the ledger's: a step that is sent again has the same, one that a later attempt generated again has others.
    Reads the ledger only. Needs the extra `otel`.
    """
    if step is not None and (follow or after):
        raise ConfigError("--step is one step", "leave --follow and --after out")
    from scavenger.observe import traces

    try:
        from scavenger.observe.otlp import Collector
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError("opentelemetry is not installed", "pip install 'scavenger[otel]'") from error
    url = config.read_daemon(config_path).ledger_url
    with Collector(endpoint) as collector:
        done = after if step is None else step - 1
        while True:
            found = _read(url, run, done, only=step)
            for done, spans in found:
                cut = spans[0].attributes.get(traces.CUT)
                print(
                    f"step {done}: {collector.send(spans)} spans, trace {spans[0].trace_id.hex()}"
                    + (f" (left out: {cut})" if cut else ""),
                    flush=True,
                )
            if step is not None or not (found or follow):
                return
            if not found:
                time.sleep(interval)


def _read(url: str, name: str, after: int, only: int | None) -> list[tuple[int, list[traces.Span]]]:
    """(step, its spans) of the first step beyond `after`, if there is one. Raises `LedgerError`."""
    from scavenger.ledger.read.reader import connected
    from scavenger.observe import traces

    with connected(url) as connection:
        found = traces.find(connection, name)
        steps = [only] if only is not None else traces.committed(connection, found, after)[:1]
        return [(one, traces.read(connection, found, one)) for one in steps]
