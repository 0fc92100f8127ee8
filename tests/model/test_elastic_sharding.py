"""A sharded training on two nodes, one of whose processes dies, restarts and ends as one process would."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import leanbayes as lb

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded.py"
# The last process dies once, in the third epoch, after two checkpoints.
SCRIPT = f"""
import os, runpy
import leanbayes as lb
from leanbayes.data import Batches
epoch = Batches.epoch

def dying(self, number=0, start=0):
    if number == 2 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.environ["RANK"] == "3":
        os._exit(7)
    return epoch(self, number, start)

Batches.epoch = dying
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def nodes(folder: Path, count: int, processes: int) -> list[str]:
    """Run the example by torchrun on some nodes of this machine, and return what each printed."""
    (folder / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", str(processes)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--max-restarts", "2", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(words, cwd=folder, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT)
        for _ in range(count)
    ]
    printed = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count, "\n".join(printed)[-3000:]
    return printed


@pytest.mark.slow
def test_two_nodes_survive_the_loss_of_a_process(tmp_path: Path) -> None:
    elastic, alone = tmp_path / "elastic", tmp_path / "alone"
    for folder in (elastic, alone):
        folder.mkdir()
    text = "\n".join(nodes(elastic, 2, 2))
    assert text.count("Epoch 2/6") == 1
    assert "exitcode" in text.lower()  # torchrun reports the process that died
    nodes(alone, 1, 1)
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )  # fmt: skip
    found, expected = (lb.load(folder / "sharded" / "model.safetensors", network) for folder in (elastic, alone))
    assert found.noise.state.tolist() == expected.noise.state.tolist()
    for name, value in expected.state_dict().items():
        difference = (found.state_dict()[name] - value).abs().double().mean()
        assert difference <= 1e-3 * (value.abs().double().mean() + 1), name
