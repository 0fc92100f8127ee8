"""Files that are changed after they were written, as damage does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import leanbayes as lb

Change = Callable[[dict[str, Tensor]], Any]


def rewritten(path: Path, change: Change) -> None:
    """Change the tensors of a file in place."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Change one tensor."""
    return lambda tensors: tensors.update({name: change(tensors[name])})


def assert_damage_is_told(bnn: lb.BayesianModel, network: nn.Module, change: Change, message: str, path: Path) -> None:
    """A saved model that was changed is refused in one line."""
    bnn.save(path)
    rewritten(path, change)
    with pytest.raises(lb.FileFormatError, match=message) as caught:
        lb.load(path, network)
    assert "\n" not in str(caught.value)
