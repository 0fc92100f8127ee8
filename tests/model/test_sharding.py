"""A sharded model trains as the unsharded one, to rounding, on any number of processes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sharding_cases as cases
import torch
import torch.nn.functional as F
from sharding_cases import METHODS, NUM_DATA, REPLICATED, RESUMED, WORLD, build, data, optimizer_of, reference, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import leanbayes as lb
from leanbayes.core import noise
from leanbayes.errors import UnsupportedOperation
from leanbayes.methods.shard_plan import shard_plan

CLOSE: Any = {"rtol": 1e-4, "atol": 2e-6}
TRAINED = [(method, 4) for method in METHODS]
TRAINED += [(method, size) for method in ("MeanField", "SSVI ivon", "PBN ivon") for size in (1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four processes have written. They do everything at once, because starting them takes seconds."""
    folder = tmp_path_factory.mktemp("sharded")
    done = subprocess.run(
        [sys.executable, cases.__file__, str(folder)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def read(folder: Path, name: str) -> Any:
    return torch.load(folder / f"{name}.pt")


def assert_equal_models(path: Path, expected: lb.BayesianModel) -> None:
    found = lb.load(path, cases.Net()).state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, **CLOSE)


@pytest.mark.parametrize(("method", "size"), TRAINED)
def test_training_equals_that_of_the_unsharded_model(method: str, size: int, folder: Path) -> None:
    """Losses, norms of gradients, and all parameters after some steps of clipped gradients, from one file."""
    bnn = reference(method)
    expected = cases.summary(list(train(bnn, optimizer_of(bnn), slice(None))))
    torch.testing.assert_close(read(folder, f"losses {method} {size}"), expected, rtol=1e-5, atol=1e-5)
    assert_equal_models(folder / f"{method} {size}.safetensors", bnn)
    start = build(method).state_dict()
    assert not torch.equal(bnn.state_dict()["posterior.rho"], start["posterior.rho"])
    if method.startswith("SSVI"):
        assert not torch.equal(bnn.state_dict()["posterior.index"], start["posterior.index"])


@pytest.mark.parametrize("kind", ["plain", "blocks", "inside", "kept"])
def test_gradients_equal_those_of_the_unsharded_model(kind: str, folder: Path) -> None:
    """Also if blocks, or parts of them, are checkpointed, and if weights are kept for the backward pass."""
    bnn, (x, y) = reference("MeanField"), data()
    lb.elbo_loss(bnn, x, y, num_data=NUM_DATA).backward()
    found = read(folder, f"gradients {kind}")
    expected = {name.removeprefix("posterior."): p.grad for name, p in bnn.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **CLOSE)


def test_predictions_moments_and_the_kl_equal_those_of_the_unsharded_model(folder: Path) -> None:
    bnn, (x, _) = reference("MeanField"), data()
    with torch.no_grad(), bnn.using("mean"):
        torch.testing.assert_close(read(folder, "mean"), bnn(x))
    torch.testing.assert_close(read(folder, "kl"), bnn.kl().detach())
    mean, variance = read(folder, "moments")
    assert torch.equal(mean, bnn.posterior.mean())
    torch.testing.assert_close(variance, bnn.posterior.variance())
    key = noise.at(noise.make_key(5), 0)
    with torch.no_grad(), bnn.holding(bnn.posterior.sample(key)) as network:
        output = network(x)
    drawn = read(folder, "drawn")
    torch.testing.assert_close(drawn[0], output)
    assert torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(read(folder, "prediction"), output.softmax(1))  # the noise is frozen
    assert "5 units over 4 processes" in read(folder, "repr")


@pytest.mark.parametrize("method", REPLICATED)
def test_replicas_have_their_own_samples(method: str, folder: Path) -> None:
    bnn, (x, y) = reference(method), data()
    optimizer, rows = optimizer_of(bnn), len(x) // WORLD
    losses = read(folder, f"losses of replicas {method}")[..., 0]
    training = lb.Training(bnn, 100, NUM_DATA, optimizers=[optimizer], batch=(x, y))
    for step in range(cases.STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            bnn.noise.state[1] = 2 * step + rank // 2  # sample t of replica r of 2 is sample 2t + r
            part = slice(rank * rows, (rank + 1) * rows)
            loss = lb.elbo_loss(bnn, x[part], y[part], num_data=NUM_DATA)
            (loss / WORLD).backward()
            torch.testing.assert_close(losses[rank, step], loss.detach(), rtol=1e-5, atol=1e-5)
        torch.nn.utils.clip_grad_norm_(bnn.parameters(), 0.5)
        optimizer.step()
        training.step = step
        bnn.method.after_step(training)
    bnn.noise.state[1] = cases.STEPS
    assert_equal_models(folder / f"replicas {method}.safetensors", bnn)


def test_flipout_flips_one_shared_perturbation_by_signs_of_each_process(folder: Path) -> None:
    bnn, (x, _) = reference("MeanField"), data()
    layout, network = bnn.layout, bnn.to_deterministic()
    key = noise.make_key(7)
    changes = dict(zip(layout, layout.split(bnn.posterior.perturbation(noise.at(key, 0)).detach()), strict=True))
    by_name = {slot.name: change for slot, change in changes.items()}
    outputs, rows = read(folder, "flipout"), len(x) // WORLD
    for rank in range(WORLD):
        used: dict[int, int] = {}

        def linear(name: str, unit: int, x: Tensor, rank: int = rank, used: dict[int, int] = used) -> Tensor:
            layer: Any = network.get_submodule(name)
            own = noise.of_part(key, 1 + unit * WORLD + rank)
            r = noise.signs(x, tuple(x.shape), own, used.get(unit, 0) + 1)
            change = F.linear(x * r, by_name[f"{name}.weight"])
            s = noise.signs(change, tuple(change.shape), own, used.get(unit, 0) + 2)
            used[unit] = used.get(unit, 0) + 2
            return layer(x) + change * s

        with torch.no_grad():
            h = linear("start", 0, x[rank * rows : (rank + 1) * rows])
            for number in range(3):
                norm: Any = network.get_submodule(f"blocks.{number}.norm")
                h = norm(h)
                inside = torch.tanh(linear(f"blocks.{number}.first", number + 1, h))
                h = h + linear(f"blocks.{number}.last", number + 1, inside)
            expected = linear("end", 4, h)
        torch.testing.assert_close(outputs[rank], expected)
    losses = read(folder, "flipout losses")
    assert losses.isfinite().all()


@pytest.mark.parametrize("method", RESUMED)
def test_a_checkpoint_continues_on_another_number_of_processes(method: str, folder: Path) -> None:
    bnn = reference(method)
    expected = cases.summary(list(train(bnn, optimizer_of(bnn), slice(None), 6)))
    torch.testing.assert_close(torch.cat(read(folder, f"resumed {method}")), expected, rtol=1e-4, atol=1e-4)
    assert_equal_models(folder / f"resumed {method}.safetensors", bnn)


def test_a_step_communicates_what_fsdp2_does(folder: Path) -> None:
    found = read(folder, "bytes")
    plain = found["plain"]
    for name, most in (("MeanField", 1.05), ("MeanField bf16", 0.55), ("SSVI", 0.95), ("PBN", 1.12)):
        for kind in ("gathered", "reduced"):
            assert found[name][kind] <= most * plain[kind], (name, kind, found[name][kind], plain[kind])


@pytest.mark.parametrize("method", ["MeanField", "SSVI", "PBN"])
def test_the_plan_is_what_a_sharded_model_takes(method: str, folder: Path) -> None:
    """But for padding to equal parts, which matters in a network of 550 weights only."""
    found, plan = read(folder, "bytes")[method], shard_plan(cases.Net(), METHODS[method], WORLD)
    for key, planned in (("gathered", plan.all_gather), ("reduced", plan.reduce_scatter)):
        assert found[key] == pytest.approx(planned, rel=0.1)
    assert found["parameters"] == pytest.approx(plan.parameters, rel=0.1)


def test_what_a_sharded_model_does_not_support_is_refused(folder: Path) -> None:
    for text in read(folder, "refused rules"):
        assert "does not work with a sharded posterior: use one of 'sample', 'flipout', 'mean'" in text
    assert "once per sample" in read(folder, "refused samples")
    assert "lb.save" in read(folder, "refused copy")
    assert "sharded already" in read(folder, "refused twice")


@pytest.mark.parametrize("method", cases.ACCELERATED)
def test_accelerate_trains_a_sharded_model_as_the_unsharded_one(method: str, folder: Path) -> None:
    bnn = reference(method)
    expected = cases.summary(list(train(bnn, optimizer_of(bnn), slice(None))))
    torch.testing.assert_close(read(folder, f"accelerated {method}"), expected, rtol=1e-5, atol=1e-5)
    assert_equal_models(folder / f"accelerated {method}.safetensors", bnn)


@pytest.mark.skipif(not cases.ACCELERATED, reason="needs accelerate")
@pytest.mark.parametrize("name", ["refused by accelerate", "refused by FSDP2"])
def test_fsdp2_itself_and_the_plugin_of_accelerate_are_refused(name: str, folder: Path) -> None:
    assert "call lb.fully_shard(bnn) instead, then make the optimizer" in read(folder, name)


def test_a_model_that_cannot_be_sharded_is_refused() -> None:
    def refused(method: Any, **settings: Any) -> str:
        bnn = build("other", other=method, **settings)
        return cases.message(lambda: lb.fully_shard(bnn))

    assert "init_process_group" in refused(lb.MeanField())
    assert "no Bayesian weights" in refused(lb.Deterministic())
    assert "fixed std" in refused(lb.MeanField(), likelihood=lb.Gaussian(learned=True))


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lb.MeanField(prior=lb.ScaleMixture()), "Gaussian prior"),
        (lb.PBN(0.2, sensitivity="magnitude", kl="mean"), "kl='sum'"),
        (lb.PBN(0.2), "not chosen yet"),
        (lb.WeightSharing(), "supports lb.MeanField"),
        (lb.MeanField(rule="local"), "does not work with a sharded posterior"),
    ],
)
def test_a_posterior_or_rule_that_cannot_be_sharded_is_refused(method: Any, reason: str, one_process: Any) -> None:
    with pytest.raises(UnsupportedOperation, match=reason):
        lb.fully_shard(build("other", other=method))


def test_positions_of_a_large_layer_are_gathered_exactly(one_process: Any) -> None:
    """Processes exchange the lower 16 bits of positions. Some spans of 2^16 positions have no active weight."""
    bnn = lb.bayesianize(torch.nn.Sequential(torch.nn.Linear(700, 600)), lb.SSVI(8 / 420_000))
    posterior: Any = bnn.posterior
    posterior.index.copy_(torch.tensor([0, 7, 65535, 65536, 65537, 3 * 65536 + 5, 6 * 65536 - 1, 419_999]))
    expected = posterior.mean().detach()
    assert torch.equal(lb.fully_shard(bnn).posterior.mean(), expected)


def test_blocks_are_given_by_name_and_tied_weights_belong_to_the_whole(one_process: Any) -> None:
    bnn = lb.fully_shard(build("MeanField"), blocks=["start", "blocks.1"])
    assert bnn.root_units is not None
    assert [[slot.name for slot in one.unit.layout] for one in bnn.root_units] == [
        ["blocks.0.first.weight", "blocks.0.last.weight"],
        ["blocks.2.first.weight", "blocks.2.last.weight", "end.weight"],
    ]
    tied = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    tied[1].weight = tied[0].weight
    sharded = lb.fully_shard(lb.bayesianize(tied, lb.MeanField()))
    assert sharded.root_units is not None
    assert [one.unit.layout.slots[0].names for one in sharded.root_units] == [("0.weight", "1.weight")]
    assert sharded(torch.zeros(2, 4)).shape == (2, 2)
    with pytest.raises(lb.LeanBayesError, match="no module 'layers'"):
        lb.fully_shard(build("MeanField"), blocks=["layers"])
    with pytest.raises(lb.LeanBayesError, match=r"inside bnn\.network"):
        lb.fully_shard(build("MeanField"), blocks=[torch.nn.Linear(1, 1)])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", ["MeanField", "SSVI ivon", "PBN"])
def test_one_device_trains_as_the_unsharded_model(method: str, device: str, one_process: Any) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    mesh = init_device_mesh(device, (1,))
    models = [lb.fully_shard(build(method), mesh=mesh), reference(method).to(device)]
    losses = [cases.summary(list(train(bnn, optimizer_of(bnn), slice(None)))) for bnn in models]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    for moment in ("mean", "variance"):
        torch.testing.assert_close(*(getattr(bnn.posterior, moment)().detach() for bnn in models), **CLOSE)
    half = lb.fully_shard(build(method), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    (first,) = train(half, optimizer_of(half), slice(None), 1)
    torch.testing.assert_close(first[0], losses[1][0, 0], rtol=2e-2, atol=2e-2)


@pytest.fixture
def one_process(tmp_path: Path) -> Any:
    backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
