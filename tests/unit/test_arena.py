import itertools
import os
import random
import signal
import struct

import numpy as np
import pytest

from duoka.collectives.arena import PAGE, Arena
from duoka.collectives.board import Board, board_bytes
from duoka.errors import OutOfMemory


@pytest.fixture
def fd():
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def test_two_arenas_over_one_file_see_the_same_pieces(fd):
    first, second = (Arena(fd, available_bytes=lambda: 2**40) for _ in range(2))
    for arena in (first, second):
        arena.reserve(10, "something before")
    ours, theirs = (arena.reserve(100, "numbers").array(np.dtype("f8"), 10) for arena in (first, second))
    ours[:] = range(10)
    assert theirs.tolist() == list(range(10))


def test_whoever_asks_in_another_order_or_for_fewer_pieces_finds_the_same_ones(fd):
    first, second = (Arena(fd, available_bytes=lambda: 2**40) for _ in range(2))
    offsets = [first.reserve(*asked).offset for asked in ((10, "a"), (10, "b"), (9000, "a"), (10, "a"))]
    assert len(set(offsets)) == 4
    assert [second.reserve(*asked).offset for asked in ((9000, "a"), (10, "a"), (10, "a"))] == [
        offsets[2],
        offsets[0],
        offsets[3],
    ]


def reserve_much_and_tell(fd: int, seed: int, pipe: int) -> None:
    arena, chance = Arena(fd, available_bytes=lambda: 2**40), random.Random(seed)
    wanted = [(n % 7 + 1, f"purpose {n % 5}") for n in range(60)]
    chance.shuffle(wanted)
    for pages, purpose in wanted:
        piece = arena.reserve(pages * PAGE, purpose)
        os.write(pipe, struct.pack("<QQ", piece.offset, piece.nbytes))


def test_processes_that_reserve_at_once_agree_and_no_pieces_overlap(fd):
    reading, writing = os.pipe()
    children = []
    for seed in range(4):
        if (pid := os.fork()) == 0:
            reserve_much_and_tell(fd, seed, writing)
            os._exit(0)
        children.append(pid)
    os.kill(children[0], signal.SIGKILL)  # wherever it is: its lock goes with it, and it leaves nothing half-done
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes[1:] == [0, 0, 0] and codes[0] in (0, -signal.SIGKILL)
    told = list(struct.iter_unpack("<QQ", os.read(reading, 1 << 16)))
    assert len(told) >= 3 * 60
    pieces = sorted(set(told))
    assert len(pieces) == 60
    assert all(start + size <= later for (start, size), (later, _) in itertools.pairwise(pieces))
    os.close(reading), os.close(writing)


def test_pieces_are_really_there_before_they_are_used(fd):
    Arena(fd, available_bytes=lambda: 2**40).reserve(3 * PAGE, "numbers")
    assert os.fstat(fd).st_blocks * 512 >= 3 * PAGE


def test_pages_of_different_places_lie_side_by_side_without_a_copy(fd):
    piece = Arena(fd, available_bytes=lambda: 2**40).reserve(4 * PAGE, "numbers")
    piece.bytes[:] = np.repeat([0, 1, 2, 3], PAGE)
    stitched = piece.stitch([(3 * PAGE, PAGE), (PAGE, PAGE)])
    assert stitched[:: PAGE // 2].tolist() == [3, 3, 1, 1]
    piece.bytes[3 * PAGE] = 9
    assert stitched[0] == 9
    view = stitched[PAGE:].view("u1")
    del stitched, piece
    assert view[0] == 1  # the memory lives as long as an array that shows it


def test_a_shortage_is_an_error_that_says_how_much_was_wanted_and_how_much_is_there(fd):
    arena = Arena(fd, available_bytes=lambda: 50 * 2**20)
    with pytest.raises(OutOfMemory, match=r"(?s)100 MB of shared memory for gradients.*50 MB are free"):
        arena.reserve(100 * 2**20, "gradients")
    assert os.fstat(fd).st_size == 0


def test_the_board_keeps_two_calls_and_says_where_a_worker_was_seen():
    board = Board(bytearray(board_bytes(2)))
    assert board.tell_activity(1) == "its start-up"
    board.write_call(1, 7, b"barrier")
    board.write(1, 99, 7, 6, 3)
    board.write_call(1, 8, b"x" * 10_000)
    assert board.tell_activity(1) == "barrier" and board.read_call(1, 7) == b"barrier"
    assert board.read_call(1, 8).startswith(b"x" * 400)
    board.write_call(0, 8, b"x" * 9_999 + b"y")
    assert board.read_call(0, 8) != board.read_call(1, 8)  # what does not fit is compared all the same
    board.write(1, 99, 7, 7, 4)
    assert board.tell_activity(1) == "its own code, after call 7"
    assert board.read(0).pid == 0
