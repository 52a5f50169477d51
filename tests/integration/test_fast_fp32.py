"""fast_fp32, the switch that runs torch's own products on our kernels. Overrides last as long as
the process, so tests that switch it on run in their own processes."""

import functools
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils import cpp_extension

import my_ops
from my_ops import _fast_fp32, _library

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECKS = [HERE / f"fast_fp32_{what}checks.py" for what in ("", "switch_", "complex_")]
CONVOLUTIONS = [HERE / f"fast_fp32_{what}_checks.py" for what in ("convolution", "depthwise")]
NO_SOURCE = {
    "condition": not shutil.which("c++") or not (ROOT / "csrc").exists(),
    "reason": "needs a C++ compiler and the source tree",
}
NEEDS_SOURCE = pytest.mark.skipif(**NO_SOURCE)


def compiled(source, path, *options):
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", *options]
    folders = [ROOT / "csrc", ROOT / "include", ROOT / "kernels", *cpp_extension.include_paths()]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    done = subprocess.run(
        [
            *("c++", *flags, *(f"-I{folder}" for folder in folders)),
            *(str(source), "-o", str(path)),
            *(*libraries, "-Wl,--no-as-needed", "-ltorch"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """fast_fp32_cpu.cpp, compiled: the switch, with a stand-in on the CPU for our kernels."""
    path = tmp_path_factory.mktemp("fast_fp32") / "fast_fp32.so"
    stable = "-DTORCH_TARGET_VERSION=0x020a000000000000"
    return compiled(HERE / "fast_fp32_cpu.cpp", path, stable)


def child(*arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module", params=["compiled", "python"])
def overrides(request, tmp_path_factory):
    """The kernels that replace torch's. A build for the CPU only has no compiled ones."""
    if request.param == "python":
        return Path("none")
    if _fast_fp32.OVERRIDES.exists():
        return _fast_fp32.OVERRIDES
    if NO_SOURCE["condition"]:
        pytest.skip(NO_SOURCE["reason"])
    path = tmp_path_factory.mktemp("overrides") / _fast_fp32.OVERRIDES.name
    return compiled(ROOT / "csrc/overrides/fast_fp32.cpp", path)


@NEEDS_SOURCE
def test_the_switch(module, overrides, run_pytest):
    run_pytest(*CHECKS, FAST_FP32_MODULE=str(module), FAST_FP32_OVERRIDES=str(overrides))


def test_on_cuda(cuda, overrides, run_pytest):
    run_pytest(*CHECKS, FAST_FP32_OVERRIDES=str(overrides))


def compiled_only(overrides):
    if not overrides.exists():
        pytest.skip("only compiled kernels replace torch's convolutions")


@NEEDS_SOURCE
def test_convolutions(module, overrides, run_pytest):
    compiled_only(overrides)
    run_pytest(*CONVOLUTIONS, FAST_FP32_MODULE=str(module), FAST_FP32_OVERRIDES=str(overrides))


def test_convolutions_on_cuda(cuda, overrides, run_pytest):
    compiled_only(overrides)
    run_pytest(*CONVOLUTIONS, FAST_FP32_OVERRIDES=str(overrides))


SWITCHED = """
    import sys, torch, my_ops
    from pathlib import Path
    from my_ops import _fast_fp32, _library
    _fast_fp32._switch = _fast_fp32.Switch(Path(sys.argv[1]), "CPU")
    a, small = torch.randn(200, 200), torch.randn(4, 4)
"""


def switched(module, program):
    return child("-c", textwrap.dedent(SWITCHED) + textwrap.dedent(program), module)


@NEEDS_SOURCE
def test_an_override_made_before_keeps_its_op(module):
    switched(
        module,
        """
        library = torch.library.Library("aten", "IMPL")
        theirs = lambda a, b: a + b
        library.impl("mm", theirs, "CPU", allow_override=True)
        my_ops.fast_fp32()
        assert my_ops.fast_fp32.report().others == ("mm",)
        assert "not touched: mm" in str(my_ops.fast_fp32.report())
        assert torch.equal(torch.mm(a, a), a + a)
        torch.addmm(a, a, a)
        assert [taken.op for taken in my_ops.fast_fp32.report().taken] == ["addmm"]
        """,
    )


@NEEDS_SOURCE
def test_what_torch_overrides_in_python_is_its_own(module):
    """Such as bmm on CUDA for outer products, since torch 2.13."""
    switched(
        module,
        """
        theirs = (
            "library = torch.library.Library('aten', 'IMPL')\\n"
            "library.impl('bmm', kernel, 'CPU', with_keyset=True, allow_override=True)"
        )
        kernel = lambda keys, a, b: a * b + 1
        path = Path(torch.__file__).with_name("_native") / "registry.py"
        exec(compile(theirs, path, "exec"))
        square = a[None].contiguous()
        my_ops.fast_fp32()
        assert my_ops.fast_fp32.report().others == ()
        torch.testing.assert_close(torch.bmm(square, square), (a @ a)[None], atol=1e-3, rtol=0)
        assert "bmm" in [taken.op for taken in my_ops.fast_fp32.report().taken]
        column, row = torch.randn(1, 9000, 1), torch.randn(1, 1, 9000)
        assert torch.equal(torch.bmm(column, row), column * row + 1)
        my_ops.fast_fp32(False)
        assert torch.equal(torch.bmm(square, square), square * square + 1)
        """,
    )


@pytest.mark.parametrize(
    ("running", "built", "tested", "fit"),
    [
        ("2.13.0+cpu", 213, (210, 215), True),
        ("2.10.1", 215, (210, 215), True),
        ("2.16.0a0+git1", 216, (210, 215), True),
        ("2.16.0", 215, (210, 215), False),
        ("2.13.0", 216, (210, 215), False),
        ("3.1.0", 301, (210, 215), True),
    ],
)
def test_releases_of_torch_that_the_overrides_fit(monkeypatch, running, built, tested, fit):
    """And the plain calls, which _library.cpp_module loads too."""
    stand_in = SimpleNamespace(release=lambda: built)
    monkeypatch.setattr(torch, "__version__", running)
    found = _library.cpp_module(Path("module"), "release", tested, lambda path: stand_in)
    assert found is (stand_in if fit else None)


def test_overrides_that_do_not_load(tmp_path):
    (tmp_path / "no_module.so").write_bytes(b"no module")
    for name in ("none", "no_module.so"):
        assert _library.cpp_module(tmp_path / name, "release", (210, 215)) is None


@NEEDS_SOURCE
def test_without_torch_s_table_of_kernels(module):
    """What was registered before is called, whoever registered it."""
    switched(
        module,
        """
        library = torch.library.Library("aten", "IMPL")
        library.impl("mm", lambda a, b: a + b, "CPU", allow_override=True)
        _fast_fp32.dispatch_table = lambda op: ""
        my_ops.fast_fp32()
        assert torch.equal(torch.mm(small, small), small + small)
        torch.mm(a, a)
        assert [taken.op for taken in my_ops.fast_fp32.report().taken] == ["mm"]
        """,
    )


@NEEDS_SOURCE
def test_after_a_first_call_that_failed(module):
    switched(
        module,
        """
        dispatch_table, _fast_fp32.dispatch_table = _fast_fp32.dispatch_table, None
        try:
            my_ops.fast_fp32()
        except TypeError:
            pass
        _fast_fp32.dispatch_table = dispatch_table
        my_ops.fast_fp32()
        torch.mm(a, a)
        assert [taken.op for taken in my_ops.fast_fp32.report().taken] == ["mm"]
        """,
    )


@NEEDS_SOURCE
@pytest.mark.parametrize(
    "first",
    [
        "with FakeTensorMode(): my_ops.fast_fp32()",
        "torch.func.functionalize(lambda x: (my_ops.fast_fp32(), x + 1)[1])(a)",
        "torch.func.grad(lambda x: (my_ops.fast_fp32(), x.sum())[1])(a)",
        "torch.func.vmap(lambda x: (my_ops.fast_fp32(), x)[1])(a)",
        "with mock.patch.object(torch, 'zeros', on_meta): my_ops.fast_fp32()",
        "with torch.inference_mode(), torch.device('meta'): my_ops.fast_fp32()",
    ],
)
def test_switched_on_first_inside_a_mode(module, first):
    switched(
        module,
        f"""
        from unittest import mock
        from torch._subclasses import FakeTensorMode
        zeros = torch.zeros
        on_meta = lambda *sizes, **options: zeros(*sizes, **{{**options, "device": "meta"}})
        {first}
        a @ a
        assert [taken.op for taken in my_ops.fast_fp32.report().taken] == ["mm"]
        """,
    )


@NEEDS_SOURCE
def test_switching_on_warns_of_nothing(module):
    assert switched(module, "my_ops.fast_fp32()").stderr == ""


def test_without_products_to_take():
    """On the CPU, and in CPU builds, the switch has no effect."""
    program = """
        import torch, my_ops
        with my_ops.fast_fp32():
            assert my_ops.fast_fp32.report().on
            torch.mm(torch.ones(300, 300), torch.ones(300, 300))
        report = my_ops.fast_fp32.report()
        assert not report.on and not report.taken and not report.others
        assert str(report).startswith("fast_fp32 is off")
    """
    child("-c", textwrap.dedent(program))


@pytest.mark.parametrize(
    ("gpu", "kernels", "why"),
    [
        (True, True, ""),
        (True, False, ": this build of my_ops is for the CPU only"),
        (False, True, ": torch sees no GPU"),
        (False, False, ": torch sees no GPU"),
    ],
)
def test_report_without_products_says_why(gpu, kernels, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(_fast_fp32, "_switch", SimpleNamespace(has_kernels=lambda: kernels))
    report = _fast_fp32.Report(True, (), {}, ())
    assert str(report) == f"fast_fp32 is on; no product taken{why}"
    assert str(report._replace(on=False)) == "fast_fp32 is off"


def test_report_shows_the_most_frequent_shapes():
    taken = tuple(_fast_fp32.Taken("mm", 1, m, 8, 8, m) for m in range(1, 101))
    lines = str(_fast_fp32.Report(True, taken, {}, ())).splitlines()
    assert len(lines) == 2 + _fast_fp32.SHOWN
    assert lines[1].split() == ["taken", "100", "mm", "100", "x", "8", "x", "8"]
    others = sum(range(1, 101 - _fast_fp32.SHOWN))
    assert lines[-1].split() == ["taken", str(others), "of", "70", "other", "shapes"]


@NEEDS_SOURCE
def test_the_page_shows_a_report():
    taken = (_fast_fp32.Taken("addmm", 1, 8192, 1024, 1024, 600),)
    left = {"that torch computes as fast": 40, "while TF32 is allowed": 2}
    page = (Path(__file__).resolve().parents[2] / "docs/fast_fp32.md").read_text()
    assert str(_fast_fp32.Report(True, taken, left, ("bmm",))) in page


# ------------------------------------------------------------------------------------- the call


@pytest.mark.parametrize("mode", ["off", "", None, 1, [], torch.tensor(False), child])
def test_the_mode_is_a_bool(mode):
    """As for torch.set_grad_enabled. "off" would switch it on."""
    with pytest.raises(TypeError, match="fast_fp32: mode must be a bool, got "):
        my_ops.fast_fp32(mode)
    assert not my_ops.fast_fp32.report().on


async def coroutine():
    pass


async def asynchronous_generator():
    yield


def generator():
    yield


class Generating:
    def __call__(self):
        yield


@pytest.mark.parametrize(
    "decorated, what",
    [
        (generator, "got generator, a generator"),
        (coroutine, "got coroutine, a coroutine"),
        (asynchronous_generator, "got asynchronous_generator, a generator"),
        (
            functools.partial(functools.partial(generator)),
            r"got functools.partial\(.*, a generator",
        ),
        (Generating(), "got <.*Generating.*>, a generator"),
        (Generating, "got Generating, a class"),
        (None, "got None, of type NoneType"),
    ],
)
def test_what_it_cannot_decorate(decorated, what):
    with pytest.raises(TypeError, match=f"fast_fp32: must decorate .* {what}; use a with"):
        my_ops.fast_fp32()(decorated)
    assert not my_ops.fast_fp32.report().on


def test_what_it_decorates():
    on = my_ops.fast_fp32()(functools.partial(lambda x: (x, my_ops.fast_fp32.report().on)))
    assert on(3) == (3, True)
    layer = my_ops.fast_fp32()(torch.nn.Linear(2, 3))
    assert layer(torch.ones(2)).shape == (3,)
    assert not my_ops.fast_fp32.report().on


def test_a_switch_works_in_every_with_statement(run_python):
    """As torch.set_grad_enabled does: the state at the end is that before the switch was made."""
    run_python("""
        import my_ops

        for mode in (True, False):
            my_ops.fast_fp32(not mode)
            switch = my_ops.fast_fp32(mode)
            for _ in range(2):
                my_ops.fast_fp32(not mode)
                with switch:
                    assert my_ops.fast_fp32.report().on == mode
                assert my_ops.fast_fp32.report().on != mode
    """)
