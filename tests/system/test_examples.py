"""examples/gsm8k as it stands, with the real vLLM: only paths and sizes are other ones, for a model and a data set made here."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from tests.system import play
from tests.system.model import write_small_model

pytest.importorskip("pyarrow", reason="the example reads Parquet")
pytest.importorskip("math_verify", reason="the example's verifier needs the [math] extra")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.mpi,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
#: The tokenizer has digits and a few signs: the example's system turn is not rendered.
TEMPLATE = "{{ messages[-1].content }}"


def write_data(folder: Path) -> None:
    """Problems as a clone of openai/gsm8k has them: question, worked solution, its answer behind ####."""
    from pyarrow import Table, parquet

    folder.mkdir(parents=True)
    for name, first in (("train", 0), ("test", 500)):
        rows = [
            {"question": f"{n}{n + 1}>", "answer": f"so it is #### {n % 10}"}
            for n in range(first, first + 64)
        ]
        parquet.write_table(Table.from_pylist(rows), folder / f"{name}-00000-of-00001.parquet")


def example(site: DemoSite, model: Path, data: Path) -> str:
    """The example's text with other values in some of its lines."""
    text = (play.ROOT / "examples/gsm8k/run.toml").read_text(encoding="utf-8")
    smaller: dict[str, dict[str, Any]] = {
        "run": {
            "steps": 2,
            "state_dir": str(site.state_dir),
            "out_dir": str(site.dir / "out"),
            "max_engines": 1,
        },
        "model": {"path": str(model), "context_length": 48},
        "data": {"path": str(data / "train-*.parquet"), "prompts_per_step": 2, "samples_per_prompt": 4},
        "sampling": {"max_tokens": 16},
        "algorithm": {"overlong_buffer_tokens": 12},
        "reserved": {"workers": 1},
        "eval": {"prompts": 2, "path": str(data / "test-*.parquet")},
        "trainer": {"micro_batch_tokens": 1024},
    }
    for section, keys in smaller.items():
        for key, value in keys.items():
            line = re.compile(rf"(^\[{section}\]\n(?:(?!\[).*\n)*?{key} = ).*$", re.MULTILINE)
            found = line.search(text)
            assert found is not None, f"the example has no {section}.{key}"
            text = text[: found.start()] + found[1] + json.dumps(value) + text[found.end() :]
    return text


def test_the_gsm8k_example_trains_with_vllm_engines(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "gsm8k" / "main"
    write_small_model(model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    write_data(data)
    slow = {"suspect_s": 30.0, "dead_s": 60.0}  # engines share two cores with everything else
    options = SiteOptions(
        "local", tmp_path / "site", demo_layout(grace_s=5.0), poll_interval_s=0.5, max_engines=1, daemon=slow
    )
    with DemoSite(options) as site:
        path = site.dir / "run.toml"
        path.write_text(example(site, model, data))
        play.finish(site, play.submit(site, path, ranks=1), deadline_s=600.0)
        lines = [json.loads(line) for line in (site.dir / "out" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
        trained = "SELECT DISTINCT w.engine FROM chunks c JOIN workers w ON w.worker_id = c.worker_id"
        assert play.ask(site, trained) == [("vllm",)]
        ((tokens,),) = play.ask(site, "SELECT sum(n_tokens) FROM chunks")
        assert tokens > 0
