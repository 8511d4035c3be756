"""Agents' turns on two real vLLM engines: what their prefix caches save, by vLLM's own count, and that the router's belief finds it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("httpx2", reason="needs the extra [gateway]")

from benchmarks import agent_turns_live

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
]


def test_live_the_router_s_turns_find_their_prefixes_and_those_sent_elsewhere_do_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = agent_turns_live.main(["--rounds", "1", "--turns", "4", "--slots", "8"])
    (ours,), (elsewhere,), (sticky,) = (found[name] for name in ("ours", "always elsewhere", "always sticky"))
    assert ours.prompts == elsewhere.prompts == sticky.prompts
    assert ours.computed < 0.8 * elsewhere.computed
    assert ours.back > 0.6  # the rest left a slow engine
    assert elsewhere.back < 0.2 < 0.8 < sticky.back
    assert "median [least, most]" in capsys.readouterr().out
