"""One wheel file under every supported torch:

    nox -f tools/noxfile.py -s suite -- dist/my_ops-....whl [pytest arguments]

Each session installs the same file beside another torch and runs the whole test suite on it, from
outside the source tree. `-s 'suite(torch-2.10.0)' -- WHEEL` in its place runs one of them.
"""

from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parents[1]
nox.options.default_venv_backend = "uv|virtualenv"

# README's compatibility table names each of these that was run.
TORCH = ["2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0"]


@nox.session
@nox.parametrize("torch", TORCH, ids=[f"torch-{version}" for version in TORCH])
def suite(session, torch):
    if not session.posargs:
        session.error("name the wheel: nox -- dist/my_ops-....whl")
    wheel, *arguments = session.posargs
    session.install(f"torch=={torch}", wheel, "pytest>=8", "hypothesis>=6.100", "numpy")
    session.install("expecttest", "setuptools>=77")
    session.chdir(session.create_tmp())
    session.run("python", "-m", "my_ops", success_codes=[0, 1])
    session.run(
        *("python", "-m", "pytest", f"{ROOT}/tests", "-c", f"{ROOT}/pyproject.toml"),
        *("--rootdir", ROOT, "-p", "no:cacheprovider", "-q", *arguments),
    )


@nox.session
def trainers(session):
    """Our layers inside PyTorch Lightning and Hugging Face's Trainer: nox -s trainers -- WHEEL"""
    if not session.posargs:
        session.error("name the wheel: nox -s trainers -- dist/my_ops-....whl")
    wheel, *arguments = session.posargs
    session.install(wheel, "pytest>=8", "numpy", "lightning>=2.5", "transformers>=5", "accelerate")
    tests = f"{ROOT}/tests/trainers"
    session.chdir(session.create_tmp())
    session.run("python", "-m", "pytest", tests, "--rootdir", tests, "-q", *arguments)
