from duoka.devices.device import Device
from duoka.devices.virtual import cut
from duoka.runtime.decisions import Standing, State, Vote, exit_code, judge
from duoka.runtime.environment import foreign_launcher, threads_given, worker_environment
from duoka.runtime.identity import VARIABLE, Identity, read_identity
from duoka.runtime.plan import Plan, threads_per_worker
from duoka.topology.membership import Membership


def test_a_vote_waits_for_every_survivor_and_takes_the_furthest():
    vote = Vote(Membership(3, (0, 2)))
    vote.report(0, 3, Standing(7, 2))
    assert vote.outcome(left=[]) is None
    vote.report(2, 2, Standing(9, 3))  # late, of an older generation
    vote.report(1, 3, Standing(9, 3))  # not a member
    assert vote.outcome(left=[]) is None
    vote.report(2, 3, Standing(8, 2))
    assert vote.outcome(left=[]) == Standing(8, 2)
    assert vote.outcome(left=[Standing(8, 3)]) == Standing(8, 3)


def test_a_signal_is_a_loss_and_an_exit_code_a_failure():
    assert judge(-9, reported_failure=False) is State.LOST
    assert judge(-9, reported_failure=True) is State.FAILED
    assert judge(1, reported_failure=False) is State.FAILED
    assert judge(0, reported_failure=False) is State.LEFT
    assert exit_code(-11) == 139


def plan(**changes):
    return Plan(devices=tuple(cut(Device("cpu"), 2)), num_replicas=4, threads=3, **changes)


def test_a_plan_survives_the_way_through_text():
    assert Plan.from_json(plan(notes=("a", "b")).to_json()) == plan(notes=("a", "b"))


def test_threads_depend_on_replicas_and_never_on_workers():
    assert threads_per_worker(4, cores=16, given=None) == 4
    assert threads_per_worker(4, cores=2, given=None) == 1
    assert threads_per_worker(4, cores=2, given=5) == 5


def test_a_worker_gets_pinned_threads_one_hash_seed_and_its_own_card_only():
    environ = worker_environment({"PATH": "/bin", "OMP_NUM_THREADS": "9"}, plan(seed=7), 1)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"):
        assert environ[name] == "3"
    assert environ["PYTHONHASHSEED"] == "7" and environ["PATH"] == "/bin"
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    cards = (Device("gpu", 0, physical_index=3, uuid="GPU-3"), Device("gpu", 1, physical_index=5))
    on_cards = Plan(devices=cards, num_replicas=2, threads=1)
    assert worker_environment({}, on_cards, 0)["CUDA_VISIBLE_DEVICES"] == "GPU-3"
    assert worker_environment({}, on_cards, 1)["CUDA_VISIBLE_DEVICES"] == "5"


def test_threads_set_by_the_user_are_meant():
    assert threads_given({"OMP_NUM_THREADS": "4"}) == 4
    assert threads_given({"OMP_NUM_THREADS": "4,2"}) == 4
    assert threads_given({"OMP_NUM_THREADS": "0"}) is None
    assert threads_given({}) is None


def test_other_launchers_are_recognised_when_they_started_several():
    assert foreign_launcher({"RANK": "1", "WORLD_SIZE": "2"}) == "torchrun"
    assert foreign_launcher({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert foreign_launcher({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}) == "srun"
    assert foreign_launcher({}) is None


def test_an_identity_counts_only_below_the_supervisor_that_wrote_it():
    identity = Identity(
        1,
        supervisor=42,
        link=3,
        inbox=4,
        outboxes=(5, 6),
        board=7,
        arena=8,
        chronicle=9,
        parcel=10,
        stack=11,
        plan="{}",
    )
    environ = {VARIABLE: identity.to_json()}
    assert read_identity(environ, parent=42) == identity
    assert read_identity(environ, parent=43) is None
    assert read_identity({}, parent=42) is None
