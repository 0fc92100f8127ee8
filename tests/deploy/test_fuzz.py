"""Random changes of model files: each file is refused in one line, or loads as a model. A run of any length:

python tests/deploy/test_fuzz.py --mutations 100000 --seed 3
"""

import argparse
import json
import random
import resource
import struct
import sys
import tempfile
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a run as a script

import numpy as np
import pytest
import torch
from compact_cases import START, header_of
from compact_cases import rewritten as with_compact_header
from compact_cases import signed as with_checksum
from file_cases import contents, with_header
from fuzz_cases import changed_bytes, changed_json, changed_text, check_message
from safetensors.torch import save_file
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.deploy.compact.coding import block, pack_bytes, pack_flags, unpack_symbols
from leanbayes.deploy.header import signed
from leanbayes.deploy.loading import describe

FOLDER = Path(__file__).parents[1] / "fixtures" / "v0.1"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".safetensors", ".lbc"))
MUTATIONS = 3000  # in the test suite, over all files


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 24), nn.Tanh(), nn.Linear(24, 5)
    )


# -- changes ----------------------------------------------------------------------------------------------------------


def changed_tensors(tensors: dict[str, Tensor], choice: random.Random) -> dict[str, Tensor]:
    """Change one tensor: its name, dtype, shape or values."""
    found, name = dict(tensors), choice.choice([*tensors])
    old, kind = tensors[name], choice.randrange(7)
    if kind == 0:
        del found[name]
    elif kind == 1:
        found[choice.choice(["a", "posterior.mu", name + "x", "network.networks.7.0.bias"])] = found.pop(name).clone()
    elif kind == 2:
        dtypes = [torch.float8_e4m3fn, torch.float16, torch.int8, torch.int64, torch.bool, torch.float64, torch.uint8]
        found[name] = old.to(choice.choice(dtypes))
    elif kind == 3:
        found[name] = old.reshape(-1).repeat(choice.choice([2, 3]))
    elif kind == 4:
        found[name] = old.reshape(-1)[: old.numel() // 2].clone()
    elif kind == 5:
        found[name] = old.reshape(*old.shape, 1)
    else:
        value = (
            choice.choice([float("nan"), float("inf"), -1.0, 0.0, 1e30])
            if old.is_floating_point()
            else choice.choice([-1, 0, 100])
        )
        found[name] = torch.full_like(old, value)
    return found


def calibrated_with_a_policy(bnn: lb.BayesianModel) -> None:
    """Give a model all that `lb.calibrate` and `lb.decide.fit` can add to its file."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 2, 5, 5, generator=generator), torch.arange(40) % 5
    lb.calibrate(bnn, [x], samples=2, layers=True, layer_inputs=8, generator=generator)
    lb.decide.fit(bnn, [(x, y)], false_alarms=0.5, coverage=0.5, samples=2)
    assert bnn.moment_layers
    assert bnn.policy is not None


# -- one file ---------------------------------------------------------------------------------------------------------


class Fuzzed:
    """A file to change, the model in it, and a network to load it into."""

    def __init__(self, name: str, folder: Path) -> None:
        self.network, self.path = build(), folder / "changed"
        self.is_compact = name.endswith(".lbc")
        self.bnn = lb.load(FOLDER / name, self.network)
        if name == "mean_field.safetensors":
            calibrated_with_a_policy(self.bnn)
        whole = folder / f"whole_{name}"
        if self.is_compact:
            whole.write_bytes((FOLDER / name).read_bytes())
        else:
            lb.save(self.bnn, whole)  # with a digest, which files of version 0.1 do not have
        self.data = whole.read_bytes()
        self.state = self.bnn.state_dict()
        self.header, self.tensors = (header_of(whole), {}) if self.is_compact else contents(whole)

    def change(self, choice: random.Random) -> str:
        """Write a changed file, and return what must hold if it loads: nothing, the same tensors, or the same model."""
        if choice.random() < 0.25:
            self.path.write_bytes(changed_bytes(self.data, choice))
            return "model"
        return self._change_compact(choice) if self.is_compact else self._change_safetensors(choice)

    def _change_safetensors(self, choice: random.Random) -> str:
        header = {key: value for key, value in self.header.items() if key != "digest"}
        kind = choice.random()
        if kind < 0.6:
            text = changed_text(json.dumps(header), choice)
            text = signed(text, self.tensors) if text.endswith("}") else text
            save_file(self.tensors, self.path, metadata={"leanbayes": text})
            return "tensors"
        if kind < 0.8:
            tensors = changed_tensors(self.tensors, choice)
            save_file(tensors, self.path, metadata={"leanbayes": signed(json.dumps(header), tensors)})
            return ""
        length = struct.unpack("<Q", self.data[:8])[0]
        table = changed_json(json.loads(self.data[8 : 8 + length]), choice)
        listed = json.dumps(table).encode()
        self.path.write_bytes(struct.pack("<Q", len(listed)) + listed + self.data[8 + length :])
        return "model"

    def _change_compact(self, choice: random.Random) -> str:
        magic, version, unused, length = START.unpack_from(self.data)
        parts = self.data[START.size + length : -32]
        if choice.random() < 0.3:
            parts = changed_bytes(parts, choice)
            text = json.dumps(self.header)
        else:
            text = changed_text(json.dumps(self.header), choice)
        packed = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
        self.path.write_bytes(with_checksum(START.pack(magic, version, unused, len(packed)) + packed + parts))
        return ""

    def load(self, same: str) -> str:
        """Load the changed file, and return "loaded" or "refused"."""
        try:
            described = describe(self.path)
        except lb.FileFormatError as error:
            check_message(error)
        else:
            assert described["weights"] >= 0
        try:
            bnn = lb.load(self.path, self.network)
        except lb.FileFormatError as error:
            check_message(error)
            return "refused"
        found = bnn.state_dict()
        if same:
            assert found.keys() == self.state.keys()
            assert all(torch.equal(tensor, found[name]) for name, tensor in self.state.items())
        if same == "model":
            assert (bnn.method, bnn.rule, bnn.trained_rule) == (self.bnn.method, self.bnn.rule, self.bnn.trained_rule)
            assert bnn.moment_scale == self.bnn.moment_scale
            assert bnn.likelihood.settings == self.bnn.likelihood.settings
        assert all(tensor.isfinite().all() for tensor in bnn.posterior.state_dict().values())
        assert all(line.isprintable() for line in str(bnn.report).split("\n"))
        return "loaded"


def fuzz(mutations: int, seed: int, folder: Path, report: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """Change and load the files in turn, and count what happened."""
    files = [Fuzzed(name, folder) for name in NAMES]
    outcomes: Counter[str] = Counter()
    for number in range(mutations):
        file = files[number % len(files)]
        same = file.change(random.Random(f"{seed} {number}"))
        try:
            outcomes[file.load(same)] += 1
        except Exception as error:
            kept = Path(tempfile.gettempdir()) / f"fuzz_{seed}_{number}"
            kept.write_bytes(file.path.read_bytes())
            error.add_note(f"{NAMES[number % len(files)]} with seed {seed} and number {number}: see {kept}")
            raise
        if (number + 1) % 10_000 == 0:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            report(f"{number + 1:,} files: {dict(outcomes)}, at most {memory:,} MiB")
    return outcomes


def test_changed_files_are_refused_or_load(tmp_path: Path) -> None:
    outcomes = fuzz(MUTATIONS, 0, tmp_path)
    assert outcomes["refused"] > 0.5 * MUTATIONS
    assert outcomes["loaded"] > 0.02 * MUTATIONS  # the changes reach what is behind the first checks


# -- files that would need much memory or time ------------------------------------------------------------------------


def assert_refused_at_once(path: Path, message: str, network: nn.Module | None = None) -> None:
    network = build() if network is None else network
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(lb.FileFormatError, match=message) as caught:
            lb.load(path, network)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 5
    check_message(caught.value)


@pytest.fixture
def compact(tmp_path: Path) -> Path:
    path = tmp_path / "a.lbc"
    path.write_bytes((FOLDER / "sharing_fp16.lbc").read_bytes())
    return path


@pytest.mark.parametrize("members", [1, 3, 10**7, 10**15])
def test_an_ensemble_has_as_many_members_as_the_file(members: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    lb.save(lb.load(FOLDER / "ensemble.safetensors", build()), path)
    with_header(path, lambda header: header["method"].update(members=members))
    assert_refused_at_once(path, f"the weights of 2 members instead of {members}|members={members}")


@pytest.mark.parametrize(
    ("method", "setting"), [(lb.SWAG(rank=0), "samples"), (lb.MBNN(), "snapshots"), (lb.AEB(), "snapshots")]
)
@pytest.mark.parametrize("members", [1, 40, 10**5, 10**15])
@pytest.mark.parametrize("bias", [False, True])
def test_copies_of_a_network_are_those_of_the_file(
    method: lb.Method, setting: str, members: int, bias: bool, tmp_path: Path
) -> None:
    norms = [nn.BatchNorm2d(4)] if bias else []
    layers = nn.Conv2d(2, 4, 3, bias=bias), *norms, nn.Flatten(), nn.Linear(36, 5, bias=bias)
    network, path = nn.Sequential(*layers), tmp_path / "a"
    lb.save(lb.bayesianize(network, method), path)
    lb.load(path, network)
    with_header(path, lambda header: header["method"].update({setting: members}))
    if bias or (members > 1000 and setting == "snapshots"):
        assert_refused_at_once(path, f"members instead of|{setting}={members}", network)
    else:  # there is no tensor of one copy only
        assert lb.load(path, network).method != method


def test_members_of_an_ensemble_have_all_their_weights_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    lb.save(lb.load(FOLDER / "ensemble.safetensors", build()), path)
    header, tensors = contents(path)
    header.pop("digest")
    header["method"]["members"] = 5000
    tensors |= {f"network.networks.{number}.0.bias": torch.zeros(8) for number in range(5000)}
    save_file(tensors, path, metadata={"leanbayes": signed(json.dumps(header), tensors)})
    assert_refused_at_once(path, "members")


def test_repeated_rows_of_numbers_are_refused(compact: Path) -> None:
    def repeat(header: dict[str, Any]) -> None:
        rows = header["settings"]["numbers"]
        rows.extend([rows[-1]] * 500)

    with_compact_header(compact, repeat)
    assert_refused_at_once(compact, "occurs twice")


@pytest.mark.parametrize("counts", [[], [1], [1, 2, 3, 4], [2**20, 2**20, 5], [True, 1, 1], [1, 1, 65], "abc", {}])
def test_wrong_counts_are_refused(counts: Any, compact: Path) -> None:
    with_compact_header(compact, lambda header: header["settings"].update(counts=counts))
    assert_refused_at_once(compact, "damaged")


def test_a_long_header_of_small_lists_is_refused(compact: Path, tmp_path: Path) -> None:
    with_compact_header(compact, lambda header: header["settings"].update(more=[[index] for index in range(200_000)]))
    assert_refused_at_once(compact, "too many values|too long")
    path = tmp_path / "b"
    for count in (200_000, 4 << 20):
        many: list[Any] = [[]] * count
        lb.save(lb.load(FOLDER / "mean_field.safetensors", build()), path)
        with_header(path, methodcaller("update", more=many))
        assert_refused_at_once(path, "characters|too many values|list of tensors")


def test_a_list_of_many_tensors_is_refused(tmp_path: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    for count, message in ((150_000, "tensors"), (400_000, "list of tensors|tensors")):
        table = ("{" + ",".join(entry % number for number in range(count)) + "}").encode()
        (tmp_path / "a").write_bytes(struct.pack("<Q", len(table)) + table + bytes(8))
        assert_refused_at_once(tmp_path / "a", message)


def test_tables_of_symbols_are_in_memory_one_at_a_time() -> None:
    groups, alphabet = 400, 1 << 20
    levels = np.zeros(alphabet, np.uint8)
    table = bytes([1, 0, 0, 1])  # all levels are the same byte, which needs no bits
    assert len(pack_bytes(levels)) <= len(table)
    data = pack_flags([True] * groups) + block(table) * (groups + 1)
    tracemalloc.start()
    with pytest.raises(ValueError, match="no symbols"):
        unpack_symbols(data, [1] * groups, alphabet)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Load changed model files.")
    parser.add_argument("--mutations", type=int, default=100_000, help="number of changed files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the changes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        print(dict(fuzz(given.mutations, given.seed, Path(made), print)))
