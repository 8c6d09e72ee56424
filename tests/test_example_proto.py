import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tensorflow_datasets.proto import tf_example_pb2

from data_prep.formats import example_proto

ROWS = 3
words = st.text(min_size=1, max_size=200)


def columns(kind: str, draw: st.DataObject) -> np.ndarray:
    width = draw.draw(st.integers(0, 70))
    generator = np.random.default_rng(draw.draw(st.integers(0, 99)))
    if kind == "float_list":
        return generator.normal(size=(ROWS, width)).astype(np.float32)
    if kind == "bytes_list":
        return generator.integers(0, 256, (ROWS, width), dtype=np.uint8)
    most = draw.draw(st.sampled_from([2, 128, 30_000, 2**40, 2**62]))
    return generator.integers(-1, most, (ROWS, width))


@given(st.dictionaries(words, st.sampled_from(["int64_list", "float_list", "bytes_list"]), max_size=4), st.data())
def test_records_are_those_of_protocol_buffers(kinds: dict[str, str], draw: st.DataObject) -> None:
    """Byte for byte what the library's deterministic serialisation gives, and so what it reads."""
    values = {name: columns(kind, draw) for name, kind in kinds.items()}
    make = {"int64_list": example_proto.ints, "float_list": example_proto.floats, "bytes_list": example_proto.raw}
    records = example_proto.encode({name: make[kinds[name]](values[name]) for name in kinds}, ROWS).strings()
    for row, record in enumerate(records):
        example = tf_example_pb2.Example()
        example.features.SetInParent()
        for name, kind in kinds.items():
            stored = getattr(example.features.feature[name], kind)
            stored.SetInParent()
            held = values[name][row]
            stored.value.extend([held.tobytes()] if kind == "bytes_list" else held.tolist())
        parsed = tf_example_pb2.Example.FromString(record)
        assert parsed == example
        # Empty numbers it leaves out, and names that begin with one another it puts in the order of its version.
        apart = not any(one != name and one.startswith(name) for one in kinds for name in kinds)
        if apart and all(kinds[name] == "bytes_list" or values[name].shape[1] for name in kinds):
            assert record == example.SerializeToString(deterministic=True)
