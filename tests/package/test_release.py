"""What is released: the workflow's matrix and its tables, the index, the checks before it."""

import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".github").is_dir(), reason="needs the repository"
)

sys.path[:0] = [str(REPOSITORY / f"tools/{room}") for room in ("build", "release", "testing")]

import preflight  # noqa: E402

pytest.importorskip("packaging")

import check_release  # noqa: E402
import make_index  # noqa: E402

# Not find_spec: looking up pip turns off setuptools' distutils, which torch.compile needs.
PIP = any(importlib.metadata.distributions(name="pip"))


def matrix(name, key):
    """The value lists `key: [...]` of a workflow, in order of appearance."""
    text = (REPOSITORY / f".github/workflows/{name}.yml").read_text()
    return [
        json.loads(found) for found in re.findall(rf"^ +{key}: (\[\".*\])$", text, re.MULTILINE)
    ]


def table(name):
    """The rows of a page's first table."""
    text = (REPOSITORY / name).read_text().split("|---|", 1)[1]
    rows = re.findall(r"^\|(.*)\|$", text.split("\n\n")[0], re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows if "---" not in row]


def test_wheels_of_the_workflow_are_those_of_the_table():
    rows = table("docs/install.md")
    built, smoked = matrix("wheels", "cuda")
    assert built == smoked == check_release.CUDA
    assert matrix("wheels", "arch") == [check_release.PROCESSORS]
    names = ["my_ops" + (f"+cu{cuda.replace('.', '')}" if cuda else "") for cuda in built]
    assert [row[0].strip("`") for row in rows] == names
    assert [row[1] for row in rows] == [cuda or "12.9" for cuda in built]
    for cuda, row in zip(built, rows, strict=True):
        release = tuple(map(int, (cuda or "12.9").split(".")))
        assert ("12.x" in row[3]) == (release >= (12, 8))
        assert release >= preflight.OLDEST_CUDA


def test_recipe_asks_for_what_the_package_asks_for():
    recipe = (REPOSITORY / "tools/release/recipe.yaml").read_text()
    project = (REPOSITORY / "pyproject.toml").read_text()
    (torch,) = re.findall(r'"torch(>=[\d.]+)"', project)
    (setuptools,) = re.findall(r'^requires = \["setuptools(>=.*)"\]', project, re.MULTILINE)
    assert re.findall(r"- pytorch (.*)$", recipe, re.MULTILINE) == [torch, torch]
    assert re.findall(r"- setuptools (.*)$", recipe, re.MULTILINE) == [setuptools]
    versions = re.findall(r'^  version: "(.*)"$', recipe, re.MULTILINE)
    assert versions == [check_release.source_version(REPOSITORY)]
    for name in re.findall(r"^    - (LICENSE|NOTICE)$", recipe, re.MULTILINE):
        assert (REPOSITORY / name).exists()


README = (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_examples_of_the_readme_print_what_they_say(run_python, code):
    """Without a GPU. The example of a cell, which is generated first, is tested in
    examples/test_examples.py.
    """
    said = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert said
    assert run_python(code, CUDA_VISIBLE_DEVICES="").splitlines() == said


def test_readme_is_short():
    assert len(README.split()) <= 900


def test_build_takes_no_python_that_its_torch_lacks():
    """torch 2.15, with which +cu132 is built, has no wheel for Python 3.10."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    pythons = re.search(r'^build = "cp3(\d)\{(\d)', text, re.MULTILINE)
    assert int(pythons[1] + pythons[2]) >= 11
    ci = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    assert '{python: "3.10", torch: torch-2.10.0' in ci  # so this one is tested there


def test_audit_runs_under_every_python():
    """torch-abi-audit needs 3.11: its requirements have a marker that says so."""
    for name in ("audit.in", "audit.txt"):
        text = (REPOSITORY / "tools/requirements" / name).read_text()
        (line,) = re.findall(r"^torch-abi-audit.*$", text, re.MULTILINE)
        assert re.search(r"; python_(full_)?version >= .3\.11", line)


def test_pages_name_the_processors_of_the_release():
    for page in ("README.md", "docs/install.md", "docs/compatibility.md"):
        text = (REPOSITORY / page).read_text().replace("x86-64", "x86_64")
        assert [name for name in check_release.PROCESSORS if name not in text] == []


def test_prerequisites_are_the_same_everywhere():
    """In every place that states them, and on CI's bare machine, which has nothing else."""
    (packages,) = re.findall("apt install (.*)$", preflight.APT)
    for name in ("README.md", "docs/install.md"):
        assert f"`apt install {packages}`" in (REPOSITORY / name).read_text()
    ci = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    assert f"apt-get install --no-install-recommends -y {packages}\n" in ci
    for target in ("demo", "test"):
        assert f"make {target}" in (REPOSITORY / "README.md").read_text()


def test_readme_says_what_each_of_its_commands_takes():
    shown = set(re.findall(r"^(pip install \.|make \w+)", README, re.MULTILINE))
    rows = re.findall(r"^\| `(.+)` \| [\d.]+ GB \| [\d.]+ GB \| .*minutes", README, re.MULTILINE)
    assert {"pip install .", "make test"} <= shown == set(rows)


def test_bug_form_asks_for_the_report():
    assert "python -m my_ops --json" in (REPOSITORY / ".github/ISSUE_TEMPLATE/bug.yml").read_text()


# -------------------------------------------------------------------------------------- the index


def wheel(folder, version):
    info = f"my_ops-{version}.dist-info"
    files = {
        "my_ops/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: my_ops\nVersion: {version}\nRequires-Python: >=3.10\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    path = folder / f"my_ops-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def index(tmp_path):
    """An index of two wheels, served on this machine."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("0.1.0", "0.1.0+cu130"):
        wheel(folder, version)
    subprocess.run([sys.executable, REPOSITORY / "tools/release/make_index.py", folder], check=True)
    with make_index.served(folder) as url:
        yield folder, url


def download(url, requirement, folder):
    command = [sys.executable, "-m", "pip", "download", "--isolated", "--no-deps", "--no-cache-dir"]
    return subprocess.run(
        [*command, "--disable-pip-version-check", "-i", url, "-d", folder, requirement],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not PIP, reason="needs pip")
@pytest.mark.parametrize(("path", "version"), [("simple", "0.1.0"), ("cu130", "0.1.0+cu130")])
def test_pip_downloads_from_the_index(index, tmp_path, path, version):
    folder, url = index
    done = download(f"{url}/{path}/", "my_ops==0.1.0", tmp_path)
    assert done.returncode == 0, done.stderr
    (name,) = (path.name for path in tmp_path.glob("*.whl"))
    assert f"-{version}-" in name
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize(("path", "version"), [("simple", "0.1.0"), ("cu130", "0.1.0+cu130")])
def test_install_into_a_clean_environment(index, tmp_path, tool, path, version):
    _, url = index
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if not (uv if tool == "uv" else PIP):
        pytest.skip(f"needs {tool}")
    venv = tmp_path / "venv"
    python = venv / "bin/python"
    pip = [python, "-I", "-m", "pip", "--isolated", "--disable-pip-version-check", "install"]
    command = [uv, "pip", "install", "--no-config", "--python", python] if tool == "uv" else pip
    bare = ["--without-pip"] if tool == "uv" else []
    subprocess.run([sys.executable, "-m", "venv", *bare, venv], check=True)
    options = ["--no-cache-dir", "--index-url", f"{url}/{path}/"]
    subprocess.run([*command, *options, "my_ops"], check=True, capture_output=True)
    script = "import my_ops; print(my_ops.__version__)"
    done = subprocess.run(
        [python, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == version


@pytest.mark.skipif(not PIP, reason="needs pip")
def test_pip_refuses_a_changed_file(index, tmp_path):
    folder, url = index
    with (folder / "my_ops-0.1.0-py3-none-any.whl").open("ab") as file:
        file.write(b"changed")
    done = download(f"{url}/simple/", "my_ops==0.1.0", tmp_path)
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()


def test_json_index(index):
    folder, _ = index
    data = json.loads((folder / "simple/my-ops/index.json").read_text())
    assert data["meta"] == {"api-version": "1.1"}
    assert data["versions"] == ["0.1.0"]
    for file in data["files"]:
        content = (folder / file["filename"]).read_bytes()
        assert file["hashes"]["sha256"] == hashlib.sha256(content).hexdigest()
        assert file["requires-python"] == ">=3.10"
        assert (folder / "simple/my-ops" / file["url"]).resolve() == folder / file["filename"]


# ------------------------------------------------------------------------------------ the release


def record(path, **changes):
    """Writes a wheel with a build record alone, or with another one than it has."""
    version, nvcc = path.name.split("-")[1], "12.9.86"
    if "+cu" in version:
        nvcc = "{}.{}.88".format(*re.findall(r"\+cu(\d\d)(\d)", version)[0])
    fields = {"version": version, "nvcc": nvcc, "commit": "a" * 40} | changes
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("my_ops/_build.json", json.dumps(fields))


@pytest.fixture
def release(tmp_path):
    """The files of every wheel of version 0.2.0, and its source's version and changelog."""
    folder = tmp_path / "dist"
    folder.mkdir()
    for cuda in check_release.CUDA:
        local = f"+cu{cuda.replace('.', '')}" if cuda else ""
        for processor in check_release.PROCESSORS:
            record(folder / f"my_ops-0.2.0{local}-py3-none-manylinux_2_28_{processor}.whl")
    (folder / "my_ops-0.2.0.tar.gz").touch()
    (tmp_path / "setup.py").write_text('VERSION = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0 (2026-12-31)\n\n## 0.1.0 (x)\n")
    return tmp_path


def findings(root, tag=None):
    version = check_release.source_version(root)
    files = check_release.check_files(root / "dist", version)
    return [*files, *check_release.check_changelog(root, version, tag)]


def test_release_that_is_ready(release):
    assert findings(release) == findings(release, "v0.2.0") == []
    log = release / "CHANGELOG.md"
    log.write_text(log.read_text().replace("2026-12-31", "unreleased"))
    assert findings(release) == []  # a rehearsal


PLAIN_WHEEL = "dist/my_ops-0.2.0-py3-none-manylinux_2_28_x86_64.whl"
CUDA_WHEEL = "dist/my_ops-0.2.0+cu130-py3-none-manylinux_2_28_aarch64.whl"


@pytest.mark.parametrize(
    ("file", "change", "finding"),
    [
        (CUDA_WHEEL, Path.unlink, "there is no wheel of 0.2.0+cu130 aarch64"),
        (
            CUDA_WHEEL,
            lambda path: path.rename(str(path).replace("0.2.0+cu130", "0.1.0+cu130")),
            "there is a wheel of 0.1.0+cu130 aarch64, which belongs to no release of 0.2.0",
        ),
        (
            CUDA_WHEEL,
            lambda path: path.rename(str(path).replace("manylinux_2_28", "linux")),
            "has no manylinux tag",
        ),
        (
            CUDA_WHEEL,
            lambda path: record(path, nvcc=None),
            "aarch64.whl was built with the compiler None, not with CUDA 13.0",
        ),
        (
            PLAIN_WHEEL,
            lambda path: record(path, nvcc="13.0.88"),
            "x86_64.whl was built with the compiler 13.0.88, not with CUDA 12.9",
        ),
        (
            PLAIN_WHEEL,
            lambda path: record(path, commit="b" * 40),
            f"the wheels are of several commits: {'a' * 40}, {'b' * 40}",
        ),
        ("dist/my_ops-0.2.0.tar.gz", Path.unlink, "the sdists are of [], not of 0.2.0 alone"),
        (
            "setup.py",
            lambda path: path.write_text('VERSION = "0.3.0"\n'),
            "the tag is v0.2.0, and setup.py names version 0.3.0",
        ),
        (
            "CHANGELOG.md",
            lambda path: path.write_text("## 0.2.0 (unreleased)\n"),
            "CHANGELOG.md gives 0.2.0 the date 'unreleased', not one like 2026-12-31",
        ),
        (
            "CHANGELOG.md",
            lambda path: path.write_text("## 0.1.9 (2026-12-31)\n"),
            "CHANGELOG.md begins with '0.1.9 (2026-12-31)', not with '0.2.0 (DATE)'",
        ),
    ],
)
def test_release_with_a_defect(release, file, change, finding):
    change(release / file)
    assert any(finding in said for said in findings(release, "v0.2.0"))


def test_source_is_at_a_version_that_can_be_rehearsed():
    version = check_release.source_version(REPOSITORY)
    assert list(check_release.check_changelog(REPOSITORY, version, None)) == []


def test_the_next_version_passes_the_same_checks(tmp_path):
    """Its number stands in three files. Tests that name a number themselves would fail in a copy of
    the source at another one, or check nothing there."""

    def ignored(path, names):
        results = {"build", "dist", "wheelhouse", *(n for n in names if n[0] == ".")}
        return results - {".github"} if Path(path) == REPOSITORY else {"__pycache__"}

    folder = shutil.copytree(REPOSITORY, tmp_path / "copy", ignore=ignored)
    now, other = check_release.source_version(REPOSITORY), "9.8.7"
    for name, text in (
        ("setup.py", f'VERSION = "{now}"'),
        ("tools/release/recipe.yaml", f'version: "{now}"'),
        ("CHANGELOG.md", f"## {now} ("),
    ):
        source = (folder / name).read_text()
        assert source.count(text) == 1
        (folder / name).write_text(source.replace(text, text.replace(now, other)))
    tests = [folder / f"tests/package/test_{name}.py" for name in ("packaging", "release")]
    names = "links_of_the_page or page_without or bill_of or recipe_asks or can_be_rehearsed"
    command = [sys.executable, "-m", "pytest", "-c", folder / "pyproject.toml", "-q", "-k", names]
    done = subprocess.run(
        [*command, "--rootdir", folder, "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^[56] passed", done.stdout, re.MULTILINE), done.stdout
    for name in ("test_wheel", "planted_wheel"):  # they need a wheel
        assert now not in (folder / f"tests/package/{name}.py").read_text()


def test_run_of_the_tests_is_recorded(tmp_path):
    import record_suite

    suite = '<testsuite tests="9" failures="1" errors="1" skipped="3"/>'
    (tmp_path / "suite.xml").write_text(f"<testsuites>{suite}</testsuites>")
    assert record_suite.counts(tmp_path / "suite.xml") == {"passed": 4, "failed": 2}

    def run(torch, python="3.11", processor="x86_64", passed=1):
        return {"torch": torch, "python": python, "processor": processor, "passed": passed}

    runs: list = []
    for one in (
        *(run("2.10.0"), run("2.10.0", processor="aarch64"), run("2.9.1+cpu")),
        *(run("2.16.0"), run("2.16.0.dev20261101+cpu"), run("2.16.0rc1")),
        *(run("2.10.0", "3.14t"), run("2.10.0", "3.14"), run("2.10.0", "3.9")),
        run("2.10.0+cpu", passed=2),  # replaces the first
    ):
        runs = record_suite.add(runs, one)
    assert [(row["torch"], row["python"]) for row in runs[:-1]] == [
        *(("2.9.1+cpu", "3.11"), ("2.10.0", "3.9"), ("2.10.0+cpu", "3.11")),
        *(("2.10.0", "3.14"), ("2.10.0", "3.14t"), ("2.16.0.dev20261101+cpu", "3.11")),
        *(("2.16.0rc1", "3.11"), ("2.16.0", "3.11")),
    ]
    assert runs[2]["passed"] == 2
    assert runs[-1]["processor"] == "aarch64"


@pytest.mark.parametrize("free_threaded", [0, 1])
def test_a_run_names_its_python(monkeypatch, free_threaded):
    import record_suite

    monkeypatch.setattr(
        record_suite.sysconfig, "get_config_var", {"Py_GIL_DISABLED": free_threaded}.get
    )
    short = ".".join(map(str, sys.version_info[:2]))
    assert record_suite.this_run("all")["python"] == short + "t" * free_threaded
