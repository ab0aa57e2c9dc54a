"""Who says whether a predicted film shows success: networks trained on films, or a vision-language model.

All are `worldmodel.contract.Judge`: clips in; probability of success, progress and abstention out. `StateProbe` reads
the simulator's state off the frames and applies the task's own predicate; it is the best one where states are known.
`SuccessClassifier` learns success and progress themselves. `VLMJudge` needs neither, and should be measured first.
How much any of them can be trusted, and what their errors do to a success rate, is in `robopolicy.evaluation.judging`.
"""

from robopolicy.worldmodel.judge.calibration import Reliability, best_threshold, fit_temperature, reliability
from robopolicy.worldmodel.judge.classifier import SuccessClassifier, fit_classifier
from robopolicy.worldmodel.judge.clips import Examples, FitConfig, JudgeConfig
from robopolicy.worldmodel.judge.probe import StateProbe, fit_probe
from robopolicy.worldmodel.judge.store import load_classifier, load_probe, save_judge
from robopolicy.worldmodel.judge.vlm import VLMJudge

__all__ = [
    "Examples",
    "FitConfig",
    "JudgeConfig",
    "Reliability",
    "StateProbe",
    "SuccessClassifier",
    "VLMJudge",
    "best_threshold",
    "fit_classifier",
    "fit_probe",
    "fit_temperature",
    "load_classifier",
    "load_probe",
    "reliability",
    "save_judge",
]
