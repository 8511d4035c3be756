"""`scavenger ledger tokens` prints what a sample says, from either database."""

from __future__ import annotations

import json
import math
import os
import sys
import tracemalloc
from pathlib import Path

import pytest
import sqlalchemy as sa
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from scavenger.cli import main
from scavenger.errors import ConfigError, LedgerError
from scavenger.ledger import records as r
from scavenger.ledger.read.tokenizer import MOST_BYTES, load_tokenizer
from scavenger.ledger.read.tokens import show
from scavenger.ledger.store import open_engine
from scavenger.protocol.messages import pack_logprobs, pack_tokens
from tests.ledger.examples import T0, chunk, everything, group, moved_group, prologue, written

RAW = [-math.inf, -0.10000000149011612, 0.0]  # the second is a float32


def execute(url: str, sql: str, **parameters: object) -> None:
    engine = open_engine(url)
    with engine.connect() as connection:
        connection.execute(sa.text(sql), parameters)
        connection.commit()
    engine.dispose()


def spoken(url: str, tokenizer: Path) -> None:
    """Sample 21 says 0 1 2, in two chunks; its run's tokenizer lies at `tokenizer`."""
    lease = r.LeaseGranted(21, 1, 2, 1, 0, T0)
    first = r.ChunkAccepted(
        21, 1, 0, pack_tokens([0, 1]), pack_logprobs([-0.5, -1.5]), pack_logprobs(RAW[:2]), 1, 2, T0
    )
    last = r.ChunkAccepted(
        21, 1, 2, pack_tokens([2]), pack_logprobs([-2.5]), pack_logprobs(RAW[2:]), 1, 2, T0
    )
    written(url, [prologue(), [group(20, 21, 2, 3, 1), lease, first, last]])
    words = Tokenizer(WordLevel({"the ": 0, "truth": 1, "!": 2}, unk_token="!"))
    words.decoder = Fuse()
    words.save(str(tokenizer))
    execute(url, "UPDATE runs SET tokenizer = :path", path=str(tokenizer))


def test_ids_are_those_of_all_chunks_in_order(url: str) -> None:
    written(url, everything())
    assert show(url, 11) == "11000 11001 11002 11003 11004 11005 11006 11007 11008\n"


def test_json_has_the_prompt_and_exact_logprobs(url: str, tmp_path: Path) -> None:
    spoken(url, tmp_path / "tokenizer.json")
    found = json.loads(show(url, 21, "json"))
    assert (found["run"], found["step"], found["sample_index"], found["state"]) == ("sorting", 3, 0, "open")
    assert (found["prompt"], found["tokens"]) == ([7, 8, 9], [0, 1, 2])
    assert found["logprobs"] == [-0.5, -1.5, -2.5]
    assert [float(x) for x in found["raw_logprobs"]] == RAW


def test_text_is_what_the_runs_tokenizer_makes_of_it(url: str, tmp_path: Path) -> None:
    spoken(url, tmp_path / "tokenizer.json")
    assert show(url, 21, "text") == "the truth!\n"
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="put it back"):
        show(url, 21, "text")


def test_a_sample_that_said_nothing_yet_has_no_tokens(url: str, tmp_path: Path) -> None:
    spoken(url, tmp_path / "tokenizer.json")
    assert show(url, 22) == "\n"
    assert json.loads(show(url, 22, "json"))["tokens"] == []


def test_a_long_prompt_is_read_once_and_not_with_each_chunk(sqlite_url: str) -> None:
    n, chunks = 100_000, 100
    created = r.GroupCreated(70, 1, "train", 3, 0, 0, 1, bytes(4 * n), 2, 71, '{"max_tokens": 64}', "{}", T0)
    told: list[r.Record] = [created, r.LeaseGranted(71, 1, 2, 1, 0, T0)]
    told += [chunk(71, 1, at, 1, 2) for at in range(chunks)]
    written(sqlite_url, [prologue(), told])
    tracemalloc.start()
    try:
        assert len(show(sqlite_url, 71).split()) == chunks
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 5 * 4 * n


def test_an_unknown_sample_is_named(url: str) -> None:
    written(url, everything())
    with pytest.raises(LedgerError, match="no sample 999"):
        show(url, 999)


def test_dropped_tokens_are_called_dropped_and_lost_ones_lost(url: str) -> None:
    written(url, [prologue(), moved_group()])
    execute(url, "UPDATE samples SET contents = 'dropped' WHERE sample_id = 11")
    with pytest.raises(LedgerError, match="9 tokens of sample 11 were dropped"):
        show(url, 11)
    execute(url, "DELETE FROM chunks WHERE sample_id = 12")
    with pytest.raises(LedgerError, match="sample 12: 0 tokens in its chunks, 4 accepted"):
        show(url, 12)


def test_the_command_prints_them(sqlite_url: str, tmp_path: Path) -> None:
    spoken(sqlite_url, tmp_path / "tokenizer.json")
    (tmp_path / "scavenger.toml").write_text(
        f'[daemon]\nstate_dir = "{tmp_path}/state"\nledger = "{sqlite_url}"\n'
    )
    config = ["--config", str(tmp_path / "scavenger.toml")]
    for fmt, said in (("ids", "0 1 2\n"), ("text", "the truth!\n")):
        done = CliRunner().invoke(main.app, ["ledger", "tokens", "21", "--format", fmt, *config])
        assert (done.exit_code, done.output) == (0, said)


@pytest.mark.parametrize("what", ["fifo", "folder", "/dev/zero", "x" * 5_000, "nul\0", "huge"])
def test_a_tokenizer_that_is_no_file_of_its_size_is_refused_at_once(tmp_path: Path, what: str) -> None:
    """A run's owner says the path; who reads the ledger must neither wait for it nor be filled by it."""
    path = tmp_path / what if what in ("fifo", "folder", "huge") else Path(what)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "huge":
        with path.open("wb") as file:
            file.truncate(MOST_BYTES + 1)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(str(path))


def test_without_the_package_that_makes_text_ids_are_told_and_the_remedy_for_text(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken(url, tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert show(url, 21) == "0 1 2\n"
    with pytest.raises(ConfigError, match=r"tokenizers.*not installed(?s:.*)scavenger\[text\]"):
        show(url, 21, "text")
