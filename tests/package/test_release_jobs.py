"""The jobs of the release: tools/noxfile.py, and the workflows that run them."""

import itertools
import json
import re
import runpy
import shutil
import sys
import types
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".github").is_dir(), reason="needs the repository"
)

WORKFLOWS = sorted((REPOSITORY / ".github").glob("workflows/*.yml"))
ACTIONS = sorted((REPOSITORY / ".github").glob("actions/*/action.yml"))


@pytest.mark.parametrize("name", ["audit", "docs", "lint", "mutants", "release", "test"])
def test_tools_are_pinned_by_hash(name):
    folder = REPOSITORY / "tools/requirements"
    wanted = re.findall(r"^[a-z][\w.-]*", (folder / f"{name}.in").read_text(), re.MULTILINE)
    lock = (folder / f"{name}.txt").read_text()
    pinned = re.findall(r"^([a-z][\w.-]*)==\S+(?: ;.*)? \\\n    --hash=sha256:", lock, re.MULTILINE)
    assert set(wanted) <= set(pinned)
    assert len(pinned) == len(re.findall(r"^[a-z]", lock, re.MULTILINE))
    assert "index-url" not in lock


def test_make_pins_the_tools_it_installs():
    """All but the wheels it builds, and what a build takes in any version: torch, the toolkit."""
    text = (REPOSITORY / "Makefile").read_text().replace("\\\n", "")
    for installed in re.findall(r"\$\(PIP\) install (.*)", text):
        words = installed.removeprefix("-q ").split()
        assert "--no-deps" in words or words[0].startswith(("-r", '"$$'))


class Session:
    """A stand-in for nox's: notes what a job installs, and runs, and in which folder."""

    posargs = ("my_ops.whl",)

    def __init__(self, folder):
        self.invoked_from = self.folder = folder
        self.installed, self.ran, self.said = [], [], []
        self.create_tmp = lambda: str(folder / "tmp")

    def install(self, *arguments):
        self.installed.append(arguments)

    def chdir(self, folder):
        self.folder = Path(folder)

    def run(self, *command, **options):
        self.ran.append((self.folder, command))
        return ""

    def log(self, text):
        self.said.append(text)


@pytest.fixture
def jobs(monkeypatch):
    """tools/noxfile.py, with a stand-in for nox: each job is a function."""
    nox = types.SimpleNamespace(
        session=lambda job: job, parametrize=lambda *_, **__: lambda job: job, options=Session
    )
    monkeypatch.setitem(sys.modules, "nox", nox)
    names = runpy.run_path(str(REPOSITORY / "tools/noxfile.py"))
    return {name: job for name, job in names.items() if callable(job)}


def test_jobs_pin_their_tools_by_hash(jobs, tmp_path):
    """Except those that test a wheel as users have it, with whatever pip takes."""
    (tmp_path / "my_ops.whl").mkdir()
    for name in ("sdist", "wheel", "audit", "recipe", "index", "publish"):
        session = Session(tmp_path)
        jobs[name](session)
        locks = {f"{REPOSITORY}/tools/requirements/{lock}.txt" for lock in ("audit", "release")}
        assert session.installed
        assert all(option == "-r" and lock in locks for option, lock in session.installed), name


@pytest.mark.parametrize("name", ["suite", "trainers"])
def test_wheel_is_tested_outside_the_source_tree(jobs, tmp_path, name):
    """There, Python would import the source's my_ops, which is not compiled."""
    session = Session(tmp_path)
    jobs[name](session, **({"torch": "torch"} if name == "suite" else {}))
    assert any(str(tmp_path / "my_ops.whl") in arguments for arguments in session.installed)
    assert any("pytest" in command for _, command in session.ran)
    assert {folder for folder, _ in session.ran} == {tmp_path / "tmp"}


@pytest.mark.parametrize("arguments", [(), ("-k", "gemm")])
def test_only_a_run_of_the_whole_suite_is_recorded(jobs, tmp_path, arguments):
    session = Session(tmp_path)
    session.posargs += arguments
    jobs["suite"](session, "torch")
    recorded = [command[-1] for _, command in session.ran if "record_suite" in command[1]]
    assert recorded == ([] if arguments else ["all"])


def test_wheel_job_says_how_much_disk_it_took(jobs, monkeypatch, tmp_path):
    session = Session(tmp_path)
    free = itertools.chain([20e9], itertools.repeat(6.5e9))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=next(free)))
    jobs["wheel"](session)
    assert session.said == ["disk: 13.5 GB taken at the peak, 20.0 GB were free"]


def test_wheels_and_sdist_are_attested():
    """On PyPI, and on the page of the release, which has all wheels."""
    text = (REPOSITORY / ".github/workflows/wheels.yml").read_text()
    publish, release = re.findall(r"^  (?:publish|release):\n(?:    .*\n|\n)+", text, re.MULTILINE)
    assert 'pattern: "{sdist,wheel-plain-*}"' in publish
    assert re.search(
        r"gh-action-pypi-publish@.*\n        with:\n          attestations: true", publish
    )
    assert re.search(
        r"attest-build-provenance@.*\n        with:\n          subject-path: \|\n"
        r"            dist/\*\.whl\n            dist/\*\.tar\.gz\n",
        release,
    )
    for job in (publish, release):
        assert "      id-token: write" in job


def steps(path):
    """The commands in a workflow's steps."""
    lines = iter(path.read_text().splitlines())
    for line in lines:
        if match := re.match(r"( +(?:- )?)run: (.*)", line):
            if match[2] != "|":
                yield match[2]
                continue
            deeper = " " * (len(match[1]) + 1)
            block = itertools.takewhile(lambda line, deeper=deeper: line.startswith(deeper), lines)
            yield from map(str.strip, block)


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=lambda path: path.stem)
def test_jobs_run_what_a_developer_runs(path):
    """A make target or a nox session, because nobody tries the shell code of a workflow."""
    sessions = re.findall(
        r"^def (\w+)\(session", (REPOSITORY / "tools/noxfile.py").read_text(), re.M
    )
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = re.findall(r"^([\w-]+):|^(\w+ :)=", makefile, re.MULTILINE)
    targets = {target or variable.removesuffix(" :") for target, variable in targets}
    for step in steps(path):
        if match := re.match(r"nox -f tools/noxfile\.py -s \"?(\w+)", step):
            assert match[1] in sessions
        elif step.startswith("make "):
            words = re.sub(r"\$\{\{.*?\}\}", "", step).split()[1:]
            assert {word.split("=")[0] for word in words} <= targets
        else:
            known = (
                "pip install --require-hashes -r ",
                "actionlint -color",
                "apt-get ",
            )
            forge = ("tar -czf index.tar.gz -C dist ", "gh release create ")
            assert step.startswith((*known, *forge)), step


def test_wheels_are_rehearsed_when_their_build_changes():
    text = (REPOSITORY / ".github/workflows/wheels.yml").read_text()
    blocks = re.findall(r"^    paths:\n((?:      - .*\n)+)", text, re.MULTILINE)
    of_push, of_pull_request = (re.findall(r"- (\S+)", block) for block in blocks)
    assert of_push == of_pull_request
    files = {"setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"}
    folders = {f"{name}/**" for name in ("csrc", "include", "kernels", "my_ops", "tools")}
    assert files | folders <= set(of_push)
    for path in of_push:
        assert (REPOSITORY / path.removesuffix("/**")).exists()


def test_newest_torch_and_python_are_tried_every_week():
    text = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    assert re.search(r"^  schedule:\n    - cron: ", text, re.MULTILINE)
    assert '{python: "3.x", torch: torch-newest' in text


def test_version_matrix_is_that_of_the_table():
    session = (REPOSITORY / "tools/noxfile.py").read_text()
    versions = re.search(r"^TORCH = (\[.*\])$", session, re.MULTILINE)
    page = (REPOSITORY / "docs/compatibility.md").read_text()
    listed = set(re.findall(r"^\| (2\.\d+\.\d+)(?:\+cpu)? \|", page, re.MULTILINE))
    assert listed
    assert listed <= set(json.loads(versions[1]))


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=lambda path: path.stem)
def test_actions_are_pinned(path):
    text = path.read_text()
    uses = re.findall(r"uses: (\S+)(.*)", text)
    assert uses
    for action, comment in uses:
        if not action.startswith("./"):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_permissions_are_named(path):
    text = path.read_text()
    assert "\npermissions: {}\n" in text
    jobs = re.findall(r"^  [\w-]+:\n(?=    )", text.partition("\njobs:\n")[2], re.MULTILINE)
    assert len(re.findall(r"^    permissions:$", text, re.MULTILINE)) == len(jobs)
