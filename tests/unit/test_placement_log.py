from duoka.devices.device import Device
from duoka.frameworks.placement_log import PlacementLog, Row, list_kinds

OWN = Device("gpu", 2)
ROWS = [
    Row("variable", "dense/kernel", "float32 (4, 8)", "/job:localhost/replica:0/task:0/device:GPU:0"),
    Row("operations", "loss", "2: Mean, Sub", "CPU:0"),
    Row("operations", "odd", "1: X", "a device of no known kind"),
]


def test_the_table_is_aligned_and_has_our_names_and_comes_once(capsys):
    log = PlacementLog(OWN, lambda: True, is_only_card=True)
    log.show(ROWS)
    log.show(ROWS)
    assert capsys.readouterr().err.splitlines() == [
        "duoka: placement of the first step:",
        "duoka: what        name          of              device",
        "duoka: variable    dense/kernel  float32 (4, 8)  gpu:2",
        "duoka: operations  loss          2: Mean, Sub    cpu:0",
        "duoka: operations  odd           1: X            a device of no known kind",
    ]
    assert not log.is_wanted


def test_a_process_alone_sees_all_cards_by_their_numbers(capsys):
    PlacementLog(OWN, lambda: True, is_only_card=False).show(ROWS)
    assert "float32 (4, 8)  gpu:0" in capsys.readouterr().err


def test_only_the_main_worker_shows_it(capsys):
    log = PlacementLog(OWN, lambda: False, is_only_card=True)
    log.show(ROWS)
    assert capsys.readouterr().err == ""
    assert not log.is_wanted


def test_many_kinds_of_operations_are_cut_short():
    assert list_kinds(list("abcdea")) == "6: a, b, c, d, ..."
