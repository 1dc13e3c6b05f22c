"""The networks of the GPU benchmarks, written out: those of the paper, GPT-2 small, and a chain of plain layers.

All have their published sizes where nothing is said; smaller ones are for trying a benchmark out on a CPU.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class _Block(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = _shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet18(nn.Module):
    """11.2 million parameters, for images of 32x32."""

    def __init__(self, num_classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, inputs = [], width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks += [_Block(inputs, outputs, stride), _Block(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


class _Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, and a way around them; the stride is the 3x3's."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(inputs, width, 1, bias=False)
        self.middle = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.up = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.BatchNorm2d(size) for size in (width, width, 4 * width))
        self.short = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.down(x)))
        y = F.relu(self.norm2(self.middle(y)))
        return F.relu(self.norm3(self.up(y)) + self.short(x))


class ResNet50(nn.Module):
    """25.6 million parameters, for images of 224x224."""

    def __init__(self, num_classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inputs = [], width
        for stage, num_blocks in enumerate((3, 4, 6, 3)):
            for block in range(num_blocks):
                blocks.append(_Bottleneck(inputs, width * 2**stage, 2 if stage > 0 and block == 0 else 1))
                inputs = 4 * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


class _Layer(nn.Module):
    """Attention and two linear layers, normalised before each (GPT-2) or after (BERT)."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).reshape(b, t, c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.causal:
            x = x + self.attend(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class SmallGpt(nn.Module):
    """124 million parameters: 12 layers of width 768, tied embeddings of 50,257 tokens, padded to a multiple of 64."""

    def __init__(self, vocabulary: int = 50304, width: int = 768, layers: int = 12, context: int = 1024) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(_Layer(width, max(1, width // 64), causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.layers(self.tokens(tokens) + self.places(places))))


class Bert(nn.Module):
    """109 million parameters: BERT-base without its pooler, and a head that points at the answer's start and end.

    Returns a logit of each token for the start and one for the end, [b, 2, tokens], as SQuAD asks.
    """

    def __init__(self, vocabulary: int = 30522, width: int = 768, layers: int = 12, context: int = 512) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(_Layer(width, max(1, width // 64), causal=False) for _ in range(layers)))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        segments = (places > 32).long()  # a question of 32 tokens, then the text
        embedded = self.norm(self.tokens(tokens) + self.places(places) + self.segments(segments))
        return self.head(self.layers(embedded)).transpose(1, 2)


class Speech(nn.Module):
    """52 million parameters: DeepSpeech2's two convolutions, five GRUs both ways, a letter per frame.

    Takes spectrograms [b, 1, frequencies, frames] and returns [b, frames / 2, letters].
    """

    def __init__(self, hidden: int = 912, layers: int = 5, frequencies: int = 161, letters: int = 29) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5), bias=False), nn.BatchNorm2d(32), nn.Hardtanh(0, 20)),
            *(nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5), bias=False), nn.BatchNorm2d(32), nn.Hardtanh(0, 20)),
        )
        inputs = 32 * ((frequencies + 3) // 4)  # halved twice, each time rounded up
        sizes = pairwise([inputs, *([hidden] * layers)])
        self.layers = nn.ModuleList(nn.GRU(i, o, batch_first=True, bidirectional=True) for i, o in sizes)
        self.head = nn.Linear(hidden, letters)

    def forward(self, spectrogram: torch.Tensor) -> torch.Tensor:
        x = self.convolutions(spectrogram).flatten(1, 2).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):  # cuDNN's GRUs want their weights in one piece, as they are
            x = x.float().contiguous()
            for layer in self.layers:
                both, _ = layer(x)
                x = both.unflatten(2, (2, -1)).sum(2)  # both directions together, as in DeepSpeech2
        return self.head(x)


class NeuMf(nn.Module):
    """5.2 million parameters: NeuMF with tables for MovieLens-1M's users and items, 98 factors; one logit per pair."""

    def __init__(self, users: int = 6040, items: int = 3706, factors: int = 98) -> None:
        super().__init__()
        wide = 4 * factors
        self.user_factors, self.item_factors = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user_inputs, self.item_inputs = nn.Embedding(users, wide), nn.Embedding(items, wide)
        sizes = pairwise((2 * wide, wide, 2 * factors, factors))
        self.mlp = nn.Sequential(*(nn.Sequential(nn.Linear(i, o), nn.ReLU()) for i, o in sizes))
        self.output = nn.Linear(2 * factors, 1)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        users, items = pairs.unbind(1)
        factors = self.user_factors(users) * self.item_factors(items)
        hidden = self.mlp(torch.cat([self.user_inputs(users), self.item_inputs(items)], dim=-1))
        return self.output(torch.cat([factors, hidden], dim=-1)).squeeze(-1)


class Chain(nn.Module):
    """16.8 million parameters in 16 equal layers that do next to nothing per sample: what takes time is what was added.

    For benchmarks that compare what is learned with a known truth.
    """

    def __init__(self, width: int = 1024, layers: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x
