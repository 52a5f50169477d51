"""Fixtures of the whole suite: devices, seeds, poisoned memory, rejected calls."""

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

# cuBLAS reads this when it starts. Without it, deterministic mode refuses matrix products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import hypothesis
import pytest
import torch

# What tests share is here, what those of one folder share is in the folder: under any import mode.
HERE = Path(__file__).parent
FOLDERS = [str(HERE), *sorted({str(path.parent) for path in HERE.glob("*/test_*.py")})]
sys.path[:0] = FOLDERS

pytest.register_assert_rewrite("samples", "strided", "precision")

# Plans are tested with the costs of the package, not with those that `tune` has measured here.
with pytest.MonkeyPatch.context() as untuned:
    untuned.setenv("MY_OPS_CACHE", os.devnull)
    import my_ops  # noqa: F401

hypothesis.settings.register_profile(
    "my_ops", deadline=None, derandomize=True, database=None, max_examples=100
)
hypothesis.settings.load_profile("my_ops")

LIBC = ctypes.CDLL(None)
M_PERTURB = -6  # in glibc's malloc.h: the byte to fill with, inverted

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def pytest_addoption(parser):
    text = "of each test that is not slow, as many cases as show every value of its parameters; "
    text += "nothing of tests/package; the default of pytest without arguments"
    parser.addoption("--sample", action="store_true", help=text)


def pytest_configure(config):
    options = config.option
    if config.args_source is config.ArgsSource.TESTPATHS and not options.keyword:
        options.sample = True  # here, because xdist hands the options to its workers


def pytest_ignore_collect(collection_path, config):
    return True if config.option.sample and collection_path == HERE / "package" else None


def pytest_collection_modifyitems(config, items):
    # Its wheels and programs take longest alone: of two workers none should end with them.
    items.sort(key=lambda item: item.path.parent.name != "package")
    if not config.option.sample:
        return
    seen, left = {}, []
    for item in items[:]:
        skipped = any(mark.args and mark.args[0] for mark in item.iter_markers("skipif"))
        values = getattr(item, "callspec", None)
        shown = {(name, repr(v)) for name, v in values.params.items()} if values else {()}
        of_test = seen.setdefault(item.nodeid.partition("[")[0], set())
        if skipped or shown <= of_test or item.get_closest_marker("slow"):
            left.append(item)
        else:
            of_test |= shown
    config.hook.pytest_deselected(items=left)
    gone = set(map(id, left))
    items[:] = [item for item in items if id(item) not in gone]


def pytest_make_parametrize_id(val):
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    return str(val) if isinstance(val, tuple) else None


def pytest_terminal_summary(terminalreporter):
    """Prints one line per reason to skip. On a machine without a GPU most tests are skipped."""
    skipped = terminalreporter.getreports("skipped")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request):
    return request.param


@pytest.fixture(scope="session", params=[pytest.param("cuda", marks=NEEDS_CUDA)])
def cuda(request):
    return request.param


@pytest.fixture
def captures():
    """For tests that capture a graph: freeing an earlier graph meanwhile would end the capture."""
    gc.collect()


@pytest.fixture
def strict_cublas(cuda):
    """torch's float32 products are computed in float32, not TF32."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """gc.collect() need not look at what stays: tests, modules, and what compiled calls of earlier
    files left in torch's caches. Half a second each, at the end a second."""
    torch.use_deterministic_algorithms(False)  # loads modules of torch
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fills what torch.empty returns with NaN (integers: the largest value), so that an output
    element that no kernel wrote fails the comparison. Results on the CPU come straight from the
    allocator. There the C library fills them with the byte 0xff, which makes NaN and -1."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    LIBC.mallopt(M_PERTURB, 0x100)
    yield
    LIBC.mallopt(M_PERTURB, 0)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def no_stale_graphs():
    yield
    torch.compiler.reset()


@pytest.fixture
def run_pytest():
    """``run_pytest(*arguments, **environment)`` passes in its own process, without this one's
    options and plugins, which may not suit a child of an xdist worker."""
    apart = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(*arguments, **environment):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **apart, **environment},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def run_python():
    """``run_python(script, *arguments, **environment)`` ends with ``status`` in its own process,
    which may use the helpers of the tests; what it printed."""

    def run(script, *arguments, status=0, **environment):
        path = os.pathsep.join(filter(None, [*FOLDERS, os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def rejects():
    """``with rejects(error, match, *tensors):`` the block raises, and the tensors do not change."""

    @contextmanager
    def check(error, match, *tensors):
        before = [(t.detach().clone(), t._version) for t in tensors]
        with pytest.raises(error, match=match):
            yield
        for t, (values, version) in zip(tensors, before, strict=True):
            assert t._version == version
            torch.testing.assert_close(t.detach(), values, rtol=0, atol=0, equal_nan=True)

    return check
