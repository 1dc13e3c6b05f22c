"""Trainings under Transformers' Trainer, each beside one process that trains on the whole batches.

By a launch of users' own, which writes what was found to FOLDER/told.pt:

    torchrun --standalone --nproc-per-node=2 transformers_cases.py FOLDER CASE...
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

from cannikin.errors import BatchMatchError
from cannikin.integrations.transformers import HeteroTrainer
from cannikin.runtime.passes import epoch_order

LOCAL, NUM_SAMPLES = 8, 103  # 7 batches per epoch, the last one of 7 samples
UNEQUAL = {"local_batches": [12, 4]}
EPOCHS = 2


class Sentences(Dataset):
    """Sequences of 4 to 12 tokens that count up by ones and twos; in some, not every token is to be predicted."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(2)
        lengths = torch.randint(4, 13, (num_samples,), generator=generator).tolist()
        steps = [torch.randint(1, 3, (length,), generator=generator) for length in lengths]
        self.rows = [(7 * index + each.cumsum(0)) % 49 + 1 for index, each in enumerate(steps)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.rows[index].clone()
        labels[: index % 3] = -100
        return {"input_ids": self.rows[index], "labels": labels}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """To the longest of the batch, so that every rank pads in its own way."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class OwnMean(LlamaForCausalLM):
    """A Llama whose loss is a mean over the tokens of its own batch."""

    accepts_loss_kwargs = False


def own_mean() -> LlamaForCausalLM:
    model = llama()
    model.__class__ = OwnMean
    return model


def num_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


class Points(Dataset):
    """Points to classify."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(num_samples, 8, generator=generator)
        self.labels = (self.inputs[:, :3] + torch.randn(num_samples, 3, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.inputs[index], "labels": self.labels[index]}


class Classifier(torch.nn.Module):
    """A module of one's own, whose loss is a mean over its batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


class Deaf(Classifier):
    """One that takes any keyword and listens to none, as BERT's for sequence classification does."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **keywords: Any) -> dict[str, torch.Tensor]:
        return super().forward(x, labels)


class Reticent(Classifier):
    """One that takes any keyword, and has a loss in training only; it counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **keywords: Any) -> dict[str, torch.Tensor]:
        if self.training:
            self.num_forwards += 1
        return super().forward(x, labels if self.training else None)


class Broken(Classifier):
    """One that cannot do what it is asked for."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **keywords: Any) -> dict[str, torch.Tensor]:
        raise ValueError("no such input")


def by_items(outputs: dict[str, torch.Tensor], labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss function of the user's own, as Trainer asks for it."""
    return cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


class Watched(HeteroTrainer):
    """Notes splits and samples, and takes longer for each sample on rank 1."""

    delay_s = 0.0
    output: Any
    splits: set[tuple[int, ...]]
    seen: list[list[list[int]]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.splits.add(self.engine.plan.local_batches)
            if "input_ids" in inputs:
                counted = (inputs["labels"] != -100).any(1)  # not padding
                self.seen.append([[token for token in row if token] for row in inputs["input_ids"][counted].tolist()])
            if self.delay_s and self.args.process_index == 1:
                time.sleep(self.delay_s * len(inputs["labels"]))
        return super().compute_loss(model, inputs, *args, **kwargs)


class OwnLoader(Watched):
    """Makes its train loader itself."""

    batch_size = LOCAL

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, self.batch_size, shuffle=True, collate_fn=self.data_collator)


class OtherLoader(OwnLoader):
    """With other batches than Trainer counts."""

    batch_size = 2 * LOCAL


class Looking(Watched):
    """Looks at the train loader, and leaves it as it is."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = super().get_train_dataloader()
        assert len(loader) == 7
        return loader


def fresh() -> None:
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()


def arguments(folder: Path, **keywords: Any) -> TrainingArguments:
    defaults = {
        "per_device_train_batch_size": LOCAL,
        "per_device_eval_batch_size": LOCAL,
        "num_train_epochs": EPOCHS,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder / "out"), **{**defaults, **keywords})


def train(
    folder: Path, model: Any, *, arguments_: dict[str, Any] | None = None, resume: str | None = None,
    delay_s: float = 0.0, compute_loss_func: Any = None, collator: Any = None,
    kind: type[Watched] = Watched, **options: Any,
) -> Watched:  # fmt: skip
    fresh()
    data, usual = (Sentences(), padded) if isinstance(model, LlamaForCausalLM) else (Points(), None)
    trainer = kind(
        model=model, args=arguments(folder, **(arguments_ or {})), train_dataset=data, eval_dataset=type(data)(32),
        data_collator=collator or usual, compute_loss_func=compute_loss_func, **options,
    )  # fmt: skip
    trainer.delay_s, trainer.splits, trainer.seen = delay_s, set(), []
    trainer.output = trainer.train(resume_from_checkpoint=resume)
    return trainer


def one_process(
    trainer: HeteroTrainer, model: Any, *, accumulate: int = 1, bf16: bool = False, factor: float = 1.0
) -> dict[str, float]:
    """Train one process on the whole batches in the same order; the largest differences from what the trainer did.

    `factor` is what Trainer multiplies the loss by where the model does not divide it by its number of ranks.
    """
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    is_llama = isinstance(model, LlamaForCausalLM)
    data = Sentences() if is_llama else Points()
    decayed = trainer.get_decay_parameter_names(model)
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in model.named_parameters() if name in decayed]},
        {
            "params": [parameter for name, parameter in model.named_parameters() if name not in decayed],
            "weight_decay": 0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=trainer.args.learning_rate, weight_decay=trainer.args.weight_decay)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, trainer.state.max_steps)
    losses, rates, evaluated, epoch = [], [], {}, 0
    model.train()
    while len(losses) < trainer.state.global_step:
        order = epoch_order(len(data), seed=trainer.args.seed, epoch=epoch, shuffle=True)[:].tolist()
        total_batch = 2 * trainer.args.per_device_train_batch_size
        batches = [order[start : start + total_batch] for start in range(0, len(order), total_batch)]
        epoch += 1
        for first in range(0, len(batches), accumulate):
            group = [[data[index] for index in batch] for batch in batches[first : first + accumulate]]
            total = 0.0
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                if is_llama:
                    collated = [padded(samples) for samples in group]
                    count = sum((batch["labels"][:, 1:] != -100).sum() for batch in collated)
                    parts = [model(**batch, num_items_in_batch=count).loss for batch in collated]
                else:
                    parts = []
                    for samples in group:
                        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
                        logits = model.net(batch["x"]).float()
                        whole = sum(map(len, batches[first : first + accumulate]))
                        if trainer.compute_loss_func is not None:
                            parts.append(cross_entropy(logits, batch["labels"], reduction="sum") / whole)
                        else:
                            parts.append(factor * cross_entropy(logits, batch["labels"]) / len(group))
            for part in parts:
                part.backward()
                total += float(part.detach())
            losses.append(total)
            rates.append(optimizer.param_groups[0]["lr"])
            torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            evaluated[len(losses)] = measure(model, is_llama) if trainer.args.do_eval else 0.0
            if len(losses) == trainer.state.global_step:
                break
    evals = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    pairs = zip(model.parameters(), trainer.model.parameters(), strict=True)
    return {
        "weights": max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs),
        "loss": max(abs(mine - theirs["loss"]) for mine, theirs in zip(losses, logged, strict=True)),
        "rate": max(abs(mine - theirs["learning_rate"]) for mine, theirs in zip(rates, logged, strict=True)),
        "evaluated": max((abs(evaluated[step] - value) for step, value in evals.items()), default=0.0),
        "num_evaluated": len(evals),
        "steps": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "epoch": trainer.state.epoch,
        "weighting": trainer.engine.weighting,
    }


def measure(model: Any, is_llama: bool) -> float:
    """The evaluation loss, as Trainer makes it of its ranks' batches."""
    if is_llama:
        return float("nan")  # a mean of batches' means: another one on other ranks
    model.eval()
    data = Points(32)
    with torch.no_grad():
        loss = float(cross_entropy(model.net(data.inputs), data.labels))
    model.train()
    return loss


# Cases: each returns what rank 0 found.


_PILED = {"gradient_accumulation_steps": 3}
_IN_SYNC = {**_PILED, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}

# name: model, arguments, options, what the one process does
PARITY: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tokens": (llama, {}, {}, {}),
    "tokens, short last group": (llama, _PILED, {}, {"accumulate": 3}),
    "tokens, each batch in sync": (llama, _IN_SYNC, {}, {"accumulate": 3}),
    "tokens, a rank without samples": (llama, {"per_device_train_batch_size": 17}, {"local_batches": [20, 14]}, {}),
    "tokens, packed": (llama, {}, {"collator": DataCollatorWithFlattening()}, {}),
    "tokens, packed, short last group": (
        llama,
        _PILED,
        {"collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True)},
        {"accumulate": 3},
    ),
    "tokens, packed, a rank without samples": (
        llama,
        {"per_device_train_batch_size": 17},
        {"local_batches": [20, 14], "collator": DataCollatorWithFlattening()},
        {},
    ),
    "tokens by item_count, packed": (
        own_mean,
        {},
        {"collator": DataCollatorWithFlattening(), "item_count": num_labels},
        {},
    ),
    "tokens, bf16": (llama, {"bf16": True}, {}, {"bf16": True}),
    "means": (Classifier, {}, {}, {}),
    "means, short last group": (Classifier, _PILED, {}, {"accumulate": 3}),
    "means, evaluated": (Classifier, {"eval_strategy": "steps", "eval_steps": 3}, {}, {}),
    "means, 9 steps": (Classifier, {"max_steps": 9}, {}, {}),
    "means, a count ignored": (Deaf, {}, {}, {"factor": 2.0}),
    "means, in training only": (Reticent, {}, {}, {"factor": 2.0}),
    "means, a loader of one's own": (Classifier, {}, {"kind": OwnLoader}, {}),
    "means, a loader looked at": (Classifier, {}, {"kind": Looking}, {}),
    "a loss function": (Classifier, _PILED, {"compute_loss_func": by_items}, {"accumulate": 3}),
}
QUICK = (
    "tokens, short last group",
    "tokens, packed",
    "tokens by item_count, packed",
    "means, evaluated",
    "means, a count ignored",
    "means, in training only",
    "means, a loader of one's own",
)


def parity(folder: Path, names: Iterable[str] = PARITY) -> dict[str, Any]:
    """Pinned unequal splits, with all that a Trainer may do."""
    found = {}
    for name in names:
        model, given, options, reference = PARITY[name]
        trainer = train(folder, model(), arguments_=given, **{**UNEQUAL, **options})
        found[name] = one_process(trainer, model(), **reference)
    return found


def quick(folder: Path) -> dict[str, Any]:
    """Some of these."""
    return parity(folder, QUICK)


def num_forwards(folder: Path) -> int:
    """Forwards that a model has counted in a training that was preceded by trials of its loss."""
    return int(train(folder, Reticent(), **UNEQUAL).model.num_forwards)


def summary(folder: Path) -> dict[str, Any]:
    """The loss of the whole training: of one that logs each step, too seldom to log any, or never."""
    found = {}
    for every in (1, 500):
        trainer = train(folder, Classifier(), arguments_={"max_steps": 7, "logging_steps": every}, **UNEQUAL)
        found[every] = trainer.state.log_history[-1]["train_loss"]
    trainer = train(folder, Classifier(), arguments_={"max_steps": 7, "logging_strategy": "no"}, **UNEQUAL)
    output = trainer.output
    found["no"] = [trainer.state.log_history[-1]["train_loss"], output.training_loss, output.metrics["train_loss"]]
    return found


def logged(folder: Path) -> list[dict[str, float]]:
    """What Trainer's own trackers are told, of a training that is evaluated before its first step, too."""
    rows: list[dict[str, float]] = []

    class Tracker(TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            rows.append(dict(logs))

    given = {"num_train_epochs": 12, "learning_rate": 1e-5, "eval_on_start": True}
    train(folder, Classifier(), arguments_=given, callbacks=[Tracker()], **UNEQUAL)
    return rows


def without_labels(samples: Any) -> Any:
    batch = padded(samples)
    batch["labels"][:] = -100
    return batch


def adaptive(folder: Path) -> dict[str, Any]:
    """A split that changes within bounds, under accumulation, and what the run tells of itself."""
    given = {"num_train_epochs": 20, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    bounds = [(2, 15), (1, 12)]
    trainer = train(folder, llama(), arguments_=given, delay_s=2e-3, local_bounds=bounds)
    return {
        "tokens": one_process(trainer, llama(), accumulate=2),
        "splits": trainer.splits,
        "noise": trainer.engine.noise_scale,
        "progress": trainer.engine.progress,
    }


def by_length(folder: Path) -> dict[str, Any]:
    """Samples grouped by length, read by workers; and an epoch whose last batch leaves a rank without samples."""
    given = {"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 1, "num_train_epochs": 1}
    trainer = train(folder, llama(), arguments_={**given, "per_device_train_batch_size": 17}, local_batches=[20, 14])
    return {"seen": trainer.seen, "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


class Mixed(HeteroTrainer, Seq2SeqTrainer):
    """HeteroTrainer as a mixin."""


class Curious(TrainerCallback):
    """Asks for a loader of its own when training begins."""

    trainer: Any

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_batches = len(self.trainer.get_train_dataloader())


def again(folder: Path) -> dict[str, Any]:
    """A second train() of one trainer, one of a Trainer of another kind, with a callback that asks for a loader."""
    fresh()
    given = {"max_steps": 3, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
    arguments_ = Seq2SeqTrainingArguments(output_dir=str(folder / "out"), per_device_train_batch_size=LOCAL, **given)
    curious = Curious()
    trainer = Mixed(model=Classifier(), args=arguments_, train_dataset=Points(), callbacks=[curious], **UNEQUAL)
    curious.trainer = trainer
    found = {}
    for name in ("first", "second"):
        trainer.train()
        found[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return found


def saving(folder: Path, names: Iterable[str] = ("each batch", "between epochs")) -> dict[str, Any]:
    """Save in the middle of the second epoch and train on; `resuming` must end with the same weights."""
    ends = {}
    for name in names:
        given = _RESUMED[name]
        trainer = train(folder / name, llama_with_dropout(), arguments_={**given, "save_strategy": "steps"}, **UNEQUAL)
        ends[name] = trainer.model.state_dict()
    if trainer.args.process_index == 0:
        torch.save(ends, folder / "ends.pt")
    return {}


_RESUMED: dict[str, dict[str, Any]] = {
    "each batch": {"save_steps": 10},  # 7 per epoch
    "groups": {"save_steps": 4, "gradient_accumulation_steps": 3},  # 3 per epoch
    "between epochs": {"save_steps": 7},
}


def llama_with_dropout() -> LlamaForCausalLM:
    model = llama()
    model.config.attention_dropout = 0.2
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    return model


def saving_groups(folder: Path) -> dict[str, Any]:
    """One of these, under accumulation."""
    return saving(folder, ("groups",))


def resuming(folder: Path) -> dict[str, Any]:
    """Load what was saved, in another process, and train to the end."""
    ends, gaps = torch.load(folder / "ends.pt"), {}
    for name in ends:
        given = _RESUMED[name]
        at = folder / name / "out" / f"checkpoint-{given['save_steps']}"
        trainer = train(folder / name, llama_with_dropout(), arguments_=given, resume=str(at), **UNEQUAL)
        state = trainer.model.state_dict()
        gaps[name] = max(float((state[key] - ends[name][key]).abs().max()) for key in state)
        assert trainer.state.global_step == trainer.state.max_steps
    return gaps


class Stream(IterableDataset):
    """Without a length."""

    def __iter__(self) -> Any:
        return iter(Points())


def refusals(folder: Path) -> dict[str, str]:
    """What is refused, by a sentence."""

    def said(call: Callable[[], Any]) -> str:
        fresh()
        try:
            call()
        except (ValueError, BatchMatchError) as error:
            return " ".join([str(error), *getattr(error, "__notes__", ())])
        return "nothing"

    def evaluated_first() -> None:
        trainer = make(max_steps=2)
        trainer.evaluate(Points(8))
        trainer.train()

    def make(data: Any = None, options: dict[str, Any] | None = None, **given: Any) -> HeteroTrainer:
        return HeteroTrainer(
            model=Classifier(), args=arguments(folder, **given), train_dataset=data or Points(), **(options or {})
        )

    return {
        "growing": said(lambda: make(options={"max_batch_size": 64})),
        "auto_find_batch_size": said(lambda: make(auto_find_batch_size=True)),
        "split_batches": said(lambda: make(accelerator_config={"split_batches": True})),
        "dispatch_batches": said(lambda: make(accelerator_config={"dispatch_batches": True})),
        "batch_rebalance": said(lambda: make(train_sampling_strategy="batch_rebalance")),
        "another total": said(lambda: make(options={"local_batches": [20, 4]})),
        "not whole": said(lambda: make(options={"local_batches": [12.0, 4.0]})),
        "stream": said(lambda: make(Stream(), max_steps=3)),
        "evaluated first": said(evaluated_first),
        "other batches": said(lambda: train(folder, Classifier(), kind=OtherLoader, **UNEQUAL)),
        "broken": said(lambda: train(folder, Broken(), **UNEQUAL)),
        "packed": said(lambda: train(folder, own_mean(), collator=DataCollatorWithFlattening(), **UNEQUAL)),
        "no labels": said(lambda: train(folder, llama(), collator=without_labels, **UNEQUAL)),
        "tokens of one's own": said(
            lambda: train(folder, llama(), arguments_={"average_tokens_across_devices": False}, **UNEQUAL)
        ),
    }


def run(rank: int, world_size: int, folder: Path, *names: str) -> dict[str, Any]:
    """Run the cases that are asked for, as one of several ranks; what each found here."""
    warnings.simplefilter("error", RuntimeWarning)
    # What torchrun says to Trainer.
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    return {name: globals()[name](folder) for name in names}


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]), *sys.argv[2:])
    if os.environ["RANK"] == "0":
        torch.save(told, Path(sys.argv[1]) / "told.pt")
    torch.distributed.destroy_process_group()
