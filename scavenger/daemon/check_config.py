"""What a scavenger.toml means and whether a daemon could start with it: `scavenger check-config`. Changes and submits nothing.

Boundary: one subcommand.

Owns the order of the checks and their words; each asks the part that the daemon itself would ask. One that fails does not hide the next.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from scavenger.cluster import choose
from scavenger.cluster.proxy import client
from scavenger.config import DaemonConfig
from scavenger.errors import LedgerError, ScavengerError, StartFinding
from scavenger.harvest.decide.decide import Submit
from scavenger.harvest.execute.job_script import job_spec, read_template
from scavenger.host.user import user_name
from scavenger.ledger import queries, schema, store
from scavenger.ledger.read import reader
from scavenger.protocol import keys


def _owners(config: DaemonConfig, user: str) -> str:
    """Who may own runs, and what these may hold. Pure."""
    public, owners = config.daemon.public_dir, config.owners
    who = [f"users {', '.join(owners.users)}"] if owners.users else []
    who += [f"members of {', '.join(owners.groups)}"] if owners.groups else []
    if public is None or not who:
        lacks = (
            "daemon.public_dir is not set" if public is None else "owners.users and owners.groups are empty"
        )
        return f"owners    {user} alone may train, and whom `scavenger enroll` names: {lacks}"
    most = "any number of GPUs" if owners.max_gpus is None else f"{owners.max_gpus} GPUs at most"
    single = "".join(f", {name} {count}" for name, count in sorted(owners.max_gpus_of.items()))
    return f"owners    {' and '.join(who)} may train, by `scavenger join {public}`; engines of each hold {most}{single}"


def limits(config: DaemonConfig) -> list[tuple[str, str, str]]:
    """All that bounds what the daemon takes, asks and keeps: (key, value, what it bounds). Pure; docs/admin.md has the same table."""
    d, h, c, o = config.daemon, config.harvest, config.cluster, config.owners

    def of(value: object, unit: str = "") -> str:
        return (
            "no limit"
            if value is None
            else f"{value:,}{unit}"
            if isinstance(value, int)
            else f"{value}{unit}"
        )

    def each(table: Mapping[str, object]) -> str:
        return ", ".join(f"{name} {_listed(value)}" for name, value in sorted(table.items())) or "none"

    hours = [
        f"{one.days} {one.hours} h: "
        + (
            ", ".join(
                f"{key} {value}"
                for key, value in (("max_engines", one.max_engines), ("max_gpus", one.max_gpus))
                if value is not None
            )
            or "nothing else"
        )
        for one in h.schedule
    ]
    dark = [f"{one.start} to {one.end}{f' ({one.reason})' if one.reason else ''}" for one in h.blackout]
    return [
        ("harvest.max_engines", of(h.max_engines), "jobs of ours, pending and leaving ones included"),
        ("harvest.max_gpus", of(h.max_gpus), "GPUs that these hold or wait for"),
        ("harvest.max_pending", of(h.max_pending), "of them, those that wait in the queue"),
        (
            "harvest.max_environment_workers",
            of(h.max_environment_workers),
            "environment workers in jobs, which take no GPU",
        ),
        ("harvest.standby_jobs", of(h.standby_jobs), "jobs more that wait to be told where to begin"),
        ("harvest.max_gpus_per_node", of(h.max_gpus_per_node), "GPUs of ours on one node"),
        ("harvest.max_nodes_per_engine", of(h.max_nodes_per_engine), "nodes of one engine, in one job"),
        (
            "harvest.max_gpus_by_partition",
            each(h.max_gpus_by_partition),
            "GPUs of ours on other partitions' nodes",
        ),
        ("harvest.max_gpus_by_type", each(h.max_gpus_by_type), "GPUs of ours of a GRES type"),
        (
            "harvest.max_gpus_per_user",
            of(h.max_gpus_per_user),
            "GPUs of all jobs of our Unix user in the partition",
        ),
        ("owners.max_gpus", of(o.max_gpus), "GPUs of engines of one owner's runs"),
        ("owners.max_gpus_of", each(o.max_gpus_of), "the same for single owners"),
        ("owners.share_of", each(o.share_of), "who gets how much where not all is to be had (others: 1)"),
        ("harvest.division", h.division, "how GPUs are divided among runs"),
        ("owners.gpu_types_of", each(o.gpu_types_of), "GRES types of single owners' engines"),
        (
            "owners.partitions_of",
            each(o.partitions_of),
            "partitions whose nodes single owners' engines may use",
        ),
        ("harvest.headroom_gpus", of(h.headroom_gpus), "idle GPUs that stay idle"),
        ("harvest.headroom_per_node", of(h.headroom_per_node), "the same on each node"),
        ("harvest.headroom_by_type", each(h.headroom_by_type), "the same of each GRES type"),
        (
            "harvest.headroom_by_partition",
            each(h.headroom_by_partition),
            "the same on other partitions' nodes",
        ),
        (
            "harvest.schedule",
            "; ".join(hours) or "none",
            f"max_engines and max_gpus by the hour ({h.timezone})",
        ),
        ("harvest.blackout", "; ".join(dark) or "none", f"when nothing is harvested ({h.timezone})"),
        (
            "harvest.max_preemptions_per_hour",
            of(h.max_preemptions_per_hour),
            "preemptions within an hour, after which nothing is submitted",
        ),
        ("harvest.time_limit_s", of(h.time_limit_s, " s"), "a job's --time"),
        ("harvest.min_runtime_s", of(h.min_runtime_s, " s"), "no engine starts where less is left"),
        (
            "harvest.cpus_per_engine",
            of(h.cpus_per_engine),
            "CPUs of a job, at most its GPUs' share of the node",
        ),
        (
            "harvest.memory_mb_per_engine",
            of(h.memory_mb_per_engine, " MiB") if h.memory_mb_per_engine else "its GPUs' share",
            "memory of a job",
        ),
        (
            "harvest.pull_mb_per_s",
            of(h.pull_mb_per_s, " MB/s") if h.pull_mb_per_s else "no limit",
            "weights that all engines of a node fetch from others",
        ),
        (
            "harvest.quarantine_after, quarantine_s",
            f"{h.quarantine_after} in {h.quarantine_s:g} s",
            "failures on a node, after which it is left alone",
        ),
        ("harvest.backoff_s", of(h.backoff_s, " s"), "after a job that died at once; doubles up to 600 s"),
        ("harvest.logs_mb", of(h.logs_mb, " MiB"), "job logs"),
        (
            "cluster.max_rpc_per_min",
            of(c.max_rpc_per_min),
            "requests to slurmctld, on average over ten minutes",
        ),
        ("cluster.poll_interval_s", of(c.poll_interval_s, " s"), "between two polls"),
        (
            "cluster.fast_poll_interval_s",
            of(c.fast_poll_interval_s, " s"),
            "the same while something is expected",
        ),
        ("cluster.min_poll_interval_s", of(c.min_poll_interval_s, " s"), "never less than this"),
        ("cluster.command_timeout_s", of(c.command_timeout_s, " s"), "one command of Slurm's"),
        ("daemon.payload_memory_mb", of(d.payload_memory_mb, " MiB"), "tokens that the daemon caches"),
        (
            "ledger.retention, retention_steps",
            f"{config.ledger.retention}, {config.ledger.retention_steps}",
            "the ledger's growth",
        ),
    ]


def _listed(value: object) -> str:
    return "+".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _table(rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Columns as wide as they need to be; a long value has a line of its own."""
    key_width = max(len(key) for key, _, _ in rows)
    for key, value, what in rows:
        yield f"{key:{key_width}}  {value:<16}  {what}"


def explain(config: DaemonConfig, user: str, host: str) -> list[str]:
    """The configuration in sentences. Pure."""
    d, h, c, keep = config.daemon, config.harvest, config.cluster, config.ledger
    reached = d.advertise or (host if d.listen == "0.0.0.0" else d.listen)
    kept = {
        "keep": "tokens of every sample are kept",
        "compact": f"a sample's chunks are compacted, {keep.retention_steps} steps after no kept checkpoint needs them",
        "drop": f"a sample's tokens are dropped, {keep.retention_steps} steps after no kept checkpoint needs them",
    }[keep.retention]
    said = [
        f"state     {d.state_dir}: keys and the rendezvous file; "
        + (
            f"the daemon alone reads it (you are {user})"
            if c.submit_socket
            else f"the daemon and its engines read it, as one user (you are {user})"
        ),
        _owners(config, user),
        f"ledger    {store.parse(config.ledger_url).render_as_string()}; {kept}",
        f"address   listens on {d.listen}, port {d.port or 'given by the system'}; engines and trainers connect to {reached}",
    ]
    decides = {
        "predictive": "predicts the step's end from what it has seen, and places, moves, sizes and closes the window by that",
        "standard": "fills engines evenly, moves nothing, and leaves the window to reserved.window",
    }[config.router.policy]
    said.append(f"policy    {config.router.policy}: {decides}")
    if config.prometheus.listen:
        said.append(
            f"metrics   for Prometheus at {config.prometheus.listen}; every host that reaches it may read it"
        )
    if not h.enabled:
        return [*said, "harvest   disabled: no jobs are submitted"]
    memory = (
        f"{h.memory_mb_per_engine} MiB" if h.memory_mb_per_engine else "its GPUs' share of a node's memory"
    )
    asks = [f"{h.cpus_per_engine} CPUs", memory]
    asks += [f"GPUs of type {h.gpu_type}"] if h.gpu_type else []
    asks += [
        f"{name} {value}"
        for name, value in (("account", h.account), ("QOS", h.qos), ("constraint", h.constraint))
        if value
    ]
    said.append(
        f"engines   run as {c.engines_user}, by {c.submit_socket}; their keys and logs are in {c.engines_dir}"
        if c.submit_socket
        else f"engines   run as {user}, the daemon's own user: their processes can read its keys and ledger"
    )
    if c.view_socket:
        said.append(f"queue     read by {c.view_socket}, as its user sees it")
    most = h.max_nodes_per_engine
    nodes = f" on each of run.nodes_per_engine nodes ({most} at most)" if most > 1 else ""
    return [
        *said,
        f"harvest   partition {h.partition}, backend {c.backend}; at most {h.max_engines} engines, {h.max_pending} of them pending; "
        f"{h.headroom_gpus} idle GPUs are always left alone",
        f"job       run.gpus_per_engine GPUs{nodes}, {', '.join(asks)}; {h.time_limit_s / 3600:g} h at most; "
        f"runs {h.python or 'the Python of the daemon'}",
        f"polls     every {c.poll_interval_s:g} s, every {c.fast_poll_interval_s:g} s while something "
        f"is expected, never closer than {c.min_poll_interval_s:g} s; "
        f"{c.max_rpc_per_min:g} requests to slurmctld a minute on average",
    ]


def check(config: DaemonConfig) -> Iterator[StartFinding]:
    """Ask everything that the daemon asks when it starts, without doing it."""
    yield _ask("state and keys", lambda: keys.read_keypair(keys.server_key_path(config.daemon.state_dir)))
    yield _ask("ledger", lambda: _ledger(config))
    if _named_owners(config):
        yield _ask("owners by name", lambda: _unknown_owners(config))
    if config.harvest.enabled:
        yield _ask("job template", lambda: _template(config))
        yield _ask("engines' Python", lambda: _python(config))
        yield _ask("engines' user", lambda: _engines(config))
        yield _ask("cluster and partition", lambda: _cluster(config))


def _named_owners(config: DaemonConfig) -> dict[str, list[str]]:
    """Owner -> the keys that name it. Pure."""
    o, found = config.owners, dict[str, list[str]]()
    tables: dict[str, Mapping[str, object]] = {
        "owners.max_gpus_of": o.max_gpus_of,
        "owners.share_of": o.share_of,
        "owners.gpu_types_of": o.gpu_types_of,
        "owners.partitions_of": o.partitions_of,
    }
    for key, table in tables.items():
        for name in table:
            found.setdefault(name, []).append(key)
    return found


def _unknown_owners(config: DaemonConfig) -> str:
    """A name that is misspelt bounds nobody. Who may join later is named before it does."""
    known = {*keys.owner_keys(config.daemon.state_dir), *config.owners.users}
    unknown = {name: its for name, its in _named_owners(config).items() if name not in known}
    if not unknown:
        return ""
    words = ", ".join(f"{name} ({', '.join(its)})" for name, its in sorted(unknown.items()))
    return f"WARNING: no owner has the name {words}: nobody gets anything by it; `scavenger keys list` names the owners"


def _ask(what: str, function: Callable[[], object]) -> StartFinding:
    try:
        note = function()
    except ScavengerError as error:
        return StartFinding(what, str(error))
    return StartFinding(what, "", note if isinstance(note, str) else "")


def _ledger(config: DaemonConfig) -> str:
    path = store.sqlite_file(config.ledger_url)
    if path is None:
        return _postgres(config.ledger_url)
    store.refuse_network_file_system(path.parent)
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    for place in (path, folder) if path.exists() else (folder,):  # its log and index lie beside it
        if not os.access(place, os.W_OK):
            raise LedgerError(
                f"the ledger {path} cannot be written: {user_name()} may not write {place}",
                "check its owner and mode",
            )
    if why := store.volatile(config.ledger_url):
        return f"WARNING: {why}"
    if path.exists():
        return ""
    return (
        "its file is not there yet"
        if folder == path.absolute().parent
        else f"the folder {path.parent} is not there yet; it is made"
    )


def _postgres(url: str) -> str:
    engine = store.open_readonly(url)
    try:
        tables = [*schema.metadata.tables, "alembic_version"]
        ((problem,),) = reader.rows(engine, queries.load("may_write"), {"tables": tables}).rows
        if problem:
            remedy = "name the daemon's own role in daemon.ledger, which owns the tables"
            raise LedgerError(f"the ledger cannot be written: {problem}", remedy)
        (there,) = reader.rows(engine, "SELECT to_regclass('alembic_version') IS NOT NULL").rows[0]
    finally:
        engine.dispose()
    return "" if there else "its tables are not there yet; they are made"


def _template(config: DaemonConfig) -> None:
    probe = Submit(0, "probe", config.harvest.partition, 1, "")
    job_spec(
        config, read_template(config.harvest.job_template), config.cluster.backend, "probe", "probe", probe
    )


def _python(config: DaemonConfig) -> str:
    """What compute nodes have, only a job tells; that the daemon's own Python will not do can be seen here."""
    if config.harvest.python or config.harvest.container:
        return "not looked at: `scavenger doctor --submit` tries it on a compute node"
    lacks = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if not lacks:
        return ""
    return (
        f"WARNING: the daemon's, {sys.executable}, has no {' and no '.join(lacks)}: name an environment of the compute nodes in "
        "harvest.python, or an image in harvest.container (docs/install.md)"
    )


def _engines(config: DaemonConfig) -> str:
    if (engines := client.engines_user_of(config)) is not None:
        engines.check()
    elif config.daemon.public_dir is not None and not choose.is_local(config):
        return (
            "WARNING: engines of all owners run as the daemon's user, and can read its keys and ledger; cluster.submit_socket "
            "runs them as another (docs/site.md)"
        )
    return ""


def _cluster(config: DaemonConfig) -> None:
    cluster = choose.backend(config)
    try:
        choose.preflight(config, cluster)
    finally:
        cluster.close()


def report(path: Path, config: DaemonConfig) -> tuple[list[str], bool]:
    """Lines for a terminal, and whether a daemon could start."""
    findings = list(check(config))
    refused = [finding.what for finding in findings if finding.problem]
    verdict = (
        f", and a daemon would not start with it: see REFUSED below ({', '.join(refused)})" if refused else ""
    )
    said = [f"{path} is well-formed{verdict}. It means:"]
    said += [f"  {line}" for line in explain(config, user_name(), socket.gethostname())]
    said.append("A daemon that starts with it now:")
    for finding in findings:
        said += [
            f"  {'ok     ' if not finding.problem else 'REFUSED'}  {finding.what}{f' ({finding.note})' if finding.note else ''}"
        ]
        said += [f"           {line}" for line in finding.problem.splitlines()]
    if config.harvest.enabled:
        said.append("Its limits (docs/admin.md); those of its QOS and account in Slurm apply besides:")
        said += [f"  {line}" for line in _table(limits(config))]
    return said, not refused
