"""docs/from-the-articles.md: what it shows is run here, and it shows nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from functools import lru_cache
from pathlib import Path

import pytest

from tests.process.scripts import run as run_script

pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "from-the-articles.md"
NAMES = ("tensorflow_articles.py", "tensorflow_articles_alone.py", "torch_articles.py")
SETTINGS = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1") | {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "KERAS_BACKEND": "tensorflow",
}


@pytest.fixture(scope="module")
def look(tmp_path_factory):
    """The facts of every worker of a script, and all that was printed. Each script is run once."""

    @lru_cache
    def look(name: str, num_workers: int) -> tuple[list[dict], str]:
        done = subprocess.run(
            [sys.executable, str(HERE / name)],
            capture_output=True,
            text=True,
            timeout=500,
            cwd=tmp_path_factory.mktemp("run"),
            env=os.environ | SETTINGS,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        facts = [json.loads(line.partition("FACTS ")[2]) for line in done.stdout.splitlines() if "FACTS " in line]
        assert len(facts) == num_workers
        return facts, done.stdout + done.stderr

    return look


@pytest.fixture
def on_two_workers(look):
    return look("tensorflow_articles.py", 2)


@pytest.fixture
def alone(look):
    ((facts,), said) = look("tensorflow_articles_alone.py", 1)
    return facts, said


@pytest.fixture
def torch(look):
    return look("torch_articles.py", 2)


# PyTorch.


@pytest.mark.torch
@pytest.mark.slow
def test_a_net_goes_to_the_device_of_its_worker(torch):
    facts, said = torch
    for each in facts:
        worker = each["one_card"]["worker"]
        assert each["one_card"] == {"moved": "cpu", "made": "cpu", "place": f"cpu:0/v{worker}", "worker": worker}
        assert f"gpu:0 is not here: what is placed there runs on cpu:0/v{worker}" in said


@pytest.mark.torch
@pytest.mark.slow
def test_data_parallel_splits_the_batch_and_has_the_numbers_of_one_device(torch):
    facts, said = torch
    assert sorted(each["several_cards"]["rows"] for each in facts) == [[10], [11]]
    for each in facts:
        assert each["several_cards"]["plain"] == 21
        assert each["several_cards"]["difference"] <= 1e-5
    assert "gpu:3 is not here: cpu:0/v1, a virtual CPU device, takes its place" in said


# TensorFlow in one process.


@pytest.mark.tensorflow
@pytest.mark.slow
def test_a_block_on_the_cpu_runs_there(alone):
    assert alone[0]["on_the_cpu"] == {"sum": [2, 4, 6], "place": "CPU:0"}


@pytest.mark.tensorflow
@pytest.mark.slow
def test_a_card_that_is_not_here_is_named_once_or_an_error(alone):
    facts, said = alone
    error = facts["on_a_card"].pop("error")
    assert facts["on_a_card"] == {"sum": [2, 4, 6], "place": "CPU:0", "found": "cpu:0"}
    assert error.startswith("gpu:3 is not here.")
    assert "Here are: cpu:0, cpu:1, cpu:2, cpu:3." in error, "each device once"
    assert said.count("gpu:3 is not here: what is placed there runs on cpu:0") == 1


@pytest.mark.tensorflow
@pytest.mark.slow
def test_a_session_without_soft_placement_runs_what_was_placed_with_us(alone):
    assert alone[0]["in_a_session"] == {"sum": [2, 4, 6], "asked": "/device:CPU:0"}


@pytest.mark.tensorflow
@pytest.mark.slow
def test_a_second_logical_cpu_computes(alone):
    assert alone[0]["on_two_cpus"] == {"sum": [2, 4, 6], "places": ["CPU:0", "CPU:1"]}


@pytest.mark.tensorflow
@pytest.mark.slow
def test_a_variable_for_a_missing_card_is_on_the_cpu_and_this_is_said(alone):
    facts, said = alone
    assert facts["placed_softly"]["places"] == ["CPU:0", "CPU:0"]
    assert said.count("gpu:0 is not here: what is placed there runs on cpu:0") == 1


@pytest.mark.tensorflow
@pytest.mark.slow
def test_products_of_two_cards_are_added(alone):
    assert alone[0]["added_from_two_cards"]["sum"] == [[44, 56], [98, 128]]


@pytest.mark.tensorflow
@pytest.mark.slow
def test_towers_train_as_one_device_does_with_a_rate_that_falls_in_stairs(alone):
    towers = alone[0]["towers"]
    assert towers["devices"] == ["/CPU:0", "/CPU:1", "/CPU:2", "/CPU:3"]
    assert towers["last"] == "CPU:3"
    assert towers["difference"] <= 1e-5
    assert towers["rate"] == pytest.approx(0.1 * 0.5**2)


@pytest.mark.tensorflow
@pytest.mark.slow
def test_without_a_number_every_card_here_is_taken(alone):
    found = alone[0]["every_card_here"]
    assert (found["replicas"], found["gpus"]) == (1, 0)
    plain, *ours = found["weights"]
    assert ours == [plain, plain]


@pytest.mark.tensorflow
@pytest.mark.slow
def test_what_ran_where_is_one_table(alone):
    said = alone[1]
    assert said.count("duoka: placement of the first step:") == 1
    assert re.search(r"^duoka: variable +\S+/added/kernel +float32 \(3, 1\) +cpu:0$", said, re.MULTILINE)
    assert re.search(r"^duoka: operations +\S+/added\S* +.*MatMul.* +cpu:0$", said, re.MULTILINE)


# TensorFlow and Keras on two workers.


@pytest.mark.tensorflow
@pytest.mark.slow
def test_a_list_of_devices_gives_each_worker_its_own(on_two_workers):
    facts, said = on_two_workers
    found = sorted((each["device_list"] for each in facts), key=lambda each: each["worker"])
    assert found == [{"replicas": 2, "worker": worker, "device": f"cpu:0/v{worker}"} for worker in (0, 1)]
    assert "gpu:1 is not here: cpu:0/v1, a virtual CPU device, takes its place" in said


@pytest.mark.tensorflow
@pytest.mark.slow
def test_cats_and_dogs_are_fitted_in_batches_that_grow_with_the_replicas(on_two_workers):
    facts, said = on_two_workers
    first, second = (each["cats_and_dogs"] for each in facts)
    assert first == second
    assert (first["batch"], first["batches"], first["updates"]) == (32, 3, 6)
    assert first["names"] == ["loss", "sparse_categorical_accuracy"]
    assert first["losses"][1] < first["losses"][0]
    assert said.count("Number of devices: 2") == 1


@pytest.mark.tensorflow
@pytest.mark.slow
def test_multi_gpu_model_and_compile_with_a_list_train_to_the_numbers_of_one_device(on_two_workers):
    for each in on_two_workers[0]:
        assert each["old_keras"]["is_the_original"]
        assert each["old_keras"]["multi_gpu_model"] <= 1e-5
        assert each["old_keras"]["compile"] <= 1e-5


@pytest.mark.tensorflow
@pytest.mark.slow
def test_the_loop_has_the_losses_accuracies_and_weights_of_one_device(on_two_workers):
    facts, said = on_two_workers
    for each in facts:
        assert each["custom_loop"]["batches"] == 6
        assert each["custom_loop"]["numbers"] <= 1e-5
        assert each["custom_loop"]["weights"] <= 1e-5
    assert said.count("strategy.run was given a plain batch: it is split") == 1


@pytest.mark.tensorflow
@pytest.mark.slow
def test_the_loop_shows_one_bar_with_loss_and_accuracy(on_two_workers):
    said = on_two_workers[1]
    for epoch in (1, 2):
        assert len(re.findall(rf"Epoch {epoch}/2: 3/3.* loss [\d.]+, accuracy [\d.]+", said)) == 1


@pytest.mark.tensorflow
@pytest.mark.slow
def test_folders_of_pictures_are_read_into_batches_for_the_loop(on_two_workers):
    for each in on_two_workers[0]:
        assert each["pictures_in_folders"] == {"sizes": [8, 8, 4], "right": [True] * 3}


@pytest.mark.tensorflow
@pytest.mark.slow
def test_a_horovod_script_in_our_words_has_the_weights_of_one_device(on_two_workers):
    for each in on_two_workers[0]:
        assert each["in_place_of_horovod"]["weights"] <= 1e-5


@pytest.mark.tensorflow
@pytest.mark.slow
def test_reuters_is_loaded_once_and_fitted_with_the_losses_of_one_device(on_two_workers):
    facts, said = on_two_workers
    assert said.count("DOWNLOADED") == 1
    first, second = (each["reuters"] for each in facts)
    assert first == second
    assert first["parameters"] == 332_856
    assert first["difference"] <= 1e-4
    assert first["names"][0] == first["names"][1]
    assert first["losses"][0][1] < first["losses"][0][0]


# Without a framework.


def test_one_visible_card_is_one_device(tmp_path):
    ended = run_script(tmp_path, 'import duoka\nprint(duoka.Mirrored(devices=["gpu:0"]).device)')
    assert (ended.code, ended.out) == (0, "cpu:0/v0\n"), ended.err
    assert "gpu:0 is not here" in ended.err


def test_three_named_cards_are_three_workers(tmp_path):
    source = """
    import json, duoka
    strategy = duoka.Mirrored(devices=["/gpu:0", "/gpu:2", "/gpu:3"])
    print(json.dumps({"device": str(strategy.device), "replicas": strategy.num_replicas_in_sync}))
    """
    ended = run_script(tmp_path, source)
    assert ended.code == 0, ended.err
    assert ended.facts() == {worker: {"device": f"cpu:0/v{worker}", "replicas": 3} for worker in range(3)}
    for name in ("gpu:0", "gpu:2", "gpu:3"):
        assert f"{name} is not here" in ended.err


def test_two_virtual_devices_are_held_to_1024_mb_each(tmp_path):
    source = """
    import json, duoka, numpy as np
    strategy = duoka.Mirrored(duoka.virtual_devices("cpu:0", count=2, memory_mb=1024))
    fits = np.empty((900, 2**20), "uint8").nbytes
    try:
        np.empty((1100, 2**20), "uint8")
    except MemoryError:
        print(json.dumps({"device": str(strategy.device), "replicas": strategy.replicas}))
    """
    ended = run_script(tmp_path, source)
    assert ended.code == 0, ended.err
    assert ended.facts() == {worker: {"device": f"cpu:0/v{worker}", "replicas": 2} for worker in (0, 1)}
    assert "2 workers (cpu:0/v0 with 1024 MB, cpu:0/v1 with 1024 MB)" in ended.err


def test_a_share_of_the_memory_is_held_to(tmp_path):
    source = """
    import json, duoka, numpy as np
    whole_mb = duoka.devices()[-1].total_mb
    strategy = duoka.Mirrored(memory_fraction=0.8)
    fits = np.empty((whole_mb // 10, 2**20), "uint8").nbytes
    try:
        np.empty((whole_mb * 9 // 10, 2**20), "uint8")
    except MemoryError:
        print("held")
    """
    ended = run_script(tmp_path, source)
    assert (ended.code, ended.out) == (0, "held\n"), ended.err


def test_growth_and_counts_of_devices_are_taken_or_said_to_have_no_meaning(tmp_path):
    ended = run_script(tmp_path, "import duoka\nprint(duoka.Mirrored(allow_growth=True).replicas)")
    assert (ended.code, ended.out) == (0, "1\n"), ended.err
    assert ended.err.count("allow_growth=True has no meaning on a CPU") == 1
    source = 'import duoka\nprint(duoka.Mirrored(device_count={"GPU": 1, "CPU": 56}).replicas)'
    ended = run_script(tmp_path / "count", source)
    assert (ended.code, ended.out) == (0, "1\n"), ended.err
    assert 'device_count={"GPU": 1}: 0 GPUs here' in ended.err


# The page.


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| their")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_has_the_five_articles_and_every_row_names_tests_that_exist():
    assert len(re.findall(r"^## \d\. ", PAGE.read_text(), re.MULTILINE)) == 5
    assert len(rows()) >= 40
    for cells in rows():
        assert len(cells) == 4, cells
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cells[3])
        assert named, f"{cells[0]} names no test"
        for file, function in named:
            (path,) = (ROOT / "tests").rglob(file)
            assert re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE), f"{file}::{function}"


def test_what_the_page_calls_ours_is_what_the_tests_run():
    own = "".join((HERE / name).read_text() for name in (*NAMES, Path(__file__).name))
    for cells in rows():
        named = re.findall(r"`(test_\w+\.py)::", cells[3])
        sources = own + "".join(path.read_text() for name in named for path in (ROOT / "tests").rglob(name))
        for code in re.findall(r"`([^`]+)`", cells[2]):
            assert code in sources or (ROOT / code).exists(), f"{code} is nowhere in the tests"


def test_the_blocks_of_the_page_are_word_for_word_in_the_scripts():
    sources = [without_empty_lines((HERE / name).read_text()) for name in NAMES]
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    for block in blocks:
        inside = textwrap.indent(without_empty_lines(block), "    ")
        assert any(inside in source for source in sources), block


def without_empty_lines(text: str) -> str:
    """Their number depends on whether a function stands in another one."""
    return "".join(line for line in text.splitlines(keepends=True) if line.strip())
