"""Pictures of examples: the surest mistakes, the least sure answers, and maps of segmentations."""

import base64
import colorsys
import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leanbayes.bayesian import BayesianModel
from leanbayes.data import Batches, Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.scores import ignored, predictions
from leanbayes.network import input_dtype
from leanbayes.report.figures.lines import class_name

_MAPS = 4  # segmentations that are shown
_LARGEST = 320  # pixels of a side; larger pictures are shown smaller
_TITLES = {
    "mistakes": ("Surest mistakes", "Wrong answers of the highest confidence: a model to trust has few of these."),
    "unsure": ("Least sure answers", "The test examples of the highest entropy: are they hard for you, too?"),
}


def galleries_of(bnn: BayesianModel, data: Data, assessment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Draw the examples that `assess` has named, or some segmentations, as plain values: PNG files in base64."""
    if len(data.input_shape) != 3 or data.input_shape[0] not in (1, 3) or data.test is None:
        return []
    if data.task == "segmentation":
        return [_maps(bnn, data, assessment["look"])]
    galleries = []
    for key, examples in assessment["extremes"].items():
        title, caption = _TITLES[key]
        if examples:
            pictures = [_example(data, example) for example in examples]
            galleries.append({"title": title, "caption": caption, "pictures": pictures})
    return galleries


def _read(data: Data, number: int) -> tuple[Tensor, Tensor]:
    """Read one test example as it is stored: a batch of one."""
    assert data.test is not None
    one = torch.utils.data.Subset(data.test, [number])
    return next(Batches(one, 1, shuffle=False).epoch())


def _example(data: Data, example: Mapping[str, Any]) -> dict[str, Any]:
    truth, answer = (class_name(data.classes, example[key]) for key in ("truth", "answer"))
    verdict = f"{answer}, rightly" if example["truth"] == example["answer"] else f"{answer}, but is {truth}"
    return {
        "pngs": [{"data": png(_read(data, example["index"])[0][0]), "label": ""}],
        "caption": f"{verdict}: {example['confidence']:.1%} sure",
        "alt": f"Test example {example['index']}, {truth}, taken for {answer}.",
    }


def _maps(bnn: BayesianModel, data: Data, look: Mapping[str, Any]) -> dict[str, Any]:
    """Show images, their true and predicted classes, and the entropy, at even distances through the test data."""
    total = len(data.test)  # type: ignore[arg-type]
    numbers = sorted({round(place * (total - 1) / (_MAPS - 1)) for place in range(_MAPS)})
    return {
        "title": "Segmentations",
        "caption": "Image, truth, answer and entropy. The doubt should lie where the answer is wrong.",
        "pictures": [_segmentation(bnn, data, look, number) for number in numbers],
    }


def _segmentation(bnn: BayesianModel, data: Data, look: Mapping[str, Any], number: int) -> dict[str, Any]:
    x, y = _read(data, number)
    batch = (data.normalise(x) if data.normalise else x).to(bnn.device, input_dtype(bnn))
    settings = {name: look[name] for name in ("samples", "rule", "seed")}
    prediction, _ = next(predictions(bnn, [(batch, y)], **settings))
    truth, answer = y[0], prediction.label[0].cpu()
    counted = truth != ignored(bnn)
    wrong = (answer != truth)[counted].float().mean().item() if counted.any() else 0.0
    doubt = prediction.entropy.cpu() / math.log(data.outputs)
    colours = _palette(data.outputs)
    return {
        "pngs": [
            {"data": png(x[0]), "label": "image"},
            {"data": png(_coloured(torch.where(counted, truth, data.outputs), colours), sharp=True), "label": "truth"},
            {"data": png(_coloured(answer, colours), sharp=True), "label": "answer"},
            {"data": png(doubt), "label": "entropy"},
        ],
        "caption": f"Test image {number}: {wrong:.1%} of the pixels are wrong; bright is unsure",
        "alt": f"Test image {number}, its true classes, the predicted ones, and where the model is unsure.",
    }


def _palette(classes: int) -> Tensor:
    """Give each class a colour far from its neighbours', and black to what has no label."""
    colours = [colorsys.hsv_to_rgb(number * 0.618 % 1, 0.55 + 0.3 * (number % 2), 0.95) for number in range(classes)]
    return torch.tensor([*colours, (0.0, 0.0, 0.0)])


def _coloured(labels: Tensor, palette: Tensor) -> Tensor:
    return palette[labels].permute(2, 0, 1)


def png(image: Tensor, sharp: bool = False) -> str:
    """Write an image (channels, height, width), uint8 or floats from 0 to 1, as a PNG file in base64.

    sharp: where it is made smaller, take some of its pixels, and mix none: between two classes lies no third.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise LeanBayesError("Pictures need pillow: pip install 'leanbayes[report]'.") from None
    if image.is_floating_point():
        image = image.clamp(0, 1).mul(255).round().to(torch.uint8)
    values = image.cpu().permute(1, 2, 0).numpy()
    picture = Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values)
    if max(picture.size) > _LARGEST:
        picture.thumbnail((_LARGEST, _LARGEST), Image.Resampling.NEAREST if sharp else Image.Resampling.BICUBIC)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
