"""Runs every test in its own folder, which contains train.bin and val.bin.

    /usr/bin/python3 -m pytest -n 2 dev/test                    all tests
    /usr/bin/python3 -m pytest dev/test/test_options.py -k plan  some
    /usr/bin/python3 -m pytest dev/test --program=build/train_gpt2_asan

Tests marked `gpu` drive --gpu-program, the others --program. Unless -k is given, tests marked `all`
run only with ALL=1 or ALL=rest (which runs no others), and tests marked `full` only with FULL=1.
The last line is `N passed, N failed, N skipped`."""

import os, shutil

import pytest
import files, program


def pytest_addoption(parser):
    parser.addoption("--program", default=os.environ.get("PROGRAM", "train_gpt2"),
                     help="the built CPU program to drive")
    parser.addoption("--gpu-program", default=os.environ.get("GPU_PROGRAM", "train_gpt2cu_cpu"),
                     help="the built GPU program to drive")


def pytest_configure(config):
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads delay other programs
    for name, text in {"gpu": "drives the GPU program", "emulated": "needs the emulated GPU",
                       "all": "needs ALL=1", "full": "needs FULL=1"}.items():
        config.addinivalue_line("markers", "%s: %s" % (name, text))


def wanted(item):
    part = "all" if program.FULL and not program.ALL else program.ALL
    rest = item.get_closest_marker("all")
    if item.get_closest_marker("full") and not program.FULL:
        return False
    return not rest if part in ("", "main") else rest or part != "rest"


def pytest_collection_modifyitems(config, items):
    if not config.option.keyword:
        config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
        items[:] = [item for item in items if wanted(item)]


@pytest.fixture(scope="session")
def built(request, tmp_path_factory):
    """Copies of both programs, which a build during the tests does not replace."""
    folder = tmp_path_factory.mktemp("programs")

    def copy(option):
        source = program.TOP / request.config.getoption(option)
        return shutil.copy(source, folder) if source.exists() else None

    return copy("--program"), copy("--gpu-program")


@pytest.fixture(autouse=True)
def folder(request, tmp_path, monkeypatch, built):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gpu = request.node.get_closest_marker("gpu")
    program.cpu_path, program.path = built[0], built[gpu is not None]
    if gpu and not program.path:
        pytest.skip("no GPU program: it needs CUDA's headers")
    if request.node.get_closest_marker("emulated") and not program.is_emulated():
        pytest.skip("needs the emulated device")
    files.write_corpus()
    yield
    while program.started:
        process = program.started.pop()
        process.kill()
        process.wait()


def pytest_terminal_summary(terminalreporter, config):
    count = lambda *kinds: sum(len(terminalreporter.stats.get(kind, [])) for kind in kinds)
    config.counts = count("passed"), count("failed", "error"), count("skipped")


def pytest_unconfigure(config):
    if hasattr(config, "counts"):
        print("%d passed, %d failed, %d skipped" % config.counts)
