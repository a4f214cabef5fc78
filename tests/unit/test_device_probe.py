"""What is here is found without loading a framework, and what is not here is explained."""

import os
import subprocess
import sys
import types

import pynvml
import pytest

import duoka.devices
import duoka.devices.cuda
from duoka.devices.cpu import list_cpus
from duoka.devices.cuda import list_gpus, probe_gpus
from duoka.devices.device import MB, Device
from duoka.devices.probe import Inventory, list_devices, summary_sentence
from tests.limits import START_S

GB = 1024 * MB


class FakeNvml:
    """The functions of pynvml that are used, over cards given as dictionaries; errors are pynvml's own.

    A value that is an exception is raised when asked for: so the driver answers what a card does not support.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, *cards, init_error=None, instances=()):
        self.cards, self.instances, self.init_error = (
            cards,
            {card["uuid"]: card for card in instances},
            init_error,
        )
        self.is_open = False

    def nvmlInit(self):
        if self.init_error:
            raise self.init_error
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._answer(self.cards[index], "handle", default=self.cards[index])

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.instances:
            raise pynvml.NVMLError_NotFound()
        return self.instances[uuid]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return self._answer(handle, "parent")

    def nvmlDeviceGetIndex(self, handle):
        return self.cards.index(handle)

    def nvmlDeviceGetName(self, handle):
        return self._answer(handle, "title")

    def nvmlDeviceGetUUID(self, handle):
        return self._answer(handle, "uuid")

    def nvmlDeviceGetMemoryInfo(self, handle):
        total, free = self._answer(handle, "memory")
        return types.SimpleNamespace(total=total, free=free, used=total - free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        processes = self._answer(handle, "processes", default=[])
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        raise pynvml.NVMLError_NotSupported()

    def nvmlSystemGetProcessName(self, pid):
        if pid == 404:
            raise pynvml.NVMLError_NotFound()
        return f"/usr/bin/trainer\x1b[2J{pid}"

    def nvmlDeviceGetMigMode(self, handle):
        return self._answer(handle, "mig_mode")

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        mine = [card for card in self.instances.values() if card["parent"] is handle]
        if index >= len(mine):
            raise pynvml.NVMLError_NotFound()
        return mine[index]

    def _answer(self, card, key, default=None):
        assert self.is_open, "asked outside of nvmlInit and nvmlShutdown"
        value = card.get(key, default)
        if value is None:
            raise pynvml.NVMLError_NotSupported()
        if isinstance(value, Exception):
            raise value
        return value


def card(uuid, **known):
    return {"title": "NVIDIA A100", "uuid": uuid, "memory": (40 * GB, 39 * GB), **known}


FOUR = FakeNvml(card("GPU-aa11"), card("GPU-ab22"), card("GPU-bb33"), card("GPU-cc44"))


def physical(setting, nvml=FOUR):
    return [device.physical_index for device in list_gpus({"CUDA_VISIBLE_DEVICES": setting}, nvml)]


def test_every_card_is_listed_with_its_title_and_memory_when_nothing_hides_it():
    devices = list_gpus({}, FOUR)
    assert [device.name for device in devices] == ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    assert (devices[2].title, devices[2].total_mb, devices[2].free_mb) == ("NVIDIA A100", 40960, 39936)
    assert not FOUR.is_open


@pytest.mark.parametrize(
    ("setting", "cards"),
    [
        ("3,0", [3, 0]),
        (" 2 , 1", [2, 1]),
        ("GPU-bb33,GPU-aa", [2, 0]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", [0]),
        ("1,9,0", [1]),
        ("GPU-bb,GPU-zz,GPU-aa", [2]),
        ("GPU-a", []),
        ("GPU-bb,0", [2]),
        ("0,GPU-bb", [0]),
        ("1,1", []),
        ("GPU-aa,GPU-aa11", []),
    ],
)
def test_visible_cards_are_read_as_cuda_reads_them(setting, cards):
    assert physical(setting) == cards


@pytest.mark.torch
@pytest.mark.parametrize(
    "setting", ["3,0", "", "-1", "0,-1,1", "1,9,0", "1,1", "2x,1", "+1", "GPU-bb33,GPU-aa", "GPU-a"]
)
def test_visible_cards_are_counted_as_pytorch_counts_them(setting, monkeypatch):
    import torch.cuda

    uuids = [known["uuid"] for known in FOUR.cards]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: uuids)
    assert len(physical(setting)) == torch.cuda._device_count_nvml()


def test_hidden_cards_are_mentioned_with_the_reason():
    assert "hides 4 of 4" in probe_gpus({"CUDA_VISIBLE_DEVICES": ""}, FOUR).notes[0]
    notes = probe_gpus({"CUDA_VISIBLE_DEVICES": "1,9"}, FOUR).notes
    assert "'9' is not one card here" in notes[0] and "hides 3 of 4" in notes[1]
    assert "twice" in probe_gpus({"CUDA_VISIBLE_DEVICES": "1,1"}, FOUR).notes[0]


def test_a_query_that_a_card_does_not_support_loses_only_its_own_value():
    bare = {key: pynvml.NVMLError_NotSupported() for key in ("title", "uuid", "memory", "processes")}
    (device,) = list_gpus({}, FakeNvml(bare))
    assert device == Device("gpu", 0)
    assert (device.total_mb, device.free_mb, device.uuid, device.holders) == (None, None, None, ())


def test_a_card_that_has_fallen_off_the_bus_is_noted_and_the_others_stay():
    cards = probe_gpus({}, FakeNvml(card("GPU-1"), {"handle": pynvml.NVMLError_GpuIsLost()}, card("GPU-3")))
    assert [(device.name, device.physical_index) for device in cards.devices] == [("gpu:0", 0), ("gpu:1", 2)]
    assert "physical GPU 1 does not answer" in cards.notes[0]
    assert cards.problems == cards.notes[:1]


def test_processes_that_hold_a_card_are_listed_largest_first_and_safe_to_print():
    (device,) = list_gpus({}, FakeNvml(card("GPU-1", processes=[(404, None), (7, 2 * GB), (8, 3 * GB)])))
    assert device.holders == ((8, "trainer?[2J8", 3072), (7, "trainer?[2J7", 2048), (404, "unknown", None))


def test_instances_of_a_split_card_can_be_chosen_by_name_and_are_reported():
    whole = card("GPU-1", mig_mode=[1, 1])
    parts = [card(f"MIG-{n}", title="NVIDIA A100 MIG 1g.5gb", memory=(5 * GB, 5 * GB), parent=whole) for n in (1, 2)]
    nvml = FakeNvml(card("GPU-0", mig_mode=[0, 0]), whole, instances=parts)
    assert "gpu:1 is split by MIG" in probe_gpus({}, nvml).notes[0]
    assert "MIG-1, MIG-2" in probe_gpus({}, nvml).notes[0]
    cards = probe_gpus({"CUDA_VISIBLE_DEVICES": "MIG-2,MIG-9,MIG-1"}, nvml)
    (device,) = cards.devices
    assert (device.name, device.uuid, device.physical_index, device.total_mb) == ("gpu:0", "MIG-2", 1, 5120)
    assert any("MIG-9 is not here" in note for note in cards.notes)


def test_unequal_cards_come_with_a_warning_about_the_order_cuda_counts_in():
    mixed = FakeNvml(card("GPU-1"), card("GPU-2", title="NVIDIA T4"))
    assert any("CUDA_DEVICE_ORDER" in note for note in probe_gpus({}, mixed).notes)
    assert probe_gpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, mixed).notes == ()
    assert probe_gpus({}, FOUR).notes == ()


def test_a_driver_that_does_not_start_is_a_note_and_not_an_error():
    cards = probe_gpus({}, FakeNvml(init_error=pynvml.NVMLError_DriverNotLoaded()))
    assert cards.devices == ()
    assert "does not answer" in cards.notes[0]
    assert cards.problems == cards.notes


def test_a_gpu_without_a_driver_is_found_on_the_bus(tmp_path, monkeypatch):
    monkeypatch.setattr(duoka.devices.cuda, "DRIVER_FILES", ())
    monkeypatch.setattr(duoka.devices.cuda, "PCI_DEVICES", tmp_path)
    for name, vendor, kind in (("0", "0x10de", "0x040300"), ("1", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert probe_gpus({}).problems == ()
    (tmp_path / "0" / "class").write_text("0x030200\n")
    assert probe_gpus({}).problems == ("an NVIDIA GPU is on the PCI bus, but no NVIDIA driver is loaded",)


def test_a_gpu_that_does_not_work_is_no_problem_once_all_gpus_are_hidden():
    broken = FakeNvml(init_error=pynvml.NVMLError_DriverNotLoaded())
    assert list_devices({}, (), broken).problems != ()
    for setting in ("", "-1"):
        assert list_devices({"CUDA_VISIBLE_DEVICES": setting}, (), broken).problems == ()


def test_the_cpu_is_one_device_with_the_cores_this_process_may_use():
    (cpu,) = list_cpus()
    assert cpu == Device("cpu", 0)
    assert cpu.cores == len(os.sched_getaffinity(0))
    assert 0 < cpu.free_mb <= cpu.total_mb
    assert 1 <= len(cpu.holders) <= 3
    assert [holder.mb for holder in cpu.holders] == sorted((holder.mb for holder in cpu.holders), reverse=True)


def make_machine(folder, cgroup_line):
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup_line + "\n")
    (proc / "meminfo").write_text(f"MemTotal: {8 * 1024 * 1024} kB\nMemAvailable: {6 * 1024 * 1024} kB\n")
    return proc, folder / "cgroup"


def write_group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_memory_limit_of_a_version_2_group_above_ours_counts_and_its_cached_files_are_free(tmp_path):
    proc, groups = make_machine(tmp_path, "0::/pod/task")
    write_group(groups / "pod/task", memory__max="max\n", memory__current="1\n", memory__stat="inactive_file 0\n")
    write_group(
        groups / "pod",
        memory__max=f"{2 * GB}\n",
        memory__current=f"{GB}\n",
        memory__stat=f"anon 5\ninactive_file {GB // 2}\n",
    )
    (cpu,) = list_cpus(proc, groups)
    assert (cpu.total_mb, cpu.free_mb) == (2048, 1536)


def test_the_memory_limit_of_a_version_1_group_counts_even_if_our_path_is_the_hosts(tmp_path):
    proc, groups = make_machine(tmp_path, "4:memory:/docker/not-visible-in-here\n1:cpu:/")
    write_group(
        groups / "memory",
        memory__limit_in_bytes=f"{GB}\n",
        memory__usage_in_bytes=f"{GB // 4}\n",
        memory__stat="total_inactive_file 0\n",
    )
    (cpu,) = list_cpus(proc, groups)
    assert (cpu.total_mb, cpu.free_mb) == (1024, 768)


def test_without_a_limit_the_memory_is_the_machines(tmp_path):
    (cpu,) = list_cpus(*make_machine(tmp_path, "0::/"))
    assert (cpu.total_mb, cpu.free_mb) == (8192, 6144)


def test_devices_of_a_framework_are_added_unless_they_are_known_already():
    extra = [Device("mps", 0, title="seen by PyTorch"), Device("gpu", 0, title="seen by PyTorch")]
    inventory = list_devices({"CUDA_VISIBLE_DEVICES": "2"}, extra, FOUR)
    assert [device.name for device in inventory.devices] == ["gpu:0", "mps:0", "cpu:0"]
    assert inventory.devices[0].title == "NVIDIA A100"


@pytest.mark.parametrize(
    ("num_gpus", "cores", "sentence"),
    [
        (0, 2, "0 GPUs, 2 CPU cores: `Mirrored(devices=4)` will use 4 virtual CPU devices"),
        (0, 1, "0 GPUs, 1 CPU core: `Mirrored(devices=4)` will use 4 virtual CPU devices"),
        (1, 8, "1 GPU, 8 CPU cores: `Mirrored()` will use gpu:0"),
        (2, 64, "2 GPUs, 64 CPU cores: `Mirrored()` will use gpu:0 and gpu:1"),
        (8, 64, "8 GPUs, 64 CPU cores: `Mirrored()` will use gpu:0 to gpu:7"),
    ],
)
def test_the_summary_is_one_plain_sentence(num_gpus, cores, sentence):
    gpus = [Device("gpu", index) for index in range(num_gpus)]
    assert summary_sentence(Inventory((*gpus, Device("cpu", 0, cores=cores)))) == sentence


def test_the_summary_does_not_promise_cpu_devices_beside_a_gpu_that_does_not_work():
    inventory = Inventory((Device("cpu", 0, cores=8),), problems=("the driver does not answer",))
    assert "`Mirrored(devices=4)` will raise an error" in summary_sentence(inventory)


def test_the_summary_counts_other_accelerators():
    inventory = Inventory((Device("mps"), Device("cpu", 0, cores=8)))
    assert summary_sentence(inventory).startswith("0 GPUs, 1 MPS device, 8 CPU cores: ")


def test_the_folder_of_this_layer_is_also_the_public_function(monkeypatch):
    monkeypatch.setitem(sys.modules, "duoka.here", types.SimpleNamespace(devices=lambda: "what is here"))
    assert duoka.devices() == "what is here"


def ask_extra_devices(imports):
    """Run in a fresh process: which frameworks were loaded before and after, and what they added."""
    program = f"""
import sys
{imports}
from duoka.frameworks.extra_devices import ASKED, list_extra_devices
before = [name for name in ASKED if name in sys.modules]
found = list_extra_devices()
assert [name for name in ASKED if name in sys.modules] == before, "a framework was imported"
assert all(device.kind != "cpu" for device in found)
print(before)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_no_framework_is_imported_to_ask_for_its_devices():
    assert ask_extra_devices("") == "[]"


@pytest.mark.torch
def test_pytorch_is_asked_once_it_is_imported():
    assert ask_extra_devices("import torch") == "['torch']"


@pytest.mark.slow
@pytest.mark.tensorflow
def test_tensorflow_is_asked_without_starting_its_runtime():
    # Splitting a device is refused once the runtime has started, so that it works shows that it has not.
    program = """
import tensorflow as tf
from duoka.frameworks.tensorflow.devices import list_devices
assert list_devices() == []
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
assert len(tf.config.list_logical_devices("CPU")) == 2
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.jax
def test_jax_is_asked_without_starting_its_backends():
    program = """
import jax
from jax._src import xla_bridge
from duoka.frameworks.jax.devices import list_devices
assert list_devices() == [] and not xla_bridge.backends_are_initialized()
jax.numpy.ones(1)
assert xla_bridge.backends_are_initialized() and list_devices() == []
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr[-2000:]
