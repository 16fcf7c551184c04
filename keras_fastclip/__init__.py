"""Fast, exact differentially private training for Keras 3 on TensorFlow."""

from keras_fastclip.accounting import calibrate_noise
from keras_fastclip.audit import AuditReport, audit
from keras_fastclip.callbacks import (
    BackupAndRestore,
    EpsilonTracker,
    GradientNormMonitor,
    PrivacyBudget,
)
from keras_fastclip.checking import GradientReport, check_gradients
from keras_fastclip.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GlobalClipping,
    PerLayerClipping,
)
from keras_fastclip.dials import AdaptiveNorm
from keras_fastclip.model import DPModel, DPSequential, make_private
from keras_fastclip.plots import plot_plan, plot_privacy
from keras_fastclip.privacy import BudgetExceededError
from keras_fastclip.probe import NotPrivateError
from keras_fastclip.registry import (
    LayerRegistry,
    default_registry,
    from_tf_privacy,
    register,
)
from keras_fastclip.replacement import replace_batch_normalization
from keras_fastclip.report import privacy_report
from keras_fastclip.sampling import PoissonDataset
from keras_fastclip.sparse import SparseNoise
from keras_fastclip.summary import clipping_summary

__version__ = "0.1.0.dev0"

__all__ = [
    "AdaptiveNorm",
    "AuditReport",
    "AutomaticClipping",
    "BackupAndRestore",
    "BudgetExceededError",
    "Clipping",
    "DPModel",
    "DPSequential",
    "EpsilonTracker",
    "FlatClipping",
    "GlobalClipping",
    "GradientNormMonitor",
    "GradientReport",
    "LayerRegistry",
    "NotPrivateError",
    "PerLayerClipping",
    "PoissonDataset",
    "PrivacyBudget",
    "SparseNoise",
    "audit",
    "calibrate_noise",
    "check_gradients",
    "clipping_summary",
    "default_registry",
    "from_tf_privacy",
    "make_private",
    "plot_plan",
    "plot_privacy",
    "privacy_report",
    "register",
    "replace_batch_normalization",
]
