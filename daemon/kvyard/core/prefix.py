"""The prefix cache: which block holds which content, named by a chain of digests.

A block's digest covers all tokens up to its end, so equal digests mean equal prefixes. The chain is
BLAKE2b keyed with a secret of this start, so nobody can prepare a collision, and it begins with the tenant
and the request's cache salt, each with its length, so no two of them can be mistaken for one another.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from kvyard.core.loops import FORGOTTEN, NAME, NOBODY, YOUNGER, Blocks, find, publish, unpublish
from kvyard.core.plan import TokenArray

DIGEST_BYTES = 16
ROOTS = 256
"""Roots that are remembered."""


class DigestChain:
    """Digests of prefixes. `salt` is secret and new with every start of the engine (at most 64 bytes)."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._roots: dict[tuple[str, str], bytes] = {}
        """The last ones: most requests have the tenant and the salt of others."""
        # Copying a keyed hash costs half of keying one anew.
        self._copy = blake2b(digest_size=DIGEST_BYTES, key=salt).copy

    def root(self, tenant: str, cache_salt: str) -> bytes:
        """Where the chain of a request begins: only the same tenant with the same salt shares it.

        Without isolation between tenants, all of them are the empty one; a salt separates always.
        """
        known = self._roots.get((tenant, cache_salt))
        if known is not None:
            return known
        fields = [field.encode("utf-8", "surrogatepass") for field in (tenant, cache_salt)]
        text = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
        root = blake2b(text, digest_size=DIGEST_BYTES, key=self._salt, person=b"kvyard-root").digest()
        if len(self._roots) == ROOTS:
            self._roots.clear()
        self._roots[tenant, cache_salt] = root
        return root

    def next(self, parent: bytes, tokens: bytes) -> bytes:
        """The digest of the block with these tokens (int32) behind the one whose digest is `parent`."""
        block = self._copy()
        block.update(parent + tokens)
        return block.digest()

    def extend(self, digests: bytearray, root: bytes, tokens: bytes, width: int) -> None:
        """Append the digests of the blocks in `tokens` (int32), `width` bytes each, behind those there are."""
        parent, copy = bytes(digests[-DIGEST_BYTES:]) or root, self._copy
        for at in range(0, len(tokens), width):
            block = copy()
            block.update(parent + tokens[at : at + width])
            parent = block.digest()
            digests += parent


class PrefixIndex:
    """Digest to block, over the pool's blocks. Duplicates of one digest live side by side; the eldest is found.

    The pool takes a block's name from it when it hands the block out again.
    """

    def __init__(self, blocks: Blocks) -> None:
        """`blocks` is the state of a pool that caches."""
        self._blocks = blocks

    @property
    def evicted(self) -> int:
        """Names forgotten since the start."""
        return int(self._blocks.counts[FORGOTTEN])

    def find(self, digests: bytes | bytearray, number: int = 0) -> int | None:
        """A block with the content that the digest of this number names."""
        found = find(self._blocks, np.frombuffer(digests, np.int32), number)
        return None if found == NOBODY else found

    def publish(self, blocks: TokenArray, digests: bytes | bytearray, begin: int = 0) -> None:
        """From now on these can be found under the digests from number `begin` on; who has a name keeps it."""
        publish(self._blocks, blocks, np.frombuffer(digests, np.int32), begin)

    def forget(self, blocks: TokenArray) -> None:
        """These were never filled. Does nothing to a block without a name."""
        unpublish(self._blocks, blocks)

    def digest(self, block: int) -> bytes | None:
        """The name of a block, if it has one."""
        return self._blocks.entries[block, NAME:].tobytes() if self._blocks.named[block] else None

    def audit(self) -> list[str]:
        """Every broken invariant in words."""
        alike: dict[bytes, set[int]] = {}
        for block in np.flatnonzero(self._blocks.named).tolist():
            alike.setdefault(self.digest(block) or b"", set()).add(block)
        faults = []
        if int(np.count_nonzero(self._blocks.heads != NOBODY)) != len(alike):
            faults.append("the prefix index and the blocks differ in which digests there are")
        for digest, blocks in alike.items():
            eldest = self.find(digest)
            if eldest is None or self._ring(eldest, len(blocks)) != blocks:
                faults.append(f"not all of the blocks {sorted(blocks)}, which have one digest, can be found")
        return faults

    def _ring(self, eldest: int, most: int) -> set[int]:
        """The blocks that stand in a ring with this one, one more than `most` at the most."""
        ring, block = {eldest}, int(self._blocks.entries[eldest, YOUNGER])
        while block not in ring and len(ring) <= most:
            ring.add(block)
            block = int(self._blocks.entries[block, YOUNGER])
        return ring
