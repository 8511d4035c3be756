"""The `scavenger keys` commands: changing keys while jobs run (docs/recovery.md). Each calls one function of `scavenger.protocol.keys`.

Boundary: one subcommand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scavenger import config
from scavenger.cli.options import DEFAULT_CONFIG, ConfigOption
from scavenger.errors import ConfigError
from scavenger.host.user import user_name
from scavenger.protocol import keys

app = typer.Typer(no_args_is_help=True, help="Change keys while jobs run.")

Name = Annotated[str, typer.Argument(help="the owner, as its file in keys/owners is called")]


@app.command("list")
def list_keys(config_path: ConfigOption = DEFAULT_CONFIG) -> None:
    """Who may connect, in which role, since when, and whose keys were retired. Public keys only."""
    for line in keys.shown(keys.listed(config.read_daemon(config_path).daemon.state_dir)):
        print(line)


@app.command("rotate-server")
def rotate_server(config_path: ConfigOption = DEFAULT_CONFIG) -> None:
    """Give the daemon a new key pair; it is in use from the daemon's next start, and peers that reconnect find it."""
    print(
        f"wrote {keys.rotate_server(config.read_daemon(config_path).daemon.state_dir)}; next: restart the daemon"
    )


@app.command("rotate-owner")
def rotate_owner(
    name: Annotated[str, typer.Argument(help="the owner, as its file in keys/owners is called")] = "",
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Give the owner of this state directory a new key pair; the old one is accepted until `retire`."""
    owner = name or user_name()
    written = keys.rotate_owner(config.read_daemon(config_path).daemon.state_dir, owner)
    print(f"wrote {written}; when no job uses the old key any more: scavenger keys retire {owner}")


@app.command("make")
def make(out: Annotated[Path, typer.Argument(help="a new file for the key pair, mode 0600")]) -> None:
    """Make a key pair, and print the public half: for `scavenger enroll --public` or `scavenger keys add --public`."""
    print(keys.make_new(out).public)


@app.command("add")
def add(
    name: Name,
    public: Annotated[str, typer.Option("--public", help="the public half of the owner's new key")],
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Accept a further key of an enrolled owner, who keeps the key file elsewhere."""
    print(f"wrote {keys.add_owner_key(config.read_daemon(config_path).daemon.state_dir, name, public)}")


@app.command("guest")
def guest(
    name: Annotated[str, typer.Argument(help="what the guest is called: its service, say")],
    run: Annotated[str, typer.Option("--run", help="the run whose samples it may generate")],
    out: Annotated[Path, typer.Option("--out", help="a new file for its key pair, mode 0600")],
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Make the key with which the owner of a service hosts one engine of a run (`scavenger guest`). Removing
    keys/guests/NAME.pub revokes it; the same name again renews it."""
    from scavenger.ledger import store
    from scavenger.ledger.read import reader

    site = config.read_daemon(config_path)
    engine = store.open_readonly(site.ledger_url)
    try:
        if reader.run_by_name(engine, run) is None:
            raise ConfigError(
                f"the ledger has no run called {run!r}", "`scavenger ledger report runs` lists them"
            )
    finally:
        engine.dispose()
    keys.invite_guest(site.daemon.state_dir, name, run, out)
    print(
        f"wrote {out}; give it to the service's owner: whoever has it reads samples and weights of run {run}"
    )


@app.command("cluster")
def cluster(
    name: Annotated[str, typer.Argument(help="what the cluster is called in ledger and status")],
    out: Annotated[Path, typer.Option("--out", help="a new file for its key pair, mode 0600")],
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Make the key of the harvester of a further cluster (`scavenger harvester`). Removing keys/clusters/NAME.pub
    revokes it; the same name again renews it."""
    site = config.read_daemon(config_path)
    keys.admit_cluster(site.daemon.state_dir, name, out)
    print(
        f"wrote {out}; give it to the cluster's admin: whoever has it is sent the keys of engines that start there"
    )
    if site.daemon.clusters_port is None:
        print("no harvester can dial in yet: set daemon.clusters_port, and restart the daemon")


@app.command("retire")
def retire(
    name: Name,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="the newest key too: none of the owner's may connect until another is added"
        ),
    ] = False,
    config_path: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Accept only the owner's newest key; sessions under older ones end within seconds. The runs stay the owner's. Exit code 2: there is
    no older key, so none was retired.

    With `--all` the owner is locked out at once: engines of its runs leave, its training job is refused and ends."""
    state_dir = config.read_daemon(config_path).daemon.state_dir
    if not everything:
        print(_retired(keys.retire_owner_keys(state_dir, name)))
        return
    count, back = keys.retire_all_owner_keys(state_dir, name)
    print(f"{_retired(count)}: no key of {name} is accepted now")
    print(
        "its sessions end within seconds: harvested engines of its runs leave, and its training job's next call is refused, which ends it"
    )
    print(f"its runs, completions and checkpoints stay {name}'s; to let {name} back: {back}")


def _retired(count: int) -> str:
    return f"{count} {'key' if count == 1 else 'keys'} retired"
