"""Rows as a person reads them: words again, and beside each masked one what stood there."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bert_jax.array_types import Integer
from bert_jax.data.example import Rows
from bert_jax.tokenizer import Tokenizer

State = Literal["plain", "special", "masked", "random", "kept"]

# Where a vocabulary does not say which tokens follow without a space (WordPiece), these do.
_NO_SPACE_BEFORE = set(",.;:!?)]}%”’'…")


@dataclass(frozen=True)
class Piece:
    """Tokens side by side that are alike: `seen` is what the model sees, `truth` what it should say."""

    seen: str
    truth: str
    state: State
    joined: bool  # whether it follows what is before it without a space


@dataclass(frozen=True)
class Shown:
    """A sequence of a row."""

    row: int
    key: int
    slots: int
    label: int
    segments: dict[str, list[Piece]]  # A, and B where there is one


def shown_rows(rows: Rows, tokenizer: Tokenizer) -> Iterator[Shown]:
    """Every sequence of some rows; masks where the rows have any."""
    for row, lengths in enumerate(rows.sequence_lengths.astype(int).tolist()):
        start = 0
        truths = _truths(rows, row)
        for sequence, length in enumerate(lengths):
            if not length:
                continue
            middle, end = start + int(rows.first_segment_lengths[row, sequence]), start + length
            spans = {"A": (start, middle), "B": (middle, end)}
            yield Shown(
                row,
                int(rows.sequence_keys[row, sequence]),
                length,
                int(rows.next_sentence_labels[row, sequence]),
                {
                    name: list(_pieces(rows.input_ids[row], truths, first, last, tokenizer))
                    for name, (first, last) in spans.items()
                    if first < last
                },
            )
            start = end


def plain_text(pieces: list[Piece]) -> str:
    """Pieces as one line; a predicted one in braces, {[MASK]: cat}."""
    text = ""
    for piece in pieces:
        words = piece.seen if piece.state in ("plain", "special") else f"{{{piece.seen}: {piece.truth}}}"
        text += words if piece.joined or not text else f" {words}"
    return text


def _truths(rows: Rows, row: int) -> dict[int, int]:
    """What stood in each predicted slot of a row."""
    if rows.masked_positions is None or rows.masked_ids is None or rows.masked_counts is None:
        return {}
    real = int(rows.masked_counts[row])
    return dict(zip(rows.masked_positions[row, :real].tolist(), rows.masked_ids[row, :real].tolist(), strict=True))


def _pieces(
    ids: Integer[np.ndarray, "T"], truths: dict[int, int], first: int, last: int, tokenizer: Tokenizer
) -> Iterator[Piece]:
    """Slots [first, last) in runs of one state."""

    def state(slot: int) -> State:
        seen = int(ids[slot])
        if slot not in truths:
            return "special" if seen in special else "plain"
        return "masked" if seen == tokenizer.mask_id else "kept" if seen == truths[slot] else "random"

    special = set(tokenizer.special_ids)
    begin = first
    while begin < last:
        kind, end = state(begin), begin + 1
        while end < last and state(end) == kind:
            end += 1
        seen = [int(token) for token in ids[begin:end]]
        truth = [truths.get(slot, token) for slot, token in zip(range(begin, end), seen, strict=True)]
        text = _text(truth, tokenizer)
        joined = begin > first and int(ids[begin - 1]) not in special - {tokenizer.mask_id, tokenizer.unk_id}
        joined = joined and bool(tokenizer.continuation[truth[0]] or (text[:1] in _NO_SPACE_BEFORE and text))
        yield Piece(text if seen == truth else _text(seen, tokenizer), text, kind, joined)
        begin = end


def _text(ids: list[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(ids).strip().removeprefix("##")
