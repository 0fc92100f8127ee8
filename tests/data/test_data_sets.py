"""Data sets by name, and wrapped data sets of the user."""

import dataclasses
import doctest
import importlib
import pkgutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import expect, write_folder, write_svhn
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import leanbayes as lb
import leanbayes.data
from leanbayes.core import config
from leanbayes.data import (
    NAMES,
    ArrayDataset,
    Augment,
    Normalize,
    fingerprint,
    from_datasets,
    has_color_classes,
    load,
    ood_partners,
    preset,
    read_images,
    task_of,
)

# -- names -------------------------------------------------------------------------------------------------------------


def test_case_and_separators_of_names_do_not_matter() -> None:
    assert load("Digits").name == "digits"
    assert load("TOY").name == "toy"
    assert {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "toy", "boston"} <= set(NAMES)


def test_unknown_names_get_a_suggestion(tmp_path: Path) -> None:
    expect(lambda: load("cifar-11"), "There is no data set 'cifar-11': did you mean cifar10?")
    expect(lambda: load("nothing like it"), *NAMES, "uci:NAME", "csv:FILE", "path")
    expect(lambda: load("./not/there"), "./not/there", "path")
    expect(lambda: load("csv:none.dat", tmp_path), "none.dat")
    (tmp_path / "file.bin").write_bytes(b"")
    expect(lambda: load(tmp_path / "file.bin"), "file.bin", "csv:FILE")
    expect(lambda: load(f"csv:{tmp_path}"), str(tmp_path), "file")
    expect(lambda: load("digits", validation_share=0), "validation_share=0")
    expect(lambda: load("digits", validation_share=1.0), "validation_share=1.0")


def test_errors_about_a_missing_root_name_both_ways_to_set_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in set(NAMES) - {"digits", "letters", "toy", "gap"}:
        expect(partial(load, name), name, "root", "LEANBAYES_DATA", "that holds")
    monkeypatch.setenv("LEANBAYES_DATA", str(tmp_path))
    expect(lambda: load("mnist"), tmp_path, "train-images-idx3-ubyte")
    write_folder(tmp_path / "pets", ("train",))
    assert load("pets").name == "pets"  # a path relative to the root


@pytest.mark.parametrize(("module", "name"), [("sklearn.datasets", "digits"), ("PIL.Image", "pets")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, name: str) -> None:
    write_folder(tmp_path / "pets", ("train",))
    monkeypatch.setitem(sys.modules, module, None)

    def first_example() -> Any:
        return load(name, tmp_path).train[0]

    expect(first_example, "pip install '.[data]'")


def test_matlab_files_need_no_optional_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_svhn(tmp_path / f"{split}_32x32.mat")
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert load("svhn", tmp_path).input_shape == (3, 32, 32)


def test_the_import_needs_no_optional_package() -> None:
    code = (
        "import sys, leanbayes.data; print([m for m in ('sklearn', 'scipy', 'PIL', 'torchvision') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- data sets of the user ---------------------------------------------------------------------------------------------


class Pairs(Dataset[Any]):
    """A data set of arbitrary examples."""

    def __init__(self, *examples: Any, **attributes: Any) -> None:
        self.examples = examples
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


X, Y = torch.randn(20, 6), torch.arange(20) % 3


def test_task_shape_and_classes_are_found_in_the_examples() -> None:
    data = from_datasets(TensorDataset(X, Y), test=TensorDataset(X, Y), name="mine", validation_share=0.2, seed=5)
    assert (data.name, data.task, data.input_shape, data.outputs) == ("mine", "classification", (6,), 3)
    assert isinstance(data.train, Subset)
    assert isinstance(data.validation, Subset)
    assert sorted([*data.train.indices, *data.validation.indices]) == list(range(20))
    assert len(data.validation) == 4
    assert isinstance(data.likelihood(), lb.Categorical)
    same = from_datasets(TensorDataset(X, Y), validation_share=0.2, seed=5)
    assert same.validation.indices == data.validation.indices  # type: ignore[attr-defined]
    other = from_datasets(TensorDataset(X, Y), validation_share=0.2, seed=6)
    assert other.validation.indices != data.validation.indices  # type: ignore[attr-defined]

    real = from_datasets(ArrayDataset(X, X[:, :2].double()), TensorDataset(X, X[:, :2]))
    assert (real.task, real.outputs) == ("regression", 2)
    assert isinstance(real.likelihood(), lb.Gaussian)
    assert (from_datasets(Pairs((X[0], 1.5), (X[1], 2.5))).task) == "regression"

    maps = torch.randint(0, 4, (6, 5, 5))
    maps[0, 0, 0] = -100
    maps[1, 0, 0] = 3
    dense = from_datasets(ArrayDataset(torch.zeros(6, 3, 5, 5, dtype=torch.uint8), maps))
    assert (dense.task, dense.outputs, dense.input_shape) == ("segmentation", 4, (3, 5, 5))
    assert dense.normalize == Normalize((0.0,), (1.0,))


def test_classes_come_from_the_data_set_or_an_argument() -> None:
    pair = (np.zeros((3, 4, 4), np.float32), 1)
    assert from_datasets(Pairs(pair, pair, targets=[0, 6])).outputs == 7
    named = from_datasets(Pairs(pair, pair, classes=["cat", "dog"]))
    assert (named.outputs, named.classes) == (2, ("cat", "dog"))
    assert from_datasets(Pairs(pair, pair), outputs=5).outputs == 5
    assert from_datasets(Pairs(pair, pair), classes=["a", "b", "c"]).outputs == 3
    expect(lambda: from_datasets(Pairs(pair, pair)), "outputs=")
    expect(lambda: from_datasets(TensorDataset(X, Y - 1)), "0 or more")
    expect(lambda: from_datasets(TensorDataset(X, Y), task="ranking"), "ranking", "regression")  # type: ignore[arg-type]


def test_inputs_can_be_dicts_and_tuples() -> None:
    for x in ({"ids": torch.arange(3)}, (X[0], X[1])):
        assert from_datasets(Pairs((x, 0), (x, 1)), outputs=2).input_shape == ()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(X[0], 1)])


def test_invalid_data_sets_raise_one_sentence() -> None:
    good = TensorDataset(X, Y)
    for call, words in [
        (lambda: from_datasets(Stream()), "map-style"),
        (lambda: from_datasets(DataLoader(good)), "loader.dataset"),  # type: ignore[arg-type]
        (lambda: from_datasets(iter([])), "map-style"),  # type: ignore[arg-type]
        (lambda: from_datasets(good, Stream()), "map-style"),
        (lambda: from_datasets(good, good, TensorDataset(X[:0], Y[:0])), "empty"),
        (lambda: from_datasets(Pairs()), "empty"),
        (lambda: from_datasets(TensorDataset(X, Y, Y)), "pairs"),
        (lambda: from_datasets(Pairs({"x": 1})), "dict"),
        (lambda: from_datasets(Pairs((Image.new("RGB", (4, 4)), 1))), "Image"),
        (lambda: from_datasets(Pairs((X[0], "cat"))), "str"),
        (lambda: from_datasets(Pairs((X[0], [1, 2]))), "list"),
        (lambda: from_datasets(Pairs((X[0], 1)), outputs=2), "1 example"),
        (lambda: ArrayDataset(X, Y[:-1]), "(19,)"),
        (lambda: ArrayDataset(X, 3), "()"),
    ]:
        expect(call, words)


def test_transforms_can_be_saved_as_json() -> None:
    for setting in (Normalize((0.5, 0.4, 0.3), (0.1, 0.2, 0.3)), Augment(2, flip=False)):
        assert config.decode(config.encode(setting)) == setting
    expect(lambda: Normalize((0.5,), (0.0,)), "positive")
    expect(lambda: Normalize((0.5, 0.5), (1.0,)), "each channel")
    expect(lambda: Augment(-1), "crop=-1")


def test_the_task_is_known_without_loading(tmp_path: Path) -> None:
    (tmp_path / "scenes" / "trainannot").mkdir(parents=True)
    (tmp_path / "pets" / "train").mkdir(parents=True)
    assert task_of("CIFAR-10") == task_of("pets", tmp_path) == "classification"
    assert task_of("scenes", tmp_path) == "segmentation"
    assert task_of("toy") == task_of("uci:yacht") == task_of("csv:a.csv") == task_of("boston") == "regression"


def test_presets_follow_the_data_set_or_its_kind_of_task(tmp_path: Path) -> None:
    (tmp_path / "scenes" / "trainannot").mkdir(parents=True)
    (tmp_path / "pets" / "train").mkdir(parents=True)
    assert preset("digits")["model"] == "small-cnn"
    assert preset("Fashion_MNIST") == preset("mnist") == {"model": "lenet-5", "epochs": 20, "temperature": 0.003}
    assert preset("CIFAR-10") == preset("svhn")
    assert preset("toy") == preset("uci:yacht") == preset("a.csv")
    assert preset("toy")["model"] == "mlp"
    assert preset("pets", tmp_path)["model"] == "resnet-18"
    assert preset(tmp_path / "scenes")["model"] == "unet"
    for name in (*NAMES, str(tmp_path / "pets"), str(tmp_path / "scenes")):
        regression = task_of(name) == "regression"
        assert preset(name)["temperature"] == (0.1 if regression else 0.003)
        by_ivon = preset(name, method=lb.MeanField(engine="ivon"))
        assert (by_ivon["temperature"], by_ivon["lr"]) == (1, 0.1 if regression else 1)
        assert not {"engine", "optimizer"} & by_ivon.keys()
        color = name in ("cifar10", "cifar100", "svhn", str(tmp_path / "pets"))
        assert has_color_classes(name) == color


def test_changing_a_preset_leaves_the_record_as_it_is() -> None:
    preset("mnist")["epochs"] = 1
    assert preset("mnist")["epochs"] == 20


def test_ood_partners_are_image_sets_of_the_same_shape() -> None:
    assert ood_partners("cifar10") == ("svhn", "cifar100")
    assert ood_partners("toy") == ood_partners("pets") == ()
    assert {partner for name in NAMES for partner in ood_partners(name)} <= set(NAMES)
    assert read_images(ood_partners("digits")[0], "test").x.shape[1:] == load("digits").input_shape


def test_reprs_show_sizes_and_shapes_without_values() -> None:
    x, y = torch.randn(20, 6), torch.arange(20) % 3
    data = from_datasets(TensorDataset(x, y), test=ArrayDataset(x[:5], y[:5]), name="mine", validation_share=0.2)
    assert repr(data) == ("Data('mine', 'classification', train=16, validation=4, test=5, input_shape=(6,), classes=3)")
    assert repr(load("toy")) == (
        "Data('toy', 'regression', train=810, validation=90, test=100, input_shape=(1,), outputs=1)"
    )
    assert "test=None" in repr(from_datasets(TensorDataset(x, y)))
    assert repr(dataclasses.replace(data, train=Stream())).startswith("Data('mine', 'classification', train=Stream, ")
    images = torch.zeros(4, 3, 5, 7, dtype=torch.uint8)
    assert repr(ArrayDataset(images, y[:4])) == "ArrayDataset(4 examples, x: uint8 (3, 5, 7), y: int64 ())"
    assert repr(ArrayDataset(x, x[:, :2])) == "ArrayDataset(20 examples, x: float32 (6,), y: float32 (2,))"


@pytest.mark.parametrize("module", sorted(module.name for module in pkgutil.iter_modules(leanbayes.data.__path__)))
def test_examples_in_docstrings_work(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"leanbayes.data.{module}")).failed == 0


def test_different_data_sets_have_different_fingerprints() -> None:
    x, y = torch.arange(40.0).view(20, 2), torch.arange(20)
    first = fingerprint(ArrayDataset(x, y))
    assert first == fingerprint(ArrayDataset(x.clone(), y.clone()))
    others = [ArrayDataset(x + 1, y), ArrayDataset(x, y + 1), ArrayDataset(x[:19], y[:19])]
    assert len({first, *map(fingerprint, others)}) == 4


def test_targets_that_are_not_standardized_cause_a_warning() -> None:
    x = torch.randn(50, 2)
    with pytest.warns(UserWarning, match="standardize"):
        from_datasets(TensorDataset(x, 1000 * torch.randn(50)))
    from_datasets(TensorDataset(x, torch.randn(50)))


def test_uint8_inputs_that_are_not_images_raise_an_error() -> None:
    flat = TensorDataset(torch.zeros(9, 28, 28, dtype=torch.uint8), torch.arange(9))
    expect(lambda: from_datasets(flat), "uint8", "(channels, height, width)")


def test_classes_of_a_subset_come_from_the_whole_data_set() -> None:
    class Own(Dataset[Any]):
        classes = ("a", "b", "c")

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(2), index % 3

    assert from_datasets(Subset(Own(), range(10))).outputs == 3
