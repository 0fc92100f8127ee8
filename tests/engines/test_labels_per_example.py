"""The ELBO of padded sequences is a sum over labeled tokens, whatever the engine, against a loop over sequences.

So is the energy of a chain, against one on the tokens as examples.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import leanbayes as lb
from leanbayes.data import from_datasets

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

LENGTHS = [7, 4, 2, 5]
UNLABELED = 1  # tokens at the start of a sequence, such as a prompt, that do not count


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def padded() -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(1, 11, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    labels = ids.where(mask, -100)
    labels[0, : 2 * UNLABELED + 1] = -100
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}, labels


TOKENS = sum(LENGTHS) - len(LENGTHS) - 2  # nothing predicts first tokens, and two more do not count


def nll_of_all(bnn: lb.BayesianModel, x: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Add up the NLL of each labeled token, given the tokens before it, one sequence at a time and without padding."""
    total = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        logits = bnn(input_ids=x["input_ids"][row : row + 1, :length]).logits[0]
        for place in range(1, length):
            if labels[row, place] >= 0:
                total = total - F.log_softmax(logits[place - 1], -1)[labels[row, place]]
    return total


def kl_of(bnn: lb.BayesianModel) -> Tensor:
    posterior: Any = bnn.posterior
    prior = posterior.prior.normal_terms(None)
    q = torch.distributions.Normal(posterior.mu, F.softplus(posterior.rho))
    return torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, prior.scale)).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("engine", ["backprop", "ivon"])
def test_the_loss_is_the_elbo_per_labeled_token(engine: Any, temperature: float) -> None:
    bnn = lb.bayesianize(gpt2(), lb.MeanField(engine=engine, init_std=0.1), seed=0)
    if engine == "ivon":
        lb.IVON(bnn, num_data=4, labels_per_example=TOKENS / 4)
    x, labels = padded()
    with bnn.frozen(3):
        loss = lb.elbo_loss(bnn, x, labels, num_data=4, temperature=temperature)
        expected = nll_of_all(bnn, x, labels) + temperature * kl_of(bnn)
    torch.testing.assert_close(loss * TOKENS, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_a_step_of_ivon_is_that_of_the_whole_elbo(temperature: float) -> None:
    bnn = lb.bayesianize(gpt2(), lb.MeanField(engine="ivon"), seed=0)
    betas, lr = (0.9, 0.99), 0.2
    settings: dict[str, Any] = {"temperature": temperature, "betas": betas, "hess_init": 0.7}
    optimizer = lb.IVON(bnn, lr, num_data=4, labels_per_example=TOKENS / 4, **settings)
    posterior: Any = bnn.posterior
    x, labels = padded()
    mean, std = posterior.mu.detach().clone(), F.softplus(posterior.rho).detach()
    precision = posterior.prior.normal_terms(None).scale ** -2
    with bnn.frozen(3):
        by_mean, by_rho = torch.autograd.grad(nll_of_all(bnn, x, labels), [posterior.mu, posterior.rho])
        lb.elbo_loss(bnn, x, labels, num_data=4, temperature=temperature).backward()
    optimizer.step()
    # sigmoid(ρ) = 1 - exp(-σ). The steps are those of the paper, for the energy E = NLL / T + KL over all data.
    by_log_std = std * by_rho / -torch.expm1(-std) / temperature
    slope, gap = by_log_std + std**2 * precision - 1, 1 - betas[1]
    new_std = std / (1 + gap * slope + 0.5 * gap**2 * slope**2).sqrt()
    weight = TOKENS / temperature
    natural = new_std**2 * (weight * 0.7 + precision) * (by_mean / temperature + precision * mean) / weight
    torch.testing.assert_close(F.softplus(posterior.rho.detach()), new_std, rtol=1e-7, atol=0)
    torch.testing.assert_close(posterior.mu.detach(), mean - lr * natural, rtol=1e-7, atol=1e-10)


def test_several_labels_per_example_must_be_told_to_ivon() -> None:
    bnn = lb.bayesianize(gpt2(), lb.MeanField(engine="ivon"))
    lb.IVON(bnn, num_data=4)
    with pytest.raises(lb.LeanBayesError, match="labels_per_example"):
        lb.elbo_loss(bnn, *padded(), num_data=4)
    with pytest.raises(lb.LeanBayesError, match="labels_per_example=0 must be a positive number"):
        lb.IVON(bnn, num_data=4, labels_per_example=0)


# -- lb.fit counts ----------------------------------------------------------------------------------------------------


class Rows(Dataset[dict[str, Tensor]]):
    """Padded sequences as dicts."""

    def __init__(self, copies: int) -> None:
        x, labels = padded()
        columns = {**x, "labels": labels}
        self.columns = {name: column.repeat(copies, 1) for name, column in columns.items()}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


FIT: dict[str, Any] = {"epochs": 1, "batch_size": 4, "device": "cpu", "progress": False}


def test_fit_counts_labeled_tokens() -> None:
    data = from_datasets(Rows(2), Rows(1), Rows(1), outputs=11)
    bnn = lb.fit(gpt2().float(), lb.MeanField(engine="ivon"), data, **FIT)
    assert bnn.labels_per_example == TOKENS / 4


def test_fit_counts_labeled_pixels() -> None:
    x, y = torch.randn(8, 1, 4, 4), torch.zeros(8, 4, 4, dtype=torch.long)
    y[:, 0] = -100
    y[:4, 1] = 1
    data = from_datasets(*[TensorDataset(x, y)] * 3)
    bnn = lb.fit(torch.nn.Conv2d(1, 2, 1), lb.MeanField(engine="ivon"), data, **FIT)
    assert bnn.labels_per_example == 12


def test_one_label_per_example_is_not_counted() -> None:
    data = from_datasets(*[TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)] * 3)
    bnn = lb.fit(torch.nn.Linear(3, 2), lb.MeanField(engine="ivon"), data, **FIT)
    assert bnn.labels_per_example is None


# -- chains -----------------------------------------------------------------------------------------------------------


def sequences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(12, 5, 3, generator=generator), torch.randint(4, (12, 5), generator=generator)
    y[:, 0], y[:6, 1] = -100, -100
    return x, y


def weights_of(bnn: lb.BayesianModel) -> Tensor:
    return torch.cat([value.flatten() for name, value in bnn.state_dict().items() if value.is_floating_point()])


CHAINS = {
    "csgmcmc": lb.CyclicalSGMCMC(cycles=2, per_cycle=2, exploration=0.3),
    "aeb": lb.AEB(density=0.5, snapshots=3, interval=2),
    "mbnn": lb.MBNN(sparsity=0.2, snapshots=3, interval=1, temperature=1.0),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_on_sequences_is_that_on_their_labeled_tokens(name: str) -> None:
    x, y = sequences()
    labeled = y >= 0
    trained = []
    for inputs, labels in ((x, y), (x[labeled], y[labeled])):
        torch.manual_seed(0)
        data = from_datasets(*[TensorDataset(inputs, labels)] * 3, outputs=4)
        settings: dict[str, Any] = {
            "batch_size": len(labels),
            "optimizer": "sgd",
            "lr": 0.3,
            "likelihood": lb.Categorical(class_dim=-1),
        }
        network = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
        trained.append(lb.fit(network, CHAINS[name], data, **{**FIT, **settings, "epochs": 20}))
    torch.testing.assert_close(*map(weights_of, trained), rtol=1e-4, atol=1e-5)


def test_several_labels_per_example_must_be_told_to_a_chain() -> None:
    x, y = sequences()
    method = lb.CyclicalSGMCMC(exploration=0.0)
    bnn = lb.bayesianize(torch.nn.Linear(3, 4), method, likelihood=lb.Categorical(class_dim=-1))
    optimizer = torch.optim.SGD([p for p in bnn.parameters() if p.requires_grad], lr=0.1)
    training = lb.Training(bnn, 100, len(y), optimizers=[optimizer], batch=(x, y))
    with pytest.raises(lb.LeanBayesError, match=r"lb\.Training\(labels_per_example=\.\.\.\)"):
        method.after_step(training)
    training.labels_per_example = 0.0
    with pytest.raises(lb.LeanBayesError, match=r"labels_per_example=0\.0 must be a positive number"):
        method.after_step(training)
    training.labels_per_example = 3.5
    method.after_step(training)
