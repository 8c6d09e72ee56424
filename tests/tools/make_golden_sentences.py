"""Writes what sentence-transformers computes: vectors of texts, losses and metrics; see make_golden.py.

    golden_env/bin/pip install sentence-transformers
    golden_env/bin/python tests/tools/make_golden_sentences.py --output tests/testdata

sentences.npz holds a tiny random BERT with a WordPiece vocabulary, saved as folders of several settings:

    weights/NAME            the tensors, which all folders share
    files/FOLDER/PATH       the other files of a folder
    texts                   a JSON list
    vectors/FOLDER          f32[texts, D], as encode() returns them
    query/FOLDER, document/FOLDER   as encode_query() and encode_document() do
    loss/vectors            f32[3, B, D]: anchors, positives and hard negatives
    loss/scores             f32[B]
    loss/NAME               the value of a loss of these vectors
    search/queries, search/documents   f32 vectors with equal scores among them
    search/relevant         JSON: the relevant documents of each query; identifiers are q0, q1, ... and d0, d1, ...
    search/metrics          JSON: of InformationRetrievalEvaluator
    pairs/first, pairs/second, pairs/scores, pairs/metrics   of EmbeddingSimilarityEvaluator
"""

import argparse
import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy
import torch
import transformers
from make_golden import NAMES, randomize
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer import evaluation, losses
from sentence_transformers.sentence_transformer.modules import Pooling

WIDTH, MAX_LENGTH = 12, 9
TEXTS = ["the cat sat on the mat", "A dog,\nand a cat!", "x", "the river " * 8, "  a mat . "]
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdehimnorstuvx,.!:"]
TOKENS += [f"##{letter}" for letter in "adehinorstvy"]
TOKENS += ["the", "cat", "dog", "sat", "on", "mat", "river", "query", "passage"]
PROMPTS = {"query": "query: ", "document": "passage: ", "other": "the "}
# By folder: pooling mode, whether vectors are normalized, prompts, name of the default prompt.
FOLDERS = {
    "cls": ("cls", True, PROMPTS, None),
    "mean": ("mean", False, {}, None),
    "max": ("max", False, PROMPTS, "other"),
    "last": ("lasttoken", True, {}, None),
}


class Fixed:
    """Stands for a model in an evaluator: the vectors of inputs that are indices of rows."""

    def __init__(self, rows: dict[str, np.ndarray]) -> None:
        self.rows = rows
        self.similarity_fn_name = "cosine"
        self.model_card_data = None

    def similarity(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(left) @ torch.nn.functional.normalize(right).T

    def encode(self, texts: list[str], convert_to_tensor: bool = False, **_: object) -> object:
        found = np.stack([self.rows[text] for text in texts])
        return torch.from_numpy(found) if convert_to_tensor else found

    encode_query = encode_document = encode


def write_folders(arrays: dict[str, np.ndarray]) -> None:
    tokenizer = transformers.BertTokenizer(vocab={token: index for index, token in enumerate(TOKENS)})
    sizes = dict(zip(NAMES, (len(TOKENS), WIDTH, 2, 3, 17, 29), strict=True))
    config = transformers.BertConfig(attn_implementation="eager", **sizes)
    model = transformers.BertModel(config).eval()
    randomize(model, seed=91)
    arrays["texts"] = np.array(json.dumps(TEXTS))
    for name, (mode, normalize, prompts, default) in FOLDERS.items():
        with tempfile.TemporaryDirectory() as start, tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(start)
            model.save_pretrained(start)
            modules = [Transformer(start, max_seq_length=MAX_LENGTH), Pooling(WIDTH, mode)]
            sentences = SentenceTransformer(
                modules=[*modules, *([Normalize()] if normalize else [])],
                prompts=prompts,
                default_prompt_name=default,
                device="cpu",
            )
            sentences.save(folder, create_model_card=False)
            arrays[f"vectors/{name}"] = sentences.encode(TEXTS)
            arrays[f"query/{name}"] = sentences.encode_query(TEXTS)
            arrays[f"document/{name}"] = sentences.encode_document(TEXTS)
            for file in sorted(pathlib.Path(folder).rglob("*")):
                if file.suffix in (".json", ".txt"):
                    key = f"files/{name}/{file.relative_to(folder).as_posix()}"
                    arrays[key] = np.array(file.read_text(encoding="utf-8"))
            tensors = safetensors.numpy.load_file(f"{folder}/model.safetensors")
    arrays.update({f"weights/{name}": tensor for name, tensor in tensors.items()})


def write_losses(arrays: dict[str, np.ndarray], sample: np.random.Generator) -> None:
    vectors = sample.normal(size=(3, 6, WIDTH)).astype(np.float32)
    scores = np.array([0.1, 0.9, 0.5, 0.5, 0.0, 1.0], np.float32)
    arrays["loss/vectors"], arrays["loss/scores"] = vectors, scores
    columns = [torch.from_numpy(column) for column in vectors]
    ranking = losses.MultipleNegativesRankingLoss
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    cosent = losses.CoSENTLoss(None)
    found = {
        "pairs": ranking(None).compute_loss_from_embeddings(columns[:2], None),
        "triplets": ranking(None, scale=5.0).compute_loss_from_embeddings(columns, None),
        "symmetric": ranking(None, **both).compute_loss_from_embeddings(columns[:2], None),
        "cosent": cosent.compute_loss_from_embeddings(columns[:2], torch.from_numpy(scores)),
        "matryoshka": matryoshka(columns[:2], (WIDTH, 5, 3)),
    }
    arrays.update({f"loss/{name}": value.numpy() for name, value in found.items()})


def matryoshka(columns: list[torch.Tensor], dimensions: tuple[int, ...]) -> torch.Tensor:
    """MatryoshkaLoss over a model that returns given vectors."""

    class Given(torch.nn.Module):
        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"sentence_embedding": features["given"].clone()}

        def get_embedding_dimension(self) -> int:
            return WIDTH

    model = Given()
    loss = losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), list(dimensions))
    return loss([{"given": column} for column in columns], torch.zeros(len(columns[0])))


def write_metrics(arrays: dict[str, np.ndarray], sample: np.random.Generator) -> None:
    documents = sample.normal(size=(150, WIDTH)).astype(np.float32)
    documents[40:70] = documents[10]  # equal scores
    near = sample.integers(0, 150, 12)
    queries = (documents[near] + 0.7 * sample.normal(size=(12, WIDTH))).astype(np.float32)
    queries[3] = documents[10]
    relevant = {f"q{i}": sorted({f"d{j}" for j in [near[i], *sample.integers(0, 150, i % 4)]}) for i in range(11)}
    relevant["q3"] = ["d55", "d9"]
    rows = {f"text of q{i}": row for i, row in enumerate(queries)}
    rows |= {f"text of d{i}": row for i, row in enumerate(documents)}
    evaluator = evaluation.InformationRetrievalEvaluator(
        {f"q{i}": f"text of q{i}" for i in range(12)},
        {f"d{i}": f"text of d{i}" for i in range(150)},
        {query: set(found) for query, found in relevant.items()},
        precision_recall_at_k=[1, 5, 10, 100],
        corpus_chunk_size=64,
        write_csv=False,
    )
    model = Fixed(rows)
    evaluator.store_metrics_in_model_card_data = lambda *_, **__: None
    scores = evaluator(model)
    arrays["search/queries"], arrays["search/documents"] = queries, documents
    arrays["search/relevant"] = np.array(json.dumps(relevant))
    arrays["search/metrics"] = np.array(json.dumps(scores))
    first, second = (sample.normal(size=(20, WIDTH)).astype(np.float32) for _ in range(2))
    values = sample.integers(0, 6, 20) / 5
    rows = {f"a{i}": row for i, row in enumerate(first)} | {f"b{i}": row for i, row in enumerate(second)}
    similarity = evaluation.EmbeddingSimilarityEvaluator(
        [f"a{i}" for i in range(20)],
        [f"b{i}" for i in range(20)],
        values.tolist(),
        main_similarity="cosine",
        similarity_fn_names=["cosine"],
        write_csv=False,
    )
    similarity.store_metrics_in_model_card_data = lambda *_, **__: None
    arrays["pairs/first"], arrays["pairs/second"], arrays["pairs/scores"] = first, second, values
    arrays["pairs/metrics"] = np.array(json.dumps({k: float(v) for k, v in similarity(Fixed(rows)).items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, type=pathlib.Path, help="the folder to write to")
    folder = parser.parse_args().output
    arrays: dict[str, np.ndarray] = {}
    sample = np.random.default_rng(92)
    write_folders(arrays)
    write_losses(arrays, sample)
    write_metrics(arrays, sample)
    np.savez_compressed(folder / "sentences.npz", **arrays)


if __name__ == "__main__":
    main()
