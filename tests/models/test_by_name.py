"""Networks of timm and torchvision by name, and our networks compared with theirs for the same weights."""

import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import Tensor, nn

import leanbayes as lb
from leanbayes import networks
from leanbayes.networks.recorded import rebuild


def images(*shape: int) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))


def shapes(network: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in network.parameters()]


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Perturb the parameters of the source, and copy them and its buffers to the target in order."""
    for parameter in source.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    pairs = [
        *zip(source.parameters(), target.parameters(), strict=True),
        *zip(source.buffers(), target.buffers(), strict=True),
    ]
    for one, other in pairs:
        other.copy_(one)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_our_resnet_equals_that_of_torchvision(name: str) -> None:
    theirs, ours = torchvision.models.get_model(name, num_classes=7), networks.build(name, (3, 64, 64), 7)
    assert shapes(ours) == shapes(theirs)
    copy_weights(theirs, ours)
    x = images(3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)  # training mode, which updates statistics
    expected = theirs.eval()(x)
    assert expected.std() > 1e-2
    torch.testing.assert_close(ours.eval()(x), expected, rtol=1e-4, atol=1e-4)


def test_our_vit_tiny_equals_that_of_timm() -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=64, depth=3)
    ours = networks.build("vit-tiny", (3, 64, 64), 7, patch=16, depth=3)
    assert shapes(ours) == shapes(theirs)
    copy_weights(theirs, ours)
    x = images(3, 64, 64)
    expected = theirs.eval()(x)
    assert expected.std() > 1e-2
    torch.testing.assert_close(ours.eval()(x), expected, rtol=1e-4, atol=1e-5)


def test_our_large_networks_have_the_same_parameter_shapes() -> None:
    """Shapes of transformers are compared sorted, because torchvision has another order of parameters."""
    with torch.device("meta"):
        for name in ("resnet18", "resnet50", "resnet101"):
            assert shapes(networks.build(name, (3, 224, 224), 1000)) == shapes(torchvision.models.get_model(name))
        for size in ("tiny", "small", "base"):
            ours = networks.build(f"vit-{size}", (3, 224, 224), 1000)
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
def test_networks_of_libraries_fit_images_and_classes(
    name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    network = networks.build(name, shape, 7, seed=0, **options).eval()
    assert network(images(*shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["torchvision:segmentation/lraspp_mobilenet_v3_large", "torchvision:fcn_resnet50"])
def test_a_segmentation_network_of_torchvision_takes_a_step(name: str) -> None:
    network = networks.build(name, (3, 33, 47), 4, seed=0)
    assert network.eval()(images(3, 33, 47))["out"].shape == (2, 4, 33, 47)
    bnn = lb.bayesianize(network, lb.MeanField()).train()
    loss = lb.elbo_loss(bnn, images(3, 33, 47), torch.randint(4, (2, 33, 47)), num_data=1000)
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_a_seed_determines_the_weights_without_changing_the_random_state(name: str) -> None:
    before = torch.get_rng_state()
    one, same, other = (networks.build(name, (3, 32, 32), 3, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])


def test_timm_loads_pretrained_weights(tmp_path: Path) -> None:
    pretrained = timm.create_model("resnet18", num_classes=1000)
    safetensors.torch.save_file(pretrained.state_dict(), tmp_path / "weights.safetensors")
    file = {"file": str(tmp_path / "weights.safetensors")}
    network = networks.build("timm:resnet18", (3, 32, 32), 7, pretrained=True, pretrained_cfg_overlay=file)
    assert torch.equal(network.state_dict()["conv1.weight"], pretrained.state_dict()["conv1.weight"])
    assert network(images(3, 32, 32)).shape == (2, 7)


def with_weights(monkeypatch: pytest.MonkeyPatch, name: str, classes: int, **options: Any) -> dict[str, Tensor]:
    """Make torchvision load local weights instead of downloading them."""
    state = torchvision.models.get_model(name, num_classes=classes, **options).state_dict()
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda self, *args, **kwargs: state)
    return state


@pytest.mark.parametrize("outputs", [7, 1000])
def test_torchvision_loads_pretrained_weights_that_fit(monkeypatch: pytest.MonkeyPatch, outputs: int) -> None:
    state = with_weights(monkeypatch, "resnet18", 1000)
    built = networks.build("torchvision:resnet18", (3, 32, 32), outputs, pretrained=True).state_dict()
    different = {key for key in state if not torch.equal(built[key], state[key])}
    assert different == (set() if outputs == 1000 else {"fc.weight", "fc.bias"})


def test_torchvision_loads_a_pretrained_segmentation_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights include an auxiliary head for training, which is not built."""
    state = with_weights(monkeypatch, "fcn_resnet50", 21, weights_backbone=None, aux_loss=True)
    built = networks.build("torchvision:fcn_resnet50", (3, 32, 32), 4, pretrained=True).state_dict()
    different = {key for key in built if not torch.equal(built[key], state[key])}
    assert different == {"classifier.4.weight", "classifier.4.bias"}


def test_pretrained_positions_for_another_size_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_weights(monkeypatch, "vit_b_32", 1000)
    with pytest.raises(
        lb.LeanBayesError, match=r"pretrained encoder.pos_embedding of torchvision:vit_b_32 does not fit"
    ):
        networks.build("torchvision:vit_b_32", (3, 64, 64), 7, pretrained=True)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("timm:resnet81", (3, 32, 32), {}, r"timm has no network 'resnet81' for images: did you mean .*resnet\d"),
        ("timm:zzzzzz", (3, 32, 32), {}, r"timm has no network 'zzzzzz' for images: see timm's list_models\(\)"),
        ("torchvision:resnet19", (3, 32, 32), {}, "torchvision has no network 'resnet19' for images: did you mean"),
        ("torchvision:fasterrcnn_resnet50_fpn", (3, 32, 32), {}, "torchvision has no network .* for images"),
        ("torchvision:resnet18", (1, 28, 28), {}, "takes 3 input channels, not 1: repeat the channel, or use timm"),
        ("torchvision:resnet18", (784,), {}, "must be that of an image"),
        ("timm:resnet18", (784,), {}, "must be that of an image"),
        ("timm:resnet18", (3, 32, 32), {"foo": 1}, r"timm:resnet18 cannot be built .* with foo=1: .*'foo'"),
        ("torchvision:resnet18", (3, 32, 32), {"foo": 1}, r"torchvision:resnet18 cannot be built .* with foo=1"),
        ("timm:", (3, 32, 32), {}, "There is no network 'timm:'"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise_one_sentence(
    name: str, shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(lb.LeanBayesError, match=message):
        networks.build(name, shape, 10, **options)


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_run_neither_unpickles_a_checkpoint_nor_contacts_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    checkpoint, victim = tmp_path / "checkpoint.pth", tmp_path / "victim"
    checkpoint.write_bytes(pickle.dumps(Malicious(victim)))
    for options in (
        {"checkpoint_path": str(checkpoint)},
        {"pretrained": True},
        {"pretrained": True, "pretrained_cfg_overlay": {"url": "http://192.0.2.1/weights.pth"}},
        {"pretrained": True, "pretrained_cfg_overlay": {"file": str(checkpoint)}},
    ):
        network = rebuild("timm:resnet18", [3, 32, 32], 7, options, file_bytes=1 << 26)
        assert shapes(network) == shapes(timm.create_model("resnet18", num_classes=7))
    assert not victim.exists()
    for name in ("timm:hf-hub:someone/something", f"timm:local-dir:{tmp_path}"):
        with pytest.raises(lb.LeanBayesError, match="without a path or an address"):
            rebuild(name, [3, 32, 32], 7, {}, file_bytes=1 << 26)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("timm:vit_tiny_patch16_224", {"depth": 2, "patch_size": 8, "drop_rate": 0.1, "global_pool": "avg"}),
        ("timm:resnet18", {"layers": [1, 1, 1, 1], "act_layer": "silu", "stem_type": "deep"}),
        ("timm:swin_tiny_patch4_window7_224", {"depths": [1, 1, 1, 1], "window_size": 7}),
        ("torchvision:segmentation/lraspp_mobilenet_v3_large", {}),
        ("torchvision:densenet121", {"drop_rate": 0.1, "memory_efficient": True}),
    ],
)
def test_a_run_is_rebuilt_as_it_was_built(name: str, options: dict[str, Any]) -> None:
    network = rebuild(name, [3, 64, 64], 7, options, file_bytes=1 << 26)
    assert str(network) == str(networks.build(name, (3, 64, 64), 7, **options))
    assert {tensor.device.type for tensor in network.state_dict().values()} == {"cpu"}
