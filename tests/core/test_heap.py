"""Predictions on a CPU reuse the memory of their activations."""

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource

import torch

import leanbayes as lb
from leanbayes.networks import build

torch.set_num_threads(1)
bnn = lb.bayesianize(build("resnet-20", (3, 32, 32), 10, seed=0), lb.MeanField()).eval()
x = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        bnn.predict(x, 3)
        bnn.predict(x, rule="moments")
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have limits of their own")
def test_the_memory_of_activations_is_not_returned_to_the_system_after_each_pass() -> None:
    """A new process, because the heap of this one may have grown already. Without the limit there are thousands."""
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 500
