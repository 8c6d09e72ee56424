"""Writes tests/testdata/original_checkpoint: tiny checkpoints made by TensorFlow and google-research/bert.

    python tests/tools/make_original_checkpoint.py --scripts DIR_OF_ITS_SCRIPTS

It needs TensorFlow and a copy of google-research/bert at its first release (fe35475), whose GELU is exact, so no test
runs it. The graph is built by that code; three functions of TensorFlow 1 that TensorFlow 2 lacks are defined here.
"""

import argparse
import json
import sys
import types
import unittest.mock
import zlib
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

FOLDER = Path(__file__).parent.parent / "testdata" / "original_checkpoint"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = SPECIAL + ["the", "cat", "dog", "sat", "on", "##s"] + [f"word{index}" for index in range(36)]
SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}
LENGTHS, SLOTS = (11, 7), 11
POSITIONS = np.array([[1, 4, 9], [2, 5, 6]], np.int32)


def dense(inputs, units, activation=None, name=None, kernel_initializer=None):
    with tf.variable_scope(name, default_name="dense"):
        kernel = tf.get_variable("kernel", (inputs.shape[-1], units), initializer=kernel_initializer)
        product = tf.tensordot(inputs, kernel, 1) + tf.get_variable("bias", (units,))
        return activation(product) if activation else product


def layer_norm(inputs, begin_norm_axis, begin_params_axis, scope):
    assert begin_norm_axis == begin_params_axis == -1
    with tf.variable_scope(scope, default_name="LayerNorm"):
        beta, gamma = (tf.get_variable(name, inputs.shape[-1:]) for name in ("beta", "gamma"))
        mean, variance = tf.nn.moments(inputs, [-1], keepdims=True)
        return tf.nn.batch_normalization(inputs, mean, variance, beta, gamma, variance_epsilon=1e-12)


def value_of(variable) -> np.ndarray:
    """Returns random values, seeded by the variable's name."""
    generator = np.random.default_rng(zlib.crc32(variable.op.name.encode()))
    return (0.3 * generator.standard_normal(variable.shape.as_list())).astype(variable.dtype.as_numpy_dtype)


def saved(outputs: dict, name: str) -> dict[str, np.ndarray]:
    """Assigns values to the graph's variables, writes a checkpoint of them, and computes the outputs."""
    step = tf.train.get_global_step()
    with tf.Session() as session:
        for variable in tf.global_variables():
            session.run(variable.assign(1000 if variable is step else value_of(variable)))
        tf.train.Saver().save(session, str(FOLDER / name), write_state=False, write_meta_graph=False)
        return session.run(outputs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scripts", type=Path, required=True)
    sys.path.insert(0, str(parser.parse_args().scripts))
    tf.disable_eager_execution()
    tf.layers = types.SimpleNamespace(dense=dense)
    tf.contrib = types.SimpleNamespace(layers=types.SimpleNamespace(layer_norm=layer_norm))
    tf.flags = unittest.mock.MagicMock()  # both scripts define flags
    sys.modules |= {"tensorflow": tf, "optimization": types.ModuleType("optimization")}
    import modeling
    import run_pretraining
    import run_squad

    config = modeling.BertConfig.from_dict(SIZES)
    generator = np.random.default_rng(0)
    mask = (np.arange(SLOTS) < np.array(LENGTHS)[:, None]).astype(np.int32)
    ids = generator.integers(0, SIZES["vocab_size"], mask.shape).astype(np.int32) * mask
    segments = (np.arange(SLOTS) >= 4).astype(np.int32) * mask
    model = modeling.BertModel(
        config, False, tf.constant(ids), tf.constant(mask), tf.constant(segments), use_one_hot_embeddings=False
    )
    none = tf.zeros(POSITIONS.shape, tf.int32)
    _, _, masked = run_pretraining.get_masked_lm_output(
        config,
        model.get_sequence_output(),
        model.get_embedding_table(),
        tf.constant(POSITIONS),
        none,
        tf.zeros_like(none, tf.float32),
    )
    _, _, next_sentence = run_pretraining.get_next_sentence_output(
        config, model.get_pooled_output(), tf.zeros([2], tf.int32)
    )
    outputs = {
        "hidden": tf.stack([model.get_embedding_output(), *model.get_all_encoder_layers()]),
        "pooled": model.get_pooled_output(),
        "mlm_log_probs": masked,
        "next_sentence_log_probs": next_sentence,
    }
    # Training state that a checkpoint contains along with the parameters.
    tf.get_variable("bert/pooler/dense/bias/adam_m", [SIZES["hidden_size"]])
    tf.train.get_or_create_global_step()
    FOLDER.mkdir(exist_ok=True)
    found = saved(outputs, "bert_model.ckpt")
    tf.reset_default_graph()
    inputs = (tf.constant(part) for part in (ids, mask, segments))
    begin, end = run_squad.create_model(config, False, *inputs, use_one_hot_embeddings=False)
    found |= saved({"answer_logits": tf.stack([begin, end], axis=-1)}, "squad.ckpt")
    np.savez_compressed(
        FOLDER / "outputs.npz", input_ids=ids, attention_mask=mask, segment_ids=segments, positions=POSITIONS, **found
    )
    (FOLDER / "bert_config.json").write_text(json.dumps(SIZES, indent=2) + "\n")
    (FOLDER / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")


if __name__ == "__main__":
    main()
