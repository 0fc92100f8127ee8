"""The model card of an evaluated run: what it is unsure about, its scores, data, method, cost and limits."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leanbayes.core.arguments import checked
from leanbayes.deploy.hub import front_matter, policy_text, use_section
from leanbayes.methods.registry import describe_method
from leanbayes.model.bayesian import BayesianModel
from leanbayes.report.cells import writer
from leanbayes.report.columns import columns
from leanbayes.report.evaluated_run import OOD_SCORES, EvaluatedRun, best_ood_score
from leanbayes.report.verdicts import COST, verdicts_on

_TASKS = {  # names of the Hub, for images and for tables
    ("classification", True): "image-classification",
    ("segmentation", True): "image-segmentation",
    ("classification", False): "tabular-classification",
    ("regression", False): "tabular-regression",
}
_MOST_CONFUSIONS, _MOST_CLASSES = 3, 20


@checked()
def model_card(run: EvaluatedRun, bnn: BayesianModel, repo_id: str, *, license: str | None = None) -> str:
    """Write a model card from an evaluation, for `lb.push_to_hub`.

    The card begins with what the model is unsure about. Its scores are also in the metadata (model-index), which the
    Hub shows. It needs huggingface_hub (the extra "hub").

    Args:
        run: The evaluated run.
        bnn: Its model.
        repo_id: The repository of the model, such as "me/digits".
        license: The license of the model, as an identifier of the Hub such as "apache-2.0".

    Returns:
        The text of the card: Markdown with metadata.

    Raises:
        MissingPackageError: huggingface_hub is not installed.

    Example:
        >>> run = evaluate_for_report("mean-field", bnn, data)
        >>> lb.push_to_hub(bnn, "me/digits", card=model_card(run, bnn, "me/digits"))
    """
    settings = run.record["config"]
    task = _task(settings)
    score = best_ood_score([run])
    metrics = run.metrics(score)
    metadata = front_matter(
        repo_id,
        tags=[describe_method(bnn.method).partition(":")[0]],
        results=list(_results(settings["data"], task, metrics)),
        **({} if license is None else {"license": license}),
        **({} if task is None else {"pipeline_tag": task}),
    )
    sections = {
        "What it is unsure about": _unsure(run, bnn),
        "Scores": _scores(run, bnn, metrics, score),
        "Data": _data(settings),
        "Method": _method(run, bnn),
        "Cost": _cost(run, metrics),
        "Limits": "\n".join(f"- {sentence}" for sentence in _limits(run, bnn)),
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    named = "source" in settings  # a run of the command line
    return f"{metadata}\n# {repo_id.rpartition('/')[2]}\n\n{_summary(run)}\n\n{body}\n\n{use_section(repo_id, named)}"


def _task(settings: Mapping[str, Any]) -> str | None:
    """Return the Hub's name of the task, if the record says what the inputs are."""
    if "source" not in settings:
        return None
    return _TASKS.get((settings["source"]["task"], len(settings["model"]["input_shape"]) == 3))


def _results(data: str, task: str | None, metrics: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the scores on the test data and the AUROCs of OOD data, as the Hub stores results."""
    for column in columns([metrics]):
        value = metrics[column.key]
        if column.group in ("quality", "out of distribution") and column.key != "ood" and math.isfinite(value):
            yield {
                "task_type": task or "other",
                "dataset_type": data,
                "dataset_name": data,
                "dataset_split": "test",
                "metric_type": column.key.replace(":", "_auroc_"),
                "metric_name": column.title,
                "metric_value": value,
            }


def _summary(run: EvaluatedRun) -> str:
    settings = run.record["config"]
    network = settings["model"]["name"] if "model" in settings else "a custom network"
    version = run.record["versions"].get("leanbayes")
    by = f"leanbayes {version}" if version else "leanbayes"
    return f"{network}, trained on {settings['data']} with the method {run.method} of {by}."


def _unsure(run: EvaluatedRun, bnn: BayesianModel) -> str:
    answers = {one.question: one.answer for one in verdicts_on([run]) if one.question != COST}
    confused = _confusions(run)
    answers |= {"What does it confuse?": confused} if confused else {}
    answers["Which policy is in its file?"] = policy_text(bnn)
    return "\n".join(f"- **{question}** {answer}" for question, answer in answers.items())


def _confusions(run: EvaluatedRun) -> str:
    """Say which classes it takes for which others most often, from the mistakes on the test data."""
    mistakes, names = run.evaluation["mistakes"], run.record["config"]["classes"] or ()
    if "truth" not in mistakes or not mistakes["truth"]:
        return ""
    pairs = Counter(zip(mistakes["truth"], mistakes["answer"], strict=True))

    def name(label: int) -> str:
        return str(names[label]) if label < len(names) else str(label)

    found = [f"{name(true)} for {name(said)} ({count}×)" for (true, said), count in pairs.most_common(_MOST_CONFUSIONS)]
    total = len(mistakes["truth"])
    return f"It makes {total} mistakes on the test data. Most often it takes {', '.join(found)}."


def _scores(run: EvaluatedRun, bnn: BayesianModel, metrics: Mapping[str, float], score: str) -> str:
    rule = run.evaluation["settings"]["rule"] or bnn.rule
    samples = run.evaluation["costs"]["ours"]["samples"]
    how = f"Predictions have {samples} sample{'s' * (samples != 1)} (rule {rule})."
    ood = f" Unknown inputs are detected by {OOD_SCORES[score]}." if run.evaluation["ood"] else ""
    head = f"On {run.scores['examples']:,} test examples. {how}{ood}"
    return f"{head}\n\n{_table(metrics, ('quality', 'out of distribution', 'shift'))}"


def _table(metrics: Mapping[str, float], groups: Sequence[str]) -> str:
    shown = [(one, metrics[one.key]) for one in columns([metrics]) if one.group in groups]
    rows = [f"| {one.title} | {writer(one.form, [value])(value)} | {one.help} |" for one, value in shown]
    return "\n".join(["| metric | value | meaning |", "|---|---:|---|", *rows])


def _data(settings: Mapping[str, Any]) -> str:
    lines = [f"Trained on {settings['data']}."]
    if "source" in settings:
        share = settings["source"]["validation_share"]
        lines.append(f"{100 * share:g} % of the training data were held out, for all choices.")
        shape = "×".join(map(str, settings["model"]["input_shape"]))
        lines.append(f"An input has the shape {shape}.")
    classes = settings.get("classes")
    if classes:
        more = f" and {len(classes) - _MOST_CLASSES} more" if len(classes) > _MOST_CLASSES else ""
        lines.append(f"Classes: {', '.join(map(str, classes[:_MOST_CLASSES]))}{more}.")
    normalize = settings.get("normalize")
    if normalize:
        mean, std = (_numbers(normalize[name]) for name in ("mean", "std"))
        lines.append(f"Images with values from 0 to 1 are normalized by mean {mean} and std {std}.")
    elif (settings.get("scales") or {}).get("input_mean"):
        lines.append("Inputs and targets are standardized; run.json has their means and stds.")
    return " ".join(lines)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _method(run: EvaluatedRun, bnn: BayesianModel) -> str:
    about = (type(bnn.method).__doc__ or "").strip().splitlines()[0]
    weights = f"{bnn.posterior.random_weights:,} weights have a distribution." if bnn.posterior.random_weights else ""
    recipe = run.record["config"]["recipe"]
    trained = (
        f"It was trained for {recipe['epochs']} epochs with batches of {recipe['batch_size']}, at temperature "
        f"{recipe['temperature']:g}."
        if recipe
        else "It was trained in a custom loop."
    )
    return " ".join(filter(None, [about, weights, trained, f"Settings: `{bnn.method}`."]))


def _cost(run: EvaluatedRun, metrics: Mapping[str, float]) -> str:
    machine, version = run.record["machine"], run.record["versions"].get("torch")
    processor = ", ".join(machine.get("gpus") or [f"a CPU ({machine.get('processor', 'unknown')})"])
    where = [f"It was trained on {processor}, with torch {version}."] if machine and version else []
    head = [one.answer for one in verdicts_on([run]) if one.question == COST]
    return f"{' '.join([*head, *where])}\n\n{_table(metrics, ('cost', 'relative to plain'))}"


def _limits(run: EvaluatedRun, bnn: BayesianModel) -> Iterator[str]:
    yield "The scores hold for inputs like the test data. Other cameras, places or times need another evaluation."
    yield f"They are those of one training (seed {run.seed}). Another seed has slightly other ones."
    if not run.evaluation["ood"]:
        yield "It was not evaluated on unknown inputs, so it may be certain and wrong about them."
    if not run.evaluation["shifts"]:
        yield "It was not evaluated on corrupted or noisy inputs."
    if bnn.policy is None:
        yield "Nothing says when to ask a person. `lb.decide.fit` learns this from held-out data."
    else:
        yield "The promises of its policy hold for inputs like the held-out ones, not under a shift."
    yield "Its probabilities are not explanations: they say how sure the model is, not why."
