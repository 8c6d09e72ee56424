"""The text of a mixture: what is read, and what is refused with an example."""

import pytest

from bert_jax.data.mixture import MixtureSpec, NamedFolder, is_mixture, parse_mixture
from bert_jax.errors import UserError


@pytest.mark.parametrize(
    ("text", "folders", "alpha"),
    [
        ("wiki=DIR:0.5,books=OTHER:0.5", [("wiki", "DIR", 0.5), ("books", "OTHER", 0.5)], None),
        (" wiki=gs://bucket/w:7, zh-Hant=a=b:2e1", [("wiki", "gs://bucket/w", 7), ("zh-Hant", "a=b", 20)], None),
        ("wiki=DIR:1", [("wiki", "DIR", 1.0)], None),
        ("de=gs://b/de,th=2024:alpha=0.3", [("de", "gs://b/de", None), ("th", "2024", None)], 0.3),
        ("de=DE,th=TH: alpha=0", [("de", "DE", None), ("th", "TH", None)], 0.0),
    ],
)
def test_sources_have_names_folders_and_weights_or_one_alpha(text, folders, alpha):
    assert parse_mixture(text, "data.mixture") == MixtureSpec(tuple(NamedFolder(*one) for one in folders), alpha)
    assert is_mixture(text)


@pytest.mark.parametrize("text", ["DIR", "./wiki=DIR", "gs://bucket/lang=de", "C:three", "shards/lang=de"])
def test_a_folder_is_not_taken_for_a_mixture(text):
    assert not is_mixture(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DIR:0.5,OTHER:0.5", "not of the form NAME=DIR:WEIGHT,NAME=DIR:WEIGHT, such as wiki=shards/wiki:0.7,"),
        ("wiki=DIR,books=OTHER", "not of the form"),
        ("wiki=DIR:0.5,books=OTHER", "not of the form"),
        ("wiki=DIR:0.5,", "not of the form"),
        ("wiki=:0.5", "not of the form"),
        ("wiki=DIR:half", "not of the form"),
        ("wiki=DIR:0.5,books=OTHER:alpha=0.3", "not of the form"),
        ("wiki=DIR:alpha=high", "not of the form"),
        ("wiki=DIR:0.5,wiki=OTHER:0.5", "names wiki twice"),
        ("wiki=DIR:0.5,books=OTHER:0", "the weight of books is 0. Use a positive number"),
        ("wiki=DIR:0.5,books=OTHER:-1", "the weight of books is -1"),
        ("wiki=DIR:nan", "the weight of wiki is nan"),
        ("wiki=DIR,books=OTHER:alpha=-1", "alpha is -1"),
        ("wiki=DIR,books=OTHER:alpha=inf", "alpha is inf"),
    ],
)
def test_an_invalid_mixture_is_refused_in_one_line(text, said):
    with pytest.raises(UserError) as caught:
        parse_mixture(text, "data.phases.9")
    assert said in str(caught.value) and str(caught.value).startswith("data.phases.9") and "\n" not in str(caught.value)
