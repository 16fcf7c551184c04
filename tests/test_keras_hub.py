"""KerasHub: tasks keep their own `fit`, backbones are clipped exactly."""

import keras
import keras_hub
import numpy as np
import pytest

import keras_fastclip
from tests import hub_zoo

pytestmark = pytest.mark.filterwarnings("ignore:No rule is registered")

SENTENCES = ["a b c a", "c b a", "b b b", "a a c b"] * 8


def gpt2():
    words = ["<|endoftext|>", "a", "b", "c", "Ġ", "Ġa", "Ġb", "Ġc"]
    tokenizer = keras_hub.models.GPT2Tokenizer(
        vocabulary={word: i for i, word in enumerate(words)},
        merges=["Ġ a", "Ġ b", "Ġ c"],
    )
    return keras_hub.models.GPT2CausalLM(
        backbone=keras_hub.models.GPT2Backbone(
            vocabulary_size=len(words),
            num_layers=1,
            num_heads=2,
            hidden_dim=8,
            intermediate_dim=16,
            max_sequence_length=8,
        ),
        preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(
            tokenizer, sequence_length=8
        ),
    )


def bert():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    return keras_hub.models.BertTextClassifier(
        backbone=keras_hub.models.BertBackbone(
            vocabulary_size=len(words),
            num_layers=1,
            num_heads=2,
            hidden_dim=8,
            intermediate_dim=16,
            max_sequence_length=8,
        ),
        num_classes=2,
        preprocessor=keras_hub.models.BertTextClassifierPreprocessor(
            keras_hub.models.BertTokenizer(vocabulary=words), sequence_length=8
        ),
    )


def private(task):
    keras_fastclip.make_private(task, l2_norm_clip=1.0, noise_multiplier=1.0)
    task.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return task


def test_causal_language_model_trains_on_strings_and_generates():
    task = private(gpt2())
    assert type(task) is keras_hub.models.GPT2CausalLM
    task.fit(
        SENTENCES,
        batch_size=8,
        epochs=2,
        verbose=0,
        validation_data=(SENTENCES[:8],),
    )
    (entry,) = task._privacy.ledger(task).entries
    assert entry.mechanism.num_examples == 32 and entry.steps == 8
    assert isinstance(task.generate("a b", max_length=8), str)
    batch = task.preprocessor(SENTENCES[:5])
    report = keras_fastclip.check_gradients(task, *batch)
    assert report.relative_error < 1e-5


def test_classifier_trains_on_strings_and_labels():
    task = private(bert())
    labels = np.array([0, 1, 1, 0] * 8)
    history = task.fit(
        SENTENCES, labels, batch_size=8, verbose=0, validation_split=0.25
    )
    assert "val_accuracy" in history.history
    assert 0 < task.privacy_spent(1e-3, "rdp") < np.inf
    x, y = task.preprocessor(SENTENCES[:5], labels[:5])
    assert keras_fastclip.check_gradients(task, x, y).relative_error < 1e-5


# `python -m tests.hub_zoo` goes through all the others.
BACKBONES = [
    "AlbertBackbone",
    "BertBackbone",
    "BloomBackbone",
    "CLIPBackbone (embeddings)",
    "DenseNetBackbone",
    "DistilBertBackbone",
    "GPT2Backbone",
    "GemmaBackbone",
    "GemmaBackbone (Gemma 2)",
    "Gemma3Backbone",
    "Llama3Backbone",
    "LlamaBackbone",
    "MistralBackbone",
    "MixtralBackbone (no added loss)",
    "OPTBackbone",
    "ResNetBackbone",
    "RobertaBackbone",
    "SwinTransformerBackbone",
    "T5Backbone",
    "VGGBackbone",
    "ViTBackbone",
    "WhisperBackbone",
]


@pytest.mark.parametrize("name", BACKBONES)
def test_backbone_gives_the_gradients_of_the_loop(name):
    assert hub_zoo.is_right(name)


@pytest.mark.parametrize(
    "name, reason",
    [
        # The loss of a router is one of all tokens of the batch.
        ("MixtralBackbone", "add_loss with one number for the whole batch"),
        # Each image is compared with each text of the batch.
        ("CLIPBackbone", "mixes examples"),
    ],
)
def test_backbone_that_mixes_examples_is_refused(name, reason):
    with pytest.raises(ValueError, match=reason):
        hub_zoo.gradient_report(name)


def test_zoo_holds_every_backbone():
    assert set(hub_zoo.exported()) <= set(hub_zoo.ZOO)
