"""Writes the golden arrays of DistilBERT, MPNet, ALBERT and ELECTRA; make_golden.py has the keys and environment.

    golden_env/bin/python tests/tools/make_golden_relatives.py --output tests/testdata

Additional keys: those of make_golden_roberta.py. electra_pair.npz holds a discriminator and, under
outputs/generator_weights/ and outputs/generator_gradients/, its generator, whose embeddings are the discriminator's;
inputs/sampled has the generator's samples at the masked positions, and outputs/mlm_loss, rtd_loss and loss are those of
Clark et al. 2020, section 3.1.
"""

import argparse
import pathlib

import torch
import transformers
from make_golden import IGNORED, hidden_states, inputs_of, randomize, write
from make_golden_roberta import ANSWERS, by_choice, roberta_inputs, run


def distilbert_config(**changes: object) -> transformers.DistilBertConfig:
    """Returns a configuration without dropout."""
    dropouts = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout", "qa_dropout"), 0.0)
    return transformers.DistilBertConfig(attn_implementation="eager", **dropouts, **changes)


def mpnet_config(**changes: object) -> transformers.MPNetConfig:
    """Returns a configuration without dropout, with the special ids of the published models."""
    return transformers.MPNetConfig(
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        layer_norm_eps=1e-5,
        **changes,
    )


def masked_labels(inputs: dict[str, torch.Tensor], vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Returns a label at about a quarter of the positions."""
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(inputs["input_ids"].shape, generator=generator) < 0.25) & (inputs["attention_mask"] == 1)
    targets = torch.randint(0, vocab_size, chosen.shape, generator=generator)
    return {"labels": torch.where(chosen, targets, IGNORED)}


def distilbert_masked_lm(path: pathlib.Path) -> None:
    """Writes DistilBertForMaskedLM."""
    config = distilbert_config(
        vocab_size=79, dim=18, n_layers=3, n_heads=3, hidden_dim=29, max_position_embeddings=22, pad_token_id=0
    )
    model = transformers.DistilBertForMaskedLM(config)
    randomize(model, seed=61)
    inputs = roberta_inputs(config, lengths=[17, 6, 21], length=21, seed=62)
    run(path, model, inputs, masked_labels(inputs, config.vocab_size, seed=63), ["logits"])


def distilbert_classification(path: pathlib.Path) -> None:
    """Writes DistilBertForSequenceClassification with three labels."""
    config = distilbert_config(
        vocab_size=61, dim=15, n_layers=2, n_heads=5, hidden_dim=22, max_position_embeddings=13, num_labels=3
    )
    model = transformers.DistilBertForSequenceClassification(config)
    randomize(model, seed=64)
    run(path, model, roberta_inputs(config, [5, 11], 11, seed=65), {"labels": torch.tensor([2, 0])}, ["logits"])


def distilbert_question(path: pathlib.Path) -> None:
    """Writes DistilBertForQuestionAnswering."""
    config = distilbert_config(vocab_size=53, dim=12, n_layers=1, n_heads=3, hidden_dim=17, max_position_embeddings=14)
    model = transformers.DistilBertForQuestionAnswering(config)
    randomize(model, seed=66)
    run(path, model, roberta_inputs(config, [13, 13, 13], 13, seed=67), ANSWERS, ["start_logits", "end_logits"])


def mpnet_masked_lm(path: pathlib.Path) -> None:
    """Writes MPNetForMaskedLM. The rows are long enough that distances share buckets."""
    config = mpnet_config(
        vocab_size=71,
        hidden_size=18,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=25,
        max_position_embeddings=43,
    )
    model = transformers.MPNetForMaskedLM(config)
    randomize(model, seed=68)
    inputs = roberta_inputs(config, lengths=[40, 6, 31], length=40, seed=69)
    run(path, model, inputs, masked_labels(inputs, config.vocab_size, seed=70), ["logits"])


def mpnet_classification(path: pathlib.Path) -> None:
    """Writes MPNetForSequenceClassification with three labels."""
    config = mpnet_config(
        vocab_size=57,
        hidden_size=14,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=19,
        max_position_embeddings=15,
        num_labels=3,
    )
    model = transformers.MPNetForSequenceClassification(config)
    randomize(model, seed=71)
    run(path, model, roberta_inputs(config, [5, 11], 11, seed=72), {"labels": torch.tensor([1, 2])}, ["logits"])


def albert_config(**changes: object) -> transformers.AlbertConfig:
    """Returns a configuration without dropout and with embeddings narrower than the layers."""
    return transformers.AlbertConfig(classifier_dropout_prob=0.0, attn_implementation="eager", **changes)


def albert_pretraining(path: pathlib.Path) -> None:
    """Writes AlbertForPreTraining: three layers that share their parameters."""
    config = albert_config(
        vocab_size=73,
        embedding_size=10,
        hidden_size=18,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=27,
        max_position_embeddings=24,
        type_vocab_size=2,
    )
    model = transformers.AlbertForPreTraining(config).train()
    randomize(model, seed=73)
    inputs = inputs_of(config, lengths=[17, 6, 21], length=21, seed=74)
    labels = masked_labels(inputs, config.vocab_size, seed=75)
    order = torch.tensor([0, 1, 1])
    output = model(**inputs, **labels, sentence_order_label=order, output_hidden_states=True)
    mlm_loss = torch.nn.functional.cross_entropy(output.prediction_logits.flatten(0, 1), labels["labels"].flatten())
    order_loss = torch.nn.functional.cross_entropy(output.sop_logits, order)
    torch.testing.assert_close(output.loss, mlm_loss + order_loss)
    output.loss.backward()
    outputs = hidden_states(output) | {
        "pooled": torch.tanh(model.albert.pooler(output.hidden_states[-1][:, 0])),
        "mlm_logits": output.prediction_logits,
        "next_sentence_logits": output.sop_logits,
        "loss": output.loss,
        "mlm_loss": mlm_loss,
        "next_sentence_loss": order_loss,
    }
    write(path, model, inputs | labels | {"next_sentence_label": order}, outputs)


def albert_classification(path: pathlib.Path) -> None:
    """Writes AlbertForSequenceClassification with three labels and another activation."""
    config = albert_config(
        vocab_size=57,
        embedding_size=11,
        hidden_size=14,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=19,
        max_position_embeddings=15,
        hidden_act="gelu",
        num_labels=3,
    )
    model = transformers.AlbertForSequenceClassification(config)
    randomize(model, seed=76)
    run(path, model, inputs_of(config, [5, 11], 11, seed=77), {"labels": torch.tensor([1, 2])}, ["logits"])


def electra_config(**changes: object) -> transformers.ElectraConfig:
    """Returns a configuration without dropout."""
    return transformers.ElectraConfig(
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        summary_last_dropout=0.0,
        attn_implementation="eager",
        **changes,
    )


ELECTRA = {
    "vocab_size": 67,
    "embedding_size": 10,
    "hidden_size": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 27,
    "max_position_embeddings": 23,
}


def electra_masked_lm(path: pathlib.Path) -> None:
    """Writes ElectraForMaskedLM, a generator."""
    config = electra_config(**ELECTRA)
    model = transformers.ElectraForMaskedLM(config)
    randomize(model, seed=78)
    inputs = inputs_of(config, [17, 6, 21], 21, seed=79)
    run(path, model, inputs, masked_labels(inputs, config.vocab_size, seed=80), ["logits"])


def electra_classification(path: pathlib.Path) -> None:
    """Writes ElectraForSequenceClassification with three labels; its embeddings are as wide as the layers."""
    config = electra_config(**ELECTRA | {"embedding_size": 18, "num_labels": 3})
    model = transformers.ElectraForSequenceClassification(config)
    randomize(model, seed=81)
    run(path, model, inputs_of(config, [5, 11], 11, seed=82), {"labels": torch.tensor([1, 2])}, ["logits"])


def electra_choices(path: pathlib.Path) -> None:
    """Writes ElectraForMultipleChoice: three questions of two choices."""
    config = electra_config(**ELECTRA)
    model = transformers.ElectraForMultipleChoice(config)
    randomize(model, seed=83)
    inputs = by_choice(inputs_of(config, [11, 3, 7, 8, 9, 4], 11, seed=84), 2)
    run(path, model, inputs, {"labels": torch.tensor([1, 0, 1])}, ["logits"])


def electra_pair(path: pathlib.Path) -> None:
    """Writes one step of a generator and a discriminator that share their embeddings, on fixed samples."""
    config = electra_config(**ELECTRA)
    small = electra_config(**ELECTRA | {"hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 18})
    model, generator = transformers.ElectraForPreTraining(config), transformers.ElectraForMaskedLM(small)
    randomize(model, seed=85)
    randomize(generator, seed=86)
    generator.electra.embeddings = model.electra.embeddings
    generator.generator_lm_head.weight = model.electra.embeddings.word_embeddings.weight
    inputs = inputs_of(config, [17, 6, 21], 21, seed=87)
    labels = masked_labels(inputs, config.vocab_size, seed=88)["labels"]
    source = torch.Generator().manual_seed(89)
    sampled = torch.randint(0, config.vocab_size, labels.shape, generator=source)
    sampled = torch.where(torch.rand(labels.shape, generator=source) < 0.3, labels, sampled)  # some samples are right
    masked = labels != IGNORED
    mlm_loss = generator(**inputs, labels=labels).loss
    text = torch.where(masked, labels, inputs["input_ids"])
    corrupted = torch.where(masked, sampled, inputs["input_ids"])
    found = model(**inputs | {"input_ids": corrupted}, labels=(corrupted != text).long(), output_hidden_states=True)
    loss = mlm_loss + 50 * found.loss
    loss.backward()
    outputs = hidden_states(found) | {
        "logits": found.logits,
        "mlm_loss": mlm_loss,
        "rtd_loss": found.loss,
        "loss": loss,
        **{f"generator_weights/{name}": value for name, value in generator.named_parameters()},
        **{f"generator_gradients/{name}": value.grad for name, value in generator.named_parameters()},
    }
    write(path, model, inputs | {"labels": labels, "sampled": torch.where(masked, sampled, 0)}, outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("tests/testdata"), help="output folder")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    distilbert_masked_lm(folder / "distilbert_masked_lm.npz")
    distilbert_classification(folder / "distilbert_classification.npz")
    distilbert_question(folder / "distilbert_question.npz")
    mpnet_masked_lm(folder / "mpnet_masked_lm.npz")
    mpnet_classification(folder / "mpnet_classification.npz")
    albert_pretraining(folder / "albert_pretraining.npz")
    albert_classification(folder / "albert_classification.npz")
    electra_masked_lm(folder / "electra_masked_lm.npz")
    electra_classification(folder / "electra_classification.npz")
    electra_choices(folder / "electra_choices.npz")
    electra_pair(folder / "electra_pair.npz")


if __name__ == "__main__":
    main()
