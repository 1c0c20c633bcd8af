"""How the test-suite is spread over processes."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Hand out files as they are collected. By number of tests, files of one long test would come last, and one process
    would wait for the other."""
    config.option.loadscopereorder = False
