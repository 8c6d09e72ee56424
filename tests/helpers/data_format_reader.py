"""A reader of build_examples outputs written from docs/data_format.md alone: struct and json, no Arrow, no numpy.

It stands for a reader in another language, so it imports nothing of ours and is slow.
"""

import functools
import hashlib
import itertools
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15


@dataclass
class Sequence:
    """A sequence of a row, by the columns of its shard."""

    start: int
    length: int
    first_length: int
    label: int
    key: int


@dataclass
class Row:
    ids: list[int]
    sequences: list[Sequence]
    predicted: dict[int, int] = field(default_factory=dict)  # position to label; static masks only


class Output:
    """DIR: manifest, tokenizer facts, and rows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_bytes())
        library = json.loads((directory / "tokenizer" / "tokenizer.json").read_bytes())
        self.special = {token["id"] for token in library["added_tokens"] if token["special"]}
        roles = json.loads((directory / "tokenizer" / "special_tokens_map.json").read_bytes())
        ids = {token["content"]: token["id"] for token in library["added_tokens"]}
        self.mask, self.pad = (ids[_text_of(roles[role])] for role in ("mask_token", "pad_token"))
        sentence_piece = any((directory / "tokenizer").glob("*.model"))
        self.inside = _insides(library, sentence_piece) - self.special
        scripts = self.manifest["masking"].get("words") == "scripts"
        self.unspaced, self.attached = _of_scripts(library, sentence_piece) if scripts else (set(), set())
        self.unspaced -= self.special
        self.attached &= self.inside
        self.ordinary = [
            index for index in range(self.manifest["tokenizer"]["vocab_size"]) if index not in self.special
        ]

    def random_token(self, kind: str, value: int) -> int:
        if kind == "uniform":
            return self.ordinary[value * len(self.ordinary) >> 32]
        counts = self.unigram_counts()
        total, running = sum(counts[index] for index in self.ordinary), 0
        for index in self.ordinary:
            running += counts[index]
            if running * 2**32 // total > value:
                return index
        raise AssertionError(value)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (one output at a time)
    def unigram_counts(self) -> list[int]:
        """An .npy file: magic, version, the length of a header, the header, numbers."""
        content = (self.directory / self.manifest["unigram_counts"]).read_bytes()
        begin = 10 + _read("<H", content, 8)
        assert content[:8] == b"\x93NUMPY\x01\x00" and b"'<i8'" in content[10:begin]
        return list(struct.unpack(f"<{(len(content) - begin) // 8}q", content[begin:]))

    def rows(self, part: str) -> Iterator[Row]:
        table = (self.directory / self.manifest["shards"]["table"]).read_bytes()
        assert hashlib.sha256(table).hexdigest() == self.manifest["shards"]["sha256"]
        shards = arrow_columns(table)
        assert len(shards["name"]) == self.manifest["shards"]["count"]
        listed = [shards[key] for key in ("name", "rows", "bytes", "sha256")]
        for name, count, size, digest in zip(*listed, strict=True):
            if name.startswith(f"{part}/"):
                content = (self.directory / name).read_bytes()
                assert len(content) == size and hashlib.sha256(content).digest() == digest
                columns = arrow_columns(content)
                yield from [_row({key: values[row] for key, values in columns.items()}) for row in range(count)]


def _text_of(token: Any) -> str:
    return token if isinstance(token, str) else token["content"]


def _tokens(library: dict[str, Any]) -> dict[int, str]:
    model = library["model"]
    if isinstance(model["vocab"], list):  # Unigram: pieces with their scores
        tokens = {index: piece for index, (piece, _) in enumerate(model["vocab"])}
    else:
        tokens = {index: token for token, index in model["vocab"].items()}
    return tokens | {token["id"]: token["content"] for token in library["added_tokens"]}


UNSPACED = "0E00-0FFF 1000-109F 1780-17FF 1950-19FF 1A20-1AAF 2E80-312F 3190-9FFF A9E0-A9FF AA60-AADF F900-FAFF "
UNSPACED += "FE30-FE4F FF01-FF9F 1AFF0-1B16F 20000-3FFFF"
MARKS = "0E31 0E34-0E3A 0E47-0E4E 0EB1 0EB4-0EBC 0EC8-0ECE 0F18-0F19 0F35 0F37 0F39 0F3E-0F3F 0F71-0F84 0F86-0F87 "
MARKS += "0F8D-0FBC 0FC6 102B-103E 1056-1059 105E-1060 1062-1064 1067-106D 1071-1074 1082-108D 108F 109A-109D "
MARKS += "17B4-17D3 17DD 3099-309A"


def _is_in(ranges: str, code: int) -> bool:
    borders = [one.partition("-") for one in ranges.split()]
    return any(int(first, 16) <= code <= int(last or first, 16) for first, _, last in borders)


def _of_scripts(library: dict[str, Any], sentence_piece: bool) -> tuple[set[int], set[int]]:
    """The unspaced ids, and those whose bytes begin within a character or with a mark."""
    unspaced, within = set(), set()
    for index, token in _tokens(library).items():
        first = _first_character(_bytes_of(token, library, sentence_piece))
        if first is None or (first[0] == first[1] and _is_in(MARKS, first[0])):
            within.add(index)
        elif all(_is_in(UNSPACED, code) for code in first):
            unspaced.add(index)
    return unspaced, within


def _bytes_of(token: str, library: dict[str, Any], sentence_piece: bool) -> bytes:
    model = library["model"]
    if sentence_piece:
        if model.get("byte_fallback") and token.startswith("<0x") and len(token) == 6:
            return bytes([int(token[3:5], 16)])
        return token.removeprefix("▁").encode()
    if model["type"] == "WordPiece":
        return token.removeprefix(model["continuing_subword_prefix"]).encode()
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    byte_of = {chr(byte): byte for byte in printed} | {chr(256 + number): byte for number, byte in enumerate(others)}
    if any(character not in byte_of for character in token):
        return token.encode().removeprefix(b" ")
    return bytes(byte_of[character] for character in token).removeprefix(b" ")


def _first_character(utf8: bytes) -> tuple[int, int] | None:
    """The lowest and the highest code point that a token may begin with; None within a character."""
    if not utf8 or utf8[0] >= 0xF8:  # a byte that UTF-8 does not use
        return 0, 0
    bits = f"{utf8[0]:08b}"
    if bits.startswith("10"):
        return None
    size = {"0": 1, "110": 2, "1110": 3, "11110": 4}[bits[: bits.index("0") + 1]]
    rest = list(itertools.takewhile(lambda byte: byte >> 6 == 2, utf8[1:size]))
    known = bits[bits.index("0") + 1 :] + "".join(f"{byte & 63:06b}" for byte in rest)
    missing = 6 * (size - 1 - len(rest))
    return int(known + "0" * missing, 2), int(known + "1" * missing, 2)


def _insides(library: dict[str, Any], sentence_piece: bool) -> set[int]:
    """The ids that continue a word, by the marks of the vocabulary."""
    model, tokens = library["model"], _tokens(library)
    if sentence_piece:
        return {index for index, token in tokens.items() if not token.startswith("▁")}
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        return {index for index, token in tokens.items() if token.startswith(prefix)}
    assert model["type"] == "BPE", model["type"]
    begins = tuple("ĠĉĊċČč \t\n\v\f\r")
    return {index for index, token in tokens.items() if not token.startswith(begins)}


def _row(columns: dict[str, Any]) -> Row:
    row, start = Row(columns["input_ids"], []), 0
    names = ("sequence_lengths", "first_segment_lengths", "next_sentence_labels", "sequence_keys")
    for length, first, label, key in zip(*(columns[name] for name in names), strict=True):
        if length:
            row.sequences.append(Sequence(start, length, first, label, key))
            start += length
    if "masked_counts" in columns:
        real = columns["masked_counts"]
        row.predicted = dict(zip(columns["masked_positions"][:real], columns["masked_ids"][:real], strict=True))
    return row


# Arrow IPC, as its documentation and its FlatBuffers schemas have it (format/File.fbs, Message.fbs, Schema.fbs).


class Table:
    """A FlatBuffers table: a signed offset back to its vtable, which has the position of each field."""

    def __init__(self, buffer: bytes, position: int) -> None:
        self.buffer, self.position = buffer, position
        vtable = position - _read("<i", buffer, position)
        size = _read("<H", buffer, vtable)
        self.fields = [_read("<H", buffer, vtable + at) for at in range(4, size, 2)]

    def scalar(self, number: int, kind: str, default: int = 0) -> int:
        present = number < len(self.fields) and self.fields[number]
        return _read(kind, self.buffer, self.position + self.fields[number]) if present else default

    def target(self, number: int) -> int:
        place = self.position + self.fields[number]
        return place + _read("<I", self.buffer, place)

    def table(self, number: int) -> "Table":
        return Table(self.buffer, self.target(number))

    def text(self, number: int) -> str:
        place = self.target(number)
        return self.buffer[place + 4 : place + 4 + _read("<I", self.buffer, place)].decode()

    def structs(self, number: int, kind: str) -> list[tuple[int, ...]]:
        place = self.target(number)
        size = struct.calcsize(kind)
        return [
            struct.unpack_from(kind, self.buffer, place + 4 + i * size) for i in range(_read("<I", self.buffer, place))
        ]

    def tables(self, number: int) -> list["Table"]:
        place = self.target(number)
        count = _read("<I", self.buffer, place)
        offsets = [place + 4 + 4 * index for index in range(count)]
        return [Table(self.buffer, offset + _read("<I", self.buffer, offset)) for offset in offsets]


def arrow_columns(content: bytes) -> dict[str, list[Any]]:
    """The columns of a file of one record batch: integers, or lists of as many integers in each row."""
    assert content[:6] == content[-6:] == b"ARROW1"
    size = _read("<i", content, len(content) - 10)
    begin = len(content) - 10 - size
    footer = Table(content, begin + _read("<I", content, begin))
    [(offset, metadata_size, body_size)] = footer.structs(3, "<qi4xq")
    assert content[offset : offset + 4] == b"\xff\xff\xff\xff"
    message = Table(content, offset + 8 + _read("<I", content, offset + 8))
    body = offset + metadata_size
    assert message.scalar(3, "<q") == body_size and message.scalar(1, "<B") == 3  # a RecordBatch
    batch = message.table(2)
    buffers = iter(batch.structs(2, "<qq"))
    rows = batch.scalar(0, "<q")
    columns: dict[str, list[Any]] = {}
    for one in footer.table(1).tables(1):
        next(buffers)  # validity of the column: no nulls, so it may be empty
        width, integers, kind = 1, one, one.scalar(2, "<B")
        if kind == 5:  # Utf8: offsets of rows + 1, and the text
            ends = struct.unpack_from(f"<{rows + 1}i", content, body + next(buffers)[0])
            start, _ = next(buffers)
            texts = itertools.pairwise(ends)
            columns[one.text(0)] = [content[body + start + a : body + start + b].decode() for a, b in texts]
            continue
        if kind == 15:  # FixedSizeBinary
            width, (start, _) = one.table(3).scalar(0, "<i"), next(buffers)
            columns[one.text(0)] = [
                content[body + start + row * width : body + start + (row + 1) * width] for row in range(rows)
            ]
            continue
        is_list = kind == 16  # FixedSizeList
        if is_list:
            width = one.table(3).scalar(0, "<i")
            [integers] = one.tables(5)
            next(buffers)  # validity of the integers
        assert integers.scalar(2, "<B") == 2  # Int
        kind = {8: "b", 16: "h", 32: "i", 64: "q"}[integers.table(3).scalar(0, "<i")]
        kind = kind if integers.table(3).scalar(1, "<B") else kind.upper()
        start, _ = next(buffers)
        values = struct.unpack_from(f"<{rows * width}{kind}", content, body + start)
        columns[one.text(0)] = (
            [list(values[row * width : (row + 1) * width]) for row in range(rows)] if is_list else list(values)
        )
    return columns


def _read(kind: str, buffer: bytes, position: int) -> int:
    return struct.unpack_from(kind, buffer, position)[0]


# What a model sees of a row.


def model_view(row: Row, width: int, pack: int) -> dict[str, list[int]]:
    """Segment ids, sequence ids and positions of a row, and the [CLS] positions and labels of its sequences."""
    segments, numbers, positions = ([0] * width for _ in range(3))
    starts, labels, weights = ([0] * pack for _ in range(3))
    for index, sequence in enumerate(row.sequences):
        starts[index] = sequence.start
        labels[index], weights[index] = max(sequence.label, 0), int(sequence.label >= 0)
        for position in range(sequence.length):
            slot = sequence.start + position
            numbers[slot], positions[slot] = index + 1, position
            segments[slot] = int(position >= sequence.first_length)
    return {
        "segment_ids": segments,
        "sequence_ids": numbers,
        "positions": positions,
        "cls_positions": starts,
        "next_sentence_label": labels,
        "next_sentence_weight": weights,
    }


# Masks.


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def combine(*numbers: int) -> int:
    state = 0
    for number in numbers:
        state = mix(((state + GOLDEN) % WORD) ^ number % WORD)
    return state


def order_hash(state: int, position: int) -> int:
    low, high = state % 2**32, state >> 32
    x = (position * 0x9E3779B1 + low) % 2**32
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) + high
    x = x % 2**32 * 0xC2B2AE35 % 2**32
    return (x ^ (x >> 16)) >> 12


def _words(output: Output, ids: list[int], sequence: Sequence) -> list[list[int]]:
    """The positions of each word."""
    words: list[list[int]] = []
    for position, token in enumerate(ids):
        if token in output.special:
            continue
        inside = output.manifest["masking"]["unit"] != "token" and token in output.inside
        if inside and token not in output.attached:
            before = next((one for one in reversed(ids[:position]) if one not in output.attached), None)
            inside = token not in output.unspaced and before not in output.unspaced
        if inside and position != sequence.first_length and position and ids[position - 1] not in output.special:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def _replaced(
    output: Output, truth: int, position: int, decides: int, sequence: Sequence, seed: int, epoch: int
) -> int:
    """The input id at a chosen position; `decides` is the position whose hash chooses between the three cases."""
    rule, state = output.manifest["masking"], combine(2, seed, epoch, sequence.key)
    case = mix((state + decides * GOLDEN) % WORD) >> 32
    if case < round(rule["split"][0] * 2**32):
        return output.mask
    if case < round((rule["split"][0] + rule["split"][1]) * 2**32):
        return output.random_token(rule["random"], mix((state + position * GOLDEN) % WORD) % 2**32)
    return truth


def masks(output: Output, ids: list[int], sequence: Sequence, seed: int, epoch: int) -> dict[int, tuple[int, int]]:
    """The predicted positions of a sequence, the input ids there, and the labels."""
    rule = output.manifest["masking"]
    words = _words(output, ids, sequence)
    state = combine(1, seed, epoch, sequence.key)
    order = sorted(words, key=lambda word: (order_hash(state, word[0]), word[0]))
    budget = max(1, round(rule["rate"] * len(ids)))
    chosen: set[int] = set()
    for word in order:
        if rule["unit"] in ("token", "word"):
            run = word
        else:
            run = _run(words, words.index(word), chosen, budget, sequence, rule, seed, epoch)
        if len(chosen) + len(run) <= budget:
            chosen.update(run)
    if not chosen and words:
        chosen.update(order[0][:budget])

    found: dict[int, tuple[int, int]] = {}
    first = 0
    for position in sorted(chosen):
        if position - 1 not in found:
            first = position
        decides = first if rule["unit"] == "span" else position
        truth = ids[position]
        found[position] = (_replaced(output, truth, position, decides, sequence, seed, epoch), truth)
    if rule["reorder_rate"]:
        found |= _out_of_order(output, ids, sequence, seed, epoch, set(found))
    return found


def infilled(output: Output, row: Row, width: int, seed: int, epoch: int) -> Row:
    """A row in which each run of unit infill is one position."""
    result = Row([], [])
    for sequence in row.sequences:
        ids = row.ids[sequence.start : sequence.start + sequence.length]
        words = _words(output, ids, sequence)
        runs, empty = _infilled_runs(output, ids, words, sequence, seed, epoch)
        removed = {position for run in runs for position in run[1:]}
        inserted = set(sorted(empty)[: len(removed)])
        start, first_length = len(result.ids), 0
        for position, truth in enumerate(ids):
            if position == sequence.first_length:
                first_length = len(result.ids) - start
            if position in inserted:
                result.ids.append(output.mask)
            if any(run[0] == position for run in runs):
                result.predicted[len(result.ids)] = truth
                truth = _replaced(output, truth, position, position, sequence, seed, epoch)
            if position not in removed:
                result.ids.append(truth)
        length = len(result.ids) - start
        first_length = first_length or length
        result.sequences.append(Sequence(start, length, first_length, sequence.label, sequence.key))
    result.ids += [output.pad] * (width - len(result.ids))
    return result


def _infilled_runs(
    output: Output, ids: list[int], words: list[list[int]], sequence: Sequence, seed: int, epoch: int
) -> tuple[list[list[int]], set[int]]:
    """The runs, and the positions before which there is an empty one."""
    rule = output.manifest["masking"]
    weights = [3**i / math.factorial(i) for i in range(21)]
    below = [round(sum(weights[: i + 1]) / sum(weights) * 2**32) for i in range(20)]
    state = combine(1, seed, epoch, sequence.key)
    order = sorted(words, key=lambda word: (order_hash(state, word[0]), word[0]))
    budget = max(1, round(rule["rate"] * len(ids)))
    runs: list[list[int]] = []
    chosen: set[int] = set()
    empty: set[int] = set()
    for word in order:
        value = mix((combine(4, seed, epoch, sequence.key) + word[0] * GOLDEN) % WORD) >> 32
        wanted = sum(value >= threshold for threshold in below)
        if word[0] in chosen or len(chosen) == budget:
            continue
        if not wanted:
            empty.add(word[0])
        run: list[int] = []
        begin = words.index(word)
        for other in words[begin : _end_of_stretch(words, begin, sequence)][:wanted]:
            if len(chosen) + len(run) + len(other) > budget or other[0] in chosen | (empty - {word[0]}):
                break
            run += other
        runs += [run] if run else []
        chosen.update(run)
    return runs or ([order[0][:budget]] if order else []), empty


def _out_of_order(
    output: Output, ids: list[int], sequence: Sequence, seed: int, epoch: int, chosen: set[int]
) -> dict[int, tuple[int, int]]:
    """The positions of the shuffled trigrams, the input ids there, and the labels."""
    order, shuffle = combine(5, seed, epoch, sequence.key), combine(6, seed, epoch, sequence.key)
    found: dict[int, tuple[int, int]] = {}
    most = round(output.manifest["masking"]["reorder_rate"] * len(ids) / 3)
    for place in sorted(range(len(ids) - 2), key=lambda place: (order_hash(order, place), place)):
        trigram = range(place, place + 3)
        if len(found) == 3 * most:
            break
        if sequence.first_length in trigram[1:] or any(ids[p] in output.special for p in trigram):
            continue
        if chosen.isdisjoint(trigram) and not any(p in found for p in trigram):
            number = 6 * (mix((shuffle + place * GOLDEN) % WORD) >> 32) >> 32
            moved = list(itertools.permutations(range(3)))[number]
            found |= {place + j: (ids[place + moved[j]], ids[place + j]) for j in range(3)}
    return found


def _end_of_stretch(words: list[list[int]], begin: int, sequence: Sequence) -> int:
    """The first word after one that a special token or the start of B separates from it."""
    end = begin + 1
    while end < len(words) and words[end][0] == words[end - 1][-1] + 1 and words[end][0] != sequence.first_length:
        end += 1
    return end


def _run(
    words: list[list[int]],
    begin: int,
    chosen: set[int],
    budget: int,
    sequence: Sequence,
    rule: dict[str, Any],
    seed: int,
    epoch: int,
) -> list[int]:
    """The positions of the n-gram or span that begins with a word; none if it may not be chosen."""
    if words[begin][0] in chosen:
        return []
    room = _end_of_stretch(words, begin, sequence)
    value = mix((combine(4, seed, epoch, sequence.key) + words[begin][0] * GOLDEN) % WORD) >> 32
    if rule["unit"] == "ngram":
        weights = [1 / size for size in range(1, min(room - begin, rule["ngram_max"]) + 1)]
    else:
        weights = [(1 - rule["span_p"]) ** (size - 1) for size in range(1, rule["span_max"] + 1)]
    drawn = 1 + sum(value >= round(sum(weights[: i + 1]) / sum(weights) * 2**32) for i in range(len(weights) - 1))
    cut: list[list[int]] = []
    for word in words[begin : min(room, begin + drawn)]:
        if len(chosen) + sum(map(len, cut)) + len(word) > budget:
            break
        cut.append(word)
    free = list(itertools.takewhile(chosen.isdisjoint, cut))
    if rule["unit"] == "ngram" and len(free) < len(cut):
        return []
    return [slot for word in free for slot in word]
