"""What the design calls "not to be cut" and no article shows: names of devices, memory, counts, without a framework.

The launches of the articles hold the rest of that list: see calls.md.
"""

from __future__ import annotations

import json

import pytest

from tests.limits import START_S
from tests.process.scripts import run

pytestmark = [pytest.mark.timeout(4 * START_S)]

GPU_NAMES = ("/gpu:0", "cuda:0", "gpu(0)", "gpu:0", "/device:GPU:0", "/job:localhost/replica:0/task:0/device:GPU:0")


def test_every_way_to_write_the_name_of_a_missing_gpu_leads_to_the_cpu_or_to_an_error(tmp_path):
    source = f"""
    import json, sys, duoka
    from duoka.errors import DuokaError
    found = []
    for name in {GPU_NAMES!r}:
        with duoka.device(name) as place:
            soft = place.name
        try:
            with duoka.device(name, soft_placement=False):
                error = "nothing"
        except DuokaError as refused:
            error = str(refused).splitlines()[0]
        found.append([soft, error])
    loaded = sorted({{"torch", "tensorflow", "keras", "jax"}} & set(sys.modules))
    print(json.dumps([found, loaded]))
    """
    ended = run(tmp_path, source, timeout_s=START_S)
    assert ended.code == 0, ended.err
    found, loaded = json.loads(ended.out)
    assert found == [["cpu:0", "gpu:0 is not here."]] * len(GPU_NAMES)
    assert loaded == []
    assert ended.err.count("gpu:0 is not here: what is placed there runs on cpu:0") == 1


def test_a_strategy_without_soft_placement_refuses_a_missing_gpu(tmp_path):
    source = """
    import duoka
    duoka.Mirrored(devices=["/job:localhost/replica:0/task:0/device:GPU:0"], soft_placement=False)
    """
    ended = run(tmp_path, source, timeout_s=START_S)
    assert ended.code != 0
    assert "soft_placement=False forbids virtual CPU devices in their place" in ended.err


def test_a_memory_limit_in_mb_is_held_on_every_worker(tmp_path):
    source = """
    import json, duoka, numpy as np
    strategy = duoka.Mirrored(devices=2, memory_limit_mb=512)
    fits = np.empty((200, 2**20), "uint8").nbytes
    try:
        np.empty((600, 2**20), "uint8")
        is_held = False
    except MemoryError:
        is_held = True
    print(json.dumps({"is_held": is_held, "fits": fits}))
    """
    ended = run(tmp_path, source, timeout_s=START_S)
    assert ended.code == 0, ended.err
    assert ended.facts() == {worker: {"is_held": True, "fits": 200 * 2**20} for worker in (0, 1)}
    assert "2 workers (cpu:0/v0 with 512 MB, cpu:0/v1 with 512 MB)" in ended.err


def test_virtual_devices_have_a_limit_each(tmp_path):
    source = """
    import json, duoka, numpy as np
    strategy = duoka.Mirrored(duoka.virtual_devices("cpu:0", memory_mb=[300, 600]))
    try:
        np.empty((400, 2**20), "uint8")
        is_held = False
    except MemoryError:
        is_held = True
    print(json.dumps({"is_held": is_held}))
    """
    ended = run(tmp_path, source, timeout_s=START_S)
    assert ended.code == 0, ended.err
    assert ended.facts() == {0: {"is_held": True}, 1: {"is_held": False}}
    assert "2 workers (cpu:0/v0 with 300 MB, cpu:0/v1 with 600 MB)" in ended.err


def test_allow_growth_is_accepted_and_duoka_logs_that_a_cpu_has_no_use_for_it(tmp_path):
    ended = run(tmp_path, "import duoka\nprint(duoka.Mirrored(allow_growth=True).replicas)", timeout_s=START_S)
    assert (ended.code, ended.out) == (0, "1\n"), ended.err
    assert ended.err.count("allow_growth=True has no meaning on a CPU") == 1


def test_a_count_of_gpus_that_are_missing_is_logged(tmp_path):
    source = 'import duoka\nprint(duoka.Mirrored(device_count={"GPU": 1, "CPU": 56}).replicas)'
    ended = run(tmp_path, source, timeout_s=START_S)
    assert (ended.code, ended.out) == (0, "1\n"), ended.err
    assert 'device_count={"GPU": 1}: 0 GPUs here' in ended.err
