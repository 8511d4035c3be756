"""Traces with the names, columns and length of those that benchmarks play, made up: small, so that a page's command ends soon."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable
from pathlib import Path

HOURS = 72
NODES, GPUS = 8, 8
BAMBOO = "bamboo/p2-xlarge-2020-11-20-to-2020-11-23"


def write(folder: Path) -> None:
    """All of them, the same at each call."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(7)
    _csv(folder / "earth_node_idle_72h.csv.gz", "t_seconds,node,idle_gpus,delta", _idle(draw))
    _csv(folder / "earth_jobs_72h.csv.gz", "t_start,t_end,vc,gpus,placement", _jobs(draw))
    columns = "source,zone,instance_type,gpus_per_instance,target,t_seconds,available_instances"
    _csv(folder / "spot_bamboo.csv.gz", columns, _spot(draw))
    columns = "source,arrival_s,prompt_tokens,output_tokens"
    _csv(folder / "output_lengths.csv.gz", columns, _lengths(draw))


def _csv(path: Path, columns: str, lines: Iterable[str]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("# made up\n" + "\n".join([columns, *lines]) + "\n")


def _idle(draw: random.Random) -> list[str]:
    idle = [draw.randrange(GPUS + 1) for _ in range(NODES)]
    lines = [f"0,n{node},{count},0" for node, count in enumerate(idle)]
    for at in range(600, HOURS * 3600, 600):
        node = draw.randrange(NODES)
        now = draw.randrange(GPUS + 1)
        if now != idle[node]:
            lines.append(f"{at},n{node},{now},{now - idle[node]}")
            idle[node] = now
    return lines


def _spot(draw: random.Random) -> list[str]:
    return [
        f"{BAMBOO},us-east-1c,p2.xlarge,1,16,{at},{draw.randrange(8, 17)}"
        for at in range(0, HOURS * 3600, 900)
    ]


def _lengths(draw: random.Random) -> list[str]:
    return [
        f"{source},{at:.1f},{draw.randrange(50, 500)},{draw.randrange(20, 300)}"
        for source in ("azure2023_conv", "azure2023_code", "mooncake_conversation")
        for at in (n * 0.7 for n in range(600))
    ]


def _jobs(draw: random.Random) -> list[str]:
    begins = sorted(draw.uniform(0.0, HOURS * 3600.0) for _ in range(2_000))
    return [
        f"{at:.1f},{at + draw.uniform(300.0, 7200.0):.1f},a,{gpus},a-{node:02d}:{gpus}"
        for at in begins
        for gpus, node in [(draw.randrange(1, GPUS + 1), draw.randrange(NODES))]
    ]
