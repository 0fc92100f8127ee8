"""Tables of numbers in the formats that people use."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import RANDOM, expect

import leanbayes as lb
from leanbayes.data import ArrayDataset, Data, load, read_table

# -- tables ------------------------------------------------------------------------------------------------------------


def targets(data: Data) -> list[float]:
    """Return the targets of all splits in the units of the file."""
    parts: list[Any] = [data.train, data.validation, data.test]
    return sorted(float(y * data.target_std[0] + data.target_mean[0]) for part in parts for y in part.y[:, 0])


@pytest.mark.parametrize("separator", [",", ", ", ";", " ", "\t", "  "])
@pytest.mark.parametrize("header", ["", "a{0}b{0}the_target\n"])
@pytest.mark.parametrize("ending", [".csv", ".txt", ".data", ".csv.gz"])
def test_tables_are_read_and_standardized(tmp_path: Path, separator: str, header: str, ending: str) -> None:
    table = RANDOM.normal(3, 5, (40, 3)).round(4)
    text = header.format(separator) + "".join(separator.join(map(str, row)) + "\n" for row in table) + "\n\n"
    path = tmp_path / f"table{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    for name in (str(path), f"csv:{path}"):
        data = load(name)
        assert (data.task, data.input_shape, data.outputs) == ("regression", (2,), 1)
        assert isinstance(data.train, ArrayDataset)
        assert (len(data.train), len(data.validation), len(data.test or ())) == (32, 4, 4)  # type: ignore[arg-type]
        assert data.train.x.dtype == data.train.y.dtype == torch.float32
        for values in (data.train.x, data.train.y):
            torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5, rtol=0)
            torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1]))
        assert targets(data) == pytest.approx(sorted(table[:, -1]), abs=1e-4)


def test_constant_columns_do_not_divide_by_zero(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("".join(f"0.1,{i},0,7\n" for i in range(30)))
    data = load(str(path))
    assert isinstance(data.train, ArrayDataset)
    assert data.train.x[:, [0, 2]].abs().max() < 1e-6
    assert data.train.y.abs().max() == 0
    assert data.target_mean == (7.0,)
    assert data.target_std == (1.0,)


TABLE_DAMAGE: dict[str, tuple[bytes, str]] = {
    "text": (b"1,2,3\n4,five,6\n", "line 2, column 2: 'five'"),
    "text in the first line": (b"1,2,x\n4,5,6\n", "line 1, column 3: 'x'"),
    "nan": (b"a,b\n1,2\n\nnan,3\n", "line 4, column 1: 'nan'"),
    "infinity": (b"1 2\n3 inf\n", "line 2, column 2: 'inf'"),
    "empty cell": (b"1,2,3\n4,,6\n", "line 2, column 2: ''"),
    "short row": (b"1,2,3\n4,5\n", "line 2, has 2 columns"),
    "long row": (b"1 2\n3 4 5\n", "line 2, has 3 columns"),
    "one column": (b"1\n2\n", "2 or more numbers"),
    "only a header": (b"a,b,c\n", "rows"),
    "empty": (b"", "2 or more numbers, the target in the last column"),
    "not text": (b"\xff\xfe\0\0\x80", "not a text file"),
}


@pytest.mark.parametrize("name", TABLE_DAMAGE)
def test_invalid_cells_are_named_by_line_and_column(tmp_path: Path, name: str) -> None:
    content, words = TABLE_DAMAGE[name]
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    expect(lambda: load(str(path)), path, words, kind=lb.FileFormatError)


def test_uci_tables_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uci").mkdir()
    for file in ("bostonHousing.txt", "wine-quality-red.csv", "power-plant.data", "mine.txt.gz"):
        text = "".join(f"{i} {i * i}\n" for i in range(30)).encode()
        (tmp_path / "uci" / file).write_bytes(gzip.compress(text) if file.endswith("gz") else text)
    for name, known in [
        ("boston", "boston"),
        ("Wine", "wine"),
        ("power_plant", "power-plant"),
        ("uci:boston", "boston"),
        ("uci:mine", "mine"),
    ]:
        assert load(name, tmp_path).name == known
    expect(lambda: load("yacht", tmp_path), "yacht", "uci/yacht.txt")
    monkeypatch.setenv("LEANBAYES_DATA", str(tmp_path))
    assert load("boston").input_shape == (1,)


def test_toy_is_a_cubic_function_with_noise() -> None:
    data, again = load("toy", seed=0), load("toy", seed=3)
    assert isinstance(data.test, ArrayDataset)
    assert isinstance(again.test, ArrayDataset)
    assert np.allclose(targets(data), targets(again), atol=1e-3)
    assert isinstance(data.train, ArrayDataset)
    x = torch.cat([data.train.x, data.test.x]).double()
    y = torch.cat([data.train.y, data.test.y]).double() * data.target_std[0] + data.target_mean[0]
    # The standardized input is linear in x, so a cubic polynomial fits, and the residuals are the noise.
    features = torch.cat([x**power for power in range(4)], dim=1)
    residuals = y - features @ torch.linalg.lstsq(features, y).solution
    assert 2.7 < residuals.std() < 3.3
    assert 1.6 < x.max() < 1.85  # 4 over the std of a uniform, 8/√12
    assert -1.85 < x.min() < -1.6


def test_the_test_data_of_gap_are_where_there_is_nothing_to_train_on() -> None:
    data, again = load("gap", seed=0), load("gap", seed=3)
    assert isinstance(data.test, ArrayDataset)
    assert np.allclose(targets(data), targets(again), atol=1e-5)
    for split, count, low, high in ((data.train, 216, 1, 3), (data.validation, 24, 1, 3), (data.test, 300, 0, 1)):
        assert isinstance(split, ArrayDataset)
        x = split.x.double() * data.input_std[0] + data.input_mean[0]
        y = split.y.double() * data.target_std[0] + data.target_mean[0]
        assert len(x) == count
        assert low <= x.abs().min() < x.abs().max() <= high
        assert x.min() < -0.9 * high
        assert x.max() > 0.9 * high
        assert 0.07 < (y - x * (2 * x).sin()).std() < 0.13


@pytest.mark.parametrize(
    "text",
    [
        b'"cement (kg, m3)","strength"\n"1","2"\n"3","4"\n',
        b"a, b;c\n1;2\n3;4\n",
        b"first name\tlast name\n1\t2\n3\t4\n",
        "größe,höhe\n1,2\n3,4\n".encode("latin-1"),
    ],
)
def test_headers_and_separators_of_many_kinds_are_read(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    assert read_table(tmp_path / "a.csv").tolist() == [[1, 2], [3, 4]]


def test_a_first_row_of_missing_values_is_not_a_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"NA,NA\n1,2\n")
    expect(lambda: read_table(tmp_path / "a.csv"), "line 1, column 1", kind=lb.FileFormatError)
