"""`BayesianModel` = network + posterior + rule + likelihood.

No layer is replaced. The chosen parameters move from the network into the flat vector of a posterior. `forward_pass`
puts their values back for each pass.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Generic

import torch
from torch import Tensor, nn

from leanbayes.core.arguments import checked
from leanbayes.core.layout import Layout, Report
from leanbayes.core.network import in_first_order, output_tensor
from leanbayes.errors import LeanBayesError, UnsupportedOperation
from leanbayes.likelihoods import Likelihood
from leanbayes.likelihoods.base import P
from leanbayes.likelihoods.decisions import Policy
from leanbayes.model import batchnorm, prediction
from leanbayes.model.compiled_passes import CompiledPasses
from leanbayes.model.draw import StochasticNetwork
from leanbayes.model.forward_pass import PosteriorNetwork
from leanbayes.model.method import Method
from leanbayes.posteriors import Posterior
from leanbayes.rules import Rule


class BayesianModel(PosteriorNetwork, Generic[P]):
    """A network with a distribution over its weights. Call it like the network: each call samples the weights once.

    `lb.bayesianize` makes one. Its parameters, `state_dict`, `to`, `train` and `eval` work as for any module.

    Attributes:
        network: The copy of the user's network. Its Bayesian parameters are None outside a forward pass.
        posterior: The distribution q(w) over the flat vector of all Bayesian weights.
        method: The settings that made the posterior.
        likelihood: What the network's outputs mean.
        report: Which parameters are Bayesian, and why.
        trained_rule: The rule of the last `lb.elbo_loss` with gradients, or None.
        optimized_by: The engine of the optimizer that was made for the model, if it needs one of its own, or None.
        labels_per_example: The number of labels of an example that this optimizer was told, or None.
        moment_scale: The factors of mean and std that `lb.calibrate` fitted for one-pass prediction.
        moment_layers: The corrections of layers that `lb.calibrate` fitted for one-pass prediction, by weight.
        moment_margins: For `Adjoint(mean="moments")`: how the variances of margins are combined, as
            `lb.calibrate(..., layers=True)` fitted it for 1, 2 and 3 margins, or an empty tuple.
        policy: When to answer and when to ask a person, as `lb.decide.fit` fitted it, or None.

    Example:
        >>> bnn = lb.bayesianize(network, lb.MeanField())
        >>> prediction = bnn.predict(x)
        >>> prediction.label, prediction.mutual_information
    """

    described = "a Bayesian model, which lb.bayesianize makes of a network"  # in messages about arguments

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse the class that FSDP2 makes for a module that it shards: its parts of a posterior would be wrong."""
        super().__init_subclass__(**kwargs)
        if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
            raise UnsupportedOperation(
                "FSDP2 and accelerate's plugin for it cannot shard a Bayesian model: call lb.fully_shard(bnn) instead, "
                "then make the optimizer, and pass only the optimizer and the loader to accelerator.prepare, without "
                "the plugin."
            )

    def __init__(
        self,
        network: nn.Module,
        posterior: Posterior,
        method: Method,
        likelihood: Likelihood[P],
        report: Report,
        seed: int = 0,
    ) -> None:
        super().__init__(network, posterior, method, seed)
        self.likelihood = likelihood
        self.report = report
        self.trained_rule: str | None = None
        self.optimized_by: str | None = None
        self.labels_per_example: float | None = None
        self.policy: Policy | None = None
        self.compiled_passes = CompiledPasses()
        self.row_memory: dict[Any, int] = {}  # bytes that one example takes, as measured by `predict`
        self.obstacles: dict[Any, str | None] = {}  # why `predict` cannot cut a batch of some kind

    def extra_repr(self) -> str:
        """Return the first line of `print(bnn)`."""
        return f"{type(self.method).__name__}, rule={self.rule!r}, {self.posterior.random_weights:,} Bayesian weights"

    @property
    def class_dim(self) -> int | None:
        """The dimension of the outputs that counts classes, or None if they are not logits of classes."""
        return getattr(self.likelihood, "class_dim", None)

    def check_output(self, output: Any) -> None:
        """Raise an error if the likelihood cannot score the output of the network."""
        self.likelihood.check_output(output_tensor(output))

    # -- parameters of an optimizer -----------------------------------------------------------------------------------

    def scale_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the posterior's std. They need an adaptive optimizer: Adam at about 1e-2."""
        return list(self.posterior.scale_parameters())

    def mean_parameters(self) -> list[nn.Parameter]:
        """Return all other trainable parameters: means, norms and biases."""
        scales = {id(p) for p in self.posterior.scale_parameters()}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in scales]

    @checked()
    def parameter_groups(self, scale_lr: float = 1e-2) -> list[dict[str, Any]]:
        """Return parameter groups for one optimizer: means, and stds with their own rate and without weight decay.

        Weight decay over `bnn.parameters()` would pull ρ to 0, which is a std of 0.69.

        Args:
            scale_lr: The learning rate of the posterior's std, and of the noise in the data if it is learned.

        Example:
            >>> optimizer = torch.optim.AdamW(bnn.parameter_groups(), lr=1e-3, weight_decay=1e-2)
        """
        noise_parameters = [p for p in self.likelihood.parameters() if p.requires_grad]
        scales = [*(p for p in self.scale_parameters() if p.requires_grad), *noise_parameters]
        known = {id(p) for p in scales}
        groups: list[dict[str, Any]] = [{"params": [p for p in self.mean_parameters() if id(p) not in known]}]
        groups.append({"params": scales, "lr": scale_lr, "weight_decay": 0.0})
        return [group for group in groups if group["params"]]

    # -- the KL and prediction ----------------------------------------------------------------------------------------

    @property
    def kl_kind(self) -> str:
        """How `kl` is computed: "exact" or "monte-carlo"."""
        return self.posterior.kl_kind

    @checked()
    def kl(self, generator: torch.Generator | None = None) -> Tensor:
        """Return KL(q ‖ prior), summed over all weights. `kl_kind` says how it is computed."""
        exact = self.kl_kind == "exact"  # then no noise is spent on it
        return self.posterior.kl(self.noise.state if exact else self.next_draw(generator).key)

    @checked(memory_budget="a number of bytes, such as 2**30")
    def predict(
        self,
        x: Any,
        samples: int | None = None,
        *,
        rule: str | Rule | None = None,
        generator: torch.Generator | None = None,
        memory_budget: int | None = None,
        keep_outputs: bool = False,
        compile: bool | None = None,
    ) -> P:
        """Predict in evaluation mode, and split the uncertainty into an aleatoric and an epistemic part.

        Several threads may call it on one model. They take turns.

        Args:
            x: A batch: a tensor, or a tuple or dict of tensors.
            samples: The number of Monte Carlo samples. By default the method's, and 1 for a rule without noise. The
                rules "moments" and "adjoint" always take one pass.
            rule: The rule to predict with, such as "moments" or "adjoint". By default the current one.
            generator: The source of the noise. By default the model's own stream.
            memory_budget: Bytes that the activations may take. Large batches are cut to fit.
            keep_outputs: Keep the raw output of every sample, (samples, batch, ...). Under "moments" it is the mean.
            compile: Whether to compile the pass (torch.compile, on a GPU with CUDA graphs) and keep it for later calls
                with inputs of the same shape. By default a pass is compiled on a GPU once passes of its shape have
                taken some seconds. The results differ by rounding.

        Returns:
            The prediction that the likelihood makes, such as a `ClassPrediction`.

        Raises:
            LeanBayesError: The inputs or the outputs are not finite, or an argument is out of range.

        Example:
            >>> prediction = bnn.predict(x, samples=30)
            >>> uncertain = prediction.mutual_information > 0.1
        """
        with self._alone():
            return prediction.predict(self, x, samples, rule, generator, memory_budget, keep_outputs, compile)

    # -- after training -----------------------------------------------------------------------------------------------

    @checked()
    def refresh_batchnorm(self, batches: Iterable[Any], generator: torch.Generator | None = None) -> int:
        """Recompute the running statistics of all BatchNorm layers under the posterior, with one sample per batch.

        Args:
            batches: Training inputs, or (input, label) pairs.
            generator: The source of the noise. By default the model's own stream.

        Returns:
            The number of BatchNorm layers.

        Example:
            >>> bnn.refresh_batchnorm(x for x, _ in train_loader)
        """
        with self._alone():
            return batchnorm.refresh_batchnorm(self, batches, generator)

    @torch.no_grad()
    def to_deterministic(self) -> nn.Module:
        """Return a plain network at the posterior mean, with ordinary parameters. Tied parameters stay tied."""
        if self.root_units is not None:
            raise LeanBayesError("A sharded model cannot be copied: call lb.save, and lb.load the file in one process.")
        network = self._with_parameters(self.posterior.mean())
        return network.plain() if isinstance(network, StochasticNetwork) else network

    @checked()
    @torch.no_grad()
    def member(self, number: int) -> nn.Module:
        """Return a member of an ensemble as a plain network, with ordinary parameters.

        Raises:
            LeanBayesError: The model has no members that can be counted, or not so many.
        """
        if not isinstance(self.network, StochasticNetwork) or self.members is None:
            raise LeanBayesError("The samples of this model cannot be counted: use to_deterministic(), or drawn().")
        if not 0 <= number < self.members:
            raise LeanBayesError(f"number={number} must be from 0 to {self.members - 1}: there are so many members.")
        key = self.posterior.key_of_member(self.noise.state, number)
        network = self._with_parameters(self.posterior.sample(key) if len(self.layout) else None)
        assert isinstance(network, StochasticNetwork)
        return network.member(number)

    def _with_parameters(self, weights: Tensor | None) -> nn.Module:
        """Copy the network with the given flat weights, which are None if there are no Bayesian parameters."""
        network = copy.deepcopy(self.network)
        values = [] if weights is None else self.layout.split(weights)
        for slot, value, dtype in zip(self.layout, values, self.slot_dtypes(), strict=True):
            parameter = nn.Parameter(value.to(dtype).clone())
            for module, attribute in self.places_in(network, slot):
                setattr(module, attribute, parameter)
        return in_first_order(network)

    @torch.no_grad()
    def weight_variances(self) -> dict[str, Tensor]:
        """Return the variance of each Bayesian parameter, under each of its names."""
        parts = self.layout.split(self.posterior.variance())
        return {name: part for slot, part in zip(self.layout, parts, strict=True) for name in slot.names}

    def saved_layout(self) -> Layout:
        """Return the layout with the dtypes that the weights have now."""
        return Layout([replace(slot, dtype=dtype) for slot, dtype in zip(self.layout, self.slot_dtypes(), strict=True)])
