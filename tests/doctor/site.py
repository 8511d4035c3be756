"""A recorded site (Slurm 22.05.8, tests/data/doctor) and what may be otherwise there, for tests of rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from scavenger.doctor.facts import QUEUE_MARK, CommandOutput, SiteFacts, SiteRequirements
from tests.cluster.record import MARK

RELEASES = Path(__file__).resolve().parents[1] / "data/slurm"
DATA = Path(__file__).resolve().parents[1] / "data/doctor"
NAMES = ("config", "client", "partitions", "nodes", "mpi")
WANTED = SiteRequirements("scavenge", user="scavenger")
#: When the recorded configuration was printed (Unix s).
AT = float(re.findall(r"as of (\d+)", (DATA / "config.txt").read_text())[0])


def site(
    config: Mapping[str, str | None] | None = None,
    *,
    replace: dict[str, tuple[str, str]] | None = None,
    answers: dict[str, CommandOutput] | None = None,
    asked_at: float = AT,
    pyslurm: str = "",
    pyslurm_unfit: str = "",
    probe: CommandOutput | None = None,
) -> SiteFacts:
    """The recorded site with other settings (None: this Slurm has none of that name), and with text replaced in its answers."""
    found = {name: (DATA / f"{name}.txt").read_text() for name in NAMES}
    found["queue"] = (RELEASES / "22.05/jobs.txt").read_text().replace(MARK, QUEUE_MARK)
    for key, value in (config or {}).items():
        line = "" if value is None else f"{key} = {value}\n"
        changed = re.sub(rf"^{key} *= .*\n", lambda _, line=line: line, found["config"], flags=re.M)  # type: ignore[misc]
        found["config"] = changed if changed != found["config"] or value is None else changed + line
    for name, (old, new) in (replace or {}).items():
        assert old in found[name], f"{old!r} is not in the recorded {name}"
        found[name] = found[name].replace(old, new)
    return SiteFacts(
        {name: CommandOutput(text) for name, text in found.items()} | (answers or {}),
        asked_at,
        0.0,
        pyslurm,
        pyslurm_unfit,
        probe=probe,
    )


def qos_lines(*lines: str) -> dict[str, CommandOutput]:
    return {"qos": CommandOutput("\n".join(lines) + "\n"), "admin": CommandOutput("scavenger|None\n")}
