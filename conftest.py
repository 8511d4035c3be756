"""Fixtures that more than one area of the tests uses. Here, because pytest takes plugins from the top-level conftest only."""

pytest_plugins = ["tests.clusters"]
