"""Measure the time to share the weights of a ResNet-18 and the fit of the mixture, against scikit-learn.

    python benchmarks/sharing.py --out benchmarks/results/sharing-cpu.json

The weights have the distribution of a trained mean-field network: μ of each layer is Gaussian by its fan-in, σ is
log-normal. The timing covers all steps, from μ and σ to labels, outliers, blends and merged components. scikit-learn
gets a subset, because it compares every point with every center. The score of k-means is the mean squared distance of
all points to their centers, that of the mixture the mean log-likelihood of the points that both were fitted to.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import machine_of, wait, write
from sklearn.cluster import MiniBatchKMeans
from sklearn.mixture import GaussianMixture
from torch import Tensor

import leanbayes as lb
from leanbayes.methods.weight_sharing import em
from leanbayes.methods.weight_sharing.clustering import assign, kmeans
from leanbayes.methods.weight_sharing.codebook import SharingSettings, share_weights
from leanbayes.methods.weight_sharing.tiles import Tiles
from leanbayes.networks import build


def trained_weights(device: torch.device, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw μ, σ and mean |gradient| of all weights of one or several ResNet-18."""
    generator = torch.Generator().manual_seed(0)
    layout = lb.bayesianize(build("resnet-18", (3, 32, 32), 10, seed=0), lb.MeanField()).posterior.layout
    means, stds = [], []
    for slot in list(layout) * copies:
        scale = 0.5 * (2 / slot.fan_in) ** 0.5
        means.append(scale * torch.randn(slot.numel, generator=generator))
        stds.append(0.1 * scale * torch.exp(0.5 * torch.randn(slot.numel, generator=generator)))
    mean, std = torch.cat(means).to(device), torch.cat(stds).to(device)
    return mean, std, torch.randn(len(mean), generator=generator).abs().to(device)


def timed(action: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return a result and its seconds."""
    wait(device.type == "cuda")
    start = time.perf_counter()
    result = action()
    wait(device.type == "cuda")
    return result, time.perf_counter() - start


def whole(mean: Tensor, std: Tensor, gradient: Tensor, settings: SharingSettings, repeats: int) -> dict[str, Any]:
    """Time all steps several times; the first run is a warm-up."""
    runs = [timed(lambda: share_weights(mean, std, settings, gradient), mean.device) for _ in range(repeats)]
    sharing = runs[-1][0]
    loc, variance = sharing.weights(mean, std)
    error = (loc - mean).double().square().mean().sqrt() / mean.double().std()
    return {
        "weights": len(mean),
        "seconds": [seconds for _, seconds in runs],
        "components": len(sharing.mean),
        "outliers": len(sharing.outliers),
        "blended": len(sharing.blended),
        "paper_parameters": len(sharing.outliers) + len(sharing.blended) + 2 * len(sharing.mean),
        "relative_error_of_means": float(error),
        "relative_error_of_stds": float((variance.sqrt() - std).double().square().mean().sqrt() / std.double().std()),
    }


def clusters(points: Tensor, count: int, sample: int) -> dict[str, Any]:
    """Compare k-means with that of scikit-learn on a subset."""
    tiles, sorting = timed(lambda: Tiles(points), points.device)
    (centers, clusters), ours = timed(lambda: kmeans(tiles, count), points.device)
    fitted, fitting = timed(lambda: em.fit(tiles, clusters, SharingSettings.passes, full_steps=1), points.device)
    unit = float(points[:, 0].std())  # double precision and unit scale, for the accuracy of scikit-learn's distances
    some = (points[:: len(points) // sample][:sample].double() / unit).cpu().numpy()
    peer = MiniBatchKMeans(count, batch_size=16384, max_iter=5, n_init=1, random_state=0, reassignment_ratio=0)
    found, theirs = timed(lambda: peer.fit(some), torch.device("cpu"))
    peers = (unit * torch.from_numpy(found.cluster_centers_)).to(points)
    likelihoods = [em.expectation(tiles, em.candidates(tiles, mixture), mixture)[1] for mixture in (clusters, fitted)]
    return {
        "sorting_seconds": sorting,
        "seconds": ours,
        "stepwise_em_seconds": fitting,
        "mean_squared_distance": float((points - centers[assign(tiles, centers)]).double().square().sum(1).mean()),
        "log_likelihood_of_clusters": likelihoods[0],
        "log_likelihood": likelihoods[1],
        "sklearn_points": len(some),
        "sklearn_steps": found.n_steps_,
        "sklearn_seconds": theirs,
        "sklearn_mean_squared_distance": float((points - peers[assign(tiles, peers)]).double().square().sum(1).mean()),
    }


def mixtures(points: Tensor, count: int, sample: int, steps: int) -> dict[str, Any]:
    """Compare the mixture with that of scikit-learn, on the same subset and with as many components."""
    some = points[:: len(points) // sample][:sample]
    scale = some.double().std(0)
    scaled = (some.double() / scale).float()

    def ours() -> Any:
        tiles = Tiles(scaled)
        return em.fit(tiles, kmeans(tiles, count)[1], SharingSettings.passes, full_steps=steps)

    mixture, seconds = timed(ours, points.device)
    peer = GaussianMixture(count, max_iter=steps, random_state=0, tol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged
        found, theirs = timed(lambda: peer.fit(scaled.double().cpu().numpy()), torch.device("cpu"))
    unit = float(scale.log().sum())  # to the density of unscaled points
    return {
        "components": count,
        "points": len(some),
        "passes": SharingSettings.passes,
        "full_steps": steps,
        "seconds": seconds,
        "log_likelihood": float(mixture.log_density(scaled).mean()) - unit,
        "sklearn_iterations": peer.n_iter_,
        "sklearn_seconds": theirs,
        "sklearn_log_likelihood": float(found.score(scaled.double().cpu().numpy())) - unit,
    }


def main() -> None:
    """Measure everything and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--components", type=int, default=6000)
    parser.add_argument("--copies", type=int, default=1, help="number of ResNet-18: 8 are as large as ViT-B/16")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    device = torch.device(args.device)
    machine = machine_of(device.type)
    print(f"torch {torch.__version__}, {machine}\n", flush=True)
    mean, std, gradient = trained_weights(device, args.copies)
    record: dict[str, Any] = {"machine": machine}
    record["whole"] = whole(mean, std, gradient, SharingSettings(args.components), args.repeats)
    print(json.dumps(record["whole"], indent=1), flush=True)
    points = torch.stack([mean, std], 1)
    record["mixture"] = mixtures(points, 300, 60_000, 20)
    print(json.dumps(record["mixture"], indent=1), flush=True)
    record["kmeans"] = clusters(points, args.components, 400_000)
    print(json.dumps(record["kmeans"], indent=1), flush=True)
    write(args.out, record)


if __name__ == "__main__":
    main()
