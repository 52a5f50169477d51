"""The jobs of the release: tools/release/noxfile.py, and the workflows that run them."""

import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
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


@pytest.mark.parametrize("name", ["actionlint", "audit", "make", "release"])
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
    """tools/release/noxfile.py, with a stand-in for nox: each job is a function."""
    nox = types.SimpleNamespace(
        session=lambda job: job, parametrize=lambda *_, **__: lambda job: job, options=Session
    )
    monkeypatch.setitem(sys.modules, "nox", nox)
    names = runpy.run_path(str(REPOSITORY / "tools/release/noxfile.py"))
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


def test_hub_repository_is_of_every_wheel(jobs, tmp_path):
    """And loaded outside the source tree, whose kernels/ Python would import as a package."""
    session = Session(tmp_path)
    session.posargs = (".",)
    wheels = [tmp_path / f"{name}.whl" for name in "ab"]
    for wheel in wheels:
        wheel.touch()
    jobs["hub"](session)
    (_, (_, made, folder, *of)), (where, (_, tried, again)) = session.ran
    assert (Path(made).name, Path(tried).name) == ("hub_kernel.py", "try_hub_kernel.py")
    assert of == wheels
    assert folder == again
    assert where == tmp_path / "tmp"


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
        r"^def (\w+)\(session", (REPOSITORY / "tools/release/noxfile.py").read_text(), re.M
    )
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = re.findall(r"^([\w-]+):|^(\w+ :)=", makefile, re.MULTILINE)
    targets = {target or variable.removesuffix(" :") for target, variable in targets}
    for step in steps(path):
        if match := re.match(r"nox -f tools/release/noxfile\.py -s \"?(\w+)", step):
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


def workflow(name):
    """The text of each of its jobs."""
    text = (REPOSITORY / f".github/workflows/{name}.yml").read_text().partition("\njobs:\n")[2]
    return dict(re.findall(r"^  ([\w-]+):\n((?:    .*\n|\n)+)", text, re.MULTILINE))


# What a job must say; without any of these a wheel reaches an index unseen.
GATES = {
    "ci": ["if: github.ref_type == 'tag'", "uses: ./.github/workflows/ci.yml"],
    "wheel": ["- run: nox -f tools/release/noxfile.py -s wheel"],
    "smoke": ["needs: wheel", '- run: nox -f tools/release/noxfile.py -s "suite($TORCH)"'],
    "rehearse": [
        "needs: [sdist, smoke]",
        "- run: nox -f tools/release/noxfile.py -s publish -- dist",
    ],
    "publish": ["needs: [ci, rehearse]", "if: github.ref_type == 'tag'", "environment: pypi"],
    "testpypi": [
        *("needs: rehearse", "if: github.event_name == 'workflow_dispatch'"),
        *("environment: testpypi", "repository-url: https://test.pypi.org/legacy/"),
    ],
    "release": ["needs: publish"],
}


def test_nothing_is_published_before_it_passed():
    found = workflow("wheels")
    for job, lines in GATES.items():
        said = [line.strip() for line in found[job].splitlines()]
        for wanted in lines:
            assert any(line.startswith(wanted) for line in said), f"{job}: {wanted}"
        assert "continue-on-error" not in found[job]
        conditions = [line for line in said if line.startswith("if:")]
        assert all(line in lines for line in conditions), f"{job}: {conditions}"
    publishing = {job for job, text in found.items() if "gh-action-pypi-publish" in text}
    assert publishing == {"publish", "testpypi"}
    assert all("\n          skip-existing: true" in found[job] for job in publishing)


def test_steps_of_a_release_are_written_down():
    """Each environment that a job waits for, each workflow and file that a person must touch."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("\n## Release\n")[2]
    text = text.partition("\n## ")[0]
    jobs = [job for path in WORKFLOWS for job in workflow(path.stem).values()]
    named = re.findall(r"^    environment:(?:\n      name:)? (\S+)$", "\n".join(jobs), re.MULTILINE)
    assert sorted(named) == ["github-pages", "pypi", "testpypi"]
    files = ("wheels.yml", "setup.py", "tools/release/recipe.yaml", "CHANGELOG.md")
    assert [name for name in (*named, *files) if f"`{name}`" not in text] == []


def test_every_wheel_of_a_release_is_audited_and_tested(jobs, tmp_path):
    """By cibuildwheel in its container, and again before anything is published."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    said = dict(re.findall(r'^([\w-]+) = (?:"{3}\\?\n)?(.*?)"*$', text, re.MULTILINE))
    assert said["audit-command"] == (
        '"python {package}/tools/release/check_wheel.py --glibc 2.28 {wheel}'
    )
    assert said["audit-requires"] == '["-r", "tools/requirements/audit.txt"]'
    assert "python -m pytest {package}/tests -c {package}/pyproject.toml" in said["test-command"]
    assert "auditwheel repair --exclude libtorch.so" in said["repair-wheel-command"]
    names = [f"my_ops-1.0{local}-py3-none-linux_x86_64.whl" for local in ("+cu130", "")]
    folder = tmp_path / "my_ops.whl"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    session = Session(tmp_path)
    jobs["publish"](session)
    audited = [command for _, command in session.ran if "check_wheel.py" in str(command[1])]
    assert [(Path(c[2]).name, *c[3:]) for c in audited] == [(n, "--glibc", "2.28") for n in names]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_end(path):
    """GitHub's own limit is six hours. A workflow that a job calls has its own."""
    for name, text in workflow(path.stem).items():
        limits = re.findall(r"^    timeout-minutes: (\d+)$", text, re.MULTILINE)
        assert len(limits) == (0 if re.search("^    uses:", text, re.MULTILINE) else 1), name
        assert all(0 < int(limit) < 360 for limit in limits), name


def test_a_push_leaves_the_weekly_run_alone():
    """Both are of main, so the event must be part of what a run replaces."""
    text = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    (group,) = re.findall(r"^  group: (.*)$", text, re.MULTILINE)
    runs = {group.replace("${{ github.event_name }}", event) for event in ("push", "schedule")}
    assert len(runs) == 2
    assert "${{ github.ref }}" in group


def test_jobs_of_every_push_keep_what_they_downloaded():
    """Not those of a release, where another run could have put something into the cache."""
    for name, text in workflow("ci").items():
        if "- run: make" in text and "container:" not in text:
            assert "          cache: pip\n" in text, name
    for name in ("docs", "wheels"):
        assert all("cache:" not in text for text in workflow(name).values())


SCRIPTS = [
    ".ci/run",
    "Makefile",
    *(f"tools/testing/{name}" for name in ("aarch64.sh", "bare_root.sh")),
]


def test_packages_are_verified():
    """What root installs, or runs, is signed by Debian or pinned."""
    for name in [*SCRIPTS, *(path.relative_to(REPOSITORY) for path in (*WORKFLOWS, *ACTIONS))]:
        text = (REPOSITORY / name).read_text()
        assert not re.search(r"trusted=yes|unauthenticated|--no-check-gpg|--insecure|curl -k", text)
    assert "[signed-by=" in (REPOSITORY / "tools/testing/aarch64.sh").read_text()
    assert (
        "debootstrap --force-check-gpg" in (REPOSITORY / "tools/testing/bare_root.sh").read_text()
    )


@pytest.fixture
def ci(tmp_path):
    """Runs a copy of .ci/run with stand-ins for all that it calls; returns it and their calls."""

    def run(bare_root=0, **stand_ins):
        for name in (".ci/run", "tools/testing/bare_root.sh", "build/venv/bin/python"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / ".ci/run", tmp_path / ".ci/run")
        tools = {"make": 0, "apt-get": 1, **stand_ins}
        paths = {f"bin/{name}": status for name, status in tools.items()}
        paths |= {"tools/testing/bare_root.sh": bare_root, "build/venv/bin/python": 0}
        (tmp_path / "bin").mkdir()
        for name in ("bash", "dirname", "env"):
            (tmp_path / "bin" / name).symlink_to(shutil.which(name))
        for name, status in paths.items():
            text = f'#!/bin/sh\necho "{Path(name).name} $*" >>calls\nexit {status}\n'
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        done = subprocess.run(
            [tmp_path / ".ci/run"],
            env={"PATH": str(tmp_path / "bin")},
            capture_output=True,
            text=True,
            check=False,
        )
        return done, (tmp_path / "calls").read_text().splitlines()

    return run


def here(*targets):
    """The wheel alone, then two at a time, and what takes longest first."""
    targets = " ".join((*targets, "lint", "docs", "fuzz", "examples"))
    beside = f"make -j2 --output-sync=target {targets} SECONDS=60 SEED=1"
    return ["make build/installed", beside]


def test_ci_runs_the_two_commands_of_the_readme_in_a_bare_debian(ci):
    done, calls = ci(**{"apt-get": 0})
    assert done.returncode == 0
    assert calls[0] == "bare_root.sh sh -c make clean && make demo && make test"
    made = [call for call in calls if call.startswith("make")]
    assert made == here("aarch64")
    assert "LEFT OUT" not in done.stdout


def test_ci_says_what_it_left_out(ci):
    done, calls = ci(bare_root=69)
    assert done.returncode == 0
    made = [call for call in calls if call.startswith("make")]
    assert made == ["make demo", "make test", *here()]
    left_out = re.findall(r"^LEFT OUT: (.*)$", done.stdout, re.MULTILINE)
    assert ["bare Debian" in left_out[0], "aarch64" in left_out[1]] == [True, True]


@pytest.mark.parametrize(("user", "arguments", "status"), [(1000, ["false"], 69), (0, [], 2)])
def test_bare_debian_needs_root_and_a_command(tmp_path, user, arguments, status):
    """Where it is impossible, nothing runs, and the status is one that .ci/run knows."""
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(
        [REPOSITORY / "tools/testing/bare_root.sh", *arguments],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    if arguments:
        reason = "no bare Debian can be made here: it needs root"
        assert done.stderr == f"bare_root.sh: {reason}\n"
    else:
        assert "tools/testing/bare_root.sh make test" in done.stdout


def test_ci_fails_where_the_bare_debian_fails(ci):
    done, calls = ci(bare_root=2)
    assert done.returncode == 2
    assert len(calls) == 1


def test_newest_torch_and_python_are_tried_every_week():
    text = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    assert re.search(r"^  schedule:\n    - cron: ", text, re.MULTILINE)
    assert '{python: "3.x", torch: torch-newest' in text


def test_version_matrix_is_that_of_the_table():
    session = (REPOSITORY / "tools/release/noxfile.py").read_text()
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


def test_containers_are_pinned():
    """A tag can be moved, a digest not."""
    lines = [line for path in WORKFLOWS for line in path.read_text().splitlines()]
    images = [line.split()[-1] for line in lines if re.match(r" +(container|image): \S", line)]
    assert images
    for image in images:
        assert re.fullmatch(r"[\w./-]+:\w+@sha256:[0-9a-f]{64}", image), image


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_permissions_are_named(path):
    text = path.read_text()
    assert "\npermissions: {}\n" in text
    jobs = re.findall(r"^  [\w-]+:\n(?=    )", text.partition("\njobs:\n")[2], re.MULTILINE)
    assert len(re.findall(r"^    permissions:$", text, re.MULTILINE)) == len(jobs)
