"""A GPT on the characters of Tiny Shakespeare whose layers are sharded over the ranks (FSDP2); validation loss in nats.

    python examples/gpt_fsdp.py --data DIR --quick
    torchrun --standalone --nproc-per-node=2 examples/gpt_fsdp.py --data DIR --target 1.80

DIR holds input.txt: the first 90% train, the last 10% are for validation. Every layer is a group of `fully_shard`, is
computed once more in backward instead of kept (activation checkpointing), and computes in bfloat16; parameters,
gradients between ranks and the optimizer are float32.
"""

import harness
import readers
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

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
    max_chars=100_000_000,  # use the beginning of the text only
    seed=0,
    quick={"epochs": 2.0, "max_chars": 20_000, "block": 32, "num_layers": 2, "width": 64},
)
device = harness.start(settings.seed)
harness.join(device)  # fully_shard needs the process group, which HeteroDataParallel would make

written = readers.text(settings.data)[: settings.max_chars]
alphabet = sorted(set(written))
number = {char: place for place, char in enumerate(alphabet)}
chars = torch.tensor([number[char] for char in written], device=device)
train, validation = chars.tensor_split([int(0.9 * len(chars))])
num_blocks = (len(train) - 1) // settings.block
within = torch.arange(settings.block, device=device)


class Layer(nn.Module):
    """Attention to what came before, then an MLP, each beside a way around."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x):
        # [samples, block, width] as [samples, heads, block, width of a head], for each of query, key and value
        query, key, value = self.inputs(self.norm1(x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outputs(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Characters and places go in, a score for every next character comes out."""

    def __init__(self, num_chars, block, num_layers, num_heads, width):
        super().__init__()
        self.char, self.place = nn.Embedding(num_chars, width), nn.Embedding(block, width)
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, num_chars)
        for table in (self.char, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x):
        x = self.char(x) + self.place.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.score(self.norm(x)).float()


torch.manual_seed(settings.seed)  # every rank keeps its shards of the same weights
net = GPT(len(alphabet), settings.block, settings.num_layers, settings.num_heads, settings.width).to(device)
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in net.layers:
    fully_shard(layer, mp_policy=precision)
fully_shard(net, mp_policy=precision)  # the whole comes last, with what its layers have not got
groups = harness.decay_groups(net, settings.weight_decay)
optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.99))  # of the shards, so after fully_shard
engine = cannikin.attach(net, optimizer, run_dir=settings.run_dir)
loader = cannikin.HeteroDataLoader(
    harness.Rows(num_blocks),
    model=engine,
    batch_size=settings.batch_size,
    max_batch_size=settings.max_batch_size or None,
    seed=settings.seed,
    collate_fn=harness.Rows.collate,
)
schedule = harness.one_cycle(optimizer, engine, settings, num_blocks)  # by progress


def cross_entropy(text, starts):
    """Nats a character. All blocks are as long, so a mean over characters is one over samples too."""
    places = starts[:, None] + within
    return nn.functional.cross_entropy(net(text[places]).flatten(0, 1), text[places + 1].flatten())


@torch.no_grad()
def validation_loss():
    """The mean over the validation text. Layers are gathered here too: every rank must take as many batches."""
    net.eval()
    starts = torch.arange(0, len(validation) - settings.block, settings.block, device=device)
    mine = starts[: len(starts) // engine.world_size * engine.world_size][engine.rank :: engine.world_size]
    total = sum(cross_entropy(validation, part) * len(part) for part in mine.split(64))
    net.train()
    return harness.sum_over_ranks(total)[0] / (len(mine) * engine.world_size)


log = harness.Log(engine, loader, settings, metric="validation_loss", lower_is_better=True)
for _ in engine.epochs(settings.epochs):
    log.start()
    for rows in loader:
        optimizer.zero_grad()
        loss = cross_entropy(train, rows.to(device) * settings.block)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # of the gradient of all ranks: clip after backward, as ever
        optimizer.step()
        schedule.step()
        log.step(loss)
    log.stop()
    if log.epoch(validation_loss=validation_loss()):
        break
log.finish()
