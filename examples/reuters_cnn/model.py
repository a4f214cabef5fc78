"""A small text CNN: words as 7 numbers, two blocks of convolution and pooling, one of 46 topics."""

import keras
from keras import layers


def create_model(num_words: int, num_topics: int) -> keras.Model:
    return keras.Sequential(
        [
            layers.Embedding(num_words, 7),
            layers.Conv1D(64, 5, activation="relu"),
            layers.MaxPool1D(2),
            layers.Conv1D(32, 3, activation="relu"),
            layers.MaxPool1D(2),
            layers.Flatten(),
            layers.Dense(num_topics, activation="softmax"),
        ]
    )


def compile_model(model: keras.Model) -> keras.Model:
    model.compile(
        optimizer=keras.optimizers.Nadam(),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model
