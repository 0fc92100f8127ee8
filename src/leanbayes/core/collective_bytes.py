"""The bytes that processes exchange in a computation."""

from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

from leanbayes.core import sharding

_GATHERS = ((dist, "all_gather_into_tensor"), (dist, "all_gather_single"), (sharding, "_all_gather"))
_SCATTERS = ((dist, "reduce_scatter_tensor"), (dist, "reduce_scatter_single"), (sharding, "_reduce_scatter"))


class CollectiveBytes:
    """Counts bytes inside a block: those that all-gathers return and reduce-scatters take, also the calls of FSDP2.

    All-reduces are not counted: sharded models use them for single numbers, and for gradients of replicas.
    """

    def __init__(self) -> None:
        self.gathered = self.reduced = 0
        self._former: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        for owner, name in (*_GATHERS, *_SCATTERS):
            function = getattr(owner, name, None)
            if function is not None:
                self._former.append((owner, name, function))
                setattr(owner, name, self._counting(function, (owner, name) in _GATHERS))
        return self

    def _counting(self, function: Any, is_gather: bool) -> Any:
        def call(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.gathered += output.nbytes if is_gather else 0
            self.reduced += 0 if is_gather else input.nbytes
            return function(output, input, *args, **kwargs)

        return call

    def __exit__(self, *error: object) -> None:
        for owner, name, function in self._former:
            setattr(owner, name, function)
