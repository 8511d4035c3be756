"""What a site's Slurm says of itself, as facts that rules read. Pure: text in, frozen structs out.

Owns the parsing of the answers that `collect` gathers. Reading a fact that is not there raises `Missing` with the reason; its default is
never assumed. Judges nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from scavenger.cluster.model import Job, Node, NodeHost, Partition, Qos
from scavenger.cluster.slurm import commands
from scavenger.cluster.slurm import text as slurm_text
from scavenger.errors import ClusterError

T = TypeVar("T")
#: The queue's fields are told apart by a mark; doctor's is no secret, and a user who forges it deceives a report.
QUEUE_MARK = "scavengerdoctor0mark"
#: What the test job says of imports that its `timeout` ended.
SLOW_IMPORTS = "its imports took longer than"

#: Limits of an association, as `sacctmgr show assoc` calls them, after whose they are.
ASSOCIATION_LIMITS = (
    "GrpTRES",
    "GrpTRESMins",
    "GrpTRESRunMins",
    "GrpJobs",
    "GrpSubmit",
    "GrpWall",
    "MaxTRES",
    "MaxTRESMins",
    "MaxJobs",
    "MaxSubmit",
    "MaxWall",
)
ASSOCIATION_FIELDS = ("Account", "User", "ParentName", *ASSOCIATION_LIMITS)


class Missing(Exception):
    """A fact is not known. `str()` says why."""

    def __init__(self, why: str, remedy: str = "see the reason; ask again when it is mended") -> None:
        super().__init__(why)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """What one command printed; `error` is why there is nothing to read, "" where there is."""

    text: str = ""
    error: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class SiteRequirements:
    """What the daemon's configuration asks of this site; in seconds and mebibytes."""

    partition: str
    qos: str = ""
    account: str = ""
    gpu_type: str = ""
    cpus: int = 1
    memory_mb: int = 0
    time_limit_s: float = 3600.0
    poll_interval_s: float = 60.0
    fast_poll_interval_s: float = 15.0
    absent_s: float = 30.0
    user: str = ""
    listen: str = "0.0.0.0"  # daemon.listen and daemon.advertise; `host`: this one's name
    advertise: str = ""
    host: str = ""
    engine: str = ""  # that a run will name; "": any that can be imported will do
    pinned: bool = True  # whether the daemon chooses the node, and so an engine's share of it
    daemon_user: str = ""  # `user` is that of engines' jobs
    viewer: str = ""  # who reads the queue by cluster.view_socket; "" = the daemon's user
    shared: bool = False  # other users train: daemon.public_dir is set


@dataclass(frozen=True, slots=True)
class Association:
    """A user in an account, or with user "" the account itself, below `parent`. `limits`: those that are set."""

    account: str
    user: str
    parent: str
    limits: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """`answers`: by the names in `collect.QUESTIONS`. `asked_at`: this host's clock when the configuration came, Unix seconds."""

    answers: Mapping[str, CommandOutput]
    asked_at: float = 0.0
    utc_offset_s: float = 0.0
    pyslurm: str = ""  # the installed one's version, "" = none
    pyslurm_unfit: str = ""  # why it cannot read this site, "" = it can
    own_addresses: frozenset[str] = frozenset()  # those of the nodes' addresses that are this host's
    probe: CommandOutput | None = None  # what the test job said of its node; None = it was not asked for
    _cache: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    def text(self, name: str) -> str:
        """Raises `Missing`."""
        answer = self.answers.get(name)
        if answer is None:
            raise Missing(f"{name} was not asked for")
        if answer.error:
            raise Missing(answer.error, answer.remedy) if answer.remedy else Missing(answer.error)
        return answer.text

    @property
    def config(self) -> Mapping[str, str]:
        """`scontrol show config`, key by key."""
        if "config" not in self._cache:
            self._cache["config"] = dict(re.findall(r"^(\S+) *= (.*?) *$", self.text("config"), re.M))
        found = self._cache["config"]
        assert isinstance(found, dict)
        return found

    def value(self, key: str) -> str:
        """One setting, "" where Slurm prints that there is none. Raises `Missing` where this Slurm has no such setting."""
        found = self.config.get(key)
        if found is None:
            raise Missing(f"scontrol show config has no {key}")
        return "" if found in ("(null)", "N/A", "none") else found

    def words(self, key: str) -> tuple[str, ...]:
        return tuple(word.strip() for word in self.value(key).split(",") if word.strip())

    def option(self, key: str, name: str) -> str | None:
        """The value of `name=value` in a list of options, "" for a bare word, None where it is not there."""
        for word in self.words(key):
            left, _, right = word.partition("=")
            if left == name:
                return right
        return None

    def seconds(self, key: str) -> float:
        found = self.value(key)
        match = re.match(r"(\d+) sec", found)
        if match:
            return float(match[1])
        try:
            return slurm_text.parse_duration(found)
        except ClusterError as error:
            raise Missing(f"{key} = {found!r} is no time") from error

    @property
    def controllers(self) -> tuple[str, ...]:
        """HOST:PORT of slurmctld and of its backups, by address where slurm.conf has one."""
        port = self.value("SlurmctldPort").partition("-")[0]
        hosts = (value for key, value in self.config.items() if key.startswith("SlurmctldHost["))
        return tuple(f"{re.sub(r'.*[(]|[)]', '', host)}:{port}" for host in hosts)

    @property
    def version(self) -> str:
        return self.value("SLURM_VERSION")

    @property
    def controller_at(self) -> float:
        """The controller's clock when it answered, Unix seconds."""
        match = re.match(r"Configuration data as of (\S+)", self.text("config"))
        if match is None:
            raise Missing("scontrol show config does not begin with a time")
        if match[1].isdigit():
            return float(match[1])
        try:
            return datetime.fromisoformat(match[1] + "+00:00").timestamp() - self.utc_offset_s
        except ValueError as error:
            raise Missing(f"{match[1]!r} is no time") from error

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return _read(commands.parse_partitions, self.text("partitions"))

    @property
    def nodes(self) -> tuple[Node, ...]:
        return _read(commands.parse_nodes, self.text("nodes"))

    def queue(self) -> tuple[Job, ...]:
        """Raises `ClusterError` where the answer is there and cannot be read, `Missing` where there is none."""
        return commands.parse_jobs(self.text("queue"), QUEUE_MARK)

    @property
    def node_hosts(self) -> Mapping[str, NodeHost]:
        return _read(commands.parse_node_hosts, self.text("nodes"))

    def partition(self, name: str) -> Partition:
        for part in self.partitions:
            if part.name == name:
                return part
        raise Missing(f"there is no partition {name}")

    def partition_words(self, name: str) -> Mapping[str, str]:
        """Every `Key=value` of a partition, as Slurm spells them."""
        for line in self.text("partitions").splitlines():
            row = dict(re.findall(r"(?:^| )([A-Za-z]+)=(\S*)", line))
            if row.get("PartitionName") == name:
                return row
        raise Missing(f"there is no partition {name}")

    @property
    def accounting(self) -> bool:
        """Whether the site has slurmdbd, and so QOS and associations."""
        return self.value("AccountingStorageType").endswith("slurmdbd")

    @property
    def preempts_by(self) -> str:
        """partition_prio | qos | none"""
        kind = self.value("PreemptType").rpartition("/")[2].strip("() ").lower()
        return "none" if kind in ("", "null") else kind

    @property
    def qos(self) -> tuple[Qos, ...]:
        return _read(commands.parse_qos, self.text("qos"))

    @property
    def associations(self) -> tuple[Association, ...]:
        """Those of the cluster that the user may see."""
        found = []
        for line in self.text("associations").splitlines():
            words = line.split("|")
            if len(words) != len(ASSOCIATION_FIELDS):
                raise Missing(f"sacctmgr show assoc printed {line[:80]!r}")
            account, user, parent, *values = words
            limits = zip(ASSOCIATION_LIMITS, values, strict=True)
            found.append(
                Association(account, user, parent, tuple((key, value) for key, value in limits if value))
            )
        return tuple(found)

    def grace_s(self, wanted: SiteRequirements) -> float:
        """The GraceTime that our jobs get: of the QOS where Slurm preempts by QOS, else of the partition."""
        if self.preempts_by == "qos":
            return next((one.grace_s for one in self.qos if one.name == wanted.qos), 0.0)
        return self.partition(wanted.partition).grace_s


def _read(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ClusterError as error:
        raise Missing(error.cause) from error
