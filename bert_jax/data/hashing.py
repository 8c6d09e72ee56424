"""Counter-based hashing: randomness as a pure function of numbers, without generator state (laws 1 and 2).

`mix` is the finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
OOPSLA; constants of David Stafford's variant 13), vectorized by numpy. All arithmetic is modulo 2**64.
"""

import hashlib

import numpy as np

from bert_jax.array_types import Integer, UInt32, UInt64

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: SplitMix64's increment
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(values: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """A bijection of 64-bit numbers. Each input bit flips each output bit about half of the time."""
    mixed = values ^ (values >> _SHIFT_1)
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> _SHIFT_2
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> _SHIFT_3
    return mixed


def combine(*parts: int | Integer[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """One 64-bit hash of several numbers in order; arrays broadcast. The result has at least one dimension.

    A Python integer is taken modulo 2**64, an array of signed numbers by its two's complement.
    """
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix((state + GAMMA) ^ _words(part))
    return state


def hash_text(text: str) -> int:
    """A 64-bit number for a text (the head of its sha256), the same in every process and version."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def bounded(words: UInt32[np.ndarray, "K"], bound: int | Integer[np.ndarray, "K"]) -> Integer[np.ndarray, "K"]:
    """Maps uniform 32-bit words to [0, bound), 0 < bound < 2**31, by multiply and shift (Lemire 2019, ACM TOMACS 29).

    It omits Lemire's rejection step: each probability has a relative error of at most bound / 2**32.
    """
    return ((words.astype(np.uint64) * np.asarray(bound, np.uint64)) >> np.uint64(32)).astype(np.int64)


def _words(part: int | Integer[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    if isinstance(part, np.ndarray):
        return np.atleast_1d(part).astype(np.uint64)
    return np.array([int(part) % 2**64], np.uint64)
