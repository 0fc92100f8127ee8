"""Images of examples have the right pixels, colors and captions."""

import io
import random
import struct
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_cases import (
    CLASSES,
    VOID,
    Recorded,
    image_data,
    images,
    network,
    segmentation_data,
    segmentation_network,
    table_data,
    table_network,
)
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.data import Data, from_datasets
from leanbayes.evaluation import EvaluationSettings, evaluate_fully
from leanbayes.report.galleries import galleries_of, png

SETTINGS = EvaluationSettings(samples=3, shifts=(), seed=2)


def decoded(text: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(b64decode(text, validate=True))))


def evaluated(
    data: Data, settings: EvaluationSettings = SETTINGS
) -> tuple[lb.BayesianModel, dict[str, Any], list[dict[str, Any]]]:
    bnn = lb.bayesianize(network(data.input_shape[0]), lb.MeanField(init_std=0.3))
    found = evaluate_fully(bnn, data, settings)
    return bnn, found, galleries_of(bnn, data, found)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_survive_the_png_file(channels: int) -> None:
    image = torch.randint(0, 256, (channels, 5, 9), dtype=torch.uint8)
    found = decoded(png(image))
    expected = image.permute(1, 2, 0).numpy()
    assert np.array_equal(found, expected[..., 0] if channels == 1 else expected)


def test_floats_are_clipped_and_rounded_to_bytes() -> None:
    image = torch.tensor([[[0.0, 1.0, 0.5, 0.2], [-0.3, 1.7, 0.499, 0.001]]])
    assert decoded(png(image)).tolist() == [[0, 255, 128, 51], [0, 255, 127, 0]]


def test_large_images_are_scaled_down_in_proportion() -> None:
    image = torch.zeros(3, 400, 800, dtype=torch.uint8)
    image[0, :, 400:] = 200
    found = decoded(png(image))
    assert found.shape == (160, 320, 3)
    assert found[80, 40].tolist() == [0, 0, 0]
    assert found[80, 280].tolist() == [200, 0, 0]
    assert decoded(png(torch.zeros(1, 320, 17))).shape == (320, 17)


def test_a_sharp_image_has_no_new_colors_after_scaling() -> None:
    image = torch.zeros(3, 700, 700, dtype=torch.uint8)
    image[1, :, ::2] = 255
    image[2, ::3] = 90
    colors = {tuple(pixel) for pixel in image.permute(1, 2, 0).reshape(-1, 3).tolist()}
    small = decoded(png(image, sharp=True))
    assert small.shape == (320, 320, 3)
    assert {tuple(pixel) for pixel in small.reshape(-1, 3).tolist()} <= colors
    smooth = decoded(png(image))
    assert not {tuple(pixel) for pixel in smooth.reshape(-1, 3).tolist()} <= colors


def test_it_is_a_png_file() -> None:
    file = b64decode(png(torch.zeros(1, 4, 6)))
    assert file.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", file[16:24]) == (6, 4)


# -- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("bytes_", [True, False])
def test_mistakes_are_shown_without_normalization(channels: int, bytes_: bool) -> None:
    data = image_data(channels, bytes_)
    _, found, (gallery,) = evaluated(data)
    assert gallery["title"] == "Most confident mistakes"
    x, _ = images(24, channels, bytes_=bytes_)
    pixels = x if bytes_ else (255 * x).round().clamp(0, 255).to(torch.uint8)
    assert [one["index"] for one in gallery["pictures"]] == found["mistakes"]["index"]
    for shown_image in gallery["pictures"]:
        (one,) = shown_image["pngs"]
        shown = decoded(one["data"])
        assert np.array_equal(shown.reshape(8, 8, channels), pixels[shown_image["index"]].permute(1, 2, 0).numpy())


def words(data: Data, **example: Any) -> tuple[str, str]:
    bnn = lb.bayesianize(network(), lb.Deterministic())
    shown = {"index": 3, "truth": 2, "answer": 1, "confidence": 0.98765, **example}
    mistakes = {name: [value] for name, value in shown.items()}
    (gallery,) = galleries_of(bnn, data, {"settings": {}, "mistakes": mistakes})
    (image,) = gallery["pictures"]
    return image["caption"], image["alt"]


def named(*classes: str) -> Data:
    dataset = TensorDataset(*images(8))
    return from_datasets(dataset, dataset, dataset, classes=classes)


def test_captions_have_the_predicted_and_the_true_class() -> None:
    assert words(image_data()) == (
        "predicted class 1 (98.8%), truth class 2",
        "Test example 3: class 2, predicted as class 1.",
    )
    data = named("cat", "<dog> & co", "Ωmega\n", "cat")
    assert words(data) == (
        "predicted <dog> & co (98.8%), truth Ωmega\n",
        "Test example 3: Ωmega\n, predicted as <dog> & co.",
    )
    assert words(data, truth=0, answer=3)[0] == "predicted cat (98.8%), truth cat"  # two of one name


def test_a_model_without_mistakes_has_no_gallery() -> None:
    bnn = lb.bayesianize(network(), lb.Deterministic())
    assert galleries_of(bnn, image_data(), {"settings": {}, "mistakes": {"index": []}}) == []


def test_data_other_than_images_have_no_gallery() -> None:
    table = lb.bayesianize(table_network(), lb.Deterministic(), likelihood=lb.Gaussian())
    assert galleries_of(table, table_data(), evaluate_fully(table, table_data(), SETTINGS)) == []
    assert evaluated(image_data(channels=2))[2] == []


def test_examples_that_are_read_one_by_one_are_shown() -> None:
    dataset = Recorded(*images(8))
    data = from_datasets(dataset, dataset, dataset, outputs=CLASSES)
    _, found, galleries = evaluated(data)
    first = found["mistakes"]["index"][0]
    shown = galleries[-1]["pictures"][0]["pngs"][0]["data"]
    assert np.array_equal(decoded(shown), dataset.x[first, 0].numpy())


# -- segmentations ----------------------------------------------------------------------------------------------------


def segmented(data: Data, settings: EvaluationSettings = SETTINGS) -> tuple[lb.BayesianModel, list[dict[str, Any]]]:
    likelihood = lb.Categorical(ignore_index=VOID)
    bnn = lb.bayesianize(segmentation_network(), lb.MeanField(init_std=0.3), likelihood=likelihood)
    (gallery,) = galleries_of(bnn, data, {"settings": vars(settings), "mistakes": {}})
    assert gallery["title"] == "Segmentations"
    return bnn, gallery["pictures"]


def test_segmentations_show_image_truth_prediction_and_entropy() -> None:
    data = segmentation_data(count=10)
    bnn, images_ = segmented(data)
    x, y = data.test[:]  # type: ignore[index]
    assert len(images_) == 4
    colors: dict[int, set[tuple[int, ...]]] = {}
    for entry, number in zip(images_, (0, 3, 6, 9), strict=True):
        assert [one["label"] for one in entry["pngs"]] == ["image", "truth", "prediction", "entropy"]
        image, truth, answer, uncertainty = (decoded(one["data"]) for one in entry["pngs"])
        assert np.array_equal(image, x[number].permute(1, 2, 0).numpy())
        prediction = bnn.predict(x[number][None] / 255, 3, generator=torch.Generator().manual_seed(2))
        label, entropy = prediction.label[0], prediction.entropy[0]
        share = (entropy / torch.tensor(float(CLASSES)).log()).mul(255).round()
        assert np.abs(uncertainty.astype(int) - share.numpy()).max() <= 1
        assert (truth[y[number] == VOID] == 0).all()
        for classes, shown in ((y[number], truth), (label, answer)):
            for k in classes.unique().tolist():
                colors.setdefault(k, set()).update(map(tuple, shown[classes == k].tolist()))
        counted = y[number] != VOID
        wrong = (label != y[number])[counted].float().mean().item()
        assert entry["caption"] == f"Test image {number}: {wrong:.1%} of the pixels are wrong; bright means uncertain"
        assert entry["alt"].startswith(f"Test image {number}, ")
    # Each class has its own color, the same in truth and prediction.
    assert all(len(found) == 1 for found in colors.values())
    assert len(set().union(*colors.values())) == len(colors) >= 4
    assert colors[VOID] == {(0, 0, 0)}


@pytest.mark.parametrize("changes", [{"seed": 3}, {"samples": 1}, {"rule": "mean"}])
def test_segmentations_are_predicted_with_the_settings(changes: dict[str, Any]) -> None:
    data, settings = segmentation_data(), EvaluationSettings(**{"samples": 3, **changes})
    bnn, images_ = segmented(data, settings)
    x, _ = data.test[0]  # type: ignore[index]
    generator = torch.Generator().manual_seed(settings.seed)
    entropy = bnn.predict(x[None] / 255, settings.samples, rule=settings.rule, generator=generator).entropy[0]
    shown = decoded(images_[0]["pngs"][3]["data"]).astype(int)
    share = (entropy / torch.tensor(float(CLASSES)).log()).mul(255).round().numpy()
    assert np.abs(shown - share).max() <= 1
    assert images_[0]["pngs"][3]["data"] != segmented(data)[1][0]["pngs"][3]["data"]


def test_segmentations_of_a_network_in_double_precision_are_shown() -> None:
    likelihood = lb.Categorical(ignore_index=VOID)
    bnn = lb.bayesianize(segmentation_network(), lb.MeanField(init_std=0.3), likelihood=likelihood)
    found = {"settings": vars(EvaluationSettings(rule="mean")), "mistakes": {}}
    single = galleries_of(bnn, segmentation_data(1), found)
    assert galleries_of(bnn.double(), segmentation_data(1), found) == single


@pytest.mark.parametrize("count", [1, 2, 4])
def test_few_segmentations_are_shown_once(count: int) -> None:
    _, images_ = segmented(segmentation_data(count))
    assert [image["caption"].split(":")[0] for image in images_] == [f"Test image {n}" for n in range(count)]


def test_large_maps_keep_the_colors_of_their_classes() -> None:
    small, large = (segmented(segmentation_data(1, side))[1][0] for side in (8, 500))
    truth = decoded(large["pngs"][1]["data"])
    assert truth.shape == (320, 320, 3)
    expected = {tuple(pixel) for pixel in decoded(small["pngs"][1]["data"]).reshape(-1, 3).tolist()}
    assert {tuple(pixel) for pixel in truth.reshape(-1, 3).tolist()} <= expected


def test_an_image_without_any_label_is_all_black_in_truth() -> None:
    x, y = torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.full((1, 8, 8), VOID)
    dataset = TensorDataset(x, y)
    data = from_datasets(dataset, dataset, dataset, outputs=CLASSES, ignore_index=VOID)
    _, images_ = segmented(data)
    assert not decoded(images_[0]["pngs"][1]["data"]).any()
    assert "0.0% of the pixels are wrong" in images_[0]["caption"]


def test_galleries_do_not_change_random_states_and_the_model() -> None:
    data = segmentation_data()
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    bnn, _ = segmented(data)
    before: dict[str, Tensor] = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    galleries_of(bnn, data, {"settings": vars(SETTINGS), "mistakes": {}})
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (str(np.random.get_state()), random.getstate())
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())
