"""Writes docs/benchmarks.md from the figures under benchmarks/results, so that no number is copied by hand.

python benchmarks/tables.py
"""

import json
import statistics
from pathlib import Path
from typing import Any

import lenet
import peers
import size
import sparse_inference
from step import TABLE_HEAD, table_row

HERE = Path(__file__).parent
PAGE = """# What it costs

Every table is from one run, in which the variants take turns; the deterministic network is the unit. `bayesian-torch`
is version 0.5.0. The commands need only this repository (and the peer, if its rows are wanted). This page is written
by `python benchmarks/tables.py`.

## A training step on a GPU

Forward, backward and SGD with momentum; ResNet-18 for 32×32 images in batches of 256, channels_last, and an MLP of
three 2048×2048 layers in batches of 64. "Busy" is the time that the GPU's kernels take. Where it is far below the
step's time, the step waits for Python to launch kernels, and the ratio of times is kinder to what adds arithmetic but
few kernels; CUDA graphs ("cudagraphs", `mode="reduce-overhead"`), whose memory is not counted, wait no longer.
`moments` trains by VDP++, `partial` is PBN, `subspace` SSVI.

In the compiled rows the first variant, the deterministic one, also carries about 68 MB of workspaces of the GPU
libraries: compare the compiled variants' memory with the deterministic memory of the eager rows (the script has since
been mended).

The GPU rows of `flipout` are from before its perturbation and KL shared one pass; the CPU rows and the bytes are
after.

{gpu}

## A whole epoch on a GPU

`lb.fit` on random images of CIFAR-10's size and number, by the recipe of experiments/cifar10_resnet18.yaml: data,
augmentation, both optimisers and logging included. They take turns epoch by epoch.

{epoch}

The next ones shared the GPU with other trainings, which came and went: of these times only the share of the exchanges
is worth something.

{exchange}

## A training step on a CPU

The same, in fp32 on 2 cores; `cnn` is a ResNet-18 of a quarter of the width, batches of 64. A compiled step's memory
is not counted.

{cpu}

## LeNet-5 by moments

A training step of LeNet-5 on MNIST's images, side by side with Bayes by Backprop and with VDP as it was before VDP++,
which keeps full covariances.

{lenet}

## One pass by moments

A prediction of a batch by one pass, which gives mean and variance, beside one plain forward pass and draws of the
weights; with CUDA graphs ("cudagraphs", `mode="reduce-overhead"`) and without. The table with the most variants was
compiled while trainings kept the GPU busy, though timed alone: the compiler chooses kernels by timing them, and its
passes by moments are slower than in the other tables, of the same operations.

{one_pass}

## Sparse weights on a CPU

Layers whose weights are mostly zero multiply by sparse matrices where that is faster, which is measured when a layer
first meets a batch of some size: "picked" is what a model does. Convolutions with windows seldom gain, so neither does
a ResNet.

{sparse}

## On disk

{size}

## Sharing weights

From μ and σ of all weights of a ResNet-18, or of eight, as many as ViT-B/16 has, to labels, outliers, blends and merged
components, several times in a row, of which the first warms up; and two of its steps, the sorting of the points
included, beside those of scikit-learn, whose k-means gets a sample. Weights are drawn as those of a trained network
lie. On the GPU the whole of the ResNet-18 was timed alone, all else there beside trainings.

{sharing}

## Compact files

A ResNet-18 whose labels and positions are drawn at random, so that nothing but their entropy can be won.

{compact_file}

## Bytes moved

Counted by `leanbayes.cost` over all operations of an eager step (forward and backward); the same on every machine.
`lenet` has two convolutions and two linear layers. On a GPU draw and KL are one kernel, and less is moved than here.

{moved}

## Beside the peers

leanbayes beside other libraries in one run, eager and in fp32, all from the same means and with one σ. A step of
laplace-torch, which does not train, is its fit to the batch; by default it treats the last layer. FastBNNs trains by
one pass. torch-uncertainty and blitz convert nothing: their layers were put in by hand. In leanbayes biases are points,
in the others they are random. `lenet` and `cnn` are those above; an error in place of figures is what the library said.
On the GPU all of them, also the plain network, wait for Python, which launches kernel after kernel: times count
launches, of which one pass has many in eager mode (compiled it takes a few plain passes, see above). The memory of the
plain network there has the workspaces of the GPU libraries in it, so that all ratios of memory are too small, those of
`cnn` most (the script has since been mended).

What is right, on a small network with max pooling that was trained on digits:

- **KL**, and **KL's gradient** by the means: over the exact ones of `torch.distributions`, 1 is right.
- **error of σ's gradient**: two draws before one backward pass, against one after the other with the same noise.
- **std** of one pass over that of draws, the median over outputs, and the **correlation** of their logarithms, which
  the noise of the draws lowers too.
- **attention**: what of `nn.MultiheadAttention` becomes random. **BatchNorm**: convolutions with it train, and are
  random in evaluation mode.

{peers}
"""


def load(name: str) -> dict[str, Any]:
    """Read one result file."""
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def steps(*names: str) -> str:
    """The tables of some runs of step.py."""
    parts = []
    for name in names:
        record = load(name)
        rows = "\n".join(table_row(row) for row in record["rows"])
        parts.append(
            f"`{record['command']}`: {record['machine']}, torch {record['torch']}, {record['precision']}\n\n"
            f"{TABLE_HEAD}\n{rows}"
        )
    return "\n\n".join(parts)


def epoch(name: str) -> str:
    """The table of a run of epoch.py."""
    record = load(name)
    gpu, torch = record["machine"]["gpus"][0], record["versions"]["torch"]
    lines = [
        f"`{record['command']}`: {gpu}, torch {torch}, bf16, compiled\n",
        "| method | s an epoch (range) |",
        "|---|---|",
    ]
    for name, seconds in record["epoch_seconds"].items():
        middle = statistics.median(seconds)
        lines.append(f"| {name} | {middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) |")
    ratios = record.get("ratios") or {"mean-field": record["ratio"]}
    told = [
        f"{name} {ratio:.2f} times as long as the plain one"
        for name, ratio in ratios.items()
        if name != "deterministic"
    ]
    told += [
        f"exchanges of weights are {share:.1%} of {name}"
        for name, share in record.get("exchange_shares", {}).items()
        if share
    ]
    return "\n".join([*lines, f"\nMedians over pairs of epochs: {', '.join(told)}."])


def of_lenet() -> str:
    """The table of lenet.py."""
    record = load("lenet")
    head = f"`{record['command']}`: {record['machine']}, torch {record['torch']}, {record['precision']}"
    return "\n".join([head, "", lenet.TABLE_HEAD, *(lenet.table_row(row) for row in record["rows"])])


def of_one_pass() -> str:
    """The tables of one_pass.py."""
    parts = []
    for path in sorted((HERE / "results").glob("one-pass-*.json")):
        record = load(path.stem)
        head = f"`{record['command']}`: {record['machine']}, torch {record['torch']}, {record['precision']}"
        lines = [head, "", TABLE_HEAD, *(table_row(row) for row in record["rows"])]
        weights = {row["variant"]: row["weights_ms"] for row in record["rows"] if row.get("weights_ms")}
        if weights:
            told = ", ".join(f"{variant} {ms:.2f}" for variant, ms in weights.items())
            lines += ["", f"Milliseconds for mean and variance of all weights, once for all passes: {told}."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def of_sparse() -> str:
    """The tables of sparse_inference.py."""
    record = load("sparse-inference")
    layers = [sparse_inference.layer_row(row) for row in record["layers"]]
    networks = [sparse_inference.network_row(row) for row in record["networks"]]
    head = f"`{record['command']}`: {record['machine']}, torch {record['torch']}, fp32"
    return "\n".join([head, "", sparse_inference.LAYER_HEAD, *layers, "", sparse_inference.NETWORK_HEAD, *networks])


def of_size() -> str:
    """The table of size.py."""
    record = load("size")
    return "\n".join([f"`{record['command']}`: {record['network']}\n", size.HEAD, *map(size.table_row, record["rows"])])


def of_sharing(record: dict[str, Any]) -> str:
    """The tables of a run of sharing.py."""
    whole, kmeans, mixture = (record[name] for name in ("whole", "kmeans", "mixture"))
    counts = (f"{whole[key]:,}" for key in ("weights", "components", "outliers", "blended", "paper_parameters"))
    seconds = kmeans["sorting_seconds"] + kmeans["seconds"]
    return "\n".join(
        [
            f"`{record['command']}`: {record['machine']}, torch {record['torch']}\n",
            "| s | weights | Gaussians | outliers | blends | the paper's count |",
            "|---|---|---|---|---|---|",
            f"| {', '.join(f'{one:.1f}' for one in whole['seconds'])} | {' | '.join(counts)} |\n",
            "| | ours on | s | scikit-learn on | s | how good: ours | scikit-learn |",
            "|---|---|---|---|---|---|---|",
            f"| k-means, mean squared distance of all points | {whole['weights']:,} | {seconds:.1f} | "
            f"{kmeans['sklearn_points']:,} | {kmeans['sklearn_seconds']:.0f} | {kmeans['mean_squared_distance']:.2e} | "
            f"{kmeans['sklearn_mean_squared_distance']:.2e} |",
            f"| mixture of {mixture['components']}, mean log-likelihood | {mixture['points']:,} | "
            f"{mixture['seconds']:.1f} | {mixture['points']:,} | {mixture['sklearn_seconds']:.0f} | "
            f"{mixture['log_likelihood']:.4f} | {mixture['sklearn_log_likelihood']:.4f} |",
        ]
    )


def of_compact_file() -> str:
    """The table of compact_file.py."""
    record = load("compact-file-cpu")
    titles = ("density", "Gaussians", "outliers", "blends", "bytes", "entropy of the labels", "s to write", "s to load")
    lines = [
        f"`{record['command']}`: {record['machine']}, torch {record['torch']}\n",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    for row in (record["sparse"], record["dense"]):
        numbers = (f"{row[key]:,}" for key in ("components", "outliers", "blends", "bytes", "entropy_of_labels_bytes"))
        seconds = (f"{statistics.median(row[key]):.2f}" for key in ("compress_seconds", "load_seconds"))
        lines.append(f"| {row['density']:.0%} | {' | '.join([*numbers, *seconds])} |")
    return "\n".join(lines)


def moved() -> str:
    """The table of moved.py."""
    record = load("moved")
    lines = [f"`{record['command']}`\n", "| network | variant | MB moved | × | kernels |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        megabytes = f"{row['bytes'] / 1e6:.0f}"
        lines.append(f"| {row['network']} | {row['variant']} | {megabytes} | {row['ratio']:.2f} | {row['kernels']} |")
    return "\n".join(lines)


def of_peers() -> str:
    """The tables of peers.py."""
    lines: list[str] = []
    for record in map(load, ("peers-cpu", "peers-gpu")):
        named = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
        where = f"{record['machine']}, torch {record['torch']}, {record['precision']}; {named}"
        lines += [f"`{record['command']}`: {where}", ""]
        if record["probes"]:
            lines += [peers.PROBE_HEAD, *map(peers.probe_row, record["probes"]), ""]
        lines += [peers.COST_HEAD, *map(peers.cost_row, record["costs"]), ""]
    return "\n".join(lines).rstrip()


def readme_peers() -> str:
    """The table of peers.py in few words: what is right, and what a LeNet costs beside the plain one."""
    record = load("peers-cpu")
    costs = {row["library"]: row for row in record["costs"] if row["network"] == "lenet"}
    titles = ["KL ÷ exact", "error of σ's gradient", "attention", "step ×", "bytes moved ×", "30 draws ×", "disk ×"]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for row in record["probes"]:
        found = costs[row["library"]]
        attention = row.get("attention") or ("fails" if "attention" in row["errors"] else "")
        figures = [row.get("kl_ratio"), row.get("gradient_error")]
        cells = ["" if figure is None else f"{figure:.2g}" for figure in figures] + [attention]
        ratios = [found["step"]["ratio"], found["moved_ratio"], found["predict"]["ratio"], found["stored_ratio"]]
        lines.append(f"| {row['library']} | {' | '.join([*cells, *(f'{ratio:.1f}' for ratio in ratios)])} |")
    return "\n".join(lines)


def fill(page: Path, text: str, begin: str, end: str = "<!-- /measured -->") -> None:
    """Put a table between its marks."""
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    page = PAGE.format(
        gpu=steps(
            "step-resnet18",
            "step-moments-resnet18",
            "step-moments-graphs",
            "step-partial-graphs",
            "step-methods-graphs",
            "step-mlp",
        ),
        cpu=steps("step-cpu"),
        moved=moved(),
        peers=of_peers(),
        epoch=epoch("epoch-resnet18"),
        exchange=epoch("exchange-resnet18"),
        lenet=of_lenet(),
        one_pass=of_one_pass(),
        sparse=of_sparse(),
        size=of_size(),
        sharing="\n\n".join(map(of_sharing, map(load, ("sharing-cpu", "sharing-gpu", "sharing-gpu-8-copies")))),
        compact_file=of_compact_file(),
    )
    (HERE.parent / "docs" / "benchmarks.md").write_text(page)
    fill(HERE.parent / "README.md", readme_peers(), "<!-- measured: peers -->")
