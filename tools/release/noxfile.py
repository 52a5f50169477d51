"""The jobs of the release workflow: one session for each, to run there and here,
by nox -f tools/release/noxfile.py -s

    sdist                      dist/*.tar.gz
    wheel                      wheelhouse/*.whl, in its container
    audit -- WHEEL             every check of check_wheel.py
    suite -- WHEEL [pytest arguments]
    trainers -- WHEEL [pytest arguments]
    index -- FOLDER            its indexes; pip and uv install from them
    recipe -- SDIST            the recipe for conda-forge, in dist/recipe
    hub -- FOLDER              the one for the Kernel Hub, in dist/hub
    publish -- FOLDER [TAG]    everything except the upload

With MY_OPS_CUDA=13.2, `wheel` builds X.Y.Z+cu132. It needs docker, or CIBW_CONTAINER_ENGINE=podman.
`suite` installs the same file with one torch after another; `-s 'suite(torch-2.10.0)'` takes one of
them, and UV_TORCH_BACKEND=cpu takes CPU builds of torch.
"""

import contextlib
import os
import shutil
import sys
import threading
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parents[2]
AUDIT, RELEASE = (f"{ROOT}/tools/requirements/{name}.txt" for name in ("audit", "release"))
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.envdir = f"{ROOT}/.nox"  # not in tools/, all of which goes into the sdist
nox.options.sessions = []

# docs/compatibility.md lists those that were run.
TORCH = ["2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0"]


def named(session, what):
    """Makes the first argument, a path, absolute; returns it and the rest."""
    if not session.posargs:
        session.error(f"name {what}: nox -s {session.name} -- {what}")
    return str(Path(session.invoked_from, session.posargs[0])), session.posargs[1:]


@contextlib.contextmanager
def disk_measured(session):
    """Prints how much disk space was used at most: the machines of the release have 14 GB free."""
    before = lowest = shutil.disk_usage("/").free
    done = threading.Event()

    def watch():
        nonlocal lowest
        while not done.wait(5):
            lowest = min(lowest, shutil.disk_usage("/").free)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        taken = (before - min(lowest, shutil.disk_usage("/").free)) / 1e9
        session.log(f"disk: {taken:.1f} GB taken at the peak, {before / 1e9:.1f} GB were free")


def commit_time(session):
    """The commit's time. It becomes the time of every file in a wheel and in the sdist, so that two
    builds are equal."""
    command = ("git", "-C", str(ROOT), "show", "-s", "--format=%ct", "HEAD")
    return session.run(*command, external=True, silent=True).strip()


@nox.session
def sdist(session):
    session.install("-r", RELEASE)
    env = {"SOURCE_DATE_EPOCH": commit_time(session)}
    session.run("python", "-m", "build", "--sdist", "--outdir", f"{ROOT}/dist", ROOT, env=env)


@nox.session
def wheel(session):
    session.install("-r", RELEASE)
    env = {"SOURCE_DATE_EPOCH": commit_time(session)}
    if (os.environ.get("MY_OPS_CUDA") or "12.9").startswith("12."):
        # nvcc 12 needs an older g++ than the image's; tools/release/install_cuda12.sh installs it.
        toolset = "/opt/rh/gcc-toolset-13/root/usr/bin"
        env |= {"CC": f"{toolset}/gcc", "CXX": f"{toolset}/g++"}
    session.chdir(ROOT)
    with disk_measured(session):
        session.run("cibuildwheel", "--output-dir", "wheelhouse", *session.posargs, env=env)


@nox.session
def audit(session):
    file, arguments = named(session, "WHEEL")
    session.install("-r", AUDIT)
    session.run("python", f"{ROOT}/tools/release/check_wheel.py", file, *arguments)


@nox.session
@nox.parametrize(
    "torch",
    [*(f"torch=={version}" for version in TORCH), "torch"],
    ids=[*(f"torch-{version}" for version in TORCH), "torch-newest"],
)
def suite(session, torch):
    """Runs outside the source tree, whose my_ops/ would otherwise be imported."""
    file, arguments = named(session, "WHEEL")
    session.install(torch, file, "pytest>=8", "hypothesis>=6.100", "numpy", "expecttest")
    session.install("setuptools>=77")
    session.chdir(session.create_tmp())
    session.run("python", "-m", "my_ops", success_codes=[0, 1])
    session.run(
        *("python", "-m", "pytest", f"{ROOT}/tests", "-c", f"{ROOT}/pyproject.toml"),
        *("--rootdir", ROOT, "-p", "no:cacheprovider", "-q", "--junitxml=suite.xml", *arguments),
    )
    if not arguments:  # part of the suite would replace the record of all of it
        session.run("python", f"{ROOT}/tools/testing/record_suite.py", "suite.xml", "all")


@nox.session
def trainers(session):
    """Our layers in PyTorch Lightning and in Hugging Face's Trainer."""
    file, arguments = named(session, "WHEEL")
    session.install(file, "pytest>=8", "numpy", "lightning>=2.5", "transformers>=5", "accelerate")
    tests = f"{ROOT}/tests/trainers"
    session.chdir(session.create_tmp())
    session.run("python", "-m", "pytest", tests, "--rootdir", tests, "-q", *arguments)


@nox.session
def index(session):
    folder, _ = named(session, "FOLDER")
    session.install("-r", RELEASE)
    session.run("python", f"{ROOT}/tools/release/make_index.py", folder)
    sys.path.insert(0, f"{ROOT}/tools/release")
    import make_index

    tools = {"pip": ("python", "-m", "pip", "--isolated"), "uv": ("uv", "pip")}
    with make_index.served(Path(folder)) as url:
        for path in sorted(Path(folder).glob("*/my-ops")):
            for name, tool in tools.items():
                target = Path(session.create_tmp(), path.parent.name, name)
                shutil.rmtree(target, ignore_errors=True)
                session.run(
                    *(*tool, "install", "--no-deps", "--no-cache-dir", "--target", target),
                    *("--index-url", f"{url}/{path.parent.name}/", "my_ops"),
                )
                session.log(f"{name}: {[p.name for p in target.glob('*.dist-info')]}")


@nox.session
def recipe(session):
    sdist, _ = named(session, "SDIST")
    session.install("-r", RELEASE)
    session.run("python", f"{ROOT}/tools/release/conda_recipe.py", sdist, f"{ROOT}/dist/recipe")


@nox.session
def hub(session):
    """The package kernels loads it, on the CPU where there is no GPU."""
    folder, _ = named(session, "FOLDER")
    session.install("torch", "kernels>=0.17", "kernel-abi-check", "packaging", "numpy")
    wheels = sorted(Path(folder).glob("*.whl"))
    session.run("python", f"{ROOT}/tools/release/hub_kernel.py", f"{ROOT}/dist/hub", *wheels)
    session.chdir(session.create_tmp())  # not beside the source's kernels/
    session.run("python", f"{ROOT}/tools/release/try_hub_kernel.py", f"{ROOT}/dist/hub")


@nox.session
def publish(session):
    folder, arguments = named(session, "FOLDER")
    session.install("-r", AUDIT)
    session.install("-r", RELEASE)
    session.run(
        "python", f"{ROOT}/tools/release/check_release.py", folder, *filter(None, arguments)
    )
    wheels = sorted(Path(folder).glob("*.whl"))
    for path in wheels:
        session.run("python", f"{ROOT}/tools/release/check_wheel.py", path, "--glibc", "2.28")
    files = [*wheels, *Path(folder).glob("my_ops-*.tar.gz")]
    session.run("twine", "check", "--strict", *files)
    ours = [path for path in files if "+" not in path.name]  # the others go to the release page
    session.run("uv", "publish", "--dry-run", "--username", "-", "--password", "-", *ours)
