"""A sharded training on two nodes that dies is continued by other numbers of processes, as if it had not died."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import leanbayes as lb

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded.py"
# All processes of two nodes die in the third epoch, after two checkpoints.
SCRIPT = f"""
import os, runpy
import leanbayes as lb
from leanbayes.data import Batches
epoch = Batches.epoch

def dying(self, number=0, start=0):
    if number == 2 and os.environ["WORLD_SIZE"] == "4":
        os._exit(7)
    return epoch(self, number, start)

Batches.epoch = dying
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def nodes(folder: Path, count: int, processes: int) -> tuple[str, list[int]]:
    """Run the example by torchrun on some nodes of this machine, and return what they print and their exit codes."""
    (folder / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", str(processes)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(words, cwd=folder, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT)
        for _ in range(count)
    ]
    printed = [process.communicate(timeout=900)[0] for process in started]
    return "\n".join(printed), [process.returncode for process in started]


@pytest.mark.slow
def test_two_nodes_are_continued_by_one(tmp_path: Path) -> None:
    stopped, alone = tmp_path / "stopped", tmp_path / "alone"
    for folder in (stopped, alone):
        folder.mkdir()
    text, codes = nodes(stopped, 2, 2)
    assert "Epoch 2/6" in text
    assert "Epoch 3/6" not in text
    assert 0 not in codes
    for folder in (stopped, alone):
        text, codes = nodes(folder, 1, 2 if folder == stopped else 1)
        assert codes == [0], text[-3000:]
        assert ("Epoch 2/6" in text) == (folder == alone)
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )  # fmt: skip
    found, expected = (lb.load(folder / "sharded" / "model.safetensors", network) for folder in (stopped, alone))
    assert found.noise.state.tolist() == expected.noise.state.tolist()
    for name, value in expected.state_dict().items():
        difference = (found.state_dict()[name] - value).abs().double().mean()
        assert difference <= 1e-3 * (value.abs().double().mean() + 1), name
