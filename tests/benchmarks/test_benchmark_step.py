import contextlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks import step, step_peer
from bert_jax.config import ModelConfig

ROOT = Path(__file__).parent.parent.parent
CONFIG = ModelConfig(vocab_size=1100, layers=2, width=8, heads=2, feed_forward=16, max_positions=16)


def test_the_batch_masks_a_seventh_of_full_rows():
    batch = step.random_batch(CONFIG, 4, 16)
    assert (np.asarray(batch.sequence_ids) == 1).all()
    assert batch.masked_positions.shape == (4, 2)
    picked = np.take_along_axis(np.asarray(batch.input_ids), np.asarray(batch.masked_positions), axis=1)
    np.testing.assert_array_equal(picked, batch.masked_ids)
    assert (np.diff(batch.masked_positions, axis=1) > 0).all()


def line_of(peer, batch):
    return step.peer_line(Path("python"), peer, CONFIG, "float32", batch)


def test_each_peer_gets_the_sizes_of_this_model_and_as_many_masked_positions():
    batch = step.random_batch(CONFIG, 4, 16)
    for peer, work, compiled in [
        ("equal", "equal", False),
        ("equal_compiled", "equal", True),
        ("head", "head", False),
        ("full", "full", False),
        ("full_compiled", "full", True),
    ]:
        parsed = step_peer.parse(line_of(peer, batch)[2:])
        assert (parsed.work, parsed.compiled) == (work, compiled)
        assert (parsed.layers, parsed.width, parsed.heads, parsed.vocab_size) == (2, 8, 2, 1100)
        assert (parsed.batch_size, parsed.seq_len, parsed.predictions) == (4, 16, 2)


def test_the_ratio_to_equal_work_comes_first(monkeypatch, capsys):
    """bert_jax takes 2 s for a step of 32 tokens, the peers 1 s at equal work and 8 s at more."""

    @contextlib.contextmanager
    def peer_turn(line, keep_memory):
        yield (lambda count: [1.0 if "--work=equal" in line else 8.0] * count), {"peer torch": "1"}

    monkeypatch.setattr(step, "our_turn", lambda *_: lambda count: [2.0] * count)
    monkeypatch.setattr(step, "peer_turn", peer_turn)
    flags = ["--size=tiny", "--batch_size=2", "--seq_len=16", "--nokeep_memory", "--peer_python=python"]
    step.main([*flags, "--peers", "full", "equal"])
    equal, full = map(json.loads, capsys.readouterr().out.splitlines())
    assert (equal["value"], equal["peer_value"], equal["ratio"]) == (16, 32, 0.5)
    assert (full["value"], full["peer_value"], full["ratio"]) == (16, 4, 4)
    assert "at the masked positions" in equal["peer"] and "at all positions" in full["peer"]
    step.main(flags)
    assert [json.loads(line)["ratio"] for line in capsys.readouterr().out.splitlines()] == [0.5, 0.5, 4, 4, 4, 4]


# Prints the masked positions, and the loss and its gradients by each kind of work.
COMPARE = """
import json, sys, torch
from benchmarks import step_peer
arguments = step_peer.parse(sys.argv[1:])
torch.manual_seed(0)
model, inputs, found = step_peer.make_model(arguments), step_peer.random_inputs(arguments), []
for work in ("equal", "head", "full"):
    model.zero_grad()
    loss = step_peer.loss_of(model, work)(**inputs)
    loss.backward()
    found.append([loss.item(), [value.grad.flatten().tolist() for value in model.parameters()]])
print(json.dumps([inputs["masked_positions"].tolist(), *found]))
"""


def test_the_peer_s_loss_and_gradients_do_not_depend_on_its_work(peer_python):
    line = line_of("equal", step.random_batch(CONFIG, 4, 16))
    arguments = [*line[2:], "--dropout=0", "--attention_dropout=0"]
    command = [peer_python, "-c", COMPARE, *arguments]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    positions, *others, (wanted, wanted_gradients) = json.loads(printed)
    assert (np.diff(positions, axis=1) > 0).all() and np.shape(positions) == (4, 2)
    assert max(np.abs(gradient).max() for gradient in wanted_gradients) > 1e-3
    for loss, gradients in others:
        assert loss == pytest.approx(wanted, rel=1e-6)
        for gradient, expected in zip(gradients, wanted_gradients, strict=True):
            np.testing.assert_allclose(gradient, expected, atol=1e-6)
