"""Reference networks: parameter counts of the papers, shapes, names, seeds, and the Bayesian version of each."""

import doctest
import importlib
import pkgutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import leanbayes as lb
from leanbayes import networks
from leanbayes.networks.resnet import PaddedShortcut
from leanbayes.networks.vit import TransformerBlock

# Small versions of all networks: the shape of an input, and options.
SMALL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "lenet-300-100": ((1, 8, 8), {}),
    "lenet-5": ((1, 16, 16), {}),
    "mlp": ((6,), {"hidden": (8, 8)}),
    "resnet-101": ((3, 8, 8), {"width": 4}),
    "resnet-18": ((3, 8, 8), {"width": 4}),
    "resnet-20": ((3, 8, 8), {"width": 4}),
    "resnet-50": ((3, 8, 8), {"width": 4}),
    "small-cnn": ((1, 8, 8), {}),
    "unet": ((2, 17, 19), {"width": 2}),
    "vit": ((3, 8, 8), {"depth": 1, "patch": 4, "width": 24, "heads": 3}),
    "vit-base": ((3, 8, 8), {"depth": 1, "patch": 4}),
    "vit-small": ((3, 8, 8), {"depth": 1, "patch": 4}),
    "vit-tiny": ((3, 8, 8), {"depth": 2, "patch": 4}),
    "wrn-28-10": ((3, 8, 8), {"depth": 10, "widen": 1, "dropout": 0.1}),
}
CLASSES = 5


def small(name: str, **options: Any) -> nn.Module:
    shape, own = SMALL[name]
    return networks.build(name, shape, CLASSES, seed=0, **own, **options)


def images(*shape: int, batch: int = 3) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1))


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "parameters"),
    [
        ("lenet-300-100", (1, 28, 28), 10, 266_610),
        ("lenet-5", (1, 28, 28), 10, 431_080),
        ("small-cnn", (1, 8, 8), 10, 58_634),
        ("resnet-20", (3, 32, 32), 10, 269_722),
        ("resnet-18", (3, 32, 32), 10, 11_173_962),
        ("resnet-50", (3, 32, 32), 10, 23_520_842),
        ("resnet-101", (3, 32, 32), 10, 42_512_970),
        ("resnet-18", (3, 224, 224), 1000, 11_689_512),
        ("resnet-50", (3, 224, 224), 1000, 25_557_032),
        ("resnet-101", (3, 224, 224), 1000, 44_549_160),
        ("wrn-28-10", (3, 32, 32), 10, 36_479_194),
        ("vit-tiny", (3, 224, 224), 1000, 5_717_416),
        ("vit-small", (3, 224, 224), 1000, 22_050_664),
        ("vit-base", (3, 224, 224), 1000, 86_567_656),
        ("unet", (1, 572, 572), 1, 17_261_825),
    ],
)
def test_networks_have_the_parameter_counts_of_their_papers(
    name: str, shape: tuple[int, ...], outputs: int, parameters: int
) -> None:
    with torch.device("meta"):
        assert count(networks.build(name, shape, outputs)) == parameters


def test_an_mlp_has_the_given_layers() -> None:
    assert count(networks.mlp(6, 3, hidden=(5, 4))) == (6 * 5 + 5) + (5 * 4 + 4) + (4 * 3 + 3)
    assert count(networks.mlp(6, 3, hidden=())) == 6 * 3 + 3


def test_names_are_sorted_and_every_network_is_tested() -> None:
    assert list(networks.NAMES) == sorted(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_the_output_has_the_shape_of_the_task(name: str) -> None:
    shape, _ = SMALL[name]
    expected = (3, CLASSES, *shape[1:]) if name == "unet" else (3, CLASSES)
    assert small(name).eval()(images(*shape)).shape == expected


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("mlp", (2, 3, 4), {}),
        ("lenet-300-100", (64,), {}),
        ("lenet-5", (3, 32, 17), {}),
        ("small-cnn", (3, 9, 13), {}),
        ("resnet-20", (1, 28, 28), {"width": 4}),
        ("resnet-20", (3, 33, 17), {"width": 4}),
        ("resnet-18", (1, 28, 28), {"width": 4}),
        ("resnet-18", (4, 64, 96), {"width": 4}),
        ("resnet-18", (3, 65, 33), {"width": 4, "stem": "imagenet"}),
        ("resnet-50", (3, 64, 64), {"width": 4, "stem": "small"}),
        ("wrn-28-10", (1, 28, 30), {"depth": 16, "widen": 1}),
        ("vit-tiny", (1, 28, 28), {"depth": 1}),
        ("vit-tiny", (3, 32, 64), {"depth": 1}),
        ("vit-tiny", (3, 128, 160), {"depth": 1}),
    ],
)
def test_classifiers_take_other_shapes(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    assert networks.build(name, shape, 7, **options)(images(*shape)).shape == (3, 7)


@pytest.mark.parametrize("sides", [(16, 16), (17, 31), (33, 50), (64, 48)])
def test_the_unet_returns_maps_of_the_size_of_the_image(sides: tuple[int, int]) -> None:
    network = networks.build("unet", (1, *sides), 4, width=2)
    assert network(images(1, *sides)).shape == (3, 4, *sides)


def test_the_unet_has_a_large_receptive_field_and_full_resolution() -> None:
    """Changing a pixel changes the output most at that pixel, and also far away."""
    network = networks.build("unet", (1, 64, 64), 1, seed=0, width=4).eval()
    x = images(1, 64, 64, batch=1)
    changed = x.clone()
    changed[0, 0, 20, 40] += 10
    difference = (network(changed) - network(x)).abs()[0, 0]
    row, column = divmod(int(difference.argmax()), 64)
    assert abs(row - 20) <= 4
    assert abs(column - 40) <= 4
    assert difference[50, 10] > 0


@pytest.mark.parametrize(("sides", "patch"), [((8, 8), 1), ((28, 28), 4), ((32, 32), 4), ((64, 64), 8), ((3, 3), 1)])
def test_the_patch_of_small_images_is_an_eighth_of_the_side(sides: tuple[int, int], patch: int) -> None:
    with torch.device("meta"):
        network = networks.vit_tiny(10, (3, *sides))
    assert network.patches.kernel_size == network.patches.stride == (patch, patch)
    assert network.positions.shape == (1, 1 + sides[0] // patch * (sides[1] // patch), 192)


def test_the_patch_of_large_images_is_16() -> None:
    with torch.device("meta"):
        assert networks.vit_tiny(10, (3, 128, 128)).patches.kernel_size == (16, 16)


@pytest.mark.parametrize("name", ["resnet-18", "resnet-50", "resnet-101"])
@pytest.mark.parametrize(
    ("side", "options", "kernel"),
    [(63, {}, 3), (64, {}, 7), (32, {"stem": "imagenet"}, 7), (224, {"stem": "small"}, 3)],
)
def test_the_stem_depends_on_the_image_unless_it_is_given(
    name: str, side: int, options: dict[str, Any], kernel: int
) -> None:
    with torch.device("meta"):
        network = networks.build(name, (3, side, side), 10, **options)
    assert isinstance(network, networks.ResNet)
    assert network.conv1.kernel_size == (kernel, kernel)
    assert isinstance(network.pool, nn.MaxPool2d) == (kernel == 7)


def test_resnet18_has_stable_arguments_and_parameter_names() -> None:
    network = networks.resnet18(width=16)
    assert isinstance(network, networks.ResNet)
    assert count(network) == count(networks.resnet18(10, 16))
    assert [name for name, _ in network.named_children() if name != "pool"] == ["conv1", "bn1", "layers", "fc"]
    assert "layers.2.shortcut.0.weight" in network.state_dict()


def test_the_shortcuts_of_resnet_20_have_no_parameters() -> None:
    network = small("resnet-20")
    padded = [module for module in network.modules() if isinstance(module, PaddedShortcut)]
    assert len(padded) == 2
    assert not any("shortcut" in name for name, _ in network.named_parameters())
    x = images(4, 5, 7)
    y = padded[0](x)
    assert y.shape == (3, 8, 3, 4)
    assert torch.equal(y[:, :4], x[:, :, ::2, ::2])
    assert not y[:, 4:].any()


def test_a_transformer_block_equals_that_of_torch() -> None:
    block: Any = TransformerBlock(12, 3)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
    theirs = nn.TransformerEncoderLayer(
        12, 3, 48, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    )
    theirs.load_state_dict(
        {
            "self_attn.in_proj_weight": block.attention.qkv.weight,
            "self_attn.in_proj_bias": block.attention.qkv.bias,
            "self_attn.out_proj.weight": block.attention.out.weight,
            "self_attn.out_proj.bias": block.attention.out.bias,
            "linear1.weight": block.mlp[0].weight,
            "linear1.bias": block.mlp[0].bias,
            "linear2.weight": block.mlp[2].weight,
            "linear2.bias": block.mlp[2].bias,
            **{f"norm1.{name}": value for name, value in block.norm1.state_dict().items()},
            **{f"norm2.{name}": value for name, value in block.norm2.state_dict().items()},
        }
    )
    x = images(5, 12)
    torch.testing.assert_close(block(x), theirs(x))


def test_a_transformer_depends_on_the_positions_of_patches() -> None:
    network = networks.build("vit-tiny", (3, 8, 8), 4, seed=0, depth=1, patch=4).eval()
    x = images(3, 8, 8)
    assert not torch.allclose(network(x), network(x.flip(-1)), atol=1e-5)


def test_a_wide_block_normalizes_before_the_shortcut() -> None:
    """A shortcut that changes the shape takes the normalized input; other shortcuts take the input itself."""
    network: Any = networks.build("wrn-28-10", (3, 8, 8), 10, seed=0, depth=16, widen=2).eval()
    first, second = network.layers[:2]
    x = images(16, 8, 8)
    y = F.conv2d(F.relu(x / (1 + 1e-5) ** 0.5), first.shortcut.weight)
    branch = F.conv2d(F.relu(x / (1 + 1e-5) ** 0.5), first.conv1.weight, padding=1)
    y = y + F.conv2d(F.relu(branch / (1 + 1e-5) ** 0.5), first.conv2.weight, padding=1)
    torch.testing.assert_close(first(x), y)
    assert second.shortcut is None
    nn.init.zeros_(second.conv2.weight)
    assert torch.equal(second(y), y)


def test_convolutions_have_he_initialization_also_after_a_reset() -> None:
    network: Any = networks.build("resnet-18", (3, 32, 32), 10, seed=0, width=32)
    weight = network.layers[7].conv2.weight
    start, std = weight.detach().clone(), (2 / (256 * 9)) ** 0.5
    assert weight.std().item() == pytest.approx(std, rel=0.01)
    network.layers[7].conv2.reset_parameters()
    assert not torch.equal(weight, start)
    assert weight.std().item() == pytest.approx(std, rel=0.01)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("ResNet_18", "resnet-18"),
        ("resnet18", "resnet-18"),
        ("RESNET-20", "resnet-20"),
        ("wrn2810", "wrn-28-10"),
        ("WRN_28_10", "wrn-28-10"),
        ("LeNet5", "lenet-5"),
        ("lenet 300 100", "lenet-300-100"),
        ("ViT_Tiny", "vit-tiny"),
        ("SmallCNN", "small-cnn"),
        ("U-Net", "unet"),
    ],
)
def test_case_and_separators_of_names_do_not_matter(written: str, name: str) -> None:
    shape, options = SMALL[name]
    with torch.device("meta"):
        one, other = networks.build(written, shape, 5, **options), networks.build(name, shape, 5, **options)
    assert str(one) == str(other)


@pytest.mark.parametrize("name", SMALL)
def test_a_seed_determines_the_weights_without_changing_the_random_state(name: str) -> None:
    before = torch.get_rng_state()
    one, same = small(name).state_dict(), small(name).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[key], same[key]) for key in one)
    shape, options = SMALL[name]
    other = networks.build(name, shape, CLASSES, seed=1, **options).state_dict()
    assert not all(torch.equal(one[key], other[key]) for key in one)


def test_without_a_seed_the_global_random_state_is_used() -> None:
    torch.manual_seed(3)
    one = networks.build("mlp", (4,), 2).state_dict()
    torch.manual_seed(3)
    same, other = networks.build("mlp", (4,), 2).state_dict(), networks.build("mlp", (4,), 2).state_dict()
    assert torch.equal(one["1.weight"], same["1.weight"])
    assert not torch.equal(one["1.weight"], other["1.weight"])


@pytest.mark.parametrize("rule", ["sample", "local", "flipout"])
@pytest.mark.parametrize("name", SMALL)
def test_bayesian_versions_have_finite_gradients(name: str, rule: str) -> None:
    shape, _ = SMALL[name]
    bnn = lb.bayesianize(small(name), lb.MeanField(rule=rule)).train()
    y = torch.randint(CLASSES, (3, *shape[1:]) if name == "unet" else (3,))
    loss = lb.elbo_loss(bnn, images(*shape), y, num_data=1000)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in bnn.parameters())


def test_ensemble_members_have_the_same_initial_std() -> None:
    """Layers that are reset have the same std as before."""
    ensemble: Any = lb.bayesianize(small("resnet-18"), lb.Ensemble(members=2)).network
    one, other = (dict(member.named_parameters()) for member in ensemble.networks)
    name = "layers.7.conv2.weight"
    assert not torch.equal(one[name], other[name])
    assert one[name].std().item() == pytest.approx(other[name].std().item(), rel=0.1)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("resnet-19", (3, 32, 32), {}, r"There is no network 'resnet-19': did you mean resnet-\d+\?$"),
        ("zebra", (3, 32, 32), {}, r"There is no network 'zebra': use lenet-300-100.*timm:NAME or torchvision:NAME\.$"),
        ("keras:resnet", (3, 32, 32), {}, "There is no network 'keras:resnet'"),
        ("resnet-18", (3, 32, 32), {"widht": 3}, "resnet-18 has no option 'widht': it has stem, width"),
        ("resnet-18", (3, 32, 32), {"num_classes": 3}, "has no option 'num_classes'"),
        ("resnet-18", (3, 32, 32), {"pretrained": True}, "has no option 'pretrained'"),
        ("lenet-5", (1, 28, 28), {"width": 3}, "lenet-5 has no option 'width': it has none"),
        ("resnet-18", (3, 32, 32), {"width": 0}, "width=0 must be a whole number"),
        ("resnet-18", (3, 32, 32), {"width": 1.5}, "width=1.5 must be a whole number"),
        ("resnet-18", (3, 32, 32), {"stem": "large"}, "stem='large' is unknown: use 'small' or 'imagenet'"),
        ("resnet-18", (784,), {}, r"input_shape=\(784,\) must be that of an image.*use mlp"),
        ("vit-tiny", (28, 28), {}, "must be that of an image"),
        ("unet", (784,), {}, "must be that of an image"),
        ("unet", (3, 15, 64), {}, "at least 16×16 pixels, not 15×64"),
        ("lenet-5", (1, 8, 8), {}, "at least 16×16 pixels, not 8×8: use small-cnn"),
        ("vit-tiny", (3, 30, 30), {"patch": 4}, "patch=4 does not divide images of 30×30 pixels: use one of 1, 2, 3"),
        ("vit-tiny", (3, 31, 31), {}, "patch=4 does not divide images of 31×31"),
        ("vit-tiny", (3, 32, 32), {"patch": 0}, "patch=0 must be a whole number"),
        ("wrn-28-10", (3, 32, 32), {"depth": 27}, "depth=27 must be 4 more than a multiple of 6"),
        ("wrn-28-10", (3, 32, 32), {"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ("mlp", (4,), {"hidden": (8, 0)}, r"hidden\[1\]=0 must be a whole number"),
        ("mlp", (4,), {"hidden": 8}, "hidden=8 must be a list of layer widths"),
        ("mlp", (), {}, "must be that of one example"),
        ("mlp", (4, 0), {}, r"input_shape\[1\]=0 must be a whole number"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise_one_sentence(
    name: str, shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(lb.LeanBayesError, match=message):
        networks.build(name, shape, 10, **options)


def test_integer_shapes_and_zero_outputs_raise_one_sentence() -> None:
    with pytest.raises(lb.LeanBayesError, match=r"input_shape=784 must be that of one example, such as \(784,\)"):
        networks.build("mlp", 784, 10)  # type: ignore[arg-type]
    with pytest.raises(lb.LeanBayesError, match="outputs=0 must be a whole number"):
        networks.build("mlp", (784,), 0)


def test_a_transformer_rejects_images_of_another_size() -> None:
    with pytest.raises(lb.LeanBayesError, match=r"takes images of 8×8 pixels, not 12×8: resize them"):
        small("vit-tiny")(images(3, 12, 8))


def test_the_heads_of_a_transformer_must_divide_its_width() -> None:
    with pytest.raises(lb.LeanBayesError, match="width=10 must be a multiple of heads=3"):
        networks.VisionTransformer(10, (3, 8, 8), width=10, heads=3)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_missing_libraries_are_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", import_module)
    with pytest.raises(lb.LeanBayesError, match=f"{library} is not installed: pip install {library}"):
        networks.build(f"{library}:resnet18", (3, 32, 32), 10)


def test_libraries_that_do_not_load_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("importlib.import_module", import_module)
    with pytest.raises(lb.LeanBayesError, match=r"torchvision does not work with this version of torch .*nms"):
        networks.build("torchvision:resnet18", (3, 32, 32), 10)


@pytest.mark.parametrize("module", sorted(module.name for module in pkgutil.iter_modules(networks.__path__)))
def test_examples_in_docstrings_work(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"leanbayes.networks.{module}")).failed == 0
