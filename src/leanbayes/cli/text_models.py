"""A text classifier in a folder: a model file of `lb.save` beside the config and the tokenizer of transformers."""

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes.cli.predict import PredictOptions, class_row, prediction_of
from leanbayes.cli.runs import MODEL
from leanbayes.deploy.header import one_line
from leanbayes.deploy.loading import load
from leanbayes.errors import LeanBayesError, missing_package
from leanbayes.model.bayesian import BayesianModel

_TOKENIZER = "tokenizer_config.json"  # every tokenizer of transformers writes it
_LOCAL = {"local_files_only": True, "trust_remote_code": False}  # no download, and no code of the folder


@dataclass(frozen=True)
class TextModel:
    """A Bayesian text classifier and its tokenizer."""

    folder: Path
    model: BayesianModel
    tokenizer: Any
    config: Any

    @property
    def title(self) -> str:
        """The name of the folder, and the architecture."""
        return f"{self.folder.resolve().name}, {self.config.model_type}"

    def predict(self, text: str, options: PredictOptions) -> dict[str, Any]:
        """Return the label of a text, its uncertainty, and the verdict if the model has a policy."""
        if not text.strip():
            raise LeanBayesError("The text is empty: write one.")
        longest = min(self.tokenizer.model_max_length, getattr(self.config, "max_position_embeddings", None) or 512)
        tokens = len(self.tokenizer(text, verbose=False)["input_ids"])
        encoded = self.tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
        inputs: dict[str, Tensor] = {name: value.to(self.model.device) for name, value in encoded.items()}
        prediction, decision = prediction_of(self.model, inputs, options)
        names = [str(self.config.id2label[place]) for place in range(self.config.num_labels)]
        cut = {"cut": f"only the first {longest} of {tokens} tokens were read"} if tokens > longest else {}
        return {"text": "the text", **class_row(prediction, decision, names, self.folder), **cut}


def is_text_model(folder: Path) -> bool:
    """Whether a folder holds a tokenizer, which no run of the command line does."""
    return (folder / _TOKENIZER).is_file()


def open_text_model(folder: Path, network: str | None, device: str | None) -> TextModel:
    """Open the folder of a text classifier. `network` names a function that builds the network, as "module:function".

    Without one, the network is the classifier that the config describes.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise missing_package("A text classifier needs transformers", "text") from None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)
        built = (
            transformers.AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
            if network is None
            else _built(network)
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        if isinstance(error, LeanBayesError):
            raise
        raise LeanBayesError(
            f"transformers cannot open {folder} ({one_line(error)}): save the config and the tokenizer of the "
            "classifier there with their save_pretrained."
        ) from None
    bnn = load(folder / MODEL, built).eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return TextModel(folder, bnn, tokenizer, config)


def _built(name: str) -> nn.Module:
    """Call the function that a user names, in a module of the current folder or of an installed package."""
    module, colon, function = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), function)):
        raise LeanBayesError(f"--network {name!r} must be MODULE:FUNCTION, such as reviews:make_network.")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ModuleNotFoundError, AttributeError) as error:
        raise LeanBayesError(f"--network {name} cannot be used ({error}): check the names.") from None
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(made, nn.Module):
        raise LeanBayesError(f"--network {name} returned {type(made).__name__}: it must return a torch.nn.Module.")
    return made
