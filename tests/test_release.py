"""What is released: the index, the workflow's matrix, the version matrix, and their tables."""

import functools
import hashlib
import http.server
import importlib.metadata
import json
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".github").is_dir(), reason="needs the repository"
)

sys.path.insert(0, str(REPOSITORY / "tools/build"))

import preflight  # noqa: E402

# Not find_spec: looking pip up switches setuptools' distutils off, which torch.compile needs.
PIP = any(importlib.metadata.distributions(name="pip"))

WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))


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
    assert built == smoked
    names = ["my_ops" + (f"+cu{cuda.replace('.', '')}" if cuda else "") for cuda in built]
    assert [row[0].strip("`") for row in rows] == names
    assert [row[1] for row in rows] == [cuda or "13.0" for cuda in built]
    for cuda, row in zip(built, rows, strict=True):
        release = tuple(map(int, (cuda or "13.0").split(".")))
        assert ("12.x" in row[3]) == (release >= (12, 8))
        assert release >= preflight.OLDEST_CUDA


def test_example_of_the_readme_prints_what_it_says():
    code = re.search(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)


def test_version_matrix_is_that_of_the_readme():
    session = (REPOSITORY / "tools/noxfile.py").read_text()
    versions = re.search(r"^TORCH = (\[.*\])$", session, re.MULTILINE)
    readme = (REPOSITORY / "README.md").read_text()
    listed = set(re.findall(r"^\| (2\.\d+\.\d+)(?:\+cpu)? \|", readme, re.MULTILINE))
    assert listed
    assert listed <= set(json.loads(versions[1]))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_permissions_named(path):
    text = path.read_text()
    assert "\npermissions: {}\n" in text
    uses = re.findall(r"uses: (\S+)(.*)", text)
    assert uses
    for action, comment in uses:
        if not action.startswith("./"):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
    jobs = re.findall(r"^  [\w-]+:\n(?=    )", text.partition("\njobs:\n")[2], re.MULTILINE)
    assert len(re.findall(r"^    permissions:$", text, re.MULTILINE)) == len(jobs)


def test_prerequisites_are_the_same_everywhere():
    """Where they are said, and on the bare machine of CI, where they are all there is."""
    (packages,) = re.findall("apt install (.*)$", preflight.APT)
    for name in ("README.md", "docs/install.md"):
        assert f"`apt install {packages}`" in (REPOSITORY / name).read_text()
    ci = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    assert f"apt-get install --no-install-recommends -y {packages}\n" in ci
    for target in ("demo", "test"):
        assert f"make {target}" in (REPOSITORY / "README.md").read_text()


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
    pytest.importorskip("packaging")
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("0.1.0", "0.1.0+cu126"):
        wheel(folder, version)
    subprocess.run([sys.executable, REPOSITORY / "tools/make_index.py", folder], check=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def download(url, requirement, folder):
    command = [sys.executable, "-m", "pip", "download", "--isolated", "--no-deps", "--no-cache-dir"]
    return subprocess.run(
        [*command, "--disable-pip-version-check", "-i", url, "-d", folder, requirement],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not PIP, reason="needs pip")
@pytest.mark.parametrize(("path", "version"), [("simple", "0.1.0"), ("cu126", "0.1.0+cu126")])
def test_pip_downloads_from_the_index(index, tmp_path, path, version):
    folder, url = index
    done = download(f"{url}/{path}/", "my_ops==0.1.0", tmp_path)
    assert done.returncode == 0, done.stderr
    (name,) = (path.name for path in tmp_path.glob("*.whl"))
    assert f"-{version}-" in name
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


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
