"""Writes tokenizers, tiny models and the vectors of texts; see make_golden.py for the environment.

    golden_env/bin/python tests/tools/make_golden_texts.py --output tests/testdata

Other golden files start from ids. These (gpt2_texts.npz, mpnet_texts.npz) hold texts and the folder that transformers
saves, so that a test can follow a text from its characters to its vectors:

    files/NAME      the files of the folder; weights/NAME its tensors
    texts, pairs    JSON lists
    ids/N, pair_ids/N, hidden/N   what the tokenizer returns for text or pair N, and the last layer of the model for it
    mask_probabilities   of the model with an MLM head, over the vocabulary at the mask of MASKED
"""

import argparse
import json
import pathlib
import tempfile

import numpy as np
import safetensors.numpy
import tokenizers
import torch
import transformers
from make_golden import randomize

TEXTS = ["the cat sat on the mat", "A dog, naïve and un-seen!", "river  the\nthe", "x"]
PAIRS = [["the cat", "on a mat."], ["a dog sat", "x"]]
MASKED = "the <mask> sat"
CORPUS = ["the cat sat on the mat", "a dog sat on the cat", "the river and the mat", "un unseen on and"]
MPNET_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", *"abcdehimnorstuvx,.!-"]
MPNET_TOKENS += [f"##{letter}" for letter in "adehinorstv"] + ["the", "cat", "dog", "sat", "on", "mat", "ri", "##ver"]
MPNET_TOKENS += ["<mask>"]


def write_texts(path: pathlib.Path, tokenizer: transformers.PreTrainedTokenizerBase, model: torch.nn.Module) -> None:
    arrays = {"texts": np.array(json.dumps(TEXTS)), "pairs": np.array(json.dumps(PAIRS))}
    for index, text in enumerate(TEXTS):
        inputs = tokenizer(text, return_tensors="pt")
        arrays[f"ids/{index}"] = inputs["input_ids"][0].numpy()
        with torch.no_grad():
            output = model.base_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        arrays[f"hidden/{index}"] = output.last_hidden_state[0].numpy()
    for index, pair in enumerate(PAIRS):
        arrays[f"pair_ids/{index}"] = np.array(tokenizer(*pair)["input_ids"])
    if tokenizer.mask_token:
        inputs = tokenizer(MASKED, return_tensors="pt")
        with torch.no_grad():
            logits = model(input_ids=inputs["input_ids"]).logits[0]
        (place,) = torch.where(inputs["input_ids"][0] == tokenizer.mask_token_id)
        arrays["mask_probabilities"] = torch.softmax(logits[place[0]], dim=-1).numpy()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        for file in pathlib.Path(folder).iterdir():
            if file.suffix in (".json", ".txt"):
                arrays[f"files/{file.name}"] = np.array(file.read_text(encoding="utf-8"))
        tensors = safetensors.numpy.load_file(f"{folder}/model.safetensors")
    np.savez_compressed(path, **arrays, **{f"weights/{name}": tensor for name, tensor in tensors.items()})


def gpt2(path: pathlib.Path) -> None:
    """GPT2Model with byte-level BPE trained on a few words."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS * 5, vocab_size=275, show_progress=False, special_tokens=["<|endoftext|>"])
    content = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in content["merges"]]
    tokenizer = transformers.GPT2Tokenizer(vocab=content["vocab"], merges=merges)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=12, n_layer=2, n_head=3, n_positions=37, attn_implementation="eager"
    )
    model = transformers.GPT2Model(config).eval()
    randomize(model, seed=81)
    write_texts(path, tokenizer, model)


def mpnet(path: pathlib.Path) -> None:
    """MPNetForMaskedLM with WordPiece and the special tokens of published MPNet folders."""
    tokenizer = transformers.MPNetTokenizer(vocab={token: index for index, token in enumerate(MPNET_TOKENS)})
    config = transformers.MPNetConfig(
        vocab_size=len(MPNET_TOKENS),
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=17,
        max_position_embeddings=39,
    )
    model = transformers.MPNetForMaskedLM(config).eval()
    randomize(model, seed=82)
    write_texts(path, tokenizer, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, type=pathlib.Path, help="the folder to write to")
    folder = parser.parse_args().output
    gpt2(folder / "gpt2_texts.npz")
    mpnet(folder / "mpnet_texts.npz")


if __name__ == "__main__":
    main()
