"""Choose the settings of adapters of a small language model by held-out text. Test text is not read.

python experiments/language_choices.py --bf16 --out experiments/results/choices/language-adapters.json

A GPT is trained once. The plain adapter shows whether it overfits: its NLL of held-out text during the training. The
settings of each method are chosen one after the other, each with those chosen before it.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from arguments import command_of, run_script
from language_model import HELD_OUT, Curve, all_versions, base, batches, parts_of, the_example, training_of

import leanbayes as lb
from leanbayes.training.record import machine, write_json

FOR_MINUTES = {  # of one core, if it has bf16
    "length": 128,
    "batch": 16,
    "pretraining": 2500,
    "pretraining_lr": 2e-3,
    "adapting": 160,
    "adapting_batch": 8,
    "pages": 128,
    "width": 192,
    "layers": 4,
    "heads": 4,
    "rank": 8,
}
# The first value of each is where the search begins.
GRIDS: dict[str, dict[str, list[float]]] = {
    "plain": {"lr": [1e-3, 3e-3]},
    "mean-field": {"lr": [1e-3, 3e-3], "prior_std": [0.1], "temperature": [1.0, 0.1], "init_std": [0.01, 0.1, 0.3]},
    "mean-field, ivon": {"hess_init": [0.5, 0.05], "lr": [0.3, 1.0, 3.0], "temperature": [1.0, 0.1]},
}


def main() -> None:
    """Train with each setting and write the held-out scores."""
    example = the_example()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "", allow_abbrev=False)
    usual = {**asdict(example.Settings()), **FOR_MINUTES}
    for field in fields(example.Settings):
        flag, value = f"--{field.name.replace('_', '-')}", usual[field.name]
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(value), default=value)
    parser.add_argument("--base", type=Path, help="file of the pretrained GPT, written if it is missing")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    settings = example.Settings(**{field.name: getattr(args, field.name) for field in fields(example.Settings)})
    text = example.texts(settings.length)
    network, pretraining = base(example, settings, text, args.base)
    pages, held_out, _ = parts_of(text["prose"], settings)
    record: dict[str, Any] = {
        "command": command_of("language_choices", args, [], hidden=["base"]),
        "versions": all_versions(),
        "machine": machine(),
        "settings": asdict(settings),
        "windows": {"pages": len(pages), "held out": HELD_OUT},
        "weights": sum(p.numel() for p in network.parameters()),
        "pretraining": pretraining,
    }

    def store(search: Search) -> None:
        found = {"chosen": search.chosen, "tried": search.tried, "curves": search.curves}
        write_json(args.out, {**record, **found})

    search = Search(example, settings, network, pages, held_out, store)
    if args.out.exists():
        search.resume(json.loads(args.out.read_text()))
    for name, grid in GRIDS.items():
        search.choose(name, grid)
    store(search)


class Search:
    """Held-out scores of adapters with several settings.

    Args:
        example: The module of the example.
        settings: Its settings.
        network: The pretrained GPT.
        pages: The windows that an adapter sees.
        held_out: The windows that choose.
        store: Writes what has been found so far.
    """

    def __init__(
        self,
        example: Any,
        settings: Any,
        network: Any,
        pages: torch.Tensor,
        held_out: torch.Tensor,
        store: Callable[["Search"], None],
    ) -> None:
        self._example, self._settings, self._network, self._store = example, settings, network, store
        self._pages, self._held_out = pages, held_out
        self.tried: list[dict[str, Any]] = []
        self.curves: list[dict[str, Any]] = []
        self.chosen: dict[str, dict[str, float]] = {}

    def resume(self, record: dict[str, Any]) -> None:
        """Take what an earlier process tried with the same network and text."""
        if record["settings"] != asdict(self._settings) or record["windows"]["held out"] != len(self._held_out):
            raise lb.LeanBayesError("The file has choices for other settings: give another --out, or delete it.")
        self.tried, self.curves = record["tried"], record["curves"]

    def choose(self, name: str, grid: dict[str, list[float]]) -> None:
        """Choose the settings of a method one after the other."""
        best = {key: values[0] for key, values in grid.items()}
        lowest = self.nll(name, best)
        for key, values in grid.items():
            for value in values[1:]:
                setting = {**best, key: value}
                nll = self.nll(name, setting)
                if nll < lowest:
                    best, lowest = setting, nll
        self.chosen[name] = best

    def nll(self, name: str, setting: dict[str, float]) -> float:
        """Return the held-out NLL of an adapter: of a plain one the lowest of its training, of others the last one."""
        same = (row["nll"] for row in self.tried if row == {"method": name, **setting, "nll": row["nll"]})
        known: float | None = next(same, None)
        if known is not None:
            return known
        training = training_of(self._example, name, setting)
        curve = Curve(self._held_out)
        after_step: Any = curve if name == "plain" else lambda step, bnn: None
        bnn = self._example.adapted(self._network, training, self._pages, self._settings, 0, after_step)
        if name == "plain":
            self._add_curve(setting, curve, bnn)
            nll = min(curve.nll)
        else:
            nll = lb.evaluate(bnn, batches(self._held_out), samples=10, details=False)["nll"]
        self.tried.append({"method": name, **setting, "nll": nll})
        print(self.tried[-1], flush=True)
        self._store(self)
        return nll

    def _add_curve(self, setting: dict[str, float], curve: Curve, bnn: Any) -> None:
        train = lb.evaluate(bnn, batches(self._pages), details=False)["nll"]
        self.curves.append({**setting, "steps": curve.steps, "held_out_nll": curve.nll, "last_train_nll": train})
        print(f"plain, {setting}: last NLL of its pages {train:.3f}, held out", *(f"{v:.3f}" for v in curve.nll))


if __name__ == "__main__":
    run_script(main)
