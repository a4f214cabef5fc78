"""Article 3, TensorFlow in one process: devices in a graph, and counts of devices."""

from __future__ import annotations

import duoka

# First: TensorFlow makes logical CPUs only before it starts.
counted = duoka.Mirrored(device_count={"GPU": 1, "CPU": 56})

import tensorflow as tf  # noqa: E402
from facts import print_facts, scenario  # noqa: E402

tf1 = tf.compat.v1


@scenario
def sum_of_two_gpus_in_a_session() -> dict:
    with tf.Graph().as_default():
        c = []
        for d in ["/gpu:2", "/gpu:3"]:
            with duoka.device(d):
                a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
                b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
                c.append(tf.matmul(a, b))
        with duoka.device("/cpu:0"):
            sum = tf.add_n(c, name="sum_of_two_gpus")
        sess = tf1.Session(config=tf1.ConfigProto(log_device_placement=True))
        value = sess.run(sum)
        print(value)
        sess.close()
    return {"sum": value.tolist(), "asked": sorted({tensor.op.device for tensor in c})}


@scenario
def sum_of_two_gpus() -> dict:
    c = []
    for d in ["/gpu:2", "/gpu:3"]:
        with duoka.device(d):
            a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
            b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
            c.append(tf.matmul(a, b))
    with duoka.device("/cpu:0"):
        total = tf.add_n(c)
    return {"sum": total.numpy().tolist()}


@scenario
def counts_of_devices() -> dict:
    config = tf1.ConfigProto(device_count={"GPU": 1, "CPU": 56})
    with tf.Graph().as_default(), tf1.Session(config=config) as sess:
        in_the_session = len(sess.list_devices())
    with duoka.device("/cpu:55"):
        last = tf.constant(1.0)
    return {
        "logical": len(tf.config.list_logical_devices("CPU")),
        "in_the_session": in_the_session,
        "last": last.device.rpartition("/device:")[2],
    }


if __name__ == "__main__":
    print_facts()
