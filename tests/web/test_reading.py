"""What the pages say of samples: the prompt's row, a group's place, filters, how completions begin; and metrics over steps."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from scavenger.ledger import records as r
from scavenger.protocol.messages import pack_logprobs, pack_tokens
from scavenger.web import app as web
from scavenger.web import pages
from tests.ledger.examples import T0
from tests.web.sites import ledger

TOKEN = "t" * 32
META = {"row": 17, "hint": "<b>bold</b>\x1b[2J", "answer": "42"}
#: Of each group of step 5: its prompt's index and retry, and its two samples' rewards.
GROUPS = ((2, 0, 1.0, 1.0), (4, 0, 0.0, 1.0), (4, 1, 0.5, 0.5), (7, 0, 0.0, None))


def records(meta: str) -> list[r.Record]:
    """Groups 500, 510, ...; samples 501 and 502, 511 and 512, ..., of which the first is consumed, or filtered in group 520."""
    made: list[r.Record] = []
    tokens = pack_tokens(tuple(range(100, 300)))
    logprobs = pack_logprobs((-0.5,) * 200)
    for at, (index, retry, *rewards) in enumerate(GROUPS):
        group = 500 + 10 * at
        made.append(
            r.GroupCreated(
                group,
                1,
                "train",
                5,
                index,
                retry,
                1,
                b"\7\0\0\0",
                2,
                group + 1,
                '{"max_tokens": 64}',
                meta,
                T0,
            )
        )
        for sample, reward in enumerate(rewards, group + 1):
            made.append(r.LeaseGranted(sample, 1, 1, 1, 0, T0 + 6))
            made.append(r.ChunkAccepted(sample, 1, 0, tokens, logprobs, logprobs, 1, 1, T0 + 7))
            made.append(r.LeaseEnded(sample, 1, "finished", 200, 0, T0 + 8))
            made.append(r.SampleFinished(sample, "stop", 200, T0 + 8))
            if reward is not None:
                state = "filtered" if group == 520 else "consumed"
                made.append(r.SampleEnded(sample, state, "", 5, 1, reward, 0.0, T0 + 11, ""))
    return made


def client(folder: Path, meta: str = json.dumps(META)) -> TestClient:
    url = ledger(folder, more=[records(meta)])
    return TestClient(web.make_app(url, TOKEN), headers={"Authorization": f"Bearer {TOKEN}"})


def test_a_group_and_its_samples_show_the_row_of_their_prompt_as_text(tmp_path: Path) -> None:
    reader = client(tmp_path)
    for path in ("/groups/500", "/samples/501"):
        said = reader.get(path).text
        assert "&#34;answer&#34;: &#34;42&#34;" in said, path
        assert "&lt;b&gt;bold&lt;/b&gt;\\u001b[2J" in said, path
        assert "<b>" not in said
    assert "The prompt&#39;s row" not in reader.get("/groups/10").text, "nothing came with that prompt"


def test_of_a_prompt_s_row_however_large_the_beginning_is_shown(tmp_path: Path) -> None:
    said = client(tmp_path, json.dumps({"answer": "x" * 200_000})).get("/groups/500").text
    assert "its beginning: 200,014 characters are recorded" in said
    assert len(said) < 100_000


def test_a_group_says_which_of_its_step_it_is(tmp_path: Path) -> None:
    reader = client(tmp_path)
    for path, place in (
        ("/groups/500", "group 1 of 3 of the step (scavenger samples: --group 2)"),
        ("/groups/520", "group 2 of 3 of the step, retry 1 (scavenger samples: --group 4)"),
        ("/samples/531", "group 3 of 3 of the step (scavenger samples: --group 7)"),
    ):
        assert place in reader.get(path).text, path


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ("filtered", [521, 522]),
        ("all+rewards+equal", [501, 502, 521, 522]),
        ("all", [501, 502, 511, 512, 521, 522, 531, 532]),
    ],
)
def test_samples_of_groups_that_teach_nothing_are_a_filter(
    tmp_path: Path, chosen: str, kept: list[int]
) -> None:
    """A group of one reward alone (530) has nothing that it could be equal to."""
    said = client(tmp_path).get(f"/runs/1/steps/5?only={chosen}").text
    assert [int(one) for one in re.findall(r'href="/samples/(\d+)"', said)] == kept


def test_a_step_s_table_has_how_each_completion_begins_and_no_more(tmp_path: Path) -> None:
    said = client(tmp_path).get("/runs/1/steps/5").text
    cells = re.findall(r"<td>(&lt;w100&gt;[^<]*)</td>", said)
    assert len(cells) == 8
    assert {len(html.unescape(one)) for one in cells} == {pages.MOST_BEGINNING}
    assert all(one.endswith("\u2026") for one in cells)
    assert "<w100>" not in said


def test_a_step_is_shown_without_its_texts_where_the_tokenizer_cannot_be_used(tmp_path: Path) -> None:
    reader = client(tmp_path)
    (tmp_path / "tokenizer.json").write_text("null")
    said = reader.get("/runs/1/steps/5").text
    assert "cannot be used" in said
    assert '<a href="/samples/501">501</a>' in said


def test_a_run_s_metrics_are_drawn_over_time_or_over_steps(tmp_path: Path) -> None:
    reader = client(tmp_path)
    by_time, by_step = (reader.get(f"/runs/1{query}").text for query in ("", "?by=step"))
    assert ('<a href="/runs/1?by=step">over steps</a>' in by_time, "step 1</text>" in by_time) == (
        True,
        False,
    )
    assert ('<a href="/runs/1?by=step" aria-current="true">' in by_step, "step 1</text>" in by_step) == (
        True,
        True,
    )
    assert 'class="mark"' in by_time
    (metrics,) = re.findall(r">Metrics</h2>.*?</section>", by_step, re.DOTALL)
    assert 'class="mark"' not in metrics, "an engine leaves at a time, not at a step"
