"""What docs/weights.md says that one sets is what there is to set; its sizing rule is the one that `scavenger init --check` applies."""

from __future__ import annotations

import re
from pathlib import Path

from scavenger.config import HarvestSection, WeightsSection
from scavenger.config.reference import default_text
from scavenger.sizing.engine import GPU_MB, PROCESS_MB, PublishedSize, engine_host_mb

PAGE = (Path(__file__).resolve().parents[2] / "docs/weights.md").read_text(encoding="utf-8")
SET = PAGE.split("## What you set", 1)[1].split("\n## ", 1)[0]
ROW = re.compile(r"^\| `(\w+)\.(\w+)` \| ([^|]+?) \| ([^|]+?) \| ([^|]+?) \|$", re.MULTILINE)


def test_every_key_of_weights_is_among_what_one_sets_with_its_default_and_when_to_change_it() -> None:
    rows = {f"{section}.{key}": default for section, key, default, _unit, _when in ROW.findall(SET)}
    own = {f"weights.{key}": default_text(field) for key, field in WeightsSection.model_fields.items()}
    assert {key: default for key, default in rows.items() if key.startswith("weights.")} == own
    harvest = HarvestSection.model_fields
    others = {key: default_text(harvest[key.removeprefix("harvest.")]) for key in rows if key not in own}
    assert {key: rows[key] for key in others} == others
    assert {"harvest.memory_mb_per_engine", "harvest.pull_mb_per_s"} == others.keys()
    assert len(ROW.findall(SET)) == SET.count("\n| `"), "a row that this does not read"


def test_the_rule_for_an_engine_s_memory_is_the_one_that_is_checked() -> None:
    assert {name: mb / 1024 for name, mb in PROCESS_MB.items()} == {"vllm": 1.5, "reference": 0.5}
    assert {name: mb / 1024 for name, mb in GPU_MB.items()} == {"vllm": 3.0, "reference": 2.0}
    assert "vLLM 1.5 GiB + 3 GiB a GPU; reference engine 0.5 GiB + 2 GiB a GPU" in SET
    assert ("2.25 V + processes" in SET, "B + 0.25 V + processes" in SET) == (True, True)
    whole, nothing = 2 * 8_000_000_000, engine_host_mb(PublishedSize(0, 0), "vllm", 1)
    assert nothing == 1 + PROCESS_MB["vllm"] + GPU_MB["vllm"]
    assert abs(engine_host_mb(PublishedSize(whole, 0), "vllm", 1) - nothing - 2.25 * whole / 2**20) <= 1
    figures = [engine_host_mb(PublishedSize(whole, base), "vllm", 1) for base in (0, whole)]
    assert "{:,} MiB, as adapters {:,} MiB".format(*figures) in SET
