"""Identifies the language of a text by py3langid (Lui and Baldwin 2012; 97 languages), whose model is in its wheel."""

import functools
import importlib.util
from typing import Any

from bert_jax.command import UserError, install_hint

LONGEST = 4000  # characters that are read; more of them change nothing but the time


def check(languages: tuple[str, ...]) -> None:
    """Raises UserError for a language that is not identified, and without the package."""
    if not languages:
        return
    if importlib.util.find_spec("py3langid") is None:
        raise UserError(f"--languages needs a package that is not installed: {install_hint('clean')}")
    known = set(_identifier().labels)
    for language in languages:
        if language not in known:
            raise UserError(f"--languages: unknown language {language!r}; choose from {', '.join(sorted(known))}")


def identify(text: str) -> tuple[str, float]:
    """The most probable language of a text, as an ISO 639-1 code, and its probability."""
    language, probability = _identifier().classify(text[:LONGEST])
    return str(language), float(probability)


@functools.cache
def _identifier() -> Any:
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
