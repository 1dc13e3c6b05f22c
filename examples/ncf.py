"""NeuMF on MovieLens-1M with Adam and the square root rule, to a hit rate at 10 of 0.69.

    python examples/ncf.py --data DIR --quick
    torchrun --standalone --nproc-per-node=2 examples/ncf.py --data DIR --target 0.69

DIR holds ratings.dat of ml-1m, the files of the NCF authors, or ml-1m-ncf.npz (see readers.py). An epoch is 5 million
samples, a positive and 4 negatives for each of the million ratings, so nothing here is done sample by sample.
"""

import harness
import numpy as np
import readers
import torch
from torch import nn

import cannikin

settings = harness.settings(
    __doc__,
    epochs=12.0,  # passes at the initial batch that training is worth, whatever the batch grows to
    batch_size=4096,  # B0: the total batch of all ranks at the start
    max_batch_size=16_384,  # and what it may grow to; 0 keeps it
    lr=2e-3,  # at its peak, for B0; times the square root of B/B0 at a batch B
    warmup=0.2,  # passes until the peak
    num_negatives=4,  # drawn anew for each positive in each epoch
    num_factors=32,  # of GMF, and of the last layer of the MLP
    max_users=1_000_000,  # train and evaluate on the first of them only
    seed=0,
    quick={"epochs": 2.0, "batch_size": 512, "max_batch_size": 1024, "max_users": 200},
)
device = harness.start(settings.seed)

data = readers.movielens_1m(settings.data)
num_users = min(len(data.candidates), settings.max_users)
num_items = int(max(data.items.max(), data.candidates.max())) + 1
known = data.users < num_users
users, items = torch.tensor(data.users[known]), torch.tensor(data.items[known])
rated = torch.zeros(num_users, num_items, dtype=torch.bool)
rated[users, items] = True
negative_users = users.repeat(settings.num_negatives)
# Column 0 is the item held out, the other 99 were never rated. In NCF's files some of the 99 are the held-out item
# itself, which would always tie: those are left out of the ranking.
candidates = torch.tensor(data.candidates[:num_users])
doubled = candidates[:, 1:] == candidates[:, :1]


def draw_negatives(epoch):
    """Items that their users never rated, one for each of `negative_users`: the same on every rank, new every epoch."""
    (mixed,) = np.random.SeedSequence([settings.seed, epoch]).generate_state(1).tolist()
    generator = torch.Generator().manual_seed(mixed)  # on the CPU: ranks with unlike GPUs must agree
    drawn = torch.randint(num_items, (len(negative_users),), generator=generator)
    wrong = rated[negative_users, drawn].nonzero().squeeze(1)
    while len(wrong):
        drawn[wrong] = torch.randint(num_items, (len(wrong),), generator=generator)
        wrong = wrong[rated[negative_users[wrong], drawn[wrong]]]
    return drawn


class NeuMF(nn.Module):
    """Generalised matrix factorisation beside an MLP, each with embeddings of its own; one logit a pair."""

    def __init__(self, num_users, num_items, num_factors):
        super().__init__()
        wide = 2 * num_factors
        self.user_factors, self.item_factors = (
            nn.Embedding(num_users, num_factors),
            nn.Embedding(num_items, num_factors),
        )
        self.user_inputs, self.item_inputs = nn.Embedding(num_users, wide), nn.Embedding(num_items, wide)
        self.mlp = nn.Sequential(nn.Linear(2 * wide, wide), nn.ReLU(), nn.Linear(wide, num_factors), nn.ReLU())
        self.output = nn.Linear(2 * num_factors, 1)
        for table in (self.user_factors, self.item_factors, self.user_inputs, self.item_inputs):
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, users, items):
        factors = self.user_factors(users) * self.item_factors(items)
        hidden = self.mlp(torch.cat([self.user_inputs(users), self.item_inputs(items)], dim=-1))
        return self.output(torch.cat([factors, hidden], dim=-1)).squeeze(-1)


net = NeuMF(num_users, num_items, settings.num_factors).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=settings.lr)
# The rate follows the total batch by the square root rule, because the optimizer is Adam (lr_rule).
model = cannikin.HeteroDataParallel(net, optimizer, run_dir=settings.run_dir)
loader = cannikin.HeteroDataLoader(
    harness.Rows(len(users) * (1 + settings.num_negatives)),
    model=model,
    batch_size=settings.batch_size,
    max_batch_size=settings.max_batch_size or None,
    seed=settings.seed,
    collate_fn=harness.Rows.collate,
)
schedule = harness.one_cycle(optimizer, model, settings, len(loader.dataset))  # by progress


@torch.no_grad()
def hit_rate():
    """The share of users whose held-out item is among the first 10 of its candidates; every rank takes some users."""
    net.eval()
    num_hits = 0
    for mine in torch.arange(model.engine.rank, num_users, model.engine.world_size).split(1000):
        scores = net(mine[:, None].expand(-1, 100).to(device), candidates[mine].to(device)).cpu()
        below = (scores[:, 1:] < scores[:, :1]) | doubled[mine]  # a tie, or a NaN, is no hit
        num_hits += ((~below).sum(1) < 10).sum()
    net.train()
    return harness.sum_over_ranks(num_hits)[0] / num_users


log = harness.Log(model, loader, settings, metric="hit_rate")
epoch_users = torch.cat([users, negative_users]).to(device)  # the positives come first
for _ in model.epochs(settings.epochs):
    log.start()
    epoch_items = torch.cat([items, draw_negatives(loader.epoch)]).to(device)
    for rows in loader:
        rows = rows.to(device)
        optimizer.zero_grad()
        logits = model(epoch_users[rows], epoch_items[rows])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, (rows < len(users)).float())
        loss.backward()
        optimizer.step()
        schedule.step()
        log.step(loss)
    log.stop()
    if log.epoch(hit_rate=hit_rate()):
        break
log.finish()
