"""Sequences of rows as text, with the label of each masked token."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bert_jax.array_types import Integer
from bert_jax.data.example import Rows
from bert_jax.reporting.document import Excerpt, Fragment
from bert_jax.tokenizer import Tokenizer

# WordPiece vocabularies do not say which marks follow a word without a space.
_NO_SPACE_BEFORE = set(",.;:!?)]}%”’'…")


def excerpts(rows: Rows, numbers: Sequence[int], tokenizer: Tokenizer, labels: Mapping[int, str]) -> Iterator[Excerpt]:
    """Every sequence of some rows, which have these numbers, with their masks where the rows have any."""
    width = rows.input_ids.shape[1]
    for row, lengths in enumerate(rows.sequence_lengths.astype(int).tolist()):
        start = 0
        predicted = _predicted(rows, row)
        for sequence, length in enumerate(lengths):
            if not length:
                continue
            middle, end = start + int(rows.first_segment_lengths[row, sequence]), start + length
            segments = {"A": (start, middle), "B": (middle, end)}
            key, label = int(rows.sequence_keys[row, sequence]), int(rows.next_sentence_labels[row, sequence])
            yield Excerpt(
                heading=f"row {numbers[row]:,}",
                detail=f"key {key >> 32:#x}:{key & 0xFFFFFFFF}, {length} of {width} tokens",
                label=labels.get(label, str(label)),
                paragraphs={
                    name: list(_fragments(rows.input_ids[row], predicted, first, last, tokenizer))
                    for name, (first, last) in segments.items()
                    if first < last
                },
            )
            start = end


def _predicted(rows: Rows, row: int) -> dict[int, int]:
    """The label of each predicted position of a row."""
    if rows.masked_positions is None or rows.masked_ids is None or rows.masked_counts is None:
        return {}
    real = int(rows.masked_counts[row])
    return dict(zip(rows.masked_positions[row, :real].tolist(), rows.masked_ids[row, :real].tolist(), strict=True))


def _fragments(
    ids: Integer[np.ndarray, "T"], predicted: Mapping[int, int], first: int, last: int, tokenizer: Tokenizer
) -> Iterator[Fragment]:
    """The positions [first, last), in runs of one kind: tokens are decoded together, so that words are whole."""
    special = set(tokenizer.special_ids)

    def kind(position: int) -> str:
        seen = int(ids[position])
        if position not in predicted:
            return "special" if seen in special else "plain"
        return "masked" if seen == tokenizer.mask_id else "kept" if seen == predicted[position] else "random"

    begin = first
    while begin < last:
        end = begin + 1
        while end < last and kind(end) == kind(begin):
            end += 1
        seen = [int(token) for token in ids[begin:end]]
        labels = [predicted.get(position, token) for position, token in zip(range(begin, end), seen, strict=True)]
        label = _decode(labels, tokenizer)
        # After [CLS] or [SEP] a new word begins; after [MASK] and [UNK] the same word may continue.
        joined = begin > first and int(ids[begin - 1]) not in special - {tokenizer.mask_id, tokenizer.unk_id}
        joined = joined and bool(tokenizer.continuation[labels[0]] or (label and label[0] in _NO_SPACE_BEFORE))
        yield Fragment(label if seen == labels else _decode(seen, tokenizer), kind(begin), label, joined)  # type: ignore[arg-type]
        begin = end


def _decode(ids: list[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(ids).strip().removeprefix("##")
