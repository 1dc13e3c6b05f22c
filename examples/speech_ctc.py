"""Convolutions, GRUs and CTC on the spelled words of CMU AN4, to a word error rate of 40%.

    python examples/speech_ctc.py --data DIR --quick
    torchrun --standalone --nproc-per-node=2 examples/speech_ctc.py --data DIR --target 0.40

DIR holds an4-mfcc13.npz, features made of the sound beforehand (see readers.py): reading the corpus's own sound files
would take an audio library. Utterances differ in length; `collate` pads them and keeps the lengths.
"""

import harness
import readers
import scoring
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import cannikin

settings = harness.settings(
    __doc__,
    epochs=24.0,  # passes at the initial batch that training is worth, whatever the batch grows to
    batch_size=16,  # B0: the total batch of all ranks at the start, in utterances
    max_batch_size=64,  # and what it may grow to; 0 keeps it
    lr=2e-3,  # at its peak, for B0; times the square root of B/B0 at a batch B
    warmup=2.0,  # passes until the peak
    width=160,  # of each direction of a GRU
    num_train=948,
    num_test=130,
    seed=0,
    quick={"epochs": 2.0, "width": 32, "num_train": 64, "num_test": 16},
)
device = harness.start(settings.seed)

train, test = readers.an4(settings.data)
LETTERS = "-ABCDEFGHIJKLMNOPQRSTUVWXYZ' "  # the first is CTC's blank


def sample(features, words):
    """One utterance: its features, each at mean 0 and deviation 1, and its letters by number."""
    features = torch.tensor(features)
    features = (features - features.mean(0)) / (features.std(0) + 1e-5)
    return features, torch.tensor([LETTERS.index(letter) for letter in words])


def collate(samples):
    """Pad with zeros to the longest of the batch. The lengths go with it: padding must not be heard, nor count."""
    features, letters = zip(*samples, strict=True)
    lengths = [torch.tensor([len(sequence) for sequence in part]) for part in (features, letters)]
    return pad_sequence(features, batch_first=True), lengths[0], pad_sequence(letters, batch_first=True), lengths[1]


def samples(speech, most):
    """The first utterances of a part of the corpus."""
    return [sample(*utterance) for utterance in zip(speech.features[:most], speech.texts[:most], strict=True)]


train_samples, test_samples = samples(train, settings.num_train), samples(test, settings.num_test)


class Listener(nn.Module):
    """Convolutions that keep a quarter of the frames, two GRUs in both directions, and a score for each letter."""

    def __init__(self, num_features, width):
        super().__init__()
        self.conv1 = nn.Conv1d(num_features, width, 5, stride=2, padding=2)
        self.conv2 = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.norm = nn.LayerNorm(width)  # not BatchNorm, whose statistics would hear the padding
        self.gru = nn.GRU(width, width, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.output = nn.Linear(2 * width, len(LETTERS))

    def forward(self, features, lengths):
        x = nn.functional.relu(self.conv2(nn.functional.relu(self.conv1(features.transpose(1, 2))))).transpose(1, 2)
        lengths = (lengths + 3) // 4
        packed = pack_padded_sequence(self.norm(x), lengths, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.output(x).log_softmax(2), lengths


net = Listener(train.features[0].shape[1], settings.width).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=settings.lr, weight_decay=0.01)
# The rate follows the total batch by the square root rule, because the optimizer is AdamW (lr_rule).
model = cannikin.HeteroDataParallel(net, optimizer, run_dir=settings.run_dir)
loader = cannikin.HeteroDataLoader(
    train_samples,
    model=model,
    batch_size=settings.batch_size,
    max_batch_size=settings.max_batch_size or None,
    seed=settings.seed,
    collate_fn=collate,
)
schedule = harness.one_cycle(optimizer, model, settings, len(train_samples))  # by progress


def ctc(scores, frames, letters, num_letters):
    """CTC's loss a letter, averaged over the samples of the local batch.

    cannikin weights ranks by samples, so the loss must be a mean over samples: first each utterance's own loss a
    letter, then their mean (as torch's reduction="mean" does). Summing over the batch and dividing by its letters is
    another loss, a mean over items: that would need item_count= in the loader.
    """
    losses = nn.functional.ctc_loss(
        scores.transpose(0, 1), letters, frames, num_letters, reduction="none", zero_infinity=True
    )
    return (losses / num_letters.to(device)).mean()


@torch.no_grad()
def word_error_rate():
    """Edits over words in the test utterances, of which every rank takes its part; the likeliest letters are heard."""
    net.eval()
    edits = words = 0
    mine = range(model.engine.rank, len(test_samples), model.engine.world_size)
    for first in range(0, len(mine), 32):
        batch = mine[first : first + 32]
        features, lengths, _, _ = collate([test_samples[k] for k in batch])
        scores, frames = net(features.to(device), lengths)
        for k, letters, length in zip(batch, scores.argmax(2), frames, strict=True):
            kept = letters[:length].unique_consecutive()  # CTC: repeats are one letter, blanks are none
            heard = "".join(LETTERS[letter] for letter in kept if letter > 0)
            edits += scoring.num_edits(test.texts[k].split(), heard.split())
            words += len(test.texts[k].split())
    net.train()
    edits, words = harness.sum_over_ranks(edits, words)
    return edits / words


log = harness.Log(model, loader, settings, metric="word_error_rate", lower_is_better=True)
for _ in model.epochs(settings.epochs):
    log.start()
    for features, lengths, letters, num_letters in loader:
        optimizer.zero_grad()
        scores, frames = model(features.to(device), lengths)  # in float32 on GPUs too: the network is small
        loss = ctc(scores, frames, letters.to(device), num_letters)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        log.step(loss)
    log.stop()
    if log.epoch(word_error_rate=word_error_rate()):
        break
log.finish()
