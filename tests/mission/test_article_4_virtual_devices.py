"""Article 4: `fit` on two virtual devices with 1024 MB each."""

from __future__ import annotations

import pytest

from tests.mission.launching import Launch, launch

pytestmark = [pytest.mark.timeout(600), pytest.mark.tensorflow]


@pytest.fixture(scope="module")
def article(tmp_path_factory) -> Launch:
    return launch(tmp_path_factory.mktemp("article_4"), "article_4.py", num_workers=2)


def test_two_virtual_devices_are_held_to_1024_mb_each(article):
    for worker, found in enumerate(article.of("virtual_gpus")):
        assert (found["device"], found["replicas"], found["version"]) == (f"cpu:0/v{worker}", 2, "2")
        assert found["is_held"]
        assert found["fits"] == 600 * 2**20
    assert "2 workers (cpu:0/v0 with 1024 MB, cpu:0/v1 with 1024 MB)" in article.err
    assert article.out.count("0 Physical GPU, 0 Logical GPUs") == 1


def test_reuters_is_loaded_once_and_fitted_with_the_losses_of_one_device(article):
    assert article.out.count("DOWNLOADED") == 1
    first, second = article.of("reuters")
    assert first == second
    assert "332,856" in article.out
    assert first["difference"] <= 1e-4
    assert first["names"][0] == first["names"][1]
    assert first["losses"][0][1] < first["losses"][0][0]
