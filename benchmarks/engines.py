"""Measure one training step of a network by each engine: forward, backward and the update of all parameters.

    python benchmarks/engines.py --network resnet-50 --out benchmarks/results/engines-resnet-50.json

Variants: the plain network (SGD, or AdamW for language models), mean-field and SSVI with 5 % of the weights by both
engines, and the published IVON on the plain network (`ivon-opt`, if it is installed). Under `backprop` the stds have
their own learning rate, and Adam for images. All run in bf16 autocast, on one batch of random data.

The network with its loss is compiled once, as a function of its weights, and all variants call this code. Sampling, KL
and updates run around it. On a GPU the whole step is then captured in a CUDA graph, as `lb.fit` does it; the published
optimizer cannot be captured. With `--eager` nothing is compiled or captured, and models have their usual likelihood.

The file is written after each row. A row that failed says why, one whose capture failed is timed without it and says
why, and rows that would start after `--seconds` are left out. The plain step is timed again at the end. Bytes are those
of parameters with buffers, of gradients and of the optimizer, per weight; the peak of memory is that of a step, with
all of these.
"""

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import busy_kernels, machine_of, milliseconds, write
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.counters import PeakMemory
from leanbayes.likelihoods import Likelihood
from leanbayes.likelihoods.base import NegativeLogLikelihood
from leanbayes.networks import build
from leanbayes.training.captured_step import recover

NUM_DATA = 50_000
LR = 1e-3
IMAGES: dict[str, tuple[tuple[int, int, int], int, int]] = {  # input shape, classes, batch size
    "resnet-18": ((3, 32, 32), 10, 256),
    "resnet-50": ((3, 224, 224), 1000, 128),
    "vit-base": ((3, 224, 224), 1000, 128),
    "small-cnn": ((1, 28, 28), 10, 64),
}
LANGUAGE: dict[str, dict[str, int]] = {  # the settings of a GPT-2
    "gpt2-small": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 512},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 512},
    "gpt2-tiny": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 1000},
}
METHODS: dict[str, lb.Method | None] = {
    "plain": None,
    "ivon": lb.MeanField(engine="ivon"),
    "SSVI ivon": lb.SSVI(density=0.05, engine="ivon"),
    "backprop": lb.MeanField(),
    "SSVI backprop": lb.SSVI(density=0.05),
    "ivon-opt": None,
    "plain, again": None,
}


class Problem:
    """A network, a batch for it, and the code of its loss.

    Args:
        name: The name of the network.
        size: The examples of a batch; None for that of the network.
        device: The device.
        compiled: Whether the loss is compiled.
        blocks: Compile the repeated blocks and the rest of the loss on their own, which takes less time.
    """

    def __init__(self, name: str, size: int | None, device: torch.device, compiled: bool, blocks: bool) -> None:
        self.name, self.device, self.compiled = name, device, compiled
        generator = torch.Generator(device).manual_seed(0)
        self.is_language = name in LANGUAGE
        if self.is_language:
            config = self._config()
            shape: tuple[int, ...] = (size or 8, config.n_positions)
            self.y = torch.randint(config.vocab_size, shape, device=device, generator=generator)
            self.x: Any = {"input_ids": self.y}
        else:
            of_image, classes, usual = IMAGES[name]
            shape = (size or usual, *of_image)
            image = torch.randn(shape, device=device, generator=generator).to(memory_format=torch.channels_last)
            self.y = torch.randint(classes, shape[:1], device=device, generator=generator)
            self.x = {"x": image}
        self.shape = shape
        self._skeleton = self.network()
        self.names = [name for name, _ in self._skeleton.named_parameters()]
        self.buffer_names = [name for name, _ in self._skeleton.named_buffers()]
        # A function, which `lb.bayesianize` does not copy: copies of compiled blocks would not be compiled.
        self.code: Callable[[list[Tensor], Any, Tensor], Tensor] = lambda values, x, y: self._loss(values, x, y)
        if compiled and blocks:
            self._compile_blocks()
        elif compiled:
            self.code = torch.compile(self._loss, dynamic=False)

    def _config(self) -> Any:
        from transformers import AttentionInterface, GPT2Config
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # By its own name the attention gets no mask, which here says no more than that it is causal. Under "sdpa",
        # transformers reads the positions to see whether it needs one. During compilation or a capture it cannot, and
        # makes a mask: the blocks would be compiled again in the middle of the capture, and attention would be slower.
        AttentionInterface.register("causal", sdpa_attention_forward)
        # Without dropout, whose masks would be the same cost for all.
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2Config(**LANGUAGE[self.name], **rates, **tokens, use_cache=False, attn_implementation="causal")

    def network(self) -> nn.Module:
        """Make the network, with the same random weights each time."""
        torch.manual_seed(0)
        if self.is_language:
            from transformers import GPT2LMHeadModel

            with self.device:  # where random weights take no time
                language_model = GPT2LMHeadModel(self._config())
            language_model.loss_type = "ForCausalLM"
            return language_model
        shape, classes, _ = IMAGES[self.name]
        net = build(self.name, shape, classes, seed=0).to(self.device)
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for parameter in net.parameters():
            # A kernel of 1 × 1 has the strides that its samples have, so that the compiler shares its code.
            usual = torch.empty(parameter.shape, device=self.device)
            parameter.data = usual.copy_(parameter.data) if parameter.is_contiguous() else parameter.data
        return net

    def usual_loss(self, network: nn.Module) -> Tensor:
        """Return the loss as users of the plain network compute it."""
        if self.is_language:
            return network(**self.x, labels=self.y).loss
        return F.cross_entropy(network(self.x["x"]), self.y)

    def _loss(self, values: list[Tensor], x: Any, y: Tensor) -> Tensor:
        """Return the loss of a network with the given parameters and buffers."""
        given = dict(zip([*self.names, *self.buffer_names], values, strict=True))
        if self.is_language:
            inputs = {**x, "labels": y}
            return torch.func.functional_call(self._skeleton, given, (), inputs, tie_weights=True).loss
        return F.cross_entropy(torch.func.functional_call(self._skeleton, given, (x["x"],)), y)

    def _compile_blocks(self) -> None:
        """Compile what comes in a list of equal modules, and the loss of language models."""
        lists = [module for module in self._skeleton.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
        for module in max(lists, key=lambda found: sum(p.numel() for p in found.parameters())):
            module.compile(dynamic=False)
        if self.is_language:
            self._skeleton.loss_function = torch.compile(self._skeleton.loss_function, dynamic=False)  # type: ignore[assignment, arg-type]


class WithLoss(nn.Module):
    """A network that returns its loss, by code that all variants share.

    Args:
        network: The network, whose parameters and buffers are read.
        problem: The problem with the code.
    """

    def __init__(self, network: nn.Module, problem: Problem) -> None:
        super().__init__()
        self.network, self._code = network, problem.code
        self._names = [*problem.names, *problem.buffer_names]

    def forward(self, targets: Tensor, **x: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        values: list[Tensor] = []
        for name in self._names:
            prefix, _, attribute = name.rpartition(".")
            value = getattr(self.network.get_submodule(prefix), attribute)
            # Parameters become tensors, as sampled weights are: else the compiler would not share its code.
            values.append(value.view_as(value) if isinstance(value, nn.Parameter) else value)
        return self._code(values, x, targets)


class OutputIsLoss(Likelihood[Any]):
    """The likelihood of a network that returns its mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {}

    def output_nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Return the loss as that of one observation per example."""
        return NegativeLogLikelihood(output * len(y), len(y))

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Accept all labels: the network has used them."""


class Variant:
    """One way to train a network.

    Args:
        problem: The network and its batch.
        name: A key of `METHODS`.
    """

    def __init__(self, problem: Problem, name: str) -> None:
        self.device = problem.device
        self._before = self._allocated()
        network = problem.network()
        self.weights = sum(p.numel() for p in network.parameters())
        on_gpu = self.device.type == "cuda"
        self._fused: dict[str, Any] = {"fused": True} if on_gpu else {}
        self._adam: dict[str, Any] = {**self._fused, "capturable": True} if on_gpu else {}
        self._lr: Any = torch.tensor(LR, device=self.device) if on_gpu else LR
        self.graph: torch.cuda.CUDAGraph | None = None
        self.capturable = on_gpu and problem.compiled and name != "ivon-opt"
        self._sampled: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.model: nn.Module
        self.optimizers: list[torch.optim.Optimizer]
        self._loss: Callable[[], Tensor]
        method = METHODS[name]
        if method is None:
            self._train_plain(problem, network, published=name == "ivon-opt")
        else:
            whole = WithLoss(network, problem) if problem.compiled else network
            likelihood = OutputIsLoss() if problem.compiled else None
            self._train_bayesian(problem, lb.bayesianize(whole, method, likelihood=likelihood))

    def _train_plain(self, problem: Problem, network: nn.Module, published: bool) -> None:
        self.model = network
        parameters = list(network.parameters())
        if published:
            import ivon  # type: ignore[import-untyped]

            optimizer = ivon.IVON(parameters, lr=LR, ess=NUM_DATA, hess_init=0.5, weight_decay=1e-3)
            self.optimizers, self._sampled = [optimizer], lambda: optimizer.sampled_params(train=True)
        elif problem.is_language:
            self.optimizers = [torch.optim.AdamW(parameters, lr=self._lr, **self._adam)]
        else:
            momentum: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
            self.optimizers = [torch.optim.SGD(parameters, lr=self._lr, **momentum, **self._fused)]
        if problem.compiled:
            whole = WithLoss(network, problem)
            self._loss = lambda: whole(problem.y, **problem.x)
        else:
            self._loss = lambda: problem.usual_loss(network)

    def _train_bayesian(self, problem: Problem, bnn: lb.BayesianModel) -> None:
        self.model = bnn
        if bnn.method.engine == "ivon":
            labels = problem.y.numel() / len(problem.y)
            self.optimizers = [lb.IVON(bnn, lr=self._lr, num_data=NUM_DATA, labels_per_example=labels)]
        elif problem.is_language:
            groups = bnn.parameter_groups(scale_lr=LR)
            self.optimizers = [torch.optim.AdamW(groups, lr=self._lr, **self._adam)]
        else:
            means = torch.optim.SGD(bnn.mean_parameters(), lr=self._lr, momentum=0.9, nesterov=True, **self._fused)
            self.optimizers = [means, torch.optim.Adam(bnn.scale_parameters(), lr=self._lr, **self._adam)]
        usual = problem.x if problem.is_language else problem.x["x"]
        x = {"targets": problem.y, **problem.x} if problem.compiled else usual
        self._loss = lambda: lb.elbo_loss(bnn, x, problem.y, num_data=NUM_DATA, check=False)

    def _allocated(self) -> int:
        if self.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def step(self) -> None:
        """Take a step."""
        self.graph.replay() if self.graph is not None else self.run()

    def run(self) -> Tensor:
        """Take a step operation by operation, and return its loss."""
        with self._sampled():
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self._loss()
            loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss.detach()

    def capture(self) -> None:
        """Capture the step in a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.run()
        main, graph, pool = torch.cuda.current_stream(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        main.wait_stream(stream)
        try:
            with torch.cuda.stream(main), torch.cuda.graph(graph, pool, stream):
                self.run()
        except Exception:
            recover(torch.device("cuda", torch.cuda.current_device()), pool, self.optimizers)
            raise
        self.graph = graph

    def bytes_per_weight(self) -> dict[str, float]:
        """Return the bytes of parameters with buffers, of gradients and of the optimizers, per weight."""
        # The published optimizer has its state in groups.
        parts: list[Any] = [part for o in self.optimizers for part in (*o.state.values(), *o.param_groups)]
        values = [value for part in parts if isinstance(part, dict) for value in part.values()]
        states = [value for value in values if isinstance(value, Tensor) and value.dim() > 0]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        stored = {"parameters": [*self.model.parameters(), *self.model.buffers()], "gradients": trained}
        found = {**stored, "optimizer": states}
        return {name: sum(t.nbytes for t in tensors) / self.weights for name, tensors in found.items()}

    def peak_bytes(self, compiled: bool) -> int | None:
        """Return the peak memory of a step, with the state. A compiled step on a CPU cannot be counted."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            self.run()
            return torch.cuda.max_memory_allocated() - self._before
        if compiled:
            return None
        with PeakMemory() as memory:
            self.run()
        stored = self.bytes_per_weight()
        return round((stored["parameters"] + stored["optimizer"]) * self.weights) + memory.peak_bytes


def measure(problem: Problem, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return time, memory and bytes of a variant."""
    started, cuda = time.perf_counter(), problem.device.type == "cuda"
    variant = Variant(problem, name)
    for _ in range(3):
        loss = variant.run()
    if not torch.isfinite(loss):
        raise ArithmeticError("the training diverged")
    row: dict[str, Any] = {
        "weights": variant.weights,
        "captured": variant.capturable,
        "seconds_until_ready": time.perf_counter() - started,
        "bytes_per_weight": variant.bytes_per_weight(),
        "peak_bytes": variant.peak_bytes(problem.compiled),
    }
    if cuda and args.kernels:
        row["kernels"] = busy_kernels(variant.run)
    if variant.capturable:
        try:
            variant.capture()
        except Exception as error:  # it is timed without
            row.update(captured=False, not_captured=said(error))
            print(f"{name:14} was not captured: {row['not_captured']}", flush=True)
    row["times"] = [milliseconds(variant.step, args.steps, cuda) for _ in range(args.rounds)]
    row["milliseconds"] = statistics.median(row["times"])
    return row


def said(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def shown(name: str, row: dict[str, Any]) -> str:
    """Return a line about a row."""
    if "failed" in row:
        return f"{name:14} {row['failed']}"
    stored = row["bytes_per_weight"]
    state = f"{stored['parameters'] + stored['optimizer']:5.1f} bytes of state per weight"
    memory = f"{row['peak_bytes'] / 2**30:6.2f} GiB" if row["peak_bytes"] else ""
    ratio = f"{row.get('ratio', float('nan')):6.3f}x"
    ready = f"ready after {row['seconds_until_ready']:.0f} s"
    return f"{name:14} {row['milliseconds']:8.2f} ms {ratio}  {memory}  {state}, {ready}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--network", choices=[*IMAGES, *LANGUAGE], default="resnet-18")
    parser.add_argument("--batch-size", type=int, help="default: that of the network")
    parser.add_argument("--rows", nargs="+", choices=list(METHODS), default=list(METHODS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--seconds", type=float, default=80, help="after which no row is started")
    parser.add_argument("--eager", action="store_true", help="compile and capture nothing")
    parser.add_argument("--blocks", action="store_true", help="compile block by block, which takes less time")
    parser.add_argument("--kernels", action="store_true", help="count the kernels of a step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    started = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    problem = Problem(args.network, args.batch_size, torch.device(args.device), not args.eager, args.blocks)
    rows: dict[str, Any] = {}
    record = {"machine": machine_of(args.device), "network": args.network, "batch_size": problem.shape[0]}
    for name in args.rows:
        if time.perf_counter() - started > args.seconds:
            rows[name] = {"failed": f"not started: {args.seconds:g} seconds had passed"}
        else:
            try:
                rows[name] = row = measure(problem, name, args)
                for part, ratio in (("milliseconds", "ratio"), ("peak_bytes", "peak_ratio")):
                    if row[part] and rows.get("plain", {}).get(part):
                        row[ratio] = row[part] / rows["plain"][part]
            except Exception as error:  # a row that fails is a result, too
                rows[name] = {"failed": said(error)}
        gc.collect()
        print(f"{args.network:11} {shown(name, rows[name])}", flush=True)
        write(args.out, {**record, "seconds": time.perf_counter() - started, "rows": rows})


if __name__ == "__main__":
    main()
