"""A small language model of characters, and the text that it is trained on: no download, equal bits on every machine.

The text is half sentences of a seeded grammar, half sources of Python's standard library; the latter depend on the
version of Python, and a run is compared with others of the same one.
"""

from __future__ import annotations

import functools
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from gradbus.models.seeds import derive_seed, seeded_generator
from gradbus.models.task import EvalResult, ShardResult

VOCABULARY = 96  # printable ASCII, and one for all else
_SOURCES = (
    "argparse", "ast", "calendar", "configparser", "csv", "decimal", "difflib", "enum", "fractions", "inspect",
    "mailbox", "pathlib", "pickle", "random", "shutil", "socket", "statistics", "subprocess", "textwrap", "threading",
    "typing", "uuid", "zipfile",
)  # fmt: skip
_NOUNS = (
    "rank", "client", "model", "bus", "network", "packet", "epoch", "gradient", "weight", "buffer", "king", "garden",
    "river", "stone", "letter",
)  # fmt: skip
_VERBS = (
    "sends", "takes", "holds", "keeps", "finds", "loses", "opens", "closes", "follows", "forgets", "measures",
    "answers",
)  # fmt: skip
_ADJECTIVES = ("small", "old", "quick", "silent", "heavy", "distant", "early", "late", "broken", "equal")
_ADVERBS = ("slowly", "twice", "again", "never", "often", "soon")


def sentences(num_chars: int, seed: int = 0) -> str:
    """So many characters of sentences with agreement over a distance, such as quotes and counts that must fit."""
    draw = random.Random(derive_seed("sentences", seed))

    def phrase(depth: int) -> str:
        one = f"the {draw.choice(_ADJECTIVES) + ' ' if draw.random() < 0.4 else ''}{draw.choice(_NOUNS)}"
        if depth and draw.random() < 0.35:
            one += f" that {draw.choice(_VERBS)} {phrase(depth - 1)}"
        return one

    found, size = [], 0
    while size < num_chars:
        text = f"{phrase(2)} {draw.choice(_VERBS)} {phrase(1)}"
        if draw.random() < 0.3:
            text = f'"{text} {draw.choice(_ADVERBS)}", says {phrase(0)}'
        elif draw.random() < 0.3:
            a, b = draw.randrange(10, 60), draw.randrange(10, 40)
            text = f"{a} and {b} are {a + b}, so {text}"
        found.append(text[0].upper() + text[1:] + ".\n")
        size += len(found[-1])
    return "".join(found)[:num_chars]


def sources() -> str:
    """Modules of the standard library, one after the other."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [folder / f"{name}.py" for name in _SOURCES]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.exists())


@functools.cache
def corpus(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Characters of training and of validation: int64, shape (n,), below VOCABULARY. A tenth of each is the latter."""
    code = sources()
    parts = [_symbols(text) for text in (sentences(len(code), seed), code)]
    cuts = [9 * part.numel() // 10 for part in parts]
    train = torch.cat([part[:cut] for part, cut in zip(parts, cuts, strict=True)])
    return train, torch.cat([part[cut:] for part, cut in zip(parts, cuts, strict=True)])


def _symbols(text: str) -> Tensor:
    codes = torch.frombuffer(bytearray(text, f"utf-32-{sys.byteorder[0]}e"), dtype=torch.int32)
    return (codes.long() - 31).clamp_(0, VOCABULARY - 1)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class CharTransformer(nn.Module):
    """A decoder of 4 layers and width 128 over characters, with tied embeddings: 0.81 million parameters.

    Input int64 (B, T), T at most ``context``; output logits float32 (B, T, VOCABULARY).
    """

    def __init__(self, seed: int = 0, *, width: int = 128, layers: int = 4, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        generator = seeded_generator("char_transformer", seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        found = self.embed(x) + self.position.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(found)))  # type: ignore[no-any-return]


class TextTask:
    """Prediction of the next character, for data-parallel training: ranks draw places of the text at random."""

    def __init__(
        self,
        *,
        batch_size: int = 8,
        steps: int = 1000,
        seed: int = 0,
        context: int = 64,
        windows: int = 1024,
        is_tuned: bool = False,
    ) -> None:
        """``steps``: of an epoch. ``seed``: of the initial weights. ``windows``: that are evaluated. ``is_tuned``:
        options are chosen by this evaluation, so it is of other windows, between those of the others."""
        self.batch_size, self.steps, self.seed = batch_size, steps, seed
        self.context, self.windows, self.is_tuned = context, windows, is_tuned

    def build_model(self) -> nn.Module:
        """A new model, with the same initial weights at every call."""
        return CharTransformer(self.seed, context=self.context)

    def prepare_shard(self, rank: int, world: int) -> None:
        """Load the text."""
        corpus()

    def num_batches(self, *, rank: int, world: int, epoch: int) -> int:
        """Return those of a rank in an epoch."""
        return self.steps

    def batches(self, *, rank: int, world: int, epoch: int, seed: int) -> Iterator[Tensor]:
        """int64, shape (batch_size, context + 1) each."""
        generator = seeded_generator("text", seed, epoch, rank)
        train, _ = corpus()
        for _ in range(self.steps):
            starts = torch.randint(train.numel() - self.context - 1, (self.batch_size, 1), generator=generator)
            yield train[starts + torch.arange(self.context + 1)]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean over all characters, in nats."""
        logits = model(batch[:, :-1])
        return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> EvalResult:
        """The mean loss over windows that are spread over the text of validation."""
        model.eval()
        windows = self.windows
        _, text = corpus()
        places = torch.linspace(0, text.numel() - self.context - 2, 2 * windows).long()
        starts = places[int(self.is_tuned) :: 2, None]
        rows = text[starts + torch.arange(self.context + 1)]
        losses = [float(self.loss(model, part)) * len(part) for part in torch.split(rows, 64)]
        model.train()
        return EvalResult(accuracy=None, loss=sum(losses) / windows, num_samples=windows)

    def evaluate_shard(self, model: nn.Module, *, rank: int, world: int) -> Any:
        """On rank 0 alone; the others count nothing."""
        if rank:
            return ShardResult(correct=None, total=0, loss_sum=0.0)
        found = self.evaluate(model)
        return ShardResult(correct=None, total=found.num_samples, loss_sum=found.loss * found.num_samples)
