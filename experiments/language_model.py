"""Compare adapters of a small language model over seeds: the networks, texts and scores of examples/language_model.py.

python experiments/language_model.py --seeds 2 --compile --out experiments/results/language/adapters.json

A GPT is trained once. Each seed trains a plain adapter, and Bayesian ones by both engines, which predict by 10 samples
and in one pass. All text is on every machine; Python and torch choose its version. `--compile` also times compiled
predictions, by adapters of one engine: the other one predicts in the same way. What would start after `--seconds` is
left out, but for the first seed.
"""

import argparse
import importlib
import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from arguments import command_of, run_script

import leanbayes as lb
from leanbayes.training.record import machine, versions, write_json

EXAMPLE = Path(__file__).parents[1] / "examples" / "language_model.py"


def main() -> None:
    """Train, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    parser.add_argument("--pretraining", type=int, help="steps of the GPT; default: those of the example")
    parser.add_argument("--adapting", type=int, help="steps of an adapter")
    parser.add_argument("--pages", type=int, help="windows of prose that an adapter sees")
    parser.add_argument("--test", type=int, default=256, help="windows that are predicted, of prose and of C++ each")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=90, help="after which nothing is started")
    parser.add_argument("--compile", action="store_true", help="time compiled predictions, too")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    started = time.perf_counter()
    example = the_example()
    constants = {"PRETRAINING": args.pretraining, "ADAPTING": args.adapting, "PAGES": args.pages}
    vars(example).update({name: value for name, value in constants.items() if value is not None})
    torch.set_float32_matmul_precision("high")
    text = example.texts()
    network = example.pretrained(text["code"])
    parts = text["prose"][: example.PAGES], text["prose"][example.PAGES :][: args.test], text["C++"][: args.test]
    settings = {name.lower(): getattr(example, name) for name in ("LENGTH", "BATCH", *constants)}
    record: dict[str, Any] = {
        "command": command_of("language_model", args, [], hidden=["seconds"]),
        "versions": {**versions(), "transformers": version_of("transformers"), "peft": version_of("peft")},
        "machine": machine(),
        "settings": {**settings, "test": len(parts[1]), "unknown": len(parts[2]), **example.SIZES},
        "weights": sum(p.numel() for p in network.parameters()),
        "seconds_of_pretraining": time.perf_counter() - started,
        "seeds": [],
    }
    models: dict[str, Any] = {}
    for seed in range(args.seeds):
        if seed and time.perf_counter() - started > args.seconds:
            break
        models, rows = scores_of(example, network, parts, seed)
        record["seeds"].append(rows)
        write_json(args.out, {**record, "seconds": time.perf_counter() - started})  # so far
    record["adapter_bytes"] = size_of(models["mean-field"], args.out.parent)
    if args.compile:
        record["compiled"] = compiled_times(example, models, parts[1], started + args.seconds)
    write_json(args.out, {**record, "seconds": time.perf_counter() - started})
    for name in record["seeds"][0]:
        print(name, {key: round(statistics.fmean(one[name][key] for one in record["seeds"]), 4) for key in rows[name]})


def the_example() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("example_of_a_language_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scores_of(example: Any, network: Any, parts: Any, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train the adapters of one seed; return them, and their scores by each way to predict."""
    pages, test, unknown = parts
    models, rows = {}, {}
    for name, method in example.METHODS.items():
        start = time.perf_counter()
        models[name] = bnn = example.adapted(network, method, pages, seed)
        trained = time.perf_counter() - start
        for way, (rule, samples) in example.ways(method).items():
            rows[name + way] = {**example.scores(bnn, test, unknown, rule, samples), "seconds_of_training": trained}
            print(f"seed {seed}, {name}{way}: NLL {rows[name + way]['nll']:.4f}", flush=True)
    return models, rows


def compiled_times(example: Any, models: dict[str, Any], test: torch.Tensor, end: float) -> dict[str, Any]:
    """Return the milliseconds of a compiled prediction by each way, or why it was not compiled."""
    found: dict[str, Any] = {}
    for name in ("mean-field", "plain"):
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


def version_of(name: str) -> str:
    """Return the version of a package."""
    return str(importlib.import_module(name).__version__)


if __name__ == "__main__":
    run_script(main)
