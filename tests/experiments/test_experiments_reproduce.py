"""Tests of the list of all experiments: it is complete and in order, and its commands are those of the stored files."""

import argparse
import json
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leanbayes.cli import compare, fit
from leanbayes.cli.main import COMMANDS
from leanbayes.core import config

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
RESULTS = EXPERIMENTS / "results"
MODULE: dict[str, Any] = runpy.run_path(str(EXPERIMENTS / "reproduce.py"))
STEPS = MODULE["steps"]()
PLACES = (
    "run", "runs", "comparisons", "file", "out", "figures", "keep", "root", "device", "start", "save_model",
    "save_probs",
)  # fmt: skip
# Folders of images are described by what is in them, which needs the data.
COMPARISONS = [step for step in STEPS if step.words[:2] == ["leanbayes", "compare"] and "camvid" not in step.command]
PROGRAMS = [step for step in STEPS if step.words[0] == "python"]


def stored(step: Any) -> dict[str, Any]:
    """The result of a step under today's names; empty if it is missing."""
    return runpy.run_path(str(EXPERIMENTS / "stored.py"))["read"](RESULTS / step.result) if step.result else {}


def test_every_stored_file_has_one_command() -> None:
    listed = [step.result for step in STEPS if step.result]
    assert len(listed) == len(set(listed))
    there = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json")}
    assert there <= set(listed), "give the command of these files in experiments/results.toml"


def test_a_step_reads_only_what_earlier_steps_or_the_repository_have() -> None:
    for number, step in enumerate(STEPS):
        for path in step.inputs:
            makers = [one for one in STEPS if MODULE["maker_of"](path, [one])]
            assert (set(makers) & set(STEPS[:number])) or ((ROOT / path).exists() and not makers), path
    read = {path for step in STEPS for path in step.inputs}
    for step in STEPS:  # nothing is trained for nobody
        assert step.result or step.makes or any(path.startswith(step.outputs[0]) for path in read), step.command


def parsed(command: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a program, without those that are places on a machine."""
    program, *words = shlex.split(command)[1:]
    found: list[argparse.Namespace] = []
    read = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser) -> argparse.Namespace:
        found.append(read(self))
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [program, *words])
    monkeypatch.syspath_prepend(EXPERIMENTS)
    with pytest.raises(InterruptedError):
        runpy.run_path(str(ROOT / program), run_name="__main__")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    return {name: value for name, value in vars(found[0]).items() if name not in PLACES}


@pytest.mark.parametrize("step", PROGRAMS, ids=lambda step: step.title())
def test_programs_have_the_arguments_that_the_stored_file_names(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = parsed(shlex.join(step.words), monkeypatch)
    record = stored(step)
    if not record or not (ROOT / shlex.split(record["command"])[1]).is_file():
        return  # not made yet, or made by a former program, as the note says
    command = record["command"].replace("--picture", "--image")
    named = command.replace(".py", ".py --data x", 1) if "one_pass_quality" in command else command
    needs_out = "" if "--out" in command else " --out x.json"
    theirs = parsed(named + needs_out if step.result and "sensitivity.py" not in named else named, monkeypatch)
    for hidden in ("data", "title", "model_options") if "one_pass_quality" in command else ():
        ours.pop(hidden), theirs.pop(hidden)
    assert ours == theirs


def captured(module: Any, name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What a command would be called with."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, name, lambda *arguments: found.append(arguments))
    monkeypatch.chdir(ROOT)
    module.command(words)()
    return found[0]


def plain(method: dict[str, Any]) -> str:
    """Describe a method with today's settings. Without ivon, the prior "auto" is a Gaussian with std gain · 0.1."""
    found = config.encode(config.decode(method))
    if "prior" in found:
        gain = found["prior"].pop("gain")
        if found["prior"]["scale"] == "auto" and found["engine"] == "backprop":
            found["prior"]["scale"] = 0.1 * gain
    return json.dumps(found)


@pytest.mark.parametrize("step", COMPARISONS, ids=lambda step: step.title())
def test_comparisons_have_the_settings_of_the_stored_file(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options, recipes, methods, _ = captured(compare, "_compare", step.words[2:], monkeypatch)
    record = stored(step)
    if not record:
        return
    seeds = range(record["seed"], record["seed"] + record.get("seeds", 1))
    assert (options.recipe.seed, options.seeds) == (seeds[0], len(seeds))
    assert options.task.model == record["model"]["name"]
    known = {plain(one["method"]) for one in record["results"]}
    assert {plain(config.encode(method)) for method in methods.values()} == known
    theirs = config.decode(record["recipe"])
    for recipe in recipes.values():
        differ = {name for name in vars(theirs) if getattr(theirs, name) != getattr(recipe, name)}
        assert differ <= {"evaluate_every"}


@pytest.mark.parametrize(
    "step", [step for step in STEPS if step.words[:2] == ["leanbayes", "fit"]], ids=lambda s: s.title()
)
def test_trainings_have_the_settings_of_the_stored_file(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, method, recipe, _ = captured(fit, "_train", step.words[2:], monkeypatch)
    record = stored(step)
    if record:
        assert method == config.decode(record["config"]["method"])
        assert recipe == config.decode(record["config"]["recipe"])


def test_all_commands_are_commands() -> None:
    assert {step.words[0] for step in STEPS} == {"leanbayes", "python"}
    assert {step.words[1] for step in STEPS if step.words[0] == "leanbayes"} <= set(COMMANDS)
    assert all((ROOT / step.words[1]).is_file() for step in PROGRAMS)


def test_what_is_missing_is_made_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Callable[..., list[Any]] = MODULE["missing"]

    def todo(*gone: str, only: str = "*") -> list[str]:
        lost = {f"experiments/results/{name}" for name in gone}
        found = missing(STEPS, only, lambda path: path not in lost and not path.startswith("runs/"))
        return [step.title() for step in found]

    assert todo() == []
    assert todo("pbn/toy.json") == ["pbn/toy.json"]
    assert todo("pbn/toy.json", only="vdp/*") == []
    # The run of a file that is there is trained again if a missing file needs it, and so is what it starts from.
    assert todo("sharing/paper_seed_2.json") == [
        "cifar10_methods_seed_2_plain.json",
        "cifar10_sharing_paper_seed_2.json",
        "sharing/paper_seed_2.json",
    ]
    assert todo("sharing/int8.json") == ["runs/cifar10-resnet-20", "sharing/int8.json"]
    assert len(todo("headline/long.json")) == 4  # a training, two compressions, and the file


def test_it_says_what_it_skips_and_what_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = Path.exists
    gone = {RESULTS / "mnist_pbn.json", RESULTS / "pbn" / "mnist_rates.json", RESULTS / "pbn" / "toy.json"}
    monkeypatch.setattr(Path, "exists", lambda self: self not in gone and (RESULTS in self.parents or there(self)))
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--dry-run"])
    monkeypatch.delenv("LEANBAYES_DATA", raising=False)
    MODULE["main"]()
    assert capsys.readouterr().out.splitlines() == [
        "python experiments/pbn.py toy --figures experiments/results/pbn --out runs/pbn/toy.json",
        "Skipped mnist_pbn.json: set LEANBAYES_DATA to the folder of the data sets.",
        "Skipped pbn/mnist_rates.json: set LEANBAYES_DATA to the folder of the data sets.",
    ]
