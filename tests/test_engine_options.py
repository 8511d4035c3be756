"""What a run may pass on to vLLM: ours are refused everywhere; harvested engines take plain values and what the admin allows."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rollout.engines.base import EngineHost
from rollout.engines.vllm import setup
from scavenger.config import RunConfig
from scavenger.errors import EngineError
from scavenger.protocol import engine_options
from scavenger.protocol.messages import Denied, Drain, EngineSpec, Welcome
from scavenger.router.core.state import RouterLimits
from tests.router.harness import SPEC, Bench, open_body
from tests.router.moves import W1
from trainer.prepare import engines
from trainer.serving import adapters_beside_base


@pytest.mark.parametrize("name", sorted(engine_options.OWNED))
def test_what_the_run_or_its_job_decides_is_refused_everywhere(name: str) -> None:
    for harvested in (False, True):
        found = engine_options.fault({name: 1}, harvested=harvested, allowed=[name])
        assert found is not None
        assert f"engine.vllm.{name} cannot be set" in found[0]


@pytest.mark.parametrize(
    "options",
    [
        {"kv_transfer_config": {"kv_connector_module_path": "evil"}},
        {"speculative_config": {"method": "custom_class", "model": "evil.Proposer"}},
        {"compilation_config": {"backend": "evil.backend"}},
        {"scheduler_cls": "evil.Scheduler"},
        {"kv_cache_dtype": "../../somewhere"},
        {"attention_backend": "evil.module:Backend"},
        {"cudagraph_capture_sizes": ["1"]},
        {"moe_backend": {"a": 1}},
        {"log_config_file": "/etc/passwd"},
    ],
)
def test_harvested_engines_take_nothing_that_could_name_code_or_files(options: dict[str, Any]) -> None:
    assert engine_options.fault(options, harvested=True) is not None
    assert engine_options.fault(options, harvested=False) is None
    assert engine_options.fault(options, harvested=True, allowed=list(options)) is None


def test_plain_values_are_taken() -> None:
    options = {"enable_expert_parallel": True, "kv_cache_dtype": "fp8", "cudagraph_capture_sizes": [1, 2, 4]}
    assert engine_options.fault(options, harvested=True) is None
    assert engine_options.decode(engine_options.encode(options)) == options
    assert engine_options.fault({"not an option": 1}, harvested=False) is not None


def test_a_configuration_with_an_option_of_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch says it"):
        RunConfig.model_validate(
            {"run": {"name": "r"}, "model": {"path": "m"}, "engine": {"vllm": {"max_num_seqs": 4}}}
        )


@pytest.mark.parametrize(
    ("allowed", "harvest", "opened"), [((), True, False), (("scheduler_cls",), True, True), ((), False, True)]
)
def test_the_daemon_refuses_the_run_before_anything_is_submitted(
    allowed: tuple[str, ...], harvest: bool, opened: bool
) -> None:
    bench = Bench(limits=RouterLimits(vllm_options=allowed))
    engine = replace(SPEC, options=json.dumps({"scheduler_cls": "evil.Scheduler"}))
    answer = bench.call(replace(open_body(harvest=harvest), engine=engine))
    assert ("r" in bench.router.core.runs) is opened
    if not opened:
        assert isinstance(answer, Denied)
        assert "engine.vllm.scheduler_cls" in answer.reason


@pytest.mark.parametrize(
    ("most", "harvest", "opened"), [(1, True, False), (2, True, False), (3, True, True), (1, False, True)]
)
def test_a_run_whose_engines_take_more_nodes_than_the_site_allows_is_refused(
    most: int, harvest: bool, opened: bool
) -> None:
    bench = Bench(limits=RouterLimits(max_nodes_per_engine=most))
    answer = bench.call(replace(open_body(harvest=harvest), nodes_per_engine=3))
    assert ("r" in bench.router.core.runs) is opened
    if opened:
        (wanted,) = bench.router.demand(bench.now)
        assert (wanted.nodes_per_engine, wanted.gpus) == (3, 3 * wanted.gpus_per_engine)
    else:
        assert isinstance(answer, Denied)
        assert f"run.nodes_per_engine = 3, and this site starts engines of {most} at most" in answer.reason


def _run(engine: dict[str, Any], **more: Any) -> RunConfig:
    run = {
        "name": "r",
        "seed": 1,
        "steps": 1,
        "state_dir": "s",
        "out_dir": "o",
        "gpus_per_engine": 4,
        "nodes_per_engine": 2,
    }
    document = {"run": run, "model": {"path": "m", "context_length": 64}, "sampling": {"max_tokens": 8}}
    return RunConfig.model_validate(document | {"engine": engine} | more)


@pytest.mark.parametrize(
    ("engine", "more", "said"),
    [
        ({"name": "reference"}, {}, 'needs engine.name = "vllm": the reference engine computes on one node'),
        ({"name": "vllm", "vllm": {"pipeline_parallel_size": 3}}, {}, "must divide the engine's 8 GPUs"),
        ({"name": "vllm"}, {"lora": {"rank": 8, "serve": "unmerged"}}, 'needs lora.serve = "merged"'),
    ],
)
def test_what_cannot_span_nodes_is_refused_with_the_configuration(
    engine: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        _run(engine, **more)


def test_the_gpus_of_all_nodes_are_one_engine_s() -> None:
    config = _run({"name": "vllm", "vllm": {"pipeline_parallel_size": 2}})
    assert config.run.engine_gpus == 8
    assert adapters_beside_base(
        _run({"name": "vllm"}, lora={"rank": 8, "targets": ["q_proj"]}), "{}", "cuda"
    ) == (False, "merged: an engine over several nodes merges")


def test_options_that_cannot_be_read_are_refused() -> None:
    answer = Bench().call(replace(open_body(), engine=replace(SPEC, options="[1")))
    assert isinstance(answer, Denied)
    assert "engine.vllm" in answer.reason


def _spec(**options: Any) -> EngineSpec:
    return EngineSpec("vllm", "{}", "bfloat16", 8, 128, options=json.dumps(options))


def test_options_reach_vllm_and_stages_divide_the_gpus(tmp_path: Path) -> None:
    host = EngineHost("r", gpus=4)
    found = setup.arguments(_spec(pipeline_parallel_size=2, kv_cache_dtype="fp8"), host, tmp_path, None, True)
    assert (found["tensor_parallel_size"], found["pipeline_parallel_size"]) == (2, 2)
    assert found["kv_cache_dtype"] == "fp8"
    with pytest.raises(EngineError, match="pipeline_parallel_size = 3, and the engine has 4 GPUs"):
        setup.arguments(_spec(pipeline_parallel_size=3), host, tmp_path, None, True)
    with pytest.raises(EngineError, match="cannot be set"):
        setup.arguments(_spec(trust_remote_code=True), host, tmp_path, None, True)


@pytest.mark.vllm
def test_vllms_own_class_says_names_and_types() -> None:
    engines.check_vllm_options(
        {"max_num_batched_tokens": 4096, "kv_cache_dtype": "fp8", "enable_eplb": False}
    )
    with pytest.raises(Exception, match="did you mean max_num_batched_tokens"):
        engines.check_vllm_options({"max_num_batched_token": 4096})
    with pytest.raises(Exception, match=r"engine\.vllm\.enable_eplb = 'yes'"):
        engines.check_vllm_options({"enable_eplb": "yes"})


@pytest.mark.vllm
def test_every_name_of_ours_and_every_plain_one_is_an_argument_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert names >= engine_options.PLAIN | set(engine_options.OWNED)


def test_a_later_attempt_gives_harvested_engines_no_options_that_its_first_could_not() -> None:
    """Opened with harvesting and none, then without harvesting and with such: engines that were under way get nothing of it."""
    bench = Bench()
    bench.open()
    bench.publish()
    evil = replace(SPEC, options=json.dumps({"scheduler_cls": "evil.Scheduler"}))
    bench.call(replace(open_body(harvest=False), engine=evil))
    assert "r" in bench.router.core.runs
    bench.hello(W1)
    assert bench.take(W1, Welcome) == []
    (left,) = bench.take(W1, Drain)
    assert "engine.vllm.scheduler_cls" in left.reason


def test_a_restarted_daemon_asks_for_no_engine_that_would_get_such_options() -> None:
    """The ledger has the configuration's text of `run.harvest`, which is the trainer's word."""
    bench = Bench()
    evil = replace(SPEC, options=json.dumps({"scheduler_cls": "evil.Scheduler"}))
    body = open_body()
    bench.call(replace(body, harvest=False, engine=evil))
    bench.attempt += 1
    bench.publish()
    bench.restart()
    assert bench.router.core.runs["r"].settings.harvest
    (wanted,) = bench.router.demand(bench.now)
    assert wanted.engines == 0
    assert "engine.vllm.scheduler_cls" in wanted.reason


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_offload_gb": 1},
        {"kv_offloading_size": 1.0},
        {"kv_cache_memory_bytes": -1},
        {"watermark": float("nan")},
        {"max_num_batched_tokens": float("inf")},
        {"cudagraph_capture_sizes": [-1]},
    ],
)
def test_numbers_that_could_harm_a_node_are_not_plain(options: dict[str, Any]) -> None:
    assert engine_options.fault(options, harvested=True) is not None


@pytest.mark.parametrize(
    ("engine", "options", "keeps"),
    [
        ("vllm", "", True),
        ("vllm", '{"enable_prefix_caching": true}', True),
        ("vllm", '{"enable_prefix_caching": false}', False),
        ("vllm", "no table", False),
        ("reference", "", False),
    ],
)
def test_only_vllm_with_its_prefix_cache_on_keeps_prefixes(engine: str, options: str, keeps: bool) -> None:
    assert engine_options.keeps_prefixes(engine, options) is keeps


def test_options_are_not_read_again_for_each_placement_of_a_turn() -> None:
    text = '{"enable_prefix_caching": true, "max_num_seqs": 1234}'
    before = engine_options.keeps_prefixes.cache_info().hits
    assert engine_options.keeps_prefixes("vllm", text)
    assert engine_options.keeps_prefixes("vllm", text)
    assert engine_options.keeps_prefixes.cache_info().hits > before
