"""Galleries: what all methods get wrong, and what only the plain network does."""

from evaluated_cases import changed, picture, run

from leanbayes.report import EvaluatedRun, Gallery, document_of


def with_mistakes(method: str, wrong: dict[int, float], seed: int = 0) -> EvaluatedRun:
    """A run with wrong answers of some confidence, and their pictures."""
    indices = sorted(wrong, key=lambda index: -wrong[index])
    found = {
        "index": indices,
        "truth": [index % 6 for index in indices],
        "answer": [(index + 1) % 6 for index in indices],
        "confidence": [wrong[index] for index in indices],
    }
    one = changed(run(method, seed), "evaluation", "mistakes", value=found)
    gallery = {"title": "Most confident mistakes", "caption": "C", "pictures": [picture(index) for index in indices]}
    return changed(one, "evaluation", "galleries", value=[gallery])


def shown(*some: EvaluatedRun) -> dict[str, Gallery]:
    return {gallery.title: gallery for gallery in document_of(some).galleries}


def numbers(gallery: Gallery) -> list[int]:
    return [int(image.alt.split()[2].rstrip(":")) for image in gallery.images]


def test_galleries_compare_the_mistakes_of_all_methods() -> None:
    plain = with_mistakes("deterministic", {3: 0.9, 5: 0.8, 7: 0.95, 8: 0.6, 9: 0.7})
    other = with_mistakes("mean-field", {3: 0.5, 5: 0.9, 11: 0.99})
    third = with_mistakes("ensemble", {3: 0.4, 5: 0.6, 8: 0.5})
    found = shown(plain, other, third)
    assert list(found) == ["All methods are wrong", "Only the plain network is wrong"]
    assert numbers(found["All methods are wrong"]) == [5, 3]  # mean confidence 0.77 and 0.6
    assert numbers(found["Only the plain network is wrong"]) == [7, 9]
    first = found["All methods are wrong"].images[0]
    best = document_of((plain, other, third)).chosen
    confidence = {"mean-field": "90%", "ensemble": "60%"}[best]
    assert first.caption == f"is five\n{best}: zero, {confidence}\ndeterministic: zero, 80%"
    assert found["Only the plain network is wrong"].images[0].caption == "is one\ndeterministic: two, 95%"
    assert all(gallery.method == "" for gallery in found.values())


def test_only_the_first_seed_is_shown_and_at_most_twelve_images() -> None:
    some = [
        with_mistakes(method, {index: 0.9 - 0.01 * index for index in range(30)}, seed)
        if seed == 0
        else with_mistakes(method, {}, seed)
        for method in ("deterministic", "mean-field")
        for seed in (0, 1)
    ]
    found = shown(*some)
    assert list(found) == ["All methods are wrong"]
    assert numbers(found["All methods are wrong"]) == [*range(12)]


def test_one_method_shows_its_most_confident_mistakes() -> None:
    found = shown(with_mistakes("mean-field", {index: 0.9 - 0.01 * index for index in range(20)}))
    (gallery,) = found.values()
    assert gallery.title == "Most confident mistakes"
    assert [image.caption for image in gallery.images] == [f"caption {index}" for index in range(12)]


def test_without_a_plain_network_only_common_mistakes_are_shown() -> None:
    found = shown(with_mistakes("a", {1: 0.5, 2: 0.6}), with_mistakes("b", {2: 0.6}))
    assert {title: numbers(gallery) for title, gallery in found.items()} == {"All methods are wrong": [2]}
    assert shown(with_mistakes("a", {1: 0.5}), with_mistakes("b", {2: 0.6})) == {}


def test_segmentations_are_shown_for_each_method() -> None:
    some = [
        changed(changed(one, "evaluation", "mistakes", value={}), "evaluation", "galleries", value=galleries)
        for one in (run("a"), run("b"))
        for galleries in [[{"title": "Segmentations", "caption": "C", "pictures": [picture(4)]}]]
    ]
    assert [(one.title, one.method) for one in document_of(some).galleries] == [
        ("Segmentations", "a"),
        ("Segmentations", "b"),
    ]
