"""What the paper itself reports, in numbers: shares are of 1, workloads are called as in `cannikin simulate`."""

from __future__ import annotations

# Largest reductions on cluster B.
TIME_BELOW = {"DDP": 0.85, "AdaptDL": 0.52, "LB-BSP": 0.82}  # of the time to target
ADAPTDL_BELOW = {"cifar10": 0.52, "imagenet": 0.29}  # of the time to target, of single workloads
STEP_BELOW = {"DDP": 0.53, "LB-BSP": 0.18}  # of the step time

# From an even start on cluster A, ImageNet, total batch 128.
EPOCH_AT_OPTPERF = 3  # of Cannikin
LB_BSP_EPOCHS = 10  # LB-BSP needs more than these

# Largest error of the predicted OptPerf on cluster A.
PREDICTION_ERRORS = {"NeuMF, ResNets": 0.03, "BERT, DeepSpeech2": 0.07}
LIMIT_OF = dict.fromkeys(("ncf", "cifar10", "imagenet"), "NeuMF, ResNets")
LIMIT_OF |= dict.fromkeys(("bert", "deepspeech2"), "BERT, DeepSpeech2")
UNWEIGHTED_ERROR = 0.21  # without inverse-variance weighting

# The planner's share of the training time on cluster B: in the worst epoch, and over the run. None: far below 1%.
OVERHEAD: dict[str, tuple[float | None, float | None]] = {
    "imagenet": (None, None),
    "deepspeech2": (None, None),
    "bert": (None, None),
    "cifar10": (0.09, 0.027),
    "ncf": (0.12, 0.039),
}

# gamma of the networks of the GPU benchmarks, one rank alone on an H200: local batch, mean and standard deviation over
# 24 steps (2026-11-16-nccl.md).
GAMMAS = {
    "ResNet-18": [(8, 0.1246, 0.0139), (32, 0.1292, 0.0119), (64, 0.1231, 0.0070), (256, 0.1213, 0.0116)],
    "ResNet-50": [(4, 0.0299, 0.0032), (8, 0.0327, 0.0049), (32, 0.0294, 0.0047), (64, 0.0255, 0.0055)],
    "DeepSpeech2": [(4, 0.1787, 0.0040), (8, 0.1859, 0.0058), (32, 0.1768, 0.0047), (64, 0.1686, 0.0043)],
    "NeuMF": [(64, 0.5827, 0.0124), (512, 0.5409, 0.0810), (2048, 0.5414, 0.0707), (4096, 0.3837, 0.0407)],
}

# What was measured for real, in committed reports; "none" where nothing was. Links are from benchmarks/reports.
_NCCL, _GPU, _LAB = "[NCCL](2026-11-16-nccl.md)", "[GPU](2026-11-15-gpu.md)", "[lab](2026-11-15-lab.md)"
_OVERLAP = "[overlap](2026-11-18-overlap.md)"
REAL = {
    "inputs": "one H200 in shares, CPU ranks ([examples](../../examples/README.md) train smaller relatives)",
    "gamma": f"one H200: ResNet-18 .10 to .13, ResNet-50 .03, DeepSpeech2 .17 to .19, NeuMF .38 to .58 ({_NCCL})",
    "states": "drawn from a run's log by [`cannikin trace`](../../docs/trace.md)",
    "totals": f"none by epoch; both end at the largest allowed, 2,048 ({_GPU})",
    "accuracy": f"94% and a hit rate of 0.69 reached under all four policies ({_GPU})",
    "ddp@B0": f"CIFAR-10 50 to 52%, NeuMF 64 to 70% (shares of one H200, {_GPU})",
    "adaptdl": f"CIFAR-10 40 to 45%, NeuMF 36 to 39%, AdaptDL's policy in our runtime ({_GPU})",
    "lb-bsp@B0": f"CIFAR-10 52 to 55%, NeuMF 66 to 67% ({_GPU})",
    "ddp@best": "none",
    "lb-bsp-5@best": "none",
    "lb-bsp@best": "none",
    "paper": f"no training; its split after 5 or 6 short epochs 0.0 to 2.3% above the best, ours 0.0 to 1.8% ({_NCCL})",
    "sharing": "a load on one of three shares, answered after 15 steps ([GPU, the limit](2026-11-16-gpu.md))",
    "start": f"plan of step 14 to 19 ({_LAB}); 12 of 12 cells within 2.4% at step 30 "
    "([GPU, the limit](2026-11-16-gpu.md))",
    "steps even": f"3 to 52% on three NCCL ranks ({_NCCL}); 0 to 55% on shares of one H200 ({_GPU})",
    "steps lb-bsp": f"-0.8 to +1.9%, LB-BSP really run ({_NCCL}); 1.0 to 2.6% ({_LAB})",
    "overlap": f"LB-BSP, settled, above ours by 5.9, 18 and 24% on three NCCL ranks ({_NCCL}), by 8.9 to 9.9% on CPU "
    f"ranks ({_OVERLAP}), all chosen for it",
    "change": "none",
    "sweep": f"step time below even, speeds 1, .8, .6: 3 to 18%; 1, .5, .25: 8 to 52% ({_NCCL})",
    "prediction": f"before a plan ran median 2.4 and 1.9%, worst 8.2 and 6.9% (28 and 16 plans, {_NCCL}); median 5.5 "
    f"and 3.8%, worst 18.8 and 27.4% on CPU ranks, at closer speeds 1.1 and 0.8% at worst ({_OVERLAP})",
    "overhead": f"an even plan beyond DDP: ResNet-50 0.4%, BERT -0.7% ({_NCCL}); CPU ranks 0.8 to 2.9% "
    "([overhead](2026-11-15-overhead-cpu.md))",
}
