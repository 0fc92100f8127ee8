"""Compare leanbayes with other libraries in one run: cost of a step and a prediction, size on disk, and correctness.

    pip install '.[peers]'
    python benchmarks/peers.py --out benchmarks/results/peers-cpu.json

A step is forward, backward and SGD with momentum in fp32, on fixed random data; for laplace-torch, which does not
train, it is the fit to one batch. The libraries take turns, round after round; times and ratios are medians over
rounds, relative to the plain network. Memory is the peak during a step, with parameters and optimizer state. Bytes
moved are counted over forward and backward. A prediction averages 30 samples; that of the plain network is one pass. If
a library fails, the program reports its error.
"""

import argparse
import copy
import functools
import gc
import importlib.metadata
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Trainer, count_cost, machine_of, middle, milliseconds, write
from peer_libraries import LIBRARIES, PRIOR_STD, LaplaceTorch, Library
from step import batch, network
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from leanbayes.data import Batches, Data, load
from leanbayes.networks import small_cnn

STD = 0.05  # σ of every weight
SAMPLES = 30
COST_HEAD = """| network | library | step ms (quartiles) | time × | memory × | moved × | 30 samples × | one pass × | disk × |
|---|---|---|---|---|---|---|---|---|"""  # noqa: E501
PROBE_HEAD = """| library | KL | KL's gradient | error of σ's gradient | std | correlation | attention | BatchNorm |
|---|---|---|---|---|---|---|---|"""


def versions() -> dict[str, str]:
    """Return the installed version of each library."""
    found = {}
    for package in {library.package for library in LIBRARIES.values() if library.package}:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return dict(sorted(found.items()))


def attempt(errors: dict[str, str], what: str, action: Callable[[], Any]) -> Any:
    """Return the result of an action; if it fails, record the error and return None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return action()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        errors[what] = f"{type(error).__name__}: {lines[0][:120]}"
        return None


# -- cost -------------------------------------------------------------------------------------------------------------


class Contender:
    """A library on a network, ready to train and predict."""

    def __init__(self, library: Library, name: str, args: argparse.Namespace) -> None:
        device = torch.device(args.device)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        x, y = batch(name, args.batch, device)
        self.library, self.x, self.cuda = library, x, device.type == "cuda"
        model = library.convert(network(name).to(device).train(), STD)
        if library.trains:
            model = model.to(device)
            cost = count_cost(lambda: library.loss(model, x, y).backward())
            trainer = Trainer(model, lambda: library.loss(model, x, y), device, before, lr=1e-4, warmup=args.warmup)
            self.step, self.memory = trainer.step, trainer.memory
        else:
            cost = count_cost(lambda: library.fit(model, x, y))
            self.step, self.memory = lambda: library.fit(model, x, y), None
        self.model, self.bytes = model, cost.bytes

    def predict(self) -> Any:
        """Average 30 samples, or run the plain network once."""
        return self.library.probabilities(self.model, self.x, SAMPLES if self.library.package else 1)

    def one_pass(self) -> Any:
        """Return mean and std in one pass."""
        return self.library.one_pass(self.model, self.x)

    def stored(self) -> int:
        """Return the bytes on disk."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            self.library.save(self.model, path)
            return path.stat().st_size


def times(runs: dict[str, Callable[[], Any]], each: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Time calls in turns; ratios are relative to the plain network."""
    cuda = args.device == "cuda"
    rounds = [{label: milliseconds(run, each, cuda) for label, run in runs.items()} for _ in range(args.repeats)]
    found = {}
    for label in runs:
        ratio = statistics.median(one[label] / one["plain network"] for one in rounds)
        found[label] = {**middle([one[label] for one in rounds]), "ratio": ratio}
    return found


def costs(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all libraries on one network."""
    rows: dict[str, dict[str, Any]] = {}
    ready: dict[str, Contender] = {}
    if args.device == "cuda":
        Contender(LIBRARIES["plain network"], name, args)  # allocates the workspaces of GPU libraries
    for label in args.library:
        gc.collect()
        rows[label] = {"network": name, "library": label, "errors": {}}
        made = attempt(rows[label]["errors"], "step", lambda library=LIBRARIES[label]: Contender(library, name, args))
        if made is not None:
            ready[label] = made
        print(f"{name}, {label}: {rows[label]['errors'] or 'ready'}", file=sys.stderr, flush=True)
    for label, found in times({label: one.step for label, one in ready.items()}, args.steps, args).items():
        rows[label]["step"] = found
    predictions: dict[str, Callable[[], Any]] = {}
    passes: dict[str, Callable[[], Any]] = {"plain network": ready["plain network"].predict}
    for label, one in ready.items():
        if isinstance(one.model, nn.Module):
            one.model.eval()
        errors = rows[label]["errors"]
        if attempt(errors, "predict", one.predict) is not None:
            predictions[label] = one.predict
        if one.library.one_pass_too and attempt(errors, "one pass", one.one_pass) is not None:
            passes[label] = one.one_pass
        rows[label] |= {"moved": one.bytes, "memory": one.memory, "stored": attempt(errors, "save", one.stored)}
    for label, found in times(predictions, 1, args).items():
        rows[label]["predict"] = found
    for label, found in times(passes, 1, args).items():
        rows[label]["one_pass"] = found
    for row in rows.values():
        for cost in ("moved", "memory", "stored"):
            if row.get(cost) is not None:
                row[f"{cost}_ratio"] = row[cost] / rows["plain network"][cost]
    return list(rows.values())


def cost_row(row: dict[str, Any]) -> str:
    """Format the costs of one library."""
    if "step" not in row:
        return f"| {row['network']} | {row['library']} | {row['errors']['step']} | | | | | | |"
    low, high = row["step"]["ms_quartiles"]
    ratios = [row["step"]["ratio"], row.get("memory_ratio"), row["moved_ratio"]]
    ratios += [row.get(name, {}).get("ratio") for name in ("predict", "one_pass")] + [row.get("stored_ratio")]
    cells = [row["network"], row["library"], f"{row['step']['ms']:.1f} ({low:.1f} to {high:.1f})"]
    cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    return f"| {' | '.join(cells)} |"


# -- correctness ------------------------------------------------------------------------------------------------------


@functools.cache
def digits() -> Data:
    """Return handwritten digits of 8×8 pixels, which are part of scikit-learn."""
    return load("digits")


def images() -> tuple[Tensor, Tensor]:
    """Return some digits and their labels."""
    return next(Batches(digits().test, 64, shuffle=False, normalize=digits().normalize).epoch())


@functools.cache
def _trained() -> nn.Module:
    """Train a plain network with two convolutions, max pooling and a linear layer."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1)]
    net = nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    batches = Batches(digits().train, 64, normalize=digits().normalize)
    for epoch in range(10):
        for x, y in batches.epoch(epoch):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net


def cnn() -> nn.Module:
    """Return a copy of the trained network."""
    return copy.deepcopy(_trained())


def kl_ratios(library: Library) -> tuple[float, float]:
    """Return the KL of the library over the exact KL of its parameters, and the same for the gradient of the means.

    The gradient is projected on the exact one. Both are averaged over samples if the KL is random.
    """
    model = library.convert(cnn(), STD)
    pairs = library.gaussians(model)
    means, prior = [mean for mean, _ in pairs], Normal(torch.tensor(0.0), torch.tensor(PRIOR_STD))
    found, gradients = [], []
    for _ in range(50):
        library.draw(model, images()[0])
        kl = library.kl(model)
        found.append(kl.item())
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(kl, means)]))
    exact = torch.stack([kl_divergence(Normal(mean, library.std(raw)), prior).sum() for mean, raw in pairs]).sum()
    right = torch.cat([g.flatten() for g in torch.autograd.grad(exact, means)])
    along = torch.stack(gradients).mean(0) @ right / (right @ right)
    return statistics.mean(found) / exact.item(), along.item()


def gradient_error(library: Library) -> float:
    """Return the relative error of σ's gradient for two samples before one backward pass.

    The reference takes a backward pass after each sample, with the same noise.
    """
    x, y = images()
    gradients = []
    for together in (True, False):
        model = library.convert(cnn(), STD)
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            loss = F.cross_entropy(library.draw(model, x), y)
            losses.append(loss)
            if not together:
                loss.backward()
        if together:
            sum(losses).backward()
        gradients.append(torch.cat([raw.grad.flatten() for _, raw in library.gaussians(model)]))
    first, second = gradients
    return float((first - second).norm() / second.norm())


def one_pass_accuracy(library: Library, samples: int) -> tuple[float, float]:
    """Compare the std of one pass with that of the library's own samples, over examples and outputs.

    Returns:
        The median of their ratio, and the correlation of their logarithms.
    """
    model = library.convert(cnn(), STD)
    x, y = images()
    if isinstance(library, LaplaceTorch):
        library.fit(model, x, y)
    else:
        model.eval()
    found, true = library.one_pass(model, x)[1], library.outputs(model, x, samples).std(0)
    correlation = torch.corrcoef(torch.stack([found.flatten().log(), true.flatten().log()]))[0, 1]
    return float((found / true).median()), float(correlation)


class Attention(nn.Module):
    """Self-attention that also returns its attention weights, which depend only on the input projections."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, tokens, 16) → the same, and (batch, tokens, tokens)."""
        return self.attention(x, x, x)


def attention(library: Library) -> str:
    """Return which projections of nn.MultiheadAttention become random."""
    torch.manual_seed(0)
    model = library.convert(Attention(), STD)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    (out, inner), (other_out, other_inner) = (library.draw(model, x) for _ in range(2))
    random = not torch.equal(inner, other_inner), not torch.equal(out, other_out)
    return {(True, True): "random", (False, True): "output only"}.get(random, "stays fixed")


def batchnorm(library: Library) -> str:
    """Return whether convolutions with BatchNorm train and are random in evaluation mode."""
    torch.manual_seed(0)
    model = library.convert(small_cnn(), STD)
    x, y = images()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        loss = library.loss(model.train(), x, y)
        loss.backward()
        optimizer.step()
    one, other = library.outputs(model.eval(), x, 2)
    return "not finite" if not loss.isfinite() else "stays fixed" if torch.equal(one, other) else "random"


def probes(label: str, samples: int) -> dict[str, Any]:
    """Run all correctness checks on one library."""
    library, errors = LIBRARIES[label], {}
    row: dict[str, Any] = {"library": label, "errors": errors}
    if library.trains:
        ratios = attempt(errors, "kl_ratio", lambda: kl_ratios(library))
        row["kl_ratio"], row["kl_gradient_ratio"] = ratios or (None, None)
        row["gradient_error"] = attempt(errors, "gradient_error", lambda: gradient_error(library))
        row["attention"] = attempt(errors, "attention", lambda: attention(library))
        row["batchnorm"] = attempt(errors, "batchnorm", lambda: batchnorm(library))
    else:
        library = LaplaceTorch("regression")
    if library.one_pass_too:
        found = attempt(errors, "std_ratio", lambda: one_pass_accuracy(library, samples))
        row["std_ratio"], row["std_correlation"] = found or (None, None)
    return row


def probe_row(row: dict[str, Any]) -> str:
    """Format the checks of one library."""
    cells = [row["library"]]
    forms = {"kl_ratio": ".3g", "kl_gradient_ratio": ".3g", "gradient_error": ".1g"}
    forms |= {"std_ratio": ".2f", "std_correlation": ".2f"}
    for name, form in forms.items():
        cells.append(format(row[name], form) if row.get(name) is not None else row["errors"].get(name, ""))
    cells += [row.get(name) or row["errors"].get(name, "") for name in ("attention", "batchnorm")]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Check and measure every library, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", default=["lenet", "cnn"], choices=["resnet18", "cnn", "lenet", "mlp"])
    parser.add_argument("--library", nargs="+", default=list(LIBRARIES), choices=list(LIBRARIES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=3, help="steps per round")
    parser.add_argument("--repeats", type=int, default=5, help="number of rounds")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2000, help="samples to compare one pass with")
    parser.add_argument("--costs-only", action="store_true", help="skip the correctness checks, which need no GPU")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if "plain network" not in args.library:
        args.library.insert(0, "plain network")
    machine = machine_of(args.device)
    record: dict[str, Any] = {
        "machine": machine,
        "precision": "fp32",
        "versions": versions(),
        "costs": [],
        "probes": [],
    }
    print(f"torch {torch.__version__}, {machine}; {record['versions']}")
    if not args.costs_only:
        print(f"\n{PROBE_HEAD}", flush=True)
        for label in args.library:
            if LIBRARIES[label].package:
                record["probes"].append(probes(label, args.samples))
                print(probe_row(record["probes"][-1]), flush=True)
    print(f"\n{COST_HEAD}")
    for name in args.network:
        fresh = costs(name, args)
        print("\n".join(map(cost_row, fresh)), flush=True)
        record["costs"] += fresh
        write(args.out, record)


if __name__ == "__main__":
    main()
