"""A plugin of pytest that records the names of the CUDA kernels that tests launch:

PYTHONPATH=tests pytest -p record_kernels --kernels FILE tests

One name a line; a worker of pytest-xdist adds its name to the file's. Kernels of processes that a
test starts are not seen, and a test that profiles cannot run under it: -k "not profiler".
tools/testing/kernel_coverage.py compares the names with what is compiled.
"""

from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def pytest_addoption(parser):
    parser.addoption("--kernels", type=Path, required=True, help="a file for the names")


class Recorder:
    def __init__(self, path):
        self.names = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        # All that it records is on the device, by CUPTI: calls of torch are not slowed down.
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
            try:
                result = yield
            finally:
                torch.cuda.synchronize()
        events = profiled.profiler.kineto_results.events()
        launched = {e.name() for e in events if e.device_type() == DeviceType.CUDA}
        for name in sorted(launched - self.names):
            print(name, file=self.file, flush=True)  # at once: a later test may end the process
        self.names |= launched
        return result


def pytest_configure(config):
    if not torch.cuda.is_available():
        raise pytest.UsageError("record_kernels: there is no GPU here")
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    path = config.getoption("kernels")
    config.pluginmanager.register(Recorder(path.with_name(path.name + worker)))
