"""Two nodes train a sharded model, a process dies, and torchrun restarts it from the last checkpoint."""

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import leanbayes as lb

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded.py"
# The second process dies in the third epoch, after two checkpoints, and only once.
SCRIPT = f"""
import os, pathlib, runpy
import leanbayes as lb
from leanbayes.data import Batches
epoch = Batches.epoch

def dying(self, number=0, start=0):
    died = pathlib.Path("died")
    if number == 2 and os.environ["RANK"] == "1" and not died.exists():
        died.touch()
        os._exit(7)
    return epoch(self, number, start)

Batches.epoch = dying
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def nodes(folder: Path, count: int) -> str:
    """Run the example by torchrun on some nodes of this machine, and return what they print."""
    (folder / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", "1"]
    words += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "script.py"]
    # docs/guide/large_models.md says why
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    started = [
        subprocess.Popen(words, cwd=folder, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT)
        for _ in range(count)
    ]
    try:
        printed = "\n".join(process.communicate(timeout=300)[0] for process in started)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * count, printed[-3000:]
    return printed


def test_torchrun_restarts_two_nodes_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model equals that of one process that was never stopped."""
    text = nodes(tmp_path, 2)
    assert (tmp_path / "died").exists()
    for epoch in range(1, 7):
        assert text.count(f"Epoch {epoch}/6") == 1, text[-3000:]
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )  # fmt: skip
    found = lb.load(tmp_path / "sharded" / "model.safetensors", network)
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    expected = lb.load(Path("sharded/model.safetensors"), network)
    assert found.noise.state.tolist() == expected.noise.state.tolist()
    for name, value in expected.state_dict().items():
        difference = (found.state_dict()[name] - value).abs().double().mean()
        assert difference <= 1e-3 * (value.abs().double().mean() + 1), name
