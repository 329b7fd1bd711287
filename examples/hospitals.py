"""Twelve hospitals, a pandas frame and a model of one's own: the area under the ROC curve by hospital.

Run `python hospitals.py` here. It trains three methods; after a stop or a kill, the same
command resumes. The same from the command line, with a comparison and a report:

    offbeat compare fedavg fedbuff cadence --task hospitals:task --rounds 40 --out runs/hospitals
    offbeat report runs/hospitals/*
"""

from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import offbeat


def admissions() -> pd.DataFrame:
    """Stands for `pd.read_csv("admissions.csv")`: six measurements of each patient, unlike by hospital."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(3000, 6)), columns=[f"lab_{number}" for number in range(6)])
    frame["hospital"] = [f"hospital-{number:02}" for number in rng.integers(0, 12, len(frame))]
    risk = frame["lab_0"] - frame["lab_1"] * frame["lab_2"] + 0.1 * frame["hospital"].str[-2:].astype(int)
    frame["died"] = (risk + rng.logistic(size=len(frame)) > 2).astype(int)
    return frame


def auc(outputs: Tensor, targets: Tensor) -> float:
    """The area under the ROC curve; it is computed over all outputs, not over batches."""
    return float(roc_auc_score(targets, outputs[:, 1]))


def task() -> offbeat.LearningTask:
    """Return the task: a fifth of each hospital's patients are test data."""
    data = offbeat.ClientData.from_frame(admissions(), by="hospital", target="died")
    train, test = data.split(test=0.2)
    return offbeat.LearningTask(
        module=lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)),
        data=train,
        test=test,
        metrics={"auc": auc},
        name="hospitals",
    )


if __name__ == "__main__":
    for method in ("fedavg", "fedbuff", "cadence"):
        out = Path("runs/hospitals") / method
        result = offbeat.run(task(), method, rounds=40, out=out, resume=out.exists())
        last = result.records[-1]
        print(f"{method}: AUC {last['auc']:.3f}, worst hospitals {last['auc_worst_tenth']:.3f}")
