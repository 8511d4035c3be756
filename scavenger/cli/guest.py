"""`scavenger guest`: the owner of an inference service lets one rollout engine use what the service's objective leaves.

Boundary: one subcommand, a step of the service's own job. Owns the arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scavenger.cli.options import EngineName
from scavenger.errors import ConfigError


def guest(
    service_url: Annotated[
        str, typer.Option("--service", help='the service\'s address, as in "http://127.0.0.1:8000"')
    ],
    objective: Annotated[
        str, typer.Option("--objective", help='what the service promises: "ttft_p99=500ms tpot_p99=60ms"')
    ],
    daemon: Annotated[
        Path, typer.Option("--daemon", help="the site's public folder, or the daemon's state directory")
    ],
    key: Annotated[
        Path, typer.Option("--key", help="the key pair that its admin gave (scavenger keys guest)")
    ],
    engine: Annotated[EngineName, typer.Option("--engine", help="vllm, or reference")] = "vllm",
    most: Annotated[
        int, typer.Option("--most", min=1, help="samples that it generates at once, at most")
    ] = 32,
    memory_share: Annotated[
        float,
        typer.Option("--memory-share", min=0.0, max=1.0, help="of the GPU's memory; 0: what the run says"),
    ] = 0.0,
    poll_s: Annotated[float, typer.Option("--poll", min=0.1, help="seconds between two readings")] = 1.0,
    free_within_s: Annotated[
        float, typer.Option("--free-within", min=0.1, help="seconds in which a cut frees the memory")
    ] = 10.0,
    nice: Annotated[
        int,
        typer.Option("--nice", min=0, max=19, help="of the engine's process: the service's own comes first"),
    ] = 10,
    pull_mb_per_s: Annotated[
        float,
        typer.Option("--pull-mb-per-s", min=0.0, help="of weights that it fetches, in 10^6 bytes; 0: any"),
    ] = 0.0,
) -> None:
    """Host one rollout engine beside an inference service, asleep unless the service has slack."""
    from scavenger.guest import service
    from scavenger.guest.host import GuestHost, HostOptions
    from scavenger.policy.serving import ServingRules, objective_of
    from scavenger.protocol import keys
    from scavenger.protocol.messages import GUEST_INTENT

    pair = keys.read_keypair(key)
    if not pair.run or not pair.intent.startswith(GUEST_INTENT):
        raise ConfigError(
            f"{key} is no guest's key",
            "ask the site's admin for one: scavenger keys guest NAME --run RUN --out FILE",
        )
    options = HostOptions(
        url=service.metrics_url(service_url),
        objective=objective_of(objective),
        folder=daemon,
        key=key,
        run=pair.run,
        engine=engine,
        memory_share=memory_share,
        poll_s=poll_s,
        free_within_s=free_within_s,
        nice=nice,
        pull_mb_per_s=pull_mb_per_s,
        rules=ServingRules(most=most),
    )
    raise typer.Exit(GuestHost(options).run())
