"""Random changes of the files of a run: each command prints one sentence, or works. A run of any length:

python tests/cli/test_cli_damaged_runs.py --mutations 20000 --seed 3
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a run as a script

import pytest
from cli_cases import EVALUATION, TINY, Output, command
from file_cases import contents
from fuzz_cases import changed_bytes, changed_text, check_message, nested
from safetensors.torch import save_file

import leanbayes as lb
from leanbayes.cli.options import read_config
from leanbayes.cli.runs import open_run
from leanbayes.deploy.header import signed as with_digest
from leanbayes.training import read_record

COMMAND_NAMES = tuple("info predict evaluate report calibrate decide acquire sensitivity compress export".split())
MUTATIONS, COMMANDS = 2000, 40  # in the test suite: changed records, and changed records for each command


def make(folder: Path) -> Path:
    """Train a small run with an evaluation, and write a table of inputs beside it."""
    run = folder / "run"
    assert command("fit", "mean-field", *TINY[:-4], "--out", run).code == 0
    assert command("report", run, "--out", folder / "report.html", "--quiet", *EVALUATION).code == 0
    (folder / "inputs.csv").write_text("0.5\n")
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("damaged"))


@contextlib.contextmanager
def restored(*paths: Path) -> Iterator[None]:
    """Restore files afterwards."""
    before = [path.read_bytes() for path in paths]
    try:
        yield
    finally:
        for path, data in zip(paths, before, strict=True):
            path.write_bytes(data)


def changed(data: bytes, choice: random.Random) -> bytes:
    """Change the values of a JSON file, or its bytes."""
    if choice.random() < 0.1:
        return changed_bytes(data, choice)
    return changed_text(data.decode(), choice).encode("utf-8", "surrogatepass")


def signed(text: bytes) -> bytes:
    """Give a changed evaluation the digest of its content, as somebody who wants it to be read would."""
    values = json.loads(text)
    if isinstance(values, dict):
        values.pop("digest", None)
        key = values.pop("key", None)
        values = {"key": key, "digest": hashlib.sha256(json.dumps(values).encode()).hexdigest(), **values}
    return json.dumps(values).encode()


def check_line(text: str) -> None:
    assert text.isprintable()


def read(run: Path) -> str:
    """Read a changed run through the API, and return what happened."""
    try:
        read_record(run)
    except lb.FileFormatError as error:
        check_message(error)
        return "no record"
    try:
        open_run(run)
    except lb.LeanBayesError as error:
        check_line(str(error))
        return "no model"
    return "read"


def fuzz(run: Path, mutations: int, seed: int) -> Counter[str]:
    """Read a run with many changed records."""
    outcomes: Counter[str] = Counter()
    record = run / "run.json"
    with restored(record):
        text = record.read_bytes()
        for number in range(mutations):
            record.write_bytes(changed(text, random.Random(f"{seed} {number}")))
            try:
                outcomes[read(run)] += 1
            except Exception as error:
                error.add_note(f"in the change {number} with seed {seed}")
                raise
    return outcomes


def words_of(name: str, run: Path) -> tuple[Any, ...]:
    """Return a command that reads a run."""
    report = ("report", run, "--quiet", "--out", run.parent / "report.html")
    commands = {
        "info": ("info", run),
        "predict": ("predict", run, run.parent / "inputs.csv"),
        "evaluate": ("evaluate", run, "--samples", 2),
        "report": report,
        "calibrate": ("calibrate", run, "--samples", 2),
        "decide": ("decide", run, "--coverage", 0.5, "--samples", 2),
        "acquire": ("acquire", run, run.parent / "inputs.csv", "--number", 1, "--samples", 2),
        "sensitivity": ("sensitivity", run),
        "compress": ("compress", run, run.parent / "model.lbc", "--max-nll-increase", 1, "--samples", 2),
        "export": ("export", run, run.parent / "model.onnx"),
    }
    return commands[name]


def check_output(output: Output) -> None:
    """A command that fails prints one sentence."""
    assert output.code in (0, 1, 2), output
    assert "Traceback" not in output.err
    if output.code:
        lines = [line for line in output.err.splitlines() if line.startswith("leanbayes: ")]
        assert len(lines) == 1, output.err


def fuzz_command(name: str, run: Path, file: str, mutations: int, seed: int) -> Counter[int]:
    """Run a command on a run of which one file is changed many times."""
    outcomes: Counter[int] = Counter()
    path = run / file
    with restored(run / "run.json", run / "evaluation.json"):
        texts = {one: (run / one).read_bytes() for one in ("run.json", "evaluation.json")}
        for number in range(mutations):
            for one, text in texts.items():
                (run / one).write_bytes(text)
            data = changed(texts[file], random.Random(f"{name} {seed} {number}"))
            if file == "evaluation.json":
                with contextlib.suppress(ValueError, RecursionError):
                    data = signed(data)
            path.write_bytes(data)
            try:
                output = command(*words_of(name, run))
                check_output(output)
            except Exception as error:
                error.add_note(f"in the change {number} of {file} with seed {seed} for {name}")
                raise
            outcomes[output.code] += 1
    return outcomes


def test_changed_records_are_refused_in_one_sentence_or_read(run: Path) -> None:
    outcomes = fuzz(run, MUTATIONS, 0)
    assert min(outcomes["no record"], outcomes["no model"]) > 0.05 * MUTATIONS
    assert outcomes["read"] > 0.1 * MUTATIONS


@pytest.mark.parametrize("name", ["info", "predict", "evaluate", "report"])
def test_commands_on_a_changed_record_print_one_sentence_or_work(name: str, run: Path) -> None:
    outcomes = fuzz_command(name, run, "run.json", COMMANDS, 0)
    assert outcomes[0] > 0
    assert outcomes[1] > 0


def test_a_report_of_a_changed_evaluation_prints_one_sentence_or_works(run: Path) -> None:
    fuzz_command("report", run, "evaluation.json", COMMANDS, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is damaged"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"[" * 100_000, "nested too deeply"),
        (json.dumps(nested(60)).encode(), "nested too deeply"),
        (b"[" + b"[]," * 200_000 + b"1]", "too many values"),
        (b"[" + b"1" * 5000 + b"]", "too large"),
        (b'{"status": "finished", "status": "stopped"}', "a key twice"),
        (b"[]", "wrong type"),
        (b"{}", "has no 'status'"),
    ],
)
def test_records_beyond_the_limits_are_refused_at_once(run: Path, text: bytes, message: str) -> None:
    with restored(run / "run.json"):
        (run / "run.json").write_bytes(text)
        start = time.process_time()
        with pytest.raises(lb.FileFormatError, match=message) as caught:
            read_record(run)
        assert time.process_time() - start < 5
        check_message(caught.value)
        output = command("predict", run, run.parent / "inputs.csv")
        assert output.code == 1
        check_output(output)
    with restored(run / "evaluation.json"):
        (run / "evaluation.json").write_bytes(text)  # it is evaluated again
        assert command(*words_of("report", run), *EVALUATION).code == 0


def test_a_record_that_is_a_huge_file_is_not_read(run: Path) -> None:
    with restored(run / "run.json"):
        with (run / "run.json").open("r+b") as file:
            file.truncate(10 << 30)  # a file with a hole, which needs no space
        with pytest.raises(lb.FileFormatError, match="bytes"):
            read_record(run)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_an_evaluation_that_is_no_file_is_not_read(kind: str, run: Path) -> None:
    path = run / "evaluation.json"
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")  # both are endless
    try:
        assert command(*words_of("report", run), *EVALUATION).code == 0  # it is evaluated again
    finally:
        path.unlink()
        path.write_bytes(content)


def test_weights_of_another_dtype_are_refused(run: Path) -> None:
    path = run / "model.safetensors"
    with restored(path):
        header, tensors = contents(path)
        header.pop("digest")
        name = next(name for name in tensors if name.endswith("bias"))
        tensors[name] = tensors[name].double()
        save_file(tensors, path, metadata={"leanbayes": with_digest(json.dumps(header), tensors)})
        for words in (words_of("predict", run), ("calibrate", run), ("sensitivity", run)):
            output = command(*words)
            check_output(output)
            assert "dtype" in output.err


@pytest.mark.parametrize("classes", [["a"], ["a"] * 2])
def test_a_record_with_too_few_names_of_classes_is_refused(classes: list[str], run: Path) -> None:
    with restored(run / "run.json"):
        record = json.loads((run / "run.json").read_text())
        record["config"]["classes"] = classes
        record["config"]["model"]["outputs"] = 3
        (run / "run.json").write_text(json.dumps(record))
        with pytest.raises(lb.FileFormatError, match="classes has a wrong length"):
            open_run(run)


def test_a_config_file_may_be_a_pipe_but_not_endless(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.symlink_to("/dev/zero")
    with pytest.raises(lb.LeanBayesError, match="characters"):
        read_config(path)
    ours, theirs = os.pipe()
    os.write(theirs, b"epochs: 3")
    os.close(theirs)
    assert read_config(Path(f"/dev/fd/{ours}")) == {"epochs": 3}
    os.close(ours)


def test_aliases_in_a_config_file_are_limited(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(lines))
    tracemalloc.start()
    with pytest.raises(lb.LeanBayesError, match="values"):
        read_config(path)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()
    output = command("fit", "mean-field", "--config", path)
    assert output.code == 2
    check_output(output)
    path.write_text("epochs: " + "[" * 50_000)
    output = command("fit", "mean-field", "--config", path)
    assert output.code == 2
    check_output(output)
    path.write_text("a: &a {b: *a}")
    with pytest.raises(lb.LeanBayesError, match="values"):
        read_config(path)
    merged = ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 11))]
    path.write_text("\n".join(merged))
    with pytest.raises(lb.LeanBayesError, match="values"):
        read_config(path)
    path.write_text("epochs: &n 3\nmethod: {samples: *n}\n")
    assert read_config(path) == {"epochs": 3, "method": {"samples": 3}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Read runs with changed files.")
    parser.add_argument("--mutations", type=int, default=20_000, help="number of changed records")
    parser.add_argument("--seed", type=int, default=0, help="seed of the changes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        trained = make(Path(made))
        print(dict(fuzz(trained, given.mutations, given.seed)))
        for file in ("run.json", "evaluation.json"):
            for one in COMMAND_NAMES:
                print(file, one, dict(fuzz_command(one, trained, file, given.mutations // 20, given.seed)))
