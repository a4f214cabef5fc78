"""The environment of a worker, and what the environment says about other launchers. Read here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from duoka.devices.device import Device
from duoka.errors import LaunchError
from duoka.runtime.plan import Plan

# Each framework reads its own: OMP_NUM_THREADS alone does nothing on TensorFlow and JAX.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "NPROC",  # JAX
)

_NCCL_ON_ONE_HOST = {
    "NCCL_SOCKET_IFNAME": "lo",  # nothing listens on a network address
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else PyTorch ends a worker whose neighbour was lost
}

_LAUNCHERS = {  # who sets what: (number of this process, number of all)
    "torchrun": ("RANK", "WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpirun (MPICH)": ("PMI_RANK", "PMI_SIZE"),
}


def worker_environment(base: Mapping[str, str], plan: Plan, worker: int) -> dict[str, str]:
    """What a worker's process starts with: its device, pinned threads, one hash seed for all."""
    environ = dict(base)
    environ.update(dict.fromkeys(_THREAD_VARIABLES, str(plan.threads)))
    environ["PYTHONHASHSEED"] = str(plan.seed % 2**32)
    environ["CUDA_VISIBLE_DEVICES"] = _visible_card(plan.devices[worker])
    environ.update(memory_variables(plan, worker))
    if plan.transport == "nccl":
        for name, text in _NCCL_ON_ONE_HOST.items():
            environ.setdefault(name, text)
    return environ


def memory_variables(plan: Plan, worker: int) -> dict[str, str]:
    """What TensorFlow and JAX read when they start on a card.

    TensorFlow's own calls take growth or a limit, not both; this variable goes with either.
    """
    device, variables = plan.devices[worker], {}
    if device.kind == "gpu" and plan.allow_growth is not None:
        variables["TF_FORCE_GPU_ALLOW_GROWTH"] = str(plan.allow_growth).lower()
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(not plan.allow_growth).lower()
    if device.kind == "gpu" and device.memory_limit_mb is not None and device.total_mb is not None:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{device.memory_limit_mb / device.total_mb:.4f}"
    return variables


def _visible_card(device: Device) -> str:
    """The one card this worker may see; none for a worker that computes on the CPU."""
    if device.kind != "gpu":
        return ""
    return device.uuid or str(device.index if device.physical_index is None else device.physical_index)


def threads_given(environ: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS, when the user has set it: then it is meant."""
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(text) if text.isdigit() and int(text) > 0 else None


def transport_asked(environ: Mapping[str, str]) -> str | None:
    """DUOKA_TRANSPORT: "shm" or "torch", when the user has set it."""
    text = environ.get("DUOKA_TRANSPORT", "")
    if text not in ("", "shm", "torch"):
        raise LaunchError(
            f"DUOKA_TRANSPORT={text} cannot be used.",
            why='it is "shm" (shared memory) or "torch" (torch.distributed), for PyTorch\'s tensors.',
            do="unset it: shared memory serves CPU devices, NCCL serves cards.",
        )
    return text or None


def foreign_launcher(environ: Mapping[str, str]) -> str | None:
    """The launcher that has already started several copies of this script, if one has."""
    for name, (number, count) in _LAUNCHERS.items():
        if environ.get(number, "").isdigit() and environ.get(count, "").isdigit() and int(environ[count]) > 1:
            return name
    return None
