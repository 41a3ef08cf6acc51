"""Token ids for prompts of which only the length, and what they share, is known.

Deterministic: the same seed and ids give the same tokens. Knows nothing of time.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from skippy_sched.simulate.traces import BLOCK_TOKENS, Arrival

#: Ids are taken from 1 to this: bytes in the simulated vocabulary, none with a meaning of its own.
TOKENS = 255
#: Prompts are slices of one table; each starts with its id, so that no two begin alike.
TABLE_TOKENS = 1 << 18
ID_TOKENS = 5  # 255^5 ids


class Prompts:
    def __init__(self, seed: int = 0) -> None:
        table = np.random.default_rng(seed).integers(1, TOKENS + 1, TABLE_TOKENS)
        self._table: list[int] = table.tolist()
        self._made = 0

    def tokens(self, arrival: Arrival) -> list[int]:
        """The prompt of the next request."""
        self._made += 1
        length = arrival.prompt_tokens
        if arrival.blocks:
            tokens: list[int] = []
            for block in arrival.blocks:
                tokens += self._piece(2 * block, BLOCK_TOKENS)
            # A trace may give fewer blocks than its length needs; what is left is its own.
            if len(tokens) < length:
                tokens += self._piece(2 * self._made + 1, length - len(tokens))
            del tokens[length:]
            return tokens
        if arrival.prefix is not None:
            return self._piece(2 * crc32(arrival.prefix.encode()), length)
        return self._piece(2 * self._made + 1, length)

    def _piece(self, number: int, length: int) -> list[int]:
        """Tokens that follow from the number alone; the longer piece begins with the shorter."""
        tokens = []
        rest = number
        for _ in range(ID_TOKENS):
            rest, digit = divmod(rest, TOKENS)
            tokens.append(1 + digit)
        table = self._table
        start = (number * 40503) % TABLE_TOKENS
        while len(tokens) < length:
            tokens += table[start : start + length - len(tokens)]
            start = 0
        del tokens[length:]
        return tokens
