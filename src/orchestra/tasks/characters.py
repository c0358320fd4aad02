"""Text, character by character: the task of language models."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from orchestra.errors import InputError
from orchestra.settings import Settings, setting

if TYPE_CHECKING:
    from orchestra.tasks.task import Task
    from orchestra.tasks.tensors import TensorData

#: Line feed and printable ASCII; whatever else counts as one more character.
KNOWN = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = len(KNOWN) + 1


@dataclass(frozen=True, repr=False)
class Characters(Settings):
    """Text: what a small GPT learns of Python's own documentation, character by character.

    The text is `pydoc_data.topics` of the standard library, about 370,000 characters once every
    paragraph that occurs again is left out. It differs between versions of Python: compare runs
    of one version only; `orchestra.tasks.characters.text_sha256()` tells texts apart. The first
    80% train, the next 10% validate, the last 10% test; each part is cut into windows that do not
    overlap. A sample is a window of `context` characters, each of which has to be predicted from
    those before it.

    The model is a GPT over 97 characters: 116,705 parameters at the defaults. Loss: cross entropy
    in nats, the mean over characters; metric: bits_per_character, the same in bits (6.6 for an
    even guess among 97).
    """

    _: KW_ONLY
    context: int = setting(64, "characters in a window", low=1, high=100_000)
    layers: int = setting(2, "transformer blocks", low=1, high=1000)
    heads: int = setting(4, "heads of attention; they divide the width", low=1, high=1000)
    width: int = setting(64, "numbers that stand for a character", low=1, high=100_000)

    def check(self) -> None:
        """Each head gets an equal share of the width."""
        if self.width % self.heads:
            raise InputError(
                f"Characters: width {self.width} is no multiple of heads {self.heads}; "
                f"set width to {self.width - self.width % self.heads + self.heads}"
            )

    def build(self) -> Task:
        """The windows in memory, and a model of these settings."""
        from functools import partial

        from orchestra.tasks.gpt import GPT, next_token_loss, text_scores
        from orchestra.tasks.task import Task
        from orchestra.tasks.tensors import TensorData

        train, validation, test = (windows(part, self.context) for part in split_text())
        return Task(
            model=partial(GPT, VOCABULARY, self.context, self.layers, self.heads, self.width),
            train=train,
            validation=validation,
            test=test,
            loss=next_token_loss,
            metrics=text_scores,
            collate=TensorData.collate,
        )


def text() -> str:
    """The documentation: topics in the order of their names, each paragraph where it comes first.

    Several topics repeat others in full. Without that rule, much of the test would stand in the
    training data word for word.
    """
    try:
        topics: Any = importlib.import_module("pydoc_data.topics")
    except ImportError:
        raise InputError(
            "task characters: this Python comes without pydoc_data.topics, the text of the task; "
            "use one with the whole standard library"
        ) from None
    first: dict[str, str] = {}
    for _, topic in sorted(topics.topics.items()):
        for paragraph in topic.split("\n\n"):
            first.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    return "\n\n".join(paragraph for words, paragraph in first.items() if words)


def text_sha256() -> str:
    """Of `text()` in UTF-8: equal where two machines train on the same text."""
    return hashlib.sha256(text().encode()).hexdigest()


def split_text() -> tuple[str, str, str]:
    """The texts for training, validation and test: 80%, 10% and 10%, one after the other."""
    whole = text()
    end, start = len(whole) * 8 // 10, len(whole) * 9 // 10
    return whole[:end], whole[end:start], whole[start:]


def windows(part: str, context: int) -> TensorData:
    """Samples (characters, those that follow), each of shape (context,), cut one after the other.

    Raises:
        InputError: the text is shorter than one window.
    """
    import torch

    from orchestra.tasks.tensors import TensorData

    places = {character: place for place, character in enumerate(KNOWN)}
    tokens = torch.tensor([places.get(character, len(KNOWN)) for character in part])
    count = (len(tokens) - 1) // context
    if count < 1:
        raise InputError(
            f"Characters.context: {context} is more than the shortest part of the text holds; "
            f"set it to {len(tokens) - 1} or less"
        )
    end = count * context
    return TensorData(tokens[:end].view(count, context), tokens[1 : end + 1].view(count, context))
