"""Pictures of examples: the surest mistakes, the least sure answers, and maps of segmentations."""

import base64
import colorsys
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from leanbayes.bayesian import BayesianModel
from leanbayes.data import Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.scores import ignored

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
        return [_maps(bnn, data)]
    galleries = []
    for key, examples in assessment["extremes"].items():
        pictures = [_example(data, example) for example in examples]
        title, caption = _TITLES[key]
        if pictures:
            galleries.append({"title": title, "caption": caption, "pictures": pictures})
    return galleries


def _example(data: Data, example: Mapping[str, Any]) -> dict[str, Any]:
    assert data.test is not None
    truth, answer = (_name(data.classes, example[key]) for key in ("truth", "answer"))
    image = data.test[example["index"]][0]
    verdict = f"{answer}, rightly" if truth == answer else f"{answer}, but is {truth}"
    return {
        "pngs": [{"data": png(image), "label": ""}],
        "caption": f"{verdict}: {example['confidence']:.1%} sure",
        "alt": f"Test example {example['index']}, {truth}, taken for {answer}.",
    }


def _maps(bnn: BayesianModel, data: Data) -> dict[str, Any]:
    """Show images, their true and predicted classes, and the entropy, at even distances through the test data."""
    assert data.test is not None
    total = len(data.test)  # type: ignore[arg-type]
    palette = _palette(data.outputs)
    pictures = []
    for number in sorted({round(place * (total - 1) / max(_MAPS - 1, 1)) for place in range(_MAPS)}):
        x, y = data.test[number]
        batch = x[None].to(bnn.device)
        batch = data.normalise(batch) if data.normalise else batch
        prediction = bnn.predict(batch, generator=torch.Generator().manual_seed(0))
        doubt = prediction.entropy[0].cpu() / torch.tensor(float(data.outputs)).log()
        counted = y != ignored(bnn)
        answer = prediction.label[0].cpu()
        wrong = (answer != y)[counted].float().mean().item() if counted.any() else 0.0
        pngs = [
            {"data": png(x), "label": "image"},
            {"data": png(_coloured(torch.where(counted, y, data.outputs), palette)), "label": "truth"},
            {"data": png(_coloured(answer, palette)), "label": "answer"},
            {"data": png(doubt[None]), "label": "entropy"},
        ]
        caption = f"Test image {number}: {wrong:.1%} of the pixels are wrong; bright is unsure"
        alt = f"Test image {number}, its true classes, the predicted ones, and where the model is unsure."
        pictures.append({"pngs": pngs, "caption": caption, "alt": alt})
    caption = "Image, truth, answer and entropy. The doubt should lie where the answer is wrong."
    return {"title": "Segmentations", "caption": caption, "pictures": pictures}


def _palette(classes: int) -> Tensor:
    """Give each class a colour far from its neighbours', and black to what has no label."""
    colours = [colorsys.hsv_to_rgb(number * 0.618 % 1, 0.55 + 0.3 * (number % 2), 0.95) for number in range(classes)]
    return torch.tensor([*colours, (0.0, 0.0, 0.0)])


def _coloured(labels: Tensor, palette: Tensor) -> Tensor:
    return palette[labels.long()].permute(2, 0, 1)


def png(image: Tensor) -> str:
    """Write an image (channels, height, width), uint8 or floats from 0 to 1, as a PNG file in base64."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise LeanBayesError("Pictures need pillow: pip install 'leanbayes[report]'.") from None
    if image.is_floating_point():
        image = image.clamp(0, 1).mul(255).round().to(torch.uint8)
    values = image.cpu().permute(1, 2, 0).numpy()
    picture = Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values)
    if max(picture.size) > _LARGEST:
        picture.thumbnail((_LARGEST, _LARGEST))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _name(classes: Sequence[str], number: int) -> str:
    return classes[number] if classes else f"class {number}"
