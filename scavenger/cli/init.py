"""`scavenger init`: a site's scavenger.toml and keys, or a run's run.toml and train.sbatch. Owns the arguments and what is printed.

`trainer.prepare` checks and writes a run's files, in a process of its own: this package never imports the trainer.

Boundary: one subcommand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scavenger import config, toml
from scavenger.cli.options import DEFAULT_CONFIG, EngineName, OverOption, SetOption, is_readable
from scavenger.config import DaemonConfig, layers
from scavenger.errors import ConfigError, Refused, ScavengerError
from scavenger.host import packages
from scavenger.host.user import user_name
from scavenger.protocol import key_requests, keys

if TYPE_CHECKING:
    from scavenger.doctor.proposal import Proposal

RUN = "Of a run"
#: Options for a site's files only, and for a run's only. Given with the other kind they are refused, not ignored.
OF_SITE = frozenset({"site", "listen", "ledger"})
OF_DRAFT = frozenset(
    {"force", "reward", "prompt_field", "answer_field", "engine", "gpus", "nodes", "gpu", "state_dir"}
    | {"environment", "environment_python", "node_memory_gb"}
)


#: Of a run that `--tiny` does not write.
OF_OWN_MODEL = frozenset(
    {"reward", "prompt_field", "answer_field", "engine", "nodes", "gpu", "gpu_memory_gb", "node_memory_gb"}
)


def init(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="where the files go; its name is the run's")] = Path(),
    model: Annotated[
        Path | None, typer.Option(help="make a run of this model, a Hugging Face folder", rich_help_panel=RUN)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="on these prompts: JSONL or Parquet, a file or a folder", rich_help_panel=RUN),
    ] = None,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="make the smallest run; its model is made in place, in seconds. With --data or --environment: such a model for yours",
            rich_help_panel=RUN,
        ),
    ] = False,
    environment: Annotated[
        str, typer.Option(help="or on the tasks of this environment of verifiers", rich_help_panel=RUN)
    ] = "",
    environment_python: Annotated[
        str, typer.Option(help="a Python that has the environment", rich_help_panel=RUN)
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="say what would stop the run in DIRECTORY", rich_help_panel=RUN)
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="overwrite run.toml and train.sbatch", rich_help_panel=RUN)
    ] = False,
    reward: Annotated[
        str,
        typer.Option(help="module:function; default: a verifier that fits the answers", rich_help_panel=RUN),
    ] = "",
    prompt_field: Annotated[str, typer.Option(help="column of the prompts", rich_help_panel=RUN)] = "",
    answer_field: Annotated[str, typer.Option(help="column of the answers", rich_help_panel=RUN)] = "",
    engine: Annotated[
        EngineName | None,
        typer.Option(
            help="vllm or reference; the latter for a tiny model without a GPU", rich_help_panel=RUN
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each training node", rich_help_panel=RUN)] = 8,
    nodes: Annotated[int, typer.Option(min=1, help="training nodes", rich_help_panel=RUN)] = 1,
    gpu: Annotated[
        str,
        typer.Option(
            help="type of the GPUs, such as h100; default: as Slurm names them", rich_help_panel=RUN
        ),
    ] = "",
    gpu_memory_gb: Annotated[
        float, typer.Option(min=0, help="of one GPU; 0: by its type, else 80", rich_help_panel=RUN)
    ] = 0,
    node_memory_gb: Annotated[
        float,
        typer.Option(
            min=0,
            help="host memory of a training node; 0: as Slurm says, else 1.6 for each GB of its GPUs",
            rich_help_panel=RUN,
        ),
    ] = 0,
    state_dir: Annotated[
        str,
        typer.Option(
            help="the daemon's; default: as ./scavenger.toml says, else the site that you joined",
            rich_help_panel=RUN,
        ),
    ] = "",
    partition: Annotated[
        str, typer.Option(help="a run: where it trains (reserved); a site: what is harvested (scavenge)")
    ] = "",
    site: Annotated[
        bool, typer.Option("--site", help="a site: ask Slurm for what its scavenger.toml can take from it")
    ] = False,
    listen: Annotated[str, typer.Option(help="a site: interface that workers reach")] = "0.0.0.0",
    ledger: Annotated[
        str,
        typer.Option(help="a site: SQLAlchemy URL; default: SQLite in the state directory, on a local disk"),
    ] = "",
    over: OverOption = None,
    sets: SetOption = None,
) -> None:
    """Write a run's files (--model with --data or --environment; or --tiny), check them (--check), or write a site's
    scavenger.toml and keys.

    Existing files are left as they are; a run's only with --force are overwritten. What was assumed is printed.
    """
    if tiny and model is not None:
        raise typer.BadParameter("--tiny brings its own model: leave --model out")
    if tiny and environment.startswith("builtin:"):
        raise typer.BadParameter(
            f"{environment} has a model of its own: `python -m trainer.tiny make --task calculator --out DIR`, then --model DIR"
        )
    own_data = tiny and bool(data is not None or environment)
    if ((model is None) != (data is None and not environment) and not own_data) or (
        data is not None and environment
    ):
        raise typer.BadParameter(
            "a run needs both --model and --data, or --environment in place of --data, or --tiny in place of --model"
        )
    said = frozenset(
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    )
    _refuse_foreign(said, drafting=tiny or model is not None, check=check)
    if tiny and not own_data and (more := said & OF_OWN_MODEL):
        raise typer.BadParameter(
            f"{_flags(more)}: of a run with a model or data of yours, which --tiny brings"
        )
    if (over or sets) and not check:
        raise typer.BadParameter("--over and --set are for --check: as they will be given to train.sbatch")
    memory = ["--gpu-memory-gb", str(gpu_memory_gb)] if gpu_memory_gb else []
    if tiny and not own_data:
        words = [f"--partition={partition or 'reserved'}", f"--state-dir={state_dir or _known_state_dir()}"]
        words += [f"--gpus={gpus}"] if "gpus" in said else []
        _prepare(["tiny", str(directory), *words, *(["--force"] if force else [])], Path())
    elif model is not None or own_data:
        gpus = gpus if "gpus" in said or not own_data else 1
        told = {
            "--model": str(model or ""),
            "--data": str(data or ""),
            "--environment": environment,
            "--environment-python": environment_python,
            "--reward": reward,
            "--prompt-field": prompt_field,
            "--answer-field": answer_field,
            "--engine": engine or ("reference" if own_data else ""),
            "--gpus": str(gpus) if "gpus" in said or own_data else "",
            "--nodes": str(nodes) if "nodes" in said else "",
            "--state-dir": state_dir or _known_state_dir(),
            "--partition": partition,
            "--gpu": gpu,
            "--node-memory-gb": str(node_memory_gb) if node_memory_gb else "",
        }
        if gpus:
            told |= _of_slurm(partition or "reserved", gpus, gpu_known=bool(gpu or gpu_memory_gb))
        words = [f"{name}={value}" for name, value in told.items() if value]
        words += ["--tiny"] if own_data else []
        _prepare(["draft", str(directory), *words, *memory, *(["--force"] if force else [])], Path())
    elif not check:
        proposal = _ask_slurm(partition) if site else None
        named = str(proposal.value("harvest.partition")) if proposal else partition or "scavenge"
        _site(directory, {"partition": named, "listen": listen, "ledger": ledger}, said, proposal)
    if check:
        folder = directory.resolve()
        if not (folder / "run.toml").is_file():
            raise ConfigError(
                f"{folder} holds no run.toml",
                f"`scavenger init {directory} --model PATH --data PATH` writes one; without a model, --tiny in its place",
            )
        # The check runs in the run's folder.
        laid_over = [Path.cwd() / path for path in over or ()], sets or []
        fine = _checked(folder, memory, *laid_over)
        fits, free = _fits_site(folder, *laid_over), _name_is_free(folder, *laid_over)
        if not (fine and fits and free):
            raise typer.Exit(ConfigError.exit_code)


def _of_slurm(partition: str, gpus: int, *, gpu_known: bool) -> dict[str, str]:
    """Options of the draft: types of the partition's GPUs, separated by commas, and memory of its smallest node, where Slurm says so."""
    from scavenger.doctor import train_script

    if _is_local(None):
        return {}
    found = train_script.gpu_nodes(partition, gpus)
    return {
        "--slurm-gpu": "" if gpu_known else ",".join(found.types),
        "--slurm-memory-mb": str(found.memory_mb or ""),
    }


def _config_at_hand() -> Path:
    """The daemon's, which may be several files with `:` between, and need not be there."""
    return Path(os.environ.get("SCAVENGER_CONFIG") or DEFAULT_CONFIG)


def _known_state_dir() -> str:
    """The state directory of the daemon whose configuration is at hand, else the site that the user joined; "" where there is neither:
    then run.toml says that it must be set.
    """
    path = _config_at_hand()
    if is_readable(path):
        return str(config.read_daemon(path).daemon.state_dir.resolve())
    return keys.noted_site()


def _checked(folder: Path, memory: Sequence[str], over: Sequence[Path], sets: Sequence[str]) -> bool:
    """Run the checks of a run's files. True when nothing was refused."""
    try:
        _prepare(
            [
                "check",
                str(folder),
                *memory,
                *(f"--over={path}" for path in over),
                *(f"--set={one}" for one in sets),
            ],
            folder,
        )  # the job starts there, too: a reward function may lie beside
    except typer.Exit as refused:
        if refused.exit_code != ConfigError.exit_code:
            raise
        return False
    return True


def _fits_site(folder: Path, over: Sequence[Path], sets: Sequence[str]) -> bool:
    """Whether the site's Slurm has what train.sbatch asks for, as far as it can be asked. An unreadable run.toml was told before."""
    from scavenger.doctor import train_script

    try:
        run = config.read_run(folder / "run.toml", over, sets)
    except ConfigError:
        return True
    if _is_local(run.daemon.config):
        print("  skipped  train.sbatch: the cluster is the local backend, which Slurm knows nothing of")
        return True
    fine = True
    for found in train_script.check(
        folder / "train.sbatch", run.reserved.workers, run.reserved.gpus_per_engine
    ):
        fine = fine and not found.problem
        word = "REFUSED" if found.problem else "skipped" if found.skipped else "ok     "
        print(f"  {word}  {found.what}{f': {found.note}' if found.note else ''}")
        for line in found.problem.splitlines():
            print(f"           {line}")
    return fine


def _name_is_free(folder: Path, over: Sequence[Path], sets: Sequence[str]) -> bool:
    """Whether the site's daemon lets this user's run have its name. What hinders the question was told before, or is only told."""
    from scavenger import client

    try:
        run = config.read_run(folder / "run.toml", over, sets)
    except ConfigError:
        return True
    if run.daemon.embedded:
        return True  # the run's own daemon serves it alone
    name, problem = run.run.name, ""
    try:
        use = client.ask_name(run.run.state_dir, run.run.key, name)
    except Refused as refused:
        use, problem = client.NameUse.ANOTHER, str(refused)
    except ScavengerError as error:
        print(f"  skipped  run.name: whether another user has a run {name!r} was not asked: {error.cause}")
        return True
    if use is not client.NameUse.ANOTHER:
        note = "your run of that name goes on" if use is client.NameUse.OURS else "nobody has it yet"
        print(f"  ok       run.name: {name}, {note}")
        return True
    print("  REFUSED  run.name")
    for line in (problem or name_taken(name, user_name(), folder)).splitlines():
        print(f"           {line}")
    return False


def name_taken(name: str, user: str, folder: Path) -> str:
    """Cause and remedy. Pure."""
    cause = f"another user of this site has a run {name!r}: names of runs are the site's"
    return str(ConfigError(cause, f'set run.name = "{user}-{name}", or any other, in {folder / "run.toml"}'))


def _is_local(beside: Path | None) -> bool:
    """Whether train.sbatch is for the local backend: as its own variable says, or the daemon's configuration at hand."""
    from scavenger.cluster import choose

    paths = (beside, _config_at_hand())
    found = next((path for path in paths if path is not None and is_readable(path)), None)
    return os.environ.get("SCAVENGER_BACKEND") == "local" or (
        found is not None and choose.is_local(config.read_daemon(found))
    )


def _prepare(words: Sequence[str], folder: Path, *, quiet: bool = False) -> str:
    """Run `python -m trainer.prepare` and end with its status where it refuses. `quiet`: what it printed is returned, and not shown."""
    if missing := packages.lacking():
        raise ConfigError(
            f"this Python ({sys.executable}) has no {' and no '.join(missing)}",
            f"use the environment of the site that trains, or make one: {packages.INSTALL}",
        )
    # It runs in another folder.
    at_hand = layers.SEPARATOR.join(str(path.resolve()) for path in layers.files_of(_config_at_hand()))
    environ = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SCAVENGER_CONFIG": at_hand,
    }
    done = subprocess.run(
        [sys.executable, "-m", "trainer.prepare", *words],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        check=False,
        stdout=subprocess.PIPE if quiet else None,
        encoding="utf-8",
    )
    if done.returncode < 0:
        raise ScavengerError(f"trainer.prepare was ended by signal {-done.returncode}", "try again")
    if done.returncode:
        raise typer.Exit(done.returncode)
    return done.stdout or ""


def _refuse_foreign(said: frozenset[str], *, drafting: bool, check: bool) -> None:
    """Raises `BadParameter` for options that this call would ignore."""
    if drafting:
        foreign, why = (
            said & OF_SITE,
            "is of a site's scavenger.toml: leave it out, or leave --model and --data out",
        )
    elif check:
        foreign = said & (OF_SITE | OF_DRAFT | {"partition"})
        why = "changes nothing of a run that is checked: change it in its run.toml or train.sbatch"
    else:
        foreign, why = (
            said & (OF_DRAFT | {"gpu_memory_gb"}),
            "is of a run, which needs --model and --data, or --tiny",
        )
    if foreign:
        raise typer.BadParameter(f"{_flags(foreign)} {why}")


def _flags(names: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in sorted(names))


def _ask_slurm(partition: str) -> Proposal:
    """Raises `ConfigError` where Slurm does not answer, or nothing of it may be harvested."""
    from scavenger.doctor import collect, proposal
    from scavenger.doctor.facts import Missing, SiteRequirements

    user = user_name()
    try:
        facts = collect.gather(SiteRequirements(partition, user=user))
        return proposal.propose(facts, user, partition, packages.lacking())
    except Missing as missing:
        raise ConfigError(f"Slurm cannot be asked: {missing}", missing.remedy) from missing


def _local_ledger(state_dir: Path) -> str:
    """A URL for an SQLite ledger where `state_dir` is on a network file system, and this user's home is not; "" elsewhere."""
    from scavenger.ledger import store

    shared = store.file_system_of(state_dir) in store.NETWORK_FILE_SYSTEMS
    if not shared or store.file_system_of(Path.home()) in store.NETWORK_FILE_SYSTEMS:
        return ""
    return f"sqlite:///{Path.home() / 'ledger.sqlite3'}"


def _site(
    directory: Path, wanted: Mapping[str, str], said: frozenset[str], proposal: Proposal | None = None
) -> None:
    path, state_dir = directory / "scavenger.toml", (directory / "state").resolve()
    if path.exists():
        _refuse_unapplied(path, {name: value for name, value in wanted.items() if name in said})
    directory.mkdir(parents=True, exist_ok=True)
    beside = (
        directory.resolve() / "run.toml"
    )  # a run that brings its own daemon: its engines' jobs are of a known size
    host: dict[str, object] = {}
    if beside.is_file() and not path.exists():
        host = json.loads(_prepare(["host", str(beside.parent)], Path(), quiet=True))
    for written in keys.init_state(state_dir, user_name()):
        print(f"wrote {written}")
    if path.exists():
        print(f"left {path} as it is")
        return
    # at 0.0.0.0 the name of the host on which the daemon runs is announced: a name that is written here would be of this one for ever
    reached = {"listen": wanted["listen"]} | (
        {} if wanted["listen"] == "0.0.0.0" else {"advertise": os.uname().nodename}
    )
    ledger = wanted["ledger"] or (_local_ledger(state_dir) if proposal else "")
    document: dict[str, dict[str, object]] = {
        "daemon": {"state_dir": state_dir, **reached} | ({"ledger": ledger} if ledger else {}),
        "harvest": {"partition": wanted["partition"], **host},
    }
    why: dict[str, str] = {}
    if proposal is not None:
        document["daemon"]["public_dir"] = public_dir = directory.resolve() / "public"
        key_requests.make_public(public_dir)  # a service manager may let the daemon write only what is there
        why["daemon.public_dir"] = "where researchers find the daemon: scavenger join"
        for one in proposal.keys:
            section, _, key = one.key.partition(".")
            document.setdefault(section, {})[key] = one.value
            why[one.key] = one.why
    keys.write_private(path, toml.dumps(document, why).encode())  # a ledger's URL may hold a password
    print(f"wrote {path}")
    if proposal is None:
        print("\n".join(_assumed(config.read_daemon(path), said)))
        print(f"next: scavenger check-config {path}, then scavenger daemon --config {path}")
        return
    print("taken from Slurm:")
    print("\n".join(f"  {one.key} = {one.value!r}: {one.why}" for one in proposal.keys))
    print("yours to decide (docs/config.md):")
    print("\n".join(f"  {line}" for line in proposal.open))
    print(f"next: scavenger doctor --config {path}, then scavenger daemon --config {path}")
    print("(under systemd: copy it to /etc/scavenger first, docs/install.md)")


def _refuse_unapplied(path: Path, wanted: Mapping[str, str]) -> None:
    """Raises `ConfigError` where an existing file contradicts the options."""
    settings = config.read_daemon(path) if wanted else None
    if settings is None:
        return
    has = {
        "partition": settings.harvest.partition,
        "listen": settings.daemon.listen,
        "ledger": settings.daemon.ledger,
    }
    names = {"partition": "harvest.partition", "listen": "daemon.listen", "ledger": "daemon.ledger"}
    differing = [name for name, value in wanted.items() if value != has[name]]
    if differing:
        # what a ledger's URL is stays untold: it may hold a password
        told = "; ".join(
            f"--{n} was not applied" + (f" ({names[n]} = {has[n]!r} there)" if n != "ledger" else "")
            for n in differing
        )
        which = ", ".join(names[name] for name in differing)
        raise ConfigError(
            f"{path} exists already and is left as it is: {told}",
            f"change {which} in it, or name another directory",
        )


def _assumed(settings: DaemonConfig, said: frozenset[str]) -> list[str]:
    """What a new site's file assumes, each with the key that changes it. Pure."""
    d, h = settings.daemon, settings.harvest
    rows = [
        (
            "partition",
            f"harvest.partition = {h.partition!r}",
            "what is harvested; other users must be able to preempt its jobs",
        ),
        (
            "listen",
            f"daemon.listen = {d.listen!r}",
            "the daemon's host is announced by its own name; daemon.advertise names another",
        ),
        (
            "ledger",
            "daemon.ledger = ''",
            f"SQLite at {d.state_dir / 'ledger.sqlite3'}, which must be a local disk",
        ),
        ("", f"harvest.account = {h.account!r}, .qos = {h.qos!r}", "Slurm's defaults for this user"),
        ("", f"harvest.gpu_type = {h.gpu_type!r}", "GPUs of any type"),
        (
            "",
            f"harvest.max_engines = {h.max_engines}",
            f"at most; with {h.cpus_per_engine} CPU each (.cpus_per_engine)",
        ),
        ("", f"harvest.time_limit_s = {h.time_limit_s:g}", "of an engine's job"),
        (
            "",
            f"cluster.backend = {settings.cluster.backend!r}",
            "Slurm, by pyslurm where one matches, else by its commands",
        ),
    ]
    shown = [(key, why) for name, key, why in rows if name not in said]
    pad = max(len(key) for key, _ in shown) + 2
    return [
        "assumed, as nothing was said (change it in the file; docs/config.md):",
        *(f"  {key:<{pad}}{why}" for key, why in shown),
    ]
