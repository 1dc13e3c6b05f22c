"""A small GPT on the characters of Tiny Shakespeare with AdamW; validation loss in nats a character.

    python examples/char_lm.py --data DIR --quick
    torchrun --standalone --nproc-per-node=2 examples/char_lm.py --data DIR --target 1.80

DIR holds input.txt: the first 90% train, the last 10% are for validation. A sample is a block of characters, of which
the network predicts every next one.
"""

import harness
import numpy as np
import readers
import torch
from torch import nn

import cannikin

settings = harness.settings(
    __doc__,
    epochs=6.0,  # passes at the initial batch that training is worth, whatever the batch grows to
    batch_size=32,  # B0: the total batch of all ranks at the start, in blocks
    max_batch_size=128,  # and what it may grow to; 0 keeps it
    lr=2e-3,  # at its peak, for B0; times the square root of B/B0 at a batch B
    warmup=0.5,  # passes until the peak
    weight_decay=0.1,
    block=64,  # characters of context
    num_layers=4,
    num_heads=4,
    width=96,
    dropout=0.0,
    max_chars=100_000_000,  # use the beginning of the text only
    seed=0,
    quick={"epochs": 2.0, "max_chars": 20_000, "block": 32, "num_layers": 2, "width": 64},
)
device = harness.start(settings.seed)

written = readers.text(settings.data)[: settings.max_chars]
alphabet = sorted(set(written))
number = {char: place for place, char in enumerate(alphabet)}
chars = torch.tensor([number[char] for char in written], device=device)
train, validation = chars.tensor_split([int(0.9 * len(chars))])
num_blocks = len(train) // settings.block - 1  # one less than fit, so that an epoch may begin anywhere in the first
within = torch.arange(settings.block, device=device)


class Layer(nn.Module):
    """Attention to what came before, then an MLP, each beside a way around."""

    def __init__(self, width, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        # [samples, block, width] as [samples, heads, block, width of a head], for each of query, key and value
        query, key, value = self.inputs(self.norm1(x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.outputs(seen.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Characters and places go in, a score for every next character comes out."""

    def __init__(self, num_chars, block, num_layers, num_heads, width, dropout):
        super().__init__()
        self.char, self.place = nn.Embedding(num_chars, width), nn.Embedding(block, width)
        self.layers = nn.Sequential(*[Layer(width, num_heads, dropout) for _ in range(num_layers)], nn.LayerNorm(width))
        for table in (self.char, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x):
        x = self.char(x) + self.place.weight[: x.shape[1]]
        return nn.functional.linear(self.layers(x), self.char.weight)  # the table serves at both ends


net = GPT(len(alphabet), settings.block, settings.num_layers, settings.num_heads, settings.width, settings.dropout).to(
    device
)
groups = harness.decay_groups(net, settings.weight_decay)
optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.99))
# The rate follows the total batch by the square root rule, because the optimizer is AdamW (lr_rule).
model = cannikin.HeteroDataParallel(net, optimizer, run_dir=settings.run_dir)
loader = cannikin.HeteroDataLoader(
    harness.Rows(num_blocks),
    model=model,
    batch_size=settings.batch_size,
    max_batch_size=settings.max_batch_size or None,
    seed=settings.seed,
    collate_fn=harness.Rows.collate,
)
schedule = harness.one_cycle(optimizer, model, settings, num_blocks)  # by progress
autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def blocks(text, starts):
    """Blocks of the text, and the same one character on: what goes in and what should come out."""
    places = starts[:, None] + within
    return text[places], text[places + 1]


def cross_entropy(network, inputs, targets):
    """Nats a character. All blocks are as long, so a mean over characters is one over samples too."""
    with autocast:
        scores = network(inputs)
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def validation_loss():
    """The mean over the validation text, of which every rank takes its blocks."""
    net.eval()
    starts = torch.arange(0, len(validation) - settings.block, settings.block, device=device)
    mine = starts[model.engine.rank :: model.engine.world_size]
    total = sum(cross_entropy(net, *blocks(validation, part)) * len(part) for part in mine.split(64))
    net.train()
    return harness.sum_over_ranks(total)[0] / len(starts)


log = harness.Log(model, loader, settings, metric="validation_loss", lower_is_better=True)
for _ in model.epochs(settings.epochs):
    log.start()
    # Every epoch cuts the text at other places, the same on all ranks.
    offset = int(np.random.default_rng([settings.seed, loader.epoch]).integers(settings.block))
    for rows in loader:
        inputs, targets = blocks(train, rows.to(device) * settings.block + offset)
        optimizer.zero_grad()
        loss = cross_entropy(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # of the gradient of all ranks: clip after backward, as ever
        optimizer.step()
        schedule.step()
        log.step(loss)
    log.stop()
    if log.epoch(validation_loss=validation_loss()):
        break
log.finish()
