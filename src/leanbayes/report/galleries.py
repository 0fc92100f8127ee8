"""Images of examples: the most confident mistakes, and segmentations."""

import base64
import colorsys
import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.network import input_dtype
from leanbayes.data import Batches, Data
from leanbayes.errors import missing_package
from leanbayes.evaluation.scores import ignored, predictions
from leanbayes.model.bayesian import BayesianModel
from leanbayes.report.figures.seed_lines import class_name

_MAPS = 4  # segmentations to show
_LARGEST = 320  # pixels per side; larger images are scaled down
_MISTAKES = 24  # to keep: of several methods, the report shows those that all make, and that only one makes


def galleries_of(bnn: BayesianModel, data: Data, evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return images of the most confident mistakes, or of some segmentations, as PNG files in base64."""
    if len(data.input_shape) != 3 or data.input_shape[0] not in (1, 3) or data.test is None:
        return []
    if data.task == "segmentation":
        return [_maps(bnn, data, evaluation["settings"])]
    mistakes = evaluation["mistakes"]
    if not mistakes or not mistakes["index"]:
        return []
    rows = [dict(zip(mistakes, values, strict=True)) for values in zip(*mistakes.values(), strict=True)]
    caption = "Wrong answers with the highest confidence. Are they hard for you, too?"
    pictures = [_example(data, example) for example in rows[:_MISTAKES]]
    return [{"title": "Most confident mistakes", "caption": caption, "pictures": pictures}]


def _read(data: Data, number: int) -> tuple[Tensor, Tensor]:
    """Read one test example without normalization, as a batch of one."""
    assert data.test is not None
    one = torch.utils.data.Subset(data.test, [number])
    return next(Batches(one, 1, shuffle=False).epoch())


def _example(data: Data, example: Mapping[str, Any]) -> dict[str, Any]:
    truth, answer = (class_name(data.classes, example[key]) for key in ("truth", "answer"))
    return {
        "index": example["index"],
        "pngs": [{"data": png(_read(data, example["index"])[0][0]), "label": ""}],
        "caption": f"predicted {answer} ({example['confidence']:.1%}), truth {truth}",
        "alt": f"Test example {example['index']}: {truth}, predicted as {answer}.",
    }


def _maps(bnn: BayesianModel, data: Data, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Show images, their true and predicted classes, and the entropy, for evenly spaced test examples."""
    total = len(data.test)  # type: ignore[arg-type]
    numbers = sorted({round(place * (total - 1) / (_MAPS - 1)) for place in range(_MAPS)})
    return {
        "title": "Segmentations",
        "caption": "Image, truth, prediction and entropy. The entropy should be high where the prediction is wrong.",
        "pictures": [_segmentation(bnn, data, settings, number) for number in numbers],
    }


def _segmentation(bnn: BayesianModel, data: Data, settings: Mapping[str, Any], number: int) -> dict[str, Any]:
    x, y = _read(data, number)
    batch = (data.normalize(x) if data.normalize else x).to(bnn.device, input_dtype(bnn))
    how = {name: settings[name] for name in ("samples", "rule", "seed")}
    prediction, _ = next(predictions(bnn, [(batch, y)], **how))
    truth, answer = y[0], prediction.label[0].cpu()
    counted = truth != ignored(bnn)
    wrong = (answer != truth)[counted].float().mean().item() if counted.any() else 0.0
    uncertainty = prediction.entropy.cpu() / math.log(data.outputs)
    colors = _palette(data.outputs)
    return {
        "pngs": [
            {"data": png(x[0]), "label": "image"},
            {"data": png(_colored(torch.where(counted, truth, data.outputs), colors), sharp=True), "label": "truth"},
            {"data": png(_colored(answer, colors), sharp=True), "label": "prediction"},
            {"data": png(uncertainty), "label": "entropy"},
        ],
        "caption": f"Test image {number}: {wrong:.1%} of the pixels are wrong; bright means uncertain",
        "alt": f"Test image {number}, its true and predicted classes, and the uncertainty of the model.",
    }


def _palette(classes: int) -> Tensor:
    """Return a color per class, different from its neighbors, and black for pixels without a label."""
    colors = [colorsys.hsv_to_rgb(number * 0.618 % 1, 0.55 + 0.3 * (number % 2), 0.95) for number in range(classes)]
    return torch.tensor([*colors, (0.0, 0.0, 0.0)])


def _colored(labels: Tensor, palette: Tensor) -> Tensor:
    return palette[labels].permute(2, 0, 1)


def png(image: Tensor, sharp: bool = False) -> str:
    """Write an image (channels, height, width), uint8 or floats from 0 to 1, as a PNG file in base64.

    sharp: Scale down without mixing pixels, as a map of classes needs.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise missing_package("Images in reports need pillow", "report") from None
    if image.is_floating_point():
        image = image.clamp(0, 1).mul(255).round().to(torch.uint8)
    values = image.cpu().permute(1, 2, 0).numpy()
    result = Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values)
    if max(result.size) > _LARGEST:
        result.thumbnail((_LARGEST, _LARGEST), Image.Resampling.NEAREST if sharp else Image.Resampling.BICUBIC)
    file = io.BytesIO()
    result.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
