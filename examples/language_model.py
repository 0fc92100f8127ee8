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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import leanbayes as lb
from leanbayes.evaluation import Scores
from leanbayes.evaluation.detection import auroc

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
Adapter = lb.BayesianModel[Any]
UNCERTAINTIES = ("nll", "entropy", "mutual_information")


@dataclass(frozen=True)
class Settings:
    """The sizes of the network, of its texts (windows of bytes), and of the training."""

    length: int = 64
    batch: int = 16
    pretraining: int = 150
    pretraining_lr: float = 3e-3
    adapting: int = 200
    adapting_batch: int = 16
    pages: int = 16
    width: int = 64
    layers: int = 2
    heads: int = 2
    rank: int = 16
    bf16: bool = False


LARGE = Settings(256, 64, 1000, 1e-3, 300, 32, 96, 384, 6, 6, bf16=True)


@dataclass(frozen=True)
class Training:
    """How an adapter is trained: a method, and the settings of its optimizer."""

    method: lb.Method
    lr: float = 3e-3
    temperature: float = 1.0
    hess_init: float | None = None


TRAININGS = {
    "plain": Training(lb.Deterministic()),
    "mean-field": Training(lb.MeanField(init_std=0.1)),
    "mean-field, ivon": Training(lb.MeanField(engine="ivon"), lr=1.0, hess_init=0.5),
}


def texts(length: int) -> dict[str, Tensor]:
    """Return windows of code, prose, and C++. Paragraphs that several help pages have are taken once."""
    code = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    headers = sorted((Path(torch.__file__).parent / "include" / "ATen" / "core").glob("*.h"))
    read = lambda paths: "\n".join(path.read_text(errors="ignore") for path in paths)  # noqa: E731
    paragraphs = {" ".join(one.split()): one for page in topics.values() for one in page.split("\n\n")}
    found = {"code": read(code), "prose": "\n\n".join(paragraphs.values()), "C++": read(headers)}
    return {name: windows(text, length) for name, text in found.items()}


def windows(text: str, length: int) -> Tensor:
    """Cut a text into windows of bytes, in a random order."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    rows = data[: len(data) // length * length].view(-1, length)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))].long().to(DEVICE)


def gpt(settings: Settings) -> GPT2LMHeadModel:
    """Make a GPT with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": settings.width, "n_layer": settings.layers, "n_head": settings.heads}
    others: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    others |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # few passes over the text cannot overfit
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=settings.length, **sizes, **others)).to(DEVICE)


def pretrained(code: Tensor, settings: Settings) -> GPT2LMHeadModel:
    """Train a GPT from scratch, as usual."""
    network = gpt(settings)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.pretraining_lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.pretraining_lr, settings.pretraining)
    order = torch.Generator().manual_seed(0)
    for step in range(settings.pretraining):
        rows = code[torch.randint(len(code), (settings.batch,), generator=order)]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=settings.bf16):
            loss = network(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % (settings.pretraining // 5) == 0 or step == settings.pretraining - 1:
            print(f"pretraining, step {step}: {loss.item():.3f} nats per byte", flush=True)
    return network


def adapted(
    network: GPT2LMHeadModel,
    training: Training,
    pages: Tensor,
    settings: Settings,
    seed: int = 0,
    after_step: Callable[[int, Adapter], None] = lambda step, bnn: None,
) -> Adapter:
    """Train a LoRA adapter on a few pages. Only the adapter is Bayesian; the base is frozen."""
    torch.manual_seed(seed)
    layers = {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}
    lora = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, task_type="CAUSAL_LM", **layers)
    method, temperature = training.method, training.temperature
    select = "lora_" if method.bayesian_weights else None
    bnn = lb.bayesianize(get_peft_model(copy.deepcopy(network), lora), method, select=select, seed=seed)
    data: dict[str, Any] = {"num_data": len(pages), "temperature": temperature}
    optimizer: torch.optim.Optimizer
    if method.engine == "ivon":
        labels = settings.length - 1  # the first byte of a window is not predicted
        optimizer = lb.IVON(bnn, training.lr, labels_per_example=labels, hess_init=training.hess_init, **data)
    else:
        groups = bnn.parameter_groups(scale_lr=5e-3)
        optimizer = torch.optim.AdamW(groups, lr=training.lr, weight_decay=0.0)
    order = torch.Generator().manual_seed(seed)
    for step in range(settings.adapting):
        rows = pages[torch.randint(len(pages), (settings.adapting_batch,), generator=order)]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=settings.bf16):
            loss = lb.elbo_loss(bnn, {"input_ids": rows}, rows, check=False, **data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after_step(step + 1, bnn)
    return bnn.eval()


def ways(method: lb.Method) -> dict[str, tuple[str, int]]:
    """Return how an adapter predicts, as a rule and a number of samples, by name."""
    return (
        {" 10 samples": ("sample", 10), " one pass": ("moments", 1)} if method.bayesian_weights else {"": ("mean", 1)}
    )


def predictions(bnn: Adapter, windows: Tensor, rule: str, samples: int) -> Iterator[tuple[lb.TokenPrediction, Tensor]]:
    """Predict windows, all with the same samples of the weights."""
    for rows in windows.split(16):
        generator = torch.Generator().manual_seed(0)
        yield bnn.predict({"input_ids": rows}, samples, rule=rule, generator=generator), rows


def scores(
    bnn: Adapter,
    test: Tensor,
    unknown: Tensor,
    rule: str,
    samples: int,
    on_test: Callable[[lb.TokenPrediction, Tensor], None] = lambda prediction, rows: None,
) -> dict[str, float]:
    """Return scores per byte, AUROC of unknown windows by three scores, and the time of a prediction."""
    found, known, strange = Scores(), [], []
    for prediction, rows in predictions(bnn, test, rule, samples):
        found.update(prediction, rows)
        known.append(per_window(prediction, rows))
        on_test(prediction, rows)
    for prediction, rows in predictions(bnn, unknown, rule, samples):
        strange.append(per_window(prediction, rows))
    result = {name: found.compute()[name] for name in ("accuracy", "nll", "ece")}
    for name, *pair in zip(UNCERTAINTIES, torch.cat(known, 1), torch.cat(strange, 1), strict=True):
        result[f"auroc_{name}"] = auroc(*pair)
    return {**result, "milliseconds": milliseconds(bnn, test[:16], rule, samples)}


def per_window(prediction: lb.TokenPrediction, rows: Tensor) -> Tensor:
    """Return the uncertainties of each window, per byte."""
    one = prediction.per_sequence(rows)
    return torch.stack([-one.log_prob / one.tokens, one.entropy, one.mutual_information])


def milliseconds(bnn: Adapter, rows: Tensor, rule: str, samples: int, compile: bool | None = None) -> float:
    """Return the shortest time of a few predictions. On a CPU, it is the busy time of all threads."""
    clock, times = time.perf_counter if CUDA else time.process_time, []
    for _ in range(3):
        if CUDA:
            torch.cuda.synchronize()
        start = clock()
        bnn.predict({"input_ids": rows}, samples, rule=rule, compile=compile)
        if CUDA:
            torch.cuda.synchronize()
        times.append(1e3 * (clock() - start))
    return min(times)


def main() -> None:
    """Pretrain, adapt, compare, and write the numbers."""
    warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # layers of GPT-2 store their weights transposed
    torch.set_float32_matmul_precision("high")
    settings = LARGE if CUDA else Settings()
    text = texts(settings.length)
    network = pretrained(text["code"], settings)
    pages, test, unknown = (part[: settings.pages] for part in (text["prose"], text["prose"].flip(0), text["C++"]))
    rows: dict[str, dict[str, float]] = {}
    for name, training in TRAININGS.items():
        bnn = adapted(network, training, pages, settings)
        for way, (rule, samples) in ways(training.method).items():
            rows[name + way] = scores(bnn, test, unknown, rule, samples)
    lb.save(bnn, "adapter.safetensors")
    weights, size = sum(p.nbytes for p in network.parameters()), Path("adapter.safetensors").stat().st_size
    print(f"The file of the adapter: {size / 2**10:.0f} KiB; its base: {weights / 2**10:.0f} KiB.")
    print(f"{'adapter':28} {'NLL':>6} {'ECE':>6}  AUROC of C++ by: NLL, entropy, mutual information   milliseconds")
    for name, row in rows.items():
        detection = "   ".join(f"{row[f'auroc_{by}']:.3f}" for by in UNCERTAINTIES)
        print(f"{name:28} {row['nll']:6.3f} {row['ece']:6.3f}  {detection:>48}   {row['milliseconds']:12.1f}")
    prompt = text["prose"][-1:, : settings.length // 2]
    found = lb.generate(bnn, prompt, max_new_tokens=settings.length // 4)
    continued = bytes(found.sequences[0, settings.length // 2 :].tolist())
    print("continued:", repr(continued.decode(errors="replace")))
    machine = torch.cuda.get_device_name() if CUDA else "CPU"
    record = {"machine": machine, "torch": torch.__version__, "settings": asdict(settings), "adapter_bytes": size}
    Path("language_model.json").write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
