"""Article 2: a training loop of its own under MirroredStrategy, on three devices."""

from __future__ import annotations

import re

import pytest

from tests.mission.launching import Launch, launch

pytestmark = [pytest.mark.timeout(600), pytest.mark.tensorflow]


@pytest.fixture(scope="module")
def article(tmp_path_factory) -> Launch:
    directory = tmp_path_factory.mktemp("article_2")
    return launch(directory, "article_2.py", "--devices", "/gpu:0,/gpu:2,/gpu:3", num_workers=3)


def test_three_named_gpus_are_three_workers(article):
    found = article.of("device_list")
    assert found == [{"replicas": 3, "device": f"cpu:0/v{worker}"} for worker in range(3)]
    for name in ("gpu:0", "gpu:2", "gpu:3"):
        assert f"{name} is not here" in article.err


def test_folders_of_pictures_are_read_into_batches_for_the_loop(article):
    for found in article.of("folders_of_pictures"):
        assert found == {"sizes": [8, 8, 4], "right": [True] * 3}


def test_the_loop_of_the_article_has_the_losses_accuracies_and_weights_of_one_device(article):
    for found in article.of("loop_of_the_article"):
        assert (found["steps"], found["shown"]) == (4, 2)
        assert found["numbers"] <= 1e-5
        assert found["weights"] <= 1e-4, "the first updates of Adam divide by small numbers"
        assert found["moved"] > 1e-3
    assert re.search(r"Epoch  2/ 2: 100%.* 2/2 .*loss=\d+\.\d{4}, accuracy=\d\.\d{6}", article.err)


def test_a_loop_that_trains_all_weights_has_the_numbers_of_one_device(article):
    for found in article.of("loop_with_one_bar"):
        assert found["batches"] == 6
        assert found["numbers"] <= 1e-5
        assert found["weights"] <= 1e-5
    assert "strategy.run was given a plain batch: it is split" in article.err


def test_a_progress_of_the_strategy_shows_one_bar_with_loss_and_accuracy(article):
    for epoch in (1, 2):
        assert len(re.findall(rf"Epoch {epoch}/2: 3/3.* loss [\d.]+, accuracy [\d.]+", article.err)) == 1


def test_a_step_can_ask_for_its_replica_and_sum_over_all_replicas(article):
    for found in article.of("replica_context"):
        assert found == {"replicas": [3], "results": [6, 7, 8]}


def test_a_horovod_script_in_the_words_of_duoka_has_the_weights_of_one_device(article):
    for found in article.of("in_place_of_horovod"):
        assert found["weights"] <= 1e-5
