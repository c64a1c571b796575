"""A document, what identifies it, and how two of them are told to be nearly the same."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

Message = dict[str, str]  # {"role", "content"}
Content = str | list[Message]

SHINGLE_WORDS = 8
NEAR_IDENTICAL = 0.5  # share of the shorter document's shingles found in the other one


@dataclass(frozen=True)
class Document:
    """One text, or one conversation, with where it comes from.

    `where` is file:line, for messages. What is `private` stays out of reports and bundles.
    """

    content: Content
    domain: str
    source: str
    licence: str
    where: str = ""
    private: bool = False

    @cached_property
    def words(self) -> list[str]:
        """Words of the text in one spelling: compatibility forms, case and spacing folded."""
        return unicodedata.normalize("NFKC", plain(self.content)).casefold().split()

    @cached_property
    def id(self) -> str:
        """The sha256 (hex, 16 digits) of the normalised text."""
        return hashlib.sha256(" ".join(self.words).encode()).hexdigest()[:16]

    def order(self, seed: int) -> str:
        """Return the sort key that shuffles documents: a hash of the seed and the text."""
        return hashlib.sha256(f"{seed} {self.id}".encode()).hexdigest()


def plain(content: Content) -> str:
    """Return the words of a document without roles."""
    if isinstance(content, str):
        return content
    return "\n\n".join(message["content"] for message in content)


def shingles(text: str) -> frozenset[int]:
    """Return hashes of every run of eight words; a shorter text is one shingle."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    runs = range(max(1, len(words) - SHINGLE_WORDS + 1))
    return frozenset(
        int.from_bytes(
            hashlib.blake2b(" ".join(words[i : i + SHINGLE_WORDS]).encode(), digest_size=8).digest()
        )
        for i in runs
    )


@dataclass
class NearDuplicates:
    """Finds documents of other sets that share most of their shingles with a text."""

    sizes: list[int] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    postings: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, text: str, set_name: str) -> None:
        marks = shingles(text)
        for mark in marks:
            self.postings[mark].append(len(self.sets))
        self.sizes.append(len(marks))
        self.sets.append(set_name)

    def clashes(self, text: str, set_name: str) -> bool:
        """Tell whether a document outside `set_name` is nearly the same as `text`."""
        marks = shingles(text)
        shared = Counter(
            number
            for mark in marks
            for number in self.postings.get(mark, ())
            if self.sets[number] != set_name
        )
        return any(
            count > NEAR_IDENTICAL * min(len(marks), self.sizes[number])
            for number, count in shared.items()
        )


def count_overlapping(texts: Iterable[tuple[str, str]]) -> int:
    """Return how many of the (set name, text) pairs are nearly the same as one of another set."""
    pairs = list(texts)
    index = NearDuplicates()
    for set_name, text in pairs:
        index.add(text, set_name)
    return sum(index.clashes(text, set_name) for set_name, text in pairs)
