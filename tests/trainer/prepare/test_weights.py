"""Before a job is submitted: adapters that no layer can have and weights that engines could not fetch are refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from scavenger.config import read_run
from scavenger.errors import ConfigError
from scavenger.weights import rdma
from tests.trainer.prepare.hand import NO_GPU, change, refused, weights_told
from trainer.prepare import check, model, weights


def settled(run: Path, section: str, lines: str) -> None:
    """Add keys to a section of the drafted file, which may have none of it yet."""
    text = run.read_text()
    if f"[{section}]\n" not in text:
        run.write_text(f"{text}\n[{section}]\n")
    change(run, f"[{section}]\n", f"[{section}]\n{lines}\n")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (
            "lm_head",
            "lm_head is the output head, whose weight many models share with the embeddings; set lora.rank = 0",
        ),
        ("embed_tokens", "embed_tokens is Embedding, no linear layer"),
        ("input_layernorm", "no linear layer"),
        ("c_attn", "no layer of 'c_attn' is in the model"),
        ("proj", "no layer of 'proj' is in the model"),
    ],
)
def test_an_adapter_that_no_layer_can_have_is_refused_before_the_job(
    run: Path, target: str, why: str
) -> None:
    change(run, "rank = 0  ", f'targets = ["q_proj", "{target}"]\nrank = 4')
    with pytest.raises(ConfigError, match=f"lora.targets: {target} cannot have an adapter: ") as found:
        weights.check_adapters(read_run(run))
    assert why in found.value.cause
    assert (
        found.value.remedy
        == "name linear layers inside the decoder: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )


def test_adapters_and_their_base_are_among_the_checks(run: Path) -> None:
    change(run, "rank = 0  ", 'targets = ["q_proj", "down_proj"]\nrank = 4')
    findings = {finding.what: finding for finding in check.check(run, NO_GPU)}
    assert findings["adapters"].note == (
        "rank 4 beside 4 layers; served by engines on GPUs merged: "
        "the reference engine keeps adapters beside their base only where it is told to"
    )
    assert "on a base of 0 MiB" in findings["weights"].note
    assert not any(finding.problem for finding in findings.values())
    change(run, '"q_proj"', '"lm_head"')
    assert refused(run).keys() == {"adapters"}


def test_a_tokenizer_that_travels_with_the_weights_is_counted(run: Path) -> None:
    def size() -> tuple[int, int]:
        config = read_run(run)
        found = weights.version_of(config, model.read_facts(config.model.path))
        return found.nbytes, found.base

    alone, _ = size()
    change(run, "[sampling]", '[sampling]\nstop = ["1"]')
    tokenizer = (read_run(run).model.path / "tokenizer.json").stat().st_size
    assert size() == (alone + tokenizer, 0)
    change(run, "rank = 0  ", "rank = 4")
    assert size() == (alone, 2 * alone + tokenizer), "the base is stored in float32"


def test_a_spool_that_cannot_be_written_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / "spool"
    settled(run, "weights", f'spool_dir = "{spool}"')
    assert "REFUSED" not in weights_told(run)
    assert not spool.exists(), "looked at, not made"
    spool.write_text("a file")
    assert f"REFUSED weights.spool_dir = '{spool}': {spool} is no folder" in weights_told(run)
    assert "remedy: name a folder that engines and all ranks see and may write" in weights_told(run)
    spool.unlink()
    spool.mkdir()
    may = os.access  # whoever runs this may be root, who may all
    monkeypatch.setattr(os, "access", lambda path, mode: path != spool and may(path, mode))
    assert f"{spool} cannot be written by this user" in weights_told(run)


def test_a_spool_without_room_for_three_versions_is_refused_with_both_figures(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(run, "weights", f'spool_dir = "{tmp_path}"')
    parameters = model.read_facts(read_run(run).model.path).parameters
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=6 * parameters - 1))
    assert "REFUSED" in weights_told(run)
    assert "is to hold 3 versions of" in weights_told(run)
    (tmp_path / "my-run" / "version-1").mkdir(parents=True)
    (tmp_path / "my-run" / "version-1" / "weights.bin").write_bytes(b"x")  # goes when a newer one comes
    assert "REFUSED" not in weights_told(run)


def test_weights_that_engines_could_not_fetch_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(run, "weights", 'listen = "127.0.0.1"\nnixl = true')
    assert 'remedy: set weights.listen = "0.0.0.0"' in weights_told(run, nodes=2)
    monkeypatch.setattr(rdma, "installed", lambda: False)
    assert "pip install 'scavenger[nixl]'" in weights_told(run)
    monkeypatch.setattr(rdma, "installed", lambda: True)
    assert "REFUSED" not in weights_told(run)
