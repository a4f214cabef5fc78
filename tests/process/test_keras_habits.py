"""What people do around `fit` in a script for one device keeps working on several workers."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from tests.process.scripts import DUOKA_RUN, Ended, Run

SCRIPT = Path(__file__).parent / "keras_habits.py"
# PyTorch starts fastest; the others are part of the full matrix.
BACKENDS = [
    pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.slow]),
    pytest.param("tensorflow", marks=[pytest.mark.tensorflow, pytest.mark.slow]),
    pytest.param("jax", marks=[pytest.mark.jax, pytest.mark.slow]),
]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}


@dataclass(frozen=True)
class Found:
    backend: str
    ended: Ended
    facts: dict[int, dict]

    def of(self, name: str) -> tuple[dict, dict]:
        return self.facts[0][name], self.facts[1][name]


@lru_cache
def launch(backend: str) -> Ended | AssertionError:
    """One launch for all of them: starting costs more than they do. A failure is remembered, too."""
    directory = Path(tempfile.mkdtemp(prefix="duoka-habits"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "files").mkdir()
    words = [*DUOKA_RUN, "--devices", "2", str(SCRIPT), str(directory / "files")]
    run = Run(directory, words, env=ONE_THREAD | {"KERAS_BACKEND": backend})
    try:
        return run.finish(580, leaves=[""])  # the frameworks leave temporary files of their own
    except AssertionError as error:
        return error


def found(backend: str) -> Found:
    ended = launch(backend)
    if isinstance(ended, AssertionError):
        raise ended
    assert ended.code == 0, ended.err[-3000:]
    return Found(backend, ended, ended.facts())


@pytest.fixture(params=BACKENDS)
def habits(request) -> Found:
    return found(request.param)


def test_callbacks_write_on_the_main_worker_and_know_the_same_on_all(habits):
    main, other = habits.of("callbacks_that_write")
    for name in ("best.keras", "1.weights.h5", "2.weights.h5", "backup/latest.weights.h5", "log.csv"):
        assert name in main["files"]
    assert [name.split("/")[1] for name in main["files"] if name.startswith("events/")] == ["train", "validation"]
    assert [line.split(",")[0] for line in main["log"]] == ["epoch", "0", "1"]
    assert other["files"] == []
    assert main["best"] == other["best"]
    assert main["left"] == other["left"] == []


def test_a_monitor_sends_once_and_a_list_of_callbacks_stays_as_it_was_given(habits):
    main, other = habits.of("callbacks_of_other_kinds")
    assert (main["sent"], other["sent"]) == ([0, 1], [])
    assert (main["logged"], other["logged"]) == (True, False)
    assert main["history"] == other["history"] and len(main["history"]["loss"]) == 2
    assert main["left"] == other["left"] == 2, "the logger and the History"


def test_all_workers_restore_what_one_has_backed_up(habits):
    main, other = habits.of("restores_run_on_all_workers")
    assert main == other
    assert main["epochs"] == [[2, 3], [0, 1, 2, 3], [0, 1]]


def test_there_is_one_progress_bar(habits):
    assert "[w1]" not in habits.ended.out.partition("BAR BEGINS")[2].partition("BAR ENDS")[0]
    logs = [(habits.ended.run_directory / f"worker-{worker}.log").read_bytes().decode() for worker in (0, 1)]
    assert "━" not in logs[1]
    shown = logs[0].partition("BAR BEGINS")[2].partition("BAR ENDS")[0]
    finished = [re.sub(r"\x1b\[\d+m", "", line.rpartition("\r")[2]) for line in shown.split("\n")]
    bars = [line for line in finished if "━" in line]
    assert [line.split()[0] for line in bars] == ["4/4", "4/4", "2/2", "2/2"], "two epochs, evaluate, predict"
    assert all("val_loss" in line for line in bars[:2])
    assert finished.count("Epoch 1/2") == finished.count("Epoch 2/2") == 1


def test_any_stop_stops_all_at_the_same_step(habits):
    main, other = habits.of("any_stop_stops_all")
    assert main == other
    assert [steps for steps, _, _ in main["steps"]] == [6, 1, 4]
    assert main["seen"] == [0, 1, 2, 3, 0, 1]


def test_callbacks_of_batches_on_the_main_worker_only_stop_all(habits):
    main, other = habits.of("callbacks_on_the_main_worker_only")
    assert (main["seen"], other["seen"]) == ([0, 1, 2, 3, 0, 1], [])
    assert main["epochs"] == other["epochs"] == [0, 1]
    assert main["after"] == other["after"]


def test_nan_on_one_replica_reaches_the_history_of_all(habits):
    main, other = habits.of("nan_on_one_replica")
    assert main == other
    assert main["histories"] == [[["nan", "nan"], 4], [["nan"], 2]]


def test_models_are_saved_once_and_whole(habits):
    main, other = habits.of("saving")
    assert not other["exists"]
    assert other["refused"] == []
    expected = {"all.keras", "all.weights.h5", "c.keras", "main.keras"}
    assert set(main["names"]) - {"new"} == expected, "and nothing half-written"
    assert main["same"] == [True] * 4
    assert main["exported"]
    assert main["ours"] == []
    missing, full, there = main["refused"]
    assert "there is no folder" in missing
    assert "File too large" in full
    assert "is there already" in there


def test_looking_at_the_model_on_the_main_worker_changes_nothing(habits):
    main, other = habits.of("looking_on_the_main_worker_changes_nothing")
    assert main == other
    assert main["results"][0] == main["results"][1]
    assert main["in_order"]
    assert main["same"]


def test_weights_loaded_by_the_main_worker_reach_all(habits):
    main, other = habits.of("weights_that_the_main_worker_loads_reach_all")
    assert main == other


def test_weights_of_16_bits_stay_equal_on_all_workers(habits):
    main, other = habits.of("weights_of_16_bits")
    assert main == other
    ours, plain = main["losses"]
    assert ours == pytest.approx(plain, rel=0.1), "rows are added up in another order"


def test_the_main_worker_goes_first_and_prints_once(habits):
    main, other = habits.of("once")
    assert main == {"existed": False, "is_main": True}
    assert other == {"existed": True, "is_main": False}
    assert habits.ended.out.count("PRINTED ONCE") == 1


def test_scopes_may_be_opened_again_and_models_come_from_outside(habits):
    main, other = habits.of("scopes")
    assert main == other
    _, *rest = main["digests"]  # the first one came second, to another shuffle
    assert len(set(rest)) == 1, "made inside, trained inside, prepared, trained before"
    assert main["plain"] not in main["digests"], "else nothing was exchanged"
    assert main["steps"] == 8


def test_a_model_outside_of_the_strategy_is_named_in_one_line(habits):
    main, other = habits.of("outsiders")
    assert not main["is_watched"] and not other["is_watched"]
    assert len([line for line in habits.ended.said() if "is not part of the strategy" in line]) == 1


def test_data_of_all_kinds_is_read_in_the_order_of_one_device(habits):
    main, other = habits.of("data")
    assert main == other
    for name, (distance, _, num_epochs) in main.items():
        assert distance <= 1e-5, name
        assert num_epochs == (4 if name == "some_steps" else 2), name
    said = [line for line in habits.ended.said() if "every worker reads all of" in line]
    assert sorted(line.partition("all of ")[2].partition(",")[0] for line in said) == [
        "a PyDataset",
        "a generator",
        "a tf.data dataset",
        "a torch DataLoader",
    ]


def test_batches_with_fewer_rows_than_replicas_are_named_once_and_trained_on(habits):
    """Not last ones of an epoch: `data` has one of a single row."""
    said = [line for line in habits.ended.said() if "no rows and only wait" in line]
    assert [line.partition(":")[0] for line in said] == ["batches of 1 row are split between 2 replicas"]


def test_what_differs_between_workers_is_an_error_on_all_that_names_the_remedy(habits):
    main, other = habits.of("misuse")
    assert main["after"] == other["after"], "they can go on"
    variables = ("variable_of_tensorflow", "variable_in_a_branch", "variable_in_a_function")
    of_tensorflow = {
        **dict.fromkeys(variables, "writes to a tf.Variable"),
        "made_in_a_scope_of_tensorflow": "belongs to a strategy of tf.distribute",
        "made_in_two_scopes": "belongs to a strategy of tf.distribute",
    }
    for name, words in {
        **(of_tensorflow if habits.backend == "tensorflow" else {}),
        "shuffle_differently": "They come from arrays.",
        "shuffle_a_stream_differently": "They come from a generator.",
        "differ_in_the_last_row": "saw different global batches",
        "set_the_rate_on_one_worker": "the learning rate is",
        "rows_that_do_not_fit": "have 9, 10 rows",
        "a_batch_without_rows": "A batch has no rows.",
        "scope_in_a_scope": "inside the scope of another",
        "prepare_in_the_middle": "is under way",
        "state_of_rows": "has stateful=True",
        "function_of_its_own": "Mine overrides make_train_function",
        "fit_of_its_own": "The fit of Mine takes no callbacks.",
        "distribution_of_keras": "keras.distribution.set_distribution is in force",
        "models_that_differ": "kernel: (8, 4) float32' on worker 0, ",
    }.items():
        for errors in (main["errors"], other["errors"]):
            assert words in errors[name], name
            assert "  do   " in errors[name], name


def test_threads_beside_a_step_compute_as_ever_and_do_not_change_it(habits):
    for found in habits.of("threads_beside_a_step"):
        assert found["found"]
        assert all(each == [3.0, 2.0, 0.0] for each in found["found"])
        assert len(set(found["digests"])) == 1


def test_weights_that_drift_apart_are_an_error_on_all_that_names_the_first(habits):
    main, other = habits.of("drifting")
    assert main["after"] == other["after"], "they can go on"
    of_torch = {
        "OtherOptimizer": "OtherOptimizer did not call the optimizer",
        "OtherOptimizerBeside": "kernel is not the same on workers 0 and 1, after batch 1 of a training",
    }
    expected = {
        "set_in_a_callback": "kernel is not the same on workers 0 and 1, at the end of epoch 0",
        "set_between_batches": "kernel is not the same on workers 0 and 1, after batch 16 of a training",
        "ByHand": "ByHand did not call the optimizer",
        **(of_torch if habits.backend == "torch" else {}),
    }
    for errors in (main["errors"], other["errors"]):
        assert errors.keys() == expected.keys()
        for name, words in expected.items():
            assert words in errors[name], name
            assert "  do   " in errors[name], name


def test_steps_that_write_behind_the_back_of_keras_train_to_the_numbers_of_one_device(habits):
    main, other = habits.of("steps_behind_the_back")
    assert main == other
    assert len(main) == {"tensorflow": 9, "torch": 4, "jax": 2}[habits.backend]
    for name, (distance, _) in main.items():
        assert distance <= 1e-5, name


def test_an_apply_that_the_user_has_put_on_the_optimizer_gets_the_gradients_of_all_rows_and_stays(habits):
    main, other = habits.of("optimizers_with_an_apply_of_ones_own")
    assert main == other and len(main) == 2
    for name, (distance, is_kept, _) in main.items():
        assert distance <= 1e-5 and is_kept, name


def test_losses_of_ones_own_have_the_numbers_of_one_device_or_are_named(habits):
    main, other = habits.of("own_losses")
    assert main == other
    named = {
        "SumByRows": "the gradient of SumByRows is not a mean over rows",
        "AddedSum": "the gradient of AddedSum is not a mean over rows",
        "MadeOfMetrics": "twice is made of metrics",
        "Clipping": "the train_step of Clipping changes gradients",
    }
    said = habits.ended.said()
    for name, distance in main.items():
        assert (distance <= 1e-5) == (name not in named), name
        assert name not in named or len([line for line in said if named[name] in line]) == 1, name
    assert len([line for line in said if "is not a mean over rows" in line]) == 2
    assert len([line for line in said if "made of metrics by the step" in line]) == 1, "not MeasuredLater"
    assert len([line for line in said if "changes gradients" in line]) == ("Clipping" in main)
    assert ("EachRow" in main) == (habits.backend == "tensorflow")


def test_an_untried_version_of_keras_is_named_in_one_line(habits):
    assert habits.ended.err.count("Keras 3.99.0 has not been tried with Duoka") == 1


@pytest.mark.slow
@pytest.mark.tensorflow
def test_draws_from_tf_random_are_named_once():
    said = found("tensorflow").ended.said()
    assert len([line for line in said if "the step of Sequential draws from tf.random" in line]) == 1
    assert not [line for line in said if "loss is not a sum" in line], "a step that draws cannot be run again to see"


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_loss_with_functions_of_the_old_kind_has_the_numbers_of_one_device():
    main, other = found("tensorflow").of("functions_of_the_old_kind")
    assert main == other
    assert main["distance"] <= 1e-5


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_update_is_compiled_unless_it_is_refused_or_large():
    main, other = found("tensorflow").of("who_compiles_the_update")
    assert main == other == {"told": [True, False, True, False]}
