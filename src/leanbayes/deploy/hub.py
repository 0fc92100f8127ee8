"""Share models on the Hugging Face Hub.

A repository has the model file, a model card, and what rebuilds the network: for runs of the command line their record,
which names it, and for classes with `HubMixin` the arguments of their constructor. None of these files holds code, and
nothing else is ever downloaded.
"""

import contextlib
import inspect
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torch import nn

from leanbayes.core.arguments import checked
from leanbayes.core.files import reason_of, written_whole
from leanbayes.core.json_values import check_shape, json_text, read_untrusted
from leanbayes.core.version import __version__
from leanbayes.deploy.header import one_line
from leanbayes.deploy.loading import load
from leanbayes.deploy.model_file import save
from leanbayes.errors import FileFormatError, LeanBayesError, missing_package
from leanbayes.model.bayesian import BayesianModel
from leanbayes.networks.recorded import rebuild

MODEL, RECORD, CONFIG, CARD = "model.safetensors", "run.json", "config.json", "README.md"
TAGS = ("bayesian", "uncertainty")
_NETWORK = {"config": {"model": {"name": str, "input_shape": [int], "outputs": int, "options": {str: Any}}}}


@checked()
def push_to_hub(
    bnn: BayesianModel,
    repo_id: str,
    *,
    card: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str = "Upload a leanbayes model",
) -> str:
    """Upload a model to the Hugging Face Hub, as a safetensors file with its policy and a model card.

    It needs huggingface_hub (the extra "hub"). For a run of the command line use `leanbayes push`, which also uploads
    what rebuilds the network.

    Args:
        bnn: The model.
        repo_id: The repository, such as "me/digits". It is created if there is none.
        card: The model card, such as `leanbayes.report.model_card` writes it from an evaluation. None means a short
            card that says that the model was not evaluated.
        private: Whether a new repository is private. None means the default of its owner.
        token: An access token. None means the one that `hf auth login` stored, or the environment variable HF_TOKEN.
        commit_message: The message of the commit.

    Returns:
        The address of the commit.

    Raises:
        MissingPackageError: huggingface_hub is not installed.
        LeanBayesError: The Hub cannot be reached or refuses the upload, or the model cannot be saved.

    Example:
        >>> from leanbayes.report import evaluate_for_report, model_card
        >>> run = evaluate_for_report("mean-field", bnn, data)
        >>> lb.push_to_hub(bnn, "me/digits", card=model_card(run, bnn, "me/digits"))
    """
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), bnn, card or _short_card(bnn, repo_id))
        return upload(Path(folder), repo_id, private=private, token=token, commit_message=commit_message)


@checked()
def from_pretrained(
    repo: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
) -> BayesianModel:
    """Load a model that `lb.push_to_hub` or `leanbayes push` uploaded.

    Nothing in a repository is executed: only its model file and the record of its run are downloaded. A network that
    the record names is built as `leanbayes predict` builds it, from a list of known names and options.

    Args:
        repo: A repository on the Hugging Face Hub, such as "me/digits", or a folder with the same files.
        model: A network of the same architecture. Its weights do not matter, and it is not changed. None means the
            network that the repository names, if it holds a run of the command line.
        revision: A branch, tag or commit. None means the latest one.
        token: An access token. None means the one that `hf auth login` stored, or the environment variable HF_TOKEN.

    Returns:
        The Bayesian model, bit-equal to the one that was uploaded, in evaluation mode.

    Raises:
        MissingPackageError: huggingface_hub is not installed, and the repository is not a folder.
        LeanBayesError: The repository cannot be downloaded, or does not name its network.
        FileFormatError: The model file is missing, damaged, or from another network.

    Example:
        >>> bnn = lb.from_pretrained("me/digits", make_network())
        >>> prediction = bnn.predict(x)
    """
    folder = Path(repo) if os.path.isdir(repo) else _downloaded(str(repo), revision, token)
    return load(folder / MODEL, _recorded_network(folder, repo) if model is None else model).eval()


class HubMixin:
    """Makes the class of a network rebuild it from the Hugging Face Hub: put it before `nn.Module` in the bases.

    The arguments of the constructor are uploaded with the model, so they must be JSON values: numbers, strings, lists,
    dicts, booleans or None. Whoever loads the model needs the class, and no arguments.

    Example:
        >>> class Net(lb.HubMixin, nn.Module):
        ...     def __init__(self, width: int = 8) -> None:
        ...         super().__init__()
        ...         self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
        ...
        ...     def forward(self, x):
        ...         return self.layers(x)
        >>> bnn = lb.bayesianize(Net(width=16), lb.MeanField())
        >>> Net.push_to_hub(bnn, "me/net")
        >>> bnn = Net.from_pretrained("me/net")  # it has the width 16
    """

    _hub_settings: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments."""
        network = super().__new__(cls)
        with contextlib.suppress(TypeError):  # the constructor says what is wrong, and a copy is made without arguments
            bound = inspect.signature(cls).bind(*args, **kwargs)
            vars(network)["_hub_settings"] = dict(bound.arguments)
        return network

    push_to_hub = staticmethod(push_to_hub)

    @classmethod
    def from_pretrained(
        cls, repo: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
    ) -> BayesianModel:
        """Load a model whose network is of this class, as `lb.from_pretrained` does for a network that you pass.

        Args:
            repo: A repository on the Hugging Face Hub, such as "me/net", or a folder with the same files.
            revision: A branch, tag or commit. None means the latest one.
            token: An access token. None means the one that `hf auth login` stored, or that of the environment variable
                HF_TOKEN.

        Returns:
            The Bayesian model, bit-equal to the one that was uploaded, in evaluation mode.

        Raises:
            LeanBayesError: The repository cannot be downloaded, or has no arguments for this class.
            FileFormatError: A file is missing, damaged, or from another network.
        """
        folder = Path(repo) if os.path.isdir(repo) else _downloaded(str(repo), revision, token)
        try:
            settings = read_untrusted(folder / CONFIG)
            check_shape(settings, {str: Any})
            inspect.signature(cls).bind(**settings)
        except OSError:
            raise LeanBayesError(
                f"{repo} has no {CONFIG}, so it was not uploaded from a class with lb.HubMixin: use "
                "lb.from_pretrained(repo, network)."
            ) from None
        except (ValueError, TypeError) as error:
            raise FileFormatError(
                f"The {CONFIG} of {repo} has no arguments for {cls.__name__} ({one_line(error)}): use "
                "lb.from_pretrained(repo, network)."
            ) from None
        network = cls(**settings)
        assert isinstance(network, nn.Module)
        return load(folder / MODEL, network).eval()


def _constructor_settings(bnn: BayesianModel) -> str | None:
    """Return the arguments of the network's constructor as JSON, or None if its class does not keep them."""
    network = next((module for module in bnn.network.modules() if isinstance(module, HubMixin)), None)
    if network is None:
        return None
    settings = vars(network)["_hub_settings"]
    try:
        inspect.signature(type(network)).bind(**settings)
        return json.dumps(settings, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError):
        raise LeanBayesError(
            f"The arguments of {type(network).__name__} ({', '.join(settings)}) cannot be stored: pass JSON values by "
            "name (numbers, strings, lists or dicts), or leave out lb.HubMixin."
        ) from None


def write_repository(
    folder: Path, bnn: BayesianModel, card: str, record: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Write the files of a repository to an empty folder, and return their sizes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise LeanBayesError(f"{folder} is not empty: give a new folder.")
    except OSError as error:
        raise LeanBayesError(f"Cannot write to {folder} ({reason_of(error)}): give a new folder.") from None
    texts = {CARD: card} if record is None else {CARD: card, RECORD: json_text(record) + "\n"}
    settings = _constructor_settings(bnn)
    if settings is not None:
        texts[CONFIG] = settings
    save(bnn, folder / MODEL)
    for name, text in texts.items():
        with written_whole(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return {name: (folder / name).stat().st_size for name in (MODEL, *texts)}


def upload(folder: Path, repo_id: str, *, private: bool | None, token: str | None, commit_message: str) -> str:
    """Upload a folder as the next commit of a repository, and return the address of the commit."""
    hub = _hub("Uploading a model")
    with _one_sentence(f"{repo_id!r} cannot be uploaded", "check its name, `hf auth login` and your connection"):
        api = hub.HfApi(token=token, library_name="leanbayes", library_version=__version__)
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # with the user's name, if it had none
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message=commit_message).commit_url)


def front_matter(
    repo_id: str, *, tags: Sequence[str] = (), results: Sequence[Mapping[str, Any]] = (), **rest: Any
) -> str:
    """Return the metadata of a model card, as the Hub reads them; each result has the fields of its EvalResult."""
    hub = _hub("Writing a model card")
    name = repo_id.rpartition("/")[2]
    metrics = {"model_name": name, "eval_results": [hub.EvalResult(**one) for one in results]} if results else {}
    values = hub.ModelCardData(library_name="leanbayes", tags=[*TAGS, *tags], **metrics, **rest)
    return f"---\n{values.to_yaml().strip()}\n---\n"


def use_section(repo_id: str, named: bool) -> str:
    """Return the part of a model card that says how to use the model. A run of the command line names its network."""
    network = "" if named else ", make_network()"
    more = f"""Or with the command line:

```
hf download {repo_id} --local-dir {repo_id.rpartition("/")[2]}
leanbayes serve {repo_id.rpartition("/")[2]}    # a page in the browser; predict takes files
```"""
    about = "`make_network` builds the network that was trained; its weights do not matter."
    return f"""## Use

```python
import leanbayes as lb

bnn = lb.from_pretrained("{repo_id}"{network})
prediction = bnn.predict(x)  # x is prepared as in training
if bnn.policy is not None:
    print(bnn.policy(prediction).verdict)  # "answer", or "ask a person" and why
```

{more if named else about}

Nothing in this repository is executed: the model is a safetensors file, and loading it needs no pickle.
"""


def policy_text(bnn: BayesianModel) -> str:
    """Return what a model card says about the policy of a model."""
    if bnn.policy is None:
        return "It has no policy, so it answers every input, and never says when to ask a person."
    return str(bnn.policy)


def _short_card(bnn: BayesianModel, repo_id: str) -> str:
    return f"""{front_matter(repo_id)}
# {repo_id.rpartition("/")[2]}

A neural network that was trained with `lb.{type(bnn.method).__name__}`, and saved by leanbayes {__version__}.

## What it is unsure about

{policy_text(bnn)}

**It was uploaded without an evaluation**, so this card cannot say how accurate or how well calibrated it is.
Evaluate it on your own data before you rely on it.

{use_section(repo_id, named=False)}"""


def _recorded_network(folder: Path, repo: str | os.PathLike[str]) -> nn.Module:
    """Build the network that the record of a run names."""
    try:
        record = read_untrusted(folder / RECORD)
        check_shape(record, _NETWORK)
        model = record["config"]["model"]
        size = (folder / MODEL).stat().st_size
    except OSError:
        raise LeanBayesError(
            f"{repo} has no {RECORD} or no {MODEL}, so it does not name its network: give a network of the same "
            "architecture as model=."
        ) from None
    except ValueError as error:
        raise FileFormatError(
            f"The {RECORD} of {repo} does not name a network ({one_line(error)}): give a network of the same "
            "architecture as model=."
        ) from None
    return rebuild(model["name"], model["input_shape"], model["outputs"], model["options"], file_bytes=size)


def _downloaded(repo_id: str, revision: str | None, token: str | None) -> Path:
    hub = _hub("Downloading a model")
    remedy = "give a folder, or check the name, `hf auth login` and your connection"
    with _one_sentence(f"{repo_id!r} is no folder, and cannot be downloaded", remedy):
        return Path(
            hub.snapshot_download(repo_id, revision=revision, token=token, allow_patterns=[MODEL, RECORD, CONFIG])
        )


def _hub(what: str) -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise missing_package(f"{what} needs huggingface_hub", "hub") from None
    return huggingface_hub


@contextlib.contextmanager
def _one_sentence(what: str, remedy: str) -> Iterator[None]:
    """Replace errors of the Hub, which have many lines, by one sentence."""
    try:
        yield
    except Exception as error:  # those of HTTP libraries too, which differ between versions
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise LeanBayesError(f"{what} ({one_line(first).rstrip('.')}): {remedy}.") from None
