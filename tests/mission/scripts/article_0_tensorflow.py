"""Article 0, TensorFlow: sessions on a device, and MirroredStrategy with `fit`, on two workers."""

from __future__ import annotations

import made_up_datasets as tfds
import tensorflow as tf
from facts import print_facts, scenario

import duoka
import duoka.tensorflow
from duoka.errors import DuokaError

tf1 = tf.compat.v1


def place(tensor) -> str:
    return tensor.device.rpartition("/device:")[2]


@scenario
def on_the_cpu() -> dict:
    with tf.Graph().as_default(), tf.device("/cpu:0"):
        v1 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v1")
        v2 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v2")
        sumV12 = tf.add(v1, v2, name="sum_on_the_cpu")
        with tf1.Session(config=tf1.ConfigProto(log_device_placement=True)) as sess:
            value = sess.run(sumV12)
            print(value)
    with duoka.device("/cpu:0"):
        v1 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v1")
        v2 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v2")
        sumV12 = v1 + v2
    print(sumV12.numpy(), sumV12.device)
    return {"sums": [value.tolist(), sumV12.numpy().tolist()], "place": place(sumV12)}


@scenario
def on_a_gpu() -> dict:
    with tf.Graph().as_default(), duoka.device("/gpu:3") as found:
        v1 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v1")
        v2 = tf.constant([1.0, 2.0, 3.0], shape=[3], name="v2")
        sumV12 = tf.add(v1, v2, name="sum_for_a_gpu")
        with tf1.Session(config=tf1.ConfigProto(log_device_placement=True)) as sess:
            value = sess.run(sumV12)
            print(value)
    with duoka.device("/gpu:3"):
        eager = tf.constant([1.0, 2.0, 3.0]) + tf.constant([1.0, 2.0, 3.0])
    try:
        with duoka.device("/gpu:3", soft_placement=False):
            error = "nothing"
    except DuokaError as refused:
        error = str(refused)
    return {
        "sums": [value.tolist(), eager.numpy().tolist()],
        "place": place(eager),
        "found": found.name,
        "asked": sumV12.op.device,
        "error": error,
    }


@scenario
def device_list() -> dict:
    strategy = duoka.tensorflow.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])
    return {"replicas": strategy.num_replicas_in_sync, "worker": strategy.worker, "device": str(strategy.device)}


@scenario
def cats_and_dogs() -> dict:
    num_epochs = 1
    batch_size_per_replica = 16
    learning_rate = 0.001

    strategy = duoka.tensorflow.MirroredStrategy()
    strategy.print("Number of devices: %d" % strategy.num_replicas_in_sync)  # noqa: UP031
    batch_size = batch_size_per_replica * strategy.num_replicas_in_sync

    def resize(image, label):
        image = tf.image.resize(image, [32, 32]) / 255.0
        return image, label

    dataset = tfds.load("cats_vs_dogs", split=tfds.Split.TRAIN, as_supervised=True)
    dataset = dataset.map(resize).shuffle(1024).batch(batch_size)
    tf.keras.utils.set_random_seed(0)
    with strategy.scope():
        model = tf.keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), classes=2, alpha=0.35)
        model.compile(
            optimizer=tf.keras.optimizers.Adam(learning_rate=learning_rate),
            loss=tf.keras.losses.sparse_categorical_crossentropy,
            metrics=[tf.keras.metrics.sparse_categorical_accuracy],
            run_eagerly=True,
        )
    start = [weights.copy() for weights in model.get_weights()]
    history = model.fit(dataset, epochs=num_epochs, verbose=0)
    return {
        "batch": batch_size,
        "batches": int(dataset.cardinality()),
        "updates": int(model.optimizer.iterations),
        "losses": history.history["loss"],
        "names": sorted(history.history),
        "sum": float(sum(abs(weights).sum() for weights in model.get_weights())),
        "moved": sum(bool((a != b).any()) for a, b in zip(start, model.get_weights(), strict=True)),
        "tensors": len(start),
    }


if __name__ == "__main__":
    print_facts(duoka.tensorflow.MirroredStrategy().worker)
