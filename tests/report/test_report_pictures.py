"""Pictures of examples: the right pixels, in the right colours, with words that say what is seen."""

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
from leanbayes.evaluation import Look, assess
from leanbayes.report.pictures import galleries_of, png

LOOK = Look(samples=3, shifts=(), seed=2)


def decoded(text: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(b64decode(text, validate=True))))


def looked_at(data: Data, look: Look = LOOK) -> tuple[lb.BayesianModel, dict[str, Any], list[dict[str, Any]]]:
    bnn = lb.bayesianize(network(data.input_shape[0]), lb.MeanField(init_std=0.3))
    found = assess(bnn, data, look)
    return bnn, found, galleries_of(bnn, data, found)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_come_back_as_they_were(channels: int) -> None:
    image = torch.randint(0, 256, (channels, 5, 9), dtype=torch.uint8)
    found = decoded(png(image))
    expected = image.permute(1, 2, 0).numpy()
    assert np.array_equal(found, expected[..., 0] if channels == 1 else expected)


def test_floats_are_rounded_to_bytes_and_kept_in_range() -> None:
    image = torch.tensor([[[0.0, 1.0, 0.5, 0.2], [-0.3, 1.7, 0.499, 0.001]]])
    assert decoded(png(image)).tolist() == [[0, 255, 128, 51], [0, 255, 127, 0]]


def test_large_pictures_are_made_smaller_in_proportion() -> None:
    image = torch.zeros(3, 400, 800, dtype=torch.uint8)
    image[0, :, 400:] = 200
    found = decoded(png(image))
    assert found.shape == (160, 320, 3)
    assert found[80, 40].tolist() == [0, 0, 0]
    assert found[80, 280].tolist() == [200, 0, 0]
    assert decoded(png(torch.zeros(1, 320, 17))).shape == (320, 17)


def test_a_sharp_picture_has_no_other_colours_when_it_is_made_smaller() -> None:
    image = torch.zeros(3, 700, 700, dtype=torch.uint8)
    image[1, :, ::2] = 255
    image[2, ::3] = 90
    colours = {tuple(pixel) for pixel in image.permute(1, 2, 0).reshape(-1, 3).tolist()}
    small = decoded(png(image, sharp=True))
    assert small.shape == (320, 320, 3)
    assert {tuple(pixel) for pixel in small.reshape(-1, 3).tolist()} <= colours
    smooth = decoded(png(image))
    assert not {tuple(pixel) for pixel in smooth.reshape(-1, 3).tolist()} <= colours


def test_it_is_a_png_file() -> None:
    file = b64decode(png(torch.zeros(1, 4, 6)))
    assert file.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", file[16:24]) == (6, 4)


# -- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("bytes_", [True, False])
def test_mistakes_and_doubtful_examples_are_shown_as_they_are_stored(channels: int, bytes_: bool) -> None:
    data = image_data(channels, bytes_)
    _, found, galleries = looked_at(data)
    assert [one["title"] for one in galleries] == ["Surest mistakes", "Least sure answers"]
    x, _ = images(24, channels, bytes_=bytes_)
    pixels = x if bytes_ else (255 * x).round().clamp(0, 255).to(torch.uint8)
    for gallery, key in zip(galleries, ("mistakes", "unsure"), strict=True):
        examples = found["extremes"][key]
        assert len(gallery["pictures"]) == len(examples) > 0
        for picture, example in zip(gallery["pictures"], examples, strict=True):
            (one,) = picture["pngs"]
            shown = decoded(one["data"])
            assert np.array_equal(shown.reshape(8, 8, channels), pixels[example["index"]].permute(1, 2, 0).numpy())


def words(data: Data, **example: Any) -> tuple[str, str]:
    bnn = lb.bayesianize(network(), lb.Deterministic())
    told = {"index": 3, "truth": 2, "answer": 1, "confidence": 0.98765, "entropy": 0.1, **example}
    (gallery,) = galleries_of(bnn, data, {"look": {}, "extremes": {"mistakes": [told], "unsure": []}})
    (picture,) = gallery["pictures"]
    return picture["caption"], picture["alt"]


def named(*classes: str) -> Data:
    dataset = TensorDataset(*images(8))
    return from_datasets(dataset, dataset, dataset, classes=classes)


def test_captions_say_what_it_was_taken_for_and_what_it_is() -> None:
    assert words(image_data()) == ("class 1, but is class 2: 98.8% sure", "Test example 3, class 2, taken for class 1.")
    data = named("cat", "<dog> & co", "Ωmega\n", "cat")
    assert words(data) == ("<dog> & co, but is Ωmega\n: 98.8% sure", "Test example 3, Ωmega\n, taken for <dog> & co.")
    assert words(data, truth=1)[0] == "<dog> & co, rightly: 98.8% sure"
    assert words(data, truth=0, answer=3)[0] == "cat, but is cat: 98.8% sure"  # two classes of one name


def test_a_model_without_mistakes_shows_none() -> None:
    bnn = lb.bayesianize(network(), lb.Deterministic())
    assert galleries_of(bnn, image_data(), {"look": {}, "extremes": {"mistakes": [], "unsure": []}}) == []


def test_what_is_no_picture_is_not_shown() -> None:
    table = lb.bayesianize(table_network(), lb.Deterministic(), likelihood=lb.Gaussian())
    assert galleries_of(table, table_data(), assess(table, table_data(), LOOK)) == []
    assert looked_at(image_data(channels=2))[2] == []


def test_examples_that_are_read_one_by_one_are_shown_too() -> None:
    dataset = Recorded(*images(8))
    data = from_datasets(dataset, dataset, dataset, outputs=CLASSES)
    _, found, galleries = looked_at(data)
    first = found["extremes"]["unsure"][0]["index"]
    shown = galleries[-1]["pictures"][0]["pngs"][0]["data"]
    assert np.array_equal(decoded(shown), dataset.x[first, 0].numpy())


# -- segmentations ----------------------------------------------------------------------------------------------------


def segmented(data: Data, look: Look = LOOK) -> tuple[lb.BayesianModel, list[dict[str, Any]]]:
    likelihood = lb.Categorical(ignore_index=VOID)
    bnn = lb.bayesianize(segmentation_network(), lb.MeanField(init_std=0.3), likelihood=likelihood)
    (gallery,) = galleries_of(bnn, data, {"look": vars(look), "extremes": {}})
    assert gallery["title"] == "Segmentations"
    return bnn, gallery["pictures"]


def test_segmentations_show_image_truth_answer_and_doubt() -> None:
    data = segmentation_data(count=10)
    bnn, pictures = segmented(data)
    x, y = data.test[:]  # type: ignore[index]
    assert len(pictures) == 4
    colours: dict[int, set[tuple[int, ...]]] = {}
    for picture, number in zip(pictures, (0, 3, 6, 9), strict=True):
        assert [one["label"] for one in picture["pngs"]] == ["image", "truth", "answer", "entropy"]
        image, truth, answer, doubt = (decoded(one["data"]) for one in picture["pngs"])
        assert np.array_equal(image, x[number].permute(1, 2, 0).numpy())
        prediction = bnn.predict(x[number][None] / 255, 3, generator=torch.Generator().manual_seed(2))
        label, entropy = prediction.label[0], prediction.entropy[0]
        share = (entropy / torch.tensor(float(CLASSES)).log()).mul(255).round()
        assert np.abs(doubt.astype(int) - share.numpy()).max() <= 1
        assert (truth[y[number] == VOID] == 0).all()
        for classes, shown in ((y[number], truth), (label, answer)):
            for k in classes.unique().tolist():
                colours.setdefault(k, set()).update(map(tuple, shown[classes == k].tolist()))
        counted = y[number] != VOID
        wrong = (label != y[number])[counted].float().mean().item()
        assert picture["caption"] == f"Test image {number}: {wrong:.1%} of the pixels are wrong; bright is unsure"
        assert picture["alt"].startswith(f"Test image {number}, ")
    # Each class has one colour, the same in truth and answer, and no two have the same.
    assert all(len(found) == 1 for found in colours.values())
    assert len(set().union(*colours.values())) == len(colours) >= 4
    assert colours[VOID] == {(0, 0, 0)}


@pytest.mark.parametrize("settings", [{"seed": 3}, {"samples": 1}, {"rule": "mean"}])
def test_segmentations_are_predicted_as_the_look_says(settings: dict[str, Any]) -> None:
    data, look = segmentation_data(), Look(**{"samples": 3, **settings})
    bnn, pictures = segmented(data, look)
    x, _ = data.test[0]  # type: ignore[index]
    generator = torch.Generator().manual_seed(look.seed)
    entropy = bnn.predict(x[None] / 255, look.samples, rule=look.rule, generator=generator).entropy[0]
    shown = decoded(pictures[0]["pngs"][3]["data"]).astype(int)
    share = (entropy / torch.tensor(float(CLASSES)).log()).mul(255).round().numpy()
    assert np.abs(shown - share).max() <= 1
    assert pictures[0]["pngs"][3]["data"] != segmented(data)[1][0]["pngs"][3]["data"]


def test_segmentations_of_a_network_in_double_precision_are_shown() -> None:
    likelihood = lb.Categorical(ignore_index=VOID)
    bnn = lb.bayesianize(segmentation_network(), lb.MeanField(init_std=0.3), likelihood=likelihood)
    found = {"look": vars(Look(rule="mean")), "extremes": {}}
    single = galleries_of(bnn, segmentation_data(1), found)
    assert galleries_of(bnn.double(), segmentation_data(1), found) == single


@pytest.mark.parametrize("count", [1, 2, 4])
def test_few_segmentations_are_shown_once(count: int) -> None:
    _, pictures = segmented(segmentation_data(count))
    assert [picture["caption"].split(":")[0] for picture in pictures] == [f"Test image {n}" for n in range(count)]


def test_large_maps_keep_the_colours_of_their_classes() -> None:
    small, large = (segmented(segmentation_data(1, side))[1][0] for side in (8, 500))
    truth = decoded(large["pngs"][1]["data"])
    assert truth.shape == (320, 320, 3)
    expected = {tuple(pixel) for pixel in decoded(small["pngs"][1]["data"]).reshape(-1, 3).tolist()}
    assert {tuple(pixel) for pixel in truth.reshape(-1, 3).tolist()} <= expected


def test_an_image_without_any_label_is_all_black_in_truth() -> None:
    x, y = torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.full((1, 8, 8), VOID)
    dataset = TensorDataset(x, y)
    data = from_datasets(dataset, dataset, dataset, outputs=CLASSES, ignore_index=VOID)
    _, pictures = segmented(data)
    assert not decoded(pictures[0]["pngs"][1]["data"]).any()
    assert "0.0% of the pixels are wrong" in pictures[0]["caption"]


def test_drawing_leaves_random_numbers_and_the_model_alone() -> None:
    data = segmentation_data()
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    bnn, _ = segmented(data)
    before: dict[str, Tensor] = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    galleries_of(bnn, data, {"look": vars(LOOK), "extremes": {}})
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (str(np.random.get_state()), random.getstate())
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())
