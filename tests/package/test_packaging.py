"""What the build writes besides the code: page and bill of materials. It repeats byte for byte."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest
from planted_wheel import MODULE, TOOLS, Wheel, installed

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "setup.py").exists(), reason="needs the source tree"
)
sys.path[:0] = [str(REPOSITORY / name) for name in ("tools/release", "tools/build")]

import check_release  # noqa: E402
import preflight  # noqa: E402
import sbom  # noqa: E402

HOME = "https://example.org/owner/my_ops"
# Not find_spec: looking up pip turns off setuptools' distutils, which torch.compile needs.
NEEDS_PIP = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="pip")), reason="needs pip"
)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated")


def copy_source(folder):
    """The contents of an sdist, in a separate folder."""
    for name in ("csrc", "include", "kernels", "my_ops", "tools/build"):
        ignored = shutil.ignore_patterns(
            "__pycache__", "*.so", "_build.json", "_recurrent.cuh", "_recurrent.hpp"
        )
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


def run(command, cwd, **environment):
    ours = re.compile("MY_OPS_|SOURCE_DATE_EPOCH|TORCH_CUDA_")
    inherited = {name: value for name, value in os.environ.items() if not ours.match(name)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --------------------------------------------------------------------------------------- the page


def metadata(tmp_path, **environment):
    script = "import backend; backend.prepare_metadata_for_build_wheel('.')"
    source = copy_source(tmp_path / "source")
    run([sys.executable, "-c", script], source, PYTHONPATH="tools/build", **environment)
    (file,) = source.glob("*.dist-info/METADATA")
    return BytesParser().parsebytes(file.read_bytes())


def test_links_of_the_page_lead_to_the_repository(tmp_path):
    markdown = pytest.importorskip("markdown_it")
    page = metadata(tmp_path, MY_OPS_HOME=HOME)
    html = markdown.MarkdownIt().render(page.get_payload(decode=True).decode())
    links = re.findall(r"\b(?:href|src|srcset)=\"([^\"]*)\"", html)
    tag = f"/v{check_release.source_version(REPOSITORY)}/"
    files = [link.partition(tag)[2].partition("#")[0] for link in links if link.startswith(HOME)]
    assert "" not in files
    assert len(files) > 10
    assert [name for name in files if not (REPOSITORY / name).exists()] == []
    assert [link for link in links if not re.match("https?://|#", link)] == []
    urls = dict(url.split(", ") for url in page.get_all("Project-URL"))
    assert {"Source", "Documentation", "Changelog", "Issues"} == set(urls)
    assert all(url.startswith(HOME) for url in urls.values())


def test_page_without_a_home_is_the_readme(tmp_path):
    page = metadata(tmp_path)
    assert page.get_payload(decode=True) == (REPOSITORY / "README.md").read_bytes()
    assert page.get_all("Project-URL") is None
    assert page["Description-Content-Type"] == "text/markdown"


# -------------------------------------------------------------------------------------- the sdist


@NEEDS_PIP
def test_downloading_the_sdist_compiles_nothing(tmp_path):
    """On a machine without torch and a compiler: pip only needs the metadata."""
    source = copy_source(tmp_path / "source")
    script = "import backend; backend.build_sdist('.')"
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "torch.py").write_text("raise ImportError('no torch here')")
    bare = {"PATH": str(absent), "CUDA_HOME": str(absent), "PYTHONPATH": str(absent)}
    run([sys.executable, "-c", script], source, **{**bare, "PYTHONPATH": "tools/build"})
    (sdist,) = source.glob("*.tar.gz")
    download = [*PIP[:-1], "download", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    run([*download, "-d", tmp_path / "here", sdist], tmp_path, **bare)
    assert (tmp_path / "here" / sdist.name).exists()
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("csrc", "kernels", "include", "my_ops", "tools/build"):
        here = {p.relative_to(source).as_posix() for p in (source / folder).rglob("*.[chp]*")}
        assert {name for name in here if "__pycache__" not in name} <= inside
    assert {"NOTICE", "LICENSE", "pyproject.toml"} <= inside


# --------------------------------------------------------------------------- the same bytes again


def test_two_sdists_are_the_same(tmp_path):
    """Of two checkouts, of other times and modes, in other folders."""
    script, made = "import backend; backend.build_sdist('.')", []
    for name, mode in (("one", 0o644), ("two", 0o664)):
        source = copy_source(tmp_path / name / f"source {name}")
        for number, path in enumerate(sorted(p for p in source.rglob("*") if p.is_file())):
            path.chmod(mode)
            os.utime(path, (1_700_000_000 + number * mode,) * 2)
        environment = {"PYTHONPATH": "tools/build", "SOURCE_DATE_EPOCH": "1767225600"}
        run([sys.executable, "-B", "-c", script], source, **environment)
        made += source.glob("*.tar.gz")
    first, second = made
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        assert {member.mtime for member in archive} == {1767225600}
        assert {oct(member.mode) for member in archive if member.isfile()} == {"0o644"}
        assert f"{first.name[:-7]}/setup.py" in archive.getnames()


def wheel(source, **environment):
    """Builds the source; returns the path of its wheel."""
    target = source.parent / "dist"
    command = [*PIP, "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", target]
    run([*command, source], source.parent, SOURCE_DATE_EPOCH="1767225600", **environment)
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def next_version():
    major, minor, _ = check_release.source_version(REPOSITORY).split(".")
    return f"{major}.{int(minor) + 1}.0"


@pytest.fixture(scope="module")
def two_builds(next_version, tmp_path_factory):
    """Of the next version, so that what was built for one test shows two things."""
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler")
    wheels = []
    for name in ("one", "two"):
        source = copy_source(tmp_path_factory.mktemp(name) / f"source {name}")
        setup, now = (source / "setup.py").read_text(), check_release.source_version(REPOSITORY)
        assert setup.count(f'VERSION = "{now}"') == 1
        (source / "setup.py").write_text(setup.replace(f'"{now}"', f'"{next_version}"'))
        wheels.append(wheel(source, MY_OPS_WITH_CUDA="0"))
    return wheels


@NEEDS_PIP
def test_two_builds_give_the_same_wheel(two_builds):
    first, second = two_builds
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        names = archive.namelist()
        record = json.loads(archive.read("my_ops/_build.json"))
        (bom,) = (name for name in names if name.endswith(f".dist-info/{sbom.PLACE}"))
        assert json.loads(archive.read(bom)) == sbom.sbom(record)
        assert sum(name.endswith((".dist-info/licenses/NOTICE", "/LICENSE")) for name in names) == 2


# --------------------------------------------------------------------------- the next version


@NEEDS_PIP
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, TOOLS)), reason="needs what checks wheels"
)
def test_wheel_of_the_next_version_passes_every_check(two_builds, next_version):
    assert two_builds[0].name.startswith(f"my_ops-{next_version}-py3-none-")
    said = run(
        [sys.executable, REPOSITORY / "tools/release/check_wheel.py", two_builds[0]], REPOSITORY
    )
    assert "FAILED" not in said


LAYERS_AND_CALLS = """
    import torch, my_ops
    torch.manual_seed(5)
    layers = {
        "Linear": my_ops.nn.LinearActivation(3, 4, activation="gelu"),
        "LSTM": my_ops.nn.LSTM(3, 4, 2, bidirectional=True),
        "GRU": my_ops.nn.GRU(3, 4, batch_first=True),
        "LLTM": my_ops.nn.LLTM(3, 4),
    }
    x = torch.randn(5, 2, 3)
"""
SAVED_BY_THIS_VERSION = """
    torch.save(x, "x")
    for name, layer in layers.items():
        torch.save(layer(x), f"{name}.result")
        torch.save(layer.state_dict(), f"{name}.state")
        torch.save(layer, f"{name}.module")
        torch.jit.script(layer).save(f"{name}.script")
        torch.export.save(torch.export.export(layer, (x,)), f"{name}.pt2")
    print(my_ops.__version__)
"""
LOADED_BY_THE_NEXT = """
    from torch.utils._pytree import tree_leaves
    x = torch.load("x")
    for name, layer in layers.items():
        want = tree_leaves(torch.load(f"{name}.result"))
        layer.load_state_dict(torch.load(f"{name}.state"))
        whole = torch.load(f"{name}.module", weights_only=False)
        program = torch.export.load(f"{name}.pt2").module()
        for again in (layer, whole, torch.jit.load(f"{name}.script"), program):
            got = tree_leaves(again(x))
            assert all(map(torch.equal, got, want)) and len(got) == len(want), (name, again)
    print(my_ops.__version__)
"""


@NEEDS_PIP
def test_what_this_version_saved_loads_in_the_next(two_builds, next_version, tmp_path):
    """Installed over this one, as by an upgrade."""
    pytest.importorskip("wheel")
    if MODULE not in installed():
        pytest.skip("needs the installed wheel, not a build in place")
    environment, program = tmp_path / "environment", tmp_path / "program.py"
    run([sys.executable, "-m", "venv", "--without-pip", environment], tmp_path)
    python = environment / "bin/python"
    (site,) = environment.glob("lib/python3*/site-packages")
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "torch.pth").write_text("\n".join(ours))

    def install(wheel, *options):
        command = [*PIP, "--python", python, "install", "--no-index", "--no-deps", *options, wheel]
        run(command, tmp_path)

    def output(*scripts):
        program.write_text("".join(map(textwrap.dedent, scripts)))
        return run([python, "-W", "ignore", program], tmp_path).strip()

    install(Wheel(installed(), tmp_path).write(), "--ignore-installed")
    now = importlib.metadata.version("my_ops")
    assert output(LAYERS_AND_CALLS, SAVED_BY_THIS_VERSION) == now != next_version
    install(two_builds[0], "--upgrade")
    assert output(LAYERS_AND_CALLS, LOADED_BY_THE_NEXT) == next_version
    with zipfile.ZipFile(two_builds[0]) as archive:
        files = {name for name in archive.namelist() if name.startswith("my_ops/")}
    left = (path for path in (site / "my_ops").rglob("*") if "__pycache__" not in str(path))
    assert {path.relative_to(site).as_posix() for path in left if path.is_file()} == files
    assert [path.name for path in site.glob("my_ops-*")] == [f"my_ops-{next_version}.dist-info"]


# ----------------------------------------------------------------------------- with the CUDA code


@pytest.fixture
def toolkit():
    try:
        return preflight.find_toolkit()
    except preflight.Unfit as unfit:
        pytest.skip(str(unfit))


# Few of the files, so that it takes a minute: flags, link and archive are those of all. The module
# lacks names, and is not loaded. _calls.so includes elementwise_cpu.cpp.
SOME = {"elementwise_cpu.cpp", "elementwise_cuda.cpp", "ragged.cu"}


@NEEDS_PIP
def test_two_builds_give_the_same_cuda_wheel(toolkit, tmp_path):
    """In one place: nvcc makes names from the path. It also puts its process id into some."""
    if not toolkit.takes("--frandom-seed"):
        pytest.skip("this nvcc can put nothing else there")
    environment = {"CUDA_HOME": str(toolkit.home), "TORCH_CUDA_ARCH_LIST": "8.0;9.0a+PTX"}
    source, wheels = tmp_path / "source", []
    for name in ("first", "second"):
        copy_source(source)
        for file in [*source.glob("csrc/*.cpp"), *source.glob("kernels/**/*.c*")]:
            if file.suffix in (".cpp", ".cu") and file.name not in SOME:
                file.unlink()
        built = wheel(source, MY_OPS_WITH_CUDA="1", **environment)
        (tmp_path / name).mkdir()
        wheels.append(built.rename(tmp_path / name / built.name))
        shutil.rmtree(source)
    first, second = wheels
    with zipfile.ZipFile(first) as archive:
        assert b"_ragged_cu_" in archive.read("my_ops/_C.so")
        assert json.loads(archive.read("my_ops/_build.json"))["nvcc"] == toolkit.version
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


# ------------------------------------------------------------------------- the bill of materials


@pytest.mark.parametrize(
    ("nvcc", "inside"),
    [(None, ["torch"]), ("13.0.88", ["torch", "CUDA Runtime (libcudart_static)"])],
)
def test_bill_of_materials(nvcc, inside):
    record = {"version": "1.2.3", "torch_built_against": "2.13.0", "nvcc": nvcc}
    bom = sbom.sbom(record)
    names = [part["name"] for part in bom["components"]]
    assert len(names) == len(inside)
    assert all(map(str.startswith, names, inside))
    assert bom["dependencies"][0]["dependsOn"] == [part["bom-ref"] for part in bom["components"]]
    if nvcc:
        assert bom["components"][1]["version"] == "13.0"


def test_an_editable_install_in_the_folder_above_the_clone(tmp_path):
    """Python finds the package there too, not the clone, which has its name."""
    clone = copy_source(tmp_path / "my_ops")
    setup = (clone / "setup.py").read_text()
    assert "build() if COMPILES else {}" in setup
    (clone / "setup.py").write_text(setup.replace("build() if COMPILES else {}", "{}"))
    run([sys.executable, "-c", "import backend; backend.build_editable('.')"], clone,
        PYTHONPATH="tools/build")  # fmt: skip
    (wheel,) = clone.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = "import importlib.util, site; site.addsitedir('site')"
    script += "; print(importlib.util.find_spec('my_ops').origin)"
    found = run(  # -S: this environment may have the wheel
        [sys.executable, "-IS", "-c", f"import sys; sys.path.insert(0, ''); {script}"], tmp_path
    )
    assert found.strip() == str(clone / "my_ops/__init__.py")
