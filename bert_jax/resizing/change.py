"""A new vocabulary for a model, and where its rows come from."""

from typing import NamedTuple

from bert_jax.tokenization.tokenizer_spec import TokenizerSpec


class VocabularyChange(NamedTuple):
    """A vocabulary that replaces another one.

    spec      the new vocabulary
    sources   for each of its ids, the ids of the old vocabulary whose mean its rows are; a token that stays has one
    """

    spec: TokenizerSpec
    sources: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, old: TokenizerSpec, new: TokenizerSpec, added: dict[str, tuple[int, ...]] | None = None
    ) -> "VocabularyChange":
        """The change between two vocabularies, of which tokens with the same string are the same.

        added   the sources of the tokens that only the new vocabulary has
        """
        ids = {token: (index,) for index, token in enumerate(old.all_tokens())}
        known = ids | (added or {})
        return cls(new, tuple(known[token] for token in new.all_tokens()))
