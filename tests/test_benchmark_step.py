import numpy as np
import pytest

from benchmarks import step, turns
from bert_jax.config import ModelConfig
from bert_jax.model.runtime import Runtime

CONFIG = ModelConfig(vocab_size=1100, layers=1, width=8, heads=2, feed_forward=16, max_positions=16)


def test_the_batch_masks_a_seventh_of_full_rows():
    batch = step.random_batch(CONFIG, 4, 16)
    assert (np.asarray(batch.sequence_ids) == 1).all()
    assert batch.masked_positions.shape == (4, 2)
    picked = np.take_along_axis(np.asarray(batch.input_ids), np.asarray(batch.masked_positions), axis=1)
    np.testing.assert_array_equal(picked, batch.masked_ids)
    assert (np.diff(batch.masked_positions, axis=1) > 0).all()


def test_a_turn_takes_the_steps_asked_and_times_each():
    turn = step.our_turn(CONFIG, Runtime(), step.random_batch(CONFIG, 2, 8))
    assert all(seconds > 0 for seconds in turn(2))
    assert [len(found) for found in turns.alternate([turn], rounds=2, count=3, warmup=1)] == [6]


def test_help_gives_a_command_to_copy(capsys):
    with pytest.raises(SystemExit):
        step.main(["--help"])
    assert "python -m benchmarks.step --size mini" in capsys.readouterr().out
