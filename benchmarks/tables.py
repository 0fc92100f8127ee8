"""Write docs/benchmarks.md from the files in benchmarks/results, so that no number is copied by hand.

python benchmarks/tables.py
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import captured_epoch
import lenet
import peers
import predict
import shard_plan_table
import size
import sparse_inference
from step import TABLE_HEAD, table_row

HERE = Path(__file__).parent
PAGE = """# Benchmarks

Every table is from one run in which the variants take turns; ratios are relative to the deterministic network.
`bayesian-torch` is version 0.5.0. The commands need only this repository (and the other library, for its rows).
`python benchmarks/tables.py` writes this page.

## A training step on a GPU

Forward, backward and SGD with momentum; ResNet-18 for 32×32 images in batches of 256, channels_last, and an MLP of
three 2048×2048 layers in batches of 64. "Busy" is the time of the GPU kernels. If it is far below the time of the
step, the step waits for Python to launch kernels, and the ratio of times favors variants that add arithmetic but few
kernels. CUDA graphs ("cudagraphs", `mode="reduce-overhead"`) remove this wait; their memory is not counted. `moments`
trains with VDP++, `partial` is PBN, `subspace` is SSVI.

In the compiled rows, the memory of the first variant, the deterministic one, includes about 68 MB of workspaces of GPU
libraries: compare the memory of compiled variants with the deterministic memory of the eager rows (fixed since then).

The GPU rows of `flipout` were measured before its perturbation and KL shared one pass; the CPU rows and the bytes moved
were measured after.

{gpu}

## A whole epoch on a GPU

`lb.fit` on random images of the size and number of CIFAR-10, with the recipe of experiments/cifar10_resnet18.yaml, and
with data loading, augmentation, both optimizers and logging. The methods take turns, epoch by epoch.

{epoch}

The next runs shared the GPU with other trainings, so only the fraction of time for exchanges is meaningful.

{exchange}

## A training step on a CPU

The same in fp32 on 2 cores; `cnn` is a ResNet-18 with a quarter of the width, in batches of 64. Memory of compiled
steps is not counted.

{cpu}

## Engines

Forward, backward and the update of all parameters, compiled, in bf16. All but `ivon-opt` are captured in a CUDA graph.
`backprop` and `ivon` are mean-field, SSVI has 5 % of the weights. State is the parameters, the buffers and what the
optimizer stores. `ivon` makes no parameter random that `backprop` does not; `ivon-opt` also makes norms and biases
random. The plain optimizer is SGD, and AdamW for language models. These have sequences of 512 tokens, and compiled
blocks.

{engines}

`lb.fit` captures the whole step too (`compile=True` on a GPU). An epoch of 45,000 random images, with augmentation, by
the captured step and without it, against the time of its replays:

{captured}

## LeNet-5 by moments

A training step of LeNet-5 on images of the size of MNIST, with Bayes by Backprop and with the original VDP, which keeps
full covariances.

{lenet}

## One pass by moments

A prediction of a batch in one pass, which gives mean and variance, against a plain forward pass and Monte Carlo
samples, with and without CUDA graphs ("cudagraphs", `mode="reduce-overhead"`). The table with the most variants was
timed alone, but compiled while trainings kept the GPU busy. The compiler chooses kernels by timing them, so its passes
by moments are slower than in the other tables, for the same operations.

{one_pass}

`predict` as a user calls it. On a CPU, time is CPU time of one thread, and memory is the peak of activations. Ratios
are to the plain network: of times to the eager and to the compiled one, of memory to that of the same mode. Samples on
a CPU need memory for one sample of all weights and for their std, each as large as the means: for a small batch that is
more than the activations. To draw the noise of the weights of `vit-tiny` takes a tenth of a forward pass of 16 images,
so 30 samples take more than 30 passes.

On the GPU each network was measured alone: other programs were paused. The networks compiled beside them, so the first
calls are not listed. One pass that is not compiled waits for Python, and its times depend on the processor.

{predict}

## Sparse weights on a CPU

Layers with mostly zero weights use sparse matrix products if these are usually faster. A rule of sizes and density
decides ([sparse.md](sparse.md#sparse-products-on-cpus)), which was chosen with this table. "Picked" was measured before
there was a rule: then a layer timed both products with the first batch of each size.

{sparse}

## On disk

{size}

## Sharing weights

From μ and σ of all weights of one ResNet-18, or of eight, as large as ViT-B/16, to labels, outliers, blends and merged
components, several times in a row, with the first run as a warm-up; and two of its steps, including the sorting of
points, against scikit-learn, whose k-means gets a subset. The weights have the distribution of a trained network. On
the GPU, only the full run of one ResNet-18 was timed alone; everything else ran next to trainings.

{sharing}

## Compact files

A ResNet-18 with random labels and positions, so that no file can be smaller than their entropy.

{compact_file}

## Sharded models

A residual network of equal blocks in four CPU processes of one machine. Bytes are those that all-gathers return and
reduce-scatters take in a forward and a backward pass, relative to FSDP2 on the plain network. Memory is the largest
peak of a process while it trains (AdamW, or IVON), relative to the unsharded model in one process.

{sharded}

## Bytes moved

Counted by `leanbayes.core.counters` over all operations of an eager step (forward and backward); the same on every
machine. `lenet` has two convolutions and two linear layers. On a GPU, sampling and KL are one kernel, and fewer bytes
are moved than here.

{moved}

## Comparison with other libraries

leanbayes and other libraries in one run, eager and in fp32, all with the same means and one σ. A step of
laplace-torch, which does not train, is its fit to the batch; by default it treats the last layer. FastBNNs trains by
one pass. torch-uncertainty and blitz have no converter: their layers were inserted by hand. leanbayes keeps biases
deterministic, the others make them random. `lenet` and `cnn` are those above; an error in place of numbers is the
message of the library. On the GPU all of them, including the plain network, wait for Python to launch kernels: the
times count launches, and one pass has many in eager mode (compiled, it takes a few plain passes, see above). The
memory of the plain network on the GPU includes workspaces of GPU libraries, so all memory ratios are too small, most
of all those of `cnn` (fixed since then).

Correctness, on a small network with max pooling that was trained on digits:

- **KL** and **KL's gradient** with respect to the means, relative to the exact ones of `torch.distributions`: 1 is
  right.
- **error of σ's gradient**: two samples before one backward pass, against a backward pass after each, with the same
  noise.
- **std** of one pass relative to that of samples, the median over outputs, and the **correlation** of their
  logarithms, which the noise of the samples also lowers.
- **attention**: which part of `nn.MultiheadAttention` becomes random. **BatchNorm**: whether convolutions with
  BatchNorm train and are random in evaluation mode.

{peers}
"""


def load(name: str) -> dict[str, Any]:
    """Read one result file; files of earlier versions say draws instead of samples."""
    text = (HERE / "results" / f"{name}.json").read_text()
    return json.loads(re.sub(r"\b(\d+|one) draw(s?)\b", r"\1 sample\2", text))


def steps(*names: str) -> str:
    """Return the tables of several runs of step.py."""
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
    """Return the table of a run of epoch.py."""
    record = load(name)
    gpu, torch = record["machine"]["gpus"][0], record["versions"]["torch"]
    lines = [
        f"`{record['command']}`: {gpu}, torch {torch}, bf16, compiled\n",
        "| method | s per epoch (range) |",
        "|---|---|",
    ]
    for name, seconds in record["epoch_seconds"].items():
        middle = statistics.median(seconds)
        lines.append(f"| {name} | {middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) |")
    ratios = record.get("ratios") or {"mean-field": record["ratio"]}
    ratios_and_shares = [
        f"{name} takes {ratio:.2f} times as long as the plain network"
        for name, ratio in ratios.items()
        if name != "deterministic"
    ]
    ratios_and_shares += [
        f"exchanges of weights take {share:.1%} of {name}"
        for name, share in record.get("exchange_shares", {}).items()
        if share
    ]
    return "\n".join([*lines, f"\nMedians over pairs of epochs: {', '.join(ratios_and_shares)}."])


def of_engines() -> str:
    """Return the tables of engines.py."""
    parts = []
    for path in sorted((HERE / "results").glob("engines-*.json")):
        record = load(path.stem)
        lines = [
            f"`{record['command']}`: {record['machine']}, torch {record['torch']}, batches of {record['batch_size']}\n",
            "| | ms | time × | captured | bytes of state per weight | with gradients | peak GiB |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in record["rows"].items():
            if "failed" in row:
                lines.append(f"| {name} | {row['failed']} | | | | | |")
                continue
            stored = row["bytes_per_weight"]
            whole, gradients = sum(stored.values()), stored["gradients"]
            time = f"{row['milliseconds']:.2f} | {row['ratio']:.3f} | {'yes' if row['captured'] else 'no'}"
            peak = f"{row['peak_bytes'] / 2**30:.1f}" if row.get("peak_bytes") else ""
            lines.append(f"| {name} | {time} | {whole - gradients:.1f} | {whole:.1f} | {peak} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def of_captured() -> str:
    """Return the table of captured_epoch.py."""
    record = load("captured-epoch")
    head = f"`{record['command']}`: {record['machine']}, torch {record['torch']}, {record['precision']}\n"
    return "\n".join([head, captured_epoch.TABLE_HEAD, *map(captured_epoch.row, record["results"])])


def of_lenet() -> str:
    """Return the table of lenet.py."""
    record = load("lenet")
    head = f"`{record['command']}`: {record['machine']}, torch {record['torch']}, {record['precision']}"
    return "\n".join([head, "", lenet.TABLE_HEAD, *(lenet.table_row(row) for row in record["rows"])])


def of_one_pass() -> str:
    """Return the tables of one_pass.py."""
    parts = []
    for path in sorted((HERE / "results").glob("one-pass-*.json")):
        record = load(path.stem)
        head = f"`{record['command']}`: {record['machine']}, torch {record['torch']}, {record['precision']}"
        lines = [head, "", TABLE_HEAD, *(table_row(row) for row in record["rows"])]
        weights = {row["variant"]: row["weights_ms"] for row in record["rows"] if row.get("weights_ms")}
        if weights:
            listed = ", ".join(f"{variant} {ms:.2f}" for variant, ms in weights.items())
            lines += ["", f"Milliseconds for mean and variance of all weights, computed once for all passes: {listed}."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def of_predict() -> str:
    """Return the tables of predict.py."""
    parts = []
    for path in sorted((HERE / "results").glob("predict-*.json")):
        record = load(path.stem)
        head = f"`{record['command']}`: {record['machine']}, torch {record['torch']}, {record['precision']}"
        parts.append("\n".join([head, "", predict.TABLE_HEAD, *(predict.table_row(row) for row in record["rows"])]))
    return "\n\n".join(parts)


def of_sparse() -> str:
    """Return the tables of sparse_inference.py."""
    record = load("sparse-inference")
    layers = [sparse_inference.layer_row(row) for row in record["layers"]]
    networks = [sparse_inference.network_row(row) for row in record["networks"]]
    head = f"`{record['command']}`: {record['machine']}, torch {record['torch']}, fp32"
    return "\n".join([head, "", sparse_inference.LAYER_HEAD, *layers, "", sparse_inference.NETWORK_HEAD, *networks])


def of_size() -> str:
    """Return the table of size.py."""
    record = load("size")
    return "\n".join([f"`{record['command']}`: {record['network']}\n", size.HEAD, *map(size.table_row, record["rows"])])


def of_sharing(record: dict[str, Any]) -> str:
    """Return the tables of a run of sharing.py."""
    whole, kmeans, mixture = (record[name] for name in ("whole", "kmeans", "mixture"))
    counts = (f"{whole[key]:,}" for key in ("weights", "components", "outliers", "blended", "paper_parameters"))
    seconds = kmeans["sorting_seconds"] + kmeans["seconds"]
    return "\n".join(
        [
            f"`{record['command']}`: {record['machine']}, torch {record['torch']}\n",
            "| s | weights | Gaussians | outliers | blends | parameters by the paper's count |",
            "|---|---|---|---|---|---|",
            f"| {', '.join(f'{one:.1f}' for one in whole['seconds'])} | {' | '.join(counts)} |\n",
            "| | our points | s | points of scikit-learn | s | our score | score of scikit-learn |",
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
    """Return the table of compact_file.py."""
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
    """Return the table of moved.py."""
    record = load("moved")
    lines = [f"`{record['command']}`\n", "| network | variant | MB moved | × | kernels |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        megabytes = f"{row['bytes'] / 1e6:.0f}"
        lines.append(f"| {row['network']} | {row['variant']} | {megabytes} | {row['ratio']:.2f} | {row['kernels']} |")
    return "\n".join(lines)


def of_sharded() -> str:
    """Return the tables of sharded.py."""
    record = load("sharded-cpu")
    lines = [
        f"`{record['command']}`: {record['blocks']} blocks, {record['weights']:,} weights, {record['processes']} "
        f"processes, torch {record['torch']}\n",
        "| method | gathered in | bytes × FSDP2 |",
        "|---|---|---|",
    ]
    lines += [f"| {row['method']} | {row['dtype']} | {row['ratio']:.3f} |" for row in record["communication"]]
    lines += ["", "| method | unsharded, MB | each process, MB | × |", "|---|---|---|---|"]
    for row in record["memory"]:
        sizes = f"{row['unsharded'] / 1e6:.0f} | {row['sharded'] / 1e6:.0f}"
        lines.append(f"| {row['method']} | {sizes} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def of_shard_plan() -> str:
    """Return the table of shard_plan_table.py."""
    rows = load("shard-plan")["rows"]
    return "\n".join([shard_plan_table.HEAD, *map(shard_plan_table.table_row, rows)])


def of_peers() -> str:
    """Return the tables of peers.py."""
    lines: list[str] = []
    for record in map(load, ("peers-cpu", "peers-gpu")):
        named = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
        where = f"{record['machine']}, torch {record['torch']}, {record['precision']}; {named}"
        lines += [f"`{record['command']}`: {where}", ""]
        if record["probes"]:
            lines += [peers.PROBE_HEAD, *map(peers.probe_row, record["probes"]), ""]
        lines += [peers.COST_HEAD, *map(peers.cost_row, record["costs"]), ""]
    return "\n".join(lines).rstrip()


def short_peers() -> str:
    """Return the short table of peers.py for docs/comparison.md: correctness, and cost of a LeNet."""
    record = load("peers-cpu")
    costs = {row["library"]: row for row in record["costs"] if row["network"] == "lenet"}
    titles = ["KL ÷ exact", "error of σ's gradient", "attention", "step ×", "bytes moved ×", "30 samples ×", "disk ×"]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for row in record["probes"]:
        found = costs[row["library"]]
        attention = row.get("attention") or ("fails" if "attention" in row["errors"] else "")
        checks = [row.get("kl_ratio"), row.get("gradient_error")]
        cells = ["" if value is None else f"{value:.2g}" for value in checks] + [attention]
        ratios = [found["step"]["ratio"], found["moved_ratio"], found["predict"]["ratio"], found["stored_ratio"]]
        lines.append(f"| {row['library']} | {' | '.join([*cells, *(f'{ratio:.1f}' for ratio in ratios)])} |")
    return "\n".join(lines)


def fill(page: Path, text: str, begin: str, end: str = "<!-- /measured -->") -> None:
    """Replace the text between two marks of a page."""
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
        engines=of_engines(),
        captured=of_captured(),
        lenet=of_lenet(),
        one_pass=of_one_pass(),
        predict=of_predict(),
        sparse=of_sparse(),
        size=of_size(),
        sharing="\n\n".join(map(of_sharing, map(load, ("sharing-cpu", "sharing-gpu", "sharing-gpu-8-copies")))),
        compact_file=of_compact_file(),
        sharded=of_sharded(),
    )
    (HERE.parent / "docs" / "benchmarks.md").write_text(page)
    fill(HERE.parent / "docs" / "comparison.md", short_peers(), "<!-- measured: peers -->")
    fill(HERE.parent / "docs" / "guide" / "large_models.md", of_shard_plan(), "<!-- measured: plan -->")
