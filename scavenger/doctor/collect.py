"""Runs the few Slurm commands whose output the rules read, each with a deadline.

Owns argv, environment and deadlines. A command that failed gives an answer with its error, never an empty one. Judges nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import time
from collections.abc import Mapping, Sequence

from scavenger.cluster import choose
from scavenger.cluster.error_kind import CLOCK_REMEDY, about_clocks
from scavenger.cluster.sandbox.sandbox import slurm_environment
from scavenger.cluster.slurm import commands, runner
from scavenger.cluster.slurm.backend import SlurmCluster
from scavenger.doctor.facts import ASSOCIATION_FIELDS, QUEUE_MARK, CommandOutput, SiteFacts, SiteRequirements
from scavenger.errors import ClusterError
from scavenger.host import addresses

DEADLINE_S = 20.0
NO_SLURM = (
    "this needs a host with Slurm's commands and slurm.conf (or SLURM_CONF), and a controller that answers: try `scontrol ping`; "
    'without Slurm: backend = "local" in [cluster] (docs/config.md)'
)

#: What is run after `scontrol show config`, by the name that `facts.SiteFacts.text` knows. None changes anything.
QUESTIONS: Mapping[str, Sequence[str]] = {
    "client": ["sinfo", "--version"],
    "partitions": commands.partitions_argv(),
    "nodes": commands.nodes_argv(),
    "mpi": ["srun", "--mpi=list"],
}


def accounting_questions(wanted: SiteRequirements, cluster: str) -> Mapping[str, Sequence[str]]:
    """The questions for slurmdbd, asked only where the site has one: elsewhere sacctmgr can only fail."""
    quiet = ["sacctmgr", "--noheader", "--parsable2", "show"]
    return {
        "qos": commands.qos_argv(),
        "admin": [
            *quiet,
            "user",
            wanted.viewer or wanted.daemon_user or wanted.user,
            "format=User,AdminLevel",
        ],
        "engines admin": [*quiet, "user", wanted.user, "format=User,DefaultAccount,AdminLevel"],
        "accounts": [*quiet, "assoc", f"user={wanted.user}", "format=Account,DefaultQOS"],
        "associations": [*quiet, "assoc", f"cluster={cluster}", f"format={','.join(ASSOCIATION_FIELDS)}"],
    }


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """`env` (default: this process's) without the variables by which an outer job or its user changes what Slurm commands do."""
    inherited = os.environ if env is None else env
    clean = slurm_environment(inherited) | {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s"}
    return clean | ({"SLURM_CONF": inherited["SLURM_CONF"]} if "SLURM_CONF" in inherited else {})


def gather(
    wanted: SiteRequirements, *, env: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S
) -> SiteFacts:
    """Run every question in turn. `env`: the commands' environment, see `environment`.

    Where the first one gets no answer, the others are not run and have its error: each would only wait for its deadline.
    """
    clean = environment(env)
    before = time.time()
    answers = {"config": ask(commands.config_argv(), clean, deadline_s)}
    asked_at = (before + time.time()) / 2
    if answers["config"].error:
        silent = dataclasses.replace(answers["config"], remedy=answers["config"].remedy or NO_SLURM)
        return SiteFacts(
            dict.fromkeys(("config", *QUESTIONS, "queue"), silent), asked_at, pyslurm=pyslurm_version()
        )
    answers |= {name: ask(argv, clean, deadline_s) for name, argv in QUESTIONS.items()}
    installed = pyslurm_version()
    unfit = pyslurm_unfit(clean, deadline_s) if installed else ""
    answers["queue"] = ask(commands.squeue_argv(QUEUE_MARK), clean, deadline_s)
    facts = SiteFacts(
        answers,
        asked_at,
        float(time.localtime().tm_gmtoff),
        installed,
        unfit,
        own_addresses(answers["nodes"]),
    )
    if facts.accounting:
        answers |= {
            name: ask(argv, clean, deadline_s)
            for name, argv in accounting_questions(wanted, facts.value("ClusterName")).items()
        }
    return facts


def own_addresses(nodes: CommandOutput) -> frozenset[str]:
    """Of the nodes' addresses those that are this host's. Nodes that cannot be read have none: the rules say why."""
    try:
        hosts = commands.parse_node_hosts(nodes.text)
    except ClusterError:
        return frozenset()
    return addresses.own(host.address for host in hosts.values())


def ask(argv: Sequence[str], env: Mapping[str, str], deadline_s: float) -> CommandOutput:
    """Run one command. Every failure is in the answer's `error`; nothing is raised."""
    try:
        done = runner.asked(argv, env, deadline_s)
    except ClusterError as error:
        return CommandOutput(error=error.cause)
    if done.returncode != 0:
        said = runner.words(done)
        remedy = CLOCK_REMEDY if about_clocks(said) else ""
        return CommandOutput(error=f"{' '.join(argv[:3])}: {runner.explained(said)}", remedy=remedy)
    # Only `srun --mpi=list` of older releases answers on stderr: elsewhere that holds warnings, and no answer is an empty one.
    return CommandOutput(done.stdout or (done.stderr if "--mpi=list" in argv else ""))


def pyslurm_version() -> str:
    """The installed pyslurm's version; it is not imported, because that alone may end the process. "" = none."""
    try:
        return importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def pyslurm_unfit(env: Mapping[str, str], deadline_s: float) -> str:
    """Why the daemon would not use it, or "": found out as the daemon does, in a process of its own."""
    cluster, why_not = choose.with_pyslurm(SlurmCluster(env, timeout_s=deadline_s), deadline_s)
    if cluster is not None:
        cluster.close()
    return why_not
