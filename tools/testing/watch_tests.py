"""A pytest plugin for mutants.py: how long each test takes, and which lines of my_ops it runs."""

import json
import os
from pathlib import Path

import coverage
import pytest

FOUND = Path(os.environ["WATCH_TESTS"])

cover = coverage.Coverage(
    data_file=None, config_file=False, source=[os.environ["WATCH_SOURCE"]], messages=False
)
cover.start()  # before my_ops is imported: code that runs then belongs to no test
seconds, skipped = {}, set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    cover.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report):
    seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    if report.skipped:
        skipped.add(report.nodeid)


def pytest_sessionfinish():
    cover.stop()
    data = cover.get_data()
    lines = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
    ran = {test: duration for test, duration in seconds.items() if test not in skipped}
    FOUND.write_text(json.dumps({"seconds": ran, "lines": lines}))
