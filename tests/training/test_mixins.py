"""The trainers of transformers and of Lightning train Bayesian models, by both engines, and resume."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")
pytest.importorskip("accelerate")

from leanbayes.training import LightningMixin, TrainerMixin  # noqa: E402

ENGINES = ["backprop", "ivon"]


class BayesianTrainer(TrainerMixin, transformers.Trainer):  # type: ignore[name-defined]
    pass


class BayesianModule(LightningMixin, lightning.LightningModule):  # type: ignore[name-defined]
    pass


# -- transformers -----------------------------------------------------------------------------------------------------


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=12, n_embd=32, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def counting(rows: int = 64, length: int = 10) -> list[dict[str, Any]]:
    """Return sequences that count upwards; the first two labels do not count."""
    starts = torch.arange(rows) % 10
    ids = (starts[:, None] + torch.arange(length)) % 10 + 1
    return [{"input_ids": row, "labels": row.clone().index_fill(0, torch.arange(2), -100)} for row in ids]


def arguments(folder: Path, engine: str, **settings: Any) -> Any:
    known = {
        "max_steps": 60, "per_device_train_batch_size": 16, "report_to": [], "use_cpu": True, "save_strategy": "no",
        "disable_tqdm": True, "logging_strategy": "no", "learning_rate": 0.3 if engine == "ivon" else 1e-2, "seed": 1,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **{**known, **settings})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trainer_needs_nothing_but_the_model(engine: Any, tmp_path: Path) -> None:
    bnn, data = lb.bayesianize(gpt2(), lb.MeanField(engine=engine, init_std=0.02, samples=4), seed=0), counting()
    trainer = BayesianTrainer(bnn, arguments(tmp_path, engine), train_dataset=data, eval_dataset=data[:16])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert before > 2.2  # about log 12
    assert after < 0.5
    stacked = {name: torch.stack([row[name] for row in data[:16]]) for name in ("input_ids", "labels")}
    found = bnn.predict({"input_ids": stacked["input_ids"]}, samples=200).per_sequence(stacked["labels"])
    assert (found.tokens == 8).all()
    assert float(-found.log_prob.sum() / found.tokens.sum()) == pytest.approx(after, abs=0.1)
    predicted = trainer.predict(data[:16])
    assert predicted.predictions.shape == (16, 10, 12)
    kind = {"backprop": "AdamW", "ivon": "IVON"}[engine]
    assert type(trainer.optimizer.optimizer).__name__ == kind  # inside that of accelerate
    if engine == "ivon":
        assert trainer.optimizer.param_groups[0]["loss_weight"] == 64 * 8  # labeled tokens


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    means = []
    for settings in ({"per_device_train_batch_size": 16}, {"gradient_accumulation_steps": 2}):
        bnn = lb.bayesianize(gpt2().eval(), lb.MeanField(rule="mean"), seed=0)
        bnn.network.transformer.drop.p = 0.0  # type: ignore[union-attr]
        for module in bnn.network.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        given = {"per_device_train_batch_size": 8, **settings, "max_steps": 3, "optim": "sgd", "learning_rate": 0.1}
        BayesianTrainer(bnn, arguments(tmp_path, "backprop", **given), train_dataset=counting()).train()
        means.append(bnn.posterior.mean().detach().clone())
    torch.testing.assert_close(*means, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trainer_resumes_with_its_stds(engine: Any, tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        bnn = lb.bayesianize(gpt2(), lb.MeanField(engine=engine, init_std=0.02), seed=0)
        given = arguments(
            tmp_path, engine, max_steps=steps, save_strategy="steps", save_steps=4, lr_scheduler_type="constant"
        )
        return BayesianTrainer(bnn, given, train_dataset=counting())

    whole = trainer(8)
    whole.train()
    resumed = trainer(8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    expected = whole.model.state_dict()
    for name, tensor in resumed.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_methods_exchange_weights_in_a_trainer(tmp_path: Path) -> None:
    bnn = lb.bayesianize(gpt2(), lb.SSVI(density=0.3, interval=5), seed=0)
    posterior: Any = bnn.posterior
    before = posterior.index.clone()
    BayesianTrainer(bnn, arguments(tmp_path, "backprop", max_steps=12), train_dataset=counting()).train()
    assert not torch.equal(posterior.index, before)


def test_a_method_finishes_after_a_training_by_the_trainer(tmp_path: Path) -> None:
    bnn = lb.bayesianize(gpt2(), lb.SparseVD(log_alpha=-1.0, samples=2), seed=0)
    BayesianTrainer(bnn, arguments(tmp_path, "backprop", max_steps=2), train_dataset=counting()).train()
    assert 0 < bnn.posterior.random_weights < bnn.layout.numel


def test_methods_with_stages_are_refused(tmp_path: Path) -> None:
    bnn = lb.bayesianize(gpt2(), lb.WeightSharing())
    with pytest.raises(lb.LeanBayesError, match="stages, which other loops lack"):
        BayesianTrainer(bnn, arguments(tmp_path, "backprop"), train_dataset=counting())


# -- Lightning --------------------------------------------------------------------------------------------------------


def points(rows: int = 256) -> TensorDataset:
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))


def lightning_trainer(**settings: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(**{"enable_checkpointing": False, **quiet, **settings})


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():  # of Lightning, about workers of data loaders and its own use of torch
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*treespec.*")
        warnings.filterwarnings("ignore", ".*isinstance.*LeafSpec.*")
        yield


@pytest.mark.parametrize("engine", ENGINES)
def test_lightning_needs_nothing_but_the_model_and_num_data(engine: Any) -> None:
    data = points()
    bnn = lb.bayesianize(network(), lb.MeanField(engine=engine, init_std=0.02, samples=8), seed=0)
    lr = 0.5 if engine == "ivon" else 2e-2
    module = BayesianModule(bnn, num_data=len(data), lr=lr, temperature=0.1)
    loader = DataLoader(data, 32, shuffle=True, generator=torch.Generator().manual_seed(0))
    trainer = lightning_trainer(max_epochs=25)
    trainer.fit(module, loader, DataLoader(data, 64))
    assert trainer.callback_metrics["val_accuracy"] > 0.9
    assert trainer.callback_metrics["val_nll"] < 0.4
    predictions = trainer.predict(module, DataLoader(data, 64))
    assert sum(len(one["label"]) for one in predictions) == 256
    assert all((one["mutual_information"] >= 0).all() for one in predictions)
    assert type(trainer.optimizers[0]).__name__ == ("IVON" if engine == "ivon" else "AdamW")


def test_lightning_counts_the_labels_of_an_example() -> None:
    data = counting(48)
    bnn = lb.bayesianize(gpt2(), lb.MeanField(engine="ivon"), seed=0)
    module, trainer = BayesianModule(bnn, num_data=len(data)), lightning_trainer(max_steps=1)
    trainer.fit(module, DataLoader(data, 16))  # type: ignore[arg-type]
    assert trainer.optimizers[0].param_groups[0]["loss_weight"] == 48 * 8  # labeled tokens


def test_lightning_counts_labels_in_all_parts_of_sorted_data() -> None:
    y = torch.zeros(900, 4, dtype=torch.long)
    y[:450, 2:] = -100  # the first half has fewer labels
    bnn = lb.bayesianize(nn.Conv1d(3, 2, 1), lb.MeanField(engine="ivon"), seed=0)
    module, trainer = BayesianModule(bnn, num_data=900), lightning_trainer(max_steps=1)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(900, 3, 4), y), 16))
    assert trainer.optimizers[0].param_groups[0]["loss_weight"] == pytest.approx(900 * 3, rel=0.01)


def test_a_method_finishes_after_a_training_by_lightning() -> None:
    bnn = lb.bayesianize(network(), lb.SparseVD(log_alpha=-1.0), seed=0)
    lightning_trainer(max_epochs=1).fit(BayesianModule(bnn, num_data=64), DataLoader(points(64), 16))
    assert 0 < bnn.posterior.random_weights < bnn.layout.numel


@pytest.mark.parametrize("engine", ENGINES)
def test_lightning_resumes_with_its_stds(engine: Any, tmp_path: Path) -> None:
    data = points(64)

    def fit(epochs: int, path: Path | None = None) -> Any:
        bnn = lb.bayesianize(network(), lb.MeanField(engine=engine, init_std=0.02), seed=0)
        trainer = lightning_trainer(max_epochs=epochs)
        trainer.fit(BayesianModule(bnn, num_data=64), DataLoader(data, 16), ckpt_path=path, weights_only=False)
        return trainer, bnn

    _, whole = fit(4)
    trainer, _ = fit(2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = fit(4, tmp_path / "half.ckpt")
    for name, tensor in resumed.state_dict().items():
        torch.testing.assert_close(tensor, whole.state_dict()[name], rtol=1e-5, atol=1e-6)
