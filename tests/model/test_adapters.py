"""Adapters of peft: the adapter becomes Bayesian, the base stays as it is, and a file holds the adapter alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import leanbayes as lb

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


class Int8Linear(nn.Module):
    """A linear layer whose weight is stored in 8 bits, as libraries of quantization have it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().float().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        return nn.functional.linear(x, (self.weight * self.scale).to(x.dtype), self.bias)


def base(dtype: torch.dtype = torch.bfloat16, quantized: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    network = transformers.LlamaForCausalLM(config).to(dtype)
    if quantized:
        for layer in network.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                setattr(layer.mlp, name, Int8Linear(getattr(layer.mlp, name)))
    return network


def adapted(dtype: torch.dtype = torch.bfloat16, quantized: bool = False, **settings: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(base(dtype, quantized), config)


IDS = torch.randint(3, 200, (4, 10), generator=torch.Generator().manual_seed(0))


def trained(network: Any, engine: Any = "backprop", steps: int = 15) -> lb.BayesianModel:
    bnn = lb.bayesianize(network, lb.MeanField(engine=engine, init_std=0.02), select="lora_")
    optimizer: torch.optim.Optimizer
    if engine == "ivon":
        optimizer = lb.IVON(bnn, lr=0.3, num_data=1000, labels_per_example=9, hess_init=1.0)
    else:
        optimizer = torch.optim.Adam(bnn.parameter_groups(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = lb.elbo_loss(bnn, {"input_ids": IDS}, IDS, num_data=1000)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < sum(losses[:3])
    return bnn


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("engine", ["backprop", "ivon"])
def test_the_adapter_is_bayesian_and_the_base_stays_as_it_is(engine: str, dora: bool, quantized: bool) -> None:
    network = adapted(use_dora=dora, quantized=quantized)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    bnn = trained(network, engine)
    assert all("lora_" in slot.name for slot in bnn.layout)
    trainable = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert bnn.posterior.random_weights == trainable  # all of the adapter
    assert [p for p in bnn.network.parameters() if p.requires_grad] == []
    for name, parameter in bnn.network.named_parameters():
        assert parameter.dtype == before[name].dtype
        assert torch.equal(parameter, before[name])
    assert all(torch.equal(p, before[name]) for name, p in network.named_parameters())  # nor the user's network


class QuantizedLinear(nn.Linear):
    """A linear layer with a weight in 8 bits that peft adapts, as it does those of bitsandbytes and torchao."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        return nn.functional.linear(x, (self.weight * self.scale).to(x.dtype), self.bias)


def test_quantized_layers_are_adapted_themselves() -> None:
    network = base(quantized=True)
    for layer in network.model.layers:
        for name in ("q_proj", "v_proj"):
            linear, stored = getattr(layer.self_attn, name), Int8Linear(getattr(layer.self_attn, name))
            linear.weight, linear.__class__ = stored.weight, QuantizedLinear
            linear.register_buffer("scale", stored.scale)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapter = peft.get_peft_model(network, config, autocast_adapter_dtype=False)
    bnn = trained(adapter)
    weights = [p for name, p in bnn.network.named_parameters() if "base_layer.weight" in name]
    assert len(weights) == 4
    assert all(weight.dtype == torch.int8 for weight in weights)
    with torch.no_grad(), bnn.eval().using("moments"):
        assert bnn(input_ids=IDS).logits.variance.max() > 0  # in one pass, too


def test_without_noise_it_is_the_adapted_network() -> None:
    network = adapted(torch.float32).eval()
    bnn = lb.bayesianize(network, lb.MeanField(), select="lora_").eval()
    with torch.no_grad(), bnn.using("mean"):
        torch.testing.assert_close(bnn(input_ids=IDS).logits, network(input_ids=IDS).logits)


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_file_holds_the_adapter_alone(dora: bool, quantized: bool, tmp_path: Path) -> None:
    bnn = trained(adapted(use_dora=dora, quantized=quantized), steps=10)
    path = tmp_path / "adapter.safetensors"
    lb.save(bnn, path)
    stored = 2 * 4 * bnn.layout.numel  # mean and ρ in single precision
    weights = sum(p.nbytes for p in bnn.network.parameters())
    assert stored < path.stat().st_size < stored + 16_000  # and the names of all layers
    assert path.stat().st_size < 0.4 * weights
    loaded = lb.load(path, adapted(use_dora=dora, quantized=quantized))
    expected = bnn.predict({"input_ids": IDS}, samples=3, generator=torch.Generator().manual_seed(0))
    found = loaded.predict({"input_ids": IDS}, samples=3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.probs, expected.probs)
    assert [p for p in loaded.network.parameters() if p.requires_grad] == []
    assert isinstance(loaded.likelihood, lb.CausalLM)


def test_an_adapter_loads_onto_the_same_base_in_another_dtype(tmp_path: Path) -> None:
    bnn = trained(adapted(), steps=10)
    lb.save(bnn, tmp_path / "adapter.safetensors")
    loaded = lb.load(tmp_path / "adapter.safetensors", adapted(quantized=True))
    dtypes = {name: p.dtype for name, p in loaded.network.named_parameters()}
    assert {torch.int8, torch.bfloat16} == {*dtypes.values()}
    a, b = (model.predict({"input_ids": IDS}, rule="mean").probs for model in (bnn, loaded))
    assert (a - b).abs().max() < 0.1  # the rounding of 8 bits


def test_base_can_be_stored_and_left_out_by_hand(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))
    network[0].requires_grad_(False)
    bnn = lb.bayesianize(network, lb.MeanField(), select=r"2\.weight")
    bnn(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))  # moves the running statistics
    lb.save(bnn, tmp_path / "whole.safetensors")
    lb.save(bnn, tmp_path / "part.safetensors", base=False)
    sizes = [(tmp_path / name).stat().st_size for name in ("whole.safetensors", "part.safetensors")]
    assert sizes[0] - sizes[1] > 4 * 64 * 64
    loaded = lb.load(tmp_path / "part.safetensors", network)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in bnn.state_dict().items())
    lb.save(trained(adapted(), steps=6), tmp_path / "adapter.safetensors", base=True)
    assert (tmp_path / "adapter.safetensors").stat().st_size > 100_000


@pytest.mark.parametrize(
    "method",
    [
        lb.SWAG(samples=2, snapshots=2, rank=0, pretrain=False),
        lb.MBNN(interval=1, snapshots=2),
        lb.CyclicalSGMCMC(cycles=2, per_cycle=1),
        lb.SNGP(features=16),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_file_without_its_base_has_what_wrappers_of_the_network_have(method: Any, tmp_path: Path) -> None:
    """Their counters and measurements, and copies that are not in training now."""
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    network[0].requires_grad_(False)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    settings: Any = {"epochs": 2, "batch_size": 8, "optimizer": "sgd", "progress": False, "device": "cpu"}
    states: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def after_step(training: lb.Training) -> None:
        hook(training)
        if training.step % 3 == 0:
            lb.save(training.model, tmp_path / "part", base=False)
            loaded = lb.load(tmp_path / "part", network)
            states.append((clone(training.model.state_dict()), loaded.state_dict()))

    def clone(state: dict[str, Any]) -> dict[str, Any]:
        return {name: value.clone() for name, value in state.items()}

    hook = method.after_step
    object.__setattr__(method, "after_step", after_step)
    try:
        bnn = lb.fit(network, method, TensorDataset(x, x[:, :3].argmax(1)), **settings)
    finally:
        object.__delattr__(method, "after_step")
    lb.save(bnn, tmp_path / "part", base=False)
    states.append((bnn.state_dict(), lb.load(tmp_path / "part", network).state_dict()))
    assert len(states) > 4
    for saved, loaded in states:
        assert all(torch.equal(value, loaded[name]) for name, value in saved.items())


def test_a_file_without_its_base_is_refused_by_another_network(tmp_path: Path) -> None:
    lb.save(trained(adapted(), steps=6), tmp_path / "adapter.safetensors")
    with pytest.raises(lb.FileFormatError, match="was saved from another network"):
        lb.load(tmp_path / "adapter.safetensors", base())
