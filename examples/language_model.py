"""A small GPT learns Python's own source code, and a Bayesian LoRA adapter teaches it the prose of Python's manual.

    pip install '.[train]' transformers peft
    python examples/language_model.py

All text is on every machine: Python's standard library (code), its help pages (prose), and the C++ headers of torch,
which are out of distribution. Tokens are bytes. The adapter sees few pages, so a plain one overfits. On a GPU it takes
about a minute; on a CPU a tiny model takes seconds. Writes language_model.json.
"""

import copy
import json
import sysconfig
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import leanbayes as lb
from leanbayes.evaluation.detection import auroc

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LENGTH, BATCH, PRETRAINING, ADAPTING, PAGES = (256, 64, 1000, 300, 96) if CUDA else (64, 16, 150, 60, 16)
SIZES: dict[str, Any] = (
    {"n_embd": 384, "n_layer": 6, "n_head": 6} if CUDA else {"n_embd": 64, "n_layer": 2, "n_head": 2}
)
METHODS: dict[str, lb.Method] = {
    "plain": lb.Deterministic(),
    "mean-field": lb.MeanField(init_std=0.01),
    "mean-field, ivon": lb.MeanField(engine="ivon"),
}
Adapter = lb.BayesianModel[Any]


def windows(text: str) -> Tensor:
    """Cut a text into windows of bytes, in a random order."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    rows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))].long().to(DEVICE)


def texts() -> dict[str, Tensor]:
    """Return windows of code, prose, and C++."""
    code = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    headers = sorted((Path(torch.__file__).parent / "include" / "ATen" / "core").glob("*.h"))
    read = lambda paths: "\n".join(path.read_text(errors="ignore") for path in paths)  # noqa: E731
    return {"code": windows(read(code)), "prose": windows("\n".join(topics.values())), "C++": windows(read(headers))}


def pretrained(code: Tensor) -> GPT2LMHeadModel:
    """Train a GPT from scratch, as usual."""
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    network = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, **SIZES, **special)).to(DEVICE)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3 if CUDA else 3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3 if CUDA else 3e-3, PRETRAINING)
    order = torch.Generator().manual_seed(0)
    for step in range(PRETRAINING):
        rows = code[torch.randint(len(code), (BATCH,), generator=order)]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            loss = network(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % (PRETRAINING // 5) == 0 or step == PRETRAINING - 1:
            print(f"pretraining, step {step}: {loss.item():.3f} nats per byte", flush=True)
    return network


def adapted(network: GPT2LMHeadModel, method: lb.Method, prose: Tensor, seed: int = 0) -> Adapter:
    """Train a LoRA adapter on a few pages. Only the adapter is Bayesian; the base is frozen."""
    torch.manual_seed(seed)
    layers = {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}
    model = get_peft_model(copy.deepcopy(network), LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", **layers))
    bnn = lb.bayesianize(model, method, select="lora_" if method.bayesian_weights else None, seed=seed)
    optimizer: torch.optim.Optimizer
    if method.engine == "ivon":
        labels = LENGTH - 1  # the first byte of a window is not predicted
        optimizer = lb.IVON(bnn, lr=0.3, num_data=len(prose), labels_per_example=labels, hess_init=0.05)
    else:
        optimizer = torch.optim.AdamW(bnn.parameter_groups(scale_lr=5e-3), lr=3e-3, weight_decay=0.0)
    order = torch.Generator().manual_seed(seed)
    for _ in range(ADAPTING):
        rows = prose[torch.randint(len(prose), (min(BATCH, 32),), generator=order)]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            loss = lb.elbo_loss(bnn, {"input_ids": rows}, rows, num_data=len(prose), temperature=1.0, check=False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return bnn.eval()


def scores(bnn: Adapter, test: Tensor, unknown: Tensor, rule: str, samples: int) -> dict[str, float]:
    """Return NLL and ECE per byte, AUROC of unknown windows by three scores, and the time of a prediction."""
    batches = [({"input_ids": rows}, rows) for rows in test.split(16)]
    found = lb.evaluate(bnn, batches, rule=rule, samples=samples, details=False)

    def per_window(windows: Tensor) -> dict[str, Tensor]:
        parts = []
        for rows in windows.split(16):
            generator = torch.Generator().manual_seed(0)
            prediction = bnn.predict({"input_ids": rows}, samples, rule=rule, generator=generator)
            one = prediction.per_sequence(rows)
            parts.append(torch.stack([-one.log_prob / one.tokens, one.entropy, one.mutual_information]))
        return dict(zip(("nll", "entropy", "mutual_information"), torch.cat(parts, 1), strict=True))

    known, strange = per_window(test), per_window(unknown)
    aurocs = {f"auroc_{name}": auroc(known[name], strange[name]) for name in known}
    times = {"milliseconds": milliseconds(bnn, test[:16], rule, samples)}
    return {"nll": found["nll"], "ece": found["ece"], **aurocs, **times}


def milliseconds(bnn: Adapter, rows: Tensor, rule: str, samples: int, compile: bool | None = None) -> float:
    """Return the shortest time of a few predictions."""
    times = []
    for _ in range(3):
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        bnn.predict({"input_ids": rows}, samples, rule=rule, compile=compile)
        if CUDA:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def ways(method: lb.Method) -> dict[str, tuple[str, int]]:
    """Return how an adapter predicts, as a rule and a number of samples, by name."""
    return (
        {" 10 samples": ("sample", 10), " one pass": ("moments", 1)} if method.bayesian_weights else {"": ("mean", 1)}
    )


def main() -> None:
    """Pretrain, adapt, compare, and write the numbers."""
    warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # layers of GPT-2 store their weights transposed
    torch.set_float32_matmul_precision("high")
    text = texts()
    network = pretrained(text["code"])
    pages, test, unknown = text["prose"][:PAGES], text["prose"][-PAGES:], text["C++"][:PAGES]
    rows: dict[str, dict[str, float]] = {}
    for name, method in METHODS.items():
        bnn = adapted(network, method, pages)
        for way, (rule, samples) in ways(method).items():
            rows[name + way] = scores(bnn, test, unknown, rule, samples)
    lb.save(bnn, "adapter.safetensors")
    weights, size = sum(p.nbytes for p in network.parameters()), Path("adapter.safetensors").stat().st_size
    print(f"The file of the adapter: {size / 2**10:.0f} KiB; its base: {weights / 2**10:.0f} KiB.")
    print(f"{'adapter':28} {'NLL':>6} {'ECE':>6}  AUROC of C++ by: NLL, entropy, mutual information   milliseconds")
    for name, row in rows.items():
        detection = "   ".join(f"{row[f'auroc_{by}']:.3f}" for by in ("nll", "entropy", "mutual_information"))
        print(f"{name:28} {row['nll']:6.3f} {row['ece']:6.3f}  {detection:>48}   {row['milliseconds']:12.1f}")
    prompt = text["prose"][-1:, : LENGTH // 2]
    found = lb.generate(bnn, prompt, max_new_tokens=LENGTH // 4)
    print("continued:", repr(bytes(found.sequences[0, LENGTH // 2 :].tolist()).decode(errors="replace")))
    settings = {"length": LENGTH, "pretraining_steps": PRETRAINING, "adapting_steps": ADAPTING, "pages": PAGES, **SIZES}
    machine = torch.cuda.get_device_name() if CUDA else "CPU"
    record = {"machine": machine, "torch": torch.__version__, "settings": settings, "adapter_bytes": size, "rows": rows}
    Path("language_model.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
