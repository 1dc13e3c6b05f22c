"""What the paper itself reports, in numbers: shares are of 1, workloads are called as in `cannikin simulate`."""

from __future__ import annotations

# Largest reductions on cluster B.
TIME_BELOW = {"DDP": 0.85, "AdaptDL": 0.52, "LB-BSP": 0.82}  # of the time to target
STEP_BELOW = {"DDP": 0.53, "LB-BSP": 0.18}  # of the step time

# From an even start on cluster A, ImageNet, total batch 128.
EPOCH_AT_OPTPERF = 3  # of Cannikin
LB_BSP_EPOCHS = 10  # LB-BSP needs more than these

# Largest error of the predicted OptPerf on cluster A.
PREDICTION_ERRORS = {"NeuMF, ResNets": 0.03, "BERT, DeepSpeech2": 0.07}
UNWEIGHTED_ERROR = 0.21  # without inverse-variance weighting

# The planner's share of the training time on cluster B: in the worst epoch, and over the run. None: far below 1%.
OVERHEAD: dict[str, tuple[float | None, float | None]] = {
    "imagenet": (None, None),
    "deepspeech2": (None, None),
    "bert": (None, None),
    "cifar10": (0.09, 0.027),
    "ncf": (0.12, 0.039),
}
