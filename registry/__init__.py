"""Rules: for each layer class, ζ and how its weights act on it.

One file a family of layers. `lookup.py` holds the table from classes to
rules, `terms.py` what a rule returns, `linear.py` the one object behind all
linear layers, `fallback.py` what serves layers without a rule.
"""

from keras_fastclip.registry import (
    activation,
    attention,
    convolution,
    dense,
    embedding,
    keras_hub,
    normalization,
    recurrent,
)
from keras_fastclip.registry.lookup import (
    LayerRegistry,
    default_registry,
    register,
)
from keras_fastclip.registry.tf_privacy import from_tf_privacy

__all__ = ["LayerRegistry", "default_registry", "from_tf_privacy", "register"]

del activation, attention, convolution, dense, embedding
del keras_hub, normalization, recurrent
