"""The galleries of a report: examples that all methods get wrong, and those that only the plain network does."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from leanbayes.report.evaluated_run import EvaluatedRun
from leanbayes.report.figures.seed_lines import class_name
from leanbayes.report.gallery import Gallery, GalleryImage, Png

_SHOWN = 12  # images per gallery


def galleries(
    groups: Mapping[str, Sequence[EvaluatedRun]], plain: str, best: str, classes: Sequence[str]
) -> list[Gallery]:
    """Return the galleries of the first seed of each method.

    Args:
        groups: The runs of each method.
        plain: Name of the plain network, or "".
        best: Name of the method whose answers are shown first.
        classes: Names of the classes, or ().
    """
    firsts = {method: runs[0].evaluation for method, runs in groups.items()}
    if not any(found["mistakes"] for found in firsts.values()):  # segmentations, which each method has
        return [
            Gallery(one["title"], one["caption"], method, tuple(_image(image) for image in one["pictures"]))
            for method, found in firsts.items()
            for one in found.get("galleries", ())
        ]
    if len(groups) == 1:
        return [
            Gallery(one["title"], one["caption"], "", tuple(_image(image) for image in one["pictures"][:_SHOWN]))
            for one in firsts[best].get("galleries", ())
        ]
    return [gallery for gallery in _compared(firsts, plain, best, classes) if gallery.images]


def _compared(firsts: Mapping[str, Mapping[str, Any]], plain: str, best: str, classes: Sequence[str]) -> list[Gallery]:
    wrong = {method: _by_index(found["mistakes"]) for method, found in firsts.items()}
    pictures: dict[int, dict[str, Any]] = {}
    for evaluation in firsts.values():
        for one in evaluation.get("galleries", ()):
            pictures |= {image["index"]: image for image in one["pictures"]}
    in_all = [index for index in pictures if all(index in own for own in wrong.values())]
    named = list(dict.fromkeys(filter(None, (best, plain))))
    found = [
        Gallery(
            "All methods are wrong",
            "Test examples that every method gets wrong, those of the highest mean confidence first. Are they hard for "
            "you, too?",
            "",
            _answered(in_all, pictures, wrong, named, classes),
        )
    ]
    others = [own for method, own in wrong.items() if method != plain]
    if plain:
        only = [index for index in pictures if index in wrong[plain] and not any(index in own for own in others)]
        found.append(
            Gallery(
                "Only the plain network is wrong",
                "Its most confident mistakes among those that no other method makes.",
                "",
                _answered(only, pictures, {plain: wrong[plain]}, [plain], classes),
            )
        )
    return found


class _Mistake(NamedTuple):
    """A wrong answer to one test example."""

    truth: int
    answer: int
    confidence: float


def _by_index(mistakes: Mapping[str, Sequence[Any]]) -> dict[int, _Mistake]:
    """Return the wrong answers by the indices of their test examples."""
    columns = (mistakes.get(name, ()) for name in ("index", "truth", "answer", "confidence"))
    return {index: _Mistake(*rest) for index, *rest in zip(*columns, strict=True)}


def _answered(
    chosen: Sequence[int],
    pictures: Mapping[int, Mapping[str, Any]],
    wrong: Mapping[str, Mapping[int, _Mistake]],
    named: Sequence[str],
    classes: Sequence[str],
) -> tuple[GalleryImage, ...]:
    """Return the images of the most confident mistakes, with the answers of the named methods."""
    confidence = {index: sum(own[index].confidence for own in wrong.values()) for index in chosen}
    images = []
    for index in sorted(chosen, key=lambda index: -confidence[index])[:_SHOWN]:
        own = [(method, wrong[method][index]) for method in named]
        truth = class_name(classes, own[0][1].truth)
        answers = [f"{method}: {class_name(classes, of.answer)}, {of.confidence:.0%}" for method, of in own]
        pngs = tuple(Png(**one) for one in pictures[index]["pngs"])
        images.append(GalleryImage(pngs, "\n".join([f"is {truth}", *answers]), f"Test example {index}: {truth}."))
    return tuple(images)


def _image(values: Mapping[str, Any]) -> GalleryImage:
    return GalleryImage(tuple(Png(**one) for one in values["pngs"]), values["caption"], values["alt"])
