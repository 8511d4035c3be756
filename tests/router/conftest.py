"""Prints what the random schedules reached at the end of a run that played them."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, value in getattr(report, "user_properties", []):
            if name == "coverage" and report.when == "call":
                terminalreporter.section("random schedules of the router")
                terminalreporter.write_line(str(value))
