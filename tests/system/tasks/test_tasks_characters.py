"""The task characters: its text, its windows, its model."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pydoc_data.topics import topics

import pytest
import torch
from torch.utils.data import DataLoader

from orchestra.errors import InputError
from orchestra.tasks import Characters, TensorData, evaluate, load_task
from orchestra.tasks.characters import (
    GPT,
    KNOWN,
    VOCABULARY,
    split_text,
    text,
    text_sha256,
    windows,
)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def words(paragraphs: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in paragraphs.split("\n\n")]


def decoded(tokens: torch.Tensor) -> str:
    return "".join((KNOWN + "?")[token] for token in tokens.tolist())


# The text


def test_the_text_holds_each_paragraph_of_the_topics_once_in_their_order() -> None:
    paragraphs = words(text())
    assert len(set(paragraphs)) == len(paragraphs)
    every = [paragraph for topic in sorted(topics) for paragraph in words(topics[topic])]
    assert paragraphs == [paragraph for paragraph in dict.fromkeys(every) if paragraph]


def test_the_splits_are_the_whole_text_one_after_the_other() -> None:
    train, validation, test = split_text()
    assert train + validation + test == text()
    assert len(train) == pytest.approx(0.8 * len(text()), abs=1)
    assert len(validation) == pytest.approx(len(test), abs=1)


def test_the_text_is_the_same_in_each_process() -> None:
    code = "from orchestra.tasks.characters import text_sha256; print(text_sha256())"
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": other},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    ).stdout.strip()
    assert output == text_sha256() == hashlib.sha256(text().encode()).hexdigest()


def test_a_python_without_the_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match=r"comes without pydoc_data\.topics"):
        load_task("characters")


# Windows


def test_windows_follow_each_other_and_none_reaches_into_another_split() -> None:
    task = Characters(context=50).build()
    for data, part in zip((task.train, task.validation, task.test), split_text(), strict=True):
        assert isinstance(data, TensorData)
        tokens, following = data.tensors
        count = (len(part) - 1) // 50
        assert tokens.shape == following.shape == (count, 50)
        known = "".join(character if character in KNOWN else "?" for character in part)
        assert decoded(tokens.flatten()) == known[: count * 50]
        assert decoded(following.flatten()) == known[1 : count * 50 + 1]


def test_an_unknown_character_is_one_more() -> None:
    tokens, following = windows("a\né~", 3)
    assert tokens.tolist() == [[KNOWN.index("a"), 0, VOCABULARY - 1]]
    assert following.tolist() == [[0, VOCABULARY - 1, VOCABULARY - 2]]


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"width 30 is no multiple of heads 4; set width to 32"):
        Characters(width=30)
    with pytest.raises(InputError, match=r"context: 10 is more than .* set it to 9 or less"):
        windows("ten letter", 10)


# The model


def test_a_later_character_changes_nothing_before_it() -> None:
    torch.manual_seed(0)
    model = GPT(VOCABULARY, 16, 2, 4, 32)
    tokens = torch.randint(VOCABULARY, (3, 16))
    before = model(tokens)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCABULARY
    after = model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert ((before - after)[:, 9:].abs().amax((0, 2)) > 0).all()


def test_a_place_counts_even_among_equal_characters() -> None:
    torch.manual_seed(0)
    logits = GPT(VOCABULARY, 8, 2, 2, 16)(torch.zeros(1, 8, dtype=torch.long))[0]
    assert not torch.allclose(logits[0], logits[5], atol=1e-4)


def test_the_model_is_of_the_size_that_its_docstring_says() -> None:
    model = load_task("characters").model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 116_705
    assert "116,705" in str(Characters.__doc__)
    wide = load_task("characters(width=32, layers=1, heads=2, context=10)").model()
    assert wide(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 7, VOCABULARY)


@pytest.mark.usefixtures("one_thread")
def test_fifty_steps_beat_an_even_guess_by_far_and_bits_are_nats() -> None:
    task = load_task("characters(width=32, heads=2)")
    torch.manual_seed(0)
    model = task.model()
    assert task.validation is not None
    untrained = evaluate(task, model, task.validation, 100)
    assert untrained["bits_per_character"] == pytest.approx(math.log2(VOCABULARY), abs=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = iter(DataLoader(task.train, 16, collate_fn=task.collate))
    for _ in range(50):
        optimizer.zero_grad()
        torch.autograd.backward(task.loss(model, next(batches)))
        optimizer.step()
    figures = evaluate(task, model, task.validation, 100)
    assert figures["bits_per_character"] < 4.5
    assert figures["loss"] == pytest.approx(figures["bits_per_character"] * math.log(2), rel=1e-5)
