"""Compare stds of the areas of classes by `lb.delta_method` with those of samples, for a segmentation network.

python experiments/areas.py MODEL.safetensors --data CamVid --model unet --out FILE.json

The area of a class is the sum of its probabilities over the pixels of an image. Each way gives the mean and the std of
the area of each class in each test image. Many samples are the reference; fewer samples, from another stream, are
compared with it too, and their metrics are means over separate groups of samples. "Independent pixels" adds up the
variances of pixels in the reference, as if pixels were independent: this is what a map of variances says about an area.
Classes with a mean area below one pixel are left out.

Correlations are those of log stds over all areas, and within classes: the mean of each class over the images is
subtracted before. The std ratio is the median, and the log error is the root mean square of the log ratio. The error of
the mean is a root mean square too, in units of the std of the reference. Times are those of one batch, on a CPU the
CPU time of one thread, and medians over rounds in which all ways take turns.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.nn.functional as F
from arguments import add_common_arguments, command_of, run_script
from one_pass_quality import option, wait
from torch import Tensor

import leanbayes as lb
from leanbayes.core.gaussian import inverse_softplus
from leanbayes.data import Batches, load
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation.full_evaluation import some
from leanbayes.networks import build
from leanbayes.training.record import machine, versions, write_json

COUNTS = (8, 30, 100)
STREAM = 300  # samples that are cut into groups of each of these sizes
MOST = 1000  # values per image: no limit for the classes of any data set


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("file", type=Path, help="file of lb.save or lb.compress")
    parser.add_argument("--data", required=True, help="name of the data set, or the path of a folder")
    parser.add_argument("--model", required=True, help="name of the network")
    parser.add_argument("--model-options", type=option, nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--resize", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="size of the images")
    parser.add_argument("--title", help="name of the model in tables (default: that of the file)")
    parser.add_argument("--std-factor", type=float, default=1.0, help="multiply σ of all weights of a mean-field model")
    parser.add_argument("--limit", type=int, help="test images, chosen at random (default: all)")
    parser.add_argument("--reference-samples", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="images per batch")
    parser.add_argument("--repeats", type=int, default=5, help="times that each way is measured")
    return add_common_arguments(parser).parse_args()


@torch.no_grad()
def multiply_std(bnn: lb.BayesianModel, factor: float) -> None:
    """Multiply σ of all weights, to see how much noise a way can take."""
    rho = getattr(bnn.posterior, "rho", None)
    if not isinstance(rho, Tensor):
        raise LeanBayesError("--std-factor needs a mean-field model: leave it out.")
    rho.copy_(inverse_softplus(factor * F.softplus(rho)))


def areas(logits: Tensor) -> Tensor:
    """Return the area of each class in pixels, (images, classes)."""
    return logits.softmax(1).sum((2, 3))


@torch.no_grad()
def samples_of(bnn: lb.BayesianModel, x: Tensor, samples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the logits of each sample of the weights."""
    with bnn.using("sample"):
        for _ in range(samples):
            with bnn.drawn(generator=generator) as call:
                yield call(x)


def sampled(bnn: lb.BayesianModel, x: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Return the areas in each sample, (samples, images, classes)."""
    found = torch.empty(0)
    for number, logits in enumerate(samples_of(bnn, x, samples, generator)):
        area = areas(logits)
        if not number:  # one tensor: small ones between the large ones of a pass would fragment the memory
            found = area.new_empty(samples, *area.shape)
        found[number] = area
    return found


def reference_of(
    bnn: lb.BayesianModel, x: Tensor, samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and the std of the areas, and the std if pixels were independent, each (images, classes)."""
    sums: list[Tensor] = []
    for logits in samples_of(bnn, x, samples, generator):
        probs = logits.double().softmax(1)
        area = probs.sum((2, 3))
        values = (area, area.square(), probs, probs.square())
        sums = sums or [torch.zeros_like(value) for value in values]
        for total, value in zip(sums, values, strict=True):
            total += value
    mean, square, pixel, pixel_square = (total / samples for total in sums)
    unbiased = samples / (samples - 1)
    variance = unbiased * (square - mean.square())
    independent = unbiased * (pixel_square - pixel.square()).sum((2, 3))
    return mean, variance.clamp_min(0).sqrt(), independent.clamp_min(0).sqrt()


class Reference:
    """The means and stds of areas that others are compared with, (images, classes); `kept` are those compared."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.kept = mean >= 1
        self.mean, self.std = mean[self.kept], std[self.kept]
        self.classes = torch.arange(mean.shape[1], device=mean.device).expand_as(mean)[self.kept]

    def compared(self, std: Tensor, mean: Tensor | None = None) -> dict[str, float]:
        """Return how close other stds and means, (images, classes), are."""
        logs = torch.stack([std[self.kept].double(), self.std]).clamp_min(1e-30).log()
        ratio, within = logs[0] - logs[1], logs.clone()
        for one in self.classes.unique():
            within[:, self.classes == one] -= logs[:, self.classes == one].mean(1, keepdim=True)
        found = {
            "log_correlation": torch.corrcoef(logs)[0, 1].item(),
            "log_correlation_within_classes": torch.corrcoef(within)[0, 1].item(),
            "std_ratio": ratio.median().exp().item(),
            "log_error": ratio.square().mean().sqrt().item(),
        }
        if mean is not None:
            found["mean_error"] = ((mean[self.kept] - self.mean) / self.std).square().mean().sqrt().item()
        return found


def closeness(bnn: lb.BayesianModel, batches: list[Tensor], samples: int, seed: int) -> dict[str, Any]:
    """Return how close each way is to many samples, and of how many areas."""
    streams = [torch.Generator().manual_seed(seed + number) for number in (1, 2)]
    found = []
    for number, x in enumerate(batches, 1):
        values = lb.delta_method(bnn, x, areas, max_passes=MOST)
        few = sampled(bnn, x, STREAM, streams[1]).movedim(0, -1)
        found.append((*reference_of(bnn, x, samples, streams[0]), values.loc, values.stddev, few))
        print(f"batch {number} of {len(batches)}", flush=True)
    mean, std, independent, loc, delta, few = (torch.cat(parts) for parts in zip(*found, strict=True))
    reference, ways = Reference(mean, std), {}
    for count in COUNTS:
        groups = [part.double() for part in few.split(count, -1) if part.shape[-1] == count]
        rows = [reference.compared(part.std(-1), part.mean(-1)) for part in groups]
        ways[f"{count} samples"] = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
    ways["independent pixels"] = reference.compared(independent)
    ways["delta method"] = reference.compared(delta, loc)
    return {
        "classes": mean.shape[1],
        "areas": len(reference.mean),
        "mean_area": reference.mean.mean().item(),
        "mean_std": reference.std.mean().item(),
        "ways": ways,
    }


@torch.no_grad()
def cost(bnn: lb.BayesianModel, x: Tensor, repeats: int) -> dict[str, Any]:
    """Return the median time of each way, and relative to the plain network.

    The ways take turns. Each runs twice in its turn, and the second run counts: the first one finds memory and caches
    as another way left them, which is a large part of the time of one short pass.
    """
    plain = bnn.to_deterministic().to(bnn.device).eval()
    generator = torch.Generator().manual_seed(0)
    ways: dict[str, Callable[[], object]] = {
        "plain network": lambda: areas(plain(x)),
        "delta method, one area": lambda: lb.delta_method(bnn, x, lambda logits: areas(logits)[:, 0]),
        "delta method": lambda: lb.delta_method(bnn, x, areas, max_passes=MOST),
    }
    for count in COUNTS:
        ways[f"{count} samples"] = lambda count=count: sampled(bnn, x, count, generator).std(0)
    clock = process_time if bnn.device.type == "cpu" else perf_counter
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            run()
            wait()
            start = clock()
            run()
            wait()
            taken[name].append(1000 * (clock() - start))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    over_plain = {name: value / medians["plain network"] for name, value in medians.items()}
    return {"images": len(x), "milliseconds": medians, "over_plain": over_plain}


def main() -> None:
    """Run the comparison, and write its results."""
    args = options()
    data = load(args.data, args.root, resize=args.resize and tuple(args.resize))
    if data.test is None or data.task != "segmentation":
        raise LeanBayesError(f"{data.name} has no test images for segmentation: give a data set that has, as CamVid.")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        torch.set_num_threads(1)
    network = build(args.model, data.input_shape, data.outputs, **dict(args.model_options))
    bnn = lb.load(args.file, network).to(device).eval()
    if args.std_factor != 1:
        multiply_std(bnn, args.std_factor)
    images = some(data.test, args.limit, args.seed)
    epoch = Batches(images, args.batch, device=device, shuffle=False, normalize=data.normalize).epoch()
    batches = [x for x, _ in epoch]
    found = closeness(bnn, batches, args.reference_samples, args.seed)
    words = [args.file.name, "--data", data.name]
    if args.model_options:
        words += ["--model-options", *(f"{name}={json.dumps(value)}" for name, value in args.model_options)]
    record: dict[str, Any] = {
        "command": command_of("areas", args, words, hidden=("file", "data", "model_options")),
        "title": args.title or args.file.stem,
        "data": data.name,
        "model": {"name": args.model, "options": dict(args.model_options)},
        "images": sum(map(len, batches)),
        "pixels": batches[0][0, 0].numel(),
        "reference_samples": args.reference_samples,
        **found,
        "cost": cost(bnn, batches[0], args.repeats),
        "seed": args.seed,
        "versions": versions(),
        "machine": machine(),
    }
    for name, row in found["ways"].items():
        print(name, row)
    print(record["cost"]["over_plain"])
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, record)


if __name__ == "__main__":
    run_script(main)
