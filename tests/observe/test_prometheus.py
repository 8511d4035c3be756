"""docs/grafana.json and the alerts of docs/admin.md in a real Prometheus: what Grafana would ask is answered, by a daemon's own figures.

Grafana itself is in no package index that a clone reaches. What it does with a board is done here: its variables are asked for and put into
every expression. A test marked `long` holds the board against the types that Grafana publishes.
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scavenger.ledger import records as rec
from scavenger.observe.exporter import Exporter
from scavenger.observe.metrics import METRICS
from tests.observe.test_metrics import EXPORTED, alerts, reading, worked
from tests.test_daemon_start import running, site

pytestmark = pytest.mark.prometheus

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
BOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana.json").read_text(encoding="utf-8"))
SCRAPE_S = 0.25


@dataclass(frozen=True)
class Prometheus:
    address: str

    def get(self, path: str, **words: str) -> Any:
        """`data` of a reply. Raises `AssertionError` with what Prometheus says of a question that it does not understand."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        try:
            with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
                said = json.load(reply)
        except urllib.error.HTTPError as error:
            said = json.load(error)
        assert said["status"] == "success", said["error"]
        return said["data"]

    def series(self, expression: str) -> list[dict[str, Any]]:
        found = self.get("query", query=expression)
        assert found["resultType"] == "vector", expression
        return list(found["result"])

    def until(self, what: str, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < deadline, f"{what}: not within {WAIT_S:g} s"
            time.sleep(0.1)  # between two looks


def until_ready(process: subprocess.Popen[str], log: Path) -> str:
    """Its address, once it answers."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
        if found and "Server is ready to receive web requests" in log.read_text():
            return found[1]
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def exporter() -> Iterator[Exporter]:
    """With the figures of a daemon that worked, in every metric; the test gives it more of them."""
    made = Exporter("127.0.0.1:0")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that never had a run, as a process. Its address for Prometheus."""
    config = site(tmp_path_factory.mktemp("site"), prometheus={"listen": "127.0.0.1:0"})
    with running(config) as process:
        process.until("/metrics")
        found = re.search(r"http://(\S+)/metrics", process.stderr)
        assert found is not None
        yield found[1]


@pytest.fixture(scope="module")
def prometheus(
    exporter: Exporter, daemon: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "rules.yml").write_text(alerts())
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S * 1000:g}ms", "scrape_timeout": f"{SCRAPE_S * 1000:g}ms"},
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [address]}]}
            for name, address in (("worked", exporter.address), ("daemon", daemon))
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    argv = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*argv, "--web.listen-address=127.0.0.1:0"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )
    try:
        yield Prometheus(until_ready(process, folder / "log"))
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def scraped(prometheus: Prometheus, exporter: Exporter) -> Prometheus:
    """Prometheus after two scrapes between which the daemon worked: a rate of each counter is known."""
    tally = worked()
    tally.add([rec.JobSubmitted("scv-1", 7, 1.0), rec.JobEnded("scv-1", "COMPLETED", "", 2.0)])
    tally.add([rec.SampleEnded(1, "consumed", "", 5, 1, 1.0, 0.0, 5.0)])
    exporter.reading = reading(tally)

    def steps(at_least: int) -> Callable[[], bool]:
        return lambda: bool(prometheus.series(f'scavenger_steps_total{{job="worked"}} >= {at_least}'))

    prometheus.until("the first scrape", steps(2))
    took = '{"seconds": 10.0, "seconds_wait": 4.0}'
    tally.add([rec.StepCommitted(1, 7, "train", 1, 3, took, 15.0)])
    exporter.reading = reading(tally)
    prometheus.until("a scrape after the next step", steps(3))
    prometheus.until("the daemon is scraped", lambda: bool(prometheus.series('up{job="daemon"} == 1')))
    return prometheus


def variables(board: Mapping[str, Any], prometheus: Prometheus) -> dict[str, str]:
    """What Grafana puts in place of each variable where "All" is chosen, as it is at first: `(a|b)`, escaped for PromQL's text."""
    found = {}
    for one in board["templating"]["list"]:
        if one["type"] == "datasource":
            assert one["query"] == "prometheus"
            continue
        asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", one["query"])
        assert asked is not None, one["query"]
        values = prometheus.get(f"label/{asked[2]}/values", **{"match[]": asked[1]})
        assert values, f"nothing to choose from for ${one['name']}"
        escaped = (re.sub(r"[\\$^*{}\[\]'+?.()|]", r"\\\\\g<0>", value) for value in values)
        found[one["name"]] = f"({'|'.join(escaped)})"
    return found


def unanswered(board: Mapping[str, Any], prometheus: Prometheus) -> list[str]:
    """Panels' questions that Prometheus does not understand, or has no number or no such label for."""
    chosen = variables(board, prometheus)
    found = []
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = re.sub(r"\$(\w+)", lambda name: chosen[name[1]], target["expr"])
            try:
                series = prometheus.series(expression)
            except AssertionError as error:
                found.append(f"{panel['title']}: {target['expr']}: {error}")
                continue
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - {
                "cluster"
            }  # none: the daemon's own
            good = [one for one in series if math.isfinite(float(one["value"][1]))]
            if not good or not all(wanted <= one["metric"].keys() for one in good):
                found.append(f"{panel['title']}: {target['expr']}: {series}")
    return found


def test_every_question_of_the_board_is_answered(scraped: Prometheus) -> None:
    assert len(variables(BOARD, scraped)) == 2
    assert sum(len(panel["targets"]) for panel in BOARD["panels"]) > 30
    assert unanswered(BOARD, scraped) == []


def test_the_share_that_a_run_waited_is_the_ledger_s(scraped: Prometheus) -> None:
    """The step that came between two scrapes took 10 s, 4 of them waiting."""
    (panel,) = [one for one in BOARD["panels"] if one["title"] == "Share of step time spent waiting"]
    expression = re.sub(r"\$(instance|run)", ".*", panel["targets"][0]["expr"])
    (found,) = scraped.series(expression)
    assert float(found["value"][1]) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        ("scavenger_gpus{", "scavenger_gpu{", "[]"),
        ("sum by (state) (", "sum by (state) ((", "parse error"),
        ("sum by (source) (", "sum by (kind) (", "'metric': {}"),
    ],
)
def test_a_board_with_a_mistake_is_found(scraped: Prometheus, right: str, wrong: str, why: str) -> None:
    board = copy.deepcopy(BOARD)
    target = next(
        target for panel in board["panels"] for target in panel["targets"] if right in target["expr"]
    )
    target["expr"] = target["expr"].replace(right, wrong)
    (told,) = unanswered(board, scraped)
    assert target["expr"] in told
    assert why in told


def test_prometheus_knows_every_metric_of_a_daemon_that_has_just_started(scraped: Prometheus) -> None:
    told = scraped.get("targets/metadata", match_target='{job="daemon"}')
    types = {one["metric"]: one["type"] for one in told}
    expected = {one.exported: one.kind for one in METRICS}
    # OpenMetrics names a counter's family without its `_total`; which format is spoken is Prometheus's choice.
    found = {name: types.get(name) or types.get(name.removesuffix("_total")) for name in EXPORTED}
    assert found == expected


def test_the_alerts_are_rules_that_prometheus_takes(scraped: Prometheus) -> None:
    def healths() -> list[str]:
        return [rule["health"] for group in scraped.get("rules")["groups"] for rule in group["rules"]]

    expressions = [rule["query"] for group in scraped.get("rules")["groups"] for rule in group["rules"]]
    assert len(expressions) == len(re.findall(r"- alert:", alerts()))
    for expression in expressions:
        scraped.series(expression)
    assert "err" not in healths()


def fires(scraped: Prometheus, alert: str, job: str) -> bool:
    """Whether the condition holds now for one of the targets; how long it must hold is Prometheus's matter."""
    (rule,) = [
        rule for group in scraped.get("rules")["groups"] for rule in group["rules"] if rule["name"] == alert
    ]
    (address,) = [one["metric"]["instance"] for one in scraped.series(f'up{{job="{job}"}}')]
    return any(one["metric"].get("instance") == address for one in scraped.series(rule["query"]))


@pytest.mark.parametrize(
    ("alert", "job", "expected"),
    [
        ("NodesQuarantined", "worked", True),
        ("NodesQuarantined", "daemon", False),
        ("SlurmUnseen", "worked", True),  # at second 8 of the epoch
        ("SlurmUnseen", "daemon", False),  # its local cluster does not run: never seen is not lost
        ("LedgerLags", "worked", False),
        ("LedgerLags", "daemon", False),
    ],
)
def test_an_alert_s_condition_holds_where_it_should(
    scraped: Prometheus, alert: str, job: str, expected: bool
) -> None:
    assert fires(scraped, alert, job) is expected


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", [None, ('"schemaVersion": 39', '"schemaVersion": "39"')])
def test_the_board_is_one_by_grafana_s_published_types(
    tmp_path: Path, mistake: tuple[str, str] | None
) -> None:
    """`@grafana/schema`, which Grafana's own front end is compiled with, from npm."""
    if shutil.which("npm") is None:
        pytest.skip("no npm here")
    npm = ["npm", "install", "--no-audit", "--no-fund", "@grafana/schema@13", "typescript@5"]
    subprocess.run(npm, cwd=tmp_path, capture_output=True, timeout=300, check=True)
    text = (ROOT / "docs/grafana.json").read_text(encoding="utf-8")
    if mistake:
        assert mistake[0] in text
        text = text.replace(*mistake)
    head = 'import type { Dashboard } from "@grafana/schema";\nexport const board: Dashboard = '
    (tmp_path / "board.ts").write_text(f"{head}{text};\n")
    done = subprocess.run(
        [
            "npx",
            "tsc",
            *[
                "--noEmit",
                "--strict",
                "--skipLibCheck",
                "--module",
                "esnext",
                "--moduleResolution",
                "bundler",
            ],
            "board.ts",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode == 0) is (mistake is None), done.stdout
    assert mistake is None or "is not assignable" in done.stdout


def test_the_board_is_imported_without_a_question_but_for_its_data_source() -> None:
    """By Grafana's documented form: no id of another Grafana's, and a data source by a variable, so that no `__inputs` need an edit."""
    assert "id" not in BOARD or BOARD["id"] is None
    assert "__inputs" not in BOARD
    assert BOARD["uid"]
    by_variable = {"type": "prometheus", "uid": "${datasource}"}
    assert [one["name"] for one in BOARD["templating"]["list"] if one["type"] == "datasource"] == [
        "datasource"
    ]
    panels = BOARD["panels"]
    assert all(one["datasource"] == by_variable for one in panels)
    assert all(target["datasource"] == by_variable for one in panels for target in one["targets"])
    assert len({one["id"] for one in panels}) == len(panels)
    cells = [
        (x, y)
        for one in panels
        for x in range(one["gridPos"]["x"], one["gridPos"]["x"] + one["gridPos"]["w"])
        for y in range(one["gridPos"]["y"], one["gridPos"]["y"] + one["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels lie on each other"
    assert max(x for x, _ in cells) < 24, "Grafana's grid is 24 wide"
