"""Which layer of a network is the last one: that of methods with a Bayesian last layer only."""

from torch import nn

from leanbayes.errors import LeanBayesError


def last_layer(network: nn.Module) -> list[str]:
    """Return the names of the weight and bias of the linear layer that a network defines last.

    Raises:
        LeanBayesError: The network has no linear layer, or its last one is frozen.
    """
    found = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise LeanBayesError("The network has no linear layer, so its last layer is unclear: name it by select=.")
    prefix = f"{found[-1]}." if found[-1] else ""
    own = dict(network.get_submodule(found[-1]).named_parameters(recurse=False))
    names = [f"{prefix}{name}" for name, parameter in own.items() if parameter.requires_grad]
    if not names:
        raise LeanBayesError(f"{found[-1]} is frozen: let it require gradients, or name another layer by select=.")
    return names
