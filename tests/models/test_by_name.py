"""Networks of timm and torchvision by name, and our own beside theirs with the same weights."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import Tensor, nn

import leanbayes as lb
from leanbayes import models


def images(*shape: int) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))


def shapes(network: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in network.parameters()]


@torch.no_grad()
def give_weights(source: nn.Module, target: nn.Module) -> None:
    """Move the parameters away from their start, and copy them and the buffers over in order."""
    for parameter in source.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    pairs = [
        *zip(source.parameters(), target.parameters(), strict=True),
        *zip(source.buffers(), target.buffers(), strict=True),
    ]
    for one, other in pairs:
        other.copy_(one)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_our_resnet_is_torchvisions(name: str) -> None:
    theirs, ours = torchvision.models.get_model(name, num_classes=7), models.build(name, (3, 64, 64), 7)
    assert shapes(ours) == shapes(theirs)
    give_weights(theirs, ours)
    x = images(3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)  # in training, which moves the statistics
    expected = theirs.eval()(x)
    assert expected.std() > 1e-2
    torch.testing.assert_close(ours.eval()(x), expected, rtol=1e-4, atol=1e-4)


def test_our_vit_tiny_is_timms() -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=64, depth=3)
    ours = models.build("vit-tiny", (3, 64, 64), 7, patch=16, depth=3)
    assert shapes(ours) == shapes(theirs)
    give_weights(theirs, ours)
    x = images(3, 64, 64)
    expected = theirs.eval()(x)
    assert expected.std() > 1e-2
    torch.testing.assert_close(ours.eval()(x), expected, rtol=1e-4, atol=1e-5)


def test_our_large_networks_have_the_shapes_of_theirs() -> None:
    """The transformer's as a multiset: torchvision has its parameters in another order."""
    with torch.device("meta"):
        for name in ("resnet18", "resnet50", "resnet101"):
            assert shapes(models.build(name, (3, 224, 224), 1000)) == shapes(torchvision.models.get_model(name))
        for size in ("tiny", "small", "base"):
            ours = models.build(f"vit-{size}", (3, 224, 224), 1000)
            assert shapes(ours) == shapes(timm.create_model(f"vit_{size}_patch16_224"))
        assert sorted(shapes(ours)) == sorted(shapes(torchvision.models.vit_b_16()))


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("timm:resnet18", (1, 32, 32), {}),
        ("TIMM:resnet18", (3, 40, 32), {"drop_rate": 0.1}),
        ("timm:vit_tiny_patch16_224", (3, 224, 224), {"depth": 1}),
        ("timm:vit_tiny_patch16_224", (2, 32, 64), {"depth": 1, "patch_size": 8}),
        ("timm:vit_tiny_patch16_224.augreg_in21k", (3, 32, 32), {"depth": 1}),
        ("torchvision:resnet18", (3, 32, 32), {}),
        ("torchvision:mobilenet_v3_small", (3, 64, 48), {"dropout": 0.1}),
        ("torchvision:vit_b_32", (3, 64, 64), {}),
    ],
)
def test_a_librarys_network_fits_images_and_classes(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    network = models.build(name, shape, 7, seed=0, **options).eval()
    assert network(images(*shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["torchvision:segmentation/lraspp_mobilenet_v3_large", "torchvision:fcn_resnet50"])
def test_a_segmentation_network_of_torchvision_takes_a_step(name: str) -> None:
    network = models.build(name, (3, 33, 47), 4, seed=0)
    assert network.eval()(images(3, 33, 47))["out"].shape == (2, 4, 33, 47)
    bnn = lb.bayesianize(network, lb.MeanField()).train()
    loss = lb.elbo(bnn, images(3, 33, 47), torch.randint(4, (2, 33, 47)), num_data=1000)
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_a_seed_gives_the_same_weights_and_leaves_the_random_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    one, same, other = (models.build(name, (3, 32, 32), 3, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])


def test_timm_loads_what_is_pretrained(tmp_path: Path) -> None:
    pretrained = timm.create_model("resnet18", num_classes=1000)
    safetensors.torch.save_file(pretrained.state_dict(), tmp_path / "weights.safetensors")
    file = {"file": str(tmp_path / "weights.safetensors")}
    network = models.build("timm:resnet18", (3, 32, 32), 7, pretrained=True, pretrained_cfg_overlay=file)
    assert torch.equal(network.state_dict()["conv1.weight"], pretrained.state_dict()["conv1.weight"])
    assert network(images(3, 32, 32)).shape == (2, 7)


def with_weights(monkeypatch: pytest.MonkeyPatch, name: str, classes: int, **options: Any) -> dict[str, Tensor]:
    """Let torchvision find weights on this machine; it would fetch its own."""
    state = torchvision.models.get_model(name, num_classes=classes, **options).state_dict()
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda self, *args, **kwargs: state)
    return state


@pytest.mark.parametrize("outputs", [7, 1000])
def test_torchvision_loads_what_is_pretrained_and_fits(monkeypatch: pytest.MonkeyPatch, outputs: int) -> None:
    state = with_weights(monkeypatch, "resnet18", 1000)
    built = models.build("torchvision:resnet18", (3, 32, 32), outputs, pretrained=True).state_dict()
    different = {key for key in state if not torch.equal(built[key], state[key])}
    assert different == (set() if outputs == 1000 else {"fc.weight", "fc.bias"})


def test_torchvision_loads_a_pretrained_segmentation_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights have a second head, for training, which is not built."""
    state = with_weights(monkeypatch, "fcn_resnet50", 21, weights_backbone=None, aux_loss=True)
    built = models.build("torchvision:fcn_resnet50", (3, 32, 32), 4, pretrained=True).state_dict()
    different = {key for key in built if not torch.equal(built[key], state[key])}
    assert different == {"classifier.4.weight", "classifier.4.bias"}


def test_pretrained_positions_for_another_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_weights(monkeypatch, "vit_b_32", 1000)
    with pytest.raises(
        lb.LeanBayesError, match=r"pretrained encoder.pos_embedding of torchvision:vit_b_32 does not fit"
    ):
        models.build("torchvision:vit_b_32", (3, 64, 64), 7, pretrained=True)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("timm:resnet81", (3, 32, 32), {}, r"timm has no network 'resnet81' for images: perhaps you mean .*resnet\d"),
        ("timm:zzzzzz", (3, 32, 32), {}, r"timm has no network 'zzzzzz' for images: see timm's list_models\(\)"),
        ("torchvision:resnet19", (3, 32, 32), {}, "torchvision has no network 'resnet19' for images: perhaps you mean"),
        ("torchvision:fasterrcnn_resnet50_fpn", (3, 32, 32), {}, "torchvision has no network .* for images"),
        ("torchvision:resnet18", (1, 28, 28), {}, "takes 3 input channels, not 1: repeat the channel, or use timm"),
        ("torchvision:resnet18", (784,), {}, "must be that of an image"),
        ("timm:resnet18", (784,), {}, "must be that of an image"),
        ("timm:resnet18", (3, 32, 32), {"foo": 1}, r"timm:resnet18 cannot be built .* with foo=1: .*'foo'"),
        ("torchvision:resnet18", (3, 32, 32), {"foo": 1}, r"torchvision:resnet18 cannot be built .* with foo=1"),
        ("timm:", (3, 32, 32), {}, "'timm:' is no network"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_sentence(
    name: str, shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(lb.LeanBayesError, match=message):
        models.build(name, shape, 10, **options)
