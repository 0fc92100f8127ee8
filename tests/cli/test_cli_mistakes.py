"""Mistakes on the command line: each gives one clear sentence, and never a traceback.

The exit code is 2 if the arguments are wrong, 1 if the command fails, and 130 after Ctrl-C.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import TOY, must_not_train
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.methods import METHODS
from leanbayes.training import fit, read_record
from leanbayes.training.loop import Loop

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that runs a command which should fail, and returns its sentence, or the text of the parser."""

    def run(*words: object, code: int = 1) -> str:
        capsys.readouterr()
        found = main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert found == code, err
        assert out == ""
        assert "Traceback" not in err
        assert ".py" not in err
        if code == 2 and not err.startswith("leanbayes: "):
            text = " ".join(re.sub(r"[│╭╮╰╯─]|--{2,}", " ", err).split())
            assert re.search(rf"For full helptext, (run:?|see) leanbayes {words[0]}\b.* --help", text), text
            return text
        assert re.fullmatch(r"leanbayes: [^\n]+[.?]\n", err), err
        assert len(err) < 500
        return err

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = ("fit", "mean-field", *TOY, "--model-options", "hidden=[4]", "--method.samples", 2, "--out", folder)
    assert main([str(word) for word in words]) == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def expect(text: str, *words: str) -> None:
    for word in words:
        assert word in text, text


# -- commands, names and flags ----------------------------------------------------------------------------------------


def test_unknown_commands(refused: Refused) -> None:
    for word in ("train", "--what", ""):
        commands = "calibrate, decide, acquire, compress, export, push, sensitivity, plan, info"
        commands = f"predict, serve, compare, report, {commands}"
        expect(refused(word, code=2), repr(word), commands)
    for word, close in (("fits", "fit"), ("evalute", "evaluate"), ("Compare", "compare")):
        assert refused(word, code=2) == f"leanbayes: There is no command {word!r}: did you mean {close}?\n"


# Unknown names, with code 2 if the arguments alone show it, and 1 if it takes the data or the network.
NAMES: dict[str, tuple[int, tuple[object, ...], tuple[str, ...]]] = {
    "method": (2, ("fit", "mean-feld"), ("'mean-feld'", "did you mean mean-field?")),
    "method far off": (2, ("fit", "zzz"), tuple(METHODS)),
    "method's help": (2, ("fit", "mean-feld", "--help"), ("mean-field",)),
    "no method": (2, ("fit", "--data", "toy"), tuple(METHODS)),
    "method to compare": (2, ("compare", "ensembl", *TOY), ("'ensembl'", "did you mean ensemble?")),
    "setting to compare": (2, ("compare", "mean-field:sample=3", *TOY), ("'sample'", "did you mean samples?")),
    "type of a setting": (2, ("compare", "mean-field:samples=many", *TOY), ("samples='many' must be a whole number.",)),
    "setting given twice": (2, ("compare", "mean-field:samples=3,samples=4", *TOY), ("'samples'", "twice")),
    "method given twice": (2, ("compare", "ensemble", "ensemble", *TOY), ("twice",)),
    "method given twice with a colon": (2, ("compare", "ensemble", "ensemble:", *TOY), ("twice",)),
    "method given twice in two spellings": (2, ("compare", "mc-dropout", "mc_dropout:rate=0.1", *TOY), ("twice",)),
    "column": (1, ("compare", *TOY, "--sort", "nlll"), ("'nlll'", "did you mean nll?")),
    "column far off": (1, ("compare", *TOY, "--sort", "zzz"), ("'zzz'", "rmse, nll", "compare.json")),
    "column of other data": (1, ("compare", *TOY, "--sort", "accuracy"), ("'accuracy'", "rmse, nll")),
    "OOD column": (1, ("compare", "--sort", "ood:rotatd"), ("did you mean ood:rotated?",)),
    "OOD column of another set": (1, ("compare", "--sort", "ood:letters", "--ood", "noisy"), ("'ood:letters'",)),
    "OOD data set": (1, ("compare", "--ood", "svnh"), ("'svnh'", "did you mean svhn?")),
    "OOD data set that is missing": (1, ("compare", "--ood", "svhn"), ("svhn", "--root")),
    "OOD data set for a regression": (1, ("compare", *TOY, "--ood", "svhn"), ("toy", "leave out --ood")),
    "data": (1, ("fit", "mean-field", "--data", "didgits"), ("'didgits'", "did you mean digits?")),
    "uci data": (1, ("fit", "mean-field", "--data", "uci:yahct", "--root", "."), ("uci/yahct",)),
    "model": (1, ("fit", "mean-field", "--model", "small-cn", "--quiet"), ("'small-cn'", "small-cnn")),
    "model for images": (1, ("fit", "mean-field", *TOY, "--model", "resnet-18"), ("image", "mlp")),
    "model option": (1, ("fit", "mean-field", *TOY, "--model-options", "hiden=3"), ("hiden", "hidden")),
    "option without a value": (1, ("fit", "mean-field", *TOY, "--model-options", "hidden"), ("hidden", "NAME=VALUE")),
    "option of a wrong type": (1, ("fit", "mean-field", *TOY, "--model-options", "hidden=[no]"), ("hidden",)),
    "option that is no yaml": (1, ("fit", "mean-field", *TOY, "--model-options", "hidden=[4"), ("hidden", "[4")),
    "option that should be a list": (1, ("fit", "mean-field", *TOY, "--model-options", "hidden=8"), ("hidden", "list")),
    "no model": (1, ("fit", "mean-field", *TOY, "--model", "None"), ("'None'", "mlp")),
    "rule": (2, ("evaluate", "RUN", "--rule", "guess"), ("'guess'", "--rule", "flipout")),
    "setting of a rule": (2, ("predict", "RUN", "a.png", "--rule", "adjoint:margin=3"), ("--rule", "margins?")),
}


@pytest.mark.parametrize("name", NAMES)
def test_unknown_names(name: str, refused: Refused, trained: Path) -> None:
    code, words, expected = NAMES[name]
    expect(refused(*(trained if word == "RUN" else word for word in words), code=code), *expected)
    assert not Path("runs").exists()


def test_missing_libraries_are_named(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, library, None)
        message = refused("fit", "mean-field", "--model", f"{library}:resnet18", "--quiet")
        expect(message, f"{library} is not installed", f"pip install {library}")


FLAGS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "misspelled": (("fit", "mean-field", "--epoch", 3), ("--epoch", "Perhaps you meant", "--epochs")),
    "unknown": (("evaluate", "RUN", "--what"), ("--what", "evaluate --help")),
    "of another method": (("fit", "ensemble", "--method.prior.scale", 1), ("--method.prior.scale",)),
    "without a value": (("fit", "mean-field", "--epochs"), ("--epochs",)),
    "text for a number": (("fit", "mean-field", "--epochs", "many"), ("--epochs", "'many'")),
    "fraction for a count": (("fit", "mean-field", "--epochs", 1.5), ("--epochs", "'1.5'")),
    "one size for two": (("fit", "mean-field", "--resize", 16), ("--resize",)),
    "unknown choice": (("fit", "mean-field", "--device", "tpu"), ("--device", "'tpu'", "cuda")),
    "unknown split": (("evaluate", "RUN", "--split", "train"), ("--split", "'train'", "validation")),
    "one word too many": (("fit", "mean-field", "ensemble"), ("ensemble",)),
    "two paths": (("info", "RUN", "RUN"), ("Unrecognized",)),
    "no run": (("evaluate",), ("folder of the run",)),
    "no path": (("info",), ("model.safetensors",)),
    "rule of a method": (("fit", "mean-field", "--method.rule", "guess"), ("guess", "flipout")),
    "prior": (("fit", "mean-field", "--method.prior.scale", -1), ("scale=-1.0", "positive")),
    "dropout": (("fit", "mc-dropout", "--method.rate", 2), ("rate=2.0", "between 0 and 1")),
    "members": (("fit", "ensemble", "--method.members", 0), ("members=0", "at least 1")),
    "no seeds": (("compare", "--seeds", 0), ("--seeds 0", "1 or more")),
    "no jobs": (("compare", "--jobs", -1), ("--jobs -1", "1 or more")),
    "jobs of one at a time": (("compare", "--together", "--jobs", 2), ("--together", "leave out --jobs")),
    "unknown shift": (("compare", "--evaluation.shifts", "fog"), ("'fog'", "corruptions, rotation, noise, labels")),
    "no samples": (("compare", "--evaluation.samples", 0), ("samples=0",)),
    "unknown rule of an evaluation": (("report", "RUN", "--evaluation.rule", "guess"), ("guess", "flipout")),
}


@pytest.mark.parametrize("name", FLAGS)
def test_wrong_flags(name: str, refused: Refused, trained: Path) -> None:
    words, expected = FLAGS[name]
    expect(refused(*(trained if word == "RUN" else word for word in words), code=2), *expected)


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("epochs", 0, "at least 1"),
        ("batch-size", -1, "at least 1"),
        ("lr", -1, "at least 0"),
        ("lr", "nan", "number"),
        ("lr", "inf", "number"),
        ("weight-decay", -0.1, "at least 0"),
        ("temperature", -1, "at least 0"),
        ("warmup", 2, "from 0 to 1"),
        ("samples", 0, "at least 1"),
        ("workers", -1, "at least 0"),
        ("keep", 0, "at least 1"),
        ("checkpoint-steps", 0, "at least 1"),
    ],
)
def test_values_out_of_range(flag: str, value: object, expected: str, refused: Refused) -> None:
    given = f"{flag.replace('-', '_')}={value}"
    for command in (("fit", "mean-field"), ("compare",)):
        expect(refused(*command, "--data", "toy", f"--{flag}", value, code=2), given, expected)
    assert not Path("runs").exists()


@pytest.mark.parametrize("value", [2, 0, -0.1, "nan"])
def test_a_validation_share_out_of_range(value: object, refused: Refused) -> None:
    for command in (("fit", "mean-field"), ("compare",)):
        message = refused(*command, "--data", "toy", "--validation-share", value)
        expect(message, "validation_share", "between 0 and 1")
    assert not Path("runs").exists()


def test_a_prediction_needs_at_least_one_sample(refused: Refused, trained: Path) -> None:
    expect(refused("evaluate", trained, "--samples", 0), "samples=0", "from 1 to")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["fit", "evaluate", "predict", "report"])
def test_a_missing_gpu(command: str, refused: Refused, trained: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("a.png")
    words: dict[str, tuple[object, ...]] = {
        "fit": ("mean-field", *TOY),
        "evaluate": (trained,),
        "predict": (trained, "a.png"),
        "report": (trained,),
    }
    expect(refused(command, *words[command], "--device", "cuda"), "cuda", "GPU")


def test_fp16_on_a_cpu(refused: Refused) -> None:
    expect(refused("fit", "mean-field", *TOY, "--device", "cpu", "--precision", "fp16"), "fp16", "bf16")


# -- config files -----------------------------------------------------------------------------------------------------

# Problems with the file itself, with settings that have no flag, and with numbers out of range.
FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "no yaml": ("a: [1", ("a.yaml", "yaml", "line 2")),
    "a list": ("- 1", ("a.yaml", "name: value", "list")),
    "a text": ("hello", ("a.yaml", "name: value")),
    "a number": ("3", ("a.yaml", "name: value")),
    "a date that does not exist": ("seed: 2020-99-99", ("a.yaml", "cannot be read", "month")),
    "a number that is none": ("seed: !!int x", ("a.yaml", "cannot be read")),
    "a truth value that is none": ("compile: !!bool x", ("a.yaml", "cannot be read")),
    "a number of many digits": (f"seed: {'9' * 5000}", ("a.yaml", "cannot be read", "digits")),
    "a number of many bits": (f"seed: 0x{'f' * 5000}", ("`seed`", "bits")),
    "code": ("!!python/object/apply:os.getcwd []", ("a.yaml", "yaml", "line 1")),
    "method without a name": ("method: {prior: {scale: 1}}", ("`method`", "`name`")),
    "list of methods": ("method: [mean-field]", ("`method`", "`name`")),
    "number for a method": ("method: 3", ("`method`", "`name`")),
    "unknown method": ("method: mean-feld", ("'mean-feld'", "did you mean mean-field?")),
    "value out of range": ("epochs: 0", ("epochs=0", "at least 1")),
    "share out of range": ("warmup: 1.5", ("warmup=1.5", "from 0 to 1")),
    "two for one": ("epochs: [1, 2]", ("`epochs`", "one value", "[1, 2]")),
    "setting of another command": ("methods: [ensemble]", ("`methods`", "one value")),
    "other method": ("method: ensemble", ("'ensemble'", "'mean-field'")),
    "settings of another method": ("method: {name: ensemble, members: 2}", ("'ensemble'", "'mean-field'")),
}


@pytest.mark.parametrize("name", FILES)
def test_invalid_config_files(name: str, refused: Refused) -> None:
    text, expected = FILES[name]
    Path("a.yaml").write_text(f"{text}\n")
    message = refused("fit", "mean-field", "--data", "toy", "--config", "a.yaml", code=2)
    expect(message, "leanbayes: ", *expected)
    assert not Path("runs").exists()


# Settings, the flags that they are read as, and what the parser says about them.
CONFIGS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "unknown setting": ("epoks: 1", "--epoks 1", ("--epoks", "Perhaps you meant", "--epochs")),
    "unknown setting far off": ("zzz: 1", "--zzz 1", ("Unrecognized", "--zzz")),
    "misspelled setting of the task": (
        "validation_shar: 0.2",
        "--validation-shar 0.2",
        ("--validation-shar", "Perhaps you meant", "--validation-share"),
    ),
    "number for a name": ("1: 5", "--1 5", ("Unrecognized", "--1")),
    "setting of a prior": (
        "method: {name: mean-field, prior: {skale: 1}}",
        "--method.prior.skale 1",
        ("--method.prior.skale", "--method.prior.scale"),
    ),
    "setting of a method": (
        "method: {name: mean-field, sample: 1}",
        "--method.sample 1",
        ("--method.sample", "Perhaps you meant", "--method.samples"),
    ),
    "value of a method": (
        "method: {name: mean-field, init_std: -1}",
        "--method.init-std -1",
        ("init_std=-1", "positive"),
    ),
    "type of a method's setting": (
        "method: {name: mean-field, samples: many}",
        "--method.samples=many",
        ("--method.samples", "'many'"),
    ),
    "text for a number": ("epochs: many", "--epochs=many", ("--epochs", "'many'")),
    "nothing for a number": ("epochs:", "--epochs None", ("--epochs", "'None'")),
    "fraction for a count": ("epochs: 1.5", "--epochs 1.5", ("--epochs", "'1.5'")),
    "switch for a number": ("epochs: true", "--epochs", ("--epochs",)),
    "mapping for a number": ("epochs: {a: 1}", "--epochs.a 1", ("Unrecognized", "--epochs.a")),
    "unknown choice": ("optimizer: adam", "--optimizer=adam", ("--optimizer", "'adam'", "'adamw'")),
    "text for a share": ("validation_share: half", "--validation-share=half", ("--validation-share", "'half'")),
    "one size": ("resize: 5", "--resize 5", ("--resize",)),
    "three sizes": ("resize: [1, 2, 3]", "--resize 1 2 3", ("--resize",)),
    "text for a switch": ("quiet: please", "--quiet=please", ("Unrecognized", "please")),
    "number for a switch": ("refresh_batchnorm: 3", "--refresh-batchnorm 3", ("Unrecognized", "3")),
    "text for a seed": ("seed: x", "--seed=x", ("--seed", "'x'")),
    "fraction for a seed": ("seed: 1.5", "--seed 1.5", ("--seed", "'1.5'")),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_of_a_file_are_checked_as_flags(name: str, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "run", must_not_train)
    text, flags, expected = CONFIGS[name]
    Path("a.yaml").write_text(f"{text}\n")
    message = refused("fit", "mean-field", "--data", "toy", "--config", "a.yaml", code=2)
    box, line, after = message.partition("The settings of a.yaml were read as flags: ")
    assert line
    assert after == flags
    expect(box, *expected)
    assert not Path("runs").exists()


def test_a_wrong_flag_is_not_blamed_on_the_file(refused: Refused) -> None:
    Path("a.yaml").write_text("method: mean-field\n")
    assert "a.yaml" not in refused("fit", "--config", "a.yaml", "--epoch", 3, code=2)


# Unknown names in a file that only the data or the network can show.
LATER: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown data": ("data: didgits", ("'didgits'", "did you mean digits?")),
    "number for data": ("data: 5", ("'5'",)),
    "number for a model": ("data: toy\nmodel: 3", ("'3'", "mlp")),
    "number of options": ("data: toy\nmodel_options: 5", ("model option", "'5'", "NAME=VALUE")),
    "unknown option": ("data: toy\nmodel_options: {hiden: 5}", ("hiden", "hidden")),
    "share out of range": ("data: toy\nvalidation_share: 2", ("validation_share", "between 0 and 1")),
    "number for a root": ("data: pets\nroot: 5", ("'pets'",)),
}


@pytest.mark.parametrize("name", LATER)
def test_unknown_names_in_a_file(name: str, refused: Refused) -> None:
    text, expected = LATER[name]
    Path("a.yaml").write_text(f"{text}\n")
    expect(refused("fit", "mean-field", "--config", "a.yaml"), *expected)
    assert not Path("runs").exists()


def test_a_config_file_that_cannot_be_read(refused: Refused) -> None:
    expect(refused("fit", "mean-field", "--config", "no.yaml", code=2), "no.yaml", "check the path")
    expect(refused("compare", "--config", "no.yaml", code=2), "no.yaml", "check the path")
    expect(refused("fit", "mean-field", "--config", ".", code=2), "directory")
    expect(refused("fit", "mean-field", "--config", code=2), "--config")
    Path("a.yaml").write_bytes(b"\xff\xfe\x00a")
    expect(refused("fit", "mean-field", "--config", "a.yaml", code=2), "a.yaml", "yaml")


@pytest.mark.parametrize("methods", ["deterministic", "[]", "[1]", "3", "{ensemble: 2}", ""])
def test_methods_of_a_file_must_be_a_list_of_names(methods: str, refused: Refused) -> None:
    Path("a.yaml").write_text(f"methods: {methods}\n")
    expect(refused("compare", "--data", "toy", "--config", "a.yaml", code=2), "`methods`", "list")


def test_methods_of_a_file_are_checked_as_on_the_command_line(refused: Refused) -> None:
    Path("a.yaml").write_text("methods: [deterministic, 'mean-field:sample=3']\n")
    expect(refused("compare", "--data", "toy", "--config", "a.yaml", code=2), "'sample'", "did you mean samples?")
    Path("a.yaml").write_text("methods: [ensembl]\n")
    expect(refused("compare", "--data", "toy", "--config", "a.yaml", code=2), "did you mean ensemble?")


@pytest.mark.parametrize("line", ["quiet: ensemble", "epochs: [1, ensemble]"])
def test_a_superfluous_value_is_not_taken_for_a_method(
    line: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "run", must_not_train)
    Path("a.yaml").write_text(f"{line}\n")
    expect(refused("compare", "deterministic", "--data", "toy", "--config", "a.yaml", code=2), "ensemble")


# -- data -------------------------------------------------------------------------------------------------------------


def test_missing_data(refused: Refused) -> None:
    expect(refused("fit", "mean-field", "--data", "mnist"), "LEANBAYES_DATA", "MNIST/raw/train-images-idx3-ubyte")
    expect(refused("fit", "mean-field", "--data", "cifar10", "--root", "no"), "no", "cifar-10-batches-py")
    expect(refused("fit", "mean-field", "--data", "no.csv"), "no.csv", "check the path")
    expect(refused("fit", "mean-field", "--data", "./no/folder"), "no/folder", "check the path")


@pytest.mark.parametrize("words", [("--data", "mnist"), ("--data", "mnist", "--root", ".")], ids=str)
def test_missing_data_suggest_the_root_flag(words: tuple[str, ...], refused: Refused) -> None:
    expect(refused("fit", "mean-field", *words), "--root")


def test_damaged_data(refused: Refused) -> None:
    folder = Path("MNIST/raw")
    folder.mkdir(parents=True)
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (folder / name).write_bytes(b"no idx file")
    expect(refused("fit", "mean-field", "--data", "mnist", "--root", "."), "train-images-idx3-ubyte", "damaged")
    Path("a.csv").write_text("a,b\n1,2\n3,x\n")
    expect(refused("fit", "mean-field", "--data", "a.csv"), "a.csv", "line 3", "'x'")
    Path("empty").mkdir()
    expect(refused("fit", "mean-field", "--data", "empty"), "empty", "train/CLASS")
    Path("notes").write_text("1 2\n")
    expect(refused("fit", "mean-field", "--data", "notes"), "notes", "csv:FILE")


def test_resize_is_for_folders_of_images(refused: Refused) -> None:
    expect(refused("fit", "mean-field", *TOY, "--resize", 8, 8), "resize", "toy")


@pytest.fixture
def only_training(tmp_path: Path) -> tuple[object, ...]:
    """Images without a test split."""
    for name in ("cat", "dog"):
        (tmp_path / "pets" / "train" / name).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(
                tmp_path / "pets" / "train" / name / f"{number}.png"
            )
    words = ("--data", "pets", "--resize", 16, 16, "--model", "small-cnn", "--workers", 0, "--epochs", 1, "--quiet")
    return words


def test_data_without_a_test_split(only_training: tuple[object, ...], refused: Refused) -> None:
    assert main([str(word) for word in ("fit", "deterministic", *only_training, "--out", "run")]) == 0
    expect(refused("evaluate", "run"), "pets", "no test data")
    expect(refused("report", "run"), "pets", "no test data")


def test_a_comparison_without_test_data_is_refused_before_any_training(
    only_training: tuple[object, ...], refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "run", must_not_train)
    expect(refused("compare", "deterministic", *only_training, "--out", "run"), "pets", "no test data")


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--overwrite",)], ids=str)
@pytest.mark.parametrize("out", ["file", "file/run", "/proc/run"])
def test_a_folder_that_cannot_be_written(out: str, more: tuple[str, ...], refused: Refused) -> None:
    Path("file").write_text("mine")
    reason = "Cannot write" if out.startswith("/proc") else "is a file: give a folder"
    expect(refused("fit", "deterministic", *TOY, "--out", out, *more), reason, out.partition("/run")[0])
    assert Path("file").read_text() == "mine"


def test_result_files_that_cannot_be_written_are_reported_before_the_work(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "run", must_not_train)
    expect(refused("compare", "deterministic", *TOY, "--out", "/proc/a"), "Cannot write", "/proc/a")
    Path("b/report.html").mkdir(parents=True)
    expect(refused("compare", "deterministic", *TOY, "--out", "b"), "b/report.html is a folder")


def test_another_run_in_the_folder(refused: Refused, run: Path) -> None:
    words = ("fit", "mean-field", *TOY, "--model-options", "hidden=[4]", "--method.samples", 2, "--out", run)
    expect(refused(*words, "--lr", 0.5), "lr=0.01", "0.5", "--overwrite")
    before = (run / "model.safetensors").stat().st_mtime_ns
    message = refused(*words, "--seed", 7)
    expect(message, "seed=0", "7")
    assert (run / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_without_a_run(refused: Refused) -> None:
    Path("empty").mkdir()
    Path("file").touch()
    for place in ("empty", "file", "nowhere"):
        expect(refused("evaluate", place), place, "run.json")
        expect(refused("calibrate", place), place, "run.json")
        expect(refused("predict", place, "a.png"), place, "run.json")
    expect(refused("info", "empty"), "empty", "run.json")
    expect(refused("info", "nowhere"), "nowhere", "check the path")


def test_an_unfinished_run(refused: Refused, run: Path) -> None:
    for status in ("running", "failed: The loss is nan."):
        record = read_record(run)
        (run / "run.json").write_text(json.dumps({**record, "status": status}))
        for words in (("evaluate", run), ("calibrate", run), ("predict", run, "a.png")):
            expect(refused(*words), "not finished", status, "fit")


def test_a_run_from_python(refused: Refused) -> None:
    data = TensorDataset(torch.randn(40, 2), torch.randn(40, 1))
    fit(nn.Linear(2, 1), lb.Deterministic(), data, out="run", epochs=1, progress=False)
    for words in (("evaluate", "run"), ("calibrate", "run"), ("predict", "run", "a.png")):
        expect(refused(*words), "Python", "lb.load")


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "scores that are a list": (lambda record: record.update(scores=[]), ("run.json", "damaged", "scores")),
    "costs that are a number": (lambda record: record.update(costs=3), ("run.json", "damaged", "costs")),
    "status that is nothing": (lambda record: record.update(status=None), ("run.json", "damaged", "status")),
    "no source": (lambda record: record["config"].pop("source"), ("lb.load",)),
    "source without a task": (lambda record: record["config"]["source"].pop("task"), ("lb.load",)),
    "no model": (lambda record: record["config"].pop("model"), ("lb.load",)),
    "model that is a number": (lambda record: record["config"].update(model=3), ("lb.load",)),
    "model without a shape": (lambda record: record["config"]["model"].pop("input_shape"), ("lb.load",)),
    "unknown model": (lambda record: record["config"]["model"].update(name="gone"), ("'gone'",)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_record(name: str, refused: Refused, run: Path) -> None:
    record = read_record(run)
    damage, expected = DAMAGES[name]
    damage(record)
    (run / "run.json").write_text(json.dumps(record))
    expect(refused("evaluate", run), *expected)
    expect(refused("predict", run, "a.png"), *expected)


@pytest.mark.parametrize("part", ["status", "config", "scores", "costs", "versions", "machine", "history"])
def test_a_record_without_one_of_its_parts(part: str, refused: Refused, run: Path) -> None:
    record = read_record(run)
    del record[part]
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(lb.FileFormatError, match=rf"run\.json is damaged \(it has no '{part}'\): .*\.$"):
        read_record(run)
    fit_again = ("fit", "mean-field", *TOY, "--out", run)
    for words in (("info", run), ("evaluate", run), ("predict", run, "a.png"), fit_again):
        expect(refused(*words), "run.json", "damaged", f"'{part}'")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"null"], ids=str)
@pytest.mark.parametrize("command", ["evaluate", "info", "fit"])
def test_a_file_that_is_not_a_record(command: str, content: bytes, refused: Refused, run: Path) -> None:
    (run / "run.json").write_bytes(content)
    words = ("fit", "mean-field", *TOY, "--out", run) if command == "fit" else (command, run)
    expect(refused(*words), "run.json", "damaged")


def test_a_damaged_model_file(refused: Refused, run: Path) -> None:
    path = run / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    for words in (("evaluate", run), ("info", run), ("info", path)):
        expect(refused(*words), "model.safetensors", "truncated")
    path.unlink()
    expect(refused("evaluate", run), "no file", "model.safetensors")


def test_a_foreign_file(refused: Refused) -> None:
    save_file({"a": torch.zeros(2)}, "foreign.safetensors")
    expect(refused("info", "foreign.safetensors"), "foreign.safetensors", "not one that leanbayes saved")
    Path("text").write_text("hello")
    expect(refused("info", "text"), "not a safetensors file")


# -- images -----------------------------------------------------------------------------------------------------------


def test_a_run_on_tables_takes_no_images(refused: Refused, trained: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("a.png")
    expect(refused("predict", trained, "a.png"), "a table", "not images")


def test_a_table_that_does_not_fit_the_run(refused: Refused, trained: Path) -> None:
    Path("a.csv").write_text("1,2\n3,4\n")
    expect(refused("predict", trained, "a.csv"), "a.csv", "2 columns", "the 1 inputs")
    expect(refused("predict", trained, "b.csv"), "no table", "b.csv")


def test_a_file_that_is_not_an_image(
    refused: Refused, only_training: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(word) for word in ("fit", "deterministic", *only_training, "--out", "run")]) == 0
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("good.png")
    expect(refused("predict", "run", code=2), "nothing to predict", "at least one")
    expect(refused("predict", "run", "good.png", "no.png"), "no.png", "check the path")
    Path("empty").mkdir()
    expect(refused("predict", "run", "empty"), "empty", "has no images")
    Path("text.png").write_text("hello")
    expect(refused("predict", "run", "text.png"), "text.png", "damaged or of another format")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)).save("half.png")
    Path("half.png").write_bytes(Path("half.png").read_bytes()[:600])
    expect(refused("predict", "run", "half.png"), "half.png")
    expect(refused("predict", "run", "good.png", "--samples", 0), "samples=0")


# -- interruptions and missing packages -------------------------------------------------------------------------------


def stop(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_gives_code_130_and_one_sentence(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "run", stop)
    assert refused("fit", "mean-field", *TOY, "--out", "run", code=130) == "leanbayes: Stopped.\n"


def test_ctrl_c_promises_no_checkpoint_without_training(
    refused: Refused, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanbayes.cli.evaluate.score", stop)
    assert refused("evaluate", trained, code=130) == "leanbayes: Stopped.\n"


def test_the_command_line_says_what_to_install() -> None:
    script = """if True:
        import sys
        from leanbayes.cli import main
        for module in ("tyro", "accelerate"):
            sys.modules[module] = None
            print(main(["info", "a"]))
            del sys.modules[module]
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n1\n"
    for module, line in zip(("tyro", "accelerate"), done.stderr.splitlines(), strict=True):
        expect(line, "leanbayes: ", module, "pip install '.[cli]'")


@pytest.mark.parametrize("module", ["sklearn.datasets", "yaml", "torch.utils.tensorboard"])
def test_an_optional_package_that_is_not_installed(
    module: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.yaml").write_text("epochs: 1\n")
    for name in (module, *(name for name in list(sys.modules) if name.startswith(f"{module}."))):
        monkeypatch.setitem(sys.modules, name, None)
    data = "digits" if module == "sklearn.datasets" else "toy"
    expect(refused("fit", "deterministic", "--data", data, "--quiet", "--config", "a.yaml"), "pip install '.[")
