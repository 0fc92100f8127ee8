"""Methods by name: nested settings, and one clear sentence for an unknown name or setting."""

import dataclasses
import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from torch import nn

import leanbayes as lb
from leanbayes import methods
from leanbayes.core import config
from leanbayes.methods import METHODS, describe_method, get_method, parse_method
from leanbayes.model.method import Method
from leanbayes.rules import RULES, MomentPropagation
from leanbayes.training import Recipe


def error_of(text: str) -> str:
    with pytest.raises(lb.LeanBayesError) as caught:
        parse_method(text)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    return message


# -- by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_case_and_separators_of_a_name_do_not_matter(name: str) -> None:
    for written in (name, name.upper(), name.replace("-", "_"), name.title()):
        assert get_method(written) == METHODS[name]
        assert parse_method(written) == METHODS[name]


EXPORTED = [
    value
    for name in methods.__all__
    if isinstance(value := getattr(methods, name), type) and issubclass(value, Method) and value is not Method
]


@pytest.mark.parametrize("cls", EXPORTED)
def test_every_exported_method_is_registered_once(cls: type[Method]) -> None:
    names = [name for name, method in METHODS.items() if type(method) is cls]
    assert len(names) == 1
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", names[0])


def test_every_registered_method_is_exported() -> None:
    # The command line finds the name of a method by its type, so no two methods have the same.
    assert sorted(type(method).__name__ for method in METHODS.values()) == sorted(cls.__name__ for cls in EXPORTED)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_saved_and_has_a_summary_line(name: str) -> None:
    assert config.decode(config.encode(METHODS[name])) == METHODS[name]
    first = (type(METHODS[name]).__doc__ or "").splitlines()[0]
    assert first.endswith(".")
    assert not first.startswith(type(METHODS[name]).__name__ + "(")  # what a dataclass without a docstring has


CHOICES = [
    (type(settings), setting, get_args(hint)[0])
    for settings in (*METHODS.values(), MomentPropagation(), Recipe())
    for setting, hint in get_type_hints(type(settings)).items()
    if get_origin(hint) is Literal
]


@pytest.mark.parametrize(("kind", "setting", "known"), CHOICES)
def test_an_unknown_choice_raises_an_error(kind: type, setting: str, known: str) -> None:
    with pytest.raises(lb.LeanBayesError, match=rf"'knwon'.*: .*{known}.*[.?]$"):
        kind(**{setting: "knwon"})
    assert getattr(kind(**{setting: known}), setting) == known


def test_mc_dropout_has_a_rate_by_default() -> None:
    assert METHODS["mc-dropout"] == lb.MCDropout(0.1)  # the reference networks have no dropout


def test_settings_change_a_copy() -> None:
    method = get_method("mean-field", {"rule": "flipout", "prior": {"scale": 0.05}})
    assert method == lb.MeanField(prior=lb.Normal(0.05), rule="flipout")
    assert METHODS["mean-field"] == lb.MeanField()


@pytest.mark.parametrize(
    ("name", "named"), [("mean-feld", "mean-field"), ("ensembel", "ensemble"), ("dropout", "mc-dropout")]
)
def test_a_close_name_is_suggested(name: str, named: str) -> None:
    assert error_of(name) == f"There is no method {name!r}: did you mean {named}?"


def test_all_names_are_listed_if_none_is_close() -> None:
    text = error_of("zzz")
    assert all(name in text for name in METHODS)
    assert all(name in error_of("") for name in METHODS)


# -- types of settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lb.SSVI(density="5%"), "density='5%' must be a number."),  # type: ignore[arg-type]
        (lambda: lb.MeanField(samples=2.5), "samples=2.5 must be a whole number."),  # type: ignore[arg-type]
        (lambda: lb.MeanField(rule=5), "rule=5 must be a string."),  # type: ignore[arg-type]
        (lambda: lb.Normal([1.0]), "scale=[1.0] must be a number or 'auto' or 'fan_in' or 'std'."),  # type: ignore[arg-type]
        (lambda: lb.Normal("wide"), "scale='wide' is unknown: give a positive number, 'auto', 'fan_in' or 'std'."),  # type: ignore[arg-type]
        (lambda: lb.ScaleMixture(pi="half"), "pi='half' must be a number."),  # type: ignore[arg-type]
        (lambda: lb.Ensemble(members="5"), "members='5' must be a whole number."),  # type: ignore[arg-type]
        (lambda: lb.PBN(rate=None), "rate=None must be a number."),  # type: ignore[arg-type]
        (lambda: lb.MCDropout("high"), "rate='high' must be a number or None."),  # type: ignore[arg-type]
        (lambda: lb.RigL(interval="often"), "interval='often' must be a whole number."),  # type: ignore[arg-type]
        (lambda: lb.WeightSharing("all"), "components='all' must be a whole number or None."),  # type: ignore[arg-type]
        (lambda: lb.Recipe(seed="x"), "seed='x' must be a whole number."),  # type: ignore[arg-type]
        (lambda: lb.MeanField({"scale": 1.0}), "prior must be an instance such as lb.Normal(0.1)."),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_of_the_wrong_type_raises_an_error(make: Any, message: str) -> None:
    with pytest.raises(lb.LeanBayesError) as caught:
        make()
    assert str(caught.value) == message


SETTINGS = [
    (type(settings), field.name)
    for settings in (*METHODS.values(), lb.Normal(), lb.ScaleMixture(), MomentPropagation(), Recipe())
    for field in dataclasses.fields(settings)  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("kind", "setting"), SETTINGS)
@pytest.mark.parametrize("value", [object(), [1], "5%", {"a": 1}, b"1"], ids=lambda value: type(value).__name__)
def test_every_setting_rejects_objects_of_other_types(kind: Any, setting: str, value: Any) -> None:
    with pytest.raises(lb.LeanBayesError, match=setting):
        kind(**{setting: value})


def test_numpy_scalars_become_python_numbers() -> None:
    method = lb.MeanField(lb.Normal(np.float64(0.2)), np.float64(0.1), np.bool_(False), samples=np.int64(3))  # type: ignore[arg-type]
    assert method == lb.MeanField(lb.Normal(0.2), 0.1, False, samples=3)
    assert [type(value) for value in (method.init_std, method.relative, method.samples)] == [float, bool, int]
    assert config.decode(config.encode(method)) == method
    assert lb.Recipe(epochs=np.int64(3)).epochs == 3  # type: ignore[arg-type]


def test_a_file_with_settings_of_the_wrong_type_does_not_fit() -> None:
    stored = {**config.encode(lb.Ensemble()), "members": "5"}
    with pytest.raises(lb.errors.FileFormatError, match=r"Ensemble in the file.*members='5' must be a whole number\.$"):
        config.decode(stored)


# -- as text ----------------------------------------------------------------------------------------------------------

SPECS: dict[str, Method] = {
    "mean-field": lb.MeanField(),
    "mean-field:": lb.MeanField(),
    "mean-field:rule=flipout": lb.MeanField(rule="flipout"),
    "mean-field:rule=flipout,prior.scale=0.05": lb.MeanField(prior=lb.Normal(0.05), rule="flipout"),
    "mean-field: rule = local , samples = 3 ": lb.MeanField(rule="local", samples=3),
    "mean-field:init-std=1e-3,relative=False": lb.MeanField(init_std=1e-3, relative=False),
    "mean-field:relative=false": lb.MeanField(relative=False),
    "mean-field:relative=True": lb.MeanField(),
    "mean-field:prior.scale=fan_in,prior.gain=2": lb.MeanField(prior=lb.Normal("fan_in", gain=2)),
    "mean-field:prior.center=pretrained": lb.MeanField(prior=lb.Normal("auto", center="pretrained")),
    "mean-field:prior=ScaleMixture(),samples=3": lb.MeanField(prior=lb.ScaleMixture(), samples=3),
    "pbn:rate=0.1,prior=ScaleMixture(pi=0.3, wide=1.0),seed=2": lb.PBN(0.1, prior=lb.ScaleMixture(0.3, 1.0), seed=2),
    "ensemble:members=2,seed=7": lb.Ensemble(2, seed=7),
    "mc-dropout:rate=None": lb.MCDropout(),
    "mc-dropout:rate=none": lb.MCDropout(),
    "mc-dropout:rate=.25": lb.MCDropout(0.25),
}


@pytest.mark.parametrize("text", SPECS)
def test_settings_are_parsed_from_a_text(text: str) -> None:
    parsed = parse_method(text)
    assert parsed == SPECS[text]
    assert str(parsed) == str(SPECS[text])  # True == 1 and 2 == 2.0, but their types must match too


DESCRIBED: list[Method] = [
    *METHODS.values(),
    lb.MeanField(prior=lb.ScaleMixture(0.3, 2.0, 1e-3), rule="local", samples=5),
    lb.MeanField(prior=lb.Normal("fan_in", "pretrained", 2.0), relative=False),
    lb.MeanField(rule="moments:correlation=none,activations=paper", samples=5),
    lb.PBN.paper(),
    lb.SSVI.paper(),
    lb.VDP.paper(),
    lb.WeightSharing.paper(),
    lb.WeightSharing(components=None, prior=lb.ScaleMixture()),
    lb.MCDropout(),
]


@pytest.mark.parametrize("method", DESCRIBED, ids=describe_method)
def test_a_description_is_parsed_as_the_same_method(method: Method) -> None:
    assert parse_method(describe_method(method)) == method


MISTAKES: dict[str, tuple[str, ...]] = {
    "mean-field:rule": ("'rule'", "setting=value"),
    "mean-field:rule=flipout,samples": ("'samples'", "setting=value"),
    "mean-field:rool=flipout": ("'rool'", "rule"),
    "mean-field:sample=3": ("'sample'", "did you mean samples?"),
    "mean-field:rule=guess": ("'guess'", *RULES),
    "mean-field:samples=0": ("samples=0", "at least 1"),
    "mean-field:samples=many": ("samples='many'", "a whole number"),
    "mean-field:samples=3.5": ("samples=3.5", "a whole number"),
    "mean-field:samples=True": ("samples=True", "a whole number"),
    "mean-field:samples=None": ("samples=None", "a whole number"),
    "mean-field:samples=": ("samples=''", "a whole number"),
    "mean-field:init_std=-1": ("init_std=-1", "positive"),
    "mean-field:init_std=None": ("init_std=None", "a number"),
    "mean-field:init_std=[1]": ("init_std=[1]", "a number"),
    "mean-field:relative=maybe": ("relative='maybe'", "true or false"),
    "mean-field:relative=1": ("relative=1", "true or false"),
    "mean-field:prior=wide": ("prior", "lb.Normal"),
    "mean-field:prior=ScaleMixture(wid=1)": ("'wid'", "did you mean wide?"),
    "mean-field:prior=ScaleMixture(pi=2)": ("pi=2", "between 0 and 1"),
    "mean-field:prior=ScaleMixture(pi=": ("prior", "lb.Normal"),
    "mean-field:prior=ScaleMixture(0.3)": ("'0.3'", "mean-field:prior", "setting=value"),
    "mean-field:prior=Cauchy(scale=1)": ("prior", "lb.Normal"),
    "mean-field:prior.scale=wide": ("scale='wide'", "a number", "fan_in"),
    "mean-field:prior.skale=1": ("'skale'", "did you mean scale?"),
    "mean-field:prior.scale.deep=1": ("scale=", "deep"),
    "mean-field:rule.deep=1": ("rule=", "deep"),
    "deterministic:samples=3": ("samples", "it has engine"),
    "ensemble:members=0": ("members=0", "at least 1"),
    "ensemble:members=2.5": ("members=2.5", "a whole number"),
    "ensemble:members=two": ("members='two'", "a whole number"),
    "mc-dropout:rate=2": ("rate=2", "between 0 and 1"),
    "mc-dropout:rate=high": ("rate='high'", "a number or None"),
    "mean-field:rule=mean,rule=local": ("'rule'", "twice"),
    "mean-field:init-std=1,init_std=2": ("'init_std'", "twice"),
    "mean-field:rule=mean,rule.deep=1": ("'rule.deep'", "twice"),
    "mean-field:prior.scale=1,prior.gain=2,prior.scale=1": ("'prior.scale'", "twice"),
    "mean-field:prior=1,prior.scale=1": ("'prior.scale'", "twice"),
    "mean-field:prior.scale=1,prior=1": ("'prior'", "twice"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_an_invalid_setting_raises_an_error(text: str) -> None:
    message = error_of(text)
    for word in MISTAKES[text]:
        assert word in message


# -- change -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inner:
    depth: int = 1
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    table: Any = None
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise lb.LeanBayesError(f"share={self.share} must be between 0 and 1.")


def test_a_mapping_changes_nested_settings() -> None:
    assert config.change(Outer(), {}) == Outer()
    assert config.change(Outer(), {"inner": {"depth": 3}}) == Outer(Inner(3))
    assert config.change(Outer(Inner(2, "a")), {"inner": {"name": None}, "share": 1}) == Outer(Inner(2), share=1)
    assert config.change(Outer(), {"inner": Inner(5)}) == Outer(Inner(5))
    assert config.change(Outer(), {"inner": {"name": "b"}}) == Outer(Inner(1, "b"))


def test_a_mapping_is_the_value_of_a_plain_setting() -> None:
    assert config.change(Outer(), {"table": {"a": 1}}).table == {"a": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shore": 1}, "Outer has no setting 'shore': did you mean share?"),
        ({"zzz": 1}, "Outer has no setting 'zzz': it has inner, table, share."),
        ({7: 1}, "Outer has no setting 7: it has inner, table, share."),
        ({"inner": {"dept": 1}}, "Inner has no setting 'dept': did you mean depth?"),
        ({"share": 2}, "share=2 must be between 0 and 1."),
        ({"share": "half"}, "share='half' must be a number."),
        ({"share": True}, "share=True must be a number."),
        ({"share": {"a": 1}}, "share={'a': 1} must be a number."),
        ({"inner": {"depth": "deep"}}, "depth='deep' must be a whole number."),
        ({"inner": {"depth": 1.5}}, "depth=1.5 must be a whole number."),
        ({"inner": {"name": 3}}, "name=3 must be a string or None."),
    ],
)
def test_an_invalid_change_raises_an_error(settings: Any, message: str) -> None:
    with pytest.raises(lb.LeanBayesError) as caught:
        config.change(Outer(), settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": "x"},
        {"seed": 1.5},
        {"seed": None},
        {"seed": True},
        {"compile": 3},
        {"compile": "no"},
        {"channels_last": "no"},
        {"refresh_batchnorm": "no"},
        {"refresh_batchnorm": None},
        {"checkpoint_steps": 2.5},
        {"epochs": True},
        {"warmup": 1.5},
        {"lr": "fast"},
        {"lr": {"means": 1}},
        {"optimizer": "adam"},
        {"optimizer": None},
    ],
    ids=str,
)
def test_a_recipe_rejects_values_of_the_wrong_type(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(lb.LeanBayesError) as caught:
        Recipe().changed(settings)
    message = str(caught.value)
    unknown = message == "optimizer='adam' is unknown: did you mean adamw?"
    assert unknown or (message.startswith(f"{name}={value!r} must be ") and message.endswith("."))
    assert "\n" not in message


def test_a_temperature_is_for_methods_whose_posterior_has_a_kl() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    for name, method in METHODS.items():
        if name in ("pbn", "laplace", "std-search"):  # these have no std until data choose it
            assert method.has_temperature == (name == "pbn")
            continue
        bnn = lb.bayesianize(network, lb.MCDropout(rate=0.1) if name == "mc-dropout" else method)
        assert method.has_temperature == bool(bnn.kl() != 0), name
