"""examples/train_distributed.py under torchrun: every way of sharing, and a process that dies."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")  # of char_lm.py, whose model it trains
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT = 1e-6  # of losses in float32 that were summed in another order
STEPS = 6


def run(tmp_path, *options, script=None, ranks=2, restarts=0):
    """The printed losses by step; a step that was run again counts once, and must agree."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    command += [str(script or EXAMPLES / "train_distributed.py"), "--device", "cpu", "--batch", "4"]
    command += ["--steps", str(STEPS), "--print-every", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = {}
    for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", done.stdout):
        assert losses.setdefault(int(step), float(loss)) == pytest.approx(float(loss), rel=LIMIT)
    return losses


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    losses = run(tmp_path_factory.mktemp("alone"), ranks=1)
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.mark.parametrize("way", ["ddp", "fsdp", "tp"])
def test_losses_are_those_of_one_process(way, alone, tmp_path):
    assert run(tmp_path, "--parallel", way) == pytest.approx(alone, rel=LIMIT)


@pytest.mark.parametrize("way", ["fsdp", "tp"])
def test_a_process_that_dies_costs_no_step(way, alone, tmp_path):
    """Rank 1 is killed once; torchrun starts both again, and they go on from the checkpoint."""
    script = tmp_path / "dies.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal, sys
        sys.path.insert(0, {str(EXAMPLES)!r})
        import train_distributed
        step, calls = train_distributed.train_step, []

        def dies(*args):
            calls.append(1)
            first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if first_life and os.environ["RANK"] == "1" and len(calls) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            if not first_life:
                assert len(calls) <= {STEPS} - 2, "began anew"
            return step(*args)

        train_distributed.train_step = dies
        train_distributed.main()
        """)
    )
    folder = ["--checkpoint", str(tmp_path / "checkpoint"), "--save-every", "2"]
    losses = run(tmp_path, "--parallel", way, *folder, script=script, restarts=1)
    assert losses == pytest.approx(alone, rel=LIMIT)
