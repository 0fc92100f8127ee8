"""`leanbayes push RUN REPO`: share a run on the Hugging Face Hub, with a model card written from its evaluation."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from leanbayes.cli.console import line
from leanbayes.cli.evaluations import evaluation_of
from leanbayes.cli.options import RunFolder, parse
from leanbayes.cli.runs import TrainedRun, open_run
from leanbayes.core.json_values import json_text
from leanbayes.deploy.hub import upload, write_repository
from leanbayes.report.model_card import model_card

Repository = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REPO")]


@dataclass(frozen=True)
class PushOptions:
    """Share a run on the Hugging Face Hub: its model file, its record, and a model card written from its evaluation.

    A run that has no stored evaluation is evaluated first, as report does. The card says what the model is unsure
    about, its scores, data, method, cost and limits. lb.from_pretrained loads the model, and the downloaded folder is a
    run, which predict and serve open. Log in with hf auth login, or set HF_TOKEN.

    Attributes:
        run: folder of the run.
        repo: repository, such as me/digits. It is created if there is none.
        dry_run: write the files to this new folder, and upload nothing.
        private: make a new repository private.
        license: license of the model, such as apache-2.0.
        root: folder of the data sets. None means the environment variable LEANBAYES_DATA.
        device: where to evaluate. None means the GPU, if there is one.
        json: print JSON instead of a sentence.
    """

    run: RunFolder
    repo: Repository
    dry_run: Path | None = None
    private: bool = False
    license: str | None = None
    root: Path | None = None
    device: Literal["cpu", "cuda"] | None = None
    json: bool = False


def command(words: list[str]) -> Callable[[], None]:
    """Parse the arguments, and return the action."""
    options = parse(PushOptions, words, "push")
    return lambda: _push(options)


def _push(options: PushOptions) -> None:
    run = open_run(options.run, options.device)
    evaluated = evaluation_of(run, run.data(options.root), None, root=options.root, shown=not options.json)
    card = model_card(evaluated, run.model, options.repo, license=options.license)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.dry_run or Path(temporary)
        files = write_repository(folder, run.model, card, shared_record(run))
        address = None
        if options.dry_run is None:
            message = f"Upload {evaluated.method} on {run.record['config']['data']}"
            private = True if options.private else None
            address = upload(folder, options.repo, private=private, token=None, commit_message=message)
    if options.json:
        found = {"run": str(options.run), "repo": options.repo, "files": files, "address": address}
        print(json_text(found | {"folder": None if options.dry_run is None else str(options.dry_run)}))
    elif options.dry_run is not None:
        line(f"{options.dry_run}: {', '.join(files)}. Nothing was uploaded.")
    else:
        line(f"{options.run} is in {options.repo}: {address}")


def shared_record(run: TrainedRun) -> dict[str, Any]:
    """Return the record of a run without the folders of this machine."""
    config = run.record["config"]
    source = {**config["source"], "name": Path(config["source"]["name"]).name}
    return {**run.record, "config": {**config, "source": source}}
