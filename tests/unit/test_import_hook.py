"""A callback runs right after a module is imported, and nothing else changes."""

import importlib
import importlib.machinery
import importlib.resources
import importlib.util
import inspect
import pkgutil
import sys
import threading

import pytest

from duoka.runtime.import_hook import after_import


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importlib.invalidate_caches()


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()


def test_the_callback_sees_the_finished_module_once(folder):
    write(folder, "watched.py", "first = 1\nlast = 2\n")
    seen = []
    after_import("watched", lambda module: seen.append((module.first, module.last)))
    assert seen == []
    watched = importlib.import_module("watched")
    importlib.import_module("watched")
    importlib.reload(watched)
    assert seen == [(1, 2)]


def test_an_imported_module_is_seen_at_once():
    seen = []
    after_import("json", seen.append)
    assert seen == [sys.modules["json"]]


def test_the_loader_is_the_original_again_before_the_first_line_runs(folder):
    write(folder, "watched/__init__.py", "during = type(__spec__.loader), type(__loader__)\ndef f(): pass\n")
    write(folder, "watched/part.py", "")
    write(folder, "watched/data.txt", "words")
    finders = list(sys.meta_path)
    after_import("watched", lambda module: None)
    watched = importlib.import_module("watched")
    plain = importlib.machinery.SourceFileLoader
    assert watched.during == (plain, plain)
    assert type(watched.__spec__.loader) is type(watched.__loader__) is plain
    assert sys.meta_path == finders
    assert inspect.getsource(watched.f) == "def f(): pass\n"
    assert [module.name for module in pkgutil.iter_modules(watched.__path__)] == ["part"]
    assert (importlib.resources.files(watched) / "data.txt").read_text() == "words"


def test_asking_whether_the_module_is_there_does_not_set_it_off(folder):
    write(folder, "watched.py", "")
    seen = []
    after_import("watched", seen.append)
    spec = importlib.util.find_spec("watched")
    assert spec.origin == spec.loader.get_filename("watched") == str(folder / "watched.py")
    assert seen == []
    assert importlib.import_module("watched") in seen


def test_imports_of_the_module_from_within_itself_do_not_recurse(folder):
    write(folder, "watched/__init__.py", "import watched\nimport watched.part\ndone = True\n")
    write(folder, "watched/part.py", "import importlib.util, watched\nimportlib.util.find_spec('watched')\n")
    seen = []
    after_import("watched", lambda module: seen.append(module.done))
    importlib.import_module("watched.part")
    assert seen == [True]


def test_what_the_callback_raises_comes_out_of_the_import(folder):
    write(folder, "watched.py", "")
    mishap = KeyError("mine")

    def fail(module):
        raise mishap

    after_import("watched", fail)
    with pytest.raises(KeyError) as caught:
        importlib.import_module("watched")
    assert caught.value is mishap
    importlib.import_module("watched")


def test_an_import_that_fails_does_not_count(folder):
    write(folder, "watched.py", "import sys\nif not hasattr(sys, 'ready_for_watched'): raise OSError\n")
    seen = []
    after_import("watched", seen.append)
    with pytest.raises(OSError):
        importlib.import_module("watched")
    assert seen == []
    sys.ready_for_watched = True
    try:
        assert [importlib.import_module("watched")] == seen
    finally:
        del sys.ready_for_watched


def test_a_module_that_is_not_there_is_still_not_there(folder):
    after_import("watched", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'watched'"):
        importlib.import_module("watched")


def test_callbacks_of_one_module_run_in_the_order_given(folder):
    write(folder, "watched.py", "")
    seen = []
    after_import("watched", lambda module: seen.append("first"))
    after_import("watched", lambda module: seen.append("second"))
    watched = importlib.import_module("watched")
    assert seen == ["first", "second"]
    assert type(watched.__spec__.loader) is importlib.machinery.SourceFileLoader


def test_other_modules_are_left_alone(folder):
    write(folder, "other.py", "during = type(__spec__.loader)\n")
    write(folder, "pkg/__init__.py", "")
    write(folder, "pkg/watched.py", "during = type(__spec__.loader)\n")
    seen = []
    after_import("watched", seen.append)
    for name in ("other", "pkg.watched"):
        assert importlib.import_module(name).during is importlib.machinery.SourceFileLoader
    assert seen == []


def test_a_module_that_replaces_itself_is_given_as_it_ended_up(folder):
    write(folder, "watched.py", "import sys, types\nsys.modules[__name__] = types.SimpleNamespace(x=1)\n")
    seen = []
    after_import("watched", seen.append)
    assert importlib.import_module("watched") is seen[0]
    assert seen[0].x == 1


def make_lazy(name):
    spec = importlib.util.find_spec(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("is_lazy_first", [True, False])
def test_a_lazy_module_is_seen_when_it_wakes_up(folder, is_lazy_first):
    write(folder, "watched.py", "x = 1\n")
    seen = []
    if is_lazy_first:
        module = make_lazy("watched")
        after_import("watched", lambda module: seen.append(module.x))
    else:
        after_import("watched", lambda module: seen.append(module.x))
        module = make_lazy("watched")
    assert seen == []
    assert module.x == 1
    assert seen == [1]
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader


def test_a_module_that_another_thread_is_importing_is_waited_for(folder):
    write(
        folder,
        "watched.py",
        "import sys, time\nsys.modules['started_watched'].set()\ntime.sleep(0.3)\ndone = True\n",
    )
    started = sys.modules["started_watched"] = threading.Event()
    thread = threading.Thread(target=importlib.import_module, args=("watched",))
    thread.start()
    assert started.wait(10)
    seen = []
    after_import("watched", lambda module: seen.append(module.done))
    thread.join(10)
    assert seen == [True]
