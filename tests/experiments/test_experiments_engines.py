"""Tests of the comparison of engines."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import leanbayes as lb

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def run(script: str, *words: Any, patch: pytest.MonkeyPatch) -> None:
    patch.syspath_prepend(EXPERIMENTS)
    patch.setattr(sys, "argv", [script, *map(str, words)])
    runpy.run_path(str(EXPERIMENTS / script), run_name="__main__")


def test_every_row_is_trained_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task: tuple[Any, ...] = ("--data", "digits", "--model", "small-cnn", "--epochs", 2, "--batch-size", 128)
    task = (*task, "--samples", 2)
    task = (*task, "--shift-examples", 0, "--ood-examples", 0)
    rows = (
        "sgd", "ivon", "backprop", "ssvi-ivon", "pbn-ivon", "ivon-opt", "batch-ensemble", "rank-1", "abnn", "sngp",
        "packed-ensemble", "mimo", "sparse-vd", "sbp", "mbnn",
    )  # fmt: skip
    for row in rows:
        out = tmp_path / f"digits-{row}-0.json"
        run("engines.py", row, *task, "--precision", "fp32", "--device", "cpu", "--out", out, patch=monkeypatch)
        found = json.loads(out.read_text())
        assert found["row"] == row
        for kind in ("running", "refreshed"):
            scores = found["scores"][kind]
            assert 0.2 < scores["test"]["accuracy"] <= 1
            assert scores["test_with_temperature"]["accuracy"] == scores["test"]["accuracy"]
            assert 0.25 <= scores["test_with_temperature"]["temperature"] <= 4
        assert str(tmp_path) not in out.read_text()
    table = next(runpy.run_path(str(EXPERIMENTS / "engines_tables.py"))["engines_tables"](tmp_path))
    assert table.count("digits, small-cnn, 1,078, 2") == len(rows)


def test_rows_train_by_the_defaults_of_methods_on_the_first_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "--data digits --model resnet-18 --model-options width=4 stem=imagenet --train-images 300 --test-images 90 "
        "--epochs 2 --batch-size 64 --samples 2 --shift-examples 10 --ood-examples 20 --no-running --precision fp32"
    )
    task = (*words.split(), "--device", "cpu")
    folder = tmp_path / "baselines"
    folder.mkdir()
    rows: dict[str, tuple[str, ...]] = {"sgd": ("--defaults",), "vbll": ("--defaults",), "vbll-1": ()}
    rows["sbp"] = ("--defaults", "--no-seconds")
    for name, more in rows.items():
        out = ("--out", folder / f"{name}.json")
        run("engines.py", name.removesuffix("-1"), *task, *more, *out, patch=monkeypatch)
        found = json.loads((folder / f"{name}.json").read_text())
        assert found["settings"]["num_data"] == 300
        assert found["settings"]["temperature"] == (None if more else 1.0)
        assert found["scores"]["refreshed"]["corrupted"]["examples"] == 10
        assert ("training_seconds" in found["costs"]) == ("--no-seconds" not in more)
        assert 40_000 < found["costs"]["stored_numbers"] < 60_000  # 11.2 million / 16² weights, for a width of 4
    monkeypatch.syspath_prepend(EXPERIMENTS)
    (table,) = runpy.run_path(str(EXPERIMENTS / "baselines_tables.py"))["baselines_tables"](tmp_path)
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert names == [
        "method",
        "---",
        "plain network, SGD",
        "structured Bayesian pruning",
        "VBLL",
        "VBLL, temperature 1",
    ]
    cells = {name: line.split("|")[-4].strip() for name, line in zip(names, table.splitlines()[-6:], strict=True)}
    assert cells["method"] == "training ×"
    assert cells["plain network, SGD"] == "1.00"
    assert cells["structured Bayesian pruning"] == ""
    assert "published" not in table
    assert "AUROC, letters" in table
    assert "processor time" in table
    with pytest.raises(SystemExit, match="--defaults is for our methods"):
        run("engines.py", "ivon-opt", "--defaults", *task, "--out", tmp_path / "x.json", patch=monkeypatch)


def test_ensembles_of_plain_networks_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task: tuple[Any, ...] = ("--data", "digits", "--model", "small-cnn", "--epochs", 2, "--batch-size", 128)
    task = (*task, "--precision", "fp32")
    task = (*task, "--shift-examples", 0, "--ood-examples", 0)
    for seed in range(2):
        files = ("--out", tmp_path / f"sgd-{seed}.json", "--save-probs", tmp_path / f"probs-{seed}")
        run("engines.py", "sgd", *task, "--device", "cpu", "--seed", seed, *files, patch=monkeypatch)
    probs = [tmp_path / f"probs-{seed}" for seed in range(2)]
    words = (*probs, "--like", tmp_path / "sgd-0.json", "--out", tmp_path / "ensembles.json")
    run("ensembles.py", *words, patch=monkeypatch)
    one, two = json.loads((tmp_path / "ensembles.json").read_text())["ensembles"]
    alone = [json.loads((tmp_path / f"sgd-{seed}.json").read_text())["scores"]["refreshed"] for seed in range(2)]
    for kind in ("test", "test_with_temperature"):
        expected = sum(scores[kind]["nll"] for scores in alone) / 2
        assert one[kind]["nll"] == pytest.approx(expected, rel=1e-5)
    stored = [load_file(path) for path in probs]
    mean = (stored[0]["test"] + stored[1]["test"]) / 2
    chosen = mean.gather(1, stored[0]["test_labels"][:, None])
    assert two["test"]["nll"] == pytest.approx(-chosen.log().mean().item(), rel=1e-5)
    tables = runpy.run_path(str(EXPERIMENTS / "engines_tables.py"))
    trained, ensembles = tables["engines_tables"](tmp_path)
    assert "| digits, small-cnn, 1,078, 2 | plain network, SGD |" in trained
    assert "| digits, small-cnn, 1,078, 2 | 2 |" in ensembles
    sizes = [{"test_with_temperature": {"nll": nll}} for nll in (0.4, 0.3, 0.28)]
    found = [tables["equivalent"](nll, sizes) for nll in (0.41, 0.4, 0.375, 0.29, 0.27)]
    assert found == ["< 1", "1.0", "1.2", "2.5", "> 3"]


def test_rows_start_from_a_trained_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task: tuple[Any, ...] = ("--data", "digits", "--model", "small-cnn", "--epochs", 2, "--batch-size", 128)
    task = (
        *task,
        "--samples",
        2,
        "--shift-examples",
        20,
        "--ood-examples",
        50,
        "--precision",
        "fp32",
        "--device",
        "cpu",
        "--out",
    )
    task = ("--no-running", *task)
    model = tmp_path / "trained.safetensors"
    run("engines.py", "sgd", "--save-model", model, *task, tmp_path / "sgd.json", patch=monkeypatch)
    plain = json.loads((tmp_path / "sgd.json").read_text())["scores"]["refreshed"]["test"]
    for row in ("laplace", "laplace-adjoint", "laplace-last", "laplace-kron", "std-search"):
        out = tmp_path / f"{row}.json"
        run("engines.py", row, "--start", model, *task, out, patch=monkeypatch)
        found = json.loads(out.read_text())
        assert found["settings"]["post_hoc"]
        assert list(found["scores"]) == ["refreshed"]
        assert found["costs"]["file_bytes"] > 1000
        assert abs(found["scores"]["refreshed"]["test"]["accuracy"] - plain["accuracy"]) < 0.1
        assert str(tmp_path) not in out.read_text()
        assert 0.5 < found["scores"]["refreshed"]["ood"]["letters"]["auroc"] <= 1
        assert len(found["scores"]["refreshed"]["corrupted"]["nll_by_corruption"]) == 15
        assert found["scores"]["refreshed"]["corrupted"]["examples"] == 20
    table = next(runpy.run_path(str(EXPERIMENTS / "engines_tables.py"))["engines_tables"](tmp_path))
    cells = [cell.strip() for cell in table.splitlines()[-1].split("|")[1:-1]]
    assert cells[5] == ""  # the NLL with running statistics
    assert all(cell for place, cell in enumerate(cells) if place not in (5, 8))  # nor are there ensembles
    check_table(tmp_path, monkeypatch)
    with pytest.raises(SystemExit, match="--start is for"):
        run("engines.py", "ivon", "--start", model, *task, out, patch=monkeypatch)


def check_table(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Files of this and of an earlier version are in one table, and missing metrics are empty cells."""
    results = folder / "results" / "baselines"
    results.mkdir(parents=True)
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text())
        if record["row"] == "std-search":  # as earlier versions wrote it
            del record["scores"]["refreshed"]["corrupted"], record["scores"]["refreshed"]["ood"]
            del record["costs"]["predict_flops"]
        (results / path.name).write_text(json.dumps(record))
    patch.syspath_prepend(EXPERIMENTS)
    (table,) = runpy.run_path(str(EXPERIMENTS / "baselines_tables.py"))["baselines_tables"](folder / "results")
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    found = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    plain, diagonal, old = (found[name] for name in ("plain network, SGD", "Laplace, diagonal", "std search"))
    assert plain["training ×"] == plain["prediction ×"] == "1.00"
    assert diagonal["prediction ×"] == "2.00"  # samples
    assert float(diagonal["training ×"]) > 1  # with that of the plain network
    assert float(diagonal["NLL, corrupted"]) > 0
    assert 0.5 < float(plain["AUROC, letters"].rstrip("%")) / 100 <= 1
    assert old["NLL, corrupted"] == old["prediction ×"] == old["AUROC, letters"] == ""
    assert old["file, MB"] != ""


def test_few_examples_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "small-data.json"
    words = ("--digits", 60, "--tables", "toy", "--rows", "plain", "ivon", "--epochs", 2, "--seeds", 2, "--out", out)
    run("small_data.py", *words, patch=monkeypatch)
    found = json.loads(out.read_text())["results"]
    assert [(one["data"], one["examples"], one["row"]) for one in found] == [
        ("digits", 60, "plain"),
        ("digits", 60, "ivon"),
        ("toy", None, "plain"),
        ("toy", None, "ivon"),
    ]
    assert all(len(one["scores"]) == 2 for one in found)
    (table,) = runpy.run_path(str(EXPERIMENTS / "engines_tables.py"))["engines_tables"](tmp_path)
    assert "| 60 digits |" in table
    assert "| toy (RMSE) |" in table


def test_temperatures_are_compared_on_held_out_data_and_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "digits.json"
    words = ("--cases", "digits", "--methods", "plain", "mean-field, ivon", "--temperatures", 1, 0.1)
    run("temperatures.py", *words, "--epochs", 1, "--seeds", 1, "--out", out, patch=monkeypatch)
    record = json.loads(out.read_text())
    found = [(one["method"], one["temperature"]) for one in record["results"]]
    assert found == [("plain", 1.0), ("mean-field, ivon", 1.0), ("mean-field, ivon", 0.1)]
    for one in record["results"]:
        (scores,) = one["scores"]
        assert 0.1 < scores["accuracy"] <= 1
        assert 0 <= scores["noise_auroc"] <= 1
    table = runpy.run_path(str(EXPERIMENTS / "engines_tables.py"))["temperature_table"](record)
    assert "| accuracy, NLL, AUROC of noise | 1 | 0.1 |" in table
    assert table.count("digits: ") == 2


def test_amplitudes_of_sngp_are_compared_on_held_out_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "amplitude.json"
    words = ("--amplitudes", 1, 3, "--epochs", 1, "--seeds", 1, "--out", out)
    run("sngp_amplitude.py", *words, patch=monkeypatch)
    found = json.loads(out.read_text())["results"]
    assert [one["amplitude"] for one in found] == [1, 3]
    assert all(one["held_out"]["examples"] == 300 for one in found)
    stored = json.loads((EXPERIMENTS / "results" / "choices" / "sngp-amplitude.json").read_text())["results"]
    nlls: dict[float, list[float]] = {}
    for one in stored:
        nlls.setdefault(one["amplitude"], []).append(one["held_out"]["nll"])
    default = nlls.pop(lb.SNGP().amplitude)
    assert all(ours < min(others) for ours, *others in zip(default, *nlls.values(), strict=True))


def test_default_temperatures_of_sparse_methods_keep_the_accuracy_of_held_out_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of sparse variational dropout is the largest one that costs less than 1 %."""
    out = tmp_path / "choices.json"
    words = ("--methods", "sbp", "--temperatures", 1, "--epochs", 1, "--seeds", 2, "--out", out)
    run("sparse_choices.py", *words, patch=monkeypatch)
    found = json.loads(out.read_text())
    kinds = ["Deterministic", "SBP"]
    assert [one["method"]["type"] for one in found["results"]] == [kind for kind in kinds for _ in range(2)]
    assert [one["method"]["type"] for one in found["means"]] == kinds
    of_seeds = [one["held_out"]["accuracy"] for one in found["results"][2:]]
    assert found["means"][1]["accuracy"] == pytest.approx(sum(of_seeds) / 2)

    def accuracies(name: str, method: str) -> dict[float, float]:
        found: dict[float, list[float]] = {}
        for one in json.loads((EXPERIMENTS / "results" / "choices" / name).read_text())["results"]:
            if one["method"]["type"] == method:
                found.setdefault(one["settings"].get("temperature", 0.0), []).append(one["held_out"]["accuracy"])
        return {temperature: sum(values) / len(values) for temperature, values in found.items()}

    plain = accuracies("sparse-baselines.json", "Deterministic")[0.0]
    ours = accuracies("sparse-baselines.json", "SparseVD")
    assert max(one for one, accuracy in ours.items() if accuracy > plain - 0.01) == lb.SparseVD().default_temperature
    assert accuracies("sbp.json", "SBP")[lb.SBP().default_temperature] > plain - 0.01
    dropout = accuracies("variational-dropout.json", "VariationalDropout")
    as_accurate = [temperature for temperature, accuracy in dropout.items() if accuracy > plain - 1e-9]
    assert max(as_accurate) == lb.VariationalDropout().default_temperature
    chains = json.loads((EXPERIMENTS / "results" / "choices" / "mbnn.json").read_text())["means"][1:]
    best = min(chains, key=lambda one: one["nll"])
    assert best["method"]["temperature"] == lb.MBNN().temperature
    assert best["settings"] == {"temperature": lb.MBNN().default_temperature}
    assert best["method"]["sparsity"] == lb.MBNN().sparsity


def test_snapshots_of_a_chain_are_scored_with_their_own_statistics_and_with_shared_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "chain.json"
    words = ("--width", 4, "--epochs", 4, "--batch", 64, "--weight-decays", 0.01, "--seeds", 1, "--out", out)
    run("chain_statistics.py", *words, patch=monkeypatch)
    (one,) = json.loads(out.read_text())["results"]
    assert one["distance"] > 0
    assert one["held_out"]["own"] != one["held_out"]["shared"]
    for scores in one["held_out"].values():
        assert 0 < scores["accuracy"] <= 1
        assert scores["nll"] > 0
    few = (
        "--methods swag std-search --train-images 200 --held-out-images 50 --samples 3 --width 4 --epochs 4 --batch 64"
    )
    rest = ("--weight-decays", 5e-4, "--seeds", 1, "--out", out)
    run("chain_statistics.py", *few.split(), *rest, patch=monkeypatch)
    for one in json.loads(out.read_text())["results"]:
        assert one["examples"] == 50
        assert list(one["held_out"]) == ["own", "few", "shared"]
        assert one["held_out"]["own"] != one["held_out"]["shared"]
        assert one["held_out"]["own"]["accuracy"] > 0.3
