"""Mixins for the training loops of other libraries: `transformers.Trainer` and Lightning. Neither is imported here."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.core.network import inputs_of
from leanbayes.data.base import as_pair
from leanbayes.engines import IVON
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.scores import Scores, ignored
from leanbayes.likelihoods import RegressionPrediction
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.defaults import defaults_for
from leanbayes.model.method import Training
from leanbayes.model.objective import elbo_loss, unwrap
from leanbayes.training.label_counts import labels_of, labels_per_example


class _Loop:
    """What both loops need of a model: its loss, its optimizer, and the hooks of its method.

    Args:
        bnn: The model.
        num_data: The number of training examples.
        temperature: The weight of the KL, or None for the default of the engine.
        labels_per_example: The mean number of labels of an example, or None to count them.
    """

    def __init__(
        self, bnn: BayesianModel, num_data: int, temperature: float | None, labels_per_example: float | None
    ) -> None:
        if temperature is None:
            temperature = defaults_for(bnn.method, bnn.likelihood).temperature
        stages = bnn.method.stages()
        if len(stages) > 1:
            raise LeanBayesError(
                f"{type(bnn.method).__name__} trains in {len(stages)} stages, which other loops lack: use lb.fit."
            )
        self.training = Training(bnn, steps=1, num_data=num_data, temperature=temperature, average=_average)
        self.training.labels_per_example, self.resumed = labels_per_example, False

    def start(
        self,
        lr: float,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        labels: Callable[[], Iterable[Tensor]],
    ) -> torch.optim.Optimizer:
        """Return the optimizer, with the hooks of the method.

        Args:
            lr: The learning rate.
            make: Makes an optimizer for parameter groups.
            labels: Returns labels of training examples in batches.
        """
        training, bnn = self.training, self.training.model
        if not self.resumed:
            bnn.method.start(training)
            if training.model is not bnn:
                raise LeanBayesError(f"{type(bnn.method).__name__} replaces its model at the start: use lb.fit.")
        if bnn.method.counts_labels and training.labels_per_example is None:
            training.labels_per_example = labels_per_example(bnn.likelihood, labels())
        optimizer: torch.optim.Optimizer
        if bnn.method.engine == "ivon":
            settings: dict[str, Any] = {"temperature": training.temperature, "keep_std": self.resumed}
            settings["labels_per_example"] = training.labels_per_example
            optimizer = IVON(bnn, lr, num_data=training.num_data, **settings)
        else:
            optimizer = make(bnn.parameter_groups())
        training.optimizers = [optimizer]
        optimizer.register_step_post_hook(self._after_step)
        return optimizer

    def _after_step(self, *_: Any) -> None:
        self.training.model.method.after_step(self.training)

    def finish(self) -> None:
        """Let the method act after the last step."""
        self.training.model.method.finish(self.training)

    def loss(self, model: nn.Module, batch: Any, step: int) -> Tensor:
        """Return the loss of a batch, after a number of optimizer steps."""
        training = self.training
        training.step, training.batch = step, as_pair(batch)
        x, y = training.batch
        return elbo_loss(model, x, y, num_data=max(training.num_data, len(y)), temperature=training.temperature)

    def evaluated(self, batch: Any, samples: int | None) -> tuple[Any, Tensor, dict[str, float]]:
        """Return the prediction of a batch, its labels, and its scores."""
        x, y = as_pair(batch)
        bnn = self.training.model
        prediction, scores = bnn.predict(x, samples), Scores(ignored(bnn), details=False)
        scores.update(prediction, y)
        return prediction, y, scores.compute()


def _average(tensor: Tensor) -> Tensor:
    """Return the mean of a tensor over all processes, so that a method decides the same in each."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return tensor
    tensor = tensor.clone()
    torch.distributed.all_reduce(tensor)
    return tensor / torch.distributed.get_world_size()


class TrainerMixin:
    """Makes a `transformers.Trainer` train a Bayesian model. Put it before the trainer among the base classes.

    The loss is `lb.elbo_loss`. With `engine="backprop"` the optimizer is that of the arguments, with its own rate for
    the stds; with `engine="ivon"` it is `lb.IVON`, whose `learning_rate` is about 0.1. Evaluation averages over the
    weights: `eval_loss` is the NLL of the average, and the "logits" of `compute_metrics` are log-probabilities. Methods
    that exchange weights during training, such as `lb.SSVI`, do so. Checkpoints are those of the trainer; `lb.save`
    writes the trained model.

    Args:
        *args: The arguments of the trainer.
        num_data: The number of training examples. By default the length of `train_dataset`.
        temperature: The weight of the KL. None means the default of the engine, as in `lb.fit`.
        samples: The number of samples of an evaluation. By default the method's.
        labels_per_example: What `lb.IVON` takes by this name: the mean number of labeled tokens or pixels of an
            example. By default that of up to 512 examples from all parts of `train_dataset`.
        **kwargs: The arguments of the trainer.

    Example:
        >>> class BayesianTrainer(leanbayes.training.TrainerMixin, transformers.Trainer):
        ...     pass
        >>> trainer = BayesianTrainer(model=bnn, args=arguments, train_dataset=data)
        >>> trainer.train()
        >>> lb.save(bnn, "model.safetensors")
    """

    loss_is_scaled_for_ga = False  # the loss is a mean over a batch, so the trainer averages accumulated ones

    def __init__(
        self,
        *args: Any,
        num_data: int | None = None,
        temperature: float | None = None,
        samples: int | None = None,
        labels_per_example: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        trainer.model_accepts_loss_kwargs = False
        if num_data is None:
            if not hasattr(trainer.train_dataset, "__len__"):
                raise LeanBayesError("The training data have no length: pass num_data, the number of examples.")
            num_data = len(trainer.train_dataset)
        self._loop = _Loop(unwrap(trainer.model), num_data, temperature, labels_per_example)
        self._samples = samples

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Return the negative ELBO."""
        trainer: Any = self
        loss = self._loop.loss(model, inputs, trainer.state.global_step)
        return (loss, {}) if return_outputs else loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer of the engine."""
        trainer: Any = self

        def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            kind, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
            return kind([{"weight_decay": trainer.args.weight_decay, **group} for group in groups], **settings)

        if trainer.optimizer is None:
            labels = lambda: labels_of(trainer.train_dataset, trainer.data_collator)  # noqa: E731
            trainer.optimizer = self._loop.start(trainer.args.learning_rate, make, labels)
        return trainer.optimizer

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Return the schedule, and tell the method how many steps there are."""
        self._loop.training.steps = num_training_steps
        trainer: Any = super()
        return trainer.create_scheduler(num_training_steps, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and let the method finish."""
        trainer: Any = super()
        result = trainer.train(*args, **kwargs)
        self._loop.finish()
        return result

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        trainer: Any = super()
        trainer._load_from_checkpoint(*args, **kwargs)
        self._loop.resumed = True  # the stds of the checkpoint are kept

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *_: Any, **__: Any) -> Any:
        """Return the NLL of the average prediction, its log-probabilities or means, and the labels."""
        trainer: Any = self
        prediction, y, scores = self._loop.evaluated(trainer._prepare_inputs(inputs), self._samples)
        loss = torch.tensor(scores["nll"], device=y.device)
        if prediction_loss_only:
            return loss, None, None
        found = prediction.mean if isinstance(prediction, RegressionPrediction) else prediction.probs.log()
        return loss, found, y


class LightningMixin:
    """Makes a `LightningModule` of a Bayesian model. Put it before the `LightningModule` among the base classes.

    A batch is an (input, label) pair, or a dict with the label under "labels". The optimizer is AdamW with
    `engine="backprop"`, and `lb.IVON` with `engine="ivon"`. Validation and test log NLL and accuracy, or RMSE, of the
    average over the weights. `predict_step` returns probabilities (or means) and uncertainties in a dict. Methods that
    exchange weights during training, such as `lb.SSVI`, do so. Override `configure_optimizers` to add a schedule.

    Args:
        model: The Bayesian model, as the attribute `bnn`.
        num_data: The number of training examples.
        lr: The learning rate. None means the default of `lb.IVON`, or 1e-3 for AdamW.
        temperature: The weight of the KL. None means the default of the engine, as in `lb.fit`.
        samples: The number of samples of an evaluation. By default the method's.
        labels_per_example: What `lb.IVON` takes by this name: the mean number of labeled tokens or pixels of an
            example. By default that of up to 512 examples from all parts of the data set of the training loader.

    Example:
        >>> class BayesianModule(leanbayes.training.LightningMixin, lightning.LightningModule):
        ...     pass
        >>> module = BayesianModule(bnn, num_data=len(train_set))
        >>> lightning.Trainer(max_epochs=10).fit(module, train_loader, validation_loader)
        >>> lb.save(module.bnn, "model.safetensors")
    """

    def __init__(
        self,
        model: BayesianModel,
        *,
        num_data: int,
        lr: float | None = None,
        temperature: float | None = None,
        samples: int | None = None,
        labels_per_example: float | None = None,
    ) -> None:
        super().__init__()
        self.bnn = model
        self._loop = _Loop(model, num_data, temperature, labels_per_example)
        default = defaults_for(model.method, model.likelihood).lr
        self._lr, self._samples = (1e-3 if default is None else default) if lr is None else lr, samples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network with one sample of the weights."""
        return self.bnn(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the negative ELBO."""
        module: Any = self
        loss = self._loop.loss(self.bnn, batch, module.trainer.global_step)
        module.log("train_loss", loss.detach(), batch_size=len(as_pair(batch)[1]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the scores of a batch."""
        self._log_scores(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the scores of a batch."""
        self._log_scores(batch, "test")

    def _log_scores(self, batch: Any, prefix: str) -> None:
        _, y, scores = self._loop.evaluated(batch, self._samples)
        chosen = {f"{prefix}_{name}": scores[name] for name in ("nll", "accuracy", "rmse") if name in scores}
        module: Any = self
        module.log_dict(chosen, batch_size=len(y), prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return what is predicted for a batch, whose labels are not needed."""
        found = self.bnn.predict(inputs_of(batch), self._samples)
        names = ("mean", "std", "epistemic_variance", "probs", "label", "entropy", "mutual_information")
        return {name: getattr(found, name) for name in names if hasattr(found, name)}  # Lightning changes dataclasses

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the engine."""
        module: Any = self
        self._loop.training.steps = int(module.trainer.estimated_stepping_batches)

        def labels() -> Iterable[Tensor]:
            module.trainer.fit_loop.setup_data()  # which does nothing the second time
            loader = module.trainer.train_dataloader
            known = hasattr(loader, "dataset") and hasattr(loader, "collate_fn")
            return labels_of(loader.dataset, loader.collate_fn) if known else ()

        return self._loop.start(self._lr, lambda groups: torch.optim.AdamW(groups, self._lr, weight_decay=0.0), labels)

    def on_train_end(self) -> None:
        """Let the method finish."""
        self._loop.finish()

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        """Keep the stds of the checkpoint."""
        self._loop.resumed = True
