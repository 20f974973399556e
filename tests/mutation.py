"""Bytes that are not those that were written, in the ways that readers of offsets and lengths stumble over."""

from __future__ import annotations

import random


def mutated(chance: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, to what offsets, lengths and counts are wrong with."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(changed))
        match chance.randrange(5):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                at &= ~7
                far = chance.choice((1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, 1 << 31, 0, 7, 1 << 20))
                changed[at : at + 8] = far.to_bytes(8, "little")
            case 3:
                at &= ~3
                changed[at : at + 4] = chance.choice((1 << 30, (1 << 31) - 1, (1 << 32) - 1, 0, 1)).to_bytes(
                    4, "little"
                )
            case _:
                size = len(changed[at : at + 16])
                changed[at : at + size] = chance.randbytes(size)
    return bytes(changed[: len(data)])
