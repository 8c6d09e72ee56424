"""Small tokenizers of every kind, trained by their libraries, and difficult texts: of all Unicode, without spaces.

Libraries are set up as their own users would do it, without code of bert_jax.
"""

import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

Encode = Callable[[Sequence[str]], list[list[int]]]
ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
ALBERT_SYMBOLS = {
    "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
    "user_defined_symbols": ["(", ")", '"', "-", ".", "–", "£", "€"],
    "pad_id": 0,
    "unk_id": 1,
    "bos_id": -1,
    "eos_id": -1,
    "pad_piece": "<pad>",
}
KINDS = (
    *("wordpiece_uncased", "wordpiece_cased", "bpe", "bpe_prefix_space", "bpe_nfc", "word_bpe"),
    *("unigram", "unigram_bytes", "unigram_albert"),
    *("sentencepiece_bpe", "sentencepiece_bpe_bytes", "sentencepiece_bpe_identity"),
)


def byte_pairs(folder: Path, merges: Sequence[str]) -> Path:
    """Writes byte-level BPE of the letters a to z and some merges, with the special tokens of RoBERTa."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*ROBERTA_TOKENS, *"Ġ,.abcdefghijklmnopqrstuvwxyz", *merged, "<mask>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("".join(f"{merge}\n" for merge in ["#version: 0.2", *merges]), encoding="utf-8")
    return folder


def make(kind: str, lines: Sequence[str], folder: Path) -> Encode:
    """Trains a tokenizer of a kind, writes it as others write theirs, and returns the library's encoding."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind.startswith("wordpiece"):
        return _wordpiece(lines, folder, lowercase=kind.endswith("uncased"))
    if kind == "word_bpe":
        return _word_bpe(lines, folder)
    if kind.startswith("bpe"):
        return _bpe(lines, folder, prefix=kind == "bpe_prefix_space", nfc=kind == "bpe_nfc")
    if kind == "unigram_albert":
        return _albert(lines, folder)
    bytes_too = kind.endswith("bytes")
    model = "bpe" if kind.startswith("sentencepiece") else "unigram"
    rule = "identity" if kind.endswith("identity") else "nmt_nfkc"
    return _sentencepiece(lines, folder, model_type=model, byte_fallback=bytes_too, normalization_rule_name=rule)


def _wordpiece(lines: Sequence[str], folder: Path, *, lowercase: bool) -> Encode:
    characters = sorted(set("".join(lines)) - set(" \n"))
    trained = tokenizers.BertWordPieceTokenizer(lowercase=lowercase)
    trained.train_from_iterator(lines, vocab_size=2000 + 2 * len(characters), show_progress=False)
    vocabulary = trained.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    (folder / "vocab.txt").write_text("".join(token + "\n" for token in tokens), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
    library = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return of_library(library)


def _bpe(lines: Sequence[str], folder: Path, *, prefix: bool, nfc: bool) -> Encode:
    trained = tokenizers.ByteLevelBPETokenizer(add_prefix_space=prefix)
    trained.train_from_iterator(lines, vocab_size=3000, show_progress=False, special_tokens=ROBERTA_TOKENS)
    trained.add_special_tokens(["<mask>"])
    library = tokenizers.Tokenizer.from_str(trained.to_str())
    library.normalizer = normalizers.NFC() if nfc else None
    if nfc:
        library.save(str(folder / "tokenizer.json"))
    else:
        trained.save_model(str(folder))
        vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        vocabulary["<mask>"] = len(vocabulary)
        (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": prefix}))
    return of_library(library)


def _word_bpe(lines: Sequence[str], folder: Path) -> Encode:
    """As HerBERT's folder, without a tokenizer.json."""
    trained = tokenizers.CharBPETokenizer(suffix="</w>", unk_token="<unk>", bert_normalizer=True)
    trained.train_from_iterator(
        lines, vocab_size=2000, show_progress=False, special_tokens=[*ROBERTA_TOKENS, "<mask>"], initial_alphabet=[]
    )
    trained.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "HerbertTokenizerFast"}))
    files = (str(folder / name) for name in ("vocab.json", "merges.txt"))
    model = models.BPE.from_file(*files, unk_token="<unk>", end_of_word_suffix="</w>")
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return of_library(library)


def of_library(library: tokenizers.Tokenizer) -> Encode:
    library.encode_special_tokens = True
    return lambda texts: [found.ids for found in library.encode_batch_fast(list(texts), add_special_tokens=False)]


def train_sentencepiece(lines: Sequence[str], **options: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]),
        model_writer=model,
        vocab_size=3000,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def _sentencepiece(lines: Sequence[str], folder: Path, **options: object) -> Encode:
    content = train_sentencepiece(lines, **options)
    (folder / "sentencepiece.bpe.model").write_bytes(content)
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    fairseq = {0: 3, 1: 0, 2: 2}
    return lambda texts: [
        [fairseq.get(index, index + 1) for index in found] for found in library.encode(list(texts), num_threads=1)
    ]


def _albert(lines: Sequence[str], folder: Path) -> Encode:
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    normalizer = normalizers.Sequence(steps)
    content = train_sentencepiece([normalizer.normalize_str(line) for line in lines], **ALBERT_SYMBOLS)
    (folder / "spiece.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "keep_accents": false}')
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    return lambda texts: library.encode([normalizer.normalize_str(text) for text in texts], num_threads=1)


_SPACES = [chr(code) for code in range(0x110000) if chr(code).isspace()] + list("\u200b\ufeff\u180e\u2060▁")
_BY_KIND: list[list[str]] = [
    _SPACES,
    [chr(code) for code in [*range(0x20), *range(0x7F, 0xA0), 0xAD, 0xFFFD, 0xE000, 0x10FFFF, 0xFFFF]],
    [chr(code) for code in range(0x300, 0x370)],
    list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~‘’“”…–—«»、。·"),
    [chr(code) for code in range(0x4E00, 0x4E40)] + list("がぎ\u3099ゴ가각힣ᄀ\u1161\u11a8ﷺ㍿㎢ｱﾞ"),
    list("abcxyzABCXYZ019 "),
    list("éÀßİıſǅΣςςΆΰÅK≮≯≠ﬁŉẞ῾Ά¨΅´½²"),
]
_WORDS = [
    "hello",
    "the",
    "The",
    "isn't",
    "don't",
    "000",
    "1000",
    "aaa",
    "...",
    "'ll",
    "mask",
    "[MASK]",
    "<mask>",
    "``a''",
]


def random_texts(seed: int, count: int) -> list[str]:
    """Texts over all of Unicode (surrogates apart), dense in what normalising and parting treat apart."""
    draw = random.Random(seed)
    texts = ["hello " * 200, "x" * 99 + " " + "x" * 100 + " " + "x" * 101 + "," + "x" * 100, "", " ", "  ", "\x00", "▁"]
    while len(texts) < count:
        kinds = draw.sample(_BY_KIND, draw.randint(1, 3))
        form = draw.random()
        if form < 0.6:
            texts.append("".join(_character(draw, kinds) for _ in range(draw.randint(1, 40))))
        elif form < 0.8:
            texts.append(" ".join(draw.choice(_WORDS) + _character(draw, kinds) for _ in range(8)))
        else:
            texts.append("".join(draw.choice(_WORDS) + draw.choice(_SPACES) * draw.randint(1, 2) for _ in range(8)))
    return texts


def _character(draw: random.Random, kinds: Sequence[list[str]]) -> str:
    if draw.random() >= 0.1:
        return draw.choice(draw.choice(kinds))
    code = draw.randrange(0x110000 - 0x800)
    return chr(code if code < 0xD800 else code + 0x800)


CHINESE = (
    "今天的天气很好，我们去公园散步。",
    "他说：“明天会下雨吗？”",
    "这台计算机用Python写程序，速度很快！",
    "图书馆在学校的东边，离车站不远。",
    "2020年他搬到了北京，开始新的工作。",
    "老师把书放在桌子上，学生们都在看。",
)
JAPANESE = (
    "今日はとても天気がいいので、公園を散歩しました。",
    "「明日は雨ですか」と彼は聞いた。",
    "このコンピューターはPythonで書かれたプログラムを動かす。",
    "図書館は学校の東にあって、駅から遠くない。",
    "彼女は大学でフランス語を勉強していた。",
    "先生は本を机の上に置いた！",
)
THAI = (
    "วันนี้อากาศดีมากเราจึงไปเดินเล่นที่สวนสาธารณะ",
    "เขาถามว่าพรุ่งนี้ฝนจะตกหรือไม่",
    "คอมพิวเตอร์เครื่องนี้ใช้Pythonเขียนโปรแกรม",
    "ห้องสมุดอยู่ทางตะวันออกของโรงเรียน",
    "เธอเรียนภาษาฝรั่งเศสที่มหาวิทยาลัย",
    "ครูวางหนังสือไว้บนโต๊ะ",
)


def unspaced_documents(count: int) -> list[str]:
    """Documents in Chinese, Japanese or Thai, with some English, whose lines have several sentences."""
    generator = random.Random(0)
    texts = []
    for number in range(count):
        sentences, between = [(CHINESE, ""), (JAPANESE, ""), (THAI, " ")][number % 3]
        lines = [between.join(generator.choices(sentences, k=generator.randint(1, 5))) for _ in range(4)]
        texts.append("\n".join(lines))
    return texts
