"""Measure one training step of language models: forward, backward and the update of all parameters.

    python benchmarks/language_models.py --out benchmarks/results/language-models.json

The networks are those of transformers with random weights, in bf16 autocast. The plain step is that of its users: the
loss of `model(input_ids, labels=...)` and AdamW. The others are `lb.elbo_loss` with AdamW for means and stds, or with
`lb.IVON`. ResNet-50 and ViT-B/16 are measured in the same way, with the cross-entropy of their logits. Variants that
are not compiled come first; compiled ones follow as long as `--seconds` allow it, and those left out are named in the
file. The plain step is timed before and after the others. Memory is the peak of a step, with parameters and optimizer.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import machine_of, milliseconds, write
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core.counters import PeakMemory
from leanbayes.networks import build

NUM_DATA = 100_000
LANGUAGE: dict[str, dict[str, int]] = {  # the settings of a GPT-2
    "gpt2-small": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-tiny": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 1000},
}
IMAGES = {"resnet-50": 128, "vit-base": 128}  # examples of a batch of images of 224 × 224
METHODS: dict[str, lb.Method | None] = {
    "plain": None,
    "mean-field, backprop": lb.MeanField(),
    "mean-field, ivon": lb.MeanField(engine="ivon"),
    "SSVI 5 %, backprop": lb.SSVI(density=0.05),
    "SSVI 5 %, ivon": lb.SSVI(density=0.05, engine="ivon"),
}


class Problem:
    """A network and a batch for it.

    Args:
        name: The name of the network.
        size: The examples of a batch; None for that of the network.
        device: The device.
    """

    def __init__(self, name: str, size: int | None, device: torch.device) -> None:
        self.name, self.device = name, device
        generator = torch.Generator(device).manual_seed(0)
        if name in LANGUAGE:
            config = self._config()
            shape = (size or 8, config.n_positions)
            self.y = torch.randint(config.vocab_size, shape, device=device, generator=generator)
            self.x: Any = {"input_ids": self.y}
        else:
            shape = (size or IMAGES[name], 3, 224, 224)
            self.x = torch.randn(shape, device=device, generator=generator).to(memory_format=torch.channels_last)
            self.y = torch.randint(1000, shape[:1], device=device, generator=generator)
        self.shape = tuple(shape)

    def _config(self) -> Any:
        from transformers import GPT2Config

        # Without dropout, whose masks would be the same cost for all.
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(**LANGUAGE[self.name], **rates, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")

    def network(self) -> nn.Module:
        """Make the network, with the same random weights each time."""
        torch.manual_seed(0)
        if self.name in LANGUAGE:
            from transformers import GPT2LMHeadModel

            with self.device:  # where random weights take no time
                return GPT2LMHeadModel(self._config())
        net = build(self.name, (3, 224, 224), 1000, seed=0).to(self.device)
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def plain_loss(self, network: nn.Module) -> Tensor:
        """Return the loss of a plain step."""
        if self.name in LANGUAGE:
            return network(**self.x, labels=self.y).loss
        return F.cross_entropy(network(self.x), self.y)


class Variant:
    """One way to train a network.

    Args:
        problem: The network and its batch.
        method: The method; None for a plain network.
        compiled: Whether the loss is compiled.
    """

    def __init__(self, problem: Problem, method: lb.Method | None, compiled: bool) -> None:
        self.device, self.compiled = problem.device, compiled
        self._before = self._allocated()
        network = problem.network()
        self.weights = sum(p.numel() for p in network.parameters())
        fused = {"fused": True} if self.device.type == "cuda" else {}
        self.optimizer: torch.optim.Optimizer
        if method is None:
            self.model = network
            self.optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, **fused)  # type: ignore[arg-type]
            loss: Callable[[], Tensor] = lambda: problem.plain_loss(network)  # noqa: E731
        else:
            bnn = lb.bayesianize(network, method)
            del network
            self.model = bnn
            if method.engine == "ivon":
                labels = problem.y.numel() / len(problem.y)
                self.optimizer = lb.IVON(bnn, lr=1e-3, num_data=NUM_DATA, labels_per_example=labels)
            else:
                groups = bnn.parameter_groups(scale_lr=1e-3)
                self.optimizer = torch.optim.AdamW(groups, lr=1e-4, **fused)  # type: ignore[arg-type]
            loss = lambda: lb.elbo_loss(bnn, problem.x, problem.y, num_data=NUM_DATA, check=False)  # noqa: E731
        self.loss = torch.compile(loss) if compiled else loss

    def _allocated(self) -> int:
        if self.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def step(self) -> Tensor:
        """Take a step, and return its loss."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def state_bytes(self) -> int:
        """Return the bytes of parameters, buffers and optimizer state."""
        states = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return sum(t.nbytes for t in [*self.model.parameters(), *self.model.buffers(), *states])

    def peak_bytes(self) -> int | None:
        """Return the peak memory of a step, with the state. A compiled step on a CPU cannot be counted."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated() - self._before
        if self.compiled:
            return None
        with PeakMemory() as memory:
            self.step()
        return self.state_bytes() + memory.peak_bytes


def measure(variant: Variant, rounds: int, steps: int) -> dict[str, Any]:
    """Return time, memory and loss of a variant."""
    cuda, started = variant.device.type == "cuda", time.perf_counter()
    for _ in range(3):
        loss = variant.step()
    ready = time.perf_counter() - started
    assert torch.isfinite(loss), "the training diverged"
    times = [milliseconds(variant.step, steps, cuda) for _ in range(rounds)]
    return {
        "milliseconds": statistics.median(times),
        "times": times,
        "seconds_of_first_steps": ready,
        "peak_bytes": variant.peak_bytes(),
        "state_bytes_per_weight": variant.state_bytes() / variant.weights,
        "weights": variant.weights,
    }


def measured(problem: Problem, args: argparse.Namespace, done: Callable[[dict[str, Any]], None]) -> None:
    """Measure all variants of a network, and report after each."""
    start, rows, skipped = time.perf_counter(), dict[str, Any](), list[str]()
    slowest = 0.0
    for compiled in (False, True):
        again = "plain, again"
        for name in (*METHODS, again):
            key = f"{name}, {'compiled' if compiled else 'eager'}"
            left = args.seconds - (time.perf_counter() - start)
            if left <= 0 or (compiled and name != again and left < 1.2 * slowest):  # another compilation is too long
                skipped.append(key)
                continue
            base = f"plain, {'compiled' if compiled else 'eager'}"
            before = time.perf_counter()
            # The compiler returns the code of the first plain step from its cache.
            row = measure(Variant(problem, METHODS.get(name), compiled), args.rounds, args.steps)
            gc.collect()
            if compiled:
                slowest = max(slowest, time.perf_counter() - before)
                torch.compiler.reset() if name != again else None
            rows[key] = row
            for part in ("milliseconds", "peak_bytes"):
                if row[part] and base in rows and rows[base][part]:
                    row[f"{part}_ratio"] = row[part] / rows[base][part]
            memory = f"{row['peak_bytes'] / 2**30:6.2f} GiB" if row["peak_bytes"] else ""
            ratios = "  ".join(
                f"{row.get(f'{part}_ratio', float('nan')):5.3f}x" for part in ("milliseconds", "peak_bytes")
            )
            state = f"{row['state_bytes_per_weight']:5.1f} bytes of state per weight"
            print(f"{problem.name:12} {key:32} {row['milliseconds']:8.2f} ms  {memory}  {ratios}  {state}", flush=True)
            done({"batch": problem.shape, "rows": rows, "skipped": skipped})
    done({"batch": problem.shape, "rows": rows, "skipped": skipped})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    choices = [*LANGUAGE, *IMAGES]
    parser.add_argument("--networks", nargs="+", choices=choices, default=["gpt2-small", "gpt2-medium"])
    parser.add_argument("--batch-size", type=int, help="default: that of the network")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--seconds", type=float, default=90, help="of one network, after which nothing new is started")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    networks: dict[str, Any] = {}
    for name in args.networks:

        def done(found: dict[str, Any], name: str = name) -> None:
            networks[name] = found
            write(args.out, {"machine": machine_of(args.device), "networks": networks})

        measured(Problem(name, args.batch_size, torch.device(args.device)), args, done)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
