"""python -m my_ops run: a program with fast_fp32 on."""

import re
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import my_ops
assert __name__ == "__main__"
assert my_ops.fast_fp32.report().on
print(sys.argv[1:], beside.__name__ if "beside" in dir() else "")
import beside
raise SystemExit(7 if sys.argv[1:] == ["--fail"] else 0)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_run(tmp_path, as_module):
    """python -m my_ops run: runs a program as Python does, and prints a report at its end."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").touch()
    what = ["-m", "program"] if as_module else [str(tmp_path / "program.py")]
    for arguments, status in ((["-m", "--x", "1"], 0), (["--fail"], 7)):
        done = subprocess.run(
            [sys.executable, "-m", "my_ops", "run", *what, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path if as_module else None,
        )
        assert done.returncode == status, done.stderr
        assert done.stdout.strip() == str(arguments)
        assert done.stderr.startswith("fast_fp32 is on")


def run_program(folder, program, *arguments, options=(), **how):
    """A run of the text of a program by ``python -m my_ops run``."""
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, *options, "-m", "my_ops", "run", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        **how,
    )


@pytest.mark.parametrize("end", ["os.close(2)", "os.close(2); kept = open('taken', 'w')"])
def test_run_of_a_program_that_moves_and_closes_stderr(end, tmp_path):
    """The report goes where stderr went at first, not into a file that has its number."""
    program = f"""
import os, sys
open_now = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
print(__file__, *sys.argv[1:])
{end}
os.chdir("/")
"""
    done = run_program(tmp_path, program, "program.py", "x")
    assert done.returncode == 0
    assert done.stdout.split() == [str(tmp_path / "program.py"), "x"]
    assert done.stderr.startswith("fast_fp32 is on")
    assert not (tmp_path / "taken").exists() or (tmp_path / "taken").read_text() == ""


@pytest.mark.parametrize(
    "end", ["sys.stderr.close()", "sys.stderr = None", "del sys.stderr", "os.closerange(2, 100)"]
)
def test_run_of_a_program_without_stderr(end, tmp_path):
    done = run_program(tmp_path, f"import os, sys\n{end}\n", "program.py")
    assert done.returncode == 0


def test_run_with_stderr_closed(tmp_path):
    (tmp_path / "program.py").write_text("print(open('beside', 'w').fileno())\n")
    command = f"{sys.executable} -m my_ops run program.py 2>&-"
    done = subprocess.run(command, shell=True, capture_output=True, cwd=tmp_path, check=True)
    assert done.stdout and (tmp_path / "beside").read_text() == ""


def test_run_of_a_program_that_forks(tmp_path):
    """One report, and a child that lives on does not keep the file open."""
    program = """
import os, sys, time
if os.fork() == 0:
    for number in 0, 1, 2:
        os.close(number)
    time.sleep(60)
"""
    done = run_program(tmp_path, program, "program.py", timeout=30)
    assert done.returncode == 0
    assert done.stderr.count("fast_fp32 is on") == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has -P from 3.11 on")
def test_run_keeps_a_safe_path(tmp_path):
    program = "import sys\nprint(sys.path[0])\n"
    folder = str(tmp_path)
    assert run_program(tmp_path, program, "program.py").stdout.strip() == folder
    safe = run_program(tmp_path, program, "program.py", options=["-P"])
    assert safe.returncode == 0 and safe.stdout.strip() != folder


def test_run_shows_the_program_first(tmp_path):
    done = run_program(tmp_path, "def fail():\n    1 / 0\nfail()\n", "program.py")
    assert done.returncode == 1
    trace = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert trace[1] == f'  File "{tmp_path / "program.py"}", line 3, in <module>'
    assert trace[-1] == "ZeroDivisionError: division by zero"
    assert "runpy" not in done.stderr and "_run.py" not in done.stderr


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_run_with_a_prompt(end, tmp_path):
    done = run_program(tmp_path, f"x = 41\n{end}\n", "-i", "program.py", input="print(x + 1)\n")
    assert "42" in done.stdout
    assert ("ZeroDivisionError" in done.stderr) == (end == "1 / 0")
    assert done.stderr.count("fast_fp32 is on") == 1


def test_run_without_a_program():
    for arguments, status in (([], 2), (["-m"], 2), (["-i"], 2), (["--help"], 0)):
        done = subprocess.run(
            [sys.executable, "-m", "my_ops", "run", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status
        assert "usage: python -m my_ops run" in done.stdout


SPAWNING = """
import multiprocessing
class Found:
    pass
def work(queue):
    queue.put(Found())
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(type(queue.get(timeout=60)) is Found)
    process.join()
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_run_takes_classes_of_the_program_from_spawned_processes(tmp_path, as_module):
    (tmp_path / "program.py").write_text(SPAWNING)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "my_ops",
            "run",
            *(["-m", "program"] if as_module else ["program.py"]),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "True", done.stderr
    assert "spawned began with the switch off" in done.stderr


@pytest.mark.parametrize(
    "program, why",
    [
        (["nothere.py"], "nothere.py: No such file or directory"),
        ([""], "'': can't find '__main__' module in ''"),
        (["folder"], "folder: can't find '__main__' module in 'folder'"),
        (["-m", "nothere"], "nothere: No module named nothere"),
        (["-m", "nothere.below"], "nothere.below: .*No module named 'nothere'.*"),
        (["-m", "folder"], "folder: No module named folder.__main__.*"),
    ],
)
def test_run_of_what_is_no_program(program, why, tmp_path):
    """One line, as from Python itself, and no report."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "my_ops", "run", *program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert re.fullmatch(f"run: cannot run {why}\n", done.stderr)


@pytest.mark.parametrize("line", ["import nothere", "open('nothere')"])
def test_run_shows_where_a_program_fails(line, tmp_path):
    (tmp_path / "program.py").write_text(f"{line}\n")
    done = subprocess.run(
        [sys.executable, "-m", "my_ops", "run", str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("fast_fp32 is on")
    assert 'program.py", line 1, in <module>' in done.stderr
