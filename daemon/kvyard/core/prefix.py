"""The prefix cache: which block holds which content, named by a chain of digests.

A block's digest covers all tokens up to its end, so equal digests mean equal prefixes. The chain is
BLAKE2b keyed with a secret of this start, so nobody can prepare a collision, and it begins with the tenant
and the request's cache salt, each with its length, so no two of them can be mistaken for one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from kvyard.core.plan import BoolArray

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

    def extend(self, digests: list[bytes], root: bytes, tokens: bytes, width: int) -> None:
        """Append the digests of the blocks in `tokens` (int32), `width` bytes each, behind those there are."""
        parent, copy = digests[-1] if digests else root, self._copy
        for at in range(0, len(tokens), width):
            block = copy()
            block.update(parent + tokens[at : at + width])
            parent = block.digest()
            digests.append(parent)


class PrefixIndex:
    """Digest to block, and back. Duplicates of one digest live side by side; the oldest is found."""

    def __init__(self, blocks: int) -> None:
        self.digests: list[bytes | None] = [None] * blocks
        self._named = np.zeros(blocks, np.bool_).data
        self.evicted = 0
        # An int where one block has the digest (nearly always), a dictionary as ordered set otherwise.
        self._blocks: dict[bytes, int | dict[int, None]] = {}

    def tell(self, named: BoolArray) -> None:
        """From now on `named` (by block) says which blocks have a digest; none of them has one now."""
        self._named = named.data

    def find(self, digest: bytes) -> int | None:
        """A block with this content."""
        found = self._blocks.get(digest)
        return next(iter(found)) if isinstance(found, dict) else found

    def publish(self, block: int, digest: bytes) -> None:
        """From now on `block` can be found; a block that already has a name keeps it."""
        self.publish_all(((block, digest),))

    def publish_all(self, named: Iterable[tuple[int, bytes]]) -> None:
        """`publish` for each block with its digest."""
        names, known, told = self.digests, self._blocks, self._named
        for block, digest in named:
            if names[block] is not None:
                continue
            names[block] = digest
            told[block] = True
            found = known.setdefault(digest, block)
            if found is block:
                continue
            if isinstance(found, dict):
                found[block] = None
            elif found != block:
                known[digest] = {found: None, block: None}

    def forget(self, block: int) -> None:
        """`block` is about to be overwritten, or was never filled. Does nothing to a block without a name."""
        self.forget_all((block,))

    def forget_all(self, blocks: Iterable[int]) -> None:
        """`forget` for each of `blocks`."""
        names, known, told = self.digests, self._blocks, self._named
        for block in blocks:
            digest = names[block]
            if digest is None:
                continue
            names[block] = None
            told[block] = False
            self.evicted += 1
            found = known.pop(digest)
            if isinstance(found, dict):
                del found[block]
                known[digest] = found if len(found) > 1 else next(iter(found))

    def audit(self) -> list[str]:
        """Every broken invariant in words."""
        listed: dict[int, bytes] = {}
        for digest, found in self._blocks.items():
            for block in found if isinstance(found, dict) else (found,):
                listed[block] = digest
        named = {block: digest for block, digest in enumerate(self.digests) if digest is not None}
        return [] if listed == named else ["the prefix index and the blocks' digests differ"]
