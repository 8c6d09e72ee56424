"""Prints the parameter counts of the reference implementations, which tests/model/test_sizes.py contains.

    python tests/tools/count_parameters.py            (torch and transformers 5; models are shapes on the meta device)

Two counts need other code: transformers before version 5 for `relative_key` (run with the argument `shaw` in an
environment that has it), and mosaicml/examples for MosaicBERT (tests/model/test_sizes.py explains how).
"""

import sys

import torch
import transformers
from torch import nn

BASE = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
MODERN_LARGE = {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2624}
ALBERT = {
    "base": BASE,
    "large": LARGE,
    "xlarge": LARGE | {"hidden_size": 2048, "intermediate_size": 8192},
    "xxlarge": {},  # the defaults of AlbertConfig
}
ELECTRA = {
    "small": {},  # the defaults of ElectraConfig
    "base": BASE | {"embedding_size": 768},
    "large": LARGE | {"embedding_size": 1024},
}
# Clark et al. 2020, table 6: generators of 1/4, 1/3 and 1/4 of the width.
GENERATORS = {
    "small": {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 256},
    "base": {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    "large": {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
}
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


def count(name: str, config: str, **fields: int) -> int:
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, config)(**fields))
    return parameters(model)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def show(preset: str, *counts: int) -> None:
    print(f"{preset:<18}", *(f"{number:>13,}" for number in counts))


def shaw() -> None:
    """Prints the count for relative_key without the position table, which the model creates but never reads."""
    with torch.device("meta"):
        config = transformers.BertConfig(position_embedding_type="relative_key", **BASE)
        model = transformers.BertModel(config)
    show("shaw_base", parameters(model) - model.embeddings.position_embeddings.weight.numel())


def main() -> None:
    for size, fields in (("base", BASE), ("large", LARGE)):
        for vocabulary in (30522, 28996, 119547):
            sizes = fields | {"vocab_size": vocabulary}
            names = ("BertModel", "BertForPreTraining")
            show(f"{size} {vocabulary}", *(count(name, "BertConfig", **sizes) for name in names))
        for family, vocabulary in (("Roberta", 50265), ("XLMRoberta", 250002)):
            sizes = fields | ROBERTA | {"vocab_size": vocabulary}
            names = (f"{family}Model", f"{family}ForMaskedLM")
            show(f"{family} {size}", *(count(name, f"{family}Config", **sizes) for name in names))
    prenorm = LARGE | {"vocab_size": 30522}
    show("academic_large", count("RobertaPreLayerNormModel", "RobertaPreLayerNormConfig", **prenorm))
    for size, fields in (("base", {}), ("large", MODERN_LARGE)):
        names = ("ModernBertModel", "ModernBertForMaskedLM")
        show(f"modernbert_{size}", *(count(name, "ModernBertConfig", **fields) for name in names))
    show("buckets_base", count("MPNetModel", "MPNetConfig", max_position_embeddings=514))
    for size, fields in ALBERT.items():
        names = ("AlbertModel", "AlbertForPreTraining")
        show(f"albert_{size}", *(count(name, "AlbertConfig", vocab_size=30000, **fields) for name in names))
    show("distilbert", *(count(name, "DistilBertConfig") for name in ("DistilBertModel", "DistilBertForMaskedLM")))
    for size, fields in ELECTRA.items():
        names = ("ElectraModel", "ElectraForPreTraining")
        show(f"electra_{size}", *(count(name, "ElectraConfig", **fields) for name in names))
        show("its generator", count("ElectraForMaskedLM", "ElectraConfig", **fields | GENERATORS[size]))
    show("gpt", count("OpenAIGPTLMHeadModel", "OpenAIGPTConfig"))
    show("gpt2", count("GPT2LMHeadModel", "GPT2Config"))
    with torch.device("meta"):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048), 6)
    show("transformer_base", parameters(encoder))
    for name, module, layers, width in (
        ("rnn", nn.RNN, 1, 400),
        ("lstm_medium", nn.LSTM, 2, 650),
        ("lstm_large", nn.LSTM, 2, 1500),
    ):
        with torch.device("meta"):
            parts = nn.Embedding(10000, width), module(width, width, layers), nn.Linear(width, 10000)
        show(name, sum(parameters(part) for part in parts))
    for name, cells, width in (("elmo_small", 1024, 128), ("elmo_medium", 2048, 256), ("elmo", 4096, 512)):
        with torch.device("meta"):
            direction = nn.LSTM(width, cells, 2, proj_size=width)
        second_biases = 2 * 4 * cells  # which bert_jax lacks
        show(f"layers of {name}", 2 * (parameters(direction) - second_biases))


if __name__ == "__main__":
    shaw() if sys.argv[1:] == ["shaw"] else main()
