"""Damaged model files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.deploy.header import signed

Change = Callable[[dict[str, Tensor]], Any]


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a file."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["leanbayes"])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write(path: Path, header: Any, tensors: dict[str, Tensor]) -> None:
    """Write a file; if its header has a digest, with a valid one."""
    signs = isinstance(header, dict) and header.pop("digest", None) is not None
    text = json.dumps(header)
    save_file(tensors, path, metadata={"leanbayes": signed(text, tensors) if signs else text})


def rewritten(path: Path, change: Change) -> None:
    """Change the tensors of a file in place, and give it a valid digest."""
    header, tensors = contents(path)
    change(tensors)
    write(path, header, tensors)


def with_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a file in place, and give it a valid digest."""
    header, tensors = contents(path)
    change(header)
    write(path, header, tensors)


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Change one tensor."""
    return lambda tensors: tensors.update({name: change(tensors[name])})


def assert_damage_is_refused(
    bnn: lb.BayesianModel, network: nn.Module, change: Change, message: str, path: Path
) -> None:
    """Check that a changed file is refused in one line."""
    lb.save(bnn, path)
    rewritten(path, change)
    with pytest.raises(lb.FileFormatError, match=message) as caught:
        lb.load(path, network)
    assert "\n" not in str(caught.value)
