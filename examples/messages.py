"""A parallel corpus of a hundred languages: messages of two packages, with English.

Users translate Django and Plone. The packages hold their catalogues, `.po` files with
English messages, each beside its translation: from 20 to some 4,000 in a language.
Nothing is downloaded but the packages (`pip install -e '.[tasks]'`).

* The split is by English message. What differs in case, digits or punctuation only is
  one message. A message that is held back is held back in all languages, so no model
  has seen what it shall write.
* Subwords are two vocabularies of sentencepiece, learned on the training messages:
  one of all languages, one of English.
* Languages are drawn with probability n^(1/T), where n is the number of training
  messages and T the temperature: T = 1 is the data as it is, T = 5 lets rare ones
  speak.
* A batch is a function of (seed, step) alone, so the step is the position in the data.
  Its messages are of about one length and padded to one of `LENGTHS`.
"""

import io
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polib  # pyright: ignore[reportMissingModuleSource]
import sentencepiece  # pyright: ignore[reportMissingImports]

PACKAGES = {"django": "Django", "plone.app.locales": "plone.app.locales"}
# Plone's names of languages, where Django has others.
SAME_LANGUAGE = {
    "fu": "fur",
    "mk_MK": "mk",
    "no": "nb",
    "sr@Cyrl": "sr",
    "sr@Latn": "sr_Latn",
    "zh_CN": "zh_Hans",
    "zh_TW": "zh_Hant",
}
LENGTHS = (12, 24)  # tokens of a side; longer messages are left out
PAD, BEGIN, END, UNKNOWN = range(4)
# Shares of the English messages that are held back, in percent.
TEST_PERCENT = 12
VALIDATION_PERCENT = 4  # for choices of sizes


class Message(NamedTuple):
    """A message.

    Attributes:
      language: the code of the language, such as ``"pt_BR"``.
      source: its text in that language.
      english: the English text.
    """

    language: str
    source: str
    english: str


def read_messages(languages: Sequence[str] | None = None) -> list[Message]:
    """The messages of all packages, sorted; each stands there once.

    Args:
      languages: the languages to read; ``None`` for all.

    Raises:
      FileNotFoundError: if a package came without its catalogues.
    """
    messages = set()
    for package in PACKAGES:
        folder = Path(str(resources.files(package)))
        catalogues = sorted(folder.glob("**/LC_MESSAGES/*.po"))
        if not catalogues:
            raise FileNotFoundError(f"{folder} holds no .po files: reinstall {package}")
        for path in catalogues:
            language = path.parts[-3]
            language = SAME_LANGUAGE.get(language, language)
            if languages is None or language in languages:
                messages.update(_read_catalogue(path, language))
    return sorted(messages)


def _read_catalogue(path: Path, language: str) -> Iterator[Message]:
    """The messages of a file that are translated, but for those that stay English."""
    try:
        entries = polib.pofile(str(path))
    except OSError:  # one file of Plone is not in the format
        return
    for entry in entries:
        english = _read_english(entry)
        source = entry.msgstr
        if entry.msgid_plural:
            source = entry.msgstr_plural[max(entry.msgstr_plural)]
        source = _normalize(source)
        is_translated = source and source != english and not entry.fuzzy
        if is_translated and english and not entry.obsolete and language[:2] != "en":
            yield Message(language, source, english)


def _read_english(entry: Any) -> str:
    """The English text of an entry; empty if the file does not tell it.

    Django's messages are named by their English text. Plone's have names such as
    ``label_edit``, and the text in a comment: ``Default: "Edit"``.
    """
    default = re.search(r'Default: "(.*)"', entry.comment, re.DOTALL)
    text = default[1] if default else entry.msgid_plural or entry.msgid
    is_name = default is None and "_" in text and " " not in text
    return "" if is_name else _normalize(text)


def _normalize(text: str) -> str:
    """The text with one way to write each character, and single blanks."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def choose_part(english: str) -> str:
    """The part of the corpus that a message is in, the same in all languages.

    Returns:
      ``"training"``, ``"validation"`` or ``"test"``.
    """
    letters = re.sub(r"[\W\d_]", "", english.lower())
    percent = zlib.crc32(letters.encode()) % 100
    if percent < TEST_PERCENT:
        return "test"
    return "validation" if percent < TEST_PERCENT + VALIDATION_PERCENT else "training"


def learn_subwords(
    texts: Sequence[str], size: int, folder: Path
) -> sentencepiece.SentencePieceProcessor:
    """A vocabulary of so many subwords; a file in the folder keeps it for next time."""
    digest = zlib.crc32("\n".join([str(size), *texts]).encode())
    path = folder / f"subwords-{size}-{digest:08x}.model"
    if not path.exists():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=size,
            model_type="bpe",
            character_coverage=0.998,
            byte_fallback=True,  # of rare characters
            normalization_rule_name="identity",
            pad_id=PAD,
            bos_id=BEGIN,
            eos_id=END,
            unk_id=UNKNOWN,
            num_threads=1,
            minloglevel=2,
        )
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())


class Pairs(NamedTuple):
    """Messages as tokens, padded to the greatest length.

    Attributes:
      languages: the index of the language of each message, integers ``[messages]``.
      source: the language's token, subwords and `END`, ``[messages, length]``.
      target: English subwords and `END`, ``[messages, length]``.
      lengths: tokens of the longer side, ``[messages]``.
      english: the English texts.
    """

    languages: np.ndarray
    source: np.ndarray
    target: np.ndarray
    lengths: np.ndarray
    english: np.ndarray

    def select(self, rows: np.ndarray) -> "Pairs":
        """Some of the messages, by their indices or by a mask."""
        return Pairs(*(field[rows] for field in self))

    def cut(self, length: int) -> "Pairs":
        """The messages with so many tokens of each side."""
        return self._replace(
            source=self.source[:, :length], target=self.target[:, :length]
        )


class Corpus:
    """All messages that are short enough, and the two vocabularies.

    Attributes:
      languages: the codes, that with the most training messages first.
      counts: the number of training messages of each language, ``[languages]``,
        without those that are too long.
      parts: ``"training"``, ``"validation"`` and ``"test"``.
      source_words: the size of the vocabulary of sources, languages included.
      english_words: the size of the vocabulary of targets.
    """

    def __init__(
        self,
        folder: Path,
        *,
        languages: Sequence[str] | None = None,
        source_subwords: int = 8000,
        english_subwords: int = 1000,
    ) -> None:
        """Reads the messages, and learns or loads subwords.

        Args:
          folder: a folder in which vocabularies are kept.
          languages: the languages; ``None`` for all.
          source_subwords: the subwords of all languages together.
          english_subwords: the subwords of English.
        """
        messages = read_messages(languages)
        training = [
            message
            for message in messages
            if choose_part(message.english) == "training"
        ]
        counter = Counter(message.language for message in training)
        self.languages = [language for language, _ in counter.most_common()]
        texts = [message.source for message in training]
        english = sorted({message.english for message in training})
        subwords = learn_subwords(texts, source_subwords, folder)
        self._english_subwords = learn_subwords(english, english_subwords, folder)
        self.source_words = source_subwords + len(self.languages)
        self.english_words = english_subwords

        # A language whose few messages are all held back is left out.
        messages = [message for message in messages if message.language in counter]
        pairs = self._encode(messages, subwords)
        is_short = pairs.lengths <= LENGTHS[-1]
        part = np.array([choose_part(message.english) for message in messages])
        self.parts = {
            name: pairs.select((part == name) & is_short)
            for name in ("training", "validation", "test")
        }
        self.counts = np.bincount(
            self.parts["training"].languages, minlength=len(self.languages)
        )

    def _encode(
        self,
        messages: Sequence[Message],
        subwords: sentencepiece.SentencePieceProcessor,
    ) -> Pairs:
        """The messages as tokens; `lengths` tells which of them are cut off."""
        languages = np.array([self.languages.index(m.language) for m in messages])
        first = self.source_words - len(self.languages)  # the token of language 0
        encoded = subwords.encode([message.source for message in messages])
        sources = [
            [first + language, *tokens]
            for language, tokens in zip(languages, encoded, strict=True)
        ]
        english = [message.english for message in messages]
        targets = self._english_subwords.encode(english)
        return Pairs(
            languages,
            source=_pad(sources),
            target=_pad(targets),
            # `END` is one more.
            lengths=1 + np.maximum([*map(len, sources)], [*map(len, targets)]),
            english=np.array(english, object),
        )

    def test_messages(self, languages: Sequence[str], limit: int) -> Pairs:
        """Messages that are held back, in an order that is random but always the same.

        Args:
          languages: the languages that are tested.
          limit: the most messages of a language.
        """
        pairs = self.parts["test"]
        order = np.random.default_rng(0).permutation(len(pairs.languages))
        rows = [
            order[pairs.languages[order] == self.languages.index(language)][:limit]
            for language in languages
        ]
        return pairs.select(np.concatenate(rows))

    def decode(self, tokens: np.ndarray) -> list[str]:
        """English texts of tokens ``[messages, length]``, each up to its `END`."""
        rows = [row[: (row == END).argmax()] if END in row else row for row in tokens]
        return self._english_subwords.decode([row.tolist() for row in rows])


def _pad(rows: list[list[int]]) -> np.ndarray:
    """Tokens ``[rows, greatest length]``, `END` behind each row, then `PAD`."""
    tokens = np.full((len(rows), LENGTHS[-1]), PAD, np.int32)
    for index, row in enumerate(rows):
        ended = [*row, END][: LENGTHS[-1]]
        tokens[index, : len(ended)] = ended
    return tokens


def shift_right(target: np.ndarray) -> np.ndarray:
    """Tokens that a decoder reads to write targets: `BEGIN` and all but the last."""
    return np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BEGIN)


class Batches:
    """Random batches of training messages, a function of (seed, step)."""

    def __init__(
        self, pairs: Pairs, *, tokens: int, temperature: float, seed: int
    ) -> None:
        """Weighs the messages.

        Args:
          pairs: the training messages, of one language or of many.
          tokens: positions of targets in a batch, padding included.
          temperature: T, see the head of this file.
          seed: another seed draws other batches.
        """
        self._pairs = pairs
        self._tokens = tokens
        self._seed = seed
        counts = np.bincount(pairs.languages)
        # A language with n messages has n of these weights: n^(1/T) together.
        weights = counts[pairs.languages] ** (1 / temperature - 1)
        bucket = np.searchsorted(LENGTHS, pairs.lengths)
        self._rows = [np.flatnonzero(bucket == index) for index in range(len(LENGTHS))]
        self._sums = [np.cumsum(weights[rows]) for rows in self._rows]

    def draw(self, step: int) -> Pairs:
        """The batch of a step: messages of one bucket, padded to its length.

        Shorter messages stand in larger batches, so all batches have as many tokens.
        """
        rng = np.random.default_rng([self._seed, step])
        totals = np.array([sums[-1] if len(sums) else 0 for sums in self._sums])
        # Buckets are drawn by their tokens: batches of short messages hold more.
        chances = totals * LENGTHS
        bucket = rng.choice(len(LENGTHS), p=chances / chances.sum())
        sums = self._sums[bucket]
        draws = rng.random(self._tokens // LENGTHS[bucket]) * sums[-1]
        chosen = self._pairs.select(self._rows[bucket][np.searchsorted(sums, draws)])
        return chosen.cut(LENGTHS[bucket])


def show_versions() -> str:
    """The names and versions of the packages that hold the corpus."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES.values())
