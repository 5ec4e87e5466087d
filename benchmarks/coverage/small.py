"""This repository's own small models: caches of well-known code bases, written from scratch (tests/models)."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.static_zoo import StaticForm, loop

from .case import Run, Subject, random_tokens


class Small(Subject):
    """A form of `tests.models.static_zoo` with its loop."""

    LONGEST = 128

    def __init__(self, form: StaticForm) -> None:
        self.form = form

    def build(self) -> Any:
        torch.manual_seed(3)
        return self.form.make()

    def run(self, model: Any, mode: str, new_tokens: int) -> Run:
        turns = [random_tokens(2, 7, 1, 61), random_tokens(2, 5, 2, 61)]
        model.start(2, self.LONGEST)
        feed = self.form.feed(model, model)
        tokens = loop(feed, turns if mode == "second turn" else turns[:1], new_tokens)
        return Run(tokens, feed.caches())

    def sensitivity(self, model: Any) -> float:
        tokens = self.run(model, "greedy", 20).tokens
        other = tokens.clone()
        other[:, 0] = (other[:, 0] + 1) % 61
        logits = []
        for sequence in (tokens, other):
            model.start(2, self.LONGEST)
            feed = self.form.feed(model, model)
            feed(sequence[:, :-1], 0)
            logits.append(feed(sequence[:, -1:], sequence.shape[1] - 1)[:, -1])
        return (logits[0] - logits[1]).abs().max().item()
