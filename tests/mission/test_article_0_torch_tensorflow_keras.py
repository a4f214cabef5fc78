"""Article 0: PyTorch, TensorFlow and Keras on several GPUs."""

from __future__ import annotations

import re

import pytest

from tests.limits import START_S
from tests.mission.launching import Launch, launch
from tests.process.scripts import run

pytestmark = [pytest.mark.timeout(600)]
IN_TASK = "/job:localhost/replica:0/task:0/device:"


@pytest.fixture(scope="module")
def tensorflow(tmp_path_factory) -> Launch:
    directory = tmp_path_factory.mktemp("article_0_tensorflow")
    return launch(directory, "article_0_tensorflow.py", "--devices", "/gpu:0,/gpu:1", num_workers=2)


@pytest.fixture(scope="module")
def torch(tmp_path_factory) -> Launch:
    return launch(tmp_path_factory.mktemp("article_0_torch"), "article_0_torch.py", num_workers=2)


@pytest.fixture(scope="module")
def eight_gpus(tmp_path_factory) -> Launch:
    """Four workers, two replicas each: eight of them would take a minute."""
    options = ("--devices", "4", "--replicas", "8")
    return launch(tmp_path_factory.mktemp("article_0_keras"), "eight_gpus.py", *options, num_workers=4, backend="jax")


def test_one_visible_gpu_is_one_device(tmp_path):
    source = 'import duoka\nprint(duoka.Mirrored(devices=["gpu:0"]).device)'
    ended = run(tmp_path, source, timeout_s=START_S, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert (ended.code, ended.out) == (0, "cpu:0/v0\n"), ended.err
    assert "gpu:0 is not here" in ended.err


@pytest.mark.torch
def test_a_net_moves_to_the_device_of_its_worker(torch):
    for worker, found in enumerate(torch.of("one_gpu")):
        assert found == {"moved": "cpu", "made": "cpu", "place": f"cpu:0/v{worker}"}
        assert f"gpu:0 is not here: what is placed there runs on cpu:0/v{worker}" in torch.err


@pytest.mark.torch
def test_data_parallel_followed_by_to_splits_the_batch_and_has_the_weights_of_one_device(torch):
    found = torch.of("several_gpus")
    assert sorted(each["counts"] for each in found) == [[10], [11]]
    for each in found:
        assert each["is_itself"]
        assert each["plain"] == 21
        assert each["difference"] <= 1e-5
    assert "gpu:3 is not here: cpu:0/v1, a virtual CPU device, takes its place" in torch.err


@pytest.mark.torch
def test_data_parallel_may_be_moved_and_change_its_type_between_two_trainings(torch):
    for each in torch.of("moved_after_a_step"):
        assert each["types"] == ["torch.float64"]
        assert each["difference"] <= 1e-5


@pytest.mark.torch
def test_duoka_logs_where_parameters_and_modules_of_a_torch_step_are(torch):
    assert torch.err.count("duoka: placement of the first step:") == 1
    assert re.search(r"^duoka: parameter +Sequential.2.weight +float32 \(1, 8\) +cpu:0/v0$", torch.err, re.MULTILINE)
    assert re.search(r"^duoka: operations +Sequential.1 +Tanh +cpu:0/v0$", torch.err, re.MULTILINE)
    assert "replica 1 -> worker 1 -> cpu:0/v1" in torch.err


@pytest.mark.tensorflow
def test_constants_and_their_sum_run_on_the_cpu_in_a_session_and_eagerly(tensorflow):
    for found in tensorflow.of("on_the_cpu"):
        assert found == {"sums": [[2, 4, 6], [2, 4, 6]], "place": "CPU:0"}
    assert f"sum_on_the_cpu: (AddV2): {IN_TASK}CPU:0" in tensorflow.screen


@pytest.mark.tensorflow
def test_a_block_for_a_missing_gpu_runs_on_the_cpu_in_a_session_without_soft_placement(tensorflow):
    for worker, found in enumerate(tensorflow.of("on_a_gpu")):
        assert found["sums"] == [[2, 4, 6], [2, 4, 6]]
        assert (found["place"], found["asked"], found["found"]) == ("CPU:0", "/device:CPU:0", f"cpu:0/v{worker}")
        assert tensorflow.err.count(f"gpu:3 is not here: what is placed there runs on cpu:0/v{worker}") == 1
    assert f"sum_for_a_gpu: (AddV2): {IN_TASK}CPU:0" in tensorflow.screen


@pytest.mark.tensorflow
def test_a_block_for_a_missing_gpu_is_an_error_where_soft_placement_is_off(tensorflow):
    for worker, found in enumerate(tensorflow.of("on_a_gpu")):
        assert found["error"].startswith("gpu:3 is not here.")
        assert f"Here are: cpu:0/v{worker}." in found["error"]


@pytest.mark.tensorflow
def test_a_list_of_devices_gives_each_worker_its_own(tensorflow):
    found = tensorflow.of("device_list")
    assert found == [{"replicas": 2, "worker": worker, "device": f"cpu:0/v{worker}"} for worker in (0, 1)]
    assert "gpu:1 is not here: cpu:0/v1, a virtual CPU device, takes its place" in tensorflow.err


@pytest.mark.tensorflow
def test_mobilenet_is_fitted_to_cats_and_dogs_in_batches_that_grow_with_the_replicas(tensorflow):
    first, second = tensorflow.of("cats_and_dogs")
    assert first == second
    assert (first["batch"], first["batches"], first["updates"]) == (32, 2, 2)
    assert first["names"] == ["loss", "sparse_categorical_accuracy"]
    assert first["moved"] == first["tensors"] > 200
    assert tensorflow.out.count("Number of devices: 2") == 1


@pytest.mark.jax
def test_multi_gpu_model_trains_32_of_256_samples_on_each_of_eight_replicas(eight_gpus):
    found = eight_gpus.of("replicated")
    for each in found:
        assert each["is_the_original"]
        assert (each["replicas"], each["workers"], each["updates"]) == (8, 4, 20)
        assert min(each["counts"]) == 32
    assert found[0]["difference"] <= 1e-5
