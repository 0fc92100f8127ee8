"""Compare adapters of a small language model over seeds: the networks, texts and scores of examples/language_model.py.

python experiments/language_model.py experiments/results/choices/language-adapters.json --out adapters.json

The settings are those of the file of language_choices.py, which chose them by held-out text. Each seed trains a plain
adapter and Bayesian ones by both engines. Two more posteriors are fitted to the plain adapter after training, at the
step with the lowest held-out NLL. Every adapter is also scored with a temperature that fits held-out text. All text is
on every machine; Python and torch choose its version. `--compile` also times compiled predictions, by adapters of one
engine: the other one predicts in the same way. What would start after `--seconds` is left out, but for the first seed.
"""

import argparse
import copy
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from arguments import command_of, run_script

import leanbayes as lb
from leanbayes.evaluation import Scores
from leanbayes.evaluation.outcomes import joined, outcome_of
from leanbayes.evaluation.temperature import fit_temperature
from leanbayes.training.record import machine, versions, write_json

EXAMPLE = Path(__file__).parents[1] / "examples" / "language_model.py"
OTHER = 128  # windows of each text that score the GPT
HELD_OUT = 64  # windows that choose settings, the step of early stopping, priors and temperatures
FEW = 16  # of them, for the prior of Laplace and the search of stds, which read them often
EVERY = 20  # steps between two scores on held-out text
METHODS = ("mean-field", "mean-field, ivon", "Laplace", "std search")
OF_BASE = ("length", "batch", "pretraining", "pretraining_lr", "width", "layers", "heads", "bf16")
PROBES = 32  # backward passes that estimate the curvature


def main() -> None:
    """Train, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("choices", type=Path, help="file of language_choices.py")
    parser.add_argument("--test", type=int, default=64, help="windows that are predicted, of prose and of C++ each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="besides the plain adapter"
    )
    parser.add_argument("--seconds", type=float, default=7200, help="after which nothing is started")
    parser.add_argument("--compile", action="store_true", help="time compiled predictions, too")
    parser.add_argument("--base", type=Path, help="file of the pretrained GPT, written if it is missing")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    started = time.perf_counter()
    example = the_example()
    choices = json.loads(args.choices.read_text())
    torch.set_float32_matmul_precision("high")
    settings = example.Settings(**choices["settings"])
    text = example.texts(settings.length)
    network, pretraining = base(example, settings, text, args.base)
    pages, held_out, rest = parts_of(text["prose"], settings)
    parts = {"pages": pages, "held out": held_out, "test": rest[: args.test], "unknown": text["C++"][: args.test]}
    record: dict[str, Any] = {
        "command": command_of("language_model", args, [str(args.choices)], hidden=["seconds", "base", "choices"]),
        "versions": all_versions(),
        "machine": machine(),
        "settings": asdict(settings),
        "chosen": choices["chosen"],
        "windows": {name: len(windows) for name, windows in parts.items()},
        "weights": sum(p.numel() for p in network.parameters()),
        "pretraining": pretraining,
        "seeds": [],
    }
    for seed in range(args.seeds):
        if seed and time.perf_counter() - started > args.seconds:
            break
        comparison = Comparison(example, settings, parts, args.out.parent)
        comparison.run(network, choices["chosen"], seed, args.methods)
        record["seeds"].append(comparison.rows)
        write_json(args.out, {**record, "seconds": time.perf_counter() - started})  # so far
    if args.compile:
        record["compiled"] = compiled_times(example, comparison.models, parts["test"], started + args.seconds)
    write_json(args.out, {**record, "seconds": time.perf_counter() - started})
    for name, row in record["seeds"][0].items():
        print(name, {key: round(statistics.fmean(one[name][key] for one in record["seeds"]), 4) for key in row})


class Comparison:
    """The adapters of one seed, and their scores by each way to predict.

    Args:
        example: The module of the example.
        settings: Its settings.
        parts: The windows of text by name.
        folder: Where files are written to count their bytes.
    """

    def __init__(self, example: Any, settings: Any, parts: dict[str, torch.Tensor], folder: Path) -> None:
        self.example, self.settings, self.parts, self.folder = example, settings, parts, folder
        self.models: dict[str, Any] = {}
        self.rows: dict[str, dict[str, float]] = {}
        self._seed = 0

    def run(self, network: Any, chosen: dict[str, dict[str, float]], seed: int, methods: Sequence[str]) -> None:
        """Train and score adapters: the plain one, and those of some methods."""
        self._seed = seed
        self.score("base", lb.bayesianize(copy.deepcopy(network), lb.Deterministic()).eval(), 0.0)
        curve = Curve(self.parts["held out"], stop=True)
        for name in ("plain", *(name for name in METHODS[:2] if name in methods)):
            training, start = training_of(self.example, name, chosen[name]), busy_seconds()
            after_step = curve if name == "plain" else lambda step, bnn: None
            bnn = self.example.adapted(network, training, self.parts["pages"], self.settings, seed, after_step)
            seconds = busy_seconds() - start
            self.score(name, bnn, seconds - curve.seconds if name == "plain" else seconds)
            if name == "plain":
                stopped, until_stopped = curve.restored(bnn), seconds
                self.score("plain, early stopping", stopped, seconds)
        few = batches(self.parts["held out"][:FEW])
        for name in METHODS[2:]:
            if name not in methods:
                continue
            start = busy_seconds()
            if name == "Laplace":
                laplace = lb.Laplace(probes=PROBES, seed=seed)
                bnn = lb.bayesianize(stopped, laplace, data=batches(self.parts["pages"]), select="lora_")
                lb.choose_prior(bnn, few, samples=2)
            else:
                search = lb.StdSearch(seed=seed)
                bnn = lb.bayesianize(stopped, search, data=few, select="lora_")
            self.score(name, bnn.eval(), until_stopped + busy_seconds() - start)

    def score(self, name: str, bnn: Any, seconds: float) -> None:
        """Add the scores of an adapter."""
        self.models[name] = bnn
        size = size_of(bnn, self.folder)
        for way, (rule, samples) in self.example.ways(bnn.method).items():
            test: list[Any] = []
            unknown = self.parts["unknown"]
            keep = lambda prediction, rows, test=test: test.append(outcome_of(prediction, rows))  # noqa: E731
            row = self.example.scores(bnn, self.parts["test"], unknown, rule, samples, keep)
            held_out = self.example.predictions(bnn, self.parts["held out"], rule, samples)
            temperature = fit_temperature(joined([outcome_of(*pair) for pair in held_out]))
            assert temperature is not None  # of classes there is always one
            scaled = Scores()
            scaled.take(temperature(joined(test)))
            extra = {f"{key}_scaled": scaled.compute()[key] for key in ("nll", "ece")}
            costs = {"seconds_of_training": seconds, "bytes": size}
            self.rows[name + way] = {**row, **extra, "temperature": temperature.value, **costs}
            print(f"seed {self._seed}, {name}{way}: NLL {row['nll']:.4f}", flush=True)


class Curve:
    """The NLL of held-out text during a training, and the state of the lowest one.

    Args:
        held_out: Windows of held-out text.
        stop: Store the state at the lowest NLL.
    """

    def __init__(self, held_out: torch.Tensor, stop: bool = False) -> None:
        self._held_out, self._stop = held_out, stop
        self._state: dict[str, torch.Tensor] = {}
        self.steps: list[int] = []
        self.nll: list[float] = []
        self.seconds = 0.0

    def __call__(self, step: int, bnn: Any) -> None:
        if step % EVERY:
            return
        start = busy_seconds()
        bnn.eval()
        self.steps.append(step)
        self.nll.append(lb.evaluate(bnn, batches(self._held_out), details=False)["nll"])
        if self._stop and self.nll[-1] == min(self.nll):
            self._state = {name: value.clone() for name, value in bnn.state_dict().items()}
        bnn.train()
        self.seconds += busy_seconds() - start

    def restored(self, bnn: Any) -> Any:
        """Return a copy of the model at the step with the lowest NLL."""
        found = copy.deepcopy(bnn)
        found.load_state_dict(self._state)
        return found


def the_example() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("example_of_a_language_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look it up
    spec.loader.exec_module(module)
    return module


def base(example: Any, settings: Any, text: dict[str, torch.Tensor], path: Path | None) -> tuple[Any, dict[str, Any]]:
    """Return the pretrained GPT, and its NLL of other text of each kind with the seconds of its training."""
    if path is not None and path.exists():
        stored = torch.load(path, weights_only=True)
        if any(stored["settings"][name] != getattr(settings, name) for name in OF_BASE):
            raise lb.LeanBayesError(f"{path} was trained with other settings: give another --base.")
        network = example.gpt(settings)
        network.load_state_dict(stored["state"])
        return network, stored["pretraining"]
    start = busy_seconds()
    used = len(text["code"]) - OTHER
    network = example.pretrained(text["code"][:used], settings)
    pretraining: dict[str, Any] = {"seconds": busy_seconds() - start, "nll": {}}
    bnn = lb.bayesianize(copy.deepcopy(network), lb.Deterministic()).eval()
    for name, windows in text.items():
        pretraining["nll"][name] = lb.evaluate(bnn, batches(windows[-OTHER:]), details=False)["nll"]
    print("pretrained:", pretraining, flush=True)
    if path is not None:
        stored = {"settings": asdict(settings), "state": network.state_dict(), "pretraining": pretraining}
        torch.save(stored, path)
    return network, pretraining


def parts_of(prose: torch.Tensor, settings: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the windows that an adapter sees, those that choose settings, and all others."""
    end = settings.pages + HELD_OUT
    return prose[: settings.pages], prose[settings.pages : end], prose[end:]


def training_of(example: Any, name: str, chosen: dict[str, float]) -> Any:
    """Return the training of an adapter from chosen numbers."""
    rates = {key: chosen[key] for key in ("lr", "temperature", "hess_init") if key in chosen}
    if name == "plain":
        return example.Training(lb.Deterministic(), **rates)
    if name == "mean-field":
        prior = lb.Normal(chosen["prior_std"])
        return example.Training(lb.MeanField(prior, chosen["init_std"], engine="backprop"), **rates)
    return example.Training(lb.MeanField(engine="ivon"), **rates)


def batches(windows: torch.Tensor) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Return inputs and labels."""
    return [({"input_ids": rows}, rows) for rows in windows.split(16)]


def busy_seconds() -> float:
    """Return the time on a GPU, or that of all threads on a CPU, which others may use, too."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def compiled_times(example: Any, models: dict[str, Any], test: torch.Tensor, end: float) -> dict[str, Any]:
    """Return the milliseconds of a compiled prediction by each way, or why it was not compiled."""
    found: dict[str, Any] = {}
    for name in (name for name in ("mean-field", "plain") if name in models):
        for way, (rule, samples) in example.ways(models[name].method).items():
            if time.perf_counter() > end:
                continue
            try:  # the first passes are compiled, and compared with eager ones
                example.milliseconds(models[name], test[:16], rule, samples, compile=True)
                found[name + way] = example.milliseconds(models[name], test[:16], rule, samples, compile=True)
            except lb.LeanBayesError as error:
                found[name + way] = str(error)
    return found


def size_of(bnn: Any, folder: Path) -> int:
    """Return the bytes of the file of an adapter."""
    path = folder / "adapter.safetensors"
    lb.save(bnn, path)
    size = path.stat().st_size
    path.unlink()
    return size


def all_versions() -> dict[str, str]:
    """Return the versions of packages."""
    others = {name: str(importlib.import_module(name).__version__) for name in ("transformers", "peft")}
    return {**versions(), **others}


if __name__ == "__main__":
    run_script(main)
