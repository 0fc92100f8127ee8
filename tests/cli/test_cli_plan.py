"""`leanbayes plan`: what each process of a sharded model holds and sends."""

import json

import pytest
from cli_cases import Cli

IMAGES = ("--shape", 1, 28, 28, "--outputs", 10)


def test_the_plan_of_a_small_network(cli: Cli) -> None:
    """LeNet-300-100 has 266,200 weights and 410 biases. Its last block is the smallest, and its first the largest."""
    (one, four) = json.loads(cli("plan", "lenet-300-100", *IMAGES, "--processes", 1, 4, "--json").out)
    weights, biases = 784 * 300 + 300 * 100 + 100 * 10, 410
    trained = 2 * weights + biases  # means, stds and biases, in fp32
    assert (one["weights"], one["gaussian"]) == (weights + biases, weights)
    assert (one["parameters"], one["gradients"], one["optimizer"]) == (4 * trained, 4 * trained, 8 * trained)
    assert one["gathered"] == 2 * 2 * (784 * 300 + 300)  # weights and gradients of one block, in bf16
    assert one["all_gather"] == 2 * one["reduce_scatter"] == 2 * 2 * (weights + biases)
    assert one["exchanged"] == 0
    assert four["parameters"] == 4 * trained // 4
    assert four["exchanged"] == (four["all_gather"] + four["reduce_scatter"]) * 3 // 4
    assert four["memory"] == sum(four[key] for key in ("parameters", "gradients", "optimizer", "gathered"))


def test_sparse_and_partial_models(cli: Cli) -> None:
    words = ("plan", "lenet-300-100", *IMAGES, "--engine", "ivon", "--processes", 2, "--dtype", "float32", "--json")
    (sparse,) = json.loads(cli(*words, "--method", "ssvi", "--share", 0.1).out)
    active = 26_620
    assert sparse["gaussian"] == active
    assert sparse["parameters"] == (4 * (2 * active + 410) + 4 * active) // 2
    assert sparse["optimizer"] == 4 * (active + 410) // 2
    assert sparse["reduce_scatter"] == 4 * (active + 410)
    (partial,) = json.loads(cli(*words, "--method", "pbn", "--share", 0.1).out)
    assert partial["gaussian"] == active
    assert partial["parameters"] == (4 * (266_200 + active + 410) + 4 * active) // 2
    assert partial["reduce_scatter"] == 4 * (266_200 + 410)


def test_the_table_has_a_line_for_each_number_of_processes(cli: Cli) -> None:
    title, head, *lines = cli("plan", "lenet-300-100", *IMAGES).out.splitlines()
    assert title == "lenet-300-100: 266,610 weights, 266,200 of them Gaussian"
    assert "memory each" in head
    assert max(map(len, (title, head, *lines))) <= 80
    assert [line.split()[0] for line in lines] == ["1", "8", "64"]


def test_wrong_numbers_of_processes(cli: Cli) -> None:
    output = cli("plan", "lenet-300-100", "--processes", 0, code=2)
    assert "at least 1" in output.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--share", 0.3), "--share is for --method ssvi or pbn"),
        (("--method", "ssvi", "--share", 0), "--share 0 must be a fraction above 0"),
        (("--method", "pbn", "--share", 1.5), "--share 1.5 must be a fraction above 0"),
    ],
)
def test_a_share_that_means_nothing_is_refused(cli: Cli, words: tuple[str | float, ...], said: str) -> None:
    assert said in cli("plan", "lenet-300-100", *IMAGES, *words, code=2).err


def test_the_share_is_that_of_the_gaussian_weights(cli: Cli) -> None:
    words = ("plan", "lenet-300-100", *IMAGES, "--method", "pbn", "--processes", 1, "--json")
    found = [json.loads(cli(*words, *share).out)[0]["gaussian"] for share in ((), ("--share", 0.05), ("--share", 0.5))]
    assert found[0] == found[1] == pytest.approx(found[2] / 10, abs=2)


def test_small_sizes_are_not_shown_as_zero(cli: Cli) -> None:
    line = cli("plan", "mlp", *IMAGES, "--processes", 64).out.splitlines()[-1]
    assert " kB " in line
    assert "0.0 MB" not in line
